#include "base/pcc_process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

int pcc_process_watch(int32_t pid)
{
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

bool pcc_process_ended(int watch_fd, int limit_ms)
{
    struct pollfd watched = {.fd = watch_fd, .events = POLLIN};

    return watch_fd >= 0 && poll(&watched, 1, limit_ms) > 0 && (watched.revents & POLLIN) != 0;
}
