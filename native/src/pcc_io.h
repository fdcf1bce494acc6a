/* The storage interface: every read, write and flush of a volume goes through one of these, so that
 * faults and crashes are enumerated against the very code that runs in production.
 *
 * Any thread may call any operation at any time; calls block. Offsets, lengths and addresses are
 * multiples of PCC_IO_ALIGN (asserted by the callers below, which also resume short transfers). */
#ifndef PCC_IO_H
#define PCC_IO_H

#include "pcc_base.h"

struct pcc_io;

struct pcc_io_ops {
    const char *name;
    /* Bytes moved (may be short) or -errno. Not durable before flush(). */
    int64_t (*write)(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset);
    int64_t (*read)(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset);
    /* Like write, but these bytes are on stable storage on return (RWF_DSYNC). Says nothing of
     * earlier writes. */
    int64_t (*write_durable)(struct pcc_io *io, const void *bytes, uint64_t length,
                             uint64_t offset);
    /* Writes completed before the call are on stable storage after it. A clean flush proves
     * nothing about a write that failed before; a failed flush is never repeated. */
    int (*flush)(struct pcc_io *io);
    void (*close)(struct pcc_io *io);
};

struct pcc_io { /* engines embed this as their first member */
    const struct pcc_io_ops *ops;
    uint64_t size_bytes;
};

/* Whole transfers: resume short ones and EINTR; 0 or -errno; -EIO when the end of the file is met.
 */
PCC_MUST_CHECK int pcc_io_write_all(struct pcc_io *io, const void *bytes, uint64_t length,
                                    uint64_t offset);
PCC_MUST_CHECK int pcc_io_write_durable_all(struct pcc_io *io, const void *bytes, uint64_t length,
                                            uint64_t offset);
PCC_MUST_CHECK int pcc_io_read_all(struct pcc_io *io, void *bytes, uint64_t length,
                                   uint64_t offset);
PCC_MUST_CHECK int pcc_io_flush(struct pcc_io *io);
void pcc_io_close(struct pcc_io *io); /* accepts NULL */

/* Engine `pwrite`: O_DIRECT through pread/pwrite, RWF_DSYNC, fdatasync. Takes fd (closed by
 * close()). Falls back to buffered I/O only with allow_buffered (file systems without O_DIRECT). */
PCC_MUST_CHECK int pcc_io_pwrite_open(int fd, bool allow_buffered, struct pcc_io **out);

/* Limits what passes to bytes_per_second by a token bucket; gives `inner` to the new one. */
PCC_MUST_CHECK int pcc_io_throttle_open(struct pcc_io *inner, uint64_t bytes_per_second,
                                        struct pcc_io **out);

#endif
