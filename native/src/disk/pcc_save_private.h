/* The inside of a saver, shared by pcc_saver.c (memory, threads, lanes), pcc_save.c (what
 * owners call), pcc_save_work.c (what is done with a save's bytes, in which order),
 * pcc_save_base.c (which of them lie in an earlier checkpoint) and pcc_save_adopt.c (saves of the
 * earlier daemon).
 *
 * A lane has p threads, one ring of work items and two places for saves: the lane takes the next
 * save while the end of the last one is still being reported. Behind the lanes comes one that
 * parks: its places hold parked saves, and its thread only ends those that are aborted.
 *
 * Work comes as items: write one chunk, or one step that happens alone (write the manifest, flush,
 * publish, move to another slot, end). `pending` counts the items that were queued and are not
 * finished; when it falls to zero the next step is chosen and queued, so that a step never runs
 * beside a write of the same save, and a save never ends while a write of it is under way.
 *
 * Locks, outermost first: the volume's publishing -> the lock of the lane that parks -> another
 * lane's lock -> the volume's lock. The saver's three locks stand alone. The lock of pcc_pace.h is
 * taken under any of them. Owners' callbacks run without any of them. */
#pragma once

#include "base/pcc_thread.h"
#include "disk/pcc_save.h"

#define PCC_SAVE_MOVES_MAX 2u

enum pcc_save_chunk_state {
    PCC_SAVE_CHUNK_ABSENT = 0, /* not handed over yet */
    PCC_SAVE_CHUNK_HELD,       /* handed over, neither queued nor on the disk: waits for a move */
    PCC_SAVE_CHUNK_QUEUED,     /* one item names it */
    PCC_SAVE_CHUNK_WRITING,
    PCC_SAVE_CHUNK_WRITTEN, /* in the present slot */
};

struct pcc_save_piece {
    const void *bytes;
    uint32_t length_bytes;
    uint32_t index; /* the owner's name */
    uint8_t state;
    bool offered;   /* without bytes */
    bool asked;     /* it was offered before, and has to come with its bytes */
    bool hashed;    /* its checksums are in the manifest */
    bool announced; /* chunk_written or offered was called */
    bool uncached;  /* the owner has re-used the memory */
};

enum pcc_save_step { /* what happens alone */
                     PCC_SAVE_STEP_NONE = 0,
                     PCC_SAVE_STEP_MANIFEST,
                     PCC_SAVE_STEP_FLUSH,
                     PCC_SAVE_STEP_PUBLISH,
                     PCC_SAVE_STEP_MOVE,
                     PCC_SAVE_STEP_END,
};

/* The checksums of a base's blocks; guarded by the saver's `knowing` but for what never changes. */
struct pcc_known {
    uint64_t sequence;
    uint32_t users; /* saves, and the saver, which keeps the last one */
    uint64_t payload_bytes;
    uint64_t checksums[];
};

struct pcc_lane;

struct pcc_save {
    struct pcc_lane *lane;
    uint32_t place;      /* which of its lane's */
    bool used;           /* guarded by the saver's lock; until `ended` has returned */
    uint32_t kept_place; /* of all of the saver's; pcc_saver_exchange() changes all three */
    uint8_t *manifest;   /* header, then the checksums where they are collected */
    struct pcc_save_piece *pieces; /* [piece_capacity], by position in the payload */

    /* Guarded by the lane's lock, like all that follows, and zero when the save begins. */
    bool active;                     /* from begin to the moment its end is decided */
    struct pcc_save_request request; /* once the length is known, as if it had not been open */
    uint32_t slot;
    bool has_slot;
    uint32_t piece_count;
    uint32_t handed_over;
    uint32_t written;
    uint32_t uncached;
    uint32_t offered; /* pieces without bytes: without the base they are nowhere */
    bool adopted;     /* no trainer can hand over what was offered */
    uint32_t pending;
    enum pcc_save_step last_step; /* the last step that succeeded in the present slot */
    bool sealed;
    bool superseded;
    bool given_up;      /* superseded is set, too */
    bool slot_failed;   /* a write or flush failed here: all of it goes to another slot */
    bool slot_bad;      /* and not because something was short: the slot is not used again */
    bool slot_doubtful; /* another save's flush failed: written again from the start */
    bool durable;       /* replica A names it: whatever follows, it is durable */
    bool quarantined;   /* this save took a slot out of use */
    int error;          /* 0 or why it failed or has to move */
    enum pcc_stage stage;
    bool failed; /* for good; ends when nothing is pending */
    uint32_t moves;
    uint64_t flush_failures; /* the saver's count when this slot's first byte was written */
    uint64_t copied_bytes;
    uint64_t written_bytes;
    /* Change only while no item is pending. Which blocks lie in the base: the bitmap in `manifest`,
     * also before the manifest is sealed. */
    bool has_base;
    bool base_lost; /* it is damaged: of use only for what was offered */
    struct pcc_base base;
    struct pcc_known *known; /* guarded by the saver's `knowing`; NULL: not read yet ... */
    bool unknown;            /* ... or not readable: all of the save is written */
    struct pcc_slot_entry entry;
    struct pcc_save_times times;
};

struct pcc_lane {
    struct pcc_saver *saver;
    bool parks;
    pthread_mutex_t lock;   /* of the work items and of the saves */
    pthread_cond_t changed; /* an item was added, or the lane closes */
    uint64_t *work; /* a ring of [work_capacity]; first in first out, but offers come first */
    uint64_t work_capacity; /* every piece and one step of each place */
    uint64_t work_first;
    uint64_t work_count;
    bool closing;
    uint32_t place_count;
    struct pcc_save saves[PCC_SAVES_PARKED]; /* [place_count] */
    /* Guarded by the saver's lock; NULL when the lane is free, as one that parks always is. */
    struct pcc_save *current;
    pthread_t *threads;
    uint32_t thread_count;
};

struct pcc_saver {
    struct pcc_volume *volume;
    struct pcc_geometry geometry;
    struct pcc_saver_spec spec;
    uint64_t manifest_capacity_bytes;
    uint32_t piece_capacity;
    struct pcc_record identity; /* uuid and geometry, for manifests */

    pthread_mutex_t lock;
    pthread_cond_t ended; /* a place became free, or `freed` has returned */
    bool closing;
    uint32_t telling; /* calls of `freed` that have not returned */

    pthread_mutex_t knowing; /* held over the read of a base's manifest */
    struct pcc_known *known; /* of the last base; NULL: none */

    pthread_mutex_t flushing; /* one flush at a time: a failure is counted before the next begins */
    _Atomic uint64_t flush_failures;

    struct pcc_lane *lanes; /* N, and then the one that parks */
};

/* Where the checksums of a piece's blocks are collected; no two pieces share a word. */
static inline uint64_t *pcc_save_checksums(const struct pcc_save *save, uint32_t position)
{
    const struct pcc_saver *saver = save->lane->saver;
    const uint64_t blocks = saver->spec.chunk_bytes / saver->geometry.block_bytes;

    return (uint64_t *)(void *)(save->manifest + sizeof(struct pcc_manifest_header)) +
           position * blocks;
}

static inline void pcc_save_lock(struct pcc_save *save)
{
    (void)pthread_mutex_lock(&save->lane->lock);
}

static inline void pcc_save_unlock(struct pcc_save *save)
{
    (void)pthread_mutex_unlock(&save->lane->lock);
}

/* -- pcc_save_work.c -- */
/* Without locks. What fails for scarcity is written again, for a second at most. */
PCC_MUST_CHECK int pcc_save_write_all(const struct pcc_saver *saver, const void *bytes,
                                      uint64_t length, uint64_t offset);
/* With the lane's lock held: queues one piece, or the next step when nothing is pending. */
void pcc_save_queue_piece(struct pcc_save *save, uint32_t position);
void pcc_save_advance(struct pcc_save *save);
/* Does what one work item of the lane says. */
void pcc_save_work(struct pcc_lane *lane, uint64_t item);

/* -- pcc_save_base.c -- */
/* The checksums of a save's base, without the lane's lock. The first call reads them from the disk;
 * NULL when they cannot be read. */
const struct pcc_known *pcc_save_known(struct pcc_save *save);
void pcc_save_forget_known(struct pcc_save *save);
void pcc_saver_forget_known(struct pcc_saver *saver);
/* The end of what, from `at_bytes` on, is all in the base or all to be written. */
uint64_t pcc_save_run(const struct pcc_save *save, const struct pcc_known *known, uint64_t at_bytes,
                      uint64_t end_bytes, bool *known_out);
/* With the lane's lock held, before the piece counts as written. */
void pcc_save_refer(struct pcc_save *save, uint64_t at_bytes, uint64_t end_bytes, bool referred);
uint64_t pcc_save_referred_bytes(const struct pcc_save *save);
/* Writes a piece without bytes into the save's own slot, out of the base, without the lane's lock.
 * An error with *lost_out: the bytes in the base have changed, or cannot be read. */
PCC_MUST_CHECK int pcc_save_rescue(const struct pcc_save *save, uint32_t position, bool *lost_out);

/* -- pcc_save.c -- */
/* A sealed save leaves its parking place; true when it was one. With `kept` the state memfd
 * continues to hold it. */
bool pcc_save_unpark(struct pcc_save *parked, bool kept);
/* A place that was just taken becomes this save, with no chunk handed over. `slot` may be
 * PCC_KEPT_NO_SLOT, and `base` NULL. */
void pcc_save_reset(struct pcc_save *save, const struct pcc_save_request *request,
                    const struct pcc_slot_entry *entry, uint32_t slot, const struct pcc_base *base);

/* -- pcc_saver.c -- */
/* A free place of a free lane, both taken, or a parking place; NULL when there is none. It gets
 * this kept place, which no save uses, or has any. */
#define PCC_SAVE_ANY_PLACE UINT32_MAX
struct pcc_save *pcc_saver_take_place(struct pcc_saver *saver, uint32_t kept_place, bool parked);
/* Two places exchange manifest, pieces and kept place. Nothing else uses them meanwhile. */
void pcc_saver_exchange(struct pcc_save *one, struct pcc_save *other);
/* The lane may take the next save; the place itself is free when `ended` has returned. */
void pcc_save_leave_lane(struct pcc_save *save);
/* Both, for a save that does not begin. */
void pcc_save_leave(struct pcc_save *save);
/* Leaves the place after `ended`, and calls `freed`. */
void pcc_save_over(struct pcc_save *save);
