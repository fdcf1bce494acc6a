/* A daemon's tenant with its client, and the next daemon that continues with what was copied, on a
 * machine that has run out of resources. */
#include "scarcity.h"
#include "store_fixture.h"
#include "tenant_fixture.h"

#define PAYLOAD (5 * CHUNK + 99u)
#define MEMORY (4 * CHUNK) /* the second half of a checkpoint waits for the first to be written */

static char directory[64];
static uint64_t wanted_bytes = MEMORY;
static uint8_t bytes[2 * PAYLOAD];
static uint64_t durable;   /* the newest that was reported to the client ... */
static uint64_t seeds[64]; /* ... and what each sequence holds */

/* The daemon admits no session without two chunks, and frees what an earlier session may write to.
 */
static bool has_memory(struct fixture *f)
{
    struct pcc_tenant_holding holding;
    uint64_t granted = 0;
    const uint64_t deadline = soon();

    do {
        CHECK(pcc_now_ns() < deadline);
        pcc_tenant_shrink(f->tenant, wanted_bytes, &holding);
    } while (holding.bytes > holding.lasting_bytes && pcc_client_alive(f->client));
    const int error = pcc_tenant_grow(f->tenant, wanted_bytes, &granted);

    CHECK((error == 0 && granted >= wanted_bytes) || was_refused());
    CHECK(error != -ENOSPC); /* would be reported as a full disk */
    return error == 0 && granted >= 2 * CHUNK;
}

/* The queue begins it, or says why not; a client that has died may have requested nothing. */
static int begun(struct fixture *f, uint64_t snapshot, uint64_t *sequence)
{
    const uint64_t deadline = soon();
    const struct pcc_event *event = &f->queued[snapshot % PCC_SNAPSHOTS];

    for (events_sort(f); event->id != snapshot || event->session != f->session ||
                         (event->kind == PCC_EVENT_REQUESTED && event->error == 0) ||
                         event->error == -PCC_E_NO_SLOT;
         events_sort(f)) {
        CHECK(pcc_now_ns() < deadline);
        if (!pcc_client_alive(f->client))
            return -ECONNRESET;
        (void)usleep(200);
    }
    *sequence = event->sequence;
    return event->error;
}

/* What a client and a daemon do when something is refused: the snapshot ends, and is not waited
 * for. True when it is durable. */
static bool try_save(struct fixture *f, uint64_t snapshot, uint64_t count)
{
    const struct pcc_range range = {.address = (uintptr_t)bytes, .length_bytes = count};
    const struct pcc_submission submission = {.ranges = &range,
                                              .range_count = 1,
                                              .tail_offset_bytes = count,
                                              .request = request_of(f, snapshot, count)};
    struct pcc_client_state state;
    uint64_t sequence = 0;
    int error;

    pattern(bytes, count, snapshot);
    if (!has_memory(f))
        return false;
    if (pcc_client_request(f->client, snapshot) != 0)
        return false; /* the client is dead: its segment could not be mapped */
    error = pcc_client_submit(f->client, snapshot, &submission);
    if (error != 0) {
        CHECK(error == -ENOMEM || error == -ECONNRESET);
        CHECK(pcc_client_abandon(f->client, snapshot) || !pcc_client_alive(f->client));
        return false;
    }
    error = begun(f, snapshot, &sequence);
    if (error != 0) {
        CHECK(was_refused());
        (void)pcc_tenant_refuse(f->tenant, snapshot,
                                &(struct pcc_tenant_end){.outcome = PCC_OUTCOME_FAILED});
        return false;
    }
    seeds[sequence % 64] = snapshot;
    error = pcc_client_wait(f->client, snapshot, PCC_WAIT_DURABLE, soon());
    CHECK(error == 0 || (error == -ECONNRESET && was_refused()));
    if (error != 0)
        return false;
    CHECK(pcc_client_state(f->client, snapshot, &state) == 0);
    CHECK(state.outcome == PCC_OUTCOME_DURABLE && state.sequence == sequence);
    durable = sequence;
    return true;
}

/* A trainer connects, as often as it takes; false when it cannot. */
static bool connect_one(struct fixture *f)
{
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, f->sockets) == 0);
    int error = pcc_tenant_attach(f->tenant, f->sockets[0], ++f->session, 0, &f->page_fd);
    if (error == 0) {
        error = pcc_client_open(f->sockets[1], f->page_fd, &f->client);
        if (error == 0)
            return true;
        (void)pcc_tenant_detach(f->tenant, NULL, 0);
        CHECK(close(f->page_fd) == 0);
    }
    CHECK(was_refused() && error != -ENOSPC);
    CHECK(close(f->sockets[0]) == 0 && close(f->sockets[1]) == 0);
    return false;
}

static void disconnect(struct fixture *f)
{
    if (f->client == NULL)
        return;
    (void)pcc_tenant_detach(f->tenant, NULL, 0);
    while (event_until(f, PCC_EVENT_DETACHED).session != f->session)
        ;
    ends_close(f);
}

static void volume_named(struct fixture *f, const char *name, uint64_t capacity, uint64_t next)
{
    (void)snprintf(f->path, sizeof(f->path), "%.60s/%s", directory, name);
    volume_make(f->path, capacity, next);
}

static bool daemon_open(struct fixture *f, bool keeps, uint64_t bytes_per_second)
{
    const struct pcc_tenant_spec spec = tenant_spec(keeps ? LABEL : NULL);
    struct pcc_store *store;

    if (volume_open(f->path, true, bytes_per_second, &f->volume) != 0 ||
        pcc_pool_open(16 * CHUNK, &f->pool) != 0)
        return false;
    if (keeps) {
        if (pcc_store_open(manager.address, STORED_MAX, 0, &store) != 0)
            return false;
        pcc_pool_keep(f->pool, store);
    }
    if (pcc_events_open(1024, &f->events) != 0 ||
        pcc_tenant_open(f->pool, f->events, NULL, &spec, &f->tenant) != 0)
        return false;
    pcc_tenant_policy(f->tenant, &alone);
    return true;
}

static void daemon_end(struct fixture *f)
{
    pcc_tenant_close(f->tenant);
    pcc_events_close(f->events);
    pcc_pool_close(f->pool);
    pcc_volume_close(f->volume);
}

/* The newest checkpoint is the last one that was reported, or a newer one, and right. */
static void judge(const char *path)
{
    struct pcc_volume *volume;
    struct pcc_load *load;
    uint8_t *got = malloc(sizeof(bytes));

    CHECK(got != NULL && volume_open(path, false, 0, &volume) == 0);
    const uint64_t newest = pcc_volume_superseding(volume);
    CHECK(newest >= durable);
    if (newest > 0) {
        CHECK(pcc_load_open(volume, newest, &load) == 0);
        const uint64_t count = pcc_load_entry(load)->payload_bytes;
        for (uint64_t at = 0; at < count; at += CHUNK) {
            _Alignas(4096) static uint8_t chunk[CHUNK];
            const uint64_t left = count - at < CHUNK ? count - at : CHUNK;
            CHECK(pcc_load_chunk(load, chunk, at, left) == 0);
            memcpy(got + at, chunk, left);
        }
        pattern(bytes, count, seeds[newest % 64]);
        CHECK(memcmp(got, bytes, count) == 0);
        pcc_load_close(load);
    }
    pcc_volume_close(volume);
    free(got);
}

/* Reads the newest back through the tenant, if it can. */
static void try_load(struct fixture *f, uint64_t load_id)
{
    static uint8_t got[2 * PAYLOAD];
    const struct pcc_range range = {.address = (uintptr_t)got, .length_bytes = PAYLOAD};
    int error = pcc_client_load_start(f->client, load_id, &range, 1, NULL, 0);

    if (error != 0) {
        CHECK(was_refused());
        return;
    }
    const int told = pcc_tenant_load(f->tenant, f->volume, true, durable, 0, PAYLOAD, load_id);
    error = pcc_client_load_wait(f->client, load_id, told == 0 ? soon() : pcc_now_ns());
    CHECK((told == 0 && error == 0) || was_refused());
    CHECK(told != 0 || error != -ETIMEDOUT);
    if (error != 0)
        return;
    pattern(bytes, PAYLOAD, seeds[durable % 64]);
    CHECK(memcmp(got, bytes, PAYLOAD) == 0);
}

/* The state outgrows its slots: saves go to a larger volume, the one before is let go of. */
static void try_larger(struct fixture *f, uint64_t snapshot, struct pcc_volume **larger)
{
    char before[sizeof(f->path)];
    struct pcc_volume *volume;

    memcpy(before, f->path, sizeof(before));
    (void)snprintf(f->path, sizeof(f->path), "%.60s/larger", directory);
    int error = volume_open(f->path, true, 0, &volume);
    if (error == 0) {
        error = pcc_tenant_bind(f->tenant, volume);
        if (error != 0)
            pcc_volume_close(volume);
    }
    CHECK(error == 0 || was_refused());
    memcpy(f->path, before, sizeof(before));
    if (error != 0)
        return;
    *larger = volume;
    (void)try_save(f, snapshot, 2 * PAYLOAD);
}

static void session_live(struct fixture *f)
{
    struct pcc_volume *larger = NULL;
    struct pcc_tenant_usage usage;

    if (!connect_one(f) && !connect_one(f))
        return;
    (void)try_save(f, 1, PAYLOAD);
    (void)try_save(f, 2, PAYLOAD);
    if (durable > 0)
        try_load(f, 1);
    try_larger(f, 3, &larger);
    if (!pcc_client_alive(f->client)) {
        disconnect(f);
        (void)connect_one(f);
    }
    plenty(); /* from here on every call succeeds again */
    if (f->client == NULL)
        CHECK(connect_one(f));
    CHECK(try_save(f, 11, larger != NULL ? 2 * PAYLOAD : PAYLOAD));
    disconnect(f);
    pcc_tenant_usage(f->tenant, &usage);
    CHECK(usage.granted_chunks == 0 && usage.full_chunks == 0 && usage.lent_chunks == 0);
    if (larger != NULL) {
        CHECK(pcc_tenant_unbind(f->tenant, larger) == 0);
        pcc_volume_close(larger);
    }
}

/* Two volumes, made while all is well. */
static void volumes_make(struct fixture *f, char larger[80])
{
    volume_named(f, "larger", 2 * PAYLOAD, 20);
    memcpy(larger, f->path, sizeof(f->path));
    volume_named(f, "volume", PAYLOAD, 1);
    durable = 0;
}

static void live(void)
{
    struct fixture f = {0};
    char larger[sizeof(f.path)];
    const uint64_t left = scarce.left;

    plenty();
    volumes_make(&f, larger);
    refuse_at(left);
    if (daemon_open(&f, false, 0) && pcc_tenant_bind(f.tenant, f.volume) == 0)
        session_live(&f);
    else
        CHECK(was_refused());
    daemon_end(&f);
    plenty();
    judge(durable >= 20 ? larger : f.path);
    CHECK(unlink(f.path) == 0 && unlink(larger) == 0);
}

/* -- a daemon that is killed, and the next one -- */

/* Two snapshots are copied and, as the disk is slow, not written. Never returns. */
static _Noreturn void daemon_before(struct fixture *f)
{
    uint64_t granted, sequence;

    CHECK(daemon_open(f, true, 1u << 20) && pcc_tenant_bind(f->tenant, f->volume) == 0);
    CHECK(pcc_tenant_grow(f->tenant, 14 * CHUNK, &granted) == 0);
    link_open(f);
    for (uint64_t snapshot = 1; snapshot <= 2; snapshot++) {
        pattern(bytes, PAYLOAD, snapshot);
        submit(f, snapshot, bytes, PAYLOAD);
        CHECK(begin(f, snapshot, PAYLOAD, &sequence) == 0 && sequence == snapshot);
        CHECK(pcc_client_wait(f->client, snapshot, PCC_WAIT_COPIED, soon()) == 0);
    }
    (void)kill(getpid(), SIGKILL);
    _exit(1);
}

/* The next daemon takes over memory and volume; true when nothing of it was refused. */
static bool take_over(struct fixture *f)
{
    struct pcc_kept_outcome outcomes[PCC_KEPT_OUTCOMES_MAX];
    struct stored found[STORED_MAX];
    int state_fd = -1, error = 0;
    uint64_t state_id = 0;
    uint32_t count = 0;

    (void)pthread_mutex_lock(&manager.lock);
    const uint32_t stored = manager.count;
    memcpy(found, manager.items, sizeof(found));
    (void)pthread_mutex_unlock(&manager.lock);
    bool whole = true;
    for (uint32_t i = 0; i < stored; i++) {
        unsigned long long id;
        const int fd = dup(found[i].fd);
        CHECK(fd >= 0);
        if (sscanf(found[i].name, LABEL "-segment-%llx", &id) == 1) {
            error = pcc_tenant_adopt(f->tenant, fd, id);
            if (error != 0)
                CHECK(close(fd) == 0);
            whole = whole && error == 0;
        } else {
            CHECK(sscanf(found[i].name, LABEL "-state-%llx", &id) == 1 && state_fd < 0);
            state_fd = fd;
            state_id = id;
        }
    }
    CHECK(state_fd >= 0);
    error = pcc_tenant_bind_kept(f->tenant, f->volume, state_fd, state_id, outcomes, &count);
    CHECK(close(state_fd) == 0);
    CHECK(error == 0 || was_refused());
    for (uint32_t i = 0; i < count; i++)
        whole = whole && outcomes[i].error == 0;
    return whole && error == 0;
}

/* Every save that continues ends; how many are durable, or superseded by one that is. */
static uint32_t ends_wait(struct fixture *f)
{
    struct pcc_tenant_usage usage;
    uint32_t good = 0;
    const uint64_t deadline = soon();

    for (;;) {
        struct pcc_event event;
        pcc_tenant_usage(f->tenant, &usage); /* first: the last event comes with its last save */
        while (pcc_events_take(f->events, &event, 1) == 1) {
            good += event.kind == PCC_EVENT_DURABLE || event.kind == PCC_EVENT_SUPERSEDED;
            CHECK(event.kind != PCC_EVENT_FAILED || (was_refused() && event.error == -ENOMEM));
        }
        if (usage.in_flight == 0)
            return good;
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(200);
    }
}

static void daemon_after(struct fixture *f)
{
    if (take_over(f))
        durable = 2; /* whatever is refused from here on */
    else if (pcc_tenant_bind(f->tenant, f->volume) != 0)
        CHECK(was_refused());
    pcc_tenant_settle(f->tenant);
    const uint32_t good = ends_wait(f);
    CHECK(good == 2 || was_refused());
    plenty();
    CHECK(pcc_tenant_bind(f->tenant, f->volume) == 0);
}

/* With the N-th call of the next daemon refused, or of its first session. */
static void after_a_kill(bool in_session)
{
    struct fixture f = {0};
    char larger[sizeof(f.path)];
    int status;
    const uint64_t left = scarce.left;

    plenty();
    volumes_make(&f, larger);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        daemon_before(&f);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    seeds[1] = 1;
    seeds[2] = 2;
    refuse_at(in_session ? 0 : left);
    if (!daemon_open(&f, true, 0)) { /* the manager starts another one */
        CHECK(was_refused());
        daemon_end(&f);
        plenty();
        f = (struct fixture){0};
        (void)snprintf(f.path, sizeof(f.path), "%.60s/volume", directory);
        CHECK(daemon_open(&f, true, 0));
    }
    daemon_after(&f);
    refuse_at(in_session ? left : 0);
    session_live(&f);
    daemon_end(&f);
    plenty();
    judge(durable >= 20 ? larger : f.path);
    (void)manager_count();
    (void)pthread_mutex_lock(&manager.lock);
    while (manager.count > 0) /* segments that were not taken over */
        manager_drop(manager.items[0].name);
    (void)pthread_mutex_unlock(&manager.lock);
    CHECK(unlink(f.path) == 0 && unlink(larger) == 0);
}

static void next_daemon(void)
{
    after_a_kill(false);
}

static void its_session(void)
{
    after_a_kill(true);
}

/* -- events: a put does not wait for the loop that reads -- */

static void *many_put(void *events)
{
    for (uint64_t id = 1; id <= 9; id++)
        pcc_events_put(events, &(struct pcc_event){.kind = PCC_EVENT_COPIED, .id = id});
    return NULL;
}

static void events_live(void)
{
    struct pcc_events *events;
    struct pcc_event event;
    pthread_t thread;

    if (pcc_events_open(2, &events) != 0) {
        CHECK(was_refused());
        return;
    }
    CHECK(pthread_create(&thread, NULL, many_put, events) == 0);
    const uint64_t deadline = soon();
    for (uint64_t id = 1; id <= 9; id++) {
        while (pcc_events_take(events, &event, 1) == 0)
            CHECK(pcc_now_ns() < deadline);
        CHECK(event.id == id);
    }
    CHECK(pthread_join(thread, NULL) == 0);
    pcc_events_close(events);
}

static void test_events(void)
{
    scarcity("events", events_live);
}

static void test_tenant(void)
{
    scarcity("tenant", live);
}

static void test_next_daemon(void)
{
    manager_start();
    wanted_bytes = 16 * CHUNK;
    scarcity("the next daemon", next_daemon);
    scarcity("its first session", its_session);
    manager_end();
}

int main(void)
{
    scarcity_begin(directory);
    RUN(test_events);
    RUN(test_tenant);
    RUN(test_next_daemon);
    scarcity_end(50);
    CHECK(rmdir(directory) == 0);
    return 0;
}
