/* Graph capture, as far as it is seen from outside: nothing is recorded, but what must not be done
 * meanwhile fails, and spoils the capture as it would spoil the user's. */
#include "standin.h"

enum { MODE_GLOBAL, MODE_THREAD, MODE_RELAXED };

static _Thread_local int thread_mode;

static void spoil(struct CUstream_st *stream)
{
    if (!stream->capture_broken)
        count(&standin.control->broken_captures, 1);
    stream->capture_broken = true;
}

/* The three modes of cuThreadExchangeStreamCaptureMode. */
bool capture_forbids(void)
{
    bool forbidden = false;
    for (struct CUstream_st *at = standin.streams; at; at = at->next) {
        const int mode = at->capturing - 1;
        if (!at->capturing || thread_mode == MODE_RELAXED)
            continue;
        if (pthread_equal(at->capturer, pthread_self())
                ? mode != MODE_RELAXED
                : mode == MODE_GLOBAL && thread_mode == MODE_GLOBAL) {
            spoil(at);
            forbidden = true;
        }
    }
    return forbidden;
}

/* The null stream depends on the streams that sync with it, so capturing excludes its use. */
static struct CUstream_st *implied(const struct CUstream_st *stream)
{
    for (struct CUstream_st *at = standin.streams; at && stream->null_stream; at = at->next)
        if (at->capturing && at->context == stream->context &&
            !(at->flags & CU_STREAM_NON_BLOCKING))
            return at;
    return NULL;
}

CUresult capture_check(struct CUstream_st *stream)
{
    struct CUstream_st *other = implied(stream);
    if (other)
        spoil(other);
    if (stream->capturing)
        spoil(stream);
    return other               ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
           : stream->capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                               : CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, int *status)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct CUstream_st *stream;
    if (result != CUDA_SUCCESS)
        return result;
    result = status ? stream_resolve(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && implied(stream))
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (result == CUDA_SUCCESS)
        *status = !stream->capturing ? 0 : stream->capture_broken ? 2 : 1;
    return standin_leave(result);
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    CUresult result = standin_enter(0);
    int before = thread_mode;
    if (result != CUDA_SUCCESS)
        return result;
    if (!mode || *mode < MODE_GLOBAL || *mode > MODE_RELAXED)
        return standin_leave(CUDA_ERROR_INVALID_VALUE);
    thread_mode = *mode;
    *mode = before;
    return standin_leave(CUDA_SUCCESS);
}

EXPORTED CUresult standinBeginCapture(CUstream handle, int mode)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct CUstream_st *stream;
    if (result != CUDA_SUCCESS)
        return result;
    result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS &&
        (stream->null_stream || stream->capturing || mode < MODE_GLOBAL || mode > MODE_RELAXED))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        stream->capturing = 1 + mode;
        stream->capture_broken = false;
        stream->capturer = pthread_self();
    }
    return standin_leave(result);
}

EXPORTED CUresult standinEndCapture(CUstream handle)
{
    CUresult result = standin_enter(NEED_CONTEXT);
    struct CUstream_st *stream;
    if (result != CUDA_SUCCESS)
        return result;
    result = stream_resolve(handle, &stream);
    if (result == CUDA_SUCCESS && !stream->capturing)
        result = CUDA_ERROR_INVALID_VALUE;
    else if (result == CUDA_SUCCESS) {
        stream->capturing = 0;
        result = stream->capture_broken ? CODE_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    }
    return standin_leave(result);
}
