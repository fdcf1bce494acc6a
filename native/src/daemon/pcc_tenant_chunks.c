/* Who holds which chunk: choosing, granting, taking back. Everything here runs under the tenant's
 * lock. What may be filled again is in three lists, so that a chunk is chosen in a few steps
 * however large the table is: 512 GiB are 32,768 chunks of 16 MiB. */
#include <sys/socket.h>

#include "daemon/pcc_tenant_private.h"

struct pcc_tenant_save *pcc_tenant_save_of(struct pcc_tenant *tenant, uint64_t tag)
{
    struct pcc_tenant_save *save = &tenant->saves[(tag & 0xff) % PCC_TENANT_SAVES];

    return tag != 0 && save->tag == tag && save->save != NULL ? save : NULL;
}

/* -- the lists -- */

static void list_leave(struct pcc_tenant_chunk *chunk)
{
    if (chunk->next == NULL)
        return;
    chunk->before->next = chunk->next;
    chunk->next->before = chunk->before;
    chunk->next = chunk->before = NULL;
}

static void list_enter(struct pcc_tenant_chunk *chunk, struct pcc_tenant_chunk *before)
{
    chunk->before = before;
    chunk->next = before->next;
    chunk->next->before = chunk;
    before->next = chunk;
}

void pcc_tenant_lists_clear(struct pcc_tenant *tenant)
{
    for (uint32_t i = 0; i < PCC_CHUNK_LISTS; i++)
        tenant->lists[i].next = tenant->lists[i].before = &tenant->lists[i];
}

void pcc_tenant_chunk_set(struct pcc_tenant *tenant, struct pcc_tenant_chunk *chunk,
                          enum pcc_chunk_state state)
{
    list_leave(chunk);
    chunk->state = state;
    if (pcc_tenant_retires(tenant, chunk))
        return;
    if (state == PCC_CHUNK_FREE) {
        list_enter(chunk, &tenant->lists[PCC_CHUNKS_FREE]);
    } else if (state == PCC_CHUNK_CACHED) {
        const enum pcc_chunk_list list =
            pcc_tenant_save_of(tenant, chunk->tag) != NULL ? PCC_CHUNKS_FLIGHT : PCC_CHUNKS_ENDED;
        list_enter(chunk, tenant->lists[list].before);
    }
}

void pcc_tenant_chunks_add(struct pcc_tenant *tenant, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++)
        list_enter(&tenant->chunks[i], tenant->lists[PCC_CHUNKS_FREE].before);
}

void pcc_tenant_chunks_retire(struct pcc_tenant *tenant)
{
    for (uint32_t i = tenant->chunk_count; i > 0; i--) {
        if (!pcc_tenant_retires(tenant, &tenant->chunks[i - 1]))
            return;
        list_leave(&tenant->chunks[i - 1]);
    }
}

/* A save that is being moved to another slot still reads its chunks and refuses. */
static bool uncache(struct pcc_tenant *tenant, uint32_t index)
{
    struct pcc_tenant_chunk *chunk = &tenant->chunks[index];
    struct pcc_tenant_save *save = pcc_tenant_save_of(tenant, chunk->tag);

    if (chunk->state == PCC_CHUNK_CACHED && save != NULL) {
        if (!pcc_save_uncache(tenant->bindings[save->binding].saver, chunk->tag,
                              (uint32_t)(chunk->offset_bytes / tenant->spec.chunk_bytes)))
            return false;
        save->immovable = true;
    }
    pcc_tenant_chunk_free(tenant, index);
    return true;
}

/* The first chunk of a list that does not hold `spare` and can be uncached; -1 when there is none.
 */
static int64_t list_pick(struct pcc_tenant *tenant, enum pcc_chunk_list list, uint64_t spare)
{
    struct pcc_tenant_chunk *next;

    for (struct pcc_tenant_chunk *chunk = tenant->lists[list].next; chunk != &tenant->lists[list];
         chunk = next) {
        const uint32_t index = (uint32_t)(chunk - tenant->chunks);
        tenant->looked_at++;
        next = chunk->next; /* uncache moves the chunk to another list */
        if ((spare == 0 || chunk->sequence != spare) && uncache(tenant, index))
            return index;
    }
    return -1;
}

int64_t pcc_tenant_pick(struct pcc_tenant *tenant, uint64_t spare, bool gently)
{
    int64_t index = list_pick(tenant, PCC_CHUNKS_FREE, 0);

    if (index < 0)
        index = list_pick(tenant, PCC_CHUNKS_ENDED, spare);
    if (index < 0 && spare != 0)
        index = list_pick(tenant, PCC_CHUNKS_ENDED, 0);
    if (index < 0 && !gently)
        index = list_pick(tenant, PCC_CHUNKS_FLIGHT, 0);
    return index;
}

bool pcc_tenant_uncache(struct pcc_tenant *tenant, uint32_t index)
{
    const struct pcc_tenant_save *save = pcc_tenant_save_of(tenant, tenant->chunks[index].tag);

    /* While its save may still have to be written elsewhere, it may be the only copy. */
    return (save == NULL || save->immovable) && uncache(tenant, index);
}

void pcc_tenant_chunk_free(struct pcc_tenant *tenant, uint32_t index)
{
    struct pcc_tenant_chunk *chunk = &tenant->chunks[index];

    chunk->lent_cached = false;
    chunk->lent_unchecked = false;
    chunk->tag = 0;
    chunk->sequence = 0;
    pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_FREE);
}

void pcc_tenant_chunk_fill(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                           uint32_t index, uint64_t offset_bytes, uint32_t length_bytes)
{
    struct pcc_tenant_chunk *chunk = &tenant->chunks[index];

    pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_FULL);
    chunk->tag = save->tag;
    chunk->sequence = save->sequence;
    chunk->offset_bytes = offset_bytes;
    chunk->length_bytes = length_bytes;
}

int pcc_tenant_hand_over(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                         uint32_t index, const uint64_t *checksums)
{
    const struct pcc_tenant_chunk *chunk = &tenant->chunks[index];
    const struct pcc_segment *segment = &tenant->segments[chunk->segment].memory;
    const struct pcc_chunk piece = {.bytes = chunk->bytes,
                                    .payload_offset_bytes = chunk->offset_bytes,
                                    .length_bytes = chunk->length_bytes,
                                    .index = index,
                                    .segment = segment->id,
                                    .segment_chunk = index - segment->first_chunk,
                                    .checksums = checksums};

    return pcc_save_chunk(save->save, &piece);
}

void pcc_tenant_chunks_forget(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                              bool keep_cached)
{
    for (uint32_t i = 0; i < tenant->chunk_count; i++) {
        struct pcc_tenant_chunk *chunk = &tenant->chunks[i];
        /* The base's chunks stay as long as the copied ones: a restore reads both. */
        if (keep_cached && save->referred > 0 && chunk->sequence == save->base &&
            chunk->state == PCC_CHUNK_CACHED)
            pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_CACHED);
        if (chunk->tag != save->tag)
            continue;
        if (chunk->state == PCC_CHUNK_CACHED && keep_cached)
            pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_CACHED); /* among the ended ones */
        else if (chunk->state == PCC_CHUNK_FULL || chunk->state == PCC_CHUNK_CACHED)
            pcc_tenant_chunk_free(tenant, i);
    }
}

void pcc_tenant_wake_client(struct pcc_tenant *tenant)
{
    if (tenant->attached)
        pcc_bell_ring(&tenant->view.page->client_bell);
}

int pcc_tenant_push(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    const int error = pcc_ring_push(&tenant->view.to_client, message);

    if (error != 0) /* an honest client's ring has room for every chunk and the loads */
        pcc_tenant_break(tenant);
    return error;
}

static bool grant_send(struct pcc_tenant *tenant, uint32_t index)
{
    const struct pcc_segment *memory = &tenant->segments[index].memory;
    const struct pcc_grant grant = {
        .magic = PCC_GRANT_MAGIC,
        .kind = PCC_GRANT_ADD,
        .segment = tenant->segments[index].number,
        .first_chunk = memory->first_chunk,
        .chunk_count = memory->chunk_count,
        .bytes = memory->length_bytes,
    };

    /* A client that does not read its socket gets no memory: the daemon does not wait for it. */
    return pcc_packet_send(tenant->socket_fd, &grant, sizeof(grant), memory->fd, MSG_DONTWAIT) == 0;
}

void pcc_tenant_grant_segments(struct pcc_tenant *tenant)
{
    if (!tenant->attached || tenant->broken)
        return;
    bool sent = false;
    for (uint32_t i = 0; i < tenant->segment_count; i++) {
        if (tenant->segments[i].granted || tenant->segments[i].asked)
            continue;
        if (!grant_send(tenant, i))
            break;
        tenant->segments[i].granted = true;
        sent = true;
    }
    if (sent)
        pcc_tenant_wake_client(tenant); /* it maps them before it needs them */
}

void pcc_tenant_pass_on(struct pcc_tenant *tenant)
{
    pcc_push_hand_out(tenant);
    (void)pthread_cond_broadcast(&tenant->chunk_back);
}
