/* LD_PRELOAD shim: makes the daemon die, fail or wait at an exact point of the commit protocol.
 *
 * PCC_SHIM="kill:record-a:3"  SIGKILL just before the 3rd write of a replica A
 *          "kill:record-b:1"  between replica A and B
 *          "kill:flush:2"     before the 2nd fdatasync;  "kill:data:5" before the 5th data write
 *          "eio:data:2" "enospc:data:1" "eio:flush:1" "eio:record-a:1"   fail that call once
 *          "late:record-a:1"  fails that call once, and the record is on the disk
 *          "last:record-a:1"  the same, and all after it fail, while armed
 *          "eio:read:3"       the 3rd read fails;  "dead:read:3"  and so do all after it, while armed
 *          "eio:open:1" "dead:open:1"   the same of opening a volume
 *          "slow:data:20000"  every data write takes 20,000 us longer
 * Data that the engine `mmap` stores does not pass here: no data points then. A
 * flush and a record of `mmap` are msync(), of the whole file and of a part.
 * Only files whose name ends in .pcc count, and only from the moment when the file named by
 * PCC_SHIM_ARM exists (so that start-up is left alone). Reads of 4 KiB do not count: records, which
 * are read when a volume is opened, and the smallest manifests. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum point { NO_POINT, DATA, FLUSH, RECORD_A, RECORD_B, READ, OPEN };

static atomic_int calls[OPEN + 1];
static _Thread_local int is_first; /* whether the last call that failed here was the first one */

static enum point point_named(const char *name, size_t length)
{
    static const char *const names[] = {"",         "data", "flush", "record-a",
                                        "record-b", "read", "open"};
    for (int i = DATA; i <= OPEN; i++)
        if (strlen(names[i]) == length && strncmp(names[i], name, length) == 0)
            return (enum point)i;
    return NO_POINT;
}

static int is_named_like_one(const char *path)
{
    size_t length = strlen(path);
    return length >= 5 && strcmp(path + length - 4, ".pcc") == 0;
}

static int is_volume(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return is_named_like_one(path);
}

/* 0, or the errno that the call on a volume must fail with. Does not return when the point is a
 * kill. */
static int reached(enum point point)
{
    const char *spec = getenv("PCC_SHIM");
    const char *arm = getenv("PCC_SHIM_ARM");
    if (!spec || (arm && access(arm, F_OK) != 0))
        return 0;
    const char *first = strchr(spec, ':');
    const char *second = first ? strchr(first + 1, ':') : NULL;
    if (!second || point_named(first + 1, (size_t)(second - first - 1)) != point)
        return 0;
    long number = atol(second + 1);
    if (strncmp(spec, "slow", 4) == 0) {
        struct timespec pause = {number / 1000000, number % 1000000 * 1000};
        nanosleep(&pause, NULL);
        return 0;
    }
    const int count = atomic_fetch_add(&calls[point], 1) + 1;
    const int lasts = strncmp(spec, "dead", 4) == 0 || strncmp(spec, "last", 4) == 0;
    if (count < number || (count > number && !lasts))
        return 0;
    is_first = count == number;
    if (strncmp(spec, "kill", 4) == 0) {
        kill(getpid(), SIGKILL);
        pause();
    }
    return strncmp(spec, "enospc", 6) == 0 ? ENOSPC : EIO;
}

/* The call fails after it has done its work. */
static int is_late(void)
{
    const char *spec = getenv("PCC_SHIM");
    return spec && is_first && (strncmp(spec, "late", 4) == 0 || strncmp(spec, "last", 4) == 0);
}

static int at(enum point point, int fd)
{
    return is_volume(fd) ? reached(point) : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int open(const char *path, int flags, ...)
{
    mode_t mode = 0;
    if (flags & O_CREAT) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    int error = is_named_like_one(path) ? reached(OPEN) : 0;
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(open)(path, flags, mode);
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
    int error = at(DATA, fd);
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(pwrite)(fd, bytes, length, offset);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t offset)
{
    int error = at(DATA, fd);
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(pwrite64)(fd, bytes, length, offset);
}

ssize_t pread(int fd, void *bytes, size_t length, off_t offset)
{
    int error = length > 4096 ? at(READ, fd) : 0;
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(pread)(fd, bytes, length, offset);
}

ssize_t pread64(int fd, void *bytes, size_t length, off64_t offset)
{
    int error = length > 4096 ? at(READ, fd) : 0;
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(pread64)(fd, bytes, length, offset);
}

static enum point record_point(int fd, off_t offset)
{
    struct stat status;
    if (fstat(fd, &status) != 0)
        return RECORD_A;
    return offset < status.st_size / 2 ? RECORD_A : RECORD_B;
}

ssize_t pwritev2(int fd, const struct iovec *iov, int count, off_t offset, int flags)
{
    int error = at((flags & RWF_DSYNC) ? record_point(fd, offset) : DATA, fd);
    if (error) {
        if (is_late())
            (void)!REAL(pwritev2)(fd, iov, count, offset, flags);
        errno = error;
        return -1;
    }
    return REAL(pwritev2)(fd, iov, count, offset, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *iov, int count, off64_t offset, int flags)
{
    int error = at((flags & RWF_DSYNC) ? record_point(fd, offset) : DATA, fd);
    if (error) {
        if (is_late())
            (void)!REAL(pwritev64v2)(fd, iov, count, offset, flags);
        errno = error;
        return -1;
    }
    return REAL(pwritev64v2)(fd, iov, count, offset, flags);
}

int fdatasync(int fd)
{
    int error = at(FLUSH, fd);
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(fdatasync)(fd);
}

/* The point that a msync of these bytes is, by the mapping that they are in. */
static enum point sync_point(uintptr_t address, size_t length)
{
    enum point point = NO_POINT;
    uintptr_t start, end;
    char line[4352], path[4096];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        path[0] = 0;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %4095[^\n]", &start, &end, path) < 2 ||
            address < start || address >= end)
            continue;
        if (is_named_like_one(path) && address == start && length > 64 * 1024)
            point = FLUSH;
        else if (is_named_like_one(path))
            point = address - start < (end - start) / 2 ? RECORD_A : RECORD_B;
        break;
    }
    if (maps)
        fclose(maps);
    return point;
}

int msync(void *bytes, size_t length, int flags)
{
    enum point point = sync_point((uintptr_t)bytes, length);
    int error = point == NO_POINT ? 0 : reached(point);
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(msync)(bytes, length, flags);
}
