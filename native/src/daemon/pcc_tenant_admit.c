/* Admission: which snapshots become saves, and what fills them. */
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_tenant_private.h"

static bool is_filled(const struct pcc_tenant_save *save)
{
    bool filled = false;

    for (uint32_t i = 0; i < PCC_SOURCES; i++)
        filled = filled || save->sources[i].users > 0;
    return filled;
}

bool pcc_tenant_is_filled(const struct pcc_tenant *tenant, uint32_t binding)
{
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        const struct pcc_tenant_save *save = &tenant->saves[i];
        if (is_filled(save) && (binding == PCC_TENANT_VOLUMES || save->binding == binding))
            return true;
    }
    return false;
}

/* An entry never used, else the one that ended longest ago: a message that is under way when its
 * save ends still finds it. */
struct pcc_tenant_save *pcc_tenant_save_take(struct pcc_tenant *tenant, uint32_t chunk_count)
{
    struct pcc_tenant_save *best = NULL;
    const uint32_t words = (uint32_t)pcc_ceil_div(chunk_count, 64);

    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (save->save == NULL && !is_filled(save) && (best == NULL || save->tag < best->tag))
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

void pcc_tenant_save_enter(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                           struct pcc_save *saved, const struct pcc_save_request *request,
                           uint64_t sequence, const struct pcc_source sources[PCC_SOURCES])
{
    const uint32_t chunk_bytes = tenant->spec.chunk_bytes;
    const uint64_t base = pcc_save_base(saved);
    const uint64_t offered_bytes =
        base == 0 ? 0
                  : pcc_offered_end(request->offered_bytes, request->payload_bytes, chunk_bytes);

    *save = (struct pcc_tenant_save){
        .tag = request->tag,
        .sequence = sequence,
        .payload_bytes = request->payload_bytes,
        .base = base,
        .offered_bytes = offered_bytes,
        .binding = tenant->bound,
        .chunk_count = (uint32_t)pcc_ceil_div(request->payload_bytes, chunk_bytes),
        .save = saved,
        .seen = save->seen,
        .seen_words = save->seen_words};
    memcpy(save->sources, sources, sizeof(save->sources));
    tenant->bindings[tenant->bound].active++;
}

/* -- what fills a save -- */

/* Exposed memory is the beginning of the payload; the client fills the rest. `name`: the map. */
static int sources_begin(struct pcc_tenant *tenant, uint64_t map, struct pcc_save_request *request,
                         struct pcc_source sources[PCC_SOURCES])
{
    sources[0].ops = &pcc_source_pull;
    const int error = sources[0].ops->begin(tenant, &sources[0], map, request);
    if (error != 0)
        return error;
    sources[1].ops = &pcc_source_push;
    sources[1].from_bytes = sources[0].to_bytes;
    return sources[1].ops->begin(tenant, &sources[1], 0, request);
}

static void sources_want(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    for (uint32_t i = 0; i < PCC_SOURCES; i++) {
        struct pcc_source *source = &save->sources[i];
        const uint64_t from_bytes =
            source->from_bytes > save->offered_bytes ? source->from_bytes : save->offered_bytes;
        if (from_bytes < source->to_bytes)
            source->ops->want(tenant, save, source, from_bytes, source->to_bytes);
    }
}

/* With its sources begun, which are the save's from then on. */
static int save_begin(struct pcc_tenant *tenant, struct pcc_save_request *request,
                      const struct pcc_source sources[PCC_SOURCES], struct pcc_tenant_save **out)
{
    const struct pcc_tenant_binding *binding = &tenant->bindings[tenant->bound];
    struct pcc_save *saved;
    uint64_t sequence;

    /* The number is the client's: before any memory is made for that many chunks. */
    const struct pcc_geometry geometry = pcc_volume_geometry(binding->volume);
    if (!pcc_geometry_fits(&geometry, request->payload_bytes, false))
        return -PCC_E_TOO_LARGE;
    struct pcc_tenant_save *save = pcc_tenant_save_take(
        tenant, (uint32_t)pcc_ceil_div(request->payload_bytes, tenant->spec.chunk_bytes));
    if (save == NULL)
        return -ENOMEM;
    request->tag = ++tenant->serial << 8 | (uint64_t)(save - tenant->saves);
    const int error = pcc_save_begin(binding->saver, request, &saved, &sequence);
    if (error != 0)
        return error;
    pcc_tenant_save_enter(tenant, save, saved, request, sequence, sources);
    *out = save;
    return 0;
}

static int begin(struct pcc_tenant *tenant, uint64_t snapshot, uint64_t map,
                 const struct pcc_save_request *asked, uint64_t *sequence_out)
{
    struct pcc_save_request request = *asked;
    struct pcc_source sources[PCC_SOURCES] = {0};
    struct pcc_tenant_save *save;

    if (!tenant->attached || tenant->broken)
        return -ENOTCONN;
    if (tenant->bound == PCC_TENANT_VOLUMES)
        return -ENODEV;
    if (request.payload_bytes == 0)
        return -EINVAL;
    int error =
        pcc_tenant_find(tenant, snapshot) != NULL ? -PCC_E_BAD_PEER : requested(tenant, snapshot);
    if (error == 0)
        error = sources_begin(tenant, map, &request, sources);
    if (error != 0)
        return error;
    error = save_begin(tenant, &request, sources, &save);
    if (error != 0) {
        pcc_tenant_sources_abandon(tenant, NULL, sources);
        return error;
    }
    save->snapshot = snapshot;
    save->session = tenant->session;
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);
    /* Relaxed: the word's move publishes it. */
    atomic_store_explicit(&entry->base, save->offered_bytes > 0 ? save->base : 0,
                          memory_order_relaxed);
    if (!pcc_word_move(entry, snapshot, PCC_WORD_REQUESTED, PCC_WORD_COPYING)) {
        save->silent = true;
        pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
        return -PCC_E_ABORTED;
    }
    pcc_tenant_outcome_moves(tenant, save, PCC_OUTCOME_COPYING);
    sources_want(tenant, save);
    pcc_tenant_wake_client(tenant);
    *sequence_out = save->sequence;
    return 0;
}

int pcc_tenant_begin(struct pcc_tenant *tenant, uint64_t snapshot, uint64_t map,
                     const struct pcc_save_request *request, uint64_t *sequence_out)
{
    pcc_tenant_lock(tenant);
    const int error = begin(tenant, snapshot, map, request, sequence_out);
    pcc_tenant_unlock(tenant);
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
                pcc_pull_release_streams(tenant, snapshot);
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
