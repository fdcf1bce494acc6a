/* The engine `uring` when the kernel refuses, fails, cuts short or reorders: every call of
 * pcc_uring_enter passes through here (the linker's --wrap), completions are changed before the
 * engine sees them. Each fault strikes at the first, the second, ... completion until a transfer
 * meets none. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "pcc_io.h"
#include "pcc_uring.h"

#define MIB (1ull << 20)
#define FILE_BYTES (24 * MIB)

enum fault {
    NONE,
    DONE_ERROR,        /* a completion is `error` */
    DONE_SHORT,        /* a completion moved `moved` bytes */
    ENTER_ERROR,       /* the call is `error` and takes nothing */
    ENTER_ERROR_TAKES, /* the call is `error` though it took everything */
    NO_NOWAIT,         /* the device says -EAGAIN to what the kernel issues without waiting */
    FAULTS,
};

static struct {
    enum fault fault;
    int error;
    int32_t moved;
    uint32_t at; /* strikes the n-th call or completion, and `times` - 1 more */
    uint32_t times;
    uint32_t seen, hits;
    bool reverse; /* completions come in the wrong order */
    const struct pcc_uring *ring;
    bool may_wait[64]; /* of the last request with that tag */
} kernel;

/* What the kernel took and has not finished. */
static uint32_t under_way(void)
{
    return atomic_load(kernel.ring->queue_head) - atomic_load(kernel.ring->done_tail);
}

static uint32_t ready(const struct pcc_uring *ring)
{
    return atomic_load(ring->done_tail) - atomic_load(ring->done_head);
}

int __real_pcc_uring_enter(struct pcc_uring *ring, uint32_t submit, uint32_t wait);
int __wrap_pcc_uring_enter(struct pcc_uring *ring, uint32_t submit, uint32_t wait);

static bool strikes(bool able)
{
    if (!able || ++kernel.seen < kernel.at || kernel.seen >= kernel.at + kernel.times)
        return false;
    kernel.hits++;
    return true;
}

static struct pcc_uring_done *done_at(const struct pcc_uring *ring, uint32_t index)
{
    /* The kernel's memory, and ours to write to. */
    return (struct pcc_uring_done *)(uintptr_t)&ring->done[index & (ring->done_entries - 1)];
}

static void note_requests(const struct pcc_uring *ring, uint32_t submit)
{
    const uint32_t head = atomic_load(ring->queue_head);

    for (uint32_t i = head; i != head + submit; i++) {
        const struct pcc_uring_request *request = &ring->requests[i & (ring->queue_entries - 1)];
        CHECK(request->tag < sizeof kernel.may_wait);
        kernel.may_wait[request->tag] = (request->flags & PCC_URING_MAY_WAIT) != 0;
    }
}

static void change_completions(const struct pcc_uring *ring, uint32_t from, uint32_t to)
{
    for (uint32_t i = from; i != to; i++) {
        struct pcc_uring_done *done = done_at(ring, i);
        if (strikes(kernel.fault == DONE_ERROR || kernel.fault == DONE_SHORT))
            done->result = kernel.fault == DONE_ERROR ? kernel.error : kernel.moved;
        if (kernel.fault == NO_NOWAIT && !kernel.may_wait[done->tag])
            done->result = -EAGAIN;
    }
    for (uint32_t i = from, j = to; kernel.reverse && j - i > 1 && j - i < 1u << 31; i++) {
        const struct pcc_uring_done first = *done_at(ring, i);
        *done_at(ring, i) = *done_at(ring, --j);
        *done_at(ring, j) = first;
    }
}

int __wrap_pcc_uring_enter(struct pcc_uring *ring, uint32_t submit, uint32_t wait)
{
    kernel.ring = ring;
    if (kernel.fault == ENTER_ERROR && strikes(true))
        return kernel.error;
    note_requests(ring, submit);
    int result = __real_pcc_uring_enter(ring, submit, wait);
    /* Everything under way has to be waited for before completions may change places. */
    while (kernel.reverse && result == 0 && under_way() > 0)
        result = __real_pcc_uring_enter(ring, 0, ready(ring) + 1);
    /* They may also come between two calls: those are left as they are. */
    const uint32_t after = atomic_load(ring->done_tail), before = after - ready(ring);
    change_completions(ring, before, after);
    return kernel.fault == ENTER_ERROR_TAKES && strikes(true) ? kernel.error : result;
}

static struct pcc_io *io;
static int file;
static uint64_t length = 16 * MIB + 8192; /* one piece more than are in flight together */
static uint8_t *bytes, *back;

static void fill(uint64_t seed)
{
    for (uint64_t at = 0; at < FILE_BYTES; at += 8) {
        const uint64_t word = (seed + at) * 0x9e3779b97f4a7c15ull;
        memcpy(bytes + at, &word, 8);
    }
}

/* A write, then a read; the first error. */
static int write_and_read(void)
{
    const uint64_t offset = 4096;
    static uint64_t seed;

    fill(++seed);
    memset(back, 0, length);
    int result = pcc_io_write_all(io, bytes, length, offset);
    /* Nothing may be under way when the memory is ours again. */
    CHECK_EQUAL(under_way(), 0);
    if (result == 0) {
        CHECK_EQUAL(pread(file, back, length, (off_t)offset), (long long)length);
        CHECK(memcmp(bytes, back, length) == 0);
        memset(back, 0, length);
        result = pcc_io_read_all(io, back, length, offset);
        CHECK_EQUAL(under_way(), 0);
        CHECK(result != 0 || memcmp(bytes, back, length) == 0);
    }
    return result;
}

/* At every place until none is hit; `expected` is what each hit must lead to. */
static void strike_everywhere(enum fault fault, int error, int32_t moved, uint32_t times,
                              int expected)
{
    uint32_t at = 1, cases = 0;

    do {
        kernel.fault = fault;
        kernel.error = error;
        kernel.moved = moved;
        kernel.times = times;
        kernel.at = at++;
        kernel.seen = kernel.hits = 0;
        kernel.reverse = at % 2 == 0;
        const int result = write_and_read();
        CHECK_EQUAL(result, kernel.hits > 0 ? expected : 0);
        cases += kernel.hits > 0;
    } while (kernel.hits > 0);
    kernel.fault = NONE;
    CHECK_EQUAL(write_and_read(), 0); /* the ring is as good as before */
    printf("  fault %d, error %d, moved %d, %u times: %u places\n", fault, error, moved, times,
           cases);
}

static void test_errors_of_a_piece(void)
{
    strike_everywhere(DONE_ERROR, -EIO, 0, 1, -EIO);
    strike_everywhere(DONE_ERROR, -ENOSPC, 0, 1, -ENOSPC);
    strike_everywhere(DONE_ERROR, -ECANCELED, 0, 1, -ECANCELED);
    strike_everywhere(DONE_ERROR, -EIO, 0, 5, -EIO);
}

static void test_what_passes_is_tried_again(void)
{
    strike_everywhere(DONE_ERROR, -EINTR, 0, 1, 0);
    strike_everywhere(DONE_ERROR, -EAGAIN, 0, 20, 0);
    strike_everywhere(DONE_ERROR, -EAGAIN, 0, UINT32_MAX / 2, -EAGAIN);
}

/* As Linux 6.1 with device-mapper targets and other drivers that do not know REQ_NOWAIT. */
static void test_a_device_that_cannot_but_wait(void)
{
    kernel.fault = NO_NOWAIT;
    CHECK_EQUAL(write_and_read(), 0);
    kernel.fault = NONE;
}

static void test_short_pieces_are_resumed(void)
{
    strike_everywhere(DONE_SHORT, 0, 4096, 1, 0);
    strike_everywhere(DONE_SHORT, 0, 6000, 3, 0);
    strike_everywhere(DONE_SHORT, 0, 512, 1, 0);
    strike_everywhere(DONE_SHORT, 0, 0, 10, 0);
    strike_everywhere(DONE_SHORT, 0, 0, UINT32_MAX / 2, -EIO);
}

static void test_a_ring_that_takes_nothing(void)
{
    strike_everywhere(ENTER_ERROR, -EINTR, 0, 3, 0);
    strike_everywhere(ENTER_ERROR, -EAGAIN, 0, 3, 0);
    strike_everywhere(ENTER_ERROR, -EBUSY, 0, 1, 0);
    strike_everywhere(ENTER_ERROR_TAKES, -EINTR, 0, 2, 0);
    strike_everywhere(ENTER_ERROR_TAKES, -ENOMEM, 0, 2, 0);
}

/* Refused before anything was under way: an error; the ring is empty and works afterwards. */
static void test_a_ring_that_refuses_for_good(void)
{
    for (uint32_t i = 0; i < 2; i++) {
        kernel.fault = ENTER_ERROR;
        kernel.error = i == 0 ? -ENOMEM : -EPERM;
        kernel.at = 1;
        kernel.times = i == 0 ? UINT32_MAX / 2 : 1;
        kernel.seen = 0;
        CHECK_EQUAL(pcc_io_write_all(io, bytes, 16 * MIB, 0), kernel.error);
        kernel.fault = NONE;
        CHECK_EQUAL(write_and_read(), 0);
    }
}

int main(void)
{
    const struct pcc_io_options options = {
        .engine = PCC_IO_URING, .strict = true, .allow_buffered = true};
    char path[] = "/tmp/pcc-uring-XXXXXX";

    file = mkostemp(path, O_CLOEXEC);
    CHECK(file >= 0 && unlink(path) == 0);
    CHECK_EQUAL(fallocate(file, 0, 0, (off_t)FILE_BYTES), 0);
    bytes = aligned_alloc(4096, FILE_BYTES);
    back = aligned_alloc(4096, FILE_BYTES);
    CHECK(bytes && back);
    const int result = pcc_io_open(fcntl(file, F_DUPFD_CLOEXEC, 0), &options, &io);
    if (result == -PCC_E_UNSUPPORTED) {
        printf("io_uring is not to be had here: nothing was tested\n");
        return 0;
    }
    CHECK_EQUAL(result, 0);
    RUN(test_errors_of_a_piece);
    length = 5 * MIB + 8192; /* the rest with less to write */
    RUN(test_what_passes_is_tried_again);
    RUN(test_a_device_that_cannot_but_wait);
    RUN(test_short_pieces_are_resumed);
    RUN(test_a_ring_that_takes_nothing);
    RUN(test_a_ring_that_refuses_for_good);
    pcc_io_close(io);
    (void)close(file);
    free(bytes);
    free(back);
    return 0;
}
