/* checkedcopy SIZE: what SIZE bytes from a memfd into touched memory cost, in seconds, the shortest
 * of five: a copy that checksums each byte, by all CPUs (four at most), which a restore from DRAM
 * can reach; and memcpy() and then a pass that only checksums, by one CPU. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/pcc_copy.h"
#include "base/pcc_crew.h"
#include "base/pcc_hash.h"
#include "hugememory.h"

#define PIECE_BYTES (1u << 20)

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

static void all_at_once(struct pcc_crew *crew, struct copy *copy, uint64_t pieces)
{
    pcc_crew_run(crew, PCC_CREW_HELPERS, pieces, piece_copy, copy);
}

static void one_after_the_other(struct pcc_crew *crew, struct copy *copy, uint64_t pieces)
{
    (void)crew;
    memcpy(copy->to, copy->from, pieces * PIECE_BYTES);
    (void)atomic_fetch_xor(&copy->sum, pcc_hash_bytes(copy->to, pieces * PIECE_BYTES));
}

static double shortest_s(void (*work)(struct pcc_crew *, struct copy *, uint64_t),
                         struct pcc_crew *crew, struct copy *copy, uint64_t pieces)
{
    uint64_t best_ns = UINT64_MAX;

    for (int round = 0; round < 5; round++) {
        const uint64_t start_ns = pcc_now_ns();
        work(crew, copy, pieces);
        const uint64_t took_ns = pcc_now_ns() - start_ns;
        best_ns = took_ns < best_ns ? took_ns : best_ns;
    }
    return (double)best_ns * 1e-9;
}

int main(int argc, char **argv)
{
    const uint64_t pieces = argc == 2 ? strtoull(argv[1], NULL, 10) / PIECE_BYTES : 0;
    struct copy copy = {.from = huge_memory(pieces * PIECE_BYTES),
                        .to = malloc(pieces * PIECE_BYTES)};
    struct pcc_crew crew;

    if (pieces == 0 || copy.from == NULL || copy.to == NULL) {
        (void)fprintf(stderr, "usage: checkedcopy SIZE, at least 1 MiB, twice that in memory\n");
        return 1;
    }
    memset(copy.to, 2, pieces * PIECE_BYTES);
    pcc_crew_open(&crew);
    const double together_s = shortest_s(all_at_once, &crew, &copy, pieces);
    const double apart_s = shortest_s(one_after_the_other, &crew, &copy, pieces);
    pcc_crew_close(&crew);
    (void)printf("%.6f %.6f\n", together_s, apart_s);
    return 0;
}
