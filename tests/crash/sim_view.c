#include "sim_io.h"

#include <string.h>

static int64_t view_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    struct sim_view *view = (struct sim_view *)io;
    PCC_ASSERT(offset <= io->size_bytes && length <= io->size_bytes - offset);
    uint64_t first = offset / SIM_SECTOR, end = (offset + length) / SIM_SECTOR;
    if (view->bad_sector >= first && view->bad_sector < end)
        return -EIO;
    memcpy(bytes, view->image + offset, length);
    return (int64_t)length;
}

static int64_t view_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    (void)io, (void)bytes, (void)length, (void)offset;
    return -EROFS;
}

static int view_flush(struct pcc_io *io)
{
    (void)io;
    return -EROFS;
}

static void view_close(struct pcc_io *io)
{
    (void)io; /* the image is its owner's */
}

static const struct pcc_io_ops view_ops = {
    .write = view_write,
    .read = view_read,
    .write_durable = view_write,
    .flush = view_flush,
    .close = view_close,
};

void sim_view_open(struct sim_view *view, const uint8_t *image, uint64_t size_bytes,
                   uint64_t bad_sector)
{
    *view = (struct sim_view){.io = {.ops = &view_ops, .size_bytes = size_bytes},
                              .image = image,
                              .bad_sector = bad_sector};
}
