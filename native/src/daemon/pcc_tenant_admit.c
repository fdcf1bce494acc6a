/* Admission: which snapshots become saves; and what the streams of the trainer's GPUs wait for.
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

/* 0 when the word of `snapshot` says REQUESTED. */
static int requested(const struct pcc_tenant *tenant, uint64_t snapshot)
{
    const uint64_t word = pcc_page_word(&tenant->view, snapshot);

    if (word == pcc_word(snapshot, PCC_WORD_ABANDONED))
        return -PCC_E_ABORTED;
    return word == pcc_word(snapshot, PCC_WORD_REQUESTED) ? 0 : -PCC_E_BAD_PEER;
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

static int begin(struct pcc_tenant *tenant, uint64_t snapshot, uint64_t map,
                 const struct pcc_save_request *request, struct pcc_tenant_part **parts,
                 uint64_t *sequence_out)
{
    struct pcc_save_request tagged = *request;
    struct pcc_save *saved;
    uint64_t sequence;

    if (!tenant->attached || tenant->broken)
        return -ENOTCONN;
    if (tenant->bound == PCC_TENANT_VOLUMES)
        return -ENODEV;
    if (request->payload_bytes == 0)
        return -EINVAL;
    int error =
        pcc_tenant_find(tenant, snapshot) != NULL ? -PCC_E_BAD_PEER : requested(tenant, snapshot);
    if (error == 0 && map != 0)
        error = pcc_tenant_pull_prepare(tenant, map, request, parts);
    if (error != 0)
        return error;
    /* The number is the client's: before any memory is made for that many chunks. */
    const struct pcc_geometry geometry =
        pcc_volume_geometry(tenant->bindings[tenant->bound].volume);
    if (!pcc_geometry_fits(&geometry, request->payload_bytes, false))
        return -PCC_E_TOO_LARGE;
    struct pcc_tenant_save *save = pcc_tenant_save_take(
        tenant, (uint32_t)pcc_ceil_div(request->payload_bytes, tenant->spec.chunk_bytes));
    if (save == NULL)
        return -ENOMEM;
    tagged.tag = ++tenant->serial << 8 | (uint64_t)(save - tenant->saves);
    if (map != 0) /* the daemon fills the beginning by itself */
        tagged.offered_bytes = 0;
    error = pcc_save_begin(tenant->bindings[tenant->bound].saver, &tagged, &saved, &sequence);
    if (error != 0)
        return error;
    save_fill(tenant, save, snapshot, &tagged, saved, sequence);
    /* Relaxed: the word's move publishes it. */
    atomic_store_explicit(&pcc_page_snapshot(&tenant->view, snapshot)->base,
                          save->offered_bytes > 0 ? save->base : 0, memory_order_relaxed);
    if (!pcc_word_move(pcc_page_snapshot(&tenant->view, snapshot), snapshot, PCC_WORD_REQUESTED,
                       PCC_WORD_COPYING)) {
        save->silent = true;
        pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
        return -PCC_E_ABORTED;
    }
    pcc_tenant_outcome_moves(tenant, save, PCC_OUTCOME_COPYING);
    pcc_tenant_pull_start(tenant, save, *parts);
    *parts = NULL;
    pcc_tenant_hand_out(tenant);
    pcc_tenant_wake_client(tenant);
    *sequence_out = sequence;
    return 0;
}

int pcc_tenant_begin(struct pcc_tenant *tenant, uint64_t snapshot, uint64_t map,
                     const struct pcc_save_request *request, uint64_t *sequence_out)
{
    struct pcc_tenant_part *parts = NULL; /* taken over once the save has begun */

    pcc_tenant_lock(tenant);
    const int error = begin(tenant, snapshot, map, request, &parts, sequence_out);
    pcc_tenant_unlock(tenant);
    pcc_tenant_pull_drop(parts);
    return error;
}

void pcc_tenant_refuse(struct pcc_tenant *tenant, uint64_t snapshot,
                       const struct pcc_tenant_end *end)
{
    pcc_tenant_lock(tenant);
    if (tenant->attached) {
        struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);
        const uint64_t word = pcc_page_word(&tenant->view, snapshot);
        if (word == pcc_word(snapshot, PCC_WORD_REQUESTED) ||
            word == pcc_word(snapshot, PCC_WORD_COPYING)) {
            /* The outcome first: a client that sees REFUSED finds the reason. */
            pcc_tenant_outcome(tenant, snapshot, end);
            if (pcc_word_move(entry, snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED)) {
                struct pcc_tenant_save *save = pcc_tenant_find(tenant, snapshot);
                if (save != NULL)
                    pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
            } else {
                (void)pcc_word_move(entry, snapshot, PCC_WORD_REQUESTED, PCC_WORD_REFUSED);
            }
            if (tenant->gpus != NULL)
                pcc_tenant_release_streams(tenant, snapshot);
            pcc_tenant_wake_client(tenant);
        }
    }
    pcc_tenant_unlock(tenant);
}

uint32_t pcc_tenant_requested(struct pcc_tenant *tenant, uint64_t *snapshots)
{
    uint32_t count = 0;

    pcc_tenant_lock(tenant);
    for (uint64_t i = 0; tenant->attached && i < PCC_SNAPSHOTS; i++) {
        const uint64_t word = pcc_page_word(&tenant->view, i);
        const uint64_t snapshot = word >> 8;
        if (word == pcc_word(snapshot, PCC_WORD_REQUESTED) && snapshot % PCC_SNAPSHOTS == i)
            snapshots[count++] = snapshot;
    }
    pcc_tenant_unlock(tenant);
    return count;
}

void pcc_tenant_set_outcome(struct pcc_tenant *tenant, uint64_t snapshot,
                            const struct pcc_tenant_end *end)
{
    pcc_tenant_lock(tenant);
    pcc_tenant_outcome(tenant, snapshot, end);
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

void pcc_tenant_refuse_copy(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                            int error)
{
    const uint64_t snapshot = save->snapshot;
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);
    const struct pcc_tenant_end end = {.outcome = PCC_OUTCOME_FAILED,
                                       .sequence = save->sequence,
                                       .reason = {.stage = PCC_STAGE_COPY, .error = error}};

    if (pcc_page_word(&tenant->view, snapshot) == pcc_word(snapshot, PCC_WORD_COPYING)) {
        /* The outcome first: a client that sees REFUSED finds the reason. */
        pcc_tenant_outcome(tenant, snapshot, &end);
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
