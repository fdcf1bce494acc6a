/* Saves that wait. The device part of a deferred save (level DEVICE) stays on the GPUs until the
 * client wants it on the disk, a stream withdraws it, or the trainer dies. After a death the daemon
 * reads that memory. If it cannot, it reads the memory of another rank that shares the state and
 * has the same step on its GPUs. A parked save stays in chunks until the loop has it written, or
 * drops it. */
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_tenant_private.h"
#include "shared/pcc_sample.h"

/* -- deferred saves -- */

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

/* Whether the streams have come to what is requested. Before that its GPUs may still hold an older
 * step; the update between the two withdraws that. */
static bool is_reached(const struct pcc_tenant *tenant, const struct pcc_request *request)
{
    const struct pcc_tenant_map *map = tenant->pull.map;

    if (request->map == 0 || map == NULL || map->number != request->map)
        return true;
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        if ((map->view.devices >> device & 1u) != 0 &&
            /* Acquire: as in pcc_pull_words. */
            PCC_READ_ACQUIRE(&pcc_page_words(&tenant->view, request->snapshot, device)->ready) <
                request->snapshot)
            return false;
    return true;
}

bool pcc_tenant_deferred_yield(struct pcc_tenant *tenant, const struct pcc_request *request)
{
    struct pcc_tenant_save *oldest = deferred_find(tenant, false);

    if (oldest != NULL && is_reached(tenant, request))
        withdraw(tenant, oldest);
    return oldest != NULL;
}

void pcc_tenant_deferred_want(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    const enum pcc_pull_words words =
        is_deferred(tenant, save) ? pcc_pull_words(tenant, save) : PCC_PULL_BROKEN;

    if (words == PCC_PULL_WHOLE || words == PCC_PULL_NOT_READY)
        pcc_pull_start(tenant, save);
}

/* -- the last step of a dead trainer; with the lock held unless a comment says otherwise -- */

/* Without locks: how many samples of the dead trainer's streams lie in this map's memory, which has
 * the same bytes there. -PCC_E_OTHER_BYTES when it has others; codes of pcc_gpu_read. */
static int samples_read(const struct pcc_page_view *view, uint64_t snapshot,
                        const struct pcc_tenant_map *map)
{
    const struct pcc_sample *samples = pcc_page_samples(view, snapshot);
    int found = 0;

    for (uint32_t i = 0; i < PCC_SAMPLES; i++) {
        const struct pcc_sample sample = samples[i]; /* once: the client may change it */
        atomic_signal_fence(memory_order_seq_cst);
        const struct pcc_exposed_range *range = pcc_exposure_at(&map->view, sample.offset_bytes);
        uint8_t got[PCC_SAMPLE_BYTES];
        if (range == NULL || sample.length_bytes == 0 || sample.length_bytes > sizeof(got) ||
            !pcc_is_within(sample.offset_bytes - range->offset_bytes, sample.length_bytes,
                           range->length_bytes))
            continue;
        const struct pcc_tenant_import *import = map->imports[range->allocation];
        const struct pcc_gpu_copy copy = {.from = import->address + range->allocation_offset_bytes +
                                                  (sample.offset_bytes - range->offset_bytes),
                                          .to = got,
                                          .length_bytes = sample.length_bytes};
        const int error = pcc_gpu_read(import->gpu, &copy, 1);
        if (error != 0)
            return error;
        if (memcmp(got, sample.bytes, sample.length_bytes) != 0)
            return -PCC_E_OTHER_BYTES;
        found++;
    }
    return found;
}

/* Pulls the save through its own map, which the caller holds. Releases the lock meanwhile. 0: the
 * save is copied. */
static int pull_own(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                    const struct pcc_tenant_map *mine)
{
    const uint64_t snapshot = save->snapshot;

    pcc_tenant_unlock(tenant);
    const int found = samples_read(&tenant->view, snapshot, mine);
    pcc_tenant_lock(tenant);
    if (found < 0)
        return found;
    /* The words count after the copy, too: a child of the process may have its files open, and so
     * have kept its streams going. */
    return is_deferred(tenant, save) && pcc_pull_all(tenant, save) &&
                   pcc_pull_words(tenant, save) == PCC_PULL_WHOLE && pcc_pull_accept(tenant, save)
               ? 0
               : -PCC_E_ABORTED;
}

/* The tenant's save of this checkpoint, if its GPUs hold all of it now; NULL. A client that gives
 * it up moves its word before the memory changes. A client that has it copied waits for the daemon
 * before the memory changes. */
static struct pcc_tenant_save *whole_find(struct pcc_tenant *tenant, uint64_t sequence)
{
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (save->save != NULL && !save->aborted && !save->copied &&
            pcc_tenant_of_session(tenant, save) && save->sequence == sequence &&
            pcc_page_word(&tenant->view, save->snapshot) ==
                pcc_word(save->snapshot, PCC_WORD_COPYING) &&
            pcc_pull_words(tenant, save) == PCC_PULL_WHOLE)
            return save;
    }
    return NULL;
}

struct loan { /* of another rank's memory, for the checkpoint with that sequence */
    struct pcc_tenant *lender;
    uint64_t sequence;
    struct pcc_tenant_map *map; /* held; NULL: there is none, or a borrowed map holds it */
};

/* Without locks: the memory of a rank that has this checkpoint whole, if there is any. Until
 * loan_end nothing of that rank is judged, so its client does not let its streams continue. */
static struct loan loan_begin(struct pcc_tenant *lender, uint64_t sequence)
{
    PCC_LOCKED(&lender->lock);
    const struct pcc_tenant_save *save = whole_find(lender, sequence);
    /* Streams of a GPU whose part was judged have continued without a word. And a save that has
     * been read does not hold its map any more. */
    if (save == NULL || save->sources[0].judged != 0 ||
        (!save->sources[0].deferred && save->sources[0].users == 0))
        return (struct loan){0};
    struct pcc_tenant_map *map = save->sources[0].map;
    if ((map->view.devices & ~map->proven) != 0)
        return (struct loan){0};
    map->holders++;
    lender->pull.readers++;
    return (struct loan){lender, sequence, map};
}

/* Without locks. */
static void loan_end(const struct loan *loan)
{
    if (loan->map != NULL)
        pcc_tenant_lent_put(loan->lender, loan->map);
    PCC_LOCKED(&loan->lender->lock);
    if (--loan->lender->pull.readers == 0 && loan->lender->attached)
        pcc_bell_ring(&loan->lender->view.page->daemon_bell);
}

/* Without locks, before loan_end: nothing has changed that memory since loan_begin, so what was
 * read is of one step (P4). Nothing can change it once the process has ended with all of it. */
static bool is_still_whole(const struct loan *loan)
{
    PCC_LOCKED(&loan->lender->lock);
    return whole_find(loan->lender, loan->sequence) != NULL ||
           loan->lender->pull.whole_at_end == loan->sequence;
}

/* Without locks: a map of the payload of `mine` that leads to the memory of the lender, and holds
 * it. The caller holds the map. NULL: the lender does not have all of it. */
static struct pcc_tenant_map *borrow(struct pcc_tenant *tenant, const struct pcc_tenant_map *mine,
                                     struct loan *loan)
{
    struct pcc_tenant_map *map = calloc(1, sizeof(*map));

    if (map == NULL || pcc_exposure_elsewhere(&mine->view, &loan->map->view, &map->view) != 0) {
        free(map);
        return NULL;
    }
    map->holders = 1;
    map->lender = loan->lender;
    map->lent = loan->map;
    map->imports = loan->map->imports;
    map->proven = map->view.devices;
    memcpy(map->gpus, loan->map->gpus, sizeof(map->gpus));
    loan->map = NULL;
    pcc_tenant_lock(tenant);
    tenant->pull.maps++;
    pcc_tenant_unlock(tenant);
    return map;
}

/* Pulls the save out of the lender's memory. Releases the lock meanwhile. True: it is copied. */
static bool pull_lent(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                      const struct pcc_tenant_map *mine, struct loan *loan)
{
    const uint64_t snapshot = save->snapshot;

    pcc_tenant_unlock(tenant);
    struct pcc_tenant_map *map = borrow(tenant, mine, loan);
    bool fits = map != NULL && samples_read(&tenant->view, snapshot, map) > 0 &&
                pcc_tenant_pin_for(tenant, map->gpus) == 0;
    pcc_tenant_lock(tenant);
    fits = fits && is_deferred(tenant, save) && pcc_pull_through(tenant, save, map) == 0 &&
           pcc_pull_all(tenant, save);
    pcc_tenant_unlock(tenant);
    /* The samples again: the driver may not have kept the memory of a lender that has died. */
    fits = fits && samples_read(&tenant->view, snapshot, map) > 0 && is_still_whole(loan);
    pcc_tenant_lock(tenant);
    pcc_tenant_map_put(tenant, map);
    return fits && pcc_pull_accept(tenant, save);
}

/* Pulls the save out of its own memory; if that cannot be read, out of the memory of the first of
 * the lenders that has it, whose index goes to *lender_out. Releases the lock meanwhile. 0: the
 * save is copied. */
static int pull_of_any(struct pcc_tenant *tenant, struct pcc_tenant_save *save, struct loan *loans,
                       uint32_t count, int32_t *lender_out)
{
    const enum pcc_pull_words words = pcc_pull_words(tenant, save);
    struct pcc_tenant_map *mine = save->sources[0].map;
    int error = -PCC_E_ABORTED;

    if (words != PCC_PULL_WHOLE && words != PCC_PULL_BROKEN)
        return error;
    mine->holders++;
    if (words == PCC_PULL_WHOLE) {
        tenant->pull.whole_at_end = save->sequence;
        error = pull_own(tenant, save, mine);
    }
    for (uint32_t i = 0; error != 0 && i < count && is_deferred(tenant, save); i++) {
        if (loans[i].sequence != save->sequence || !pull_lent(tenant, save, mine, &loans[i]))
            continue;
        *lender_out = (int32_t)i;
        error = 0;
    }
    pcc_tenant_map_put(tenant, mine);
    return error;
}

/* Without locks: the loans of those that have this save, by number; NULL: there is nothing to lend,
 * because no other rank stores what this one does, or the save has no number yet. They begin before
 * this process has ended: a rank that fails with it may soon have its own step copied. */
static struct loan *loans_begin(struct pcc_tenant *tenant, struct pcc_tenant *const *others,
                                uint32_t count)
{
    pcc_tenant_lock(tenant);
    const struct pcc_tenant_save *save = deferred_find(tenant, true);
    const bool is_shared = save != NULL && save->sources[0].map->view.head.share_count > 0;
    const uint64_t sequence = is_shared ? save->sequence : 0;
    pcc_tenant_unlock(tenant);
    struct loan *loans = sequence != 0 ? calloc(count, sizeof(*loans)) : NULL;
    for (uint32_t i = 0; loans != NULL && i < count; i++)
        if (others[i] != NULL)
            loans[i] = loan_begin(others[i], sequence);
    return loans;
}

static void loans_end(struct loan *loans, uint32_t count)
{
    for (uint32_t i = 0; loans != NULL && i < count; i++)
        if (loans[i].lender != NULL)
            loan_end(&loans[i]);
    free(loans);
}

/* The newest of the saves that counts is copied, and the others end. */
static int32_t last_pull(struct pcc_tenant *tenant, struct loan *loans, uint32_t count, bool broken)
{
    struct pcc_tenant_save *newest;

    PCC_LOCKED(&tenant->lock);
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) /* these cannot become whole any more */
        if (tenant->saves[i].session == tenant->session && !is_deferred(tenant, &tenant->saves[i]))
            pcc_tenant_abort(tenant, &tenant->saves[i], -PCC_E_ABORTED);
    while ((newest = deferred_find(tenant, true)) != NULL) {
        int32_t lender = -1;
        const int error = pull_of_any(tenant, newest, loans, loans != NULL ? count : 0, &lender);
        if (error == 0)
            return lender; /* older ones were withdrawn before it was ready */
        pcc_tenant_abort(tenant, newest, error);
        if (broken) /* older ones lie in the same memory, and the process may not have ended */
            return -1;
    }
    return -1;
}

int32_t pcc_tenant_last_step(struct pcc_tenant *tenant, struct pcc_tenant *const *others,
                             uint32_t count)
{
    int32_t lender = -1;

    pcc_tenant_lock(tenant);
    const bool any = !tenant->broken && pcc_tenant_deferred_look(tenant);
    const struct pcc_tenant_save *newest = any ? deferred_find(tenant, true) : NULL;
    const bool broken = newest != NULL && pcc_pull_words(tenant, newest) == PCC_PULL_BROKEN;
    pcc_tenant_unlock(tenant);
    if (!any)
        return -1;
    struct loan *loans = loans_begin(tenant, others, count);
    /* The kernel closes a socket before the GPU's files of the same process. While those are open,
     * its streams may continue, and write words. Those of a broken GPU are not read. */
    if (broken || pcc_process_ended(tenant->trainer_fd, PROCESS_END_MS))
        lender = last_pull(tenant, loans, count, broken);
    loans_end(loans, count);
    return lender;
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
