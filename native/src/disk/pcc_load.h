/* Loads: verified, parallel reads of one durable checkpoint. The one place that calls data damaged,
 * used by the daemon and without it alike.
 *
 * Opening holds the slot (no recycling) and verifies the manifest. Blocks while reading. */
#pragma once

#include "base/pcc_range.h"
#include "disk/pcc_volume.h"

struct pcc_load;

/* -ENOENT (no such durable sequence), -PCC_E_DAMAGED, -PCC_E_UNREADABLE (its manifest),
 * -PCC_E_FOREIGN_BASE, -errno.
 * Borrows volume. */
PCC_MUST_CHECK int pcc_load_open(struct pcc_volume *volume, uint64_t sequence,
                                 struct pcc_load **out);
void pcc_load_close(struct pcc_load *load); /* accepts NULL */
const struct pcc_slot_entry *pcc_load_entry(const struct pcc_load *load);
const struct pcc_manifest_header *pcc_load_manifest(const struct pcc_load *load);
uint32_t pcc_load_block_bytes(const struct pcc_load *load);
/* How much of the payload lies in its own slot, and not in its base's. */
uint64_t pcc_load_own_bytes(const struct pcc_load *load);

/* The sequence of its base, if all of payload [offset, +length) lies in the base's slot; else 0. */
uint64_t pcc_load_base_of(const struct pcc_load *load, uint64_t offset_bytes,
                          uint64_t length_bytes);

/* Checks bytes (from the pool, say) that claim to be payload [offset, offset+length); offset is
 * block aligned, length too unless it ends the payload. 0 or -PCC_E_DAMAGED. */
PCC_MUST_CHECK int pcc_load_check(const struct pcc_load *load, const void *bytes,
                                  uint64_t offset_bytes, uint64_t length_bytes);
/* Reads one chunk, unchecked, into an aligned buffer with room for length rounded up to
 * PCC_IO_ALIGN. -PCC_E_UNREADABLE after a read error. */
PCC_MUST_CHECK int pcc_load_read(struct pcc_load *load, void *bytes, uint64_t offset_bytes,
                                 uint64_t length_bytes);
/* Reads and checks. Also -PCC_E_DAMAGED. */
PCC_MUST_CHECK int pcc_load_chunk(struct pcc_load *load, void *bytes, uint64_t offset_bytes,
                                  uint64_t length_bytes);
/* The checksums of the block that begins at offset, and of those after it. */
const uint64_t *pcc_load_checksums(const struct pcc_load *load, uint64_t offset_bytes);

/* The chunk size for reads that is next to `wanted_bytes`: whole blocks, whole direct-I/O units. */
uint32_t pcc_load_chunk_bytes(const struct pcc_load *load, uint64_t wanted_bytes);
/* Streams payload [offset, offset+length) through `threads` readers, the caller among them, each
 * with a buffer of chunk_bytes; sink is called from them, for disjoint parts in any order, with
 * checked bytes cut to the range; with NULL they are only checked. Non-zero from sink stops it and
 * is returned. */
typedef int (*pcc_load_sink)(void *context, const void *bytes, uint64_t offset_bytes,
                             uint64_t length_bytes);
PCC_MUST_CHECK int pcc_load_stream(struct pcc_load *load, uint64_t offset_bytes,
                                   uint64_t length_bytes, uint32_t chunk_bytes, uint32_t threads,
                                   pcc_load_sink sink, void *context);
/* Fills the ranges, which lie in the payload, in the same way; a whole chunk whose place in memory
 * is aligned to PCC_IO_ALIGN is read there and checked there. After an error the memory has any
 * bytes. */
PCC_MUST_CHECK int pcc_load_ranges(struct pcc_load *load, const struct pcc_range *ranges,
                                   uint64_t count, uint32_t chunk_bytes, uint32_t threads);
