/* Admission: how the first snapshot of the queue becomes a save, what fills it, and what becomes of
 * one that is deferred or parked. */
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
        .is_open = request->is_open,
        .save = saved,
        .seen = save->seen,
        .seen_words = save->seen_words};
    memcpy(save->sources, sources, sizeof(save->sources));
    tenant->bindings[tenant->bound].active++;
}

/* -- what fills a save -- */

/* Exposed memory is the beginning of the payload; the client fills the rest. */
static int sources_begin(struct pcc_tenant *tenant, const struct pcc_request *from,
                         struct pcc_save_request *request, struct pcc_source sources[PCC_SOURCES])
{
    sources[0].ops = &pcc_source_pull;
    sources[0].deferred = from->level == PCC_LEVEL_DEVICE;
    const int error = sources[0].ops->begin(tenant, &sources[0], from->map, request);
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

/* -- the save -- */

/* What the volume is asked for. */
static struct pcc_save_request request_of(struct pcc_tenant *tenant,
                                          const struct pcc_tenant_wait *wait)
{
    const struct pcc_request *from = &wait->request;
    const struct pcc_number *number = &wait->number;
    const bool is_image = from->kind == PCC_KIND_IMAGE;
    struct pcc_save_request made = {.sequence = number->sequence,
                                    .parked = from->level != PCC_LEVEL_DISK,
                                    .step = from->step,
                                    .incarnation = number->incarnation,
                                    .world_size = number->world_size,
                                    .flags = number->marks | (is_image ? PCC_SLOT_IMAGE : 0),
                                    .is_open = is_image,
                                    .notes = {.name_base = number->name_base,
                                              .name_descents = number->name_descents,
                                              .name_row = number->name_row},
                                    .payload_bytes = from->payload_bytes,
                                    .tree_offset_bytes = from->tree_offset_bytes,
                                    .tree_bytes = from->tree_bytes,
                                    .frozen_bytes = from->frozen_bytes,
                                    .offered_bytes = from->offered_bytes};

    if (number->sequence == 0 && tenant->policy.numbers) {
        made.incarnation = tenant->policy.incarnation;
        made.world_size = tenant->policy.world_size;
        if (tenant->last_sequence != 0) /* the volume's next one is above it */
            (void)pcc_volume_take_sequence(tenant->bindings[tenant->bound].volume,
                                           tenant->last_sequence);
    }
    made.unnumbered = number->sequence == 0 && !tenant->policy.numbers;
    return made;
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
    if (sequence > tenant->last_sequence)
        tenant->last_sequence = sequence;
    *out = save;
    return 0;
}

int pcc_tenant_begin(struct pcc_tenant *tenant, const struct pcc_tenant_wait *wait)
{
    const uint64_t snapshot = wait->request.snapshot;
    struct pcc_source sources[PCC_SOURCES] = {0};
    struct pcc_tenant_save *save;

    if (tenant->bound == PCC_TENANT_VOLUMES || tenant->bindings[tenant->bound].lost)
        return -ENODEV;
    struct pcc_save_request request = request_of(tenant, wait);
    int error = sources_begin(tenant, &wait->request, &request, sources);
    if (error != 0)
        return error;
    error = save_begin(tenant, &request, sources, &save);
    if (error != 0) {
        pcc_tenant_sources_abandon(tenant, NULL, sources);
        return error;
    }
    save->snapshot = snapshot;
    save->session = tenant->session;
    save->wanted = wait->wanted;
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);
    /* Relaxed: the word's move publishes it. */
    PCC_WRITE(&entry->base, save->offered_bytes > 0 ? save->base : 0);
    if (!pcc_word_move(entry, snapshot, PCC_WORD_REQUESTED, PCC_WORD_COPYING)) {
        save->silent = true;
        pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
        return -PCC_E_ABORTED;
    }
    pcc_tenant_outcome_moves(tenant, save, PCC_OUTCOME_COPYING);
    pcc_tenant_put(tenant, (struct pcc_event){.kind = PCC_EVENT_BEGUN,
                                              .session = tenant->session,
                                              .id = snapshot,
                                              .sequence = save->sequence});
    sources_want(tenant, save);
    pcc_tenant_wake_client(tenant);
    return 0;
}

int pcc_tenant_number_begun(struct pcc_tenant *tenant, uint64_t snapshot,
                            const struct pcc_number *number)
{
    const uint64_t sequence = number->sequence;
    struct pcc_tenant_save *save = pcc_tenant_find(tenant, snapshot);

    if (save == NULL || save->save == NULL || save->aborted || save->copied)
        return 0;
    const int error = pcc_save_number(save->save, number);
    if (error != 0)
        return error == -PCC_E_ABORTED ? 0 : error;
    save->sequence = sequence;
    if (sequence > tenant->last_sequence)
        tenant->last_sequence = sequence;
    for (uint32_t i = 0; i < tenant->chunk_count; i++)
        if (tenant->chunks[i].tag == save->tag)
            tenant->chunks[i].sequence = sequence;
    pcc_tenant_outcome_moves(tenant, save, PCC_OUTCOME_COPYING);
    if (pcc_tenant_copy_check(tenant, save) != 0)
        pcc_tenant_break(tenant);
    return 0;
}

bool pcc_tenant_refuse_begun(struct pcc_tenant *tenant, uint64_t snapshot,
                             const struct pcc_tenant_end *end)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);
    struct pcc_tenant_save *save = pcc_tenant_find(tenant, snapshot);

    if (save == NULL ||
        pcc_page_word(&tenant->view, snapshot) != pcc_word(snapshot, PCC_WORD_COPYING))
        return false;
    /* The outcome first: a client that sees REFUSED finds the reason. */
    pcc_tenant_outcome(tenant, snapshot, end);
    const bool refused = pcc_word_move(entry, snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED);
    save->silent = refused; /* the caller knows how it ended */
    pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
    if (tenant->gpus != NULL)
        pcc_pull_release_streams(tenant, snapshot);
    pcc_tenant_wake_client(tenant);
    return refused;
}

void pcc_tenant_set_outcome(struct pcc_tenant *tenant, uint64_t snapshot,
                            const struct pcc_tenant_end *end)
{
    PCC_LOCKED(&tenant->lock);
    pcc_tenant_outcome(tenant, snapshot, end);
    pcc_tenant_wake_client(tenant);
}

/* -- deferred saves: their device part is on the GPUs until they are wanted or withdrawn -- */

/* How long the rest of a process may take to end once its session has. */
#define PROCESS_END_MS 5000

static bool is_deferred(const struct pcc_tenant *tenant, const struct pcc_tenant_save *save)
{
    return save->save != NULL && !save->aborted && save->sources[0].deferred &&
           pcc_tenant_of_session(tenant, save);
}

/* The oldest, or the newest one; NULL. */
static struct pcc_tenant_save *deferred_find(struct pcc_tenant *tenant, bool newest)
{
    struct pcc_tenant_save *found = NULL;

    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (is_deferred(tenant, save) &&
            (found == NULL || (save->snapshot > found->snapshot) == newest))
            found = save;
    }
    return found;
}

static void withdraw(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    const struct pcc_tenant_end end = {.outcome = PCC_OUTCOME_SKIPPED,
                                       .sequence = save->sequence,
                                       .reason = {.cause = PCC_CAUSE_WITHDRAWN}};

    if (pcc_tenant_refuse_begun(tenant, save->snapshot, &end))
        pcc_tenant_put(tenant, (struct pcc_event){.kind = PCC_EVENT_REFUSED,
                                                  .session = tenant->session,
                                                  .id = save->snapshot,
                                                  .error = -ECANCELED});
}

bool pcc_tenant_deferred_look(struct pcc_tenant *tenant)
{
    bool left = false;

    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (!is_deferred(tenant, save))
            continue;
        if (pcc_pull_words(tenant, save) == PCC_PULL_WITHDRAWN)
            withdraw(tenant, save);
        else
            left = true;
    }
    return left;
}

void pcc_tenant_deferred_yield(struct pcc_tenant *tenant)
{
    struct pcc_tenant_save *oldest = deferred_find(tenant, false);

    if (oldest != NULL)
        withdraw(tenant, oldest);
}

void pcc_tenant_deferred_want(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    if (is_deferred(tenant, save) && pcc_pull_words(tenant, save) != PCC_PULL_WITHDRAWN)
        pcc_pull_start(tenant, save);
}

void pcc_tenant_last_step(struct pcc_tenant *tenant)
{
    struct pcc_tenant_save *newest;

    pcc_tenant_lock(tenant);
    const bool any = !tenant->broken && pcc_tenant_deferred_look(tenant);
    pcc_tenant_unlock(tenant);
    /* The kernel closes a socket before the GPU's files of the same process. While those are open,
     * its streams may go on, and write words. */
    if (!any || !pcc_process_ended(tenant->trainer_fd, PROCESS_END_MS))
        return;
    PCC_LOCKED(&tenant->lock);
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) /* what cannot become whole any more */
        if (tenant->saves[i].session == tenant->session && !is_deferred(tenant, &tenant->saves[i]))
            pcc_tenant_abort(tenant, &tenant->saves[i], -PCC_E_ABORTED);
    while ((newest = deferred_find(tenant, true)) != NULL) {
        if (pcc_pull_words(tenant, newest) == PCC_PULL_WHOLE && pcc_pull_last(tenant, newest))
            return; /* older ones were withdrawn before it was ready */
        pcc_tenant_abort(tenant, newest, -PCC_E_ABORTED);
    }
}

/* -- parked saves: their chunks stay full until the loop has them written, or drops them -- */

static struct pcc_tenant_save *parked_find(struct pcc_tenant *tenant, uint64_t sequence)
{
    for (uint32_t i = 0; sequence != 0 && i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (save->save != NULL && save->sequence == sequence && pcc_save_is_parked(save->save))
            return save;
    }
    return NULL;
}

int pcc_tenant_write(struct pcc_tenant *tenant, uint64_t sequence)
{
    PCC_LOCKED(&tenant->lock);
    struct pcc_tenant_save *save = parked_find(tenant, sequence);
    return save != NULL ? pcc_save_write(save->save, &save->save) : 0;
}

bool pcc_tenant_drop(struct pcc_tenant *tenant, uint64_t sequence, const struct pcc_tenant_end *end)
{
    PCC_LOCKED(&tenant->lock);
    struct pcc_tenant_save *save = parked_find(tenant, sequence);
    if (save == NULL || !pcc_save_drop(save->save))
        return false;
    save->save = NULL;
    pcc_tenant_chunks_forget(tenant, save, false);
    tenant->bindings[save->binding].active--;
    if (pcc_tenant_of_session(tenant, save))
        pcc_tenant_outcome(tenant, save->snapshot, end);
    pcc_tenant_wake_client(tenant);
    pcc_tenant_pass_on(tenant);
    pcc_tenant_queue_look(tenant);
    return true;
}

void pcc_tenant_adopted_write(struct pcc_tenant *tenant)
{
    struct pcc_tenant_save *newest;

    do {
        newest = NULL;
        for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
            struct pcc_tenant_save *save = &tenant->saves[i];
            if (save->save != NULL && save->session == 0 && pcc_save_is_parked(save->save) &&
                (newest == NULL || save->sequence > newest->sequence))
                newest = save;
        }
    } while (newest != NULL && pcc_save_write(newest->save, &newest->save) == 0);
}
