/* A storage engine that limits the bytes per second of another one. Every volume has it, since the
 * limit may change while transfers wait in its queue.
 *
 * Places in the queue are counted in bytes, not in time: a transfer takes the place at the end, and
 * may start when the bucket, which fills at the present rate, has reached that place. */
#include <stdlib.h>

#include "base/pcc_thread.h"
#include "io/pcc_io.h"

#define BURST_S 0.02 /* what an idle engine may catch up on */
#define SECOND_NS 1e9

struct throttle_io {
    struct pcc_io io; /* first member */
    struct pcc_io *inner;
    _Atomic uint64_t bytes_per_second; /* written under the lock; 0: no limit */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* the rate */
    uint64_t since_ns;      /* when the rate became what it is ... */
    double filled;          /* ... and how far the bucket was then */
    double line_end;        /* of everything admitted so far */
};

static struct throttle_io *self_of(struct pcc_io *io)
{
    return (struct throttle_io *)io;
}

static uint64_t rate_of(const struct throttle_io *self)
{
    /* Relaxed: a transfer that begins beside a change may count as before it. */
    return PCC_READ(&self->bytes_per_second);
}

/* With the lock held: how far the bucket is at a time, in bytes of the line. */
static double filled_at(const struct throttle_io *self, uint64_t now_ns)
{
    return self->filled + (double)(now_ns - self->since_ns) / SECOND_NS * (double)rate_of(self);
}

/* With the lock held: waits until the bucket has come to `place`, or the rate has changed. False
 * when there is nothing to wait for. */
static bool wait_for(struct throttle_io *self, double place)
{
    const uint64_t rate = rate_of(self);

    if (rate == 0 || filled_at(self, pcc_now_ns()) >= place)
        return false;
    const double wait_ns = (place - self->filled) / (double)rate * SECOND_NS;
    /* Rounded up, so that the place is reached then; a century is as good as forever. */
    const uint64_t until = self->since_ns + (uint64_t)(wait_ns < 3e18 ? wait_ns : 3e18) + 1;
    (void)pcc_condition_wait(&self->changed, &self->lock, until);
    return true;
}

/* Takes the next place in the line for `length` bytes and waits until they have passed. */
static void pass(struct throttle_io *self, uint64_t length)
{
    if (rate_of(self) == 0)
        return;
    PCC_LOCKED(&self->lock);
    const double start = filled_at(self, pcc_now_ns()) - BURST_S * (double)rate_of(self);
    if (self->line_end < start)
        self->line_end = start;
    self->line_end += (double)length;
    const double place = self->line_end;
    while (wait_for(self, place)) {
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
    (void)pthread_cond_destroy(&self->changed);
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
    struct throttle_io *self = calloc(1, sizeof *self);

    if (!self) {
        pcc_io_close(inner);
        return -ENOMEM;
    }
    self->io.ops = &throttle_ops;
    self->io.size_bytes = inner->size_bytes;
    self->inner = inner;
    self->since_ns = pcc_now_ns();
    atomic_init(&self->bytes_per_second, bytes_per_second);
    (void)pthread_mutex_init(&self->lock, NULL);
    pcc_condition_make(&self->changed);
    *out = &self->io;
    return 0;
}

void pcc_io_limit(struct pcc_io *io, uint64_t bytes_per_second)
{
    struct throttle_io *self = self_of(io);

    PCC_ASSERT(io->ops->write == throttle_write);
    PCC_LOCKED(&self->lock);
    const uint64_t now_ns = pcc_now_ns();
    self->filled = filled_at(self, now_ns);
    self->since_ns = now_ns;
    if (rate_of(self) == 0)
        self->line_end = self->filled; /* the threads that wait in it go on */
    PCC_WRITE(&self->bytes_per_second, bytes_per_second);
    (void)pthread_cond_broadcast(&self->changed);
}

uint64_t pcc_io_limit_of(struct pcc_io *io)
{
    PCC_ASSERT(io->ops->write == throttle_write);
    return rate_of(self_of(io));
}
