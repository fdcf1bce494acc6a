/* Copies, fills and host functions: checked and enqueued. */
#include <stdlib.h>

#include "standin.h"

/* Enters and resolves the stream. */
static CUresult enter_stream(CUstream handle, unsigned needs, struct CUstream_st **stream)
{
    CUresult result = standin_enter(NEED_CONTEXT | needs);
    if (result != CUDA_SUCCESS)
        return result;
    result = stream_find(handle, stream);
    return result == CUDA_SUCCESS ? result : standin_leave(result);
}

static uint8_t *bytes_of(const struct memory *memory, CUdeviceptr address)
{
    return memory->bytes + (address - memory->address);
}

static struct memory *memory_to_write(CUdeviceptr device, size_t length)
{
    struct memory *memory = memory_find(device, length);
    const bool is_closed = memory && memory->kind == MEMORY_RESERVED &&
                           !vmm_covers(memory, device, length, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    return is_closed ? NULL : memory;
}

/* Host memory: `memory` is NULL when it is pageable. Not any that is on a device, nor any that is
 * registered only in part: the driver refuses both. */
static CUresult host_side(const void *host, size_t length, const struct CUstream_st *stream,
                          struct memory **memory)
{
    bool partly;
    *memory = memory_of_host(host, length, &partly);
    if (partly || (*memory && (*memory)->kind != MEMORY_HOST) || !host)
        return CUDA_ERROR_INVALID_VALUE;
    if (*memory && (*memory)->context != stream->context &&
        !((*memory)->flags & CU_MEMHOSTREGISTER_PORTABLE))
        *memory = NULL;
    return CUDA_SUCCESS;
}

/* The fault that a test asks for: the call's, or one that the operation ends with. */
static CUresult take_fault(struct CUstream_st *stream, struct operation *operation)
{
    bool async;
    const CUresult fault = control_copy_fault(operation->copy_kind, &async);
    operation->kind = DO_COPY;
    operation->code = async ? fault : CUDA_SUCCESS;
    if (!fault || async)
        return CUDA_SUCCESS;
    if (code_is_sticky(fault))
        atomic_store(&stream->context->lost, fault);
    (void)pthread_cond_broadcast(&standin.moved);
    return fault;
}

static CUresult enqueue_copy(struct CUstream_st *stream, struct operation operation, bool wait)
{
    const CUresult fault = take_fault(stream, &operation);
    const bool pageable = !operation.from || !operation.to;
    if (fault)
        return fault;
    if (pageable && !wait)
        count(&standin.control->pageable_copies, 1);
    return stream_enqueue(stream, operation, wait || pageable);
}

static CUresult to_host(void *host, CUdeviceptr device, size_t length, CUstream handle, bool wait)
{
    struct CUstream_st *stream;
    struct operation operation = {.target = host, .length = length, .copy_kind = STANDIN_TO_HOST};
    CUresult result = enter_stream(handle, wait ? UNSAFE_IN_CAPTURE : 0, &stream);
    if (result != CUDA_SUCCESS || !length)
        return result == CUDA_SUCCESS ? standin_leave(result) : result;
    operation.from = memory_find(device, length);
    result =
        operation.from ? host_side(host, length, stream, &operation.to) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        operation.source = bytes_of(operation.from, device);
        result = enqueue_copy(stream, operation, wait);
    }
    return standin_leave(result);
}

static CUresult to_device(CUdeviceptr device, const void *host, size_t length, CUstream handle,
                          bool wait)
{
    struct CUstream_st *stream;
    struct operation operation = {.source = host, .length = length, .copy_kind = STANDIN_TO_DEVICE};
    CUresult result = enter_stream(handle, wait ? UNSAFE_IN_CAPTURE : 0, &stream);
    if (result != CUDA_SUCCESS || !length)
        return result == CUDA_SUCCESS ? standin_leave(result) : result;
    operation.to = memory_to_write(device, length);
    result =
        operation.to ? host_side(host, length, stream, &operation.from) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        operation.target = bytes_of(operation.to, device);
        result = enqueue_copy(stream, operation, wait);
    }
    return standin_leave(result);
}

CUresult cuMemcpyDtoHAsync_v2(void *host, CUdeviceptr device, size_t length, CUstream stream)
{
    return to_host(host, device, length, stream, false);
}

EXPORTED CUresult cuMemcpyDtoH_v2(void *host, CUdeviceptr device, size_t length)
{
    return to_host(host, device, length, NULL, true);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr device, const void *host, size_t length, CUstream stream)
{
    return to_device(device, host, length, stream, false);
}

EXPORTED CUresult cuMemcpyHtoD_v2(CUdeviceptr device, const void *host, size_t length)
{
    return to_device(device, host, length, NULL, true);
}

static CUresult on_device(CUdeviceptr to, CUdeviceptr from, size_t length, struct operation *out)
{
    *out = (struct operation){.length = length, .copy_kind = STANDIN_ON_DEVICE};
    out->from = memory_find(from, length);
    out->to = memory_to_write(to, length);
    if (!out->from || !out->to)
        return CUDA_ERROR_INVALID_VALUE;
    out->source = bytes_of(out->from, from);
    out->target = bytes_of(out->to, to);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t length, CUstream handle)
{
    struct CUstream_st *stream;
    struct operation operation;
    CUresult result = enter_stream(handle, 0, &stream);
    if (result != CUDA_SUCCESS || !length)
        return result == CUDA_SUCCESS ? standin_leave(result) : result;
    result = on_device(to, from, length, &operation);
    return standin_leave(result == CUDA_SUCCESS ? enqueue_copy(stream, operation, false) : result);
}

/* Each copy has one set of attributes: set k is that of the copies from firsts[k] on. */
static bool attributes_fit(const CUmemcpyAttributes *attributes, const size_t *firsts,
                           size_t attribute_count, size_t count)
{
    if (!attributes || !firsts || !attribute_count || attribute_count > count || firsts[0])
        return false;
    for (size_t k = 0; k < attribute_count; k++)
        if (attributes[k].srcAccessOrder < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
            attributes[k].srcAccessOrder > CU_MEMCPY_SRC_ACCESS_ORDER_ANY ||
            attributes[k].flags > CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE ||
            (k && firsts[k] <= firsts[k - 1]) || firsts[k] >= count)
            return false;
    return true;
}

/* Copies before the one that is refused are enqueued. Nobody promises that, nor the opposite. */
static CUresult enqueue_batch(struct CUstream_st *stream, const CUdeviceptr *to,
                              const CUdeviceptr *from, const size_t *lengths, size_t count,
                              size_t *failed)
{
    struct operation batch = {.kind = DO_BATCH, .parts = calloc(count, sizeof(*batch.parts))};
    CUresult result = batch.parts ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY, queued = CUDA_SUCCESS;
    while (result == CUDA_SUCCESS && batch.part_count < count) {
        struct operation *part = &batch.parts[batch.part_count];
        const size_t i = batch.part_count;
        result =
            lengths[i] ? on_device(to[i], from[i], lengths[i], part) : CUDA_ERROR_INVALID_VALUE;
        if (result == CUDA_SUCCESS)
            result = take_fault(stream, part);
        if (result == CUDA_SUCCESS)
            batch.part_count++;
        else if (failed)
            *failed = i;
    }
    if (batch.part_count)
        queued = stream_enqueue(stream, batch, false);
    if (!batch.part_count || queued != CUDA_SUCCESS)
        free(batch.parts);
    return result == CUDA_SUCCESS ? queued : result;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *lengths, size_t count,
                            CUmemcpyAttributes *attributes, size_t *firsts, size_t attribute_count,
                            size_t *failed, CUstream handle)
{
    struct CUstream_st *stream;
    CUresult result = enter_stream(handle, 0, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (failed)
        *failed = SIZE_MAX;
    if (stream->null_stream || !to || !from || !lengths ||
        !attributes_fit(attributes, firsts, attribute_count, count))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    result = (CUresult)peek(&standin.control->batch_fail_code);
    if (result == CUDA_SUCCESS)
        result = enqueue_batch(stream, to, from, lengths, count, failed);
    return standin_leave(result);
}

static CUresult fill(CUdeviceptr device, uint64_t value, size_t length, unsigned width,
                     CUstream handle)
{
    struct CUstream_st *stream;
    struct memory *memory;
    CUresult result = enter_stream(handle, 0, &stream);
    if (result != CUDA_SUCCESS || !length)
        return result == CUDA_SUCCESS ? standin_leave(result) : result;
    memory = memory_to_write(device, length);
    if (!memory || device % width)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    result = stream_enqueue(stream,
                            (struct operation){.kind = DO_FILL,
                                               .to = memory,
                                               .target = bytes_of(memory, device),
                                               .length = length,
                                               .value = value,
                                               .width = width},
                            false);
    return standin_leave(result);
}

EXPORTED CUresult cuMemsetD8Async(CUdeviceptr device, unsigned char value, size_t length,
                                  CUstream stream)
{
    return fill(device, value, length, 1, stream);
}

EXPORTED CUresult cuMemsetD32Async(CUdeviceptr device, unsigned value, size_t words,
                                   CUstream stream)
{
    return fill(device, value, words * sizeof(value), sizeof(value), stream);
}

EXPORTED CUresult cuLaunchHostFunc(CUstream handle, void (*function)(void *), void *data)
{
    struct CUstream_st *stream;
    CUresult result = enter_stream(handle, 0, &stream);
    if (result != CUDA_SUCCESS)
        return result;
    if (!function)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    result = stream_enqueue(
        stream, (struct operation){.kind = DO_CALL, .function = function, .data = data}, false);
    return standin_leave(result);
}
