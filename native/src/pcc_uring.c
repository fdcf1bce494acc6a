#include "pcc_uring.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The same numbers on every architecture that we build for. */
#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

#define OFFSET_RINGS 0
#define OFFSET_REQUESTS 0x10000000
#define ENTER_GETEVENTS 1u
#define FEATURE_SINGLE_MMAP 1u /* both rings in one mapping: Linux 5.4 */
#define FEATURE_RW_CUR_POS 8u  /* came with IORING_OP_READ and IORING_OP_WRITE: Linux 5.6 */
#define FEATURES (FEATURE_SINGLE_MMAP | FEATURE_RW_CUR_POS)

struct parameters { /* struct io_uring_params */
    uint32_t queue_entries, done_entries, flags, queue_cpu, queue_idle_ms, features, queue_fd;
    uint32_t reserved[3];
    struct {
        uint32_t head, tail, mask, entries, flags, dropped, index, reserved;
        uint64_t address;
    } queue;
    struct {
        uint32_t head, tail, mask, entries, overflow, done, flags, reserved;
        uint64_t address;
    } done;
};
_Static_assert(sizeof(struct parameters) == 120, "struct io_uring_params");

static int map_rings(struct pcc_uring *ring, const struct parameters *parameters)
{
    const uint64_t queue_end =
        parameters->queue.index + (uint64_t)parameters->queue_entries * sizeof(uint32_t);
    const uint64_t done_end =
        parameters->done.done + (uint64_t)parameters->done_entries * sizeof(struct pcc_uring_done);
    const int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;

    ring->rings_bytes = queue_end > done_end ? queue_end : done_end;
    ring->requests_bytes = (uint64_t)parameters->queue_entries * sizeof(struct pcc_uring_request);
    void *rings = mmap(NULL, ring->rings_bytes, protection, flags, ring->fd, OFFSET_RINGS);
    if (rings == MAP_FAILED)
        return -errno;
    ring->rings = rings;
    void *requests = mmap(NULL, ring->requests_bytes, protection, flags, ring->fd, OFFSET_REQUESTS);
    if (requests == MAP_FAILED)
        return -errno;
    ring->requests = requests;
    /* A forked child must not find rings whose requests are not its own. */
    (void)madvise(rings, ring->rings_bytes, MADV_DONTFORK);
    (void)madvise(requests, ring->requests_bytes, MADV_DONTFORK);
    return 0;
}

static _Atomic uint32_t *word(const struct pcc_uring *ring, uint32_t offset)
{
    return (_Atomic uint32_t *)(void *)(ring->rings + offset);
}

static void find_words(struct pcc_uring *ring, const struct parameters *parameters)
{
    ring->queue_entries = parameters->queue_entries;
    ring->queue_head = word(ring, parameters->queue.head);
    ring->queue_tail = word(ring, parameters->queue.tail);
    ring->queue_index = (uint32_t *)(void *)(ring->rings + parameters->queue.index);
    ring->done_entries = parameters->done_entries;
    ring->done_head = word(ring, parameters->done.head);
    ring->done_tail = word(ring, parameters->done.tail);
    ring->done = (const struct pcc_uring_done *)(void *)(ring->rings + parameters->done.done);
    for (uint32_t i = 0; i < ring->queue_entries; i++)
        ring->queue_index[i] = i;
}

/* A filter may allow the setup and nothing else: one request that does nothing must come back. */
static int try_out(struct pcc_uring *ring)
{
    struct pcc_uring_done done;

    (void)pcc_uring_queue(ring); /* all zero: PCC_URING_NOP */
    for (;;) {
        const int result = pcc_uring_enter(ring, pcc_uring_queued(ring), 1);
        if (result != 0 && result != -EINTR)
            return result;
        if (pcc_uring_take(ring, &done))
            return done.result;
    }
}

int pcc_uring_open(uint32_t entries, struct pcc_uring *out)
{
    struct pcc_uring ring = {0};
    struct parameters parameters = {0};
    int result;

    const long fd = syscall(__NR_io_uring_setup, entries, &parameters);
    if (fd < 0)
        /* ENOMEM: before Linux 5.12 the rings count as locked memory. */
        return errno == EMFILE || errno == ENFILE ? -errno : -PCC_E_UNSUPPORTED;
    ring.fd = (int)fd;
    result = (parameters.features & FEATURES) == FEATURES ? map_rings(&ring, &parameters)
                                                          : -PCC_E_UNSUPPORTED;
    if (result == 0) {
        find_words(&ring, &parameters);
        result = try_out(&ring);
    }
    if (result != 0) {
        pcc_uring_close(&ring);
        return -PCC_E_UNSUPPORTED;
    }
    *out = ring;
    return 0;
}

void pcc_uring_close(struct pcc_uring *ring)
{
    if (ring->requests)
        (void)munmap(ring->requests, ring->requests_bytes);
    if (ring->rings)
        (void)munmap(ring->rings, ring->rings_bytes);
    (void)close(ring->fd);
    memset(ring, 0, sizeof *ring);
}

uint32_t pcc_uring_queued(const struct pcc_uring *ring)
{
    /* Acquire: the kernel has read what it moved its head past, so that the place is ours. */
    return atomic_load_explicit(ring->queue_tail, memory_order_relaxed) -
           atomic_load_explicit(ring->queue_head, memory_order_acquire);
}

struct pcc_uring_request *pcc_uring_queue(struct pcc_uring *ring)
{
    const uint32_t tail = atomic_load_explicit(ring->queue_tail, memory_order_relaxed);

    if (pcc_uring_queued(ring) == ring->queue_entries)
        return NULL;
    struct pcc_uring_request *request = &ring->requests[tail & (ring->queue_entries - 1)];
    memset(request, 0, sizeof *request);
    /* Nobody looks before pcc_uring_enter: without a polling kernel thread the system call is the
     * hand-over, whatever is written to the request until then. */
    atomic_store_explicit(ring->queue_tail, tail + 1, memory_order_release);
    return request;
}

void pcc_uring_unqueue(struct pcc_uring *ring)
{
    atomic_store_explicit(ring->queue_tail,
                          atomic_load_explicit(ring->queue_head, memory_order_acquire),
                          memory_order_release);
}

int pcc_uring_enter(struct pcc_uring *ring, uint32_t submit, uint32_t wait)
{
    const long taken =
        syscall(__NR_io_uring_enter, ring->fd, submit, wait, ENTER_GETEVENTS, NULL, 0);
    return taken < 0 ? -errno : 0;
}

bool pcc_uring_take(struct pcc_uring *ring, struct pcc_uring_done *out)
{
    const uint32_t head = atomic_load_explicit(ring->done_head, memory_order_relaxed);

    /* Acquire: with the kernel's release after it filled the entry. */
    if (head == atomic_load_explicit(ring->done_tail, memory_order_acquire))
        return false;
    *out = ring->done[head & (ring->done_entries - 1)];
    atomic_store_explicit(ring->done_head, head + 1, memory_order_release);
    return true;
}
