/* Proofs: before a byte of an exposure gets into chunks, the client shows that it reads what the
 * daemon reads. The test answers the daemon's questions, as it likes. */
#include "pull_fixture.h"

static void is_durable(struct pull *p, uint64_t snapshot)
{
    const struct pcc_event event = end_of(p, snapshot);
    uint8_t *expected = payload_expected(p, snapshot);

    CHECK_EQUAL(event.error, 0);
    saved_equals(p, event.sequence, expected);
    free(expected);
}

/* A snapshot that the daemon asks about. */
static uint64_t pulled(struct pull *p, uint64_t snapshot)
{
    uint64_t sequence;

    CHECK(admit(p, snapshot, &sequence) == 0);
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        ready_set(p, snapshot, device);
    push_tree(p, snapshot);
    return sequence;
}

static uint64_t pulled_bytes(struct pull *p)
{
    struct pcc_gpu_info info[2] = {0};

    (void)pcc_gpus_info(p->gpus, info, 2);
    return info[0].copied_bytes + info[1].copied_bytes;
}

static bool contains(const uint8_t *bytes, uint64_t length, const uint8_t *wanted)
{
    return memmem(bytes, length, wanted, 16) != NULL;
}

/* Whether any memory that the client may map has a part of these bytes. */
static bool is_seen(const struct pull *p, const uint8_t *bytes, uint64_t length)
{
    bool found = contains((const uint8_t *)p->f.page.page, p->f.page.geometry.page_bytes, bytes);

    for (uint32_t i = 0; i < p->f.tenant->segment_count; i++) {
        const struct pcc_segment *segment = &p->f.tenant->segments[i].memory;
        const uint64_t size = (uint64_t)segment->chunk_count * CHUNK;
        const uint8_t *mapped = mmap(NULL, size, PROT_READ, MAP_SHARED, segment->fd, 0);
        CHECK(mapped != MAP_FAILED);
        for (uint64_t at = 0; !found && at + 16 <= length; at += 997)
            found = contains(mapped, size, bytes + at);
        CHECK(munmap((void *)(uintptr_t)mapped, size) == 0);
    }
    return found;
}

/* Each allocation and each piece has a block, within what is read of it, at places that differ from
 * time to time. Nothing is pulled before the answer; one answer is enough for good. */
static void test_questions(void)
{
    struct pull p;
    struct pcc_proof_block blocks[2][5];

    for (uint32_t round = 0; round < 2; round++) {
        pull_open(&p, 24 * CHUNK);
        (void)allocate(&p, 0, 3 * CHUNK);
        (void)allocate_run(&p, 0, 6 * (2u << 20), 6);
        (void)allocate(&p, 1, 100000); /* read in two parts, and not between these */
        (void)allocate(&p, 0, 5000);   /* read for other ranks only */
        fill(&p, 1);
        p.replica[0] = (struct pcc_exposed_range){.allocation = 3,
                                                  .allocation_offset_bytes = 4000,
                                                  .offset_bytes = 64,
                                                  .length_bytes = 300};
        p.replica_count = 1;
        range_add(&p, 0, 256, CHUNK, 0);
        range_add(&p, 1, (4u << 20) - 100, 200, CHUNK); /* of two pieces */
        range_add(&p, 2, 0, 300, 2 * CHUNK);
        range_add(&p, 2, 99000, 1000, 2 * CHUNK + 64 + 300);
        p.device_bytes = 3 * CHUNK;
        expose_unproven(&p);
        descriptors_close(&p);
        (void)pulled(&p, 1);
        for (uint32_t asked = 0; asked < 5;) {
            question(&p);
            CHECK_EQUAL(pulled_bytes(&p), asked < 4 ? 0 : pulled_bytes(&p));
            const struct pcc_proof *proof = proof_of(&p);
            for (uint32_t i = 0; i < proof->count; i++) {
                const uint8_t *ignored;
                const struct pcc_proof_block block = proof->blocks[i];
                const uint32_t of = memory_at(&p, block.address, &ignored);
                const uint64_t from = block.address - p.memory[of].address;
                const uint64_t end = from + block.length_bytes;
                CHECK(p.memory[of].exposed.device == proof->device && block.length_bytes <= 256);
                CHECK(of != 0 || (from >= 256 && end <= 256 + CHUNK && end - from == 256));
                CHECK(of != 1 || (end - from == 100 && (end == 4u << 20 || from == 4u << 20)));
                CHECK(of != 2 || end <= 300 || (from >= 99000 && end <= 100000));
                CHECK(of != 3 || (from >= 4000 && end <= 4300));
                blocks[round][asked++] = block;
            }
            answer_question(&p, false);
        }
        is_durable(&p, 1);
        CHECK_EQUAL(pulled_bytes(&p), 3 * CHUNK);
        CHECK(atomic_load(&proof_of(&p)->proven[0]) == p.map);
        const uint64_t asked = atomic_load(&proof_of(&p)->asked);
        fill(&p, 2);
        checkpoint(&p, 2);
        CHECK_EQUAL(atomic_load(&proof_of(&p)->asked), asked);

        /* Another exposure of the same memory: only descriptors are asked about again. */
        p.range_count--;
        expose_unproven(&p);
        (void)pulled(&p, 3);
        question(&p);
        CHECK(proof_of(&p)->count == 2 && proof_of(&p)->device == 0);
        answer_question(&p, false);
        is_durable(&p, 3);
        CHECK(atomic_load(&proof_of(&p)->proven[1]) == p.map);
        pull_close(&p);
    }
    CHECK(memcmp(blocks[0], blocks[1], sizeof(blocks[0])) != 0);
}

/* More pieces than one question names; and several snapshots at a time, of which one is asked. */
static void test_many(void)
{
    const uint64_t piece = 2u << 20;
    uint64_t sequence;
    struct pull p;

    pull_open(&p, 24 * CHUNK);
    (void)allocate(&p, 0, CHUNK);
    (void)allocate_run(&p, 0, 70 * piece, 70);
    fill(&p, 1);
    for (uint32_t i = 0; i < 35; i++)
        range_add(&p, 1, (2 * i + 1) * piece - 100, 200, i * 256u);
    p.device_bytes = CHUNK;
    expose_unproven(&p);
    descriptors_close(&p);
    CHECK(admit(&p, 1, &sequence) == 0 && admit(&p, 2, &sequence) == 0);
    ready_set(&p, 2, 0);
    question(&p);
    CHECK_EQUAL(proof_of(&p)->count, PCC_PROOF_BLOCKS);
    answer_question(&p, false);
    question(&p);
    CHECK_EQUAL(proof_of(&p)->count, 70 - PCC_PROOF_BLOCKS);
    CHECK_EQUAL(pulled_bytes(&p), 0);
    answer_question(&p, false);
    wait_done(&p, 2, 0);
    CHECK_EQUAL(done_of(&p, 1, 0), 0);
    push_tree(&p, 2);
    is_durable(&p, 2);
    ready_set(&p, 1, 0);
    wait_done(&p, 1, 0);
    CHECK_EQUAL(atomic_load(&proof_of(&p)->asked), 2);
    pull_close(&p);
}

/* A client names the memory of another process, whose handle it has guessed, and cannot read it. No
 * byte gets to where the client finds it, nothing becomes durable; the GPU is pushed from then on,
 * and pulled in the next session, of what is the client's own. */
static void test_memory_of_others(void)
{
    struct pull p;
    struct trainer victim;
    struct pcc_load *load;
    uint64_t sequence;
    char reason[PCC_REASON_BYTES];
    uint8_t *secret = malloc(3 * CHUNK);

    CHECK(secret != NULL);
    pull_open(&p, 24 * CHUNK);
    trainer_start(&victim);
    usual_layout(&p);
    const struct answer others =
        trainer_ask(&victim, (struct order){.what = ORDER_ALLOCATE, .length = 3 * CHUNK});
    (void)trainer_ask(&victim, (struct order){.what = ORDER_FILL,
                                              .address = others.address,
                                              .length = 3 * CHUNK,
                                              .seed = 77});
    pattern(secret, 3 * CHUNK, 77);
    const struct device_memory mine = p.memory[1];
    p.memory[1].exposed = others.exposed;
    expose_unproven(&p);
    const uint64_t stolen = pulled(&p, 1);
    for (uint32_t i = 0; i < 3; i++) {
        question(&p);
        CHECK(!is_seen(&p, secret, 3 * CHUNK));
        answer(&p, 0); /* zeros, and what was there before */
    }
    const struct pcc_event event = end_of(&p, 1);
    CHECK(event.kind == PCC_EVENT_FAILED && event.error == -PCC_E_OTHER_MEMORY);
    CHECK(word_of(&p, 1) == pcc_word(1, PCC_WORD_REFUSED) && done_of(&p, 1, 0) == 1);
    CHECK(!is_seen(&p, secret, 3 * CHUNK) && pulled_bytes(&p) == 0);
    CHECK(pcc_load_open(p.f.volume, stolen, &load) != 0);
    struct pcc_reason why;
    CHECK(pcc_outcome_read(pcc_page_snapshot(&p.f.page, 1), 1, &why) == PCC_OUTCOME_FAILED);
    CHECK(why.error == -PCC_E_OTHER_MEMORY && why.argument == 0); /* the GPU */

    CHECK(admit(&p, 2, &sequence) == -PCC_E_OTHER_MEMORY);
    p.memory[1] = mine;
    CHECK(expose_as_is(&p, reason) == -PCC_E_OTHER_MEMORY);
    printf("  %s\n", reason);
    CHECK(strstr(reason, "GPU 0") != NULL);
    detach(&p.f);
    trainer_page_open(&p);
    expose_unproven(&p);
    (void)pulled(&p, 1);
    answer_question(&p, false);
    is_durable(&p, 1);
    trainer_kill(&victim);
    free(secret);
    pull_close(&p);
}

/* A client frees what it has named, and knows what was there. */
static void test_freed_memory(void)
{
    struct pull p;

    pull_open(&p, 24 * CHUNK);
    usual_layout(&p);
    expose_unproven(&p);
    (void)trainer_ask(&p.trainer,
                      (struct order){.what = ORDER_FREE, .address = p.memory[1].address});
    (void)pulled(&p, 1);
    for (uint32_t i = 0; i < 3; i++)
        answer_question(&p, false);
    CHECK_EQUAL(end_of(&p, 1).error, -PCC_E_OTHER_MEMORY);
    CHECK_EQUAL(pulled_bytes(&p), 0);
    pull_close(&p);
}

/* One wrong answer may be a change of what lies between tensors; three may not. But what changes
 * after the trainer has let go of the snapshot says nothing. */
static void test_wrong_answers(void)
{
    struct pull p;

    pull_open(&p, 24 * CHUNK);
    usual_layout(&p);
    expose_unproven(&p);
    (void)pulled(&p, 1);
    answer_question(&p, true);
    answer_question(&p, true);
    CHECK_EQUAL(pulled_bytes(&p), 0);
    answer_question(&p, false);
    is_durable(&p, 1);

    expose_unproven(&p); /* handles that are proven stay so */
    checkpoint(&p, 2);
    detach(&p.f);
    trainer_page_open(&p);
    expose_unproven(&p);
    (void)pulled(&p, 1);
    answer_question(&p, true);
    question(&p);
    CHECK(pcc_word_move(pcc_page_snapshot(&p.f.page, 1), 1, PCC_WORD_COPYING, PCC_WORD_ABANDONED));
    answer_question(&p, true);
    CHECK(end_of(&p, 1).error == -PCC_E_ABORTED);
    (void)pulled(&p, 2);
    answer_question(&p, false);
    is_durable(&p, 2);
    pull_close(&p);
}

/* No answer, or none that can be given: the checkpoint fails, and the next one is asked about. */
static void test_no_answer(void)
{
    struct pull p;

    pull_open(&p, 24 * CHUNK);
    usual_layout(&p);
    expose_unproven(&p);
    const uint64_t limit_ns = p.f.tenant->pull.limit_ns;
    p.f.tenant->pull.limit_ns = 1;
    (void)pulled(&p, 1);
    struct pcc_event event = end_of(&p, 1);
    CHECK(event.kind == PCC_EVENT_FAILED && event.error == -ETIMEDOUT && pulled_bytes(&p) == 0);
    p.f.tenant->pull.limit_ns = limit_ns;
    (void)pulled(&p, 2); /* the late answer is of another question */
    answer(&p, 0);
    question(&p);
    answer(&p, -PCC_E_DEVICE); /* the memory is freed */
    event = end_of(&p, 2);
    CHECK(event.kind == PCC_EVENT_FAILED && event.error == -PCC_E_DEVICE && pulled_bytes(&p) == 0);
    copies_fail(&p, 1, CUDA_ERROR_INVALID_VALUE, false);
    (void)pulled(&p, 3);
    CHECK(end_of(&p, 3).error == -PCC_E_DEVICE);
    (void)pulled(&p, 4);
    answer_question(&p, false);
    is_durable(&p, 4);

    /* The session ends meanwhile. */
    detach(&p.f);
    trainer_page_open(&p);
    expose_unproven(&p);
    (void)pulled(&p, 1);
    question(&p);
    pull_close(&p);
}

static void clear(struct pull *p, uint32_t number, uint64_t from, uint64_t length)
{
    memset(p->memory[number].expected + from, 0, length);
    (void)trainer_ask(&p->trainer, (struct order){.what = ORDER_CLEAR,
                                                  .address = p->memory[number].address + from,
                                                  .length = length});
}

/* Memory of one value says little: it is asked about at each snapshot, until it has others. What
 * has others anywhere shows them. */
static void test_memory_of_one_value(void)
{
    static const uint32_t counts[] = {ALLOCATIONS_MAX, 1, 1};
    const uint32_t last = ALLOCATIONS_MAX - 1;
    const uint8_t *bytes;
    struct pull p;

    pull_open(&p, 24 * CHUNK);
    for (uint32_t i = 0; i <= last; i++) {
        (void)allocate(&p, 0, CHUNK);
        range_add(&p, i, 0, CHUNK, i * CHUNK);
    }
    p.device_bytes = ALLOCATIONS_MAX * CHUNK;
    fill(&p, 1);
    for (uint32_t i = 1; i < last; i++)
        clear(&p, i, 0, CHUNK / 8 * 3);
    clear(&p, last, 0, CHUNK);
    expose_unproven(&p);
    for (uint64_t snapshot = 1; snapshot <= 3; snapshot++) {
        if (snapshot == 3)
            fill(&p, 3);
        (void)pulled(&p, snapshot);
        question(&p);
        const struct pcc_proof *proof = proof_of(&p);
        CHECK_EQUAL(proof->count, counts[snapshot - 1]);
        for (uint32_t i = 0; i < proof->count; i++)
            CHECK((memory_at(&p, proof->blocks[i].address, &bytes) == last && snapshot < 3) ==
                  pcc_proof_is_plain(bytes, proof->blocks[i].length_bytes));
        answer_question(&p, false);
        is_durable(&p, snapshot);
        CHECK((atomic_load(&proof->proven[0]) == p.map) == (snapshot == 3));
    }
    fill(&p, 4);
    checkpoint(&p, 4);
    CHECK_EQUAL(atomic_load(&proof_of(&p)->asked), 3);
    pull_close(&p);
}

/* Counters in staging memory are few bytes of one value. All of them are shown, and the probe,
 * which is random: so they are not asked about again. More bytes are, and those beside another
 * probe. */
static void test_counters(void)
{
    static const struct {
        uint32_t length;
        bool random, proven;
    } cases[] = {{8, true, true}, {800, true, false}, {8, false, false}};

    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct pull p;
        pull_open(&p, 24 * CHUNK);
        (void)allocate(&p, 0, CHUNK);
        fill(&p, 1);
        clear(&p, 0, 500, 800);
        if (!cases[i].random)
            clear(&p, 0, 64, 16);
        range_add(&p, 0, 500, cases[i].length, 0);
        p.device_bytes = CHUNK;
        expose_unproven(&p);
        (void)pulled(&p, 1);
        answer_question(&p, false);
        is_durable(&p, 1);
        CHECK((atomic_load(&proof_of(&p)->proven[0]) == p.map) == cases[i].proven);
        pull_close(&p);
    }
}

/* What is pulled has to be what the trainer's stream had there; or the trainer has let go of it.
 * What is no sample is ignored. */
static void test_samples(void)
{
    static const struct {
        uint64_t offset_bytes;
        uint32_t length_bytes;
        bool wrong, abandoned;
        int error;
    } cases[] = {
        {2 * CHUNK - 64, 64, false, false, 0},
        {2 * CHUNK - 64, 64, true, false, -PCC_E_OTHER_BYTES},
        {300, 1, true, false, -PCC_E_OTHER_BYTES},
        {300, 1, true, true, -PCC_E_ABORTED},
        {300, 65, true, false, 0},
        {2 * CHUNK - 63, 64, true, false, 0}, /* of two chunks */
        {UINT64_MAX - 20, 64, true, false, 0},
        {4 * CHUNK, 8, true, false, 0},
        {300, 0, true, false, 0},
    };
    uint64_t sequence;
    struct pull p;

    pull_open(&p, 24 * CHUNK);
    usual_layout(&p);
    expose(&p);
    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const uint64_t snapshot = i + 1;
        struct pcc_sample *sample = &pcc_page_samples(&p.f.page, snapshot)[i % PCC_SAMPLES];
        fill(&p, snapshot);
        CHECK(admit(&p, snapshot, &sequence) == 0);
        sample->offset_bytes = cases[i].offset_bytes;
        sample->length_bytes = cases[i].length_bytes;
        if (cases[i].offset_bytes + 64 <= 2 * CHUNK)
            memcpy(sample->bytes, p.memory[0].expected + 256 + cases[i].offset_bytes, 64);
        sample
            ->bytes[cases[i].wrong && cases[i].length_bytes ? cases[i].length_bytes % 64 / 2 : 0] ^=
            cases[i].wrong;
        if (cases[i].abandoned)
            copies_hold(&p, 0);
        ready_set(&p, snapshot, 0);
        push_tree(&p, snapshot);
        if (cases[i].abandoned) {
            wait_for(&p.control->held_copies, 1);
            CHECK(pcc_word_move(pcc_page_snapshot(&p.f.page, snapshot), snapshot, PCC_WORD_COPYING,
                                PCC_WORD_ABANDONED));
            copies_go_on(&p);
        }
        if (cases[i].error == 0) {
            is_durable(&p, snapshot);
        } else {
            CHECK_EQUAL(end_of(&p, snapshot).error, cases[i].error);
            CHECK(p.f.tenant->pull.distrusted == 0);
        }
        sample->length_bytes = 0;
    }
    pull_close(&p);
}

static const struct test tests[] = {
    {"test_questions", test_questions},
    {"test_many", test_many},
    {"test_memory_of_others", test_memory_of_others},
    {"test_freed_memory", test_freed_memory},
    {"test_wrong_answers", test_wrong_answers},
    {"test_no_answer", test_no_answer},
    {"test_memory_of_one_value", test_memory_of_one_value},
    {"test_counters", test_counters},
    {"test_samples", test_samples},
};

int main(int argc, char **argv)
{
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
