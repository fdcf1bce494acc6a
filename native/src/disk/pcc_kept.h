/* The state memfd: what a daemon that was killed leaves to the next one about a volume's saves in
 * flight. One for each volume that a tenant is bound to, made by the daemon, kept in the service
 * manager's descriptor store (pcc_store.h), and never sent to a client: clients can write to the
 * segments, so trust rests here.
 *
 *   struct pcc_kept_header, to 4096
 *   one place per place of a lane and per parking place, each: struct pcc_kept_save, struct
 * pcc_kept_piece [pieces], to 4096; then the manifest as the saver collects it (header, block
 * checksums)
 *
 * It is only ever read after the writer's death, which may come between any two instructions.
 * Memory outlives the process as its stores left it, in order (all stores here are releases), so:
 *
 *   begin    commit = 0, pieces cleared, then the entry        commit 0: the place holds nothing
 *   entry    once more before `copied`, when a save gets its number or its length after begin; the
 *            bitmap of an open save is moved first
 *   chunk    checksums, flags, chunk number, then segment      segment 0: not in DRAM
 *   hashed   checksums, then PCC_KEPT_HASHED                   without it: no checksum yet; such a
 *            chunk was pulled by the daemon, its writer had not got to it, and it is hashed again
 *   written  the bits of its blocks in the manifest's bitmap (only with base_sequence), then
 *            PCC_KEPT_WRITTEN, after the write was completed   it lies in `slot`, too; blocks whose
 *            bit is set lie in the base's slot instead
 *   referred the bits of all its blocks, then PCC_KEPT_REFERRED all of it lies in the base's slot,
 *            whatever `slot` is; it never was in DRAM
 *   re-used  segment = 0, before the memory may be written     it lies in `slot` only
 *   parked   it begins without a slot, and all of it is in DRAM
 *   moved    (also when a parked one is written) every PCC_KEPT_WRITTEN cleared, then slot, then
 * base_sequence (all pieces are in DRAM or referred then) copied   commit = sequence, after every
 * chunk was handed over and after the word of the snapshot left COPYING, before it says COPIED (P1,
 * P4) end      commit = 0: durable, superseded, dropped or failed durable and killed before this:
 * the volume's table says so
 *
 * What was copied in part has commit 0 and is dropped. What lies in a slot only is believed for its
 * checksums' sake: others may have had the volume, and the slot, in between. */
#pragma once

#include "disk/pcc_format.h"

#define PCC_KEPT_MAGIC 0x315450454b434350ull /* "PCCKEPT1" */
#define PCC_KEPT_VERSION 7u
#define PCC_KEPT_HASHED 1u
#define PCC_KEPT_WRITTEN 2u
#define PCC_KEPT_REFERRED 4u
#define PCC_KEPT_NO_SLOT UINT32_MAX /* it is parked */

struct pcc_kept_header {
    uint64_t magic;
    uint32_t version;
    uint32_t places;
    uint32_t chunk_bytes;
    uint32_t block_bytes;
    uint64_t slot_stride_bytes; /* the largest payload with its manifest */
    uint8_t volume_uuid[PCC_UUID_BYTES];
    uint32_t uid;
    uint32_t rank;
    uint32_t job_bytes;
    uint32_t reserved;
    char job[PCC_JOB_BYTES_MAX];
    uint64_t total_bytes;
};

struct pcc_kept_save {
    _Atomic uint64_t commit;
    _Atomic uint64_t base_sequence; /* of the checkpoint that it may refer to; 0: none */
    _Atomic uint32_t slot;
    uint32_t reserved;
    struct pcc_slot_entry entry; /* without base, manifest and time, which come with the end */
    struct pcc_manifest_notes notes;
};
_Static_assert(sizeof(struct pcc_kept_save) == 208, "kept save");

struct pcc_kept_piece {
    _Atomic uint64_t segment; /* its id in the pool; 0 = not in DRAM */
    uint32_t chunk;           /* within the segment */
    _Atomic uint32_t flags;
};
_Static_assert(sizeof(struct pcc_kept_piece) == 16, "kept piece");

struct pcc_kept { /* a mapping of one */
    uint8_t *bytes;
    uint64_t length_bytes;
    uint32_t piece_capacity;
    uint64_t manifest_at; /* within a place */
    uint64_t place_bytes;
};

struct pcc_kept_shape {
    uint32_t places;
    uint32_t chunk_bytes;
    uint32_t block_bytes;
    uint64_t slot_stride_bytes;
};

/* 0 for impossible numbers. */
uint64_t pcc_kept_bytes(const struct pcc_kept_shape *shape);
/* A fresh mapping of zeros, of pcc_kept_bytes(). `volume` is the volume's newest record. */
void pcc_kept_make(struct pcc_kept *kept, void *bytes, const struct pcc_kept_shape *shape,
                   const struct pcc_record *volume);
/* A mapping that was found. -PCC_E_NEWER_FORMAT (another version), -PCC_E_DAMAGED (not a state
 * memfd, or damaged). */
PCC_MUST_CHECK int pcc_kept_accept(struct pcc_kept *kept, void *bytes, uint64_t length_bytes);

static inline struct pcc_kept_header *pcc_kept_header(const struct pcc_kept *kept)
{
    return (struct pcc_kept_header *)(void *)kept->bytes;
}

struct pcc_kept_save *pcc_kept_save(const struct pcc_kept *kept, uint32_t place);
struct pcc_kept_piece *pcc_kept_piece(const struct pcc_kept *kept, uint32_t place,
                                      uint32_t position);
uint8_t *pcc_kept_manifest(const struct pcc_kept *kept, uint32_t place);
/* True when the place holds a copied save, and its numbers are possible. */
bool pcc_kept_is_copied(const struct pcc_kept *kept, uint32_t place);

/* -- the writer; accept kept = NULL, and then do nothing -- */
void pcc_kept_begin(const struct pcc_kept *kept, uint32_t place, const struct pcc_slot_entry *entry,
                    const struct pcc_manifest_notes *notes, uint32_t slot, uint32_t piece_count,
                    uint64_t base_sequence);
/* When its number or its length is known; before `copied`. */
void pcc_kept_entry(const struct pcc_kept *kept, uint32_t place, const struct pcc_slot_entry *entry,
                    const struct pcc_manifest_notes *notes);
void pcc_kept_base(const struct pcc_kept *kept, uint32_t place, uint64_t base_sequence);
void pcc_kept_chunk(const struct pcc_kept *kept, uint32_t place, uint32_t position,
                    uint64_t segment, uint32_t chunk, bool hashed);
void pcc_kept_hashed(const struct pcc_kept *kept, uint32_t place, uint32_t position);
void pcc_kept_written(const struct pcc_kept *kept, uint32_t place, uint32_t position);
/* After its checksums were put into the manifest; or no longer, after it was written. */
void pcc_kept_referred(const struct pcc_kept *kept, uint32_t place, uint32_t position,
                       bool referred);
void pcc_kept_reused(const struct pcc_kept *kept, uint32_t place, uint32_t position);
void pcc_kept_moved(const struct pcc_kept *kept, uint32_t place, uint32_t slot,
                    uint32_t piece_count);
void pcc_kept_copied(const struct pcc_kept *kept, uint32_t place);
void pcc_kept_end(const struct pcc_kept *kept, uint32_t place);

#ifdef PCC_KEPT_WATCHED /* tests look at the memory after every store */
void pcc_kept_stored(void);
#endif
