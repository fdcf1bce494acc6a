/* The engine `pmem`: stores that go past the caches to persistent memory, mapped with DAX and
 * MAP_SYNC, as the paper's PMEM path.
 *
 * What a crash may leave, and the crash tests enumerate: of the stores of a write that has not
 * returned, any part, in units of 8 bytes and in any order. A write that has returned is durable,
 * because the thread that stored has passed the fence before it returns: a fence orders the stores
 * of its own processor only, so that one in flush() would not make other threads' stores durable.
 * MAP_SYNC keeps the file's own blocks durable before a page of them can be stored to.
 *
 * Without DAX (`anywhere`, for tests) the same stores go to the page cache and msync makes them
 * durable: then all that pcc_io_mmap.c says holds. */
#include <sys/mman.h>

#include "io/pcc_io_file.h"

#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif
#ifndef MAP_SYNC
#define MAP_SYNC 0x080000
#endif

#if defined(__x86_64__)
#include <emmintrin.h>

static bool can_persist(void)
{
    return true; /* SSE2, and memory controllers that drain on power failure, as DAX requires */
}

static void copy_durably(void *to, const void *from, uint64_t length)
{
    const __m128i *source = from;
    __m128i *target = to;

    PCC_ASSERT((uintptr_t)to % 64 == 0 && (uintptr_t)from % 64 == 0 && length % 64 == 0);
    for (uint64_t left = length; left > 0; left -= 64, source += 4, target += 4) {
        const __m128i a = _mm_load_si128(source), b = _mm_load_si128(source + 1);
        const __m128i c = _mm_load_si128(source + 2), d = _mm_load_si128(source + 3);
        _mm_stream_si128(target, a); /* a whole line at once: the processor combines them */
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
}

#elif defined(__aarch64__)
#include <string.h>
#include <sys/auxv.h>

#ifndef HWCAP_DCPOP
#define HWCAP_DCPOP (1ul << 16)
#endif

static bool can_persist(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_DCPOP) != 0;
}

/* Ordinary stores, then DC CVAP (clean to the point of persistence) of every line, then a barrier.
 * The instruction is spelled as a SYS, which assemblers know without a flag for ARMv8.2. */
static void copy_durably(void *to, const void *from, uint64_t length)
{
    uint8_t *const start = to;
    uint64_t type;

    memcpy(to, from, length);
    if (!can_persist())
        return; /* only for tests, and msync follows */
    __asm__ volatile("mrs %0, ctr_el0" : "=r"(type));
    const uint64_t line = 4ull << (type >> 16 & 15);
    for (uint64_t at = 0; at < length; at += line)
        __asm__ volatile("sys #3, c7, c12, #1, %0" : : "r"(start + at) : "memory");
    __asm__ volatile("dsb sy" : : : "memory");
}

#else
#include <string.h>

static bool can_persist(void)
{
    return false;
}

static void copy_durably(void *to, const void *from, uint64_t length)
{
    memcpy(to, from, length);
}
#endif

int pcc_io_pmem_start(int fd, uint64_t size_bytes, const struct pcc_io_options *options,
                      struct pcc_io **out)
{
    struct pcc_mapping how = {
        .copy = copy_durably, .flags = MAP_SHARED_VALIDATE | MAP_SYNC, .persists = can_persist()};
    int result = -PCC_E_UNSUPPORTED;

    if (how.persists)
        result = pcc_mapped_start(fd, size_bytes, &how, out);
    if (result != -PCC_E_UNSUPPORTED || !options->pmem_anywhere)
        return result;
    how.persists = false;
    how.flags = MAP_SHARED;
    return pcc_mapped_start(fd, size_bytes, &how, out);
}
