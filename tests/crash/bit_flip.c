/* Bit flips: every bit of the four records and of every manifest, one at a time; random bits of the
 * data; then several random bits anywhere. Wrong data is never returned; a flip in a record costs
 * nothing, a flip in the newest checkpoint gives the one before, any other the newest.
 *
 *   bit_flip [--flips N] */
#include "oracle.h"
#include "report.h"
#include "workload.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum where { IN_RECORD, IN_MANIFEST, IN_DATA, ANYWHERE, WHERES };
static const char *const where_names[WHERES] = {"record", "manifest", "data", "scattered"};

struct flips {
    uint8_t *image;
    const struct workload *workload;
    struct pcc_record record;
    struct rng rng;
    uint64_t seed;
    uint64_t count[WHERES];
    uint64_t passed_over; /* recoveries of the one before */
    uint64_t violations;
};

static struct judgement recover(const struct flips *flips)
{
    struct sim_view view;
    sim_view_open(&view, flips->image, flips->workload->sim->size_bytes, UINT64_MAX);
    struct judge_rules rules = {0, 0, ORACLE_NEVER - 1, true};
    return judge(flips->workload->oracle, &view.io, &rules);
}

/* The durable sequence next below `sequence`. */
static uint64_t below(const struct pcc_record *record, uint64_t sequence)
{
    uint64_t best = 0;
    for (uint32_t i = 0; i < record->slot_count; i++) {
        const struct pcc_slot_entry *entry = &record->slots[i];
        if (entry->state == PCC_SLOT_DURABLE && entry->sequence < sequence &&
            entry->sequence > best)
            best = entry->sequence;
    }
    return best;
}

static void flip(struct flips *flips, enum where where, uint64_t bit, uint64_t expected)
{
    uint8_t mask = (uint8_t)(1u << (bit % 8));
    flips->image[bit / 8] ^= mask;
    struct judgement found = recover(flips);
    flips->image[bit / 8] ^= mask;
    flips->count[where]++;
    flips->passed_over += found.damaged > 0 && found.sequence > 0;
    if (found.verdict == VERDICT_SOUND && found.sequence == expected)
        return;
    if (flips->violations++ == 0)
        report_violation("%s: bit %llu of a %s flipped: recovered %llu instead of %llu, error %d",
                         verdict_names[found.verdict], (unsigned long long)bit, where_names[where],
                         (unsigned long long)found.sequence, (unsigned long long)expected,
                         found.error);
}

static void flip_records(struct flips *flips, const struct pcc_geometry *geometry, uint64_t newest)
{
    for (uint32_t generation = 0; generation < PCC_GENERATIONS; generation++)
        for (uint32_t replica = 0; replica < PCC_REPLICAS; replica++) {
            uint64_t start = pcc_geometry_record_offset(geometry, generation, replica) * 8;
            for (uint64_t bit = 0; bit < (uint64_t)PCC_RECORD_BYTES * 8; bit++)
                flip(flips, IN_RECORD, start + bit, newest);
        }
}

static void flip_slot(struct flips *flips, const struct pcc_geometry *geometry, uint32_t slot,
                      uint64_t newest, uint64_t data_flips)
{
    const struct pcc_slot_entry *entry = &flips->record.slots[slot];
    uint64_t expected = entry->sequence == newest ? below(&flips->record, newest) : newest;
    uint64_t data = pcc_geometry_slot_offset(geometry, slot);
    uint64_t manifest = data + pcc_align_up(entry->payload_bytes, PCC_IO_ALIGN);
    for (uint64_t bit = 0; bit < (uint64_t)entry->manifest_bytes * 8; bit++)
        flip(flips, IN_MANIFEST, manifest * 8 + bit, expected);
    for (uint64_t i = 0; i < data_flips; i++)
        flip(flips, IN_DATA, data * 8 + rng_next(&flips->rng) % (entry->payload_bytes * 8),
             expected);
}

/* Many bits at once: recovery may find anything valid or nothing, but never lies. */
static void scatter(struct flips *flips)
{
    uint64_t bits[64];
    uint32_t count = 2 + rng_below(&flips->rng, 62);
    for (uint32_t i = 0; i < count; i++) {
        bits[i] = rng_next(&flips->rng) % (flips->workload->sim->size_bytes * 8);
        flips->image[bits[i] / 8] ^= (uint8_t)(1u << (bits[i] % 8));
    }
    struct judgement found = recover(flips);
    for (uint32_t i = 0; i < count; i++)
        flips->image[bits[i] / 8] ^= (uint8_t)(1u << (bits[i] % 8));
    flips->count[ANYWHERE]++;
    if (found.verdict != VERDICT_SOUND && found.verdict != VERDICT_UNREADABLE &&
        flips->violations++ == 0)
        report_violation("%s: %u bits flipped, recovered %llu", verdict_names[found.verdict], count,
                         (unsigned long long)found.sequence);
}

/* A writable opening repairs a bad replica: afterwards the other one may rot. */
static void check_repair(struct flips *flips, struct workload *w, uint64_t newest)
{
    const struct pcc_geometry *geometry = &w->sim->geometry;
    for (uint32_t replica = 0; replica < PCC_REPLICAS; replica++) {
        uint32_t generation = flips->record.record_number % PCC_GENERATIONS;
        sim_restart(w->sim, flips->image);
        w->sim->image[pcc_geometry_record_offset(geometry, generation, replica) + 99] ^= 1;
        int result = workload_open(w);
        PCC_ASSERT(result == 0);
        workload_close(w);
        struct sim_view view;
        for (uint32_t lost = 0; lost < PCC_REPLICAS; lost++) {
            uint32_t next = (generation + 1) % PCC_GENERATIONS;
            uint64_t sector = pcc_geometry_record_offset(geometry, next, lost) / SIM_SECTOR;
            sim_view_open(&view, w->sim->image, w->sim->size_bytes, sector);
            struct judge_rules rules = {newest, 0, ORACLE_NEVER - 1, false};
            struct judgement found = judge(w->oracle, &view.io, &rules);
            if (found.verdict != VERDICT_SOUND && flips->violations++ == 0)
                report_violation("%s: replica %u lost after %u had been repaired",
                                 verdict_names[found.verdict], lost, replica);
        }
    }
}

static void run_volume(struct flips *flips, uint64_t history, uint64_t data_flips)
{
    report_case("bit_flip", flips->seed, "volume %llu", (unsigned long long)history);
    flips->rng = rng_from(flips->seed, history);
    struct workload_spec spec = {
        .slots = 4,
        .keep = 2,
        .block_bytes = history % 2 ? 4096 : 512,
        .chunk_bytes = 8192,
        .payload_pages_max = 3,
    };
    struct workload *w = workload_new(&spec, rng_next(&flips->rng));
    int result = workload_format(w);
    PCC_ASSERT(result == 0);
    sim_restart(w->sim, NULL);
    result = workload_open(w);
    PCC_ASSERT(result == 0);
    for (uint32_t i = 0; i < 5 + history; i++) {
        result = workload_save(w, 1 + i % 3);
        PCC_ASSERT(result == PCC_SAVE_DURABLE);
    }
    pcc_volume_record(w->volume, &flips->record);
    workload_close(w);
    flips->workload = w;
    flips->image = malloc(w->sim->size_bytes);
    PCC_ASSERT(flips->image);
    memcpy(flips->image, w->sim->image, w->sim->size_bytes);
    uint64_t newest = below(&flips->record, UINT64_MAX);
    flip_records(flips, &w->sim->geometry, newest);
    for (uint32_t slot = 0; slot < flips->record.slot_count; slot++)
        if (flips->record.slots[slot].state == PCC_SLOT_DURABLE)
            flip_slot(flips, &w->sim->geometry, slot, newest, data_flips / 2);
    for (uint64_t i = 0; i < data_flips; i++)
        scatter(flips);
    check_repair(flips, w, newest);
    if (w->sim->breach && flips->violations++ == 0)
        report_violation("contract: %s", w->sim->breach);
    free(flips->image);
    workload_free(w);
}

int main(int argc, char **argv)
{
    uint64_t data_flips = report_number(argc, argv, "--flips", 20000);
    struct flips flips = {.seed = report_seed()};
    for (uint64_t history = 0; history < 2; history++)
        run_volume(&flips, history, data_flips);
    uint64_t total = 0;
    for (uint32_t where = 0; where < WHERES; where++)
        total += flips.count[where];
    printf("bit_flip: %llu flips (%llu in records, %llu in manifests, %llu in data, %llu "
           "scattered), %llu times the one before was recovered, %llu violations, seed %llu\n",
           (unsigned long long)total, (unsigned long long)flips.count[IN_RECORD],
           (unsigned long long)flips.count[IN_MANIFEST], (unsigned long long)flips.count[IN_DATA],
           (unsigned long long)flips.count[ANYWHERE], (unsigned long long)flips.passed_over,
           (unsigned long long)flips.violations, (unsigned long long)flips.seed);
    return flips.violations == 0 ? 0 : 1;
}
