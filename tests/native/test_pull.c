/* Pull, with an honest trainer: bytes, order, several GPUs, layouts that change, little memory; and
 * exposures that a daemon must refuse. */
#include "pull_fixture.h"

/* Checkpoints of a state that changes, each with its own bytes; everything is closed at the end. */
static void test_bytes(void)
{
    struct pull p;
    struct pcc_tenant_usage usage;
    struct pcc_gpu_info info;

    pull_open(&p, 16 * CHUNK);
    CHECK_EQUAL(pcc_gpus_info(p.gpus, &info, 1), 0); /* contexts are not made before */
    usual_layout(&p);
    expose(&p);
    pcc_tenant_usage(p.f.tenant, &usage);
    CHECK(usage.mappings == 2 && usage.pinned_bytes == 16 * CHUNK);
    CHECK_EQUAL(usage.exposed_bytes, 3 * CHUNK + 100000);
    for (uint64_t snapshot = 1; snapshot <= 70; snapshot++) { /* the words are used again */
        fill(&p, snapshot);
        checkpoint(&p, snapshot);
        CHECK_EQUAL(done_of(&p, snapshot, 0), snapshot);
        CHECK_EQUAL(done_of(&p, snapshot, 1), 0);
    }
    CHECK_EQUAL(pcc_gpus_info(p.gpus, &info, 1), 1);
    CHECK_EQUAL(info.copied_bytes, 70 * 4 * CHUNK);
    CHECK_EQUAL(info.copies, 70 * (3 + 2));
    CHECK(!info.lost && info.failures == 0 && info.name[0] != '\0');
    CHECK(memcmp(info.uuid, p.memory[0].exposed.uuid, 16) == 0);

    /* Memory that comes later is pinned, too. */
    uint64_t granted;
    detach(&p.f);
    CHECK(pcc_tenant_release_memory(p.f.tenant) == 0);
    CHECK(pcc_tenant_grow(p.f.tenant, 4 * CHUNK, &granted) == 0 && granted == 4 * CHUNK);
    trainer_page_open(&p);
    expose(&p);
    CHECK(pcc_tenant_grow(p.f.tenant, 9 * CHUNK, &granted) == 0 && granted == 9 * CHUNK);
    pcc_tenant_usage(p.f.tenant, &usage);
    CHECK_EQUAL(usage.pinned_bytes, 9 * CHUNK);
    checkpoint(&p, 1);
    pull_close(&p);
}

/* Nothing is read before the trainer's stream is ready, and a stream that is not ready blocks no
 * other one; each GPU is released as soon as its own part was read. */
static void test_order(void)
{
    struct pull p;
    uint64_t sequences[2];

    pull_open(&p, 24 * CHUNK);
    (void)allocate(&p, 0, 2 * CHUNK);
    (void)allocate(&p, 1, 3 * CHUNK);
    range_add(&p, 0, 0, 2 * CHUNK, 0);
    range_add(&p, 1, 5, CHUNK + 77, 2 * CHUNK);
    p.device_bytes = 4 * CHUNK;
    fill(&p, 7);
    expose(&p);
    CHECK(admit(&p, 1, &sequences[0]) == 0);
    CHECK(admit(&p, 2, &sequences[1]) == 0);
    CHECK_EQUAL(peek(&p.control->copies_to_host), 1); /* the probe */
    ready_set(&p, 2, 1);
    wait_done(&p, 2, 1);
    CHECK_EQUAL(done_of(&p, 2, 0), 0);
    CHECK_EQUAL(peek(&p.control->bytes_to_host), 16 + CHUNK + 77);
    ready_set(&p, 2, 0);
    wait_done(&p, 2, 0);
    push_tree(&p, 2);
    CHECK(event_until(&p.f, PCC_EVENT_DURABLE).id == 2);
    CHECK_EQUAL(done_of(&p, 1, 0) + done_of(&p, 1, 1), 0);
    uint8_t *expected = payload_expected(&p, 2);
    saved_equals(&p, sequences[1], expected);
    free(expected);

    /* The trainer goes on; what the first snapshot reads is what is there when it is ready. */
    fill(&p, 8);
    push_tree(&p, 1);
    ready_set(&p, 1, 0);
    ready_set(&p, 1, 1);
    wait_done(&p, 1, 0);
    wait_done(&p, 1, 1);
    CHECK(event_until(&p.f, PCC_EVENT_COPIED).id == 1);
    CHECK(event_until(&p.f, PCC_EVENT_SUPERSEDED).id == 1);
    pull_close(&p);
}

/* A new layout while a copy through the old one goes on: shared allocations stay open, others are
 * closed when the copy has ended. */
static void test_layouts(void)
{
    struct pull p;
    uint64_t sequence;
    struct pcc_tenant_usage usage;

    pull_open(&p, 24 * CHUNK);
    usual_layout(&p);
    expose(&p);
    poke(&p.control->copy_hold_kinds, STANDIN_TO_HOST);
    CHECK(admit(&p, 1, &sequence) == 0);
    ready_set(&p, 1, 0);
    wait_for(&p.control->held_copies, 1);
    uint8_t *expected = payload_expected(&p, 1);

    /* Allocation 1 is exchanged for another one. The probe waits behind nothing of ours. */
    poke(&p.control->copy_hold_skip, 0);
    poke(&p.control->copy_hold_kinds, 0);
    push_tree(&p, 1);
    CHECK(event_until(&p.f, PCC_EVENT_DURABLE).id == 1);
    saved_equals(&p, sequence, expected);
    free(expected);
    CHECK(admit(&p, 2, &sequence) == 0); /* goes on through the old map */
    const uint64_t opens = peek(&p.control->opens);
    const uint32_t fresh = allocate(&p, 0, 120000);
    struct device_memory old = p.memory[1];
    p.memory[1] = p.memory[fresh];
    p.memory_count--;
    fill(&p, 5);
    expose(&p);
    CHECK_EQUAL(peek(&p.control->opens), opens + 1);
    pcc_tenant_usage(p.f.tenant, &usage);
    CHECK_EQUAL(usage.mappings, 3);
    ready_set(&p, 2, 0);
    push_tree(&p, 2);
    CHECK(event_until(&p.f, PCC_EVENT_DURABLE).id == 2);
    const uint64_t deadline = soon();
    do {
        pcc_tenant_usage(p.f.tenant, &usage);
        CHECK(pcc_now_ns() < deadline);
    } while (usage.mappings != 2);
    wait_for(&p.control->closes, 1);
    fill(&p, 6);
    checkpoint(&p, 3);

    struct pcc_request request = pull_request(&p, 4);
    request.map--;
    CHECK(admit_as(&p, 4, &request, &sequence) == -PCC_E_BAD_HANDLE);
    /* Refused: the trainer's streams are let go all the same. */
    CHECK(word_of(&p, 4) == pcc_word(4, PCC_WORD_REFUSED));
    CHECK(done_of(&p, 4, 0) == 4 && done_of(&p, 4, PCC_DEVICES - 1) == 4);
    request = pull_request(&p, 5);
    request.payload_bytes = 4 * CHUNK; /* too short */
    request.tree_offset_bytes = 4 * CHUNK - 1;
    request.tree_bytes = 1;
    CHECK(admit_as(&p, 5, &request, &sequence) == -EINVAL);
    free(old.expected);
    pull_close(&p);
}

/* m > M: the copy continues as chunks are written. */
static void test_little_memory(void)
{
    struct pull p;

    pull_open(&p, 4 * CHUNK);
    (void)allocate(&p, 0, 20 * CHUNK);
    (void)allocate(&p, 1, 20 * CHUNK);
    range_add(&p, 0, 0, 20 * CHUNK - 9, 0);
    range_add(&p, 1, 9, 20 * CHUNK - 9, 20 * CHUNK);
    p.device_bytes = 40 * CHUNK;
    fill(&p, 1);
    expose(&p);
    for (uint64_t snapshot = 1; snapshot <= 5; snapshot++) {
        fill(&p, snapshot);
        checkpoint(&p, snapshot);
    }
    pull_close(&p);
}

/* A chunk with more copies than a turn has. */
static void test_many_ranges(void)
{
    struct pull p;

    pull_open(&p, 8 * CHUNK);
    (void)allocate(&p, 0, 2 * CHUNK);
    fill(&p, 3);
    p.device_bytes = CHUNK;
    static uint8_t bytes[64 + 200 + 600 * sizeof(struct pcc_exposed_range)];
    struct pcc_exposed_range ranges[600];
    for (uint32_t i = 0; i < 600; i++)
        ranges[i] =
            (struct pcc_exposed_range){.allocation_offset_bytes = 2 * CHUNK - 100ull * (i + 1),
                                       .offset_bytes = 64ull * i,
                                       .length_bytes = 1 + i % 64};
    p.range_count = 0;
    uint64_t length = exposure_make(&p, bytes);
    memcpy(bytes + offsetof(struct pcc_exposure, range_count), &(uint32_t){600}, 4);
    memcpy(bytes + length, ranges, sizeof(ranges));
    char reason[PCC_REASON_BYTES];
    CHECK(pcc_tenant_expose(p.f.tenant, ++p.map, bytes, length + sizeof(ranges),
                            &(struct pcc_descriptors){0}, reason) == 0);
    proven(&p);
    uint64_t sequence;
    CHECK(admit(&p, 1, &sequence) == 0);
    ready_set(&p, 1, 0);
    push_tree(&p, 1);
    CHECK(event_until(&p.f, PCC_EVENT_DURABLE).id == 1);
    uint8_t *expected = payload_expected(&p, 1);
    for (uint32_t i = 0; i < 600; i++)
        memcpy(expected + ranges[i].offset_bytes,
               p.memory[0].expected + ranges[i].allocation_offset_bytes, ranges[i].length_bytes);
    saved_equals(&p, sequence, expected);
    CHECK_EQUAL(peek(&p.control->copies_to_host), 601);
    free(expected);
    pull_close(&p);
}

static void refused(struct pull *p, int code, const char *word)
{
    char reason[PCC_REASON_BYTES];
    const int error = expose_as_is(p, reason);

    printf("  %s\n", reason);
    CHECK_EQUAL(error, code);
    CHECK(strstr(reason, word) != NULL);
    mappings_gone(p);
}

static void test_what_cannot_be_exposed(void)
{
    struct pull p;
    char reason[PCC_REASON_BYTES];

    pull_open(&p, 8 * CHUNK);
    usual_layout(&p);
    const struct device_memory honest = p.memory[1];

    p.memory[1].exposed.handle[20] ^= 1;
    refused(&p, -PCC_E_BAD_HANDLE, "cannot be opened");
    p.memory[1] = honest;
    p.memory[0].exposed.uuid[1] ^= 1;
    p.memory[1].exposed.uuid[1] ^= 1;
    refused(&p, -PCC_E_BAD_HANDLE, "does not see");
    p.memory[0].exposed.uuid[1] ^= 1;
    p.memory[1] = honest;
    p.memory[1].exposed.length_bytes += 8; /* and a range that uses them */
    p.ranges[2].length_bytes += 8;
    refused(&p, -PCC_E_BAD_HANDLE, "shorter");
    p.ranges[2].length_bytes -= 8;
    p.replica[0] = (struct pcc_exposed_range){
        .allocation = 1, .offset_bytes = 64, .length_bytes = honest.exposed.length_bytes + 8};
    p.replica_count = 1;
    refused(&p, -PCC_E_BAD_HANDLE, "shorter");
    p.replica_count = 0;
    p.memory[1] = honest;
    poke(&p.control->register_fail_code, CUDA_ERROR_OUT_OF_MEMORY);
    poke(&p.control->register_fail_count, 1);
    refused(&p, -ENOMEM, "pin");
    p.memory[0].expected[70] ^= 1;
    refused(&p, -PCC_E_BAD_HANDLE, "other memory");
    p.memory[0].expected[70] ^= 1;
    p.ranges[1].allocation = 9;
    refused(&p, -PCC_E_BAD_PEER, "names no allocation");
    p.ranges[1].allocation = 1;
    poke(&p.control->open_fail_code, CUDA_ERROR_INVALID_CONTEXT);
    poke(&p.control->open_fail_count, 1);
    refused(&p, -PCC_E_BAD_HANDLE, "another user");
    poke(&p.control->open_fail_code, CUDA_ERROR_UNKNOWN); /* says "lost", but is not */
    poke(&p.control->open_fail_count, 1);
    refused(&p, -PCC_E_BAD_HANDLE, "CUDA_ERROR_UNKNOWN");
    poke(&p.control->open_fail_code, CUDA_ERROR_OUT_OF_MEMORY);
    poke(&p.control->open_fail_count, 1);
    refused(&p, -ENOMEM, "OUT_OF_MEMORY");
    poke(&p.control->copy_fail_code, CUDA_ERROR_INVALID_VALUE);
    poke(&p.control->copy_fail_kinds, STANDIN_TO_HOST);
    poke(&p.control->copy_fail_at, 1);
    refused(&p, -PCC_E_DEVICE, "cannot be read");
    expose(&p); /* and the GPU is as it was */
    checkpoint(&p, 1);
    p.memory[1].exposed.handle[20] ^= 1;
    refused(&p, -PCC_E_BAD_HANDLE, "cannot be opened"); /* the map before is gone, too */
    p.memory[1] = honest;

    detach(&p.f);
    CHECK(expose_as_is(&p, reason) == -ENOTCONN);
    trainer_page_open(&p);
    pull_close(&p);
}

/* A process that the daemon does not see, and one that is stopped after the copy: its own thread
 * says that it lives. */
static void test_the_trainer_answers(void)
{
    struct pull p;
    uint64_t sequence;

    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    detach(&p.f);
    trainer_attach(&p, false);
    expose(&p);
    checkpoint(&p, 1);

    copies_hold(&p, 4);
    CHECK(admit(&p, 2, &sequence) == 0);
    ready_set(&p, 2, 0);
    push_tree(&p, 2);
    wait_for(&p.control->held_copies, 1);
    CHECK(kill(p.trainer.pid, SIGSTOP) == 0);
    copies_go_on(&p);
    const uint64_t deadline = soon();
    while (PCC_READ(&p.f.page.page->life_asked) == PCC_READ(&p.f.page.page->life_told))
        CHECK(pcc_now_ns() < deadline);
    CHECK(done_of(&p, 2, 0) != 2);
    CHECK(kill(p.trainer.pid, SIGCONT) == 0);
    CHECK(event_until(&p.f, PCC_EVENT_DURABLE).id == 2);
    pull_close(&p);
}

/* Without a usable driver there are no GPUs, and both sides get the reason. */
static void test_no_driver(void)
{
    struct pull p = {0};
    char reason[PCC_REASON_BYTES];

    control_open(&p);
    poke(&p.control->init_fail_code, CUDA_ERROR_NO_DEVICE);
    CHECK(strstr(pcc_cuda_missing(), "CUDA_ERROR_NO_DEVICE (100)") != NULL);
    const struct settings settings = {.payload_capacity = 4u << 20, .memory_bytes = 4 * CHUNK};
    fixture_open(&p.f, &settings);
    trainer_page_open(&p);
    CHECK(pcc_tenant_expose(p.f.tenant, 1, "", 0, &(struct pcc_descriptors){0}, reason) ==
          -PCC_E_NO_DRIVER);
    CHECK(strstr(reason, "CUDA_ERROR_NO_DEVICE (100)") != NULL);
    detach(&p.f);
    fixture_close(&p.f);
}

/* A driver does not survive a fork; that of the parent still works. */
static void test_forked(void)
{
    const struct pcc_cuda *cuda;
    int status;

    struct pull p;

    control_open(&p);
    CHECK(pcc_cuda_load(&cuda) == 0 && pcc_cuda_missing()[0] == '\0');
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        _exit(pcc_cuda_load(&cuda) == -PCC_E_NO_DRIVER && strstr(pcc_cuda_missing(), "forked") ? 0
                                                                                               : 1);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    struct pcc_gpu_device device;
    CHECK(pcc_gpu_device_open(1, &device) == 0);
    struct pcc_gpu_device same;
    CHECK(pcc_gpu_device_find(&device.uuid, &same) == 0 && same.device == device.device);
    pcc_gpu_device_close(&same);
    pcc_gpu_device_close(&device);
    CHECK(pcc_gpu_device_open(2, &device) == -PCC_E_DEVICE);
}

struct watched {
    struct pcc_gpus *gpus;
    _Atomic bool over;
};

static void *look_at_info(void *argument)
{
    const struct watched *watched = argument;
    struct pcc_gpu_info info;

    while (!atomic_load(&watched->over))
        CHECK(pcc_gpus_info(watched->gpus, &info, 1) == 0 || info.name[0] != '\0');
    return NULL;
}

/* `status` asks about a GPU whose context is given back and made again. */
static void test_info_meanwhile(void)
{
    struct watched watched = {.over = false};
    struct pcc_gpu_device device;
    struct pcc_gpu *gpu;
    struct pull p;
    pthread_t looker;

    control_open(&p);
    CHECK(pcc_gpu_device_open(0, &device) == 0);
    CHECK(pcc_gpus_open(&watched.gpus) == 0);
    CHECK(pthread_create(&looker, NULL, look_at_info, &watched) == 0);
    for (uint32_t i = 0; i < 50; i++) {
        CHECK(pcc_gpus_use(watched.gpus, (const uint8_t *)&device.uuid, &gpu) == 0);
        pcc_gpu_put(gpu);
        pcc_gpus_rest(watched.gpus, 0);
    }
    atomic_store(&watched.over, true);
    CHECK(pthread_join(looker, NULL) == 0);
    pcc_gpus_close(watched.gpus);
    pcc_gpu_device_close(&device);
}

static const struct test tests[] = {
    {"test_no_driver", test_no_driver},
    {"test_forked", test_forked},
    {"test_info_meanwhile", test_info_meanwhile},
    {"test_bytes", test_bytes},
    {"test_order", test_order},
    {"test_layouts", test_layouts},
    {"test_little_memory", test_little_memory},
    {"test_many_ranges", test_many_ranges},
    {"test_what_cannot_be_exposed", test_what_cannot_be_exposed},
    {"test_the_trainer_answers", test_the_trainer_answers},
};

int main(int argc, char **argv)
{
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
