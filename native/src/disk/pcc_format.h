/* The volume format: what lies where in a volume file. native/FORMAT.md is its prose.
 *
 *   0             record_stride   2*record_stride                       volume_bytes
 *   | record 0 A | record 1 A | slot 0 | slot 1 | ... | slot S-1 | record 0 B | record 1 B |
 *
 * Records: 2 generations (record number mod 2) x 2 replicas (A at the head, B at the tail).
 * Slot: payload at its start, the manifest at the next PCC_IO_ALIGN boundary behind the payload.
 * Pure functions, any thread; nothing here does I/O. */
#pragma once

#include "base/pcc_hash.h"

#define PCC_FORMAT_VERSION 3u /* the only one: 1 and 2 were never released */
#define PCC_RECORD_BYTES 4096u
#define PCC_SLOTS_MAX 32u
#define PCC_GENERATIONS 2u
#define PCC_REPLICAS 2u
#define PCC_JOB_BYTES_MAX 128u
#define PCC_UUID_BYTES 16u
#define PCC_DIGEST_BYTES 16u
#define PCC_BLOCK_BYTES_DEFAULT (1u << 20)
#define PCC_RECORD_STRIDE_DEFAULT (1u << 20)
#define PCC_RECORD_STRIDE_MIN 4096u
#define PCC_CHECKSUM_XXH3_64 1u

#define PCC_RECORD_MAGIC 0x3143455250434350ull   /* "PCCPREC1" in memory order */
#define PCC_MANIFEST_MAGIC 0x314e414d50434350ull /* "PCCPMAN1" */

enum pcc_slot_state_on_disk { /* stored as uint32_t */
                              PCC_SLOT_FREE = 0,
                              PCC_SLOT_DURABLE = 1,
};

/* Slot flags, stored as uint32_t. The lower half must be understood: a reader refuses a volume with
 * an unknown one. */
#define PCC_SLOT_IMAGE 1u       /* a process image; otherwise tensors */
#define PCC_SLOT_PROTECTED 2u   /* newest of an incarnation, and not restored yet (P7) */
#define PCC_SLOT_QUARANTINED 4u /* a write or flush failed here: used last */
#define PCC_SLOT_DAMAGED 8u     /* a reader found it damaged: recovery skips it */
#define PCC_SLOT_PINNED 16u     /* the user pinned it */
#define PCC_SLOT_FOREIGN 32u    /* its base lies in another volume */
#define PCC_SLOT_OFFERED 64u    /* other nodes may count on it */
#define PCC_SLOT_MUST 0xffffu
/* The upper half may be ignored, and is carried along. */
#define PCC_SLOT_HEALTHY (1u << 16)    /* the user or a check approved of it */
#define PCC_SLOT_NOT_FINITE (1u << 17) /* it has NaN or infinity in it */
#define PCC_SLOT_GLOBAL (1u << 18)     /* this node knows that all nodes had it */
#define PCC_SLOT_LASTING (PCC_SLOT_PROTECTED | PCC_SLOT_PINNED) /* either: not recycled */
#define PCC_SLOT_MARKS (PCC_SLOT_OFFERED | PCC_SLOT_HEALTHY | PCC_SLOT_NOT_FINITE | PCC_SLOT_GLOBAL)

struct pcc_slot_entry {
    uint32_t state;
    uint32_t flags;
    uint64_t sequence;
    int64_t step;
    uint64_t incarnation;
    uint64_t payload_bytes;
    uint32_t manifest_bytes;
    uint32_t world_size;
    uint8_t manifest_digest[PCC_DIGEST_BYTES]; /* XXH3-128 over the manifest */
    uint64_t tree_offset_bytes; /* within the payload; the client's description of its tensors */
    uint64_t tree_bytes;
    uint64_t wall_ns;       /* when it was published; for display */
    uint64_t base_sequence; /* the checkpoint in whose slot its unchanged blocks lie; 0: none */
    uint8_t start_id[PCC_UUID_BYTES]; /* of the start that saved it; zero: not known */
};
_Static_assert(sizeof(struct pcc_slot_entry) == 112, "slot entry");

/* What a node has promised to a start of its job, among several nodes. Zero: nothing. */
struct pcc_promise {
    uint64_t number; /* with start_id orders promises, which only rise */
    uint8_t start_id[PCC_UUID_BYTES];
    uint8_t list_digest[PCC_DIGEST_BYTES]; /* over the start's list: native/FORMAT.md */
};
_Static_assert(sizeof(struct pcc_promise) == 40, "promise");

struct pcc_record {
    uint64_t magic;
    uint32_t format_version;
    uint32_t record_bytes;
    uint8_t volume_uuid[PCC_UUID_BYTES];
    uint32_t generation;    /* own position: record_number % 2 ... */
    uint32_t replica;       /* ... 0 at the head, 1 at the tail ... */
    uint64_t offset_bytes;  /* ... and where that is */
    uint64_t record_number; /* grows by one with every published record */
    uint64_t previous_hash; /* XXH3-64 of the record before, replica A */
    uint64_t boot_epoch;    /* grows by one each time the volume is opened for writing */
    /* geometry, fixed for the life of the volume */
    uint64_t volume_bytes;
    uint64_t record_stride_bytes;
    uint64_t slot_stride_bytes;
    uint32_t slot_count;
    uint32_t block_bytes;
    uint32_t checksum_algorithm;
    uint32_t keep;
    /* identity */
    uint32_t uid;
    uint32_t rank;
    uint32_t world_size;
    uint32_t job_bytes;
    char job[PCC_JOB_BYTES_MAX];
    uint64_t created_wall_ns;
    uint64_t next_sequence;           /* no sequence at or above this one was ever published here */
    uint64_t incarnation;             /* the newest incarnation that opened this volume */
    uint32_t done;                    /* the job said close(done=True) */
    uint32_t record_lost;             /* since the newest checkpoint: see struct pcc_commit_found */
    uint8_t start_id[PCC_UUID_BYTES]; /* of `incarnation`; zero: not known */
    struct pcc_promise promise;
    uint8_t reserved[160];
    struct pcc_slot_entry slots[PCC_SLOTS_MAX];
    uint32_t reserved1;
    uint32_t crc32c; /* over all bytes before this field */
};
_Static_assert(sizeof(struct pcc_record) == PCC_RECORD_BYTES, "commit record");
_Static_assert(offsetof(struct pcc_record, crc32c) == PCC_RECORD_BYTES - 4, "crc is last");

struct pcc_section { /* of the payload */
    uint64_t offset_bytes;
    uint64_t bytes; /* 0: there is none, and the offset is 0 */
};

/* What a checkpoint's manifest says and its slot entry does not. */
struct pcc_manifest_notes {
    /* The checkpoint's name within its start: how often the start had restored, how often the step
     * had gone down since, and how often the step was repeated directly. */
    uint64_t name_base;
    uint64_t name_descents;
    uint64_t name_row;
    uint8_t base_volume[PCC_UUID_BYTES]; /* with PCC_SLOT_FOREIGN; otherwise zero: this one */
    struct pcc_section statistics;
    struct pcc_section dtypes; /* a table of data types by range */
};
_Static_assert(sizeof(struct pcc_manifest_notes) == 72, "manifest notes");

/* Followed by block_count uint64_t checksums. Binds the payload to one volume, slot and sequence.
 * With a base a bitmap of 64-bit words follows: bit i is set for each block that lies in the base's
 * slot. */
struct pcc_manifest_header {
    uint64_t magic;
    uint32_t format_version;
    uint32_t header_bytes;
    uint8_t volume_uuid[PCC_UUID_BYTES];
    uint32_t slot;
    uint32_t block_bytes;
    uint64_t sequence;
    int64_t step;
    uint64_t payload_bytes;
    uint64_t block_count;
    uint64_t tree_offset_bytes;
    uint64_t tree_bytes;
    uint32_t checksum_algorithm;
    uint32_t kind; /* 0 tensors, 1 a process image: PCC_SLOT_IMAGE of the entry */
    uint8_t start_id[PCC_UUID_BYTES];
    uint64_t incarnation;
    uint32_t world_size;
    uint32_t reserved0;
    uint64_t base_sequence;
    struct pcc_manifest_notes notes;
    uint8_t reserved[48];
};
_Static_assert(sizeof(struct pcc_manifest_header) == 256, "manifest header");

struct pcc_geometry {
    uint64_t volume_bytes;
    uint64_t record_stride_bytes;
    uint64_t slot_stride_bytes;
    uint32_t slot_count;
    uint32_t block_bytes;
};

/* The geometry of a volume whose slots hold payloads of up to payload_capacity_bytes (their
 * manifests come on top). -EINVAL when a number is out of range or the sum overflows. */
PCC_MUST_CHECK int pcc_geometry_plan(uint64_t payload_capacity_bytes, uint32_t slot_count,
                                     uint32_t block_bytes, uint64_t record_stride_bytes,
                                     struct pcc_geometry *out);
uint64_t pcc_geometry_record_offset(const struct pcc_geometry *geometry, uint32_t generation,
                                    uint32_t replica);
uint64_t pcc_geometry_slot_offset(const struct pcc_geometry *geometry, uint32_t slot);
/* True when payload and manifest fit into one slot. */
bool pcc_geometry_fits(const struct pcc_geometry *geometry, uint64_t payload_bytes, bool has_base);

uint64_t pcc_manifest_bytes(uint64_t payload_bytes, uint32_t block_bytes, bool has_base);
/* What is read and written at once lies in one slot: at least a direct-I/O unit. */
static inline uint32_t pcc_placing_bytes(uint32_t block_bytes)
{
    return block_bytes > PCC_IO_ALIGN ? block_bytes : PCC_IO_ALIGN;
}
/* In a manifest with a base: behind its checksums. */
uint64_t *pcc_manifest_bitmap(void *manifest, uint64_t payload_bytes, uint32_t block_bytes);
static inline bool pcc_bitmap_has(const uint64_t *bitmap, uint64_t block)
{
    return (bitmap[block / 64] >> block % 64 & 1u) != 0;
}
/* The blocks from `at_bytes` (a multiple of pcc_placing_bytes()) to the returned offset lie in one
 * slot: the base's or their own. `end_bytes` is the limit. */
uint64_t pcc_bitmap_run(const uint64_t *bitmap, uint32_t block_bytes, uint64_t at_bytes,
                        uint64_t end_bytes, bool *in_base_out);
/* The slot of a durable checkpoint; PCC_SLOTS_MAX when there is none. */
uint32_t pcc_record_find(const struct pcc_record *record, uint64_t sequence);
/* Whether it has a base in its own volume. */
static inline bool pcc_entry_has_base(const struct pcc_slot_entry *entry)
{
    return entry->base_sequence != 0 && (entry->flags & PCC_SLOT_FOREIGN) == 0;
}
/* Of each slot of `mask`, the slot of the checkpoint that it refers to. */
uint32_t pcc_record_bases(const struct pcc_record *record, uint32_t mask);

/* Fills in position and CRC. The only way a record becomes valid. */
void pcc_record_seal(struct pcc_record *record, uint32_t generation, uint32_t replica);
/* The same checks that the seal guarantees, plus every bound that later arithmetic relies on.
 * 0, -PCC_E_DAMAGED, -PCC_E_NOT_A_VOLUME (no magic), -PCC_E_OLDER_FORMAT, -PCC_E_NEWER_FORMAT or
 * -PCC_E_UNKNOWN_FLAG. offset_bytes is where it was read. */
PCC_MUST_CHECK int pcc_record_accept(const struct pcc_record *record, uint64_t offset_bytes);
struct pcc_geometry pcc_record_geometry(const struct pcc_record *record);

/* Whether all that the notes name lies in the payload, in the one form that is written. */
bool pcc_notes_are_sound(const struct pcc_manifest_notes *notes, uint64_t payload_bytes);
/* Writes header and checksums into `manifest` (room for pcc_manifest_bytes(), zero padded to
 * PCC_IO_ALIGN by the caller, who fills the bitmap) and the 128-bit digest into the entry. */
void pcc_manifest_seal(void *manifest, const struct pcc_record *volume, uint32_t slot,
                       const struct pcc_manifest_notes *notes, const uint64_t *block_checksums,
                       struct pcc_slot_entry *entry);
/* 0, -PCC_E_DAMAGED or -PCC_E_FOREIGN_BASE: digest, binding and every length are checked against
 * the entry, and the bitmap against the base (NULL without one). */
PCC_MUST_CHECK int pcc_manifest_accept(const void *manifest, const struct pcc_record *volume,
                                       uint32_t slot, const struct pcc_slot_entry *entry,
                                       const struct pcc_slot_entry *base);

/* The same for a manifest of `manifest_bytes` from another node, of which only the digest is known:
 * afterwards its lengths, its tree and its checksums may be used. 0 or -PCC_E_DAMAGED. */
PCC_MUST_CHECK int pcc_manifest_trust(const void *manifest, uint64_t manifest_bytes,
                                      const uint8_t digest[PCC_DIGEST_BYTES]);

/* The checksums of a payload's blocks (XXH3-64, unseeded), of which the last may be shorter. */
void pcc_checksums_make(const void *bytes, uint64_t length_bytes, uint32_t block_bytes,
                        uint64_t *out);
bool pcc_checksums_match(const void *bytes, uint64_t length_bytes, uint32_t block_bytes,
                         const uint64_t *expected);
