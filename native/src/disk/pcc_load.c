#include "disk/pcc_load.h"

#include <stdlib.h>
#include <string.h>

#include "base/pcc_thread.h"
#include "io/pcc_pace.h"

#define CHUNK_BYTES_MAX (256u << 20)
/* Ranges closer than this are read in one stream: seeking would cost more than reading the gap. */
#define GAP_BYTES_MAX (4ull << 20)

struct pcc_load {
    struct pcc_volume *volume;
    struct pcc_geometry geometry;
    uint64_t slot_offset_bytes;
    uint64_t base_offset_bytes; /* of the slot that its unchanged blocks lie in */
    struct pcc_held held;
    uint8_t *manifest;
    const uint64_t *checksums;
    const uint64_t *bitmap; /* of those blocks; NULL: all lie in its own slot */
    uint32_t uid;           /* whose volume it is */
};

/* Damage means that data was read and differs from what was written, which is permanent. Data that
 * could not be read may be readable the next time. */
static int as_unreadable(int result)
{
    return result == 0 || result == -ENOMEM ? result : -PCC_E_UNREADABLE;
}

static int read_manifest(struct pcc_load *load)
{
    struct pcc_record record;
    const struct pcc_slot_entry *entry = &load->held.entry;
    const bool has_base = pcc_entry_has_base(entry);
    const uint64_t room = pcc_align_up(entry->manifest_bytes, PCC_IO_ALIGN);
    const uint64_t offset =
        load->slot_offset_bytes + pcc_align_up(entry->payload_bytes, PCC_IO_ALIGN);

    load->manifest = aligned_alloc(PCC_IO_ALIGN, room);
    if (!load->manifest)
        return -ENOMEM;
    int result = pcc_io_read_all(pcc_volume_io(load->volume), load->manifest, room, offset);
    if (result != 0)
        return as_unreadable(result);
    pcc_volume_record(load->volume, &record);
    load->uid = record.uid;
    result = pcc_manifest_accept(load->manifest, &record, load->held.slot, entry,
                                 has_base ? &load->held.base.entry : NULL);
    load->checksums =
        (const uint64_t *)(const void *)(load->manifest + sizeof(struct pcc_manifest_header));
    if (has_base)
        load->bitmap =
            pcc_manifest_bitmap(load->manifest, entry->payload_bytes, load->geometry.block_bytes);
    return result;
}

int pcc_load_open(struct pcc_volume *volume, uint64_t sequence, struct pcc_load **out)
{
    struct pcc_load *load = calloc(1, sizeof *load);

    if (!load)
        return -ENOMEM;
    load->volume = volume;
    load->geometry = pcc_volume_geometry(volume);
    int result = pcc_volume_hold(volume, sequence, &load->held);
    if (result != 0) {
        free(load);
        return result;
    }
    load->slot_offset_bytes = pcc_geometry_slot_offset(&load->geometry, load->held.slot);
    if (pcc_entry_has_base(&load->held.entry))
        load->base_offset_bytes = pcc_geometry_slot_offset(&load->geometry, load->held.base.slot);
    result = read_manifest(load);
    if (result != 0) {
        pcc_load_close(load);
        return result;
    }
    *out = load;
    return 0;
}

void pcc_load_close(struct pcc_load *load)
{
    if (!load)
        return;
    pcc_volume_release(load->volume, &load->held);
    free(load->manifest);
    free(load);
}

const struct pcc_slot_entry *pcc_load_entry(const struct pcc_load *load)
{
    return &load->held.entry;
}

const struct pcc_manifest_header *pcc_load_manifest(const struct pcc_load *load)
{
    return (const struct pcc_manifest_header *)(const void *)load->manifest;
}

uint32_t pcc_load_block_bytes(const struct pcc_load *load)
{
    return load->geometry.block_bytes;
}

uint64_t pcc_load_own_bytes(const struct pcc_load *load)
{
    const uint64_t payload_bytes = load->held.entry.payload_bytes;
    uint64_t own_bytes = 0;
    bool in_base;

    if (load->bitmap == NULL)
        return payload_bytes;
    for (uint64_t at = 0, next; at < payload_bytes; at = next) {
        next =
            pcc_bitmap_run(load->bitmap, load->geometry.block_bytes, at, payload_bytes, &in_base);
        own_bytes += in_base ? 0 : next - at;
    }
    return own_bytes;
}

const uint64_t *pcc_load_checksums(const struct pcc_load *load, uint64_t offset_bytes)
{
    return load->checksums + offset_bytes / load->geometry.block_bytes;
}

uint64_t pcc_load_base_of(const struct pcc_load *load, uint64_t offset_bytes, uint64_t length_bytes)
{
    const uint64_t end_bytes = offset_bytes + length_bytes;
    bool in_base = false;

    if (load->bitmap == NULL || length_bytes == 0 ||
        pcc_bitmap_run(load->bitmap, load->geometry.block_bytes, offset_bytes, end_bytes,
                       &in_base) < end_bytes)
        return 0;
    return in_base ? load->held.entry.base_sequence : 0;
}

/* True when [offset, +length) is made of whole blocks of the payload. */
static bool is_whole_blocks(const struct pcc_load *load, uint64_t offset, uint64_t length)
{
    const uint64_t payload = load->held.entry.payload_bytes;
    const uint64_t block = load->geometry.block_bytes;

    return offset % block == 0 && pcc_is_within(offset, length, payload) &&
           (length % block == 0 || offset + length == payload);
}

int pcc_load_check(const struct pcc_load *load, const void *bytes, uint64_t offset_bytes,
                   uint64_t length_bytes)
{
    const uint32_t block_bytes = load->geometry.block_bytes;

    if (!is_whole_blocks(load, offset_bytes, length_bytes))
        return -EINVAL;
    return pcc_checksums_match(bytes, length_bytes, block_bytes,
                               pcc_load_checksums(load, offset_bytes))
               ? 0
               : -PCC_E_DAMAGED;
}

/* As one read, or piece by piece beside the saves of others (pcc_pace.h). */
static int read_in_turn(const struct pcc_load *load, uint8_t *bytes, uint64_t offset_bytes,
                        uint64_t length_bytes, uint64_t slot_offset_bytes)
{
    int result = 0;

    while (result == 0 && length_bytes > 0) {
        const bool turn = pcc_pace_enter(load->uid);
        const uint64_t piece =
            turn && length_bytes > PCC_PACE_PIECE_BYTES ? PCC_PACE_PIECE_BYTES : length_bytes;
        result = pcc_io_read_all(pcc_volume_io(load->volume), bytes, piece,
                                 slot_offset_bytes + offset_bytes);
        if (turn)
            pcc_pace_leave(load->uid);
        bytes += piece;
        offset_bytes += piece;
        length_bytes -= piece;
    }
    return result;
}

/* Each block from the slot that it lies in. */
static int read_blocks(const struct pcc_load *load, uint8_t *bytes, uint64_t offset_bytes,
                       uint64_t length_bytes)
{
    const uint64_t end_bytes = offset_bytes + length_bytes;
    bool in_base;
    int result = 0;

    if (load->bitmap == NULL)
        return read_in_turn(load, bytes, offset_bytes, length_bytes, load->slot_offset_bytes);
    for (uint64_t at = offset_bytes, next; result == 0 && at < end_bytes; at = next) {
        next = pcc_bitmap_run(load->bitmap, load->geometry.block_bytes, at, end_bytes, &in_base);
        result = read_in_turn(load, bytes + (at - offset_bytes), at, next - at,
                              in_base ? load->base_offset_bytes : load->slot_offset_bytes);
    }
    return result;
}

int pcc_load_read(struct pcc_load *load, void *bytes, uint64_t offset_bytes, uint64_t length_bytes)
{
    if (!is_whole_blocks(load, offset_bytes, length_bytes) || offset_bytes % PCC_IO_ALIGN != 0)
        return -EINVAL;
    return as_unreadable(
        read_blocks(load, bytes, offset_bytes, pcc_align_up(length_bytes, PCC_IO_ALIGN)));
}

int pcc_load_chunk(struct pcc_load *load, void *bytes, uint64_t offset_bytes, uint64_t length_bytes)
{
    const int result = pcc_load_read(load, bytes, offset_bytes, length_bytes);

    return result != 0 ? result : pcc_load_check(load, bytes, offset_bytes, length_bytes);
}

/* -- streaming -- */

struct stream {
    struct pcc_load *load;
    uint64_t first_bytes; /* the wanted range ... */
    uint64_t end_bytes;
    uint32_t chunk_bytes; /* ... and the grid it is read in */
    pcc_load_sink sink;
    void *context;
    const struct pcc_range *ranges; /* what is read in place, where the disk can */
    uint64_t range_count;
    _Atomic uint64_t next_chunk;
    _Atomic int result; /* the first failure stops all threads */
};

static void stream_fail(struct stream *stream, int result)
{
    int expected = 0;

    (void)atomic_compare_exchange_strong_explicit(&stream->result, &expected, result,
                                                  memory_order_relaxed, memory_order_relaxed);
}

/* The memory that the chunk is to lie in, if the disk can read into it; NULL. */
static uint8_t *straight(const struct stream *stream, uint64_t offset, uint64_t length)
{
    uint8_t *place = pcc_ranges_place(stream->ranges, stream->range_count, offset, length);

    return ((uintptr_t)place | length) % PCC_IO_ALIGN == 0 ? place : NULL;
}

static int stream_chunk(struct stream *stream, uint8_t **buffer, uint64_t chunk)
{
    const uint64_t offset = chunk * stream->chunk_bytes;
    const uint64_t length =
        pcc_piece_bytes(stream->load->held.entry.payload_bytes, offset, stream->chunk_bytes);
    uint8_t *place = straight(stream, offset, length);

    if (place != NULL)
        return pcc_load_chunk(stream->load, place, offset, length);
    if (*buffer == NULL && !(*buffer = aligned_alloc(PCC_IO_ALIGN, stream->chunk_bytes)))
        return -ENOMEM;
    const int result = pcc_load_chunk(stream->load, *buffer, offset, length);
    if (result != 0 || stream->sink == NULL)
        return result;
    const uint64_t first = offset > stream->first_bytes ? offset : stream->first_bytes;
    const uint64_t end = offset + length < stream->end_bytes ? offset + length : stream->end_bytes;
    return stream->sink(stream->context, *buffer + (first - offset), first, end - first);
}

static void *stream_run(void *argument)
{
    struct stream *stream = argument;
    uint8_t *buffer = NULL;

    while (PCC_READ(&stream->result) == 0) {
        const uint64_t chunk =
            atomic_fetch_add_explicit(&stream->next_chunk, 1, memory_order_relaxed);
        if (chunk >= pcc_ceil_div(stream->end_bytes, stream->chunk_bytes))
            break;
        const int result = stream_chunk(stream, &buffer, chunk);
        if (result != 0)
            stream_fail(stream, result);
    }
    free(buffer);
    return NULL;
}

static int stream_all(struct stream *stream, uint32_t threads)
{
    const struct pcc_load *load = stream->load;
    const uint32_t chunk_bytes = stream->chunk_bytes;
    const uint64_t length_bytes = stream->end_bytes - stream->first_bytes;

    if (chunk_bytes == 0 || chunk_bytes % PCC_IO_ALIGN != 0 ||
        chunk_bytes % load->geometry.block_bytes != 0 ||
        !pcc_is_within(stream->first_bytes, length_bytes, load->held.entry.payload_bytes))
        return -EINVAL;
    if (length_bytes == 0)
        return 0;
    const uint64_t first = stream->first_bytes / chunk_bytes;
    const uint64_t chunks = pcc_ceil_div(stream->end_bytes, chunk_bytes) - first;
    atomic_init(&stream->next_chunk, first);
    atomic_init(&stream->result, 0);
    pcc_threads_run(chunks < threads ? (uint32_t)chunks : threads, stream_run, stream, "pcc-load");
    return PCC_READ(&stream->result);
}

int pcc_load_stream(struct pcc_load *load, uint64_t offset_bytes, uint64_t length_bytes,
                    uint32_t chunk_bytes, uint32_t threads, pcc_load_sink sink, void *context)
{
    struct stream stream = {.load = load,
                            .first_bytes = offset_bytes,
                            .end_bytes = offset_bytes + length_bytes,
                            .chunk_bytes = chunk_bytes,
                            .sink = sink,
                            .context = context};

    return stream_all(&stream, threads);
}

uint32_t pcc_load_chunk_bytes(const struct pcc_load *load, uint64_t wanted_bytes)
{
    uint64_t unit = load->geometry.block_bytes;

    while (unit % PCC_IO_ALIGN != 0)
        unit += load->geometry.block_bytes;
    const uint64_t bytes = wanted_bytes < CHUNK_BYTES_MAX ? wanted_bytes : CHUNK_BYTES_MAX;
    return (uint32_t)(bytes <= unit ? unit : bytes / unit * unit);
}

/* -- into memory -- */

struct scatter {
    const struct pcc_range *ranges;
    uint64_t count;
};

static int scatter(void *context, const void *bytes, uint64_t offset_bytes, uint64_t length_bytes)
{
    const struct scatter *to = context;

    pcc_ranges_fill(to->ranges, to->count, bytes, offset_bytes, length_bytes);
    return 0;
}

int pcc_load_ranges(struct pcc_load *load, const struct pcc_range *ranges, uint64_t count,
                    uint32_t chunk_bytes, uint32_t threads)
{
    int result = 0;
    uint64_t next;

    for (uint64_t first = 0; result == 0 && first < count; first = next) {
        const uint64_t start_bytes = ranges[first].offset_bytes;
        uint64_t end_bytes = pcc_range_end(&ranges[first]);
        for (next = first + 1;
             next < count && ranges[next].offset_bytes - end_bytes <= GAP_BYTES_MAX; next++)
            end_bytes = pcc_range_end(&ranges[next]);
        struct scatter run = {.ranges = &ranges[first], .count = next - first};
        struct stream stream = {.load = load,
                                .first_bytes = start_bytes,
                                .end_bytes = end_bytes,
                                .chunk_bytes = chunk_bytes,
                                .sink = scatter,
                                .context = &run,
                                .ranges = run.ranges,
                                .range_count = run.count};
        result = stream_all(&stream, threads);
    }
    return result;
}
