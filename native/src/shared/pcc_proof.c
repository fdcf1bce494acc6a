#include "shared/pcc_proof.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define PLAIN_BYTES 8u

struct dice { /* the kernel's random numbers, some at a time */
    uint64_t numbers[64];
    uint32_t left;
    bool failed;
};

static uint64_t below(struct dice *dice, uint64_t limit)
{
    if (dice->left == 0) {
        dice->failed |=
            getrandom(dice->numbers, sizeof(dice->numbers), 0) != (ssize_t)sizeof(dice->numbers);
        dice->left = sizeof(dice->numbers) / sizeof(*dice->numbers);
    }
    return dice->numbers[--dice->left] % limit;
}

/* More of the place's memory is read: in the end each byte was as likely to be chosen. */
static void add(struct pcc_proof_place *place, struct dice *dice, uint32_t allocation,
                uint64_t offset_bytes, uint64_t length_bytes)
{
    place->read_bytes += length_bytes;
    if (below(dice, place->read_bytes) >= length_bytes)
        return;
    const uint64_t room = length_bytes > PCC_PROOF_BYTES ? length_bytes - PCC_PROOF_BYTES : 0;
    const uint64_t into = below(dice, length_bytes);
    place->allocation = allocation;
    place->offset_bytes = offset_bytes + (into < room ? into : room);
    place->length_bytes = (uint32_t)(length_bytes - room);
}

/* The first place of each allocation, and how many there are. */
static uint32_t places_count(const struct pcc_exposure_view *view, uint32_t *first)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < view->head.allocation_count; i++) {
        first[i] = count;
        count += view->allocations[i].pieces > 0 ? view->allocations[i].pieces : 1;
    }
    return count;
}

static void range_add(const struct pcc_exposure_view *view, const struct pcc_exposed_range *range,
                      struct pcc_proof_place *places, struct dice *dice)
{
    const struct pcc_exposed_allocation *of = &view->allocations[range->allocation];
    const uint64_t piece_bytes = of->length_bytes / (of->pieces > 0 ? of->pieces : 1);
    const uint64_t end = range->allocation_offset_bytes + range->length_bytes;

    for (uint64_t at = range->allocation_offset_bytes, next; at < end; at = next) {
        next = (at / piece_bytes + 1) * piece_bytes;
        if (next > end)
            next = end;
        add(&places[at / piece_bytes], dice, range->allocation, at, next - at);
    }
}

int pcc_proof_choose(const struct pcc_exposure_view *view, uint32_t device, const bool *known,
                     struct pcc_proof_place **out, uint32_t *count_out)
{
    struct dice dice = {0};
    uint32_t *first = calloc(view->head.allocation_count, sizeof(*first));
    struct pcc_proof_place *places =
        first != NULL ? calloc(places_count(view, first), sizeof(*places)) : NULL;
    uint32_t count = 0;

    if (places == NULL) {
        free(first);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < view->head.range_count + view->head.replica_count; i++) {
        const struct pcc_exposed_range *range = i < view->head.range_count
                                                    ? &view->ranges[i]
                                                    : &view->replica[i - view->head.range_count];
        if (view->allocations[range->allocation].device == device && !known[range->allocation])
            range_add(view, range, &places[first[range->allocation]], &dice);
    }
    const uint32_t all = places_count(view, first);
    for (uint32_t i = 0; i < all; i++)
        if (places[i].read_bytes > 0)
            places[count++] = places[i];
    free(first);
    if (dice.failed) {
        free(places);
        return -EIO;
    }
    *out = places;
    *count_out = count;
    return 0;
}

bool pcc_proof_is_plain(const uint8_t *block, uint32_t length_bytes)
{
    return length_bytes <= PLAIN_BYTES ||
           memcmp(block, block + PLAIN_BYTES, length_bytes - PLAIN_BYTES) == 0;
}
