#include "base/pcc_copy.h"

#include <string.h>

#define SHORT_BYTES 4096u /* not worth it */

#if defined(__x86_64__)
#include <immintrin.h>

#define LINE_BYTES 64u

/* `to` lies at a line, and the length is whole lines. */
__attribute__((target("avx2"))) static void lines_stream(uint8_t *to, const uint8_t *from,
                                                         size_t length_bytes)
{
    for (size_t at = 0; at < length_bytes; at += LINE_BYTES) {
        const __m256i low = _mm256_loadu_si256((const __m256i_u *)(from + at));
        const __m256i high = _mm256_loadu_si256((const __m256i_u *)(from + at + 32));
        _mm256_stream_si256((__m256i *)(void *)(to + at), low);
        _mm256_stream_si256((__m256i *)(void *)(to + at + 32), high);
    }
    _mm_sfence(); /* such stores are not in order with others */
}

void pcc_copy_past_cache(void *to, const void *from, size_t length_bytes)
{
    if (length_bytes < SHORT_BYTES || !__builtin_cpu_supports("avx2")) {
        memcpy(to, from, length_bytes);
        return;
    }
    const size_t before = -(uintptr_t)to % LINE_BYTES;
    const size_t whole = (length_bytes - before) / LINE_BYTES * LINE_BYTES;
    uint8_t *out = (uint8_t *)to + before;
    const uint8_t *in = (const uint8_t *)from + before;
    memcpy(to, from, before);
    lines_stream(out, in, whole);
    memcpy(out + whole, in + whole, length_bytes - before - whole);
}
#else
void pcc_copy_past_cache(void *to, const void *from, size_t length_bytes)
{
    memcpy(to, from, length_bytes);
}
#endif
