#include "gpu/pcc_gpu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/pcc_thread.h"

#define READ_LIMIT_NS (10ull * 1000000000u)
#define READ_PAUSE_NS 50000
#define STOP_LIMIT_S 5

struct pcc_gpus {
    pthread_mutex_t making; /* held while a context is made, which takes seconds; before lock */
    pthread_mutex_t lock;   /* the table only: a request for info does not wait for a driver */
    struct pcc_gpu *gpus[PCC_GPUS_MAX];
    uint32_t count;
};

int pcc_gpus_open(struct pcc_gpus **out)
{
    struct pcc_gpus *gpus = calloc(1, sizeof(*gpus));
    if (gpus == NULL)
        return -ENOMEM;
    (void)pthread_mutex_init(&gpus->making, NULL);
    (void)pthread_mutex_init(&gpus->lock, NULL);
    *out = gpus;
    return 0;
}

/* -- one GPU -- */

/* Everything that was made, in whatever state; within the context. */
static void driver_objects_close(struct pcc_gpu *gpu)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;

    for (uint32_t i = 0; i < PCC_GPU_CHUNKS; i++) {
        if (gpu->slots[i].event != NULL)
            (void)cuda->event_destroy(gpu->slots[i].event);
        gpu->slots[i].event = NULL;
    }
    if (gpu->stream != NULL)
        (void)cuda->stream_destroy(gpu->stream);
    if (gpu->side != NULL)
        (void)cuda->stream_destroy(gpu->side);
    gpu->stream = gpu->side = NULL;
    if (gpu->landing_pinned)
        (void)pcc_gpu_unpin(&gpu->device, gpu->landing, PCC_GPU_LANDING_BYTES);
    gpu->landing_pinned = false;
}

static int driver_objects_open(struct pcc_gpu *gpu)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;
    int error = pcc_gpu_pin(&gpu->device, gpu->landing, PCC_GPU_LANDING_BYTES);

    if (error != 0)
        return error;
    gpu->landing_pinned = true;
    CUresult result = cuda->stream_create(&gpu->stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        result = cuda->stream_create(&gpu->side, CU_STREAM_NON_BLOCKING);
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < PCC_GPU_CHUNKS; i++)
        result = cuda->event_create(&gpu->slots[i].event, CU_EVENT_DISABLE_TIMING);
    return pcc_cuda_code(result);
}

static void gpu_free(struct pcc_gpu *gpu)
{
    (void)pthread_mutex_destroy(&gpu->reading);
    (void)pthread_mutex_destroy(&gpu->lock);
    (void)pthread_cond_destroy(&gpu->wake);
    if (gpu->landing != NULL)
        (void)munmap(gpu->landing, PCC_GPU_LANDING_BYTES);
    free(gpu);
}

/* With `making` held. */
static int gpu_start(struct pcc_gpu *gpu)
{
    int error = pcc_gpu_device_find(&gpu->uuid, &gpu->device);

    if (error != 0)
        return error;
    gpu->stopping = false;
    error = pcc_gpu_enter(&gpu->device);
    if (error != 0)
        goto fail;
    error = driver_objects_open(gpu);
    if (error == 0)
        error = pcc_thread_start(&gpu->thread, pcc_gpu_copier_run, gpu, "pcc-gpu");
    if (error != 0)
        driver_objects_close(gpu);
    pcc_gpu_leave(&gpu->device);
fail:
    if (error != 0)
        pcc_gpu_device_close(&gpu->device);
    gpu->open = error == 0;
    return error;
}

static int gpu_open(const uint8_t uuid[16], struct pcc_gpu **out)
{
    struct pcc_gpu *gpu = calloc(1, sizeof(*gpu));

    if (gpu == NULL)
        return -ENOMEM;
    memcpy(&gpu->uuid, uuid, sizeof(gpu->uuid));
    (void)pthread_mutex_init(&gpu->reading, NULL);
    (void)pthread_mutex_init(&gpu->lock, NULL);
    pcc_condition_make(&gpu->wake);
    void *const page = mmap(NULL, PCC_GPU_LANDING_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int error = -ENOMEM;
    if (page != MAP_FAILED) {
        gpu->landing = page;
        /* A forked child must not make the GPU's page one of its own. */
        (void)madvise(page, PCC_GPU_LANDING_BYTES, MADV_DONTFORK);
        error = gpu_start(gpu);
    }
    if (error != 0) {
        gpu_free(gpu);
        return error;
    }
    if (gpu->device.cuda->device_name(gpu->name, sizeof(gpu->name) - 1, gpu->device.device) !=
        CUDA_SUCCESS)
        gpu->name[0] = '\0';
    *out = gpu;
    return 0;
}

/* A copier that a lost GPU keeps in the driver is left there. */
static bool copier_stop(struct pcc_gpu *gpu)
{
    struct timespec deadline;

    (void)pthread_mutex_lock(&gpu->lock);
    gpu->stopping = true;
    (void)pthread_cond_signal(&gpu->wake);
    (void)pthread_mutex_unlock(&gpu->lock);
    if (!pcc_gpu_is_lost(gpu))
        return pthread_join(gpu->thread, NULL) == 0;
    (void)clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += STOP_LIMIT_S;
    return pthread_timedjoin_np(gpu->thread, NULL, &deadline) == 0;
}

/* GPUs that were lost, for as long as the process lives. */
static struct {
    pthread_mutex_t lock;
    struct pcc_gpu *first;
} left_behind = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Gives its context back. False: it is lost, and left behind. */
static bool gpu_stop(struct pcc_gpu *gpu)
{
    /* The driver of a lost GPU may wait forever, and its engine may still write. */
    if (!copier_stop(gpu) || pcc_gpu_is_lost(gpu)) {
        PCC_LOCKED(&left_behind.lock);
        gpu->left_behind = left_behind.first;
        left_behind.first = gpu;
        return false;
    }
    if (pcc_gpu_enter(&gpu->device) == 0) {
        driver_objects_close(gpu);
        pcc_gpu_leave(&gpu->device);
    }
    pcc_gpu_device_close(&gpu->device);
    gpu->open = false;
    return true;
}

void pcc_gpus_close(struct pcc_gpus *gpus)
{
    if (gpus == NULL)
        return;
    for (uint32_t i = 0; i < gpus->count; i++)
        if (!gpus->gpus[i]->open || gpu_stop(gpus->gpus[i]))
            gpu_free(gpus->gpus[i]);
    (void)pthread_mutex_destroy(&gpus->lock);
    (void)pthread_mutex_destroy(&gpus->making);
    free(gpus);
}

uint32_t pcc_gpus_info(struct pcc_gpus *gpus, struct pcc_gpu_info *out, uint32_t capacity)
{
    PCC_LOCKED(&gpus->lock);
    for (uint32_t i = 0; i < gpus->count && i < capacity; i++) {
        const struct pcc_gpu *gpu = gpus->gpus[i];
        struct pcc_gpu_info *info = &out[i];
        *info = (struct pcc_gpu_info){
            .lost = pcc_gpu_is_lost(gpu),
            .copied_bytes = PCC_READ(&gpu->copied_bytes),
            .copies = PCC_READ(&gpu->copies),
            .failures = PCC_READ(&gpu->failures),
        };
        memcpy(info->uuid, &gpu->uuid, sizeof(info->uuid));
        memcpy(info->name, gpu->name, sizeof(info->name));
    }
    return gpus->count;
}

/* With `making` held: the table grows under it alone. */
static struct pcc_gpu *gpu_find(const struct pcc_gpus *gpus, const uint8_t uuid[16])
{
    for (uint32_t i = 0; i < gpus->count; i++)
        if (memcmp(&gpus->gpus[i]->uuid, uuid, sizeof(CUuuid)) == 0)
            return gpus->gpus[i];
    return NULL;
}

int pcc_gpus_use(struct pcc_gpus *gpus, const uint8_t uuid[16], struct pcc_gpu **out)
{
    int error;

    PCC_LOCKED(&gpus->making);
    struct pcc_gpu *gpu = gpu_find(gpus, uuid);
    if (gpu == NULL && gpus->count == PCC_GPUS_MAX)
        return -ENODEV;
    if (gpu == NULL) {
        error = gpu_open(uuid, &gpu);
        if (error != 0)
            return error;
        PCC_LOCKED(&gpus->lock);
        gpus->gpus[gpus->count++] = gpu;
    } else {
        error = pcc_gpu_is_lost(gpu) ? -PCC_E_DEVICE_LOST : gpu->open ? 0 : gpu_start(gpu);
        if (error != 0)
            return error;
    }
    pcc_gpu_hold(gpu);
    *out = gpu;
    return 0;
}

void pcc_gpu_hold(struct pcc_gpu *gpu)
{
    PCC_LOCKED(&gpu->lock);
    gpu->users++;
}

void pcc_gpu_put(struct pcc_gpu *gpu)
{
    PCC_LOCKED(&gpu->lock);
    PCC_ASSERT(gpu->users > 0);
    if (--gpu->users == 0)
        gpu->unused_ns = pcc_now_ns();
}

/* With `making` held, without which it gets no first user. */
static bool is_unused(struct pcc_gpu *gpu, uint64_t unused_ns)
{
    PCC_LOCKED(&gpu->lock);
    return gpu->users == 0 && pcc_now_ns() - gpu->unused_ns >= unused_ns && gpu->open &&
           !pcc_gpu_is_lost(gpu);
}

void pcc_gpus_rest(struct pcc_gpus *gpus, uint64_t unused_ns)
{
    PCC_LOCKED(&gpus->making);
    for (uint32_t i = 0; i < gpus->count;) {
        if (!is_unused(gpus->gpus[i], unused_ns) || gpu_stop(gpus->gpus[i])) {
            i++;
            continue;
        }
        PCC_LOCKED(&gpus->lock); /* lost while it was closed */
        gpus->gpus[i] = gpus->gpus[--gpus->count];
    }
}

/* -- on the caller's thread -- */

int pcc_gpu_code(struct pcc_gpu *gpu, CUresult result)
{
    const int error = pcc_cuda_code(result);

    if (error != -PCC_E_DEVICE_LOST)
        return error;
    if (pcc_cuda_code(gpu->device.cuda->stream_query(gpu->side)) != -PCC_E_DEVICE_LOST)
        return -PCC_E_DEVICE;
    pcc_gpu_lose(gpu);
    return error;
}

/* Where imported memory begins and how long it is. No manual promises that cuMemGetAddressRange
 * accepts an imported pointer; if the call fails, the attributes tell, which every pointer has. */
static bool range_of(const struct pcc_cuda *cuda, CUdeviceptr address, CUdeviceptr *base,
                     size_t *length, struct pcc_gpu_answers *answers)
{
    answers->first = cuda->address_range(base, length, address);
    if (answers->first != CUDA_SUCCESS) {
        CUresult result =
            cuda->pointer_attribute(base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address);
        if (result == CUDA_SUCCESS)
            result = cuda->pointer_attribute(length, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address);
        answers->second = result;
        if (result != CUDA_SUCCESS)
            return false;
    }
    /* It may lie within a larger block that the driver shares as a whole. */
    const bool within = address >= *base && address - *base < *length;
    *answers = (struct pcc_gpu_answers){.first = within ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND};
    return within;
}

int pcc_gpu_import(struct pcc_gpu *gpu, const uint8_t handle[64], CUdeviceptr *address_out,
                   uint64_t *length_out, struct pcc_gpu_answers *answers_out)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;
    CUipcMemHandle name;
    CUdeviceptr address = 0, base = 0;
    size_t length = 0;
    int error = pcc_gpu_enter(&gpu->device);

    *answers_out = (struct pcc_gpu_answers){0};
    if (error != 0)
        return error;
    memcpy(&name, handle, sizeof(name));
    answers_out->first = cuda->ipc_open(&address, name, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (answers_out->first == CUDA_SUCCESS && !range_of(cuda, address, &base, &length, answers_out))
        (void)cuda->ipc_close(address);
    error = pcc_gpu_code(gpu, answers_out->first);
    pcc_gpu_leave(&gpu->device);
    if (error != 0)
        return error == -ENOMEM || error == -PCC_E_DEVICE_LOST ? error : -PCC_E_BAD_HANDLE;
    *address_out = address;
    *length_out = length - (address - base);
    return 0;
}

void pcc_gpu_import_close(struct pcc_gpu *gpu, CUdeviceptr address)
{
    if (pcc_gpu_is_lost(gpu) || pcc_gpu_enter(&gpu->device) != 0)
        return;
    (void)gpu->device.cuda->ipc_close(address);
    pcc_gpu_leave(&gpu->device);
}

/* Into `landing`, one behind the other. */
static int read_side(struct pcc_gpu *gpu, const struct pcc_gpu_copy *copies, uint32_t count)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;
    const uint64_t deadline_ns = pcc_now_ns() + READ_LIMIT_NS;
    uint8_t *to = gpu->landing;
    CUresult result = cuda->stream_query(gpu->side);

    /* Not ready: an earlier read that took too long is still under way, and writes to `landing`. */
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        PCC_ASSERT(to + copies[i].length_bytes <= gpu->landing + PCC_GPU_LANDING_BYTES);
        result = cuda->copy_to_host(to, copies[i].from, copies[i].length_bytes, gpu->side);
        to += copies[i].length_bytes;
    }
    if (result == CUDA_SUCCESS)
        result = cuda->stream_query(gpu->side);
    while (result == CUDA_ERROR_NOT_READY && pcc_now_ns() < deadline_ns) {
        (void)nanosleep(&(struct timespec){.tv_nsec = READ_PAUSE_NS}, NULL);
        result = cuda->stream_query(gpu->side);
    }
    return pcc_gpu_code(gpu, result);
}

int pcc_gpu_read(struct pcc_gpu *gpu, const struct pcc_gpu_copy *copies, uint32_t count)
{
    const uint8_t *from = gpu->landing;

    PCC_LOCKED(&gpu->reading);
    int error = pcc_gpu_is_lost(gpu) ? -PCC_E_DEVICE_LOST : pcc_gpu_enter(&gpu->device);
    if (error != 0)
        return error;
    error = read_side(gpu, copies, count);
    for (uint32_t i = 0; error == 0 && i < count; from += copies[i++].length_bytes)
        memcpy(copies[i].to, from, copies[i].length_bytes);
    pcc_gpu_leave(&gpu->device);
    return error;
}

int pcc_gpu_pin_host(struct pcc_gpu *gpu, void *bytes, uint64_t length)
{
    int error = pcc_gpu_enter(&gpu->device);

    if (error != 0)
        return error;
    error = pcc_gpu_pin(&gpu->device, bytes, length);
    pcc_gpu_leave(&gpu->device);
    return error;
}

int pcc_gpu_unpin_host(struct pcc_gpu *gpu, void *bytes, uint64_t length)
{
    int error = pcc_gpu_is_lost(gpu) ? -PCC_E_DEVICE_LOST : pcc_gpu_enter(&gpu->device);

    if (error != 0)
        return error;
    error = pcc_gpu_unpin(&gpu->device, bytes, length);
    pcc_gpu_leave(&gpu->device);
    return error;
}
