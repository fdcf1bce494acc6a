/* Crews share the pieces, and each piece is done once. Copies that bypass the cache are right, and
 * their checksums are those of what was stored. */
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
    _Atomic uint32_t now, most; /* threads with a piece */
};

static void piece_do(void *context, uint64_t piece)
{
    struct job *job = context;

    const uint32_t now = atomic_fetch_add(&job->now, 1) + 1;
    uint32_t most = atomic_load(&job->most);

    while (now > most && !atomic_compare_exchange_weak(&job->most, &most, now))
        ;
    (void)atomic_fetch_add(&job->in, 1);
    while (atomic_load(&job->in) < job->meet)
        (void)sched_yield();
    job->done[piece]++;
    (void)atomic_fetch_add(&job->calls, 1);
    (void)atomic_fetch_sub(&job->now, 1);
}

static void run(struct pcc_crew *crew, uint32_t helpers, uint64_t count, uint32_t meet)
{
    struct job job = {.meet = meet};

    pcc_crew_run(crew, helpers, count, piece_do, &job);
    CHECK_EQUAL(atomic_load(&job.calls), count);
    CHECK(atomic_load(&job.most) <= helpers + 1);
    for (uint64_t i = 0; i < PIECES; i++)
        CHECK_EQUAL(job.done[i], i < count ? 1 : 0);
}

static void test_each_piece_once(void)
{
    struct pcc_crew crew;

    pcc_crew_open(&crew);
    for (uint32_t round = 0; round < 200; round++)
        run(&crew, round % (PCC_CREW_HELPERS + 1), (uint64_t)round * 7 % PIECES, 0);
    pcc_crew_close(&crew);
}

/* Two pieces that wait for each other end only when two threads have them. */
static void test_pieces_run_at_once(void)
{
    struct pcc_crew crew;

    pcc_crew_open(&crew);
    run(&crew, PCC_CREW_HELPERS, 1, 0);
    run(&crew, 0, PIECES, 0);
    CHECK_EQUAL(crew.helper_count, 0); /* neither needs any */
    run(&crew, PCC_CREW_HELPERS, 2, 0);
    if (crew.helper_count > 0)
        run(&crew, 1, 2, 2);
    pcc_crew_close(&crew);
}

/* What is copied beside others leaves them half of the CPUs. */
static void test_half_of_the_cpus(void)
{
    static const uint32_t expected[][2] = {{1, 0}, {2, 0}, {3, 0}, {4, 1}, {8, 3}, {64, 31}};

    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        const struct pcc_crew crew = {.cpus = expected[i][0]};
        CHECK_EQUAL(pcc_crew_half(&crew), expected[i][1]);
    }
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

static void test_copies_are_hashed(void)
{
    static uint8_t from[40000], to[40000], expected[40000];

    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)(i * 31 + i / 251);
    for (size_t length = 0; length < 30000; length = length * 3 / 2 + 1) {
        for (size_t shift = 0; shift < 70; shift += 7) {
            struct pcc_hash hash;
            pcc_hash_start(&hash);
            memset(to, 0xee, sizeof to);
            memset(expected, 0xee, sizeof expected);
            memcpy(expected + shift, from + 2 * shift + 1, length);
            memcpy(expected + shift + length, from, 100);
            pcc_copy_hashed(to + shift, from + 2 * shift + 1, length, &hash);
            pcc_copy_hashed(to + shift + length, from, 100, &hash);
            CHECK(memcmp(to, expected, sizeof to) == 0);
            CHECK_EQUAL(pcc_hash_end(&hash), pcc_hash_bytes(expected + shift, length + 100));
        }
    }
}

#if !defined(__SANITIZE_THREAD__) /* the race is the test */
static uint64_t changing[8192];
static atomic_bool changes;

static void *change(void *unused)
{
    for (uint64_t n = 1; atomic_load(&changes); n++)
        for (size_t i = 0; i < 8192; i += 3)
            ((volatile uint64_t *)changing)[i] = n;
    return unused;
}

/* A tensor that is changed while it is copied: its bytes are of two moments, but what is stored has
 * the right checksum, and can be restored. */
static void test_the_hash_is_of_what_was_stored(void)
{
    static uint64_t to[8192];
    pthread_t thread;

    atomic_store(&changes, true);
    CHECK(pthread_create(&thread, NULL, change, NULL) == 0);
    for (int round = 0; round < 2000; round++) {
        struct pcc_hash hash;
        pcc_hash_start(&hash);
        pcc_copy_hashed(to, changing, sizeof to, &hash);
        CHECK_EQUAL(pcc_hash_end(&hash), pcc_hash_bytes(to, sizeof to));
    }
    atomic_store(&changes, false);
    (void)pthread_join(thread, NULL);
}
#endif

int main(void)
{
    RUN(test_each_piece_once);
    RUN(test_pieces_run_at_once);
    RUN(test_half_of_the_cpus);
    RUN(test_a_crew_that_was_not_used_closes);
    RUN(test_copies_past_the_cache);
    RUN(test_copies_are_hashed);
#if !defined(__SANITIZE_THREAD__)
    RUN(test_the_hash_is_of_what_was_stored);
#endif
    return 0;
}
