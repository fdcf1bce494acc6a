/* The queue of requests: who begins when, which events the loop gets, and what no honest client
 * requests. The client is hand-made, so that each request comes when the test says so. */
#include "handmade_client.h"

static const struct settings roomy = {.payload_capacity = 1u << 20, .memory_bytes = 24 * CHUNK};

static void request(struct fixture *f, uint64_t snapshot)
{
    const struct pcc_request block = request_of(f, snapshot, PAYLOAD);

    word_set(f, snapshot, PCC_WORD_REQUESTED);
    ask(f, snapshot, &block);
}

/* The name of a snapshot says which one it is, so that no two share one. */
static int number(struct fixture *f, uint64_t snapshot, uint64_t sequence, uint64_t incarnation)
{
    return pcc_tenant_number(f->tenant, snapshot,
                             &(struct pcc_number){.sequence = sequence,
                                                  .incarnation = incarnation,
                                                  .world_size = 1,
                                                  .marks = PCC_SLOT_OFFERED,
                                                  .name_base = snapshot,
                                                  .name_descents = 2,
                                                  .name_row = 3});
}

/* Until the queue holds so many. */
static void wait_queued(struct fixture *f, uint32_t count)
{
    const uint64_t deadline = soon();
    uint32_t found;

    do {
        events_sort(f);
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(100);
        pcc_tenant_lock(f->tenant);
        found = f->tenant->queue.count;
        pcc_tenant_unlock(f->tenant);
    } while (found != count);
}

/* The four chunks that are granted next. */
static void chunks_take(struct fixture *f, uint32_t chunks[4])
{
    const uint64_t deadline = soon();
    struct pcc_message message;

    for (uint32_t i = 0; i < 4; i++) {
        while (pcc_ring_pop(&f->page.to_client, &message) == 0)
            CHECK(pcc_now_ns() < deadline);
        CHECK(message.kind == PCC_MSG_FREE);
        chunks[i] = message.chunk;
    }
}

/* What has begun hands over all of its chunks. */
static void hand_over(struct fixture *f, uint64_t snapshot)
{
    uint32_t chunks[4];

    chunks_take(f, chunks);
    say_all(f, snapshot, chunks);
    ring(f);
}

static void until_durable(struct fixture *f, uint64_t snapshot)
{
    struct pcc_event event;

    do
        event = event_next(f);
    while (event.id != snapshot || event.kind == PCC_EVENT_COPIED ||
           event.kind == PCC_EVENT_WRITING);
    CHECK(event.kind == PCC_EVENT_DURABLE);
}

/* Three lanes: the others begin in the order of their requests, each when a save has ended. No test
 * and no loop does anything for that. */
static void test_first_come_first_served(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 8; snapshot++)
        request(&f, snapshot);
    wait_queued(&f, 5);
    for (uint64_t snapshot = 1; snapshot <= 8; snapshot++) {
        const struct pcc_event begun = queue_event(&f, snapshot);
        CHECK(begun.kind == PCC_EVENT_BEGUN && begun.error == 0);
        CHECK_EQUAL(begun.sequence, snapshot);
        hand_over(&f, snapshot);
        until_durable(&f, snapshot);
    }
    fixture_end(&f);
}

/* Whoever frees a lane rings: the drain thread does not look by itself before a second has passed.
 */
static void test_a_freed_lane_wakes_the_queue(void)
{
    struct fixture f;
    uint32_t own = 0;

    fixture_open(&f, &roomy);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 3; snapshot++, own++)
        request(&f, snapshot);
    for (uint64_t snapshot = 1; snapshot <= 3; snapshot++)
        CHECK(queue_event(&f, snapshot).kind == PCC_EVENT_BEGUN);
    for (uint64_t snapshot = 4; snapshot <= 23; snapshot++, own += 2) {
        request(&f, snapshot);
        wait_queued(&f, 1);
        hand_over(&f, snapshot - 3);
        until_durable(&f, snapshot - 3);
        CHECK(queue_event(&f, snapshot).kind == PCC_EVENT_BEGUN);
    }
    CHECK(pcc_bell_read(&f.page.page->daemon_bell) >= own + 20);
    fixture_end(&f);
}

static void test_a_skipping_one_does_not_wait(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 3; snapshot++)
        request(&f, snapshot);
    f.flags = PCC_REQUEST_SKIP;
    request(&f, 4);
    const struct pcc_event event = queue_event(&f, 4);
    CHECK(event.kind == PCC_EVENT_REFUSED && event.error == -PCC_E_NO_LANE);
    CHECK(word_get(&f, 4) == pcc_word(4, PCC_WORD_REFUSED));
    CHECK(atomic_load(&pcc_page_snapshot(&f.page, 4)->outcome) == pcc_word(4, PCC_OUTCOME_SKIPPED));
    fixture_end(&f);
}

/* In a group the ranks decide whether to skip: nothing is skipped before it has its number. */
static void test_a_group_decides_before_a_rank_skips(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    pcc_tenant_policy(f.tenant, &asks);
    page_open(&f);
    f.flags = PCC_REQUEST_SKIP;
    for (uint64_t snapshot = 1; snapshot <= 4; snapshot++)
        request(&f, snapshot);
    wait_queued(&f, 1);
    CHECK(word_get(&f, 4) == pcc_word(4, PCC_WORD_REQUESTED));
    const struct pcc_number impossible = {.sequence = 40, .marks = PCC_SLOT_PROTECTED};
    CHECK(pcc_tenant_number(f.tenant, 4, &impossible) == -EINVAL); /* no mark */
    CHECK(number(&f, 4, 40, 1) == 0);
    CHECK(queue_event(&f, 4).error == -PCC_E_NO_LANE);
    fixture_end(&f);
}

static void test_an_abandoned_one_leaves_the_queue(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 6; snapshot++)
        request(&f, snapshot);
    wait_queued(&f, 3);
    CHECK(pcc_word_move(pcc_page_snapshot(&f.page, 5), 5, PCC_WORD_REQUESTED, PCC_WORD_ABANDONED));
    ring(&f);
    const struct pcc_event event = queue_event(&f, 5);
    CHECK(event.kind == PCC_EVENT_REFUSED && event.error == -PCC_E_ABORTED);
    CHECK(word_get(&f, 5) == pcc_word(5, PCC_WORD_ABANDONED));
    hand_over(&f, 1);
    CHECK(queue_event(&f, 4).kind == PCC_EVENT_BEGUN);
    hand_over(&f, 2);
    CHECK(queue_event(&f, 6).kind == PCC_EVENT_BEGUN);
    /* Its entry is another one's before the daemon has looked: the message is late, and no lie. */
    word_set(&f, 7 + PCC_SNAPSHOTS, PCC_WORD_REQUESTED);
    const struct pcc_request block = request_of(&f, 7 + PCC_SNAPSHOTS, PAYLOAD);
    ask(&f, 7, &block);
    ask(&f, 7 + PCC_SNAPSHOTS, &block);
    wait_queued(&f, 1);
    events_sort(&f);
    CHECK(f.queued[7].id == 7 + PCC_SNAPSHOTS);
    fixture_end(&f);
}

static void test_what_waits_ends_with_its_session(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 5; snapshot++)
        request(&f, snapshot);
    wait_queued(&f, 2);
    (void)pcc_tenant_detach(f.tenant, NULL, 0);
    for (uint64_t snapshot = 4; snapshot <= 5; snapshot++) {
        const struct pcc_event event = queue_event(&f, snapshot);
        CHECK(event.kind == PCC_EVENT_REFUSED && event.error == -ENOTCONN);
        CHECK(word_get(&f, snapshot) == pcc_word(snapshot, PCC_WORD_REFUSED));
    }
    for (uint32_t i = 0; i < 4; i++) { /* in any order */
        const struct pcc_event event = event_next(&f);
        CHECK(event.kind == PCC_EVENT_DETACHED || event.error == -PCC_E_ABORTED);
    }
    ends_close(&f);
    link_open(&f); /* the next session begins with an empty queue, and with its own numbers */
    static uint8_t bytes[PAYLOAD];
    submit(&f, 1, bytes, sizeof(bytes));
    CHECK(begin_wait(&f, 1, PAYLOAD) == 4);
    detach(&f);
    fixture_close(&f);
}

/* -- numbers -- */

static const struct pcc_tenant_end fails = {.outcome = PCC_OUTCOME_FAILED};
static const struct pcc_tenant_end skips = {.outcome = PCC_OUTCOME_SKIPPED};

static uint32_t cached_count(struct fixture *f, uint64_t sequence)
{
    uint32_t count = 0;

    pcc_tenant_lock(f->tenant);
    for (uint32_t i = 0; i < f->tenant->chunk_count; i++)
        count += f->tenant->chunks[i].state == PCC_CHUNK_CACHED &&
                 f->tenant->chunks[i].sequence == sequence;
    pcc_tenant_unlock(f->tenant);
    return count;
}

/* All that is durable has what its number said; a sequence is ten times its snapshot. */
static void table_check(struct fixture *f, uint64_t incarnation)
{
    struct pcc_record record;
    struct pcc_load *load;

    pcc_volume_record(f->volume, &record);
    for (uint32_t slot = 0; slot < record.slot_count; slot++) {
        const struct pcc_slot_entry *entry = &record.slots[slot];
        if (entry->state != PCC_SLOT_DURABLE)
            continue;
        CHECK(entry->incarnation == incarnation && entry->world_size == 1);
        CHECK_EQUAL(entry->flags, PCC_SLOT_OFFERED);
        CHECK_EQUAL(pcc_load_open(f->volume, entry->sequence, &load), 0);
        const struct pcc_manifest_notes *notes = &pcc_load_manifest(load)->notes;
        CHECK_EQUAL(notes->name_base, entry->sequence / 10);
        CHECK(notes->name_descents == 2 && notes->name_row == 3);
        pcc_load_close(load);
    }
}

/* The copy begins at once; COPIED waits for the number, whichever comes last. */
static void test_a_number_may_come_first_or_last(void)
{
    struct fixture f;
    struct pcc_tenant_usage usage;

    fixture_open(&f, &roomy);
    pcc_tenant_policy(f.tenant, &asks);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 8; snapshot++) {
        const bool first = snapshot % 2 == 0;
        request(&f, snapshot);
        CHECK(queue_event(&f, snapshot).kind == PCC_EVENT_BEGUN);
        CHECK_EQUAL(queue_event(&f, snapshot).sequence, 0);
        if (first)
            CHECK(number(&f, snapshot, 10 * snapshot, 7) == 0);
        hand_over(&f, snapshot);
        const uint64_t deadline = soon();
        do { /* all of it has come */
            pcc_tenant_usage(f.tenant, &usage);
            CHECK(pcc_now_ns() < deadline);
        } while (usage.granted_chunks > 0);
        if (!first) {
            CHECK(word_get(&f, snapshot) == pcc_word(snapshot, PCC_WORD_COPYING));
            CHECK(number(&f, snapshot, 10 * snapshot, 7) == 0);
        }
        const struct pcc_event copied = event_until(&f, PCC_EVENT_COPIED);
        CHECK(copied.id == snapshot && copied.sequence == 10 * snapshot);
        CHECK(event_until(&f, PCC_EVENT_DURABLE).sequence == 10 * snapshot);
        CHECK_EQUAL(cached_count(&f, 10 * snapshot), 4);
        /* It has ended, or never was: nothing happens. */
        CHECK(number(&f, snapshot, 10 * snapshot + 1, 7) == 0);
        CHECK(number(&f, snapshot + 1, 10 * snapshot + 1, 7) == 0);
    }
    table_check(&f, 7);
    fixture_end(&f);
}

/* One that waits for its lane is numbered there, and a number that is taken is no number. */
static void test_a_number_in_the_queue(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    pcc_tenant_policy(f.tenant, &asks);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 5; snapshot++)
        request(&f, snapshot);
    wait_queued(&f, 2);
    for (uint64_t snapshot = 1; snapshot <= 4; snapshot++)
        CHECK(number(&f, snapshot, 10 * snapshot, 1) == 0);
    hand_over(&f, 1);
    CHECK(queue_event(&f, 4).sequence == 40);
    hand_over(&f, 2);
    CHECK(queue_event(&f, 5).kind == PCC_EVENT_BEGUN);
    CHECK(number(&f, 5, 40, 1) == -EINVAL);
    CHECK(pcc_tenant_refuse(f.tenant, 5, &fails));
    CHECK(!pcc_tenant_refuse(f.tenant, 5, &fails));
    CHECK(word_get(&f, 5) == pcc_word(5, PCC_WORD_REFUSED));
    hand_over(&f, 3);
    hand_over(&f, 4);
    until_durable(&f, 4);
    table_check(&f, 1);
    fixture_end(&f);
}

/* A rank alone: above what the loop names, in whatever volume. */
static void test_sequences_stay_above_the_floor(void)
{
    struct fixture f;
    struct pcc_tenant_policy policy = alone;

    fixture_open(&f, &roomy);
    page_open(&f);
    policy.above = 40;
    policy.incarnation = 3;
    pcc_tenant_policy(f.tenant, &policy);
    request(&f, 1);
    CHECK_EQUAL(queue_event(&f, 1).sequence, 41);
    policy.above = 7;
    pcc_tenant_policy(f.tenant, &policy);
    request(&f, 2);
    CHECK_EQUAL(queue_event(&f, 2).sequence, 42);
    hand_over(&f, 1);
    until_durable(&f, 1);
    fixture_end(&f);
}

/* A newer start runs: the loop refuses what is being copied already, and what waits. */
static void test_a_fenced_one_is_refused_in_its_copy(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    pcc_tenant_policy(f.tenant, &asks);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 4; snapshot++)
        request(&f, snapshot);
    wait_queued(&f, 1);
    CHECK(pcc_tenant_refuse(f.tenant, 4, &fails));
    CHECK(pcc_tenant_refuse(f.tenant, 2, &skips));
    const uint64_t deadline = soon();
    struct pcc_tenant_usage usage;
    do { /* its lane is free */
        pcc_tenant_usage(f.tenant, &usage);
        CHECK(pcc_now_ns() < deadline);
    } while (usage.in_flight != 2);
    CHECK_EQUAL(f.other_count, 0); /* the loop knows */
    for (uint64_t snapshot = 2; snapshot <= 4; snapshot += 2) {
        CHECK(word_get(&f, snapshot) == pcc_word(snapshot, PCC_WORD_REFUSED));
        CHECK(atomic_load(&pcc_page_snapshot(&f.page, snapshot)->outcome) ==
              pcc_word(snapshot, snapshot == 2 ? PCC_OUTCOME_SKIPPED : PCC_OUTCOME_FAILED));
    }
    CHECK(number(&f, 2, 9, 1) == 0);
    CHECK(word_get(&f, 2) == pcc_word(2, PCC_WORD_REFUSED));
    fixture_end(&f);
}

/* -- the events for the loop -- */

static struct pcc_event waits(struct fixture *f, uint64_t snapshot)
{
    const struct pcc_event event = queue_event(f, snapshot);

    CHECK(event.kind == PCC_EVENT_WAITS);
    f->queued[snapshot % PCC_SNAPSHOTS].session = 0;
    return event;
}

static void test_a_wait_is_reported_once(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    pcc_tenant_policy(f.tenant, &held);
    page_open(&f);
    request(&f, 1);
    request(&f, 2);
    CHECK(waits(&f, 1).error == -EBUSY);
    ring(&f);
    wait_queued(&f, 2);
    CHECK(f.queued[1].session == 0); /* not told again */
    pcc_tenant_retry(f.tenant);
    CHECK(waits(&f, 1).error == -EBUSY);
    pcc_tenant_policy(f.tenant, &alone);
    CHECK(queue_event(&f, 1).kind == PCC_EVENT_BEGUN && queue_event(&f, 2).kind == PCC_EVENT_BEGUN);
    hand_over(&f, 1);
    hand_over(&f, 2);
    until_durable(&f, 2);
    (void)usage_at_rest(&f);
    CHECK(pcc_tenant_unbind(f.tenant, f.volume) == 0);
    request(&f, 3);
    CHECK(waits(&f, 3).error == -ENODEV);
    CHECK(pcc_tenant_bind(f.tenant, f.volume) == 0); /* which has it look again */
    CHECK(queue_event(&f, 3).kind == PCC_EVENT_BEGUN);
    fixture_end(&f);
}

/* The loop reads no event: requests stay in the ring, and what is in it afterwards comes, too. */
/* How long the drain thread has run. */
static uint64_t drained_ns(const struct fixture *f)
{
    clockid_t clock;
    struct timespec ran;

    CHECK(pthread_getcpuclockid(f->tenant->drain, &clock) == 0);
    CHECK(clock_gettime(clock, &ran) == 0);
    return (uint64_t)ran.tv_sec * SECOND + (uint64_t)ran.tv_nsec;
}

static void test_a_loop_that_is_late_bounds_the_requests(void)
{
    struct fixture f;
    uint64_t unnoted = 0, deadline = soon();

    fixture_open(&f, &roomy);
    pcc_tenant_policy(f.tenant, &held);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 64; snapshot++)
        request(&f, snapshot);
    while (unnoted < 60) {
        pcc_tenant_lock(f.tenant);
        unnoted = f.tenant->queue.unnoted;
        pcc_tenant_unlock(f.tenant);
        CHECK(pcc_now_ns() < deadline);
    }
    (void)usleep(1000);
    const uint64_t before_ns = drained_ns(&f);
    (void)usleep(200000);
    CHECK(drained_ns(&f) - before_ns < SECOND / 100); /* it sleeps until the loop has noted some */
    pcc_tenant_lock(f.tenant);
    CHECK_EQUAL(f.tenant->queue.count, 60);
    CHECK_EQUAL(f.tenant->queue.unnoted, 60);
    pcc_tenant_unlock(f.tenant);
    wait_queued(&f, 64); /* it notes what it reads */
    CHECK(waits(&f, 1).error == -EBUSY);
    pcc_tenant_policy(f.tenant, &alone);
    for (uint64_t snapshot = 1; snapshot <= 3; snapshot++)
        CHECK(queue_event(&f, snapshot).kind == PCC_EVENT_BEGUN);
    fixture_end(&f);
}

/* -- what no honest client requests -- */

enum fault {
    FAULT_LEVEL_DEVICE,
    FAULT_LEVEL_UNKNOWN,
    FAULT_KIND,
    FAULT_FLAGS,
    FAULT_RESERVED,
    FAULT_EMPTY,
    FAULT_TREE_OUTSIDE,
    FAULT_TREE_WRAPS,
    FAULT_TYPES_OUTSIDE,
    FAULT_TYPES_WRAP,
    FAULT_TYPES_NOWHERE,
    FAULT_TOO_LARGE,
    FAULT_HUGE,
    FAULT_NO_MAP,
    FAULT_COUNT,
};

static void twist(enum fault fault, struct pcc_request *block)
{
    switch (fault) {
    case FAULT_LEVEL_DEVICE:
        block->level = PCC_LEVEL_DEVICE;
        break;
    case FAULT_LEVEL_UNKNOWN:
        block->level = UINT32_MAX;
        break;
    case FAULT_KIND:
        block->kind = PCC_KIND_IMAGE + 1;
        break;
    case FAULT_FLAGS:
        block->flags = 1u << 31;
        break;
    case FAULT_RESERVED:
        block->reserved[2] = 1;
        break;
    case FAULT_EMPTY:
        block->payload_bytes = 0;
        break;
    case FAULT_TREE_OUTSIDE:
        block->tree_offset_bytes = PAYLOAD - 7;
        block->tree_bytes = 8;
        break;
    case FAULT_TREE_WRAPS:
        block->tree_offset_bytes = 8;
        block->tree_bytes = UINT64_MAX - 4;
        break;
    case FAULT_TYPES_OUTSIDE:
        block->types_offset_bytes = PAYLOAD - 7;
        block->types_bytes = 8;
        break;
    case FAULT_TYPES_WRAP:
        block->types_offset_bytes = 8;
        block->types_bytes = UINT64_MAX - 4;
        break;
    case FAULT_TYPES_NOWHERE:
        block->types_offset_bytes = 8;
        break;
    case FAULT_TOO_LARGE:
        block->payload_bytes = 2u << 20;
        break;
    case FAULT_HUGE:
        block->payload_bytes = UINT64_MAX;
        break;
    default:
        block->map = 9;
        break;
    }
}

/* Each ends this checkpoint with a reason, and nothing else. */
static void test_impossible_requests(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    page_open(&f);
    for (uint32_t fault = 0; fault < FAULT_COUNT; fault++) {
        const uint64_t snapshot = 2 * fault + 1;
        struct pcc_request block = request_of(&f, snapshot, PAYLOAD);
        twist(fault, &block);
        word_set(&f, snapshot, PCC_WORD_REQUESTED);
        ask(&f, snapshot, &block);
        const struct pcc_event event = queue_event(&f, snapshot);
        CHECK(event.error != 0);
        if (event.kind == PCC_EVENT_REQUESTED)
            CHECK(event.error == -EINVAL && event.requested.fault.cause >= PCC_CAUSE_BAD_TREE);
        else
            CHECK(event.kind == PCC_EVENT_REFUSED && fault >= FAULT_TOO_LARGE);
        CHECK(word_get(&f, snapshot) == pcc_word(snapshot, PCC_WORD_REFUSED));
        CHECK(atomic_load(&pcc_page_snapshot(&f.page, snapshot)->outcome) ==
              pcc_word(snapshot, PCC_OUTCOME_FAILED));
        request(&f, snapshot + 1);
        CHECK(queue_event(&f, snapshot + 1).kind == PCC_EVENT_BEGUN);
        hand_over(&f, snapshot + 1);
        until_durable(&f, snapshot + 1);
    }
    fixture_end(&f);
}

/* What is only reported is made plausible; the event has the rest as it was requested. */
static void test_the_event_has_the_request(void)
{
    struct fixture f;
    struct pcc_event event;

    fixture_open(&f, &roomy);
    page_open(&f);
    struct pcc_request block = request_of(&f, 1, PAYLOAD);
    block.frozen_bytes = UINT64_MAX;
    block.held_at_ns = 5;
    block.held_ns = UINT64_MAX - 2;
    block.base = 1;
    block.turn = 2;
    block.descents = 3;
    block.row = 4;
    block.interval = 50;
    block.division = UINT64_MAX;
    block.types_bytes = PAYLOAD;
    word_set(&f, 1, PCC_WORD_REQUESTED);
    ask(&f, 1, &block);
    const uint64_t deadline = soon();
    while (pcc_events_take(f.events, &event, 1) == 0)
        CHECK(pcc_now_ns() < deadline);
    CHECK(event.kind == PCC_EVENT_REQUESTED && event.id == 1 && event.session == f.session);
    block.frozen_bytes = PAYLOAD;
    block.held_at_ns = block.held_ns = 0;
    CHECK(memcmp(&event.requested.request, &block, sizeof(block)) == 0);
    fixture_end(&f);
}

/* Lies that end the session. */
static void test_lies(void)
{
    enum { ID_ZERO, ID_AGAIN, ID_LOWER, ID_HUGE, NOT_ITS_BLOCK, NOT_REQUESTED, COUNT };
    struct fixture f;

    fixture_open(&f, &roomy);
    for (uint32_t lie = 0; lie < COUNT; lie++) {
        page_open(&f);
        request(&f, 5);
        CHECK(queue_event(&f, 5).kind == PCC_EVENT_BEGUN);
        const uint64_t ids[COUNT] = {[ID_AGAIN] = 5,
                                     [ID_LOWER] = 4,
                                     [ID_HUGE] = 1ull << 56,
                                     [NOT_ITS_BLOCK] = 6,
                                     [NOT_REQUESTED] = 6};
        struct pcc_request block = request_of(&f, ids[lie], PAYLOAD);
        block.snapshot += lie == NOT_ITS_BLOCK;
        if (lie != NOT_REQUESTED)
            word_set(&f, ids[lie], PCC_WORD_REQUESTED);
        ask(&f, ids[lie], &block);
        CHECK(event_until(&f, PCC_EVENT_BAD_PEER).session == f.session);
        detach(&f);
        (void)usage_at_rest(&f);
        renew(&f, &roomy);
    }
    fixture_close(&f);
}

/* An entry that is used again: what waits has no sequence, not that of the snapshot before. */
static void test_what_waits_has_no_sequence(void)
{
    struct fixture f;
    struct pcc_client_state state;
    static uint8_t bytes[PAYLOAD];

    fixture_open(&f, &roomy);
    link_open(&f);
    for (uint64_t snapshot = 1; snapshot <= PCC_SNAPSHOTS; snapshot++)
        CHECK(save(&f, snapshot, bytes, sizeof(bytes)) > 0);
    pcc_tenant_policy(f.tenant, &held);
    submit(&f, 1 + PCC_SNAPSHOTS, bytes, sizeof(bytes));
    CHECK(queue_event(&f, 1 + PCC_SNAPSHOTS).kind == PCC_EVENT_WAITS);
    CHECK(pcc_client_state(f.client, 1 + PCC_SNAPSHOTS, &state) == 0);
    CHECK(state.word == PCC_WORD_REQUESTED && state.outcome == PCC_OUTCOME_REQUESTED);
    CHECK_EQUAL(state.sequence, 0);
    fixture_end(&f);
}

int main(void)
{
    RUN(test_first_come_first_served);
    RUN(test_a_freed_lane_wakes_the_queue);
    RUN(test_a_skipping_one_does_not_wait);
    RUN(test_a_group_decides_before_a_rank_skips);
    RUN(test_an_abandoned_one_leaves_the_queue);
    RUN(test_what_waits_ends_with_its_session);
    RUN(test_a_number_may_come_first_or_last);
    RUN(test_a_number_in_the_queue);
    RUN(test_sequences_stay_above_the_floor);
    RUN(test_a_fenced_one_is_refused_in_its_copy);
    RUN(test_a_wait_is_reported_once);
    RUN(test_a_loop_that_is_late_bounds_the_requests);
    RUN(test_impossible_requests);
    RUN(test_the_event_has_the_request);
    RUN(test_lies);
    RUN(test_what_waits_has_no_sequence);
    return 0;
}
