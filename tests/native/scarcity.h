/* A machine that runs out of resources. The linker wraps the core's calls for memory, mappings,
 * descriptors, threads and space in files (see Makefile); the N-th call is refused, alone or with
 * all that follow. What was taken is counted: after a refusal everything must be returned. */
#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"

#define SITES_MAX 256u
#define PATIENCE_S 120u /* for one run, sanitizers and a busy machine included */

struct site { /* a call in the core, by the address it returns to */
    uintptr_t at;
    const char *what;
    uint64_t refused;
};

static struct {
    pthread_mutex_t lock;
    struct site sites[SITES_MAX];
    uint32_t site_count;
    uint64_t left; /* calls until the one that is refused; 0: none is */
    bool lasting;
    uint64_t refused; /* in this run */
    const struct site *last;
    const char *name;
    uint64_t at;
    uint64_t runs;
} scarce = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Atomic int64_t blocks_held; /* of memory */

extern const char __executable_start[];

static inline struct site *site_find(uintptr_t at, const char *what)
{
    uint32_t i = 0;

    while (i < scarce.site_count && scarce.sites[i].at != at)
        i++;
    CHECK(i < SITES_MAX);
    if (i == scarce.site_count)
        scarce.sites[scarce.site_count++] = (struct site){.at = at, .what = what};
    return &scarce.sites[i];
}

static inline bool refuse(const void *from, const char *what)
{
    bool refused = false;

    (void)pthread_mutex_lock(&scarce.lock);
    struct site *site = scarce.left > 0 ? site_find((uintptr_t)from, what) : NULL;
    if (site != NULL && (scarce.left > 1 || scarce.lasting || scarce.refused == 0)) {
        refused = scarce.left == 1;
        scarce.left -= scarce.left > 1;
    }
    if (refused) {
        site->refused++;
        scarce.refused++;
        scarce.last = site;
    }
    (void)pthread_mutex_unlock(&scarce.lock);
    return refused;
}

#define REFUSED(what) refuse(__builtin_extract_return_addr(__builtin_return_address(0)), what)

/* The wrapper that the linker uses for a function; a refused call returns `failure`, with errno. */
#define WRAP(type, function, parameters, arguments, code, failure, counted)                        \
    type __wrap_##function parameters;                                                             \
    type __wrap_##function parameters                                                              \
    {                                                                                              \
        if (REFUSED(#function)) {                                                                  \
            errno = code;                                                                          \
            return failure;                                                                        \
        }                                                                                          \
        type got = function arguments;                                                             \
        if (counted && got != failure)                                                             \
            atomic_fetch_add(&blocks_held, 1);                                                     \
        return got;                                                                                \
    }

WRAP(void *, malloc, (size_t length), (length), ENOMEM, NULL, true)
WRAP(void *, calloc, (size_t count, size_t length), (count, length), ENOMEM, NULL, true)
WRAP(void *, realloc, (void *old, size_t length), (old, length), ENOMEM, NULL, old == NULL)
WRAP(void *, aligned_alloc, (size_t to, size_t length), (to, length), ENOMEM, NULL, true)
WRAP(void *, mmap, (void *at, size_t length, int protection, int flags, int fd, off_t offset),
     (at, length, protection, flags, fd, offset), ENOMEM, MAP_FAILED, false)
/* As the kernel does where a memory cgroup leaves no inode. */
WRAP(int, memfd_create, (const char *name, unsigned flags), (name, flags), ENOSPC, -1, false)
WRAP(int, eventfd, (unsigned count, int flags), (count, flags), EMFILE, -1, false)
WRAP(int, pipe2, (int *ends, int flags), (ends, flags), EMFILE, -1, false)
WRAP(int, socket, (int domain, int type, int protocol), (domain, type, protocol), EMFILE, -1, false)
WRAP(int, ftruncate, (int fd, off_t length), (fd, length), ENOSPC, -1, false)
WRAP(int, fallocate, (int fd, int mode, off_t at, off_t length), (fd, mode, at, length), ENOSPC, -1,
     false)

void __wrap_free(void *memory);
void __wrap_free(void *memory)
{
    if (memory != NULL)
        atomic_fetch_sub(&blocks_held, 1);
    free(memory);
}

int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
    va_list rest;

    if (REFUSED("open")) {
        errno = EMFILE;
        return -1;
    }
    va_start(rest, flags);
    const int fd = open(path, flags, va_arg(rest, unsigned));
    va_end(rest);
    return fd;
}

int __wrap_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...)
{
    va_list rest;

    if (command == F_DUPFD_CLOEXEC && REFUSED("fcntl")) {
        errno = EMFILE;
        return -1;
    }
    va_start(rest, command);
    const int result = fcntl(fd, command, va_arg(rest, long));
    va_end(rest);
    return result;
}

int __wrap_pthread_create(pthread_t *out, const pthread_attr_t *how, void *(*run)(void *),
                          void *argument);
int __wrap_pthread_create(pthread_t *out, const pthread_attr_t *how, void *(*run)(void *),
                          void *argument)
{
    return REFUSED("pthread_create") ? EAGAIN : pthread_create(out, how, run, argument);
}

/* -- the loop -- */

/* The core's threads run meanwhile, and look at it. */
static inline void refuse_at(uint64_t nth) /* of the calls from here on; 0: none is */
{
    (void)pthread_mutex_lock(&scarce.lock);
    scarce.left = nth;
    (void)pthread_mutex_unlock(&scarce.lock);
}

static inline void plenty(void) /* nothing is refused any more */
{
    refuse_at(0);
}

static inline bool was_refused(void)
{
    (void)pthread_mutex_lock(&scarce.lock);
    const bool refused = scarce.refused > 0;
    (void)pthread_mutex_unlock(&scarce.lock);
    return refused;
}

static inline uint32_t entries_of(const char *directory)
{
    uint32_t count = 0;
    DIR *all = opendir(directory);

    CHECK(all != NULL);
    while (readdir(all) != NULL)
        count++;
    CHECK(closedir(all) == 0);
    return count;
}

static inline uint32_t mappings(void) /* of memfds and rings */
{
    return check_mappings("/memfd:") + check_mappings(".pccheck");
}

struct census {
    int64_t blocks;
    uint32_t descriptors, threads, mapped;
};

/* By the directory's links: its list may be cut off where a thread ends meanwhile. */
static inline uint32_t threads_now(void)
{
    struct stat all;

    CHECK(stat("/proc/self/task", &all) == 0);
    return (uint32_t)all.st_nlink;
}

/* A thread that was joined may still be seen for a moment. */
static inline void threads_settle(uint32_t threads)
{
    for (uint32_t i = 0; i < 10000 && threads_now() > threads; i++)
        (void)usleep(1000);
}

static inline struct census census_take(void)
{
    return (struct census){.blocks = atomic_load(&blocks_held),
                           .descriptors = entries_of("/proc/self/fd"),
                           .threads = threads_now(),
                           .mapped = mappings()};
}

static inline void where(void)
{
    const struct site *last = scarce.last;

    printf("  in run %llu of %s (%s), refused last: %s at %#llx of %s\n",
           (unsigned long long)scarce.at, scarce.name, scarce.lasting ? "from then on" : "once",
           last != NULL ? last->what : "nothing",
           (unsigned long long)(last != NULL ? last->at - (uintptr_t)__executable_start : 0),
           "this program (addr2line -fie)");
    (void)fflush(stdout);
}

static inline void hung(int signal_number)
{
    (void)signal_number;
    where();
    abort();
}

static inline void told_at_exit(void)
{
    if (scarce.name != NULL)
        where();
}

/* Runs with the N-th call refused, for N = 1, 2, 3, ... until there is no N-th call. */
static inline void scarcity(const char *name, void (*live)(void))
{
    for (uint32_t lasting = 0; lasting < 2; lasting++) {
        uint64_t at = 0;
        do {
            const struct census before = census_take();
            scarce.name = name;
            scarce.at = ++at;
            scarce.lasting = lasting != 0;
            scarce.refused = 0;
            scarce.last = NULL;
            scarce.left = at;
            (void)alarm(PATIENCE_S);
            live();
            plenty();
            threads_settle(before.threads);
            const struct census after = census_take();
            CHECK_EQUAL(after.blocks, before.blocks);
            CHECK_EQUAL(after.descriptors, before.descriptors);
            CHECK(after.threads <= before.threads);
            CHECK_EQUAL(after.mapped, before.mapped);
            scarce.runs++;
        } while (scarce.refused > 0);
        printf("  %s: %llu calls refused %s\n", name, (unsigned long long)at - 1,
               lasting ? "with all that follow" : "one at a time");
    }
    (void)alarm(0);
    scarce.name = NULL;
}

static inline void *first_thread(void *unused)
{
    return unused;
}

/* A directory for files that are flushed often: in memory, where that is possible. */
static inline void scarcity_begin(char directory[64])
{
    const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    pthread_t first;

    /* ThreadSanitizer starts a thread of its own with the first one, and it stays: in the census
     * from the start. */
    CHECK(pthread_create(&first, NULL, first_thread, NULL) == 0);
    CHECK(pthread_join(first, NULL) == 0);
    (void)snprintf(directory, 64, "%s/pcc-scarce-XXXXXX", base);
    CHECK(mkdtemp(directory) != NULL);
    (void)signal(SIGALRM, hung);
    CHECK(atexit(told_at_exit) == 0);
}

/* Every call site that was reached must have been refused once. */
static inline void scarcity_end(uint32_t sites_least)
{
    uint32_t missed = 0;

    for (uint32_t i = 0; i < scarce.site_count; i++) {
        missed += scarce.sites[i].refused == 0;
        if (scarce.sites[i].refused == 0 || getenv("PCC_SITES") != NULL)
            printf("  %s at %#llx: refused %llu times\n", scarce.sites[i].what,
                   (unsigned long long)(scarce.sites[i].at - (uintptr_t)__executable_start),
                   (unsigned long long)scarce.sites[i].refused);
    }
    printf("%u places refused in %llu runs\n", scarce.site_count - missed,
           (unsigned long long)scarce.runs);
    CHECK(missed == 0 && scarce.site_count >= sites_least);
}
