#include "shared/pcc_ring.h"

#include <string.h>

#define REASON_TRIES_MAX 64u /* the daemon may have been killed while it wrote the next state */

int pcc_page_plan(uint32_t chunk_bytes, uint32_t block_bytes, uint32_t chunk_capacity,
                  struct pcc_page_geometry *out)
{
    if (block_bytes < PCC_BLOCK_BYTES_MIN || block_bytes % PCC_BLOCK_BYTES_MIN != 0)
        return -EINVAL;
    if (chunk_bytes == 0 || chunk_bytes % block_bytes != 0 || chunk_bytes % PCC_IO_ALIGN != 0)
        return -EINVAL;
    if (chunk_capacity == 0 || chunk_capacity >= 1u << 24)
        return -EINVAL;

    uint32_t ring_capacity = 4;
    /* A message each for a chunk and a segment; more than the offers, the requests (some of which
     * may be of snapshots that were abandoned), as many that are wanted, and a load's end take. */
    while (ring_capacity <= 2 * chunk_capacity + 4 * PCC_OFFERS + 4 * PCC_SNAPSHOTS)
        ring_capacity *= 2;

    const uint64_t ring_bytes = (uint64_t)ring_capacity * sizeof(struct pcc_message);
    const uint64_t to_client = pcc_align_up(sizeof(struct pcc_page), 64);
    const uint64_t to_daemon = to_client + ring_bytes;
    const uint64_t checksums = to_daemon + ring_bytes;
    const uint64_t blocks = chunk_bytes / block_bytes;
    const uint64_t end = checksums + (chunk_capacity + PCC_OFFERS) * blocks * sizeof(uint64_t);
    /* 64 KiB: the page is a whole number of pages on every machine. */
    const uint64_t page_bytes = pcc_align_up(end, 65536);
    if (page_bytes > UINT32_MAX)
        return -EINVAL;

    *out = (struct pcc_page_geometry){
        .chunk_bytes = chunk_bytes,
        .block_bytes = block_bytes,
        .chunk_capacity = chunk_capacity,
        .ring_capacity = ring_capacity,
        .blocks_per_chunk = (uint32_t)blocks,
        .page_bytes = (uint32_t)page_bytes,
        .to_client_offset_bytes = (uint32_t)to_client,
        .to_daemon_offset_bytes = (uint32_t)to_daemon,
        .checksums_offset_bytes = (uint32_t)checksums,
    };
    return 0;
}

static void view_make(void *bytes, const struct pcc_page_geometry *geometry,
                      struct pcc_page_view *out)
{
    uint8_t *base = bytes;
    struct pcc_page *page = bytes;

    *out = (struct pcc_page_view){
        .page = page,
        .geometry = *geometry,
        .to_client =
            {
                .index = &page->to_client,
                .messages = (void *)(base + geometry->to_client_offset_bytes),
                .capacity = geometry->ring_capacity,
            },
        .to_daemon =
            {
                .index = &page->to_daemon,
                .messages = (void *)(base + geometry->to_daemon_offset_bytes),
                .capacity = geometry->ring_capacity,
            },
        .checksums = (void *)(base + geometry->checksums_offset_bytes),
    };
}

void pcc_page_make(void *bytes, const struct pcc_page_geometry *geometry, uint64_t session,
                   struct pcc_page_view *out)
{
    struct pcc_page *page = bytes;

    page->version = PCC_PAGE_VERSION;
    page->page_bytes = geometry->page_bytes;
    page->chunk_bytes = geometry->chunk_bytes;
    page->block_bytes = geometry->block_bytes;
    page->chunk_capacity = geometry->chunk_capacity;
    page->ring_capacity = geometry->ring_capacity;
    page->session = session;
    page->magic = PCC_PAGE_MAGIC;
    view_make(bytes, geometry, out);
}

int pcc_page_accept(void *bytes, uint64_t length_bytes, struct pcc_page_view *out)
{
    struct pcc_page_geometry geometry;
    const struct pcc_page *page = bytes;

    if (length_bytes < sizeof(*page) || page->magic != PCC_PAGE_MAGIC ||
        page->version != PCC_PAGE_VERSION)
        return -PCC_E_BAD_PEER;
    if (pcc_page_plan(page->chunk_bytes, page->block_bytes, page->chunk_capacity, &geometry) != 0)
        return -PCC_E_BAD_PEER;
    if (geometry.page_bytes != page->page_bytes || geometry.page_bytes > length_bytes ||
        geometry.ring_capacity != page->ring_capacity)
        return -PCC_E_BAD_PEER;
    view_make(bytes, &geometry, out);
    return 0;
}

void pcc_outcome_write(struct pcc_snapshot *entry, uint64_t snapshot, enum pcc_outcome outcome,
                       uint64_t sequence, uint64_t newer, const struct pcc_reason *reason)
{
    const struct pcc_reason why = reason != NULL ? *reason : (struct pcc_reason){0};
    const uint64_t word = pcc_word(snapshot, outcome);

    PCC_WRITE(&entry->explained, 0);
    /* Release: a reader that sees a part of this reason sees that `explained` has changed. */
    PCC_WRITE_RELEASE(&entry->reason,
                      (uint64_t)why.cause << 48 | (uint64_t)why.stage << 32 | (uint32_t)why.error);
    PCC_WRITE_RELEASE(&entry->argument, why.argument);
    PCC_WRITE(&entry->sequence, sequence);
    PCC_WRITE(&entry->newer, newer);
    PCC_WRITE_RELEASE(&entry->explained, word);
    /* Release: pairs with the client's acquire of outcome; the sequences are seen with it. */
    PCC_WRITE_RELEASE(&entry->outcome, word);
}

enum pcc_outcome pcc_outcome_read(const struct pcc_snapshot *entry, uint64_t snapshot,
                                  struct pcc_reason *reason)
{
    uint64_t outcome = 0;

    for (uint32_t i = 0; i < REASON_TRIES_MAX; i++) {
        /* Acquire pairs with the daemon's release: the sequence is seen with it. */
        outcome = PCC_READ_ACQUIRE(&entry->outcome);
        const bool before = PCC_READ_ACQUIRE(&entry->explained) == outcome;
        const uint64_t why = PCC_READ_ACQUIRE(&entry->reason);
        const uint64_t argument = PCC_READ_ACQUIRE(&entry->argument);
        *reason = (struct pcc_reason){.cause = (uint16_t)(why >> 48),
                                      .stage = (uint16_t)(why >> 32),
                                      .error = (int32_t)(uint32_t)why,
                                      .argument = argument};
        /* Relaxed: comes after the acquires above. */
        if (before && PCC_READ(&entry->explained) == outcome)
            break;
        *reason = (struct pcc_reason){0};
    }
    if (outcome >> 8 == snapshot)
        return (enum pcc_outcome)(outcome & 0xff);
    *reason = (struct pcc_reason){0};
    return PCC_OUTCOME_REQUESTED;
}

int pcc_ring_push(struct pcc_ring *ring, const struct pcc_message *message)
{
    /* Acquire pairs with the consumer's release of head: it has copied out what we overwrite. */
    const uint32_t head = PCC_READ_ACQUIRE(&ring->index->head);
    const uint32_t used = ring->own - head;

    if (used > ring->capacity)
        return -PCC_E_BAD_PEER;
    if (used == ring->capacity)
        return -ENOBUFS;
    memcpy(&ring->messages[ring->own & (ring->capacity - 1)], message, sizeof(*message));
    ring->own++;
    /* Release pairs with the consumer's acquire of tail: message and chunk are seen whole. */
    PCC_WRITE_RELEASE(&ring->index->tail, ring->own);
    return 0;
}

uint32_t pcc_ring_used(const struct pcc_ring *ring)
{
    return ring->own - PCC_READ(&ring->index->head);
}

int pcc_ring_pop(struct pcc_ring *ring, struct pcc_message *out)
{
    /* Acquire pairs with the producer's release of tail. */
    const uint32_t tail = PCC_READ_ACQUIRE(&ring->index->tail);
    const uint32_t used = tail - ring->own;

    if (used == 0)
        return 0;
    if (used > ring->capacity)
        return -PCC_E_BAD_PEER;
    memcpy(out, &ring->messages[ring->own & (ring->capacity - 1)], sizeof(*out));
    /* The compiler must not go back to shared memory for what was checked in the copy. */
    atomic_signal_fence(memory_order_seq_cst);
    ring->own++;
    /* Release pairs with the producer's acquire of head: the entry may be overwritten now. */
    PCC_WRITE_RELEASE(&ring->index->head, ring->own);
    return 1;
}
