/* Whether another process still is what it was, neither ending nor having begun another program;
 * and whether it has ended. */
#pragma once

#include "base/pcc_base.h"

struct pcc_process { /* open files of /proc, which stay those of this process */
    bool known;
    int maps_fd; /* holds its present address space */
    int stat_fd;
};

/* The process `pid` as it is now. Not known when there is none, or it may not be looked into (it
 * is another user's, or in a PID namespace that we do not see: pid 0). Then there is nothing to
 * close. */
struct pcc_process pcc_process_open(int32_t pid);
void pcc_process_close(struct pcc_process *process);
/* True when, at some time during the call, the process had begun neither to end nor to execute
 * another program. In both cases the kernel removes the address space before it closes files, GPUs
 * among them. So the GPU memory that the process had mapped before the call was still mapped. Any
 * thread. */
bool pcc_process_lives(const struct pcc_process *process);

/* A descriptor that becomes readable when process `pid` has ended, the caller's to close; -1 when
 * it is not known (pid 0), or has ended already. */
int pcc_process_watch(int32_t pid);
/* Waits at most `limit_ms` for the end of the process. True when all of the process has ended: no
 * thread of it runs, and every file of it is closed. False when it lives, or is not known (-1). */
bool pcc_process_ended(int watch_fd, int limit_ms);
