#include "base/pcc_process.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Fields of /proc/PID/stat by their numbers in proc(5). The name, field 2, may hold anything. */
#define FIELD_STATE 3
#define FIELD_FLAGS 9
#define FLAG_EXITING 0x4u /* PF_EXITING: set at the very beginning of the end */

/* The text after the last ")" begins with field 3; fields are parted by single spaces. */
static bool field_read(const char *text, int field, uint64_t *out)
{
    const char *at = strrchr(text, ')');

    for (int i = FIELD_STATE - 1; at != NULL && i < field; i++) {
        at = strchr(at, ' ');
        if (at != NULL)
            at++;
    }
    if (at == NULL || *at < '0' || *at > '9')
        return false;
    *out = strtoull(at, NULL, 10);
    return true;
}

/* The maps alone are not enough: while another process looks at an address space, the address space
 * exists for a moment after its own process has ended. */
static bool is_ending(int stat_fd)
{
    char text[1024];
    uint64_t flags;
    const ssize_t length = pread(stat_fd, text, sizeof(text) - 1, 0);

    if (length <= 0)
        return true;
    text[length] = '\0';
    return !field_read(text, FIELD_FLAGS, &flags) || (flags & FLAG_EXITING) != 0;
}

struct pcc_process pcc_process_open(int32_t pid)
{
    struct pcc_process process = {0};
    char path[40];

    if (pid <= 0)
        return process;
    (void)snprintf(path, sizeof(path), "/proc/%d/maps", pid);
    process.maps_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (process.maps_fd < 0)
        return (struct pcc_process){0};
    (void)snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    process.stat_fd = open(path, O_RDONLY | O_CLOEXEC);
    process.known = process.stat_fd >= 0;
    if (!process.known)
        (void)close(process.maps_fd);
    else if (!pcc_process_lives(&process))
        pcc_process_close(&process);
    return process.known ? process : (struct pcc_process){0};
}

void pcc_process_close(struct pcc_process *process)
{
    if (process->known) {
        (void)close(process->maps_fd);
        (void)close(process->stat_fd);
    }
    *process = (struct pcc_process){0};
}

bool pcc_process_lives(const struct pcc_process *process)
{
    char text[64];

    /* Nothing can be read once that address space has no user any more. */
    return process->known && pread(process->maps_fd, text, sizeof(text), 0) > 0 &&
           !is_ending(process->stat_fd);
}

int pcc_process_watch(int32_t pid)
{
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

bool pcc_process_ended(int watch_fd, int limit_ms)
{
    struct pollfd watched = {.fd = watch_fd, .events = POLLIN};

    return watch_fd >= 0 && poll(&watched, 1, limit_ms) > 0 && (watched.revents & POLLIN) != 0;
}
