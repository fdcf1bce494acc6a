/* A tenant over a real volume file, and the two kinds of client that tests connect to it: a real
 * client, and a hand-made one that sends what no honest client sends. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/pcc_futex.h"
#include "check.h"
#include "client/pcc_client.h"
#include "daemon/pcc_tenant_private.h"
#include "volume_open.h"

#define BLOCK 4096u
#define CHUNK 65536u
#define SECOND 1000000000ull
#define PATIENCE (90 * SECOND)

struct fixture {
    char directory[64];
    char path[80];
    struct pcc_volume *volume;
    struct pcc_pool *pool;
    struct pcc_events *events;
    struct pcc_tenant *tenant;
    int sockets[2]; /* 0 the daemon's, 1 the client's */
    int page_fd;
    uint64_t session;
    int32_t trainer; /* its process, for those that are pulled from */
    struct pcc_client *client;
    uint64_t frozen_bytes; /* of each snapshot, which offers them */
    uint32_t flags;        /* of each request ... */
    uint32_t level;        /* ... and where it is to be safe */
    struct pcc_event
        queued[PCC_SNAPSHOTS];   /* the queue's last event of a snapshot; session 0: none */
    struct pcc_event other[256]; /* events of another kind, not looked at yet */
    uint32_t other_first, other_count;
    struct pcc_page_view page; /* of the hand-made client */
};

struct settings {
    uint64_t payload_capacity;
    uint64_t memory_bytes;
    uint64_t segment_bytes; /* 0: all in one */
    uint64_t bytes_per_second;
    struct pcc_gpus *gpus;
};

static const struct pcc_tenant_policy alone = {.numbers = true, .world_size = 1};
static const struct pcc_tenant_policy held = {.held = true, .numbers = true, .world_size = 1};
static const struct pcc_tenant_policy asks = {.held = false}; /* the loop gives each number */

static inline uint64_t soon(void)
{
    return pcc_now_ns() + PATIENCE;
}

static inline void attach(struct fixture *f)
{
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, f->sockets) == 0);
    CHECK(pcc_tenant_attach(f->tenant, f->sockets[0], ++f->session, f->trainer, &f->page_fd) == 0);
}

static inline void link_open(struct fixture *f)
{
    uint64_t granted;

    attach(f);
    CHECK(pcc_client_open(f->sockets[1], f->page_fd, &f->client) == 0);
    CHECK(pcc_tenant_grow(f->tenant, 0, &granted) == 0);
}

static inline void page_open(struct fixture *f)
{
    attach(f);
    void *bytes = mmap(NULL, f->tenant->geometry.page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                       f->page_fd, 0);
    CHECK(bytes != MAP_FAILED);
    CHECK(pcc_page_accept(bytes, f->tenant->geometry.page_bytes, &f->page) == 0);
}

/* Sorts the events that have come: the queue's by their snapshot, the others as they come. */
static inline void events_sort(struct fixture *f)
{
    struct pcc_event event;

    while (f->other_count < 256 && pcc_events_take(f->events, &event, 1) == 1) {
        if (event.kind > PCC_EVENT_REFUSED) {
            f->other[(f->other_first + f->other_count++) % 256] = event;
            continue;
        }
        if (event.kind == PCC_EVENT_REQUESTED)
            pcc_tenant_noted(f->tenant);
        f->queued[event.id % PCC_SNAPSHOTS] = event;
    }
}

/* The next event that is not the queue's; fails the test when none comes. */
static inline struct pcc_event event_next(struct fixture *f)
{
    const uint64_t deadline = soon();

    for (events_sort(f); f->other_count == 0; events_sort(f)) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(200);
    }
    f->other_count--;
    return f->other[f->other_first++ % 256];
}

/* The queue's event of a snapshot that says what has become of it: BEGUN, WAITS, REFUSED; or that
 * it was refused at once. */
static inline struct pcc_event queue_event(struct fixture *f, uint64_t snapshot)
{
    const uint64_t deadline = soon();
    const struct pcc_event *event = &f->queued[snapshot % PCC_SNAPSHOTS];

    for (events_sort(f); event->id != snapshot || event->session != f->session ||
                         (event->kind == PCC_EVENT_REQUESTED && event->error == 0);
         events_sort(f)) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(100);
    }
    return *event;
}

static inline struct pcc_event event_until(struct fixture *f, uint32_t kind)
{
    struct pcc_event event;

    do
        event = event_next(f);
    while (event.kind != kind);
    return event;
}

/* What is used as soon as no checkpoint is in flight. */
static inline struct pcc_tenant_usage usage_at_rest(struct fixture *f)
{
    struct pcc_tenant_usage usage;
    const uint64_t deadline = soon();

    do {
        pcc_tenant_usage(f->tenant, &usage);
        CHECK(pcc_now_ns() < deadline);
    } while (usage.in_flight > 0);
    return usage;
}

static inline void ends_close(struct fixture *f)
{
    CHECK(close(f->sockets[0]) == 0);
    pcc_client_close(f->client);
    f->client = NULL;
    if (f->page.page != NULL)
        CHECK(munmap(f->page.page, f->page.geometry.page_bytes) == 0);
    f->page.page = NULL;
    CHECK(close(f->sockets[1]) == 0);
    CHECK(close(f->page_fd) == 0);
}

static inline void detach(struct fixture *f)
{
    (void)pcc_tenant_detach(f->tenant, NULL, 0);
    CHECK(event_until(f, PCC_EVENT_DETACHED).session == f->session);
    ends_close(f);
}

/* Up to `bytes`, in segments of that length. */
static inline void grow(struct fixture *f, uint64_t bytes, uint64_t segment_bytes)
{
    struct pcc_tenant_usage usage;
    uint64_t granted;

    pcc_tenant_usage(f->tenant, &usage);
    for (granted = usage.bytes; granted < bytes;) {
        const uint64_t next = granted + segment_bytes;
        const uint64_t step = segment_bytes == 0 || next > bytes ? bytes : next;
        CHECK(pcc_tenant_grow(f->tenant, step, &granted) == 0);
        CHECK(granted == step);
    }
}

/* As the daemon does after a session that still had chunks to fill: replaces its memory. */
static inline void renew(struct fixture *f, const struct settings *settings)
{
    struct pcc_tenant_usage usage;
    struct pcc_tenant_holding holding;
    const uint64_t deadline = soon();

    do {
        CHECK(pcc_now_ns() < deadline);
        pcc_tenant_shrink(f->tenant, settings->memory_bytes, &holding);
        pcc_tenant_usage(f->tenant, &usage);
    } while (usage.left_chunks > 0 || holding.bytes > holding.lasting_bytes);
    grow(f, settings->memory_bytes, settings->segment_bytes);
}

static inline void volume_make(const char *path, uint64_t payload_capacity, uint64_t next_sequence)
{
    const struct pcc_volume_spec spec = {.payload_capacity_bytes = payload_capacity,
                                         .record_stride_bytes = PCC_RECORD_STRIDE_MIN,
                                         .slot_count = 4,
                                         .keep = 1,
                                         .block_bytes = BLOCK,
                                         .world_size = 1,
                                         .job = "test",
                                         .next_sequence = next_sequence};

    CHECK(pcc_volume_create(path, &spec, true) == 0);
}

static inline struct pcc_tenant_spec tenant_spec(const char *label)
{
    return (struct pcc_tenant_spec){.id = 7,
                                    .chunk_bytes = CHUNK,
                                    .block_bytes = BLOCK,
                                    .chunk_capacity = 256,
                                    .lanes = 3,
                                    .writers_per_lane = 2,
                                    .label = label};
}

static inline void fixture_open(struct fixture *f, const struct settings *settings)
{
    const struct pcc_tenant_spec tenant = tenant_spec(NULL);
    const char *base = getenv("TMPDIR");

    memset(f, 0, sizeof(*f));
    (void)snprintf(f->directory, sizeof(f->directory), "%s/pcc-tenant-XXXXXX",
                   base != NULL && strlen(base) < 32 ? base : "/tmp");
    CHECK(mkdtemp(f->directory) != NULL);
    (void)snprintf(f->path, sizeof(f->path), "%s/volume", f->directory);
    volume_make(f->path, settings->payload_capacity, 1);
    CHECK(volume_open(f->path, true, settings->bytes_per_second, &f->volume) == 0);
    CHECK(pcc_pool_open(settings->memory_bytes, &f->pool) == 0);
    CHECK(pcc_events_open(1024, &f->events) == 0);
    CHECK(pcc_tenant_open(f->pool, f->events, settings->gpus, &tenant, &f->tenant) == 0);
    pcc_tenant_policy(f->tenant, &alone);
    CHECK(pcc_tenant_bind(f->tenant, f->volume) == 0);
    grow(f, settings->memory_bytes, settings->segment_bytes);
}

static inline void fixture_close(struct fixture *f)
{
    pcc_tenant_close(f->tenant);
    pcc_events_close(f->events);
    pcc_pool_close(f->pool);
    pcc_volume_close(f->volume);
    CHECK(unlink(f->path) == 0);
    CHECK(rmdir(f->directory) == 0);
}

static inline void fixture_end(struct fixture *f)
{
    detach(f);
    fixture_close(f);
}

static inline struct pcc_request request_of(const struct fixture *f, uint64_t snapshot,
                                            uint64_t payload_bytes)
{
    return (struct pcc_request){.snapshot = snapshot,
                                .step = (int64_t)snapshot,
                                .payload_bytes = payload_bytes,
                                .frozen_bytes = f->frozen_bytes,
                                .offered_bytes = f->frozen_bytes,
                                .level = f->level,
                                .flags = f->flags};
}

/* The hand-made client: any block, and the message. */
static inline void ask(struct fixture *f, uint64_t snapshot, const struct pcc_request *request)
{
    const struct pcc_message message = {.kind = PCC_MSG_REQUEST, .id = snapshot};

    *pcc_page_request(&f->page, snapshot) = *request;
    CHECK(pcc_ring_push(&f->page.to_daemon, &message) == 0);
    pcc_bell_ring(&f->page.page->daemon_bell);
}

/* What the queue makes of a snapshot that the real client has submitted, or that the hand-made one
 * requests now: 0 when it has begun, else why not. */
static inline int begin(struct fixture *f, uint64_t snapshot, uint64_t payload_bytes,
                        uint64_t *sequence)
{
    if (f->page.page != NULL) {
        const struct pcc_request request = request_of(f, snapshot, payload_bytes);
        ask(f, snapshot, &request);
    }
    const struct pcc_event event = queue_event(f, snapshot);
    *sequence = event.sequence;
    return event.error;
}

/* The same, and it has to begin, in its turn. */
static inline uint64_t begin_wait(struct fixture *f, uint64_t snapshot, uint64_t payload_bytes)
{
    const uint64_t deadline = soon();
    uint64_t sequence;
    int error = begin(f, snapshot, payload_bytes, &sequence);

    while (error == -PCC_E_NO_SLOT) { /* what the last record has dropped */
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(500);
        f->queued[snapshot % PCC_SNAPSHOTS].session = 0;
        pcc_tenant_retry(f->tenant);
        const struct pcc_event event = queue_event(f, snapshot);
        sequence = event.sequence;
        error = event.error;
    }
    CHECK(error == 0);
    return sequence;
}

static inline void submit(struct fixture *f, uint64_t snapshot, const uint8_t *bytes,
                          uint64_t count)
{
    const struct pcc_range range = {.address = (uintptr_t)bytes, .length_bytes = count};
    const struct pcc_submission submission = {.ranges = &range,
                                              .range_count = 1,
                                              .tail_offset_bytes = count,
                                              .offered_bytes = f->frozen_bytes,
                                              .request = request_of(f, snapshot, count)};

    CHECK(pcc_client_request(f->client, snapshot) == 0);
    CHECK(pcc_client_submit(f->client, snapshot, &submission) == 0);
}

/* A process of its own that submits snapshot 1, and waits to be killed. */
static inline pid_t trainer_to_kill(struct fixture *f, const uint8_t *bytes, uint64_t count)
{
    const pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        (void)close(f->sockets[0]);
        if (pcc_client_open(f->sockets[1], f->page_fd, &f->client) != 0)
            _exit(1);
        submit(f, 1, bytes, count);
        for (;;)
            (void)pause();
    }
    return child;
}

static inline uint64_t save(struct fixture *f, uint64_t snapshot, const uint8_t *bytes,
                            uint64_t count)
{
    struct pcc_client_state state;

    submit(f, snapshot, bytes, count);
    const uint64_t sequence = begin_wait(f, snapshot, count);
    CHECK(pcc_client_wait(f->client, snapshot, PCC_WAIT_DURABLE, soon()) == 0);
    CHECK(pcc_client_state(f->client, snapshot, &state) == 0);
    CHECK(state.word == PCC_WORD_COPIED && state.outcome == PCC_OUTCOME_DURABLE);
    CHECK(state.source_read && state.sequence == sequence);
    return sequence;
}

static inline int load(struct fixture *f, uint64_t sequence, uint64_t load_id,
                       const struct pcc_range *ranges, uint64_t range_count, uint64_t offset,
                       uint64_t length)
{
    CHECK(pcc_client_load_start(f->client, load_id, ranges, range_count, NULL, 0) == 0);
    CHECK(pcc_tenant_load(f->tenant, f->volume, true, sequence, offset, length, load_id) == 0);
    const int result = pcc_client_load_wait(f->client, load_id, soon());
    const struct pcc_event event = event_until(f, PCC_EVENT_LOAD_ENDED);
    CHECK(event.id == load_id && event.error == result);
    return result;
}

/* Which share of the last load was still in the daemon's memory, from 0 to 1. */
static inline double loaded_from_memory(const struct fixture *f)
{
    uint64_t cached_bytes, read_bytes;

    pcc_client_loaded(f->client, &cached_bytes, &read_bytes);
    return (double)cached_bytes / (double)(cached_bytes + read_bytes);
}

/* Loads the whole payload and compares it. */
static inline void load_equals(struct fixture *f, uint64_t sequence, uint64_t load_id,
                               const uint8_t *expected, uint64_t count)
{
    uint8_t *got = calloc(1, count);
    const struct pcc_range range = {.address = (uintptr_t)got, .length_bytes = count};

    CHECK(got != NULL);
    CHECK(load(f, sequence, load_id, &range, 1, 0, count) == 0);
    CHECK(memcmp(got, expected, count) == 0);
    free(got);
}
