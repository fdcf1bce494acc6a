#include "base/pcc_copy.h"

#include <string.h>

#define SHORT_BYTES 4096u /* not worth it */

static void copy_then_hash(void *to, const void *from, size_t length_bytes, struct pcc_hash *hash)
{
    memcpy(to, from, length_bytes);
    pcc_hash_add(hash, to, length_bytes);
}

#if defined(__x86_64__)
#include <immintrin.h>

#define LINE_BYTES 64u
#define TEE_BYTES 2048u /* with what it was copied from, well inside of the first-level cache */

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

/* As lines_stream, and into a small buffer, too: each byte is read from memory once. */
__attribute__((target("avx2"))) static void lines_tee(uint8_t *to, uint8_t *buffer,
                                                      const uint8_t *from, size_t length_bytes)
{
    for (size_t at = 0; at < length_bytes; at += LINE_BYTES) {
        const __m256i low = _mm256_loadu_si256((const __m256i_u *)(from + at));
        const __m256i high = _mm256_loadu_si256((const __m256i_u *)(from + at + 32));
        _mm256_stream_si256((__m256i *)(void *)(to + at), low);
        _mm256_stream_si256((__m256i *)(void *)(to + at + 32), high);
        _mm256_store_si256((__m256i *)(void *)(buffer + at), low);
        _mm256_store_si256((__m256i *)(void *)(buffer + at + 32), high);
    }
}

void pcc_copy_hashed(void *to, const void *from, size_t length_bytes, struct pcc_hash *hash)
{
    _Alignas(LINE_BYTES) uint8_t buffer[TEE_BYTES];
    uint8_t *out = to;
    const uint8_t *in = from;

    if (length_bytes < SHORT_BYTES || !__builtin_cpu_supports("avx2")) {
        copy_then_hash(to, from, length_bytes, hash);
        return;
    }
    const size_t before = -(uintptr_t)to % LINE_BYTES;
    copy_then_hash(out, in, before, hash);
    size_t at = before;
    while (length_bytes - at >= LINE_BYTES) {
        const size_t whole = (length_bytes - at) / LINE_BYTES * LINE_BYTES;
        const size_t count = whole < TEE_BYTES ? whole : TEE_BYTES;
        lines_tee(out + at, buffer, in + at, count);
        pcc_hash_add(hash, buffer, count);
        at += count;
    }
    _mm_sfence(); /* such stores are not in order with others */
    copy_then_hash(out + at, in + at, length_bytes - at, hash);
}
#else
void pcc_copy_past_cache(void *to, const void *from, size_t length_bytes)
{
    memcpy(to, from, length_bytes);
}

void pcc_copy_hashed(void *to, const void *from, size_t length_bytes, struct pcc_hash *hash)
{
    copy_then_hash(to, from, length_bytes, hash);
}
#endif
