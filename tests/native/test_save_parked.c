/* Saves that stay in memory: parked, written, dropped; and what the next daemon finds of them after
 * every single store to the state memfd. */
#include <stdio.h>
#include <string.h>

#include "save_fixture.h"

enum { PARKED_BYTES = 2 * CHUNK + 77, TAGS = 16 };

static void step_all(struct owner *owner)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (uint32_t lane = 0; lane <= owner->saver->spec.lanes; lane++)
            moved |= pcc_saver_step(owner->saver, lane) == 0;
    }
}

static struct payload park(struct owner *owner, uint64_t tag)
{
    struct payload payload;

    CHECK_EQUAL(payload_begin_as(owner, tag, PARKED_BYTES, PARKED, &payload), 0);
    CHECK(pcc_save_is_parked(payload.save));
    payload_fill(&payload);
    return payload;
}

static void test_a_parked_save_takes_no_lane_and_no_slot(void)
{
    struct owner *owner = owner_new(3, 1, 1, 0);
    struct payload parked[PCC_SAVES_PARKED], other;

    for (uint32_t i = 0; i < PCC_SAVES_PARKED; i++)
        parked[i] = park(owner, 1 + i);
    CHECK_EQUAL(payload_begin_as(owner, 9, CHUNK, PARKED, &other), -PCC_E_NO_LANE);
    for (uint64_t tag = 10; tag < 14; tag++) { /* lane and slots are others' to use */
        CHECK_EQUAL(payload_begin(owner, tag, CHUNK, &other), 0);
        payload_fill(&other);
        step_all(owner);
        CHECK_EQUAL(owner_wait(owner, tag).end, PCC_SAVE_DURABLE);
        free(other.memory);
    }
    CHECK_EQUAL(owner->written[1], 0);
    for (uint32_t i = 0; i < PCC_SAVES_PARKED; i++)
        free(parked[i].memory);
    owner_free(owner); /* does not wait for what is parked */
}

static void test_a_parked_save_is_written_when_asked(void)
{
    for (uint32_t writers = 0; writers <= 2; writers += 2) {
        struct owner *owner = owner_new(3, 1, 1, writers);
        for (uint64_t tag = 1; tag <= 2 * PCC_SAVES_PARKED; tag++) {
            struct payload parked = park(owner, tag);
            struct pcc_save *save;
            int error;
            while ((error = pcc_save_write(parked.save, &save)) == -PCC_E_NO_SLOT)
                CHECK(writers > 0); /* replica B of the record before is not written yet */
            CHECK_EQUAL(error, 0);
            CHECK(!pcc_save_is_parked(save));
            if (writers == 0)
                step_all(owner);
            CHECK_EQUAL(owner_wait(owner, tag).end, PCC_SAVE_DURABLE);
            CHECK_EQUAL(owner_wait(owner, tag).sequence, tag);
            CHECK_EQUAL(owner->writing[tag], 1);
            CHECK_EQUAL(owner->written[tag], 7); /* each of three chunks */
            CHECK_EQUAL(read_back(owner->volume, tag, writers), 0);
            free(parked.memory);
        }
        owner_free(owner);
    }
}

static void test_a_write_that_is_refused_changes_nothing(void)
{
    struct owner *owner = owner_new(3, 1, 2, 0);
    struct payload open, parked, busy[2];
    struct pcc_save *save;
    uint32_t slots[3], taken = 0;

    CHECK_EQUAL(payload_begin_as(owner, 1, CHUNK, PARKED, &open), 0);
    CHECK_EQUAL(pcc_save_write(open.save, &save), -EBUSY);
    CHECK(!pcc_save_drop(open.save));
    parked = park(owner, 2);
    while (pcc_volume_take_slot(owner->volume, &slots[taken]) == 0)
        taken++;
    CHECK_EQUAL(pcc_save_write(parked.save, &save), -PCC_E_NO_SLOT);
    while (taken > 0)
        pcc_volume_return_slot(owner->volume, slots[--taken]);
    for (uint32_t i = 0; i < 2; i++)
        CHECK_EQUAL(payload_begin(owner, 3 + i, CHUNK, &busy[i]), 0);
    CHECK_EQUAL(pcc_save_write(parked.save, &save), -PCC_E_NO_LANE);
    pcc_save_abort(busy[0].save, -PCC_E_ABORTED);
    step_all(owner);
    CHECK_EQUAL(pcc_save_write(parked.save, &save), 0);
    step_all(owner);
    CHECK_EQUAL(owner_wait(owner, 2).end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(read_back(owner->volume, 2, 0), 0);
    free(open.memory);
    free(parked.memory);
    for (uint32_t i = 0; i < 2; i++)
        free(busy[i].memory);
    owner_free(owner);
}

static void test_a_place_is_free_after_a_drop_or_an_abort(void)
{
    for (uint32_t writers = 0; writers <= 2; writers += 2) {
        struct owner *owner = owner_new(3, 1, 1, writers);
        for (uint64_t tag = 1; tag <= 8; tag++) {
            struct payload payload;
            if (tag % 2 == 0) {
                payload = park(owner, tag);
                CHECK(pcc_save_drop(payload.save));
                CHECK(!owner->has_ended[tag]);
            } else {
                CHECK_EQUAL(payload_begin_as(owner, tag, PARKED_BYTES, PARKED, &payload), 0);
                CHECK_EQUAL(payload_chunk(&payload, 1), 0);
                pcc_save_abort(payload.save, -PCC_E_ABORTED);
                if (writers == 0)
                    step_all(owner);
                CHECK_EQUAL(owner_wait(owner, tag).end, PCC_SAVE_FAILED);
                CHECK_EQUAL(owner_wait(owner, tag).error, -PCC_E_ABORTED);
            }
            free(payload.memory);
        }
        CHECK_EQUAL(owner->media->writes, 0);
        owner_free(owner);
    }
}

static void test_what_is_older_than_a_durable_one_is_superseded(void)
{
    struct owner *owner = owner_new(3, 1, 1, 0);
    struct payload parked = park(owner, 1), newer;
    struct pcc_save *save;

    CHECK_EQUAL(payload_begin(owner, 2, CHUNK, &newer), 0);
    payload_fill(&newer);
    step_all(owner);
    CHECK_EQUAL(pcc_save_write(parked.save, &save), 0);
    step_all(owner);
    CHECK_EQUAL(owner_wait(owner, 1).end, PCC_SAVE_SUPERSEDED);
    CHECK_EQUAL(owner_wait(owner, 1).newer, 2);
    free(parked.memory);
    free(newer.memory);
    owner_free(owner);
}

/* -- the next daemon -- */

static struct {
    struct owner *owner; /* whose stores are looked at; NULL: nobody's */
    struct pcc_kept kept;
    uint8_t *memory[TAGS]; /* of each tag's chunks */
    uint64_t must;         /* the newest sequence that was sealed and not dropped */
    bool dropped[TAGS];    /* the call has returned */
    uint32_t looks, parked_seen, continued;
    bool written; /* what is parked is written by the next daemon, else dropped */
} truth;

static void handed_over(struct pcc_save *save, uint64_t tag)
{
    const uint64_t bytes = save->request.payload_bytes;

    for (uint32_t i = 0; i < save->piece_count; i++) {
        const struct pcc_kept_piece *piece =
            pcc_kept_piece(save->lane->saver->spec.kept, save->kept_place, i);
        CHECK_EQUAL(piece->segment, tag); /* all of what is looked at stays in DRAM */
        const struct pcc_chunk chunk = {
            .bytes = truth.memory[tag] + (uint64_t)piece->chunk * CHUNK,
            .payload_offset_bytes = (uint64_t)i * CHUNK,
            .length_bytes = (uint32_t)pcc_piece_bytes(bytes, (uint64_t)i * CHUNK, CHUNK),
            .index = (uint32_t)tag * CHUNKS_MAX + i,
            .segment = tag,
            .segment_chunk = piece->chunk,
            .checksums = pcc_save_kept_checksums(save, i)};
        CHECK(pcc_save_matches(save, i, chunk.bytes, chunk.length_bytes));
        CHECK_EQUAL(pcc_save_chunk(save, &chunk), 0);
    }
    CHECK_EQUAL(pcc_save_seal(save), 0);
}

/* Continues everything in a copy of state and media, the newest first, as a daemon does. */
static void continue_all(struct owner *next, const struct pcc_kept *kept)
{
    const uint32_t places = pcc_kept_header(kept)->places;
    bool tried[8] = {false};

    CHECK(places <= 8);
    for (;;) {
        uint32_t newest = places;
        for (uint32_t i = 0; i < places; i++)
            if (!tried[i] && pcc_kept_is_copied(kept, i) &&
                (newest == places || pcc_kept_save(kept, i)->entry.sequence >
                                         pcc_kept_save(kept, newest)->entry.sequence))
                newest = i;
        if (newest == places)
            return;
        tried[newest] = true;
        const struct pcc_kept_save *found = pcc_kept_save(kept, newest);
        const uint64_t tag = (uint64_t)found->entry.step;
        struct pcc_save *save;
        CHECK(tag > 0 && tag < TAGS && !truth.dropped[tag]);
        const int error = pcc_save_adopt(next->saver, newest, tag, &save);
        CHECK(error == 0 || error == -EALREADY);
        if (error != 0)
            continue;
        const bool parked = found->slot == PCC_KEPT_NO_SLOT;
        CHECK_EQUAL(pcc_save_is_parked(save), parked);
        handed_over(save, tag);
        truth.parked_seen += parked;
        truth.continued++;
        if (parked && !truth.written) {
            CHECK(pcc_save_drop(save));
            continue;
        }
        if (parked)
            CHECK_EQUAL(pcc_save_write(save, &save), 0);
        step_all(next);
        CHECK(owner_wait(next, tag).end == PCC_SAVE_DURABLE ||
              owner_wait(next, tag).end == PCC_SAVE_SUPERSEDED);
    }
}

static void look(void)
{
    struct memory_io *media = memory_new(truth.owner->media->io.size_bytes);
    uint8_t *image = aligned_alloc(PCC_IO_ALIGN, truth.kept.length_bytes);
    struct pcc_kept kept;

    CHECK(image != NULL);
    memcpy(media->bytes, truth.owner->media->bytes, media->io.size_bytes);
    memcpy(image, truth.kept.bytes, truth.kept.length_bytes);
    CHECK_EQUAL(pcc_kept_accept(&kept, image, truth.kept.length_bytes), 0);
    struct owner *next = owner_kept(media, 1, 0, &kept);
    continue_all(next, &kept);
    const uint64_t newest = pcc_volume_superseding(next->volume);
    CHECK(!truth.written || newest >= truth.must);
    if (newest > 0)
        CHECK_EQUAL(read_back(next->volume, newest, 0), 0);
    for (uint32_t i = 0; i < pcc_kept_header(&kept)->places; i++)
        CHECK(!pcc_kept_is_copied(&kept, i) ||
              pcc_kept_save(&kept, i)->entry.sequence <= newest); /* adopted in vain: EALREADY */
    owner_free(next);
    free(image);
    truth.looks++;
}

void pcc_kept_stored(void);

void pcc_kept_stored(void)
{
    static bool looking;

    if (truth.owner == NULL || looking)
        return;
    looking = true;
    look();
    looking = false;
}

static struct payload park_watched(uint64_t tag)
{
    struct payload payload;

    CHECK_EQUAL(payload_begin_as(truth.owner, tag, PARKED_BYTES, PARKED, &payload), 0);
    truth.memory[tag] = payload.memory;
    payload_fill(&payload);
    truth.must = payload.sequence;
    return payload;
}

static void drop_watched(struct payload *payload)
{
    CHECK(pcc_save_drop(payload->save));
    truth.dropped[payload->tag] = true;
    memset(payload->memory, 0xee, PARKED_BYTES); /* another one's from now on */
    pcc_kept_stored();
}

static void life(bool written)
{
    const struct pcc_saver_spec spec = {.lanes = 1};
    struct memory_io *media = formatted(3, 1);
    struct pcc_save *save;
    struct payload other;

    truth.written = written;
    truth.must = 0;
    memset(truth.dropped, 0, sizeof(truth.dropped));
    struct pcc_volume *volume = opened(media);
    const struct pcc_geometry geometry = pcc_volume_geometry(volume);
    const struct pcc_kept_shape shape = pcc_kept_shape_of(&geometry, spec.lanes, CHUNK);
    struct pcc_record record;
    pcc_volume_record(volume, &record);
    pcc_volume_close(volume);
    void *bytes = aligned_alloc(PCC_IO_ALIGN, pcc_kept_bytes(&shape));
    CHECK(bytes != NULL);
    memset(bytes, 0, pcc_kept_bytes(&shape));
    pcc_kept_make(&truth.kept, bytes, &shape, &record);
    truth.owner = owner_kept(media, spec.lanes, 0, &truth.kept);

    struct payload first = park_watched(1), second = park_watched(2);
    drop_watched(&first);
    struct payload third = park_watched(3);
    CHECK_EQUAL(pcc_save_write(second.save, &save), 0); /* while a newer one is parked */
    step_all(truth.owner);
    CHECK_EQUAL(owner_wait(truth.owner, 2).end, PCC_SAVE_DURABLE);
    CHECK_EQUAL(payload_begin_as(truth.owner, 4, PARKED_BYTES, PARKED, &other), 0);
    truth.memory[4] = other.memory;
    CHECK_EQUAL(payload_chunk(&other, 0), 0);
    truth.dropped[4] = true; /* it is never copied */
    pcc_save_abort(other.save, -PCC_E_ABORTED);
    step_all(truth.owner);
    struct payload fifth = park_watched(5);
    drop_watched(&third);
    CHECK_EQUAL(pcc_save_write(fifth.save, &save), 0);
    step_all(truth.owner);
    struct payload last = park_watched(6); /* left when the saver closes */
    struct owner *owner = truth.owner;
    truth.owner = NULL;
    owner_free(owner);
    uint32_t copied = 0;
    for (uint32_t i = 0; i < shape.places; i++)
        copied += pcc_kept_is_copied(&truth.kept, i);
    CHECK_EQUAL(copied, 1);
    struct payload *const all[] = {&first, &second, &third, &other, &fifth, &last};
    for (uint32_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        free(all[i]->memory);
    free(bytes);
}

static void test_the_next_daemon_finds_it_whole_or_not_at_all(void)
{
    life(true);
    life(false);
    printf("  looked after %u stores; %u saves went on, %u of them parked\n", truth.looks,
           truth.continued, truth.parked_seen);
    CHECK(truth.looks > 100 && truth.parked_seen > 50 && truth.continued > truth.parked_seen + 10);
}

int main(void)
{
    RUN(test_a_parked_save_takes_no_lane_and_no_slot);
    RUN(test_a_parked_save_is_written_when_asked);
    RUN(test_a_write_that_is_refused_changes_nothing);
    RUN(test_a_place_is_free_after_a_drop_or_an_abort);
    RUN(test_what_is_older_than_a_durable_one_is_superseded);
    RUN(test_the_next_daemon_finds_it_whole_or_not_at_all);
    return 0;
}
