/* A disk that fails under a tenant: a checkpoint moves to another slot while its chunks are cached.
 * When it cannot move, it fails, and page and events report that. */
#include <fcntl.h>

#include "tenant_fixture.h"

static const struct settings roomy = {.payload_capacity = 1u << 20, .memory_bytes = 4u << 20};
static const struct settings scarce = {.payload_capacity = 1u << 20, .memory_bytes = 4 * CHUNK};

struct faulty { /* fails the next writes of chunk data; records go through */
    struct pcc_io io;
    struct pcc_io *inner;
    _Atomic int skip; /* let this many pass first */
    _Atomic int fail;
};

static int64_t faulty_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    struct faulty *faulty = (struct faulty *)io;

    if (atomic_fetch_sub(&faulty->skip, 1) <= 0 && atomic_fetch_sub(&faulty->fail, 1) > 0)
        return -EIO;
    return faulty->inner->ops->write(faulty->inner, bytes, length, offset);
}

static int64_t faulty_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    struct faulty *faulty = (struct faulty *)io;

    return faulty->inner->ops->read(faulty->inner, bytes, length, offset);
}

static int64_t faulty_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                    uint64_t offset)
{
    struct faulty *faulty = (struct faulty *)io;

    return faulty->inner->ops->write_durable(faulty->inner, bytes, length, offset);
}

static int faulty_flush(struct pcc_io *io)
{
    return pcc_io_flush(((struct faulty *)io)->inner);
}

static void faulty_close(struct pcc_io *io)
{
    pcc_io_close(((struct faulty *)io)->inner);
}

static const struct pcc_io_ops faulty_ops = {.write = faulty_write,
                                             .read = faulty_read,
                                             .write_durable = faulty_write_durable,
                                             .flush = faulty_flush,
                                             .close = faulty_close};

/* Puts the faulty disk under the fixture's volume. */
static void break_disk(struct fixture *f, struct faulty *faulty)
{
    const struct pcc_io_options options = {.allow_buffered = true};
    const int fd = open(f->path, O_RDWR | O_CLOEXEC);

    CHECK(pcc_tenant_unbind(f->tenant, f->volume) == 0);
    pcc_volume_close(f->volume);
    CHECK(fd >= 0 && pcc_io_open(fd, &options, &faulty->inner) == 0);
    faulty->io = (struct pcc_io){.ops = &faulty_ops, .size_bytes = faulty->inner->size_bytes};
    atomic_store(&faulty->skip, 0);
    atomic_store(&faulty->fail, 0);
    CHECK(pcc_volume_open_io(&faulty->io, true, &f->volume) == 0);
    CHECK(pcc_tenant_bind(f->tenant, f->volume) == 0);
}

static void test_moves_to_another_slot(void)
{
    struct fixture f;
    struct faulty faulty;
    static uint8_t bytes[900000];

    fixture_open(&f, &roomy);
    break_disk(&f, &faulty);
    link_open(&f);
    pattern(bytes, sizeof(bytes), 1);
    atomic_store(&faulty.skip, 5);
    atomic_store(&faulty.fail, 1);
    const uint64_t sequence = save(&f, 1, bytes, sizeof(bytes));
    const struct pcc_event event = event_until(&f, PCC_EVENT_DURABLE);
    CHECK(event.rehomed == 1 && event.sequence == sequence);
    load_equals(&f, sequence, 1, bytes, sizeof(bytes));
    CHECK(loaded_from_memory(&f) == 1);
    fixture_end(&f);
}

/* The disk has failed for good: the word, the outcome and the event report that, the trainer is
 * released, and no chunk is lost; what was durable before is still there. */
static void fails(const struct settings *settings, int skip)
{
    struct fixture f;
    struct faulty faulty;
    static uint8_t before[900000], bytes[900000];
    struct pcc_client_state state;
    struct pcc_tenant_usage usage;

    fixture_open(&f, settings);
    break_disk(&f, &faulty);
    link_open(&f);
    pattern(before, sizeof(before), 1);
    pattern(bytes, sizeof(bytes), 2);
    const uint64_t good = save(&f, 1, before, sizeof(before));
    CHECK(event_until(&f, PCC_EVENT_DURABLE).id == 1);
    atomic_store(&faulty.skip, skip);
    atomic_store(&faulty.fail, 1000000);
    submit(&f, 2, bytes, sizeof(bytes));
    CHECK(begin_wait(&f, 2, sizeof(bytes)) == good + 1);
    CHECK(pcc_client_wait(f.client, 2, PCC_WAIT_READ, soon()) == 0);
    CHECK(pcc_client_wait(f.client, 2, PCC_WAIT_DURABLE, soon()) == 0);
    const uint64_t deadline = soon();
    do { /* REFUSED is final at once, COPIED with its outcome */
        CHECK(pcc_client_state(f.client, 2, &state) == 0);
        CHECK(pcc_now_ns() < deadline);
    } while (state.outcome != PCC_OUTCOME_FAILED);
    CHECK(state.word == PCC_WORD_REFUSED || state.word == PCC_WORD_COPIED);
    CHECK(state.reason.stage == PCC_STAGE_WRITE && state.reason.error == -EIO);
    const struct pcc_event event = event_until(&f, PCC_EVENT_FAILED);
    CHECK(event.id == 2 && event.error == -EIO && event.stage == PCC_STAGE_WRITE);
    atomic_store(&faulty.fail, 0);
    load_equals(&f, good, 1, before, sizeof(before));
    detach(&f);
    pcc_tenant_usage(f.tenant, &usage);
    CHECK(usage.full_chunks == 0 && usage.granted_chunks == 0 && usage.lent_chunks == 0);
    fixture_close(&f);
}

static void test_fails_with_all_cached(void)
{
    fails(&roomy, 5);
}

static void test_fails_with_chunks_used_again(void)
{
    fails(&scarce, 8);
}

static void test_fails_at_the_first_write(void)
{
    fails(&scarce, 0);
}

int main(void)
{
    RUN(test_moves_to_another_slot);
    RUN(test_fails_with_all_cached);
    RUN(test_fails_with_chunks_used_again);
    RUN(test_fails_at_the_first_write);
    return 0;
}
