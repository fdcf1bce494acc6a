/* A storage engine that lets no more than so many bytes per second through to another one. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "pcc_io.h"

#define BURST_NS 20000000u /* what an idle engine may catch up on */

struct throttle_io {
    struct pcc_io io; /* first member */
    struct pcc_io_ops ops;
    struct pcc_io *inner;
    uint64_t bytes_per_second;
    pthread_mutex_t lock;
    uint64_t free_at_ns; /* when everything admitted so far has passed */
};

static struct throttle_io *self_of(struct pcc_io *io)
{
    return (struct throttle_io *)io;
}

/* Takes the next place in the line for `length` bytes and waits until they have passed. */
static void pass(struct throttle_io *self, uint64_t length)
{
    const uint64_t now = pcc_now_ns();
    const uint64_t needs = (uint64_t)((double)length / (double)self->bytes_per_second * 1e9);

    (void)pthread_mutex_lock(&self->lock);
    if (self->free_at_ns + BURST_NS < now)
        self->free_at_ns = now - BURST_NS;
    self->free_at_ns += needs;
    const uint64_t until = self->free_at_ns;
    (void)pthread_mutex_unlock(&self->lock);
    if (until <= now)
        return;
    const struct timespec wake = {
        .tv_sec = (time_t)(until / 1000000000u),
        .tv_nsec = (long)(until % 1000000000u),
    };
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &wake, NULL) == EINTR) {
    }
}

static int64_t throttle_write(struct pcc_io *io, const void *bytes, uint64_t length,
                              uint64_t offset)
{
    pass(self_of(io), length);
    return self_of(io)->inner->ops->write(self_of(io)->inner, bytes, length, offset);
}

static int64_t throttle_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    pass(self_of(io), length);
    return self_of(io)->inner->ops->read(self_of(io)->inner, bytes, length, offset);
}

static int64_t throttle_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                      uint64_t offset)
{
    pass(self_of(io), length);
    return self_of(io)->inner->ops->write_durable(self_of(io)->inner, bytes, length, offset);
}

static int throttle_flush(struct pcc_io *io)
{
    return pcc_io_flush(self_of(io)->inner);
}

static void throttle_close(struct pcc_io *io)
{
    struct throttle_io *self = self_of(io);

    pcc_io_close(self->inner);
    (void)pthread_mutex_destroy(&self->lock);
    free(self);
}

static const struct pcc_io_ops throttle_ops = {
    .write = throttle_write,
    .read = throttle_read,
    .write_durable = throttle_write_durable,
    .flush = throttle_flush,
    .close = throttle_close,
};

int pcc_io_throttle_open(struct pcc_io *inner, uint64_t bytes_per_second, struct pcc_io **out)
{
    struct throttle_io *self = NULL;

    if (bytes_per_second > 0)
        self = calloc(1, sizeof *self);
    if (!self) {
        pcc_io_close(inner);
        return bytes_per_second == 0 ? -EINVAL : -ENOMEM;
    }
    self->ops = throttle_ops;
    self->ops.name = inner->ops->name; /* the engine's: what people ask for */
    self->io.ops = &self->ops;
    self->io.size_bytes = inner->size_bytes;
    self->inner = inner;
    self->bytes_per_second = bytes_per_second;
    (void)pthread_mutex_init(&self->lock, NULL);
    *out = &self->io;
    return 0;
}
