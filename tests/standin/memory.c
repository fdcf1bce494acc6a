/* Device memory: files of PCCHECK_STANDIN_DIR, mapped where the CPU can touch them, and the list of
 * all memory that streams may use. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory.h"

struct memory *memory_find(CUdeviceptr address, size_t length)
{
    for (struct memory *at = standin.memories; at; at = at->next)
        if (!at->going && address >= at->address && address - at->address < at->length)
            return length <= at->length - (address - at->address) &&
                           (at->kind != MEMORY_RESERVED ||
                            vmm_covers(at, address, length, CU_MEM_ACCESS_FLAGS_PROT_READ))
                       ? at
                       : NULL;
    return NULL;
}

struct memory *memory_of_host(const void *bytes, size_t length, bool *partly)
{
    const uintptr_t start = (uintptr_t)bytes, end = start + length;
    *partly = false;
    for (struct memory *at = standin.memories; at; at = at->next) {
        const uintptr_t first = (uintptr_t)at->bytes, last = first + at->length;
        if (at->going || end <= first || start >= last)
            continue;
        if (start >= first && end <= last)
            return at;
        *partly = true;
    }
    return NULL;
}

struct memory *memory_add(enum memory_kind kind, uint8_t *bytes, size_t length)
{
    struct memory *memory = calloc(1, sizeof(*memory));
    if (!memory)
        return NULL;
    memory->kind = kind;
    memory->bytes = bytes;
    memory->address = (CUdeviceptr)(uintptr_t)bytes;
    memory->length = length;
    memory->context = standin_current();
    memory->buffer_id = lies(LIE_BUFFER) ? (uintptr_t)bytes >> 12 : ++standin.next_buffer;
    memory->next = standin.memories;
    standin.memories = memory;
    return memory;
}

/* Frees, closes and unregisters wait for the whole context first: the real calls may, and who calls
 * them while a stream waits for that very thread shall find out. */
void memory_remove(struct memory *memory)
{
    struct memory **at = &standin.memories;
    memory->going = true;
    if (standin.free_waits && memory->kind != MEMORY_RESERVED)
        stream_drain(memory->context);
    while (memory->busy)
        (void)pthread_cond_wait(&standin.moved, &standin.lock);
    while (*at != memory)
        at = &(*at)->next;
    *at = memory->next;
    if (memory->kind == MEMORY_HOST) {
        count(&standin.control->registered_bytes, -(int64_t)memory->length);
    } else if (memory->kind == MEMORY_IMPORTED) {
        count(&standin.control->open_mappings, -1);
        checkpoint_note(0, -1);
    } else if (memory->kind != MEMORY_RESERVED) {
        checkpoint_note(0, memory->shared ? -1 : 0);
        count(&standin.control->allocations, -1);
        count(&standin.control->allocated_bytes, -(int64_t)memory->length);
    }
    memory_unmap(memory);
    free(memory);
}

static uint32_t physical(const struct CUctx_st *context)
{
    return (uint32_t)standin.physical[context->device];
}

static uint64_t hidden_nonce(const uint8_t *bytes)
{
    return (uintptr_t)bytes ^ (uint64_t)getpid() << 47;
}

/* What importers read from now on is undefined, and looks like it. */
void memory_unmap(struct memory *memory)
{
    switch (memory->kind) {
    case MEMORY_HOST:
        break;
    case MEMORY_OWN:
        atomic_store(&memory->file->freed, !lies(LIE_REOPENED));
        if (memory->shared && !lies(LIE_REOPENED))
            (void)memset(memory->bytes, SCRAMBLED, memory->length);
        memory_file_drop(memory->file);
        break;
    case MEMORY_IMPORTED:
        whole_forget("import", memory->file->device, memory->file->nonce);
        free(memory->first_read);
        if (lies(LIE_REOPENED))
            lie_close(memory);
        else
            (void)munmap(memory->file, HEADER_BYTES + memory->length);
        break;
    case MEMORY_UNSHAREABLE:
        whole_forget("hidden", physical(memory->context), hidden_nonce(memory->bytes));
        (void)munmap(memory->bytes, memory->length);
        break;
    case MEMORY_RESERVED:
        (void)munmap(memory->bytes, memory->length);
        break;
    }
}

void memory_drop_context(struct CUctx_st *context)
{
    for (struct memory *at = standin.memories, *next; at; at = next) {
        next = at->next;
        if (at->context == context && !at->going && at->kind != MEMORY_RESERVED)
            memory_remove(at); /* nothing is enqueued any more: this does not wait */
    }
}

size_t memory_in_blocks(size_t length)
{
    return length < SHARED_BLOCK ? length : (length + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

void memory_file_drop(struct file_header *file)
{
    char path[PATH_BYTES];
    whole_path(path, "memory", file->device, file->pid, file->nonce);
    (void)unlink(path);
    (void)munmap(file, HEADER_BYTES + file->length);
}

struct file_header *memory_file_make(size_t wanted, uint32_t device)
{
    const size_t length = memory_in_blocks(wanted);
    struct file_header *file;
    uint64_t nonce = 0;
    char path[PATH_BYTES];
    int fd;
    (void)!getrandom(&nonce, sizeof(nonce), 0);
    whole_path(path, "memory", device, (uint32_t)getpid(), nonce);
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return NULL;
    (void)fchmod(fd, 0666); /* whether another user may open it is not the file system's say */
    file = ftruncate(fd, (off_t)(HEADER_BYTES + length))
               ? MAP_FAILED
               : mmap(NULL, HEADER_BYTES + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    (void)close(fd);
    if (file == MAP_FAILED) {
        (void)unlink(path);
        return NULL;
    }
    file->nonce = nonce;
    file->length = length;
    file->start_time = standin.start_time;
    file->pid = (uint32_t)getpid();
    file->device = device;
    file->magic = FILE_MAGIC;
    return file;
}

static CUresult take(CUdeviceptr *address, size_t length, enum memory_kind kind)
{
    struct file_header *file = NULL;
    struct memory *memory;
    uint8_t *bytes;
    if (memory_in_blocks(length) > whole_free(physical(standin_current())))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (kind == MEMORY_OWN) {
        file = memory_file_make(length, physical(standin_current()));
        bytes = file ? (uint8_t *)file + HEADER_BYTES : NULL;
    } else {
        bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (bytes == MAP_FAILED)
            bytes = NULL;
        else
            whole_note("hidden", physical(standin_current()), hidden_nonce(bytes), length);
    }
    memory = bytes ? memory_add(kind, bytes, length) : NULL;
    if (!memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memory->file = file;
    if (length <= FRESH_BYTES_MAX)
        (void)memset(bytes, FRESH, length);
    count(&standin.control->allocations, 1);
    count(&standin.control->allocated_bytes, (int64_t)length);
    *address = memory->address;
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *address, size_t length, enum memory_kind kind)
{
    if (!address || !length)
        return CUDA_ERROR_INVALID_VALUE;
    if (control_take(&standin.control->alloc_fail_count))
        return CUDA_ERROR_OUT_OF_MEMORY;
    const int alone = whole_begin();
    const CUresult result = take(address, length, kind);
    whole_end(alone);
    return result;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t length)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    if (result != CUDA_SUCCESS)
        return result;
    return standin_leave(allocate(address, length, MEMORY_OWN));
}

EXPORTED CUresult standinAllocUnshareable(CUdeviceptr *address, size_t length)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    return standin_leave(allocate(address, length, MEMORY_UNSHAREABLE));
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    if (!address)
        return standin_leave(CUDA_SUCCESS);
    memory = memory_find(address, 1);
    if (!memory || memory->address != address ||
        (memory->kind != MEMORY_OWN && memory->kind != MEMORY_UNSHAREABLE))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    if (!lies(LIE_FREED))
        memory_remove(memory);
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    *free_bytes = whole_free(physical(standin_current()));
    *total_bytes = standin.device_bytes;
    return standin_leave(CUDA_SUCCESS);
}

struct extent {
    CUdeviceptr base;
    size_t length;
    uint64_t buffer_id;
};

/* The allocation, or the piece of virtual memory, that the address is in. */
static struct extent extent_of(const struct memory *memory, CUdeviceptr address)
{
    struct extent found = {memory->address, memory->length, memory->buffer_id};
    if (memory->kind == MEMORY_RESERVED)
        vmm_describe(memory, address, &found.base, &found.length, &found.buffer_id);
    return found;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *length, CUdeviceptr address)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    const struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    memory = memory_find(address, 1);
    if (!memory || memory->kind == MEMORY_HOST)
        return standin_leave(CUDA_ERROR_NOT_FOUND);
    if (memory->kind == MEMORY_IMPORTED && peek(&standin.control->range_fail) & 1)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    const struct extent extent = extent_of(memory, address);
    if (base)
        *base = extent.base;
    if (length)
        *length = extent.length;
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
    CUresult result = standin_enter(0);
    const struct memory *memory;
    bool partly;
    if (result != CUDA_SUCCESS)
        return result;
    memory = memory_find(address, 1);
    if (!memory) /* a host pointer is one, too */
        memory = memory_of_host((const void *)(uintptr_t)address, 1, &partly);
    if (memory && memory->kind == MEMORY_RESERVED && !vmm_covers(memory, address, 1, 0))
        memory = NULL; /* an address without memory */
    if (!memory || !value)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value =
            memory->kind == MEMORY_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(uint64_t *)value = extent_of(memory, address).buffer_id;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        if (memory->kind == MEMORY_IMPORTED && peek(&standin.control->range_fail) & 2)
            return standin_leave(CUDA_ERROR_NOT_SUPPORTED);
        *(uint64_t *)value = attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE
                                 ? extent_of(memory, address).length
                                 : extent_of(memory, address).base;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = memory->context->device;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(bool *)value = memory->kind == MEMORY_OWN; /* the driver writes one byte */
        break;
    default:
        result = CUDA_ERROR_INVALID_VALUE;
    }
    return standin_leave(result);
}
