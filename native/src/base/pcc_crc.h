/* CRC-32C, which seals commit records. */
#pragma once

#include "base/pcc_base.h"

uint32_t pcc_crc32c(uint32_t crc, const void *bytes, size_t length_bytes);
