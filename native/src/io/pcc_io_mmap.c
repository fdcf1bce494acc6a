/* The engine `mmap`: stores to a shared mapping of the file and msync, as the paper's SSD path. For
 * comparison: it copies every byte once more, and a page that is not cached is read before it is
 * overwritten.
 *
 * What its write-back allows, and the crash tests enumerate:
 *  - Until a flush has returned, each page that was stored to may be on the disk or not, in any
 *    order, however long ago the store was; torn within the page; and, when the kernel wrote it out
 *    in the middle of a store, in a state that memory was in for a moment only.
 *  - A flush makes durable what was stored before it began.
 *  - A page that could not be written is reported once, by the next msync of whatever part of the
 *    file, a record's too, and is clean from then on: the flush after that is good and proves
 *    nothing. So a failed flush puts all unflushed saves in doubt, and a failed record stops the
 *    volume (pcc_save_work.c, pcc_commit.c); both already hold for `pwrite`.
 *  - Such a page is new in the cache and old on the disk. Reads are direct, so that what is
 *    recovered comes from the disk; the kernel writes a dirty page out before it reads under it.
 *  - A store whose page cannot be had is -EIO here (pcc_guard.h). It is rare: pages are populated
 *    before the copy, all blocks were allocated with the volume, and reads do not go through the
 *    mapping. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/pcc_guard.h"
#include "base/pcc_map.h"
#include "io/pcc_io_file.h"

struct mapped_io {
    struct pcc_io io; /* first member */
    struct pcc_mapping how;
    int fd;
    uint8_t *bytes;
};

static struct mapped_io *self_of(struct pcc_io *io)
{
    return (struct mapped_io *)io;
}

/* Brings the pages in: twice as fast as fault by fault when they are not cached (1.0 instead of
 * 2.2 s per GiB), and what fails does so without a signal. Kernels before 5.14 say EINVAL; then,
 * and when a page has gone again, the guard is there. */
static int populate(uint8_t *bytes, uint64_t length)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint8_t *start = bytes - (uintptr_t)bytes % page;

    if (madvise(start, (size_t)(bytes - start) + length, MADV_POPULATE_WRITE) == 0)
        return 0;
    return errno == EFAULT || errno == EHWPOISON ? -EIO : 0;
}

static void store(void *io, void *to, const void *from, uint64_t length)
{
    self_of(io)->how.copy(to, from, length);
}

static int64_t mapped_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    const struct mapped_io *self = self_of(io);

    if (!pcc_is_within(offset, length, io->size_bytes))
        return -EFBIG;
    const struct pcc_guarded what = {
        .copy = store, .context = io, .to = self->bytes + offset, .from = bytes, .length = length};
    uint64_t fault;
    const int result = populate(self->bytes + offset, length);
    if (result != 0)
        return result;
    return pcc_guard_copy(&what, &fault) == 0 ? (int64_t)length : -EIO;
}

static int64_t mapped_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    return pcc_io_file_read(self_of(io)->fd, bytes, length, offset);
}

static int64_t mapped_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                    uint64_t offset)
{
    const struct mapped_io *self = self_of(io);
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    const int64_t moved = mapped_write(io, bytes, length, offset);

    if (moved <= 0 || self->how.persists)
        return moved;
    const uint64_t start = offset / page * page;
    return msync(self->bytes + start, offset + length - start, MS_SYNC) == 0 ? moved : -errno;
}

static int mapped_flush(struct pcc_io *io)
{
    const struct mapped_io *self = self_of(io);

    if (self->how.persists)
        return 0;
    return msync(self->bytes, io->size_bytes, MS_SYNC) == 0 ? 0 : -errno;
}

static void mapped_close(struct pcc_io *io)
{
    struct mapped_io *self = self_of(io);

    (void)munmap(self->bytes, io->size_bytes);
    (void)close(self->fd);
    free(self);
}

static const struct pcc_io_ops mapped_ops = {
    .write = mapped_write,
    .read = mapped_read,
    .write_durable = mapped_write_durable,
    .flush = mapped_flush,
    .close = mapped_close,
};

int pcc_mapped_start(int fd, uint64_t size_bytes, const struct pcc_mapping *how,
                     struct pcc_io **out)
{
    struct mapped_io *self;
    const int result = pcc_guard_install();

    if (result != 0)
        return result;
    if (size_bytes == 0)
        return -PCC_E_UNSUPPORTED;
    self = malloc(sizeof *self);
    if (!self)
        return -ENOMEM;
    *self = (struct mapped_io){
        .io = {.ops = &mapped_ops, .size_bytes = size_bytes}, .how = *how, .fd = fd};
    /* Not possible: read-only descriptors (EACCES), files without mappings (ENODEV), no MAP_SYNC
     * (EOPNOTSUPP, EINVAL), no address space left (ENOMEM). */
    self->bytes = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, how->flags, fd, 0);
    if (self->bytes == MAP_FAILED) {
        free(self);
        return -PCC_E_UNSUPPORTED;
    }
    (void)madvise(self->bytes, size_bytes, MADV_DONTFORK);
    *out = &self->io;
    return 0;
}

static void copy_plainly(void *to, const void *from, uint64_t length)
{
    memcpy(to, from, length);
}

int pcc_io_mmap_start(int fd, uint64_t size_bytes, const struct pcc_io_options *options,
                      struct pcc_io **out)
{
    const struct pcc_mapping how = {.copy = copy_plainly, .flags = MAP_SHARED};

    (void)options;
    return pcc_mapped_start(fd, size_bytes, &how, out);
}
