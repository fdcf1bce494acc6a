#include "repair.h"
#include "disk/pcc_volume.h"

#include <string.h>

#define WRITES_MAX 8u /* two replicas of two records at most, each in one write */

/* The image with the records that were written on top of it: the first `shown` of them, and half of
 * the next one. */
struct overlay {
    struct pcc_io io; /* first member */
    const uint8_t *image;
    uint32_t count, shown;
    uint64_t offsets[WRITES_MAX];
    uint8_t written[WRITES_MAX][PCC_RECORD_BYTES];
};

static int64_t overlay_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    const struct overlay *self = (const struct overlay *)io;
    PCC_ASSERT(length == PCC_RECORD_BYTES && offset % length == 0); /* records only */
    memcpy(bytes, self->image + offset, length);
    for (uint32_t i = 0; i < self->count && i <= self->shown; i++)
        if (self->offsets[i] == offset)
            memcpy(bytes, self->written[i], i < self->shown ? length : length / 2);
    return (int64_t)length;
}

static int64_t overlay_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    (void)io, (void)bytes, (void)length, (void)offset;
    return -EROFS; /* an opening has nothing to write but records */
}

static int64_t overlay_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                     uint64_t offset)
{
    struct overlay *self = (struct overlay *)io;
    PCC_ASSERT(length == PCC_RECORD_BYTES && self->count < WRITES_MAX);
    memcpy(self->written[self->count], bytes, length);
    self->offsets[self->count++] = offset;
    self->shown = self->count;
    return (int64_t)length;
}

static int overlay_flush(struct pcc_io *io)
{
    (void)io;
    return 0;
}

static void overlay_close(struct pcc_io *io)
{
    (void)io;
}

static const struct pcc_io_ops overlay_ops = {
    .write = overlay_write,
    .read = overlay_read,
    .write_durable = overlay_write_durable,
    .flush = overlay_flush,
    .close = overlay_close,
};

uint64_t repair_hash(const uint8_t *image, const struct pcc_geometry *geometry)
{
    uint64_t hash = 0;
    for (uint32_t generation = 0; generation < PCC_GENERATIONS; generation++)
        for (uint32_t replica = 0; replica < PCC_REPLICAS; replica++)
            hash = hash * 0x9e3779b97f4a7c15ull +
                   pcc_hash_bytes(image + pcc_geometry_record_offset(geometry, generation, replica),
                                  PCC_RECORD_BYTES);
    return hash;
}

static bool open_record(struct overlay *overlay, bool writable, struct pcc_record *record,
                        struct pcc_volume_health *health)
{
    struct pcc_volume *volume;
    if (pcc_volume_open_io(&overlay->io, writable, &volume) != 0)
        return false;
    pcc_volume_record(volume, record);
    *health = pcc_volume_health(volume);
    pcc_volume_close(volume);
    return true;
}

const char *repair_judge(const uint8_t *image, uint64_t size_bytes, bool record_failed)
{
    struct overlay overlay = {.io = {.ops = &overlay_ops, .size_bytes = size_bytes},
                              .image = image};
    struct pcc_record before, opened, after;
    struct pcc_volume_health health;
    if (!open_record(&overlay, false, &before, &health))
        return "a crashed volume cannot be read";
    if (before.record_lost && !record_failed)
        return "a crash looks like a lost record";
    if (!open_record(&overlay, true, &opened, &health))
        return "a crashed volume does not open for writing";
    if (opened.boot_epoch != before.boot_epoch + 1 || opened.next_sequence != before.next_sequence)
        return "an opening is not told from the one before, or takes sequences back";
    for (overlay.shown = 0; overlay.shown <= overlay.count; overlay.shown++) {
        if (!open_record(&overlay, false, &after, &health))
            return "an opening that is cut off leaves no record";
        if (memcmp(before.slots, after.slots, sizeof before.slots) != 0)
            return "an opening that is cut off changes the table";
    }
    if (health.valid_replicas != PCC_REPLICAS || health.damaged_records != 0)
        return "an opening leaves a record with one replica";
    return NULL;
}
