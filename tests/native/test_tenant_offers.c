/* Offers: what a snapshot has in common with its base needs no chunk. With an honest client, with
 * one that changes what it has offered, and with a hand-made one that offers what it must not. */
#include <fcntl.h>
#include <signal.h>

#include "base/pcc_hash.h"
#include "handmade_client.h"

#define FROZEN (10 * CHUNK)
#define WHOLE (FROZEN + 2 * CHUNK + 99)

static const struct settings roomy = {.payload_capacity = 1u << 20, .memory_bytes = 2u << 20};
static const struct settings two_chunks = {.payload_capacity = 1u << 20, .memory_bytes = 2 * CHUNK};
static const struct settings lied_to = {.payload_capacity = 1u << 20, .memory_bytes = 8 * CHUNK};

static uint8_t bytes[WHOLE];

static void content(uint64_t snapshot)
{
    pattern(bytes, WHOLE, snapshot);
    pattern(bytes, FROZEN, 77);
}

/* The next save that has ended. */
static struct pcc_event ended(struct fixture *f)
{
    struct pcc_event event;

    do
        event = event_next(f);
    while (event.kind != PCC_EVENT_DURABLE && event.kind != PCC_EVENT_FAILED &&
           event.kind != PCC_EVENT_SUPERSEDED);
    return event;
}

static uint64_t copied(struct fixture *f, uint64_t snapshot)
{
    (void)save(f, snapshot, bytes, WHOLE);
    const struct pcc_event event = ended(f);
    CHECK(event.id == snapshot && event.kind == PCC_EVENT_DURABLE);
    return event.copied_bytes;
}

static void rot(struct fixture *f)
{
    const int fd = open(f->path, O_WRONLY | O_CLOEXEC);
    const struct pcc_geometry geometry = pcc_volume_geometry(f->volume);

    CHECK(fd >= 0);
    for (uint32_t slot = 0; slot < geometry.slot_count; slot++)
        CHECK(pwrite(fd, "rot", 3, (off_t)pcc_geometry_slot_offset(&geometry, slot)) == 3);
    CHECK(close(fd) == 0);
}

static void test_what_is_in_the_base_needs_no_chunk(void)
{
    struct fixture f;
    uint64_t snapshot = 0;

    fixture_open(&f, &roomy);
    f.frozen_bytes = FROZEN;
    link_open(&f);
    content(++snapshot);
    CHECK_EQUAL(copied(&f, snapshot), WHOLE);
    while (snapshot < 9) {
        content(++snapshot);
        CHECK_EQUAL(copied(&f, snapshot), WHOLE - FROZEN);
        load_equals(&f, snapshot, snapshot, bytes, WHOLE);
        CHECK(loaded_from_memory(&f) == 1); /* what was not copied is there of the base */
    }
    bytes[3 * CHUNK + 5] ^= 1; /* nothing has counted this */
    CHECK_EQUAL(copied(&f, ++snapshot), WHOLE - FROZEN + CHUNK);
    load_equals(&f, snapshot, snapshot, bytes, WHOLE);
    detach(&f);
    link_open(&f); /* a client that knows nothing of the base */
    rot(&f);       /* neither is read: it is all in DRAM */
    load_equals(&f, snapshot, 1, bytes, WHOLE);
    CHECK(loaded_from_memory(&f) == 1);
    content(1);
    CHECK_EQUAL(copied(&f, 1), WHOLE - FROZEN);
    detach(&f);
    CHECK(pcc_tenant_release_memory(f.tenant) == 0);
    fixture_close(&f);
}

/* A payload that ends within a piece of its base: the base's chunk, though it is cached and has all
 * the bytes, is longer than the row of checksums of that piece. */
static void test_a_longer_chunk_of_the_base(void)
{
    struct fixture f;
    const uint64_t count = FROZEN - CHUNK - 2 * BLOCK;

    fixture_open(&f, &roomy);
    f.frozen_bytes = FROZEN;
    link_open(&f);
    content(1);
    CHECK_EQUAL(copied(&f, 1), WHOLE);
    const uint64_t sequence = save(&f, 2, bytes, count);
    CHECK_EQUAL(ended(&f).copied_bytes, count % CHUNK);
    for (uint32_t i = 0; i < f.tenant->chunk_count; i++) /* re-used, say */
        if (f.tenant->chunks[i].sequence == sequence)
            f.tenant->chunks[i].offset_bytes = FROZEN;
    load_equals(&f, sequence, 1, bytes, count);
    CHECK(!f.tenant->load.careful); /* the client found nothing damaged */
    fixture_end(&f);
}

/* A part of a chunk, all of which the base has, but not the rest of that chunk: the base's chunk is
 * not it, though it is cached. */
static void test_a_part_of_a_chunk(void)
{
    static uint8_t got[2 * BLOCK];
    const struct pcc_range range = {(uintptr_t)got, 3 * CHUNK, sizeof got};
    struct fixture f;

    fixture_open(&f, &roomy);
    f.frozen_bytes = FROZEN;
    link_open(&f);
    content(1);
    CHECK_EQUAL(copied(&f, 1), WHOLE);
    bytes[4 * CHUNK - 5] ^= 1;
    const uint64_t sequence = save(&f, 2, bytes, WHOLE);
    CHECK_EQUAL(ended(&f).copied_bytes, WHOLE - FROZEN + CHUNK);
    for (uint32_t i = 0; i < f.tenant->chunk_count; i++) /* re-used, say */
        if (f.tenant->chunks[i].sequence == sequence)
            f.tenant->chunks[i].offset_bytes = 2 * WHOLE;
    CHECK(load(&f, sequence, 1, &range, 1, 3 * CHUNK, sizeof got) == 0);
    CHECK(memcmp(got, bytes + 3 * CHUNK, sizeof got) == 0);
    CHECK(!f.tenant->load.careful); /* the client found nothing damaged */
    content(1);
    load_equals(&f, sequence - 1, 2, bytes, WHOLE);
    CHECK(loaded_from_memory(&f) == 1); /* the base is as cached as it was */
    fixture_end(&f);
}

/* All but one of the chunks may be held for something else: what is asked for still gets one. */
static void test_with_two_chunks(void)
{
    struct fixture f;
    struct pcc_tenant_usage usage;

    fixture_open(&f, &two_chunks);
    f.frozen_bytes = FROZEN;
    link_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 8; snapshot++) {
        content(snapshot);
        for (uint64_t i = 0; snapshot > 4 && i < FROZEN; i += CHUNK) /* all of it has changed */
            bytes[i + snapshot] ^= (uint8_t)snapshot;
        const uint64_t count = copied(&f, snapshot);
        CHECK_EQUAL(count, snapshot > 1 && snapshot <= 4 ? WHOLE - FROZEN : WHOLE);
        load_equals(&f, snapshot, snapshot, bytes, WHOLE);
    }
    /* Several at once, and the last chunk of each is kept until it is confirmed. */
    const struct pcc_range range = {.address = (uintptr_t)bytes, .length_bytes = WHOLE};
    const struct pcc_submission submission = {.ranges = &range,
                                              .range_count = 1,
                                              .tail_offset_bytes = WHOLE,
                                              .offered_bytes = FROZEN,
                                              .provisional = true,
                                              .request = request_of(&f, 0, WHOLE)};
    for (uint64_t snapshot = 9; snapshot <= 10; snapshot++) {
        CHECK(pcc_client_request(f.client, snapshot) == 0);
        CHECK(pcc_client_submit(f.client, snapshot, &submission) == 0);
        (void)begin_wait(&f, snapshot, WHOLE);
    }
    for (uint64_t snapshot = 9; snapshot <= 10; snapshot++)
        CHECK(pcc_client_wait(f.client, snapshot, PCC_WAIT_READ, soon()) == 0);
    for (uint64_t snapshot = 9; snapshot <= 10; snapshot++) {
        struct pcc_client_state state;
        CHECK(pcc_client_state(f.client, snapshot, &state) == 0);
        CHECK(state.word == PCC_WORD_COPYING); /* after any answer */
    }
    CHECK(pcc_client_abandon(f.client, 10));
    pcc_client_confirm(f.client, 9);
    CHECK(pcc_client_wait(f.client, 9, PCC_WAIT_DURABLE, soon()) == 0);
    load_equals(&f, 9, 9, bytes, WHOLE);
    const uint64_t deadline = soon();
    do {
        pcc_tenant_usage(f.tenant, &usage);
        CHECK(pcc_now_ns() < deadline);
    } while (usage.in_flight > 0 || usage.granted_chunks > 0 || usage.lent_chunks > 0);
    fixture_end(&f);
}

/* All of it has changed, and the disk is slow: the trainer waits until all has been read, and not
 * until it is written. */
static void test_answers_do_not_wait_for_writes(void)
{
    static const struct settings slow = {
        .payload_capacity = 8u << 20, .memory_bytes = 16u << 20, .bytes_per_second = 1ull << 40};
    const uint64_t count = 3 * PCC_OFFERS * CHUNK + 99;
    uint8_t *large = malloc(count);
    struct pcc_tenant_usage usage;
    struct fixture f;

    CHECK(large != NULL);
    fixture_open(&f, &slow);
    f.frozen_bytes = count;
    link_open(&f);
    pattern(large, count, 1);
    (void)save(&f, 1, large, count);
    CHECK_EQUAL(ended(&f).copied_bytes, count);
    pattern(large, count, 2);
    pcc_io_limit(pcc_volume_io(f.volume), 2 * CHUNK); /* the rest takes 16 seconds */
    submit(&f, 2, large, count);
    const uint64_t sequence = begin_wait(&f, 2, count);
    CHECK(pcc_client_wait(f.client, 2, PCC_WAIT_READ, soon()) == 0);
    const uint64_t deadline = soon();
    do { /* the drain thread may be behind the client */
        pcc_tenant_usage(f.tenant, &usage);
        CHECK(pcc_now_ns() < deadline);
    } while (usage.full_chunks <= 2 * PCC_OFFERS); /* these are not written */
    pcc_io_limit(pcc_volume_io(f.volume), 1ull << 40);
    CHECK(pcc_client_wait(f.client, 2, PCC_WAIT_DURABLE, soon()) == 0);
    CHECK_EQUAL(ended(&f).copied_bytes, count);
    load_equals(&f, sequence, 1, large, count);
    fixture_end(&f);
    free(large);
}

/* The trainer is killed somewhere on the way: it ends, and what is durable is whole. */
static void test_trainer_killed(void)
{
    struct fixture f;
    uint32_t durable = 0;

    fixture_open(&f, &roomy);
    f.frozen_bytes = FROZEN;
    link_open(&f);
    content(1);
    (void)copied(&f, 1);
    detach(&f);
    for (uint32_t round = 0; round < 24; round++) {
        uint64_t sequence;
        content(2 + round);
        attach(&f);
        const pid_t child = trainer_to_kill(&f, bytes, WHOLE);
        CHECK(begin(&f, 1, WHOLE, &sequence) == 0);
        if (round % 4 == 3)
            CHECK(event_until(&f, PCC_EVENT_COPIED).id == 1);
        else
            (void)usleep(round * 40);
        CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
        (void)pcc_tenant_detach(f.tenant, NULL, 0);
        const struct pcc_event event = ended(&f);
        CHECK(event.id == 1 && event.sequence == sequence);
        CHECK(event.kind == PCC_EVENT_DURABLE || round % 4 != 3);
        durable += event.kind == PCC_EVENT_DURABLE;
        ends_close(&f);
        renew(&f, &roomy); /* the tenant does not know which process it was */
        if (event.kind == PCC_EVENT_DURABLE) {
            link_open(&f);
            load_equals(&f, sequence, 1, bytes, WHOLE);
            detach(&f);
        }
    }
    CHECK(durable >= 6);
    fixture_close(&f);
}

/* -- what no honest client offers -- */

enum lie {
    LIE_ROW_TOO_LARGE,
    LIE_SNAPSHOT_UNKNOWN,
    LIE_OFFSET_UNALIGNED,
    LIE_OFFSET_HUGE,
    LIE_NOT_TO_BE_OFFERED,
    LIE_LENGTH,
    LIE_TWICE,
    LIE_AGAIN_AFTER_ITS_ANSWER,
    LIE_FULL_BESIDE,
    LIE_FULL_NOT_WANTED,
    LIE_NO_BASE,
    LIE_COUNT,
};

static struct pcc_message offer(struct fixture *f, uint64_t snapshot, uint32_t part, uint8_t fill)
{
    static uint8_t block[BLOCK];

    memset(block, fill, sizeof block);
    for (uint32_t i = 0; i < CHUNK / BLOCK; i++)
        pcc_page_offer(&f->page, part)[i] = pcc_hash_bytes(block, BLOCK);
    return (struct pcc_message){.kind = PCC_MSG_OFFER,
                                .chunk = part,
                                .id = snapshot,
                                .offset_bytes = (uint64_t)part * CHUNK,
                                .length_bytes = CHUNK};
}

static struct pcc_message heard(struct fixture *f, uint32_t kind)
{
    struct pcc_message message;
    const uint64_t deadline = soon();

    while (pcc_ring_pop(&f->page.to_client, &message) == 0 || message.kind != kind)
        CHECK(pcc_now_ns() < deadline);
    return message;
}

/* Snapshot 2, with snapshot 1 as its base: three pieces to offer, and a chunk for the fourth. */
static uint32_t with_base(struct fixture *f)
{
    uint32_t chunks[4];

    admitted(f, 1, chunks);
    say_all(f, 1, chunks);
    ring(f);
    CHECK(ended(f).kind == PCC_EVENT_DURABLE);
    CHECK(atomic_load(&pcc_page_snapshot(&f->page, 1)->base) == 0);
    f->frozen_bytes = PAYLOAD;
    word_set(f, 2, PCC_WORD_REQUESTED);
    CHECK(begin_wait(f, 2, PAYLOAD) > 0);
    CHECK(atomic_load(&pcc_page_snapshot(&f->page, 2)->base) > 0);
    f->frozen_bytes = 0;
    return heard(f, PCC_MSG_FREE).chunk;
}

static void tell(struct fixture *f, enum lie lie, uint32_t chunk)
{
    struct pcc_message message = offer(f, 2, 1, 0);

    switch (lie) {
    case LIE_ROW_TOO_LARGE:
        message.chunk = PCC_OFFERS;
        break;
    case LIE_SNAPSHOT_UNKNOWN:
        message.id = 65;
        break;
    case LIE_OFFSET_UNALIGNED:
        message.offset_bytes = BLOCK;
        break;
    case LIE_OFFSET_HUGE:
        message.offset_bytes = UINT64_MAX - CHUNK + 1;
        break;
    case LIE_NOT_TO_BE_OFFERED:
        message.offset_bytes = 3 * CHUNK;
        message.length_bytes = PAYLOAD - 3 * CHUNK;
        break;
    case LIE_LENGTH:
        message.length_bytes -= BLOCK;
        break;
    case LIE_TWICE:
        say(f, &message);
        break;
    case LIE_AGAIN_AFTER_ITS_ANSWER:
        message = offer(f, 2, 1, 1); /* not what the base has */
        say(f, &message);
        ring(f);
        CHECK(heard(f, PCC_MSG_ANSWER).result == 0);
        break;
    case LIE_FULL_BESIDE: /* a chunk for each piece, but only one is needed */
        message = full(f, 2, chunk, 3);
        say(f, &message);
        message = offer(f, 2, 0, 1);
        say(f, &message);
        ring(f);
        chunk = heard(f, PCC_MSG_FREE).chunk;
        message = full(f, 2, chunk, 1); /* it is for piece 0 */
        say(f, &message);
        message = offer(f, 2, 0, 0);
        break;
    case LIE_FULL_NOT_WANTED: /* in the chunk of another snapshot */
        message = full(f, 2, chunk, 3);
        say(f, &message);
        word_set(f, 3, PCC_WORD_REQUESTED);
        CHECK(begin_wait(f, 3, PAYLOAD) > 0);
        message = full(f, 2, heard(f, PCC_MSG_FREE).chunk, 1);
        break;
    case LIE_NO_BASE:
        word_set(f, 3, PCC_WORD_REQUESTED);
        CHECK(begin_wait(f, 3, PAYLOAD) > 0); /* without a frozen part */
        message.id = 3;
        break;
    default:
        break;
    }
    say(f, &message);
}

static void test_lies(void)
{
    struct fixture f;

    for (uint32_t lie = 0; lie < LIE_COUNT; lie++) {
        fixture_open(&f, &lied_to);
        page_open(&f);
        tell(&f, lie, with_base(&f));
        ring(&f);
        CHECK(event_until(&f, PCC_EVENT_BAD_PEER).session == f.session);
        detach(&f);
        const struct pcc_tenant_usage usage = usage_at_rest(&f);
        CHECK(usage.granted_chunks == 0 && usage.full_chunks == 0);
        fixture_close(&f);
    }
}

/* A client that offers what it does not have gets what the base has, and nobody else does. */
static void test_a_false_offer(void)
{
    struct fixture f;
    struct pcc_message message;

    fixture_open(&f, &lied_to);
    page_open(&f);
    const uint32_t chunk = with_base(&f);
    for (uint32_t part = 0; part < 3; part++) {
        message = offer(&f, 2, part, 0);
        say(&f, &message);
    }
    message = full(&f, 2, chunk, 3);
    say(&f, &message);
    ring(&f);
    const struct pcc_event event = ended(&f);
    CHECK(event.kind == PCC_EVENT_DURABLE && event.copied_bytes == PAYLOAD - 3 * CHUNK);
    detach(&f);
    static const uint8_t zeros[PAYLOAD];
    link_open(&f);
    load_equals(&f, event.sequence, 1, zeros, PAYLOAD);
    fixture_end(&f);
}

int main(void)
{
    RUN(test_what_is_in_the_base_needs_no_chunk);
    RUN(test_a_longer_chunk_of_the_base);
    RUN(test_a_part_of_a_chunk);
    RUN(test_with_two_chunks);
    RUN(test_answers_do_not_wait_for_writes);
    RUN(test_trainer_killed);
    RUN(test_lies);
    RUN(test_a_false_offer);
    return 0;
}
