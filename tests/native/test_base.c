/* Unchanged blocks: not written again, and kept as long as a checkpoint refers to them. */
#include <sched.h>
#include <string.h>

#include "save_fixture.h"

#define FROZEN (4u * CHUNK)
#define PAYLOAD (FROZEN + CHUNK + 1000u)
#define MANIFEST PCC_IO_ALIGN

/* FROZEN bytes of `world`, then those of the tag. */
static uint8_t byte_of(uint64_t tag, uint64_t world, uint64_t offset)
{
    return offset < FROZEN ? payload_byte(world * 1000 + offset / 4096, offset)
                           : payload_byte(tag, offset);
}

static struct payload begun(struct owner *owner, uint64_t tag, uint64_t world, uint64_t frozen)
{
    const struct pcc_save_request request = {.tag = tag,
                                             .step = (int64_t)tag,
                                             .incarnation = 1,
                                             .world_size = 1,
                                             .payload_bytes = PAYLOAD,
                                             .frozen_bytes = frozen};
    struct payload payload = {.tag = tag, .bytes = PAYLOAD, .chunk_count = 6};

    payload.memory = aligned_alloc(PCC_IO_ALIGN, 6 * CHUNK);
    CHECK(payload.memory);
    memset(payload.memory, 0, 6 * CHUNK);
    for (uint64_t i = 0; i < PAYLOAD; i++)
        payload.memory[i] = byte_of(tag, world, i);
    CHECK_EQUAL(pcc_save_begin(owner->saver, &request, &payload.save, &payload.sequence), 0);
    return payload;
}

static void run(struct owner *owner)
{
    for (uint32_t lane = 0; lane < owner->saver->spec.lanes; lane++)
        while (pcc_saver_step(owner->saver, lane) == 0) {
        }
}

static struct pcc_save_result finished(struct owner *owner, struct payload *payload)
{
    payload_fill(payload);
    run(owner);
    const struct pcc_save_result result = owner_wait(owner, payload->tag);
    free(payload->memory);
    return result;
}

static uint64_t saved(struct owner *owner, uint64_t tag, uint64_t world, uint64_t frozen)
{
    struct payload payload = begun(owner, tag, world, frozen);
    const struct pcc_save_result result = finished(owner, &payload);

    CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
    return result.written_bytes;
}

struct expected {
    uint64_t tag, world;
};

static int same(void *context, const void *bytes, uint64_t offset, uint64_t length)
{
    const struct expected *expected = context;
    for (uint64_t i = 0; i < length; i++)
        CHECK_EQUAL(((const uint8_t *)bytes)[i],
                    byte_of(expected->tag, expected->world, offset + i));
    return 0;
}

static int reads(struct pcc_volume *volume, uint64_t sequence, uint64_t world)
{
    struct expected expected = {.world = world};
    struct pcc_load *load;
    int result = pcc_load_open(volume, sequence, &load);

    if (result != 0)
        return result;
    expected.tag = (uint64_t)pcc_load_entry(load)->step;
    result = pcc_load_stream(load, 0, PAYLOAD, CHUNK, 0, same, &expected);
    pcc_load_close(load);
    return result;
}

static uint64_t base_of(struct pcc_volume *volume, uint64_t sequence)
{
    struct pcc_record record;

    pcc_volume_record(volume, &record);
    const uint32_t slot = pcc_record_find(&record, sequence);
    CHECK(slot < PCC_SLOTS_MAX);
    return record.slots[slot].base_sequence;
}

#define WHOLE (pcc_align_up(PAYLOAD, PCC_IO_ALIGN) + MANIFEST)
#define CHANGED (pcc_align_up(PAYLOAD - FROZEN, PCC_IO_ALIGN) + MANIFEST)

static void test_what_has_not_changed_is_not_written(void)
{
    struct owner *owner = owner_new(4, 2, 2, 0);

    CHECK_EQUAL(saved(owner, 1, 7, FROZEN), WHOLE);
    for (uint64_t tag = 2; tag < 12; tag++) {
        CHECK_EQUAL(saved(owner, tag, 7, FROZEN), CHANGED);
        CHECK_EQUAL(base_of(owner->volume, tag), 1);
        CHECK_EQUAL(reads(owner->volume, tag, 7), 0);
        CHECK_EQUAL(reads(owner->volume, 1, 7), 0); /* beyond `keep` by now */
        CHECK_EQUAL(table_size(owner->volume), tag < 3 ? 2 : 3);
    }
    /* Without the hint it is written whole; and with the last one that refers to it goes a base. */
    CHECK_EQUAL(saved(owner, 12, 7, 0), WHOLE);
    CHECK(has(owner->volume, 1) && has(owner->volume, 11));
    CHECK_EQUAL(saved(owner, 13, 7, 0), WHOLE);
    CHECK(!has(owner->volume, 1) && !has(owner->volume, 11));
    CHECK_EQUAL(table_size(owner->volume), 2);
    owner_free(owner);
}

static void test_it_goes_on_after_an_opening(void)
{
    struct owner *owner = owner_new(4, 2, 2, 0);

    (void)saved(owner, 1, 7, FROZEN);
    (void)saved(owner, 2, 7, FROZEN);
    struct memory_io *media = owner->media;
    pcc_saver_close(owner->saver);
    pcc_volume_close(owner->volume);
    free(owner);
    owner = owner_of(media, 2, 0);
    CHECK_EQUAL(reads(owner->volume, 2, 7), 0);
    CHECK_EQUAL(saved(owner, 3, 7, FROZEN), CHANGED);
    CHECK_EQUAL(base_of(owner->volume, 3), 1);
    CHECK_EQUAL(pcc_volume_finish(owner->volume, 1), 0);
    CHECK(has(owner->volume, 3) && has(owner->volume, 1) && !has(owner->volume, 2));
    CHECK_EQUAL(reads(owner->volume, 3, 7), 0);
    owner_free(owner);
}

static void test_what_has_changed_after_all_is_written(void)
{
    struct owner *owner = owner_new(5, 2, 2, 0);

    (void)saved(owner, 1, 7, FROZEN);
    CHECK_EQUAL(saved(owner, 2, 8, FROZEN), WHOLE); /* all of it: no base, and itself one */
    CHECK_EQUAL(base_of(owner->volume, 2), 0);
    CHECK_EQUAL(saved(owner, 3, 8, FROZEN), CHANGED);
    CHECK_EQUAL(base_of(owner->volume, 3), 2);
    struct payload payload = begun(owner, 4, 8, FROZEN);
    for (uint64_t i = 0; i < 3 * CHUNK; i++) /* most of it */
        payload.memory[i] ^= 1;
    CHECK_EQUAL(finished(owner, &payload).written_bytes, CHANGED + 3 * CHUNK);
    CHECK_EQUAL(base_of(owner->volume, 4), 2);
    CHECK_EQUAL(saved(owner, 5, 8, FROZEN), WHOLE); /* though all of it is in 2 */
    CHECK_EQUAL(base_of(owner->volume, 5), 0);
    CHECK_EQUAL(saved(owner, 6, 8, FROZEN), CHANGED);
    CHECK_EQUAL(base_of(owner->volume, 6), 5);
    CHECK(!has(owner->volume, 2));
    owner_free(owner);
}

/* A quarter of what is said not to change differs from the base by `change`; 0: it does not. */
static uint64_t saved_but(struct owner *owner, uint64_t tag, uint8_t change)
{
    struct payload payload = begun(owner, tag, 7, FROZEN);

    for (uint64_t i = 0; i < CHUNK; i++)
        payload.memory[i] ^= change;
    return finished(owner, &payload).written_bytes;
}

static void test_what_has_changed_once_is_not_written_for_ever(void)
{
    struct owner *owner = owner_new(5, 2, 2, 0);
    uint64_t tag = 1;

    (void)saved_but(owner, tag++, 0);
    for (uint32_t merge = 1; merge <= 3; merge++) { /* each time when all that was worth a base */
        for (uint32_t i = 0; i < 4; i++)
            CHECK_EQUAL(saved_but(owner, tag++, (uint8_t)merge), CHANGED + CHUNK);
        CHECK_EQUAL(saved_but(owner, tag++, (uint8_t)merge), WHOLE);
        for (uint32_t i = 0; i < 9; i++)
            CHECK_EQUAL(saved_but(owner, tag++, (uint8_t)merge), CHANGED);
    }
    owner_free(owner);

    /* State that changes each time does not profit from a new base, so one is tried ever more
     * rarely. */
    owner = owner_new(5, 2, 2, 0);
    tag = 1;
    (void)saved_but(owner, tag++, 0);
    for (uint32_t patience = 1; patience <= 8; patience *= 2) {
        for (uint32_t i = 0; i < 4 * patience; i++, tag++)
            CHECK_EQUAL(saved_but(owner, tag, (uint8_t)(1 + tag % 250)), CHANGED + CHUNK);
        CHECK_EQUAL(saved_but(owner, tag, (uint8_t)(1 + tag % 250)), WHOLE);
        tag++;
    }
    owner_free(owner);
}

/* State of which all changes each time (an average of the weights) is offered ever more rarely. */
static void test_what_all_changes_each_time_gets_few_bases(void)
{
    struct owner *owner = owner_new(5, 2, 2, 0);
    uint32_t bases = 0;

    for (uint64_t tag = 1; tag <= 200; tag++) {
        struct payload payload = begun(owner, tag, tag, FROZEN);
        bases += pcc_save_base(payload.save) != 0;
        CHECK_EQUAL(finished(owner, &payload).written_bytes, WHOLE);
    }
    CHECK_EQUAL(bases, 9);                      /* after 1, 1, 2, 4, ... 64 and 64 */
    for (uint64_t tag = 201; tag <= 270; tag++) /* and then it does not */
        (void)saved(owner, tag, 7, FROZEN);
    CHECK_EQUAL(saved(owner, 271, 7, FROZEN), CHANGED);
    CHECK_EQUAL(saved(owner, 272, 8, FROZEN), WHOLE); /* the next surprise is the first one */
    CHECK_EQUAL(saved(owner, 273, 8, FROZEN), CHANGED);
    owner_free(owner);
}

static void test_a_base_is_not_taken_where_slots_are_few(void)
{
    static const struct {
        uint32_t slots, keep;
        bool taken;
    } shapes[] = {{2, 1, false}, {3, 1, false}, {3, 2, false}, {4, 3, false},
                  {4, 2, true},  {4, 1, true},  {5, 3, true}};

    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct owner *owner = owner_new(shapes[i].slots, shapes[i].keep, 1, 0);
        (void)saved(owner, 1, 7, FROZEN);
        for (uint64_t tag = 2; tag < 9; tag++)
            CHECK_EQUAL(saved(owner, tag, 7, FROZEN), shapes[i].taken ? CHANGED : WHOLE);
        owner_free(owner);
    }
    /* A checkpoint that is protected for the next run needs its slot, and that of its base. */
    struct owner *owner = owner_new(4, 2, 1, 0);
    (void)saved(owner, 1, 7, FROZEN);
    (void)saved(owner, 2, 7, FROZEN);
    CHECK_EQUAL(pcc_volume_flag(owner->volume, 2, PCC_SLOT_PROTECTED, 0, false), 0);
    for (uint64_t tag = 3; tag < 9; tag++)
        CHECK_EQUAL(saved(owner, tag, 7, FROZEN), WHOLE);
    CHECK_EQUAL(reads(owner->volume, 2, 7), 0);
    CHECK_EQUAL(pcc_volume_flag(owner->volume, 2, 0, PCC_SLOT_PROTECTED, false), 0);
    CHECK_EQUAL(saved(owner, 9, 7, FROZEN), CHANGED);
    CHECK(!has(owner->volume, 2) && !has(owner->volume, 1));
    owner_free(owner);
}

static void test_a_base_in_use_stays(void)
{
    struct owner *owner = owner_new(6, 1, 2, 0);

    (void)saved(owner, 1, 7, FROZEN);
    struct payload slow = begun(owner, 2, 7, FROZEN);
    for (uint64_t tag = 3; tag < 6; tag++)
        CHECK_EQUAL(saved(owner, tag, 8, 0), WHOLE);
    CHECK(has(owner->volume, 1)); /* for the one in flight */
    CHECK_EQUAL(pcc_volume_recycle(owner->volume), 0);
    CHECK(has(owner->volume, 1));
    CHECK_EQUAL(finished(owner, &slow).end, PCC_SAVE_SUPERSEDED);
    CHECK_EQUAL(pcc_volume_recycle(owner->volume), 0);
    CHECK(!has(owner->volume, 1));

    CHECK_EQUAL(saved(owner, 6, 8, FROZEN), CHANGED);
    CHECK_EQUAL(base_of(owner->volume, 6), 5);
    CHECK_EQUAL(pcc_volume_spare(owner->volume, 6, true), 0); /* a reader's lease */
    (void)saved(owner, 7, 9, 0);
    CHECK(has(owner->volume, 6) && has(owner->volume, 5));
    struct pcc_load *load;
    CHECK_EQUAL(pcc_load_open(owner->volume, 6, &load), 0);
    CHECK_EQUAL(pcc_volume_spare(owner->volume, 6, false), 0);
    (void)saved(owner, 8, 9, 0);
    CHECK(!has(owner->volume, 6) && !has(owner->volume, 5));
    for (uint64_t tag = 9; tag < 20; tag++) /* whatever is free is written to */
        (void)saved(owner, tag, 10 + tag, 0);
    struct expected expected = {.tag = 6, .world = 8};
    CHECK_EQUAL(pcc_load_stream(load, 0, PAYLOAD, CHUNK, 0, same, &expected), 0);
    pcc_load_close(load);
    CHECK_EQUAL(pcc_volume_free_slots(owner->volume), 5);
    owner_free(owner);
}

static void test_damage_of_a_base_is_damage_of_both(void)
{
    struct owner *owner = owner_new(5, 2, 2, 0);
    const struct pcc_geometry geometry = pcc_volume_geometry(owner->volume);

    (void)saved(owner, 1, 7, FROZEN);
    (void)saved(owner, 2, 7, FROZEN);
    uint8_t *slot = owner->media->bytes + pcc_geometry_slot_offset(&geometry, 0);
    slot[FROZEN + 3] ^= 1; /* of what only the base has */
    CHECK_EQUAL(reads(owner->volume, 1, 7), -PCC_E_DAMAGED);
    CHECK_EQUAL(reads(owner->volume, 2, 7), 0);
    slot[FROZEN + 3] ^= 1;
    slot[CHUNK + 3] ^= 1;
    CHECK_EQUAL(reads(owner->volume, 1, 7), -PCC_E_DAMAGED);
    CHECK_EQUAL(reads(owner->volume, 2, 7), -PCC_E_DAMAGED);
    /* Known before the record: written again, whole. Its chunks are still there. */
    for (uint32_t flagged = 1; flagged <= 2; flagged++) {
        struct payload payload = begun(owner, 2 * flagged + 1, 7, FROZEN);
        const uint64_t base = flagged == 1 ? 1 : 3;
        const uint64_t damaged = flagged == 1 ? 2 : 3; /* one that refers to it, or itself */
        CHECK_EQUAL(pcc_volume_flag(owner->volume, damaged, PCC_SLOT_DAMAGED, 0, true), 0);
        const struct pcc_save_result result = finished(owner, &payload);
        CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
        CHECK_EQUAL(result.rehomed, 1);
        CHECK_EQUAL(result.written_bytes, CHANGED + WHOLE);
        CHECK_EQUAL(base_of(owner->volume, payload.sequence), 0);
        CHECK_EQUAL(reads(owner->volume, payload.sequence, 7), 0);
        CHECK(base < payload.sequence);
    }
    CHECK_EQUAL(saved(owner, 9, 7, FROZEN), CHANGED);
    owner_free(owner);
}

/* The checkpoint cannot be written again, because the memory of some chunks is in other use. */
static void test_damage_of_a_base_ends_what_is_not_in_memory(void)
{
    struct owner *owner = owner_new(5, 2, 2, 0);

    (void)saved(owner, 1, 7, FROZEN);
    struct payload payload = begun(owner, 2, 7, FROZEN);
    for (uint32_t i = 0; i < 6; i++)
        CHECK_EQUAL(payload_chunk(&payload, i), 0);
    run(owner);
    CHECK(pcc_save_uncache(owner->saver, 2, 5));
    CHECK_EQUAL(pcc_save_seal(payload.save), 0);
    CHECK_EQUAL(pcc_volume_flag(owner->volume, 1, PCC_SLOT_DAMAGED, 0, true), 0);
    run(owner);
    const struct pcc_save_result result = owner_wait(owner, 2);
    CHECK_EQUAL(result.end, PCC_SAVE_FAILED);
    CHECK_EQUAL(result.error, -PCC_E_DAMAGED);
    CHECK(result.stage == PCC_STAGE_BASE); /* it is not the volume's record that failed */
    CHECK(!pcc_volume_stopped(owner->volume));
    free(payload.memory);
    owner_free(owner);
}

/* The first save that finds the damage is written whole, and its record drops the checkpoint with
 * the damage flag. This does not repair the base. */
static void test_damage_outlives_the_checkpoint_that_showed_it(void)
{
    struct owner *owner = owner_new(4, 1, 2, 0);

    (void)saved(owner, 1, 7, FROZEN);
    (void)saved(owner, 2, 7, FROZEN);
    struct payload first = begun(owner, 3, 7, FROZEN);
    struct payload second = begun(owner, 4, 7, FROZEN);
    CHECK_EQUAL(pcc_volume_flag(owner->volume, 2, PCC_SLOT_DAMAGED, 0, true), 0);
    CHECK_EQUAL(finished(owner, &first).end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(base_of(owner->volume, 3), 0);
    CHECK(!has(owner->volume, 2));
    CHECK_EQUAL(finished(owner, &second).end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(base_of(owner->volume, 4), 0);
    CHECK_EQUAL(saved(owner, 5, 7, FROZEN), CHANGED);
    CHECK_EQUAL(base_of(owner->volume, 5), 4);
    owner_free(owner);
}

static void test_without_its_manifest_a_base_is_none(void)
{
    struct owner *owner = owner_new(4, 2, 2, 0);

    (void)saved(owner, 1, 7, FROZEN);
    owner->media->fail_reads = 1;
    CHECK_EQUAL(saved(owner, 2, 7, FROZEN), WHOLE);
    CHECK_EQUAL(base_of(owner->volume, 2), 0);
    CHECK_EQUAL(saved(owner, 3, 7, FROZEN), CHANGED);
    owner_free(owner);
}

static void test_a_bad_slot_is_left_with_the_base_kept(void)
{
    struct owner *owner = owner_new(5, 2, 1, 0);

    (void)saved(owner, 1, 7, FROZEN);
    struct payload payload = begun(owner, 2, 7, FROZEN);
    owner->media->fail_writes = 1;
    const struct pcc_save_result result = finished(owner, &payload);
    CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(result.rehomed, 1);
    CHECK_EQUAL(base_of(owner->volume, 2), 1);
    CHECK_EQUAL(reads(owner->volume, 2, 7), 0);
    owner_free(owner);
}

/* The daemon dies when all is written and the memory of some chunks is used for something else. */
static void test_the_next_daemon_goes_on(void)
{
    const struct pcc_saver_spec spec = {.lanes = 1, .chunk_bytes = CHUNK, .events = &owner_events};

    for (uint32_t base_gone = 0; base_gone <= 1; base_gone++) {
        for (uint32_t reused = 0; reused <= 6; reused += 3) {
            struct owner *owner = owner_new(4, 2, 1, 0);
            (void)saved(owner, 1, 7, FROZEN);
            pcc_saver_close(owner->saver);
            const struct pcc_geometry geometry = pcc_volume_geometry(owner->volume);
            const struct pcc_kept_shape shape = pcc_kept_shape_of(&geometry, 1, CHUNK);
            struct pcc_record record;
            struct pcc_kept kept;
            void *memory = aligned_alloc(PCC_IO_ALIGN, pcc_kept_bytes(&shape));
            CHECK(memory);
            memset(memory, 0, pcc_kept_bytes(&shape));
            pcc_volume_record(owner->volume, &record);
            pcc_kept_make(&kept, memory, &shape, &record);
            struct pcc_saver_spec with_kept = spec;
            with_kept.owner = owner;
            with_kept.kept = &kept;
            CHECK_EQUAL(pcc_saver_open(owner->volume, &with_kept, &owner->saver), 0);
            struct payload payload = begun(owner, 2, 7, FROZEN);
            for (uint32_t i = 0; i < 6; i++) {
                CHECK_EQUAL(payload_chunk(&payload, i), 0);
                CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
            }
            for (uint32_t i = 0; i < reused; i++)
                CHECK(pcc_save_uncache(owner->saver, 2, i));
            pcc_kept_copied(&kept, 0);
            uint8_t *image = malloc(kept.length_bytes);
            CHECK(image);
            memcpy(image, memory, kept.length_bytes);

            /* The old saver ends its save in its own memory; the next one finds the image. */
            pcc_save_abort(payload.save, -PCC_E_ABORTED);
            run(owner);
            pcc_saver_close(owner->saver);
            if (base_gone)
                CHECK_EQUAL(pcc_volume_flag(owner->volume, 1, PCC_SLOT_DAMAGED, 0, true), 0);
            memcpy(memory, image, kept.length_bytes);
            CHECK_EQUAL(pcc_saver_open(owner->volume, &with_kept, &owner->saver), 0);
            owner->has_ended[2] = false;
            owner->written[2] = 0;
            struct pcc_save *save;
            uint8_t *buffer = aligned_alloc(PCC_IO_ALIGN, CHUNK);
            CHECK(buffer);
            for (uint32_t i = reused; i < 6; i++) /* in DRAM */
                atomic_store(&pcc_kept_piece(&kept, 0, i)->segment, 1);
            const int result = pcc_save_adopt(owner->saver, 0, 2, &save);
            if (base_gone && reused > 0) {
                CHECK_EQUAL(result, -ENODATA);
            } else {
                CHECK_EQUAL(result, 0);
                for (uint32_t i = 0; i < reused; i++) {
                    CHECK_EQUAL(pcc_save_found(save, 2, i, buffer), 0);
                    for (uint32_t k = 0; k < CHUNK && i * CHUNK + k < PAYLOAD; k++)
                        CHECK_EQUAL(buffer[k], byte_of(2, 7, i * CHUNK + k));
                }
                payload.save = save;
                for (uint32_t i = reused; i < 6; i++)
                    CHECK_EQUAL(payload_chunk(&payload, i), 0);
                CHECK_EQUAL(pcc_save_seal(save), 0);
                run(owner);
                CHECK_EQUAL(owner_wait(owner, 2).end, PCC_SAVE_DURABLE);
                CHECK_EQUAL(base_of(owner->volume, 2), base_gone ? 0 : 1);
                CHECK_EQUAL(reads(owner->volume, 2, 7), 0);
            }
            pcc_saver_close(owner->saver);
            CHECK_EQUAL(pcc_saver_open(owner->volume, &spec, &owner->saver), 0);
            owner_free(owner);
            free(payload.memory);
            free(buffer);
            free(image);
            free(memory);
        }
    }
}

/* -- offers: what has no chunk -- */

/* The frozen part is offered, before what changes is handed over. */
static struct payload offered(struct owner *owner, uint64_t tag, uint64_t world)
{
    struct payload payload = begun(owner, tag, world, FROZEN);

    for (uint32_t i = 0; i < 4; i++)
        CHECK_EQUAL(payload_offer(&payload, i), 0);
    return payload;
}

static struct pcc_save_result completed(struct owner *owner, struct payload *payload)
{
    run(owner);
    CHECK_EQUAL(owner->referred[payload->tag] | owner->asked[payload->tag], 15);
    for (uint32_t i = 0; i < payload->chunk_count; i++)
        if ((owner->referred[payload->tag] >> i & 1) == 0)
            CHECK_EQUAL(payload_chunk(payload, i), 0);
    CHECK_EQUAL(pcc_save_seal(payload->save), 0);
    run(owner);
    free(payload->memory);
    return owner_wait(owner, payload->tag);
}

static void test_what_is_offered_and_in_the_base_needs_no_bytes(void)
{
    struct owner *owner = owner_new(4, 2, 2, 0);

    struct payload first = begun(owner, 1, 7, FROZEN);
    CHECK_EQUAL(pcc_save_base(first.save), 0);
    CHECK_EQUAL(payload_offer(&first, 0), -EINVAL); /* there is no base */
    CHECK_EQUAL(finished(owner, &first).copied_bytes, PAYLOAD);
    for (uint64_t tag = 2; tag < 8; tag++) {
        struct payload payload = offered(owner, tag, 7);
        CHECK_EQUAL(pcc_save_base(payload.save), 1);
        CHECK_EQUAL(payload_offer(&payload, 0), -EINVAL); /* twice */
        CHECK_EQUAL(pcc_save_seal(payload.save), -EINVAL);
        const struct pcc_save_result result = completed(owner, &payload);
        CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
        CHECK_EQUAL(owner->referred[tag], 15);
        CHECK_EQUAL(result.copied_bytes, PAYLOAD - FROZEN);
        CHECK_EQUAL(result.written_bytes, CHANGED);
        CHECK_EQUAL(reads(owner->volume, tag, 7), 0);
    }
    owner_free(owner);
}

static void test_what_is_offered_and_has_changed_is_asked_for(void)
{
    struct owner *owner = owner_new(5, 2, 2, 0);

    (void)saved(owner, 1, 7, FROZEN);
    struct payload payload = begun(owner, 2, 7, FROZEN);
    payload.memory[CHUNK + 5 * BLOCK / 2] ^= 1; /* one block of one chunk */
    for (uint32_t i = 0; i < 4; i++)
        CHECK_EQUAL(payload_offer(&payload, i), 0);
    run(owner);
    CHECK_EQUAL(owner->asked[2], 2);
    CHECK_EQUAL(payload_offer(&payload, 1), -EINVAL); /* the daemon has asked for its bytes */
    struct pcc_save_result result = completed(owner, &payload);
    CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(result.copied_bytes, PAYLOAD - FROZEN + CHUNK);
    CHECK_EQUAL(result.written_bytes, CHANGED + PCC_IO_ALIGN);

    owner->media->fail_reads = 1; /* of the base's manifest: nothing is known of it */
    pcc_saver_forget_known(owner->saver);
    payload = offered(owner, 3, 7);
    result = completed(owner, &payload);
    CHECK_EQUAL(owner->asked[3], 15);
    CHECK_EQUAL(result.written_bytes, WHOLE);
    CHECK_EQUAL(reads(owner->volume, 3, 7), 0);

    payload = offered(owner, 4, 7); /* given up before a writer compared it */
    pcc_save_abort(payload.save, -PCC_E_ABORTED);
    run(owner);
    CHECK_EQUAL(owner_wait(owner, 4).end, PCC_SAVE_FAILED);
    CHECK_EQUAL(owner->referred[4] | owner->asked[4], 0);
    free(payload.memory);
    owner_free(owner);
}

static void test_what_was_offered_moves_with_the_base(void)
{
    for (uint32_t answered = 0; answered <= 1; answered++) {
        struct owner *owner = owner_new(5, 2, 1, 0);
        (void)saved(owner, 1, 7, FROZEN);
        struct payload payload = begun(owner, 2, 7, FROZEN);
        owner->media->fail_writes = 1;
        if (answered == 0) { /* the write fails first, and the offers wait for the move */
            CHECK_EQUAL(payload_chunk(&payload, 4), 0);
            CHECK_EQUAL(pcc_saver_step(owner->saver, 0), 0);
        }
        for (uint32_t i = 0; i < 4; i++)
            CHECK_EQUAL(payload_offer(&payload, i), 0);
        run(owner);
        CHECK_EQUAL(owner->referred[2], 15);
        for (uint32_t i = 4 + (answered == 0); i < 6; i++)
            CHECK_EQUAL(payload_chunk(&payload, i), 0);
        CHECK_EQUAL(pcc_save_seal(payload.save), 0);
        run(owner);
        const struct pcc_save_result result = owner_wait(owner, 2);
        CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
        CHECK_EQUAL(result.rehomed, 1);
        CHECK_EQUAL(base_of(owner->volume, 2), 1);
        CHECK_EQUAL(reads(owner->volume, 2, 7), 0);
        free(payload.memory);
        owner_free(owner);
    }
}

/* What was offered is in the base only: it is taken from there, if that part of it is intact. */
static void test_what_was_offered_is_rescued_from_a_damaged_base(void)
{
    for (uint32_t hit = 0; hit <= 3; hit++) {
        struct owner *owner = owner_new(5, 2, 2, 0);
        const struct pcc_geometry geometry = pcc_volume_geometry(owner->volume);
        (void)saved(owner, 1, 7, FROZEN);
        struct payload payload = offered(owner, 2, 7);
        run(owner);
        uint8_t *base = owner->media->bytes + pcc_geometry_slot_offset(&geometry, 0);
        base[hit == 1 ? 2 * CHUNK + 3 : FROZEN + 3] ^= 1;
        CHECK_EQUAL(pcc_volume_flag(owner->volume, 1, PCC_SLOT_DAMAGED, 0, true), 0);
        if (hit >= 2) { /* and a write fails on the way; for want of space it is tried again */
            for (uint32_t i = 4; i < 6; i++)
                CHECK_EQUAL(payload_chunk(&payload, i), 0);
            CHECK_EQUAL(pcc_save_seal(payload.save), 0);
            while (!payload.save->base_lost)
                CHECK_EQUAL(pcc_saver_step(owner->saver, payload.save->kept_place / 2), 0);
            owner->media->fail_writes = 1;
            owner->media->write_error = hit == 3 ? -ENOSPC : 0;
            run(owner);
            free(payload.memory);
        } else {
            (void)completed(owner, &payload);
        }
        const struct pcc_save_result result = owner_wait(owner, 2);
        if (hit == 1) {
            CHECK_EQUAL(result.end, PCC_SAVE_FAILED);
            CHECK_EQUAL(result.error, -PCC_E_DAMAGED);
            CHECK(result.stage == PCC_STAGE_BASE);
            CHECK(!has(owner->volume, 2));
        } else {
            CHECK_EQUAL(result.end, PCC_SAVE_DURABLE);
            CHECK_EQUAL(result.rehomed, hit == 2 ? 2 : 1);
            CHECK_EQUAL(base_of(owner->volume, 2), 0);
            CHECK_EQUAL(reads(owner->volume, 2, 7), 0);
        }
        const struct payload next = begun(owner, 3, 7, FROZEN); /* nothing uses the damaged one */
        CHECK_EQUAL(pcc_save_base(next.save), hit == 1 ? 0 : 2);
        pcc_save_abort(next.save, -PCC_E_ABORTED);
        run(owner);
        free(next.memory);
        owner_free(owner);
    }
}

static void test_with_threads(void)
{
    struct owner *owner = owner_new(7, 2, 3, 2); /* two kept ones with a base each, three lanes */
    struct payload payloads[3];
    uint64_t tag = 1;

    payloads[0] = begun(owner, tag, 7, FROZEN);
    payload_fill(&payloads[0]);
    (void)owner_wait(owner, tag++);
    free(payloads[0].memory);
    for (uint32_t round = 0; round < 50; round++) {
        while (in_flight(owner) > 0) /* an end is told before its lane is free */
            (void)sched_yield();
        for (uint32_t i = 0; i < 3; i++) {
            payloads[i] = begun(owner, tag + i, 7 + (round + i) / 20, FROZEN);
            payload_fill(&payloads[i]);
        }
        uint64_t newest = 0;
        for (uint32_t i = 0; i < 3; i++) {
            const struct pcc_save_result result = owner_wait(owner, tag + i);
            CHECK(result.end == PCC_SAVE_DURABLE || result.end == PCC_SAVE_SUPERSEDED);
            newest = result.end == PCC_SAVE_DURABLE ? tag + i : newest;
            free(payloads[i].memory);
        }
        CHECK_EQUAL(newest, tag + 2);
        CHECK_EQUAL(reads(owner->volume, payloads[2].sequence, 7 + (round + 2) / 20), 0);
        tag += 3;
    }
    owner_free(owner);
}

int main(void)
{
    RUN(test_what_has_not_changed_is_not_written);
    RUN(test_it_goes_on_after_an_opening);
    RUN(test_what_has_changed_after_all_is_written);
    RUN(test_what_has_changed_once_is_not_written_for_ever);
    RUN(test_what_all_changes_each_time_gets_few_bases);
    RUN(test_a_base_is_not_taken_where_slots_are_few);
    RUN(test_a_base_in_use_stays);
    RUN(test_damage_of_a_base_is_damage_of_both);
    RUN(test_damage_of_a_base_ends_what_is_not_in_memory);
    RUN(test_damage_outlives_the_checkpoint_that_showed_it);
    RUN(test_without_its_manifest_a_base_is_none);
    RUN(test_a_bad_slot_is_left_with_the_base_kept);
    RUN(test_the_next_daemon_goes_on);
    RUN(test_what_is_offered_and_in_the_base_needs_no_bytes);
    RUN(test_what_is_offered_and_has_changed_is_asked_for);
    RUN(test_what_was_offered_moves_with_the_base);
    RUN(test_what_was_offered_is_rescued_from_a_damaged_base);
    RUN(test_with_threads);
    return 0;
}
