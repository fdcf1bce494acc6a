/* The session page: its layout, and the two message rings in it. Both sides use this code.
 *
 * A ring has one producer and one consumer. Each side keeps its own index in private memory and
 * only publishes it; the other side's index is read once per call and checked against the capacity,
 * and only a copy of a message is looked at. Nothing blocks or allocates. */
#pragma once

#include "base/pcc_futex.h"
#include "shared/pcc_shared.h"

struct pcc_ring {
    struct pcc_ring_index *index; /* in the page */
    struct pcc_message *messages; /* in the page */
    uint32_t capacity;
    uint32_t own; /* our index: the producer's tail or the consumer's head */
};

struct pcc_page_geometry {
    uint32_t chunk_bytes;
    uint32_t block_bytes;
    uint32_t chunk_capacity;
    uint32_t ring_capacity;
    uint32_t blocks_per_chunk;
    uint32_t page_bytes;
    uint32_t to_client_offset_bytes;
    uint32_t to_daemon_offset_bytes;
    uint32_t checksums_offset_bytes;
};

struct pcc_page_view { /* one side's private view of a mapped page */
    struct pcc_page *page;
    struct pcc_page_geometry geometry;
    struct pcc_ring to_client;
    struct pcc_ring to_daemon;
    uint64_t *checksums; /* [chunk][block] */
};

/* -EINVAL when a number is out of range or the page would pass 4 GiB. */
PCC_MUST_CHECK int pcc_page_plan(uint32_t chunk_bytes, uint32_t block_bytes,
                                 uint32_t chunk_capacity, struct pcc_page_geometry *out);
/* The daemon: writes the header of a fresh, zeroed mapping. */
void pcc_page_make(void *bytes, const struct pcc_page_geometry *geometry, uint64_t session,
                   struct pcc_page_view *out);
/* The client: checks the header of a mapping of length_bytes. -PCC_E_BAD_PEER. */
PCC_MUST_CHECK int pcc_page_accept(void *bytes, uint64_t length_bytes, struct pcc_page_view *out);

/* 0; -ENOBUFS when full; -PCC_E_BAD_PEER when the consumer's index is impossible. */
PCC_MUST_CHECK int pcc_ring_push(struct pcc_ring *ring, const struct pcc_message *message);
/* For the producer: how many messages the consumer has not taken, if its index can be trusted. */
uint32_t pcc_ring_used(const struct pcc_ring *ring);
/* 1 with a message; 0 when empty; -PCC_E_BAD_PEER when the producer's index is impossible. */
PCC_MUST_CHECK int pcc_ring_pop(struct pcc_ring *ring, struct pcc_message *out);

static inline struct pcc_snapshot *pcc_page_snapshot(const struct pcc_page_view *view,
                                                     uint64_t snapshot)
{
    return &view->page->snapshots[snapshot % PCC_SNAPSHOTS];
}

/* The word of a snapshot. Acquire pairs with the other side's moves. */
static inline uint64_t pcc_page_word(const struct pcc_page_view *view, uint64_t snapshot)
{
    return PCC_READ_ACQUIRE(&pcc_page_snapshot(view, snapshot)->word);
}

/* The daemon: a new outcome of the snapshot, with its sequences and its reason (NULL: there is
 * none, as of an outcome that is no end). One writer at a time. */
void pcc_outcome_write(struct pcc_snapshot *entry, uint64_t snapshot, enum pcc_outcome outcome,
                       uint64_t sequence, uint64_t newer, const struct pcc_reason *reason);
/* The client: the outcome and its reason, which is all 0 while there is none. */
enum pcc_outcome pcc_outcome_read(const struct pcc_snapshot *entry, uint64_t snapshot,
                                  struct pcc_reason *reason);

/* A chunk's row of the checksum table. */
static inline uint64_t *pcc_page_checksums(const struct pcc_page_view *view, uint32_t chunk)
{
    return view->checksums + (size_t)chunk * view->geometry.blocks_per_chunk;
}

/* The checksums of an offer. */
static inline uint64_t *pcc_page_offer(const struct pcc_page_view *view, uint32_t row)
{
    return view->checksums +
           ((size_t)view->geometry.chunk_capacity + row) * view->geometry.blocks_per_chunk;
}

static inline struct pcc_device_words *pcc_page_words(const struct pcc_page_view *view,
                                                      uint64_t snapshot, uint32_t device)
{
    return &view->page->devices[snapshot % PCC_SNAPSHOTS][device];
}

static inline struct pcc_request *pcc_page_request(const struct pcc_page_view *view,
                                                   uint64_t snapshot)
{
    return &view->page->requests[snapshot % PCC_SNAPSHOTS];
}

/* A thread of the trainer: says that its process lives, if the daemon has asked. */
static inline void pcc_life_tell(struct pcc_page *page)
{
    /* Acquire and release: the thread runs after the question, and before the answer. */
    const uint32_t asked = PCC_READ_ACQUIRE(&page->life_asked);

    if (asked == PCC_READ(&page->life_told))
        return;
    PCC_WRITE_RELEASE(&page->life_told, asked);
    pcc_bell_ring(&page->daemon_bell);
}

static inline struct pcc_sample *pcc_page_samples(const struct pcc_page_view *view,
                                                  uint64_t snapshot)
{
    return view->page->samples[snapshot % PCC_SNAPSHOTS];
}

static inline uint64_t pcc_word(uint64_t snapshot, unsigned state)
{
    return snapshot << 8 | state;
}

/* Moves the word of `snapshot` from one state to another; true for the side that did it. Release
 * publishes what led here (outcome, freed entry); acquire pairs with the other side's move. */
static inline bool pcc_word_move(struct pcc_snapshot *entry, uint64_t snapshot,
                                 enum pcc_word_state from, enum pcc_word_state to)
{
    uint64_t expected = pcc_word(snapshot, from);

    return atomic_compare_exchange_strong_explicit(&entry->word, &expected, pcc_word(snapshot, to),
                                                   memory_order_acq_rel, memory_order_acquire);
}
