/* Checkpoints of level memory: copied and parked, then written or dropped; what waits for a parking
 * place; what outlives its session; and what the client wants on the disk. */
#include "handmade_client.h"

static const struct settings roomy = {.payload_capacity = 1u << 20, .memory_bytes = 24 * CHUNK};
static const struct pcc_tenant_end replaced = {.outcome = PCC_OUTCOME_SUPERSEDED, .newer = 77};

static void memory_open(struct fixture *f)
{
    fixture_open(f, &roomy);
    f->level = PCC_LEVEL_MEMORY;
}

/* Copied by the real client. */
static uint64_t park(struct fixture *f, uint64_t snapshot, uint8_t *bytes)
{
    struct pcc_client_state state;

    pattern(bytes, PAYLOAD, snapshot);
    submit(f, snapshot, bytes, PAYLOAD);
    const uint64_t sequence = begin_wait(f, snapshot, PAYLOAD);
    CHECK(pcc_client_wait(f->client, snapshot, PCC_WAIT_COPIED, soon()) == 0);
    CHECK(event_next(f).kind == PCC_EVENT_COPIED);
    CHECK(pcc_client_state(f->client, snapshot, &state) == 0);
    CHECK(state.word == PCC_WORD_COPIED && state.outcome == PCC_OUTCOME_COPIED);
    CHECK_EQUAL(state.sequence, sequence);
    return sequence;
}

static struct pcc_tenant_usage usage_of(struct fixture *f)
{
    struct pcc_tenant_usage usage;

    pcc_tenant_usage(f->tenant, &usage);
    return usage;
}

static void written(struct fixture *f, uint64_t session, uint64_t snapshot)
{
    const struct pcc_event writing = event_next(f), durable = event_next(f);

    CHECK(writing.kind == PCC_EVENT_WRITING && writing.id == snapshot);
    CHECK(durable.kind == PCC_EVENT_DURABLE && durable.id == snapshot);
    CHECK(writing.session == session && durable.session == session);
}

static void test_copied_written_and_read(void)
{
    struct fixture f;
    uint8_t *bytes = malloc(PAYLOAD);

    CHECK(bytes != NULL);
    memory_open(&f);
    link_open(&f);
    const uint64_t sequence = park(&f, 1, bytes);
    CHECK_EQUAL(usage_of(&f).parked, 1);
    CHECK_EQUAL(usage_of(&f).full_chunks, 4);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_DURABLE, pcc_now_ns()) == -ETIMEDOUT);
    CHECK(pcc_tenant_unbind(f.tenant, f.volume) == -EBUSY);
    CHECK(pcc_tenant_write(f.tenant, sequence) == 0);
    written(&f, f.session, 1);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_DURABLE, soon()) == 0);
    CHECK(pcc_tenant_write(f.tenant, sequence) == 0); /* nothing of it is parked any more */
    CHECK(!pcc_tenant_drop(f.tenant, sequence, &replaced));
    CHECK_EQUAL(usage_at_rest(&f).parked, 0);
    load_equals(&f, sequence, 1, bytes, PAYLOAD);
    CHECK(loaded_from_memory(&f) == 1.0);
    fixture_end(&f);
    free(bytes);
}

static void test_dropped(void)
{
    struct fixture f;
    struct pcc_client_state state;
    uint8_t *bytes = malloc(PAYLOAD);

    CHECK(bytes != NULL);
    memory_open(&f);
    link_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 100; snapshot++) { /* entries are used again */
        const uint64_t sequence = park(&f, snapshot, bytes);
        CHECK(pcc_tenant_drop(f.tenant, sequence, &replaced));
        CHECK(!pcc_tenant_drop(f.tenant, sequence, &replaced));
        CHECK(pcc_client_wait(f.client, snapshot, PCC_WAIT_DURABLE, soon()) == 0);
        CHECK(pcc_client_state(f.client, snapshot, &state) == 0);
        CHECK(state.outcome == PCC_OUTCOME_SUPERSEDED && state.newer == 77);
        CHECK_EQUAL(usage_of(&f).parked + usage_of(&f).in_flight + usage_of(&f).full_chunks, 0);
    }
    CHECK(pcc_volume_superseding(f.volume) == 0);
    f.level = PCC_LEVEL_DISK;
    CHECK_EQUAL(save(&f, 101, bytes, PAYLOAD), 101);
    fixture_end(&f);
    free(bytes);
}

static void request(struct fixture *f, uint64_t snapshot)
{
    const struct pcc_request block = request_of(f, snapshot, PAYLOAD);

    word_set(f, snapshot, PCC_WORD_REQUESTED);
    ask(f, snapshot, &block);
}

static uint64_t hand_over(struct fixture *f, uint64_t snapshot)
{
    uint32_t chunks[4];

    admitted(f, snapshot, chunks);
    say_all(f, snapshot, chunks);
    ring(f);
    const struct pcc_event event = event_next(f);
    CHECK(event.kind == PCC_EVENT_COPIED && event.id == snapshot);
    return event.sequence;
}

static void test_a_full_parking_makes_the_next_one_wait(void)
{
    struct fixture f;

    memory_open(&f);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= PCC_SAVES_PARKED; snapshot++)
        CHECK_EQUAL(hand_over(&f, snapshot), snapshot);
    f.flags = PCC_REQUEST_SKIP;
    request(&f, 4);
    CHECK(queue_event(&f, 4).error == -PCC_E_NO_LANE);
    CHECK(word_get(&f, 4) == pcc_word(4, PCC_WORD_REFUSED));
    f.flags = 0;
    request(&f, 5);
    CHECK(pcc_tenant_drop(f.tenant, 2, &replaced));
    CHECK(queue_event(&f, 5).kind == PCC_EVENT_BEGUN);
    request(&f, 6);
    CHECK(pcc_tenant_write(f.tenant, 3) == 0); /* its lane is free at once for the next one */
    written(&f, f.session, 3);
    CHECK(queue_event(&f, 6).kind == PCC_EVENT_BEGUN);
    fixture_end(&f);
}

static void test_what_is_being_copied_is_neither_written_nor_dropped(void)
{
    struct fixture f;
    uint32_t chunks[4];

    memory_open(&f);
    page_open(&f);
    admitted(&f, 1, chunks);
    const struct pcc_message first = full(&f, 1, chunks[0], 0);
    say(&f, &first);
    ring(&f);
    while (usage_of(&f).full_chunks == 0)
        (void)usleep(100);
    CHECK(pcc_tenant_write(f.tenant, 1) == -EBUSY);
    CHECK(!pcc_tenant_drop(f.tenant, 1, &replaced));
    CHECK_EQUAL(usage_of(&f).parked, 1);
    detach(&f); /* it is given up, as any other is */
    CHECK_EQUAL(usage_at_rest(&f).parked, 0);
    fixture_close(&f);
}

static void test_it_outlives_its_session(void)
{
    struct fixture f;
    uint8_t *bytes = malloc(PAYLOAD);

    CHECK(bytes != NULL);
    memory_open(&f);
    link_open(&f);
    const uint64_t dropped = park(&f, 1, bytes), sequence = park(&f, 2, bytes);
    const uint64_t session = f.session;
    detach(&f);
    CHECK_EQUAL(usage_of(&f).parked, 2);
    CHECK(pcc_tenant_release_memory(f.tenant) == -EBUSY);
    CHECK(pcc_tenant_drop(f.tenant, dropped, &replaced));
    link_open(&f); /* the next trainer waits for the write, and reads */
    CHECK(pcc_tenant_write(f.tenant, sequence) == 0);
    written(&f, session, 2);
    load_equals(&f, sequence, 1, bytes, PAYLOAD);
    fixture_end(&f);
    free(bytes);
}

/* The next event says that this snapshot is wanted. */
static void wanted(struct fixture *f, uint64_t snapshot, uint64_t sequence)
{
    const struct pcc_event event = event_next(f);

    CHECK(event.kind == PCC_EVENT_WANTED && event.session == f->session);
    CHECK(event.id == snapshot && event.sequence == sequence);
}

static void want(struct fixture *f, uint64_t snapshot)
{
    say(f, &(struct pcc_message){.kind = PCC_MSG_WRITE, .id = snapshot});
    ring(f);
}

static void test_a_wanted_one_is_reported_once(void)
{
    struct fixture f;

    memory_open(&f);
    page_open(&f);
    want(&f, 9); /* unknown */
    CHECK_EQUAL(hand_over(&f, 1), 1);
    want(&f, 1);
    want(&f, 1);
    wanted(&f, 1, 1);
    for (uint64_t snapshot = 2; snapshot <= PCC_SAVES_PARKED; snapshot++)
        CHECK_EQUAL(hand_over(&f, snapshot), snapshot);
    request(&f, 4); /* it waits, and has no number */
    want(&f, 4);
    wanted(&f, 4, 0);
    CHECK(pcc_tenant_drop(f.tenant, 1, &replaced));
    CHECK(queue_event(&f, 4).kind == PCC_EVENT_BEGUN);
    want(&f, 4);
    want(&f, 1);
    f.level = PCC_LEVEL_DISK;
    request(&f, 5);
    CHECK(queue_event(&f, 5).kind == PCC_EVENT_BEGUN);
    want(&f, 5); /* it is written anyway */
    CHECK(pcc_tenant_write(f.tenant, 2) == 0);
    written(&f, f.session, 2);
    want(&f, 3); /* behind all of the others */
    wanted(&f, 3, 3);
    fixture_end(&f);
}

/* The daemon hears of it after the request, whenever the client asks. */
static void test_a_client_may_want_it_at_any_time(void)
{
    struct fixture f;
    uint8_t *bytes = malloc(PAYLOAD);
    const struct pcc_range range = {.address = (uintptr_t)bytes, .length_bytes = PAYLOAD};

    CHECK(bytes != NULL);
    pattern(bytes, PAYLOAD, 1);
    memory_open(&f);
    link_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 3; snapshot++) {
        const struct pcc_submission submission = {.ranges = &range,
                                                  .range_count = 1,
                                                  .tail_offset_bytes = PAYLOAD,
                                                  .request = request_of(&f, snapshot, PAYLOAD)};
        struct pcc_event event;
        uint32_t reports = 0;
        CHECK(pcc_client_request(f.client, snapshot) == 0);
        if (snapshot == 1)
            pcc_client_write(f.client, snapshot);
        CHECK(pcc_client_submit(f.client, snapshot, &submission) == 0);
        if (snapshot == 2)
            pcc_client_write(f.client, snapshot);
        CHECK(pcc_client_wait(f.client, snapshot, PCC_WAIT_COPIED, soon()) == 0);
        pcc_client_write(f.client, snapshot);
        pcc_client_write(f.client, snapshot);
        for (bool copied = false; reports == 0 || !copied;) {
            event = event_next(&f);
            CHECK(event.id == snapshot);
            copied = copied || event.kind == PCC_EVENT_COPIED;
            reports += event.kind == PCC_EVENT_WANTED;
        }
        CHECK_EQUAL(reports, 1);
        CHECK(pcc_tenant_write(f.tenant, snapshot) == 0);
        written(&f, f.session, snapshot);
        pcc_client_write(f.client, snapshot - 1); /* long over */
    }
    fixture_end(&f);
    free(bytes);
}

int main(void)
{
    RUN(test_copied_written_and_read);
    RUN(test_dropped);
    RUN(test_a_full_parking_makes_the_next_one_wait);
    RUN(test_what_is_being_copied_is_neither_written_nor_dropped);
    RUN(test_it_outlives_its_session);
    RUN(test_a_wanted_one_is_reported_once);
    RUN(test_a_client_may_want_it_at_any_time);
    return 0;
}
