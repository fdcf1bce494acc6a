/* Requested snapshots wait here, first come first served, for a lane and a slot; then they become
 * saves. The drain thread takes requests out of the page and tries the first one. Code that frees a
 * lane or a slot, or changes what may begin, rings for the drain thread. Nothing here waits or
 * polls (P5), and no number of a request is used unchecked (P6).
 *
 * The daemon's loop gets an event for every request. It decides only two things: the number of a
 * checkpoint of several ranks, and what to do when nothing frees a slot by itself. */
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_tenant_private.h"

/* A request is taken when the loop has noted all but so many of those before it, so that the events
 * of a client that requests without an end have room. */
#define UNNOTED_MAX 60u

/* With the lock held: the drain thread looks at the first one soon. */
void pcc_tenant_queue_look(struct pcc_tenant *tenant)
{
    tenant->queue.look = true;
    if (tenant->attached)
        pcc_bell_ring(&tenant->view.page->daemon_bell);
}

void pcc_tenant_retry(struct pcc_tenant *tenant)
{
    PCC_LOCKED(&tenant->lock);
    tenant->queue.reported = 0;
    pcc_tenant_adopted_write(tenant);
    pcc_tenant_queue_look(tenant);
}

void pcc_tenant_policy(struct pcc_tenant *tenant, const struct pcc_tenant_policy *policy)
{
    PCC_LOCKED(&tenant->lock);
    tenant->policy = *policy;
    if (policy->above > tenant->last_sequence)
        tenant->last_sequence = policy->above;
    tenant->queue.reported = 0;
    pcc_tenant_queue_look(tenant);
}

void pcc_tenant_noted(struct pcc_tenant *tenant)
{
    PCC_LOCKED(&tenant->lock);
    if (tenant->queue.unnoted > 0)
        tenant->queue.unnoted--;
    if (tenant->queue.crowded && tenant->attached)
        pcc_bell_ring(&tenant->view.page->daemon_bell);
}

/* -- taking requests -- */

/* What no image has: an exposure, a tree before its length is known, other ranks. */
static bool is_plain(const struct pcc_request *request)
{
    return request->level == PCC_LEVEL_DISK && request->map == 0 &&
           request->tree_offset_bytes == 0 && request->tree_bytes == 0 &&
           request->types_bytes == 0 && request->offered_bytes == 0 && request->division == 0;
}

/* Why no honest client requests this; cause CODE: it may. */
static struct pcc_reason fault_of(const struct pcc_request *request)
{
    const uint64_t payload_bytes = request->payload_bytes;
    const uint32_t unknown_flags = (request->flags & ~(uint32_t)PCC_REQUEST_SKIP) |
                                   request->reserved[0] | request->reserved[1] |
                                   request->reserved[2];

    if (request->level > PCC_LEVEL_DEVICE ||
        (request->level == PCC_LEVEL_DEVICE && request->map == 0))
        return (struct pcc_reason){.cause = PCC_CAUSE_BAD_LEVEL, .argument = request->level};
    if (request->kind != PCC_KIND_TENSORS && request->kind != PCC_KIND_IMAGE)
        return (struct pcc_reason){.cause = PCC_CAUSE_BAD_KIND, .argument = request->kind};
    if (request->kind == PCC_KIND_IMAGE && !is_plain(request))
        return (struct pcc_reason){.cause = PCC_CAUSE_BAD_TREE};
    if (unknown_flags != 0)
        return (struct pcc_reason){.cause = PCC_CAUSE_BAD_FLAGS, .argument = unknown_flags};
    if (payload_bytes == 0 ||
        !pcc_is_within(request->tree_offset_bytes, request->tree_bytes, payload_bytes))
        return (struct pcc_reason){.cause = PCC_CAUSE_BAD_TREE};
    if (!pcc_is_within(request->types_offset_bytes, request->types_bytes, payload_bytes) ||
        (request->types_bytes == 0 && request->types_offset_bytes != 0))
        return (struct pcc_reason){.cause = PCC_CAUSE_BAD_TYPES};
    return (struct pcc_reason){.cause = PCC_CAUSE_CODE};
}

/* What is only reported, and cannot be, counts as not reported. */
static void make_plausible(struct pcc_request *request)
{
    const uint64_t now_ns = pcc_now_ns();

    if (request->held_at_ns > now_ns || request->held_ns > now_ns - request->held_at_ns)
        request->held_at_ns = request->held_ns = 0;
    if (request->frozen_bytes > request->payload_bytes)
        request->frozen_bytes = request->payload_bytes;
}

static void put(struct pcc_tenant *tenant, enum pcc_event_kind kind, uint64_t snapshot, int error)
{
    pcc_tenant_put(tenant,
                   (struct pcc_event){
                       .kind = kind, .session = tenant->session, .id = snapshot, .error = error});
}

/* The word, if the client has not abandoned the snapshot, and the outcome. */
static void refuse_word(struct pcc_tenant *tenant, uint64_t snapshot,
                        const struct pcc_tenant_end *end)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);

    if (pcc_page_word(&tenant->view, snapshot) == pcc_word(snapshot, PCC_WORD_REQUESTED)) {
        /* The outcome first: a client that sees REFUSED finds the reason. */
        pcc_tenant_outcome(tenant, snapshot, end);
        (void)pcc_word_move(entry, snapshot, PCC_WORD_REQUESTED, PCC_WORD_REFUSED);
    }
    if (tenant->gpus != NULL)
        pcc_pull_release_streams(tenant, snapshot);
    pcc_tenant_wake_client(tenant);
}

static void enter(struct pcc_tenant *tenant, const struct pcc_request *request)
{
    struct pcc_tenant_queue *queue = &tenant->queue;

    PCC_ASSERT(queue->count < PCC_SNAPSHOTS); /* the caller has looked */
    queue->waits[queue->count++] = (struct pcc_tenant_wait){.request = *request};
    queue->look = queue->look || queue->count == 1;
}

/* -- leaving -- */

static uint32_t find(const struct pcc_tenant_queue *queue, uint64_t snapshot)
{
    uint32_t i = 0;

    while (i < queue->count && queue->waits[i].request.snapshot != snapshot)
        i++;
    return i;
}

static void leave(struct pcc_tenant_queue *queue, uint32_t index)
{
    queue->count--;
    memmove(&queue->waits[index], &queue->waits[index + 1],
            (queue->count - index) * sizeof(queue->waits[0]));
    if (index == 0) {
        queue->reported = 0;
        queue->look = true;
    }
}

/* The queue itself ends a snapshot. A REFUSED event gives the loop the reason. */
static void end(struct pcc_tenant *tenant, uint32_t index, int error)
{
    const struct pcc_tenant_wait wait = tenant->queue.waits[index];
    struct pcc_tenant_end how = {.outcome = PCC_OUTCOME_FAILED, .sequence = wait.number.sequence};

    if (error == -PCC_E_NO_LANE) {
        how.outcome = PCC_OUTCOME_SKIPPED;
        how.reason.cause = PCC_CAUSE_SLOTS_BUSY;
    } else if (error == -ENOTCONN) {
        how.reason.cause = PCC_CAUSE_ENDED_BEFORE;
    } else {
        how.reason = (struct pcc_reason){.stage = PCC_STAGE_BEGIN, .error = error};
    }
    leave(&tenant->queue, index);
    refuse_word(tenant, wait.request.snapshot, &how);
    put(tenant, PCC_EVENT_REFUSED, wait.request.snapshot, error);
}

static void drop_abandoned(struct pcc_tenant *tenant)
{
    struct pcc_tenant_queue *queue = &tenant->queue;

    for (uint32_t i = queue->count; i > 0; i--) {
        const uint64_t snapshot = queue->waits[i - 1].request.snapshot;
        if (pcc_page_word(&tenant->view, snapshot) != pcc_word(snapshot, PCC_WORD_REQUESTED))
            end(tenant, i - 1, -PCC_E_ABORTED);
    }
}

/* -- messages of the client -- */

int pcc_tenant_take_request(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    struct pcc_tenant_queue *queue = &tenant->queue;
    const uint64_t snapshot = message->id;

    if (snapshot <= queue->newest || snapshot >> 56 != 0)
        return -PCC_E_BAD_PEER;
    if (queue->unnoted >= UNNOTED_MAX && !PCC_READ(&tenant->stopping)) {
        queue->crowded = true; /* taken again when the loop has noted some */
        queue->message = *message;
        return 0;
    }
    queue->newest = snapshot;
    struct pcc_request request = *pcc_page_request(&tenant->view, snapshot);
    /* Its entry may be another one's by now, because it was abandoned, and the block may have
     * changed under the copy: the word, read afterwards, tells. */
    atomic_thread_fence(memory_order_acquire);
    const uint64_t word = pcc_page_word(&tenant->view, snapshot);
    if (word >> 8 > snapshot)
        return 0;
    if (request.snapshot != snapshot || (word != pcc_word(snapshot, PCC_WORD_REQUESTED) &&
                                         word != pcc_word(snapshot, PCC_WORD_ABANDONED)))
        return -PCC_E_BAD_PEER;
    drop_abandoned(tenant);
    if (queue->count == PCC_SNAPSHOTS) /* no honest client's word says an earlier snapshot again */
        return -PCC_E_BAD_PEER;
    make_plausible(&request);
    const struct pcc_reason fault = fault_of(&request);
    const bool is_bad = fault.cause != PCC_CAUSE_CODE;
    queue->unnoted++;
    pcc_tenant_put(
        tenant, (struct pcc_event){
                    .kind = PCC_EVENT_REQUESTED,
                    .error = is_bad ? -EINVAL : 0,
                    .session = tenant->session,
                    .id = snapshot,
                    .requested = {.request = request, .fault = fault, .taken_ns = pcc_now_ns()}});
    if (is_bad)
        refuse_word(tenant, snapshot,
                    &(struct pcc_tenant_end){.outcome = PCC_OUTCOME_FAILED, .reason = fault});
    else
        enter(tenant, &request);
    return 0;
}

void pcc_tenant_take_write(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    const uint32_t index = find(&tenant->queue, message->id);
    struct pcc_tenant_save *save = pcc_tenant_find(tenant, message->id);
    struct pcc_tenant_wait *wait = &tenant->queue.waits[index % PCC_SNAPSHOTS];
    bool *wanted = NULL;

    if (index < tenant->queue.count && wait->request.level != PCC_LEVEL_DISK) {
        wanted = &wait->wanted;
        wait->request.level = PCC_LEVEL_MEMORY; /* it is not deferred any more */
    } else if (save != NULL && save->save != NULL && !save->aborted &&
               pcc_save_is_parked(save->save))
        wanted = &save->wanted;
    if (wanted == NULL || *wanted)
        return;
    *wanted = true;
    if (save != NULL)
        pcc_tenant_deferred_want(tenant, save);
    pcc_tenant_put(tenant, (struct pcc_event){.kind = PCC_EVENT_WANTED,
                                              .session = tenant->session,
                                              .id = message->id,
                                              .sequence = save != NULL ? save->sequence : 0});
}

/* -- ends that the queue does not decide -- */

void pcc_tenant_queue_end(struct pcc_tenant *tenant)
{
    while (tenant->queue.count > 0)
        end(tenant, 0, -ENOTCONN);
    tenant->queue = (struct pcc_tenant_queue){0};
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

bool pcc_tenant_refuse(struct pcc_tenant *tenant, uint64_t snapshot,
                       const struct pcc_tenant_end *how)
{
    PCC_LOCKED(&tenant->lock);
    const uint32_t index = find(&tenant->queue, snapshot);
    if (index == tenant->queue.count)
        return tenant->attached && pcc_tenant_refuse_begun(tenant, snapshot, how);
    leave(&tenant->queue, index);
    refuse_word(tenant, snapshot, how);
    pcc_tenant_queue_look(tenant);
    return true;
}

void pcc_tenant_set_outcome(struct pcc_tenant *tenant, uint64_t snapshot,
                            const struct pcc_tenant_end *end)
{
    PCC_LOCKED(&tenant->lock);
    pcc_tenant_outcome(tenant, snapshot, end);
    pcc_tenant_wake_client(tenant);
}

/* -- saves -- */

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
    save->gpus = sources[0].ops == &pcc_source_pull ? sources[0].parts : 0;
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

/* -- how the first one becomes a save -- */

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

/* Takes lane and slot, moves the word REQUESTED -> COPYING, sets the outcome, hands out chunks
 * (none for what is to be offered), and has the device part of the request's map pulled. BEGUN
 * follows. Codes of pcc_save_begin; -ENODEV without a volume, or when its file is lost;
 * -PCC_E_ABORTED when the client has abandoned it; -PCC_E_BAD_HANDLE when the map is not the one
 * exposed last; -PCC_E_OTHER_MEMORY when a proof has failed on a GPU of the map. */
static int begin(struct pcc_tenant *tenant, const struct pcc_tenant_wait *wait)
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

/* As pcc_tenant_number, for what has left the queue. */
static int number_begun(struct pcc_tenant *tenant, uint64_t snapshot,
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

/* -- the number, and the turn of the first one -- */

int pcc_tenant_number(struct pcc_tenant *tenant, uint64_t snapshot, const struct pcc_number *number)
{
    if ((number->marks & ~PCC_SLOT_MARKS) != 0)
        return -EINVAL;
    PCC_LOCKED(&tenant->lock);
    const uint32_t index = find(&tenant->queue, snapshot);
    if (index == tenant->queue.count)
        return number_begun(tenant, snapshot, number);
    tenant->queue.waits[index].number = *number;
    pcc_tenant_queue_look(tenant); /* with its number it may have to be skipped */
    return 0;
}

/* Whether a code means that the first one waits, for what others do or the loop decides. */
static bool is_waited_for(int error)
{
    return error == -PCC_E_NO_LANE || error == -PCC_E_NO_SLOT || error == -PCC_E_STOPPED ||
           error == -EBUSY || error == -ENODEV;
}

/* 0: the first one has begun, or has ended. Else why it waits. */
static int try_first(struct pcc_tenant *tenant)
{
    const struct pcc_tenant_wait *wait = &tenant->queue.waits[0];
    const bool skips = (wait->request.flags & PCC_REQUEST_SKIP) != 0;
    const bool numbered = wait->number.sequence != 0 || tenant->policy.numbers;
    const int error = tenant->policy.held ? -EBUSY : begin(tenant, wait);

    /* A copy is worth more than a step that is on a GPU only. */
    const bool gets_place = error == -PCC_E_NO_LANE && wait->request.level == PCC_LEVEL_MEMORY &&
                            pcc_tenant_deferred_yield(tenant, &wait->request);

    if (error == 0)
        leave(&tenant->queue, 0);
    else if (!is_waited_for(error) || /* and a group decides before a rank skips */
             (error == -PCC_E_NO_LANE && skips && numbered && !gets_place))
        end(tenant, 0, error);
    else
        return error;
    return 0;
}

bool pcc_tenant_queue_run(struct pcc_tenant *tenant)
{
    struct pcc_tenant_queue *queue = &tenant->queue;
    bool deferred = false;
    int error = 0;

    PCC_LOCKED(&tenant->lock);
    if (!tenant->broken) {
        deferred = pcc_tenant_deferred_look(tenant);
        drop_abandoned(tenant);
        queue->look = queue->look || deferred; /* its streams may have come to the first one */
        while (queue->look && queue->count > 0 && error == 0) {
            queue->look = false;
            error = try_first(tenant);
            queue->look = queue->look || error == 0;
        }
        /* A lane is freed by a save that ends. For the rest the loop can do something. */
        if (error != 0 && error != -PCC_E_NO_LANE && queue->reported != error) {
            queue->reported = error;
            put(tenant, PCC_EVENT_WAITS, queue->waits[0].request.snapshot, error);
        }
    }
    return deferred && (queue->count > 0 || tenant->missing > 0);
}
