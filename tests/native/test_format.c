/* The layout on disk, the arithmetic on it, and what each checksum covers. */
#include <string.h>

#include "base/pcc_crc.h"
#include "check.h"
#include "disk/pcc_format.h"
#include "fast_crc.h"

uint32_t __wrap_pcc_crc32c(uint32_t crc, const void *bytes, size_t length);
uint32_t __wrap_pcc_crc32c(uint32_t crc, const void *bytes, size_t length)
{
    return fast_crc32c(crc, bytes, length);
}

static struct pcc_record sample(void)
{
    struct pcc_geometry geometry;
    struct pcc_record record;

    CHECK_EQUAL(pcc_geometry_plan(100000, 4, 4096, 4096, &geometry), 0);
    memset(&record, 0, sizeof record);
    record.magic = PCC_RECORD_MAGIC;
    record.format_version = PCC_FORMAT_VERSION;
    record.record_bytes = PCC_RECORD_BYTES;
    record.record_number = 7;
    for (uint8_t i = 0; i < PCC_UUID_BYTES; i++)
        record.volume_uuid[i] = i;
    record.volume_bytes = geometry.volume_bytes;
    record.record_stride_bytes = geometry.record_stride_bytes;
    record.slot_stride_bytes = geometry.slot_stride_bytes;
    record.slot_count = 4;
    record.block_bytes = 4096;
    record.checksum_algorithm = PCC_CHECKSUM_XXH3_64;
    record.keep = 2;
    record.job_bytes = 3;
    memcpy(record.job, "job", 3);
    record.next_sequence = 10;
    record.slots[1].state = PCC_SLOT_DURABLE;
    record.slots[1].sequence = 9;
    record.slots[1].payload_bytes = 100000;
    record.slots[1].manifest_bytes = (uint32_t)pcc_manifest_bytes(100000, 4096, false);
    record.slots[3].flags = PCC_SLOT_QUARANTINED;
    pcc_record_seal(&record, 1, 0);
    return record;
}

struct field {
    const char *name;
    size_t offset, size;
};
#define FIELD(type, name)                                                                          \
    {                                                                                              \
#name, offsetof(struct type, name), sizeof(((struct type *)0)->name)                       \
    }

static const struct field record_fields[] = {
    FIELD(pcc_record, magic),
    FIELD(pcc_record, format_version),
    FIELD(pcc_record, record_bytes),
    FIELD(pcc_record, volume_uuid),
    FIELD(pcc_record, generation),
    FIELD(pcc_record, replica),
    FIELD(pcc_record, offset_bytes),
    FIELD(pcc_record, record_number),
    FIELD(pcc_record, previous_hash),
    FIELD(pcc_record, boot_epoch),
    FIELD(pcc_record, volume_bytes),
    FIELD(pcc_record, record_stride_bytes),
    FIELD(pcc_record, slot_stride_bytes),
    FIELD(pcc_record, slot_count),
    FIELD(pcc_record, block_bytes),
    FIELD(pcc_record, checksum_algorithm),
    FIELD(pcc_record, keep),
    FIELD(pcc_record, uid),
    FIELD(pcc_record, rank),
    FIELD(pcc_record, world_size),
    FIELD(pcc_record, job_bytes),
    FIELD(pcc_record, job),
    FIELD(pcc_record, created_wall_ns),
    FIELD(pcc_record, next_sequence),
    FIELD(pcc_record, incarnation),
    FIELD(pcc_record, done),
    FIELD(pcc_record, record_lost),
    FIELD(pcc_record, start_id),
    FIELD(pcc_record, promise),
    FIELD(pcc_record, reserved),
    FIELD(pcc_record, slots),
    FIELD(pcc_record, reserved1),
    FIELD(pcc_record, crc32c),
};
static const struct field entry_fields[] = {
    FIELD(pcc_slot_entry, state),           FIELD(pcc_slot_entry, flags),
    FIELD(pcc_slot_entry, sequence),        FIELD(pcc_slot_entry, step),
    FIELD(pcc_slot_entry, incarnation),     FIELD(pcc_slot_entry, payload_bytes),
    FIELD(pcc_slot_entry, manifest_bytes),  FIELD(pcc_slot_entry, world_size),
    FIELD(pcc_slot_entry, manifest_digest), FIELD(pcc_slot_entry, tree_offset_bytes),
    FIELD(pcc_slot_entry, tree_bytes),      FIELD(pcc_slot_entry, wall_ns),
    FIELD(pcc_slot_entry, base_sequence),   FIELD(pcc_slot_entry, start_id),
};
static const struct field promise_fields[] = {
    FIELD(pcc_promise, number),
    FIELD(pcc_promise, start_id),
    FIELD(pcc_promise, list_digest),
};
static const struct field manifest_fields[] = {
    FIELD(pcc_manifest_header, magic),
    FIELD(pcc_manifest_header, format_version),
    FIELD(pcc_manifest_header, header_bytes),
    FIELD(pcc_manifest_header, volume_uuid),
    FIELD(pcc_manifest_header, slot),
    FIELD(pcc_manifest_header, block_bytes),
    FIELD(pcc_manifest_header, sequence),
    FIELD(pcc_manifest_header, step),
    FIELD(pcc_manifest_header, payload_bytes),
    FIELD(pcc_manifest_header, block_count),
    FIELD(pcc_manifest_header, tree_offset_bytes),
    FIELD(pcc_manifest_header, tree_bytes),
    FIELD(pcc_manifest_header, checksum_algorithm),
    FIELD(pcc_manifest_header, kind),
    FIELD(pcc_manifest_header, start_id),
    FIELD(pcc_manifest_header, incarnation),
    FIELD(pcc_manifest_header, world_size),
    FIELD(pcc_manifest_header, reserved0),
    FIELD(pcc_manifest_header, base_sequence),
    FIELD(pcc_manifest_header, notes),
    FIELD(pcc_manifest_header, reserved),
};
static const struct field notes_fields[] = {
    FIELD(pcc_manifest_notes, name_base),  FIELD(pcc_manifest_notes, name_descents),
    FIELD(pcc_manifest_notes, name_row),   FIELD(pcc_manifest_notes, base_volume),
    FIELD(pcc_manifest_notes, statistics), FIELD(pcc_manifest_notes, dtypes),
};

/* The rows below a heading of FORMAT.md are the fields, in order, and leave no byte out. */
static void check_table(const char *document, const char *heading, const struct field *fields,
                        size_t count, size_t total)
{
    const char *at = strstr(document, heading);
    size_t end = 0;

    CHECK(at);
    for (size_t i = 0; i < count; i++) {
        char row[128];
        (void)snprintf(row, sizeof row, "\n| %zu | %zu | `%s` |", fields[i].offset, fields[i].size,
                       fields[i].name);
        at = strstr(at, row);
        if (!at)
            printf("FORMAT.md lacks, or has out of order:%s\n", row);
        CHECK(at);
        CHECK_EQUAL(fields[i].offset, end);
        end += fields[i].size;
    }
    CHECK_EQUAL(end, total);
}

static void test_the_document_agrees_with_the_structs(void)
{
    static char document[65536];
    FILE *file = fopen(FORMAT_MD, "r");

    CHECK(file);
    CHECK(fread(document, 1, sizeof document - 1, file) > 0);
    CHECK_EQUAL(fclose(file), 0);
#define TABLE(heading, fields, type)                                                               \
    check_table(document, heading, fields, sizeof(fields) / sizeof(fields)[0], sizeof(struct type))
    TABLE("## Commit record", record_fields, pcc_record);
    TABLE("## Slot entry", entry_fields, pcc_slot_entry);
    TABLE("## Promise", promise_fields, pcc_promise);
    TABLE("## Manifest", manifest_fields, pcc_manifest_header);
    TABLE("| 208 | 48 | `reserved`", notes_fields, pcc_manifest_notes);
#undef TABLE
    /* The vectors that the tests below check. */
    CHECK(strstr(document, "`e3069283`") && strstr(document, "`5fb992b2`"));
    CHECK(strstr(document, "`2d06800538d394c2`") && strstr(document, "`eb4b7c3707879151`"));
    CHECK(strstr(document, "`d728614bd9e16b09e3833fd7ee6ecd31`"));
}

static void test_vectors(void)
{
    uint8_t bytes[4096];
    uint64_t magic;

    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)i;
    CHECK_EQUAL(__real_pcc_crc32c(0, "123456789", 9), 0xe3069283u);
    CHECK_EQUAL(__real_pcc_crc32c(0, bytes, 4092), 0x5fb992b2u);
    CHECK_EQUAL(pcc_crc32c(0, "123456789", 9), 0xe3069283u);
    CHECK_EQUAL(pcc_crc32c(0, bytes, 4092), 0x5fb992b2u);
    CHECK(pcc_hash_bytes("", 0) == 0x2d06800538d394c2ull);
    CHECK(pcc_hash_bytes(bytes, 4096) == 0xeb4b7c3707879151ull);
    magic = PCC_RECORD_MAGIC;
    CHECK(memcmp(&magic, "PCCPREC1", 8) == 0);
    magic = PCC_MANIFEST_MAGIC;
    CHECK(memcmp(&magic, "PCCPMAN1", 8) == 0);
}

static void test_geometry(void)
{
    struct pcc_geometry geometry;

    CHECK_EQUAL(pcc_geometry_plan(64 << 20, 4, 1 << 20, 1 << 20, &geometry), 0);
    CHECK_EQUAL(geometry.slot_stride_bytes, 65 << 20);
    CHECK_EQUAL(geometry.volume_bytes, (4 + 4 * 65) << 20);
    CHECK_EQUAL(pcc_geometry_record_offset(&geometry, 0, 0), 0);
    CHECK_EQUAL(pcc_geometry_record_offset(&geometry, 1, 0), 1 << 20);
    CHECK_EQUAL(pcc_geometry_slot_offset(&geometry, 0), 2 << 20);
    CHECK_EQUAL(pcc_geometry_slot_offset(&geometry, 3), (2 + 3 * 65) << 20);
    CHECK_EQUAL(pcc_geometry_record_offset(&geometry, 0, 1), 262ll << 20);
    CHECK_EQUAL(pcc_geometry_record_offset(&geometry, 1, 1), 263ll << 20);
    CHECK(pcc_geometry_fits(&geometry, 64 << 20, false));
    CHECK(!pcc_geometry_fits(&geometry, 65 << 20, false));
    CHECK(!pcc_geometry_fits(&geometry, UINT64_MAX, false));

    CHECK_EQUAL(pcc_geometry_plan(0, 4, 4096, 4096, &geometry), -EINVAL);
    CHECK_EQUAL(pcc_geometry_plan(UINT64_MAX, 4, 4096, 4096, &geometry), -EINVAL);
    CHECK_EQUAL(pcc_geometry_plan(1, 33, 4096, 4096, &geometry), -EINVAL);
    CHECK_EQUAL(pcc_geometry_plan(1, 0, 4096, 4096, &geometry), -EINVAL);
    CHECK_EQUAL(pcc_geometry_plan(1, 4, 256, 4096, &geometry), -EINVAL);
    CHECK_EQUAL(pcc_geometry_plan(1, 4, 5000, 4096, &geometry), -EINVAL);
    CHECK_EQUAL(pcc_geometry_plan(1, 4, 4096, 2048, &geometry), -EINVAL);
    CHECK_EQUAL(pcc_geometry_plan(1, 4, 4096, 2 << 20, &geometry), -EINVAL);
}

static void test_every_flipped_bit_of_a_record_is_found(void)
{
    struct pcc_record record = sample();

    CHECK_EQUAL(pcc_record_accept(&record, 4096), 0);
    CHECK_EQUAL(pcc_record_accept(&record, 0), -PCC_E_DAMAGED);
    for (size_t bit = 0; bit < sizeof record * 8; bit++) {
        uint8_t *byte = (uint8_t *)&record + bit / 8;
        *byte ^= (uint8_t)(1u << bit % 8);
        const int expected = bit < 64 ? -PCC_E_NOT_A_VOLUME : -PCC_E_DAMAGED;
        CHECK_EQUAL(pcc_record_accept(&record, 4096), expected);
        *byte ^= (uint8_t)(1u << bit % 8);
    }
}

static int accept_sealed(struct pcc_record record)
{
    record.crc32c = pcc_crc32c(0, &record, offsetof(struct pcc_record, crc32c));
    return pcc_record_accept(&record, 4096);
}

/* Values with a right CRC that would break later arithmetic: a hostile disk may hold them. */
static void test_bounds_are_checked_behind_the_crc(void)
{
    const struct pcc_record good = sample();
    struct pcc_record bad;

    CHECK_EQUAL(accept_sealed(good), 0);
#define BAD(change)                                                                                \
    do {                                                                                           \
        bad = good;                                                                                \
        bad.change;                                                                                \
        CHECK_EQUAL(accept_sealed(bad), -PCC_E_DAMAGED);                                           \
    } while (0)
    BAD(slot_count = 33);
    BAD(slot_count = 0);
    BAD(slot_stride_bytes = UINT64_MAX);
    BAD(slot_stride_bytes += 1);
    BAD(record_stride_bytes = 12288);
    BAD(volume_bytes += 4096);
    BAD(block_bytes = 0);
    BAD(block_bytes = 4097);
    BAD(keep = 4);
    BAD(keep = 0);
    BAD(job_bytes = 129);
    BAD(job_bytes = 2);
    BAD(checksum_algorithm = 2);
    BAD(record_number = 8);
    BAD(record_number = 0);
    BAD(replica = 1);
    BAD(generation = 3);
    BAD(record_bytes = 8192);
    BAD(format_version = 0);
    BAD(next_sequence = 9);
    BAD(slots[1].state = 2);
    BAD(slots[1].flags = PCC_SLOT_FOREIGN); /* of no base */
    BAD(promise.start_id[0] = 1);
    BAD(promise.list_digest[15] = 1);
    BAD(offset_bytes = 0);
    BAD(slots[1].flags = PCC_SLOT_QUARANTINED);
    BAD(slots[1].sequence = 0);
    BAD(slots[1].payload_bytes = 1ull << 60);
    BAD(slots[1].payload_bytes = 0);
    BAD(slots[1].manifest_bytes = 4);
    BAD(slots[1].tree_offset_bytes = 100001);
    BAD(slots[1].tree_bytes = UINT64_MAX);
    BAD(slots[0].sequence = 3);
    BAD(slots[3].flags = PCC_SLOT_PROTECTED);
    BAD(slots[3].flags = PCC_SLOT_OFFERED);
    BAD(slots[3].flags = PCC_SLOT_HEALTHY);
    BAD(slots[3].start_id[7] = 1);
    BAD(slots[4].sequence = 3);
    BAD(slots[2] = good.slots[1]);
#undef BAD
    bad = good;
    bad.format_version = PCC_FORMAT_VERSION + 1;
    CHECK_EQUAL(accept_sealed(bad), -PCC_E_NEWER_FORMAT);
    for (bad.format_version = 1; bad.format_version < PCC_FORMAT_VERSION; bad.format_version++)
        CHECK_EQUAL(accept_sealed(bad), -PCC_E_OLDER_FORMAT);
}

/* Each of the 32 flags, of a durable entry. */
static void test_flags_that_must_be_understood(void)
{
    const uint32_t known = PCC_SLOT_IMAGE | PCC_SLOT_LASTING | PCC_SLOT_DAMAGED | PCC_SLOT_OFFERED;
    const uint32_t impossible = PCC_SLOT_QUARANTINED | PCC_SLOT_FOREIGN;

    for (uint32_t bit = 0; bit < 32; bit++) {
        struct pcc_record record = sample();
        const uint32_t flag = 1u << bit;
        record.slots[1].flags = flag;
        CHECK_EQUAL(accept_sealed(record), (flag & impossible) != 0 ? -PCC_E_DAMAGED
                                           : bit >= 16 || (flag & known) != 0
                                               ? 0
                                               : -PCC_E_UNKNOWN_FLAG);
    }
}

/* Slot 2 refers to slot 1. */
static struct pcc_record sample_with_base(void)
{
    struct pcc_record record = sample();
    struct pcc_slot_entry *entry = &record.slots[2];

    record.format_version = PCC_FORMAT_VERSION;
    *entry = record.slots[1];
    entry->sequence = record.slots[1].sequence + 1;
    entry->base_sequence = record.slots[1].sequence;
    entry->manifest_bytes = (uint32_t)pcc_manifest_bytes(100000, 4096, true);
    if (record.next_sequence <= entry->sequence)
        record.next_sequence = entry->sequence + 1;
    return record;
}

static void test_a_base_is_in_the_same_table(void)
{
    const struct pcc_record good = sample_with_base();
    struct pcc_record bad;

    CHECK_EQUAL(accept_sealed(good), 0);
    CHECK_EQUAL(pcc_record_bases(&good, 1u << 2), 1u << 1);
    CHECK_EQUAL(pcc_record_bases(&good, 1u << 1), 0);
#define BAD(change)                                                                                \
    bad = good;                                                                                    \
    bad.change;                                                                                    \
    CHECK_EQUAL(accept_sealed(bad), -PCC_E_DAMAGED)
    BAD(slots[2].base_sequence += 1);
    BAD(slots[2].base_sequence += 7);
    BAD(slots[2].manifest_bytes = good.slots[1].manifest_bytes);
    BAD(slots[1].base_sequence = good.slots[2].sequence);
    BAD(slots[1] = good.slots[3]);
#undef BAD
    /* In another volume it may have any number, and none here is kept for it. */
    bad = good;
    bad.slots[2].flags = PCC_SLOT_FOREIGN;
    bad.slots[2].base_sequence = 1000;
    CHECK_EQUAL(accept_sealed(bad), 0);
    CHECK_EQUAL(pcc_record_bases(&bad, 1u << 2), 0);
}

static void test_a_bitmap_names_blocks_that_the_base_has(void)
{
    struct pcc_record record = sample_with_base();
    struct pcc_slot_entry *entry = &record.slots[2], *base = &record.slots[1];
    const struct pcc_manifest_notes notes = {0};
    uint64_t checksums[25] = {0};
    _Alignas(8) uint8_t manifest[4096] = {0};
    uint64_t *bitmap = pcc_manifest_bitmap(manifest, entry->payload_bytes, 4096);

    *bitmap = 1 << 24 | 1 << 3;
    pcc_manifest_seal(manifest, &record, 2, &notes, checksums, entry);
    CHECK_EQUAL(entry->manifest_bytes, 256 + 25 * 8 + 8);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, base), 0);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, NULL), -PCC_E_DAMAGED);
    for (size_t bit = 0; bit < entry->manifest_bytes * 8; bit++) {
        manifest[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, base), -PCC_E_DAMAGED);
        manifest[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    base->payload_bytes--; /* its last block is shorter than ours */
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, base), -PCC_E_DAMAGED);
    base->payload_bytes = 4096 * 4 - 1;
    *bitmap = 1 << 3;
    pcc_manifest_seal(manifest, &record, 2, &notes, checksums, entry);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, base), -PCC_E_DAMAGED);
    base->payload_bytes++;
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, base), 0);
    *bitmap = 1 << 25; /* behind the last block */
    pcc_manifest_seal(manifest, &record, 2, &notes, checksums, entry);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, base), -PCC_E_DAMAGED);

    /* Blocks that are read together lie together. */
    record.block_bytes = 512;
    entry->payload_bytes = base->payload_bytes = 5000;
    bitmap = pcc_manifest_bitmap(manifest, 5000, 512);
    memset(manifest, 0, sizeof manifest);
    *bitmap = 0xff;
    pcc_manifest_seal(manifest, &record, 2, &notes, checksums, entry);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, base), 0);
    bool in_base;
    CHECK_EQUAL(pcc_bitmap_run(bitmap, 512, 0, 5000, &in_base), 4096);
    CHECK(in_base);
    CHECK_EQUAL(pcc_bitmap_run(bitmap, 512, 4096, 5000, &in_base), 5000);
    CHECK(!in_base);
    *bitmap = 0x7f;
    pcc_manifest_seal(manifest, &record, 2, &notes, checksums, entry);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, entry, base), -PCC_E_DAMAGED);
}

static void test_every_flipped_bit_of_a_manifest_is_found(void)
{
    const struct pcc_record record = sample();
    struct pcc_slot_entry entry = record.slots[1], other;
    struct pcc_manifest_notes notes = {0};
    uint64_t checksums[25];
    _Alignas(8) uint8_t manifest[4096] = {0};

    for (uint64_t i = 0; i < 25; i++)
        checksums[i] = i * 0x9e3779b97f4a7c15ull;
    entry.step = -4;
    pcc_manifest_seal(manifest, &record, 1, &notes, checksums, &entry);
    CHECK_EQUAL(entry.manifest_bytes, 256 + 25 * 8);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 1, &entry, NULL), 0);
    for (size_t bit = 0; bit < entry.manifest_bytes * 8; bit++) {
        manifest[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 1, &entry, NULL), -PCC_E_DAMAGED);
        manifest[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 2, &entry, NULL), -PCC_E_DAMAGED);
    other = entry;
    other.sequence++;
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 1, &other, NULL), -PCC_E_DAMAGED);
    struct pcc_record elsewhere = record;
    elsewhere.volume_uuid[0] ^= 1;
    CHECK_EQUAL(pcc_manifest_accept(manifest, &elsewhere, 1, &entry, NULL), -PCC_E_DAMAGED);
    static const uint8_t digest[PCC_DIGEST_BYTES] = {0xd7, 0x28, 0x61, 0x4b, 0xd9, 0xe1,
                                                     0x6b, 0x09, 0xe3, 0x83, 0x3f, 0xd7,
                                                     0xee, 0x6e, 0xcd, 0x31};
    CHECK(memcmp(entry.manifest_digest, digest, sizeof digest) == 0);
}

/* What the entry does not say: written, read back, and bounded. */
static void test_the_notes_of_a_manifest(void)
{
    const struct pcc_record record = sample();
    struct pcc_slot_entry entry = record.slots[1];
    const struct pcc_manifest_notes good = {.name_base = 3,
                                            .name_descents = 2,
                                            .name_row = 1,
                                            .statistics = {99000, 1000},
                                            .dtypes = {0, 100000}};
    const uint64_t checksums[25] = {0};
    _Alignas(8) uint8_t manifest[4096] = {0};
    const struct pcc_manifest_header *header = (const void *)manifest;
    struct pcc_manifest_notes bad;

    entry.flags = PCC_SLOT_IMAGE;
    entry.incarnation = 5;
    memset(entry.start_id, 0xa5, sizeof entry.start_id);
    pcc_manifest_seal(manifest, &record, 1, &good, checksums, &entry);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 1, &entry, NULL), 0);
    CHECK(memcmp(&header->notes, &good, sizeof good) == 0);
    CHECK(memcmp(header->start_id, entry.start_id, sizeof entry.start_id) == 0);
    CHECK_EQUAL(header->kind, 1);
    CHECK_EQUAL(header->incarnation, 5);
#define BAD(change)                                                                                \
    bad = good;                                                                                    \
    bad.change;                                                                                    \
    CHECK(!pcc_notes_are_sound(&bad, entry.payload_bytes))
    BAD(statistics.bytes = 1001);
    BAD(statistics.bytes = UINT64_MAX);
    BAD(statistics.offset_bytes = 100001);
    BAD(statistics.bytes = 0);
    BAD(dtypes.offset_bytes = 1);
    BAD(dtypes.offset_bytes = UINT64_MAX);
#undef BAD
    bad = good;
    bad.base_volume[3] = 1; /* of a checkpoint without a base elsewhere */
    pcc_manifest_seal(manifest, &record, 1, &bad, checksums, &entry);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 1, &entry, NULL), -PCC_E_DAMAGED);
    entry.flags |= PCC_SLOT_FOREIGN;
    entry.base_sequence = 77;
    pcc_manifest_seal(manifest, &record, 1, &bad, checksums, &entry);
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 1, &entry, NULL), -PCC_E_FOREIGN_BASE);
    pcc_manifest_seal(manifest, &record, 1, &good, checksums, &entry); /* which volume? */
    CHECK_EQUAL(pcc_manifest_accept(manifest, &record, 1, &entry, NULL), -PCC_E_DAMAGED);
}

static uint64_t random_of(uint64_t *state) /* splitmix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/* Whatever the CRC vouches for: no check reads or computes out of bounds, and what is accepted can
 * be used. */
static void test_any_sealed_record_is_accepted_or_refused(void)
{
    const struct pcc_record good = sample_with_base();
    uint64_t state = 33, accepted = 0;

    for (uint32_t round = 0; round < 100000; round++) {
        struct pcc_record record = good;
        for (uint64_t count = random_of(&state) % 3 + 1; count > 0; count--) {
            /* Most of the record is zero: half of the changes go to what is not. */
            const uint64_t at = random_of(&state) % 2 == 0 ? random_of(&state) % 4092
                                                           : random_of(&state) % (504 + 4 * 112);
            ((uint8_t *)&record)[at] ^= (uint8_t)(1u << random_of(&state) % 8);
        }
        const int result = accept_sealed(record);
        CHECK(result <= 0);
        if (result != 0)
            continue;
        accepted++;
        const struct pcc_geometry geometry = pcc_record_geometry(&record);
        const uint32_t bases = pcc_record_bases(&record, UINT32_MAX);
        CHECK(geometry.slot_count <= PCC_SLOTS_MAX && bases >> geometry.slot_count == 0);
        for (uint32_t slot = 0; slot < geometry.slot_count; slot++) {
            const struct pcc_slot_entry *entry = &record.slots[slot];
            CHECK(pcc_geometry_slot_offset(&geometry, slot) +
                      pcc_align_up(entry->payload_bytes, PCC_IO_ALIGN) + entry->manifest_bytes <=
                  geometry.volume_bytes);
            CHECK((entry->flags & PCC_SLOT_MUST) < 128);
        }
    }
    CHECK(accepted > 1000);
}

int main(void)
{
    RUN(test_flags_that_must_be_understood);
    RUN(test_the_notes_of_a_manifest);
    RUN(test_the_document_agrees_with_the_structs);
    RUN(test_vectors);
    RUN(test_geometry);
    RUN(test_every_flipped_bit_of_a_record_is_found);
    RUN(test_bounds_are_checked_behind_the_crc);
    RUN(test_every_flipped_bit_of_a_manifest_is_found);
    RUN(test_a_base_is_in_the_same_table);
    RUN(test_a_bitmap_names_blocks_that_the_base_has);
    RUN(test_any_sealed_record_is_accepted_or_refused);
    return 0;
}
