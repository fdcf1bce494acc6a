/* A restarted daemon checks what it takes over. When a save ends while a chunk of it is being
 * checked, its memory, saver and entry stay until the check is over. */
#include <signal.h>

#include "base/pcc_hash.h"
#include "store_fixture.h"
#include "tenant_fixture.h"

#define PAYLOAD (5 * CHUNK + 99)
#define MEMORY (8 * CHUNK)

static struct fixture *settling; /* by this thread */
static _Thread_local bool is_settler;
static uint32_t stops;

uint64_t __real_pcc_hash_bytes(const void *bytes, uint64_t length_bytes);
uint64_t __wrap_pcc_hash_bytes(const void *bytes, uint64_t length_bytes);

/* The chunk is being checked. Its save ends, and its memory, saver and entry are asked for. */
static void stop(struct fixture *f, uint32_t chunk)
{
    struct pcc_tenant_holding holding;

    CHECK(event_until(f, PCC_EVENT_FAILED).error == -EIO);
    pcc_tenant_shrink(f->tenant, 0, &holding);
    CHECK_EQUAL(holding.lasting_bytes, 2 * CHUNK);
    CHECK_EQUAL(holding.bytes, (chunk + 1) * CHUNK); /* those behind it go first, and are gone */
    CHECK(pcc_tenant_unbind(f->tenant, f->volume) == -EBUSY);
    CHECK(pcc_tenant_release_memory(f->tenant) == -EBUSY);
    stops++;
}

uint64_t __wrap_pcc_hash_bytes(const void *bytes, uint64_t length_bytes)
{
    const struct pcc_tenant *tenant = is_settler && stops == 0 ? settling->tenant : NULL;

    /* One that can go, when another was handed over already. */
    for (uint32_t i = 2; tenant != NULL && i < tenant->chunk_count; i++)
        if (tenant->chunks[i].bytes == bytes && tenant->chunks[i].offset_bytes > 0) {
            stop(settling, i);
            break;
        }
    return __real_pcc_hash_bytes(bytes, length_bytes);
}

/* -- a disk that takes records and nothing else -- */

struct sick_io {
    struct pcc_io io; /* first member */
    struct pcc_io *inner;
};

static struct pcc_io *inner_of(struct pcc_io *io)
{
    return ((struct sick_io *)io)->inner;
}

static int64_t sick_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    (void)io, (void)bytes, (void)length, (void)offset;
    return -EIO;
}

static int64_t sick_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    return inner_of(io)->ops->read(inner_of(io), bytes, length, offset);
}

static int64_t sick_durable(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    return inner_of(io)->ops->write_durable(inner_of(io), bytes, length, offset);
}

static int sick_flush(struct pcc_io *io)
{
    return pcc_io_flush(inner_of(io));
}

static void sick_close(struct pcc_io *io)
{
    pcc_io_close(inner_of(io));
}

static struct pcc_io *sick_open(const char *path, struct sick_io *self)
{
    static const struct pcc_io_ops ops = {.write = sick_write,
                                          .read = sick_read,
                                          .write_durable = sick_durable,
                                          .flush = sick_flush,
                                          .close = sick_close};
    const struct pcc_io_options options = {.allow_buffered = true};
    const int fd = open(path, O_RDWR | O_CLOEXEC);

    CHECK(fd >= 0 && pcc_io_open(fd, &options, &self->inner) == 0);
    self->io = (struct pcc_io){.ops = &ops, .size_bytes = self->inner->size_bytes};
    return &self->io;
}

/* -- two daemons -- */

static void daemon_open(struct fixture *f, uint64_t memory_bytes)
{
    const struct pcc_tenant_spec spec = tenant_spec(LABEL);
    struct pcc_store *store;

    CHECK(pcc_pool_open(memory_bytes, &f->pool) == 0);
    CHECK(pcc_store_open(manager.address, STORED_MAX, 0, &store) == 0);
    pcc_pool_keep(f->pool, store);
    CHECK(pcc_events_open(1024, &f->events) == 0);
    CHECK(pcc_tenant_open(f->pool, f->events, NULL, &spec, &f->tenant) == 0);
    pcc_tenant_policy(f->tenant, &alone);
}

static void daemon_close(struct fixture *f)
{
    pcc_tenant_close(f->tenant);
    pcc_events_close(f->events);
    pcc_pool_close(f->pool);
}

/* One that is killed when a checkpoint is copied and nothing of it is written. */
static _Noreturn void daemon_live(struct fixture *f)
{
    static uint8_t bytes[PAYLOAD];

    CHECK(volume_open(f->path, true, 0, &f->volume) == 0);
    daemon_open(f, MEMORY);
    CHECK(pcc_tenant_bind(f->tenant, f->volume) == 0);
    grow(f, MEMORY, CHUNK);
    link_open(f);
    pcc_io_limit(pcc_volume_io(f->volume), 1);
    pattern(bytes, sizeof(bytes), 1);
    submit(f, 1, bytes, sizeof(bytes));
    CHECK(begin_wait(f, 1, sizeof(bytes)) == 1);
    CHECK(pcc_client_wait(f->client, 1, PCC_WAIT_COPIED, soon()) == 0);
    (void)kill(getpid(), SIGKILL);
    abort();
}

/* What the manager has, in the order in which it came; nobody puts anything now. */
static int adopt(struct fixture *f, uint64_t *state_id)
{
    unsigned long long id;
    int state_fd = -1;

    for (uint32_t i = 0; i < manager.count; i++) {
        const int fd = dup(manager.items[i].fd);
        CHECK(fd >= 0);
        if (sscanf(manager.items[i].name, LABEL "-segment-%llx", &id) == 1) {
            CHECK(pcc_tenant_adopt(f->tenant, fd, id) == 0);
        } else {
            CHECK(sscanf(manager.items[i].name, LABEL "-state-%llx", &id) == 1);
            state_fd = fd;
            *state_id = id;
        }
    }
    return state_fd;
}

static void *settle_run(void *argument)
{
    settling = argument;
    is_settler = true;
    pcc_tenant_settle(settling->tenant);
    return NULL;
}

static void test_its_save_ends(void)
{
    struct pcc_kept_outcome outcomes[PCC_KEPT_OUTCOMES_MAX];
    struct pcc_tenant_holding holding;
    struct fixture f = {0};
    struct sick_io disk;
    uint64_t state_id = 0;
    uint32_t count = 0;
    pthread_t thread;
    int status;

    (void)snprintf(f.path, sizeof(f.path), "%s.volume", manager.address);
    volume_make(f.path, PAYLOAD, 1);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        daemon_live(&f);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGKILL && manager_count() == 9);

    daemon_open(&f, MEMORY);
    CHECK(pcc_volume_open_io(sick_open(f.path, &disk), true, &f.volume) == 0);
    const int state_fd = adopt(&f, &state_id);
    CHECK(pcc_tenant_bind_kept(f.tenant, f.volume, state_fd, state_id, outcomes, &count) == 0);
    CHECK(close(state_fd) == 0 && count == 1 && outcomes[0].error == 0);
    CHECK(pthread_create(&thread, NULL, settle_run, &f) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQUAL(stops, 1);
    pcc_tenant_shrink(f.tenant, 0, &holding);
    CHECK_EQUAL(holding.bytes, 2 * CHUNK);
    CHECK(pcc_tenant_unbind(f.tenant, f.volume) == 0);
    CHECK(pcc_tenant_release_memory(f.tenant) == 0);
    daemon_close(&f);
    pcc_volume_close(f.volume);
    CHECK(unlink(f.path) == 0);
    CHECK_EQUAL(manager_count(), 0);
}

/* It stays its owner's, who closes it. */
static void test_a_segment_that_does_not_fit(void)
{
    static const struct {
        uint64_t length_bytes;
        int error;
    } unfit[] = {{CHUNK + CHUNK / 2, -EINVAL}, {257 * CHUNK, -ENOSPC}};
    struct fixture f = {0};
    uint64_t budget, used;

    daemon_open(&f, 300 * CHUNK);
    for (uint32_t i = 0; i < 2; i++) {
        void *bytes;
        int fd;
        CHECK(pcc_memfd_make("test", unfit[i].length_bytes, &fd, &bytes) == 0);
        CHECK_EQUAL(pcc_tenant_adopt(f.tenant, fd, 1 + i), unfit[i].error);
        CHECK(close(fd) == 0);
        CHECK(munmap(bytes, unfit[i].length_bytes) == 0);
        pcc_pool_usage(f.pool, &budget, &used);
        CHECK_EQUAL(used, 0);
    }
    daemon_close(&f);
}

int main(void)
{
    manager_start();
    RUN(test_a_segment_that_does_not_fit);
    RUN(test_its_save_ends);
    manager_end();
    return 0;
}
