/* The engine `uring`: a transfer is cut into pieces which the disk has in flight together.
 *
 * Not used, because measured (1 GiB in chunks of 16 MiB, virtio disk, Linux 6.18):
 *  - registered files: no gain, and the kernel lets go of them 35 ms after close() or SIGKILL (50
 * of 50), so that whoever restarts would find the volume still locked;
 *  - registered buffers: what they save, the pinning of pages, is a part of 0.03 s of CPU per GiB
 *    with 4 KiB pages and of 0.008 s with huge ones, as the pool has them; against that stand a
 *    registration in every ring, which alone took more, and a pool that counts as locked memory;
 *  - IORING_OP_FSYNC and RWF_DSYNC through the ring: a flush takes 84 us instead of 65, because a
 *    kernel thread does it, a record 97 us instead of 93. The caller waits in either case. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pcc_io_file.h"
#include "pcc_uring.h"

#define PIECE_BYTES (2u << 20) /* 1 to 8 MiB are the same; smaller ones cost CPU */
#define DEPTH 8u               /* one chunk of 16 MiB */
#define RINGS_MAX 8u           /* as many transfers at a time; more of them wait for a ring */
#define TRIES_MAX 64u          /* of one piece, without progress */

struct uring_io {
    struct pcc_io io; /* first member */
    int fd;
    pthread_mutex_t lock;
    pthread_cond_t returned; /* a ring was */
    /* Lent to one transfer at a time: threads come and go without leaving a ring behind. */
    struct pcc_uring rings[RINGS_MAX];
    uint32_t ring_count; /* made as they are needed */
    uint32_t idle;       /* bit per ring */
    bool no_more_rings;  /* the kernel refused another one */
};

struct piece {
    uint8_t *bytes;
    uint64_t offset;
    uint32_t length;
    uint32_t tries;
    bool busy;     /* in the ring or with the kernel */
    bool may_wait; /* it was tried without, and could not be done so */
};

struct transfer {
    struct pcc_uring *ring;
    int fd;
    uint8_t opcode;
    uint8_t *bytes; /* what is not yet cut */
    uint64_t offset;
    uint64_t length;
    struct piece pieces[DEPTH];
    uint32_t busy;
    uint32_t refusals; /* of the ring, in a row */
    int error;         /* the first */
};

static struct uring_io *self_of(struct pcc_io *io)
{
    return (struct uring_io *)io;
}

/* -- rings -- */

static struct pcc_uring *take_ring(struct uring_io *self)
{
    (void)pthread_mutex_lock(&self->lock);
    while (self->idle == 0) {
        if (self->ring_count < RINGS_MAX && !self->no_more_rings) {
            self->no_more_rings = pcc_uring_open(DEPTH, &self->rings[self->ring_count]) != 0;
            if (!self->no_more_rings)
                self->idle |= 1u << self->ring_count++;
            continue;
        }
        (void)pthread_cond_wait(&self->returned, &self->lock);
    }
    const uint32_t index = (uint32_t)__builtin_ctz(self->idle);
    self->idle &= ~(1u << index);
    (void)pthread_mutex_unlock(&self->lock);
    return &self->rings[index];
}

static void return_ring(struct uring_io *self, const struct pcc_uring *ring)
{
    (void)pthread_mutex_lock(&self->lock);
    self->idle |= 1u << (ring - self->rings);
    (void)pthread_cond_signal(&self->returned);
    (void)pthread_mutex_unlock(&self->lock);
}

/* -- a transfer -- */

static void queue_piece(struct transfer *transfer, struct piece *piece)
{
    struct pcc_uring_request *request = pcc_uring_queue(transfer->ring);

    PCC_ASSERT(request); /* the ring has room for as many as there are pieces */
    request->opcode = transfer->opcode;
    request->flags = piece->may_wait ? PCC_URING_MAY_WAIT : 0;
    request->fd = transfer->fd;
    request->address = (uint64_t)(uintptr_t)piece->bytes;
    request->length = piece->length;
    request->offset = piece->offset;
    request->tag = (uint64_t)(piece - transfer->pieces);
}

static void cut_pieces(struct transfer *transfer)
{
    for (uint32_t i = 0; i < DEPTH && transfer->length > 0 && transfer->error == 0; i++) {
        struct piece *piece = &transfer->pieces[i];
        if (piece->busy)
            continue;
        const uint32_t length =
            transfer->length < PIECE_BYTES ? (uint32_t)transfer->length : PIECE_BYTES;
        *piece = (struct piece){
            .bytes = transfer->bytes, .offset = transfer->offset, .length = length, .busy = true};
        transfer->bytes += length;
        transfer->offset += length;
        transfer->length -= length;
        transfer->busy++;
        queue_piece(transfer, piece);
    }
}

static bool is_passing(int error)
{
    return error == -EINTR || error == -EAGAIN;
}

/* The rest of a short piece, or all of an interrupted one, goes again; after an error of another
 * piece nothing does.
 *
 * -EAGAIN is what the kernel says where it issued the piece on condition that nobody waits, and the
 * device cannot promise that: always so with some device-mapper targets on Linux 6.1, now and then
 * when a request is split. Asked in the same way again, it may say so for ever. */
static void finish_piece(struct transfer *transfer, const struct pcc_uring_done *done)
{
    struct piece *piece = &transfer->pieces[done->tag];
    const uint32_t moved =
        done->result < 0 ? 0 : (uint32_t)done->result / PCC_IO_ALIGN * PCC_IO_ALIGN;

    PCC_ASSERT(done->tag < DEPTH && piece->busy && moved <= piece->length);
    piece->bytes += moved;
    piece->offset += moved;
    piece->length -= moved;
    piece->tries = moved > 0 ? 0 : piece->tries + 1;
    piece->may_wait = piece->may_wait || done->result == -EAGAIN;
    if (transfer->error == 0 && done->result < 0 &&
        (!is_passing(done->result) || piece->tries == TRIES_MAX))
        transfer->error = done->result;
    if (transfer->error == 0 && piece->tries == TRIES_MAX)
        transfer->error = -EIO; /* the end of the file, or a device that never moves */
    if (transfer->error == 0 && piece->length > 0) {
        queue_piece(transfer, piece);
        return;
    }
    piece->busy = false;
    transfer->busy--;
}

/* The kernel did not take what is queued: it never will see it. */
static void drop_queued(struct transfer *transfer, int error)
{
    transfer->busy -= pcc_uring_queued(transfer->ring);
    pcc_uring_unqueue(transfer->ring);
    if (transfer->error == 0)
        transfer->error = error;
}

/* One system call: hands over what is queued and waits for a completion. */
static void enter(struct transfer *transfer)
{
    const uint32_t queued = pcc_uring_queued(transfer->ring);
    const bool under_way = transfer->busy > queued;
    /* A kernel that is short of memory gets no more before it has finished something. */
    const uint32_t submit = under_way && transfer->refusals > 0 ? 0 : queued;
    const int result = pcc_uring_enter(transfer->ring, submit, 1);

    if (result == 0)
        transfer->refusals = 0;
    if (result == 0 || result == -EINTR)
        return;
    transfer->refusals++;
    if ((result == -EAGAIN || result == -EBUSY || result == -ENOMEM) &&
        (under_way || transfer->refusals < TRIES_MAX))
        return;
    /* While the kernel uses the caller's memory we cannot return, and it does not let us wait. */
    PCC_ASSERT(!under_way);
    drop_queued(transfer, result);
}

/* All or -errno, when nothing is under way any more: the caller's memory is the caller's again. */
static int64_t move_all(struct uring_io *self, uint8_t opcode, uint8_t *bytes, uint64_t length,
                        uint64_t offset)
{
    struct transfer transfer = {
        .fd = self->fd, .opcode = opcode, .bytes = bytes, .offset = offset, .length = length};
    struct pcc_uring_done done;

    transfer.ring = take_ring(self);
    cut_pieces(&transfer);
    while (transfer.busy > 0) {
        enter(&transfer);
        while (pcc_uring_take(transfer.ring, &done))
            finish_piece(&transfer, &done);
        cut_pieces(&transfer);
    }
    return_ring(self, transfer.ring);
    return transfer.error == 0 ? (int64_t)length : transfer.error;
}

static int64_t uring_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    /* The cast in which both directions share their code: the kernel only reads from it. */
    return move_all(self_of(io), PCC_URING_WRITE, (uint8_t *)(uintptr_t)bytes, length, offset);
}

static int64_t uring_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    return move_all(self_of(io), PCC_URING_READ, bytes, length, offset);
}

static int64_t uring_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                   uint64_t offset)
{
    return pcc_io_file_write_durable(self_of(io)->fd, bytes, length, offset);
}

static int uring_flush(struct pcc_io *io)
{
    return pcc_io_file_flush(self_of(io)->fd);
}

static void uring_close(struct pcc_io *io)
{
    struct uring_io *self = self_of(io);

    for (uint32_t i = 0; i < self->ring_count; i++)
        pcc_uring_close(&self->rings[i]);
    (void)pthread_cond_destroy(&self->returned);
    (void)pthread_mutex_destroy(&self->lock);
    (void)close(self->fd);
    free(self);
}

static const struct pcc_io_ops uring_ops = {
    .name = "uring",
    .write = uring_write,
    .read = uring_read,
    .write_durable = uring_write_durable,
    .flush = uring_flush,
    .close = uring_close,
};

int pcc_io_uring_start(int fd, uint64_t size_bytes, struct pcc_io **out)
{
    struct uring_io *self = calloc(1, sizeof *self);

    if (!self)
        return -ENOMEM;
    const int result = pcc_uring_open(DEPTH, &self->rings[0]);
    if (result != 0) {
        free(self);
        return result;
    }
    self->ring_count = 1;
    self->idle = 1;
    self->io.ops = &uring_ops;
    self->io.size_bytes = size_bytes;
    self->fd = fd;
    (void)pthread_mutex_init(&self->lock, NULL);
    (void)pthread_cond_init(&self->returned, NULL);
    *out = &self->io;
    return 0;
}
