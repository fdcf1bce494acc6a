/* The state memfd: what the next daemon would read, looked at after every single store of a saver's
 * life. The oracle knows what is true of the memory and of the slot at that moment. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "disk/pcc_kept.h"

static void looked(void);

void pcc_kept_stored(void)
{
    looked();
}

enum { PIECES = 5, SLOT_BYTES = 256 << 10, BYTES_BLOCK = 4096, BYTES_CHUNK = 16384 };

static const struct pcc_kept_shape shape = {.places = 2,
                                            .chunk_bytes = BYTES_CHUNK,
                                            .block_bytes = BYTES_BLOCK,
                                            .slot_stride_bytes = SLOT_BYTES};

static struct {
    struct pcc_kept kept;
    uint64_t looks, copied_seen;
    bool active;
    bool may_be_copied;  /* everything was handed over and the word has left COPYING */
    bool must_be_copied; /* the client may have seen COPIED */
    uint64_t sequence;
    uint32_t slot;             /* that its pieces are written to */
    uint64_t memory[PIECES];   /* what the DRAM of a piece holds: sequence, or 0 */
    uint64_t disk[PIECES][4];  /* what piece, slot hold: sequence */
    uint64_t checksum[PIECES]; /* what was handed over as such */
} truth;

/* Another daemon's view of the very bytes. */
static void looked(void)
{
    struct pcc_kept kept;

    if (!truth.active)
        return;
    truth.looks++;
    uint8_t *image = malloc(truth.kept.length_bytes);
    CHECK(image != NULL);
    memcpy(image, truth.kept.bytes, truth.kept.length_bytes);
    CHECK(pcc_kept_accept(&kept, image, truth.kept.length_bytes) == 0);
    const bool copied = pcc_kept_is_copied(&kept, 1);
    CHECK(!copied || truth.may_be_copied);
    CHECK(copied || !truth.must_be_copied);
    CHECK(!pcc_kept_is_copied(&kept, 0));
    if (copied) {
        truth.copied_seen++;
        const struct pcc_kept_save *save = pcc_kept_save(&kept, 1);
        CHECK(save->entry.sequence == truth.sequence &&
              save->entry.payload_bytes == PIECES * BYTES_CHUNK - 7);
        CHECK(save->entry.step == (int64_t)truth.sequence * 10 && save->entry.world_size == 3);
        CHECK(save->entry.flags == PCC_SLOT_HEALTHY &&
              save->entry.start_id[0] == (uint8_t)truth.sequence);
        CHECK(save->notes.name_row == truth.sequence);
        for (uint32_t i = 0; i < PIECES; i++) {
            const struct pcc_kept_piece *piece = pcc_kept_piece(&kept, 1, i);
            const uint64_t *sums =
                (const uint64_t *)(const void *)(pcc_kept_manifest(&kept, 1) +
                                                 sizeof(struct pcc_manifest_header)) +
                i * (BYTES_CHUNK / BYTES_BLOCK);
            if (piece->segment != 0) { /* what it says is in DRAM, is */
                CHECK(piece->segment == 77 && piece->chunk == i + 3);
                CHECK(truth.memory[i] == truth.sequence);
            } else {
                CHECK((piece->flags & PCC_KEPT_WRITTEN) != 0);
            }
            if ((piece->flags & PCC_KEPT_WRITTEN) != 0)
                CHECK(truth.disk[i][save->slot] == truth.sequence);
            if ((piece->flags & PCC_KEPT_HASHED) != 0)
                CHECK(sums[0] == truth.checksum[i]);
            CHECK((piece->flags & PCC_KEPT_WRITTEN) == 0 || (piece->flags & PCC_KEPT_HASHED) != 0);
        }
    }
    free(image);
}

static void sums_set(uint32_t position, uint64_t value)
{
    uint64_t *sums = (uint64_t *)(void *)(pcc_kept_manifest(&truth.kept, 1) +
                                          sizeof(struct pcc_manifest_header)) +
                     position * (BYTES_CHUNK / BYTES_BLOCK);
    truth.checksum[position] = value;
    *sums = value;
}

static struct pcc_slot_entry entry_of(uint64_t sequence)
{
    return (struct pcc_slot_entry){.state = PCC_SLOT_DURABLE,
                                   .sequence = sequence,
                                   .step = (int64_t)sequence * 10,
                                   .payload_bytes = PIECES * BYTES_CHUNK - 7,
                                   .tree_offset_bytes = 100,
                                   .tree_bytes = 50,
                                   .world_size = 3,
                                   .flags = PCC_SLOT_HEALTHY,
                                   .start_id = {(uint8_t)sequence}};
}

/* Some begin without a number. */
static bool is_numbered_later(uint64_t sequence)
{
    return sequence % 4 == 1;
}

static void begin_one(uint64_t sequence, uint32_t slot)
{
    struct pcc_slot_entry entry = entry_of(sequence);

    if (is_numbered_later(sequence))
        entry.sequence = entry.world_size = entry.start_id[0] = 0;
    truth.may_be_copied = truth.must_be_copied = false;
    pcc_kept_begin(&truth.kept, 1, &entry, &(struct pcc_manifest_notes){.name_row = sequence}, slot,
                   PIECES, 0);
    truth.sequence = sequence;
    truth.slot = slot;
}

static void written(uint32_t position)
{
    truth.disk[position][truth.slot] = truth.sequence; /* the write has completed */
    pcc_kept_written(&truth.kept, 1, position);
}

static void reused(uint32_t position)
{
    pcc_kept_reused(&truth.kept, 1, position);
    truth.memory[position] = 0; /* from here on somebody writes to it */
    looked();
}

/* One save: chunks come with checksums or get them from the writer, before or after the seal; it
 * may move to another slot, lose chunks after they were written, and ends. */
static void one_save(uint64_t sequence, bool moves, bool loses)
{
    begin_one(sequence, (uint32_t)sequence % 4);
    for (uint32_t i = 0; i < PIECES; i++) {
        const bool hashed = i % 2 == 0;
        truth.memory[i] = sequence;
        if (hashed)
            sums_set(i, sequence * 100 + i);
        pcc_kept_chunk(&truth.kept, 1, i, 77, i + 3, hashed);
        if (i == 0)
            written(0);
    }
    if (is_numbered_later(sequence)) {
        const struct pcc_slot_entry entry = entry_of(sequence);
        pcc_kept_entry(&truth.kept, 1, &entry, &(struct pcc_manifest_notes){.name_row = sequence});
    }
    truth.may_be_copied = true;
    pcc_kept_copied(&truth.kept, 1);
    truth.must_be_copied = true;
    for (uint32_t i = 1; i < PIECES; i++) {
        if (i % 2 != 0) {
            sums_set(i, sequence * 100 + i);
            pcc_kept_hashed(&truth.kept, 1, i);
        }
        written(i);
    }
    if (moves) {
        const uint32_t to = (truth.slot + 1) % 4;
        pcc_kept_moved(&truth.kept, 1, to, PIECES);
        truth.slot = to;
        for (uint32_t i = 0; i < PIECES; i++)
            written(i);
    }
    for (uint32_t i = 0; loses && i < PIECES - 1; i++)
        reused(i);
    truth.must_be_copied = false; /* it is durable, superseded or failed */
    pcc_kept_end(&truth.kept, 1);
    truth.may_be_copied = false;
    looked();
}

static void test_every_store(void)
{
    const uint64_t length = pcc_kept_bytes(&shape);
    struct pcc_record record = {.uid = 5, .rank = 6, .job_bytes = 3, .job = "abc"};
    void *bytes = aligned_alloc(PCC_IO_ALIGN, length);

    CHECK(bytes != NULL);
    memset(bytes, 0, length);
    memset(&truth, 0, sizeof(truth));
    pcc_kept_make(&truth.kept, bytes, &shape, &record);
    truth.active = true;
    for (uint64_t sequence = 1; sequence <= 40; sequence++) {
        one_save(sequence, sequence % 3 == 0, sequence % 2 == 0);
        if (sequence % 5 == 0) { /* one that never was copied comes between */
            begin_one(1000 + sequence, 0);
            truth.memory[0] = 1000 + sequence;
            pcc_kept_chunk(&truth.kept, 1, 0, 77, 3, false);
            pcc_kept_end(&truth.kept, 1);
        }
    }
    truth.active = false;
    printf("  %llu stores looked at, %llu with something copied\n", (unsigned long long)truth.looks,
           (unsigned long long)truth.copied_seen);
    CHECK(truth.looks > 1000 && truth.copied_seen > 400);
    free(bytes);
}

/* A state with random content: refused, or all its numbers are plausible. */
static void test_noise(void)
{
    const uint64_t length = pcc_kept_bytes(&shape);
    const struct pcc_record record = {.job_bytes = 1, .job = "j"};
    uint8_t *bytes = aligned_alloc(PCC_IO_ALIGN, length);
    struct pcc_kept kept;
    uint64_t x = 12345, accepted = 0;

    CHECK(bytes != NULL);
    for (uint32_t round = 0; round < 20000; round++) {
        memset(bytes, 0, length);
        pcc_kept_make(&kept, bytes, &shape, &record);
        pcc_kept_save(&kept, 0)->entry.state = PCC_SLOT_DURABLE;
        pcc_kept_save(&kept, 0)->entry.sequence = 9;
        pcc_kept_save(&kept, 0)->entry.payload_bytes = 9;
        pcc_kept_copied(&kept, 0);
        CHECK(pcc_kept_is_copied(&kept, 0));
        for (uint32_t i = 0; i < 1 + round % 4; i++) {
            x = x * 6364136223846793005ull + 1442695040888963407ull;
            const uint64_t at = x >> 33;
            bytes[at % 3 == 0 ? at % 256 : at % length] = (uint8_t)(x >> 20);
        }
        const int error = pcc_kept_accept(&kept, bytes, length);
        CHECK(error == 0 || error == -PCC_E_DAMAGED || error == -PCC_E_NEWER_FORMAT);
        if (error != 0)
            continue;
        accepted++;
        for (uint32_t place = 0; place < pcc_kept_header(&kept)->places; place++)
            if (pcc_kept_is_copied(&kept, place))
                CHECK(pcc_kept_save(&kept, place)->entry.payload_bytes <=
                      pcc_kept_header(&kept)->slot_stride_bytes);
        CHECK(kept.length_bytes == length);
    }
    CHECK(accepted > 1000);
    CHECK(pcc_kept_accept(&kept, bytes, 100) == -PCC_E_DAMAGED);
    free(bytes);
}

int main(void)
{
    RUN(test_every_store);
    RUN(test_noise);
    return 0;
}
