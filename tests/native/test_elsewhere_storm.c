/* Ranks that share state and end at random moments, at once: what was copied of any of them is of
 * their step, whatever the others do meanwhile. PCC_STORM_ROUNDS rounds from PCC_SEED on. */
#include "pull_fixture.h"

#define RANKS 3u
#define PARTS 3u

struct rank {
    struct pull p;
    struct storm *storm;
    uint32_t number, act;
    bool breaks;
    uint32_t delay_us, late_us;
    int32_t lender;
    uint8_t *expected;
};

struct storm {
    struct rank ranks[RANKS];
    uint64_t random;
    uint32_t lent, copied, lost;
    pthread_barrier_t barrier;
};

static uint32_t roll(struct storm *storm, uint32_t below)
{
    storm->random = storm->random * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(storm->random >> 33) % below;
}

static const struct pcc_exposed_range parts[PARTS] = {
    {.allocation = 0, .allocation_offset_bytes = 256, .length_bytes = 2 * CHUNK},
    {.allocation = 1, .allocation_offset_bytes = 0, .length_bytes = 1000},
    {.allocation = 1, .allocation_offset_bytes = 2000, .length_bytes = 98000}};

static void layout_make(struct storm *storm, struct rank *rank)
{
    struct pull *p = &rank->p;
    uint64_t at = 64, end = 2 * CHUNK;
    const uint32_t first = roll(storm, 2), last = roll(storm, 2) ? first : 1 - first;
    const uint32_t which = roll(storm, 3); /* 0: all */

    (void)allocate(p, first, 3 * CHUNK);
    (void)allocate(p, last, 100000);
    fill(p, 5);
    for (uint32_t i = 0; i < PARTS; i++) {
        p->replica[i] = parts[i];
        p->replica[i].offset_bytes = at;
        if (i == 0 || which == 0 || which == i) {
            const uint64_t offset = i == 0 ? 0 : end;
            p->shares[p->share_count++] =
                (struct pcc_exposed_share){.replica_offset_bytes = at,
                                           .offset_bytes = offset,
                                           .length_bytes = parts[i].length_bytes};
            range_add(p, i == 0 ? 0 : 1, parts[i].allocation_offset_bytes, parts[i].length_bytes,
                      offset);
            end = pcc_align_up(offset + parts[i].length_bytes, 64);
        }
        at = pcc_align_up(at + parts[i].length_bytes, 64);
    }
    p->replica_count = PARTS;
    p->replica_id = 7;
    p->device_bytes = pcc_align_up(end, CHUNK);
}

static void defer(struct rank *rank)
{
    struct pull *p = &rank->p;
    struct pcc_request request = pull_request(p, 1);
    uint64_t sequence;

    request.level = PCC_LEVEL_DEVICE;
    CHECK(admit_as(p, 1, &request, &sequence) == 0);
    ready_set(p, 1, 0);
    ready_set(p, 1, 1);
    push_tree(p, 1);
    struct pcc_sample *sample = pcc_page_samples(&p->f.page, 1);
    *sample = (struct pcc_sample){.offset_bytes = p->ranges[1].offset_bytes + 10,
                                  .length_bytes = PCC_SAMPLE_BYTES};
    memcpy(sample->bytes, p->memory[1].expected + p->ranges[1].allocation_offset_bytes + 10,
           PCC_SAMPLE_BYTES);
    rank->expected = payload_expected(p, 1);
}

static void update(struct pull *p)
{
    (void)trainer_ask(&p->trainer, (struct order){.what = ORDER_FILL,
                                                  .address = p->memory[0].address,
                                                  .length = p->memory[0].exposed.length_bytes,
                                                  .seed = 999});
}

static void *rank_run(void *argument)
{
    struct rank *rank = argument;
    struct pull *p = &rank->p;
    struct pcc_tenant *others[RANKS];
    uint32_t count = 0;
    const struct pcc_message write = {.kind = PCC_MSG_WRITE, .id = 1};
    const uint32_t device = p->memory[0].exposed.device;

    for (uint32_t i = 1; i < RANKS; i++)
        others[count++] = rank->storm->ranks[(rank->number + i) % RANKS].p.f.tenant;
    (void)pthread_barrier_wait(&rank->storm->barrier);
    (void)usleep(rank->delay_us);
    if (rank->act == 1) { /* the update begins */
        atomic_store(&pcc_page_words(&p->f.page, 1, 0)->withdrawn, 1);
        atomic_store(&pcc_page_words(&p->f.page, 1, 1)->withdrawn, 1);
        update(p);
    } else if (rank->act == 2) { /* it is wanted, and streams wait */
        CHECK(pcc_ring_push(&p->f.page.to_daemon, &write) == 0);
        pcc_bell_ring(&p->f.page.page->daemon_bell);
        const uint64_t deadline = soon();
        while (done_of(p, 1, device) < 1) {
            CHECK(pcc_now_ns() < deadline);
            (void)usleep(20);
        }
        update(p);
    } else if (rank->act == 3) { /* it abandons its snapshot */
        if (pcc_word_move(pcc_page_snapshot(&p->f.page, 1), 1, PCC_WORD_COPYING,
                          PCC_WORD_ABANDONED)) {
            pcc_bell_ring(&p->f.page.page->daemon_bell);
            update(p);
        }
    }
    (void)usleep(rank->late_us);
    if (rank->breaks) {
        atomic_store(&pcc_page_words(&p->f.page, 1, device)->broken, 1);
        update(p); /* its memory may be anything */
    } else {
        trainer_kill(&p->trainer);
    }
    rank->lender = pcc_tenant_detach(p->f.tenant, others, count);
    return NULL;
}

static void judge(struct storm *storm, struct rank *rank)
{
    struct pull *p = &rank->p;
    bool detached = false, copied = false, durable = false;
    uint64_t sequence = 0;

    while (!detached) {
        const struct pcc_event event = event_next(&p->f);
        detached = event.kind == PCC_EVENT_DETACHED;
        if (event.id == 1 && event.kind == PCC_EVENT_COPIED) {
            copied = true;
            sequence = event.sequence;
        }
        durable = durable || event.kind == PCC_EVENT_DURABLE;
    }
    CHECK(copied || rank->lender < 0);
    if (copied) {
        CHECK(pcc_tenant_write(p->f.tenant, sequence) == 0);
        if (!durable)
            CHECK(event_until(&p->f, PCC_EVENT_DURABLE).id == 1);
        saved_equals(p, sequence, rank->expected);
    }
    storm->copied += copied;
    storm->lost += !copied;
    storm->lent += rank->lender >= 0;
    free(rank->expected);
}

static void round_play(struct storm *storm, struct pull *common)
{
    pthread_t threads[RANKS];

    poke(&common->control->copy_slow_kinds, STANDIN_TO_HOST);
    poke(&common->control->copy_us_per_mib, roll(storm, 20000));
    for (uint32_t i = 0; i < RANKS; i++) {
        struct rank *rank = &storm->ranks[i];
        *rank = (struct rank){.storm = storm, .number = i};
        struct pull *p = &rank->p;
        p->control = common->control;
        p->gpus = common->gpus;
        const struct settings settings = {
            .payload_capacity = 4u << 20, .memory_bytes = 24 * CHUNK, .gpus = p->gpus};
        fixture_open(&p->f, &settings);
        trainer_start(&p->trainer);
        trainer_page_open(p);
        layout_make(storm, rank);
        expose(p);
        rank->act = roll(storm, 7);
        rank->breaks = roll(storm, 2);
        rank->delay_us = roll(storm, 4000);
        rank->late_us = roll(storm, 3) ? roll(storm, 30000) : roll(storm, 1000);
    }
    for (uint32_t i = 0; i < RANKS; i++)
        defer(&storm->ranks[i]);
    CHECK(pthread_barrier_init(&storm->barrier, NULL, RANKS) == 0);
    for (uint32_t i = 0; i < RANKS; i++)
        CHECK(pthread_create(&threads[i], NULL, rank_run, &storm->ranks[i]) == 0);
    for (uint32_t i = 0; i < RANKS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(pthread_barrier_destroy(&storm->barrier) == 0);
    for (uint32_t i = 0; i < RANKS; i++)
        judge(storm, &storm->ranks[i]);
    for (uint32_t i = 0; i < RANKS; i++) {
        struct pull *p = &storm->ranks[i].p;
        CHECK_EQUAL(p->f.tenant->pull.maps, 0);
        CHECK_EQUAL(p->f.tenant->pull.readers, 0);
        ends_close(&p->f);
        trainer_kill(&p->trainer);
        mappings_gone(p);
        fixture_close(&p->f);
        expected_free(p);
    }
}

static void test_storm(void)
{
    const char *rounds = getenv("PCC_STORM_ROUNDS"), *seed = getenv("PCC_SEED");
    struct storm storm = {.random = seed != NULL ? strtoull(seed, NULL, 0) : 14};
    struct pull common = {0};

    control_open(&common);
    CHECK(pcc_gpus_open(&common.gpus) == 0);
    for (int i = rounds != NULL ? atoi(rounds) : 60; i > 0; i--)
        round_play(&storm, &common);
    printf("  %u copied, %u of them from another rank, %u lost\n", storm.copied, storm.lent,
           storm.lost);
    pcc_gpus_close(common.gpus);
    CHECK_EQUAL(peek(&common.control->registered_bytes), 0);
    CHECK_EQUAL(peek(&common.control->streams) + peek(&common.control->events), 0);
}

static const struct test tests[] = {{"test_storm", test_storm}};

int main(int argc, char **argv)
{
    if (getenv("PCCHECK_STANDIN_DEAD") == NULL)
        (void)setenv("PCCHECK_STANDIN_DEAD", "keep", 1);
    return pull_main(argc, argv, tests, 1);
}
