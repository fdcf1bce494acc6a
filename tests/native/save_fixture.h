/* An owner of chunks for tests of the saver: makes payloads from which their sequence is known,
 * hands them over, and counts the saver's answers. */
#pragma once

#include "disk/pcc_load.h"
#include "disk/pcc_save_private.h"
#include "volume_fixture.h"

#define CHUNK 16384u
#define TAGS_MAX 4096u
#define CHUNKS_MAX 32u

struct owner {
    struct memory_io *media;
    struct pcc_volume *volume;
    struct pcc_saver *saver;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    struct pcc_save_result results[TAGS_MAX];
    bool has_ended[TAGS_MAX];
    uint32_t writing[TAGS_MAX], written[TAGS_MAX];
    uint32_t referred[TAGS_MAX], asked[TAGS_MAX]; /* the chunks that were offered, by the answer */
};

struct payload {
    struct pcc_save *save;
    uint64_t tag, sequence, bytes;
    uint32_t chunk_count, handed_over;
    uint8_t *memory;
};

static inline void owner_writing(void *context, uint64_t tag)
{
    struct owner *owner = context;
    (void)pthread_mutex_lock(&owner->lock);
    CHECK(!owner->has_ended[tag]);
    owner->writing[tag]++;
    (void)pthread_mutex_unlock(&owner->lock);
}

static inline void owner_chunk_written(void *context, uint64_t tag, uint32_t index)
{
    struct owner *owner = context;
    (void)pthread_mutex_lock(&owner->lock);
    CHECK(!owner->has_ended[tag] && index % CHUNKS_MAX < CHUNKS_MAX);
    CHECK_EQUAL(owner->written[tag] >> index % CHUNKS_MAX & 1u, 0);
    owner->written[tag] |= 1u << index % CHUNKS_MAX;
    (void)pthread_mutex_unlock(&owner->lock);
}

static inline void owner_offered(void *context, uint64_t tag, uint64_t offset, bool in_base)
{
    struct owner *owner = context;
    uint32_t *answers = in_base ? owner->referred : owner->asked;
    const uint32_t bit = 1u << offset / CHUNK;
    (void)pthread_mutex_lock(&owner->lock);
    CHECK(!owner->has_ended[tag] && offset % CHUNK == 0 && offset / CHUNK < CHUNKS_MAX);
    CHECK_EQUAL((owner->referred[tag] | owner->asked[tag]) & bit, 0);
    answers[tag] |= bit;
    (void)pthread_cond_broadcast(&owner->ended);
    (void)pthread_mutex_unlock(&owner->lock);
}

static inline void owner_ended(void *context, const struct pcc_save_result *result)
{
    struct owner *owner = context;
    (void)pthread_mutex_lock(&owner->lock);
    CHECK(!owner->has_ended[result->tag]);
    owner->has_ended[result->tag] = true;
    owner->results[result->tag] = *result;
    (void)pthread_cond_broadcast(&owner->ended);
    (void)pthread_mutex_unlock(&owner->lock);
}

static const struct pcc_save_events owner_events = {
    .writing = owner_writing,
    .chunk_written = owner_chunk_written,
    .offered = owner_offered,
    .ended = owner_ended,
};

static inline struct owner *owner_kept(struct memory_io *media, uint32_t lanes, uint32_t writers,
                                       const struct pcc_kept *kept)
{
    struct owner *owner = calloc(1, sizeof *owner);
    CHECK(owner);
    (void)pthread_mutex_init(&owner->lock, NULL);
    (void)pthread_cond_init(&owner->ended, NULL);
    owner->media = media;
    owner->volume = opened(owner->media);
    const struct pcc_saver_spec spec = {.lanes = lanes,
                                        .writers_per_lane = writers,
                                        .chunk_bytes = CHUNK,
                                        .events = &owner_events,
                                        .owner = owner,
                                        .kept = kept};
    CHECK_EQUAL(pcc_saver_open(owner->volume, &spec, &owner->saver), 0);
    return owner;
}

static inline struct owner *owner_of(struct memory_io *media, uint32_t lanes, uint32_t writers)
{
    return owner_kept(media, lanes, writers, NULL);
}

static inline struct owner *owner_new(uint32_t slots, uint32_t keep, uint32_t lanes,
                                      uint32_t writers)
{
    return owner_of(formatted(slots, keep), lanes, writers);
}

static inline void owner_free(struct owner *owner)
{
    pcc_saver_close(owner->saver);
    pcc_volume_close(owner->volume);
    memory_free(owner->media);
    (void)pthread_mutex_destroy(&owner->lock);
    (void)pthread_cond_destroy(&owner->ended);
    free(owner);
}

static inline uint32_t in_flight(struct owner *owner)
{
    struct pcc_saver *saver = owner->saver;
    uint32_t count = 0;

    (void)pthread_mutex_lock(&saver->lock);
    for (uint32_t i = 0; i < saver->spec.lanes; i++)
        count += saver->lanes[i].current != NULL;
    (void)pthread_mutex_unlock(&saver->lock);
    return count;
}

static inline uint8_t payload_byte(uint64_t tag, uint64_t offset)
{
    return (uint8_t)(tag * 131 + offset * 7 + (offset >> 9));
}

enum payload_kind { NUMBERED, UNNUMBERED, PARKED };

static inline int payload_begin_as(struct owner *owner, uint64_t tag, uint64_t bytes,
                                   enum payload_kind kind, struct payload *out)
{
    const bool unnumbered = kind == UNNUMBERED;
    const struct pcc_save_request request = {.tag = tag,
                                             .unnumbered = unnumbered,
                                             .parked = kind == PARKED,
                                             .step = (int64_t)tag,
                                             .incarnation = unnumbered ? 0 : 1,
                                             .world_size = unnumbered ? 0 : 1,
                                             .payload_bytes = bytes,
                                             .tree_offset_bytes = bytes / 2,
                                             .tree_bytes = bytes - bytes / 2};
    *out = (struct payload){.tag = tag, .bytes = bytes};
    const int result = pcc_save_begin(owner->saver, &request, &out->save, &out->sequence);
    if (result != 0)
        return result;
    out->chunk_count = (uint32_t)pcc_ceil_div(bytes, CHUNK);
    /* One more than needed, so that a test may hand over too much. */
    out->memory = aligned_alloc(PCC_IO_ALIGN, (out->chunk_count + 1ull) * CHUNK);
    CHECK(out->memory);
    memset(out->memory, 0, (out->chunk_count + 1ull) * CHUNK);
    for (uint64_t i = 0; i < bytes; i++)
        out->memory[i] = payload_byte(tag, i);
    return 0;
}

static inline int payload_begin(struct owner *owner, uint64_t tag, uint64_t bytes,
                                struct payload *out)
{
    return payload_begin_as(owner, tag, bytes, NUMBERED, out);
}

/* Only its checksums. */
static inline int payload_offer(struct payload *payload, uint32_t number)
{
    uint64_t checksums[CHUNK / BLOCK];

    for (uint32_t at = 0; at < CHUNK; at += BLOCK)
        checksums[at / BLOCK] =
            pcc_hash_bytes(payload->memory + (uint64_t)number * CHUNK + at, BLOCK);
    const struct pcc_chunk chunk = {.payload_offset_bytes = (uint64_t)number * CHUNK,
                                    .length_bytes = CHUNK,
                                    .index = UINT32_MAX,
                                    .checksums = checksums};
    return pcc_save_chunk(payload->save, &chunk);
}

static inline int payload_chunk(struct payload *payload, uint32_t number)
{
    const uint64_t offset = (uint64_t)number * CHUNK, left = payload->bytes - offset;
    const uint32_t length = left < CHUNK ? (uint32_t)left : CHUNK;
    uint64_t checksums[CHUNK / BLOCK];

    for (uint32_t at = 0; at < length; at += BLOCK)
        checksums[at / BLOCK] = pcc_hash_bytes(payload->memory + offset + at,
                                               length - at < BLOCK ? length - at : BLOCK);
    const struct pcc_chunk chunk = {
        .bytes = payload->memory + offset,
        .payload_offset_bytes = offset,
        .length_bytes = length,
        .index = (uint32_t)payload->tag * CHUNKS_MAX + number,
        .segment = payload->tag,
        .segment_chunk = number,
        .checksums = (payload->tag + number) % 2 == 0 ? checksums : NULL, /* made by the writer */
    };
    return pcc_save_chunk(payload->save, &chunk);
}

static inline void payload_fill(struct payload *payload)
{
    for (uint32_t i = payload->chunk_count; i > 0; i--) /* any order will do */
        CHECK_EQUAL(payload_chunk(payload, i - 1), 0);
    CHECK_EQUAL(pcc_save_seal(payload->save), 0);
}

static inline struct pcc_save_result owner_wait(struct owner *owner, uint64_t tag)
{
    (void)pthread_mutex_lock(&owner->lock);
    while (!owner->has_ended[tag])
        (void)pthread_cond_wait(&owner->ended, &owner->lock);
    const struct pcc_save_result result = owner->results[tag];
    (void)pthread_mutex_unlock(&owner->lock);
    return result;
}

struct compare {
    uint64_t tag;
    _Atomic uint64_t bytes;
};

static inline int compare_sink(void *context, const void *bytes, uint64_t offset, uint64_t length)
{
    struct compare *compare = context;
    for (uint64_t i = 0; i < length; i++)
        CHECK_EQUAL(((const uint8_t *)bytes)[i], payload_byte(compare->tag, offset + i));
    atomic_fetch_add(&compare->bytes, length);
    return 0;
}

/* Reads a checkpoint back; 0 or the code of the load. Wrong bytes end the program. */
static inline int read_back(struct pcc_volume *volume, uint64_t sequence, uint32_t threads)
{
    struct pcc_load *load;
    int result = pcc_load_open(volume, sequence, &load);
    if (result != 0)
        return result;
    const struct pcc_slot_entry *entry = pcc_load_entry(load);
    struct compare compare = {.tag = (uint64_t)entry->step};
    result =
        pcc_load_stream(load, 0, entry->payload_bytes, 2 * BLOCK, threads, compare_sink, &compare);
    if (result == 0)
        CHECK_EQUAL(compare.bytes, entry->payload_bytes);
    pcc_load_close(load);
    return result;
}
