/* The drain thread, which reads the client's messages (the ring to_daemon), and the callbacks of
 * the savers. Every message is checked against the tenant's own table before it has any effect. */
#include <unistd.h>

#include "daemon/pcc_tenant_private.h"

#define IDLE_NS 1000000000u /* a peer that sets its bell back delays us by this much */
/* Something waits for a word that only a stream of the client writes: that a deferred save is
 * withdrawn, or that the memory to be proven is as the snapshot has it. */
#define PRESSED_NS 2000000u
#define EMPTY_WAKES_MAX 64u /* rung that often for nothing: look once per millisecond */
#define EMPTY_WAKE_PAUSE_NS 1000000

void pcc_tenant_put(struct pcc_tenant *tenant, struct pcc_event event)
{
    event.tenant = tenant->spec.id;
    pcc_events_put(tenant->events, &event);
}

void pcc_tenant_break(struct pcc_tenant *tenant)
{
    if (tenant->broken)
        return;
    tenant->broken = true;
    pcc_tenant_put(tenant, (struct pcc_event){.kind = PCC_EVENT_BAD_PEER,
                                              .error = -PCC_E_BAD_PEER,
                                              .session = tenant->session});
    (void)pthread_cond_broadcast(&tenant->chunk_back);
}

struct pcc_tenant_save *pcc_tenant_find(struct pcc_tenant *tenant, uint64_t snapshot)
{
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (save->tag != 0 && save->snapshot == snapshot && save->session == tenant->session)
            return save;
    }
    return NULL;
}

void pcc_tenant_outcome(struct pcc_tenant *tenant, uint64_t snapshot,
                        const struct pcc_tenant_end *end)
{
    if (!tenant->attached)
        return;
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, snapshot);
    /* The entry may have a younger snapshot by now; ids only grow. */
    if (PCC_READ(&entry->outcome) >> 8 > snapshot)
        return;
    pcc_outcome_write(entry, snapshot, end->outcome, end->sequence, end->newer, &end->reason);
}

void pcc_tenant_outcome_moves(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                              enum pcc_outcome outcome)
{
    pcc_tenant_outcome(tenant, save->snapshot,
                       &(struct pcc_tenant_end){.outcome = outcome, .sequence = save->sequence});
}

static void save_event(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                       enum pcc_event_kind kind)
{
    pcc_tenant_put(tenant, (struct pcc_event){.kind = kind,
                                              .session = save->session,
                                              .id = save->snapshot,
                                              .sequence = save->sequence,
                                              .payload_bytes = save->payload_bytes});
}

void pcc_tenant_sources_abandon(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                                struct pcc_source sources[PCC_SOURCES])
{
    for (uint32_t i = 0; i < PCC_SOURCES; i++)
        if (sources[i].ops != NULL && sources[i].ops->abandon != NULL)
            sources[i].ops->abandon(tenant, save, &sources[i]);
}

void pcc_tenant_abort(struct pcc_tenant *tenant, struct pcc_tenant_save *save, int error)
{
    if (save->save == NULL || save->copied || save->aborted)
        return;
    save->aborted = true;
    save->abort_error = error;
    pcc_tenant_sources_abandon(tenant, save, save->sources);
    pcc_save_abort(save->save, error);
}

/* Every chunk is with the saver. The word decides first: once the client has abandoned the
 * snapshot, the trainer continues, and the last chunks may hold another step (P4). The seal stores
 * for the next daemon that the snapshot is copied; the client sees COPIED afterwards (P1). */
static int copy_complete(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, save->snapshot);

    if (!pcc_word_move(entry, save->snapshot, PCC_WORD_COPYING, PCC_WORD_VOUCHING)) {
        const uint64_t word = pcc_page_word(&tenant->view, save->snapshot);
        pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
        return word == pcc_word(save->snapshot, PCC_WORD_ABANDONED) ? 0 : -PCC_E_BAD_PEER;
    }
    save->copied = true;
    /* An error means that a write has failed meanwhile; `ended` follows and says so. */
    (void)!pcc_save_seal(save->save);
    /* The call fails if the client has overwritten the page. The snapshot is copied even then. */
    (void)pcc_word_move(entry, save->snapshot, PCC_WORD_VOUCHING, PCC_WORD_COPIED);
    pcc_tenant_outcome_moves(tenant, save,
                             save->writing ? PCC_OUTCOME_WRITING : PCC_OUTCOME_COPIED);
    save_event(tenant, save, PCC_EVENT_COPIED);
    if (save->writing)
        save_event(tenant, save, PCC_EVENT_WRITING);
    pcc_tenant_wake_client(tenant);
    return 0;
}

void pcc_tenant_chunk_to_save(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                              uint32_t index, uint64_t offset_bytes, uint32_t length_bytes,
                              const uint64_t *checksums)
{
    pcc_tenant_chunk_fill(tenant, save, index, offset_bytes, length_bytes);
    const int error = pcc_tenant_hand_over(tenant, save, index, checksums);
    if (error != 0) { /* it was not taken */
        pcc_tenant_chunk_free(tenant, index);
        pcc_tenant_abort(tenant, save, error);
    }
}

void pcc_tenant_seen(const struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                     uint64_t offset_bytes, bool seen)
{
    const uint64_t part = offset_bytes / tenant->spec.chunk_bytes;

    if (seen)
        save->seen[part / 64] |= 1ull << (part % 64);
    else
        save->seen[part / 64] &= ~(1ull << (part % 64));
}

void pcc_tenant_received(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                         uint64_t offset_bytes)
{
    pcc_tenant_seen(tenant, save, offset_bytes, true);
    save->received++;
}

int pcc_tenant_copy_check(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    bool complete = save->received == save->chunk_count && !save->is_open && save->sequence != 0 &&
                    !save->aborted;

    for (uint32_t i = 0; i < PCC_SOURCES; i++)
        complete = complete && save->sources[i].judged == save->sources[i].parts;
    return complete ? copy_complete(tenant, save) : 0;
}

static int take_back(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    if (message->chunk >= tenant->chunk_count)
        return -PCC_E_BAD_PEER;
    const struct pcc_tenant_chunk *chunk = &tenant->chunks[message->chunk];
    if (chunk->state == PCC_CHUNK_GRANTED) {
        tenant->granted_count--;
        pcc_tenant_chunk_free(tenant, message->chunk);
        (void)pthread_cond_broadcast(&tenant->chunk_back);
    } else if (chunk->state == PCC_CHUNK_LENT &&
               (message->result == 0 || chunk->lent_unchecked)) { /* what is checked is intact */
        pcc_tenant_load_put_back(tenant, message->chunk, message->result == 0);
    } else {
        return -PCC_E_BAD_PEER;
    }
    return 0;
}

static int take(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    if (message->kind == PCC_MSG_FULL)
        return pcc_push_take_full(tenant, message);
    if (message->kind == PCC_MSG_OFFER)
        return pcc_push_take_offer(tenant, message);
    if (message->kind == PCC_MSG_TAKEN)
        return take_back(tenant, message);
    if (message->kind == PCC_MSG_REQUEST)
        return pcc_tenant_take_request(tenant, message);
    if (message->kind == PCC_MSG_WRITE) {
        pcc_tenant_take_write(tenant, message);
        return 0;
    }
    if (message->kind == PCC_MSG_LENGTH)
        return pcc_push_take_length(tenant, message);
    return message->kind == PCC_MSG_RETURNED ? pcc_tenant_take_returned(tenant, message)
                                             : -PCC_E_BAD_PEER;
}

/* The next one; a request that could not be taken comes first, and is tried once. */
static int message_next(struct pcc_tenant *tenant, bool *again, struct pcc_message *out)
{
    if (!tenant->queue.crowded)
        return pcc_ring_pop(&tenant->view.to_daemon, out);
    if (!*again)
        return 0;
    *again = tenant->queue.crowded = false; /* the drain thread alone sets it */
    *out = tenant->queue.message;
    return 1;
}

/* Takes at most one ring's worth, so that a peer that never stops cannot keep the thread here. */
static uint32_t ring_drain(struct pcc_tenant *tenant)
{
    bool again = true;
    uint32_t count = 0;
    struct pcc_message message;

    while (count < tenant->geometry.ring_capacity) {
        PCC_LOCKED(&tenant->lock);
        const int result = message_next(tenant, &again, &message);
        if (result == 0)
            break;
        if (!tenant->broken) {
            if (result < 0 || take(tenant, &message) != 0)
                pcc_tenant_break(tenant);
            else
                pcc_push_hand_out(tenant);
        }
        if (tenant->broken)
            return 0; /* and nothing from this ring is believed again */
        if (tenant->queue.crowded)
            break; /* the loop rings when it has noted some */
        count++;
    }
    return count;
}

static void abort_abandoned(struct pcc_tenant *tenant)
{
    PCC_LOCKED(&tenant->lock);
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (save->save == NULL || save->copied || save->aborted || save->session != tenant->session)
            continue;
        /* ABANDONED; or the word was overwritten, and it ends the same way. */
        if (pcc_page_word(&tenant->view, save->snapshot) !=
            pcc_word(save->snapshot, PCC_WORD_COPYING))
            pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
    }
}

/* -- judging what was read -- */

/* With the lock held: parts that were read and not judged. */
static uint32_t unjudged(const struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                         const struct pcc_source *source)
{
    const bool goes_on =
        save->save != NULL && !save->aborted && !save->copied && save->session == tenant->session;

    return goes_on ? source->read & ~source->judged : 0;
}

/* With the lock held: the owner has answered after these parts were read. */
static void source_judge(struct pcc_tenant *tenant, struct pcc_tenant_save *save,
                         struct pcc_source *source, uint32_t parts)
{
    /* One that was deferred may have been withdrawn while it was read: then it is a mix (P4). */
    if (pcc_pull_words(tenant, save) == PCC_PULL_WITHDRAWN) {
        pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
        return;
    }
    source->judged |= parts;
    source->ops->drained(tenant, save, parts);
    if (pcc_tenant_copy_check(tenant, save) != 0)
        pcc_tenant_break(tenant);
}

/* A pulled copy counts only if its owner lived after the last read, and before the client sees
 * COPIED. A thread of the owner is asked, and answers when it runs: while a process has a thread,
 * the kernel closes none of its files, the GPUs' among them. True when something was judged. */
static bool sources_judge(struct pcc_tenant *tenant)
{
    struct pcc_page *page = tenant->view.page;
    bool any = false, asks = false;

    PCC_LOCKED(&tenant->lock);
    /* Acquire: what was judged was read before the question. */
    const bool answered =
        PCC_READ_ACQUIRE(&page->life_told) == tenant->pull.life_asked && tenant->pull.readers == 0;
    for (uint32_t i = 0; i < PCC_TENANT_SAVES * PCC_SOURCES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i / PCC_SOURCES];
        struct pcc_source *source = &save->sources[i % PCC_SOURCES];
        const uint32_t parts = unjudged(tenant, save, source) & source->asked;
        if (answered && parts != 0) {
            source_judge(tenant, save, source, parts);
            any = true;
        }
        const uint32_t left = unjudged(tenant, save, source);
        asks = asks || (left & ~source->asked) != 0;
        source->asked |= left;
    }
    if (asks) {
        PCC_WRITE_RELEASE(&page->life_asked,
                          ++tenant->pull.life_asked); /* what was read comes before */
        pcc_tenant_wake_client(tenant);
    }
    return any;
}

void *pcc_tenant_drain_run(void *argument)
{
    struct pcc_tenant *tenant = argument;
    _Atomic uint32_t *bell = &tenant->view.page->daemon_bell;
    uint32_t empty_wakes = 0;

    for (;;) {
        const uint32_t rung = pcc_bell_read(bell);
        /* Acquire pairs with the release in detach. Read before the ring: what a dead trainer has
         * produced is taken before we stop. */
        const bool stopping = PCC_READ_ACQUIRE(&tenant->stopping);
        bool moved = ring_drain(tenant) > 0;
        abort_abandoned(tenant);
        bool pressed = !stopping && pcc_tenant_queue_run(tenant);
        moved = sources_judge(tenant) || moved;
        /* Here, and not in the threads that fill chunks: the driver may make the caller wait. */
        moved = (!stopping && pcc_tenant_prove(tenant)) || moved;
        pressed = pressed || tenant->pull.proof.waits;
        pcc_tenant_maps_close(tenant);
        if (stopping)
            return NULL;
        if (moved) {
            empty_wakes = 0;
            continue;
        }
        if (++empty_wakes > EMPTY_WAKES_MAX)
            (void)nanosleep(&(struct timespec){.tv_nsec = EMPTY_WAKE_PAUSE_NS}, NULL);
        pcc_futex_wait(bell, rung, pressed ? PRESSED_NS : IDLE_NS);
    }
}

/* -- callbacks of the savers -- */

static void on_writing(void *owner, uint64_t tag)
{
    struct pcc_tenant *tenant = owner;

    PCC_LOCKED(&tenant->lock);
    struct pcc_tenant_save *save = pcc_tenant_save_of(tenant, tag);
    if (!save->writing) {
        save->writing = true;
        if (save->copied) { /* else reported with COPIED: states come in order */
            if (pcc_tenant_of_session(tenant, save))
                pcc_tenant_outcome_moves(tenant, save, PCC_OUTCOME_WRITING);
            save_event(tenant, save, PCC_EVENT_WRITING);
        }
    }
}

static void on_chunk_written(void *owner, uint64_t tag, uint32_t index)
{
    struct pcc_tenant *tenant = owner;

    PCC_LOCKED(&tenant->lock);
    struct pcc_tenant_chunk *chunk = &tenant->chunks[index];
    if (chunk->tag == tag && chunk->state == PCC_CHUNK_FULL) /* not so when written again */
        pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_CACHED);
    pcc_tenant_pass_on(tenant);
}

/* With the lock held. */
static void answer(struct pcc_tenant *tenant, struct pcc_tenant_save *save, uint64_t offset_bytes,
                   bool in_base)
{
    struct pcc_source *source = pcc_source_at(save, offset_bytes);

    if (source->ops->answer(tenant, save, offset_bytes, in_base) != 0)
        return;
    if (in_base) {
        save->received++;
        save->referred++;
        if (pcc_tenant_copy_check(tenant, save) != 0)
            pcc_tenant_break(tenant);
    } else { /* it needs a chunk after all */
        pcc_tenant_seen(tenant, save, offset_bytes, false);
        source->ops->want(tenant, save, source, offset_bytes,
                          offset_bytes + tenant->spec.chunk_bytes);
    }
    pcc_tenant_wake_client(tenant);
}

static void on_offered(void *owner, uint64_t tag, uint64_t payload_offset_bytes, bool in_base)
{
    struct pcc_tenant *tenant = owner;

    PCC_LOCKED(&tenant->lock);
    struct pcc_tenant_save *save = pcc_tenant_save_of(tenant, tag);
    if (save != NULL && pcc_tenant_of_session(tenant, save) && !save->aborted && !tenant->broken)
        answer(tenant, save, payload_offset_bytes, in_base);
}

static void ended_outcome(struct pcc_tenant *tenant, const struct pcc_tenant_save *save,
                          const struct pcc_save_result *result)
{
    static const enum pcc_outcome outcomes[] = {
        [PCC_SAVE_DURABLE] = PCC_OUTCOME_DURABLE,
        [PCC_SAVE_SUPERSEDED] = PCC_OUTCOME_SUPERSEDED,
        [PCC_SAVE_GIVEN_UP] = PCC_OUTCOME_SKIPPED,
        [PCC_SAVE_FAILED] = PCC_OUTCOME_FAILED,
    };
    static const uint16_t causes[] = {
        [PCC_SAVE_SUPERSEDED] = PCC_CAUSE_REPLACED,
        [PCC_SAVE_GIVEN_UP] = PCC_CAUSE_OTHER_RANK,
        [PCC_SAVE_FAILED] = PCC_CAUSE_CODE,
    };
    struct pcc_snapshot *entry = pcc_page_snapshot(&tenant->view, save->snapshot);
    const struct pcc_tenant_end end = {
        .outcome = outcomes[result->end],
        .sequence = save->sequence,
        .newer = result->newer,
        .reason = {.cause = causes[result->end],
                   .stage = (uint16_t)result->stage,
                   .error = result->error,
                   .argument = result->error == -PCC_E_OTHER_MEMORY ? save->device : geteuid()},
    };

    pcc_tenant_outcome(tenant, save->snapshot, &end);
    if (!save->copied) /* false when the client has abandoned it: the word is final either way */
        (void)pcc_word_move(entry, save->snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED);
    pcc_tenant_wake_client(tenant);
}

/* The loop opens another volume. Without this a request that comes before the loop has heard of the
 * failure would begin in the lost file, and fail, too. */
static bool is_of_lost_file(const struct pcc_save_result *result)
{
    return result->end == PCC_SAVE_FAILED &&
           (result->error == -PCC_E_REMOVED || result->error == -PCC_E_REPLACED ||
            result->error == -PCC_E_TRUNCATED);
}

static void on_ended(void *owner, const struct pcc_save_result *result)
{
    static const enum pcc_event_kind kinds[] = {
        [PCC_SAVE_DURABLE] = PCC_EVENT_DURABLE,
        [PCC_SAVE_SUPERSEDED] = PCC_EVENT_SUPERSEDED,
        [PCC_SAVE_GIVEN_UP] = PCC_EVENT_GIVEN_UP,
        [PCC_SAVE_FAILED] = PCC_EVENT_FAILED,
    };
    struct pcc_tenant *tenant = owner;

    PCC_LOCKED(&tenant->lock);
    struct pcc_tenant_save *save = pcc_tenant_save_of(tenant, result->tag);
    save->save = NULL;
    pcc_tenant_chunks_forget(tenant, save, result->end == PCC_SAVE_DURABLE);
    tenant->bindings[save->binding].active--;
    if (is_of_lost_file(result))
        tenant->bindings[save->binding].lost = true;
    if (!save->silent) {
        if (pcc_tenant_of_session(tenant, save))
            ended_outcome(tenant, save, result);
        pcc_tenant_put(tenant, (struct pcc_event){.kind = kinds[result->end],
                                                  .error = result->error,
                                                  .session = save->session,
                                                  .id = save->snapshot,
                                                  .sequence = save->sequence,
                                                  .slot = result->slot,
                                                  .rehomed = result->rehomed,
                                                  .copied_bytes = result->copied_bytes,
                                                  .written_bytes = result->written_bytes,
                                                  .stage = result->stage,
                                                  .times = result->times});
    }
    if (!save->copied) /* after the outcome: owners go on when the word is final */
        pcc_tenant_sources_abandon(tenant, save, save->sources);
    pcc_tenant_pass_on(tenant);
}

static void on_freed(void *owner)
{
    struct pcc_tenant *tenant = owner;

    PCC_LOCKED(&tenant->lock);
    pcc_tenant_adopted_write(tenant);
    if (tenant->queue.count > 0)
        pcc_tenant_queue_look(tenant);
}

const struct pcc_save_events pcc_tenant_save_events = {
    .writing = on_writing,
    .chunk_written = on_chunk_written,
    .offered = on_offered,
    .ended = on_ended,
    .freed = on_freed,
};
