/* Events, and the operations that wait for words and write them. */
#include <stdlib.h>

#include "standin.h"

static bool is_event(const struct CUevent_st *event)
{
    for (const struct CUevent_st *at = standin.events; at; at = at->next)
        if (at == event)
            return true;
    return false;
}

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct CUevent_st *made;
    if (result != CUDA_SUCCESS)
        return result;
    if (!event || (flags & ~7u))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    made = calloc(1, sizeof(*made));
    if (!made)
        return standin_leave(CUDA_ERROR_OUT_OF_MEMORY);
    made->context = standin_current();
    made->next = standin.events;
    standin.events = made;
    count(&standin.control->events, 1);
    *event = made;
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent event)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct CUevent_st **at = &standin.events;
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_event(event))
        return standin_leave(CUDA_ERROR_INVALID_HANDLE);
    while (*at != event)
        at = &(*at)->next;
    *at = event->next;
    record_release(event->record); /* who waits for it has a reference */
    free(event);
    count(&standin.control->events, -1);
    return standin_leave(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent event, CUstream handle)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct CUstream_st *stream;
    struct record *record;
    if (result != CUDA_SUCCESS)
        return result;
    result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && (!is_event(event) || event->context != stream->context))
        result = CUDA_ERROR_INVALID_HANDLE;
    record = result == CUDA_SUCCESS ? calloc(1, sizeof(*record)) : NULL;
    if (!record)
        return standin_leave(result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result);
    record->references = 1;
    result = stream_enqueue(stream, (struct operation){.kind = DO_RECORD, .record = record}, false);
    if (result != CUDA_SUCCESS) {
        record_release(record);
        return standin_leave(result);
    }
    record_release(event->record);
    event->record = record;
    return standin_leave(CUDA_SUCCESS);
}

/* Enters for a call about an event, which needs no current context. */
static CUresult enter_event(CUevent event)
{
    CUresult result = standin_enter(UNSAFE_IN_CAPTURE);
    if (result != CUDA_SUCCESS)
        return result;
    if (is_event(event))
        context_await(event->context);
    result = is_event(event) ? atomic_load(&event->context->lost) : CUDA_ERROR_INVALID_HANDLE;
    return result == CUDA_SUCCESS ? result : standin_leave(result);
}

CUresult cuEventQuery(CUevent event)
{
    CUresult result = enter_event(event);
    if (result != CUDA_SUCCESS)
        return result;
    if (event->record && !lies(LIE_EVENT))
        result = event->record->done ? event->record->error : CUDA_ERROR_NOT_READY;
    return standin_leave(result);
}

EXPORTED CUresult cuEventSynchronize(CUevent event)
{
    CUresult result = enter_event(event);
    struct record *record;
    if (result != CUDA_SUCCESS)
        return result;
    record = event->record;
    if (!record || lies(LIE_EVENT))
        return standin_leave(CUDA_SUCCESS);
    record->references++;
    while (!record->done)
        (void)pthread_cond_wait(&standin.moved, &standin.lock);
    result = record->error;
    record_release(record);
    return standin_leave(result);
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct CUstream_st *stream;
    if (result != CUDA_SUCCESS)
        return result;
    if (flags)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && !is_event(event))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS && event->record && /* never recorded: nothing to wait for */
        !lies(LIE_EVENT_WAIT))
        result = stream_enqueue(
            stream, (struct operation){.kind = DO_WAIT_EVENT, .record = event->record}, false);
    return standin_leave(result);
}

/* A word that the stream's device can reach; its flags are 0: >=, and a fence before a write. */
static CUresult enqueue_word(enum operation_kind kind, CUstream handle, CUdeviceptr address,
                             uint64_t value, unsigned flags)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct CUstream_st *stream;
    struct memory *memory;
    if (result != CUDA_SUCCESS)
        return result;
    if (peek(&standin.control->no_memory_ops))
        return standin_leave(CUDA_ERROR_NOT_SUPPORTED);
    result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return standin_leave(result);
    memory = memory_find(address, sizeof(uint64_t));
    if (!memory || address % sizeof(uint64_t) || flags ||
        (memory->kind == MEMORY_HOST && memory->context != stream->context &&
         !(memory->flags & CU_MEMHOSTREGISTER_PORTABLE)) ||
        (memory->kind == MEMORY_HOST && !(memory->flags & CU_MEMHOSTREGISTER_DEVICEMAP)))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    const struct operation operation = {.kind = kind,
                                        .to = memory,
                                        .target = memory->bytes + (address - memory->address),
                                        .value = value};
    const bool is_liar = lies(LIE_WORD_WAIT_ONE) && stream->context->device == 0;
    if (kind == DO_WAIT_VALUE && (lies(LIE_WORD_WAIT) || is_liar))
        return standin_leave(CUDA_SUCCESS);
    if (kind == DO_WRITE && lies(LIE_WORD_EARLY))
        __atomic_store_n((uint64_t *)(void *)operation.target, value, __ATOMIC_SEQ_CST);
    return standin_leave(stream_enqueue(stream, operation, false));
}

CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value,
                                unsigned flags)
{
    return enqueue_word(DO_WAIT_VALUE, stream, address, value, flags);
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value,
                                 unsigned flags)
{
    if (control_take(&standin.control->write_fail_count))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return enqueue_word(DO_WRITE, stream, address, value, flags);
}
