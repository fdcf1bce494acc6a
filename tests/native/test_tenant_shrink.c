/* Segments are taken back from a tenant in use: nothing is lost, nothing stands still, and what
 * was given back is really gone. */
#include "tenant_fixture.h"

#define SEGMENT (2 * CHUNK)

static const struct settings roomy = {
    .payload_capacity = 2u << 20, .memory_bytes = 32 * CHUNK, .segment_bytes = SEGMENT};
static const struct settings slow = {.payload_capacity = 1u << 20,
                                     .memory_bytes = 32 * CHUNK,
                                     .segment_bytes = SEGMENT,
                                     .bytes_per_second = 4u << 20};

static uint64_t used(const struct fixture *f)
{
    uint64_t budget, bytes;

    pcc_pool_usage(f->pool, &budget, &bytes);
    return bytes;
}

/* As the daemon does for a session that needs the memory. */
static void shrink(struct fixture *f, uint64_t bytes, uint64_t expected)
{
    struct pcc_tenant_holding holding;
    const uint64_t deadline = soon();

    do {
        CHECK(pcc_now_ns() < deadline);
        pcc_tenant_shrink(f->tenant, bytes, &holding);
        CHECK_EQUAL(holding.lasting_bytes, expected);
        (void)usleep(200);
    } while (holding.bytes > holding.lasting_bytes);
    CHECK_EQUAL(holding.asked, 0);
    CHECK_EQUAL(used(f), expected);
}

/* Mappings of segments in this process, which is daemon and client. */
static uint32_t mappings(void)
{
    return check_mappings("pccheck-segment");
}

/* An idle trainer gives back what it cached, and grows again later, under the same chunk numbers.
 */
static void test_idle(void)
{
    struct fixture f;
    const uint64_t count = 20 * CHUNK;
    uint8_t *bytes = malloc(count);

    CHECK(bytes != NULL);
    fixture_open(&f, &roomy);
    link_open(&f);
    for (uint64_t round = 1; round <= 4; round++) {
        pattern(bytes, count, round);
        const uint64_t sequence = save(&f, 2 * round - 1, bytes, count);
        CHECK_EQUAL(mappings(), 2 * 16);
        shrink(&f, 4 * SEGMENT, 4 * SEGMENT);
        CHECK_EQUAL(mappings(), 2 * 4);
        CHECK_EQUAL(f.tenant->segments[3].number, 4);
        load_equals(&f, sequence, 2 * round, bytes, count);
        bytes[7]++;
        CHECK(save(&f, 2 * round, bytes, count) > sequence); /* m > M by now */
        grow(&f, roomy.memory_bytes, SEGMENT);
        CHECK_EQUAL(f.tenant->segments[15].number, 4 + 12 * (round + 1));
    }
    shrink(&f, 0, SEGMENT); /* two chunks stay in any case */
    pattern(bytes, count, 9);
    load_equals(&f, save(&f, 9, bytes, count), 9, bytes, count);
    detach(&f);
    shrink(&f, 0, SEGMENT);
    fixture_close(&f);
    free(bytes);
}

/* Three are in flight, one of them is being copied: all become durable. */
static void test_in_flight(void)
{
    struct fixture f;
    const uint64_t count = 900000;
    uint8_t *bytes = malloc(3 * count);
    uint64_t sequences[3];

    CHECK(bytes != NULL);
    for (uint32_t copied = 0; copied < 4; copied++) {
        fixture_open(&f, &slow);
        link_open(&f);
        for (uint64_t i = 0; i < 3; i++) {
            pattern(bytes + i * count, count, 3 * copied + i);
            submit(&f, i + 1, bytes + i * count, count);
            sequences[i] = begin_wait(&f, i + 1, count);
            if (i < copied)
                CHECK(pcc_client_wait(f.client, i + 1, PCC_WAIT_COPIED, soon()) == 0);
        }
        shrink(&f, SEGMENT, SEGMENT);
        for (uint64_t i = 1; i <= 3; i++) {
            struct pcc_client_state state;
            CHECK(pcc_client_wait(f.client, i, PCC_WAIT_DURABLE, soon()) == 0);
            CHECK(pcc_client_state(f.client, i, &state) == 0);
            CHECK(state.outcome == PCC_OUTCOME_DURABLE || state.outcome == PCC_OUTCOME_SUPERSEDED);
        }
        load_equals(&f, sequences[2], 1, bytes + 2 * count, count);
        fixture_end(&f);
    }
    free(bytes);
}

/* The trainer is gone, what it had copied is still being written. */
static void test_detached(void)
{
    struct fixture f;
    static uint8_t bytes[900000];

    fixture_open(&f, &slow);
    link_open(&f);
    pattern(bytes, sizeof(bytes), 5);
    submit(&f, 1, bytes, sizeof(bytes));
    const uint64_t sequence = begin_wait(&f, 1, sizeof(bytes));
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_COPIED, soon()) == 0);
    struct pcc_tenant_holding holding;
    pcc_tenant_shrink(f.tenant, SEGMENT, &holding);
    CHECK(holding.bytes > holding.lasting_bytes);
    (void)pcc_tenant_detach(f.tenant, NULL, 0);
    ends_close(&f);
    link_open(&f); /* the next one is not sent what is going */
    shrink(&f, SEGMENT, SEGMENT);
    CHECK(event_until(&f, PCC_EVENT_DURABLE).sequence == sequence);
    const uint64_t deadline = soon();
    while (mappings() != 2) { /* the next client's thread may not have come to it yet */
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(200);
    }
    load_equals(&f, sequence, 1, bytes, sizeof(bytes));
    fixture_end(&f);
}

struct storm {
    struct fixture *f;
    uint64_t seed;
    _Atomic bool over;
};

static uint64_t next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
    return *seed >> 33;
}

static void *storm_run(void *argument)
{
    struct storm *storm = argument;
    struct pcc_tenant_holding holding = {0};
    uint64_t granted;

    while (!atomic_load(&storm->over)) {
        const uint64_t bytes = (1 + next(&storm->seed) % 16) * SEGMENT;
        pcc_tenant_shrink(storm->f->tenant, bytes, &holding);
        if (holding.bytes == holding.lasting_bytes && next(&storm->seed) % 2 == 0)
            CHECK(pcc_tenant_grow(storm->f->tenant, holding.bytes + SEGMENT, &granted) == 0);
        CHECK(used(storm->f) <= roomy.memory_bytes);
        (void)usleep((unsigned)(next(&storm->seed) % 300));
    }
    return NULL;
}

/* Saves, loads and sessions, while another thread grows and shrinks as it likes. */
static void test_storm(void)
{
    const char *given = getenv("PCCHECK_SEED");
    const uint64_t seed = given != NULL ? strtoull(given, NULL, 10) : pcc_now_ns();
    struct fixture f;
    struct storm storm = {.f = &f, .seed = seed};
    const uint64_t most = 30 * CHUNK;
    uint8_t *bytes = malloc(most);
    pthread_t thread;

    printf("  PCCHECK_SEED=%llu\n", (unsigned long long)seed);
    CHECK(bytes != NULL);
    fixture_open(&f, &roomy);
    CHECK(pthread_create(&thread, NULL, storm_run, &storm) == 0);
    uint64_t dice = seed ^ 0x5eed;
    for (uint32_t session = 0; session < 12; session++) {
        link_open(&f);
        for (uint64_t snapshot = 1; snapshot <= 6; snapshot++) {
            const uint64_t count = 1 + next(&dice) % most;
            pattern(bytes, count, dice);
            const uint64_t sequence = save(&f, snapshot, bytes, count);
            load_equals(&f, sequence, snapshot, bytes, count);
        }
        detach(&f);
    }
    atomic_store(&storm.over, true);
    CHECK(pthread_join(thread, NULL) == 0);
    shrink(&f, 0, SEGMENT);
    fixture_close(&f);
    free(bytes);
}

int main(void)
{
    RUN(test_idle);
    RUN(test_in_flight);
    RUN(test_detached);
    RUN(test_storm);
    return 0;
}
