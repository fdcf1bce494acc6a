/* Preloaded into nbdkit, which serves a file as a block device: reads, writes and flushes of the
 * device fail as the control page says (faultydisk.py maps the same one). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, FLUSH = 4 };

struct control {
    _Atomic uint32_t kinds;      /* that fail; 0: none */
    _Atomic uint32_t skip;       /* so many of them pass first */
    _Atomic uint32_t persistent; /* else the first that fails is the last */
    _Atomic uint32_t hits;
};

static struct control *control;

__attribute__((constructor)) static void open_control(void)
{
    const char *path = getenv("PCC_DISK_CONTROL");
    const int fd = path != NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;

    if (fd < 0)
        return;
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED)
        control = page;
    (void)close(fd);
}

static int fails(int fd, uint32_t kind)
{
    struct stat about;

    if (control == NULL || (atomic_load(&control->kinds) & kind) == 0)
        return 0;
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode))
        return 0;
    uint32_t skip = atomic_load(&control->skip);
    while (skip > 0)
        if (atomic_compare_exchange_weak(&control->skip, &skip, skip - 1))
            return 0;
    if (!atomic_load(&control->persistent) && atomic_exchange(&control->kinds, 0) == 0)
        return 0;
    atomic_fetch_add(&control->hits, 1);
    errno = EIO;
    return 1;
}

#define SHIM(type, name, parameters, arguments, kind)                                              \
    type name parameters                                                                           \
    {                                                                                              \
        static type(*real) parameters;                                                             \
        if (real == NULL)                                                                          \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                                             \
        return fails(fd, kind) ? (type)-1 : real arguments;                                        \
    }

SHIM(ssize_t, pread, (int fd, void *to, size_t count, off_t at), (fd, to, count, at), READ)
SHIM(ssize_t, pread64, (int fd, void *to, size_t count, off_t at), (fd, to, count, at), READ)
SHIM(ssize_t, pwrite, (int fd, const void *from, size_t count, off_t at), (fd, from, count, at),
     WRITE)
SHIM(ssize_t, pwrite64, (int fd, const void *from, size_t count, off_t at), (fd, from, count, at),
     WRITE)
SHIM(int, fdatasync, (int fd), (fd), FLUSH)
SHIM(int, fsync, (int fd), (fd), FLUSH)
