/* The hand-made client: it maps the page, and the test writes any value into it. */
#pragma once

#include "tenant_fixture.h"

#define PAYLOAD (4 * CHUNK - 1000u) /* four chunks, the last one short */

static inline void say(struct fixture *f, const struct pcc_message *message)
{
    CHECK(pcc_ring_push(&f->page.to_daemon, message) == 0);
}

static inline void ring(struct fixture *f)
{
    pcc_bell_ring(&f->page.page->daemon_bell);
}

static inline void word_set(struct fixture *f, uint64_t snapshot, enum pcc_word_state state)
{
    atomic_store(&pcc_page_snapshot(&f->page, snapshot)->word, pcc_word(snapshot, state));
}

static inline uint64_t word_get(struct fixture *f, uint64_t snapshot)
{
    return atomic_load(&pcc_page_snapshot(&f->page, snapshot)->word);
}

/* An admitted snapshot and its four chunks. */
static inline void admitted(struct fixture *f, uint64_t snapshot, uint32_t chunks[4])
{
    struct pcc_message message;

    word_set(f, snapshot, PCC_WORD_REQUESTED);
    CHECK(begin_wait(f, snapshot, PAYLOAD) > 0);
    CHECK(word_get(f, snapshot) == pcc_word(snapshot, PCC_WORD_COPYING));
    for (uint32_t i = 0; i < 4; i++) {
        CHECK(pcc_ring_pop(&f->page.to_client, &message) == 1);
        CHECK(message.kind == PCC_MSG_FREE);
        chunks[i] = message.chunk;
    }
    CHECK(pcc_ring_pop(&f->page.to_client, &message) == 0); /* never more than is needed */
}

/* An honest FULL message for part `part`, with the checksums of a new chunk, which holds zeros. */
static inline struct pcc_message full(struct fixture *f, uint64_t snapshot, uint32_t chunk,
                                      uint32_t part)
{
    const uint32_t length = part < 3 ? CHUNK : PAYLOAD - 3 * CHUNK;
    static uint8_t zeros[BLOCK];
    uint64_t *checksums = f->page.checksums + (size_t)chunk * (CHUNK / BLOCK);

    for (uint32_t at = 0; at < length; at += BLOCK)
        checksums[at / BLOCK] = pcc_hash_bytes(zeros, length - at < BLOCK ? length - at : BLOCK);
    return (struct pcc_message){.kind = PCC_MSG_FULL,
                                .chunk = chunk,
                                .id = snapshot,
                                .offset_bytes = (uint64_t)part * CHUNK,
                                .length_bytes = length};
}

static inline void say_all(struct fixture *f, uint64_t snapshot, const uint32_t chunks[4])
{
    for (uint32_t i = 0; i < 4; i++) {
        const struct pcc_message message = full(f, snapshot, chunks[(i + 1) % 4], (i + 1) % 4);
        say(f, &message);
    }
}
