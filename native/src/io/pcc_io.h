/* The storage interface: every read, write and flush of a volume goes through one of these, so that
 * faults and crashes are enumerated against the very code that runs in production.
 *
 * Any thread may call any operation at any time; calls block. Offsets, lengths and addresses are
 * multiples of PCC_IO_ALIGN (asserted by the callers below, which also resume short transfers). */
#pragma once

#include "base/pcc_base.h"

struct pcc_io;

struct pcc_io_ops {
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
    const char *name; /* of the engine; NULL unless pcc_io_open opened it */
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

/* -- engines on files -- */

enum pcc_io_engine {
    PCC_IO_PWRITE, /* O_DIRECT by pread and pwrite: everywhere, and what the others fall back to */
    PCC_IO_MMAP,   /* stores to a shared mapping and msync: the paper's SSD path */
    PCC_IO_PMEM,   /* non-temporal stores and a fence on a DAX mapping: its PMEM path */
    PCC_IO_ENGINES,
};

/* One of the engines, in words for users. */
struct pcc_io_words {
    const char *name;
    const char *how;     /* what `name` does: "writes past the page cache" */
    const char *refusal; /* why a file got pwrite instead */
};
const struct pcc_io_words *pcc_io_words_of(enum pcc_io_engine engine);
PCC_MUST_CHECK int pcc_io_engine_named(const char *name, enum pcc_io_engine *out); /* -EINVAL */

struct pcc_io_options { /* zeroed: pwrite on a file system that is fit for volumes */
    enum pcc_io_engine engine;
    bool strict;         /* -PCC_E_UNSUPPORTED, instead of pwrite, where it cannot be had */
    bool allow_buffered; /* file systems without O_DIRECT, or not fit for volumes */
    bool pmem_anywhere;  /* pmem without DAX: stores and msync, so that it can be tested */
};

/* The wanted engine or, where the kernel, the container or the file system refuses it, pwrite:
 * (*out)->name says which. Without a limit until pcc_io_limit sets one. Takes fd, on failure
 * too. */
PCC_MUST_CHECK int pcc_io_open(int fd, const struct pcc_io_options *options, struct pcc_io **out);

/* Limits what passes to bytes_per_second (0: no limit) by a token bucket; gives `inner` to the new
 * one, on failure too. */
PCC_MUST_CHECK int pcc_io_throttle_open(struct pcc_io *inner, uint64_t bytes_per_second,
                                        struct pcc_io **out);
/* Another limit, at once: for transfers that wait, too. Only for what pcc_io_open or
 * pcc_io_throttle_open gave. Does not wait. */
void pcc_io_limit(struct pcc_io *io, uint64_t bytes_per_second);
uint64_t pcc_io_limit_of(struct pcc_io *io);
