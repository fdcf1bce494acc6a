/* With PCCHECK_STANDIN_STAGES=1: the thread of a process that takes its device memory into private
 * host memory when it is checkpointed, and back when it is restored. An image of the process, made
 * by another program in between, has it then. */
#include <fcntl.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "process.h"

static void path_of(char *out, const struct file_header *file)
{
    whole_path(out, "memory", file->device, file->pid, file->nonce);
}

static CUresult take_out(struct memory *memory)
{
    const size_t length = HEADER_BYTES + memory->file->length;
    char path[PATH_BYTES];
    void *copy = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    path_of(path, memory->file);
    (void)memcpy(copy, memory->file, length);
    (void)unlink(path);
    (void)mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, memory->file);
    return CUDA_SUCCESS;
}

static bool write_whole(int fd, const uint8_t *bytes, size_t length)
{
    while (length > 0) {
        const ssize_t written = write(fd, bytes, length);
        if (written <= 0)
            return false;
        bytes += written;
        length -= (size_t)written;
    }
    return true;
}

static CUresult take_in(struct memory *memory)
{
    struct file_header *file = memory->file;
    const size_t length = HEADER_BYTES + file->length;
    char path[PATH_BYTES];
    file->device = process_own->map[file->device];
    file->pid = (uint32_t)getpid();
    file->start_time = standin.start_time;
    if (file->length > whole_free(file->device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    path_of(path, file);
    const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const bool whole = fd >= 0 && !fchmod(fd, 0666) && write_whole(fd, (uint8_t *)file, length);
    const void *at = whole
                         ? mmap(file, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0)
                         : MAP_FAILED;
    (void)close(fd);
    return at == MAP_FAILED ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

/* The process may be another one by now, with the same addresses. */
static void move_in(void)
{
    standin.start_time = process_start_time(getpid(), NULL);
    for (int i = 0; i < standin.device_count; i++)
        standin.physical[i] = (int)process_own->map[standin.physical[i]];
}

static CUresult take_all(uint32_t order)
{
    CUresult result = CUDA_SUCCESS;
    if (order == ORDER_IN)
        move_in();
    for (struct memory *at = standin.memories; at && result == CUDA_SUCCESS; at = at->next)
        if (at->kind == MEMORY_OWN)
            result = order == ORDER_IN ? take_in(at) : take_out(at);
    return result;
}

static void *stage(void *unused)
{
    struct process_page *page = process_own;
    (void)unused;
    atomic_store(&page->thread, (int)syscall(SYS_gettid));
    for (;;) {
        const uint32_t order = atomic_load(&page->order);
        if (order == ORDER_NOTHING) {
            (void)syscall(SYS_futex, &page->order, FUTEX_WAIT, ORDER_NOTHING, NULL, NULL, 0);
            continue;
        }
        (void)pthread_mutex_lock(&standin.lock);
        atomic_store(&page->result, (int)take_all(order));
        (void)pthread_mutex_unlock(&standin.lock);
        atomic_store(&page->order, ORDER_NOTHING);
    }
    return NULL;
}

void stage_begin(void)
{
    const char *wanted = getenv("PCCHECK_STANDIN_STAGES");
    pthread_t thread;
    if (!wanted || !*wanted || pthread_create(&thread, NULL, stage, NULL))
        return;
    (void)pthread_detach(thread);
    while (!atomic_load(&process_own->thread))
        (void)sched_yield();
}

void stage_order(struct process_page *page, uint32_t order)
{
    atomic_store(&page->order, order);
    (void)syscall(SYS_futex, &page->order, FUTEX_WAKE, 1, NULL, NULL, 0);
}
