/* Crews share out pieces, each done once; copies past the cache are copies. */
#include "base/pcc_crew.h"

#include <sched.h>
#include <stdatomic.h>

#include "base/pcc_copy.h"
#include "check.h"

#define PIECES 1000u

struct job {
    uint32_t done[PIECES]; /* each written by one thread */
    _Atomic uint32_t calls;
    _Atomic uint32_t in; /* threads that wait for each other, when `meet` is set */
    uint32_t meet;
};

static void piece_do(void *context, uint64_t piece)
{
    struct job *job = context;

    (void)atomic_fetch_add(&job->in, 1);
    while (atomic_load(&job->in) < job->meet)
        (void)sched_yield();
    job->done[piece]++;
    (void)atomic_fetch_add(&job->calls, 1);
}

static void run(struct pcc_crew *crew, uint64_t count, uint32_t meet)
{
    struct job job = {.meet = meet};

    pcc_crew_run(crew, count, piece_do, &job);
    CHECK_EQUAL(atomic_load(&job.calls), count);
    for (uint64_t i = 0; i < PIECES; i++)
        CHECK_EQUAL(job.done[i], i < count ? 1 : 0);
}

static void test_each_piece_once(void)
{
    struct pcc_crew crew;

    pcc_crew_open(&crew);
    for (uint32_t round = 0; round < 200; round++)
        run(&crew, (uint64_t)round * 7 % PIECES, 0);
    pcc_crew_close(&crew);
}

/* Two pieces that wait for each other end only when two threads have them. */
static void test_pieces_run_at_once(void)
{
    struct pcc_crew crew;

    pcc_crew_open(&crew);
    run(&crew, 1, 0);
    CHECK_EQUAL(crew.helper_count, 0); /* one piece needs none */
    run(&crew, 2, 0);
    if (crew.helper_count > 0)
        run(&crew, 2, 2);
    pcc_crew_close(&crew);
}

static void test_a_crew_that_was_not_used_closes(void)
{
    struct pcc_crew crew;

    pcc_crew_open(&crew);
    pcc_crew_close(&crew);
}

static void test_copies_past_the_cache(void)
{
    static uint8_t from[40000], to[40000], expected[40000];

    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)(i * 31 + i / 251);
    for (size_t length = 0; length < 20000; length = length * 3 / 2 + 1) {
        for (size_t shift = 0; shift < 70; shift += 7) {
            memset(to, 0xee, sizeof to);
            memset(expected, 0xee, sizeof expected);
            memcpy(expected + shift, from + 2 * shift + 1, length);
            pcc_copy_past_cache(to + shift, from + 2 * shift + 1, length);
            CHECK(memcmp(to, expected, sizeof to) == 0);
        }
    }
}

int main(void)
{
    RUN(test_each_piece_once);
    RUN(test_pieces_run_at_once);
    RUN(test_a_crew_that_was_not_used_closes);
    RUN(test_copies_past_the_cache);
    return 0;
}
