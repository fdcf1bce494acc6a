/* What recovery must give: the book of every save that was begun, and the judge who recovers an
 * image with the real core and compares. */
#pragma once

#include "disk/pcc_save.h"
#include "sim_io.h"

#define ORACLE_SAVES_MAX 512u
#define ORACLE_NEVER UINT32_MAX

struct oracle_save {
    struct pcc_save_request request; /* tag = index in the book */
    uint64_t sequence;
    uint8_t *bytes;     /* the payload, from (sequence, step), and what of it is frozen */
    uint32_t sealed_at; /* log position; before it, nothing of it may be recovered */
    bool ended;
    bool scrubbed; /* its chunk memory may hold anything now */
    struct pcc_save_result result;
};

struct oracle {
    struct oracle_save saves[ORACLE_SAVES_MAX];
    uint32_t count;
    uint64_t required; /* newest acknowledged before the log began */
    uint64_t required_one_before;
    int64_t next_step;
    uint64_t frozen_bytes; /* so much of each payload is the same in many: made from ... */
    uint64_t frozen;       /* ... this */
};

struct oracle *oracle_new(void);
void oracle_free(struct oracle *oracle);
/* Writes the payload of (sequence, step); bytes has room up to the next PCC_IO_ALIGN, zeroed. The
 * frozen ones are those of every payload with this `frozen`, but for a page now and then. */
void oracle_payload(const struct oracle *oracle, uint64_t sequence, int64_t step, uint8_t *bytes,
                    uint64_t length);
/* Books a save that begins; its payload is made here. */
/* Of the start with this number. */
void oracle_start_id(uint64_t incarnation, uint8_t out[PCC_UUID_BYTES]);
struct oracle_save *oracle_begin(struct oracle *oracle, const struct pcc_save_request *request,
                                 uint64_t sequence);
/* A crash at `position` kept what was before it: the log starts afresh from there. */
void oracle_crashed(struct oracle *oracle, const struct sim *sim, uint32_t position);

enum verdict {
    VERDICT_SOUND,
    VERDICT_UNREADABLE,   /* the volume does not open, or nothing verifies though something must */
    VERDICT_TOO_OLD,      /* older than the last acknowledged */
    VERDICT_WRONG_BYTES,  /* verified, and not what was saved */
    VERDICT_UNSEALED,     /* was never `copied` */
    VERDICT_BROKEN_ENTRY, /* the record names what is not (any more) in the slot */
    VERDICT_LOST_FLAGGED, /* a flagged checkpoint was recycled */
    VERDICT_BAD_TABLE,    /* the record contradicts itself */
    VERDICT_COUNT,
};
extern const char *const verdict_names[VERDICT_COUNT];

struct judge_rules {
    uint64_t required; /* nothing older than this sequence; 0: nothing was acknowledged */
    uint64_t flagged;  /* must be in the record; 0: none */
    uint32_t position; /* of the crash in the log */
    bool damage;       /* sectors may be rotten: entries may fail to verify, never lie */
};

struct judgement {
    enum verdict verdict;
    int error;         /* of the opening */
    uint64_t sequence; /* recovered; 0: nothing */
    uint32_t entries;  /* in the record */
    uint32_t damaged;  /* of them, passed over */
};

/* Recovers through io (borrowed) as a reader does: newest valid record, newest entry that verifies.
 */
struct judgement judge(const struct oracle *oracle, struct pcc_io *io,
                       const struct judge_rules *rules);
