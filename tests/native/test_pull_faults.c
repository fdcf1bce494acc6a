/* Pull when something goes wrong: a trainer that abandons a checkpoint, lies or dies, copies that
 * fail, a GPU that is lost or never answers. A checkpoint is right or has failed; no call waits for
 * ever, and no mapping is left. */
#include "pull_fixture.h"

static void failed_with(struct pull *p, uint64_t snapshot, int error)
{
    struct pcc_event event = event_until(&p->f, PCC_EVENT_FAILED);

    CHECK_EQUAL(event.id, snapshot);
    CHECK_EQUAL(event.error, error);
    CHECK(event.stage == PCC_STAGE_COPY);
    CHECK(done_of(p, snapshot, 0) >= snapshot); /* the trainer's stream was let go */
    CHECK(word_of(p, snapshot) != pcc_word(snapshot, PCC_WORD_COPIED) &&
          word_of(p, snapshot) != pcc_word(snapshot, PCC_WORD_COPYING));
}

static uint32_t chunks_in(struct pull *p, enum pcc_chunk_state state)
{
    uint32_t count = 0;

    pcc_tenant_lock(p->f.tenant);
    for (uint32_t i = 0; i < p->f.tenant->chunk_count; i++)
        count += p->f.tenant->chunks[i].state == state;
    pcc_tenant_unlock(p->f.tenant);
    return count;
}

/* Detached in mid-copy: the events of the session's end and of the save's come in any order. */
static void detach_failing(struct pull *p)
{
    (void)pcc_tenant_detach(p->f.tenant, NULL, 0);
    for (uint32_t told = 0; told != 3;) {
        const struct pcc_event event = event_next(&p->f);
        CHECK(event.kind == PCC_EVENT_DETACHED || event.error == -PCC_E_ABORTED);
        told |= event.kind == PCC_EVENT_DETACHED ? 1 : 2;
    }
    ends_close(&p->f);
}

/* The client abandons a snapshot while copies are under way: no other save gets their chunks before
 * the copies have ended. */
static void test_abandoned(void)
{
    struct pull p;
    uint64_t sequence;

    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    expose(&p);
    for (uint64_t snapshot = 1; snapshot <= 9; snapshot += 2) {
        copies_hold(&p, snapshot % 4);
        CHECK(admit(&p, snapshot, &sequence) == 0);
        ready_set(&p, snapshot, 0);
        wait_for(&p.control->held_copies, 1);
        CHECK(pcc_word_move(pcc_page_snapshot(&p.f.page, snapshot), snapshot, PCC_WORD_COPYING,
                            PCC_WORD_ABANDONED));
        pcc_bell_ring(&p.f.page.page->daemon_bell);
        failed_with(&p, snapshot, -PCC_E_ABORTED);
        CHECK(word_of(&p, snapshot) == pcc_word(snapshot, PCC_WORD_ABANDONED));
        CHECK(chunks_in(&p, PCC_CHUNK_PULLED) > 0);
        struct pcc_message message; /* what was granted for it goes back */
        while (message_next(&p, &message)) {
            message.kind = PCC_MSG_TAKEN;
            CHECK(pcc_ring_push(&p.f.page.to_daemon, &message) == 0);
        }
        pcc_bell_ring(&p.f.page.page->daemon_bell);
        fill(&p, snapshot); /* the trainer goes on, and what is copied now is torn */
        copies_go_on(&p);
        checkpoint(&p, snapshot + 1);
        const uint64_t deadline = soon();
        while (chunks_in(&p, PCC_CHUNK_PULLED) > 0)
            CHECK(pcc_now_ns() < deadline);
    }
    pull_close(&p);
}

/* A copy that the driver refuses, or that fails later, fails its checkpoint and no other. */
static void test_copies_fail(void)
{
    struct pull p;
    uint64_t sequence, snapshot = 0;

    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    expose(&p);
    for (uint32_t nth = 1; nth <= 5; nth++) {
        for (uint32_t behind = 0; behind <= 1; behind++) {
            copies_fail(&p, nth, CUDA_ERROR_INVALID_VALUE, behind);
            CHECK(admit(&p, ++snapshot, &sequence) == 0);
            ready_set(&p, snapshot, 0);
            failed_with(&p, snapshot, -PCC_E_DEVICE);
            CHECK(word_of(&p, snapshot) == pcc_word(snapshot, PCC_WORD_REFUSED));
            poke(&p.control->copy_fail_at, 0);
            struct pcc_message message;
            while (message_next(&p, &message)) {
                message.kind = PCC_MSG_TAKEN;
                CHECK(pcc_ring_push(&p.f.page.to_daemon, &message) == 0);
            }
            pcc_bell_ring(&p.f.page.page->daemon_bell);
            fill(&p, snapshot);
            checkpoint(&p, ++snapshot);
        }
    }
    struct pcc_gpu_info info;
    CHECK(pcc_gpus_info(p.gpus, &info, 1) == 1 && !info.lost && info.failures >= 10);
    pull_close(&p);
}

/* Killed in mid-copy, and killed when everything was read but one copy: the stand-in gives what a
 * dead trainer's memory may hold, and none of it becomes a checkpoint. */
static void test_trainer_killed(void)
{
    struct pull p;
    uint64_t sequence;

    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    const uint32_t memories = p.memory_count, ranges = p.range_count;
    for (uint64_t after = 0; after <= 4; after++) {
        if (after > 0) {
            trainer_start(&p.trainer);
            p.memory_count = 0;
            for (uint32_t i = 0; i < memories; i++) {
                free(p.memory[i].expected);
                (void)allocate(&p, 0, i == 0 ? 3 * CHUNK : 100000);
            }
            fill(&p, after);
            trainer_page_open(&p);
        }
        CHECK_EQUAL(p.range_count, ranges);
        expose(&p);
        checkpoint(&p, 1);
        copies_hold(&p, after);
        CHECK(admit(&p, 2, &sequence) == 0);
        ready_set(&p, 2, 0);
        wait_for(&p.control->held_copies, 1);
        trainer_kill(&p.trainer);
        copies_go_on(&p);
        push_tree(&p, 2);
        detach(&p.f);
        mappings_gone(&p);
        trainer_page_open(&p);
        (void)usage_at_rest(&p.f); /* a save that the detach gave up ends later */
        for (uint32_t i = 0; i < p.f.tenant->chunk_count; i++)
            CHECK(p.f.tenant->chunks[i].state != PCC_CHUNK_CACHED ||
                  p.f.tenant->chunks[i].sequence != sequence);
        detach(&p.f);
    }
    CHECK(peek(&p.control->scrambled) > 0);
    trainer_page_open(&p);
    pull_close(&p);
}

/* After a GPU was lost; the tenant is detached. */
static void lost_close(struct pull *p)
{
    struct pcc_tenant_usage usage;

    pcc_tenant_usage(p->f.tenant, &usage);
    CHECK(usage.mappings == 0 && usage.exposed_bytes == 0);
    trainer_kill(&p->trainer);
    CHECK(pcc_tenant_release_memory(p->f.tenant) == 0);
    fixture_close(&p->f);
    pcc_gpus_close(p->gpus);
    expected_free(p);
}

/* The context is lost in mid-copy: that checkpoint fails, later ones are told at once, and what is
 * pushed is saved as ever. */
static void test_context_lost(void)
{
    struct pull p;
    uint64_t sequence;
    char reason[PCC_REASON_BYTES];
    struct pcc_gpu_info info;

    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    expose(&p);
    checkpoint(&p, 1);
    copies_fail(&p, 3, CUDA_ERROR_LAUNCH_FAILED, true);
    CHECK(admit(&p, 2, &sequence) == 0);
    ready_set(&p, 2, 0);
    failed_with(&p, 2, -PCC_E_DEVICE_LOST);
    CHECK(admit(&p, 3, &sequence) == -PCC_E_DEVICE_LOST);
    CHECK(expose_as_is(&p, reason) == -PCC_E_DEVICE_LOST);
    CHECK(strstr(reason, "restarted") != NULL);
    CHECK(pcc_gpus_info(p.gpus, &info, 1) == 1 && info.lost);
    CHECK(admit(&p, 4, &sequence) == -PCC_E_BAD_HANDLE);
    CHECK(chunks_in(&p, PCC_CHUNK_LOST) > 0);
    detach(&p.f);

    link_open(&p.f);
    uint8_t *bytes = malloc(500000);
    CHECK(bytes != NULL);
    pattern(bytes, 500000, 9);
    load_equals(&p.f, save(&p.f, 1, bytes, 500000), 1, bytes, 500000);
    free(bytes);
    detach(&p.f);
    lost_close(&p);
}

/* What was pinned for one GPU and what is pinned later have nothing to do with another one that is
 * lost: the daemon pulls from the others as before. */
static void test_a_lost_gpu_leaves_the_others(void)
{
    struct pull p;
    uint64_t sequence;

    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    expose(&p);
    checkpoint(&p, 1);
    copies_fail(&p, 1, CUDA_ERROR_LAUNCH_FAILED, true);
    CHECK(admit(&p, 2, &sequence) == 0);
    ready_set(&p, 2, 0);
    failed_with(&p, 2, -PCC_E_DEVICE_LOST);
    copies_fail(&p, 0, 0, false);
    expected_free(&p);
    p.range_count = 0;
    (void)allocate(&p, 1, 3 * CHUNK);
    range_add(&p, 0, 256, 2 * CHUNK, 0);
    p.device_bytes = 2 * CHUNK;
    fill(&p, 3);
    expose(&p);
    checkpoint(&p, 3);
    CHECK_EQUAL(peek(&p.control->pageable_copies), 0);
    detach(&p.f);
    lost_close(&p);
}

/* A GPU that never answers: detach ends all the same, and its chunks are never used again. */
static void test_never_answers(void)
{
    struct pull p;
    uint64_t sequence, granted;

    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    expose(&p);
    copies_hold(&p, 1);
    CHECK(admit(&p, 1, &sequence) == 0);
    ready_set(&p, 1, 0);
    wait_for(&p.control->held_copies, 1);
    p.f.tenant->pull.limit_ns = SECOND / 100;
    detach_failing(&p);
    const uint32_t lost = chunks_in(&p, PCC_CHUNK_LOST);
    CHECK(lost > 0 && chunks_in(&p, PCC_CHUNK_PULLED) == 0);
    CHECK(pcc_tenant_release_memory(p.f.tenant) == 0);
    uint64_t budget, used;
    pcc_pool_usage(p.f.pool, &budget, &used);
    CHECK_EQUAL(used, 16 * CHUNK); /* still there: the GPU may write to it at any time */
    copies_go_on(&p);
    CHECK(pcc_tenant_grow(p.f.tenant, CHUNK, &granted) == 0 && granted == 0);
    trainer_kill(&p.trainer);
    fixture_close(&p.f);
    pcc_gpus_close(p.gpus);
    expected_free(&p);
}

/* What the client may write at any time: into the words, the ring, the chunks. */
static void test_a_lying_client(void)
{
    struct pull p;
    uint64_t sequence;
    struct pcc_message message;

    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    expose(&p);
    CHECK(admit(&p, 1, &sequence) == 0);
    while (!message_next(&p, &message))
        (void)usleep(100);
    message.kind = PCC_MSG_FULL;
    message.id = 1;
    message.offset_bytes = CHUNK; /* the device part is not his */
    message.length_bytes = CHUNK;
    CHECK(pcc_ring_push(&p.f.page.to_daemon, &message) == 0);
    pcc_bell_ring(&p.f.page.page->daemon_bell);
    CHECK(event_until(&p.f, PCC_EVENT_BAD_PEER).session == p.f.session);
    ready_set(&p, 1, 0);
    detach_failing(&p);
    mappings_gone(&p);

    /* Words that are too large count as ready and as done: his own checkpoint. Scribbling while
     * copies are under way gives up the snapshot. */
    trainer_page_open(&p);
    expose(&p);
    for (uint32_t device = 0; device < PCC_DEVICES; device++) {
        atomic_store(&pcc_page_words(&p.f.page, 1, device)->ready, UINT64_MAX);
        atomic_store(&pcc_page_words(&p.f.page, 1, device)->done, UINT64_MAX);
    }
    CHECK(admit(&p, 1, &sequence) == 0);
    push_tree(&p, 1);
    CHECK(event_until(&p.f, PCC_EVENT_DURABLE).id == 1);
    CHECK_EQUAL(done_of(&p, 1, 0), UINT64_MAX);
    copies_hold(&p, 0);
    CHECK(admit(&p, 2, &sequence) == 0);
    ready_set(&p, 2, 0);
    wait_for(&p.control->held_copies, 1);
    atomic_store(&pcc_page_snapshot(&p.f.page, 2)->word, 0x1234);
    copies_go_on(&p);
    failed_with(&p, 2, -PCC_E_ABORTED);
    pull_close(&p);
}

/* The client's answers to what it was asked for; what it was to fill goes back, too. */
static void give_back(struct pull *p)
{
    struct pcc_message message;

    while (message_next(p, &message)) {
        CHECK(message.kind == PCC_MSG_FREE || message.kind == PCC_MSG_RETIRE);
        message.kind = message.kind == PCC_MSG_FREE ? PCC_MSG_TAKEN : PCC_MSG_RETURNED;
        CHECK(pcc_ring_push(&p->f.page.to_daemon, &message) == 0);
    }
    pcc_bell_ring(&p->f.page.page->daemon_bell);
}

/* Until all that is to go is gone. Unpinning may wait for the copies under way. */
static void *shrink_run(void *tenant)
{
    struct pcc_tenant_holding holding;

    do
        pcc_tenant_shrink(tenant, 2 * CHUNK, &holding);
    while (holding.bytes > 2 * CHUNK);
    return NULL;
}

/* Memory that a GPU is copying to stays until it has ended, and is unpinned before it goes. */
static void test_segments_taken_back(void)
{
    struct pull p;
    struct pcc_tenant_holding holding;
    struct pcc_event event;
    pthread_t thread;
    uint64_t sequence, granted;

    pull_open(&p, 12 * CHUNK);
    detach(&p.f);
    CHECK(pcc_tenant_release_memory(p.f.tenant) == 0);
    grow(&p.f, 12 * CHUNK, 2 * CHUNK);
    trainer_page_open(&p);
    CHECK(pcc_tenant_grow(p.f.tenant, 0, &granted) == 0);
    usual_layout(&p);
    expose(&p);
    copies_hold(&p, 0);
    CHECK(admit(&p, 1, &sequence) == 0);
    ready_set(&p, 1, 0);
    wait_for(&p.control->held_copies, 1);
    pcc_tenant_shrink(p.f.tenant, 2 * CHUNK, &holding);
    CHECK(holding.lasting_bytes == 2 * CHUNK && holding.asked == 5);
    give_back(&p);
    CHECK(pthread_create(&thread, NULL, shrink_run, p.f.tenant) == 0);
    copies_go_on(&p);
    push_tree(&p, 1);
    do
        event = event_next(&p.f);
    while (event.kind != PCC_EVENT_DURABLE && event.kind != PCC_EVENT_FAILED);
    CHECK(event.kind == PCC_EVENT_DURABLE && event.sequence == sequence);
    uint8_t *expected = payload_expected(&p, 1);
    saved_equals(&p, sequence, expected);
    free(expected);
    CHECK(pthread_join(thread, NULL) == 0);
    const uint64_t others = peek(&p.control->registered_bytes) - 2 * CHUNK;
    CHECK(others <= PCC_GPU_LANDING_BYTES); /* the daemon's own */
    fill(&p, 2);
    checkpoint(&p, 2); /* through two chunks, and through more again */
    CHECK(pcc_tenant_grow(p.f.tenant, 8 * CHUNK, &granted) == 0 && granted == 8 * CHUNK);
    CHECK_EQUAL(peek(&p.control->registered_bytes), 8 * CHUNK + others);
    fill(&p, 3);
    checkpoint(&p, 3);
    pull_close(&p);
}

static const struct test tests[] = {
    {"test_abandoned", test_abandoned},
    {"test_copies_fail", test_copies_fail},
    {"test_trainer_killed", test_trainer_killed},
    {"test_context_lost", test_context_lost},
    {"test_a_lost_gpu_leaves_the_others", test_a_lost_gpu_leaves_the_others},
    {"test_never_answers", test_never_answers},
    {"test_a_lying_client", test_a_lying_client},
    {"test_segments_taken_back", test_segments_taken_back},
};

int main(int argc, char **argv)
{
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
