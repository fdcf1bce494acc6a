/* Virtual memory: handles of physical memory, reserved addresses, what is mapped where, and
 * descriptors by which other processes get a handle of the same memory. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory.h"

struct physical { /* lives until the last handle and the last mapping */
    struct physical *next;
    struct file_header *file;
    size_t length;
    CUmemAllocationProp properties;
    unsigned handles, mappings;
    bool imported;
};

struct piece { /* one cuMemMap */
    struct piece *next;
    struct physical *physical;
    CUdeviceptr address;
    uint64_t buffer_id;
    int access; /* of the device; 0: none yet */
};

static struct physical *physicals;

static bool is_whole(uint64_t number)
{
    return number && number % BLOCK_BYTES == 0;
}

static struct physical *find(CUmemGenericAllocationHandle handle)
{
    for (struct physical *at = physicals; at; at = at->next)
        if ((uintptr_t)at == handle && at->handles)
            return at;
    return NULL;
}

static struct physical *add(struct file_header *file, size_t length, CUmemAllocationProp properties)
{
    struct physical *made = calloc(1, sizeof(*made));
    if (!made)
        return NULL;
    *made = (struct physical){
        .next = physicals, .file = file, .length = length, .properties = properties, .handles = 1};
    return physicals = made;
}

static void drop_unused(struct physical *physical)
{
    struct physical **at = &physicals;
    if (physical->handles || physical->mappings)
        return;
    while (*at != physical)
        at = &(*at)->next;
    *at = physical->next;
    if (physical->imported) {
        whole_forget("import", physical->file->device, physical->file->nonce);
        count(&standin.control->open_mappings, -1);
        (void)munmap(physical->file, HEADER_BYTES + physical->length);
    } else {
        memory_file_drop(physical->file);
        count(&standin.control->allocations, -1);
        count(&standin.control->allocated_bytes, -(int64_t)physical->length);
    }
    free(physical);
}

static struct piece *piece_at(const struct memory *memory, CUdeviceptr address)
{
    for (struct piece *at = memory->pieces; at; at = at->next)
        if (address >= at->address && address - at->address < at->physical->length)
            return at;
    return NULL;
}

bool vmm_covers(const struct memory *memory, CUdeviceptr address, size_t length, int access)
{
    for (CUdeviceptr at = address; at < address + length;) {
        const struct piece *piece = piece_at(memory, at);
        if (!piece || (piece->access & access) != access)
            return false;
        at = piece->address + piece->physical->length;
    }
    return true;
}

void vmm_describe(const struct memory *memory, CUdeviceptr address, CUdeviceptr *base,
                  size_t *length, uint64_t *buffer_id)
{
    const struct piece *piece = piece_at(memory, address);
    *base = piece->address;
    *length = piece->physical->length;
    *buffer_id = piece->buffer_id;
}

/* The reservation that holds all of this, mapped or not. */
static struct memory *reservation(CUdeviceptr address, size_t length)
{
    for (struct memory *at = standin.memories; at; at = at->next)
        if (at->kind == MEMORY_RESERVED && address >= at->address && length <= at->length &&
            address - at->address <= at->length - length)
            return at;
    return NULL;
}

EXPORTED CUresult cuMemGetAllocationGranularity(size_t *bytes,
                                                const CUmemAllocationProp *properties, int option)
{
    CUresult result = standin_enter(0);
    if (result != CUDA_SUCCESS)
        return result;
    if (!bytes || !properties || (unsigned)option > 1)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    *bytes = BLOCK_BYTES;
    return standin_leave(CUDA_SUCCESS);
}

static CUresult create(struct physical **out, size_t length, const CUmemAllocationProp *properties)
{
    const uint32_t device = (uint32_t)standin.physical[properties->location.id];
    struct file_header *file;
    if (control_take(&standin.control->alloc_fail_count) || length > whole_free(device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    file = memory_file_make(length, device);
    *out = file ? add(file, length, *properties) : NULL;
    if (!*out)
        return CUDA_ERROR_OUT_OF_MEMORY;
    count(&standin.control->allocations, 1);
    count(&standin.control->allocated_bytes, (int64_t)length);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t length,
                              const CUmemAllocationProp *properties, unsigned long long flags)
{
    CUresult result = standin_enter(0);
    struct physical *made = NULL;
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle || !properties || flags || !is_whole(length) ||
        properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return standin_leave(CUDA_ERROR_NOT_SUPPORTED);
    if (properties->location.id < 0 || properties->location.id >= standin.device_count)
        return standin_leave(CUDA_ERROR_INVALID_DEVICE);
    const int alone = whole_begin();
    result = create(&made, length, properties);
    whole_end(alone);
    if (result == CUDA_SUCCESS)
        *handle = (uintptr_t)made;
    return standin_leave(result);
}

EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    CUresult result = standin_enter(0);
    struct physical *physical;
    if (result != CUDA_SUCCESS)
        return result;
    physical = find(handle);
    if (!physical)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    physical->handles--;
    drop_unused(physical);
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    CUresult result = standin_enter(0);
    const struct memory *memory;
    const struct piece *piece;
    if (result != CUDA_SUCCESS)
        return result;
    memory = reservation((uintptr_t)address, 1);
    piece = memory ? piece_at(memory, (uintptr_t)address) : NULL;
    if (!handle || !piece)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    piece->physical->handles++;
    *handle = (uintptr_t)piece->physical;
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                         CUmemGenericAllocationHandle handle)
{
    CUresult result = standin_enter(0);
    const struct physical *physical;
    if (result != CUDA_SUCCESS)
        return result;
    physical = find(handle);
    if (!properties || !physical)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    *properties = physical->properties;
    return standin_leave(CUDA_SUCCESS);
}

/* -- addresses -- */

EXPORTED CUresult cuMemAddressReserve(CUdeviceptr *address, size_t length, size_t alignment,
                                      CUdeviceptr wanted, unsigned long long flags)
{
    CUresult result = standin_enter(0);
    const size_t step = alignment > BLOCK_BYTES ? alignment : BLOCK_BYTES;
    if (result != CUDA_SUCCESS)
        return result;
    (void)wanted; /* a hint */
    if (!address || flags || !length || length % HEADER_BYTES || (alignment & (alignment - 1)))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    uint8_t *bytes =
        mmap(NULL, length + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bytes == MAP_FAILED)
        return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
    const size_t before = step - (uintptr_t)bytes % step;
    (void)munmap(bytes, before);
    if (before < step)
        (void)munmap(bytes + before + length, step - before);
    if (!memory_add(MEMORY_RESERVED, bytes + before, length))
        return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *address = (uintptr_t)(bytes + before);
    count(&standin.control->reserved_bytes, (int64_t)length);
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t length)
{
    CUresult result = standin_enter(0);
    struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    memory = reservation(address, length);
    if (!memory || memory->address != address || memory->length != length || memory->pieces)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    memory_remove(memory);
    count(&standin.control->reserved_bytes, -(int64_t)length);
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemMap(CUdeviceptr address, size_t length, size_t offset,
                           CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    CUresult result = standin_enter(0);
    struct physical *physical;
    struct memory *memory;
    struct piece *piece;
    if (result != CUDA_SUCCESS)
        return result;
    physical = find(handle);
    memory = reservation(address, length);
    if (!physical || !memory || flags || offset || length != physical->length ||
        address % BLOCK_BYTES)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    for (size_t at = 0; at < length; at += BLOCK_BYTES)
        if (piece_at(memory, address + at))
            return standin_leave(CUDA_ERROR_INVALID_VALUE);
    piece = calloc(1, sizeof(*piece));
    /* An old length of 0: a second mapping of the same pages. */
    if (!piece || mremap((uint8_t *)physical->file + HEADER_BYTES, 0, length,
                         MREMAP_MAYMOVE | MREMAP_FIXED, (void *)address) == MAP_FAILED)
        return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
    (void)mprotect((void *)address, length, PROT_NONE);
    *piece = (struct piece){.next = memory->pieces,
                            .physical = physical,
                            .address = address,
                            .buffer_id = ++standin.next_buffer};
    memory->pieces = piece;
    physical->mappings++;
    return standin_leave(CUDA_SUCCESS);
}

/* Whether the range is a number of whole pieces. */
static bool is_pieces(const struct memory *memory, CUdeviceptr address, size_t length)
{
    const struct piece *first = piece_at(memory, address);
    const struct piece *last = piece_at(memory, address + length - 1);
    return length && vmm_covers(memory, address, length, 0) && first->address == address &&
           last->address + last->physical->length == address + length;
}

EXPORTED CUresult cuMemSetAccess(CUdeviceptr address, size_t length, const CUmemAccessDesc *access,
                                 size_t count_of)
{
    CUresult result = standin_enter(0);
    struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    memory = reservation(address, length);
    if (!memory || !access || count_of != 1 || !is_pieces(memory, address, length) ||
        access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->flags & ~3)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    for (struct piece *at = memory->pieces; at; at = at->next)
        if (at->address >= address && at->address - address < length)
            at->access = access->flags;
    (void)mprotect((void *)address, length,
                   access->flags == 3   ? PROT_READ | PROT_WRITE
                   : access->flags == 1 ? PROT_READ
                                        : PROT_NONE);
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemUnmap(CUdeviceptr address, size_t length)
{
    CUresult result = standin_enter(0);
    struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    memory = reservation(address, length);
    if (!memory || !is_pieces(memory, address, length))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    while (memory->busy)
        (void)pthread_cond_wait(&standin.moved, &standin.lock);
    (void)mmap((void *)address, length, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (struct piece **at = &memory->pieces; *at;) {
        struct piece *piece = *at;
        if (piece->address < address || piece->address - address >= length) {
            at = &piece->next;
            continue;
        }
        *at = piece->next;
        piece->physical->mappings--;
        drop_unused(piece->physical);
        free(piece);
    }
    return standin_leave(CUDA_SUCCESS);
}

/* -- other processes -- */

EXPORTED CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                               int type, unsigned long long flags)
{
    CUresult result = standin_enter(0);
    const struct physical *physical;
    char path[PATH_BYTES];
    int fd;
    if (result != CUDA_SUCCESS)
        return result;
    physical = find(handle);
    if (!out || !physical || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        !(physical->properties.requestedHandleTypes & type))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    if (physical->imported)
        return standin_leave(CUDA_ERROR_NOT_SUPPORTED); /* the card can; nothing here needs it */
    if (control_take(&standin.control->export_fail_count))
        return standin_leave((CUresult)peek(&standin.control->export_fail_code));
    const struct file_header *file = physical->file;
    for (const struct physical *at = physicals; at && lies(LIE_DESCRIPTOR); at = at->next)
        if (at != physical && !at->imported && at->length == physical->length)
            file = at->file;
    whole_path(path, "memory", file->device, file->pid, file->nonce);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return standin_leave(CUDA_ERROR_UNKNOWN);
    (void)memcpy(out, &fd, sizeof(fd));
    return standin_leave(CUDA_SUCCESS);
}

static CUresult import(struct physical **out, int fd)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = -1}};
    struct stat about;
    struct file_header *file;
    if (fstat(fd, &about) || about.st_size <= HEADER_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    file = mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (file == MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < standin.device_count && file->magic == FILE_MAGIC; i++)
        if ((uint32_t)standin.physical[i] == file->device)
            properties.location.id = i;
    *out = properties.location.id >= 0 ? add(file, (size_t)about.st_size - HEADER_BYTES, properties)
                                       : NULL;
    if (!*out) {
        (void)munmap(file, (size_t)about.st_size);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    (*out)->imported = true;
    whole_note("import", file->device, file->nonce, (*out)->length);
    count(&standin.control->open_mappings, 1);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                                 void *descriptor, int type)
{
    CUresult result = standin_enter(0);
    struct physical *made = NULL;
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    if (control_take(&standin.control->open_fail_count))
        return standin_leave((CUresult)peek(&standin.control->open_fail_code));
    open_takes_time();
    const int fd = lie_import((int)(intptr_t)descriptor);
    result = import(&made, fd);
    (void)close(fd);
    if (result == CUDA_SUCCESS)
        *handle = (uintptr_t)made;
    return standin_leave(result);
}
