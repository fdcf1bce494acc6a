/* Reading gives way to saving: what verify, scrub, restore and export read, while checkpoints of
 * other users are saved in this process.
 *
 * While another user saves, or has in the last second, all reads of one user together are one piece
 * at a time. While work of another user's save is queued or done, a piece needs a turn: each step
 * of a save earns one for each reading user, and one more for every PCC_PACE_TURN_BYTES that it
 * wrote. So a user reads at most one byte for two that others write, and one piece a step; between
 * two steps at most PCC_PACE_TURNS_MAX pieces. Should no step end, because a disk hangs or is
 * throttled, a piece is read every PCC_PACE_LIMIT_NS all the same: no user can keep another from
 * reading. A save waits for nothing here but a short lock.
 *
 * Users are distinguished by uid % PCC_PACE_USERS. Any thread; enter blocks, the rest does not. */
#pragma once

#include "base/pcc_base.h"

#define PCC_PACE_USERS 64u
#define PCC_PACE_PIECE_BYTES (1u << 20)
#define PCC_PACE_TURN_BYTES (2u << 20)
#define PCC_PACE_TURNS_MAX 8u
#define PCC_PACE_CALM_NS 1000000000u
#define PCC_PACE_LIMIT_NS 100000000u

/* A checkpoint of this user is on its way, or not any more. */
void pcc_pace_save_begins(uint32_t uid);
void pcc_pace_save_ends(uint32_t uid);
/* A step of such a checkpoint waits for a writer; the step is done, and wrote `written_bytes`. */
void pcc_pace_step_queued(uint32_t uid);
void pcc_pace_step_done(uint32_t uid, uint64_t written_bytes);

enum pcc_pace {
    PCC_PACE_FREE, /* no other user saves: read at any time */
    PCC_PACE_TURN, /* read one piece, then leave */
    PCC_PACE_WAIT
};

enum pcc_pace pcc_pace_try(uint32_t uid);
/* Waits until a user may read; true when it was given a turn. */
PCC_MUST_CHECK bool pcc_pace_enter(uint32_t uid);
void pcc_pace_leave(uint32_t uid);
