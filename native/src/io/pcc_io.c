#include "io/pcc_io.h"

/* After this many attempts in a row without progress a transfer has failed: an interrupted or short
 * transfer is continued, but a device that makes no progress does not hang the caller. */
#define TRIES_WITHOUT_PROGRESS 64u
/* Longer transfers go in pieces: two threads that write 4 MiB at a time are faster than with 16 MiB
 * (bench/core.py), and sessions that write at the same time take turns more often. */
#define PIECE_BYTES (4u << 20)

enum transfer { WRITE, WRITE_DURABLE, READ };

static int64_t move(struct pcc_io *io, enum transfer kind, uint8_t *bytes, uint64_t length,
                    uint64_t offset)
{
    if (kind == READ)
        return io->ops->read(io, bytes, length, offset);
    return (kind == WRITE ? io->ops->write : io->ops->write_durable)(io, bytes, length, offset);
}

static int transfer_all(struct pcc_io *io, enum transfer kind, uint8_t *bytes, uint64_t length,
                        uint64_t offset)
{
    uint32_t tries = 0;

    PCC_ASSERT((uintptr_t)bytes % PCC_IO_ALIGN == 0);
    PCC_ASSERT(length % PCC_IO_ALIGN == 0 && offset % PCC_IO_ALIGN == 0);
    while (length > 0) {
        const uint64_t piece = length < PIECE_BYTES ? length : PIECE_BYTES;
        const int64_t result = move(io, kind, bytes, piece, offset);
        if (result < 0 && result != -EINTR)
            return (int)result;
        PCC_ASSERT(result < 0 || (uint64_t)result <= piece);
        /* A short transfer resumes at the last aligned boundary that it reached. */
        const uint64_t moved = result < 0 ? 0 : (uint64_t)result / PCC_IO_ALIGN * PCC_IO_ALIGN;
        if (moved == 0 && ++tries == TRIES_WITHOUT_PROGRESS)
            return result == -EINTR ? -EINTR : -EIO;
        if (moved > 0)
            tries = 0;
        bytes += moved;
        offset += moved;
        length -= moved;
    }
    return 0;
}

/* The one cast in which the two directions share their code: writes never store through it. */
static uint8_t *unconst(const void *bytes)
{
    return (uint8_t *)(uintptr_t)bytes;
}

int pcc_io_write_all(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    return transfer_all(io, WRITE, unconst(bytes), length, offset);
}

int pcc_io_write_durable_all(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    return transfer_all(io, WRITE_DURABLE, unconst(bytes), length, offset);
}

int pcc_io_read_all(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    return transfer_all(io, READ, bytes, length, offset);
}

int pcc_io_flush(struct pcc_io *io)
{
    return io->ops->flush(io);
}

void pcc_io_close(struct pcc_io *io)
{
    if (io)
        io->ops->close(io);
}
