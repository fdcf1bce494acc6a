/* Handles of device memory that another process can open, and what becomes of a dead exporter. */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"

enum { PF_EXITING = 4 };

struct handle {
    uint64_t magic, nonce, length, start_time, sum;
    uint32_t pid, device;
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct handle) == sizeof(CUipcMemHandle), "a handle");

static uint64_t sum_of(const struct handle *handle)
{
    return (handle->magic ^ handle->nonce * 3 ^ handle->length * 5 ^ handle->start_time * 7) +
           handle->pid * 11ull + handle->device * 13ull;
}

/* When the process began, in clock ticks; 0 = there is none. `alive`: and it is not ending. */
uint64_t process_start_time(int pid, bool *alive)
{
    char path[64], text[1024];
    unsigned long long start_time = 0;
    unsigned flags = 0;
    char state = 'X';
    const char *after_name;
    ssize_t length;
    int fd;
    if (alive)
        *alive = false;
    /* The dot: for a process itself qemu's user mode makes up another file of this name. */
    (void)snprintf(path, sizeof(path), "/proc/./%d/stat", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    length = read(fd, text, sizeof(text) - 1);
    (void)close(fd);
    if (length <= 0)
        return 0;
    text[length] = 0;
    after_name = strrchr(text, ')');
    if (!after_name ||
        sscanf(after_name + 1,
               " %c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &state, &flags, &start_time) != 3)
        return 0;
    if (alive)
        *alive = state != 'Z' && state != 'X' && !(flags & PF_EXITING);
    return start_time;
}

bool memory_source_alive(const struct memory *memory)
{
    bool alive;
    if (memory->kind != MEMORY_IMPORTED)
        return true;
    if (atomic_load(&memory->file->freed))
        return false;
    return process_start_time((int)memory->file->pid, &alive) == memory->file->start_time && alive;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr base)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct memory *memory;
    struct handle handle = {.magic = FILE_MAGIC};
    if (result != CUDA_SUCCESS)
        return result;
    memory = memory_find(base, 1);
    if (!out || !memory || memory->address != base || memory->kind != MEMORY_OWN)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    if (control_take(&standin.control->export_fail_count))
        return standin_leave((CUresult)peek(&standin.control->export_fail_code));
    checkpoint_note(0, memory->shared ? 0 : 1);
    memory->shared = true;
    handle.nonce = memory->file->nonce;
    handle.length = memory->length;
    handle.start_time = memory->file->start_time;
    handle.pid = memory->file->pid;
    handle.device = memory->file->device;
    handle.sum = sum_of(&handle);
    (void)memcpy(out, &handle, sizeof(*out));
    return standin_leave(CUDA_SUCCESS);
}

/* The nonce of another allocation of the owner that is as long, if there is one. */
static uint64_t other_nonce(const struct handle *handle)
{
    char start[64];
    uint64_t nonce, found = handle->nonce;
    struct stat about;
    DIR *directory = opendir(standin.directory);
    const struct dirent *entry;
    (void)snprintf(start, sizeof(start), "memory-%" PRIu32 "-%" PRIu32 "-", handle->device,
                   handle->pid);
    while (directory && (entry = readdir(directory)))
        if (!strncmp(entry->d_name, start, strlen(start)) &&
            sscanf(entry->d_name + strlen(start), "%" SCNx64, &nonce) == 1 &&
            nonce != handle->nonce && !fstatat(dirfd(directory), entry->d_name, &about, 0) &&
            (uint64_t)about.st_size == HEADER_BYTES + memory_in_blocks(handle->length))
            found = nonce;
    if (directory)
        (void)closedir(directory);
    return found;
}

void open_takes_time(void)
{
    const uint64_t us = peek(&standin.control->open_us);
    struct CUctx_st *context = standin_current();
    if (!us)
        return;
    if (context)
        context_lock(context);
    (void)pthread_mutex_unlock(&standin.lock);
    (void)nanosleep(&(struct timespec){(time_t)(us / 1000000), (long)(us % 1000000) * 1000}, NULL);
    (void)pthread_mutex_lock(&standin.lock);
    if (context)
        context_unlock(context);
}

/* Maps the exporter's file. Any user may: driver 580.159 let users and root open each other's. */
static CUresult map_exported(const struct handle *handle, struct file_header **out)
{
    static unsigned opened;
    const uint64_t nonce = lies(LIE_OTHER) && opened++ % 2 ? other_nonce(handle) : handle->nonce;
    const size_t length = HEADER_BYTES + memory_in_blocks(handle->length);
    char path[PATH_BYTES];
    struct file_header *file;
    struct stat about;
    bool alive;
    int fd;
    if (process_start_time((int)handle->pid, &alive) != handle->start_time || !alive)
        return CUDA_ERROR_INVALID_HANDLE;
    whole_path(path, "memory", handle->device, handle->pid, nonce);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (fstat(fd, &about) || (standin.same_uid && about.st_uid != geteuid()) ||
        (uint64_t)about.st_size != length) {
        (void)close(fd);
        return CUDA_ERROR_INVALID_VALUE;
    }
    file = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    if (file == MAP_FAILED)
        return CUDA_ERROR_MAP_FAILED;
    if (file->magic != FILE_MAGIC || file->nonce != nonce || atomic_load(&file->freed)) {
        (void)munmap(file, length);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    *out = file;
    return CUDA_SUCCESS;
}

static struct memory *already_open(const struct handle *handle)
{
    for (struct memory *at = standin.memories; at; at = at->next)
        if (at->kind == MEMORY_IMPORTED && !at->going && at->nonce == handle->nonce &&
            at->context == standin_current())
            return at;
    return NULL;
}

static CUresult open_handle(const struct handle *handle, struct memory **out)
{
    struct file_header *file;
    struct memory *memory = already_open(handle);
    CUresult result;
    if (!memory) {
        file = lie_reopen(handle->pid, handle->device, memory_in_blocks(handle->length));
        result = file ? CUDA_SUCCESS : map_exported(handle, &file);
        if (result != CUDA_SUCCESS)
            return result;
        const size_t length = memory_in_blocks(handle->length);
        memory = memory_add(MEMORY_IMPORTED, (uint8_t *)file + HEADER_BYTES, length);
        if (!memory) {
            (void)munmap(file, HEADER_BYTES + length);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        memory->file = file;
        memory->nonce = handle->nonce;
        checkpoint_note(0, 1);
        whole_note("import", file->device, file->nonce, length);
        count(&standin.control->open_mappings, 1);
    }
    memory->opens++;
    count(&standin.control->opens, 1);
    *out = memory;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *base, CUipcMemHandle sent, unsigned flags)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    struct memory *memory = NULL;
    struct handle handle;
    if (result != CUDA_SUCCESS)
        return result;
    (void)memcpy(&handle, &sent, sizeof(handle));
    if (!base || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.magic != FILE_MAGIC ||
        handle.sum != sum_of(&handle))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    if (control_take(&standin.control->open_fail_count))
        return standin_leave((CUresult)peek(&standin.control->open_fail_code));
    if (handle.pid == (uint32_t)getpid() && handle.start_time == standin.start_time)
        return standin_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (handle.device != (uint32_t)standin.physical[standin_current()->device])
        return standin_leave(CODE_PEER_ACCESS_UNSUPPORTED);
    open_takes_time();
    result = open_handle(&handle, &memory);
    if (result == CUDA_SUCCESS)
        *base = memory->address;
    return standin_leave(result);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr base)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    memory = memory_find(base, 1);
    if (!memory || memory->address != base || memory->kind != MEMORY_IMPORTED)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    count(&standin.control->closes, 1);
    if (--memory->opens == 0)
        memory_remove(memory);
    return standin_leave(CUDA_SUCCESS);
}
