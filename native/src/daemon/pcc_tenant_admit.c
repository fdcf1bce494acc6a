/* Admission: how the first snapshot of the queue becomes a save, and what the streams of the
 * trainer's GPUs wait for.
 *
 * A pulled copy counts only if its trainer lived after the last read: CUDA does not say what an
 * importer reads once the exporter has ended. Only then `done` is stored, which releases the
 * trainer's stream; a failed copy stores `done`, too, but after its word has become final (P4). */
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_tenant_private.h"

#define RAISE_TRIES_MAX 64u /* a hostile client may change the word meanwhile */

/* An entry never used, else the one that ended longest ago: a message that is under way when its
 * save ends still finds it. */
struct pcc_tenant_save *pcc_tenant_save_take(struct pcc_tenant *tenant, uint32_t chunk_count)
{
    struct pcc_tenant_save *best = NULL;
    const uint32_t words = (uint32_t)pcc_ceil_div(chunk_count, 64);

    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (save->save == NULL && save->pulls == 0 && save != tenant->settling &&
            (best == NULL || save->tag < best->tag))
            best = save;
    }
    if (best == NULL)
        return NULL;
    if (best->seen_words < words) { /* only until every entry has seen the largest payload */
        uint64_t *seen = realloc(best->seen, words * sizeof(*seen));
        if (seen == NULL)
            return NULL;
        best->seen = seen;
        best->seen_words = words;
    }
    memset(best->seen, 0, words * sizeof(*best->seen));
    return best;
}

/* The entry of a save that was just begun. */
static void save_fill(struct pcc_tenant *tenant, struct pcc_tenant_save *save, uint64_t snapshot,
                      const struct pcc_save_request *request, struct pcc_save *saved,
                      uint64_t sequence)
{
    uint64_t *seen = save->seen;
    const uint32_t seen_words = save->seen_words;
    const uint32_t chunk_count =
        (uint32_t)pcc_ceil_div(request->payload_bytes, tenant->spec.chunk_bytes);

    const uint64_t base = pcc_save_base(saved);
    const uint64_t offered_bytes =
        base == 0 ? 0
                  : pcc_offered_end(request->offered_bytes, request->payload_bytes,
                                    tenant->spec.chunk_bytes);
    const uint32_t wanted = chunk_count - (uint32_t)(offered_bytes / tenant->spec.chunk_bytes);

    *save = (struct pcc_tenant_save){.tag = request->tag,
                                     .snapshot = snapshot,
                                     .session = tenant->session,
                                     .sequence = sequence,
                                     .payload_bytes = request->payload_bytes,
                                     .binding = tenant->bound,
                                     .chunk_count = chunk_count,
                                     .wanted = wanted,
                                     .base = base,
                                     .offered_bytes = offered_bytes,
                                     .save = saved,
                                     .seen = seen,
                                     .seen_words = seen_words};
    tenant->bindings[tenant->bound].active++;
    tenant->missing += wanted;
}

/* What the volume is asked for. */
static struct pcc_save_request request_of(struct pcc_tenant *tenant,
                                          const struct pcc_tenant_wait *wait)
{
    const struct pcc_request *from = &wait->request;
    struct pcc_save_request made = {.sequence = wait->sequence,
                                    .step = from->step,
                                    .incarnation = wait->incarnation,
                                    .world_size = wait->world_size,
                                    .payload_bytes = from->payload_bytes,
                                    .tree_offset_bytes = from->tree_offset_bytes,
                                    .tree_bytes = from->tree_bytes,
                                    .frozen_bytes = from->frozen_bytes,
                                    .offered_bytes = from->offered_bytes};

    if (from->map != 0) /* the daemon fills the beginning by itself */
        made.offered_bytes = 0;
    if (wait->sequence == 0 && tenant->policy.numbers) {
        made.incarnation = tenant->policy.incarnation;
        made.world_size = tenant->policy.world_size;
        if (tenant->last_sequence != 0) /* the volume's next one is above it */
            (void)pcc_volume_take_sequence(tenant->bindings[tenant->bound].volume,
                                           tenant->last_sequence);
    }
    made.unnumbered = wait->sequence == 0 && !tenant->policy.numbers;
    return made;
}

/* An entry of the table, and a lane, a slot and mostly a sequence of the volume. */
static int save_begin(struct pcc_tenant *tenant, const struct pcc_tenant_wait *wait,
                      struct pcc_tenant_save **out)
{
    struct pcc_save_request request = request_of(tenant, wait);
    const struct pcc_tenant_binding *binding = &tenant->bindings[tenant->bound];
    struct pcc_save *saved;
    uint64_t sequence;

    /* The number is the client's: before any memory is made for that many chunks. */
    const struct pcc_geometry geometry = pcc_volume_geometry(binding->volume);
    if (!pcc_geometry_fits(&geometry, request.payload_bytes, false))
        return -PCC_E_TOO_LARGE;
    struct pcc_tenant_save *save = pcc_tenant_save_take(
        tenant, (uint32_t)pcc_ceil_div(request.payload_bytes, tenant->spec.chunk_bytes));
    if (save == NULL)
        return -ENOMEM;
    request.tag = ++tenant->serial << 8 | (uint64_t)(save - tenant->saves);
    const int error = pcc_save_begin(binding->saver, &request, &saved, &sequence);
    if (error != 0)
        return error;
    save_fill(tenant, save, wait->request.snapshot, &request, saved, sequence);
    if (sequence > tenant->last_sequence)
        tenant->last_sequence = sequence;
    *out = save;
    return 0;
}

int pcc_tenant_begin(struct pcc_tenant *tenant, const struct pcc_tenant_wait *wait)
{
    const uint64_t snapshot = wait->request.snapshot;
    struct pcc_tenant_part *parts = NULL; /* taken over once the save has begun */
    struct pcc_tenant_save *save;

    if (tenant->bound == PCC_TENANT_VOLUMES)
        return -ENODEV;
    int error = wait->request.map != 0 ? pcc_tenant_pull_prepare(tenant, &wait->request, &parts) : 0;
    if (error == 0)
        error = save_begin(tenant, wait, &save);
    if (error != 0) {
        pcc_tenant_pull_drop(parts);
        return error;
    }
    /* Relaxed: the word's move publishes it. */
    atomic_store_explicit(&pcc_page_snapshot(&tenant->view, snapshot)->base,
                          save->offered_bytes > 0 ? save->base : 0, memory_order_relaxed);
    if (!pcc_word_move(pcc_page_snapshot(&tenant->view, snapshot), snapshot, PCC_WORD_REQUESTED,
                       PCC_WORD_COPYING)) {
        save->silent = true;
        pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
        pcc_tenant_pull_drop(parts);
        return -PCC_E_ABORTED;
    }
    pcc_tenant_outcome(tenant, snapshot, PCC_OUTCOME_COPYING, save->sequence, 0);
    const struct pcc_event event = {.kind = PCC_EVENT_BEGUN,
                                    .session = tenant->session,
                                    .id = snapshot,
                                    .sequence = save->sequence};
    pcc_tenant_put(tenant, &event);
    pcc_tenant_pull_start(tenant, save, parts);
    pcc_tenant_hand_out(tenant);
    pcc_tenant_wake_client(tenant);
    return 0;
}

int pcc_tenant_number_begun(struct pcc_tenant *tenant, uint64_t snapshot, uint64_t sequence,
                            uint64_t incarnation, uint32_t world_size)
{
    struct pcc_tenant_save *save = pcc_tenant_find(tenant, snapshot);

    if (save == NULL || save->save == NULL || save->aborted || save->copied)
        return 0;
    const int error = pcc_save_number(save->save, sequence, incarnation, world_size);
    if (error != 0)
        return error == -PCC_E_ABORTED ? 0 : error;
    save->sequence = sequence;
    if (sequence > tenant->last_sequence)
        tenant->last_sequence = sequence;
    for (uint32_t i = 0; i < tenant->chunk_count; i++)
        if (tenant->chunks[i].tag == save->tag)
            tenant->chunks[i].sequence = sequence;
    pcc_tenant_outcome(tenant, snapshot, PCC_OUTCOME_COPYING, sequence, 0);
    if (pcc_tenant_copy_check(tenant, save) != 0)
        pcc_tenant_break(tenant);
    return 0;
}

bool pcc_tenant_refuse_begun(struct pcc_tenant *tenant, uint64_t snapshot,
                             enum pcc_outcome outcome, uint64_t sequence)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);
    struct pcc_tenant_save *save = pcc_tenant_find(tenant, snapshot);

    if (save == NULL ||
        pcc_page_word(&tenant->view, snapshot) != pcc_word(snapshot, PCC_WORD_COPYING))
        return false;
    /* The outcome first: a client that sees REFUSED finds the reason. */
    pcc_tenant_outcome(tenant, snapshot, outcome, sequence, 0);
    const bool refused = pcc_word_move(entry, snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED);
    pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
    if (tenant->gpus != NULL)
        pcc_tenant_release_streams(tenant, snapshot);
    pcc_tenant_wake_client(tenant);
    return refused;
}

void pcc_tenant_set_outcome(struct pcc_tenant *tenant, uint64_t snapshot, enum pcc_outcome outcome,
                            uint64_t sequence, uint64_t newer)
{
    pcc_tenant_lock(tenant);
    pcc_tenant_outcome(tenant, snapshot, outcome, sequence, newer);
    pcc_tenant_wake_client(tenant);
    pcc_tenant_unlock(tenant);
}

/* -- the words that GPUs' streams wait for -- */

/* The daemon has read a GPU's part of the snapshot: the stream may continue. */
static void device_done(struct pcc_tenant *tenant, uint64_t snapshot, uint32_t device)
{
    _Atomic uint64_t *word = &pcc_page_words(&tenant->view, snapshot, device)->done;
    uint64_t now = atomic_load_explicit(word, memory_order_relaxed);

    for (uint32_t i = 0; now < snapshot && i < RAISE_TRIES_MAX; i++)
        /* Release: the copies, and the word that has become final, come before it. */
        if (atomic_compare_exchange_strong_explicit(word, &now, snapshot, memory_order_release,
                                                    memory_order_relaxed))
            return;
}

void pcc_tenant_release_streams(struct pcc_tenant *tenant, uint64_t snapshot)
{
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        device_done(tenant, snapshot, device);
}

void pcc_tenant_refuse_copy(struct pcc_tenant *tenant, uint64_t snapshot, uint64_t sequence)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);

    if (pcc_page_word(&tenant->view, snapshot) == pcc_word(snapshot, PCC_WORD_COPYING)) {
        /* The outcome first: a client that sees REFUSED finds the reason. */
        pcc_tenant_outcome(tenant, snapshot, PCC_OUTCOME_FAILED, sequence, 0);
        (void)pcc_word_move(entry, snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED);
    }
    pcc_tenant_release_streams(tenant, snapshot);
    pcc_tenant_wake_client(tenant);
}

/* -- judging what was pulled -- */

struct reading { /* the devices of a save that were read and not judged */
    uint64_t tag;
    uint32_t devices;
};

/* With the lock held. */
static struct reading reading_of(const struct pcc_tenant *tenant,
                                 const struct pcc_tenant_save *save)
{
    const bool goes_on =
        save->save != NULL && !save->aborted && !save->copied && save->session == tenant->session;

    return (struct reading){.tag = save->tag, .devices = goes_on ? save->read & ~save->judged : 0};
}

/* With the lock held: the trainer lived after these devices were read. */
static void count_as_read(struct pcc_tenant *tenant, struct pcc_tenant_save *save, uint32_t devices)
{
    save->judged |= devices;
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        if ((devices >> device & 1u) != 0)
            device_done(tenant, save->snapshot, device);
    pcc_tenant_wake_client(tenant);
    if (pcc_tenant_copy_check(tenant, save) != 0)
        pcc_tenant_break(tenant);
}

bool pcc_tenant_judge(struct pcc_tenant *tenant)
{
    struct reading before[PCC_TENANT_SAVES];
    bool any = false;

    pcc_tenant_lock(tenant);
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        before[i] = reading_of(tenant, &tenant->saves[i]);
        any = any || before[i].devices != 0;
    }
    pcc_tenant_unlock(tenant);
    if (!any)
        return false;
    /* After the last copy of each, and before the client sees COPIED. */
    const bool lives = pcc_process_lives(&tenant->pull.trainer);
    pcc_tenant_lock(tenant);
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        const struct reading now = reading_of(tenant, save);
        const uint32_t devices = now.tag == before[i].tag ? now.devices & before[i].devices : 0;
        if (devices != 0 && lives)
            count_as_read(tenant, save, devices);
        else if (devices != 0)
            pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
    }
    pcc_tenant_unlock(tenant);
    return true;
}
