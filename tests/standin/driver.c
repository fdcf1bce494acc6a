/* Start, entry and exit of every call, names of errors. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

struct standin standin = {.lock = PTHREAD_MUTEX_INITIALIZER, .moved = PTHREAD_COND_INITIALIZER};

static _Atomic bool forked, ended;
static _Thread_local bool in_callback;

static void after_fork(void)
{
    atomic_store(&forked, true);
}

static void at_end(void)
{
    atomic_store(&ended, true);
}

void standin_in_callback(bool inside)
{
    in_callback = inside;
}

static uint64_t number_of(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

bool standin_read_machine(void)
{
    const char *directory = getenv("PCCHECK_STANDIN_DIR");
    standin.machine_devices = (int)number_of("PCCHECK_STANDIN_DEVICES", 1);
    standin.device_bytes = number_of("PCCHECK_STANDIN_MEMORY", 64ull << 30);
    if (!standin.directory && directory)
        standin.directory = strdup(directory);
    return standin.directory != NULL;
}

static CUresult read_devices(void)
{
    const uint64_t devices = number_of("PCCHECK_STANDIN_DEVICES", 1);
    const char *visible = getenv("PCCHECK_STANDIN_VISIBLE");
    int count_of = 0;
    if (devices > DEVICES_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    for (const char *at = visible; at && *at && count_of < DEVICES_MAX;) {
        char *end;
        const long physical = strtol(at, &end, 10);
        if (end == at || physical < 0 || physical >= (long)devices)
            break; /* as CUDA_VISIBLE_DEVICES: what follows a wrong one is not seen */
        standin.physical[count_of++] = (int)physical;
        at = *end == ',' ? end + 1 : end;
    }
    for (int i = 0; !visible && i < (int)devices; i++)
        standin.physical[count_of++] = i;
    standin.device_count = count_of;
    for (int i = 0; i < count_of; i++)
        standin.contexts[i].device = i;
    return count_of ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

/* As long as a driver takes to wake up its GPUs. */
static void wake_up(const struct standin_control *control)
{
    const uint64_t us = peek(&control->init_us);
    (void)nanosleep(&(struct timespec){(time_t)(us / 1000000), (long)(us % 1000000) * 1000}, NULL);
    while (peek(&control->init_hold))
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* A process whose cuInit has failed gets the same again, whatever has changed since. */
static CUresult init_fault(struct standin_control *control)
{
    static CUresult failed;
    const uint64_t left = peek(&control->init_fail_count);
    if (failed == CUDA_SUCCESS)
        failed = (CUresult)peek(&control->init_fail_code);
    if (failed != CUDA_SUCCESS && left == 1)
        __atomic_store_n(&control->init_fail_code, 0, __ATOMIC_RELEASE);
    if (failed != CUDA_SUCCESS && left > 0)
        count(&control->init_fail_count, -1);
    return failed;
}

static CUresult start(void)
{
    static bool handlers;
    const char *dead = getenv("PCCHECK_STANDIN_DEAD");
    const char *uids = getenv("PCCHECK_STANDIN_UIDS");
    CUresult result = control_open();
    if (result == CUDA_SUCCESS) {
        wake_up(standin.control);
        result = init_fault(standin.control);
    }
    if (result == CUDA_SUCCESS)
        result = lie_read();
    if (result == CUDA_SUCCESS)
        result = read_devices();
    if (result != CUDA_SUCCESS)
        return result;
    if (!standin_read_machine())
        return CUDA_ERROR_UNKNOWN;
    standin.dead = lies(LIE_DEAD)                   ? DEAD_SCRAMBLE
                   : dead && !strcmp(dead, "error") ? DEAD_ERROR
                   : dead && !strcmp(dead, "keep")  ? DEAD_KEEP
                                                    : DEAD_SCRAMBLE;
    standin.same_uid = uids && !strcmp(uids, "same");
    standin.free_waits = number_of("PCCHECK_STANDIN_SYNC", 1) != 0;
    standin.context_bytes = number_of("PCCHECK_STANDIN_CONTEXT", 0);
    standin.start_time = process_start_time(getpid(), NULL);
    if (!handlers) {
        (void)pthread_atfork(NULL, NULL, after_fork);
        (void)atexit(at_end);
    }
    handlers = true;
    count(&standin.control->inits, 1);
    standin.initialised = true;
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags)
{
    if (atomic_load(&forked))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (atomic_load(&ended))
        return CUDA_ERROR_DEINITIALIZED;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    (void)pthread_mutex_lock(&standin.lock);
    return standin_leave(standin.initialised ? CUDA_SUCCESS : start());
}

static void lose_contexts(void)
{
    const int code = (int)peek(&standin.control->lose_context);
    for (int i = 0; code && i < standin.device_count; i++)
        atomic_store(&standin.contexts[i].lost, code);
    if (code)
        (void)pthread_cond_broadcast(&standin.moved);
}

CUresult standin_enter(unsigned needs)
{
    CUresult result = CUDA_SUCCESS;
    if (atomic_load(&forked)) /* before the lock: somebody held it at the fork, perhaps */
        return CUDA_ERROR_NOT_INITIALIZED;
    if (atomic_load(&ended))
        return CUDA_ERROR_DEINITIALIZED;
    if (in_callback)
        return CUDA_ERROR_NOT_PERMITTED;
    (void)pthread_mutex_lock(&standin.lock);
    if (!standin.initialised)
        return standin_leave(CUDA_ERROR_NOT_INITIALIZED);
    checkpoint_await();
    lose_contexts();
    if (needs & NEED_CONTEXT) {
        const struct CUctx_st *context = standin_current();
        if (context)
            context_await(context);
        if (!context)
            result = CUDA_ERROR_INVALID_CONTEXT;
        else if (!context->retained)
            result = CODE_CONTEXT_IS_DESTROYED;
        else
            result = atomic_load(&context->lost);
    }
    if (result == CUDA_SUCCESS && needs & UNSAFE_IN_CAPTURE && capture_forbids())
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return result == CUDA_SUCCESS ? result : standin_leave(result);
}

CUresult standin_leave(CUresult result)
{
    (void)pthread_mutex_unlock(&standin.lock);
    return result;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {CUDA_ERROR_ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error"},
    {CODE_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "no peer access"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CODE_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "an OS call failed"},
    {CODE_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "illegal state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access"},
    {CODE_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_HARDWARE_STACK_ERROR, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CODE_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "capture invalidated"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "depends on a capture"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult code, bool by_name, const char **out)
{
    for (size_t i = 0; out && i < sizeof(errors) / sizeof(errors[0]); i++)
        if (errors[i].code == code) {
            *out = by_name ? errors[i].name : errors[i].text;
            return CUDA_SUCCESS;
        }
    if (out)
        *out = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult result, const char **name)
{
    return describe(result, true, name);
}

EXPORTED CUresult cuGetErrorString(CUresult result, const char **text)
{
    return describe(result, false, text);
}

CUresult cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = (int)number_of("PCCHECK_STANDIN_VERSION", 12080); /* before cuInit, too */
    return CUDA_SUCCESS;
}
