/* Opening a crashed image for writing, which repairs it: nothing may be lost by that, nor by a
 * power cut in the middle of it. */
#pragma once

#include "sim_io.h"

/* What the places of the records hold: images that agree in it are repaired alike. */
uint64_t repair_hash(const uint8_t *image, const struct pcc_geometry *geometry);
/* NULL, or what is broken. `image` (borrowed) is as a crash left it, and a reader can open it.
 * After a failed record it may look as if a later one had been lost. */
const char *repair_judge(const uint8_t *image, uint64_t size_bytes, bool record_failed);
