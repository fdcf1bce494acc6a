/* Parts of a payload that lie in this process's memory. Lists of them ascend without overlap. */
#pragma once

#include <string.h>

#include "base/pcc_base.h"

struct pcc_range { /* payload [offset, offset+length) lies at `address` */
    uint64_t address;
    uint64_t offset_bytes;
    uint64_t length_bytes;
};

struct pcc_device_range { /* payload [offset, offset+length) is device memory at `address` */
    uint64_t address;
    uint64_t offset_bytes;
    uint64_t length_bytes;
    uint32_t device;
    uint32_t reserved;
};

static inline uint64_t pcc_range_end(const struct pcc_range *range)
{
    return range->offset_bytes + range->length_bytes;
}

/* The index of the first range that ends behind offset_bytes; `count` when none does. The ranges
 * are the first members of structs of stride_bytes. */
static inline uint64_t pcc_range_find(const struct pcc_range *ranges, size_t stride_bytes,
                                      uint64_t count, uint64_t offset_bytes)
{
    uint64_t low = 0, high = count;

    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        const void *range = (const char *)ranges + middle * stride_bytes;
        if (pcc_range_end(range) > offset_bytes)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* What of the range lies in [start, end) of the payload, with which it shares bytes. */
static inline struct pcc_range pcc_range_cut(const struct pcc_range *range, uint64_t start_bytes,
                                             uint64_t end_bytes)
{
    const uint64_t from = range->offset_bytes > start_bytes ? range->offset_bytes : start_bytes;
    const uint64_t to = pcc_range_end(range) < end_bytes ? pcc_range_end(range) : end_bytes;

    return (struct pcc_range){.address = range->address + (from - range->offset_bytes),
                              .offset_bytes = from,
                              .length_bytes = to - from};
}

/* Where payload [offset, +length) is to lie, if one range wants all of it; NULL. */
static inline void *pcc_ranges_place(const struct pcc_range *ranges, uint64_t count,
                                     uint64_t offset_bytes, uint64_t length_bytes)
{
    const uint64_t i = pcc_range_find(ranges, sizeof *ranges, count, offset_bytes);

    if (i == count || ranges[i].offset_bytes > offset_bytes ||
        pcc_range_end(&ranges[i]) - offset_bytes < length_bytes)
        return NULL;
    return (void *)(uintptr_t)(ranges[i].address + (offset_bytes - ranges[i].offset_bytes));
}

/* Copies payload [offset, +length), which is at `bytes`, to those of the ranges that want it. */
static inline void pcc_ranges_fill(const struct pcc_range *ranges, uint64_t count,
                                   const void *bytes, uint64_t offset_bytes, uint64_t length_bytes)
{
    const uint64_t end_bytes = offset_bytes + length_bytes;

    for (uint64_t i = pcc_range_find(ranges, sizeof *ranges, count, offset_bytes);
         i < count && ranges[i].offset_bytes < end_bytes; i++) {
        const struct pcc_range part = pcc_range_cut(&ranges[i], offset_bytes, end_bytes);
        memcpy((void *)(uintptr_t)part.address,
               (const uint8_t *)bytes + (part.offset_bytes - offset_bytes), part.length_bytes);
    }
}
