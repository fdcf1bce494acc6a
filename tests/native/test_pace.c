/* Reading gives way to saving: how many pieces a user reads between the steps of another's save.
 * The clock stands still but where a test moves it, so that nothing here depends on time. */
#include <sched.h>

#include "io/pcc_pace.h"
#include "save_fixture.h"

#define SAVER 1u
#define READER 2u
#define THIRD 3u

static _Atomic uint64_t now_ns = 5;

uint64_t __wrap_pcc_now_ns(void);
uint64_t __wrap_pcc_now_ns(void)
{
    return atomic_load(&now_ns);
}

static void pass(uint64_t ns)
{
    atomic_fetch_add(&now_ns, ns);
}

/* How often a user may read one piece after another now. */
static uint32_t turns_of(uint32_t uid)
{
    uint32_t count = 0;

    while (count < 1000 && pcc_pace_try(uid) == PCC_PACE_TURN) {
        pcc_pace_leave(uid);
        count++;
    }
    return count;
}

static void test_nobody_saves(void)
{
    CHECK_EQUAL(pcc_pace_try(READER), PCC_PACE_FREE);
    CHECK(!pcc_pace_enter(READER));
    pcc_pace_save_begins(READER); /* one's own saves are one's own affair */
    pcc_pace_step_queued(READER);
    CHECK_EQUAL(pcc_pace_try(READER), PCC_PACE_FREE);
    pcc_pace_step_done(READER, 0);
    pcc_pace_save_ends(READER);
}

static void test_a_step_earns_a_turn_for_each_user(void)
{
    pcc_pace_save_begins(SAVER);
    pcc_pace_step_queued(SAVER);
    (void)turns_of(READER);
    (void)turns_of(THIRD);
    for (int i = 0; i < 5; i++) {
        CHECK_EQUAL(pcc_pace_try(READER), PCC_PACE_WAIT);
        pcc_pace_step_queued(SAVER);
        pcc_pace_step_done(SAVER, 0);
        CHECK_EQUAL(turns_of(READER), 1);
        CHECK_EQUAL(turns_of(THIRD), 1);
    }
    pcc_pace_step_done(SAVER, 0);
    pcc_pace_save_ends(SAVER);
    pass(PCC_PACE_CALM_NS);
}

static void test_one_byte_is_read_for_two_that_are_written(void)
{
    const uint32_t written = 4 * PCC_PACE_TURN_BYTES;

    pcc_pace_save_begins(SAVER);
    pcc_pace_step_queued(SAVER);
    (void)turns_of(READER);
    for (int i = 0; i < 100; i++) {
        pcc_pace_step_queued(SAVER);
        pcc_pace_step_done(SAVER, written);
        CHECK_EQUAL(turns_of(READER), 1 + written / 2 / PCC_PACE_PIECE_BYTES);
    }
    for (int i = 0; i < 100; i++) { /* what was not used is not saved up */
        pcc_pace_step_queued(SAVER);
        pcc_pace_step_done(SAVER, written);
    }
    CHECK_EQUAL(turns_of(READER), PCC_PACE_TURNS_MAX);
    pcc_pace_step_done(SAVER, 0);
    pcc_pace_save_ends(SAVER);
    pass(PCC_PACE_CALM_NS);
}

static void test_a_user_reads_one_piece_at_a_time(void)
{
    pcc_pace_save_begins(SAVER); /* it waits for its trainer: nothing is written */
    CHECK_EQUAL(pcc_pace_try(READER), PCC_PACE_TURN);
    CHECK_EQUAL(pcc_pace_try(READER), PCC_PACE_WAIT);
    CHECK_EQUAL(pcc_pace_try(THIRD), PCC_PACE_TURN);
    pcc_pace_leave(THIRD);
    pcc_pace_leave(READER);
    CHECK_EQUAL(turns_of(READER), 1000);
    pcc_pace_save_ends(SAVER);
    CHECK_EQUAL(turns_of(READER), 1000); /* the next save comes soon */
    pass(PCC_PACE_CALM_NS);
    CHECK_EQUAL(pcc_pace_try(READER), PCC_PACE_FREE);
}

static void test_a_save_that_hangs_does_not_hold_readers(void)
{
    pcc_pace_save_begins(SAVER);
    pcc_pace_step_queued(SAVER);
    (void)turns_of(READER);
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(pcc_pace_try(READER), PCC_PACE_WAIT);
        pass(PCC_PACE_LIMIT_NS);
        CHECK_EQUAL(turns_of(READER), 1);
    }
    pcc_pace_step_done(SAVER, 0);
    pcc_pace_save_ends(SAVER);
    pass(PCC_PACE_CALM_NS);
}

/* -- a real save, step by step, and a real verify loop -- */

#define READERS 4u

struct verifier {
    struct owner *owner;
    uint64_t sequence;
    _Atomic bool stop;
};

static void *verify_loop(void *context)
{
    struct verifier *verifier = context;

    while (!atomic_load(&verifier->stop))
        CHECK_EQUAL(read_back(verifier->owner->volume, verifier->sequence, READERS), 0);
    return NULL;
}

static void wait_for_reads(struct memory_io *media, int count)
{
    while (atomic_load(&media->reads) < count)
        (void)sched_yield();
}

static void step_all(struct owner *owner)
{
    while (pcc_saver_step(owner->saver, 0) == 0) {
    }
}

static void test_a_verify_loop_beside_a_save(void)
{
    struct owner *saver = owner_of(formatted_for(SAVER, 4, 2), 1, 0);
    struct owner *reader = owner_of(formatted_for(READER, 4, 2), 1, 0);
    struct memory_io *disk = reader->media;
    struct payload mine, theirs;
    pthread_t thread;

    CHECK_EQUAL(payload_begin(reader, 1, CAPACITY, &mine), 0);
    payload_fill(&mine);
    step_all(reader);
    pass(PCC_PACE_CALM_NS);
    struct verifier verifier = {.owner = reader, .sequence = mine.sequence};
    CHECK_EQUAL(pthread_create(&thread, NULL, verify_loop, &verifier), 0);
    wait_for_reads(disk, 500);

    CHECK_EQUAL(payload_begin(saver, 2, CAPACITY, &theirs), 0);
    payload_fill(&theirs);
    /* What was begun before, and the manifests, of which one stands before each 32 pieces. */
    const int begun = atomic_load(&disk->reads) + (int)READERS;
    for (int steps = 1; steps <= (int)theirs.chunk_count + 3; steps++) {
        CHECK_EQUAL(pcc_saver_step(saver->saver, 0), 0);
        CHECK(!saver->has_ended[2]);
        const int most = begun + steps + 2;
        wait_for_reads(disk, most - (int)READERS - 2); /* no reader starves */
        for (int i = 0; i < 200; i++)
            (void)sched_yield(); /* it would run if it were allowed to */
        CHECK(atomic_load(&disk->reads) <= most);
    }
    step_all(saver);
    CHECK(saver->has_ended[2]);
    const int paced = atomic_load(&disk->reads);
    pass(PCC_PACE_CALM_NS);
    wait_for_reads(disk, paced + 500);
    atomic_store(&verifier.stop, true);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(read_back(saver->volume, theirs.sequence, 2), 0);
    free(mine.memory);
    free(theirs.memory);
    owner_free(reader);
    owner_free(saver);
}

int main(void)
{
    RUN(test_nobody_saves);
    RUN(test_a_step_earns_a_turn_for_each_user);
    RUN(test_one_byte_is_read_for_two_that_are_written);
    RUN(test_a_user_reads_one_piece_at_a_time);
    RUN(test_a_save_that_hangs_does_not_hold_readers);
    RUN(test_a_verify_loop_beside_a_save);
    return 0;
}
