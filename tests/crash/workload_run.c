/* Which move comes next: the random part of the workload. */
#include "disk/pcc_save_private.h"
#include "workload.h"

#include <string.h>

static struct live *any_live(struct workload *workload)
{
    return &workload->lives[rng_below(&workload->rng, workload->lanes)];
}

static void abort_save(struct workload *workload, struct live *live)
{
    (void)workload;
    if (!live->save || live->sealed || live->aborted)
        return;
    live->aborted = true;
    pcc_save_abort(live->save, -PCC_E_ABORTED);
}

/* A durable checkpoint of the record, or NULL. */
static const struct pcc_slot_entry *any_durable(struct workload *workload,
                                                struct pcc_record *record)
{
    pcc_volume_record(workload->volume, record);
    uint32_t start = rng_below(&workload->rng, record->slot_count);
    for (uint32_t i = 0; i < record->slot_count; i++) {
        const struct pcc_slot_entry *entry = &record->slots[(start + i) % record->slot_count];
        if (entry->state == PCC_SLOT_DURABLE)
            return entry;
    }
    return NULL;
}

static int compare(void *context, const void *bytes, uint64_t offset, uint64_t length)
{
    const struct oracle_save *save = context;
    return memcmp(bytes, save->bytes + offset, length) == 0 ? 0 : 1;
}

/* What a reader holds must verify and be right, whatever was published since. */
static void read_back(struct workload *workload, struct pcc_load *load)
{
    struct sim *sim = workload->sim;
    const struct pcc_slot_entry *entry = pcc_load_entry(load);
    struct oracle *oracle = workload->oracle;
    struct oracle_save *save = NULL;
    for (uint32_t i = oracle->count; i-- > 0 && !save;)
        if (oracle->saves[i].sequence == entry->sequence &&
            oracle->saves[i].request.step == entry->step)
            save = &oracle->saves[i];
    if (!save || save->sealed_at == ORACLE_NEVER) {
        sim_breach(sim, "a checkpoint that was never copied is durable");
        return;
    }
    workload->count.reads++;
    int result = pcc_load_stream(load, 0, entry->payload_bytes, workload->spec.chunk_bytes, 0,
                                 compare, save);
    if (result == 1)
        sim_breach(sim, "a reader was given wrong bytes");
    else if (result != 0 && !workload->faulty)
        sim_breach(sim, "a held checkpoint became unreadable");
    uint64_t start = rng_next(&workload->rng) % entry->payload_bytes;
    uint64_t length = 1 + rng_next(&workload->rng) % (entry->payload_bytes - start);
    result = pcc_load_stream(load, start, length, workload->spec.chunk_bytes, 0, compare, save);
    if (result == 1)
        sim_breach(sim, "a reader of a part was given wrong bytes");
}

/* One reader at a time; it opens now and reads some moves later. */
static void toggle_reader(struct workload *workload)
{
    if (workload->reading) {
        read_back(workload, workload->reading);
        pcc_load_close(workload->reading);
        workload->reading = NULL;
        return;
    }
    struct pcc_record record;
    const struct pcc_slot_entry *entry = any_durable(workload, &record);
    if (!entry)
        return;
    if (pcc_load_open(workload->volume, entry->sequence, &workload->reading) != 0) {
        workload->reading = NULL;
        if (!workload->faulty)
            sim_breach(workload->sim, "a durable checkpoint could not be opened");
    }
}

/* What has to be recovered once `flagged` is called damaged. */
static uint64_t newest_beside(const struct pcc_record *record, uint64_t flagged)
{
    uint64_t newest = 0;
    for (uint32_t i = 0; i < record->slot_count; i++)
        if (record->slots[i].state == PCC_SLOT_DURABLE && record->slots[i].sequence != flagged &&
            (record->slots[i].flags & PCC_SLOT_DAMAGED) == 0 && record->slots[i].sequence > newest)
            newest = record->slots[i].sequence;
    return newest;
}

static void clear_flag(struct workload *workload, bool now)
{
    sim_mark(workload->sim, SIM_RETAIN, 0);
    int result =
        pcc_volume_flag(workload->volume, workload->flagged, 0, workload->flagged_with, now);
    if (result == -ENOENT && (workload->flagged_with & PCC_SLOT_LASTING) != 0)
        sim_breach(workload->sim, "a pinned checkpoint was recycled");
    workload->flagged = 0;
}

/* At most one flag stands, so that saves do not run out of slots. */
static void change_flag(struct workload *workload, bool now)
{
    if (workload->flagged) {
        clear_flag(workload, now);
        return;
    }
    struct pcc_record record;
    const struct pcc_slot_entry *entry = any_durable(workload, &record);
    /* With less than two slots beside the flagged and the newest one, saves would only wait. */
    if (!entry || workload->spec.slots < workload->spec.keep + 2)
        return;
    const uint32_t lasting = rng_chance(&workload->rng, 2) ? PCC_SLOT_PROTECTED : PCC_SLOT_PINNED;
    const uint32_t flag = rng_chance(&workload->rng, 3) ? PCC_SLOT_DAMAGED : lasting;
    /* Before the call: its record may arrive at any time from then on. */
    if (flag == PCC_SLOT_DAMAGED && newest_beside(&record, 0) == entry->sequence)
        sim_mark(workload->sim, SIM_DAMAGED, newest_beside(&record, entry->sequence));
    if (pcc_volume_flag(workload->volume, entry->sequence, flag, 0, now) == 0) {
        workload->flagged = entry->sequence;
        workload->flagged_with = flag;
        if ((flag & PCC_SLOT_LASTING) != 0)
            sim_mark(workload->sim, SIM_RETAIN, entry->sequence);
    }
}

static void reopen(struct workload *workload)
{
    struct sim *sim = workload->sim;
    workload_close(workload);
    sim_mark(sim, SIM_RETAIN, 0);
    if (pcc_io_flush(&sim->io) != 0)
        return;
    sim_reopened(sim);
    if (workload_open(workload) != 0 && !workload->faulty)
        sim_breach(sim, "a volume that was closed cleanly does not open");
    workload->count.reopened++;
}

static void change_policy(struct workload *workload)
{
    uint8_t start_id[PCC_UUID_BYTES];
    int result = 0;
    switch (rng_below(&workload->rng, 8)) {
    case 0:
        oracle_start_id(workload->incarnation + 1, start_id);
        result =
            pcc_volume_begin_incarnation(workload->volume, workload->incarnation + 1, start_id, 1);
        workload->incarnation += result == 0;
        break;
    case 1:
        sim_mark(workload->sim, SIM_RETAIN, 0);
        workload->flagged = 0;
        result = pcc_volume_finish(workload->volume, 1);
        break;
    case 2:
        reopen(workload);
        break;
    case 3:
        result = pcc_volume_recycle(workload->volume);
        break;
    default:
        workload->is_flagging = true;
        change_flag(workload, rng_chance(&workload->rng, 2));
        workload->is_flagging = false;
    }
    if (result != 0 && !workload->faulty)
        sim_breach(workload->sim, "a policy change failed on a disk without faults");
}

static void arm_fault(struct workload *workload)
{
    static const enum sim_fault_kind kinds[] = {FAULT_DATA,  FAULT_DATA,  FAULT_FLUSH,
                                                FAULT_SHORT, FAULT_EINTR, FAULT_RECORD};
    static const enum sim_fault_kind mapped[] = {FAULT_DATA,   FAULT_BEHIND, FAULT_FLUSH,
                                                 FAULT_BEHIND, FAULT_BEHIND, FAULT_RECORD};
    struct rng *rng = &workload->rng;
    const bool is_mapped = workload->sim->model == SIM_MAPPED;
    sim_set_fault(workload->sim, (is_mapped ? mapped : kinds)[rng_below(rng, 6)],
                  1 + rng_below(rng, 6), false);
    workload->faulty = true;
}

static void begin_any(struct workload *workload)
{
    int result =
        workload_begin(workload, 1 + rng_below(&workload->rng, workload->spec.payload_pages_max));
    bool expected = result == 0 || result == -PCC_E_NO_LANE || result == -PCC_E_NO_SLOT;
    if (!expected && !workload->faulty)
        sim_breach(workload->sim, "a save could not begin on a disk without faults");
}

/* What an earlier daemon had copied is durable under protection, which its owner takes away. */
static void unprotect(struct workload *workload)
{
    struct pcc_record record;
    if (pcc_volume_stopped(workload->volume))
        return; /* a record that was not written: the table says more than the next one was to */
    pcc_volume_record(workload->volume, &record);
    for (uint32_t i = 0; i < record.slot_count; i++) {
        const struct pcc_slot_entry *entry = &record.slots[i];
        if (entry->state == PCC_SLOT_DURABLE && (entry->flags & PCC_SLOT_PROTECTED) != 0 &&
            entry->sequence != workload->flagged &&
            pcc_volume_flag(workload->volume, entry->sequence, 0, PCC_SLOT_PROTECTED, false) != 0)
            sim_breach(workload->sim, "a protected checkpoint was recycled");
    }
}

static void move_on(struct workload *workload)
{
    struct rng *rng = &workload->rng;
    const struct workload_spec *spec = &workload->spec;
    if (spec->death_one_in && rng_chance(rng, 8))
        unprotect(workload);
    if (spec->policy_one_in && rng_chance(rng, spec->policy_one_in)) {
        change_policy(workload);
        return;
    }
    uint32_t move = rng_below(rng, 100);
    if (move < 12)
        begin_any(workload);
    else if (move < 45)
        workload_feed(workload, any_live(workload));
    else if (move < 47)
        abort_save(workload, any_live(workload));
    else if (move < 50)
        workload_uncache(workload, any_live(workload));
    else if (move < 53)
        toggle_reader(workload);
    else
        (void)workload_step(workload, rng_below(rng, workload->lanes));
}

void workload_run(struct workload *workload, uint32_t actions)
{
    struct rng *rng = &workload->rng;
    const struct workload_spec *spec = &workload->spec;
    for (uint32_t i = 0; i < actions && workload->volume && !workload->sim->breach; i++) {
        if (spec->fault_one_in && rng_chance(rng, spec->fault_one_in))
            arm_fault(workload);
        if (spec->death_one_in && rng_chance(rng, spec->death_one_in))
            workload->sim->dies_in = 1 + rng_below(rng, 12);
        if (workload_dies(workload, move_on))
            workload_go_on(workload);
    }
    workload->sim->dies_in = 0;
}

/* Others go on while the publisher writes a record: a flag may change, a save may begin in whatever
 * slot is free now and fill it. Sealed saves stay put, for they might want to publish, which only
 * one may at a time.
 */
void workload_beside(void *owner)
{
    struct workload *workload = owner;
    if (!workload->saver || rng_chance(&workload->rng, 2))
        return;
    for (uint32_t i = 0; i < workload->lanes; i++) {
        const struct live *live = &workload->lives[i];
        if (live->save && live->sealed &&
            (workload->stepping == 0 ||
             live->save->lane != &workload->saver->lanes[workload->stepping - 1]))
            return;
    }
    /* Not while a flag is being changed: it might take the other good one. */
    if (workload->spec.policy_one_in && rng_chance(&workload->rng, 4) && !workload->is_flagging)
        change_flag(workload, false);
    begin_any(workload);
    for (uint32_t i = 0; i < workload->lanes; i++) {
        struct live *live = &workload->lives[i];
        while (live->save && !live->sealed && !live->aborted && live->handed != all_chunks(live))
            workload_feed(workload, live);
    }
    for (uint32_t lane = 0; lane < workload->lanes; lane++)
        for (uint32_t i = rng_below(&workload->rng, 4); lane + 1 != workload->stepping && i > 0;
             i--)
            (void)workload_step(workload, lane);
}

static bool is_idle(const struct workload *workload)
{
    for (uint32_t i = 0; i < workload->lanes; i++)
        if (workload->lives[i].save)
            return false;
    return true;
}

void workload_drain(struct workload *workload)
{
    for (uint32_t rounds = 0; !is_idle(workload); rounds++) {
        bool worked = false;
        for (uint32_t i = 0; i < workload->lanes; i++) {
            struct live *live = &workload->lives[i];
            worked |= live->save && !live->sealed && !live->aborted;
            workload_feed(workload, live);
            worked |= workload_step(workload, i) != -EAGAIN;
        }
        if (!worked && !is_idle(workload)) {
            sim_breach(workload->sim, "a sealed save never ends: no lane has work");
            memset(workload->lives, 0, sizeof workload->lives);
        }
        PCC_ASSERT(rounds < 100000);
    }
}

int workload_save(struct workload *workload, uint32_t pages)
{
    uint32_t index = workload->oracle->count;
    int result = workload_begin(workload, pages);
    if (result != 0)
        return result;
    workload_drain(workload);
    return (int)workload->oracle->saves[index].result.end;
}

void workload_restore(struct workload *workload)
{
    struct pcc_record record;
    pcc_volume_record(workload->volume, &record);
    for (uint32_t i = 0; i < record.slot_count; i++) {
        struct pcc_load *load = NULL;
        if (record.slots[i].state != PCC_SLOT_DURABLE ||
            pcc_load_open(workload->volume, record.slots[i].sequence, &load) != 0)
            continue;
        read_back(workload, load);
        pcc_load_close(load);
    }
}

void workload_close(struct workload *workload)
{
    if (!workload->volume)
        return;
    if (workload->reading) {
        pcc_load_close(workload->reading);
        workload->reading = NULL;
    }
    for (uint32_t i = 0; i < workload->lanes; i++)
        abort_save(workload, &workload->lives[i]);
    workload_drain(workload);
    for (uint32_t i = 0; i < workload->lanes; i++)
        if (workload->saver->lanes[i].current != NULL)
            sim_breach(workload->sim, "saves are in flight after all have ended");
    pcc_saver_close(workload->saver);
    pcc_volume_close(workload->volume);
    workload->saver = NULL;
    workload->volume = NULL;
}
