/* Ranks that share state: a step on the GPU of a rank that has ended, whose memory cannot be read
 * any more, is read from the GPU of another rank, if that one has it whole all the time. */
#include "pull_fixture.h"

#define PARTS 3u

struct pair {
    struct pull dead, other;
    uint64_t sequence, other_sequence; /* of snapshot 1 */
};

/* What usual_layout has, as another rank has it: at other places of its payload. */
static void other_layout(struct pull *q)
{
    (void)allocate(q, 0, 3 * CHUNK);
    (void)allocate(q, 0, 100000);
    fill(q, 1);
    range_add(q, 1, 2000, 98000, 0);
    q->device_bytes = 2 * CHUNK;
}

/* Where the parts of usual_layout are in the replica, whose places are the same on both ranks. */
static void replica_add(struct pair *pair)
{
    uint64_t at = 64;

    for (uint32_t i = 0; i < PARTS; i++) {
        const struct pcc_exposed_range *range = &pair->dead.ranges[i];
        pair->dead.shares[i] = (struct pcc_exposed_share){
            .replica_offset_bytes = at,
            .offset_bytes = range->offset_bytes,
            .length_bytes = range->length_bytes,
        };
        pair->other.replica[i] = *range;
        pair->other.replica[i].offset_bytes = at;
        at = pcc_align_up(at + range->length_bytes, 64);
    }
    pair->dead.share_count = pair->other.replica_count = PARTS;
    pair->dead.replica_id = pair->other.replica_id = 7;
}

static void pair_open(struct pair *pair)
{
    struct pull *q = &pair->other;

    pull_open(&pair->dead, 24 * CHUNK);
    usual_layout(&pair->dead);
    memset(q, 0, sizeof(*q));
    q->control = pair->dead.control;
    q->gpus = pair->dead.gpus;
    const struct settings settings = {
        .payload_capacity = 4u << 20, .memory_bytes = 24 * CHUNK, .gpus = q->gpus};
    fixture_open(&q->f, &settings);
    trainer_start(&q->trainer);
    trainer_page_open(q);
    other_layout(q);
    replica_add(pair);
    expose(&pair->dead);
    expose(q);
    fill(&pair->dead, 5);
    fill(q, 5);
}

static uint64_t defer(struct pull *p, bool ready)
{
    struct pcc_request request = pull_request(p, 1);
    uint64_t sequence;

    request.level = PCC_LEVEL_DEVICE;
    CHECK(admit_as(p, 1, &request, &sequence) == 0);
    if (ready)
        ready_set(p, 1, 0);
    push_tree(p, 1);
    return sequence;
}

/* What the stream of the dead rank had in its second part. */
static void sample_put(struct pair *pair)
{
    struct pull *p = &pair->dead;
    struct pcc_sample *sample = pcc_page_samples(&p->f.page, 1);

    *sample = (struct pcc_sample){.offset_bytes = p->ranges[1].offset_bytes + 10,
                                  .length_bytes = PCC_SAMPLE_BYTES};
    memcpy(sample->bytes, p->memory[1].expected + 10, PCC_SAMPLE_BYTES);
}

static void both_defer(struct pair *pair, bool other_ready)
{
    pair->sequence = defer(&pair->dead, true);
    pair->other_sequence = defer(&pair->other, other_ready);
    sample_put(pair);
}

static _Atomic uint64_t *broken_of(struct pull *p)
{
    return &pcc_page_words(&p->f.page, 1, 0)->broken;
}

static _Atomic uint64_t *withdrawn_of(struct pull *p)
{
    return &pcc_page_words(&p->f.page, 1, 0)->withdrawn;
}

/* The session of the dead rank ends. Whose memory was read. */
static int32_t leave(struct pair *pair)
{
    struct pcc_tenant *others[] = {NULL, pair->other.f.tenant};

    return pcc_tenant_detach(pair->dead.f.tenant, others, 2);
}

/* How the snapshot of a session that has ended came out. */
static enum pcc_event_kind end_kind(struct pull *p)
{
    enum pcc_event_kind kind = 0;
    bool detached = false;

    while (kind == 0 || !detached) {
        const struct pcc_event event = event_next(&p->f);
        detached = detached || event.kind == PCC_EVENT_DETACHED;
        if (event.id == 1 && (event.kind == PCC_EVENT_COPIED || event.kind == PCC_EVENT_FAILED))
            kind = event.kind;
    }
    return kind;
}

/* The dead rank's part is copied, and becomes durable with these bytes, which are freed. */
static void is_saved_as(struct pair *pair, uint8_t *expected)
{
    struct pull *p = &pair->dead;

    CHECK(end_kind(p) == PCC_EVENT_COPIED);
    CHECK(pcc_tenant_write(p->f.tenant, pair->sequence) == 0);
    CHECK(event_until(&p->f, PCC_EVENT_DURABLE).id == 1);
    saved_equals(p, pair->sequence, expected);
    free(expected);
}

static void is_saved(struct pair *pair, bool saved)
{
    if (saved)
        is_saved_as(pair, payload_expected(&pair->dead, 1));
    else
        CHECK(end_kind(&pair->dead) == PCC_EVENT_FAILED);
}

static void pair_close(struct pair *pair)
{
    struct pull *q = &pair->other;

    ends_close(&pair->dead.f);
    if (q->f.tenant->attached) {
        atomic_store(withdrawn_of(q), 1); /* else detach waits for the end of its process */
        detach(&q->f);
    } else {
        ends_close(&q->f);
    }
    trainer_kill(&q->trainer);
    mappings_gone(q);
    fixture_close(&q->f);
    expected_free(q);
    trainer_page_open(&pair->dead);
    pull_close(&pair->dead);
}

/* The driver has told the dead rank of an error: its memory is not read. */
static void test_broken(void)
{
    struct pair pair;

    pair_open(&pair);
    both_defer(&pair, true);
    atomic_store(broken_of(&pair.dead), 1);
    fill(&pair.dead, 6); /* anything may be there */
    for (uint32_t i = 0; i < pair.dead.memory_count; i++)
        memcpy(pair.dead.memory[i].expected, pair.other.memory[i].expected,
               pair.dead.memory[i].exposed.length_bytes);
    CHECK_EQUAL(leave(&pair), 1);
    is_saved(&pair, true);
    /* The other rank's snapshot is as before, and the dead rank holds nothing of its memory. */
    CHECK(word_of(&pair.other, 1) == pcc_word(1, PCC_WORD_COPYING));
    pair_close(&pair);
}

/* The memory of the dead rank is not what its stream had there. */
static void test_other_bytes(void)
{
    struct pair pair;

    pair_open(&pair);
    both_defer(&pair, true);
    uint8_t *before = payload_expected(&pair.dead, 1);
    fill(&pair.dead, 6);
    trainer_kill(&pair.dead.trainer);
    CHECK_EQUAL(leave(&pair), 1);
    is_saved_as(&pair, before);
    pair_close(&pair);
}

/* Its own memory comes first. */
static void test_own_memory(void)
{
    struct pair pair;

    pair_open(&pair);
    both_defer(&pair, true);
    trainer_kill(&pair.dead.trainer);
    CHECK_EQUAL(leave(&pair), -1);
    is_saved(&pair, true);
    pair_close(&pair);
}

/* Nobody has it as it has to be: the step is lost, and nothing stays mapped. */
static void test_no_other(void)
{
    for (uint32_t lack = 0; lack < 9; lack++) {
        struct pair pair;
        pair_open(&pair);
        if (lack == 0) { /* other state */
            pair.other.replica_id++;
            expose(&pair.other);
        } else if (lack == 1) { /* not all of it */
            pair.other.replica[2].length_bytes--;
            expose(&pair.other);
        } else if (lack == 2) { /* it has not shown that the memory is its own */
            expose_unproven(&pair.other);
        } else if (lack == 8) { /* another checkpoint */
            const struct pcc_tenant_policy ahead = {
                .numbers = true, .world_size = 1, .above = pair.dead.f.tenant->last_sequence + 1};
            pcc_tenant_policy(pair.other.f.tenant, &ahead);
        }
        both_defer(&pair, lack != 3);
        CHECK((pair.other_sequence != pair.sequence) == (lack == 8));
        if (lack == 4)
            atomic_store(withdrawn_of(&pair.other), 1);
        else if (lack == 5)
            atomic_store(broken_of(&pair.other), 1);
        else if (lack == 6) /* no sample says that these are its bytes */
            pcc_page_samples(&pair.dead.f.page, 1)->length_bytes = 0;
        else if (lack == 7)
            fill(&pair.other, 6);
        atomic_store(broken_of(&pair.dead), 1);
        CHECK_EQUAL(leave(&pair), -1);
        is_saved(&pair, false);
        pair_close(&pair);
    }
}

static void *other_changes(void *argument)
{
    struct pair *pair = argument;

    wait_for(&pair->dead.control->held_copies, 1);
    atomic_store(withdrawn_of(&pair->other), 1);
    copies_go_on(&pair->dead);
    return NULL;
}

static void *other_dies(void *argument)
{
    struct pair *pair = argument;

    wait_for(&pair->dead.control->held_copies, 1);
    trainer_kill(&pair->other.trainer);
    copies_go_on(&pair->dead);
    (void)pcc_tenant_detach(pair->other.f.tenant, NULL, 0);
    return NULL;
}

static void *other_abandons(void *argument)
{
    struct pair *pair = argument;

    wait_for(&pair->dead.control->held_copies, 1);
    atomic_store(&pcc_page_snapshot(&pair->other.f.page, 1)->word, pcc_word(1, PCC_WORD_ABANDONED));
    copies_go_on(&pair->dead);
    return NULL;
}

/* As when the driver does not keep the memory of a rank that dies then. */
static void *other_is_overwritten(void *argument)
{
    struct pair *pair = argument;

    wait_for(&pair->dead.control->held_copies, 1);
    fill(&pair->other, 6);
    copies_go_on(&pair->dead);
    return NULL;
}

/* The other rank's memory is being copied. That rank begins its update, abandons its own snapshot,
 * or has other bytes behind the chunk with the sample: the step is lost. Or that rank dies, and
 * both are saved. */
static void test_meanwhile(void)
{
    static const struct {
        void *(*other)(void *);
        uint32_t behind; /* so many copies: the sample comes first */
        bool saved;
    } cases[] = {{other_changes, 1, false},
                 {other_abandons, 1, false},
                 {other_is_overwritten, 5, false},
                 {other_dies, 1, true}};

    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pair pair;
        pthread_t thread;
        pair_open(&pair);
        both_defer(&pair, true);
        atomic_store(broken_of(&pair.dead), 1);
        copies_hold(&pair.dead, cases[i].behind);
        CHECK(pthread_create(&thread, NULL, cases[i].other, &pair) == 0);
        CHECK_EQUAL(leave(&pair), cases[i].saved ? 1 : -1);
        CHECK(pthread_join(thread, NULL) == 0);
        is_saved(&pair, cases[i].saved);
        if (cases[i].saved)
            CHECK(end_kind(&pair.other) == PCC_EVENT_COPIED);
        pair_close(&pair);
    }
}

static void *other_comes_again(void *argument)
{
    struct pair *pair = argument;
    struct pull *q = &pair->other;

    wait_for(&pair->dead.control->held_copies, 1);
    trainer_kill(&q->trainer);
    detach(&q->f);
    trainer_start(&q->trainer);
    trainer_page_open(q);
    copies_go_on(&pair->dead);
    return NULL;
}

/* The other rank's process has ended, and the next one is there, before all is read. */
static void test_next_session(void)
{
    struct pair pair;
    pthread_t thread;

    pair_open(&pair);
    pair.sequence = defer(&pair.dead, true);
    struct pcc_request request = pull_request(&pair.other, 1);
    request.level = PCC_LEVEL_DEVICE; /* its own part does not come, so it is not copied */
    uint64_t sequence;
    CHECK(admit_as(&pair.other, 1, &request, &sequence) == 0);
    CHECK_EQUAL(sequence, pair.sequence);
    ready_set(&pair.other, 1, 0);
    sample_put(&pair);
    atomic_store(broken_of(&pair.dead), 1);
    copies_hold(&pair.dead, 1);
    CHECK(pthread_create(&thread, NULL, other_comes_again, &pair) == 0);
    CHECK_EQUAL(leave(&pair), 1);
    CHECK(pthread_join(thread, NULL) == 0);
    is_saved(&pair, true);
    pair_close(&pair);
}

/* The other rank has its own part copied. */
static void other_writes(struct pair *pair)
{
    const struct pcc_message write = {.kind = PCC_MSG_WRITE, .id = 1};

    CHECK(pcc_ring_push(&pair->other.f.page.to_daemon, &write) == 0);
    pcc_bell_ring(&pair->other.f.page.page->daemon_bell);
}

static void wait_lent(struct pair *pair)
{
    struct pcc_tenant *lender = pair->other.f.tenant;
    uint32_t readers = 0;

    while (readers == 0) {
        (void)usleep(100);
        pcc_tenant_lock(lender);
        readers = lender->pull.readers;
        pcc_tenant_unlock(lender);
    }
}

static void *copies_continue_when_lent(void *argument)
{
    struct pair *pair = argument;

    wait_lent(pair);
    copies_go_on(&pair->dead);
    return NULL;
}

/* The other rank has its own part copied just now, and its streams wait: they go on when the dead
 * rank's part was read, too. */
static void test_wanted(void)
{
    struct pair pair;
    pthread_t thread;

    pair_open(&pair);
    both_defer(&pair, true);
    atomic_store(broken_of(&pair.dead), 1);
    copies_hold(&pair.dead, 0);
    other_writes(&pair);
    wait_for(&pair.dead.control->held_copies, 1);
    CHECK(pthread_create(&thread, NULL, copies_continue_when_lent, &pair) == 0);
    CHECK_EQUAL(leave(&pair), 1);
    CHECK(pthread_join(thread, NULL) == 0);
    is_saved(&pair, true);
    CHECK(event_until(&pair.other.f, PCC_EVENT_COPIED).id == 1);
    CHECK_EQUAL(done_of(&pair.other, 1, 0), 1);
    pair_close(&pair);
}

/* The other rank has two GPUs, and its own part of one of them has been copied: that GPU's stream
 * has gone on, without a word. */
static void test_half_copied(void)
{
    struct pair pair;

    pair_open(&pair);
    struct pull *q = &pair.other;
    const uint32_t more = allocate(q, 1, 1000);
    fill(q, 5);
    range_add(q, more, 0, 1000, 2 * CHUNK);
    q->device_bytes = 3 * CHUNK;
    expose(q);
    both_defer(&pair, true);
    other_writes(&pair);
    wait_done(q, 1, 0);
    copies_hold(&pair.dead, 0);
    ready_set(q, 1, 1);
    wait_for(&pair.dead.control->held_copies, 1);
    poke(&pair.dead.control->copy_hold_skip, STANDIN_ALWAYS); /* the first GPU can be read */
    (void)trainer_ask(&q->trainer, (struct order){.what = ORDER_FILL,
                                                  .address = q->memory[0].address,
                                                  .length = q->memory[0].exposed.length_bytes,
                                                  .seed = 600});
    atomic_store(broken_of(&pair.dead), 1);
    CHECK_EQUAL(leave(&pair), -1);
    is_saved(&pair, false);
    copies_go_on(&pair.dead);
    CHECK(event_until(&q->f, PCC_EVENT_COPIED).id == 1);
    pair_close(&pair);
}

static void *write_and_die(void *argument)
{
    struct pair *pair = argument;
    struct pcc_tenant *lender = pair->other.f.tenant;
    uint32_t read = 0;

    wait_lent(pair);
    other_writes(pair);
    while (read == 0) {
        (void)usleep(100);
        pcc_tenant_lock(lender);
        read = pcc_tenant_find(lender, 1)->sources[0].read;
        pcc_tenant_unlock(lender);
    }
    trainer_kill(&pair->dead.trainer);
    return NULL;
}

/* The dead rank's session has ended, and its process has not yet. Meanwhile the other rank fails,
 * too, and has its own part copied. */
static void test_wanted_before_the_end(void)
{
    struct pair pair;
    pthread_t thread;

    pair_open(&pair);
    both_defer(&pair, true);
    uint8_t *before = payload_expected(&pair.dead, 1);
    fill(&pair.dead, 6);
    CHECK(pthread_create(&thread, NULL, write_and_die, &pair) == 0);
    CHECK_EQUAL(leave(&pair), 1);
    CHECK(pthread_join(thread, NULL) == 0);
    is_saved_as(&pair, before);
    CHECK(event_until(&pair.other.f, PCC_EVENT_COPIED).id == 1);
    pair_close(&pair);
}

static void *number_comes(void *argument)
{
    static const struct pcc_number number = {.sequence = 9, .incarnation = 1, .world_size = 2};
    struct pair *pair = argument;

    wait_for(&pair->dead.control->held_copies, 1);
    CHECK(pcc_tenant_number(pair->dead.f.tenant, 1, &number) == 0);
    copies_go_on(&pair->dead);
    return NULL;
}

/* Without its number nobody knows which snapshot of the other rank is the same checkpoint. The
 * number comes while the copy would be made. */
static void test_without_number(void)
{
    static const struct pcc_tenant_policy group = {.world_size = 2};
    struct pair pair;
    pthread_t thread;

    pair_open(&pair);
    pcc_tenant_policy(pair.dead.f.tenant, &group);
    pcc_tenant_policy(pair.other.f.tenant, &group);
    both_defer(&pair, true);
    CHECK_EQUAL(pair.sequence, 0);
    atomic_store(broken_of(&pair.dead), 1);
    copies_hold(&pair.dead, 1);
    CHECK(pthread_create(&thread, NULL, number_comes, &pair) == 0);
    /* What the thread waits for, if nothing is copied. */
    const int32_t lender = leave(&pair);
    poke(&pair.dead.control->held_copies, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQUAL(lender, -1);
    is_saved(&pair, false);
    pair_close(&pair);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        {"broken", test_broken},
        {"other bytes", test_other_bytes},
        {"own memory", test_own_memory},
        {"no other", test_no_other},
        {"meanwhile", test_meanwhile},
        {"wanted", test_wanted},
        {"next session", test_next_session},
        {"half copied", test_half_copied},
        {"wanted before the end", test_wanted_before_the_end},
        {"without number", test_without_number},
    };

    (void)setenv("PCCHECK_STANDIN_DEAD", "keep", 1);
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
