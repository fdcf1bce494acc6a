/* Saves of open length: a bound at the begin, and the length when all of it is there. */
#include <string.h>

#include "save_fixture.h"

#define BOUND (5u * CHUNK)

static struct payload begun(struct owner *owner, uint64_t tag, uint64_t bytes,
                            uint64_t frozen_bytes)
{
    const struct pcc_save_request request = {
        .tag = tag,
        .step = (int64_t)tag,
        .incarnation = 1,
        .world_size = 1,
        .flags = PCC_SLOT_IMAGE | PCC_SLOT_HEALTHY,
        .is_open = true,
        .payload_bytes = BOUND,
        .notes = {.name_base = 1, .name_descents = 2, .name_row = 3},
        .frozen_bytes = frozen_bytes,
    };
    struct payload payload = {.tag = tag, .bytes = bytes};

    payload.chunk_count = (uint32_t)pcc_ceil_div(bytes, CHUNK);
    payload.memory = aligned_alloc(PCC_IO_ALIGN, BOUND);
    CHECK(payload.memory);
    memset(payload.memory, 0, BOUND);
    for (uint64_t i = 0; i < bytes; i++)
        payload.memory[i] = payload_byte(tag, i);
    CHECK_EQUAL(pcc_save_begin(owner->saver, &request, &payload.save, &payload.sequence), 0);
    return payload;
}

static struct pcc_save_length length_of(uint64_t bytes)
{
    return (struct pcc_save_length){.payload_bytes = bytes,
                                    .tree_offset_bytes = bytes / 2,
                                    .tree_bytes = bytes - bytes / 2,
                                    .statistics = {0, bytes / 2 + 1},
                                    .dtypes = {bytes - 1, 1}};
}

static void run(struct owner *owner)
{
    for (uint32_t lane = 0; lane < owner->saver->spec.lanes; lane++)
        while (pcc_saver_step(owner->saver, lane) == 0) {
        }
}

static void close_it(struct owner *owner, struct payload *payload)
{
    const struct pcc_save_length length = length_of(payload->bytes);

    CHECK_EQUAL(pcc_save_seal(payload->save), -EINVAL); /* how long is it? */
    CHECK_EQUAL(pcc_save_set_length(payload->save, &length), 0);
    CHECK_EQUAL(pcc_save_set_length(payload->save, &length), -EINVAL);
    CHECK_EQUAL(pcc_save_seal(payload->save), 0);
    run(owner);
    CHECK_EQUAL(owner_wait(owner, payload->tag).end, PCC_SAVE_DURABLE);
    free(payload->memory);
}

static void check_stored(struct owner *owner, uint64_t sequence, uint64_t bytes)
{
    const struct pcc_save_length length = length_of(bytes);
    struct pcc_load *load;

    CHECK_EQUAL(read_back(owner->volume, sequence, 1), 0);
    CHECK_EQUAL(pcc_load_open(owner->volume, sequence, &load), 0);
    const struct pcc_slot_entry *entry = pcc_load_entry(load);
    const struct pcc_manifest_notes *notes = &pcc_load_manifest(load)->notes;
    CHECK_EQUAL(entry->payload_bytes, bytes);
    CHECK_EQUAL(entry->tree_offset_bytes, length.tree_offset_bytes);
    CHECK_EQUAL(entry->tree_bytes, length.tree_bytes);
    CHECK_EQUAL(entry->flags, PCC_SLOT_IMAGE | PCC_SLOT_HEALTHY);
    CHECK_EQUAL(pcc_load_manifest(load)->kind, 1);
    CHECK(notes->name_base == 1 && notes->name_descents == 2 && notes->name_row == 3);
    CHECK(memcmp(&notes->statistics, &length.statistics, sizeof notes->statistics) == 0);
    CHECK(memcmp(&notes->dtypes, &length.dtypes, sizeof notes->dtypes) == 0);
    pcc_load_close(load);
}

/* From one byte to all of the bound, with and without a short last chunk. */
static void test_every_length_up_to_the_bound(void)
{
    static const uint64_t lengths[] = {1,         4095,          4096,      CHUNK - 1, CHUNK,
                                       CHUNK + 1, 3 * CHUNK + 7, BOUND - 1, BOUND};

    for (uint32_t writers = 0; writers < 3; writers += 2) {
        struct owner *owner = owner_new(4, 2, 2, writers);
        for (uint64_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            struct payload payload = begun(owner, i + 1, lengths[i], 0);
            for (uint32_t k = payload.chunk_count; k > 0; k--) /* the short one first */
                CHECK_EQUAL(payload_chunk(&payload, k - 1), 0);
            if (writers == 0 && i % 2 == 0)
                run(owner); /* written before the length is known */
            if (writers == 0)
                close_it(owner, &payload);
            else {
                const struct pcc_save_length length = length_of(payload.bytes);
                CHECK_EQUAL(pcc_save_set_length(payload.save, &length), 0);
                CHECK_EQUAL(pcc_save_seal(payload.save), 0);
                CHECK_EQUAL(owner_wait(owner, payload.tag).end, PCC_SAVE_DURABLE);
                free(payload.memory);
            }
            check_stored(owner, payload.sequence, lengths[i]);
        }
        owner_free(owner);
    }
}

static int set(struct payload *payload, struct pcc_save_length length)
{
    return pcc_save_set_length(payload->save, &length);
}

static void test_lengths_that_do_not_fit_are_refused(void)
{
    struct owner *owner = owner_new(4, 2, 2, 0);
    struct payload payload = begun(owner, 1, 2 * CHUNK + 10, 0);
    struct pcc_save_length bad = length_of(payload.bytes);

    for (uint32_t i = 0; i < payload.chunk_count; i++)
        CHECK_EQUAL(payload_chunk(&payload, i), 0);
    CHECK_EQUAL(set(&payload, length_of(BOUND + 1)), -EINVAL);
    CHECK_EQUAL(set(&payload, length_of(2 * CHUNK + 9)), -EINVAL);
    CHECK_EQUAL(set(&payload, length_of(2 * CHUNK + 11)), -EINVAL);
    CHECK_EQUAL(set(&payload, length_of(2 * CHUNK)), -EINVAL); /* the third one lies behind it */
    CHECK_EQUAL(set(&payload, length_of(3 * CHUNK + 10)), -EINVAL); /* it is in the middle */
    bad.tree_bytes++;
    CHECK_EQUAL(set(&payload, bad), -EINVAL);
    bad = length_of(payload.bytes);
    bad.statistics.bytes = UINT64_MAX;
    CHECK_EQUAL(set(&payload, bad), -EINVAL);
    bad = length_of(payload.bytes);
    bad.dtypes.offset_bytes++;
    CHECK_EQUAL(set(&payload, bad), -EINVAL);
    bad = (struct pcc_save_length){0};
    CHECK_EQUAL(set(&payload, bad), -EINVAL);
    close_it(owner, &payload);

    /* Known lengths that leave a hole are taken; the seal waits for what lacks. */
    payload = begun(owner, 2, 2 * CHUNK, 0);
    CHECK_EQUAL(payload_chunk(&payload, 1), 0);
    CHECK_EQUAL(set(&payload, length_of(2 * CHUNK)), 0);
    CHECK_EQUAL(pcc_save_seal(payload.save), -EINVAL);
    CHECK_EQUAL(payload_chunk(&payload, 0), 0);
    CHECK_EQUAL(pcc_save_seal(payload.save), 0);
    CHECK_EQUAL(set(&payload, length_of(2 * CHUNK)), -EINVAL);
    run(owner);
    CHECK_EQUAL(owner_wait(owner, 2).end, PCC_SAVE_DURABLE);
    free(payload.memory);

    CHECK_EQUAL(payload_begin(owner, 3, CHUNK, &payload), 0); /* not open */
    CHECK_EQUAL(set(&payload, length_of(CHUNK)), -EINVAL);
    pcc_save_abort(payload.save, -PCC_E_ABORTED);
    run(owner);
    CHECK_EQUAL(set(&payload, length_of(CHUNK)), -PCC_E_ABORTED);
    free(payload.memory);
    owner_free(owner);
}

/* Its bitmap of shared blocks lies behind the checksums of the bound, and then of the length. */
static void test_a_base_is_found_before_the_length_is_known(void)
{
    static const uint64_t lengths[] = {CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5000, BOUND};

    for (uint32_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        struct owner *owner = owner_new(6, 2, 2, 0);
        struct payload first, second;
        struct pcc_load *load;
        CHECK_EQUAL(payload_begin(owner, 1, BOUND, &first), 0);
        payload_fill(&first);
        run(owner);
        CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_DURABLE);
        second = begun(owner, 2, lengths[i], CHUNK);
        memcpy(second.memory, first.memory, CHUNK);
        CHECK_EQUAL(pcc_save_base(second.save), first.sequence);
        for (uint32_t k = second.chunk_count; k > 1; k--)
            CHECK_EQUAL(payload_chunk(&second, k - 1), 0);
        CHECK_EQUAL(payload_offer(&second, 0), 0);
        if (i % 2 == 0)
            run(owner);
        close_it(owner, &second);
        CHECK_EQUAL(pcc_load_open(owner->volume, second.sequence, &load), 0);
        CHECK_EQUAL(pcc_load_own_bytes(load), lengths[i] - CHUNK);
        CHECK_EQUAL(pcc_load_base_of(load, 0, CHUNK), first.sequence);
        CHECK_EQUAL(pcc_load_stream(load, 0, lengths[i], CHUNK, 0, NULL, NULL), 0);
        pcc_load_close(load);
        free(first.memory);
        owner_free(owner);
    }
}

static void test_a_write_error_moves_it(void)
{
    for (uint32_t late = 0; late < 2; late++) {
        struct owner *owner = owner_new(4, 2, 2, 0);
        struct payload payload = begun(owner, 1, 2 * CHUNK + 10, 0);
        for (uint32_t i = 0; i < payload.chunk_count; i++)
            CHECK_EQUAL(payload_chunk(&payload, i), 0);
        owner->media->fail_writes = late == 0;
        run(owner);
        owner->media->fail_writes = late == 1; /* its manifest */
        close_it(owner, &payload);
        CHECK_EQUAL(owner_wait(owner, 1).rehomed, 1);
        check_stored(owner, payload.sequence, payload.bytes);
        owner_free(owner);
    }
}

int main(void)
{
    RUN(test_every_length_up_to_the_bound);
    RUN(test_lengths_that_do_not_fit_are_refused);
    RUN(test_a_base_is_found_before_the_length_is_known);
    RUN(test_a_write_error_moves_it);
    return 0;
}
