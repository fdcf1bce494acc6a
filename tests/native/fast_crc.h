/* CRC32C by the processor where it can: what tests compute millions of would take the core's
 * pcc_crc32c, which is small, most of their time. */
#pragma once

#include <stdint.h>
#include <string.h>

uint32_t __real_pcc_crc32c(uint32_t crc, const void *bytes, size_t length);

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static inline uint32_t
crc32c_sse42(uint32_t crc, const uint8_t *bytes, size_t length)
{
    uint64_t sum = (uint32_t)~crc;
    size_t at = 0;
    for (uint64_t word; length - at >= sizeof word; at += sizeof word) {
        memcpy(&word, bytes + at, sizeof word);
        sum = __builtin_ia32_crc32di(sum, word);
    }
    for (; at < length; at++)
        sum = __builtin_ia32_crc32qi((uint32_t)sum, bytes[at]);
    return ~(uint32_t)sum;
}
#endif

static inline uint32_t fast_crc32c(uint32_t crc, const void *bytes, size_t length)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2"))
        return crc32c_sse42(crc, bytes, length);
#endif
    return __real_pcc_crc32c(crc, bytes, length);
}
