/* Host memory that devices may use: registered, never allocated here. */
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

/* The driver may hand out another address than the CPU's, so that using the wrong one fails here
 * as it may fail there. No CPU can touch this one. */
static const CUdeviceptr DEVICE_VIEW = 1ull << 52;

enum { LARGE_BYTES = 1 << 20 };

static bool is_mapped(const void *address, size_t length)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = (uintptr_t)address / page * page;
    const uintptr_t last = ((uintptr_t)address + length + page - 1) / page * page;
    unsigned char seen[256];
    for (uintptr_t at = first; at < last; at += sizeof(seen) * page) {
        const uintptr_t left = last - at;
        if (mincore((void *)at, left < sizeof(seen) * page ? left : sizeof(seen) * page, seen))
            return false;
    }
    return true;
}

/* How long others had the driver to themselves since the last time. */
static void note_pause(void)
{
    static uint64_t last_us;
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    const uint64_t us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    const uint64_t before = peek(&standin.control->register_pause_us);
    if (last_us && (!before || us - last_us < before))
        __atomic_store_n(&standin.control->register_pause_us, us - last_us, __ATOMIC_RELEASE);
    last_us = us;
}

/* A portable registration maps the memory in every context. No vendor text says what one that is
 * lost means for that: here it fails the call. */
static CUresult portable_result(unsigned flags)
{
    for (int i = 0; flags & CU_MEMHOSTREGISTER_PORTABLE && i < standin.device_count; i++) {
        const struct CUctx_st *context = &standin.contexts[i];
        if (context->retained && atomic_load(&context->lost))
            return (CUresult)atomic_load(&context->lost);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *address, size_t length, unsigned flags)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    struct memory *memory;
    bool partly = false;
    if (result != CUDA_SUCCESS)
        return result;
    if (!address || !length || (flags & ~15u) || (uintptr_t)address + length < length)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    if (control_take(&standin.control->register_fail_count))
        return standin_leave((CUresult)peek(&standin.control->register_fail_code));
    if (memory_of_host(address, length, &partly) || partly)
        return standin_leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    if (!is_mapped(address, length))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    result = portable_result(flags);
    if (result != CUDA_SUCCESS)
        return standin_leave(result);
    memory = memory_add(MEMORY_HOST, address, length);
    if (!memory)
        return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
    memory->address += DEVICE_VIEW;
    memory->flags = flags;
    count(&standin.control->registered_bytes, (int64_t)length);
    if (length >= LARGE_BYTES)
        note_pause();
    return standin_leave(CUDA_SUCCESS);
}

static struct memory *registered(const void *address)
{
    bool partly;
    struct memory *memory = memory_of_host(address, 1, &partly);
    return memory && memory->kind == MEMORY_HOST ? memory : NULL;
}

CUresult cuMemHostUnregister(void *address)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    memory = registered(address);
    if (!memory || memory->bytes != address)
        return standin_leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    memory_remove(memory);
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    const struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    memory = registered(host);
    if (!device || flags || !memory || !(memory->flags & CU_MEMHOSTREGISTER_DEVICEMAP) ||
        (memory->context != standin_current() && !(memory->flags & CU_MEMHOSTREGISTER_PORTABLE)))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    *device = memory->address + ((uintptr_t)host - (uintptr_t)memory->bytes);
    return standin_leave(CUDA_SUCCESS);
}
