/* Finding the driver, once per process, and the few calls that both sides need in the same way. */
#include "gpu/pcc_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY "libcuda.so.1"
#define VERSION_MIN 11070 /* streams wait for and write 64-bit words through the v2 calls */
#define FORKED "the CUDA driver was loaded before this process was forked"

static struct {
    pthread_once_t once;
    pid_t pid; /* that loaded it */
    int error;
    char missing[200];
    struct pcc_cuda calls;
} driver = {.once = PTHREAD_ONCE_INIT};

/* -- loading -- */

/* A function's address as dlsym gives it, moved into a pointer to a function: ISO C has no cast. */
static bool symbol_find(void *library, const char *symbol, void *pointer_out)
{
    void *const found = dlsym(library, symbol);

    memcpy(pointer_out, &found, sizeof(found));
    if (found == NULL)
        (void)snprintf(driver.missing, sizeof(driver.missing), "symbol %s is missing in " LIBRARY,
                       symbol);
    return found != NULL;
}

static void *library_open(void)
{
    void *const library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

    if (library != NULL)
        return library;
    const char *why = dlerror();
    if (why == NULL || strstr(why, "No such file") != NULL)
        (void)snprintf(driver.missing, sizeof(driver.missing), LIBRARY " is not installed");
    else
        (void)snprintf(driver.missing, sizeof(driver.missing), LIBRARY " cannot be loaded: %s",
                       why);
    return NULL;
}

static bool succeeded(CUresult result, const char *symbol)
{
    char words[PCC_CUDA_WORDS_BYTES];

    if (result == CUDA_SUCCESS)
        return true;
    pcc_cuda_describe(result, words, sizeof(words));
    (void)snprintf(driver.missing, sizeof(driver.missing), "%s: %s", symbol, words);
    return false;
}

/* The version first: an old driver would only be said to lack a symbol. */
static bool version_fits(void *library)
{
    int version = 0;

    if (!symbol_find(library, "cuDriverGetVersion", &driver.calls.driver_version) ||
        !succeeded(driver.calls.driver_version(&version), "cuDriverGetVersion"))
        return false;
    if (version >= VERSION_MIN)
        return true;
    (void)snprintf(driver.missing, sizeof(driver.missing),
                   "the driver (CUDA %d.%d) is older than %d.%d", version / 1000,
                   version % 1000 / 10, VERSION_MIN / 1000, VERSION_MIN % 1000 / 10);
    return false;
}

static bool symbols_find(void *library)
{
#define PCC_CUDA_FIND(name, symbol, parameters)                                                    \
    if (!symbol_find(library, #symbol, &driver.calls.name))                                        \
        return false;
    PCC_CUDA_CALLS(PCC_CUDA_FIND)
#undef PCC_CUDA_FIND
    return true;
}

static void optional_find(void *library)
{
    driver.calls.descriptors = true;
#define PCC_CUDA_LOOK(name, symbol, parameters)                                                    \
    if (!symbol_find(library, #symbol, &driver.calls.name))                                        \
        driver.calls.descriptors = false;
    PCC_CUDA_PIECE_CALLS(PCC_CUDA_LOOK)
#undef PCC_CUDA_LOOK
#define PCC_CUDA_LOOK(name, symbol, parameters)                                                    \
    (void)symbol_find(library, #symbol, &driver.calls.name);
    PCC_CUDA_SINGLE_CALLS(PCC_CUDA_LOOK)
#undef PCC_CUDA_LOOK
    driver.missing[0] = '\0';
}

static bool load(void)
{
    int count = 0;
    void *const library = library_open();

    /* Kept for good, whatever follows: drivers do not survive being unloaded. */
    if (library == NULL || !version_fits(library) || !symbols_find(library) ||
        !succeeded(driver.calls.init(0), "cuInit") ||
        !succeeded(driver.calls.device_count(&count), "cuDeviceGetCount"))
        return false;
    optional_find(library);
    if (count > 0)
        return true;
    (void)snprintf(driver.missing, sizeof(driver.missing), "the driver shows no GPU");
    return false;
}

static void load_once(void)
{
    driver.pid = getpid();
    driver.error = load() ? 0 : -PCC_E_NO_DRIVER;
}

int pcc_cuda_load(const struct pcc_cuda **out)
{
    (void)pthread_once(&driver.once, load_once);
    if (driver.error != 0)
        return driver.error;
    if (driver.pid != getpid())
        return -PCC_E_NO_DRIVER;
    *out = &driver.calls;
    return 0;
}

const char *pcc_cuda_missing(void)
{
    const struct pcc_cuda *ignored;

    if (pcc_cuda_load(&ignored) == 0)
        return "";
    return driver.error != 0 ? driver.missing : FORKED;
}

/* -- results -- */

int pcc_cuda_code(CUresult result)
{
    switch (result) {
    case CUDA_SUCCESS:
        return 0;
    case CUDA_ERROR_OUT_OF_MEMORY:
        return -ENOMEM;
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_MAP_FAILED:
    case CUDA_ERROR_ALREADY_MAPPED:
    case CUDA_ERROR_INVALID_HANDLE:
        return -PCC_E_BAD_HANDLE;
    /* "This leaves the process in an inconsistent state and any further CUDA work will return the
     * same error": cuda.h says so of these, in these or other words. */
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case 220: /* NVLINK_UNCORRECTABLE */
    case 226: /* CONTAINED */
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case 702: /* LAUNCH_TIMEOUT */
    case 709: /* CONTEXT_IS_DESTROYED */
    case 710: /* ASSERT */
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case 715: /* ILLEGAL_INSTRUCTION */
    case 716: /* MISALIGNED_ADDRESS */
    case 717: /* INVALID_ADDRESS_SPACE */
    case 718: /* INVALID_PC */
    case CUDA_ERROR_LAUNCH_FAILED:
    case 721: /* TENSOR_MEMORY_LEAK */
    case 810: /* MPS_CLIENT_TERMINATED */
    case 911: /* EXTERNAL_DEVICE */
    case CUDA_ERROR_UNKNOWN:
        return -PCC_E_DEVICE_LOST;
    default:
        return -PCC_E_DEVICE;
    }
}

void pcc_cuda_describe(CUresult result, char *out, size_t out_bytes)
{
    const char *name = NULL;

    if (driver.calls.error_name != NULL && driver.calls.error_name(result, &name) == CUDA_SUCCESS &&
        name != NULL)
        (void)snprintf(out, out_bytes, "%s (%d)", name, result);
    else
        (void)snprintf(out, out_bytes, "CUDA error %d", result);
}

/* -- devices -- */

int pcc_gpu_device_open(uint32_t ordinal, struct pcc_gpu_device *out)
{
    struct pcc_gpu_device opened = {0};
    int memory_ops = 0;
    int error = pcc_cuda_load(&opened.cuda);

    if (error != 0)
        return error;
    if (ordinal > INT32_MAX)
        return -PCC_E_DEVICE;
    CUresult result = opened.cuda->device_get(&opened.device, (int)ordinal);
    if (result == CUDA_SUCCESS)
        result = opened.cuda->device_uuid(&opened.uuid, opened.device);
    if (result == CUDA_SUCCESS)
        result = opened.cuda->primary_retain(&opened.context, opened.device);
    error = pcc_cuda_code(result);
    if (error != 0) /* no handle was concerned, whatever the driver calls it */
        return error == -PCC_E_BAD_HANDLE ? -PCC_E_DEVICE : error;
    result = opened.cuda->device_attribute(
        &memory_ops, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, opened.device);
    opened.memory_ops = result == CUDA_SUCCESS && memory_ops != 0;
    *out = opened;
    return 0;
}

/* A process with a context there keeps all others out. */
static bool is_exclusive(const struct pcc_cuda *cuda, CUdevice device)
{
    int mode = CU_COMPUTEMODE_DEFAULT;

    return cuda->device_attribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device) ==
               CUDA_SUCCESS &&
           mode != CU_COMPUTEMODE_DEFAULT;
}

int pcc_gpu_device_find(const CUuuid *uuid, struct pcc_gpu_device *out)
{
    const struct pcc_cuda *cuda;
    int count = 0;
    int error = pcc_cuda_load(&cuda);

    if (error != 0)
        return error;
    if (cuda->device_count(&count) != CUDA_SUCCESS)
        return -PCC_E_DEVICE;
    for (int ordinal = 0; ordinal < count; ordinal++) {
        CUdevice device;
        CUuuid found;
        if (cuda->device_get(&device, ordinal) == CUDA_SUCCESS &&
            cuda->device_uuid(&found, device) == CUDA_SUCCESS &&
            memcmp(&found, uuid, sizeof(found)) == 0)
            return is_exclusive(cuda, device) ? -EBUSY
                                              : pcc_gpu_device_open((uint32_t)ordinal, out);
    }
    return -ENODEV;
}

void pcc_gpu_device_close(struct pcc_gpu_device *device)
{
    if (device->cuda == NULL)
        return;
    (void)device->cuda->primary_release(device->device);
    *device = (struct pcc_gpu_device){0};
}

int pcc_gpu_enter(const struct pcc_gpu_device *device)
{
    const int error = pcc_cuda_code(device->cuda->context_push(device->context));

    return error == -PCC_E_BAD_HANDLE ? -PCC_E_DEVICE : error;
}

void pcc_gpu_leave(const struct pcc_gpu_device *device)
{
    CUcontext ignored;

    (void)device->cuda->context_pop(&ignored);
}

/* -- pinning -- */

static uint64_t piece_bytes(uint64_t length, uint64_t at)
{
    return length - at < PCC_PIN_BYTES_MAX ? length - at : PCC_PIN_BYTES_MAX;
}

/* Every piece up to `length` is tried, also after one was refused. */
int pcc_gpu_unpin(const struct pcc_gpu_device *device, void *bytes, uint64_t length)
{
    uint8_t *const start = bytes;
    int error = 0;

    for (uint64_t at = 0; at < length; at += PCC_PIN_BYTES_MAX) {
        const int result = pcc_cuda_code(device->cuda->host_unregister(start + at));
        if (error == 0)
            error = result;
    }
    return error;
}

int pcc_gpu_pin(const struct pcc_gpu_device *device, void *bytes, uint64_t length)
{
    uint8_t *const start = bytes;

    for (uint64_t at = 0; at < length; at += PCC_PIN_BYTES_MAX) {
        /* "Already registered" is an error, too: it is not ours to unregister then. */
        const CUresult result = device->cuda->host_register(start + at, piece_bytes(length, at), 0);
        if (result == CUDA_SUCCESS)
            continue;
        (void)pcc_gpu_unpin(device, start, at);
        const int error = pcc_cuda_code(result);
        return error == -PCC_E_BAD_HANDLE ? -PCC_E_DEVICE : error;
    }
    return 0;
}
