/* The driver's own checkpoints of a process, as seen from outside. A process with a context has a
 * page that others find: its state, and how much it has enqueued. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "process.h"

enum { POLL_NS = 200000, MAP_VERSION_MIN = 13000 };

/* CUcheckpointRestoreArgs of CUDA 13 and later: all zero before. */
struct restore_map {
    const CUuuid (*pairs)[2]; /* old, new */
    unsigned count;
};

static struct process_page nobody;
struct process_page *process_own = &nobody;

static void nap(void)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
}

static struct process_page *page_map(int pid, int flags)
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

static bool maps_its_page(int pid)
{
    char path[PATH_BYTES], line[PATH_BYTES + 256], table[64];
    bool found = false;
    whole_path(path, PROCESS_KIND, 0, (uint32_t)pid, 0);
    (void)snprintf(table, sizeof(table), "/proc/%d/maps", pid);
    FILE *file = fopen(table, "re");
    while (file && !found && fgets(line, sizeof(line), file))
        found = strstr(line, path) != NULL;
    if (file)
        (void)fclose(file);
    return found;
}

/* A process that another program has made again from its image began later than the page says, and
 * is checkpointed: there are no other images. */
static struct process_page *page_of(int pid)
{
    bool alive;
    const uint64_t began = process_start_time(pid, &alive);
    struct process_page *page = began && alive ? page_map(pid, 0) : NULL;
    if (page && atomic_load(&page->start_time) != began) {
        if (!maps_its_page(pid)) {
            page_close(page);
            return NULL;
        }
        atomic_store(&page->state, CU_PROCESS_STATE_CHECKPOINTED);
        atomic_store(&page->order, ORDER_NOTHING);
        atomic_store(&page->start_time, began);
    }
    return page;
}

void checkpoint_begin(void)
{
    struct process_page *page = page_map(getpid(), O_CREAT | O_TRUNC);
    if (!page)
        return;
    atomic_store(&page->start_time, standin.start_time);
    process_own = page;
    stage_begin();
}

void checkpoint_end(void)
{
    char path[PATH_BYTES];
    whole_path(path, PROCESS_KIND, 0, (uint32_t)getpid(), 0);
    (void)unlink(path);
    if (process_own != &nobody && !atomic_load(&process_own->thread))
        page_close(process_own);
    process_own = &nobody;
}

void checkpoint_note(int queued, int shares)
{
    atomic_fetch_add(&process_own->queued, queued);
    atomic_fetch_add(&process_own->shares, shares);
}

void checkpoint_device(uint32_t device, bool used)
{
    if (used)
        atomic_fetch_or(&process_own->devices, 1u << device);
    else
        atomic_fetch_and(&process_own->devices, ~(1u << device));
}

/* With the lock: other threads may come and wait, too. */
void checkpoint_await(void)
{
    while (atomic_load(&process_own->state) != CU_PROCESS_STATE_RUNNING && !lies(LIE_UNLOCKED)) {
        (void)pthread_mutex_unlock(&standin.lock);
        nap();
        (void)pthread_mutex_lock(&standin.lock);
    }
}

/* Of this process itself, too: one that was made again sees another start time than others do. */
bool checkpoint_has_released(int pid)
{
    if (pid == getpid())
        return atomic_load(&process_own->state) == CU_PROCESS_STATE_CHECKPOINTED;
    struct process_page *page = page_of(pid);
    const bool released = page && atomic_load(&page->state) == CU_PROCESS_STATE_CHECKPOINTED;
    if (page)
        page_close(page);
    return released;
}

uint32_t checkpoint_devices(int pid)
{
    struct process_page *page = page_of(pid);
    const bool holds = page && atomic_load(&page->state) != CU_PROCESS_STATE_CHECKPOINTED;
    const uint32_t devices = holds ? atomic_load(&page->devices) : 0;
    if (page)
        page_close(page);
    return devices;
}

static CUresult move(struct process_page *page, int from, int to)
{
    return atomic_compare_exchange_strong(&page->state, &from, to) ? CUDA_SUCCESS
                                                                   : CODE_ILLEGAL_STATE;
}

/* -- a call -- */

struct call {
    unsigned kind; /* STANDIN_STATE, ... */
    CUresult (*work)(int pid, struct process_page *page, void *argument);
};

static void hold(const struct call *call, bool done)
{
    struct standin_control *control = standin.control;
    if (!(peek(&control->process_hold_calls) & call->kind) ||
        (peek(&control->process_hold_done) != 0) != done)
        return;
    if (control_take(&control->process_hold_skip))
        return;
    count(&control->held_calls, 1);
    while (peek(&control->process_hold_calls) & call->kind)
        nap();
}

static void slow(const struct call *call)
{
    const uint64_t us = peek(&standin.control->process_slow_us);
    if (peek(&standin.control->process_slow_calls) & call->kind)
        (void)nanosleep(&(struct timespec){(time_t)(us / 1000000), (long)(us % 1000000) * 1000},
                        NULL);
}

static CUresult fault(const struct call *call)
{
    struct standin_control *control = standin.control;
    if (!(peek(&control->process_fail_calls) & call->kind) ||
        control_take(&control->process_fail_skip))
        return CUDA_SUCCESS;
    return (CUresult)peek(&control->process_fail_code);
}

/* As drivers answer: a process that there is not, or one that has no CUDA. */
static CUresult work_on(const struct call *call, int pid, void *argument)
{
    bool alive;
    const bool is_there = process_start_time(pid, &alive) != 0;
    struct process_page *page = alive ? page_of(pid) : NULL;
    if (!page)
        return is_there ? CUDA_ERROR_NOT_INITIALIZED : (CUresult)CODE_OPERATING_SYSTEM;
    const CUresult result = call->work(pid, page, argument);
    page_close(page);
    return result;
}

/* Waits without the lock: other calls of this process may go on. */
static CUresult carry_out(struct call call, int pid, void *argument)
{
    CUresult result = standin_enter(0);
    if (result != CUDA_SUCCESS)
        return result;
    (void)standin_leave(result);
    hold(&call, false);
    slow(&call);
    result = fault(&call);
    if (result == CUDA_SUCCESS)
        result = work_on(&call, pid, argument);
    hold(&call, true);
    return result;
}

/* -- the calls -- */

static CUresult tell_state(int pid, struct process_page *page, void *argument)
{
    (void)pid;
    *(int *)argument = atomic_load(&page->state);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    return carry_out((struct call){STANDIN_STATE, tell_state}, pid, state);
}

static CUresult tell_thread(int pid, struct process_page *page, void *argument)
{
    const int thread = atomic_load(&page->thread);
    *(int *)argument = thread ? thread : pid;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    return carry_out((struct call){0, tell_thread}, pid, tid);
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

static CUresult lock(int pid, struct process_page *page, void *argument)
{
    const CUcheckpointLockArgs *arguments = argument;
    CUresult result = move(page, CU_PROCESS_STATE_RUNNING, CU_PROCESS_STATE_LOCKED);
    (void)pid;
    if (result == CUDA_SUCCESS && !is_idle_within(page, arguments ? arguments->timeoutMs : 0)) {
        atomic_store(&page->state, CU_PROCESS_STATE_RUNNING);
        result = CUDA_ERROR_NOT_READY;
    }
    return result;
}

EXPORTED CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *arguments)
{
    return carry_out((struct call){STANDIN_LOCK, lock}, pid, arguments);
}

/* Lets the process do its part, if it has a thread for that. */
static CUresult ordered(int pid, struct process_page *page, uint32_t order)
{
    bool alive = true;
    if (!atomic_load(&page->thread))
        return CUDA_SUCCESS;
    stage_order(page, order);
    while (alive && atomic_load(&page->order) != ORDER_NOTHING) {
        nap();
        (void)process_start_time(pid, &alive);
    }
    return alive ? (CUresult)atomic_load(&page->result) : (CUresult)CODE_OPERATING_SYSTEM;
}

/* Its memory is the host's meanwhile: whole.c does not count it. */
static CUresult checkpoint(int pid, struct process_page *page, void *argument)
{
    (void)argument;
    if (atomic_load(&page->state) != CU_PROCESS_STATE_LOCKED)
        return CODE_ILLEGAL_STATE;
    if (atomic_load(&page->shares) > 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    const CUresult result = ordered(pid, page, ORDER_OUT);
    return result ? result : move(page, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_CHECKPOINTED);
}

EXPORTED CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *arguments)
{
    return carry_out((struct call){STANDIN_CHECKPOINT, checkpoint}, pid, arguments);
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

/* Of one of this machine's devices, whether or not this process sees it; -1 for others. */
static int device_of(const CUuuid *uuid)
{
    CUuuid like;
    device_uuid(0, &like);
    const int device = uuid->bytes[13] - '0';
    like.bytes[13] = uuid->bytes[13];
    return memcmp(&like, uuid, sizeof(like)) || device < 0 || device >= standin.machine_devices
               ? -1
               : device;
}

/* Fills the page's map: where each device goes. All that are used must be in a map, if there is
 * one, and no two may go to the same. */
static CUresult map_devices(struct process_page *page, const struct restore_map *map)
{
    const uint32_t used = atomic_load(&page->devices);
    uint32_t from = 0, to = 0;
    int version = 0;
    for (uint32_t i = 0; i < DEVICES_MAX; i++)
        page->map[i] = i;
    if (!map || !map->pairs)
        return CUDA_SUCCESS;
    if (cuDriverGetVersion(&version) || version < MAP_VERSION_MIN)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < map->count; i++) {
        const int old = device_of(&map->pairs[i][0]), new = device_of(&map->pairs[i][1]);
        if (old < 0 || new < 0 || from & 1u << old || to & 1u << new)
            return CUDA_ERROR_INVALID_VALUE;
        from |= 1u << old;
        to |= 1u << new;
        if (!peek(&standin.control->process_no_map))
            page->map[old] = (uint32_t) new;
    }
    return used & ~from ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static void use_mapped(struct process_page *page)
{
    const uint32_t used = atomic_load(&page->devices);
    uint32_t now = 0;
    for (uint32_t i = 0; i < DEVICES_MAX; i++)
        now |= used & 1u << i ? 1u << page->map[i] : 0;
    atomic_store(&page->devices, now);
}

/* One that fails is never possible again. */
static CUresult restore(int pid, struct process_page *page, void *argument)
{
    if (atomic_load(&page->state) != CU_PROCESS_STATE_CHECKPOINTED)
        return CODE_ILLEGAL_STATE;
    CUresult result = map_devices(page, argument);
    if (result != CUDA_SUCCESS)
        return result;
    result = ordered(pid, page, ORDER_IN);
    if (result != CUDA_SUCCESS) {
        atomic_store(&page->state, CU_PROCESS_STATE_FAILED);
        return result;
    }
    use_mapped(page);
    result = move(page, CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED);
    if (result == CUDA_SUCCESS && lies(LIE_RESTORED))
        spoil_memory(pid);
    return result;
}

EXPORTED CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *arguments)
{
    return carry_out((struct call){STANDIN_RESTORE, restore}, pid, arguments);
}

static CUresult unlock(int pid, struct process_page *page, void *argument)
{
    (void)pid;
    (void)argument;
    return move(page, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING);
}

EXPORTED CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *arguments)
{
    return carry_out((struct call){STANDIN_UNLOCK, unlock}, pid, arguments);
}
