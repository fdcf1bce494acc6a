/* N-th I/O fault loop: a whole life of a volume (format, open, saves three in flight, policy,
 * reads, reopen, restore, one more save) in which the N-th operation fails, for N = 1, 2, 3, ...
 * until a run meets no fault; every kind of fault, once or from then on for ever.
 *
 *   fault_loop [--model direct|mmap|pmem] [--seeds N] [--only SEED:KIND:PERSISTENT:AT] [--killed]
 */
#include "media.h"
#include "report.h"
#include "workload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CRASH_IMAGES 6u

struct loop {
    uint64_t seed;
    enum sim_model model;
    uint64_t cases[FAULT_KINDS][2], violations;
    uint64_t durable, superseded, failed, rehomed, stopped, not_formatted, not_opened, quarantined;
    uint64_t images;
    bool quiet;
};

struct fault_case {
    uint64_t seed;
    enum sim_fault_kind kind;
    bool persistent;
    uint64_t at;
};

static void violation(struct loop *loop, const char *what, const struct judgement *found,
                      uint64_t required)
{
    if (loop->violations++ == 0 && !loop->quiet)
        report_violation("%s (%s, recovered %llu, acknowledged %llu, error %d)", what,
                         found ? verdict_names[found->verdict] : "contract",
                         (unsigned long long)(found ? found->sequence : 0),
                         (unsigned long long)required, found ? found->error : 0);
}

static void judge_image(struct loop *loop, const struct workload *w, const uint8_t *image,
                        uint64_t required, const char *what)
{
    struct sim_view view;
    sim_view_open(&view, image, w->sim->size_bytes, UINT64_MAX);
    struct judge_rules rules = {required, 0, ORACLE_NEVER - 1, false};
    struct judgement found = judge(w->oracle, &view.io, &rules);
    loop->images++;
    if (found.verdict != VERDICT_SOUND)
        violation(loop, what, &found, required);
}

/* The power goes at the end of the faulty run: what was pending arrived, or not, or in part. */
static void judge_crashes(struct loop *loop, const struct workload *w, struct rng *rng)
{
    struct media *media = media_new(w->sim->size_bytes);
    media_begin(media, w->sim->base, SIM_SECTOR, rng_next(rng));
    for (uint32_t i = 0; i < w->sim->log_count; i++)
        media_complete(media, &w->sim->log[i]);
    for (uint32_t image = 0; image < CRASH_IMAGES; image++) {
        struct media_choice choice = {{0}};
        for (uint32_t i = 0; i < media->unit_count; i++)
            media_choose(&choice, i, image == 1 || (image > 1 && rng_chance(rng, 2)));
        media_apply(media, &choice);
        judge_image(loop, w, media->image, w->sim->last_ack, "a crash after the fault");
        media_revert(media, &choice);
    }
    media_free(media);
}

static uint32_t durable_count(struct workload *w)
{
    struct pcc_record record;
    uint32_t count = 0;
    pcc_volume_record(w->volume, &record);
    for (uint32_t i = 0; i < record.slot_count; i++)
        count += record.slots[i].state == PCC_SLOT_DURABLE;
    return count;
}

/* Recycles where there is no slot, as the daemon does. */
static bool saves_again(struct workload *w)
{
    int result = workload_save(w, 1);
    if (result == -PCC_E_NO_SLOT && pcc_volume_recycle(w->volume) == 0)
        result = workload_save(w, 1);
    /* Pinned ones and the newest may fill the table. */
    return result == PCC_SAVE_DURABLE ||
           (result == -PCC_E_NO_SLOT && durable_count(w) == w->spec.slots);
}

/* Nothing is closed and opened: what was kept is kept, and the next save becomes durable. */
static void check_open(struct workload *w)
{
    struct sim *sim = w->sim;
    uint32_t kept = durable_count(w);
    /* Saves go on failing for as long as the disk does. */
    for (uint32_t i = 0; i < 3 && !pcc_volume_stopped(w->volume); i++)
        (void)workload_save(w, 1);
    if (durable_count(w) < (kept < w->spec.keep ? kept : w->spec.keep))
        sim_breach(sim, "a disk that fails costs what was kept");
    struct sim_fault fault = sim->fault;
    sim_set_fault(sim, FAULT_NONE, 0, false);
    if (!pcc_volume_stopped(w->volume) && !sim->unreported && !w->flagged && !w->reading &&
        !saves_again(w))
        sim_breach(sim, "no checkpoint becomes durable in a volume that stayed open");
    sim->fault = fault;
}

/* The volume's life while the fault strikes. False when it could not even be made. */
static bool live_through(struct loop *loop, struct workload *w)
{
    struct sim *sim = w->sim;
    if (workload_format(w) != 0) {
        loop->not_formatted++;
        return false;
    }
    for (uint32_t session = 0; session < 2; session++) {
        if (workload_open(w) != 0) {
            loop->not_opened++;
            break;
        }
        workload_run(w, 110);
        workload_drain(w);
        if (w->volume && sim->record_bad && !pcc_volume_stopped(w->volume))
            sim_breach(sim, "the publisher did not stop after a record error");
        if (w->volume && sim->record_bad) {
            loop->stopped++;
            if (workload_begin(w, 1) != -PCC_E_STOPPED)
                sim_breach(sim, "a stopped volume takes a save");
        }
        if (w->volume)
            workload_restore(w);
        if (w->volume)
            check_open(w);
        workload_close(w);
        if (pcc_io_flush(&sim->io) != 0)
            break;
        sim_reopened(sim);
    }
    return true;
}

/* The disk is well again: everything acknowledged is there, and new checkpoints become durable. */
static void check_after(struct loop *loop, struct workload *w)
{
    struct sim *sim = w->sim;
    uint64_t required = sim->last_ack;
    judge_image(loop, w, sim->image, required, "after the fault");
    sim_set_fault(sim, FAULT_NONE, 0, false);
    int result = pcc_io_flush(&sim->io);
    PCC_ASSERT(result == 0);
    sim_reopened(sim);
    if (workload_open(w) != 0) {
        violation(loop, "the volume does not open on a disk that is well again", NULL, required);
        return;
    }
    workload_restore(w);
    struct pcc_record record;
    pcc_volume_record(w->volume, &record);
    for (uint32_t i = 0; i < record.slot_count; i++)
        loop->quarantined += (record.slots[i].flags & PCC_SLOT_QUARANTINED) != 0;
    w->faulty = false;
    if (!saves_again(w))
        violation(loop, "no checkpoint becomes durable on a disk that is well again", NULL,
                  required);
    workload_close(w);
    judge_image(loop, w, sim->image, sim->last_ack, "after the first save after the fault");
}

static struct workload *fresh(const struct loop *loop, const struct fault_case *c, struct rng *rng)
{
    static const struct {
        uint32_t slots, keep;
    } shapes[] = {{4, 1}, {5, 2}, {4, 2}};
    *rng = rng_from(c->seed, 0xfa);
    uint32_t shape = rng_below(rng, 3);
    struct workload_spec spec = {
        .slots = shapes[shape].slots,
        .keep = shapes[shape].keep,
        .block_bytes = 512,
        .chunk_bytes = 4096,
        .payload_pages_max = 2,
        .policy_one_in = 20,
        .frozen_pages = 1,
    };
    struct workload *w = workload_new(&spec, rng_next(rng));
    w->sim->model = loop->model;
    sim_restart(w->sim, NULL);
    sim_set_fault(w->sim, c->kind, c->at, c->persistent);
    w->faulty = true;
    return w;
}

/* False when the run met no fault: the loop is at its end. */
static bool run_case(struct loop *loop, const struct fault_case *c)
{
    report_case("fault_loop", loop->seed, "--model %s --only %llu:%u:%u:%llu",
                sim_model_names[loop->model], (unsigned long long)c->seed, c->kind, c->persistent,
                (unsigned long long)c->at);
    struct rng rng;
    struct workload *w = fresh(loop, c, &rng);
    bool formatted = live_through(loop, w);
    bool hit = w->sim->fault_hits > 0;
    if (formatted) {
        judge_crashes(loop, w, &rng);
        check_after(loop, w);
    }
    if (w->sim->breach)
        violation(loop, w->sim->breach, NULL, w->sim->last_ack);
    loop->cases[c->kind][c->persistent]++;
    loop->durable += w->count.durable;
    loop->superseded += w->count.superseded;
    loop->failed += w->count.failed;
    loop->rehomed += w->count.rehomed;
    workload_free(w);
    return hit;
}

/* One save at a time, all its chunks cached, slots to spare: a fault that passes costs nothing. */
static bool run_gentle(struct loop *loop, const struct fault_case *c)
{
    report_case("fault_loop", loop->seed, "(gentle) --model %s --only %llu:%u:0:%llu",
                sim_model_names[loop->model], (unsigned long long)c->seed, c->kind,
                (unsigned long long)c->at);
    struct workload_spec spec = {
        .slots = 5,
        .keep = 2,
        .block_bytes = 512,
        .chunk_bytes = 4096,
        .payload_pages_max = 3,
    };
    struct workload *w = workload_new(&spec, c->seed);
    w->sim->model = loop->model;
    int result = workload_format(w);
    PCC_ASSERT(result == 0);
    result = workload_open(w);
    PCC_ASSERT(result == 0);
    sim_restart(w->sim, NULL);
    sim_set_fault(w->sim, c->kind, c->at, false);
    w->faulty = true;
    for (uint32_t i = 0; i < 3; i++)
        if (workload_save(w, 1 + i) != PCC_SAVE_DURABLE)
            sim_breach(w->sim, "a passing fault failed a save that could have moved");
    bool hit = w->sim->fault_hits > 0;
    bool moves = c->kind == FAULT_DATA || c->kind == FAULT_FLUSH || c->kind == FAULT_BEHIND;
    bool stays = c->kind == FAULT_SHORT;
    if ((moves && w->count.rehomed != hit) || (stays && w->count.rehomed != 0))
        sim_breach(w->sim, "a save moved without need, or did not move");
    workload_close(w);
    judge_image(loop, w, w->sim->image, w->sim->last_ack, "after a passing fault");
    if (w->sim->breach)
        violation(loop, w->sim->breach, NULL, w->sim->last_ack);
    loop->cases[c->kind][0]++;
    loop->rehomed += w->count.rehomed;
    loop->durable += w->count.durable;
    workload_free(w);
    return hit;
}

static void run_seed(struct loop *loop, uint64_t seed)
{
    static const enum sim_fault_kind gentle[] = {FAULT_DATA, FAULT_FLUSH, FAULT_SHORT, FAULT_EINTR,
                                                 FAULT_BEHIND};
    struct fault_case c = {.seed = seed};
    for (uint32_t i = 0; i < sizeof gentle / sizeof *gentle; i++)
        for (c.kind = gentle[i], c.at = 1; loop->violations == 0 && run_gentle(loop, &c);)
            c.at++;
    for (uint32_t kind = FAULT_NONE + 1; kind < FAULT_KINDS; kind++)
        for (uint32_t persistent = 0; persistent < 2; persistent++) {
            c = (struct fault_case){seed, (enum sim_fault_kind)kind, persistent, 1};
            while (loop->violations == 0 && run_case(loop, &c))
                c.at++;
        }
}

static void print(const struct loop *loop)
{
    uint64_t total = 0;
    for (uint32_t kind = FAULT_NONE + 1; kind < FAULT_KINDS; kind++) {
        printf("  %-8s %6llu transient %6llu persistent\n", sim_fault_names[kind],
               (unsigned long long)loop->cases[kind][0], (unsigned long long)loop->cases[kind][1]);
        total += loop->cases[kind][0] + loop->cases[kind][1];
    }
    printf("fault_loop (%s): %llu cases, saves: %llu durable, %llu superseded, %llu failed, %llu "
           "moved; "
           "%llu volumes not made, %llu openings refused, %llu publishers stopped, %llu slots in "
           "quarantine after reopening; %llu images recovered, %llu violations, seed %llu\n",
           sim_model_names[loop->model], (unsigned long long)total,
           (unsigned long long)loop->durable, (unsigned long long)loop->superseded,
           (unsigned long long)loop->failed, (unsigned long long)loop->rehomed,
           (unsigned long long)loop->not_formatted, (unsigned long long)loop->not_opened,
           (unsigned long long)loop->stopped, (unsigned long long)loop->quarantined,
           (unsigned long long)loop->images, (unsigned long long)loop->violations,
           (unsigned long long)loop->seed);
}

int main(int argc, char **argv)
{
    bool killed = report_option(argc, argv, "--killed") != NULL;
    struct loop loop = {.seed = report_seed(), .quiet = killed};
    loop.model = sim_model_named(report_option(argc, argv, "--model"));
    const char *only = report_option(argc, argv, "--only");
    if (only) {
        unsigned long long seed = 0, at = 0;
        unsigned kind = 0, persistent = 0;
        int fields = sscanf(only, "%llu:%u:%u:%llu", &seed, &kind, &persistent, &at);
        PCC_ASSERT(fields == 4 && kind < FAULT_KINDS);
        struct fault_case c = {seed, (enum sim_fault_kind)kind, persistent != 0, at};
        run_case(&loop, &c);
    } else {
        uint64_t seeds = report_number(argc, argv, "--seeds", 20);
        for (uint64_t i = 0; i < seeds && loop.violations == 0; i++)
            run_seed(&loop, loop.seed + i);
    }
    print(&loop);
    if (killed)
        return loop.violations > 0 ? 0 : 1;
    bool reached = loop.rehomed > 0 && loop.stopped > 0 && loop.failed > 0 && loop.quarantined > 0;
    return loop.violations == 0 && (only || reached) ? 0 : 1;
}
