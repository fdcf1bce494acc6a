/* A tenant whose trainer has GPU memory. The trainer is another process that has nothing else: the
 * test writes the page, as in test_tenant_hostile.c. */
#pragma once

#include "pull_trainer.h"

#define ALLOCATIONS_MAX 8u
#define RANGES_MAX 64u

/* -- the test's side -- */

struct device_memory {
    uint64_t address; /* in the trainer */
    struct pcc_exposed_allocation exposed;
    uint8_t *expected;
};

struct pull {
    struct fixture f;
    struct pcc_gpus *gpus;
    struct trainer trainer;
    struct standin_control *control; /* of this process's driver: the daemon's */
    struct device_memory memory[ALLOCATIONS_MAX];
    uint32_t memory_count;
    struct pcc_exposed_range ranges[RANGES_MAX];
    uint32_t range_count;
    struct pcc_exposed_range replica[RANGES_MAX];
    struct pcc_exposed_share shares[RANGES_MAX];
    uint64_t replica_id;
    uint32_t replica_count, share_count;
    uint64_t device_bytes;
    uint64_t map;
    int *fds; /* what comes with the next exposure */
    uint64_t fd_count;
};

/* Memory on a GPU, filled; its number. */
static inline uint32_t allocate(struct pull *p, uint32_t device, uint64_t length)
{
    struct device_memory *memory = &p->memory[p->memory_count];
    const struct answer answer = trainer_ask(
        &p->trainer, (struct order){.what = ORDER_ALLOCATE, .device = device, .length = length});

    CHECK(p->memory_count < ALLOCATIONS_MAX);
    memory->address = answer.address;
    memory->exposed = answer.exposed;
    memory->expected = malloc(length);
    CHECK(memory->expected != NULL);
    return p->memory_count++;
}

/* The same, in pieces with a descriptor each, which come with the next exposure. */
static inline uint32_t allocate_run(struct pull *p, uint32_t device, uint64_t length,
                                    uint32_t pieces)
{
    struct device_memory *memory = &p->memory[p->memory_count];
    const struct answer answer = trainer_ask(
        &p->trainer,
        (struct order){.what = ORDER_RUN, .device = device, .length = length, .pieces = pieces});

    CHECK(p->memory_count < ALLOCATIONS_MAX);
    memory->address = answer.address;
    memory->exposed = answer.exposed;
    memory->expected = calloc(1, length);
    p->fds = realloc(p->fds, (p->fd_count + pieces) * sizeof(*p->fds));
    CHECK(memory->expected != NULL && p->fds != NULL);
    for (uint32_t i = 0; i < pieces; i++)
        p->fds[p->fd_count++] =
            trainer_descriptor(&p->trainer, memory->address + i * (length / pieces));
    return p->memory_count++;
}

static inline void descriptors_close(struct pull *p)
{
    for (uint64_t i = 0; i < p->fd_count; i++)
        CHECK(close(p->fds[i]) == 0);
    free(p->fds);
    p->fds = NULL;
    p->fd_count = 0;
}

/* The trainer's step: other bytes in all of its memory. */
static inline void fill(struct pull *p, uint64_t seed)
{
    for (uint32_t i = 0; i < p->memory_count; i++) {
        struct device_memory *memory = &p->memory[i];
        pattern(memory->expected, memory->exposed.length_bytes, seed * 100 + i);
        (void)trainer_ask(&p->trainer, (struct order){.what = ORDER_FILL,
                                                      .address = memory->address,
                                                      .length = memory->exposed.length_bytes,
                                                      .seed = seed * 100 + i});
    }
}

static inline void range_add(struct pull *p, uint32_t allocation, uint64_t from, uint64_t length,
                             uint64_t at)
{
    CHECK(p->range_count < RANGES_MAX);
    p->ranges[p->range_count++] = (struct pcc_exposed_range){.allocation = allocation,
                                                             .allocation_offset_bytes = from,
                                                             .offset_bytes = at,
                                                             .length_bytes = length};
}

/* The exposure of what there is; `out` has room for it. Its length. */
static inline uint64_t exposure_make(struct pull *p, uint8_t *out)
{
    struct pcc_exposure head = {.magic = PCC_EXPOSURE_MAGIC,
                                .allocation_count = p->memory_count,
                                .range_count = p->range_count,
                                .device_bytes = p->device_bytes,
                                .probe_offset_bytes = 64,
                                .replica_id = p->replica_id,
                                .replica_count = p->replica_count,
                                .share_count = p->share_count};
    uint8_t *at = out + sizeof(head);

    memcpy(head.probe, p->memory[0].expected + 64, sizeof(head.probe));
    memcpy(out, &head, sizeof(head));
    for (uint32_t i = 0; i < p->memory_count; i++, at += sizeof(p->memory[i].exposed))
        memcpy(at, &p->memory[i].exposed, sizeof(p->memory[i].exposed));
    at = mempcpy(at, p->ranges, p->range_count * sizeof(p->ranges[0]));
    at = mempcpy(at, p->replica, p->replica_count * sizeof(p->replica[0]));
    at = mempcpy(at, p->shares, p->share_count * sizeof(p->shares[0]));
    return (uint64_t)(at - out);
}

#define EXPOSURE_ROOM 8192u

static inline int expose_as_is(struct pull *p, char reason[PCC_REASON_BYTES])
{
    uint8_t bytes[EXPOSURE_ROOM];
    const uint64_t length = exposure_make(p, bytes);

    const struct pcc_descriptors descriptors = {p->fds, p->fd_count};

    return pcc_tenant_expose(p->f.tenant, ++p->map, bytes, length, &descriptors, reason);
}

static inline void expose_unproven(struct pull *p)
{
    char reason[PCC_REASON_BYTES];
    const int error = expose_as_is(p, reason);

    if (error != 0)
        printf("  %s: %s\n", pcc_error_name(error), reason);
    CHECK(error == 0 && reason[0] == '\0');
}

/* As if a snapshot before had proven it: test_pull_proof.c has the proof. */
static inline void proven(struct pull *p)
{
    pcc_tenant_lock(p->f.tenant);
    p->f.tenant->pull.map->proven = UINT32_MAX;
    pcc_tenant_unlock(p->f.tenant);
}

static inline void expose(struct pull *p)
{
    expose_unproven(p);
    proven(p);
}

/* -- the page -- */

static inline uint64_t done_of(struct pull *p, uint64_t snapshot, uint32_t device)
{
    return atomic_load(&pcc_page_words(&p->f.page, snapshot, device)->done);
}

static inline void ready_set(struct pull *p, uint64_t snapshot, uint32_t device)
{
    atomic_store(&pcc_page_words(&p->f.page, snapshot, device)->ready, snapshot);
}

static inline uint64_t word_of(struct pull *p, uint64_t snapshot)
{
    return atomic_load(&pcc_page_snapshot(&p->f.page, snapshot)->word);
}

#define TREE_BYTES 5000u /* the client's part of a payload */

static inline struct pcc_request pull_request(const struct pull *p, uint64_t snapshot)
{
    return (struct pcc_request){.snapshot = snapshot,
                                .step = (int64_t)snapshot,
                                .payload_bytes = p->device_bytes + TREE_BYTES,
                                .tree_offset_bytes = p->device_bytes,
                                .tree_bytes = TREE_BYTES,
                                .map = p->map};
}

/* Requests it by any block; why it did not begin, or 0. */
static inline int admit_as(struct pull *p, uint64_t snapshot, const struct pcc_request *request,
                           uint64_t *sequence)
{
    atomic_store(&pcc_page_snapshot(&p->f.page, snapshot)->word,
                 pcc_word(snapshot, PCC_WORD_REQUESTED));
    ask(&p->f, snapshot, request);
    const struct pcc_event event = queue_event(&p->f, snapshot);
    *sequence = event.sequence;
    return event.error;
}

static inline int admit(struct pull *p, uint64_t snapshot, uint64_t *sequence)
{
    const struct pcc_request request = pull_request(p, snapshot);

    return admit_as(p, snapshot, &request, sequence);
}

static inline bool message_next(struct pull *p, struct pcc_message *message)
{
    return pcc_ring_pop(&p->f.page.to_client, message) == 1;
}

/* A chunk as the client has it mapped. */
static inline uint8_t *client_map(struct pull *p, uint32_t chunk)
{
    const struct pcc_segment *segment =
        &p->f.tenant->segments[p->f.tenant->chunks[chunk].segment].memory;
    void *bytes = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, segment->fd,
                       (off_t)(chunk - segment->first_chunk) * CHUNK);

    CHECK(bytes != MAP_FAILED);
    return bytes;
}

/* The client's part: takes a granted chunk, fills it with the tree of `snapshot`, sends it. */
static inline void push_tree(struct pull *p, uint64_t snapshot)
{
    const uint64_t deadline = soon();
    struct pcc_message message;

    while (!message_next(p, &message)) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(100);
    }
    CHECK(message.kind == PCC_MSG_FREE);
    uint8_t *tree = client_map(p, message.chunk);
    memset(tree, 0, 2 * BLOCK);
    pattern(tree, TREE_BYTES, snapshot);
    uint64_t *checksums = p->f.page.checksums + (size_t)message.chunk * (CHUNK / BLOCK);
    checksums[0] = pcc_hash_bytes(tree, BLOCK);
    checksums[1] = pcc_hash_bytes(tree + BLOCK, TREE_BYTES - BLOCK);
    CHECK(munmap(tree, CHUNK) == 0);
    message.kind = PCC_MSG_FULL;
    message.id = snapshot;
    message.offset_bytes = p->device_bytes;
    message.length_bytes = TREE_BYTES;
    CHECK(pcc_ring_push(&p->f.page.to_daemon, &message) == 0);
    pcc_bell_ring(&p->f.page.page->daemon_bell);
}

/* -- the daemon's questions: what the trainer has in its memory -- */

static inline struct pcc_proof *proof_of(const struct pull *p)
{
    return &p->f.page.page->proof;
}

/* Waits for a question that has no answer yet. */
static inline void question(const struct pull *p)
{
    const struct pcc_proof *proof = proof_of(p);
    const uint64_t deadline = soon();

    while (atomic_load(&proof->asked) == atomic_load(&proof->answered)) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(100);
    }
    CHECK(proof->count > 0 && proof->count <= PCC_PROOF_BLOCKS);
}

/* What the trainer has there; the allocation's number. */
static inline uint32_t memory_at(const struct pull *p, uint64_t address, const uint8_t **out)
{
    uint32_t i = 0;

    while (address - p->memory[i].address >= p->memory[i].exposed.length_bytes)
        CHECK(++i < p->memory_count);
    *out = p->memory[i].expected + (address - p->memory[i].address);
    return i;
}

static inline void answer(const struct pull *p, int result)
{
    struct pcc_proof *proof = proof_of(p);

    proof->result = result;
    atomic_store(&proof->answered, atomic_load(&proof->asked));
    pcc_bell_ring(&p->f.page.page->daemon_bell);
}

/* The bytes that are asked for, all of them or (wrong) but for one bit. */
static inline void answer_question(const struct pull *p, bool wrong)
{
    struct pcc_proof *proof = proof_of(p);
    const uint8_t *bytes;

    question(p);
    for (uint32_t i = 0; i < proof->count; i++) {
        (void)memory_at(p, proof->blocks[i].address, &bytes);
        memcpy(proof->bytes[i], bytes, proof->blocks[i].length_bytes);
    }
    proof->bytes[proof->count - 1][0] ^= wrong;
    answer(p, 0);
}

/* -- what was saved -- */

/* What the payload holds at `snapshot`: gaps are zeros. */
static inline uint8_t *payload_expected(const struct pull *p, uint64_t snapshot)
{
    uint8_t *bytes = calloc(1, p->device_bytes + TREE_BYTES);

    CHECK(bytes != NULL);
    for (uint32_t i = 0; i < p->range_count; i++) {
        const struct pcc_exposed_range *range = &p->ranges[i];
        memcpy(bytes + range->offset_bytes,
               p->memory[range->allocation].expected + range->allocation_offset_bytes,
               range->length_bytes);
    }
    pattern(bytes + p->device_bytes, TREE_BYTES, snapshot);
    return bytes;
}

static inline int compare_to(void *expected, const void *bytes, uint64_t offset, uint64_t length)
{
    return memcmp((const uint8_t *)expected + offset, bytes, length) == 0 ? 0 : -EBADMSG;
}

static inline void saved_equals(struct pull *p, uint64_t sequence, uint8_t *expected)
{
    struct pcc_load *load;

    CHECK(pcc_load_open(p->f.volume, sequence, &load) == 0);
    CHECK(pcc_load_stream(load, 0, p->device_bytes + TREE_BYTES, CHUNK, 1, compare_to, expected) ==
          0);
    pcc_load_close(load);
}

/* A whole checkpoint: pulled, pushed, durable, the right bytes. */
static inline void checkpoint(struct pull *p, uint64_t snapshot)
{
    uint64_t sequence;

    CHECK(admit(p, snapshot, &sequence) == 0);
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        ready_set(p, snapshot, device);
    push_tree(p, snapshot);
    struct pcc_event event;
    do
        event = event_next(&p->f);
    while (event.id != snapshot || event.session != p->f.session ||
           (event.kind != PCC_EVENT_DURABLE && event.kind != PCC_EVENT_FAILED));
    CHECK_EQUAL(event.error, 0);
    CHECK(event.kind == PCC_EVENT_DURABLE);
    CHECK(word_of(p, snapshot) == pcc_word(snapshot, PCC_WORD_COPIED));
    uint8_t *expected = payload_expected(p, snapshot);
    saved_equals(p, sequence, expected);
    free(expected);
}

/* -- life -- */

static inline void control_open(struct pull *p)
{
    const char *path = getenv("PCCHECK_STANDIN_FAULTS");

    CHECK(path != NULL);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    p->control = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(p->control != MAP_FAILED && close(fd) == 0);
    p->control->magic = STANDIN_CONTROL_MAGIC;
}

static inline uint64_t peek(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void poke(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline void wait_for(const uint64_t *word, uint64_t least)
{
    const uint64_t deadline = soon();

    while (peek(word) < least) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(200);
    }
}

static inline void wait_done(struct pull *p, uint64_t snapshot, uint32_t device)
{
    const uint64_t deadline = soon();

    while (done_of(p, snapshot, device) < snapshot) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(200);
    }
}

/* What the daemon's driver does with copies: */
static inline void copies_hold(struct pull *p, uint64_t after)
{
    poke(&p->control->copy_hold_skip, after);
    poke(&p->control->copy_hold_kinds, STANDIN_TO_HOST);
}

static inline void copies_go_on(struct pull *p)
{
    poke(&p->control->copy_hold_kinds, 0);
}

static inline void copies_fail(struct pull *p, uint64_t nth, uint64_t code, bool behind)
{
    poke(&p->control->copy_fail_kinds, STANDIN_TO_HOST);
    poke(&p->control->copy_fail_code, code);
    poke(&p->control->copy_fail_async, behind);
    poke(&p->control->copy_fail_at, nth);
}

/* A session of the trainer, if it lives; `seen`: in the daemon's PID namespace. */
static inline void trainer_attach(struct pull *p, bool seen)
{
    p->f.trainer = seen ? p->trainer.pid : 0;
    page_open(&p->f);
    if (p->trainer.pid != 0)
        trainer_answer(&p->trainer, p->f.page_fd, p->f.tenant->geometry.page_bytes);
}

static inline void trainer_page_open(struct pull *p)
{
    trainer_attach(p, true);
}

/* A tenant with a page, and a trainer who has nothing yet. */
static inline void pull_open(struct pull *p, uint64_t memory_bytes)
{
    memset(p, 0, sizeof(*p));
    control_open(p);
    CHECK(pcc_gpus_open(&p->gpus) == 0);
    const struct settings settings = {
        .payload_capacity = 4u << 20, .memory_bytes = memory_bytes, .gpus = p->gpus};
    fixture_open(&p->f, &settings);
    trainer_start(&p->trainer);
    trainer_page_open(p);
}

/* A GPU, two allocations, four chunks of payload with gaps in them. */
static inline void usual_layout(struct pull *p)
{
    (void)allocate(p, 0, 3 * CHUNK);
    (void)allocate(p, 0, 100000);
    fill(p, 1);
    range_add(p, 0, 256, 2 * CHUNK, 0);
    range_add(p, 1, 0, 1000, 2 * CHUNK + 64);
    range_add(p, 1, 2000, 98000, 2 * CHUNK + 1088);
    p->device_bytes = 4 * CHUNK;
}

static inline void mappings_gone(struct pull *p)
{
    struct pcc_tenant_usage usage;

    pcc_tenant_usage(p->f.tenant, &usage);
    CHECK(usage.mappings == 0 && usage.exposed_bytes == 0 && usage.granted_chunks == 0);
    CHECK(usage.pieces == 0 && peek(&p->control->reserved_bytes) == 0);
    CHECK_EQUAL(peek(&p->control->open_mappings), 0);
}

static inline void expected_free(struct pull *p)
{
    for (uint32_t i = 0; i < p->memory_count; i++)
        free(p->memory[i].expected);
    p->memory_count = 0;
}

static inline void pull_close(struct pull *p)
{
    detach(&p->f);
    trainer_kill(&p->trainer);
    mappings_gone(p);
    fixture_close(&p->f);
    pcc_gpus_close(p->gpus);
    CHECK_EQUAL(peek(&p->control->registered_bytes), 0);
    CHECK_EQUAL(peek(&p->control->streams) + peek(&p->control->events), 0);
    CHECK_EQUAL(peek(&p->control->pageable_copies) + peek(&p->control->contexts), 0);
    expected_free(p);
}

/* How a save ended. */
static inline struct pcc_event end_of(struct pull *p, uint64_t snapshot)
{
    struct pcc_event event;

    do
        event = event_next(&p->f);
    while (event.id != snapshot ||
           (event.kind != PCC_EVENT_DURABLE && event.kind != PCC_EVENT_FAILED));
    return event;
}
