/* Saves: checkpoints on their way from chunks to a durable slot, N of them at once.
 *
 * A saver belongs to one volume and has N lanes; a save occupies one lane from begin to its end,
 * and p writer threads serve each lane. A *parked* save has a parking place instead, and no slot:
 * what was copied stays in its chunks, until it is written (it then is like any other) or dropped.
 * The order that durability rests on is in pcc_save_work.c alone: chunks and manifest written,
 * every completion checked; flush; publish; free. With writers_per_lane = 0 there are no threads
 * and the caller steps the work itself (pcc_saver_step): this is how crashes and faults are
 * enumerated, deterministically. */
#pragma once

#include "disk/pcc_kept.h"
#include "disk/pcc_volume.h"

struct pcc_saver;
struct pcc_save;

enum pcc_save_end {
    PCC_SAVE_DURABLE,
    PCC_SAVE_SUPERSEDED,
    PCC_SAVE_GIVEN_UP, /* by the group: another rank will never have it */
    PCC_SAVE_FAILED
};

struct pcc_save_times { /* CLOCK_MONOTONIC ns; 0 = never reached */
    uint64_t begin, first_write, sealed, written, flushed, durable;
    uint64_t ended; /* its lane is free */
};

struct pcc_save_result {
    enum pcc_save_end end;
    int error; /* 0, or why it failed (negative code) */
    enum pcc_stage stage;
    uint64_t tag;
    uint64_t sequence;
    uint64_t newer; /* of SUPERSEDED: what is durable instead (pcc_volume_superseding) */
    uint32_t slot;
    uint32_t rehomed;       /* times it was moved to another slot */
    uint64_t copied_bytes;  /* of the payload, that were handed over in chunks */
    uint64_t written_bytes; /* to the volume, with the manifest; what lies in a base is not */
    struct pcc_save_times times;
};

struct pcc_chunk { /* what a lane is handed: one piece of the payload, in the pool */
    /* PCC_IO_ALIGN aligned, readable to length rounded up to it. NULL: the piece is only offered,
     * by its checksums; events->offered says whether all of it lies in the save's base. */
    const void *bytes;
    uint64_t payload_offset_bytes; /* multiple of the chunk size */
    uint32_t length_bytes;         /* the chunk size, except for the last one of a payload */
    uint32_t index;                /* the owner's name for it */
    uint64_t segment;              /* the next daemon's name for it (pcc_kept.h); 0 = none */
    uint32_t segment_chunk;
    /* One per block, copied during the call; NULL: the writer makes them before it writes. What is
     * offered has them. */
    const uint64_t *checksums;
};

struct pcc_save_events { /* called from writer threads without locks held; must not block */
    void (*writing)(void *owner, uint64_t tag);
    /* The chunk is on the disk (not flushed): cached from now on. Owner may take it back with
     * pcc_save_uncache(). */
    void (*chunk_written)(void *owner, uint64_t tag, uint32_t index);
    /* A piece was offered: it lies in the base and counts as written, or it counts as never handed
     * over, and has to be, with its bytes. Not called for an adopted save. */
    void (*offered)(void *owner, uint64_t tag, uint64_t payload_offset_bytes, bool in_base);
    /* The lane and the save are gone when this returns. */
    void (*ended)(void *owner, const struct pcc_save_result *result);
    /* After `ended`: a lane, and mostly a slot, can be taken. NULL: nobody waits for them. */
    void (*freed)(void *owner);
};

struct pcc_saver_spec {
    uint32_t lanes;            /* N */
    uint32_t writers_per_lane; /* p */
    uint32_t chunk_bytes;      /* b; multiple of the volume's block size and of PCC_IO_ALIGN */
    const struct pcc_save_events *events;
    void *owner;
    const struct pcc_kept *kept; /* borrowed; NULL: nothing outlives us */
};

/* All memory is taken here: per lane the manifest, the checksums and the list of chunks of the
 * largest payload that a slot holds. Borrows volume. */
PCC_MUST_CHECK int pcc_saver_open(struct pcc_volume *volume, const struct pcc_saver_spec *spec,
                                  struct pcc_saver **out);
/* Waits for the saves in flight that are sealed; aborts the others. Joins its threads. What is
 * parked and sealed is left to the next daemon. */
void pcc_saver_close(struct pcc_saver *saver);

struct pcc_number { /* what a save of one of several ranks gets with its sequence */
    uint64_t sequence;
    uint64_t incarnation;
    uint32_t world_size;
    uint32_t marks; /* PCC_SLOT_MARKS, in the record that makes it durable */
    uint64_t name_base;
    uint64_t name_descents;
    uint64_t name_row;
};

struct pcc_save_request {
    uint64_t tag;      /* the owner's name for it */
    uint64_t sequence; /* above all that the volume has given out; 0: the volume's next one */
    bool unnumbered;   /* sequence, incarnation and world size come with pcc_save_number */
    int64_t step;
    uint64_t incarnation;
    uint32_t world_size;
    uint32_t flags; /* PCC_SLOT_IMAGE, PCC_SLOT_MARKS */
    bool parked;    /* takes neither lane nor slot, and no base */
    /* The length is not known yet: payload_bytes is its bound, for which slot and manifest have
     * room, and pcc_save_set_length() follows before the seal. */
    bool is_open;
    uint64_t payload_bytes;
    uint64_t tree_offset_bytes;
    uint64_t tree_bytes;
    struct pcc_manifest_notes notes;
    /* The length of a prefix of the payload that most probably has not changed since the checkpoint
     * before: worth a base, which takes a slot for as long as it is referred to. 0: written whole.
     */
    uint64_t frozen_bytes;
    uint64_t offered_bytes; /* for the owner: a prefix that is offered, if there is a base */
};

/* The next one begins while the end of the last is being reported. */
#define PCC_SAVES_PER_LANE 2u
/* In a group one is on every rank, one on some of them, and one is being copied. */
#define PCC_SAVES_PARKED 3u

static inline uint32_t pcc_kept_places(uint32_t lanes)
{
    return lanes * PCC_SAVES_PER_LANE + PCC_SAVES_PARKED;
}

static inline struct pcc_kept_shape pcc_kept_shape_of(const struct pcc_geometry *geometry,
                                                      uint32_t lanes, uint32_t chunk_bytes)
{
    return (struct pcc_kept_shape){.places = pcc_kept_places(lanes),
                                   .chunk_bytes = chunk_bytes,
                                   .block_bytes = geometry->block_bytes,
                                   .slot_stride_bytes = geometry->slot_stride_bytes};
}

/* Continues the copied save that the saver's state memfd holds in `place`, before any other save
 * begins: takes a lane, its slot if it is free, and its sequence. One without a slot is parked.
 * Every chunk is to be handed over again, or found where it was written (pcc_save_found), and then
 * it is to be sealed. It becomes durable with PCC_SLOT_PROTECTED, which is its owner's to take
 * away. `tag` is the owner's. -ENOENT (no copied save there), -EALREADY (it or a newer one is
 * durable), -ENODATA (a part of it is neither in DRAM nor in its slot), codes of pcc_save_begin. */
PCC_MUST_CHECK int pcc_save_adopt(struct pcc_saver *saver, uint32_t place, uint64_t tag,
                                  struct pcc_save **out);
/* The piece at `position` was re-used after it had been written: reads it back into `bytes` (a
 * chunk, aligned) and checks it. -PCC_E_DAMAGED, -PCC_E_ABORTED (save `tag` has ended). */
PCC_MUST_CHECK int pcc_save_found(struct pcc_save *save, uint64_t tag, uint32_t position,
                                  void *bytes);
/* True when all of the piece lay in the base: it is to be offered again. If it is not in the base
 * any more, the save fails. */
bool pcc_save_was_referred(const struct pcc_save *save, uint32_t position);
/* Its checksums as kept; NULL when it had none. */
const uint64_t *pcc_save_kept_checksums(const struct pcc_save *save, uint32_t position);
/* Whether memory holds what the checksums say, if there are any. */
bool pcc_save_matches(const struct pcc_save *save, uint32_t position, const void *bytes,
                      uint32_t length_bytes);

/* Takes a lane, a slot and a sequence (0 if it is unnumbered); if parked, a parking place and a
 * sequence. -PCC_E_NO_LANE (no such place), -PCC_E_NO_SLOT, -PCC_E_TOO_LARGE, -PCC_E_STOPPED,
 * -EINVAL (also for a sequence that is too low). */
PCC_MUST_CHECK int pcc_save_begin(struct pcc_saver *saver, const struct pcc_save_request *request,
                                  struct pcc_save **out, uint64_t *sequence_out);
/* Numbers a save that began without a number, once, and before the seal. -EINVAL when the sequence
 * is too low, or the save has a number; -PCC_E_ABORTED when the save has ended. */
PCC_MUST_CHECK int pcc_save_number(struct pcc_save *save, const struct pcc_number *number);
/* The sequence of the base, which is kept until the save ends; 0: there is none. */
uint64_t pcc_save_base(const struct pcc_save *save);
/* Hands one chunk over, in any order; it is written at once. The owner keeps the memory unchanged
 * until chunk_written. Of an open save any one may be the short last one. -EINVAL when it does not
 * fit the payload or came before; also when it is offered to a save without a base, or for the
 * second time. */
PCC_MUST_CHECK int pcc_save_chunk(struct pcc_save *save, const struct pcc_chunk *chunk);
struct pcc_save_length {
    uint64_t payload_bytes; /* at most the bound */
    uint64_t tree_offset_bytes;
    uint64_t tree_bytes;
    struct pcc_section statistics;
    struct pcc_section dtypes;
};
/* The length of an open save, before its seal. The chunks that were handed over must be whole, but
 * for the one that ends the payload. -EINVAL when they do not fit, the save is not open or numbers
 * are impossible; -PCC_E_ABORTED. */
PCC_MUST_CHECK int pcc_save_set_length(struct pcc_save *save, const struct pcc_save_length *length);
/* The copy is complete (every chunk was handed over, length and number are known): from here it is
 * `copied`. -EINVAL if not. */
PCC_MUST_CHECK int pcc_save_seal(struct pcc_save *save);
/* Whether it is parked: true until it is written, and fixed for `save`. */
bool pcc_save_is_parked(const struct pcc_save *save);
/* A parked save that is sealed takes a lane and a slot, and is written. From now on it is *out,
 * with the same tag; `parked` is gone. -EBUSY (it is not sealed); -PCC_E_NO_LANE, -PCC_E_NO_SLOT
 * and -PCC_E_STOPPED as for begin; nothing changes then. */
PCC_MUST_CHECK int pcc_save_write(struct pcc_save *parked, struct pcc_save **out);
/* A parked save that is sealed is forgotten, and its place free; `ended` is not called. False when
 * it is not sealed. Its owner frees its chunks afterwards. */
bool pcc_save_drop(struct pcc_save *parked);
/* Gives up before the seal; ends FAILED with `error` at stage "copy" once its writes are done. */
void pcc_save_abort(struct pcc_save *save, int error);
/* The owner re-uses the memory of a written chunk, the one at `position` in the payload of save
 * `tag`: from now on the save cannot move to another slot. False when the save is being re-homed
 * and still needs the chunk. True for ended saves. */
bool pcc_save_uncache(struct pcc_saver *saver, uint64_t tag, uint32_t position);

/* Only with writers_per_lane = 0: does one unit of work of one lane; -EAGAIN when it has none. */
PCC_MUST_CHECK int pcc_saver_step(struct pcc_saver *saver, uint32_t lane);
