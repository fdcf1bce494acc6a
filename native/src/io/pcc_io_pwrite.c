/* Files opened for direct I/O: what a file must be, and the engine `pwrite`. */
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "io/pcc_io_file.h"

#ifndef BTRFS_SUPER_MAGIC
#define BTRFS_SUPER_MAGIC 0x9123683E
#endif
#define CIFS_MAGIC 0xFF534D42u
#define SMB2_MAGIC 0xFE534D42u
#define ZFS_MAGIC 0x2FC12FC1u
#define CEPH_MAGIC 0x00C36400u

struct pwrite_io {
    struct pcc_io io; /* first member */
    int fd;
};

static int fd_of(struct pcc_io *io)
{
    return ((struct pwrite_io *)io)->fd;
}

int64_t pcc_io_file_read(int fd, void *bytes, uint64_t length, uint64_t offset)
{
    const ssize_t moved = pread(fd, bytes, length, (off_t)offset);
    return moved < 0 ? -errno : moved;
}

static int64_t pwrite_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    const ssize_t moved = pwrite(fd_of(io), bytes, length, (off_t)offset);
    return moved < 0 ? -errno : moved;
}

static int64_t pwrite_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    return pcc_io_file_read(fd_of(io), bytes, length, offset);
}

static int64_t pwrite_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                    uint64_t offset)
{
    const int fd = fd_of(io);
    const struct iovec vector = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = length};
    ssize_t moved = pwritev2(fd, &vector, 1, (off_t)offset, RWF_DSYNC);

    if (moved >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS))
        return moved < 0 ? -errno : moved;
    /* Kernels without the flag: the same promise in two calls. */
    moved = pwrite(fd, bytes, length, (off_t)offset);
    if (moved < 0 || fdatasync(fd) != 0)
        return -errno;
    return moved;
}

static int pwrite_flush(struct pcc_io *io)
{
    const int fd = fd_of(io);
    return fdatasync(fd) == 0 ? 0 : -errno;
}

static void pwrite_close(struct pcc_io *io)
{
    (void)close(fd_of(io));
    free(io);
}

static const struct pcc_io_ops pwrite_ops = {
    .write = pwrite_write,
    .read = pwrite_read,
    .write_durable = pwrite_write_durable,
    .flush = pwrite_flush,
    .close = pwrite_close,
};

/* Memory, other machines' disks and copy-on-write files do not keep what the format builds on:
 * durable after a flush, and overwriting in place. */
static bool file_system_is_suitable(int fd)
{
    struct statfs system;

    if (fstatfs(fd, &system) != 0)
        return false;
    switch ((uint32_t)system.f_type) {
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
    case NFS_SUPER_MAGIC:
    case CIFS_MAGIC:
    case SMB2_MAGIC:
    case CEPH_MAGIC:
    case (uint32_t)BTRFS_SUPER_MAGIC:
    case ZFS_MAGIC:
        return false;
    default:
        return true;
    }
}

/* False when the kernel says that direct I/O needs more than our alignment or is not possible. */
static bool alignment_is_enough(int fd)
{
#ifdef STATX_DIOALIGN
    struct statx status;

    memset(&status, 0, sizeof status);
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
        (status.stx_mask & STATX_DIOALIGN) != 0)
        return status.stx_dio_offset_align != 0 && status.stx_dio_offset_align <= PCC_IO_ALIGN &&
               status.stx_dio_mem_align <= PCC_IO_ALIGN;
#else
    (void)fd;
#endif
    return true; /* older kernels do not say; 4 KiB has always been enough there */
}

static int set_direct(int fd, bool allow_buffered)
{
    const int flags = fcntl(fd, F_GETFL);

    if (flags < 0)
        return -errno;
    /* Reading is harmless wherever the file lies: a copy on another machine's disk can be read. */
    if ((flags & O_ACCMODE) == O_RDONLY)
        allow_buffered = true;
    if (!allow_buffered && !file_system_is_suitable(fd))
        return -PCC_E_UNSUPPORTED;
    if (alignment_is_enough(fd) && fcntl(fd, F_SETFL, flags | O_DIRECT) == 0)
        return 0;
    return allow_buffered ? 0 : -PCC_E_UNSUPPORTED;
}

int pcc_io_file_prepare(int fd, bool allow_buffered, uint64_t *size_bytes_out)
{
    struct stat status;

    if (fstat(fd, &status) != 0)
        return -errno;
    if (!S_ISREG(status.st_mode))
        return -PCC_E_NOT_A_VOLUME;
    const int result = set_direct(fd, allow_buffered);
    if (result == 0)
        *size_bytes_out = (uint64_t)status.st_size;
    return result;
}

int pcc_io_pwrite_start(int fd, uint64_t size_bytes, const struct pcc_io_options *options,
                        struct pcc_io **out)
{
    struct pwrite_io *self = calloc(1, sizeof *self);

    (void)options;
    if (!self)
        return -ENOMEM;
    self->io.ops = &pwrite_ops;
    self->io.size_bytes = size_bytes;
    self->fd = fd;
    *out = &self->io;
    return 0;
}
