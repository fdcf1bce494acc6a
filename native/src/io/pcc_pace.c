#include "io/pcc_pace.h"

#include "base/pcc_thread.h"

#define WAIT_NS 10000000u

struct user {
    uint32_t saves;    /* on their way */
    uint32_t steps;    /* of them, queued or being done */
    uint64_t earned;   /* turns, for each of the others */
    uint64_t ended_ns; /* the newest end of a save; 0: there was none */
    uint64_t spent;    /* of what the others have earned */
    uint64_t waits_ns; /* for a turn, since then; 0: it does not */
    bool is_reading;   /* has a turn */
};

/* Of the process, as the disk is that all of its volumes share. */
static pthread_mutex_t pace_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pace_moved;
static struct user pace_users[PCC_PACE_USERS];

static struct user *user_of(uint32_t uid)
{
    return &pace_users[uid % PCC_PACE_USERS];
}

__attribute__((constructor)) static void make_condition(void)
{
    pcc_condition_make(&pace_moved);
}

/* With the lock held: all users but this one, as one. */
static struct user others_of(const struct user *me)
{
    struct user sum = {0};

    for (uint32_t i = 0; i < PCC_PACE_USERS; i++) {
        const struct user *user = &pace_users[i];
        if (user == me)
            continue;
        sum.saves += user->saves;
        sum.steps += user->steps;
        sum.earned += user->earned;
        if (user->ended_ns > sum.ended_ns)
            sum.ended_ns = user->ended_ns;
    }
    return sum;
}

void pcc_pace_save_begins(uint32_t uid)
{
    PCC_LOCKED(&pace_lock);
    user_of(uid)->saves++;
}

void pcc_pace_save_ends(uint32_t uid)
{
    PCC_LOCKED(&pace_lock);
    PCC_ASSERT(user_of(uid)->saves > 0);
    user_of(uid)->saves--;
    user_of(uid)->ended_ns = pcc_now_ns();
}

void pcc_pace_step_queued(uint32_t uid)
{
    PCC_LOCKED(&pace_lock);
    user_of(uid)->steps++;
}

void pcc_pace_step_done(uint32_t uid, uint64_t written_bytes)
{
    PCC_LOCKED(&pace_lock);
    PCC_ASSERT(user_of(uid)->steps > 0);
    user_of(uid)->steps--;
    user_of(uid)->earned += 1 + written_bytes / PCC_PACE_TURN_BYTES;
    (void)pthread_cond_broadcast(&pace_moved);
}

/* With the lock held: takes a turn for a user that has none; false when it has to wait. */
static bool take_turn(struct user *me, const struct user *others, uint64_t now_ns)
{
    if (others->steps == 0)
        return true;
    if (others->earned - me->spent > PCC_PACE_TURNS_MAX)
        me->spent = others->earned - PCC_PACE_TURNS_MAX; /* what was not used is gone */
    if (me->spent < others->earned) {
        me->spent++;
        return true;
    }
    if (me->waits_ns == 0)
        me->waits_ns = now_ns;
    return now_ns - me->waits_ns >= PCC_PACE_LIMIT_NS;
}

static enum pcc_pace try_with_lock(struct user *me)
{
    const struct user others = others_of(me);
    const uint64_t now_ns = pcc_now_ns();

    if (others.saves == 0 &&
        (others.ended_ns == 0 || now_ns - others.ended_ns >= PCC_PACE_CALM_NS)) {
        me->spent = others.earned;
        me->waits_ns = 0;
        return PCC_PACE_FREE;
    }
    if (me->is_reading || !take_turn(me, &others, now_ns))
        return PCC_PACE_WAIT;
    me->is_reading = true;
    me->waits_ns = 0;
    return PCC_PACE_TURN;
}

enum pcc_pace pcc_pace_try(uint32_t uid)
{
    PCC_LOCKED(&pace_lock);
    return try_with_lock(user_of(uid));
}

bool pcc_pace_enter(uint32_t uid)
{
    enum pcc_pace found;

    PCC_LOCKED(&pace_lock);
    while ((found = try_with_lock(user_of(uid))) == PCC_PACE_WAIT)
        (void)pcc_condition_wait(&pace_moved, &pace_lock, pcc_now_ns() + WAIT_NS);
    return found == PCC_PACE_TURN;
}

void pcc_pace_leave(uint32_t uid)
{
    PCC_LOCKED(&pace_lock);
    PCC_ASSERT(user_of(uid)->is_reading);
    user_of(uid)->is_reading = false;
    (void)pthread_cond_broadcast(&pace_moved);
}
