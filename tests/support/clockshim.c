/* LD_PRELOAD shim: the wall clock of a process is as many seconds ahead as the file PCC_CLOCK says.
 * CLOCK_MONOTONIC is as it is, and so are the kernel's waits. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead_s(void)
{
    char text[32] = "";
    const char *path = getenv("PCC_CLOCK");
    const int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

    if (fd >= 0) {
        if (read(fd, text, sizeof text - 1) < 0)
            text[0] = 0;
        close(fd);
    }
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    const int result = ((__typeof__(&clock_gettime))dlsym(RTLD_NEXT, "clock_gettime"))(clock, now);

    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead_s();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    struct timespec time;
    const int result = clock_gettime(CLOCK_REALTIME, &time);

    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return result;
}

time_t time(time_t *now)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_REALTIME, &time);
    if (now != NULL)
        *now = time.tv_sec;
    return time.tv_sec;
}
