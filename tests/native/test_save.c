/* Saves and loads, step by step: the way to durable, errors and moves, superseding, aborts. */
#include <string.h>

#include "save_fixture.h"

static _Atomic int pauses = -1; /* counted and skipped; -1: real ones */

int __real_nanosleep(const struct timespec *pause, struct timespec *left);
int __wrap_nanosleep(const struct timespec *pause, struct timespec *left);

int __wrap_nanosleep(const struct timespec *pause, struct timespec *left)
{
    if (atomic_load(&pauses) < 0)
        return __real_nanosleep(pause, left);
    atomic_fetch_add(&pauses, 1);
    return 0;
}

static void step_all(struct owner *owner, uint32_t lanes)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (uint32_t lane = 0; lane < lanes; lane++)
            moved |= pcc_saver_step(owner->saver, lane) == 0;
    }
}

static void test_one_save_becomes_durable_and_reads_back(void)
{
    static const uint64_t sizes[] = {1, 511, 4096, 4097, CHUNK, CHUNK + 1, 100000, CAPACITY};

    for (uint32_t writers = 0; writers <= 2; writers += 2) {
        struct owner *owner = owner_new(4, 2, 2, writers);
        for (uint64_t tag = 1; tag <= 8; tag++) {
            struct payload payload;
            CHECK_EQUAL(payload_begin(owner, tag, sizes[tag - 1], &payload), 0);
            payload_fill(&payload);
            if (writers == 0)
                step_all(owner, 2);
            const struct pcc_save_result result = owner_wait(owner, tag);
            CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
            CHECK_EQUAL(result.sequence, tag);
            CHECK(result.times.first_write >= result.times.begin);
            CHECK(result.times.durable >= result.times.flushed);
            CHECK_EQUAL(owner->writing[tag], 1);
            CHECK_EQUAL((uint32_t)__builtin_popcount(owner->written[tag]), payload.chunk_count);
            CHECK_EQUAL(read_back(owner->volume, tag, writers), 0);
            free(payload.memory);
        }
        CHECK_EQUAL(in_flight(owner), 0);
        owner_free(owner);
    }
}

/* Without checksums the writer makes them, of what the chunk holds when it is written; and once. */
static void test_checksums_are_made_by_the_writer(void)
{
    for (int corrupt = 0; corrupt <= 1; corrupt++) {
        struct owner *owner = owner_new(4, 2, 1, 0);
        struct payload payload;

        CHECK_EQUAL(payload_begin(owner, 1, 2 * CHUNK - 5, &payload), 0);
        payload.memory[7] ^= 1;
        CHECK_EQUAL(payload_chunk(&payload, 0), 0); /* tag 1: this one has no checksums */
        payload.memory[7] ^= 1;
        CHECK_EQUAL(payload_chunk(&payload, 1), 0);
        CHECK_EQUAL(pcc_save_seal(payload.save), 0);
        CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
        CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
        owner->media->fail_writes = 1; /* the manifest: everything is written again elsewhere */
        payload.memory[7] ^= (uint8_t)corrupt;
        step_all(owner, 1);
        CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_DURABLE);
        CHECK_EQUAL(owner_wait(owner, 1).rehomed, 1);
        CHECK_EQUAL(read_back(owner->volume, 1, 0), corrupt ? -PCC_E_DAMAGED : 0);
        free(payload.memory);
        owner_free(owner);
    }
}

static void test_what_does_not_fit_is_refused(void)
{
    struct owner *owner = owner_new(4, 2, 2, 0);
    struct payload payload, other, third;

    CHECK_EQUAL(payload_begin(owner, 1, 0, &payload), -EINVAL);
    CHECK_EQUAL(payload_begin(owner, 1, 2 * CAPACITY, &payload), -PCC_E_TOO_LARGE);
    CHECK_EQUAL(payload_begin(owner, 1, 3 * CHUNK, &payload), 0);
    CHECK_EQUAL(pcc_save_seal(payload.save), -EINVAL);
    CHECK_EQUAL(payload_chunk(&payload, 1), 0);
    CHECK_EQUAL(payload_chunk(&payload, 1), -EINVAL);
    struct payload longer = payload;
    longer.bytes = 4 * CHUNK;
    CHECK_EQUAL(payload_chunk(&longer, 3), -EINVAL);
    longer.bytes = 2 * CHUNK + 5;
    CHECK_EQUAL(payload_chunk(&longer, 2), -EINVAL);
    CHECK_EQUAL(pcc_save_seal(payload.save), -EINVAL);
    CHECK_EQUAL(payload_begin(owner, 2, CHUNK, &other), 0);
    CHECK_EQUAL(payload_begin(owner, 3, CHUNK, &third), -PCC_E_NO_LANE);
    CHECK_EQUAL(in_flight(owner), 2);
    pcc_save_abort(payload.save, -PCC_E_ABORTED);
    step_all(owner, 2);
    CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_FAILED);
    CHECK_EQUAL(owner_wait(owner, 1).error, -PCC_E_ABORTED);
    CHECK(owner_wait(owner, 1).stage == PCC_STAGE_COPY);
    CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 3);
    pcc_saver_close(owner->saver); /* aborts the other */
    owner->saver = NULL;
    CHECK_EQUAL(owner->results[2].error, -PCC_E_SHUT_DOWN);
    CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 4);
    free(payload.memory);
    free(other.memory);
    owner_free(owner);
}

static void test_the_newer_one_supersedes(void)
{
    struct owner *owner = owner_new(4, 2, 2, 0);
    struct payload older, newer;

    CHECK_EQUAL(payload_begin(owner, 1, CAPACITY, &older), 0);
    CHECK_EQUAL(payload_begin(owner, 2, CAPACITY, &newer), 0);
    payload_fill(&older);
    payload_fill(&newer);
    while (pcc_saver_step(owner->saver, 1) == 0) {
    }
    CHECK_EQUAL(owner_wait(owner, 2).end, PCC_SAVE_DURABLE);
    const int writes = owner->media->writes;
    step_all(owner, 2);
    CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_SUPERSEDED);
    CHECK_EQUAL(owner->media->writes, writes); /* nothing more was written for it */
    CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 3);
    CHECK_EQUAL(read_back(owner->volume, 2, 0), 0);
    CHECK_EQUAL(read_back(owner->volume, 1, 0), -ENOENT);
    free(older.memory);
    free(newer.memory);
    owner_free(owner);
}

/* The copy begins before the number is known, and is not sealed without one. */
static void test_a_number_comes_before_the_seal(void)
{
    struct owner *owner = owner_new(4, 2, 2, 0);
    struct payload late, next;
    struct pcc_held held;
    struct pcc_load *load;
    struct pcc_number number = {.sequence = 1, /* taken */
                                .incarnation = 9,
                                .world_size = 4,
                                .marks = PCC_SLOT_OFFERED,
                                .name_base = 3,
                                .name_descents = 1,
                                .name_row = 2};

    CHECK_EQUAL(payload_begin_as(owner, 1, 2 * CHUNK, UNNUMBERED, &late), 0);
    CHECK_EQUAL(late.sequence, 0);
    CHECK_EQUAL(payload_begin(owner, 2, CHUNK, &next), 0); /* numbered, and takes 1 */
    CHECK_EQUAL(payload_chunk(&late, 0), 0);
    CHECK_EQUAL(payload_chunk(&late, 1), 0);
    step_all(owner, 2);
    CHECK_EQUAL(pcc_save_seal(late.save), -EINVAL);
    CHECK_EQUAL(pcc_save_number(late.save, &number), -EINVAL);
    number.sequence = 0;
    CHECK_EQUAL(pcc_save_number(late.save, &number), -EINVAL);
    number.sequence = 7;
    number.marks = PCC_SLOT_PINNED; /* no mark */
    CHECK_EQUAL(pcc_save_number(late.save, &number), -EINVAL);
    CHECK_EQUAL(pcc_save_seal(late.save), -EINVAL);
    number.marks = PCC_SLOT_OFFERED;
    CHECK_EQUAL(pcc_save_number(late.save, &number), 0);
    number.sequence = 8;
    CHECK_EQUAL(pcc_save_number(late.save, &number), -EINVAL); /* it has one */
    CHECK_EQUAL(pcc_save_seal(late.save), 0);
    step_all(owner, 2);
    CHECK_EQUAL(owner_wait(owner, 1).sequence, 7);
    CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(pcc_volume_hold(owner->volume, 7, &held), 0);
    CHECK(held.entry.incarnation == 9 && held.entry.world_size == 4);
    CHECK_EQUAL(held.entry.flags, PCC_SLOT_OFFERED);
    pcc_volume_release(owner->volume, &held);
    CHECK_EQUAL(read_back(owner->volume, 7, 0), 0);
    CHECK_EQUAL(pcc_load_open(owner->volume, 7, &load), 0);
    const struct pcc_manifest_notes *notes = &pcc_load_manifest(load)->notes;
    CHECK(notes->name_base == 3 && notes->name_descents == 1 && notes->name_row == 2);
    pcc_load_close(load);
    free(late.memory);
    CHECK_EQUAL(payload_begin_as(owner, 3, CHUNK, UNNUMBERED, &late), 0);
    pcc_save_abort(late.save, -PCC_E_ABORTED);
    step_all(owner, 2);
    CHECK_EQUAL(pcc_save_number(late.save, &number), -PCC_E_ABORTED);
    owner_free(owner);
    free(late.memory);
    free(next.memory);
}

static void test_a_write_error_moves_the_save(void)
{
    for (int at = 0; at < 17; at++) { /* chunk or manifest */
        struct owner *owner = owner_new(4, 2, 1, 0);
        struct payload payload;
        struct pcc_record record;

        CHECK_EQUAL(payload_begin(owner, 1, CAPACITY, &payload), 0);
        payload_fill(&payload);
        for (int i = 0; i < at; i++)
            CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
        owner->media->fail_writes = 1;
        step_all(owner, 1);
        const struct pcc_save_result result = owner_wait(owner, 1);
        CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
        CHECK_EQUAL(result.rehomed, 1);
        CHECK_EQUAL(result.error, 0);
        CHECK_EQUAL(result.slot, 1);
        CHECK_EQUAL(read_back(owner->volume, 1, 0), 0);
        pcc_volume_record(owner->volume, &record);
        CHECK_EQUAL(record.slots[0].flags, PCC_SLOT_QUARANTINED);
        CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 2);
        free(payload.memory);
        owner_free(owner);
    }
}

static void test_errors_without_end_fail_the_save_and_are_remembered(void)
{
    struct owner *owner = owner_new(5, 1, 1, 0);
    struct payload payload;
    struct pcc_record record;

    CHECK_EQUAL(payload_begin(owner, 1, CAPACITY, &payload), 0);
    CHECK_EQUAL(payload_chunk(&payload, 0), 0);
    owner->media->fail_writes = -1;
    CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
    CHECK_EQUAL(payload_chunk(&payload, 1), 0); /* while it waits to be moved */
    step_all(owner, 1);
    const struct pcc_save_result result = owner_wait(owner, 1);
    CHECK_EQUAL(result.end, PCC_SAVE_FAILED);
    CHECK_EQUAL(result.error, -EIO);
    CHECK(result.stage == PCC_STAGE_WRITE);
    CHECK_EQUAL(result.rehomed, 2);
    CHECK_EQUAL(payload_chunk(&payload, 2), -PCC_E_ABORTED);
    CHECK_EQUAL(pcc_save_seal(payload.save), -PCC_E_ABORTED);
    pcc_volume_record(owner->volume, &record);
    for (int slot = 0; slot < 3; slot++)
        CHECK_EQUAL(record.slots[slot].flags, PCC_SLOT_QUARANTINED);
    CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 2);
    free(payload.memory);
    owner_free(owner);
}

/* Data cannot be written for a while, records can. */
static void test_an_outage_costs_nothing_that_is_kept(void)
{
    struct owner *owner = owner_new(4, 2, 1, 0);
    uint64_t tag = 0;

    for (uint32_t i = 0; i < 9; i++) {
        struct payload payload;
        const bool out = i >= 2 && i < 6;
        owner->media->fail_writes = out ? -1 : 0;
        CHECK_EQUAL(payload_begin(owner, ++tag, CAPACITY, &payload), 0);
        payload_fill(&payload);
        step_all(owner, 1);
        CHECK_EQUAL(owner_wait(owner, tag).end, out ? PCC_SAVE_FAILED : PCC_SAVE_DURABLE);
        for (uint64_t kept = 1; out && kept <= 2; kept++)
            CHECK_EQUAL(read_back(owner->volume, kept, 0), 0);
        free(payload.memory);
    }
    CHECK_EQUAL(read_back(owner->volume, 8, 0), 0);
    CHECK_EQUAL(read_back(owner->volume, 9, 0), 0);
    owner_free(owner);
}

/* No memory, or a full thin pool: the shortage passes, and the slot is not at fault. */
static void test_scarcity_is_waited_for(void)
{
    static const int codes[] = {-ENOMEM, -EAGAIN, -ENOSPC};

    for (size_t i = 0; i < sizeof(codes) / sizeof(*codes); i++) {
        struct owner *owner = owner_new(4, 2, 1, 0);
        struct payload payload;
        struct pcc_record record;

        pauses = 0;
        owner->media->write_error = codes[i];
        owner->media->fail_writes = 3;
        CHECK_EQUAL(payload_begin(owner, 1, CAPACITY, &payload), 0);
        payload_fill(&payload);
        step_all(owner, 1);
        CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_DURABLE);
        CHECK_EQUAL(owner_wait(owner, 1).rehomed, 0);
        free(payload.memory);
        owner->media->fail_writes = -1; /* for longer than anybody waits */
        CHECK_EQUAL(payload_begin(owner, 2, CAPACITY, &payload), 0);
        CHECK_EQUAL(payload_chunk(&payload, 0), 0);
        pauses = 0;
        step_all(owner, 1);
        CHECK_EQUAL(owner_wait(owner, 2).end, PCC_SAVE_FAILED);
        CHECK_EQUAL(owner_wait(owner, 2).error, codes[i]);
        CHECK(pauses > 0);
        pauses = -1;
        pcc_volume_record(owner->volume, &record);
        for (int slot = 0; slot < 4; slot++)
            CHECK_EQUAL(record.slots[slot].flags, 0);
        CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 3);
        free(payload.memory);
        owner_free(owner);
    }
}

static void test_what_was_uncached_cannot_move(void)
{
    struct owner *owner = owner_new(4, 2, 1, 0);
    struct payload payload;

    CHECK_EQUAL(payload_begin(owner, 1, 3 * CHUNK, &payload), 0);
    CHECK_EQUAL(payload_chunk(&payload, 0), 0);
    CHECK_EQUAL(payload_chunk(&payload, 1), 0);
    CHECK(!pcc_save_uncache(owner->saver, 1, 0)); /* not written yet */
    CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
    CHECK(pcc_save_uncache(owner->saver, 99, 0)); /* no such save: it has ended */
    CHECK(pcc_save_uncache(owner->saver, 1, 0));
    memset(payload.memory, 0, CHUNK); /* the owner may do so now */
    owner->media->fail_writes = 1;
    CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
    step_all(owner, 1);
    CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_FAILED);
    CHECK_EQUAL(owner_wait(owner, 1).rehomed, 0);
    CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 3);
    free(payload.memory);

    CHECK_EQUAL(payload_begin(owner, 2, 2 * CHUNK, &payload), 0);
    payload_fill(&payload);
    CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0); /* the last chunk came first */
    owner->media->fail_writes = 1;
    CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
    CHECK(!pcc_save_uncache(owner->saver, 2, 1)); /* it has to move: needed */
    CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
    CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
    CHECK(pcc_save_uncache(owner->saver, 2, 0)); /* rewritten in the new slot */
    CHECK(!pcc_save_uncache(owner->saver, 2, 1));
    step_all(owner, 1);
    CHECK_EQUAL(owner_wait(owner, 2).end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(read_back(owner->volume, 2, 0), 0);
    free(payload.memory);
    owner_free(owner);
}

/* However a save ends afterwards: its slot is quarantined if the medium has failed, and not after a
 * shortage. */
static void test_given_up_between_the_error_and_the_move(void)
{
    static const int codes[][2] = {
        {-EIO, -PCC_E_ABORTED}, {-EIO, -ENOMEM}, {-ENOSPC, -PCC_E_ABORTED}, {-ENOSPC, -ENOMEM}};

    for (size_t i = 0; i < sizeof(codes) / sizeof(*codes); i++) {
        const bool is_bad = codes[i][0] == -EIO;
        struct owner *owner = owner_new(4, 2, 1, 0);
        struct payload payload;
        struct pcc_record record;

        CHECK_EQUAL(payload_begin(owner, 1, 2 * CHUNK, &payload), 0);
        CHECK_EQUAL(payload_chunk(&payload, 0), 0);
        pauses = 0;
        owner->media->write_error = codes[i][0];
        owner->media->fail_writes = is_bad ? 1 : -1;
        CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
        pauses = -1;
        const int writes = owner->media->writes;
        pcc_save_abort(payload.save, codes[i][1]); /* the move is queued */
        step_all(owner, 1);
        CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_FAILED);
        CHECK_EQUAL(owner_wait(owner, 1).error, codes[i][1]);
        CHECK(owner_wait(owner, 1).stage == PCC_STAGE_COPY);
        CHECK_EQUAL(owner->media->writes, writes);
        pcc_volume_record(owner->volume, &record);
        CHECK_EQUAL(record.slots[0].flags, is_bad ? PCC_SLOT_QUARANTINED : 0);
        CHECK_EQUAL(pcc_volume_free_slots(owner->volume), is_bad ? 3 : 4);
        free(payload.memory);
        owner_free(owner);
    }
}

/* A flush that fails concerns every save whose bytes it was to cover. */
static void test_a_failed_flush_is_nobodys_success(void)
{
    struct owner *owner = owner_new(6, 2, 2, 0);
    struct payload one, two;

    CHECK_EQUAL(payload_begin(owner, 1, 2 * CHUNK, &one), 0);
    CHECK_EQUAL(payload_begin(owner, 2, 2 * CHUNK, &two), 0);
    payload_fill(&one);
    payload_fill(&two);
    for (int i = 0; i < 3; i++) { /* both have everything written */
        CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
        CHECK_EQUAL(pcc_saver_step(owner->saver, 1), 0);
    }
    owner->media->fail_flushes = 1;
    CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
    CHECK_EQUAL(owner->media->flushes, 1);
    const int writes = owner->media->writes;
    CHECK_EQUAL(pcc_saver_step(owner->saver, 1), 0); /* must not flush and believe it */
    CHECK_EQUAL(owner->media->flushes, 1);
    CHECK(!pcc_save_uncache(owner->saver, 2, 0)); /* it has to be written again */
    while (pcc_saver_step(owner->saver, 0) == 0) {
    }
    while (pcc_saver_step(owner->saver, 1) == 0) {
    }
    CHECK_EQUAL(owner->media->writes, writes + 6);
    CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(owner_wait(owner, 1).rehomed, 1);
    CHECK_EQUAL(owner_wait(owner, 1).slot, 2);
    CHECK_EQUAL(owner_wait(owner, 2).end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(owner_wait(owner, 2).slot, 1); /* its slot is not to blame */
    CHECK_EQUAL(read_back(owner->volume, 1, 0), 0);
    CHECK_EQUAL(read_back(owner->volume, 2, 0), 0);
    free(one.memory);
    free(two.memory);
    owner_free(owner);
}

static void test_a_failed_record_fails_the_save_and_stops(void)
{
    struct owner *owner = owner_new(4, 2, 1, 0);
    struct payload payload;

    CHECK_EQUAL(payload_begin(owner, 1, CHUNK, &payload), 0);
    payload_fill(&payload);
    owner->media->fail_durables = 1;
    step_all(owner, 1);
    CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_FAILED);
    CHECK(owner_wait(owner, 1).stage == PCC_STAGE_PUBLISH);
    CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 3); /* the media may name its slot */
    free(payload.memory);
    CHECK_EQUAL(payload_begin(owner, 2, CHUNK, &payload), -PCC_E_STOPPED);
    owner_free(owner);
}

static void test_damage_is_found_by_the_load(void)
{
    struct owner *owner = owner_new(4, 2, 1, 0);
    struct payload payload;
    struct pcc_geometry geometry;

    CHECK_EQUAL(payload_begin(owner, 1, CAPACITY - 100, &payload), 0);
    payload_fill(&payload);
    step_all(owner, 1);
    free(payload.memory);
    geometry = pcc_volume_geometry(owner->volume);
    uint8_t *slot = owner->media->bytes + pcc_geometry_slot_offset(&geometry, 0);
    CHECK_EQUAL(read_back(owner->volume, 1, 2), 0);
    for (uint64_t at = 0; at < CAPACITY - 100; at += 1009) {
        slot[at] ^= 4;
        CHECK_EQUAL(read_back(owner->volume, 1, at % 2 ? 0 : 2), -PCC_E_DAMAGED);
        slot[at] ^= 4;
    }
    for (uint64_t at = 0; at < 96 + 64 * 8; at++) {
        slot[CAPACITY + at] ^= 4;
        CHECK_EQUAL(read_back(owner->volume, 1, 0), -PCC_E_DAMAGED);
        slot[CAPACITY + at] ^= 4;
    }
    /* The manifest, then the data: it is not known whether they are whole. */
    owner->media->fail_reads = 1;
    CHECK_EQUAL(read_back(owner->volume, 1, 0), -PCC_E_UNREADABLE);
    CHECK_EQUAL(read_back(owner->volume, 1, 0), 0);
    struct pcc_load *load;
    CHECK_EQUAL(pcc_load_open(owner->volume, 1, &load), 0);
    owner->media->fail_reads = 1;
    struct compare compare = {.tag = 1};
    CHECK_EQUAL(pcc_load_stream(load, 5000, 70001, BLOCK, 2, compare_sink, &compare),
                -PCC_E_UNREADABLE);
    compare.bytes = 0;
    CHECK_EQUAL(pcc_load_stream(load, 5000, 70001, BLOCK, 2, compare_sink, &compare), 0);
    CHECK_EQUAL(compare.bytes, 70001);
    CHECK_EQUAL(pcc_load_stream(load, CAPACITY - 101, 2, BLOCK, 0, compare_sink, &compare),
                -EINVAL);
    CHECK_EQUAL(pcc_load_stream(load, 0, 1, BLOCK + 512, 0, compare_sink, &compare), -EINVAL);
    uint8_t *buffer = aligned_alloc(PCC_IO_ALIGN, CHUNK);
    CHECK(buffer);
    CHECK_EQUAL(pcc_load_chunk(load, buffer, 0, 100), -EINVAL);
    CHECK_EQUAL(pcc_load_chunk(load, buffer, CHUNK, CHUNK), 0);
    CHECK_EQUAL(pcc_load_check(load, buffer, CHUNK, CHUNK), 0);
    CHECK_EQUAL(pcc_load_check(load, buffer, 0, CHUNK), -PCC_E_DAMAGED);
    free(buffer);
    pcc_load_close(load);
    owner_free(owner);
}

/* Whole chunks that are to lie on whole pages are read there, the others are copied; nothing beside
 * the ranges changes. */
static void test_ranges_are_filled_in_place_and_beside(void)
{
    enum { PAYLOAD = CAPACITY - 100, GAP = 5000, ROOM = CAPACITY + 4 * PCC_IO_ALIGN };
    struct owner *owner = owner_new(4, 2, 1, 0);
    const struct pcc_geometry geometry = pcc_volume_geometry(owner->volume);
    uint8_t *slot = owner->media->bytes + pcc_geometry_slot_offset(&geometry, 0);
    uint8_t *memory = aligned_alloc(PCC_IO_ALIGN, ROOM);
    struct payload payload;
    struct pcc_load *load;

    CHECK(memory);
    CHECK_EQUAL(payload_begin(owner, 1, PAYLOAD, &payload), 0);
    payload_fill(&payload);
    step_all(owner, 1);
    free(payload.memory);
    CHECK_EQUAL(pcc_load_open(owner->volume, 1, &load), 0);
    for (uint64_t shift = 0; shift <= 1; shift++) {
        uint8_t *first = memory + PCC_IO_ALIGN + shift;
        const struct pcc_range ranges[] = {
            {.address = (uintptr_t)first, .length_bytes = 2 * CHUNK + 7},
            {.address = (uintptr_t)first + 2 * CHUNK + 7 + GAP,
             .offset_bytes = 2 * CHUNK + 7 + GAP,
             .length_bytes = PAYLOAD - (2 * CHUNK + 7 + GAP)}};
        memset(memory, 0xa5, ROOM);
        CHECK_EQUAL(pcc_load_ranges(load, ranges, 2, CHUNK, 2), 0);
        for (uint64_t at = 0; at < ROOM; at++) {
            const uint64_t offset = at - PCC_IO_ALIGN - shift; /* of the payload */
            const bool wanted = at >= PCC_IO_ALIGN + shift && offset < PAYLOAD &&
                                (offset < 2 * CHUNK + 7 || offset >= 2 * CHUNK + 7 + GAP);
            CHECK_EQUAL(memory[at], wanted ? payload_byte(1, offset) : 0xa5);
        }
        slot[CHUNK + 1] ^= 4;
        CHECK_EQUAL(pcc_load_ranges(load, ranges, 2, CHUNK, 0), -PCC_E_DAMAGED);
        slot[CHUNK + 1] ^= 4;
    }
    pcc_load_close(load);
    free(memory);
    owner_free(owner);
}

static void test_n_are_in_flight_at_once(void)
{
    for (uint32_t lanes = 1; lanes <= 3; lanes += 2) {
        struct owner *owner = owner_new(5, 2, lanes, 1);
        struct payload payloads[3];

        owner->media->meet = (int)lanes;
        for (uint64_t tag = 0; tag < lanes; tag++) {
            CHECK_EQUAL(payload_begin(owner, tag, CAPACITY, &payloads[tag]), 0);
            payload_fill(&payloads[tag]);
        }
        for (uint64_t tag = 0; tag < lanes; tag++) {
            CHECK(owner_wait(owner, tag).end != PCC_SAVE_FAILED);
            free(payloads[tag].memory);
        }
        CHECK_EQUAL(owner->media->writing_most, lanes);
        CHECK_EQUAL(owner->media->flushing_most, 1); /* so an error belongs to one save */
        owner_free(owner);
    }
}

int main(void)
{
    RUN(test_one_save_becomes_durable_and_reads_back);
    RUN(test_checksums_are_made_by_the_writer);
    RUN(test_what_does_not_fit_is_refused);
    RUN(test_the_newer_one_supersedes);
    RUN(test_a_number_comes_before_the_seal);
    RUN(test_a_write_error_moves_the_save);
    RUN(test_errors_without_end_fail_the_save_and_are_remembered);
    RUN(test_an_outage_costs_nothing_that_is_kept);
    RUN(test_scarcity_is_waited_for);
    RUN(test_what_was_uncached_cannot_move);
    RUN(test_given_up_between_the_error_and_the_move);
    RUN(test_a_failed_flush_is_nobodys_success);
    RUN(test_a_failed_record_fails_the_save_and_stops);
    RUN(test_damage_is_found_by_the_load);
    RUN(test_ranges_are_filled_in_place_and_beside);
    RUN(test_n_are_in_flight_at_once);
    return 0;
}
