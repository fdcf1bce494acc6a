/* Devices and primary contexts; the thread's stack of current contexts. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "memory.h"

enum { STACK_DEPTH = 64 };
static _Thread_local struct CUctx_st *stack[STACK_DEPTH];
static _Thread_local int depth;

struct CUctx_st *standin_current(void)
{
    return depth ? stack[depth - 1] : NULL;
}

void context_await(const struct CUctx_st *context)
{
    while (context->locked && !pthread_equal(context->locked_by, pthread_self()))
        (void)pthread_cond_wait(&standin.moved, &standin.lock);
}

void context_lock(struct CUctx_st *context)
{
    context->locked_by = pthread_self();
    context->locked = true;
}

void context_unlock(struct CUctx_st *context)
{
    context->locked = false;
    (void)pthread_cond_broadcast(&standin.moved);
}

/* As the first launch of a kernel whose module is loaded lazily: it waits for the GPU to be idle.
 */
EXPORTED CUresult standinLoadModule(void)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    context_lock(standin_current());
    stream_drain(standin_current());
    context_unlock(standin_current());
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetCount(int *device_count)
{
    CUresult result = standin_enter(0);
    if (result != CUDA_SUCCESS)
        return result;
    *device_count = standin.device_count;
    return standin_leave(CUDA_SUCCESS);
}

/* Enters, and checks the ordinal. */
static CUresult enter_device(CUdevice device, const void *out)
{
    CUresult result = standin_enter(0);
    if (result != CUDA_SUCCESS)
        return result;
    if (device < 0 || device >= standin.device_count)
        return standin_leave(CUDA_ERROR_INVALID_DEVICE);
    return out ? CUDA_SUCCESS : standin_leave(CUDA_ERROR_INVALID_VALUE);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult result = enter_device(ordinal, device);
    if (result != CUDA_SUCCESS)
        return result;
    *device = ordinal;
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUresult result = enter_device(device, name);
    if (result != CUDA_SUCCESS)
        return result;
    if (length > 0)
        (void)snprintf(name, (size_t)length, "Stand-in GPU %d", standin.physical[device]);
    return standin_leave(CUDA_SUCCESS);
}

void device_uuid(int physical, CUuuid *uuid)
{
    (void)memcpy(uuid->bytes, "stand-in gpu -\xA5\x5A", sizeof(uuid->bytes));
    uuid->bytes[13] = (char)('0' + physical);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    CUresult result = enter_device(device, uuid);
    if (result != CUDA_SUCCESS)
        return result;
    device_uuid(standin.physical[device], uuid);
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    CUresult result = enter_device(device, value);
    if (result != CUDA_SUCCESS)
        return result;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        *value = 1;
        break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        *value = (int)peek(&standin.control->compute_mode);
        break;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
        *value = !peek(&standin.control->no_memory_ops);
        break;
    default:
        result = CUDA_ERROR_INVALID_VALUE;
    }
    return standin_leave(result);
}

/* A context takes its part of the device's memory. */
static CUresult context_take(struct CUctx_st *context)
{
    const uint32_t device = (uint32_t)standin.physical[context->device];
    const int alone = whole_begin();
    const bool fits = standin.context_bytes <= whole_free(device);
    if (fits && standin.context_bytes)
        whole_note("context", device, (uint64_t)getpid(), standin.context_bytes);
    whole_end(alone);
    return fits ? stream_null(context) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult result = enter_device(device, context);
    struct CUctx_st *primary;
    if (result != CUDA_SUCCESS)
        return result;
    primary = &standin.contexts[device];
    if (primary->retained == 0 && (result = context_take(primary)) != CUDA_SUCCESS)
        return standin_leave(result);
    if (atomic_load(&primary->lost))
        return standin_leave(atomic_load(&primary->lost));
    if (primary->retained++ == 0 && standin.contexts_held++ == 0)
        checkpoint_begin();
    if (primary->retained == 1) {
        checkpoint_device((uint32_t)standin.physical[device], true);
        count(&standin.control->contexts, 1);
    }
    *context = primary;
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult result = enter_device(device, &device);
    struct CUctx_st *primary;
    if (result != CUDA_SUCCESS)
        return result;
    primary = &standin.contexts[device];
    if (primary->retained == 0)
        return standin_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (--primary->retained == 0) { /* everything in it ends with it */
        count(&standin.control->contexts, -1);
        stream_drop_context(primary);
        memory_drop_context(primary);
        checkpoint_device((uint32_t)standin.physical[device], false);
        if (--standin.contexts_held == 0)
            checkpoint_end();
        whole_forget("context", (uint32_t)standin.physical[device], (uint64_t)getpid());
    }
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    CUresult result = enter_device(device, active);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags)
        *flags = 0;
    *active = standin.contexts[device].retained != 0;
    return standin_leave(CUDA_SUCCESS);
}

static bool is_context(const struct CUctx_st *context)
{
    return context >= standin.contexts && context < standin.contexts + standin.device_count;
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CUresult result = standin_enter(0);
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_context(context) || !context->retained || depth == STACK_DEPTH)
        return standin_leave(CUDA_ERROR_INVALID_CONTEXT);
    stack[depth++] = context;
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    CUresult result = standin_enter(0);
    if (result != CUDA_SUCCESS)
        return result;
    if (!depth)
        return standin_leave(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (context)
        *context = stack[depth];
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuCtxSetCurrent(CUcontext context)
{
    CUresult result = standin_enter(0);
    if (result != CUDA_SUCCESS)
        return result;
    if (context && (!is_context(context) || !context->retained))
        return standin_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (depth)
        depth--; /* replaces the top of the stack; NULL only takes it off */
    if (context)
        stack[depth++] = context;
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuCtxGetCurrent(CUcontext *context)
{
    CUresult result = standin_enter(0);
    if (result != CUDA_SUCCESS)
        return result;
    *context = standin_current();
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuCtxGetDevice(CUdevice *device)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    *device = standin_current()->device;
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuCtxSynchronize(void)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    if (result != CUDA_SUCCESS)
        return result;
    stream_drain(standin_current());
    return standin_leave(atomic_load(&standin_current()->lost));
}
