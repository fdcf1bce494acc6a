/* checkedcopy SIZE: what SIZE bytes from a memfd into touched memory cost, in seconds. First the
 * shortest of five copies that checksum each byte, by all CPUs (four at most): what a restore from
 * DRAM can reach. Then the CPU time of memcpy() and of a pass that only checksums, the median of
 * five. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/pcc_copy.h"
#include "base/pcc_crew.h"
#include "base/pcc_hash.h"
#include "base/pcc_map.h"

#define PIECE_BYTES (1u << 20)
#define ROUNDS 5

struct copy {
    const uint8_t *from;
    uint8_t *to;
    _Atomic uint64_t sum; /* so that no checksum is left out */
};

static void piece_copy(void *context, uint64_t piece)
{
    struct copy *copy = context;
    const uint64_t at = piece * PIECE_BYTES;

    (void)atomic_fetch_xor(&copy->sum, pcc_hash_bytes(copy->from + at, PIECE_BYTES));
    pcc_copy_past_cache(copy->to + at, copy->from + at, PIECE_BYTES);
}

static double now_s(clockid_t clock)
{
    struct timespec now;

    (void)clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double together_s(struct pcc_crew *crew, struct copy *copy, uint64_t pieces)
{
    const double start_s = now_s(CLOCK_MONOTONIC);

    pcc_crew_run(crew, pieces, piece_copy, copy);
    return now_s(CLOCK_MONOTONIC) - start_s;
}

static double apart_s(struct pcc_crew *crew, struct copy *copy, uint64_t pieces)
{
    const double start_s = now_s(CLOCK_THREAD_CPUTIME_ID);

    (void)crew;
    memcpy(copy->to, copy->from, pieces * PIECE_BYTES);
    (void)atomic_fetch_xor(&copy->sum, pcc_hash_bytes(copy->to, pieces * PIECE_BYTES));
    return now_s(CLOCK_THREAD_CPUTIME_ID) - start_s;
}

static int in_order(const void *one, const void *other)
{
    const double a = *(const double *)one;
    const double b = *(const double *)other;

    return (a > b) - (a < b);
}

/* In huge pages where the kernel has some, as the daemon's memory is. */
static void *source_make(uint64_t length_bytes)
{
    const int fd = memfd_create("checkedcopy", MFD_CLOEXEC);
    void *bytes = NULL;

    if (fd < 0 || ftruncate(fd, (off_t)length_bytes) != 0 ||
        pcc_map_shared(fd, length_bytes, &bytes) != 0)
        return NULL;
    memset(bytes, 1, length_bytes);
    (void)madvise(bytes, length_bytes, MADV_COLLAPSE);
    return bytes;
}

int main(int argc, char **argv)
{
    const uint64_t pieces = argc == 2 ? strtoull(argv[1], NULL, 10) / PIECE_BYTES : 0;
    struct copy copy = {.from = source_make(pieces * PIECE_BYTES),
                        .to = malloc(pieces * PIECE_BYTES)};
    struct pcc_crew crew;
    double together[ROUNDS];
    double apart[ROUNDS];

    if (pieces == 0 || copy.from == NULL || copy.to == NULL) {
        (void)fprintf(stderr, "usage: checkedcopy SIZE, at least 1 MiB, twice that in memory\n");
        return 1;
    }
    memset(copy.to, 2, pieces * PIECE_BYTES);
    pcc_crew_open(&crew);
    for (int round = 0; round < ROUNDS; round++) {
        together[round] = together_s(&crew, &copy, pieces);
        apart[round] = apart_s(&crew, &copy, pieces);
    }
    qsort(together, ROUNDS, sizeof(double), in_order);
    qsort(apart, ROUNDS, sizeof(double), in_order);
    pcc_crew_close(&crew);
    (void)printf("%.6f %.6f\n", together[0], apart[ROUNDS / 2]);
    return 0;
}
