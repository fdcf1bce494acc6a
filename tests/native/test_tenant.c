/* Shared memory with honest peers: saves, loads, little memory, death on either side, and the word
 * that decides between a late daemon and a client that has abandoned the snapshot. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>

#include "tenant_fixture.h"

static const struct settings roomy = {.payload_capacity = 2u << 20, .memory_bytes = 4u << 20};
static const struct settings scarce = {.payload_capacity = 4u << 20, .memory_bytes = 4 * CHUNK};
static const struct settings slow = {
    .payload_capacity = 1u << 20, .memory_bytes = 4u << 20, .bytes_per_second = 4u << 20};
static const struct settings stuck = {/* little memory that the disk gives back late */
                                      .payload_capacity = 2u << 20,
                                      .memory_bytes = 4 * CHUNK,
                                      .bytes_per_second = 1u << 20};

/* Ranges, inline ranges and tail with gaps between them; the gaps come back as zeros. */
static void test_ranges(void)
{
    struct fixture f;
    static uint8_t first[100000], second[300], middle[70000], tail[777], expected[400000],
        got[400000];
    const struct pcc_range ranges[] = {
        {.address = (uintptr_t)first, .offset_bytes = 64, .length_bytes = sizeof(first)},
        {.address = (uintptr_t)second, .offset_bytes = 220032, .length_bytes = sizeof(second)}};
    const struct pcc_range inlined = {
        .address = (uintptr_t)middle, .offset_bytes = 131072, .length_bytes = sizeof(middle)};
    const uint64_t tail_at = 230016, payload = tail_at + sizeof(tail);
    struct pcc_submission submission = {.ranges = ranges,
                                        .range_count = 2,
                                        .inline_ranges = &inlined,
                                        .inline_count = 1,
                                        .tail = tail,
                                        .tail_bytes = sizeof(tail),
                                        .tail_offset_bytes = tail_at};
    uint64_t sequence;

    fixture_open(&f, &roomy);
    link_open(&f);
    pattern(first, sizeof(first), 1);
    pattern(second, sizeof(second), 2);
    pattern(middle, sizeof(middle), 3);
    pattern(tail, sizeof(tail), 4);
    memcpy(expected + 64, first, sizeof(first));
    memcpy(expected + 131072, middle, sizeof(middle));
    memcpy(expected + 220032, second, sizeof(second));
    memcpy(expected + tail_at, tail, sizeof(tail));

    CHECK(pcc_client_request(f.client, 1) == 0);
    CHECK(pcc_client_submit(f.client, 1, &submission) == 0);
    memset(middle, 0, sizeof(middle)); /* was copied during the call */
    memset(tail, 0, sizeof(tail));
    CHECK(begin(&f, 1, payload, &sequence) == 0);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_READ, soon()) == 0);
    memset(first, 0, sizeof(first)); /* the trainer updates */
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_DURABLE, soon()) == 0);
    CHECK(event_next(&f).kind == PCC_EVENT_COPIED);
    CHECK(event_next(&f).kind == PCC_EVENT_WRITING);
    CHECK(event_next(&f).kind == PCC_EVENT_DURABLE);
    load_equals(&f, sequence, 1, expected, payload);

    /* Parts only, and ranges that cut through chunks. */
    const struct pcc_range part = {
        .address = (uintptr_t)got, .offset_bytes = 100, .length_bytes = 150000};
    CHECK(load(&f, sequence, 2, &part, 1, 100, 150000) == 0);
    CHECK(memcmp(got, expected + 100, 150000) == 0);
    CHECK(load(&f, sequence, 3, NULL, 0, 0, payload + 1) == -EINVAL);
    CHECK(load(&f, sequence + 1, 4, NULL, 0, 0, 1) == -ENOENT);

    /* Overlaps are refused before anything is read. */
    struct pcc_range bad[] = {ranges[0], ranges[1]};
    bad[1].offset_bytes = 70;
    CHECK(pcc_client_request(f.client, 2) == 0);
    submission.ranges = bad;
    submission.inline_count = 0;
    CHECK(pcc_client_submit(f.client, 2, &submission) == -EINVAL);
    CHECK(pcc_client_abandon(f.client, 2));
    fixture_end(&f);
    CHECK(f.queued[2].session == 0); /* the daemon has not heard of it */
}

/* What is cached is recovered although the disk has rotted; what rots in DRAM is read again. */
static void test_load_from_dram(void)
{
    struct fixture f;
    static uint8_t bytes[1000000];

    fixture_open(&f, &roomy);
    link_open(&f);
    pattern(bytes, sizeof(bytes), 5);
    const uint64_t sequence = save(&f, 1, bytes, sizeof(bytes));
    detach(&f); /* the trainer dies; its cached chunks stay */
    link_open(&f);
    load_equals(&f, sequence, 1, bytes, sizeof(bytes));
    CHECK(loaded_from_memory(&f) == 1);

    f.tenant->chunks[3].bytes[17] ^= 1;
    load_equals(&f, sequence, 2, bytes, sizeof(bytes));
    const double intact = loaded_from_memory(&f);
    CHECK(intact > 0 && intact < 1);

    const uint64_t second = save(&f, 1, bytes, sizeof(bytes));
    const int fd = open(f.path, O_WRONLY | O_CLOEXEC);
    const struct pcc_geometry geometry = pcc_volume_geometry(f.volume);
    CHECK(fd >= 0);
    for (uint32_t slot = 0; slot < geometry.slot_count; slot++)
        CHECK(pwrite(fd, "rot", 3, (off_t)pcc_geometry_slot_offset(&geometry, slot)) == 3);
    CHECK(close(fd) == 0);
    load_equals(&f, second, 3, bytes, sizeof(bytes));

    detach(&f);
    CHECK(pcc_tenant_release_memory(f.tenant) == 0);
    uint64_t budget, used;
    pcc_pool_usage(f.pool, &budget, &used);
    CHECK(used == 0);
    link_open(&f);
    CHECK(pcc_tenant_grow(f.tenant, 2 * CHUNK, &used) == 0 && used == 2 * CHUNK);
    const struct pcc_range range = {.address = (uintptr_t)bytes, .length_bytes = sizeof(bytes)};
    CHECK(load(&f, second, 4, &range, 1, 0, sizeof(bytes)) == -PCC_E_DAMAGED);
    fixture_end(&f);
}

/* m > M: chunks are used again as they are written, for saves and for loads. */
static void test_recycling(void)
{
    struct fixture f;
    const uint64_t count = (4u << 20) - 100;
    uint8_t *bytes = malloc(count);
    struct pcc_tenant_usage usage;

    CHECK(bytes != NULL);
    fixture_open(&f, &scarce);
    link_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 6; snapshot++) {
        pattern(bytes, count, snapshot);
        const uint64_t sequence = save(&f, snapshot, bytes, count);
        load_equals(&f, sequence, snapshot, bytes, count);
        CHECK(loaded_from_memory(&f) < 1);
    }
    const uint64_t deadline = soon();
    do { /* the last chunks of the load are on their way back */
        pcc_tenant_usage(f.tenant, &usage);
        CHECK(pcc_now_ns() < deadline);
    } while (usage.lent_chunks > 0);
    CHECK(usage.granted_chunks == 0 && usage.in_flight == 0);
    CHECK(usage.free_chunks + usage.cached_chunks == 4);
    fixture_end(&f);
    free(bytes);
}

/* N at once, each with bytes of its own; the newest is what recovery finds. */
static void test_several_in_flight(void)
{
    struct fixture f;
    const uint64_t count = 900000;
    uint8_t *bytes = malloc(3 * count);
    uint64_t sequences[3], ignored;
    struct pcc_tenant_usage usage;

    CHECK(bytes != NULL);
    fixture_open(&f, &slow);
    link_open(&f);
    for (uint64_t i = 0; i < 3; i++) {
        pattern(bytes + i * count, count, i + 1);
        submit(&f, i + 1, bytes + i * count, count);
    }
    for (uint64_t i = 0; i < 3; i++)
        CHECK(begin(&f, i + 1, count, &sequences[i]) == 0);
    f.flags = PCC_REQUEST_SKIP;
    submit(&f, 4, bytes, count);
    CHECK(begin(&f, 4, count, &ignored) == -PCC_E_NO_LANE);
    CHECK(pcc_client_wait(f.client, 4, PCC_WAIT_DURABLE, soon()) == 0);
    struct pcc_client_state state;
    CHECK(pcc_client_state(f.client, 4, &state) == 0);
    CHECK(state.word == PCC_WORD_REFUSED && state.outcome == PCC_OUTCOME_SKIPPED);
    CHECK(state.reason.cause == PCC_CAUSE_SLOTS_BUSY);
    for (uint64_t i = 1; i <= 3; i++)
        CHECK(pcc_client_wait(f.client, i, PCC_WAIT_COPIED, soon()) == 0);
    pcc_tenant_usage(f.tenant, &usage);
    CHECK(usage.in_flight == 3); /* all copied before the slow disk has taken one */
    for (uint64_t i = 1; i <= 3; i++) {
        CHECK(pcc_client_wait(f.client, i, PCC_WAIT_DURABLE, soon()) == 0);
        CHECK(pcc_client_state(f.client, i, &state) == 0);
        CHECK(state.outcome == PCC_OUTCOME_DURABLE || state.outcome == PCC_OUTCOME_SUPERSEDED);
        CHECK(i < 3 || state.outcome == PCC_OUTCOME_DURABLE);
        CHECK((state.newer > state.sequence) == (state.outcome == PCC_OUTCOME_SUPERSEDED));
        CHECK((state.reason.cause == PCC_CAUSE_REPLACED) == (state.newer > 0));
    }
    load_equals(&f, sequences[2], 1, bytes + 2 * count, count);
    fixture_end(&f);
    free(bytes);
}

/* The trainer is killed by SIGKILL at many points of the copy. The checkpoint fails or, when all of
 * it was handed over, becomes durable; what was durable before stays, and the tenant serves the
 * next trainer. */
static void test_trainer_killed(void)
{
    struct fixture f;
    const uint64_t count = 2u << 20;
    uint8_t *bytes = malloc(count);
    uint32_t durable = 0, failed = 0;

    CHECK(bytes != NULL);
    pattern(bytes, count, 9);
    fixture_open(&f, &roomy);
    for (uint32_t round = 0; round < 12; round++) {
        uint64_t sequence;
        attach(&f);
        const pid_t child = trainer_to_kill(&f, bytes, count);
        CHECK(begin(&f, 1, count, &sequence) == 0);
        if (round % 4 == 3)
            CHECK(event_until(&f, PCC_EVENT_COPIED).id == 1);
        else
            (void)usleep(round * 150);
        CHECK(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
        (void)pcc_tenant_detach(f.tenant, NULL, 0);
        struct pcc_event event;
        do
            event = event_next(&f);
        while (event.kind != PCC_EVENT_DURABLE && event.kind != PCC_EVENT_FAILED);
        CHECK(event.id == 1 && event.sequence == sequence);
        if (event.kind == PCC_EVENT_DURABLE) {
            durable++;
        } else {
            CHECK(event.error == -PCC_E_ABORTED && round % 4 != 3);
            failed++;
        }
        ends_close(&f);
        struct pcc_tenant_usage usage;
        pcc_tenant_usage(f.tenant, &usage);
        CHECK(usage.granted_chunks == 0 && usage.in_flight == 0);
        renew(&f, &roomy); /* the tenant was not told which process it is */
    }
    CHECK(durable >= 3);
    printf("  killed in mid-copy: %u failed, %u durable\n", failed, durable);
    link_open(&f);
    load_equals(&f, save(&f, 1, bytes, count), 1, bytes, count);
    fixture_end(&f);
    free(bytes);
}

/* A paused daemon (its lock is held, as if it were stopped there) and a client that abandons. */
static void test_abandon_and_late_daemon(void)
{
    struct fixture f;
    const uint64_t count = 1u << 20;
    uint8_t *bytes = malloc(count);
    struct pcc_client_state state;
    uint64_t sequence;

    CHECK(bytes != NULL);
    pattern(bytes, count, 3);
    fixture_open(&f, &stuck);
    link_open(&f);
    submit(&f, 1, bytes, count);
    CHECK(begin(&f, 1, count, &sequence) == 0);
    pcc_tenant_lock(f.tenant);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_READ, pcc_now_ns() + SECOND / 20) == -ETIMEDOUT);
    CHECK(pcc_client_abandon(f.client, 1));
    CHECK(!pcc_client_abandon(f.client, 1));
    memset(bytes, 0xff, count); /* the trainer goes on; the copy would be torn */
    pcc_tenant_unlock(f.tenant);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_DURABLE, soon()) == 0);
    CHECK(pcc_client_state(f.client, 1, &state) == 0);
    CHECK(state.word == PCC_WORD_ABANDONED && state.source_read);
    const struct pcc_event event = event_until(&f, PCC_EVENT_FAILED);
    CHECK(event.id == 1 && event.error == -PCC_E_ABORTED);
    load_equals(&f, save(&f, 2, bytes, count), 1, bytes, count);
    CHECK(!pcc_client_abandon(f.client, 2));
    fixture_end(&f);
    free(bytes);
}

/* The daemon goes: nothing waits for ever, and the source is let go. */
static void test_daemon_gone(void)
{
    struct fixture f;
    static uint8_t bytes[1u << 20];
    struct pcc_client_state state;

    fixture_open(&f, &roomy);
    link_open(&f);
    (void)save(&f, 1, bytes, sizeof(bytes));
    CHECK(pcc_client_alive(f.client));
    pcc_tenant_policy(f.tenant, &held);
    submit(&f, 2, bytes, sizeof(bytes));
    CHECK(queue_event(&f, 2).kind == PCC_EVENT_WAITS); /* and is refused at the end */
    CHECK(pcc_client_load_start(f.client, 9, NULL, 0, NULL, 0) == 0);
    (void)pcc_tenant_detach(f.tenant, NULL, 0);
    CHECK(shutdown(f.sockets[0], SHUT_RDWR) == 0);
    CHECK(pcc_client_load_wait(f.client, 9, soon()) == -ECONNRESET);
    CHECK(pcc_client_wait(f.client, 2, PCC_WAIT_READ, soon()) == 0);
    CHECK(pcc_client_wait(f.client, 2, PCC_WAIT_DURABLE, soon()) == 0);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_DURABLE, soon()) == 0);
    CHECK(pcc_client_state(f.client, 2, &state) == 0);
    CHECK(state.word == PCC_WORD_REFUSED && state.source_read);
    CHECK(state.reason.cause == PCC_CAUSE_ENDED_BEFORE);
    CHECK(!pcc_client_alive(f.client));
    CHECK(pcc_client_request(f.client, 3) == -ECONNRESET);
    ends_close(&f);
    fixture_close(&f);
}

static void *close_later(void *argument)
{
    (void)usleep(30000);
    pcc_client_close(argument);
    return NULL;
}

/* close() first ends a wait; and a worker that was forked does not keep the session alive. */
static void test_close_and_fork(void)
{
    struct fixture f;
    pthread_t closer;
    struct pollfd hang_up = {.events = POLLRDHUP};

    fixture_open(&f, &roomy);
    link_open(&f);
    const pid_t worker = fork();
    CHECK(worker >= 0);
    if (worker == 0) {
        (void)close(f.sockets[1]); /* the client's copy of it is closed already */
        for (;;)
            (void)pause();
    }
    CHECK(pcc_client_request(f.client, 1) == 0);
    CHECK(pthread_create(&closer, NULL, close_later, f.client) == 0);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_COPIED, soon()) == -ECONNRESET);
    CHECK(pthread_join(closer, NULL) == 0);
    f.client = NULL;
    CHECK(close(f.sockets[1]) == 0);
    hang_up.fd = f.sockets[0];
    CHECK(poll(&hang_up, 1, 10000) == 1);
    f.sockets[1] = dup(f.sockets[0]);
    CHECK(kill(worker, SIGKILL) == 0 && waitpid(worker, NULL, 0) == worker);
    fixture_end(&f);
}

int main(void)
{
    RUN(test_ranges);
    RUN(test_load_from_dram);
    RUN(test_recycling);
    RUN(test_several_in_flight);
    RUN(test_abandon_and_late_daemon);
    RUN(test_daemon_gone);
    RUN(test_close_and_fork);
    RUN(test_trainer_killed);
    return 0;
}
