/* Crash plus rot: every prefix of the log, the operation under way missing, torn or, for records,
 * with its two replicas arrived in the wrong order; and in each of these images every sector in
 * turn rotten (garbage) or unreadable. With keep = 2 something valid must always remain, the newest
 * acknowledged unless its own data rotted; with keep = 1 losses are counted and expected.
 *
 *   rot [--cases N] [--history K] [--mutant no-replica] [--killed] */
#include "media.h"
#include "report.h"
#include "workload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct rot {
    struct media *media;
    struct rng rng;
    uint64_t seed;
    uint64_t cases[3], lost[3], prefixes, reordered; /* by keep */
    uint64_t violations;
    uint32_t keep;
    bool quiet;
};

struct expectation {
    const struct oracle *oracle;
    uint64_t newest, one_before; /* acknowledged */
    bool replicated;             /* both replicas of the record that named `newest` are durable */
    uint32_t position;
};

static bool is_record(const struct rot *rot, uint64_t sector)
{
    uint64_t area = PCC_GENERATIONS * PCC_RECORD_STRIDE_MIN, offset = sector * SIM_SECTOR;
    return offset < area || offset >= rot->media->size_bytes - area;
}

static void judge_rotten(struct rot *rot, const struct expectation *expect, uint64_t sector)
{
    uint8_t *image = rot->media->image, saved[SIM_SECTOR];
    uint8_t *bytes = image + sector * SIM_SECTOR;
    bool unreadable = rng_chance(&rot->rng, 2);
    memcpy(saved, bytes, SIM_SECTOR);
    for (uint32_t i = 0; i < SIM_SECTOR && !unreadable; i++)
        bytes[i] = (uint8_t)rng_next(&rot->rng);
    struct sim_view view;
    sim_view_open(&view, image, rot->media->size_bytes, unreadable ? sector : UINT64_MAX);
    struct judge_rules rules = {expect->one_before, 0, expect->position, true};
    if (rot->keep == 1)
        rules.required = 0;
    struct judgement found = judge(expect->oracle, &view.io, &rules);
    memcpy(bytes, saved, SIM_SECTOR);
    rot->cases[rot->keep]++;
    rot->lost[rot->keep] += expect->one_before > 0 && found.sequence == 0;
    /* Acknowledged at replica A: until B is there too, rot in A gives the one before. */
    bool excused = found.damaged > 0 || (!expect->replicated && is_record(rot, sector));
    bool older_for_no_reason = !excused && found.sequence < expect->newest;
    if (found.verdict == VERDICT_SOUND && !older_for_no_reason)
        return;
    if (rot->violations++ == 0 && !rot->quiet)
        report_violation("%s: log position %u, sector %llu %s, recovered %llu, acknowledged %llu "
                         "and before it %llu, error %d",
                         verdict_names[found.verdict], expect->position, (unsigned long long)sector,
                         unreadable ? "unreadable" : "rotten", (unsigned long long)found.sequence,
                         (unsigned long long)expect->newest, (unsigned long long)expect->one_before,
                         found.error);
}

static void rot_every_sector(struct rot *rot, const struct expectation *expect)
{
    for (uint64_t sector = 0; sector < rot->media->size_bytes / SIM_SECTOR; sector++)
        judge_rotten(rot, expect, sector);
}

/* Everything before the operation arrived; of its own sectors none, or half. */
static void rot_prefix(struct rot *rot, const struct expectation *expect, bool torn)
{
    struct media_choice choice = {{0}};
    for (uint32_t i = 0; i < rot->media->unit_count; i++) {
        bool in_flight = rot->media->units[i].in_flight;
        media_choose(&choice, i, !in_flight || (torn && rng_chance(&rot->rng, 2)));
    }
    media_apply(rot->media, &choice);
    rot->prefixes++;
    rot_every_sector(rot, expect);
    media_revert(rot->media, &choice);
}

static bool is_record_a(const struct sim_entry *entry)
{
    return entry->part == PART_SAVE_A || entry->part == PART_OPEN_A || entry->part == PART_POLICY_A;
}

/* Replica B of the same record is on the media, A is not, or torn. */
static void rot_reordered(struct rot *rot, const struct expectation *expect,
                          const struct sim_entry *a, const struct sim_entry *end)
{
    const struct sim_entry *b = a + 1;
    while (b < end && b->part != a->part + 1)
        b++;
    if (b >= end)
        return;
    uint8_t *saved = malloc(b->length);
    PCC_ASSERT(saved);
    memcpy(saved, rot->media->image + b->offset, b->length);
    memcpy(rot->media->image + b->offset, b->bytes, b->length);
    rot->reordered++;
    rot_prefix(rot, expect, rng_chance(&rot->rng, 2));
    memcpy(rot->media->image + b->offset, saved, b->length);
    free(saved);
}

static void rot_log(struct rot *rot, const struct workload *w)
{
    const struct sim *sim = w->sim;
    struct expectation expect = {w->oracle, w->oracle->required, w->oracle->required_one_before,
                                 true, 0};
    media_begin(rot->media, sim->base, SIM_SECTOR, rng_next(&rot->rng));
    for (uint32_t i = 0; i < sim->log_count && rot->violations == 0; i++) {
        const struct sim_entry *entry = &sim->log[i];
        expect.position = i;
        media_start(rot->media, entry);
        rot_prefix(rot, &expect, rng_chance(&rot->rng, 2));
        if (is_record_a(entry))
            rot_reordered(rot, &expect, entry, sim->log + sim->log_count);
        media_withdraw(rot->media);
        media_complete(rot->media, entry);
        if (entry->kind == SIM_ACK && entry->sequence > expect.newest) {
            expect.one_before = expect.newest;
            expect.newest = entry->sequence;
            expect.replicated = false;
        }
        expect.replicated |= entry->part == PART_SAVE_B;
    }
}

static void run_history(struct rot *rot, uint64_t history, bool mutant)
{
    report_case("rot", rot->seed, "--history %llu", (unsigned long long)history);
    rot->rng = rng_from(rot->seed, history * 2);
    rot->keep = history % 3 == 2 ? 1 : 2;
    struct workload_spec spec = {
        .slots = 4,
        .keep = rot->keep,
        .block_bytes = 512,
        .chunk_bytes = 4096,
        .payload_pages_max = 1 + rng_below(&rot->rng, 2),
        /* What two checkpoints share, one sector can take from both. */
        .frozen_pages = rot->keep == 1,
    };
    struct workload *w = workload_new(&spec, rng_next(&rot->rng));
    rot->media = media_new(w->sim->size_bytes);
    int result = workload_format(w);
    PCC_ASSERT(result == 0);
    for (uint32_t session = 0; session < 2 && rot->violations == 0; session++) {
        sim_restart(w->sim, NULL);
        w->sim->mutant = mutant ? SIM_NO_REPLICA : SIM_SOUND;
        result = workload_open(w);
        PCC_ASSERT(result == 0);
        workload_run(w, 90);
        workload_close(w);
        if (w->sim->breach && !rot->quiet) {
            report_violation("contract: %s", w->sim->breach);
            rot->violations++;
        }
        rot_log(rot, w);
        oracle_crashed(w->oracle, w->sim, w->sim->log_count);
    }
    workload_free(w);
    media_free(rot->media);
}

int main(int argc, char **argv)
{
    const char *only = report_option(argc, argv, "--history");
    bool killed = report_option(argc, argv, "--killed") != NULL;
    bool mutant = report_option(argc, argv, "--mutant") != NULL;
    uint64_t wanted = report_number(argc, argv, "--cases", 200000);
    struct rot rot = {.seed = report_seed(), .quiet = killed};
    uint64_t history = report_number(argc, argv, "--history", 0);
    do
        run_history(&rot, history++, mutant);
    while (!only && rot.violations == 0 && rot.cases[1] + rot.cases[2] < wanted);
    printf("rot: %llu cases with keep=2 (%llu lost everything), %llu with keep=1 (%llu lost "
           "everything, expected), %llu images, %llu with replicas reordered, %llu violations, "
           "seed %llu\n",
           (unsigned long long)rot.cases[2], (unsigned long long)rot.lost[2],
           (unsigned long long)rot.cases[1], (unsigned long long)rot.lost[1],
           (unsigned long long)rot.prefixes, (unsigned long long)rot.reordered,
           (unsigned long long)rot.violations, (unsigned long long)rot.seed);
    if (killed || rot.violations > 0)
        return (rot.violations > 0) == killed ? 0 : 1;
    /* With one checkpoint kept a rotten sector must be able to lose it, or the rot does not bite.
     */
    return only || (rot.lost[1] > 0 && rot.reordered > 0) ? 0 : 1;
}
