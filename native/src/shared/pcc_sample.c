#include "shared/pcc_sample.h"

#include <string.h>
#include <sys/random.h>

struct stretch { /* of ranges on one GPU, side by side in the payload */
    const struct pcc_device_range *ranges;
    uint64_t count;
};

struct place { /* of a sample */
    const struct pcc_device_range *range;
    uint64_t offset_bytes;
    bool at_end; /* of the copy that has this byte */
};

bool pcc_samples_can_be_of(const struct pcc_device_range *ranges, uint64_t count)
{
    uint64_t end = 0;

    for (uint64_t i = 0; i < count; i++) {
        if (ranges[i].length_bytes == 0 || ranges[i].offset_bytes < end ||
            __builtin_add_overflow(ranges[i].offset_bytes, ranges[i].length_bytes, &end))
            return false;
    }
    return true;
}

/* The stretch of `ranges` that begins with the first of them. */
static struct stretch stretch_first(const struct pcc_device_range *ranges, uint64_t count)
{
    struct stretch stretch = {ranges, 1};

    while (stretch.count < count && ranges[stretch.count].device == ranges->device)
        stretch.count++;
    return stretch;
}

static uint32_t stretches_count(const struct pcc_device_range *ranges, uint64_t count)
{
    uint32_t stretches = 0;

    for (uint64_t at = 0; at < count; at += stretch_first(ranges + at, count - at).count)
        stretches++;
    return stretches;
}

/* The last range that begins at `offset_bytes` or before. */
static const struct pcc_device_range *range_at(const struct stretch *stretch, uint64_t offset_bytes)
{
    uint64_t low = 0, high = stretch->count;

    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (stretch->ranges[middle].offset_bytes <= offset_bytes)
            low = middle;
        else
            high = middle;
    }
    return &stretch->ranges[low];
}

/* The sample of this number in a stretch. Copies that begin too early or end too late are wrong
 * where the first copy begins or ends, or at the very end. Then in turn the end of a range, any
 * byte of the next one, where a copy ends, and any byte: copies go wrong at their ends, and a small
 * range would hardly ever be met by chance. */
static struct place place_choose(const struct stretch *stretch, uint64_t number, uint64_t turn,
                                 uint64_t first, uint64_t dice)
{
    const struct pcc_device_range *start = stretch->ranges, *last = start + stretch->count - 1;
    const uint64_t end = last->offset_bytes + last->length_bytes;

    if (number == 0 || number == 2)
        return (struct place){start, start->offset_bytes, number == 2};
    if (number == 1)
        return (struct place){last, end - 1, true};
    turn += number;
    const struct pcc_device_range *range =
        turn % 4 < 2 ? &start[(first + turn / 4 * 2 + turn % 4) % stretch->count]
                     : range_at(stretch, start->offset_bytes + dice % (end - start->offset_bytes));
    if (turn % 4 == 0)
        return (struct place){range, range->offset_bytes + range->length_bytes - 1, true};
    return (struct place){range, range->offset_bytes + (dice >> 1) % range->length_bytes,
                          turn % 4 == 2};
}

/* Of one chunk, since a copy goes into one. */
static struct pcc_range sample_prepare(const struct place *place, uint64_t dice,
                                       uint64_t chunk_bytes, struct pcc_sample *out)
{
    const struct pcc_range range = {place->range->address, place->range->offset_bytes,
                                    place->range->length_bytes};
    const uint64_t chunk = place->offset_bytes / chunk_bytes * chunk_bytes;
    struct pcc_range part = pcc_range_cut(&range, chunk, chunk + chunk_bytes);

    if (!place->at_end)
        part = pcc_range_cut(&part, place->offset_bytes, place->offset_bytes + PCC_SAMPLE_BYTES);
    else if (part.length_bytes > PCC_SAMPLE_BYTES)
        part = pcc_range_cut(&part, pcc_range_end(&part) - PCC_SAMPLE_BYTES, UINT64_MAX);
    out->offset_bytes = part.offset_bytes;
    out->length_bytes = (uint32_t)part.length_bytes;
    /* A copy that does not come shall not seem to have come. */
    for (size_t i = 0; i < sizeof(out->bytes); i++)
        out->bytes[i] = (uint8_t)(dice >> i % 8 * 8) ^ (uint8_t)(i * 0x9d);
    return part;
}

void pcc_samples_choose(const struct pcc_page_view *view, uint64_t snapshot, uint32_t device,
                        const struct pcc_device_range *ranges, uint64_t count,
                        struct pcc_range parts_out[PCC_SAMPLES])
{
    struct pcc_sample *samples = pcc_page_samples(view, snapshot);
    const uint32_t stretches = stretches_count(ranges, count);
    uint64_t dice[PCC_SAMPLES];
    struct stretch stretch = {0};

    memset(parts_out, 0, PCC_SAMPLES * sizeof(*parts_out));
    if (getrandom(dice, sizeof(dice), 0) != (ssize_t)sizeof(dice))
        return;
    /* The stretches share the samples. The next snapshot with this entry has them alike. */
    for (uint64_t at = 0, number = 0; at < count; at += stretch.count, number++) {
        stretch = stretch_first(ranges + at, count - at);
        if (ranges[at].device != device)
            continue;
        for (uint64_t i = number; i < PCC_SAMPLES; i += stretches) {
            const struct place place =
                place_choose(&stretch, i / stretches, snapshot, dice[0], dice[i]);
            parts_out[i] = sample_prepare(&place, dice[i], view->geometry.chunk_bytes, &samples[i]);
        }
    }
}

bool pcc_samples_agree(const struct pcc_page_view *view, uint64_t snapshot, const uint8_t *chunk,
                       uint64_t offset_bytes, uint64_t length_bytes)
{
    const struct pcc_sample *samples = pcc_page_samples(view, snapshot);

    for (uint32_t i = 0; i < PCC_SAMPLES; i++) {
        const struct pcc_sample sample = samples[i]; /* once: the other side may change it */
        atomic_signal_fence(memory_order_seq_cst);
        if (sample.length_bytes == 0 || sample.length_bytes > PCC_SAMPLE_BYTES ||
            sample.offset_bytes < offset_bytes ||
            !pcc_is_within(sample.offset_bytes - offset_bytes, sample.length_bytes, length_bytes))
            continue;
        if (memcmp(chunk + (sample.offset_bytes - offset_bytes), sample.bytes,
                   sample.length_bytes) != 0)
            return false;
    }
    return true;
}
