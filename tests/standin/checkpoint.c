/* The driver's own checkpoints of a process. A process with a context has a page that others find:
 * its state, and how much it has enqueued. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"

enum { POLL_NS = 200000, CODE_ILLEGAL_STATE = 401 };

struct process_page {
    _Atomic int state;
    _Atomic int queued; /* operations in all streams */
    _Atomic int shares; /* handles given away, memory opened */
};

static struct process_page nobody;
static struct process_page *own = &nobody;

static void nap(void)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
}

static struct process_page *page_of(int pid, int flags)
{
    char path[PATH_BYTES];
    struct process_page *page;
    whole_path(path, PROCESS_KIND, 0, (uint32_t)pid, 0);
    const int fd = open(path, O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd < 0 || (flags && ftruncate(fd, HEADER_BYTES))) {
        (void)close(fd);
        return NULL;
    }
    page = mmap(NULL, HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    return page == MAP_FAILED ? NULL : page;
}

static void page_close(struct process_page *page)
{
    (void)munmap(page, HEADER_BYTES);
}

void checkpoint_begin(void)
{
    struct process_page *page = page_of(getpid(), O_CREAT | O_TRUNC);
    if (page)
        own = page;
}

void checkpoint_end(void)
{
    char path[PATH_BYTES];
    whole_path(path, PROCESS_KIND, 0, (uint32_t)getpid(), 0);
    (void)unlink(path);
    if (own != &nobody)
        page_close(own);
    own = &nobody;
}

void checkpoint_note(int queued, int shares)
{
    atomic_fetch_add(&own->queued, queued);
    atomic_fetch_add(&own->shares, shares);
}

/* With the lock: other threads may come and wait, too. */
void checkpoint_await(void)
{
    while (atomic_load(&own->state) != CU_PROCESS_STATE_RUNNING && !lies(LIE_UNLOCKED)) {
        (void)pthread_mutex_unlock(&standin.lock);
        nap();
        (void)pthread_mutex_lock(&standin.lock);
    }
}

bool checkpoint_has_released(int pid)
{
    struct process_page *page = page_of(pid, 0);
    const bool released = page && atomic_load(&page->state) == CU_PROCESS_STATE_CHECKPOINTED;
    if (page)
        page_close(page);
    return released;
}

static CUresult move(struct process_page *page, int from, int to)
{
    return atomic_compare_exchange_strong(&page->state, &from, to) ? CUDA_SUCCESS
                                                                   : CODE_ILLEGAL_STATE;
}

/* Enters, without waiting for this process's own state, and finds the other's page. */
static CUresult enter(int pid, struct process_page **page)
{
    CUresult result = standin_enter(0);
    bool alive;
    if (result != CUDA_SUCCESS)
        return result;
    *page = process_start_time(pid, &alive) && alive ? page_of(pid, 0) : NULL;
    return *page ? CUDA_SUCCESS : standin_leave(CUDA_ERROR_INVALID_VALUE);
}

static CUresult leave(struct process_page *page, CUresult result)
{
    page_close(page);
    return standin_leave(result);
}

EXPORTED CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    struct process_page *page;
    CUresult result = enter(pid, &page);
    if (result != CUDA_SUCCESS)
        return result;
    *state = atomic_load(&page->state);
    return leave(page, CUDA_SUCCESS);
}

/* Whether all that the process has enqueued ended in time; a time of 0 has no end. */
static bool is_idle_within(const struct process_page *page, unsigned ms)
{
    const uint64_t naps = ms * 1000000ull / POLL_NS;
    for (uint64_t i = 0; atomic_load(&page->queued) > 0; i++) {
        if (ms && i >= naps)
            return false;
        nap();
    }
    return true;
}

EXPORTED CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *arguments)
{
    struct process_page *page;
    CUresult result = enter(pid, &page);
    if (result != CUDA_SUCCESS)
        return result;
    result = move(page, CU_PROCESS_STATE_RUNNING, CU_PROCESS_STATE_LOCKED);
    if (result == CUDA_SUCCESS && !is_idle_within(page, arguments ? arguments->timeoutMs : 0)) {
        atomic_store(&page->state, CU_PROCESS_STATE_RUNNING);
        result = CUDA_ERROR_NOT_READY;
    }
    return leave(page, result);
}

/* Its memory is the host's meanwhile: whole.c does not count it. */
EXPORTED CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *arguments)
{
    struct process_page *page;
    CUresult result = enter(pid, &page);
    (void)arguments;
    if (result != CUDA_SUCCESS)
        return result;
    if (atomic_load(&page->state) == CU_PROCESS_STATE_LOCKED && atomic_load(&page->shares) > 0)
        return leave(page, CUDA_ERROR_NOT_SUPPORTED);
    return leave(page, move(page, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_CHECKPOINTED));
}

/* Changes the first byte of all device memory of a process. */
static void spoil_memory(int pid)
{
    DIR *directory = opendir(standin.directory);
    const struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        uint8_t byte = SCRAMBLED;
        int of = 0;
        if (sscanf(entry->d_name, "memory-%*u-%d-", &of) != 1 || of != pid)
            continue;
        const int fd = openat(dirfd(directory), entry->d_name, O_WRONLY | O_CLOEXEC);
        (void)!pwrite(fd, &byte, 1, HEADER_BYTES);
        (void)close(fd);
    }
    if (directory)
        (void)closedir(directory);
}

EXPORTED CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *arguments)
{
    struct process_page *page;
    CUresult result = enter(pid, &page);
    (void)arguments;
    if (result != CUDA_SUCCESS)
        return result;
    result = move(page, CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED);
    if (result == CUDA_SUCCESS && lies(LIE_RESTORED))
        spoil_memory(pid);
    return leave(page, result);
}

EXPORTED CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *arguments)
{
    struct process_page *page;
    CUresult result = enter(pid, &page);
    (void)arguments;
    if (result != CUDA_SUCCESS)
        return result;
    return leave(page, move(page, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING));
}
