/* A volume: the storage of one (uid, job, rank); its slot table, its free slots and its publisher.
 *
 * Two tables: `durable` is what the newest record on the media says; `staged` is what the next one
 * will say. A slot leaves the free ones when a checkpoint takes it and comes back when the newest
 * record, both replicas durable, does not mention it. Policy flags are staged at once and reach the
 * media with the next record.
 *
 * Any thread. publish() is serialised inside; slots are taken and returned at any time. */
#pragma once

#include "disk/pcc_format.h"
#include "io/pcc_io.h"

struct pcc_volume;

struct pcc_volume_spec { /* what a new volume is made from */
    uint64_t payload_capacity_bytes;
    uint64_t record_stride_bytes;
    uint32_t slot_count;
    uint32_t keep;
    uint32_t block_bytes;
    uint32_t uid;
    uint32_t rank;
    uint32_t world_size;
    const char *job;
    uint64_t next_sequence; /* a grown volume continues the numbers of the old one */
    uint64_t incarnation;
    uint8_t start_id[PCC_UUID_BYTES];
};

/* Writes the first records (number 1, empty table) through io, durably. io spans the volume. */
PCC_MUST_CHECK int pcc_volume_format(struct pcc_io *io, const struct pcc_volume_spec *spec);

/* Temporary name, all room taken, formatted, made durable, renamed to path, directory synced.
 * Never replaces an existing file (-EEXIST). */
PCC_MUST_CHECK int pcc_volume_create(const char *path, const struct pcc_volume_spec *spec,
                                     bool allow_buffered);

struct pcc_volume_health {   /* of the records, as found at open */
    uint32_t valid_replicas; /* of the newest record */
    uint32_t repaired_replicas;
    uint32_t damaged_records; /* present but not acceptable */
};

/* Reads the records (highest valid number wins, never promotes what was not published), checks the
 * size. Writable: bumps the boot epoch in a fresh record, which also repairs bad replicas.
 * Takes io on success and on failure. */
PCC_MUST_CHECK int pcc_volume_open_io(struct pcc_io *io, bool writable, struct pcc_volume **out);
/* open + flock (writable) + fsync before anything read is trusted: a descriptor for pcc_io_open,
 * whose engine is for pcc_volume_open_io. */
PCC_MUST_CHECK int pcc_volume_open_file(const char *path, bool writable, int *fd_out);
/* All three. From now on no record is published, and no checkpoint is reported durable, while
 * the file is not in its place. */
PCC_MUST_CHECK int pcc_volume_open_at(const char *path, bool writable,
                                      const struct pcc_io_options *options,
                                      struct pcc_volume **out);
/* The same for a file that is open (takes fd, always): who may not open files got it from who may.
 */
PCC_MUST_CHECK int pcc_volume_open_fd(int fd, const char *path, bool writable,
                                      const struct pcc_io_options *options,
                                      struct pcc_volume **out);
void pcc_volume_close(struct pcc_volume *volume); /* takes; accepts NULL */

/* Snapshots under the lock. */
void pcc_volume_record(struct pcc_volume *volume, struct pcc_record *durable_out);
struct pcc_volume_health pcc_volume_health(struct pcc_volume *volume);
struct pcc_geometry pcc_volume_geometry(const struct pcc_volume *volume);
struct pcc_io *pcc_volume_io(struct pcc_volume *volume); /* borrows */
uint32_t pcc_volume_free_slots(struct pcc_volume *volume);
bool pcc_volume_stopped(struct pcc_volume *volume); /* a record write failed */
/* Codes of pcc_named_file_check(): whether the file that this volume was opened from is still the
 * one at its path, and whole. */
PCC_MUST_CHECK int pcc_volume_in_place(const struct pcc_volume *volume);

/* Set or clear policy flags of the durable checkpoint `sequence`; -ENOENT. Staged; with `now`
 * a record is published at once (damage found, quarantine). */
PCC_MUST_CHECK int pcc_volume_flag(struct pcc_volume *volume, uint64_t sequence, uint32_t set,
                                   uint32_t clear, bool now);
/* The durable checkpoint `sequence`, with its base, is not recycled from now on, or may be again.
 * Lasts until the volume is closed and leaves nothing on the media; waits for no disk. -ENOENT. */
PCC_MUST_CHECK int pcc_volume_spare(struct pcc_volume *volume, uint64_t sequence, bool spared);
/* Identity that moves with time. Published at once. */
PCC_MUST_CHECK int pcc_volume_begin_incarnation(struct pcc_volume *volume, uint64_t incarnation,
                                                const uint8_t start_id[PCC_UUID_BYTES],
                                                uint32_t world_size);
/* The id of the newest start or of the one before it, whichever has this number; else zero: not
 * known. */
void pcc_volume_start_id(struct pcc_volume *volume, uint64_t incarnation,
                         uint8_t out[PCC_UUID_BYTES]);
/* What this node promised to a start among several nodes. Published at once. -EINVAL unless it is
 * above the promise before: its number is, or the number is equal and the start's id is above. */
PCC_MUST_CHECK int pcc_volume_promise(struct pcc_volume *volume, const struct pcc_promise *promise);
/* close(done=True): keep only the newest `keep` checkpoints, say done. Published at once. */
PCC_MUST_CHECK int pcc_volume_finish(struct pcc_volume *volume, uint32_t keep);
/* Drops what `keep` and the flags no longer hold, as a publish does: without a free slot there is
 * no next publish. Published at once if something is dropped. */
PCC_MUST_CHECK int pcc_volume_recycle(struct pcc_volume *volume);

/* -- one of several ranks -- */
#define PCC_GIVEN_UP_MAX 128u
/* What a group of ranks has agreed on, in sequences, which are the same on every rank of the group.
 * A common checkpoint is durable on all ranks. */
struct pcc_volume_group {
    uint64_t oldest; /* common, and kept: no checkpoint at or above it is recycled; 0: none is */
    uint64_t newest; /* common: a checkpoint below it that is not durable yet is superseded */
    uint32_t given_up_count;
    uint64_t given_up[PCC_GIVEN_UP_MAX]; /* another rank will never have these: recycled first */
};
/* The publisher obeys it from the next record on; a save that is given up ends before its record.
 * Waits for no disk. Until the first call nothing is recycled of a volume with world_size > 1, or
 * which holds a checkpoint of such a start; for other volumes `group` counts for nothing. -EINVAL:
 * oldest is above newest. */
PCC_MUST_CHECK int pcc_volume_set_group(struct pcc_volume *volume,
                                        const struct pcc_volume_group *group);
/* Whether a slot may be recycled now. */
bool pcc_volume_has_expendable(struct pcc_volume *volume);
/* Whether no slot becomes free by itself: each is in quarantine, or holds a checkpoint that is
 * durable and stays. */
bool pcc_volume_is_full(struct pcc_volume *volume);

/* -- used by pcc_save -- */
/* What is below this sequence and not durable yet is superseded: the newest undamaged durable one
 * of a lone rank, the newest common one of a group; 0 when there is none. */
uint64_t pcc_volume_superseding(struct pcc_volume *volume);
bool pcc_volume_gives_up(struct pcc_volume *volume, uint64_t sequence);
/* Writes a record of what is staged (quarantine, flags). */
PCC_MUST_CHECK int pcc_volume_publish_staged(struct pcc_volume *volume);
/* Takes `wanted`, or the next one for 0; 0 when `wanted` is not above all that were taken. */
uint64_t pcc_volume_take_sequence(struct pcc_volume *volume, uint64_t wanted);
/* Slots in quarantine come last: when every other one holds what has to be kept. -PCC_E_NO_SLOT or
 * -PCC_E_STOPPED. */
PCC_MUST_CHECK int pcc_volume_take_slot(struct pcc_volume *volume, uint32_t *slot_out);
/* The same for the slot that a save of a killed daemon had; false when it is not free. */
bool pcc_volume_take_slot_again(struct pcc_volume *volume, uint32_t slot);
/* Both for the slot of a save that was not published. */
void pcc_volume_return_slot(struct pcc_volume *volume, uint32_t slot);
void pcc_volume_quarantine_slot(struct pcc_volume *volume, uint32_t slot);
enum pcc_published {
    PCC_PUBLISHED = 0,
    PCC_PUBLISH_SUPERSEDED, /* these two: nothing was written, and the slot is free again */
    PCC_PUBLISH_GIVEN_UP,   /* by the group */
    PCC_PUBLISH_BASE_LOST,  /* the base is damaged: nothing was written; the slot stays taken */
};
/* The publisher: newest wins. The data and the manifest in the slot of `entry` must be flushed. On
 * 0 *out says what came of it; when published, the record is durable in both replicas, and slots
 * that it has dropped are free. An error stops the volume, and the slot stays taken, since the
 * media may name it. One exception: an error of pcc_volume_in_place() before anything is written
 * stops nothing, and the slot is free again. `on_durable` (may be NULL) is called between replica A
 * and B. */
PCC_MUST_CHECK int pcc_volume_publish(struct pcc_volume *volume, uint32_t slot,
                                      const struct pcc_slot_entry *entry, enum pcc_published *out,
                                      void (*on_durable)(void *context), void *context);

/* -- bases: where the unchanged blocks of another checkpoint lie -- */
struct pcc_base { /* a durable checkpoint that refers to none itself */
    uint32_t slot;
    struct pcc_slot_entry entry;
};
/* For a save that begins: the base of the newest checkpoint, or that one itself; it stays in the
 * table until it is left. False when there is none, or to keep it could leave a later checkpoint
 * without a slot. */
bool pcc_volume_take_base(struct pcc_volume *volume, struct pcc_base *out);
/* The base with this sequence, for a save of an earlier daemon; false when it cannot be used any
 * more. */
bool pcc_volume_take_base_again(struct pcc_volume *volume, uint64_t sequence, struct pcc_base *out);
void pcc_volume_leave_base(struct pcc_volume *volume, const struct pcc_base *base);
/* A save found `referred_bytes` in it of `frozen_bytes`. No later save begins with it when that is
 * less than half, or when such saves have written as much again as a new base would cost. Forgotten
 * when the volume is closed. */
void pcc_volume_judge_base(struct pcc_volume *volume, const struct pcc_base *base,
                           uint64_t frozen_bytes, uint64_t referred_bytes);

/* Readers hold the slots of a checkpoint and of its base, so that neither is recycled under them.
 * -ENOENT. */
struct pcc_held {
    uint32_t slot;
    struct pcc_slot_entry entry;
    struct pcc_base base; /* counts when pcc_entry_has_base() */
};
PCC_MUST_CHECK int pcc_volume_hold(struct pcc_volume *volume, uint64_t sequence,
                                   struct pcc_held *out);
void pcc_volume_release(struct pcc_volume *volume, const struct pcc_held *held);
