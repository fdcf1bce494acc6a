/* Crash enumerator: for every position of the core's write log, the images that a power cut may
 * leave there (exhaustively where at most 14 units are pending, sampled above), each recovered by
 * the real core and judged, as a reader opens it and as a writer does. Sessions follow one another
 * on crashed media, so that recovery itself is cut off too.
 *
 *   crash_enum [--model direct|mmap|pmem] [--images N] [--history K]
 *              [--mutant no-flush|no-durable|wrong-slot] [--killed] [--alone]
 *
 * --model: which engine's writes are assumed, see sim_io.h; --history K repeats one history;
 * --killed: the core is a mutant, a violation is what we want; --alone: other saves rest while a
 * record is being written. */
#include "media.h"
#include "repair.h"
#include "report.h"
#include "workload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXHAUSTIVE_UNITS 14u
#define SAMPLES 96u
#define SINGLES 128u /* so many units are looked at one by one; of more, these at random */
#define SESSIONS 3u
#define GAP_FLOOR 200u

enum when { BEFORE, DURING, AFTER, WHENS };

struct enumeration {
    struct media *media;
    struct hash_set judged; /* (image, what is required of it) */
    struct hash_set images;
    struct hash_set repaired; /* contents of the places of the records */
    uint64_t states, epochs, exhaustive_epochs, positions, histories, sessions;
    uint64_t gaps[PART_COUNT][WHENS];
    uint64_t recovered_newer, recovered_nothing;
    uint64_t deaths, adopted; /* of daemons; saves that went on in another one */
    uint64_t based;           /* became durable with a base */
    uint64_t referred;        /* chunks that nobody copied, because the base has them */
    uint64_t open;            /* were sealed with a length that was not known before */
    uint64_t violations;
    uint64_t seed;
    const char *program;
    const struct pcc_geometry *geometry; /* of the history at hand */
    enum sim_model model;
    bool quiet;
    bool alone; /* nothing moves while a record is being written */
};

struct position {
    const struct oracle *oracle;
    const struct sim_entry *next;     /* in flight; NULL at the end of the log */
    const struct sim_entry *previous; /* completed last; NULL at its start */
    struct judge_rules rules;
    bool record_failed; /* the write of one, earlier in the session */
};

static void judge_state(struct enumeration *e, const struct position *at,
                        const struct media_choice *choice)
{
    uint64_t hash = media_hash(e->media, choice);
    e->states++;
    hash_set_add(&e->images, hash);
    uint64_t need = at->rules.required * 0x9e3779b97f4a7c15ull ^ at->rules.flagged << 32;
    if (!hash_set_add(&e->judged, hash ^ need))
        return;
    media_apply(e->media, choice);
    struct sim_view view;
    sim_view_open(&view, e->media->image, e->media->size_bytes, UINT64_MAX);
    struct judgement found = judge(at->oracle, &view.io, &at->rules);
    const char *broken = NULL;
    if (found.verdict == VERDICT_SOUND &&
        hash_set_add(&e->repaired, repair_hash(e->media->image, e->geometry)))
        broken = repair_judge(e->media->image, e->media->size_bytes, at->record_failed);
    media_revert(e->media, choice);
    e->recovered_newer += found.sequence > at->rules.required;
    e->recovered_nothing += found.sequence == 0;
    if (found.verdict == VERDICT_SOUND && !broken)
        return;
    if (e->violations++ == 0 && !e->quiet)
        report_violation("%s: log position %u, %u pending units, recovered sequence %llu of %u "
                         "entries, last acknowledged %llu, error %d",
                         broken ? broken : verdict_names[found.verdict], at->rules.position,
                         e->media->unit_count, (unsigned long long)found.sequence, found.entries,
                         (unsigned long long)at->rules.required, found.error);
}

static bool in_flight_arrived(const struct media *media, const struct media_choice *choice)
{
    for (uint32_t i = media->unit_count; i-- > 0 && media->units[i].in_flight;)
        if (media_chosen(choice, i))
            return true;
    return false;
}

static void count_gap(struct enumeration *e, const struct position *at,
                      const struct media_choice *choice)
{
    bool during = at->next && in_flight_arrived(e->media, choice);
    if (at->next)
        e->gaps[at->next->part][during ? DURING : BEFORE]++;
    if (at->previous && !during)
        e->gaps[at->previous->part][AFTER]++;
}

static void visit(struct enumeration *e, const struct position *at,
                  const struct media_choice *choice)
{
    count_gap(e, at, choice);
    judge_state(e, at, choice);
}

/* None, all, each one alone, all but each one; then coins of several weights. */
static void sample(struct enumeration *e, const struct position *at, struct rng *rng)
{
    uint32_t n = e->media->unit_count;
    struct media_choice all = {{0}};
    for (uint32_t i = 0; i < n; i++)
        media_choose(&all, i, true);
    struct media_choice none = {{0}}, one;
    visit(e, at, &none);
    visit(e, at, &all);
    for (uint32_t i = 0; i < n && i < SINGLES; i++) {
        uint32_t unit = n <= SINGLES ? i : rng_below(rng, n);
        one = none;
        media_choose(&one, unit, true);
        visit(e, at, &one);
        one = all;
        media_choose(&one, unit, false);
        visit(e, at, &one);
    }
    for (uint32_t s = 0; s < SAMPLES; s++) {
        static const uint32_t weights[] = {2, 8, 14, 4, 12};
        one = none;
        for (uint32_t i = 0; i < n; i++)
            media_choose(&one, i, rng_below(rng, 16) < weights[s % 5]);
        visit(e, at, &one);
    }
}

static void visit_position(struct enumeration *e, const struct position *at, struct rng *rng)
{
    uint32_t n = e->media->unit_count;
    e->positions++;
    if (n > EXHAUSTIVE_UNITS) {
        sample(e, at, rng);
        return;
    }
    for (uint64_t chosen = 0; chosen < 1ull << n; chosen++) {
        struct media_choice choice = {{chosen}};
        visit(e, at, &choice);
    }
}

static void enumerate(struct enumeration *e, const struct workload *w, uint32_t unit_bytes,
                      struct rng *rng)
{
    const struct sim *sim = w->sim;
    struct position at = {.oracle = w->oracle, .rules = {.required = w->oracle->required}};
    media_begin(e->media, sim->base, unit_bytes, rng_next(rng));
    for (uint32_t i = 0; i <= sim->log_count && e->violations == 0; i++) {
        at.next = i < sim->log_count ? &sim->log[i] : NULL;
        at.rules.position = i;
        if (at.next)
            media_start(e->media, at.next);
        visit_position(e, &at, rng);
        if (!at.next)
            break;
        bool ends_epoch = at.next->kind == SIM_DURABLE || at.next->kind == SIM_FLUSH;
        e->epochs += ends_epoch;
        e->exhaustive_epochs += ends_epoch && e->media->unit_count <= EXHAUSTIVE_UNITS;
        media_withdraw(e->media);
        media_complete(e->media, at.next);
        if (at.next->kind == SIM_ACK && at.next->sequence > at.rules.required)
            at.rules.required = at.next->sequence;
        if (at.next->kind == SIM_DAMAGED)
            at.rules.required = at.next->sequence;
        if (at.next->kind == SIM_RETAIN)
            at.rules.flagged = at.next->sequence;
        /* After a failed msync the page shows what the media may not hold: an opening sees nothing
         * to repair, and a torn record then leaves the other generation without a replica. */
        at.record_failed |= at.next->kind == SIM_DURABLE && at.next->failed;
        at.previous = at.next;
    }
}

/* Leaves a random crash image of the session in media->image; the position is the result. */
static uint32_t crash_somewhere(struct enumeration *e, const struct sim *sim, uint32_t unit_bytes,
                                struct rng *rng)
{
    uint32_t position = rng_below(rng, sim->log_count + 1);
    media_begin(e->media, sim->base, unit_bytes, rng_next(rng));
    for (uint32_t i = 0; i < position; i++)
        media_complete(e->media, &sim->log[i]);
    if (position < sim->log_count)
        media_start(e->media, &sim->log[position]);
    struct media_choice choice = {{0}};
    for (uint32_t i = 0; i < e->media->unit_count; i++)
        media_choose(&choice, i, rng_chance(rng, 2));
    media_apply(e->media, &choice);
    return position;
}

static struct workload_spec draw_spec(struct rng *rng, uint64_t history)
{
    static const struct {
        uint32_t slots, keep;
    } shapes[] = {{4, 1}, {5, 2}, {4, 1}, {5, 2}, {3, 1}, {3, 2}};
    struct workload_spec spec = {.slots = shapes[history % 6].slots,
                                 .keep = shapes[history % 6].keep};
    spec.block_bytes = rng_chance(rng, 2) ? 512 : 4096;
    spec.chunk_bytes = rng_chance(rng, 2) ? 4096 : 8192;
    spec.payload_pages_max = 1 + rng_below(rng, 3);
    spec.policy_one_in = rng_chance(rng, 3) ? 0 : 25;
    spec.reuse_one_in = rng_chance(rng, 2) ? 16 : 0;
    spec.fault_one_in = rng_chance(rng, 2) ? 40 : 0;
    spec.death_one_in = rng_chance(rng, 2) ? 12 : 0;
    spec.frozen_pages = rng_chance(rng, 4) ? 0 : 1 + rng_below(rng, spec.payload_pages_max);
    return spec;
}

/* How finely a crash tears: as the disk does; as a page is stored, line by line, while it goes out;
 * as persistent memory takes words. The last ones cost most, and come with small checkpoints. */
static uint32_t draw_units(enum sim_model model, uint64_t history, struct workload_spec *spec)
{
    static const uint32_t units[SIM_MODELS][6] = {
        [SIM_DIRECT] = {SIM_SECTOR, 4096, SIM_SECTOR, 4096, SIM_SECTOR, 4096},
        [SIM_MAPPED] = {4096, SIM_SECTOR, 4096, 64, SIM_SECTOR, 4096},
        [SIM_PMEM] = {64, 64, 8, 64, 64, 64},
    };
    const uint32_t unit_bytes = units[model][history % 6];
    if (unit_bytes == 8)
        spec->payload_pages_max = 1;
    return unit_bytes;
}

static void run_history(struct enumeration *e, uint64_t history, enum sim_mutant mutant)
{
    report_case(e->program, e->seed, "--model %s --history %llu", sim_model_names[e->model],
                (unsigned long long)history);
    struct rng rng = rng_from(e->seed, history * 2 + 1);
    struct workload_spec spec = draw_spec(&rng, history);
    uint32_t unit_bytes = draw_units(e->model, history, &spec);
    struct workload *w = workload_new(&spec, rng_next(&rng));
    w->sim->model = e->model;
    w->sim->lenient = e->quiet;
    if (e->alone)
        w->sim->beside = NULL;
    e->media = media_new(w->sim->size_bytes);
    e->geometry = &w->sim->geometry;
    e->histories++;
    int result = workload_format(w);
    PCC_ASSERT(result == 0);
    for (uint32_t session = 0; session < SESSIONS && e->violations == 0; session++) {
        sim_restart(w->sim, session == 0 ? NULL : e->media->image);
        sim_set_fault(w->sim, FAULT_NONE, 0, false);
        w->sim->mutant = mutant;
        w->sim->tear_bytes = unit_bytes;
        w->faulty = false;
        e->sessions++;
        result = workload_open(w);
        if (result != 0)
            sim_breach(w->sim, "a crashed volume does not open for writing");
        workload_run(w, 120 + rng_below(&rng, 120));
        w->sim->recording = false;
        enumerate(e, w, unit_bytes, &rng);
        uint32_t position = crash_somewhere(e, w->sim, unit_bytes, &rng);
        sim_set_fault(w->sim, FAULT_NONE, 0, false);
        workload_close(w);
        oracle_crashed(w->oracle, w->sim, position);
        if (!w->sim->breach || e->quiet)
            continue;
        report_violation("contract: %s", w->sim->breach);
        e->violations++;
    }
    e->deaths += w->count.deaths;
    e->adopted += w->count.adopted;
    e->based += w->count.based;
    e->referred += w->count.referred;
    e->open += w->count.open;
    workload_close(w);
    workload_free(w);
    media_free(e->media);
}

static bool print_gaps(const struct enumeration *e)
{
    bool covered = true;
    printf("  %-24s %12s %12s %12s\n", "gap", "before", "during", "after");
    for (uint32_t part = 0; part < PART_COUNT; part++) {
        if (part == PART_RETAIN)
            continue;
        const uint64_t *count = e->gaps[part];
        bool instant = part == PART_FLUSH || part == PART_ACK;
        printf("  %-24s %12llu %12llu %12llu\n", sim_part_names[part],
               (unsigned long long)count[BEFORE], (unsigned long long)count[DURING],
               (unsigned long long)count[AFTER]);
        covered &= count[BEFORE] >= GAP_FLOOR && count[AFTER] >= GAP_FLOOR;
        covered &= instant || count[DURING] >= GAP_FLOOR;
    }
    return covered;
}

static enum sim_mutant mutant_named(const char *name)
{
    if (!name)
        return SIM_SOUND;
    if (strcmp(name, "no-flush") == 0)
        return SIM_NO_FLUSH;
    if (strcmp(name, "no-durable") == 0)
        return SIM_NO_DURABLE;
    PCC_ASSERT(strcmp(name, "wrong-slot") == 0);
    return SIM_WRONG_SLOT;
}

int main(int argc, char **argv)
{
    const char *only = report_option(argc, argv, "--history");
    enum sim_mutant mutant = mutant_named(report_option(argc, argv, "--mutant"));
    bool killed = report_option(argc, argv, "--killed") != NULL;
    uint64_t wanted = report_number(argc, argv, "--images", 2000000);
    struct enumeration e = {.seed = report_seed(), .program = "crash_enum", .quiet = killed};
    e.model = sim_model_named(report_option(argc, argv, "--model"));
    e.alone = report_option(argc, argv, "--alone") != NULL;
    hash_set_open(&e.judged, 1u << 22);
    hash_set_open(&e.images, 1u << 22);
    hash_set_open(&e.repaired, 1u << 22);
    uint64_t history = report_number(argc, argv, "--history", 0);
    do
        run_history(&e, history++, mutant);
    while (!only && e.violations == 0 && e.images.count < wanted);
    printf("crash_enum (%s): %llu states, %llu distinct images, %llu judged, %llu repaired, %llu "
           "epochs (%llu exhaustive), %llu positions, %llu sessions of %llu histories, %llu deaths "
           "of the daemon (%llu saves went on), %llu saves with a base, %llu chunks that were not "
           "copied, %llu saves of open length, %llu violations, seed %llu\n",
           sim_model_names[e.model], (unsigned long long)e.states,
           (unsigned long long)e.images.count, (unsigned long long)e.judged.count,
           (unsigned long long)e.repaired.count, (unsigned long long)e.epochs,
           (unsigned long long)e.exhaustive_epochs, (unsigned long long)e.positions,
           (unsigned long long)e.sessions, (unsigned long long)e.histories,
           (unsigned long long)e.deaths, (unsigned long long)e.adopted, (unsigned long long)e.based,
           (unsigned long long)e.referred, (unsigned long long)e.open,
           (unsigned long long)e.violations, (unsigned long long)e.seed);
    hash_set_close(&e.judged);
    hash_set_close(&e.images);
    hash_set_close(&e.repaired);
    if (killed || e.violations > 0)
        return (e.violations > 0) == killed ? 0 : 1;
    bool covered = print_gaps(&e);
    if (!covered && !only)
        printf("crash_enum: a gap of the protocol was visited less than %u times\n", GAP_FLOOR);
    return covered || only ? 0 : 1;
}
