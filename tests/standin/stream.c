/* Streams as queues; what is enqueued runs in the stream's own thread (worker.c). */
#include <signal.h>
#include <stdlib.h>

#include "standin.h"

enum { QUEUE_MAX = 1024 };

void record_release(struct record *record)
{
    if (record && --record->references == 0)
        free(record);
}

static bool is_stream(const struct CUstream_st *stream)
{
    for (const struct CUstream_st *at = standin.streams; at; at = at->next)
        if (at == stream)
            return !at->destroyed;
    return false;
}

/* Resolves a handle; NULL and CU_STREAM_LEGACY (1) are the current context's null stream. */
CUresult stream_resolve(CUstream handle, struct CUstream_st **out)
{
    struct CUstream_st *stream = (uintptr_t)handle <= 1 ? standin_current()->null_stream : handle;
    if ((uintptr_t)handle > 1 && (!is_stream(stream) || stream->null_stream))
        return CUDA_ERROR_INVALID_HANDLE;
    *out = stream;
    return atomic_load(&stream->context->lost);
}

CUresult stream_find(CUstream handle, struct CUstream_st **out)
{
    CUresult result = stream_resolve(handle, out);
    return result == CUDA_SUCCESS ? capture_check(*out) : result;
}

static CUresult start_worker(struct CUstream_st *stream)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    int failed;
    if (stream->started)
        return CUDA_SUCCESS;
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before); /* signals are the program's */
    failed = pthread_create(&thread, &attributes, worker_main, stream);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    stream->started = !failed;
    return failed ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static struct record *wait_record(struct operation *operation)
{
    struct record *record = operation->ended = calloc(1, sizeof(*record));
    if (record)
        record->references = 2; /* the operation's and the waiter's */
    return record;
}

/* With the lock. */
static void count_queued(uint64_t length)
{
    struct standin_control *control = standin.control;
    count(&control->to_device_queued, (int64_t)length);
    if (peek(&control->to_device_queued) > peek(&control->to_device_queued_most))
        count(&control->to_device_queued_most,
              (int64_t)(peek(&control->to_device_queued) - peek(&control->to_device_queued_most)));
}

/* A full queue blocks in the driver. */
static void await_room(struct CUstream_st *stream)
{
    const uint64_t told = peek(&standin.control->launch_queue), most = told ? told : QUEUE_MAX;
    if (stream->queued < most)
        return;
    context_lock(stream->context);
    while (stream->queued >= most && !atomic_load(&stream->context->lost))
        (void)pthread_cond_wait(&standin.moved, &standin.lock);
    context_unlock(stream->context);
}

void operation_uses(struct operation *operation, int change)
{
    for (size_t i = 0; i <= operation->part_count; i++) {
        const struct operation *at = i < operation->part_count ? &operation->parts[i] : operation;
        if (at->from)
            at->from->busy += (unsigned)change;
        if (at->to)
            at->to->busy += (unsigned)change;
    }
}

CUresult stream_enqueue(struct CUstream_st *stream, struct operation operation, bool wait)
{
    await_room(stream);
    struct operation *copy = malloc(sizeof(*copy));
    struct record *ended = NULL;
    CUresult result = copy ? start_worker(stream) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS && wait && !(ended = wait_record(&operation)))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        free(copy);
        return result;
    }
    operation.next = NULL;
    operation.order = ++standin.next_order;
    *copy = operation;
    *(stream->first ? &stream->last->next : &stream->first) = copy;
    stream->last = copy;
    stream->queued++;
    checkpoint_note(1, 0);
    operation_uses(copy, 1);
    count(&standin.control->launches, 1);
    if (copy->record)
        copy->record->references++;
    if (copy->kind == DO_WAIT_EVENT || copy->kind == DO_WAIT_VALUE)
        count(&standin.control->waits, 1);
    if (copy->kind == DO_COPY && copy->copy_kind == STANDIN_TO_DEVICE)
        count_queued(copy->length);
    if (copy->kind == DO_COPY && copy->copy_kind == STANDIN_TO_HOST)
        count(&standin.control->to_host_queued, (int64_t)copy->length);
    (void)pthread_cond_broadcast(&standin.moved);
    if (!ended)
        return CUDA_SUCCESS;
    while (!ended->done)
        (void)pthread_cond_wait(&standin.moved, &standin.lock);
    result = ended->error;
    record_release(ended);
    return result;
}

enum which { ALL, BLOCKING, THIS };

/* Whether streams of the context have work that was enqueued up to `order`. */
static bool has_work(const struct CUctx_st *context, enum which which,
                     const struct CUstream_st *this, uint64_t order)
{
    for (const struct CUstream_st *at = standin.streams; at; at = at->next) {
        const bool counts = which == ALL || at == this ||
                            (which == BLOCKING && !(at->flags & CU_STREAM_NON_BLOCKING));
        if (at->context == context && counts && at->first && at->first->order <= order)
            return true;
    }
    return false;
}

static void drain(struct CUctx_st *context, enum which which, const struct CUstream_st *this)
{
    const uint64_t order = standin.next_order;
    while (has_work(context, which, this, order))
        (void)pthread_cond_wait(&standin.moved, &standin.lock);
}

void stream_drain(struct CUctx_st *context)
{
    drain(context, ALL, NULL);
}

static struct CUstream_st *add(struct CUctx_st *context, unsigned flags)
{
    struct CUstream_st *stream = calloc(1, sizeof(*stream));
    if (!stream)
        return NULL;
    stream->context = context;
    stream->flags = flags;
    stream->next = standin.streams;
    standin.streams = stream;
    count(&standin.control->streams, 1);
    return stream;
}

CUresult stream_null(struct CUctx_st *context)
{
    context->null_stream = add(context, 0);
    if (!context->null_stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->null_stream->null_stream = true;
    return CUDA_SUCCESS;
}

static void destroy(struct CUstream_st *stream)
{
    struct CUstream_st **at = &standin.streams;
    count(&standin.control->streams, -1);
    stream->destroyed = true; /* its thread ends behind what is still enqueued */
    if (!stream->started) {
        while (*at != stream)
            at = &(*at)->next;
        *at = stream->next;
        free(stream);
    }
    (void)pthread_cond_broadcast(&standin.moved);
}

/* What is enqueued ends without being done, as with a lost context. */
void stream_drop_context(struct CUctx_st *context)
{
    const int before = atomic_load(&context->lost);
    atomic_store(&context->lost, CODE_CONTEXT_IS_DESTROYED);
    (void)pthread_cond_broadcast(&standin.moved);
    stream_drain(context);
    for (struct CUstream_st *at = standin.streams, *next; at; at = next) {
        next = at->next;
        if (at->context == context && !at->destroyed)
            destroy(at);
    }
    context->null_stream = NULL;
    atomic_store(&context->lost, before);
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (!stream || (flags & ~1u))
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    *stream = add(standin_current(), flags);
    return standin_leave(*stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult cuStreamDestroy_v2(CUstream stream)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_stream(stream) || stream->null_stream)
        return standin_leave(CUDA_ERROR_INVALID_HANDLE);
    destroy(stream);
    return standin_leave(CUDA_SUCCESS);
}

/* The error of something in the stream is told once. */
static CUresult take_error(struct CUstream_st *stream)
{
    const CUresult error = stream->error;
    const CUresult lost = atomic_load(&stream->context->lost);
    stream->error = CUDA_SUCCESS;
    return lost ? lost : error;
}

CUresult cuStreamQuery(CUstream handle)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    struct CUstream_st *stream;
    if (result != CUDA_SUCCESS)
        return result;
    result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = stream->first && !lies(LIE_SYNC) ? CUDA_ERROR_NOT_READY : take_error(stream);
    return standin_leave(result);
}

CUresult cuStreamSynchronize(CUstream handle)
{
    CUresult result = standin_enter(NEED_CONTEXT | UNSAFE_IN_CAPTURE);
    struct CUstream_st *stream;
    if (result != CUDA_SUCCESS)
        return result;
    result = stream_find(handle, &stream);
    if (result != CUDA_SUCCESS)
        return standin_leave(result);
    if (!lies(LIE_SYNC))
        drain(stream->context, stream->null_stream ? BLOCKING : THIS, stream);
    return standin_leave(take_error(stream));
}
