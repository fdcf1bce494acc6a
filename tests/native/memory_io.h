/* A disk in memory for tests: counts operations, and fails the chosen ones. Thread-safe. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "io/pcc_io.h"

#define MEET_LIMIT_NS 30000000000ull
#define ALONE_NS 500000000ull /* how long a flush looks whether another one begins beside it */

struct memory_io {
    struct pcc_io io; /* first member */
    uint8_t *bytes;
    pthread_mutex_t lock;
    _Atomic int fail_writes; /* so many writes fail from now on; -1: all */
    _Atomic int write_error; /* with this; 0: -EIO */
    _Atomic int fail_durables;
    _Atomic int fail_flushes;
    _Atomic int fail_reads;
    _Atomic int fail_reads_after; /* > 0: the n-th read from now on and all after it fail */
    _Atomic int short_every;      /* > 0: a transfer moves at most so many bytes */
    _Atomic int interrupts;       /* so many transfers are interrupted */
    _Atomic int writes, durables, flushes, reads;
    _Atomic long write_ns; /* how long a write takes */
    _Atomic int meet; /* the first writes wait until so many are under way at once; from 2 on the
                         first flush also waits, a moment, for a second one */
    _Atomic int writing, writing_most;
    _Atomic int flushing, flushing_most;
};

static inline struct memory_io *memory_of(struct pcc_io *io)
{
    return (struct memory_io *)io;
}

static inline bool memory_spend(_Atomic int *budget)
{
    int left = atomic_load(budget);
    while (left > 0)
        if (atomic_compare_exchange_weak(budget, &left, left - 1))
            return true;
    return left < 0;
}

static inline int64_t memory_length(struct memory_io *self, uint64_t length)
{
    const int limit = atomic_load(&self->short_every);
    if (memory_spend(&self->interrupts))
        return -EINTR;
    return limit > 0 && length > (uint64_t)limit ? limit : (int64_t)length;
}

static inline int64_t memory_move_in(struct memory_io *self, const void *bytes, uint64_t length,
                                     uint64_t offset)
{
    PCC_ASSERT(offset % PCC_IO_ALIGN == 0 && length % PCC_IO_ALIGN == 0);
    PCC_ASSERT((uintptr_t)bytes % PCC_IO_ALIGN == 0);
    PCC_ASSERT(offset <= self->io.size_bytes && length <= self->io.size_bytes - offset);
    const int64_t moved = memory_length(self, length);
    if (moved > 0) {
        (void)pthread_mutex_lock(&self->lock);
        memcpy(self->bytes + offset, bytes, (size_t)moved);
        (void)pthread_mutex_unlock(&self->lock);
    }
    return moved;
}

static inline int64_t memory_write(struct pcc_io *io, const void *bytes, uint64_t length,
                                   uint64_t offset)
{
    struct memory_io *self = memory_of(io);
    const int now = atomic_fetch_add(&self->writing, 1) + 1;
    int most = atomic_load(&self->writing_most);
    while (now > most && !atomic_compare_exchange_weak(&self->writing_most, &most, now)) {
    }
    atomic_fetch_add(&self->writes, 1);
    const struct timespec pause = {.tv_nsec = atomic_load(&self->write_ns)};
    if (pause.tv_nsec > 0)
        (void)nanosleep(&pause, NULL);
    const uint64_t deadline = pcc_now_ns() + MEET_LIMIT_NS;
    while (atomic_load(&self->writing_most) < atomic_load(&self->meet) && pcc_now_ns() < deadline)
        (void)nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    const int64_t moved =
        memory_spend(&self->fail_writes)
            ? (atomic_load(&self->write_error) != 0 ? atomic_load(&self->write_error) : -EIO)
            : memory_move_in(self, bytes, length, offset);
    atomic_fetch_sub(&self->writing, 1);
    return moved;
}

static inline int64_t memory_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                           uint64_t offset)
{
    atomic_fetch_add(&memory_of(io)->durables, 1);
    if (memory_spend(&memory_of(io)->fail_durables))
        return -EIO;
    return memory_move_in(memory_of(io), bytes, length, offset);
}

static inline int64_t memory_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    struct memory_io *self = memory_of(io);
    atomic_fetch_add(&self->reads, 1);
    const int left = atomic_load(&self->fail_reads_after);
    if (left > 1)
        atomic_store(&self->fail_reads_after, left - 1);
    if (memory_spend(&self->fail_reads) || left == 1)
        return -EIO;
    PCC_ASSERT(offset <= io->size_bytes && length <= io->size_bytes - offset);
    const int64_t moved = memory_length(self, length);
    if (moved > 0) {
        (void)pthread_mutex_lock(&self->lock);
        memcpy(bytes, self->bytes + offset, (size_t)moved);
        (void)pthread_mutex_unlock(&self->lock);
    }
    return moved;
}

static inline int memory_flush(struct pcc_io *io)
{
    struct memory_io *self = memory_of(io);
    const int now = atomic_fetch_add(&self->flushing, 1) + 1;
    int most = atomic_load(&self->flushing_most);
    while (now > most && !atomic_compare_exchange_weak(&self->flushing_most, &most, now)) {
    }
    const bool looks = atomic_load(&self->meet) > 1 && atomic_load(&self->flushes) == 0;
    const uint64_t until = pcc_now_ns() + ALONE_NS;
    while (looks && atomic_load(&self->flushing_most) < 2 && pcc_now_ns() < until)
        (void)nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    atomic_fetch_sub(&self->flushing, 1);
    atomic_fetch_add(&self->flushes, 1);
    return memory_spend(&memory_of(io)->fail_flushes) ? -EIO : 0;
}

static inline void memory_close(struct pcc_io *io)
{
    (void)io; /* the media outlives the volume */
}

static const struct pcc_io_ops memory_ops = {
    .write = memory_write,
    .read = memory_read,
    .write_durable = memory_write_durable,
    .flush = memory_flush,
    .close = memory_close,
};

static inline struct memory_io *memory_new(uint64_t size_bytes)
{
    struct memory_io *self = calloc(1, sizeof *self);
    CHECK(self);
    self->io.ops = &memory_ops;
    self->io.size_bytes = size_bytes;
    self->bytes = calloc(1, size_bytes);
    CHECK(self->bytes);
    (void)pthread_mutex_init(&self->lock, NULL);
    return self;
}

static inline void memory_free(struct memory_io *self)
{
    (void)pthread_mutex_destroy(&self->lock);
    free(self->bytes);
    free(self);
}
