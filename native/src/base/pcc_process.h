/* Whether another process has ended. */
#pragma once

#include "base/pcc_base.h"

/* A descriptor that becomes readable when process `pid` has ended, the caller's to close; -1 when
 * it is not known (pid 0), or has ended already. */
int pcc_process_watch(int32_t pid);
/* Waits at most `limit_ms` for the end of the process. True when all of the process has ended: no
 * thread of it runs, and every file of it is closed. False when it lives, or is not known (-1). */
bool pcc_process_ended(int watch_fd, int limit_ms);
