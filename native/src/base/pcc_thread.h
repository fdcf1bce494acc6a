/* Native threads: named, and with every signal blocked, so that an interpreter's handlers run on
 * its own threads and our system calls are not interrupted. */
#ifndef PCC_THREAD_H
#define PCC_THREAD_H

#include <pthread.h>
#include <signal.h>

#include "base/pcc_base.h"

/* 0 or -errno. `name` has at most 15 characters. The caller joins. */
PCC_MUST_CHECK static inline int pcc_thread_start(pthread_t *out, void *(*run)(void *),
                                                  void *argument, const char *name)
{
    sigset_t all, before;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(out, NULL, run, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return -error;
    (void)pthread_setname_np(*out, name);
    return 0;
}

#endif
