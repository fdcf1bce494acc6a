#include "oracle.h"
#include "disk/pcc_load.h"

#include <stdlib.h>
#include <string.h>

const char *const verdict_names[VERDICT_COUNT] = {
    "sound",        "unreadable",          "older than acknowledged",
    "wrong bytes",  "recovered unsealed",  "record names what is not there",
    "lost flagged", "inconsistent record",
};

struct oracle *oracle_new(void)
{
    struct oracle *oracle = calloc(1, sizeof *oracle);
    PCC_ASSERT(oracle);
    oracle->next_step = 1;
    return oracle;
}

void oracle_free(struct oracle *oracle)
{
    for (uint32_t i = 0; i < oracle->count; i++)
        free(oracle->saves[i].bytes);
    free(oracle);
}

static void fill(struct rng rng, uint8_t *bytes, uint64_t length)
{
    for (uint64_t at = 0; at < length; at += sizeof(uint64_t)) {
        uint64_t word = rng_next(&rng);
        memcpy(bytes + at, &word, length - at < sizeof word ? length - at : sizeof word);
    }
}

void oracle_payload(const struct oracle *oracle, uint64_t sequence, int64_t step, uint8_t *bytes,
                    uint64_t length)
{
    uint64_t padded = pcc_align_up(length, PCC_IO_ALIGN);
    uint64_t frozen = length < oracle->frozen_bytes ? length : oracle->frozen_bytes;
    fill(rng_from(sequence, (uint64_t)step), bytes, padded);
    fill(rng_from(0xf202e4, oracle->frozen), bytes, frozen);
    if (frozen > 0 && step % 8 == 0) /* one that nobody expected to change */
        bytes[(uint64_t)step * 977 % frozen] ^= 1;
    memset(bytes + length, 0, padded - length);
}

void oracle_start_id(uint64_t incarnation, uint8_t out[PCC_UUID_BYTES])
{
    memset(out, 0xa5, PCC_UUID_BYTES);
    memcpy(out, &incarnation, sizeof incarnation);
}

struct oracle_save *oracle_begin(struct oracle *oracle, const struct pcc_save_request *request,
                                 uint64_t sequence)
{
    PCC_ASSERT(oracle->count < ORACLE_SAVES_MAX && request->tag == oracle->count);
    struct oracle_save *save = &oracle->saves[oracle->count++];
    *save = (struct oracle_save){.request = *request, .sequence = sequence};
    save->sealed_at = ORACLE_NEVER;
    uint64_t padded = pcc_align_up(request->payload_bytes, PCC_IO_ALIGN);
    save->bytes = aligned_alloc(PCC_IO_ALIGN, padded);
    PCC_ASSERT(save->bytes);
    oracle_payload(oracle, sequence, request->step, save->bytes, request->payload_bytes);
    return save;
}

static void acknowledge(struct oracle *oracle, uint64_t sequence)
{
    if (sequence > oracle->required) {
        oracle->required_one_before = oracle->required;
        oracle->required = sequence;
    }
}

void oracle_crashed(struct oracle *oracle, const struct sim *sim, uint32_t position)
{
    for (uint32_t i = 0; i < position; i++)
        if (sim->log[i].kind == SIM_ACK)
            acknowledge(oracle, sim->log[i].sequence);
        else if (sim->log[i].kind == SIM_DAMAGED)
            oracle->required = sim->log[i].sequence;
    for (uint32_t i = 0; i < oracle->count; i++) {
        struct oracle_save *save = &oracle->saves[i];
        save->sealed_at = save->sealed_at <= position ? 0 : ORACLE_NEVER;
        save->ended = true;
    }
}

static const struct oracle_save *find(const struct oracle *oracle,
                                      const struct pcc_slot_entry *entry)
{
    for (uint32_t i = oracle->count; i-- > 0;)
        if (oracle->saves[i].sequence == entry->sequence &&
            oracle->saves[i].request.step == entry->step)
            return &oracle->saves[i];
    return NULL;
}

static bool is_same(const struct oracle_save *save, const struct pcc_slot_entry *entry)
{
    const struct pcc_save_request *request = &save->request;
    uint8_t start_id[PCC_UUID_BYTES];
    oracle_start_id(request->incarnation, start_id);
    return memcmp(entry->start_id, start_id, sizeof start_id) == 0 &&
           (entry->flags & PCC_SLOT_MARKS) == request->flags &&
           entry->incarnation == request->incarnation &&
           entry->payload_bytes == request->payload_bytes &&
           entry->world_size == request->world_size &&
           entry->tree_offset_bytes == request->tree_offset_bytes &&
           entry->tree_bytes == request->tree_bytes;
}

static _Alignas(PCC_IO_ALIGN) uint8_t read_buffer[1 << 16];

/* Reads the whole checkpoint, in pieces of one or two pages so that joints are covered. */
static enum verdict verify(const struct oracle *oracle, struct pcc_volume *volume,
                           const struct pcc_slot_entry *entry, uint32_t position)
{
    struct pcc_load *load = NULL;
    if (pcc_load_open(volume, entry->sequence, &load) != 0)
        return VERDICT_BROKEN_ENTRY;
    enum verdict verdict = VERDICT_SOUND;
    const struct pcc_slot_entry *loaded = pcc_load_entry(load);
    const struct oracle_save *save = find(oracle, loaded);
    uint64_t piece =
        pcc_load_block_bytes(load) > PCC_IO_ALIGN ? pcc_load_block_bytes(load) : 2 * PCC_IO_ALIGN;
    for (uint64_t at = 0; at < loaded->payload_bytes && verdict == VERDICT_SOUND; at += piece) {
        uint64_t left = loaded->payload_bytes - at;
        uint64_t length = left < piece ? left : piece;
        if (pcc_load_chunk(load, read_buffer, at, length) != 0)
            verdict = VERDICT_BROKEN_ENTRY;
        else if (!save || !is_same(save, loaded) ||
                 memcmp(&pcc_load_manifest(load)->notes, &save->request.notes,
                        sizeof save->request.notes) != 0 ||
                 memcmp(read_buffer, save->bytes + at, length) != 0)
            verdict = VERDICT_WRONG_BYTES;
    }
    if (verdict == VERDICT_SOUND && save->sealed_at > position)
        verdict = VERDICT_UNSEALED;
    pcc_load_close(load);
    return verdict;
}

/* No sequence twice, none at or above next_sequence, quarantined slots not named as durable. */
static bool is_consistent(const struct pcc_record *record)
{
    for (uint32_t i = 0; i < record->slot_count; i++) {
        const struct pcc_slot_entry *entry = &record->slots[i];
        if (entry->state != PCC_SLOT_DURABLE)
            continue;
        if (entry->sequence == 0 || entry->sequence >= record->next_sequence)
            return false;
        for (uint32_t j = 0; j < i; j++)
            if (record->slots[j].state == PCC_SLOT_DURABLE &&
                record->slots[j].sequence == entry->sequence)
                return false;
    }
    return true;
}

/* The newest durable entry older than `below`. */
static const struct pcc_slot_entry *newest_below(const struct pcc_record *record, uint64_t below)
{
    const struct pcc_slot_entry *newest = NULL;
    for (uint32_t i = 0; i < record->slot_count; i++) {
        const struct pcc_slot_entry *entry = &record->slots[i];
        if (entry->state == PCC_SLOT_DURABLE && !(entry->flags & PCC_SLOT_DAMAGED) &&
            entry->sequence < below && (!newest || entry->sequence > newest->sequence))
            newest = entry;
    }
    return newest;
}

struct judgement judge(const struct oracle *oracle, struct pcc_io *io,
                       const struct judge_rules *rules)
{
    struct judgement found = {.verdict = VERDICT_SOUND};
    struct pcc_volume *volume = NULL;
    found.error = pcc_volume_open_io(io, false, &volume);
    if (found.error != 0) {
        found.verdict = VERDICT_UNREADABLE;
        return found;
    }
    struct pcc_record record;
    pcc_volume_record(volume, &record);
    bool flagged_found = rules->flagged == 0; /* also with a flag that says that it is damaged */
    for (uint32_t i = 0; i < record.slot_count; i++)
        flagged_found |=
            record.slots[i].state == PCC_SLOT_DURABLE && record.slots[i].sequence == rules->flagged;
    const struct pcc_slot_entry *entry = newest_below(&record, UINT64_MAX);
    for (; entry; entry = newest_below(&record, entry->sequence)) {
        found.entries++;
        enum verdict verdict = verify(oracle, volume, entry, rules->position);
        if (verdict == VERDICT_SOUND && found.sequence == 0)
            found.sequence = entry->sequence;
        found.damaged += verdict == VERDICT_BROKEN_ENTRY;
        bool excused = verdict == VERDICT_BROKEN_ENTRY && rules->damage;
        if (!excused && found.verdict == VERDICT_SOUND)
            found.verdict = verdict;
    }
    pcc_volume_close(volume);
    if (found.verdict != VERDICT_SOUND)
        return found;
    if (found.sequence < rules->required)
        found.verdict = found.sequence == 0 ? VERDICT_UNREADABLE : VERDICT_TOO_OLD;
    else if (!flagged_found)
        found.verdict = VERDICT_LOST_FLAGGED;
    else if (!is_consistent(&record))
        found.verdict = VERDICT_BAD_TABLE;
    return found;
}
