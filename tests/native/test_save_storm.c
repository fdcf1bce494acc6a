/* Many saves at once under threads, with readers, aborts, failing flushes and chunks taken back. */
#include <string.h>

#include "save_fixture.h"

struct storm {
    struct owner *owner;
    _Atomic uint64_t next_tag;
    _Atomic uint64_t durable;
    _Atomic bool stop;
};

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* One trainer: begins, fills, now and then aborts, takes chunks back, meets errors. */
static void *storm_trainer(void *argument)
{
    struct storm *storm = argument;
    struct owner *owner = storm->owner;
    uint64_t random = 77 + (uint64_t)(uintptr_t)&random, tag;

    while ((tag = atomic_fetch_add(&storm->next_tag, 1)) < 400) {
        struct payload payload;
        int result;
        while ((result = payload_begin(owner, tag, 1 + next_random(&random) % CAPACITY,
                                       &payload)) == -PCC_E_NO_LANE ||
               result == -PCC_E_NO_SLOT)
            (void)sched_yield();
        CHECK_EQUAL(result, 0);
        const uint32_t stop_at = next_random(&random) % 8 == 0 ? payload.chunk_count / 2 : 99;
        if (next_random(&random) % 40 == 0)
            owner->media->fail_flushes = 1;
        uint32_t i = 0;
        for (; i < payload.chunk_count && i != stop_at; i++)
            CHECK_EQUAL(payload_chunk(&payload, i), 0);
        if (i < payload.chunk_count)
            pcc_save_abort(payload.save, -PCC_E_ABORTED);
        else
            CHECK_EQUAL(pcc_save_seal(payload.save), 0);
        if (next_random(&random) % 4 == 0) {
            const uint32_t number = next_random(&random) % payload.chunk_count;
            if (pcc_save_uncache(owner->saver, tag, number) && i == payload.chunk_count)
                memset(payload.memory + (uint64_t)number * CHUNK, 0xcc, CHUNK);
        }
        if (owner_wait(owner, tag).end == PCC_SAVE_DURABLE)
            atomic_fetch_add(&storm->durable, 1);
        free(payload.memory);
    }
    return NULL;
}

/* What is durable can be read at any time and is never overwritten under a reader. */
static void *storm_reader(void *argument)
{
    struct storm *storm = argument;

    while (!atomic_load(&storm->stop)) {
        const uint64_t newest = pcc_volume_superseding(storm->owner->volume);
        const int result = newest > 0 ? read_back(storm->owner->volume, newest, 0) : 0;
        CHECK(result == 0 || result == -ENOENT);
        (void)sched_yield();
    }
    return NULL;
}

static void test_a_storm_of_saves_loads_aborts_and_errors(void)
{
    struct owner *owner = owner_new(32, 2, 3, 2);
    struct storm storm = {.owner = owner};
    pthread_t trainers[3], reader;

    CHECK_EQUAL(pthread_create(&reader, NULL, storm_reader, &storm), 0);
    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(pthread_create(&trainers[i], NULL, storm_trainer, &storm), 0);
    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(pthread_join(trainers[i], NULL), 0);
    atomic_store(&storm.stop, true);
    CHECK_EQUAL(pthread_join(reader, NULL), 0);
    CHECK(atomic_load(&storm.durable) > 100);
    CHECK_EQUAL(in_flight(owner), 0);

    /* Every slot is accounted for: in the table, free, or quarantined. */
    struct pcc_record record;
    uint32_t durable = 0, quarantined = 0;
    CHECK_EQUAL(pcc_volume_publish_staged(owner->volume), 0);
    pcc_volume_record(owner->volume, &record);
    for (uint32_t slot = 0; slot < record.slot_count; slot++) {
        durable += record.slots[slot].state == PCC_SLOT_DURABLE;
        quarantined += (record.slots[slot].flags & PCC_SLOT_QUARANTINED) != 0;
    }
    CHECK_EQUAL(durable + quarantined + pcc_volume_free_slots(owner->volume), 32);
    owner_free(owner);
}

int main(void)
{
    RUN(test_a_storm_of_saves_loads_aborts_and_errors);
    return 0;
}
