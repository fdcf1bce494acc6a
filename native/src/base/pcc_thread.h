/* Native threads: named, and with every signal blocked, so that an interpreter's handlers run on
 * its own threads and our system calls are not interrupted. Faults stay open: one that is blocked
 * kills at once (pcc_guard.h). Mutexes held by a block, conditions with deadlines. */
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "base/pcc_base.h"

/* 0 or -errno. `name` has at most 15 characters. The caller joins. */
PCC_MUST_CHECK static inline int pcc_thread_start(pthread_t *out, void *(*run)(void *),
                                                  void *argument, const char *name)
{
    sigset_t all, before;

    (void)sigfillset(&all);
    (void)sigdelset(&all, SIGBUS);
    (void)sigdelset(&all, SIGSEGV);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(out, NULL, run, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return -error;
    (void)pthread_setname_np(*out, name);
    return 0;
}

#define PCC_THREADS_MAX 64u
/* Calls `run` on `count` threads at once (0 counts as 1), of which the caller is one; returns when
 * all calls have. A thread that cannot be started is left out. */
static inline void pcc_threads_run(uint32_t count, void *(*run)(void *), void *argument,
                                   const char *name)
{
    pthread_t started[PCC_THREADS_MAX];
    uint32_t others = 0;

    while (others + 1 < count && others < PCC_THREADS_MAX &&
           pcc_thread_start(&started[others], run, argument, name) == 0)
        others++;
    (void)run(argument);
    for (uint32_t i = 0; i < others; i++)
        (void)pthread_join(started[i], NULL);
}

static inline pthread_mutex_t *pcc_mutex_take(pthread_mutex_t *mutex)
{
    (void)pthread_mutex_lock(mutex);
    return mutex;
}

static inline void pcc_mutex_leave(pthread_mutex_t **taken)
{
    (void)pthread_mutex_unlock(*taken);
}

/* Takes the mutex, and leaves it at the end of the block, on every way out. */
#define PCC_LOCKED(mutex) PCC_LOCKED_BY(mutex, __LINE__)
#define PCC_LOCKED_BY(mutex, line) PCC_LOCKED_AS(mutex, line)
#define PCC_LOCKED_AS(mutex, line)                                                                 \
    pthread_mutex_t *taken_##line __attribute__((cleanup(pcc_mutex_leave), unused)) =              \
        pcc_mutex_take(mutex)

/* A condition whose deadlines are times of pcc_now_ns: the clock of the machine may be set. */
static inline void pcc_condition_make(pthread_cond_t *out)
{
    pthread_condattr_t monotonic;

    (void)pthread_condattr_init(&monotonic); /* these cannot fail */
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(out, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
}

/* With the lock held. False when the deadline has passed. */
static inline bool pcc_condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock,
                                      uint64_t deadline_ns)
{
    const struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                                      .tv_nsec = (long)(deadline_ns % 1000000000u)};

    return pthread_cond_timedwait(condition, lock, &deadline) == 0;
}
