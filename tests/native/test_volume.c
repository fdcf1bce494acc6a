/* Records, slots, holds and policy, on a disk in memory. */
#include <string.h>

#include "disk/pcc_load.h"
#include "volume_fixture.h"

static void test_a_new_volume_is_empty_and_free(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    struct pcc_record record;

    pcc_volume_record(volume, &record);
    CHECK_EQUAL(record.record_number, 2);
    CHECK_EQUAL(record.boot_epoch, 1);
    CHECK_EQUAL(record.rank, 3);
    CHECK(record.created_wall_ns > 0);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 4);
    CHECK_EQUAL(pcc_volume_superseding(volume), 0);
    CHECK_EQUAL(pcc_volume_health(volume).valid_replicas, 2);
    CHECK_EQUAL(pcc_volume_health(volume).damaged_records, 0);
    CHECK_EQUAL(pcc_volume_health(volume).repaired_replicas, 0);
    done_with(volume, media);
}

static void test_every_stride_is_found_without_the_first_record(void)
{
    for (uint64_t stride = 4096; stride <= 1 << 20; stride *= 2) {
        struct pcc_volume_spec spec = spec_of(3, 1);
        struct pcc_geometry geometry;
        struct pcc_volume *volume;
        uint64_t sequence = 0;

        spec.record_stride_bytes = stride;
        CHECK_EQUAL(pcc_geometry_plan(CAPACITY, 3, BLOCK, stride, &geometry), 0);
        struct memory_io *media = memory_new(geometry.volume_bytes);
        CHECK_EQUAL(pcc_volume_format(&media->io, &spec), 0);
        volume = opened(media);
        CHECK_EQUAL(publish_next(volume, &sequence), 0);
        pcc_volume_close(volume);
        memset(media->bytes, 0xee, 4096);
        memset(media->bytes + stride, 0xee, 4096);
        volume = opened(media); /* record 3: generation 1; both heads are gone */
        CHECK_EQUAL(pcc_volume_superseding(volume), sequence);
        CHECK_EQUAL(pcc_volume_health(volume).valid_replicas, 1);
        CHECK_EQUAL(pcc_volume_health(volume).repaired_replicas, 1);
        CHECK_EQUAL(pcc_volume_health(volume).damaged_records, 2);
        pcc_volume_close(volume);
        volume = opened(media);
        CHECK_EQUAL(pcc_volume_health(volume).damaged_records, 0);
        done_with(volume, media);
    }
}

/* Both replicas, as two bad sectors or a stray write would leave them. */
static void damage_generation(struct memory_io *media, struct pcc_volume *volume,
                              uint32_t generation)
{
    const struct pcc_geometry geometry = pcc_volume_geometry(volume);

    for (uint32_t replica = 0; replica < PCC_REPLICAS; replica++)
        memset(media->bytes + pcc_geometry_record_offset(&geometry, generation, replica), 0xee,
               512);
}

static bool tells_of_a_lost_record(struct memory_io *media, bool writable, uint64_t *newest_out)
{
    struct pcc_volume *volume;
    struct pcc_record record;

    CHECK_EQUAL(pcc_volume_open_io(&media->io, writable, &volume), 0);
    pcc_volume_record(volume, &record);
    *newest_out = pcc_volume_superseding(volume);
    pcc_volume_close(volume);
    return record.record_lost != 0;
}

static void test_a_lost_record_is_told_until_the_next_checkpoint(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    struct pcc_record record;
    uint64_t first, second, newest;

    CHECK_EQUAL(publish_next(volume, &first), 0);
    CHECK_EQUAL(publish_next(volume, &second), 0);
    pcc_volume_record(volume, &record);
    CHECK_EQUAL(record.record_lost, 0);
    damage_generation(media, volume, record.generation);
    pcc_volume_close(volume);
    CHECK(tells_of_a_lost_record(media, false, &newest));
    CHECK_EQUAL(newest, first);
    CHECK(tells_of_a_lost_record(media, true, &newest));
    CHECK(tells_of_a_lost_record(media, true, &newest)); /* its place was written since */
    CHECK(tells_of_a_lost_record(media, false, &newest));
    CHECK_EQUAL(newest, first);
    volume = opened(media);
    CHECK_EQUAL(publish_next(volume, &second), 0);
    pcc_volume_record(volume, &record);
    CHECK_EQUAL(record.record_lost, 0);
    pcc_volume_close(volume);
    CHECK(!tells_of_a_lost_record(media, true, &newest));
    CHECK_EQUAL(newest, second);
    memory_free(media);
}

static void test_a_first_opening_that_was_cut_off_lost_nothing(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume;
    uint64_t newest;

    CHECK(!tells_of_a_lost_record(media, false, &newest));
    memset(media->bytes, 0xee, 512); /* a torn replica A of record 2 */
    CHECK(!tells_of_a_lost_record(media, false, &newest));
    CHECK_EQUAL(pcc_volume_open_io(&media->io, false, &volume), 0);
    damage_generation(media, volume, 0);
    pcc_volume_close(volume);
    CHECK(tells_of_a_lost_record(media, true, &newest));
    memory_free(media);
}

static void test_what_is_no_volume_says_so(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume;
    struct pcc_record record;

    memory_of(&media->io)->io.size_bytes -= 8192; /* the last record and its padding */
    CHECK_EQUAL(pcc_volume_open_io(&media->io, false, &volume), -PCC_E_TRUNCATED);
    media->io.size_bytes = 0;
    CHECK_EQUAL(pcc_volume_open_io(&media->io, false, &volume), -PCC_E_NOT_A_VOLUME);
    memory_free(media);

    media = memory_new(1 << 20);
    CHECK_EQUAL(pcc_volume_open_io(&media->io, true, &volume), -PCC_E_NOT_A_VOLUME);
    CHECK_EQUAL(media->durables, 0);
    media->fail_reads = -1;
    CHECK_EQUAL(pcc_volume_open_io(&media->io, true, &volume), -EIO);
    memory_free(media);

    media = formatted(4, 2);
    volume = opened(media);
    const struct pcc_geometry geometry = pcc_volume_geometry(volume);
    pcc_volume_close(volume);
    for (uint32_t generation = 0; generation < 2; generation++)
        for (uint32_t replica = 0; replica < 2; replica++)
            media->bytes[pcc_geometry_record_offset(&geometry, generation, replica) + 100] ^= 1;
    CHECK_EQUAL(pcc_volume_open_io(&media->io, true, &volume), -PCC_E_DAMAGED);
    memory_free(media);

    media = formatted(4, 2);
    memcpy(&record, media->bytes + 8192, sizeof record); /* record 1: generation 1 */
    record.format_version = PCC_FORMAT_VERSION + 1;
    pcc_record_seal(&record, 1, 0);
    memcpy(media->bytes + 8192, &record, sizeof record);
    CHECK_EQUAL(pcc_volume_open_io(&media->io, true, &volume), -PCC_E_NEWER_FORMAT);
    memory_free(media);
}

/* A reader that does not know the flag must not take the record before for the newest one. */
static void test_an_unknown_flag_of_the_newest_record_refuses_the_volume(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    struct pcc_record record;
    uint64_t sequence = 0;

    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    pcc_volume_record(volume, &record);
    pcc_volume_close(volume);
    for (uint32_t slot = 0; slot < record.slot_count; slot++)
        if (record.slots[slot].state == PCC_SLOT_DURABLE)
            record.slots[slot].flags = 1u << 15;
    for (uint32_t replica = 0; replica < 2; replica++) {
        pcc_record_seal(&record, record.generation, replica);
        memcpy(media->bytes + record.offset_bytes, &record, sizeof record);
    }
    CHECK_EQUAL(pcc_volume_open_io(&media->io, false, &volume), -PCC_E_UNKNOWN_FLAG);
    CHECK_EQUAL(pcc_volume_open_io(&media->io, true, &volume), -PCC_E_UNKNOWN_FLAG);
    memory_free(media);
}

static void test_a_base_in_another_volume_is_listed_and_not_read(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    const struct pcc_geometry geometry = pcc_volume_geometry(volume);
    const struct pcc_manifest_notes notes = {.base_volume = {7}};
    _Alignas(PCC_IO_ALIGN) uint8_t manifest[PCC_IO_ALIGN] = {0};
    const uint64_t checksums[1] = {0};
    struct pcc_record record;
    struct pcc_base base;
    struct pcc_load *load;
    enum pcc_published published;
    uint32_t slot;

    pcc_volume_record(volume, &record);
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    struct pcc_slot_entry entry = entry_of(pcc_volume_take_sequence(volume, 5));
    entry.flags = PCC_SLOT_FOREIGN | PCC_SLOT_OFFERED | PCC_SLOT_NOT_FINITE;
    entry.base_sequence = 9;
    pcc_manifest_seal(manifest, &record, slot, &notes, checksums, &entry);
    memcpy(media->bytes + pcc_geometry_slot_offset(&geometry, slot) + 4096, manifest, 4096);
    CHECK_EQUAL(pcc_volume_publish(volume, slot, &entry, &published, NULL, NULL), 0);
    CHECK_EQUAL(published, PCC_PUBLISHED);
    CHECK(has(volume, 5));
    CHECK_EQUAL(pcc_load_open(volume, 5, &load), -PCC_E_FOREIGN_BASE);
    CHECK(!pcc_volume_take_base(volume, &base)); /* the next save shares nothing with it */
    pcc_volume_close(volume);
    volume = opened(media);
    pcc_volume_record(volume, &record);
    CHECK_EQUAL(record.slots[slot].flags, entry.flags);
    CHECK_EQUAL(pcc_load_open(volume, 5, &load), -PCC_E_FOREIGN_BASE);
    done_with(volume, media);
}

static void test_a_start_and_a_promise_are_kept(void)
{
    static const uint8_t start[PCC_UUID_BYTES] = {1, 2, 3};
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    struct pcc_promise promise = {.number = 8, .start_id = {9}, .list_digest = {10}};
    struct pcc_record record;
    uint8_t found[PCC_UUID_BYTES];
    uint64_t sequence = 0;

    CHECK_EQUAL(pcc_volume_begin_incarnation(volume, 4, start, 1), 0);
    CHECK_EQUAL(pcc_volume_promise(volume, &promise), 0);
    CHECK_EQUAL(pcc_volume_promise(volume, &promise), -EINVAL);
    promise.start_id[0] = 8; /* of equal numbers the id decides */
    CHECK_EQUAL(pcc_volume_promise(volume, &promise), -EINVAL);
    promise.start_id[0] = 9;
    promise.start_id[15] = 1;
    CHECK_EQUAL(pcc_volume_promise(volume, &promise), 0);
    promise.number = 7;
    promise.start_id[0] = 200;
    CHECK_EQUAL(pcc_volume_promise(volume, &promise), -EINVAL);
    promise.number = 0;
    CHECK_EQUAL(pcc_volume_promise(volume, &promise), -EINVAL);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    pcc_volume_close(volume);
    volume = opened(media);
    pcc_volume_record(volume, &record);
    CHECK(memcmp(record.start_id, start, sizeof start) == 0);
    CHECK(record.promise.number == 8 && record.promise.start_id[0] == 9 &&
          record.promise.start_id[15] == 1 && record.promise.list_digest[0] == 10);
    pcc_volume_start_id(volume, 4, found);
    CHECK(memcmp(found, start, sizeof start) == 0);
    pcc_volume_start_id(volume, 3, found); /* only its checkpoints know */
    CHECK(memcmp(found, NO_ID, sizeof found) == 0);
    done_with(volume, media);
}

static void test_an_unreadable_newest_record_is_not_written_over(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t sequence = 0;

    CHECK_EQUAL(publish_next(volume, &sequence), 0); /* record 3: generation 1 */
    pcc_volume_close(volume);
    const int durables = media->durables;
    /* Position 0 tells the geometry, generation 0 is read, and generation 1 cannot be. */
    media->fail_reads_after = 4;
    CHECK_EQUAL(pcc_volume_open_io(&media->io, true, &volume), -EIO);
    CHECK_EQUAL(media->durables, durables);
    media->fail_reads_after = 0;
    volume = opened(media);
    CHECK_EQUAL(pcc_volume_superseding(volume), sequence);
    done_with(volume, media);
}

static void test_keep_newest_and_reuse_the_rest(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t sequence = 0;

    for (int i = 0; i < 20; i++) {
        CHECK_EQUAL(publish_next(volume, &sequence), 0);
        CHECK_EQUAL(table_size(volume), i == 0 ? 1 : 2);
        CHECK_EQUAL(pcc_volume_free_slots(volume), i == 0 ? 3 : 2);
        CHECK(has(volume, sequence));
        CHECK(i == 0 || has(volume, sequence - 1));
        CHECK(!has(volume, sequence - 2));
    }
    pcc_volume_close(volume);
    volume = opened(media);
    CHECK(has(volume, sequence) && has(volume, sequence - 1));
    CHECK_EQUAL(pcc_volume_take_sequence(volume, 0), sequence + 1);
    done_with(volume, media);
}

static void test_an_older_one_is_superseded(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint32_t slots[2];
    enum pcc_published superseded;

    CHECK_EQUAL(pcc_volume_take_slot(volume, &slots[0]), 0);
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slots[1]), 0);
    const struct pcc_slot_entry older = entry_of(pcc_volume_take_sequence(volume, 0));
    const struct pcc_slot_entry newer = entry_of(pcc_volume_take_sequence(volume, 0));
    CHECK_EQUAL(pcc_volume_publish(volume, slots[1], &newer, &superseded, NULL, NULL), 0);
    CHECK(!superseded);
    const int durables = media->durables;
    CHECK_EQUAL(pcc_volume_publish(volume, slots[0], &older, &superseded, NULL, NULL), 0);
    CHECK(superseded);
    CHECK_EQUAL(media->durables, durables);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 3);
    done_with(volume, media);
}

static void test_flags_keep_what_policy_wants_but_leave_a_slot(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t sequence, first;

    CHECK_EQUAL(publish_next(volume, &first), 0);
    CHECK_EQUAL(pcc_volume_flag(volume, 99, PCC_SLOT_PROTECTED, 0, false), -ENOENT);
    CHECK_EQUAL(pcc_volume_flag(volume, first, PCC_SLOT_QUARANTINED, 0, false), -EINVAL);
    CHECK_EQUAL(pcc_volume_flag(volume, first, PCC_SLOT_PROTECTED, 0, false), 0);
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(publish_next(volume, &sequence), 0);
        CHECK(has(volume, first));
    }
    CHECK_EQUAL(table_size(volume), 3);
    /* A second flagged one: with the newest two that would be all four slots, so one goes. */
    CHECK_EQUAL(pcc_volume_flag(volume, sequence - 1, PCC_SLOT_PROTECTED, 0, false), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(table_size(volume), 3);
    CHECK(has(volume, first) && has(volume, sequence) && has(volume, sequence - 3));
    CHECK(!has(volume, sequence - 1));
    CHECK_EQUAL(pcc_volume_flag(volume, sequence, PCC_SLOT_PROTECTED, 0, false), 0);
    CHECK_EQUAL(publish_next(volume, &sequence),
                0); /* three flagged, the newest: no slot is left */
    CHECK_EQUAL(publish_next(volume, &sequence), -PCC_E_NO_SLOT);
    done_with(volume, media);
}

static void test_a_spared_one_stays_until_it_is_spared_no_longer(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t first, second, last;

    CHECK_EQUAL(publish_next(volume, &first), 0);
    CHECK_EQUAL(pcc_volume_spare(volume, first + 1, true), -ENOENT);
    CHECK_EQUAL(pcc_volume_spare(volume, first, true), 0);
    CHECK_EQUAL(publish_next(volume, &second), 0);
    CHECK_EQUAL(pcc_volume_spare(volume, second, true), 0);
    CHECK_EQUAL(publish_next(volume, &last), 0);
    CHECK_EQUAL(publish_next(volume, &last), 0);
    CHECK(has(volume, first) && has(volume, second) && table_size(volume) == 4);
    CHECK(!pcc_volume_has_expendable(volume)); /* a reader's lease holds the last slots */
    CHECK_EQUAL(publish_next(volume, &last), -PCC_E_NO_SLOT);
    CHECK_EQUAL(pcc_volume_spare(volume, first, false), 0);
    CHECK(pcc_volume_has_expendable(volume));
    CHECK_EQUAL(pcc_volume_recycle(volume), 0);
    CHECK(!has(volume, first) && has(volume, second));
    CHECK_EQUAL(pcc_volume_spare(volume, first, true), -ENOENT); /* it is gone */
    CHECK_EQUAL(pcc_volume_finish(volume, 1), 0);
    CHECK(has(volume, second) && table_size(volume) == 2);
    pcc_volume_close(volume);
    volume = opened(media); /* nothing of it is on the media */
    CHECK_EQUAL(publish_next(volume, &last), 0);
    CHECK(!has(volume, second));
    done_with(volume, media);
}

/* A rank of a group of two: nothing of it goes before the group has said so. */
static struct pcc_volume *grouped(struct memory_io *media)
{
    struct pcc_volume *volume = opened(media);

    CHECK_EQUAL(pcc_volume_begin_incarnation(volume, 1, NO_ID, 2), 0);
    return volume;
}

static void agree(struct pcc_volume *volume, uint64_t oldest, uint64_t newest, uint64_t given_up)
{
    struct pcc_volume_group group = {.oldest = oldest, .newest = newest};

    if (given_up != 0)
        group.given_up[group.given_up_count++] = given_up;
    CHECK_EQUAL(pcc_volume_set_group(volume, &group), 0);
}

static void test_a_group_keeps_what_the_others_may_still_need(void)
{
    struct memory_io *media = formatted(4, 1);
    struct pcc_volume *volume = grouped(media);
    uint64_t one, two, three, four;

    CHECK_EQUAL(publish_next(volume, &one), 0);
    CHECK_EQUAL(publish_next(volume, &two), 0);
    CHECK_EQUAL(publish_next(volume, &three), 0);
    CHECK_EQUAL(publish_next(volume, &four), 0);
    CHECK_EQUAL(publish_next(volume, &four), -PCC_E_NO_SLOT);
    CHECK_EQUAL(table_size(volume), 4);
    CHECK(!pcc_volume_has_expendable(volume));
    agree(volume, two, two, 0); /* the others have the second by now */
    CHECK(pcc_volume_has_expendable(volume));
    CHECK_EQUAL(pcc_volume_recycle(volume), 0);
    CHECK(!has(volume, one) && has(volume, two) && has(volume, three) && has(volume, four));
    agree(volume, two, two, three); /* one of them has failed at the third */
    CHECK_EQUAL(pcc_volume_recycle(volume), 0);
    CHECK(has(volume, two) && !has(volume, three) && has(volume, four));
    CHECK_EQUAL(pcc_volume_finish(volume, 1), 0);
    CHECK(has(volume, two) && has(volume, four));
    CHECK_EQUAL(pcc_volume_set_group(volume, &(struct pcc_volume_group){.oldest = 2, .newest = 1}),
                -EINVAL);
    /* The next run is a single process: its newest `keep` count. */
    CHECK_EQUAL(pcc_volume_begin_incarnation(volume, 2, NO_ID, 1), 0);
    CHECK_EQUAL(publish_next(volume, &one), 0);
    CHECK_EQUAL(table_size(volume), 1);
    done_with(volume, media);
}

static void test_a_group_publishes_in_any_order_above_its_newest(void)
{
    struct memory_io *media = formatted(4, 1);
    struct pcc_volume *volume = grouped(media);
    struct pcc_slot_entry entries[4];
    uint32_t slots[4];
    enum pcc_published superseded;

    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(pcc_volume_take_slot(volume, &slots[i]), 0);
        entries[i] = entry_of(pcc_volume_take_sequence(volume, (uint64_t)(10 + 2 * i)));
        CHECK_EQUAL(entries[i].sequence, (uint64_t)(10 + 2 * i));
    }
    CHECK_EQUAL(pcc_volume_take_sequence(volume, 16), 0); /* given out already */
    CHECK_EQUAL(pcc_volume_publish(volume, slots[2], &entries[2], &superseded, NULL, NULL), 0);
    CHECK(!superseded);
    CHECK_EQUAL(pcc_volume_superseding(volume), 0);
    CHECK_EQUAL(pcc_volume_publish(volume, slots[1], &entries[1], &superseded, NULL, NULL), 0);
    CHECK(!superseded && has(volume, 12) && has(volume, 14));
    agree(volume, 12, 12, 16);
    CHECK_EQUAL(pcc_volume_superseding(volume), 12);
    CHECK_EQUAL(pcc_volume_publish(volume, slots[0], &entries[0], &superseded, NULL, NULL), 0);
    CHECK(superseded == PCC_PUBLISH_SUPERSEDED && !has(volume, 10));
    CHECK(pcc_volume_gives_up(volume, 16) && !pcc_volume_gives_up(volume, 14));
    CHECK_EQUAL(pcc_volume_publish(volume, slots[3], &entries[3], &superseded, NULL, NULL), 0);
    CHECK(superseded == PCC_PUBLISH_GIVEN_UP && !has(volume, 16));
    CHECK_EQUAL(pcc_volume_free_slots(volume), 2);
    done_with(volume, media);
}

static enum pcc_published publish_of(struct pcc_volume *volume, uint64_t sequence,
                                     uint32_t world_size)
{
    struct pcc_slot_entry entry = entry_of(pcc_volume_take_sequence(volume, sequence));
    enum pcc_published published;
    uint32_t slot;

    entry.world_size = world_size;
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    CHECK_EQUAL(pcc_volume_publish(volume, slot, &entry, &published, NULL, NULL), 0);
    return published;
}

static void test_one_rank_after_several_obeys_the_group_until_it_has_its_own(void)
{
    struct memory_io *media = formatted(4, 1);
    struct pcc_volume *volume = grouped(media);

    CHECK_EQUAL(publish_of(volume, 1, 2), PCC_PUBLISHED);
    agree(volume, 1, 1, 0);
    CHECK_EQUAL(pcc_volume_begin_incarnation(volume, 2, NO_ID, 1), 0);
    CHECK_EQUAL(publish_of(volume, 2, 2), PCC_PUBLISHED); /* in flight: the others lack it yet */
    CHECK(has(volume, 1) && has(volume, 2));
    agree(volume, 1, 1, 2); /* and never get it */
    CHECK_EQUAL(pcc_volume_recycle(volume), 0);
    CHECK(has(volume, 1) && !has(volume, 2));
    CHECK_EQUAL(publish_of(volume, 4, 1), PCC_PUBLISHED);
    CHECK(has(volume, 1) && has(volume, 4));
    agree(volume, 4, 4, 0);
    CHECK_EQUAL(publish_of(volume, 6, 1), PCC_PUBLISHED);
    CHECK_EQUAL(table_size(volume), 2); /* from now on it decides by itself */
    CHECK_EQUAL(publish_of(volume, 7, 1), PCC_PUBLISHED);
    CHECK_EQUAL(table_size(volume), 1);
    agree(volume, 7, 7, 8);
    CHECK_EQUAL(publish_of(volume, 8, 2), PCC_PUBLISH_GIVEN_UP);
    done_with(volume, media);
}

static void test_what_the_user_pinned_stays_over_a_restart_until_it_is_unpinned(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t kept = 0, sequence = 0;

    CHECK_EQUAL(publish_next(volume, &kept), 0);
    CHECK_EQUAL(pcc_volume_flag(volume, kept, PCC_SLOT_PINNED, 0, true), 0);
    for (int i = 0; i < 5; i++)
        CHECK_EQUAL(publish_next(volume, &sequence), 0);
    pcc_volume_close(volume);
    volume = opened(media);
    for (int i = 0; i < 5; i++)
        CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK(has(volume, kept) && has(volume, sequence));
    CHECK_EQUAL(pcc_volume_finish(volume, 1), 0); /* nor does the end of the job take it */
    CHECK(has(volume, kept) && has(volume, sequence) && !has(volume, sequence - 1));
    CHECK_EQUAL(pcc_volume_flag(volume, kept, 0, PCC_SLOT_PINNED, true), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK(!has(volume, kept));
    done_with(volume, media);
}

static void test_a_full_volume_of_a_group_gives_away_its_oldest_common_one(void)
{
    struct memory_io *media = formatted(3, 2);
    struct pcc_volume *volume = grouped(media);
    uint64_t pinned, older, newest, next;

    CHECK_EQUAL(publish_next(volume, &pinned), 0);
    CHECK_EQUAL(pcc_volume_flag(volume, pinned, PCC_SLOT_PROTECTED, 0, false), 0);
    CHECK_EQUAL(publish_next(volume, &older), 0);
    CHECK_EQUAL(publish_next(volume, &newest), 0);
    CHECK_EQUAL(publish_next(volume, &next), -PCC_E_NO_SLOT);
    agree(volume, older, older, 0);
    CHECK(!pcc_volume_has_expendable(volume)); /* the newest may become common */
    agree(volume, older, newest, 0);
    CHECK_EQUAL(pcc_volume_recycle(volume), 0); /* else none of the group could go on */
    CHECK(has(volume, pinned) && !has(volume, older) && has(volume, newest));
    done_with(volume, media);
}

static void test_damage_is_recorded_and_does_not_count(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t good, bad, next;

    CHECK_EQUAL(publish_next(volume, &good), 0);
    CHECK_EQUAL(publish_next(volume, &bad), 0);
    CHECK_EQUAL(pcc_volume_flag(volume, bad, PCC_SLOT_DAMAGED, 0, true), 0);
    CHECK_EQUAL(pcc_volume_superseding(volume), good);
    CHECK_EQUAL(publish_next(volume, &next), 0);
    CHECK(has(volume, good) && has(volume, next) && !has(volume, bad));
    /* A flag taken back again, staged only: the older one may not become the newest. */
    CHECK_EQUAL(pcc_volume_flag(volume, next, PCC_SLOT_DAMAGED, 0, true), 0);
    uint32_t slot;
    enum pcc_published superseded;
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    CHECK_EQUAL(pcc_volume_flag(volume, next, 0, PCC_SLOT_DAMAGED, false), 0);
    const struct pcc_slot_entry older = entry_of(bad);
    CHECK_EQUAL(pcc_volume_publish(volume, slot, &older, &superseded, NULL, NULL), 0);
    CHECK(superseded);
    done_with(volume, media);
}

static void test_a_held_slot_is_freed_at_release(void)
{
    struct memory_io *media = formatted(4, 1);
    struct pcc_volume *volume = opened(media);
    struct pcc_held first, second, none;
    uint64_t sequence, held;
    uint32_t other;

    CHECK_EQUAL(publish_next(volume, &held), 0);
    CHECK_EQUAL(pcc_volume_hold(volume, held, &first), 0);
    CHECK_EQUAL(pcc_volume_hold(volume, held, &second), 0);
    CHECK_EQUAL(first.entry.step, (int64_t)held * 10);
    CHECK_EQUAL(first.slot, second.slot);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(pcc_volume_hold(volume, held, &none), -ENOENT);
    for (int i = 0; i < 6; i++) {
        CHECK_EQUAL(pcc_volume_take_slot(volume, &other), 0);
        CHECK(other != first.slot);
        pcc_volume_return_slot(volume, other);
    }
    CHECK_EQUAL(pcc_volume_free_slots(volume), 2);
    pcc_volume_release(volume, &first);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 2);
    pcc_volume_release(volume, &second);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 3);
    done_with(volume, media);
}

static int acknowledged;
static void on_durable(void *context)
{
    (void)context;
    acknowledged++;
}

static void test_a_failed_record_stops_the_volume(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t first, sequence;
    uint32_t slot;
    enum pcc_published superseded;

    CHECK_EQUAL(publish_next(volume, &first), 0);
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    const struct pcc_slot_entry entry = entry_of(pcc_volume_take_sequence(volume, 0));
    media->fail_durables = 1;
    CHECK_EQUAL(pcc_volume_publish(volume, slot, &entry, &superseded, on_durable, NULL), -EIO);
    CHECK_EQUAL(acknowledged, 0);
    CHECK(pcc_volume_stopped(volume));
    const int durables = media->durables;
    CHECK_EQUAL(publish_next(volume, &sequence), -PCC_E_STOPPED);
    CHECK_EQUAL(pcc_volume_flag(volume, first, PCC_SLOT_PROTECTED, 0, true), -PCC_E_STOPPED);
    CHECK_EQUAL(pcc_volume_finish(volume, 1), -PCC_E_STOPPED);
    CHECK_EQUAL(media->durables, durables);
    CHECK(has(volume, first)); /* reads go on */
    pcc_volume_close(volume);
    volume = opened(media);
    CHECK(has(volume, first));
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    done_with(volume, media);
}

static struct memory_io *armed;
static void arm(void *context)
{
    (void)context;
    armed->fail_durables = 1;
}

static void test_a_failed_second_replica_is_durable_but_stops(void)
{
    struct memory_io *media = formatted(4, 1);
    struct pcc_volume *volume = opened(media);
    uint64_t first;
    uint32_t slot;
    enum pcc_published superseded;

    CHECK_EQUAL(publish_next(volume, &first), 0);
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    const struct pcc_slot_entry entry = entry_of(pcc_volume_take_sequence(volume, 0));
    armed = media;
    CHECK_EQUAL(pcc_volume_publish(volume, slot, &entry, &superseded, arm, NULL), -EIO);
    CHECK(pcc_volume_stopped(volume));
    CHECK_EQUAL(pcc_volume_superseding(volume), entry.sequence);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 2); /* the first one's slot is not free */
    pcc_volume_close(volume);
    volume = opened(media);
    CHECK_EQUAL(pcc_volume_superseding(volume), entry.sequence);
    CHECK_EQUAL(pcc_volume_health(volume).valid_replicas, 1);
    CHECK_EQUAL(pcc_volume_health(volume).repaired_replicas, 1);
    done_with(volume, media);
}

/* Errors cost nothing that is kept: slots that met them are used again when nothing else is left.
 */
/* The older one is the only good one, from the moment on in which damage is known. */
static void test_what_is_being_flagged_supersedes_nothing(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    const uint64_t older = pcc_volume_take_sequence(volume, 0);
    uint64_t newer = 0;
    uint32_t slot;
    enum pcc_published superseded = PCC_PUBLISH_SUPERSEDED;

    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    CHECK_EQUAL(publish_next(volume, &newer), 0);
    CHECK_EQUAL(pcc_volume_superseding(volume), newer);
    CHECK_EQUAL(pcc_volume_flag(volume, newer, PCC_SLOT_DAMAGED, 0, false), 0);
    CHECK_EQUAL(pcc_volume_superseding(volume), 0);
    const struct pcc_slot_entry entry = entry_of(older);
    CHECK_EQUAL(pcc_volume_publish(volume, slot, &entry, &superseded, NULL, NULL), 0);
    CHECK(!superseded);
    CHECK_EQUAL(pcc_volume_superseding(volume), older);
    CHECK_EQUAL(table_size(volume), 2);
    done_with(volume, media);
}

static void test_quarantine_lasts_until_nothing_is_left(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t sequence = 0;
    uint32_t slot, other;

    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    pcc_volume_quarantine_slot(volume, slot);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    pcc_volume_close(volume);
    volume = opened(media);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 2);
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    CHECK_EQUAL(pcc_volume_take_slot(volume, &other), 0);
    CHECK_EQUAL(pcc_volume_take_slot(volume, &other), -PCC_E_NO_SLOT); /* two will come back */
    pcc_volume_return_slot(volume, other);
    pcc_volume_quarantine_slot(volume, slot);
    CHECK_EQUAL(pcc_volume_publish_staged(volume), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(table_size(volume), 2); /* two are kept, two in quarantine */
    CHECK(!pcc_volume_has_expendable(volume));
    for (uint32_t round = 0; round < 3; round++) {
        CHECK_EQUAL(pcc_volume_free_slots(volume), 0);
        CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0); /* forgiven, both of them */
        CHECK_EQUAL(pcc_volume_take_slot(volume, &other), 0);
        pcc_volume_quarantine_slot(volume, slot);
        pcc_volume_quarantine_slot(volume, other);
        CHECK_EQUAL(table_size(volume), 2);
    }
    pcc_volume_close(volume);
    volume = opened(media);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(table_size(volume), 2);
    done_with(volume, media);
}

/* The slot of one that need not be kept is a good one. */
static void test_quarantine_lasts_while_something_is_expendable(void)
{
    struct memory_io *media = formatted(4, 2);
    struct pcc_volume *volume = opened(media);
    uint64_t first = 0, sequence = 0;
    uint32_t slot;

    CHECK_EQUAL(publish_next(volume, &first), 0);
    CHECK_EQUAL(pcc_volume_flag(volume, first, PCC_SLOT_PROTECTED, 0, true), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    pcc_volume_quarantine_slot(volume, slot);
    CHECK_EQUAL(pcc_volume_flag(volume, first, 0, PCC_SLOT_PROTECTED, false), 0);
    CHECK(pcc_volume_has_expendable(volume));
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), -PCC_E_NO_SLOT);
    CHECK_EQUAL(pcc_volume_recycle(volume), 0);
    CHECK(!has(volume, first));
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    done_with(volume, media);
}

static void test_a_full_volume_lets_go_of_what_lost_its_flag(void)
{
    struct memory_io *media = formatted(2, 1);
    struct pcc_volume *volume = opened(media);
    uint64_t first = 0, sequence = 0;

    CHECK_EQUAL(publish_next(volume, &first), 0);
    CHECK_EQUAL(pcc_volume_flag(volume, first, PCC_SLOT_PROTECTED, 0, false), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(pcc_volume_recycle(volume), 0);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 0);
    CHECK_EQUAL(pcc_volume_flag(volume, first, 0, PCC_SLOT_PROTECTED, false), 0);
    CHECK_EQUAL(pcc_volume_recycle(volume), 0);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 1);
    done_with(volume, media);
}

struct under_way {
    struct pcc_volume *volume;
    bool has_slot, has_expendable, is_full;
};

static void look_at_record(void *context)
{
    struct under_way *seen = context;

    seen->has_slot = pcc_volume_free_slots(seen->volume) > 0;
    seen->has_expendable = pcc_volume_has_expendable(seen->volume);
    seen->is_full = pcc_volume_is_full(seen->volume);
}

/* What a save has, or the record under way gives back, becomes free. */
static void test_a_volume_is_full_once_no_slot_becomes_free(void)
{
    struct memory_io *media = formatted(2, 1);
    struct pcc_volume *volume = opened(media);
    struct under_way seen = {.volume = volume, .has_slot = true};
    enum pcc_published published;
    uint64_t first = 0, sequence = 0;
    uint32_t slot;

    CHECK_EQUAL(publish_next(volume, &first), 0);
    CHECK(!pcc_volume_is_full(volume));
    CHECK_EQUAL(pcc_volume_take_slot(volume, &slot), 0);
    CHECK(!pcc_volume_has_expendable(volume) && !pcc_volume_is_full(volume));
    const struct pcc_slot_entry entry = entry_of(pcc_volume_take_sequence(volume, 0));
    CHECK_EQUAL(pcc_volume_publish(volume, slot, &entry, &published, look_at_record, &seen), 0);
    CHECK(!has(volume, first) && !seen.has_slot && !seen.has_expendable && !seen.is_full);
    CHECK_EQUAL(pcc_volume_flag(volume, entry.sequence, PCC_SLOT_PROTECTED, 0, false), 0);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK(pcc_volume_is_full(volume));
    CHECK_EQUAL(pcc_volume_flag(volume, entry.sequence, 0, PCC_SLOT_PROTECTED, false), 0);
    CHECK(!pcc_volume_is_full(volume));
    done_with(volume, media);
}

static void test_incarnation_and_done(void)
{
    struct memory_io *media = formatted(6, 2);
    struct pcc_volume *volume = opened(media);
    struct pcc_record record;
    uint64_t sequence = 0;

    for (int i = 0; i < 3; i++)
        CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(pcc_volume_begin_incarnation(volume, 5, NO_ID, 1), 0);
    CHECK_EQUAL(pcc_volume_finish(volume, 0), -EINVAL);
    CHECK_EQUAL(pcc_volume_finish(volume, 1), 0);
    CHECK_EQUAL(table_size(volume), 1);
    CHECK_EQUAL(pcc_volume_free_slots(volume), 5);
    pcc_volume_close(volume);
    CHECK_EQUAL(pcc_volume_open_io(&media->io, false, &volume), 0);
    pcc_volume_record(volume, &record);
    CHECK_EQUAL(record.done, 1);
    CHECK_EQUAL(record.incarnation, 5);
    CHECK_EQUAL(record.world_size, 1);
    CHECK_EQUAL(pcc_volume_finish(volume, 1), -EROFS);
    CHECK_EQUAL(pcc_volume_spare(volume, sequence, true), -EROFS);
    CHECK_EQUAL(pcc_volume_flag(volume, sequence, PCC_SLOT_PROTECTED, 0, true), -EROFS);
    done_with(volume, media);
}

int main(void)
{
    RUN(test_a_new_volume_is_empty_and_free);
    RUN(test_an_unknown_flag_of_the_newest_record_refuses_the_volume);
    RUN(test_a_base_in_another_volume_is_listed_and_not_read);
    RUN(test_a_start_and_a_promise_are_kept);
    RUN(test_every_stride_is_found_without_the_first_record);
    RUN(test_a_lost_record_is_told_until_the_next_checkpoint);
    RUN(test_a_first_opening_that_was_cut_off_lost_nothing);
    RUN(test_what_is_no_volume_says_so);
    RUN(test_an_unreadable_newest_record_is_not_written_over);
    RUN(test_keep_newest_and_reuse_the_rest);
    RUN(test_an_older_one_is_superseded);
    RUN(test_flags_keep_what_policy_wants_but_leave_a_slot);
    RUN(test_a_spared_one_stays_until_it_is_spared_no_longer);
    RUN(test_a_group_keeps_what_the_others_may_still_need);
    RUN(test_a_group_publishes_in_any_order_above_its_newest);
    RUN(test_one_rank_after_several_obeys_the_group_until_it_has_its_own);
    RUN(test_what_the_user_pinned_stays_over_a_restart_until_it_is_unpinned);
    RUN(test_a_full_volume_of_a_group_gives_away_its_oldest_common_one);
    RUN(test_damage_is_recorded_and_does_not_count);
    RUN(test_a_held_slot_is_freed_at_release);
    RUN(test_a_failed_record_stops_the_volume);
    RUN(test_a_failed_second_replica_is_durable_but_stops);
    RUN(test_what_is_being_flagged_supersedes_nothing);
    RUN(test_quarantine_lasts_until_nothing_is_left);
    RUN(test_quarantine_lasts_while_something_is_expendable);
    RUN(test_a_full_volume_lets_go_of_what_lost_its_flag);
    RUN(test_a_volume_is_full_once_no_slot_becomes_free);
    RUN(test_incarnation_and_done);
    return 0;
}
