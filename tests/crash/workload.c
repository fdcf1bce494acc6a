#include "workload.h"

#include <stdlib.h>
#include <string.h>

static void on_writing(void *owner, uint64_t tag)
{
    (void)owner, (void)tag;
}

static struct live *live_of(struct workload *workload, uint64_t tag)
{
    for (uint32_t i = 0; i < WORKLOAD_LANES_MAX; i++)
        if (workload->lives[i].save && workload->lives[i].tag == tag)
            return &workload->lives[i];
    sim_breach(workload->sim, "an event for a save that is not in flight");
    return NULL;
}

static void on_chunk_written(void *owner, uint64_t tag, uint32_t index)
{
    struct workload *workload = owner;
    struct live *live = live_of(workload, tag);
    if (!live)
        return;
    if (index >= live->chunk_count || !(live->handed >> index & 1))
        sim_breach(workload->sim, "a chunk was written that nobody handed over");
    live->written |= 1u << index;
    /* Some owners have something else for it at once. */
    if (workload->spec.reuse_one_in && rng_chance(&workload->rng, workload->spec.reuse_one_in))
        workload_uncache_chunk(workload, live, index);
}

static void on_offered(void *owner, uint64_t tag, uint64_t offset, bool in_base)
{
    struct workload *workload = owner;
    struct live *live = live_of(workload, tag);
    if (!live)
        return;
    const uint32_t bit = 1u << offset / workload->spec.chunk_bytes;
    if ((live->offered & bit) == 0) {
        sim_breach(workload->sim, "an answer to what nobody offered");
        return;
    }
    live->offered &= ~bit;
    if (in_base) {
        live->referred |= bit;
        workload->count.referred++;
    } else {
        live->asked |= bit;
        live->handed &= ~bit;
    }
}

/* An end must agree with what was acknowledged; memory is the owner's again. */
static void on_ended(void *owner, const struct pcc_save_result *result)
{
    struct workload *workload = owner;
    struct sim *sim = workload->sim;
    struct live *live = live_of(workload, result->tag);
    if (!live)
        return;
    struct oracle_save *save = &workload->oracle->saves[live->tag];
    struct pcc_record record;
    bool acknowledged = sim->acknowledged[result->sequence];
    if (result->sequence != save->sequence)
        sim_breach(sim, "a save ended with another one's sequence");
    switch (result->end) {
    case PCC_SAVE_DURABLE:
        workload->count.durable++;
        if (!acknowledged || !live->sealed)
            sim_breach(sim, "a save ended durable without an acknowledgement");
        pcc_volume_record(workload->volume, &record);
        workload->count.based += record.slots[result->slot].base_sequence != 0;
        break;
    case PCC_SAVE_SUPERSEDED:
        workload->count.superseded++;
        if (sim->top_ack <= result->sequence)
            sim_breach(sim, "a save was superseded by nothing newer");
        break;
    default:
        workload->count.failed++;
        if (acknowledged)
            sim_breach(sim, "a save failed after it had been acknowledged");
        if (result->error >= 0 || result->stage == PCC_STAGE_NONE)
            sim_breach(sim, "a save failed without saying why");
        if (!live->aborted && !workload->faulty)
            sim_breach(sim, "a save failed on a disk without faults");
    }
    workload->count.rehomed += result->rehomed;
    save->ended = true;
    save->result = *result;
    memset(live->memory, 0xee, live->chunk_count * (size_t)workload->spec.chunk_bytes);
    free(live->memory);
    *live = (struct live){0};
}

static const struct pcc_save_events events = {.writing = on_writing,
                                              .chunk_written = on_chunk_written,
                                              .offered = on_offered,
                                              .ended = on_ended};

struct workload *workload_new(const struct workload_spec *spec, uint64_t seed)
{
    struct workload *workload = calloc(1, sizeof *workload);
    PCC_ASSERT(workload && spec->slots > spec->keep);
    workload->spec = *spec;
    workload->rng = rng_from(seed, 0x30ad);
    workload->oracle = oracle_new();
    workload->oracle->frozen_bytes = (uint64_t)spec->frozen_pages * PCC_IO_ALIGN;
    struct pcc_geometry geometry;
    int result = pcc_geometry_plan((uint64_t)spec->payload_pages_max * PCC_IO_ALIGN, spec->slots,
                                   spec->block_bytes, PCC_RECORD_STRIDE_MIN, &geometry);
    PCC_ASSERT(result == 0);
    workload->sim = sim_new(geometry.volume_bytes, seed);
    workload->sim->geometry = geometry;
    workload->sim->beside = workload_beside;
    workload->sim->owner = workload;
    workload->lanes = spec->slots - spec->keep;
    if (workload->lanes > WORKLOAD_LANES_MAX)
        workload->lanes = WORKLOAD_LANES_MAX;
    workload->incarnation = 1;
    sim_current = workload->sim;
    hooks_seed(seed);
    return workload;
}

void workload_free(struct workload *workload)
{
    PCC_ASSERT(!workload->volume);
    free(workload->memory);
    sim_free(workload->sim);
    oracle_free(workload->oracle);
    free(workload);
}

int workload_format(struct workload *workload)
{
    struct pcc_volume_spec spec = {
        .payload_capacity_bytes = (uint64_t)workload->spec.payload_pages_max * PCC_IO_ALIGN,
        .record_stride_bytes = PCC_RECORD_STRIDE_MIN,
        .slot_count = workload->spec.slots,
        .keep = workload->spec.keep,
        .block_bytes = workload->spec.block_bytes,
        .world_size = 1,
        .job = "crash",
        .next_sequence = 1,
        .incarnation = workload->incarnation,
    };
    oracle_start_id(spec.incarnation, spec.start_id);
    workload->sim->purpose = PURPOSE_OPEN;
    int result = pcc_volume_format(&workload->sim->io, &spec);
    workload->sim->purpose = PURPOSE_POLICY;
    return result;
}

static int volume_open(struct workload *workload)
{
    struct sim *sim = workload->sim;
    sim->purpose = PURPOSE_OPEN;
    int result = pcc_volume_open_io(&sim->io, true, &workload->volume);
    sim->purpose = PURPOSE_POLICY;
    if (result != 0) {
        workload->volume = NULL;
        return result;
    }
    struct pcc_record record;
    pcc_volume_record(workload->volume, &record);
    workload->incarnation = record.incarnation;
    workload->newest_begun = record.next_sequence - 1;
    workload->flagged = 0;
    return 0;
}

static void saver_open(struct workload *workload)
{
    struct pcc_saver_spec spec = {
        .lanes = workload->lanes,
        .writers_per_lane = 0,
        .chunk_bytes = workload->spec.chunk_bytes,
        .events = &events,
        .owner = workload,
        .kept = &workload->kept,
    };
    int result = pcc_saver_open(workload->volume, &spec, &workload->saver);
    PCC_ASSERT(result == 0);
}

int workload_open(struct workload *workload)
{
    int result = volume_open(workload);
    if (result != 0)
        return result;
    workload_keep(workload);
    saver_open(workload);
    return 0;
}

int workload_open_again(struct workload *workload)
{
    int result = volume_open(workload);
    if (result == 0)
        saver_open(workload);
    return result;
}

/* Every third save has no length before its seal. */
static bool is_open(const struct pcc_save_request *request)
{
    return request->tag % 3 == 2;
}

/* What is known of it when it begins: that it fits. */
static struct pcc_save_request open_of(const struct workload *workload,
                                       const struct pcc_save_request *request)
{
    struct pcc_save_request begun = *request;
    begun.is_open = true;
    begun.payload_bytes = (uint64_t)workload->spec.payload_pages_max * PCC_IO_ALIGN;
    begun.tree_offset_bytes = begun.tree_bytes = 0;
    begun.notes.statistics = (struct pcc_section){0, 0};
    return begun;
}

static void set_length(struct workload *workload, struct live *live)
{
    const struct pcc_save_request *request = &workload->oracle->saves[live->tag].request;
    const struct pcc_save_length length = {.payload_bytes = request->payload_bytes,
                                           .tree_offset_bytes = request->tree_offset_bytes,
                                           .tree_bytes = request->tree_bytes,
                                           .statistics = request->notes.statistics};
    if (pcc_save_set_length(live->save, &length) != 0 && !workload->faulty)
        sim_breach(workload->sim, "the length of a complete save was refused");
    workload->count.open++;
}

int workload_begin(struct workload *workload, uint32_t pages)
{
    struct oracle *oracle = workload->oracle;
    struct live *live = NULL;
    for (uint32_t i = 0; i < workload->lanes && !live; i++)
        if (!workload->lives[i].save)
            live = &workload->lives[i];
    if (!live)
        return -PCC_E_NO_LANE;
    /* Half of the payloads end within a page and within a block. */
    uint64_t bytes = (uint64_t)pages * PCC_IO_ALIGN -
                     (rng_next(&workload->rng) & 1 ? rng_below(&workload->rng, 4000) : 0);
    struct pcc_save_request request = {
        .tag = oracle->count,
        .step = oracle->next_step,
        .incarnation = workload->incarnation,
        .world_size = 1,
        .payload_bytes = bytes,
        .tree_offset_bytes = bytes / 2 / 64 * 64,
    };
    request.tree_bytes = bytes - request.tree_offset_bytes;
    if (oracle->frozen_bytes > 0) {
        oracle->frozen += rng_chance(&workload->rng, 16);
        if (!rng_chance(&workload->rng, 6))
            request.frozen_bytes = oracle->frozen_bytes < bytes ? oracle->frozen_bytes : bytes;
    }
    request.notes = (struct pcc_manifest_notes){.name_base = request.tag / 8,
                                                .name_row = request.tag % 8,
                                                .statistics = {0, bytes / 3 + 1}};
    request.flags = request.tag % 5 == 0 ? PCC_SLOT_OFFERED | PCC_SLOT_HEALTHY : 0;
    uint64_t sequence = 0;
    struct pcc_save *save = NULL;
    const struct pcc_save_request begun = is_open(&request) ? open_of(workload, &request) : request;
    int result = pcc_save_begin(workload->saver, &begun, &save, &sequence);
    if (result != 0)
        return result;
    if (sequence <= workload->newest_begun)
        sim_breach(workload->sim, "a sequence was given twice");
    workload->newest_begun = sequence;
    oracle->next_step++;
    oracle_begin(oracle, &request, sequence);
    live->save = save;
    live->tag = (uint32_t)request.tag;
    live->chunk_count = (uint32_t)pcc_ceil_div(bytes, workload->spec.chunk_bytes);
    PCC_ASSERT(live->chunk_count <= WORKLOAD_CHUNKS_MAX);
    live->memory =
        aligned_alloc(PCC_IO_ALIGN, live->chunk_count * (size_t)workload->spec.chunk_bytes);
    PCC_ASSERT(live->memory);
    workload->count.begun++;
    return 0;
}

/* With `offered` only its checksums. */
static void hand_over(struct workload *workload, struct live *live, uint32_t index, bool offered)
{
    const struct oracle_save *save = &workload->oracle->saves[live->tag];
    uint32_t chunk_bytes = workload->spec.chunk_bytes, block_bytes = workload->spec.block_bytes;
    uint64_t offset = (uint64_t)index * chunk_bytes;
    uint64_t left = save->request.payload_bytes - offset;
    uint32_t length = left < chunk_bytes ? (uint32_t)left : chunk_bytes;
    uint8_t *bytes = live->memory + offset;
    if (!offered)
        memcpy(bytes, save->bytes + offset, pcc_align_up(length, PCC_IO_ALIGN));
    uint64_t checksums[64] = {0};
    for (uint32_t at = 0; at < length; at += block_bytes) {
        uint32_t piece = length - at < block_bytes ? length - at : block_bytes;
        checksums[at / block_bytes] = pcc_hash_bytes(save->bytes + offset + at, piece);
    }
    const bool given = offered || (index + live->tag) % 2 == 0; /* else the writer makes them */
    struct pcc_chunk chunk = {.bytes = offered ? NULL : bytes,
                              .payload_offset_bytes = offset,
                              .length_bytes = length,
                              .index = index,
                              .segment = live->tag + 1,
                              .segment_chunk = index,
                              .checksums = given ? checksums : NULL};
    live->handed |= 1u << index;
    live->offered |= offered ? 1u << index : 0;
    int result = pcc_save_chunk(live->save, &chunk);
    memset(checksums, 0xee, sizeof checksums); /* they were to be copied during the call */
    if (result != 0 && !workload->faulty)
        sim_breach(workload->sim, "a good chunk was refused");
    if (live->save && pcc_save_chunk(live->save, &chunk) != -EINVAL && !workload->faulty)
        sim_breach(workload->sim, "a chunk was taken twice");
}

static void seal(struct workload *workload, struct live *live)
{
    if (is_open(&workload->oracle->saves[live->tag].request))
        set_length(workload, live);
    workload->oracle->saves[live->tag].sealed_at = workload->sim->log_count;
    live->sealed = true;
    int result = pcc_save_seal(live->save);
    if (result != 0 && !workload->faulty)
        sim_breach(workload->sim, "a complete save could not be sealed");
}

void workload_feed(struct workload *workload, struct live *live)
{
    if (!live->save || live->sealed || live->aborted)
        return;
    if (live->handed == all_chunks(live)) {
        if (live->offered == 0)
            seal(workload, live);
        return;
    }
    uint32_t index = rng_below(&workload->rng, live->chunk_count);
    while (live->handed >> index & 1)
        index = (index + 1) % live->chunk_count;
    const bool offered = pcc_save_base(live->save) != 0 && (live->asked >> index & 1) == 0 &&
                         rng_chance(&workload->rng, 2);
    hand_over(workload, live, index, offered);
}

/* The owner takes a written chunk back and fills it with something else. */
void workload_uncache(struct workload *workload, struct live *live)
{
    workload_uncache_chunk(workload, live, rng_below(&workload->rng, WORKLOAD_CHUNKS_MAX));
}

void workload_uncache_chunk(struct workload *workload, struct live *live, uint32_t index)
{
    if (!live->save || !(live->written >> index & 1) || (live->uncached >> index & 1))
        return;
    if (!pcc_save_uncache(workload->saver, live->tag, index))
        return;
    live->uncached |= 1u << index;
    memset(live->memory + (size_t)index * workload->spec.chunk_bytes, 0xdd,
           workload->spec.chunk_bytes);
}

int workload_step(struct workload *workload, uint32_t lane)
{
    uint32_t before = workload->stepping;
    workload->stepping = lane + 1;
    int result = pcc_saver_step(workload->saver, lane);
    workload->stepping = before;
    return result;
}
