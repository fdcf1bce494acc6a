/* Preloaded into the daemon by demo.py: each write takes as long as on a disk that takes SLOW_DISK
 * bytes per second from one writer, and more from several at a time. Disks in a network are so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

static ssize_t slowly(const char *name, int fd, const void *bytes, size_t length, off_t at)
{
    ssize_t (*real)(int, const void *, size_t, off_t) = (__typeof__(real))dlsym(RTLD_NEXT, name);
    const char *speed = getenv("SLOW_DISK");
    const double pause_s = speed != NULL ? (double)length / atof(speed) : 0.0;
    const time_t whole_s = (time_t)pause_s;

    nanosleep(&(struct timespec){whole_s, (long)((pause_s - (double)whole_s) * 1e9)}, NULL);
    return real(fd, bytes, length, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t at)
{
    return slowly("pwrite", fd, bytes, length, at);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off_t at)
{
    return slowly("pwrite64", fd, bytes, length, at);
}
