/* A volume on a disk in memory, and checkpoints published into it without a saver. */
#pragma once

#include "disk/pcc_volume.h"
#include "memory_io.h"

#define BLOCK 4096u
#define CAPACITY (256u << 10)

static const uint8_t NO_ID[PCC_UUID_BYTES]; /* of a start */

static inline struct pcc_volume_spec spec_of(uint32_t slots, uint32_t keep)
{
    return (struct pcc_volume_spec){
        .payload_capacity_bytes = CAPACITY,
        .record_stride_bytes = 8192,
        .slot_count = slots,
        .keep = keep,
        .block_bytes = BLOCK,
        .rank = 3,
        .world_size = 1,
        .job = "gpt",
        .next_sequence = 1,
    };
}

static inline struct memory_io *formatted_for(uint32_t uid, uint32_t slots, uint32_t keep)
{
    struct pcc_volume_spec spec = spec_of(slots, keep);
    struct pcc_geometry geometry;

    spec.uid = uid;
    CHECK_EQUAL(pcc_geometry_plan(spec.payload_capacity_bytes, slots, spec.block_bytes,
                                  spec.record_stride_bytes, &geometry),
                0);
    struct memory_io *media = memory_new(geometry.volume_bytes);
    CHECK_EQUAL(pcc_volume_format(&media->io, &spec), 0);
    return media;
}

static inline struct memory_io *formatted(uint32_t slots, uint32_t keep)
{
    return formatted_for(1000, slots, keep);
}

static inline struct pcc_volume *opened(struct memory_io *media)
{
    struct pcc_volume *volume;
    CHECK_EQUAL(pcc_volume_open_io(&media->io, true, &volume), 0);
    return volume;
}

static inline void done_with(struct pcc_volume *volume, struct memory_io *media)
{
    pcc_volume_close(volume);
    memory_free(media);
}

static inline struct pcc_slot_entry entry_of(uint64_t sequence)
{
    return (struct pcc_slot_entry){
        .state = PCC_SLOT_DURABLE,
        .sequence = sequence,
        .step = (int64_t)sequence * 10,
        .payload_bytes = 4096,
        .manifest_bytes = 264,
    };
}

/* Publishes an (empty) checkpoint with the next sequence; the code of publish. */
static inline int publish_next(struct pcc_volume *volume, uint64_t *sequence_out)
{
    uint32_t slot;
    enum pcc_published superseded;
    const int result = pcc_volume_take_slot(volume, &slot);

    if (result != 0)
        return result;
    const struct pcc_slot_entry entry = entry_of(pcc_volume_take_sequence(volume, 0));
    *sequence_out = entry.sequence;
    return pcc_volume_publish(volume, slot, &entry, &superseded, NULL, NULL);
}

static inline uint32_t table_size(struct pcc_volume *volume)
{
    struct pcc_record record;
    uint32_t count = 0;

    pcc_volume_record(volume, &record);
    for (uint32_t slot = 0; slot < record.slot_count; slot++)
        count += record.slots[slot].state == PCC_SLOT_DURABLE;
    return count;
}

static inline bool has(struct pcc_volume *volume, uint64_t sequence)
{
    struct pcc_held held;

    if (pcc_volume_hold(volume, sequence, &held) != 0)
        return false;
    pcc_volume_release(volume, &held);
    return held.entry.sequence == sequence;
}
