/* Checkpoints of level DEVICE: what becomes of memory that stays on the GPUs when its owner goes
 * on, wants it on the disk, or has died; and what a client that lies in its words gets. Memory of a
 * dead process stays as it was here (PCCHECK_STANDIN_DEAD). */
#include "pull_fixture.h"

static void withdrawn_set(struct pull *p, uint64_t snapshot, uint32_t device, uint64_t value)
{
    atomic_store(&pcc_page_words(&p->f.page, snapshot, device)->withdrawn, value);
}

/* A deferred snapshot whose stream has come to it, and the client's part of it. */
static uint64_t defer(struct pull *p, uint64_t snapshot, bool ready)
{
    struct pcc_request request = pull_request(p, snapshot);
    uint64_t sequence;

    request.level = PCC_LEVEL_DEVICE;
    CHECK(admit_as(p, snapshot, &request, &sequence) == 0);
    if (ready)
        ready_set(p, snapshot, 0);
    push_tree(p, snapshot);
    return sequence;
}

/* The session ends; what becomes of the snapshot meanwhile, or soon after. */
static struct pcc_event leave(struct pull *p, uint64_t snapshot)
{
    struct pcc_event event, found = {0};
    bool detached = false;

    (void)pcc_tenant_detach(p->f.tenant, NULL, 0);
    while (!detached || found.id == 0) {
        event = event_next(&p->f);
        detached = detached || event.kind == PCC_EVENT_DETACHED;
        if (event.id == snapshot &&
            (event.kind == PCC_EVENT_COPIED || event.kind == PCC_EVENT_FAILED))
            found = event;
        if (detached && p->f.queued[snapshot % PCC_SNAPSHOTS].kind == PCC_EVENT_REFUSED)
            found = p->f.queued[snapshot % PCC_SNAPSHOTS];
    }
    ends_close(&p->f);
    return found;
}

/* The same after the trainer's process has ended. */
static struct pcc_event die(struct pull *p, uint64_t snapshot)
{
    trainer_kill(&p->trainer);
    return leave(p, snapshot);
}

static void close_all(struct pull *p)
{
    mappings_gone(p);
    trainer_page_open(p);
    pull_close(p);
}

static void is_saved(struct pull *p, uint64_t snapshot, uint64_t sequence)
{
    uint8_t *expected = payload_expected(p, snapshot);

    CHECK(pcc_tenant_write(p->f.tenant, sequence) == 0);
    CHECK(event_until(&p->f, PCC_EVENT_DURABLE).id == snapshot);
    saved_equals(p, sequence, expected);
    free(expected);
}

static void open_usual(struct pull *p, uint64_t memory_bytes)
{
    pull_open(p, memory_bytes);
    usual_layout(p);
    expose(p);
}

/* Nothing is copied while the trainer lives. It dies: what its memory holds is the checkpoint. */
static void test_last_step(void)
{
    struct pull p;

    open_usual(&p, 24 * CHUNK);
    fill(&p, 5);
    const uint64_t sequence = defer(&p, 1, true);
    const uint64_t copies = peek(&p.control->copies_to_host);
    CHECK(word_of(&p, 1) == pcc_word(1, PCC_WORD_COPYING));
    CHECK(copies == 1); /* the probe */
    CHECK(die(&p, 1).kind == PCC_EVENT_COPIED);
    mappings_gone(&p);
    is_saved(&p, 1, sequence);
    close_all(&p);
}

/* The update was enqueued and had begun, or the stream had not come to the snapshot: nothing of it
 * is read. The newest one that is whole counts. */
static void test_words(void)
{
    static const struct {
        uint64_t ready, withdrawn;
        bool counts;
    } cases[] = {
        {2, 0, true},
        {2, 1, true},
        {2, 2, false},
        {0, 0, false},
        {2, UINT64_MAX, false},
        {UINT64_MAX, 0, false},
        {2 + PCC_SNAPSHOTS, 0, false},
        {1, 0, false},
    };

    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pull p;
        open_usual(&p, 24 * CHUNK);
        fill(&p, 5);
        const uint64_t copies = peek(&p.control->copies_to_host);
        const uint64_t sequence = defer(&p, 2, false);
        atomic_store(&pcc_page_words(&p.f.page, 2, 0)->ready, cases[i].ready);
        withdrawn_set(&p, 2, 0, cases[i].withdrawn);
        const struct pcc_event event = die(&p, 2);
        CHECK((event.kind == PCC_EVENT_COPIED) == cases[i].counts);
        if (cases[i].counts)
            is_saved(&p, 2, sequence);
        else
            CHECK_EQUAL(peek(&p.control->copies_to_host), copies);
        close_all(&p);
    }
}

/* What was withdrawn stays so, although the word goes back. */
static void test_withdrawn(void)
{
    struct pull p;

    open_usual(&p, 24 * CHUNK);
    (void)defer(&p, 1, true);
    withdrawn_set(&p, 1, 0, 1);
    fill(&p, 6);
    const uint64_t sequence = defer(&p, 2, true);
    const struct pcc_event event = queue_event(&p.f, 1);
    CHECK(event.kind == PCC_EVENT_BEGUN || event.error == -ECANCELED);
    const uint64_t deadline = soon();
    while (word_of(&p, 1) != pcc_word(1, PCC_WORD_REFUSED))
        CHECK(pcc_now_ns() < deadline && usleep(100) == 0);
    const uint64_t outcome = atomic_load(&pcc_page_snapshot(&p.f.page, 1)->outcome);
    CHECK(outcome == (1 << 8 | PCC_OUTCOME_SKIPPED));
    CHECK(done_of(&p, 1, 0) == 1 && done_of(&p, 2, 0) == 0);
    withdrawn_set(&p, 1, 0, 0);
    CHECK(die(&p, 2).kind == PCC_EVENT_COPIED);
    is_saved(&p, 2, sequence);
    close_all(&p);
}

/* The session ends and the process goes on; or the client has abandoned it; or its own part of the
 * payload is missing: nothing is read. */
static void test_no_death(void)
{
    struct pull p;
    uint64_t sequence;

    open_usual(&p, 24 * CHUNK);
    uint64_t copies = peek(&p.control->copies_to_host);
    (void)defer(&p, 1, true);
    atomic_store(&pcc_page_snapshot(&p.f.page, 1)->word, pcc_word(1, PCC_WORD_ABANDONED));
    struct pcc_request request = pull_request(&p, 2);
    request.level = PCC_LEVEL_DEVICE;
    CHECK(admit_as(&p, 2, &request, &sequence) == 0);
    ready_set(&p, 2, 0);
    CHECK(die(&p, 2).error == -PCC_E_ABORTED);
    CHECK_EQUAL(peek(&p.control->copies_to_host), copies);
    close_all(&p);

    open_usual(&p, 24 * CHUNK);
    copies = peek(&p.control->copies_to_host);
    (void)defer(&p, 1, true);
    CHECK(leave(&p, 1).error == -PCC_E_ABORTED);
    CHECK_EQUAL(peek(&p.control->copies_to_host), copies);
    close_all(&p);
}

/* Wanted while its trainer lives, it is pulled at once, unless it was withdrawn before that ended.
 */
static void test_wanted(void)
{
    const struct pcc_message write = {.kind = PCC_MSG_WRITE, .id = 1};
    struct pull p;

    for (uint32_t late = 0; late < 2; late++) {
        open_usual(&p, 24 * CHUNK);
        fill(&p, 5);
        const uint64_t sequence = defer(&p, 1, true);
        if (late)
            copies_hold(&p, 0);
        CHECK(pcc_ring_push(&p.f.page.to_daemon, &write) == 0);
        pcc_bell_ring(&p.f.page.page->daemon_bell);
        if (late) {
            wait_for(&p.control->held_copies, 1);
            withdrawn_set(&p, 1, 0, 1);
            copies_go_on(&p);
            CHECK(event_until(&p.f, PCC_EVENT_FAILED).error == -PCC_E_ABORTED);
        } else {
            wait_done(&p, 1, 0);
            CHECK(event_until(&p.f, PCC_EVENT_COPIED).id == 1);
            is_saved(&p, 1, sequence);
        }
        pull_close(&p);
    }
}

/* A copy that fails, and memory that is too short: no checkpoint, and the GPU's memory is back. */
static void test_no_copy(void)
{
    struct pull p;

    for (uint32_t short_of = 0; short_of < 2; short_of++) {
        open_usual(&p, short_of ? 3 * CHUNK : 24 * CHUNK);
        (void)defer(&p, 1, true);
        if (!short_of)
            copies_fail(&p, 2, 1, true);
        CHECK(die(&p, 1).kind == PCC_EVENT_FAILED);
        close_all(&p);
    }
}

/* Nobody is left to show what was not proven: the daemon asks while the trainer lives. What is
 * withdrawn meanwhile says nothing of the memory. */
static void test_proof(void)
{
    struct pull p;
    uint64_t sequence;

    for (uint32_t answered = 0; answered < 2; answered++) {
        pull_open(&p, 24 * CHUNK);
        usual_layout(&p);
        expose_unproven(&p);
        fill(&p, 5);
        sequence = defer(&p, 1, true);
        question(&p);
        if (answered) {
            answer_question(&p, false);
            while (atomic_load(&proof_of(&p)->proven[0]) != p.map)
                CHECK(usleep(100) == 0);
        }
        const struct pcc_event event = die(&p, 1);
        CHECK(event.kind == (answered ? PCC_EVENT_COPIED : PCC_EVENT_FAILED));
        if (answered)
            is_saved(&p, 1, sequence);
        close_all(&p);
    }
    pull_open(&p, 24 * CHUNK);
    usual_layout(&p);
    expose_unproven(&p);
    (void)defer(&p, 1, false);
    ready_set(&p, 1, 0); /* nobody rings */
    question(&p);
    withdrawn_set(&p, 1, 0, 1);
    fill(&p, 6);
    answer_question(&p, true);
    sequence = defer(&p, 2, true);
    answer_question(&p, false);
    while (atomic_load(&proof_of(&p)->proven[0]) != p.map)
        CHECK(usleep(100) == 0);
    CHECK(die(&p, 2).kind == PCC_EVENT_COPIED);
    is_saved(&p, 2, sequence);
    close_all(&p);
}

int main(int argc, char **argv)
{
    static const struct test tests[] = {
        {"last step", test_last_step}, {"words", test_words},   {"withdrawn", test_withdrawn},
        {"no death", test_no_death},   {"wanted", test_wanted}, {"no copy", test_no_copy},
        {"proof", test_proof},
    };

    (void)setenv("PCCHECK_STANDIN_DEAD", "keep", 1);
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
