#include "sim_io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sim *sim_current;

const char *const sim_model_names[SIM_MODELS] = {"direct", "mmap", "pmem"};

const char *const sim_part_names[PART_COUNT] = {
    "chunk",
    "chunk into reused slot",
    "chunk after move",
    "manifest",
    "flush",
    "record A",
    "acknowledgement",
    "record B",
    "open: A",
    "open: B",
    "policy: A",
    "policy: B",
    "retain",
};

const char *const sim_fault_names[FAULT_KINDS] = {
    "none", "EIO", "ENOSPC", "short", "zero", "EINTR", "data", "flush", "record", "read", "behind",
};

void sim_breach(struct sim *sim, const char *what)
{
    if (!sim->breach && !sim->lenient)
        sim->breach = what;
}

enum sim_model sim_model_named(const char *name)
{
    for (uint32_t i = 0; name && i < SIM_MODELS; i++)
        if (strcmp(sim_model_names[i], name) == 0)
            return (enum sim_model)i;
    PCC_ASSERT(!name);
    return SIM_DIRECT;
}

static void check_operation(struct sim *sim, const void *bytes, uint64_t length, uint64_t offset)
{
    PCC_ASSERT(length % PCC_IO_ALIGN == 0 && offset % PCC_IO_ALIGN == 0 && length > 0);
    PCC_ASSERT((uintptr_t)bytes % PCC_IO_ALIGN == 0);
    PCC_ASSERT(offset <= sim->size_bytes && length <= sim->size_bytes - offset);
    (void)sim;
}

static void may_die(struct sim *sim)
{
    if (sim->dies_in > 0 && --sim->dies_in == 0)
        longjmp(sim->death, 1);
}

static void count_operation(struct sim *sim)
{
    may_die(sim);
    if (++sim->operations > SIM_OPERATIONS_MAX) {
        fprintf(stderr, "hang: %s fault at %llu, more than %u operations\n",
                sim_fault_names[sim->fault.kind], (unsigned long long)sim->fault.at,
                SIM_OPERATIONS_MAX);
        abort();
    }
}

static struct sim_entry *append(struct sim *sim, enum sim_kind kind, enum sim_part part)
{
    if (sim->log_count == sim->log_capacity) {
        sim->log_capacity = sim->log_capacity ? 2 * sim->log_capacity : 256;
        sim->log = realloc(sim->log, sim->log_capacity * sizeof *sim->log);
        PCC_ASSERT(sim->log);
    }
    struct sim_entry *entry = &sim->log[sim->log_count++];
    memset(entry, 0, sizeof *entry);
    entry->kind = kind;
    entry->part = part;
    return entry;
}

static void append_write(struct sim *sim, enum sim_kind kind, enum sim_part part, const void *bytes,
                         uint64_t length, uint64_t offset)
{
    if (!sim->recording)
        return;
    struct sim_entry *entry = append(sim, kind, part);
    entry->offset = offset;
    entry->length = length;
    entry->bytes = malloc(length);
    PCC_ASSERT(entry->bytes);
    memcpy(entry->bytes, bytes, length);
}

void sim_mark(struct sim *sim, enum sim_kind kind, uint64_t sequence)
{
    if (kind == SIM_ACK) {
        PCC_ASSERT(sequence < SIM_SEQUENCES_MAX);
        sim->acknowledged[sequence] = true;
        sim->last_ack = sim->top_ack = sequence;
    }
    if (kind == SIM_DAMAGED)
        sim->last_ack = sequence;
    if (sim->recording)
        append(sim, kind, kind == SIM_ACK ? PART_ACK : PART_RETAIN)->sequence = sequence;
}

/* Does the fault strike this operation? `able` says that its kind can. */
static bool strikes(struct sim *sim, bool able)
{
    if (!able || sim->fault.kind == FAULT_NONE)
        return false;
    sim->fault_seen++;
    bool hit =
        sim->fault.persistent ? sim->fault_seen >= sim->fault.at : sim->fault_seen == sim->fault.at;
    sim->fault_hits += hit;
    return hit;
}

/* Stores are whole or end in an error (SIGBUS); only system calls are cut short or interrupted. */
static bool is_any(const struct sim *sim)
{
    return sim->fault.kind == FAULT_EIO ||
           (sim->fault.kind == FAULT_EINTR && sim->model == SIM_DIRECT);
}

static bool is_transfer(const struct sim *sim)
{
    return is_any(sim) || (sim->model == SIM_DIRECT &&
                           (sim->fault.kind == FAULT_SHORT || sim->fault.kind == FAULT_ZERO));
}

/* System calls in every engine. */
static bool is_read(const struct sim *sim)
{
    const enum sim_fault_kind kind = sim->fault.kind;
    return kind == FAULT_EIO || kind == FAULT_EINTR || kind == FAULT_SHORT || kind == FAULT_ZERO ||
           kind == FAULT_READ;
}

static bool is_write(const struct sim *sim)
{
    return is_transfer(sim) || (sim->model == SIM_DIRECT && sim->fault.kind == FAULT_ENOSPC);
}

/* -errno, or how many bytes move: 512-byte granular, as drives tear. */
static int64_t faulted_length(struct sim *sim, uint64_t length)
{
    switch (sim->fault.kind) {
    case FAULT_ENOSPC:
        return -ENOSPC;
    case FAULT_EINTR:
        return -EINTR;
    case FAULT_ZERO:
        return 0;
    case FAULT_SHORT:
        return SIM_SECTOR *
               (1 + (int64_t)rng_below(&sim->rng, (uint32_t)(length / SIM_SECTOR) - 1));
    default:
        return -EIO;
    }
}

static uint32_t slot_at(const struct sim *sim, uint64_t offset)
{
    uint64_t first = pcc_geometry_slot_offset(&sim->geometry, 0);
    PCC_ASSERT(offset >= first);
    uint64_t slot = (offset - first) / sim->geometry.slot_stride_bytes;
    PCC_ASSERT(slot < sim->geometry.slot_count);
    return (uint32_t)slot;
}

static enum sim_part part_of_data(struct sim *sim, const void *bytes, uint32_t slot, bool starts)
{
    uint64_t magic;
    memcpy(&magic, bytes, sizeof magic);
    if (magic == PCC_MANIFEST_MAGIC)
        return PART_MANIFEST;
    if (sim->moving)
        return PART_MOVED;
    bool reused = sim->slot_used[slot];
    sim->slot_used[slot] |= starts;
    return reused ? PART_REUSE : PART_CHUNK;
}

static uint64_t misdirected(struct sim *sim, uint64_t offset, uint32_t slot)
{
    if (sim->mutant != SIM_WRONG_SLOT || !rng_chance(&sim->rng, 12))
        return offset;
    uint64_t stride = sim->geometry.slot_stride_bytes;
    return slot + 1 < sim->geometry.slot_count ? offset + stride : offset - stride;
}

/* A failed write may have reached any part of what it was meant for. */
static void fail_write(struct sim *sim, enum sim_kind kind, enum sim_part part,
                       const uint8_t *bytes, uint64_t length, uint64_t offset)
{
    uint64_t arrived = rng_next(&sim->rng), unit = sim_doubt_bytes(sim->tear_bytes);
    PCC_ASSERT(length / unit <= 64);
    for (uint64_t i = 0; i < length / unit; i++)
        if (arrived >> i & 1)
            memcpy(sim->image + offset + i * unit, bytes + i * unit, unit);
    append_write(sim, kind, part, bytes, length, offset);
    if (!sim->recording)
        return;
    sim->log[sim->log_count - 1].failed = true;
    sim->log[sim->log_count - 1].arrived = arrived;
}

static int64_t sim_write(struct pcc_io *io, const void *bytes, uint64_t length, uint64_t offset)
{
    struct sim *sim = (struct sim *)io;
    check_operation(sim, bytes, length, offset);
    count_operation(sim);
    uint32_t slot = slot_at(sim, offset);
    if (sim->slot_bad[slot])
        sim_breach(sim, "a slot was written again after a write to it had failed");
    uint64_t slot_start = pcc_geometry_slot_offset(&sim->geometry, slot);
    enum sim_part part = part_of_data(sim, bytes, slot, offset == slot_start);
    int64_t moved = (int64_t)length;
    if (sim->fault.kind == FAULT_BEHIND && strikes(sim, sim->model == SIM_MAPPED)) {
        sim->unreported = true;
        fail_write(sim, SIM_WRITE, part, bytes, length, offset);
        return moved;
    }
    if (strikes(sim, is_write(sim) || sim->fault.kind == FAULT_DATA))
        moved = faulted_length(sim, length);
    if (moved == -EIO || moved == -ENOSPC) {
        sim->slot_bad[slot] |= moved == -EIO;
        sim->moving = true;
        fail_write(sim, SIM_WRITE, part, bytes, length, offset);
    } else if (moved > 0) {
        offset = misdirected(sim, offset, slot);
        memcpy(sim->image + offset, bytes, (uint64_t)moved);
        append_write(sim, SIM_WRITE, part, bytes, (uint64_t)moved, offset);
    }
    may_die(sim);
    return moved;
}

static enum sim_part part_of_record(const struct sim *sim, uint64_t offset)
{
    static const enum sim_part parts[][2] = {
        [PURPOSE_SAVE] = {PART_SAVE_A, PART_SAVE_B},
        [PURPOSE_OPEN] = {PART_OPEN_A, PART_OPEN_B},
        [PURPOSE_POLICY] = {PART_POLICY_A, PART_POLICY_B},
    };
    return parts[sim->purpose][offset >= sim->size_bytes / 2];
}

/* The one report of pages that could not be written behind our back. */
static bool was_unreported(struct sim *sim)
{
    const bool report = sim->unreported;
    sim->unreported = false;
    return report;
}

static int64_t sim_write_durable(struct pcc_io *io, const void *bytes, uint64_t length,
                                 uint64_t offset)
{
    struct sim *sim = (struct sim *)io;
    check_operation(sim, bytes, length, offset);
    count_operation(sim);
    if (sim->beside && !sim->is_beside && sim->fault.kind == FAULT_NONE) {
        sim->is_beside = true;
        sim->beside(sim->owner);
        sim->is_beside = false;
    }
    if (sim->record_bad)
        sim_breach(sim, "a record was written after a record write had failed");
    if (sim->mutant == SIM_NO_REPLICA && offset >= sim->size_bytes / 2)
        return (int64_t)length;
    int64_t moved = (int64_t)length;
    if (strikes(sim, is_write(sim) || sim->fault.kind == FAULT_RECORD))
        moved = faulted_length(sim, length);
    if (was_unreported(sim))
        moved = -EIO;
    enum sim_kind as = sim->mutant == SIM_NO_DURABLE ? SIM_WRITE : SIM_DURABLE;
    if (moved == -EIO || moved == -ENOSPC) {
        sim->record_bad = true;
        fail_write(sim, as, part_of_record(sim, offset), bytes, length, offset);
    } else if (moved > 0) {
        memcpy(sim->image + offset, bytes, (uint64_t)moved);
        append_write(sim, as, part_of_record(sim, offset), bytes, (uint64_t)moved, offset);
    }
    may_die(sim);
    return moved;
}

static int64_t sim_read(struct pcc_io *io, void *bytes, uint64_t length, uint64_t offset)
{
    struct sim *sim = (struct sim *)io;
    check_operation(sim, bytes, length, offset);
    count_operation(sim);
    int64_t moved = (int64_t)length;
    if (strikes(sim, is_read(sim)))
        moved = faulted_length(sim, length);
    if (moved > 0)
        memcpy(bytes, sim->image + offset, (uint64_t)moved);
    return moved;
}

static int sim_flush(struct pcc_io *io)
{
    struct sim *sim = (struct sim *)io;
    count_operation(sim);
    if (sim->mutant == SIM_NO_FLUSH)
        return 0;
    int result = 0;
    /* A fence does not fail. */
    if (strikes(sim, sim->model != SIM_PMEM && (is_any(sim) || sim->fault.kind == FAULT_FLUSH)))
        result = sim->fault.kind == FAULT_EINTR ? -EINTR : -EIO;
    if (was_unreported(sim))
        result = -EIO;
    if (result == -EINTR)
        return result; /* nothing was tried: asking again is allowed */
    if (result != 0)
        sim->moving = true;
    if (sim->recording)
        append(sim, SIM_FLUSH, PART_FLUSH)->failed = result != 0;
    may_die(sim);
    return result;
}

static void sim_close(struct pcc_io *io)
{
    (void)io; /* the media outlives the volume that is open on it */
}

static const struct pcc_io_ops sim_ops = {
    .write = sim_write,
    .read = sim_read,
    .write_durable = sim_write_durable,
    .flush = sim_flush,
    .close = sim_close,
};

struct sim *sim_new(uint64_t size_bytes, uint64_t seed)
{
    struct sim *sim = calloc(1, sizeof *sim);
    PCC_ASSERT(sim);
    sim->io.ops = &sim_ops;
    sim->io.size_bytes = sim->size_bytes = size_bytes;
    sim->image = calloc(1, size_bytes);
    sim->base = calloc(1, size_bytes);
    PCC_ASSERT(sim->image && sim->base);
    sim->tear_bytes = SIM_SECTOR;
    sim->rng = rng_from(seed, 0x51);
    return sim;
}

static void clear_log(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->log_count; i++)
        free(sim->log[i].bytes);
    sim->log_count = 0;
}

void sim_free(struct sim *sim)
{
    clear_log(sim);
    free(sim->log);
    free(sim->image);
    free(sim->base);
    free(sim);
}

void sim_reopened(struct sim *sim)
{
    memset(sim->slot_bad, 0, sizeof sim->slot_bad);
    sim->record_bad = sim->moving = sim->unreported = false;
}

void sim_restart(struct sim *sim, const uint8_t *media)
{
    clear_log(sim);
    if (media)
        memcpy(sim->image, media, sim->size_bytes);
    memcpy(sim->base, sim->image, sim->size_bytes);
    memset(sim->slot_used, 0, sizeof sim->slot_used);
    sim_reopened(sim);
    sim->recording = true;
    memset(sim->acknowledged, 0, sizeof sim->acknowledged);
    sim->operations = sim->last_ack = sim->top_ack = 0;
    sim->breach = NULL;
}

void sim_set_fault(struct sim *sim, enum sim_fault_kind kind, uint64_t at, bool persistent)
{
    sim->fault = (struct sim_fault){kind, at, persistent};
    sim->fault_seen = sim->fault_hits = 0;
}
