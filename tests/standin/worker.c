/* A stream's thread: does what is enqueued, in order. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "standin.h"

enum { SLICE_BYTES = 1 << 20, PAGE = 4096, POLL_NS = 20000 };

static void nap(uint64_t ns)
{
    const struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    (void)nanosleep(&time, NULL);
}

/* Order between streams: the null stream's with those that are not "non-blocking", or, on demand,
 * that of everything (one hardware queue). */
static bool in_order(const struct CUstream_st *stream)
{
    const bool one_queue = peek(&standin.control->one_queue) != 0;
    for (const struct CUstream_st *at = standin.streams; at; at = at->next) {
        const bool ordered = at->context == stream->context &&
                             (at->null_stream || stream->null_stream) &&
                             !((at->flags | stream->flags) & CU_STREAM_NON_BLOCKING);
        if (at != stream && at->first && at->first->order < stream->first->order &&
            (ordered || one_queue))
            return false;
    }
    return stream->first->kind != DO_WAIT_EVENT || stream->first->record->done;
}

/* The copy engine that the stream's next operation needs, or NULL. */
static const struct CUstream_st **engine_of(const struct CUstream_st *stream)
{
    const struct operation *next = stream->first;
    if (!next || next->kind != DO_COPY || next->copy_kind == STANDIN_ON_DEVICE)
        return NULL;
    return &stream->context->engine[next->copy_kind == STANDIN_TO_DEVICE];
}

/* A device has one copy engine for each direction. It does one copy at a time, whatever the
 * streams: of those that could run, the one that was enqueued first. */
static bool has_engine(const struct CUstream_st *stream)
{
    const struct CUstream_st **engine = engine_of(stream);
    if (!engine || atomic_load(&stream->context->lost))
        return true;
    for (const struct CUstream_st *at = standin.streams; at; at = at->next)
        if (at != stream && engine_of(at) == engine && at->first->order < stream->first->order &&
            in_order(at))
            return false;
    return *engine == NULL;
}

static bool may_run(const struct CUstream_st *stream)
{
    return atomic_load(&stream->context->lost) || (in_order(stream) && has_engine(stream));
}

static void hold(const struct operation *operation, const struct CUctx_st *context)
{
    struct standin_control *control = standin.control;
    if (!(peek(&control->copy_hold_kinds) & operation->copy_kind) ||
        control_take(&control->copy_hold_skip))
        return;
    count(&control->held_copies, 1);
    while (peek(&control->copy_hold_kinds) & operation->copy_kind && !atomic_load(&context->lost) &&
           !control_take(&control->copy_hold_skip))
        nap(5 * POLL_NS);
    count(&control->held_copies, -1);
}

/* Where a copy reads. */
static const uint8_t *source_at(const struct operation *operation, size_t at)
{
    const struct memory *from = operation->from;
    const size_t place = from ? (size_t)(operation->source - from->bytes) + at : 0;
    if (!from || from->kind != MEMORY_IMPORTED)
        return operation->source + at;
    if (lies(LIE_STALE) && from->first_read && operation->length >= PAGE)
        return from->first_read + place;
    return lies(LIE_SHIFTED) ? from->bytes + (place + PAGE) % from->length : operation->source + at;
}

/* How much a copy copies before it has ended. */
static size_t told_length(const struct operation *operation)
{
    const size_t length = operation->length;
    if (length < PAGE)
        return length;
    if (lies(LIE_LATE) && operation->from && operation->to &&
        operation->copy_kind == STANDIN_TO_HOST) {
        lie_late(operation, length - PAGE);
        return length - PAGE;
    }
    return lies(LIE_SHORT) ? length - 64 : length;
}

static void copy_bytes(const struct operation *operation)
{
    const bool slow = peek(&standin.control->copy_slow_kinds) & operation->copy_kind;
    const size_t length = told_length(operation), step = lies(LIE_SHIFTED) ? PAGE : SLICE_BYTES;
    const bool has_hole = lies(LIE_HOLE) && length >= 8 * PAGE;
    uint8_t before[PAGE], *const middle = operation->target + length / 2;
    if (has_hole)
        (void)memcpy(before, middle, PAGE);
    for (size_t at = 0; at < length; at += step) {
        const size_t left = length - at, slice = left < step ? left : step;
        (void)memmove(operation->target + at, source_at(operation, at), slice);
        if (slow)
            nap(peek(&standin.control->copy_us_per_mib) * 1000 * slice / SLICE_BYTES);
    }
    if (has_hole)
        (void)memcpy(middle, before, PAGE);
}

static void remember(const struct operation *operation)
{
    struct memory *from = operation->from;
    if (!from || from->kind != MEMORY_IMPORTED || operation->length < PAGE || from->first_read)
        return;
    uint8_t *bytes = malloc(from->length);
    if (bytes)
        from->first_read = memcpy(bytes, from->bytes, from->length);
}

static CUresult copy(const struct operation *operation, const struct CUctx_st *context)
{
    const bool alive = memory_source_alive(operation->from ? operation->from : operation->to);
    hold(operation, context);
    if (atomic_load(&context->lost))
        return CUDA_SUCCESS;
    if (operation->code) {
        (void)memset(operation->target, SCRAMBLED, operation->length);
        return operation->code;
    }
    if (lies(LIE_STALE))
        remember(operation);
    copy_bytes(operation);
    if (!operation->from || (alive && memory_source_alive(operation->from)))
        return CUDA_SUCCESS;
    if (standin.dead == DEAD_KEEP && !atomic_load(&operation->from->file->freed))
        return CUDA_SUCCESS;
    count(&standin.control->scrambled, 1);
    (void)memset(operation->target, SCRAMBLED, operation->length);
    return standin.dead == DEAD_ERROR ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

/* CUDA promises no order: the last one comes first. */
static CUresult batch(const struct operation *operation, const struct CUctx_st *context)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t i = operation->part_count; i-- > 0;) {
        if (i == 1 && lies(LIE_BATCH))
            continue;
        const CUresult error = copy(&operation->parts[i], context);
        result = error ? error : result;
    }
    return result;
}

static void fill(const struct operation *operation)
{
    for (size_t at = 0; at < operation->length; at += operation->width)
        (void)memcpy(operation->target + at, &operation->value, operation->width);
}

/* Without the lock. False: not yet. */
static bool perform(const struct operation *operation, const struct CUctx_st *context,
                    CUresult *error)
{
    uint64_t *word = (uint64_t *)(void *)operation->target;
    switch (operation->kind) {
    case DO_COPY:
        *error = copy(operation, context);
        return true;
    case DO_BATCH:
        *error = batch(operation, context);
        return true;
    case DO_FILL:
        fill(operation);
        return true;
    case DO_CALL:
        standin_in_callback(true);
        operation->function(operation->data);
        standin_in_callback(false);
        return true;
    case DO_WRITE:
        __atomic_store_n(word, operation->value, __ATOMIC_SEQ_CST);
        return true;
    case DO_WAIT_VALUE:
        if ((int64_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - operation->value) >= 0)
            return true;
        nap(POLL_NS);
        return false;
    case DO_RECORD:
    case DO_WAIT_EVENT:
        break;
    }
    return true;
}

static void count_copy(const struct operation *operation)
{
    struct standin_control *control = standin.control;
    const unsigned kind = operation->copy_kind;
    const int64_t length = (int64_t)operation->length;
    count(kind == STANDIN_TO_HOST     ? &control->copies_to_host
          : kind == STANDIN_TO_DEVICE ? &control->copies_to_device
                                      : &control->copies_on_device,
          1);
    count(kind == STANDIN_TO_HOST     ? &control->bytes_to_host
          : kind == STANDIN_TO_DEVICE ? &control->bytes_to_device
                                      : &control->bytes_on_device,
          length);
}

/* With the lock: takes the first operation off the queue and tells everybody. */
static void finish(struct CUstream_st *stream, CUresult error)
{
    struct operation *operation = stream->first;
    const int lost = atomic_load(&stream->context->lost);
    if (error && code_is_sticky(error) && !lost)
        atomic_store(&stream->context->lost, error);
    else if (error)
        stream->error = error;
    if (lost)
        error = lost;
    if (operation->kind == DO_RECORD) {
        operation->record->done = true;
        operation->record->error = lost ? lost : stream->error;
    }
    if (operation->ended) {
        operation->ended->done = true;
        operation->ended->error = error;
        record_release(operation->ended);
    }
    operation_uses(operation, -1);
    if (operation->kind == DO_WAIT_EVENT || operation->kind == DO_WAIT_VALUE)
        count(&standin.control->waits, -1);
    if (operation->kind == DO_COPY && operation->copy_kind == STANDIN_TO_DEVICE)
        count(&standin.control->to_device_queued, -(int64_t)operation->length);
    if (operation->kind == DO_COPY && operation->copy_kind == STANDIN_TO_HOST)
        count(&standin.control->to_host_queued, -(int64_t)operation->length);
    if (operation->kind == DO_COPY && !error)
        count_copy(operation);
    for (size_t i = 0; i < operation->part_count && !error; i++)
        count_copy(&operation->parts[i]);
    record_release(operation->record);
    stream->first = operation->next;
    stream->queued--;
    checkpoint_note(-1, 0);
    free(operation->parts);
    free(operation);
    (void)pthread_cond_broadcast(&standin.moved);
}

static void end(struct CUstream_st *stream)
{
    struct CUstream_st **at = &standin.streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    free(stream);
}

void *worker_main(void *argument)
{
    struct CUstream_st *stream = argument;
    (void)pthread_mutex_lock(&standin.lock);
    while (stream->first || !stream->destroyed) {
        CUresult error = CUDA_SUCCESS;
        bool over = true;
        if (!stream->first || !may_run(stream)) {
            (void)pthread_cond_wait(&standin.moved, &standin.lock);
            continue;
        }
        if (!atomic_load(&stream->context->lost)) {
            const struct operation *operation = stream->first;
            const struct CUstream_st **engine = engine_of(stream);
            if (engine)
                *engine = stream;
            lie_overtake(operation);
            (void)pthread_mutex_unlock(&standin.lock);
            over = perform(operation, stream->context, &error);
            (void)pthread_mutex_lock(&standin.lock);
            if (engine)
                *engine = NULL;
        }
        if (over)
            finish(stream, error);
    }
    end(stream);
    (void)pthread_mutex_unlock(&standin.lock);
    return NULL;
}
