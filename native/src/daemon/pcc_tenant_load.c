/* Loads: payload on its way back to the client. Reader threads take pieces of one chunk's length in
 * order; a piece whose chunk is still cached is lent as it is, any other is read from the volume
 * into a chunk that is taken for it. This is the only place where that is decided, and it is
 * decided for each chunk: what a load will find in memory is not known before.
 *
 * The client checks the bytes while it copies them. If they do not match, the load goes back to
 * that piece and becomes careful: from there on everything is checked here first. */
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_tenant_private.h"

struct piece {
    uint64_t offset_bytes;
    uint64_t length_bytes;
};

/* Chunks that one load may hold at a time: enough to keep disk and client busy. More are more pages
 * that the kernel has to clear first. */
static uint32_t lent_max(const struct pcc_tenant *tenant)
{
    return 2 + 2 * tenant->spec.writers_per_lane;
}

static bool over(const struct pcc_tenant *tenant)
{
    const struct pcc_tenant_load *load = &tenant->load;

    return load->stop || load->result != 0 || !tenant->attached || tenant->broken;
}

/* No piece is left to send; the load may still go back to one that is lent. */
static bool all_sent(const struct pcc_tenant_load *load)
{
    return load->next_bytes >= load->end_bytes;
}

static bool piece_next(struct pcc_tenant *tenant, struct piece *out)
{
    struct pcc_tenant_load *load = &tenant->load;
    const uint64_t chunk_bytes = tenant->spec.chunk_bytes;

    while (!over(tenant) && load->lent > 0 && (all_sent(load) || load->lent >= lent_max(tenant)))
        (void)pthread_cond_wait(&tenant->chunk_back, &tenant->lock);
    if (over(tenant) || all_sent(load))
        return false;
    uint64_t end = (load->next_bytes / chunk_bytes + 1) * chunk_bytes;
    if (end > load->end_bytes)
        end = load->end_bytes;
    *out = (struct piece){.offset_bytes = load->next_bytes, .length_bytes = end - load->next_bytes};
    load->next_bytes = end;
    return true;
}

/* Only whole: the chunk of a base may be longer or shorter than this payload's. Sequence 0 is that
 * of another rank's checkpoint, and of a save that has no number yet: neither is cached. */
static int64_t cached_find(const struct pcc_tenant *tenant, uint64_t sequence,
                           uint64_t offset_bytes, uint64_t length_bytes)
{
    for (uint32_t i = 0; sequence != 0 && i < tenant->chunk_count; i++) {
        const struct pcc_tenant_chunk *chunk = &tenant->chunks[i];
        if (chunk->state == PCC_CHUNK_CACHED && chunk->sequence == sequence &&
            chunk->offset_bytes == offset_bytes && chunk->length_bytes == length_bytes &&
            !pcc_tenant_retires(tenant, chunk))
            return i;
    }
    return -1;
}

static void take(struct pcc_tenant *tenant, uint32_t index, bool cached)
{
    pcc_tenant_chunk_set(tenant, &tenant->chunks[index], PCC_CHUNK_READING);
    tenant->chunks[index].lent_cached = cached;
    tenant->load.lent++;
}

static void go_back_to(struct pcc_tenant_load *load, uint64_t offset_bytes)
{
    load->careful = true;
    if (load->next_bytes > offset_bytes)
        load->next_bytes = offset_bytes;
}

void pcc_tenant_load_put_back(struct pcc_tenant *tenant, uint32_t index, bool intact)
{
    struct pcc_tenant_chunk *chunk = &tenant->chunks[index];

    tenant->load.lent--;
    if (!intact && chunk->lent_unchecked && chunk->lent_to == tenant->load.id)
        go_back_to(&tenant->load, chunk->offset_bytes);
    chunk->lent_unchecked = false;
    if (chunk->lent_cached && intact) {
        chunk->lent_cached = false;
        pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_CACHED);
    } else {
        pcc_tenant_chunk_free(tenant, index);
    }
    (void)pthread_cond_broadcast(&tenant->chunk_back);
}

/* What the client checks the chunk against. */
static void checksums_put(struct pcc_tenant *tenant, uint32_t index, const struct piece *piece)
{
    memcpy(pcc_page_checksums(&tenant->view, index),
           pcc_load_checksums(tenant->load.load, piece->offset_bytes),
           pcc_ceil_div(piece->length_bytes, tenant->geometry.block_bytes) * sizeof(uint64_t));
}

static void send(struct pcc_tenant *tenant, uint32_t index, const struct piece *piece, bool checked)
{
    struct pcc_tenant_chunk *chunk = &tenant->chunks[index];
    const struct pcc_message message = {.kind = PCC_MSG_DATA,
                                        .chunk = index,
                                        .id = tenant->load.id,
                                        .offset_bytes = piece->offset_bytes,
                                        .length_bytes = (uint32_t)piece->length_bytes,
                                        .result =
                                            (checked ? PCC_DATA_CHECKED : PCC_DATA_UNCHECKED) |
                                            (chunk->lent_cached ? PCC_DATA_CACHED : 0)};

    chunk->offset_bytes = piece->offset_bytes;
    chunk->lent_unchecked = !checked;
    chunk->lent_to = tenant->load.id;
    if (!checked)
        checksums_put(tenant, index, piece);
    pcc_tenant_grant_segments(tenant);
    if (over(tenant) || pcc_tenant_push(tenant, &message) != 0) {
        pcc_tenant_load_put_back(tenant, index, true);
        return;
    }
    pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_LENT);
    pcc_tenant_wake_client(tenant);
}

/* True when the piece's chunk was cached and is on its way. The client can write to its chunks at
 * any time, so trust comes from the checksums of the volume. */
static bool send_cached(struct pcc_tenant *tenant, const struct piece *piece)
{
    const uint64_t chunk_bytes = tenant->spec.chunk_bytes;
    const uint64_t sequence = tenant->load.cached_as;
    const uint64_t at = piece->offset_bytes / chunk_bytes * chunk_bytes;
    const uint64_t length =
        pcc_piece_bytes(pcc_load_entry(tenant->load.load)->payload_bytes, at, chunk_bytes);
    int64_t found = cached_find(tenant, sequence, at, length);

    if (found < 0 && sequence != 0) { /* what was never copied is perhaps cached of the base */
        const uint64_t base = pcc_load_base_of(tenant->load.load, at, length);
        found = base != 0 ? cached_find(tenant, base, at, length) : -1;
    }
    if (found < 0)
        return false;
    const uint32_t index = (uint32_t)found;
    const struct pcc_tenant_chunk *chunk = &tenant->chunks[index];
    const struct piece whole = {.offset_bytes = chunk->offset_bytes,
                                .length_bytes = chunk->length_bytes};
    const bool careful = tenant->load.careful;
    take(tenant, index, true);
    if (careful) {
        pcc_tenant_unlock(tenant);
        const int error =
            pcc_load_check(tenant->load.load, chunk->bytes, whole.offset_bytes, whole.length_bytes);
        pcc_tenant_lock(tenant);
        if (error != 0) {
            pcc_tenant_load_put_back(tenant, index, false);
            return false;
        }
    }
    send(tenant, index, &whole, careful);
    return true;
}

/* Without the lock, after a mismatch: the client may have written to the chunk. Read once more
 * where it cannot, so that only the disk's own bytes are called damaged. */
static int read_privately(struct pcc_tenant *tenant, uint32_t index, const struct piece *piece)
{
    const uint64_t length = pcc_align_up(piece->length_bytes, PCC_IO_ALIGN);
    void *bytes = aligned_alloc(PCC_IO_ALIGN, length);

    if (bytes == NULL)
        return -ENOMEM;
    const int error =
        pcc_load_chunk(tenant->load.load, bytes, piece->offset_bytes, piece->length_bytes);
    if (error == 0)
        memcpy(tenant->chunks[index].bytes, bytes, length);
    free(bytes);
    return error;
}

static int read_into(struct pcc_tenant *tenant, uint32_t index, const struct piece *piece,
                     bool careful)
{
    struct pcc_load *load = tenant->load.load;
    uint8_t *bytes = tenant->chunks[index].bytes;

    if (!careful)
        return pcc_load_read(load, bytes, piece->offset_bytes, piece->length_bytes);
    const int error = pcc_load_chunk(load, bytes, piece->offset_bytes, piece->length_bytes);
    return error == -PCC_E_DAMAGED ? read_privately(tenant, index, piece) : error;
}

static int send_read(struct pcc_tenant *tenant, const struct piece *piece)
{
    int64_t found = -1;

    while (found < 0) {
        if (over(tenant))
            return 0;
        /* With nothing lent there is nothing to wait for but saves: take their chunks, too. */
        found = pcc_tenant_pick(tenant, tenant->load.cached_as, tenant->load.lent > 0);
        if (found < 0)
            (void)pthread_cond_wait(&tenant->chunk_back, &tenant->lock);
    }
    const uint32_t index = (uint32_t)found;
    const bool careful = tenant->load.careful;
    take(tenant, index, false);
    pcc_tenant_unlock(tenant);
    const int error = read_into(tenant, index, piece, careful);
    pcc_tenant_lock(tenant);
    if (error != 0) {
        pcc_tenant_load_put_back(tenant, index, false);
        return error;
    }
    send(tenant, index, piece, careful);
    return 0;
}

static void *reader_run(void *argument)
{
    struct pcc_tenant *tenant = argument;
    struct piece piece;

    PCC_LOCKED(&tenant->lock);
    while (piece_next(tenant, &piece)) {
        if (send_cached(tenant, &piece))
            continue;
        const int error = send_read(tenant, &piece);
        if (error != 0 && tenant->load.result == 0) {
            tenant->load.result = error;
            (void)pthread_cond_broadcast(&tenant->chunk_back);
        }
    }
    return NULL;
}

/* Opens the checkpoint and cuts the range to what reads and checksums are aligned to. */
static int load_prepare(struct pcc_tenant *tenant)
{
    struct pcc_tenant_load *load = &tenant->load;
    int error = pcc_load_open(load->volume, load->sequence, &load->load);

    if (error != 0)
        return error;
    const uint64_t payload_bytes = pcc_load_entry(load->load)->payload_bytes;
    const uint64_t block_bytes = pcc_load_block_bytes(load->load);
    const uint64_t align = block_bytes > PCC_IO_ALIGN ? block_bytes : PCC_IO_ALIGN;
    if (load->end_bytes > payload_bytes || tenant->spec.chunk_bytes % align != 0)
        return -EINVAL;
    /* The rows of the page are of the bound volume's blocks. */
    load->careful = block_bytes != tenant->geometry.block_bytes;
    load->next_bytes = load->next_bytes / align * align;
    load->end_bytes = pcc_align_up(load->end_bytes, align);
    if (load->end_bytes > payload_bytes)
        load->end_bytes = payload_bytes;
    return 0;
}

static void load_end(struct pcc_tenant *tenant, int error)
{
    struct pcc_tenant_load *load = &tenant->load;

    pcc_load_close(load->load);
    PCC_LOCKED(&tenant->lock);
    load->load = NULL;
    if (load->result == 0)
        load->result = error;
    if (load->result == 0 && (over(tenant) || load->next_bytes < load->end_bytes))
        load->result = -PCC_E_ABORTED;
    if (tenant->attached && !tenant->broken) {
        const struct pcc_message message = {
            .kind = PCC_MSG_END, .id = load->id, .result = load->result};
        if (pcc_tenant_push(tenant, &message) == 0)
            pcc_tenant_wake_client(tenant);
    }
    load->active = false;
    pcc_tenant_put(tenant, (struct pcc_event){.kind = PCC_EVENT_LOAD_ENDED,
                                              .error = load->result,
                                              .session = load->session,
                                              .id = load->id,
                                              .sequence = load->sequence});
    pcc_tenant_queue_look(tenant); /* it held a slot */
}

static void *leader_run(void *argument)
{
    struct pcc_tenant *tenant = argument;
    const int error = load_prepare(tenant);

    if (error == 0)
        pcc_threads_run(tenant->spec.writers_per_lane, reader_run, tenant, "pcc-load");
    load_end(tenant, error);
    return NULL;
}

static void leader_join(struct pcc_tenant *tenant)
{
    if (tenant->load.joinable)
        (void)pthread_join(tenant->load.leader, NULL);
    tenant->load.joinable = false;
}

static int load_refused(struct pcc_tenant *tenant)
{
    PCC_LOCKED(&tenant->lock);
    if (!tenant->attached || tenant->broken)
        return -ENOTCONN;
    return tenant->load.active ? -EBUSY : 0;
}

int pcc_tenant_load(struct pcc_tenant *tenant, struct pcc_volume *volume, bool own,
                    uint64_t sequence, uint64_t offset_bytes, uint64_t length_bytes,
                    uint64_t load_id)
{
    struct pcc_tenant_load *load = &tenant->load;
    uint64_t end_bytes;

    if (__builtin_add_overflow(offset_bytes, length_bytes, &end_bytes))
        return -EINVAL;
    PCC_LOCKED(&tenant->control);
    int error = load_refused(tenant);
    if (error != 0)
        return error;
    leader_join(tenant); /* has put its last event: this does not wait */

    pcc_tenant_lock(tenant);
    load->active = true;
    load->stop = false;
    load->volume = volume;
    load->load = NULL;
    load->id = load_id;
    load->session = tenant->session;
    load->sequence = sequence;
    load->cached_as = own ? sequence : 0;
    load->next_bytes = offset_bytes;
    load->end_bytes = end_bytes;
    load->careful = false;
    load->result = 0;
    pcc_tenant_unlock(tenant);
    error = pcc_thread_start(&load->leader, leader_run, tenant, "pcc-load");
    load->joinable = error == 0;
    if (error != 0) {
        PCC_LOCKED(&tenant->lock);
        load->active = false;
    }
    return error;
}

void pcc_tenant_load_stop(struct pcc_tenant *tenant)
{
    pcc_tenant_lock(tenant);
    tenant->load.stop = true;
    (void)pthread_cond_broadcast(&tenant->chunk_back);
    pcc_tenant_unlock(tenant);
    leader_join(tenant);
}
