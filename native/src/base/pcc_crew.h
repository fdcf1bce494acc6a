/* A crew: helper threads that share the pieces of one job with the thread that calls.
 *
 * Its threads start when a run first needs them: as many as there are CPUs to run on besides the
 * caller's, at most PCC_CREW_HELPERS, and fewer when some cannot be started. One thread at a time
 * runs jobs, and closes the crew. run blocks until the job is done. */
#pragma once

#include <pthread.h>

#include "base/pcc_base.h"

#define PCC_CREW_HELPERS 7u /* with the caller: checksums at the rate of a GPU's link */

struct pcc_crew {
    pthread_mutex_t lock;
    pthread_cond_t called; /* pieces are left, or the crew closes */
    pthread_cond_t done;   /* no helper works on a piece */
    bool started;
    bool closing;
    void (*work)(void *context, uint64_t piece); /* the job, like what follows */
    void *context;
    uint64_t next;
    uint64_t count;
    uint32_t wanted; /* helpers that may work on it */
    uint32_t busy;   /* helpers that do */
    uint32_t helper_count;
    uint32_t cpus; /* that the opening thread may run on */
    pthread_t helpers[PCC_CREW_HELPERS];
};

void pcc_crew_open(struct pcc_crew *crew);
/* Joins its threads. */
void pcc_crew_close(struct pcc_crew *crew);
/* The number of helpers that leaves half of the CPUs to others. */
uint32_t pcc_crew_half(const struct pcc_crew *crew);
/* Calls work once for each piece below `count`, in any order, several at once: the caller and at
 * most `helpers` others. Returns when all calls have. What they wrote is seen by the caller. */
void pcc_crew_run(struct pcc_crew *crew, uint32_t helpers, uint64_t count,
                  void (*work)(void *, uint64_t), void *context);
