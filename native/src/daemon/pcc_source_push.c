/* Push: the client fills the chunks that it was granted, and what its messages say is checked here.
 * What may be in a base already is offered first: only checksums come. */
#include <string.h>

#include "daemon/pcc_tenant_private.h"

/* Chunks of a checkpoint that is not durable yet are taken for new data only when the client has
 * fewer than this many left to fill: late, but before it stalls. */
#define CHUNKS_AHEAD 4u
/* A process that was killed closes its sockets some time before it has ended: its GPU's driver
 * takes the GPU's memory apart in between. */
#define DEATH_LIMIT_MS 2000

void pcc_push_hand_out(struct pcc_tenant *tenant)
{
    bool sent = false;

    if (!tenant->attached || tenant->broken || tenant->granted_count >= tenant->missing)
        return;
    pcc_tenant_grant_segments(tenant);
    while (tenant->granted_count < tenant->missing) {
        const int64_t index = pcc_tenant_pick(tenant, 0, tenant->granted_count >= CHUNKS_AHEAD);
        if (index < 0)
            break;
        struct pcc_tenant_chunk *chunk = &tenant->chunks[index];
        if (!tenant->segments[chunk->segment].granted)
            break; /* the socket is full: tried again with the next chunk that moves */
        const struct pcc_message message = {.kind = PCC_MSG_FREE, .chunk = (uint32_t)index};
        if (pcc_tenant_push(tenant, &message) != 0)
            break;
        pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_GRANTED);
        tenant->granted_count++;
        sent = true;
    }
    if (sent)
        pcc_tenant_wake_client(tenant);
}

/* -- messages -- */

/* Out of the page before they are looked at: there they may change at any time. */
static void checksums_take(struct pcc_tenant *tenant, const struct pcc_message *message,
                           const uint64_t *checksums)
{
    memcpy(tenant->checksums, checksums,
           pcc_ceil_div(message->length_bytes, tenant->geometry.block_bytes) * sizeof(uint64_t));
}

/* The save that a message brings a piece of; NULL when no honest client brings this one. */
static struct pcc_tenant_save *piece_of(struct pcc_tenant *tenant,
                                        const struct pcc_message *message)
{
    const uint64_t chunk_bytes = tenant->spec.chunk_bytes;
    struct pcc_tenant_save *save = pcc_tenant_find(tenant, message->id);

    if (save == NULL || save->copied)
        return NULL;
    const uint64_t offset = message->offset_bytes;
    if (offset >= save->payload_bytes || offset % chunk_bytes != 0 ||
        pcc_source_at(save, offset)->ops != &pcc_source_push ||
        message->length_bytes != pcc_piece_bytes(save->payload_bytes, offset, chunk_bytes) ||
        (save->is_open && message->length_bytes != chunk_bytes))
        return NULL;
    const uint64_t part = offset / chunk_bytes;
    return (save->seen[part / 64] >> (part % 64) & 1u) == 0 ? save : NULL;
}

int pcc_push_take_full(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    if (message->chunk >= tenant->chunk_count ||
        tenant->chunks[message->chunk].state != PCC_CHUNK_GRANTED ||
        (message->result != PCC_FULL_HASHED && message->result != PCC_FULL_BARE))
        return -PCC_E_BAD_PEER;
    struct pcc_tenant_save *save = piece_of(tenant, message);
    if (save == NULL)
        return -PCC_E_BAD_PEER;
    struct pcc_source *source = pcc_source_at(save, message->offset_bytes);
    const bool goes_on = !save->aborted && save->save != NULL;
    if (goes_on && source->wanted == 0) /* a piece that is to be offered first */
        return -PCC_E_BAD_PEER;

    pcc_tenant_received(tenant, save, message->offset_bytes);
    tenant->granted_count--;
    if (!goes_on) { /* was under way when it ended */
        pcc_tenant_chunk_free(tenant, message->chunk);
        return 0;
    }
    source->wanted--;
    tenant->missing--;
    const bool hashed = message->result == PCC_FULL_HASHED;
    if (hashed)
        checksums_take(tenant, message, pcc_page_checksums(&tenant->view, message->chunk));
    pcc_tenant_chunk_to_save(tenant, save, message->chunk, message->offset_bytes,
                             message->length_bytes, hashed ? tenant->checksums : NULL);
    return pcc_tenant_copy_check(tenant, save);
}

/* Chunks of the bound that will never come are not missing any more. */
int pcc_push_take_length(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    struct pcc_tenant_save *save = pcc_tenant_find(tenant, message->id);
    struct pcc_save_length length = {.tree_offset_bytes = message->offset_bytes,
                                     .tree_bytes = message->length_bytes};

    if (save == NULL || !save->is_open ||
        __builtin_add_overflow(message->offset_bytes, message->length_bytes,
                               &length.payload_bytes) ||
        length.payload_bytes > save->payload_bytes)
        return -PCC_E_BAD_PEER;
    const bool goes_on = !save->aborted && save->save != NULL;
    if (goes_on && pcc_save_set_length(save->save, &length) == -EINVAL)
        return -PCC_E_BAD_PEER;
    const uint32_t count = (uint32_t)pcc_ceil_div(length.payload_bytes, tenant->spec.chunk_bytes);
    struct pcc_source *source = pcc_source_at(save, 0);
    if (goes_on) {
        source->wanted -= save->chunk_count - count;
        tenant->missing -= save->chunk_count - count;
    }
    source->to_bytes = save->payload_bytes = length.payload_bytes;
    save->chunk_count = count;
    save->is_open = false;
    return pcc_tenant_copy_check(tenant, save);
}

/* A writer compares, because reading the base's manifest may wait for the disk. */
int pcc_push_take_offer(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    struct pcc_tenant_save *save = piece_of(tenant, message);

    if (message->chunk >= PCC_OFFERS || save == NULL)
        return -PCC_E_BAD_PEER;
    if (save->aborted || save->save == NULL)
        return 0;
    if (message->offset_bytes >= save->offered_bytes)
        return -PCC_E_BAD_PEER;
    checksums_take(tenant, message, pcc_page_offer(&tenant->view, message->chunk));
    const struct pcc_chunk piece = {.payload_offset_bytes = message->offset_bytes,
                                    .length_bytes = message->length_bytes,
                                    .index = UINT32_MAX,
                                    .checksums = tenant->checksums};
    const int error = pcc_save_chunk(save->save, &piece);
    if (error == -EINVAL) /* for the second time */
        return -PCC_E_BAD_PEER;
    if (error != 0)
        pcc_tenant_abort(tenant, save, error);
    pcc_tenant_seen(tenant, save, message->offset_bytes, true);
    return 0;
}

/* -- the verbs -- */

static int begin(struct pcc_tenant *tenant, struct pcc_source *source, uint64_t name,
                 struct pcc_save_request *request)
{
    (void)tenant;
    (void)name;
    source->to_bytes = request->payload_bytes;
    if (source->from_bytes > 0) /* what is offered begins with the payload */
        request->offered_bytes = 0;
    return 0;
}

static void want(struct pcc_tenant *tenant, struct pcc_tenant_save *save, struct pcc_source *source,
                 uint64_t from_bytes, uint64_t to_bytes)
{
    const uint32_t count = (uint32_t)pcc_ceil_div(to_bytes - from_bytes, tenant->spec.chunk_bytes);

    (void)save;
    source->wanted += count;
    tenant->missing += count;
    pcc_push_hand_out(tenant);
}

static int answer(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                  uint64_t offset_bytes, bool in_base)
{
    const struct pcc_message message = {.kind = PCC_MSG_ANSWER,
                                        .id = save->snapshot,
                                        .offset_bytes = offset_bytes,
                                        .result = in_base};

    return pcc_tenant_push(tenant, &message);
}

static void abandon(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                    struct pcc_source *source)
{
    (void)save;
    tenant->missing -= source->wanted;
    source->wanted = 0;
}

/* A client that has closed, or whose process is known to have ended, writes to no chunk. */
static bool is_quiet(const struct pcc_tenant *tenant)
{
    /* Acquire pairs with the client's release. */
    return tenant->granted_count == 0 || PCC_READ_ACQUIRE(&tenant->view.page->quiet) != 0 ||
           pcc_process_ended(tenant->trainer_fd, DEATH_LIMIT_MS);
}

static void leave(struct pcc_tenant *tenant)
{
    const bool quiet = is_quiet(tenant); /* nothing is granted to a broken session */

    PCC_LOCKED(&tenant->lock);
    for (uint32_t i = 0; i < tenant->chunk_count; i++) {
        if (tenant->chunks[i].state != PCC_CHUNK_GRANTED)
            continue;
        if (quiet)
            pcc_tenant_chunk_free(tenant, i);
        else
            pcc_tenant_chunk_set(tenant, &tenant->chunks[i], PCC_CHUNK_LEFT);
    }
    tenant->granted_count = 0;
}

const struct pcc_source_ops pcc_source_push = {
    .begin = begin, .want = want, .answer = answer, .abandon = abandon, .leave = leave};
