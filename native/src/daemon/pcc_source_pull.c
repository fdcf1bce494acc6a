/* Pull: the device part of a checkpoint, filled by the GPUs' copiers. A save has one part per GPU;
 * a part waits until the trainer's stream has said `ready`, then fills chunk after chunk.
 *
 * A pulled copy counts only if its trainer lived after the last read: CUDA does not say what an
 * importer reads once the exporter has ended. Only then `done` is stored, which releases the
 * trainer's stream; a failed copy stores `done`, too, but after its word has become final (P4). */
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_tenant_private.h"
#include "shared/pcc_sample.h"

/* Chunks of a checkpoint that is not durable yet are taken only when fewer than this many are under
 * way: one is being copied, and the engine continues with the other. */
#define CHUNKS_AHEAD 2u
#define ORPHAN_RETRY_NS 10000000u
#define RAISE_TRIES_MAX 64u /* a hostile client may change the word meanwhile */

struct pcc_tenant_part {
    struct pcc_gpu_job job; /* first member: an orphan is freed through it */
    struct pcc_tenant *tenant;
    struct pcc_tenant_part *next;
    struct pcc_tenant_save *save; /* its entry stays ours until `ended` */
    struct pcc_source *source;    /* in that entry */
    struct pcc_tenant_map *map;   /* held for the save */
    uint32_t device;
    bool ready;
    uint32_t left;      /* chunks that have not arrived */
    uint32_t under_way; /* chunks taken that have not arrived */
    int64_t chunk;      /* being enqueued; -1 = none */
    uint8_t *bytes;     /* of it, as this GPU finds them */
    struct pcc_exposure_walk walk;
};

static struct pcc_tenant_part *part_of(struct pcc_gpu_job *job)
{
    return (struct pcc_tenant_part *)(void *)job;
}

/* -- what copiers ask; with the lock held where it says so -- */

static bool is_over(const struct pcc_tenant_part *part)
{
    return part->save->save == NULL || part->save->aborted;
}

/* With the lock held: whether the next chunk may be copied. */
static enum pcc_gpu_verdict may_go_on(struct pcc_tenant_part *part)
{
    struct pcc_tenant *tenant = part->tenant;
    struct pcc_tenant_save *save = part->save;

    if (is_over(part))
        return PCC_GPU_NO_MORE;
    if (!tenant->attached || tenant->broken)
        return PCC_GPU_NOTHING_NOW; /* detach gives it up */
    if (pcc_page_word(&tenant->view, save->snapshot) !=
        pcc_word(save->snapshot, PCC_WORD_COPYING)) {
        pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
        return PCC_GPU_NO_MORE;
    }
    const bool proven = (part->source->proven >> part->device & 1u) != 0;
    if (!part->ready) {
        _Atomic uint64_t *ready =
            &pcc_page_words(&tenant->view, save->snapshot, part->device)->ready;
        /* Acquire pairs with the stream's write, which is behind a fence for the whole system. */
        part->ready = PCC_READ_ACQUIRE(ready) >= save->snapshot;
        if (part->ready && !proven)
            pcc_bell_ring(&tenant->view.page->daemon_bell); /* the drain thread asks for proof */
    }
    return part->ready && proven ? PCC_GPU_PIECE : PCC_GPU_NOTHING_NOW;
}

/* With the lock held: the next chunk of the payload, and a chunk of memory for it. */
static enum pcc_gpu_verdict chunk_take(struct pcc_tenant_part *part)
{
    struct pcc_tenant *tenant = part->tenant;
    const enum pcc_gpu_verdict verdict = may_go_on(part);

    if (verdict != PCC_GPU_PIECE)
        return verdict;
    if (!pcc_exposure_next_chunk(&part->map->view, part->device, &part->walk))
        return PCC_GPU_NO_MORE;
    const int64_t index = pcc_tenant_pick(tenant, 0, part->under_way >= CHUNKS_AHEAD);
    if (index < 0)
        return PCC_GPU_NOTHING_NOW;
    struct pcc_tenant_chunk *chunk = &tenant->chunks[index];
    part->bytes = pcc_tenant_pinned(tenant, (uint32_t)index, part->map->gpus[part->device]);
    if (part->bytes == NULL) {
        /* The driver would copy by itself, and every save that shares the copier would wait. */
        pcc_tenant_abort(tenant, part->save, -PCC_E_DEVICE);
        return PCC_GPU_NO_MORE;
    }
    pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_PULLED);
    chunk->tag = part->save->tag;
    chunk->offset_bytes = part->walk.chunk_bytes;
    part->under_way++;
    part->chunk = index;
    return PCC_GPU_PIECE;
}

/* The copies that fill the chunk, as many as fit; what no range fills becomes zeros here, a little
 * at a time. The chunk is ours, the map does not change: no lock. */
static void piece_fill(struct pcc_tenant_part *part, struct pcc_gpu_piece *out)
{
    uint64_t zeroed_bytes = 0;
    struct pcc_exposure_step step;

    while (out->count < PCC_GPU_COPIES && zeroed_bytes < PCC_EXPOSURE_ZEROS_BYTES) {
        out->last = !pcc_exposure_next_step(&part->map->view, &part->walk, &step);
        if (out->last)
            return;
        uint8_t *to = part->bytes + (step.offset_bytes - part->walk.chunk_bytes);
        if (step.allocation == PCC_EXPOSURE_ZEROS) {
            memset(to, 0, step.length_bytes);
            zeroed_bytes += step.length_bytes;
            continue;
        }
        const struct pcc_tenant_import *import = part->map->imports[step.allocation];
        out->copies[out->count++] =
            (struct pcc_gpu_copy){.from = import->address + step.allocation_offset_bytes,
                                  .to = to,
                                  .length_bytes = step.length_bytes};
    }
}

static enum pcc_gpu_verdict on_next(struct pcc_gpu_job *job, struct pcc_gpu_piece *out)
{
    struct pcc_tenant_part *part = part_of(job);

    pcc_tenant_lock(part->tenant);
    const enum pcc_gpu_verdict verdict = part->chunk < 0 ? chunk_take(part) : PCC_GPU_PIECE;
    const bool over = is_over(part);
    pcc_tenant_unlock(part->tenant);
    if (verdict != PCC_GPU_PIECE)
        return verdict;
    out->token = (uint32_t)part->chunk;
    out->chunk_bytes = part->tenant->spec.chunk_bytes;
    out->count = 0;
    out->last = over; /* the rest of the chunk does not matter any more */
    if (!over)
        piece_fill(part, out);
    if (out->last)
        part->chunk = -1;
    return PCC_GPU_PIECE;
}

/* With the lock held: why what was pulled does not count, or 0. What a trainer does to its memory
 * once it has let go of the snapshot says nothing. */
static int chunk_judge(const struct pcc_tenant_part *part, uint32_t index)
{
    const struct pcc_tenant *tenant = part->tenant;
    const struct pcc_tenant_chunk *chunk = &tenant->chunks[index];
    const uint64_t snapshot = part->save->snapshot;

    if (!tenant->attached || pcc_samples_agree(&tenant->view, snapshot, chunk->bytes,
                                               chunk->offset_bytes, tenant->spec.chunk_bytes))
        return 0;
    return pcc_page_word(&tenant->view, snapshot) == pcc_word(snapshot, PCC_WORD_COPYING) &&
                   pcc_pull_words(tenant, part->save) != PCC_PULL_WITHDRAWN
               ? -PCC_E_OTHER_BYTES
               : -PCC_E_ABORTED;
}

/* With the lock held: a chunk has arrived, and its save has not ended. */
static void chunk_arrived(struct pcc_tenant_part *part, uint32_t index)
{
    struct pcc_tenant *tenant = part->tenant;
    struct pcc_tenant_save *save = part->save;
    const uint64_t offset = tenant->chunks[index].offset_bytes;

    pcc_tenant_received(tenant, save, offset);
    pcc_tenant_chunk_to_save(tenant, save, index, offset, tenant->spec.chunk_bytes, NULL);
    if (part->left > 0 || save->aborted || !tenant->attached)
        return;
    /* The drain thread asks the trainer whether it lives. */
    part->source->read |= 1u << part->device;
    pcc_bell_ring(&tenant->view.page->daemon_bell);
}

static void on_done(struct pcc_gpu_job *job, uint32_t token, int error)
{
    struct pcc_tenant_part *part = part_of(job);
    struct pcc_tenant *tenant = part->tenant;

    part->left--;
    part->under_way--;
    if (part->chunk == (int64_t)token) /* it was not enqueued as a whole */
        part->chunk = -1;
    PCC_LOCKED(&tenant->lock);
    if (error == 0 && !is_over(part))
        error = chunk_judge(part, token);
    if (error == 0 && !is_over(part))
        chunk_arrived(part, token);
    else if (error == -PCC_E_DEVICE_LOST)
        pcc_tenant_chunk_set(tenant, &tenant->chunks[token], PCC_CHUNK_LOST);
    else
        pcc_tenant_chunk_free(tenant, token);
    if (error != 0)
        pcc_tenant_abort(tenant, part->save, error);
    pcc_tenant_pass_on(tenant);
}

static void on_lost(struct pcc_gpu_job *job)
{
    struct pcc_tenant_part *part = part_of(job);
    struct pcc_tenant *tenant = part->tenant;

    PCC_LOCKED(&tenant->lock);
    if (part->chunk >= 0)
        pcc_tenant_chunk_set(tenant, &tenant->chunks[part->chunk], PCC_CHUNK_LOST);
    part->chunk = -1;
    pcc_tenant_abort(tenant, part->save, -PCC_E_DEVICE_LOST);
}

static void part_unlink(struct pcc_tenant *tenant, const struct pcc_tenant_part *part,
                        struct pcc_tenant_part *next)
{
    struct pcc_tenant_part **at = &tenant->pull.parts;

    while (*at != part)
        at = &(*at)->next;
    *at = next;
}

/* With the lock held: the map has a holder less. */
static void map_let_go(struct pcc_tenant *tenant, struct pcc_tenant_map *map)
{
    pcc_tenant_map_put(tenant, map);
    if (tenant->pull.unused != NULL && tenant->attached) /* the drain thread closes it */
        pcc_bell_ring(&tenant->view.page->daemon_bell);
}

/* With the lock held: a copier has one part less of the save. */
static void part_left(struct pcc_tenant *tenant, struct pcc_source *source,
                      struct pcc_tenant_map *map)
{
    if (--source->users == 0)
        map_let_go(tenant, map);
}

static void on_ended(struct pcc_gpu_job *job)
{
    struct pcc_tenant_part *part = part_of(job);
    struct pcc_tenant *tenant = part->tenant;

    pcc_tenant_lock(tenant);
    part_unlink(tenant, part, part->next);
    part_left(tenant, part->source, part->map);
    (void)pthread_cond_broadcast(&tenant->pull.part_ended);
    pcc_tenant_unlock(tenant);
    free(part);
}

static const struct pcc_gpu_calls calls = {
    .next = on_next, .done = on_done, .lost = on_lost, .ended = on_ended};

/* -- the words that GPUs' streams wait for -- */

/* The daemon has read a GPU's part of the snapshot: the stream may continue. */
static void device_done(struct pcc_tenant *tenant, uint64_t snapshot, uint32_t device)
{
    _Atomic uint64_t *word = &pcc_page_words(&tenant->view, snapshot, device)->done;
    uint64_t now = PCC_READ(word);

    for (uint32_t i = 0; now < snapshot && i < RAISE_TRIES_MAX; i++)
        /* Release: the copies, and the word that has become final, come before it. */
        if (atomic_compare_exchange_strong_explicit(word, &now, snapshot, memory_order_release,
                                                    memory_order_relaxed))
            return;
}

void pcc_pull_release_streams(struct pcc_tenant *tenant, uint64_t snapshot)
{
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        device_done(tenant, snapshot, device);
}

/* The same for a copy that has failed, whose word becomes REFUSED if it is not final. */
static void refuse_copy(struct pcc_tenant *tenant, const struct pcc_tenant_save *save)
{
    const uint64_t snapshot = save->snapshot;
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);
    const struct pcc_tenant_end end = {
        .outcome = PCC_OUTCOME_FAILED,
        .sequence = save->sequence,
        .reason = {.stage = PCC_STAGE_COPY, .error = save->abort_error},
    };

    if (pcc_page_word(&tenant->view, snapshot) == pcc_word(snapshot, PCC_WORD_COPYING)) {
        /* The outcome first: a client that sees REFUSED finds the reason. */
        pcc_tenant_outcome(tenant, snapshot, &end);
        (void)pcc_word_move(entry, snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED);
    }
    pcc_pull_release_streams(tenant, snapshot);
    pcc_tenant_wake_client(tenant);
}

/* -- the verbs -- */

static bool has_lost(const struct pcc_tenant_map *map)
{
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        if (map->gpus[device] != NULL && pcc_gpu_is_lost(map->gpus[device]))
            return true;
    return false;
}

static void parts_free(struct pcc_source *source)
{
    while (source->pulled != NULL) {
        struct pcc_tenant_part *part = source->pulled;
        source->pulled = part->next;
        free(part);
    }
}

static int parts_make(struct pcc_tenant *tenant, struct pcc_source *source,
                      struct pcc_tenant_map *map)
{
    for (uint32_t device = 0; device < PCC_DEVICES; device++) {
        if (map->view.chunks[device] == 0)
            continue;
        struct pcc_tenant_part *part = calloc(1, sizeof(*part));
        if (part == NULL) {
            parts_free(source);
            return -ENOMEM;
        }
        *part = (struct pcc_tenant_part){.job = {.calls = &calls},
                                         .tenant = tenant,
                                         .next = source->pulled,
                                         .map = map,
                                         .device = device,
                                         .left = map->view.chunks[device],
                                         .chunk = -1};
        source->pulled = part;
    }
    return 0;
}

/* `name`: the map that the client means; 0: nothing is pulled. */
static int begin(struct pcc_tenant *tenant, struct pcc_source *source, uint64_t name,
                 struct pcc_save_request *request)
{
    struct pcc_tenant_map *map = tenant->pull.map;

    if (name == 0)
        return 0;
    if (map == NULL || map->number != name)
        return -PCC_E_BAD_HANDLE;
    if (has_lost(map))
        return -PCC_E_DEVICE_LOST;
    if ((map->view.devices & tenant->pull.distrusted) != 0)
        return -PCC_E_OTHER_MEMORY;
    /* What follows the device part is the client's, the tree always. */
    const uint64_t device_bytes = map->view.head.device_bytes;
    if (device_bytes > request->tree_offset_bytes || device_bytes > request->payload_bytes)
        return -EINVAL;
    source->to_bytes = device_bytes;
    source->parts = map->view.devices;
    source->proven = map->proven;
    source->map = map;
    return parts_make(tenant, source, map);
}

static void parts_start(struct pcc_tenant *tenant, struct pcc_source *source)
{
    while (source->pulled != NULL) {
        struct pcc_tenant_part *part = source->pulled;
        source->pulled = part->next;
        part->next = tenant->pull.parts;
        tenant->pull.parts = part;
        source->users++;
        pcc_gpu_job_start(part->map->gpus[part->device], &part->job);
    }
}

/* The whole stretch: nothing of it is offered. */
static void want(struct pcc_tenant *tenant, struct pcc_tenant_save *save, struct pcc_source *source,
                 uint64_t from_bytes, uint64_t to_bytes)
{
    struct pcc_tenant_map *map = source->pulled->map;

    PCC_ASSERT(from_bytes == source->from_bytes && to_bytes == source->to_bytes);
    map->holders++;
    for (struct pcc_tenant_part *part = source->pulled; part != NULL; part = part->next) {
        part->save = save;
        part->source = source;
    }
    if (!source->deferred)
        parts_start(tenant, source);
}

static void abandon(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                    struct pcc_source *source)
{
    if (source->deferred && source->pulled != NULL && source->pulled->save != NULL) {
        source->deferred = false;
        map_let_go(tenant, source->pulled->map);
        parts_free(source);
    }
    if (source->pulled != NULL) { /* nothing was wanted: no stream waits for this save */
        parts_free(source);
        source->parts = 0;
    } else if (source->parts != 0 && pcc_tenant_of_session(tenant, save)) {
        refuse_copy(tenant, save);
    }
}

/* -- deferred: the device part stays where it is until its owner wants it, or has ended -- */

enum pcc_pull_words pcc_pull_words(const struct pcc_tenant *tenant,
                                   const struct pcc_tenant_save *save)
{
    enum pcc_pull_words words = PCC_PULL_WHOLE;
    bool broken = false;

    for (uint32_t device = 0; device < PCC_DEVICES; device++) {
        struct pcc_device_words *at = pcc_page_words(&tenant->view, save->snapshot, device);
        if ((save->gpus >> device & 1u) == 0)
            continue;
        /* Acquire: pairs with the streams' writes, as in may_go_on. */
        if (PCC_READ_ACQUIRE(&at->withdrawn) >= save->snapshot)
            return PCC_PULL_WITHDRAWN;
        if (PCC_READ(&at->broken) >= save->snapshot)
            broken = true;
        /* The entry is this snapshot's, so no stream of an honest client writes a larger id. */
        if (PCC_READ_ACQUIRE(&at->ready) != save->snapshot)
            words = PCC_PULL_NOT_READY;
    }
    return broken ? PCC_PULL_BROKEN : words;
}

void pcc_pull_start(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    PCC_ASSERT(save->sources[0].deferred);
    save->sources[0].deferred = false;
    parts_start(tenant, &save->sources[0]);
}

/* Chunks that can be filled now, or when writers and copiers have ended what they are at. */
static uint32_t chunks_in_reach(struct pcc_tenant *tenant)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < tenant->chunk_count; i++) {
        const struct pcc_tenant_chunk *chunk = &tenant->chunks[i];
        const struct pcc_tenant_save *of =
            chunk->state == PCC_CHUNK_FULL ? pcc_tenant_save_of(tenant, chunk->tag) : NULL;
        const bool parked = of != NULL && of->save != NULL && pcc_save_is_parked(of->save);
        count += !pcc_tenant_retires(tenant, chunk) && !parked &&
                 (chunk->state == PCC_CHUNK_FREE || chunk->state == PCC_CHUNK_FULL ||
                  chunk->state == PCC_CHUNK_CACHED || chunk->state == PCC_CHUNK_PULLED);
    }
    return count;
}

int pcc_pull_through(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                     struct pcc_tenant_map *map)
{
    struct pcc_source *source = &save->sources[0];
    struct pcc_source other = {.from_bytes = source->from_bytes,
                               .to_bytes = source->to_bytes,
                               .parts = map->view.devices,
                               .proven = map->proven,
                               .map = map,
                               .ops = source->ops};

    PCC_ASSERT(source->deferred && map->view.head.device_bytes == source->to_bytes);
    const int error = parts_make(tenant, &other, map);
    if (error != 0)
        return error;
    map_let_go(tenant, source->map);
    parts_free(source);
    *source = other;
    source->deferred = true;
    want(tenant, save, source, source->from_bytes, source->to_bytes);
    for (struct pcc_tenant_part *part = source->pulled; part != NULL; part = part->next)
        part->ready = true; /* by the caller's word: this rank's streams have nothing to do there */
    return 0;
}

bool pcc_pull_all(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    struct pcc_source *source = &save->sources[0];
    const uint64_t deadline_ns = pcc_now_ns() + tenant->pull.limit_ns;
    uint32_t left = 0;

    for (const struct pcc_tenant_part *part = source->pulled; part != NULL; part = part->next)
        left += part->left;
    /* The client's own part did not come; or memory is short, and nothing would free it. */
    if (save->received + left != save->chunk_count || chunks_in_reach(tenant) < left)
        return false;
    /* Nobody is left to show that it was the trainer's memory. */
    if ((source->parts & ~source->map->proven) != 0)
        return false;
    source->proven = source->parts;
    pcc_pull_start(tenant, save);
    while (source->users > 0 && !save->aborted &&
           pcc_condition_wait(&tenant->pull.part_ended, &tenant->lock, deadline_ns))
        ;
    return save->save != NULL && !save->aborted && source->read == source->parts;
}

bool pcc_pull_accept(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    if (save->save == NULL || save->aborted)
        return false;
    save->sources[0].judged = save->sources[0].read;
    return pcc_tenant_copy_check(tenant, save) == 0 && save->copied;
}

static void drained(struct pcc_tenant *tenant, const struct pcc_tenant_save *save, uint32_t parts)
{
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        if ((parts >> device & 1u) != 0)
            device_done(tenant, save->snapshot, device);
    pcc_tenant_wake_client(tenant);
}

/* Maps that a GPU which never answered may still read through, for as long as the process lives. */
static struct {
    pthread_mutex_t lock;
    struct pcc_tenant_map *first;
} left_behind = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void map_leave(struct pcc_tenant_map *map)
{
    if (map->left_behind)
        return;
    map->left_behind = true;
    map->holders++; /* so that it is never closed */
    PCC_LOCKED(&left_behind.lock);
    map->next = left_behind.first;
    left_behind.first = map;
}

/* With the lock held: the GPU has not ended its copies in time, and is not waited for any more.
 * Its chunks and its mappings are never freed. */
static void part_orphan(struct pcc_tenant *tenant, struct pcc_tenant_part *part)
{
    struct pcc_tenant_map *map = part->map;
    struct pcc_source *source = part->source;
    const uint64_t tag = part->save->tag;
    struct pcc_tenant_part *next = part->next; /* read while the part is ours */
    struct pcc_gpu *gpu = map->gpus[part->device];

    pcc_gpu_lose(gpu);
    if (!pcc_gpu_job_orphan(gpu, &part->job))
        return; /* it is being called just now */
    part_unlink(tenant, part, next);
    for (uint32_t i = 0; i < tenant->chunk_count; i++)
        if (tenant->chunks[i].state == PCC_CHUNK_PULLED && tenant->chunks[i].tag == tag)
            pcc_tenant_chunk_set(tenant, &tenant->chunks[i], PCC_CHUNK_LOST);
    map_leave(map);
    part_left(tenant, source, map);
}

static void leave(struct pcc_tenant *tenant)
{
    if (tenant->gpus == NULL)
        return;
    pcc_tenant_lock(tenant);
    pcc_tenant_proof_drop(tenant);
    pcc_tenant_map_put(tenant, tenant->pull.map);
    tenant->pull.map = NULL;
    uint64_t deadline_ns = pcc_now_ns() + tenant->pull.limit_ns;
    while (tenant->pull.parts != NULL) {
        if (pcc_condition_wait(&tenant->pull.part_ended, &tenant->lock, deadline_ns))
            continue;
        for (struct pcc_tenant_part *part = tenant->pull.parts, *next; part != NULL; part = next) {
            next = part->next;
            part_orphan(tenant, part);
        }
        deadline_ns = pcc_now_ns() + ORPHAN_RETRY_NS;
    }
    pcc_tenant_unlock(tenant);
    pcc_tenant_maps_close(tenant);
}

const struct pcc_source_ops pcc_source_pull = {
    .begin = begin, .want = want, .abandon = abandon, .drained = drained, .leave = leave};
