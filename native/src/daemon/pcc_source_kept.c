/* What outlives the daemon: a state memfd for each bound volume. The next daemon continues with
 * what a killed daemon had copied (pcc_kept.h). That memory was shared with a client, which may
 * still write to it, so nothing in it counts before it was checked against the state. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/pcc_tenant_private.h"

int pcc_tenant_kept_make(struct pcc_tenant *tenant, struct pcc_tenant_binding *binding,
                         struct pcc_volume *volume)
{
    const struct pcc_geometry geometry = pcc_volume_geometry(volume);
    const struct pcc_kept_shape shape =
        pcc_kept_shape_of(&geometry, tenant->spec.lanes, tenant->spec.chunk_bytes);
    struct pcc_record record;
    void *bytes = NULL;
    uint64_t id;

    const uint64_t length = pcc_kept_bytes(&shape);
    if (length == 0 || tenant->label[0] == '\0')
        return 0;
    const int error = pcc_pool_state_make(tenant->pool, tenant->label, length, &id, &bytes);
    if (error != 0 || id == 0)
        return error;
    pcc_volume_record(volume, &record);
    pcc_kept_make(&binding->kept, bytes, &shape, &record);
    binding->kept_id = id;
    return 0;
}

void pcc_tenant_kept_drop(struct pcc_tenant *tenant, struct pcc_tenant_binding *binding)
{
    if (binding->kept.bytes != NULL)
        pcc_pool_state_drop(tenant->pool, tenant->label, binding->kept_id, binding->kept.bytes,
                            binding->kept.length_bytes);
    binding->kept = (struct pcc_kept){0};
    binding->kept_id = 0;
}

/* With growing held. A client of the earlier daemon may still write to chunks that it had to fill,
 * and it is not known which these are. The chunks of a copied save are not among them. */
static int adopted_add(struct pcc_tenant *tenant, const struct pcc_tenant_segment *segment)
{
    const uint32_t first = tenant->chunk_count;
    const uint64_t chunks = segment->memory.length_bytes / tenant->spec.chunk_bytes;

    if (chunks * tenant->spec.chunk_bytes != segment->memory.length_bytes)
        return -EINVAL;
    if (chunks > tenant->spec.chunk_capacity - first)
        return -ENOSPC;
    pcc_tenant_segment_add(tenant, segment);
    PCC_LOCKED(&tenant->lock);
    for (uint32_t i = first; i < tenant->chunk_count; i++)
        pcc_tenant_chunk_set(tenant, &tenant->chunks[i], PCC_CHUNK_LEFT);
    return 0;
}

int pcc_tenant_adopt(struct pcc_tenant *tenant, int fd, uint64_t id)
{
    struct pcc_tenant_segment segment = {0};

    PCC_LOCKED(&tenant->control);
    PCC_LOCKED(&tenant->growing);
    if (tenant->session != 0 || tenant->lasting_count != tenant->segment_count)
        return -EBUSY;
    int error = pcc_pool_adopt(tenant->pool, fd, id, tenant->label, &segment.memory);
    if (error != 0)
        return error;
    error = adopted_add(tenant, &segment);
    if (error != 0)
        pcc_pool_unadopt(tenant->pool, &segment.memory);
    return error;
}

/* -- continuing the saves -- */

/* With the lock held. Index into the chunk table, -1 when the memory is not here. */
static int64_t chunk_find(const struct pcc_tenant *tenant, const struct pcc_kept_piece *piece)
{
    const uint64_t id = PCC_READ_ACQUIRE(&piece->segment);

    for (uint32_t i = 0; id != 0 && i < tenant->segment_count; i++) {
        const struct pcc_segment *memory = &tenant->segments[i].memory;
        if (memory->id == id)
            return piece->chunk < memory->chunk_count ? (int64_t)memory->first_chunk + piece->chunk
                                                      : -1;
    }
    return -1;
}

static uint32_t piece_count(const struct pcc_tenant *tenant, uint64_t payload_bytes)
{
    return (uint32_t)pcc_ceil_div(payload_bytes, tenant->spec.chunk_bytes);
}

/* Pieces in segments that this daemon did not get count as not in DRAM. `name`: where the state
 * memfd of the bound volume has the save. */
static int begin(struct pcc_tenant *tenant, struct pcc_source *source, uint64_t name,
                 struct pcc_save_request *request)
{
    const struct pcc_kept *kept = &tenant->bindings[tenant->bound].kept;
    const uint32_t pieces = piece_count(tenant, request->payload_bytes);
    const uint32_t place = (uint32_t)name;

    source->to_bytes = request->payload_bytes;
    source->kept_place = place;
    for (uint32_t i = 0; i < pieces; i++) {
        const int64_t index = chunk_find(tenant, pcc_kept_piece(kept, place, i));
        if (index < 0 || tenant->chunks[index].state != PCC_CHUNK_LEFT)
            pcc_kept_reused(kept, place, i);
    }
    return 0;
}

/* The chunks of a save that continues are its own until it has ended. */
static void want(struct pcc_tenant *tenant, struct pcc_tenant_save *save, struct pcc_source *source,
                 uint64_t from_bytes, uint64_t to_bytes)
{
    const struct pcc_kept *kept = &tenant->bindings[save->binding].kept;
    const uint64_t chunk_bytes = tenant->spec.chunk_bytes;

    source->wanted = piece_count(tenant, to_bytes - from_bytes);
    for (uint64_t at = from_bytes; at < to_bytes; at += chunk_bytes) {
        const int64_t index = chunk_find(
            tenant, pcc_kept_piece(kept, source->kept_place, (uint32_t)(at / chunk_bytes)));
        if (index < 0)
            continue; /* in its slot only */
        pcc_tenant_chunk_fill(tenant, save, (uint32_t)index, at,
                              (uint32_t)pcc_piece_bytes(save->payload_bytes, at, chunk_bytes));
    }
}

const struct pcc_source_ops pcc_source_kept = {.begin = begin, .want = want};

static int save_adopt(struct pcc_tenant *tenant, uint32_t binding, uint32_t place)
{
    const struct pcc_kept *kept = &tenant->bindings[binding].kept;
    const struct pcc_kept_save *found = pcc_kept_save(kept, place);
    struct pcc_save_request request = {.payload_bytes = found->entry.payload_bytes};
    struct pcc_source sources[PCC_SOURCES] = {{.ops = &pcc_source_kept}};
    struct pcc_save *saved;

    struct pcc_tenant_save *save =
        pcc_tenant_save_take(tenant, piece_count(tenant, found->entry.payload_bytes));
    if (save == NULL)
        return -ENOMEM;
    int error = begin(tenant, &sources[0], place, &request);
    if (error != 0)
        return error;
    request.tag = ++tenant->serial << 8 | (uint64_t)(save - tenant->saves);
    error = pcc_save_adopt(tenant->bindings[binding].saver, place, request.tag, &saved);
    if (error != 0)
        return error;
    pcc_tenant_save_enter(tenant, save, saved, &request, found->entry.sequence, sources);
    save->snapshot = found->entry.sequence;
    save->received = save->chunk_count;
    save->copied = true;
    want(tenant, save, &save->sources[0], 0, save->payload_bytes);
    return 0;
}

/* With the lock held: every copied save of the state, the newest first, since it counts most when
 * a lane or a slot is short. */
static uint32_t saves_adopt(struct pcc_tenant *tenant, uint32_t binding,
                            struct pcc_kept_outcome *outcomes)
{
    const struct pcc_kept *kept = &tenant->bindings[binding].kept;
    const uint32_t places = pcc_kept_header(kept)->places;
    uint64_t before = UINT64_MAX;
    uint32_t count = 0;

    while (count < PCC_KEPT_OUTCOMES_MAX) {
        uint32_t newest = places;
        for (uint32_t i = 0; i < places; i++)
            if (pcc_kept_is_copied(kept, i) && pcc_kept_save(kept, i)->entry.sequence < before &&
                (newest == places || pcc_kept_save(kept, i)->entry.sequence >
                                         pcc_kept_save(kept, newest)->entry.sequence))
                newest = i;
        if (newest == places)
            break;
        struct pcc_kept_outcome *out = &outcomes[count++];
        out->entry = pcc_kept_save(kept, newest)->entry;
        before = out->entry.sequence;
        out->error = save_adopt(tenant, binding, newest);
        if (out->error != 0)
            pcc_kept_end(kept, newest);
    }
    return count;
}

/* Whether the state is one of this volume, and of a tenant like this. */
static bool state_fits(const struct pcc_tenant *tenant, const struct pcc_kept *kept,
                       struct pcc_volume *volume)
{
    const struct pcc_kept_header *header = pcc_kept_header(kept);
    struct pcc_record record;

    pcc_volume_record(volume, &record);
    return memcmp(header->volume_uuid, record.volume_uuid, PCC_UUID_BYTES) == 0 &&
           header->chunk_bytes == tenant->spec.chunk_bytes &&
           header->block_bytes == record.block_bytes &&
           header->slot_stride_bytes == record.slot_stride_bytes &&
           header->places == pcc_kept_places(tenant->spec.lanes);
}

int pcc_tenant_bind_kept(struct pcc_tenant *tenant, struct pcc_volume *volume, int fd, uint64_t id,
                         struct pcc_kept_outcome *outcomes, uint32_t *count_out)
{
    void *bytes;
    uint64_t length;

    *count_out = 0;
    PCC_LOCKED(&tenant->control);
    const uint32_t index = pcc_tenant_binding_find(tenant, NULL);
    struct pcc_tenant_binding *binding = &tenant->bindings[index % PCC_TENANT_VOLUMES];
    if (tenant->session != 0 || index == PCC_TENANT_VOLUMES ||
        pcc_tenant_binding_find(tenant, volume) < PCC_TENANT_VOLUMES)
        return -EBUSY;
    if (id == 0 || tenant->label[0] == '\0')
        return -EINVAL;
    int error = pcc_pool_state_map(fd, &bytes, &length);
    if (error != 0)
        return error;
    error = pcc_kept_accept(&binding->kept, bytes, length);
    if (error == 0)
        error = state_fits(tenant, &binding->kept, volume)
                    ? pcc_tenant_binding_open(tenant, index, volume)
                    : -EINVAL;
    if (error != 0) {
        binding->kept = (struct pcc_kept){0};
        (void)munmap(bytes, length);
        return error;
    }
    binding->kept_id = id;
    PCC_LOCKED(&tenant->lock);
    *count_out = saves_adopt(tenant, index, outcomes);
    return 0;
}

/* -- settling: checked, and handed over -- */

/* With the lock held. */
static struct pcc_tenant_save *unsettled_oldest(struct pcc_tenant *tenant)
{
    struct pcc_tenant_save *oldest = NULL;

    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (save->sources[0].ops == &pcc_source_kept && save->sources[0].wanted > 0 &&
            save->save != NULL && (oldest == NULL || save->sequence < oldest->sequence))
            oldest = save;
    }
    return oldest;
}

/* With the lock held, which is released meanwhile: one chunk is checked and handed over. */
static int settle_chunk(struct pcc_tenant *tenant, struct pcc_tenant_save *save, uint32_t position,
                        void *buffer)
{
    const struct pcc_kept *kept = &tenant->bindings[save->binding].kept;
    struct pcc_save *saved = save->save;
    const uint64_t tag = save->tag;
    const int64_t index =
        chunk_find(tenant, pcc_kept_piece(kept, save->sources[0].kept_place, position));
    int error = 0;

    if (pcc_save_was_referred(saved, position)) { /* compared by a writer */
        const uint64_t at = (uint64_t)position * tenant->spec.chunk_bytes;
        const struct pcc_chunk piece = {.payload_offset_bytes = at,
                                        .length_bytes = (uint32_t)pcc_piece_bytes(
                                            save->payload_bytes, at, tenant->spec.chunk_bytes),
                                        .index = UINT32_MAX,
                                        .checksums = pcc_save_kept_checksums(saved, position)};
        save->referred++;
        return pcc_save_chunk(saved, &piece);
    }
    if (index >= 0)
        tenant->chunks[index].settling = true;
    pcc_tenant_unlock(tenant);
    if (index < 0) /* only then memory is needed that may not be had */
        error = buffer != NULL ? pcc_save_found(saved, tag, position, buffer) : -ENOMEM;
    else if (!pcc_save_matches(saved, position, tenant->chunks[index].bytes,
                               tenant->chunks[index].length_bytes))
        error = -PCC_E_DAMAGED;
    pcc_tenant_lock(tenant);
    if (index >= 0)
        tenant->chunks[index].settling = false;
    if (error != 0 || index < 0 || save->save == NULL)
        return error;
    return pcc_tenant_hand_over(tenant, save, (uint32_t)index,
                                pcc_save_kept_checksums(saved, position));
}

static void settle(struct pcc_tenant *tenant, struct pcc_tenant_save *save, void *buffer)
{
    struct pcc_source *source = &save->sources[0];
    int error = 0;

    source->users++;
    for (uint32_t i = 0; error == 0 && save->save != NULL && i < save->chunk_count; i++)
        error = settle_chunk(tenant, save, i, buffer);
    source->users--;
    source->wanted = 0;
    if (save->save == NULL)
        return; /* a write has failed, and its end was reported */
    if (error == 0)
        error = pcc_save_seal(save->save);
    if (error != 0)
        pcc_save_abort(save->save, error);
}

void pcc_tenant_settle(struct pcc_tenant *tenant)
{
    struct pcc_tenant_save *save;
    void *buffer = aligned_alloc(PCC_IO_ALIGN, tenant->spec.chunk_bytes);

    pcc_tenant_lock(tenant);
    while ((save = unsettled_oldest(tenant)) != NULL)
        settle(tenant, save, buffer);
    pcc_tenant_adopted_write(tenant);
    pcc_tenant_unlock(tenant);
    free(buffer);
}
