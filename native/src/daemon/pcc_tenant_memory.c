/* A tenant's memory: segments taken from the pool, pinned for GPUs, given back, and what chunks
 * hold. */
#include <string.h>
#include <time.h>

#include "base/pcc_map.h"
#include "daemon/pcc_tenant_private.h"

void pcc_tenant_segment_add(struct pcc_tenant *tenant, const struct pcc_tenant_segment *fresh)
{
    const uint32_t chunk_bytes = tenant->spec.chunk_bytes;
    const struct pcc_segment *segment = &fresh->memory;

    PCC_LOCKED(&tenant->lock);
    PCC_ASSERT(tenant->lasting_count == tenant->segment_count);
    const uint32_t index = tenant->segment_count++;
    tenant->lasting_count++;
    struct pcc_tenant_segment *added = &tenant->segments[index];
    *added = *fresh;
    added->number = ++tenant->segment_number;
    added->memory.first_chunk = tenant->chunk_count;
    added->memory.chunk_count = (uint32_t)(segment->length_bytes / chunk_bytes);
    for (uint32_t i = 0; i < added->memory.chunk_count; i++) {
        tenant->chunks[tenant->chunk_count++] = (struct pcc_tenant_chunk){
            .bytes = segment->bytes + (size_t)i * chunk_bytes, .segment = index};
    }
    pcc_tenant_chunks_add(tenant, added->memory.first_chunk, added->memory.chunk_count);
    pcc_tenant_grant_segments(tenant);
    pcc_tenant_pass_on(tenant);
}

/* The next segment's length: what is wanted, cut to a segment, to the table and to the budget. */
static uint64_t segment_length(struct pcc_tenant *tenant, uint64_t wanted_bytes)
{
    const uint64_t chunk_bytes = tenant->spec.chunk_bytes;
    uint64_t budget, used;

    pcc_pool_usage(tenant->pool, &budget, &used);
    uint64_t chunks = pcc_ceil_div(wanted_bytes, chunk_bytes);
    const uint64_t most = PCC_SEGMENT_BYTES_MAX / chunk_bytes;
    if (chunks > (most > 0 ? most : 1))
        chunks = most > 0 ? most : 1;
    if (chunks > tenant->spec.chunk_capacity - tenant->chunk_count)
        chunks = tenant->spec.chunk_capacity - tenant->chunk_count;
    if (chunks > (budget - used) / chunk_bytes)
        chunks = (budget - used) / chunk_bytes;
    return chunks * chunk_bytes;
}

/* -- pinned for the copies of a GPU --
 *
 * For as long as the trainer's memory is mapped, and some time after it. The driver is called
 * without the tenant's lock. */

/* Registering memory takes locks of the driver that all processes of the node share. So there is a
 * pause for the others between two pieces of a large pool. */
#define PIN_PAUSE_NS 5000000

void pcc_tenant_pinners_set(struct pcc_tenant *tenant, struct pcc_gpu *const gpus[PCC_DEVICES])
{
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_gpu *gpu = gpus != NULL ? gpus[i] : NULL;
        if (gpu != NULL)
            pcc_gpu_hold(gpu);
        if (tenant->pull.pinners[i] != NULL)
            pcc_gpu_put(tenant->pull.pinners[i]);
        tenant->pull.pinners[i] = gpu;
    }
}

static bool is_pinned(const struct pcc_tenant_segment *segment)
{
    for (uint32_t i = 0; i < PCC_DEVICES; i++)
        if (segment->pins[i].gpu != NULL)
            return true;
    return false;
}

uint8_t *pcc_tenant_pinned(const struct pcc_tenant *tenant, uint32_t index,
                           const struct pcc_gpu *gpu)
{
    const struct pcc_tenant_segment *segment = &tenant->segments[tenant->chunks[index].segment];

    for (uint32_t i = 0; i < PCC_DEVICES; i++)
        if (segment->pins[i].gpu == gpu)
            return segment->pins[i].bytes + (tenant->chunks[index].bytes - segment->memory.bytes);
    return NULL;
}

/* The entry of a GPU, or with NULL a free one. There are as many as a session has GPUs; those of an
 * earlier session may be among them. */
static struct pcc_tenant_pin *pin_find(struct pcc_tenant_segment *segment,
                                       const struct pcc_gpu *gpu)
{
    for (uint32_t i = 0; i < PCC_DEVICES; i++)
        if (segment->pins[i].gpu == gpu)
            return &segment->pins[i];
    return NULL;
}

/* With growing held: pins it for a GPU that reads into it. */
static int pin_for(struct pcc_tenant *tenant, struct pcc_tenant_segment *segment,
                   struct pcc_gpu *gpu)
{
    const struct pcc_segment *memory = &segment->memory;
    struct pcc_tenant_pin *pin = pin_find(segment, NULL);
    const bool first = !is_pinned(segment);

    if (pin == NULL)
        return -ENOMEM;
    uint8_t *bytes = first ? memory->bytes : pcc_map_alias(memory->bytes, memory->length_bytes);
    if (bytes == NULL)
        return -ENOMEM;
    const int error = pcc_gpu_pin_host(gpu, bytes, memory->length_bytes);
    if (error != 0) {
        if (!first)
            (void)munmap(bytes, memory->length_bytes);
        return error;
    }
    pcc_gpu_hold(gpu);
    pcc_tenant_lock(tenant);
    *pin = (struct pcc_tenant_pin){gpu, bytes};
    tenant->pull.pinned_bytes += first ? memory->length_bytes : 0;
    pcc_tenant_unlock(tenant);
    (void)nanosleep(&(struct timespec){.tv_nsec = PIN_PAUSE_NS}, NULL);
    return 0;
}

/* With growing held: pins it for the GPUs that read into it; 0 also when there are none. */
static int segment_pin(struct pcc_tenant *tenant, struct pcc_tenant_segment *segment)
{
    int error = 0;

    for (uint32_t i = 0; error == 0 && i < PCC_DEVICES; i++) {
        struct pcc_gpu *gpu = tenant->pull.pinners[i];
        /* Nothing is pulled with a lost GPU; memory for push does not depend on it. */
        if (gpu != NULL && !pcc_gpu_is_lost(gpu) && pin_find(segment, gpu) == NULL)
            error = pin_for(tenant, segment, gpu);
    }
    return error;
}

/* With growing held, and nothing under way into it. False: a driver still has it registered. */
static bool segment_unpin(struct pcc_tenant *tenant, struct pcc_tenant_segment *segment)
{
    const struct pcc_segment *memory = &segment->memory;
    const bool was_pinned = is_pinned(segment);

    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        const struct pcc_tenant_pin pin = segment->pins[i];
        if (pin.gpu == NULL || pcc_gpu_unpin_host(pin.gpu, pin.bytes, memory->length_bytes) != 0)
            continue;
        pcc_tenant_lock(tenant);
        segment->pins[i] = (struct pcc_tenant_pin){0};
        pcc_tenant_unlock(tenant);
        if (pin.bytes != memory->bytes)
            (void)munmap(pin.bytes, memory->length_bytes);
        pcc_gpu_put(pin.gpu);
    }
    if (is_pinned(segment))
        return false;
    PCC_LOCKED(&tenant->lock);
    tenant->pull.pinned_bytes -= was_pinned ? memory->length_bytes : 0;
    return true;
}

/* -- growing -- */

/* With growing held: the driver does not pin. Push does not need pinned memory, so the memory is
 * used. Pull ends: the next exposure pins first, and is refused with the reason. */
static void pull_stop(struct pcc_tenant *tenant)
{
    pcc_tenant_pinners_set(tenant, NULL);
    PCC_LOCKED(&tenant->lock);
    pcc_tenant_map_put(tenant, tenant->pull.map); /* the drain thread closes it */
    tenant->pull.map = NULL;
    if (tenant->attached)
        pcc_bell_ring(&tenant->view.page->daemon_bell);
}

/* With growing held. Pinned for the GPUs that read into it. */
static int segment_make(struct pcc_tenant *tenant, uint64_t length, struct pcc_tenant_segment *out)
{
    *out = (struct pcc_tenant_segment){0};
    int error = pcc_pool_take(tenant->pool, length, tenant->label, &out->memory);
    if (error != 0)
        return error;
    if (segment_pin(tenant, out) != 0)
        pull_stop(tenant);
    return 0;
}

int pcc_tenant_grow(struct pcc_tenant *tenant, uint64_t bytes, uint64_t *granted_out)
{
    struct pcc_tenant_segment segment;
    int error = 0;

    PCC_LOCKED(&tenant->growing);
    /* The table of segments changes only under `growing`. */
    uint64_t have = (uint64_t)tenant->chunk_count * tenant->spec.chunk_bytes;
    /* What retires leaves from the end of the table first. */
    while (have < bytes && tenant->lasting_count == tenant->segment_count) {
        const uint64_t length = segment_length(tenant, bytes - have);
        if (length == 0)
            break;
        error = segment_make(tenant, length, &segment);
        if (error == -PCC_E_NO_MEMORY)
            continue; /* another tenant was faster: ask for what is left */
        if (error != 0)
            break;
        pcc_tenant_segment_add(tenant, &segment);
        have += length;
    }
    PCC_LOCKED(&tenant->lock);
    pcc_tenant_grant_segments(tenant); /* also those of an earlier session */
    if (error != 0 && error != -PCC_E_NO_MEMORY && error != -ENOMEM)
        return error;
    *granted_out = have;
    return 0;
}

/* Saves, with the lock held. */
static uint32_t in_flight(const struct pcc_tenant *tenant)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < PCC_TENANT_VOLUMES; i++)
        count += tenant->bindings[i].active;
    return count;
}

int pcc_tenant_release_memory(struct pcc_tenant *tenant)
{
    PCC_LOCKED(&tenant->control);
    PCC_LOCKED(&tenant->growing);
    pcc_tenant_lock(tenant);
    const uint32_t count = tenant->segment_count;
    const bool busy = tenant->attached || tenant->load.active || in_flight(tenant) > 0 ||
                      pcc_tenant_is_filled(tenant, PCC_TENANT_VOLUMES);
    if (!busy) {
        tenant->segment_count = tenant->lasting_count = 0;
        tenant->chunk_count = 0;
        pcc_tenant_lists_clear(tenant);
    }
    pcc_tenant_unlock(tenant);
    if (busy)
        return -EBUSY;
    /* They are in no list any more, and `growing` keeps new ones away while they are unmapped. */
    for (uint32_t i = 0; i < count; i++)
        pcc_tenant_segment_return(tenant, &tenant->segments[i]);
    pcc_tenant_pinners_set(tenant, NULL); /* the next session may have no use for it */
    return 0;
}

void pcc_tenant_usage(struct pcc_tenant *tenant, struct pcc_tenant_usage *out)
{
    uint32_t count[PCC_CHUNK_LEFT + 1] = {0}; /* by state; that is the last one */
    uint32_t parked = 0;

    PCC_LOCKED(&tenant->lock);
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++)
        parked += tenant->saves[i].save != NULL && pcc_save_is_parked(tenant->saves[i].save);
    for (uint32_t i = 0; i < tenant->chunk_count; i++)
        count[tenant->chunks[i].state]++;
    *out = (struct pcc_tenant_usage){
        .bytes = (uint64_t)tenant->chunk_count * tenant->spec.chunk_bytes,
        .free_chunks = count[PCC_CHUNK_FREE],
        .granted_chunks = count[PCC_CHUNK_GRANTED] + count[PCC_CHUNK_PULLED], /* being filled */
        .full_chunks = count[PCC_CHUNK_FULL],
        .cached_chunks = count[PCC_CHUNK_CACHED],
        .lent_chunks = count[PCC_CHUNK_READING] + count[PCC_CHUNK_LENT],
        .left_chunks = count[PCC_CHUNK_LEFT],
        .in_flight = in_flight(tenant),
        .parked = parked,
        .pinned_bytes = tenant->pull.pinned_bytes,
        .exposed_bytes = tenant->pull.exposed_bytes,
        .mappings = tenant->pull.mappings,
        .pieces = tenant->pull.pieces,
    };
}

/* -- giving back, and unpinning -- */

void pcc_tenant_segment_return(struct pcc_tenant *tenant, struct pcc_tenant_segment *segment)
{
    struct pcc_segment *memory = &segment->memory;
    bool lost = false;

    for (uint32_t i = 0; i < memory->chunk_count; i++)
        lost = lost || tenant->chunks[memory->first_chunk + i].state == PCC_CHUNK_LOST;
    const bool unpinned = !lost && segment_unpin(tenant, segment);
    if (!unpinned && is_pinned(segment)) { /* its GPUs are never released */
        PCC_LOCKED(&tenant->lock);
        tenant->pull.pinned_bytes -= memory->length_bytes;
        memset(segment->pins, 0, sizeof(segment->pins));
    }
    if (lost)
        pcc_pool_abandon(tenant->pool, tenant->label, memory);
    else if (!unpinned)
        pcc_pool_retire(tenant->pool, tenant->label, memory);
    else
        pcc_pool_return(tenant->pool, tenant->label, memory);
}

int pcc_tenant_pin_for(struct pcc_tenant *tenant, struct pcc_gpu *const gpus[PCC_DEVICES])
{
    int error = 0;

    PCC_LOCKED(&tenant->growing);
    pcc_tenant_pinners_set(tenant, gpus);
    for (uint32_t i = 0; error == 0 && i < tenant->segment_count; i++)
        error = segment_pin(tenant, &tenant->segments[i]);
    if (error != 0)
        pcc_tenant_pinners_set(tenant, NULL);
    return error;
}

void pcc_tenant_rest(struct pcc_tenant *tenant, uint64_t unmapped_ns)
{
    if (pthread_mutex_trylock(&tenant->control) != 0)
        return; /* a session attaches or exposes */
    pcc_tenant_lock(tenant);
    const bool rests =
        tenant->pull.maps == 0 && pcc_now_ns() - tenant->pull.mapped_ns >= unmapped_ns;
    pcc_tenant_unlock(tenant);
    if (rests) {
        PCC_LOCKED(&tenant->growing);
        pcc_tenant_pinners_set(tenant, NULL);
        for (uint32_t i = 0; i < tenant->segment_count; i++)
            (void)segment_unpin(tenant, &tenant->segments[i]);
    }
    (void)pthread_mutex_unlock(&tenant->control);
}

/* -- taking segments back --
 *
 * Segments are taken back from a tenant that is in use, the last ones first, so that indices of
 * segments and chunks stay dense. A segment goes through
 *
 *   retiring   its chunks are neither handed out nor lent any more; cached content is dropped once
 *              its save is durable, or cannot be moved to another slot anyway
 *   asked      the client was asked (RETIRE), behind everything that named its chunks; one that it
 *              never got, or that went with its session, counts as returned
 *   returned   the client has unmapped it (RETURNED)
 *   empty      no saver, load, check or GPU uses a chunk; it is unpinned, unmapped and leaves the
 *              descriptor store. The state memfd does not name it: content is marked as dropped
 *              there first, and of ended saves nothing is read.
 *
 * Nothing waits here: the caller tries again later. A client that keeps a mapping keeps its pages,
 * too: the kernel frees them with the last mapping. */

#define CHUNKS_MIN 2u /* one is filled while one is written: less, and a copy could not go on */

static bool is_dead(const struct pcc_tenant_chunk *chunk)
{
    return chunk->state == PCC_CHUNK_LOST || chunk->state == PCC_CHUNK_LEFT;
}

static uint32_t usable(const struct pcc_tenant *tenant, const struct pcc_segment *memory)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < memory->chunk_count; i++)
        count += !is_dead(&tenant->chunks[memory->first_chunk + i]);
    return count;
}

/* Chunks of the segments that stay. */
static uint32_t lasting_chunks(const struct pcc_tenant *tenant)
{
    return tenant->lasting_count < tenant->segment_count
               ? tenant->segments[tenant->lasting_count].memory.first_chunk
               : tenant->chunk_count;
}

/* Retires the first segment with a LEFT chunk, and the segments behind it. While saves are in
 * flight this would delay the next saves, so it waits as long as some other chunk can be used. */
static void choose_left(struct pcc_tenant *tenant)
{
    uint32_t usable_count = 0;

    for (uint32_t i = 0; i < tenant->lasting_count; i++)
        usable_count += usable(tenant, &tenant->segments[i].memory);
    if (usable_count > 0 && in_flight(tenant) > 0)
        return;
    for (uint32_t i = 0; i < lasting_chunks(tenant); i++)
        if (tenant->chunks[i].state == PCC_CHUNK_LEFT)
            tenant->lasting_count = tenant->chunks[i].segment;
}

static void choose(struct pcc_tenant *tenant, uint64_t bytes)
{
    choose_left(tenant);

    uint32_t left = 0;
    for (uint32_t i = 0; i < tenant->lasting_count; i++)
        left += usable(tenant, &tenant->segments[i].memory);
    while (tenant->lasting_count > 0 &&
           (uint64_t)lasting_chunks(tenant) * tenant->spec.chunk_bytes > bytes) {
        const uint32_t last = usable(tenant, &tenant->segments[tenant->lasting_count - 1].memory);
        if (left - last < CHUNKS_MIN)
            return;
        left -= last;
        tenant->lasting_count--;
    }
}

static bool has(const struct pcc_tenant *tenant, const struct pcc_segment *memory,
                enum pcc_chunk_state state)
{
    for (uint32_t i = 0; i < memory->chunk_count; i++)
        if (tenant->chunks[memory->first_chunk + i].state == state)
            return true;
    return false;
}

/* Asks the client. While a load reads a chunk, DATA may still follow and name it. */
static void tell(struct pcc_tenant *tenant)
{
    bool sent = false;

    for (uint32_t i = tenant->lasting_count; i < tenant->segment_count; i++) {
        struct pcc_tenant_segment *segment = &tenant->segments[i];
        if (segment->asked || has(tenant, &segment->memory, PCC_CHUNK_READING))
            continue;
        if (segment->granted) {
            const struct pcc_message message = {.kind = PCC_MSG_RETIRE,
                                                .chunk = segment->memory.first_chunk,
                                                .id = segment->number};
            if (tenant->broken || pcc_tenant_push(tenant, &message) != 0)
                break; /* its session ends, and with it the grant */
            sent = true;
        }
        segment->asked = true;
    }
    if (sent)
        pcc_tenant_wake_client(tenant);
}

int pcc_tenant_take_returned(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    for (uint32_t i = tenant->lasting_count; i < tenant->segment_count; i++) {
        struct pcc_tenant_segment *segment = &tenant->segments[i];
        if (segment->number != message->id)
            continue;
        if (!segment->asked || !segment->granted || segment->memory.first_chunk != message->chunk ||
            has(tenant, &segment->memory, PCC_CHUNK_GRANTED) ||
            has(tenant, &segment->memory, PCC_CHUNK_LENT))
            break;
        segment->granted = false;
        return 0;
    }
    return -PCC_E_BAD_PEER;
}

/* Whether nothing of the segment is used; drops what is only cached. */
static bool empty(struct pcc_tenant *tenant, const struct pcc_tenant_segment *segment)
{
    bool is_empty = segment->asked && !segment->granted;

    for (uint32_t i = 0; i < segment->memory.chunk_count; i++) {
        const uint32_t index = segment->memory.first_chunk + i;
        const enum pcc_chunk_state state = tenant->chunks[index].state;
        if (tenant->chunks[index].settling)
            is_empty = false;
        if (state == PCC_CHUNK_FREE || is_dead(&tenant->chunks[index]))
            continue;
        if (state != PCC_CHUNK_CACHED || !pcc_tenant_uncache(tenant, index))
            is_empty = false;
    }
    return is_empty;
}

/* With growing and the lock held: the last segment leaves the table, if it can. */
static bool last_leaves(struct pcc_tenant *tenant, struct pcc_tenant_segment *out)
{
    if (tenant->segment_count == tenant->lasting_count)
        return false;
    const struct pcc_tenant_segment *last = &tenant->segments[tenant->segment_count - 1];
    if (!empty(tenant, last))
        return false;
    *out = *last;
    tenant->segment_count--;
    tenant->chunk_count = last->memory.first_chunk;
    return true;
}

/* With the lock held. */
static struct pcc_tenant_holding holding(const struct pcc_tenant *tenant)
{
    struct pcc_tenant_holding found = {
        .bytes = (uint64_t)tenant->chunk_count * tenant->spec.chunk_bytes,
        .lasting_bytes = (uint64_t)lasting_chunks(tenant) * tenant->spec.chunk_bytes};

    for (uint32_t i = tenant->lasting_count; i < tenant->segment_count; i++)
        found.asked += tenant->segments[i].asked && tenant->segments[i].granted;
    return found;
}

void pcc_tenant_shrink(struct pcc_tenant *tenant, uint64_t bytes, struct pcc_tenant_holding *out)
{
    struct pcc_tenant_segment gone;

    PCC_LOCKED(&tenant->growing);
    PCC_LOCKED(&tenant->lock);
    choose(tenant, bytes);
    pcc_tenant_chunks_retire(tenant);
    tell(tenant);
    while (last_leaves(tenant, &gone)) {
        pcc_tenant_unlock(tenant); /* it is in no list any more; `growing` keeps others out */
        pcc_tenant_segment_return(tenant, &gone);
        pcc_tenant_lock(tenant);
    }
    *out = holding(tenant);
}
