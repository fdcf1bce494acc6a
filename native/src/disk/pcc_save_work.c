/* The order that durability rests on, for each save: chunks and manifest written, every completion
 * checked; flush; publish (replica A, acknowledge, replica B); only then are slots free.
 *
 * The same functions run under the threads and under pcc_saver_step. */
#include <string.h>
#include <time.h>

#include "disk/pcc_save_private.h"
#include "io/pcc_pace.h"

#define PAUSE_NS_MIN 1000000
#define PAUSE_NS_MAX 999000000

/* An item: which place of the lane, a step or none, and a position in the payload. */
static uint64_t make_item(const struct pcc_save *save, enum pcc_save_step step, uint32_t position)
{
    return (uint64_t)save->place << 48 | (uint64_t)step << 32 | position;
}

/* With `first` it goes before what is queued already. */
static void push(struct pcc_save *save, uint64_t item, bool first)
{
    struct pcc_lane *lane = save->lane;

    /* A piece is queued again only after its item was taken, and so is a step. */
    PCC_ASSERT(lane->work_count < lane->work_capacity);
    if (first)
        lane->work_first = (lane->work_first + lane->work_capacity - 1) % lane->work_capacity;
    lane->work[(lane->work_first + (first ? 0 : lane->work_count)) % lane->work_capacity] = item;
    lane->work_count++;
    save->pending++;
    pcc_pace_step_queued(lane->saver->identity.uid);
    (void)pthread_cond_signal(&lane->changed);
}

void pcc_save_queue_piece(struct pcc_save *save, uint32_t position)
{
    struct pcc_save_piece *piece = &save->pieces[position];

    piece->state = PCC_SAVE_CHUNK_QUEUED;
    /* An offer writes nothing, and a trainer waits for its answer: it comes before the writes that
     * are queued. */
    push(save, make_item(save, PCC_SAVE_STEP_NONE, position), piece->offered && !piece->announced);
}

/* True when no more bytes may go to the present slot. */
static bool is_held_up(const struct pcc_save *save)
{
    return save->failed || save->superseded || save->slot_failed || save->slot_doubtful;
}

static enum pcc_save_step next_step(const struct pcc_save *save)
{
    if (save->failed || save->superseded || save->durable)
        return PCC_SAVE_STEP_END;
    if (save->slot_failed || save->slot_doubtful)
        return PCC_SAVE_STEP_MOVE;
    if (!save->sealed || save->written < save->piece_count || save->lane->parks)
        return PCC_SAVE_STEP_NONE;
    PCC_ASSERT(save->last_step < PCC_SAVE_STEP_PUBLISH);
    return save->last_step == PCC_SAVE_STEP_NONE ? PCC_SAVE_STEP_MANIFEST : save->last_step + 1;
}

void pcc_save_advance(struct pcc_save *save)
{
    if (save->pending > 0 || !save->active)
        return;
    const enum pcc_save_step step = next_step(save);
    if (step != PCC_SAVE_STEP_NONE)
        push(save, make_item(save, step, 0), false);
}

/* A newer checkpoint makes this one needless, or another rank will never have it: the rest of it
 * need not be written. Before the seal nothing is looked for: the copy continues, and its owner
 * needs its chunks back. */
static void look_for_newer(struct pcc_save *save)
{
    struct pcc_volume *volume = save->lane->saver->volume;

    if (!save->sealed || save->superseded)
        return;
    save->given_up = pcc_volume_gives_up(volume, save->entry.sequence);
    save->superseded = save->given_up || pcc_volume_superseding(volume) > save->entry.sequence;
}

/* A resource is short now, here or behind the disk (a thin pool): the slot is not to blame. */
static bool is_scarcity(int error)
{
    return error == -ENOMEM || error == -EAGAIN || error == -ENOSPC || error == -EDQUOT ||
           error == -EINTR;
}

int pcc_save_write_all(const struct pcc_saver *saver, const void *bytes, uint64_t length,
                       uint64_t offset)
{
    int error = pcc_io_write_all(pcc_volume_io(saver->volume), bytes, length, offset);

    for (long pause_ns = PAUSE_NS_MIN; is_scarcity(error) && pause_ns <= PAUSE_NS_MAX;
         pause_ns *= 2) {
        (void)nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
        error = pcc_io_write_all(pcc_volume_io(saver->volume), bytes, length, offset);
    }
    return error;
}

/* With the lock held. Other writers of the save may fail for other reasons. */
static void slot_error(struct pcc_save *save, int error, enum pcc_stage stage)
{
    save->slot_failed = true;
    save->slot_bad = save->slot_bad || !is_scarcity(error);
    save->error = error;
    save->stage = stage;
}

/* -- chunks -- */

/* False when the piece is not to be written now. */
static bool start_piece(struct pcc_save *save, uint32_t position, bool *first_out)
{
    struct pcc_save_piece *piece = &save->pieces[position];

    PCC_ASSERT(piece->state == PCC_SAVE_CHUNK_QUEUED);
    look_for_newer(save);
    if (is_held_up(save)) {
        piece->state = PCC_SAVE_CHUNK_HELD;
        return false;
    }
    piece->state = PCC_SAVE_CHUNK_WRITING;
    *first_out = save->times.first_write == 0;
    if (*first_out)
        save->times.first_write = pcc_now_ns();
    return true;
}

/* Without the lock: the item that names the piece is its only user. The memory does not change
 * until chunk_written, so one pass is enough, also if the bytes go to another slot later. */
static void hash_piece(struct pcc_save *save, uint32_t position)
{
    struct pcc_save_piece *piece = &save->pieces[position];

    if (piece->hashed)
        return;
    pcc_checksums_make(piece->bytes, piece->length_bytes, save->lane->saver->geometry.block_bytes,
                       pcc_save_checksums(save, position));
    piece->hashed = true;
    pcc_kept_hashed(save->lane->saver->spec.kept, save->kept_place, position);
}

/* Without the lock: what of the piece does not lie in the base already. */
static int write_changed(const struct pcc_save *save, const struct pcc_known *known,
                         uint32_t position, uint64_t slot_offset_bytes, uint64_t *written_out)
{
    const struct pcc_save_piece *piece = &save->pieces[position];
    const uint64_t start_bytes = (uint64_t)position * save->lane->saver->spec.chunk_bytes;
    const uint64_t end_bytes = start_bytes + piece->length_bytes;
    int result = 0;

    *written_out = 0;
    for (uint64_t at = start_bytes, next; result == 0 && at < end_bytes; at = next) {
        bool in_base;
        next = pcc_save_run(save, known, at, end_bytes, &in_base);
        if (in_base)
            continue;
        const uint64_t length_bytes = pcc_align_up(next - at, PCC_IO_ALIGN);
        result = pcc_save_write_all(save->lane->saver,
                                    (const uint8_t *)piece->bytes + (at - start_bytes),
                                    length_bytes, slot_offset_bytes + at);
        *written_out += result == 0 ? length_bytes : 0;
    }
    return result;
}

/* With the lock held. */
static void refer_piece(struct pcc_save *save, const struct pcc_known *known, uint32_t position)
{
    const uint64_t start_bytes = (uint64_t)position * save->lane->saver->spec.chunk_bytes;
    const uint64_t end_bytes = start_bytes + save->pieces[position].length_bytes;

    for (uint64_t at = start_bytes, next; at < end_bytes; at = next) {
        bool in_base;
        next = pcc_save_run(save, known, at, end_bytes, &in_base);
        pcc_save_refer(save, at, next, in_base);
    }
}

/* -- pieces without bytes -- */

/* With the lock held: the owner cannot hand over again what it has offered. */
static void offer_lost(struct pcc_save *save, uint32_t position, int error)
{
    save->pieces[position].state = PCC_SAVE_CHUNK_HELD;
    save->failed = true;
    save->error = error;
    save->stage = PCC_STAGE_BASE;
}

/* With the lock held: all of an offered piece is in the base, or not. True when its owner needs the
 * answer. */
static bool offer_judge(struct pcc_save *save, uint32_t position, bool in_base)
{
    struct pcc_save_piece *piece = &save->pieces[position];
    const uint64_t start_bytes = (uint64_t)position * save->lane->saver->spec.chunk_bytes;
    const bool tell = !piece->announced && !save->adopted;

    if (in_base) {
        pcc_save_refer(save, start_bytes, start_bytes + piece->length_bytes, true);
        piece->state = PCC_SAVE_CHUNK_WRITTEN;
        pcc_kept_referred(save->lane->saver->spec.kept, save->kept_place, position, true);
        save->written++;
        piece->announced = true;
    } else if (!tell) {
        offer_lost(save, position, -PCC_E_DAMAGED);
    } else {
        *piece = (struct pcc_save_piece){.asked = true};
        save->handed_over--;
        save->offered--;
    }
    return tell && !save->failed;
}

/* The same after the base was found to be damaged: `result` of pcc_save_rescue(). */
static void offer_rescued(struct pcc_save *save, uint32_t position, int result, bool lost)
{
    struct pcc_save_piece *piece = &save->pieces[position];
    const uint64_t start_bytes = (uint64_t)position * save->lane->saver->spec.chunk_bytes;

    if (result == 0) {
        save->written_bytes += piece->length_bytes;
        pcc_save_refer(save, start_bytes, start_bytes + piece->length_bytes, false);
        piece->state = PCC_SAVE_CHUNK_WRITTEN;
        pcc_kept_written(save->lane->saver->spec.kept, save->kept_place, position);
        pcc_kept_referred(save->lane->saver->spec.kept, save->kept_place, position, false);
        save->written++;
    } else if (lost) {
        offer_lost(save, position, result);
    } else {
        piece->state = PCC_SAVE_CHUNK_HELD;
        slot_error(save, result, PCC_STAGE_WRITE);
    }
}

/* If all of the piece lies in the base, nothing is written. If only a part does, all of it has to
 * come, because the owner has no chunk for it. */
static void work_on_offer(struct pcc_save *save, uint32_t position)
{
    const struct pcc_saver *saver = save->lane->saver;
    struct pcc_save_piece *piece = &save->pieces[position];
    const uint64_t start_bytes = (uint64_t)position * saver->spec.chunk_bytes;
    const uint64_t end_bytes = start_bytes + piece->length_bytes;
    bool in_base = false, lost = false, tell = false;
    int result = 0;

    pcc_save_lock(save);
    look_for_newer(save);
    const bool start = !is_held_up(save);
    const uint64_t tag = save->request.tag;
    piece->state = start ? PCC_SAVE_CHUNK_WRITING : PCC_SAVE_CHUNK_HELD;
    pcc_save_unlock(save);
    if (!start)
        return;
    const struct pcc_known *known = pcc_save_known(save);
    if (save->base_lost)
        result = pcc_save_rescue(save, position, &lost);
    else
        in_base =
            pcc_save_run(save, known, start_bytes, end_bytes, &in_base) == end_bytes && in_base;
    pcc_save_lock(save);
    if (save->base_lost)
        offer_rescued(save, position, result, lost);
    else
        tell = offer_judge(save, position, in_base);
    pcc_save_unlock(save);
    if (tell && saver->spec.events->offered)
        saver->spec.events->offered(saver->spec.owner, tag, start_bytes, in_base);
}

/* -- pieces -- */

/* How many bytes were written. */
static uint64_t write_piece(struct pcc_save *save, uint32_t position)
{
    const struct pcc_saver *saver = save->lane->saver;
    struct pcc_save_piece *piece = &save->pieces[position];
    bool first = false, announce = false;
    uint64_t written_bytes;

    pcc_save_lock(save);
    const bool start = start_piece(save, position, &first);
    const uint64_t slot_offset = pcc_geometry_slot_offset(&saver->geometry, save->slot);
    const uint64_t tag = save->request.tag;
    pcc_save_unlock(save);
    if (!start)
        return 0;
    if (first && saver->spec.events->writing)
        saver->spec.events->writing(saver->spec.owner, tag);
    hash_piece(save, position);
    const struct pcc_known *known =
        save->has_base && !save->base_lost ? pcc_save_known(save) : NULL;
    const int result = write_changed(save, known, position, slot_offset, &written_bytes);
    pcc_save_lock(save);
    save->written_bytes += written_bytes;
    if (result == 0) {
        if (save->has_base)
            refer_piece(save, known, position);
        piece->state = PCC_SAVE_CHUNK_WRITTEN;
        pcc_kept_written(saver->spec.kept, save->kept_place, position);
        save->written++;
        announce = !piece->announced;
        piece->announced = true;
    } else {
        piece->state = PCC_SAVE_CHUNK_HELD;
        slot_error(save, result, PCC_STAGE_WRITE);
    }
    pcc_save_unlock(save);
    if (announce && saver->spec.events->chunk_written)
        saver->spec.events->chunk_written(saver->spec.owner, tag, piece->index);
    return written_bytes;
}

/* -- the steps; the save is quiet, but for what owners ask and hand over -- */

static void write_manifest(struct pcc_save *save)
{
    const struct pcc_saver *saver = save->lane->saver;

    pcc_save_lock(save);
    look_for_newer(save);
    const bool go_on = !is_held_up(save);
    pcc_save_unlock(save);
    if (!go_on)
        return;
    /* A base of which nothing is used need not be kept. */
    save->entry.base_sequence = pcc_save_referred_bytes(save) > 0 ? save->base.entry.sequence : 0;
    pcc_manifest_seal(save->manifest, &saver->identity, save->slot, &save->request.notes,
                      pcc_save_checksums(save, 0), &save->entry);
    const uint64_t room = pcc_align_up(save->entry.manifest_bytes, PCC_IO_ALIGN);
    memset(save->manifest + save->entry.manifest_bytes, 0, room - save->entry.manifest_bytes);
    const int result =
        pcc_save_write_all(saver, save->manifest, room,
                           pcc_geometry_slot_offset(&saver->geometry, save->slot) +
                               pcc_align_up(save->request.payload_bytes, PCC_IO_ALIGN));
    PCC_LOCKED(&save->lane->lock);
    if (result == 0) {
        save->written_bytes += room;
        save->last_step = PCC_SAVE_STEP_MANIFEST;
        save->times.written = pcc_now_ns();
    } else {
        slot_error(save, result, PCC_STAGE_WRITE);
    }
}

/* A failed flush puts in doubt whatever was written before it and not flushed since, by any save:
 * the kernel reports it once, and the next flush is clean without having written anything. */
static void flush(struct pcc_save *save)
{
    struct pcc_saver *saver = save->lane->saver;

    (void)pthread_mutex_lock(&saver->flushing);
    const bool doubtful = PCC_READ(&saver->flush_failures) != save->flush_failures;
    const int result = doubtful ? 0 : pcc_io_flush(pcc_volume_io(saver->volume));
    if (result != 0)
        (void)atomic_fetch_add_explicit(&saver->flush_failures, 1, memory_order_relaxed);
    (void)pthread_mutex_unlock(&saver->flushing);

    PCC_LOCKED(&save->lane->lock);
    if (result != 0) {
        slot_error(save, result, PCC_STAGE_FLUSH);
    } else if (doubtful) {
        save->slot_doubtful = true;
        save->error = -EIO;
        save->stage = PCC_STAGE_FLUSH;
    } else {
        save->last_step = PCC_SAVE_STEP_FLUSH;
        save->times.flushed = pcc_now_ns();
    }
}

static void became_durable(void *context)
{
    struct pcc_save *save = context;

    PCC_LOCKED(&save->lane->lock);
    save->durable = true;
    save->times.durable = pcc_now_ns();
}

/* With the lock held. */
static void leave_base(struct pcc_save *save)
{
    if (save->has_base)
        pcc_volume_leave_base(save->lane->saver->volume, &save->base);
    save->has_base = false;
}

static void publish(struct pcc_save *save)
{
    const struct pcc_saver *saver = save->lane->saver;
    enum pcc_published published = PCC_PUBLISHED;
    const int result = pcc_volume_publish(saver->volume, save->slot, &save->entry, &published,
                                          became_durable, save);

    PCC_LOCKED(&save->lane->lock);
    if (result == 0 && published == PCC_PUBLISH_BASE_LOST) {
        /* All of it is written again, into the same slot; without bytes of it, from the base. */
        if (save->offered > 0)
            save->base_lost = true;
        else
            leave_base(save);
        save->slot_doubtful = true;
        save->error = -PCC_E_DAMAGED;
        save->stage = PCC_STAGE_BASE; /* nothing is wrong with the volume, should this be its end */
        return;
    }
    if (result == 0 && published == PCC_PUBLISHED && save->has_base && !save->base_lost)
        pcc_volume_judge_base(saver->volume, &save->base, save->request.frozen_bytes,
                              pcc_save_referred_bytes(save));
    /* The slot is the table's now, or free again. After a record that failed it is neither: the
     * media may name it, and the volume is stopped. */
    save->has_slot = false;
    if (result != 0) {
        save->error = result;
        save->stage = PCC_STAGE_PUBLISH;
        save->failed = !save->durable;
    } else {
        save->superseded = published != PCC_PUBLISHED;
        save->given_up = published == PCC_PUBLISH_GIVEN_UP;
        PCC_ASSERT(save->superseded != save->durable);
    }
}

/* With the lock held: never published. */
static void leave_slot(struct pcc_save *save)
{
    struct pcc_volume *volume = save->lane->saver->volume;

    if (save->has_slot && save->slot_bad) {
        pcc_volume_quarantine_slot(volume, save->slot);
        save->quarantined = true;
    } else if (save->has_slot) {
        pcc_volume_return_slot(volume, save->slot);
    }
    save->has_slot = false;
}

/* With the lock held: the place for the bytes that have to be written again; 0 or a code. */
static int find_new_slot(struct pcc_save *save)
{
    struct pcc_volume *volume = save->lane->saver->volume;

    if (save->slot_failed)
        leave_slot(save);
    if (save->moves == PCC_SAVE_MOVES_MAX || save->uncached > 0)
        return save->error;
    if (!save->has_slot && pcc_volume_take_slot(volume, &save->slot) != 0)
        return save->error; /* no room elsewhere: the first error is the reason */
    save->has_slot = true;
    return 0;
}

static void move(struct pcc_save *save)
{
    const struct pcc_kept *kept = save->lane->saver->spec.kept;

    PCC_LOCKED(&save->lane->lock);
    if (save->failed) /* given up after the move had been queued: end() leaves the slot */
        return;
    save->failed = find_new_slot(save) != 0;
    if (save->failed)
        return;
    save->moves++;
    pcc_kept_moved(kept, save->kept_place, save->slot, save->piece_count);
    pcc_kept_base(kept, save->kept_place, save->has_base ? save->base.entry.sequence : 0);
    save->slot_failed = save->slot_bad = save->slot_doubtful = false;
    save->error = 0;
    save->stage = PCC_STAGE_NONE;
    save->last_step = PCC_SAVE_STEP_NONE;
    save->written = 0;
    save->flush_failures = PCC_READ(&save->lane->saver->flush_failures);
    for (uint32_t i = 0; i < save->piece_count; i++)
        if (save->pieces[i].state != PCC_SAVE_CHUNK_ABSENT)
            pcc_save_queue_piece(save, i);
}

static void end(struct pcc_save *save)
{
    const struct pcc_saver *saver = save->lane->saver;
    struct pcc_save_result result = {0};

    pcc_save_lock(save);
    save->active = false;
    pcc_kept_end(saver->spec.kept, save->kept_place);
    result.end = save->durable      ? PCC_SAVE_DURABLE
                 : save->given_up   ? PCC_SAVE_GIVEN_UP
                 : save->superseded ? PCC_SAVE_SUPERSEDED
                                    : PCC_SAVE_FAILED;
    result.error = save->superseded && !save->durable ? 0 : save->error;
    result.stage = result.error == 0 ? PCC_STAGE_NONE : save->stage;
    result.tag = save->request.tag;
    result.sequence = save->entry.sequence;
    const uint64_t newer = pcc_volume_superseding(saver->volume);
    if (result.end == PCC_SAVE_SUPERSEDED &&
        newer > save->entry.sequence) /* else damaged meanwhile */
        result.newer = newer;
    result.slot = save->slot;
    result.rehomed = save->moves;
    result.copied_bytes = save->copied_bytes;
    result.written_bytes = save->written_bytes;
    result.times = save->times;
    leave_slot(save);
    leave_base(save);
    const bool tell = save->quarantined && result.end == PCC_SAVE_FAILED;
    pcc_save_unlock(save);
    pcc_save_forget_known(save);
    /* Without this record the quarantine would wait for a checkpoint that succeeds. If this record
     * fails, the volume has stopped, and the next begin reports that. */
    if (tell)
        (void)!pcc_volume_publish_staged(saver->volume);
    result.times.ended = pcc_now_ns(); /* the next one begins after this time */
    pcc_save_leave_lane(save);
    saver->spec.events->ended(saver->spec.owner, &result);
    pcc_save_over(save);
}

/* Does it; how many bytes of payload it wrote. */
static uint64_t do_item(struct pcc_save *save, uint64_t item)
{
    switch ((enum pcc_save_step)(item >> 32 & 0xffff)) {
    case PCC_SAVE_STEP_NONE:
        if (!save->pieces[(uint32_t)item].offered)
            return write_piece(save, (uint32_t)item);
        work_on_offer(save, (uint32_t)item);
        break;
    case PCC_SAVE_STEP_MANIFEST:
        write_manifest(save);
        break;
    case PCC_SAVE_STEP_FLUSH:
        flush(save);
        break;
    case PCC_SAVE_STEP_PUBLISH:
        publish(save);
        break;
    case PCC_SAVE_STEP_MOVE:
        move(save);
        break;
    default:
        pcc_assert_failed("a known step", __FILE__, __LINE__);
    }
    return 0;
}

void pcc_save_work(struct pcc_lane *lane, uint64_t item)
{
    struct pcc_save *save = &lane->saves[item >> 48];
    const uint32_t uid = lane->saver->identity.uid;

    if ((enum pcc_save_step)(item >> 32 & 0xffff) == PCC_SAVE_STEP_END) {
        pcc_pace_step_done(uid, 0);
        end(save); /* the place may be another save's already, the saver be gone */
        return;
    }
    const uint64_t written_bytes = do_item(save, item);
    pcc_save_lock(save);
    save->pending--;
    pcc_save_advance(save);
    pcc_save_unlock(save);
    pcc_pace_step_done(uid, written_bytes); /* the next one is queued: no gap to read in */
}
