/* Admission: which snapshots become saves; and what the streams of the trainer's GPUs wait for.
 *
 * What was pulled counts if its trainer lived after the last copy: CUDA does not say what an
 * importer reads once the exporter has ended. Only then `done` is stored, which lets the trainer's
 * stream go on; a copy that fails stores it, too, but after its word has become final (P4). */
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_channel_private.h"

#define RAISE_TRIES_MAX 64u /* the page's owner may scribble on it as fast as he can */

/* An entry never used, else the one that ended longest ago: a message that is under way when its
 * save ends still finds it. */
struct pcc_channel_save *pcc_channel_save_take(struct pcc_channel *channel, uint32_t chunk_count)
{
    struct pcc_channel_save *best = NULL;
    const uint32_t words = (uint32_t)pcc_ceil_div(chunk_count, 64);

    for (uint32_t i = 0; i < PCC_CHANNEL_SAVES; i++) {
        struct pcc_channel_save *save = &channel->saves[i];
        if (save->save == NULL && save->pulls == 0 && save != channel->settling &&
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
static int requested(const struct pcc_channel *channel, uint64_t snapshot)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&channel->view, snapshot);
    /* Acquire pairs with the client's release of the word. */
    const uint64_t word = atomic_load_explicit(&entry->word, memory_order_acquire);

    if (word == pcc_word(snapshot, PCC_WORD_ABANDONED))
        return -PCC_E_ABORTED;
    return word == pcc_word(snapshot, PCC_WORD_REQUESTED) ? 0 : -PCC_E_BAD_PEER;
}

/* The entry of a save that was just begun. */
static void save_fill(struct pcc_channel *channel, struct pcc_channel_save *save, uint64_t snapshot,
                      const struct pcc_save_request *request, struct pcc_save *saved,
                      uint64_t sequence)
{
    uint64_t *seen = save->seen;
    const uint32_t seen_words = save->seen_words;
    const uint32_t chunk_count =
        (uint32_t)pcc_ceil_div(request->payload_bytes, channel->spec.chunk_bytes);

    *save = (struct pcc_channel_save){.tag = request->tag,
                                      .snapshot = snapshot,
                                      .session = channel->session,
                                      .sequence = sequence,
                                      .payload_bytes = request->payload_bytes,
                                      .binding = channel->bound,
                                      .chunk_count = chunk_count,
                                      .wanted = chunk_count,
                                      .save = saved,
                                      .seen = seen,
                                      .seen_words = seen_words};
    channel->bindings[channel->bound].active++;
    channel->missing += chunk_count;
}

static int begin(struct pcc_channel *channel, uint64_t snapshot, uint64_t map,
                 const struct pcc_save_request *request, struct pcc_channel_part **parts,
                 uint64_t *sequence_out)
{
    struct pcc_save_request tagged = *request;
    struct pcc_save *saved;
    uint64_t sequence;

    if (!channel->attached || channel->broken)
        return -ENOTCONN;
    if (channel->bound == PCC_CHANNEL_VOLUMES)
        return -ENODEV;
    const uint64_t chunk_count = pcc_ceil_div(request->payload_bytes, channel->spec.chunk_bytes);
    if (chunk_count == 0 || chunk_count > UINT32_MAX)
        return -EINVAL;
    int error = pcc_channel_find(channel, snapshot) != NULL ? -PCC_E_BAD_PEER
                                                            : requested(channel, snapshot);
    if (error == 0 && map != 0)
        error = pcc_channel_pull_prepare(channel, map, request, parts);
    if (error != 0)
        return error;
    struct pcc_channel_save *save = pcc_channel_save_take(channel, (uint32_t)chunk_count);
    if (save == NULL)
        return -ENOMEM;
    tagged.tag = ++channel->serial << 8 | (uint64_t)(save - channel->saves);
    error = pcc_save_begin(channel->bindings[channel->bound].saver, &tagged, &saved, &sequence);
    if (error != 0)
        return error;
    save_fill(channel, save, snapshot, &tagged, saved, sequence);
    if (!pcc_word_move(pcc_page_snapshot(&channel->view, snapshot), snapshot, PCC_WORD_REQUESTED,
                       PCC_WORD_COPYING)) {
        save->silent = true;
        pcc_channel_give_up(channel, save, -PCC_E_ABORTED);
        return -PCC_E_ABORTED;
    }
    pcc_channel_outcome(channel, snapshot, PCC_OUTCOME_COPYING, sequence);
    pcc_channel_pull_start(channel, save, *parts);
    *parts = NULL;
    pcc_channel_hand_out(channel);
    pcc_channel_wake_client(channel);
    *sequence_out = sequence;
    return 0;
}

int pcc_channel_begin(struct pcc_channel *channel, uint64_t snapshot, uint64_t map,
                      const struct pcc_save_request *request, uint64_t *sequence_out)
{
    struct pcc_channel_part *parts = NULL; /* taken over once the save has begun */

    pcc_channel_lock(channel);
    const int error = begin(channel, snapshot, map, request, &parts, sequence_out);
    pcc_channel_unlock(channel);
    pcc_channel_pull_drop(parts);
    return error;
}

void pcc_channel_refuse(struct pcc_channel *channel, uint64_t snapshot, enum pcc_outcome outcome,
                        uint64_t sequence)
{
    pcc_channel_lock(channel);
    if (channel->attached) {
        struct pcc_snapshot *entry = pcc_page_snapshot(&channel->view, snapshot);
        const uint64_t word = atomic_load_explicit(&entry->word, memory_order_acquire);
        if (word == pcc_word(snapshot, PCC_WORD_REQUESTED) ||
            word == pcc_word(snapshot, PCC_WORD_COPYING)) {
            /* The outcome first: whoever sees REFUSED finds the reason. */
            pcc_channel_outcome(channel, snapshot, outcome, sequence);
            if (pcc_word_move(entry, snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED)) {
                struct pcc_channel_save *save = pcc_channel_find(channel, snapshot);
                if (save != NULL)
                    pcc_channel_give_up(channel, save, -PCC_E_ABORTED);
            } else {
                (void)pcc_word_move(entry, snapshot, PCC_WORD_REQUESTED, PCC_WORD_REFUSED);
            }
            if (channel->gpus != NULL)
                pcc_channel_let_go(channel, snapshot);
            pcc_channel_wake_client(channel);
        }
    }
    pcc_channel_unlock(channel);
}

uint32_t pcc_channel_requested(struct pcc_channel *channel, uint64_t *snapshots)
{
    uint32_t count = 0;

    pcc_channel_lock(channel);
    for (uint64_t i = 0; channel->attached && i < PCC_SNAPSHOTS; i++) {
        const struct pcc_snapshot *entry = pcc_page_snapshot(&channel->view, i);
        const uint64_t word = atomic_load_explicit(&entry->word, memory_order_acquire);
        const uint64_t snapshot = word >> 8;
        if (word == pcc_word(snapshot, PCC_WORD_REQUESTED) && snapshot % PCC_SNAPSHOTS == i)
            snapshots[count++] = snapshot;
    }
    pcc_channel_unlock(channel);
    return count;
}

void pcc_channel_set_outcome(struct pcc_channel *channel, uint64_t snapshot,
                             enum pcc_outcome outcome, uint64_t sequence)
{
    pcc_channel_lock(channel);
    pcc_channel_outcome(channel, snapshot, outcome, sequence);
    pcc_channel_wake_client(channel);
    pcc_channel_unlock(channel);
}

/* -- the words that GPUs' streams wait for -- */

void pcc_channel_done(struct pcc_channel *channel, uint64_t snapshot, uint32_t device)
{
    _Atomic uint64_t *word = &pcc_page_words(&channel->view, snapshot, device)->done;
    uint64_t now = atomic_load_explicit(word, memory_order_relaxed);

    for (uint32_t i = 0; now < snapshot && i < RAISE_TRIES_MAX; i++)
        /* Release: the copies, and the word that has become final, come before it. */
        if (atomic_compare_exchange_strong_explicit(word, &now, snapshot, memory_order_release,
                                                    memory_order_relaxed))
            return;
}

void pcc_channel_let_go(struct pcc_channel *channel, uint64_t snapshot)
{
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        pcc_channel_done(channel, snapshot, device);
}

void pcc_channel_refuse_copy(struct pcc_channel *channel, uint64_t snapshot, uint64_t sequence)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&channel->view, snapshot);

    if (atomic_load_explicit(&entry->word, memory_order_acquire) ==
        pcc_word(snapshot, PCC_WORD_COPYING)) {
        /* The outcome first: whoever sees REFUSED finds the reason. */
        pcc_channel_outcome(channel, snapshot, PCC_OUTCOME_FAILED, sequence);
        (void)pcc_word_move(entry, snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED);
    }
    pcc_channel_let_go(channel, snapshot);
    pcc_channel_wake_client(channel);
}

/* -- judging what was pulled -- */

struct reading { /* the devices of a save that were read and not judged */
    uint64_t tag;
    uint32_t devices;
};

/* With the lock held. */
static struct reading reading_of(const struct pcc_channel *channel,
                                 const struct pcc_channel_save *save)
{
    const bool goes_on =
        save->save != NULL && !save->given_up && !save->copied && save->session == channel->session;

    return (struct reading){.tag = save->tag, .devices = goes_on ? save->read & ~save->judged : 0};
}

/* With the lock held: the trainer lived after these devices were read. */
static void believe(struct pcc_channel *channel, struct pcc_channel_save *save, uint32_t devices)
{
    save->judged |= devices;
    for (uint32_t device = 0; device < PCC_DEVICES; device++)
        if ((devices >> device & 1u) != 0)
            pcc_channel_done(channel, save->snapshot, device);
    pcc_channel_wake_client(channel);
    if (pcc_channel_copy_check(channel, save) != 0)
        pcc_channel_break(channel);
}

bool pcc_channel_judge(struct pcc_channel *channel)
{
    struct reading before[PCC_CHANNEL_SAVES];
    bool any = false;

    pcc_channel_lock(channel);
    for (uint32_t i = 0; i < PCC_CHANNEL_SAVES; i++) {
        before[i] = reading_of(channel, &channel->saves[i]);
        any = any || before[i].devices != 0;
    }
    pcc_channel_unlock(channel);
    if (!any)
        return false;
    /* After the last copy of each, and before anybody hears of it. */
    const bool lives = pcc_process_lives(&channel->pull.trainer);
    pcc_channel_lock(channel);
    for (uint32_t i = 0; i < PCC_CHANNEL_SAVES; i++) {
        struct pcc_channel_save *save = &channel->saves[i];
        const struct reading now = reading_of(channel, save);
        const uint32_t devices = now.tag == before[i].tag ? now.devices & before[i].devices : 0;
        if (devices != 0 && lives)
            believe(channel, save, devices);
        else if (devices != 0)
            pcc_channel_give_up(channel, save, -PCC_E_ABORTED);
    }
    pcc_channel_unlock(channel);
    return true;
}
