/* What no honest client sends. The client here is hand-made: it maps the page, and the test writes
 * any value into it. Each lie ends the session with BAD_PEER and nothing else: no copy is accepted,
 * and the tenant serves the next session. Then the races that an honest client can lose. */
#include <fcntl.h>
#include <signal.h>

#include "base/pcc_copy.h"
#include "disk/pcc_load.h"
#include "handmade_client.h"

static const struct settings roomy = {.payload_capacity = 1u << 20, .memory_bytes = 8 * CHUNK};

enum lie {
    LIE_KIND_ZERO,
    LIE_KIND_UNKNOWN,
    LIE_KIND_OF_THE_DAEMON,
    LIE_CHUNK_TOO_LARGE,
    LIE_CHUNK_NOT_GRANTED,
    LIE_CHUNK_TWICE,
    LIE_SNAPSHOT_UNKNOWN,
    LIE_SNAPSHOT_ALREADY_COPIED,
    LIE_OFFSET_UNALIGNED,
    LIE_OFFSET_BEHIND_THE_END,
    LIE_OFFSET_HUGE,
    LIE_OFFSET_TWICE,
    LIE_LENGTH_SHORT,
    LIE_LENGTH_LONG,
    LIE_LENGTH_OF_THE_LAST,
    LIE_RESULT_UNKNOWN,
    LIE_TAKEN_NOT_LENT,
    LIE_TAKEN_TOO_LARGE,
    LIE_TAIL_JUMPS,
    LIE_HEAD_JUMPS,
    LIE_WORD_SCRIBBLED,
    LIE_COUNT,
};

static void tell_copied_twice(struct fixture *f, const uint32_t chunks[4])
{
    struct pcc_message message;
    uint32_t others[4];

    say_all(f, 1, chunks);
    ring(f);
    CHECK(event_until(f, PCC_EVENT_COPIED).id == 1);
    admitted(f, 2, others);
    message = full(f, 1, others[0], 0);
    say(f, &message);
}

/* Lies that are one wrong field. */
static void twist(enum lie lie, struct pcc_message *message)
{
    switch (lie) {
    case LIE_KIND_ZERO:
        message->kind = 0;
        break;
    case LIE_KIND_UNKNOWN:
        message->kind = 77;
        break;
    case LIE_KIND_OF_THE_DAEMON:
        message->kind = PCC_MSG_DATA;
        break;
    case LIE_CHUNK_TOO_LARGE:
        message->chunk = UINT32_MAX;
        break;
    case LIE_SNAPSHOT_UNKNOWN:
        message->id = 65;
        break;
    case LIE_OFFSET_UNALIGNED:
        message->offset_bytes = BLOCK;
        break;
    case LIE_OFFSET_BEHIND_THE_END:
        message->offset_bytes = 4 * CHUNK;
        break;
    case LIE_OFFSET_HUGE:
        message->offset_bytes = UINT64_MAX - CHUNK + 1;
        break;
    case LIE_LENGTH_SHORT:
        message->length_bytes -= BLOCK;
        break;
    case LIE_LENGTH_LONG:
        message->length_bytes = UINT32_MAX;
        break;
    case LIE_LENGTH_OF_THE_LAST:
        message->offset_bytes = 3 * CHUNK;
        break;
    case LIE_RESULT_UNKNOWN:
        message->result = 2;
        break;
    case LIE_TAKEN_TOO_LARGE:
        message->kind = PCC_MSG_TAKEN;
        message->chunk = 8;
        break;
    default:
        break;
    }
}

static void tell(struct fixture *f, enum lie lie, const uint32_t chunks[4])
{
    struct pcc_message message = full(f, 1, chunks[0], 0);
    const struct pcc_message honest = full(f, 1, chunks[1], 1);

    switch (lie) {
    case LIE_CHUNK_NOT_GRANTED:
        message.chunk = 0;
        while (f->tenant->chunks[message.chunk].state != PCC_CHUNK_FREE)
            message.chunk++;
        break;
    case LIE_CHUNK_TWICE:
        say(f, &honest);
        message.chunk = honest.chunk;
        break;
    case LIE_OFFSET_TWICE:
        say(f, &honest);
        message.offset_bytes = honest.offset_bytes;
        break;
    case LIE_TAKEN_NOT_LENT:
        say(f, &honest);
        message.kind = PCC_MSG_TAKEN;
        message.chunk = honest.chunk;
        break;
    case LIE_HEAD_JUMPS: /* noticed when the chunk that came back is handed out again */
        atomic_fetch_add(&f->page.page->to_client.head, 1u << 20);
        message.kind = PCC_MSG_TAKEN;
        break;
    case LIE_SNAPSHOT_ALREADY_COPIED:
        tell_copied_twice(f, chunks);
        return;
    case LIE_TAIL_JUMPS:
        atomic_fetch_add(&f->page.page->to_daemon.tail, 1u << 20);
        return;
    case LIE_WORD_SCRIBBLED:
        atomic_store(&pcc_page_snapshot(&f->page, 1)->word, pcc_word(1, PCC_WORD_COPIED));
        say_all(f, 1, chunks);
        return;
    default:
        twist(lie, &message);
        break;
    }
    say(f, &message);
}

static void test_lies(void)
{
    struct fixture f;
    uint32_t chunks[4];

    fixture_open(&f, &roomy);
    for (uint32_t lie = 0; lie < LIE_COUNT; lie++) {
        page_open(&f);
        admitted(&f, 1, chunks);
        tell(&f, lie, chunks);
        ring(&f);
        if (lie == LIE_WORD_SCRIBBLED) /* ends like an abandoned one, or as a broken peer */
            CHECK(event_until(&f, PCC_EVENT_FAILED).error == -PCC_E_ABORTED);
        else
            CHECK(event_until(&f, PCC_EVENT_BAD_PEER).session == f.session);
        const struct pcc_request late = request_of(&f, 3, PAYLOAD);
        word_set(&f, 3, PCC_WORD_REQUESTED);
        if (lie != LIE_WORD_SCRIBBLED)
            ask(&f, 3, &late); /* from here on nothing of it is believed */
        detach(&f);
        CHECK(f.queued[3].session != f.session);
        const struct pcc_tenant_usage usage = usage_at_rest(&f);
        CHECK(usage.granted_chunks == 0 && usage.full_chunks == 0 && usage.lent_chunks == 0);
        renew(&f, &roomy);
    }
    /* The next client is honest. */
    static uint8_t bytes[PAYLOAD];
    pattern(bytes, sizeof(bytes), 1);
    link_open(&f);
    load_equals(&f, save(&f, 1, bytes, sizeof(bytes)), 1, bytes, sizeof(bytes));
    fixture_end(&f);
}

/* P1: a dead trainer had handed over everything, and had not woken the daemon. */
/* The table's row has no meaning then: the writers make the checksums of what the chunk holds. */
static void test_a_chunk_without_checksums(void)
{
    struct fixture f;
    uint32_t chunks[4];
    static uint8_t zeros[PAYLOAD], got[PAYLOAD] = {1};
    struct pcc_load *load;

    fixture_open(&f, &roomy);
    page_open(&f);
    admitted(&f, 1, chunks);
    for (uint32_t part = 0; part < 4; part++) {
        struct pcc_message message = full(&f, 1, chunks[part], part);
        if (part < 2) {
            memset(f.page.checksums + (size_t)chunks[part] * (CHUNK / BLOCK), 7,
                   CHUNK / BLOCK * sizeof(uint64_t));
            message.result = PCC_FULL_BARE;
        }
        say(&f, &message);
    }
    ring(&f);
    const struct pcc_range range = {.address = (uintptr_t)got, .length_bytes = PAYLOAD};
    CHECK(pcc_load_open(f.volume, event_until(&f, PCC_EVENT_DURABLE).sequence, &load) == 0);
    CHECK(pcc_load_ranges(load, &range, 1, CHUNK, 1) == 0);
    CHECK(memcmp(got, zeros, PAYLOAD) == 0);
    pcc_load_close(load);
    fixture_end(&f);
}

static void test_ring_is_drained(void)
{
    struct fixture f;
    uint32_t chunks[4];

    fixture_open(&f, &roomy);
    page_open(&f);
    admitted(&f, 1, chunks);
    say_all(&f, 1, chunks);
    (void)pcc_tenant_detach(f.tenant, NULL, 0);
    CHECK(event_next(&f).kind == PCC_EVENT_COPIED);
    CHECK(event_until(&f, PCC_EVENT_DURABLE).id == 1);
    CHECK(word_get(&f, 1) == pcc_word(1, PCC_WORD_COPIED));
    (void)pcc_tenant_detach(f.tenant, NULL, 0); /* again: nothing */
    ends_close(&f);

    page_open(&f);
    admitted(&f, 1, chunks);
    const struct pcc_message one = full(&f, 1, chunks[2], 2);
    say(&f, &one);
    (void)pcc_tenant_detach(f.tenant, NULL, 0);
    const struct pcc_event event = event_until(&f, PCC_EVENT_FAILED);
    CHECK(event.id == 1 && event.error == -PCC_E_ABORTED);
    ends_close(&f);
    fixture_close(&f);
}

/* P4: the client abandons the snapshot while its last message is on its way. */
static void test_abandoned_before_the_last_message(void)
{
    struct fixture f;
    uint32_t chunks[4];
    uint64_t sequence;

    fixture_open(&f, &roomy);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 20; snapshot++) {
        word_set(&f, snapshot, PCC_WORD_REQUESTED);
        CHECK(begin_wait(&f, snapshot, PAYLOAD) > 0);
        for (uint32_t i = 0; i < 4; i++) {
            struct pcc_message message;
            while (pcc_ring_pop(&f.page.to_client, &message) == 0)
                ;
            chunks[i] = message.chunk;
        }
        say_all(&f, snapshot, chunks);
        if (snapshot % 2 == 0)
            ring(&f); /* the daemon is at it already */
        const bool won = pcc_word_move(pcc_page_snapshot(&f.page, snapshot), snapshot,
                                       PCC_WORD_COPYING, PCC_WORD_ABANDONED);
        ring(&f);
        struct pcc_event event;
        do
            event = event_next(&f);
        while (event.kind != PCC_EVENT_DURABLE && event.kind != PCC_EVENT_FAILED &&
               event.kind != PCC_EVENT_SUPERSEDED);
        CHECK(event.id == snapshot);
        CHECK((event.kind == PCC_EVENT_FAILED) == won);
        CHECK(word_get(&f, snapshot) ==
              pcc_word(snapshot, won ? PCC_WORD_ABANDONED : PCC_WORD_COPIED));
    }
    /* Abandoned before admission. */
    word_set(&f, 21, PCC_WORD_ABANDONED);
    CHECK(begin(&f, 21, PAYLOAD, &sequence) == -PCC_E_ABORTED);
    /* The same snapshot twice. */
    const struct pcc_request again = request_of(&f, 20, PAYLOAD);
    word_set(&f, 20, PCC_WORD_REQUESTED);
    ask(&f, 20, &again);
    CHECK(event_until(&f, PCC_EVENT_BAD_PEER).session == f.session);
    fixture_end(&f);
}

/* -- words that turn back -- */

static struct fixture *_Atomic turned; /* whose word turns; NULL: none does */

void __real_pcc_events_put(struct pcc_events *events, const struct pcc_event *event);
void __wrap_pcc_events_put(struct pcc_events *events, const struct pcc_event *event);

void __wrap_pcc_events_put(struct pcc_events *events, const struct pcc_event *event)
{
    struct fixture *f = atomic_load(&turned);

    if (f != NULL && event->kind == PCC_EVENT_REQUESTED && event->id > PCC_SNAPSHOTS)
        word_set(f, event->id - PCC_SNAPSHOTS, PCC_WORD_REQUESTED);
    __real_pcc_events_put(events, event);
}

/* An entry whose word says one snapshot and then an earlier one again: the queue holds no more than
 * the page has entries. */
static void test_turning_words(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    pcc_tenant_policy(f.tenant, &held);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= PCC_SNAPSHOTS; snapshot++) {
        const struct pcc_request request = request_of(&f, snapshot, PAYLOAD);
        word_set(&f, snapshot, PCC_WORD_REQUESTED);
        ask(&f, snapshot, &request);
        while (f.queued[snapshot % PCC_SNAPSHOTS].id != snapshot)
            events_sort(&f);
    }
    atomic_store(&turned, &f);
    const struct pcc_request more = request_of(&f, 1 + PCC_SNAPSHOTS, PAYLOAD);
    word_set(&f, 1 + PCC_SNAPSHOTS, PCC_WORD_REQUESTED);
    ask(&f, 1 + PCC_SNAPSHOTS, &more);
    while (f.queued[1].id != 1 + PCC_SNAPSHOTS)
        events_sort(&f);
    atomic_store(&turned, NULL);
    fixture_end(&f);
}

/* -- a process that outlives its session -- */

/* A mapping of its own, as a client has one. */
static uint8_t *map(const struct fixture *f, uint32_t chunk)
{
    const struct pcc_segment *memory =
        &f->tenant->segments[f->tenant->chunks[chunk].segment].memory;
    uint8_t *bytes = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd,
                          (off_t)(chunk - memory->first_chunk) * CHUNK);

    CHECK(bytes != MAP_FAILED);
    return bytes;
}

struct writer {
    uint8_t *chunks[4];
    _Atomic bool stop;
};

static void *write_on(void *argument)
{
    struct writer *writer = argument;

    for (uint32_t i = 0; !atomic_load(&writer->stop); i++)
        memset(writer->chunks[i % 4], (int)i, CHUNK);
    return NULL;
}

static uint64_t left_chunks(struct fixture *f)
{
    struct pcc_tenant_usage usage;

    pcc_tenant_usage(f->tenant, &usage);
    return usage.left_chunks;
}

/* A stopped process, or a late GPU, may still fill chunks that it once had: no later session has a
 * checkpoint in them. */
static void test_late_writes(void)
{
    struct fixture f;
    struct writer writer = {0};
    pthread_t thread;
    uint32_t chunks[4];
    static uint8_t bytes[PAYLOAD];

    fixture_open(&f, &roomy);
    page_open(&f);
    admitted(&f, 1, chunks);
    for (uint32_t i = 0; i < 4; i++)
        writer.chunks[i] = map(&f, chunks[i]);
    detach(&f);
    CHECK_EQUAL(left_chunks(&f), 4);
    CHECK(pthread_create(&thread, NULL, write_on, &writer) == 0);
    for (uint64_t session = 0; session < 2; session++) { /* beside them, and in their place */
        link_open(&f);
        for (uint64_t snapshot = 1; snapshot <= 50; snapshot++) {
            pattern(bytes, sizeof(bytes), snapshot);
            const uint64_t sequence = save(&f, snapshot, bytes, sizeof(bytes));
            load_equals(&f, sequence, snapshot, bytes, sizeof(bytes));
        }
        detach(&f);
        renew(&f, &roomy);
        CHECK_EQUAL(left_chunks(&f), 0);
    }
    atomic_store(&writer.stop, true);
    CHECK(pthread_join(thread, NULL) == 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(munmap(writer.chunks[i], CHUNK) == 0);
    fixture_close(&f);
}

/* A client that writes to its chunks while they are read gets no checkpoint flagged as damaged. */
static void test_scribbling_is_no_damage(void)
{
    struct fixture f;
    struct writer writer = {0};
    pthread_t thread;
    static uint8_t bytes[PAYLOAD];

    fixture_open(&f, &(struct settings){.payload_capacity = 1u << 20, .memory_bytes = 4 * CHUNK});
    pattern(bytes, sizeof(bytes), 1);
    link_open(&f);
    const uint64_t sequence = save(&f, 1, bytes, sizeof(bytes));
    for (uint32_t i = 0; i < 4; i++)
        writer.chunks[i] = map(&f, i);
    CHECK(pthread_create(&thread, NULL, write_on, &writer) == 0);
    for (uint64_t id = 1; id <= 20; id++) {
        CHECK(pcc_client_load_start(f.client, id, NULL, 0, NULL, 0) == 0);
        CHECK(pcc_tenant_load(f.tenant, f.volume, false, sequence, 0, PAYLOAD, id) == 0);
        CHECK(pcc_client_load_wait(f.client, id, soon()) == 0);
        CHECK_EQUAL(event_until(&f, PCC_EVENT_LOAD_ENDED).error, 0);
    }
    atomic_store(&writer.stop, true);
    CHECK(pthread_join(thread, NULL) == 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(munmap(writer.chunks[i], CHUNK) == 0);
    fixture_end(&f);
}

static struct pcc_message data_next(struct fixture *f)
{
    struct pcc_message message;
    const uint64_t deadline = soon();

    while (pcc_ring_pop(&f->page.to_client, &message) == 0) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(200);
    }
    return message;
}

static void give_back(struct fixture *f, const struct pcc_message *data, int32_t result)
{
    const struct pcc_message back = {
        .kind = PCC_MSG_TAKEN, .chunk = data->chunk, .id = data->id, .result = result};

    say(f, &back);
    ring(f);
}

/* The next message of a load; when it is DATA, its chunk goes back with that result. */
static struct pcc_message load_next(struct fixture *f, int32_t result)
{
    const struct pcc_message message = data_next(f);

    if (message.kind == PCC_MSG_DATA)
        give_back(f, &message, result);
    return message;
}

/* A client that calls intact data damaged makes the daemon check: the load goes back to that piece,
 * and is not damaged. What the daemon has checked is not the client's to doubt. */
static void test_doubts(void)
{
    struct fixture f;
    static uint8_t bytes[PAYLOAD];

    fixture_open(&f, &roomy);
    pattern(bytes, sizeof(bytes), 3);
    link_open(&f);
    const uint64_t sequence = save(&f, 1, bytes, sizeof(bytes));
    detach(&f);
    for (int own = 1; own >= 0; own--) { /* from memory, and from the volume */
        page_open(&f);
        CHECK(pcc_tenant_load(f.tenant, f.volume, own, sequence, 0, PAYLOAD, 5) == 0);
        struct pcc_message doubted = {0}, message;
        bool again = false;
        for (uint32_t i = 0;
             (message = load_next(&f, i == 1 ? -PCC_E_DAMAGED : 0)).kind == PCC_MSG_DATA; i++) {
            CHECK(i > 1 || message.result == (own ? PCC_DATA_CACHED : PCC_DATA_UNCHECKED));
            if (i == 1)
                doubted = message;
            else if (i > 1 && message.offset_bytes == doubted.offset_bytes)
                again = message.result == PCC_DATA_CHECKED; /* and not the cached bytes */
        }
        CHECK(message.kind == PCC_MSG_END && message.result == 0 && again);
        const struct pcc_event event = event_until(&f, PCC_EVENT_LOAD_ENDED);
        CHECK(event.id == 5 && event.error == 0);
        detach(&f);
    }
    page_open(&f);
    CHECK(pcc_tenant_load(f.tenant, f.volume, false, sequence, 0, PAYLOAD, 6) == 0);
    while (load_next(&f, -PCC_E_DAMAGED).result != PCC_DATA_CHECKED)
        continue;
    CHECK_EQUAL(event_until(&f, PCC_EVENT_BAD_PEER).session, f.session);
    fixture_end(&f);
}

/* Chunks of a save that has no number yet are nobody's cache: not that of another rank's payload.
 */
static void test_no_number_is_no_cache(void)
{
    struct fixture f;
    uint32_t chunks[4], cached;
    uint64_t none;
    struct pcc_message message;
    static uint8_t bytes[PAYLOAD];
    const uint64_t deadline = soon();

    fixture_open(&f, &(struct settings){.payload_capacity = 1u << 20, .memory_bytes = 24 * CHUNK});
    pattern(bytes, sizeof(bytes), 3);
    link_open(&f);
    const uint64_t sequence = save(&f, 1, bytes, sizeof(bytes));
    detach(&f);
    page_open(&f);
    pcc_tenant_policy(f.tenant, &asks);
    word_set(&f, 1, PCC_WORD_REQUESTED);
    CHECK(begin(&f, 1, PAYLOAD, &none) == 0 && none == 0);
    for (uint32_t i = 0; i < 4; i++)
        chunks[i] = data_next(&f).chunk;
    say_all(&f, 1, chunks);
    ring(&f);
    do {
        cached = 0;
        CHECK(pcc_now_ns() < deadline);
        pcc_tenant_lock(f.tenant);
        for (uint32_t i = 0; i < 4; i++)
            cached += f.tenant->chunks[chunks[i]].state == PCC_CHUNK_CACHED;
        pcc_tenant_unlock(f.tenant);
    } while (cached < 4);
    CHECK(pcc_tenant_load(f.tenant, f.volume, false, sequence, 0, PAYLOAD, 5) == 0);
    while ((message = load_next(&f, 0)).kind == PCC_MSG_DATA)
        CHECK_EQUAL(message.result, PCC_DATA_UNCHECKED);
    CHECK(message.kind == PCC_MSG_END && message.result == 0);
    CHECK_EQUAL(event_until(&f, PCC_EVENT_LOAD_ENDED).error, 0);
    fixture_end(&f);
}

/* A load that has found damage ends while the client still has chunks of it. The client's messages
 * about these do not concern the next load. */
static void test_late_doubts(void)
{
    struct fixture f;
    static uint8_t bytes[PAYLOAD];
    struct pcc_message sent[4], message;

    fixture_open(&f, &roomy);
    pattern(bytes, sizeof(bytes), 3);
    link_open(&f);
    const uint64_t sequence = save(&f, 1, bytes, sizeof(bytes));
    detach(&f);
    page_open(&f);
    CHECK(pcc_tenant_load(f.tenant, f.volume, false, sequence, 0, PAYLOAD, 5) == 0);
    for (uint32_t i = 0; i < 4; i++)
        sent[i] = data_next(&f);
    const struct pcc_geometry geometry = pcc_volume_geometry(f.volume);
    const int fd = open(f.path, O_WRONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    for (uint32_t slot = 0; slot < geometry.slot_count; slot++)
        CHECK(pwrite(fd, "rot", 3, (off_t)pcc_geometry_slot_offset(&geometry, slot)) == 3);
    CHECK(close(fd) == 0);
    for (uint32_t i = 0; i < 4; i++)
        if (sent[i].offset_bytes == 0)
            give_back(&f, &sent[i], -PCC_E_DAMAGED);
    CHECK(event_until(&f, PCC_EVENT_LOAD_ENDED).error == -PCC_E_DAMAGED);
    while (load_next(&f, 0).kind != PCC_MSG_END)
        continue;
    CHECK(pcc_tenant_load(f.tenant, f.volume, false, sequence, 3 * CHUNK, 1000, 6) == 0);
    message = data_next(&f);
    CHECK(message.id == 6 && message.offset_bytes == 3 * CHUNK);
    for (uint32_t i = 0; i < 4; i++)
        if (sent[i].offset_bytes != 0)
            give_back(&f, &sent[i], -PCC_E_DAMAGED);
    give_back(&f, &message, 0);
    message = load_next(&f, 0); /* and nothing is sent again */
    CHECK(message.kind == PCC_MSG_END && message.result == 0);
    fixture_end(&f);
}

/* All that a tenant has, while what was copied is still being written. */
static void test_nothing_else_is_left(void)
{
    struct fixture f;
    static const struct settings little = {.payload_capacity = 1u << 20, .memory_bytes = 4 * CHUNK};
    uint32_t chunks[4];
    static uint8_t bytes[PAYLOAD];

    fixture_open(&f, &little);
    page_open(&f);
    admitted(&f, 1, chunks);
    detach(&f);
    CHECK_EQUAL(left_chunks(&f), 4);
    link_open(&f);
    submit(&f, 1, bytes, sizeof(bytes));
    CHECK(begin_wait(&f, 1, sizeof(bytes)) > 0); /* it waits for memory, and so its save is live */
    renew(&f, &little);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_DURABLE, soon()) == 0);
    fixture_end(&f);
}

/* A process that has ended writes nothing: its chunks are used again. */
static void test_the_dead_write_nothing(void)
{
    struct fixture f;
    uint32_t chunks[4];

    fixture_open(&f, &roomy);
    f.trainer = fork();
    CHECK(f.trainer >= 0);
    if (f.trainer == 0)
        for (;;)
            (void)pause();
    page_open(&f);
    admitted(&f, 1, chunks);
    CHECK(kill(f.trainer, SIGKILL) == 0); /* and it stays a zombie */
    detach(&f);
    CHECK_EQUAL(left_chunks(&f), 0);
    CHECK(waitpid(f.trainer, NULL, 0) == f.trainer);
    fixture_close(&f);
}

/* A client that closes reports that it has stopped writing. */
static void test_a_closed_link_has_nothing(void)
{
    struct fixture f;
    static uint8_t bytes[PAYLOAD];

    fixture_open(&f, &roomy);
    for (uint64_t round = 0; round < 50; round++) {
        link_open(&f);
        submit(&f, 1, bytes, sizeof(bytes));
        CHECK(begin_wait(&f, 1, PAYLOAD) > 0);
        pcc_client_close(f.client);
        f.client = NULL;
        detach(&f);
        CHECK_EQUAL(left_chunks(&f), 0);
    }
    fixture_close(&f);
}

static struct { /* where the client's thread stands still in the middle of a chunk */
    _Atomic uint32_t pieces;
    _Atomic bool there, go;
} barrier;

void __real_pcc_copy_hashed(void *to, const void *from, size_t length_bytes, struct pcc_hash *hash);
void __wrap_pcc_copy_hashed(void *to, const void *from, size_t length_bytes, struct pcc_hash *hash);

void __wrap_pcc_copy_hashed(void *to, const void *from, size_t length_bytes, struct pcc_hash *hash)
{
    if (atomic_load(&barrier.pieces) > 0 && atomic_fetch_sub(&barrier.pieces, 1) == 1) {
        atomic_store(&barrier.there, true);
        while (!atomic_load(&barrier.go))
            (void)usleep(200);
    }
    __real_pcc_copy_hashed(to, from, length_bytes, hash);
}

/* A thread that is in the middle of a chunk when the session ends stops there. */
static void test_a_copy_ends_with_its_session(void)
{
    struct fixture f;
    static uint8_t bytes[CHUNK];
    uint32_t chunk = 0;
    const uint64_t deadline = soon();

    fixture_open(&f, &roomy);
    memset(bytes, 0xa5, CHUNK);
    link_open(&f);
    atomic_store(&barrier.pieces, 4);
    submit(&f, 1, bytes, CHUNK);
    CHECK(begin_wait(&f, 1, CHUNK) > 0);
    while (!atomic_load(&barrier.there)) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(200);
    }
    while (f.tenant->chunks[chunk].state != PCC_CHUNK_GRANTED)
        chunk++;
    uint8_t *filled = map(&f, chunk);
    (void)pcc_tenant_detach(f.tenant, NULL, 0);
    atomic_store(&barrier.go, true);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_READ, soon()) == -ECONNRESET);
    CHECK(filled[4 * BLOCK - 1] == 0xa5);
    for (uint32_t at = 4 * BLOCK; at < CHUNK; at++)
        CHECK(filled[at] == 0);
    CHECK(munmap(filled, CHUNK) == 0);
    ends_close(&f);
    fixture_close(&f);
}

/* A client that takes loaded data and never gives it back: the load waits, the detach does not. */
static void test_load_never_taken(void)
{
    struct fixture f;
    const uint64_t count = 1u << 20;
    uint8_t *bytes = malloc(count);

    CHECK(bytes != NULL);
    pattern(bytes, count, 2);
    fixture_open(&f, &roomy);
    link_open(&f);
    const uint64_t sequence = save(&f, 1, bytes, count);
    detach(&f);
    page_open(&f);
    CHECK(pcc_tenant_load(f.tenant, f.volume, true, sequence, 0, count, 5) == 0);
    CHECK(pcc_tenant_load(f.tenant, f.volume, true, sequence, 0, count, 6) == -EBUSY);
    CHECK(pcc_tenant_unbind(f.tenant, f.volume) == -EBUSY);
    (void)usleep(20000);
    (void)pcc_tenant_detach(f.tenant, NULL, 0);
    const struct pcc_event event = event_until(&f, PCC_EVENT_LOAD_ENDED);
    CHECK(event.id == 5 && event.error == -PCC_E_ABORTED);
    CHECK(event_next(&f).kind == PCC_EVENT_DETACHED);
    ends_close(&f);
    link_open(&f);
    load_equals(&f, sequence, 1, bytes, count);
    detach(&f);
    CHECK(pcc_tenant_unbind(f.tenant, f.volume) == 0);
    fixture_close(&f);
    free(bytes);
}

int main(void)
{
    RUN(test_lies);
    RUN(test_a_chunk_without_checksums);
    RUN(test_ring_is_drained);
    RUN(test_abandoned_before_the_last_message);
    RUN(test_turning_words);
    RUN(test_load_never_taken);
    RUN(test_late_writes);
    RUN(test_scribbling_is_no_damage);
    RUN(test_doubts);
    RUN(test_no_number_is_no_cache);
    RUN(test_late_doubts);
    RUN(test_nothing_else_is_left);
    RUN(test_the_dead_write_nothing);
    RUN(test_a_closed_link_has_nothing);
    RUN(test_a_copy_ends_with_its_session);
    return 0;
}
