/* Segments that the daemon asks a hand-made client to return: what the client may still do, what no
 * honest client sends, and what the daemon waits for. */
#include "handmade_client.h"

#define SEGMENT (2 * CHUNK)

static const struct settings cut = {
    .payload_capacity = 1u << 20, .memory_bytes = 4 * SEGMENT, .segment_bytes = SEGMENT};

static struct pcc_tenant_holding shrink(struct fixture *f)
{
    struct pcc_tenant_holding holding;

    pcc_tenant_shrink(f->tenant, SEGMENT, &holding);
    CHECK_EQUAL(holding.lasting_bytes, SEGMENT);
    return holding;
}

static void shrink_whole(struct fixture *f)
{
    const uint64_t deadline = soon();

    while (shrink(f).bytes > SEGMENT) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(200);
    }
}

static void returned(struct fixture *f, uint64_t number, uint32_t chunk)
{
    say(f, &(struct pcc_message){.kind = PCC_MSG_RETURNED, .chunk = chunk, .id = number});
}

static void taken(struct fixture *f, uint32_t chunk)
{
    say(f, &(struct pcc_message){.kind = PCC_MSG_TAKEN, .chunk = chunk});
}

/* Snapshot 1 has chunks 0 to 3, and the client is asked to return three of four segments. The first
 * segment's number goes to *number_out. */
static void asked(struct fixture *f, uint64_t *number_out, uint32_t chunks[4])
{
    struct pcc_message message;
    uint64_t granted;

    grow(f, cut.memory_bytes, SEGMENT);
    page_open(f);
    CHECK(pcc_tenant_grow(f->tenant, 0, &granted) == 0);
    admitted(f, 1, chunks);
    CHECK_EQUAL(shrink(f).asked, 3);
    CHECK_EQUAL(shrink(f).bytes, 4 * SEGMENT);
    *number_out = f->tenant->segments[0].number;
    for (uint32_t i = 1; i < 4; i++) {
        CHECK(pcc_ring_pop(&f->page.to_client, &message) == 1);
        CHECK(message.kind == PCC_MSG_RETIRE && message.chunk == 2 * i);
        CHECK_EQUAL(message.id, f->tenant->segments[i].number);
    }
    CHECK(pcc_ring_pop(&f->page.to_client, &message) == 0); /* it is asked once */
}

/* Everything that was asked for comes back; memory that comes later has the same chunk numbers. */
static void give_all(struct fixture *f)
{
    uint64_t granted, numbers[4];

    for (uint32_t i = 1; i < 4; i++)
        numbers[i] = f->tenant->segments[i].number;
    taken(f, 2);
    taken(f, 3);
    for (uint32_t i = 1; i < 4; i++)
        returned(f, numbers[i], 2 * i);
    ring(f);
    shrink_whole(f);
    grow(f, cut.memory_bytes, SEGMENT);
    CHECK(pcc_tenant_grow(f->tenant, 0, &granted) == 0);
}

enum lie {
    LIE_UNKNOWN,
    LIE_LASTING,
    LIE_CHUNK,
    LIE_TWICE,
    LIE_HOLDING,
    LIE_NOT_ASKED,
    LIE_GONE_NUMBER,
    LIE_GONE_CHUNK,
    LIE_CHUNK_OF_NEW_MEMORY,
    LIE_COUNT,
};

static void tell(struct fixture *f, enum lie lie, uint64_t number, const uint32_t chunks[4])
{
    const uint64_t last = f->tenant->segments[3].number;
    struct pcc_message message;

    switch (lie) {
    case LIE_UNKNOWN:
        returned(f, UINT64_MAX, 6);
        break;
    case LIE_LASTING:
        returned(f, number, 0);
        break;
    case LIE_CHUNK:
        returned(f, last, 7);
        break;
    case LIE_TWICE:
        returned(f, last, 6);
        returned(f, last, 6);
        break;
    case LIE_HOLDING:
        returned(f, f->tenant->segments[1].number, 2);
        break;
    case LIE_NOT_ASKED: /* of the new memory, which was never asked for */
        give_all(f);
        returned(f, f->tenant->segments[3].number, 6);
        break;
    case LIE_GONE_NUMBER:
        give_all(f);
        returned(f, last, 6);
        break;
    case LIE_GONE_CHUNK:
        returned(f, last, 6);
        ring(f);
        while (shrink(f).bytes > 3 * SEGMENT)
            (void)usleep(200);
        message = full(f, 1, chunks[0], 0);
        message.chunk = 7;
        say(f, &message);
        break;
    case LIE_CHUNK_OF_NEW_MEMORY: /* a late message for what lay there before */
        give_all(f);
        message = full(f, 1, chunks[0], 0);
        message.chunk = 7;
        say(f, &message);
        break;
    default:
        break;
    }
}

static void test_lies(void)
{
    struct fixture f;
    uint32_t chunks[4];
    uint64_t number;

    fixture_open(&f, &cut);
    for (uint32_t lie = 0; lie < LIE_COUNT; lie++) {
        asked(&f, &number, chunks);
        tell(&f, lie, number, chunks);
        ring(&f);
        CHECK(event_until(&f, PCC_EVENT_BAD_PEER).session == f.session);
        detach(&f);
        renew(&f, &cut); /* what it had counts as returned */
    }
    static uint8_t bytes[PAYLOAD];
    pattern(bytes, sizeof(bytes), 1);
    link_open(&f);
    load_equals(&f, save(&f, 1, bytes, sizeof(bytes)), 1, bytes, sizeof(bytes));
    fixture_end(&f);
}

/* A client that never answers keeps its segments, and nothing else. */
static void test_no_answer(void)
{
    struct fixture f;
    uint32_t chunks[4];
    uint64_t number, granted;

    fixture_open(&f, &cut);
    asked(&f, &number, chunks);
    for (uint32_t i = 0; i < 100; i++)
        CHECK(shrink(&f).asked == 3 && shrink(&f).bytes == 4 * SEGMENT);
    CHECK(pcc_tenant_grow(f.tenant, 8 * SEGMENT, &granted) == 0 && granted == 4 * SEGMENT);
    say_all(&f, 1, chunks); /* it continues */
    ring(&f);
    CHECK(event_until(&f, PCC_EVENT_DURABLE).id == 1);
    CHECK(shrink(&f).asked == 3);
    detach(&f);
    shrink_whole(&f);
    fixture_close(&f);
}

/* Three of four chunks are written: until the save is durable they may have to be written
 * elsewhere, and stay. */
static void test_content_in_flight_stays(void)
{
    struct fixture f;
    uint32_t chunks[4];
    uint64_t number;
    struct pcc_tenant_usage usage;

    fixture_open(&f, &cut);
    asked(&f, &number, chunks);
    for (uint32_t part = 1; part < 4; part++) {
        const struct pcc_message message = full(&f, 1, chunks[part], part);
        say(&f, &message);
    }
    for (uint32_t i = 1; i < 4; i++)
        returned(&f, number + i, 2 * i);
    ring(&f);
    const uint64_t deadline = soon();
    do {
        pcc_tenant_usage(f.tenant, &usage);
        CHECK(pcc_now_ns() < deadline);
    } while (usage.cached_chunks < 3 || shrink(&f).asked > 0);
    for (uint32_t i = 0; i < 100; i++)
        CHECK(shrink(&f).bytes == 2 * SEGMENT); /* those that nobody ever used are gone */
    const struct pcc_message message = full(&f, 1, chunks[0], 0);
    say(&f, &message);
    ring(&f);
    CHECK(event_until(&f, PCC_EVENT_DURABLE).id == 1);
    shrink_whole(&f);
    fixture_end(&f);
}

/* The same with a save that cannot move any more, because a chunk of it was re-used: the daemon
 * does not wait for it, however long its copy takes. */
static void test_content_that_cannot_move_goes(void)
{
    struct fixture f;
    uint32_t chunks[4];
    uint64_t number;
    struct pcc_message message;

    fixture_open(&f, &cut);
    asked(&f, &number, chunks);
    for (uint32_t part = 0; part < 4; part += 2) { /* into chunks 0, which lasts, and 2 */
        message = full(&f, 1, chunks[part], part);
        say(&f, &message);
    }
    taken(&f, 3);
    for (uint32_t i = 1; i < 4; i++)
        returned(&f, number + i, 2 * i);
    ring(&f);
    const uint64_t deadline = soon();
    while (pcc_ring_pop(&f.page.to_client, &message) == 0) /* chunk 0 again, for want of others */
        CHECK(pcc_now_ns() < deadline);
    CHECK(message.kind == PCC_MSG_FREE && message.chunk == 0);
    shrink_whole(&f);
    message = full(&f, 1, 0, 1);
    say(&f, &message);
    message = full(&f, 1, 1, 3);
    say(&f, &message);
    ring(&f);
    CHECK(event_until(&f, PCC_EVENT_DURABLE).id == 1);
    fixture_end(&f);
}

int main(void)
{
    RUN(test_lies);
    RUN(test_no_answer);
    RUN(test_content_in_flight_stays);
    RUN(test_content_that_cannot_move_goes);
    return 0;
}
