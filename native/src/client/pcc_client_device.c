/* The GPUs of a client: streams, the mapping of the page, and staging: device memory for copies
 * made on the device, before training continues or beside it. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/pcc_map.h"
#include "client/pcc_client_private.h"

#define NAP_NS_MIN 20000
#define NAP_NS_MAX 500000
/* Staging has whole units: memory smaller than that may share its physical block, and so its IPC
 * handle, with other allocations of the process. */
#define STAGING_UNIT_BYTES (2ull << 20)
#define STAGING_BYTES_MAX (1ull << 46)
#define PROBE_ROOM_BYTES 256u
/* Copies in one call of the driver. Some drivers crash when there are tens of thousands. */
#define BATCH_COPIES_MAX 1024u
/* The words lie at the start of the page; the whole page may be gigabytes. */
#define WORDS_BYTES pcc_align_up(sizeof(struct pcc_page), 65536)

struct pcc_client_device *pcc_client_device(struct pcc_client *client, uint32_t device)
{
    /* Acquire pairs with the release in pcc_client_device_open. */
    if (device >= PCC_DEVICES || !PCC_READ_ACQUIRE(&client->devices[device].open))
        return NULL;
    return &client->devices[device];
}

int pcc_client_gpu_code(struct pcc_client_device *device, CUresult result)
{
    const int code = pcc_cuda_code(result);

    if (code == -PCC_E_DEVICE_LOST || result == CUDA_ERROR_DEINITIALIZED)
        PCC_WRITE(&device->broken, true);
    return code == -PCC_E_BAD_HANDLE ? -PCC_E_DEVICE : code; /* no handle was concerned */
}

struct pcc_client_entered pcc_client_gpu_enter(struct pcc_client_device *device)
{
    struct pcc_client_entered entered = {.device = device,
                                         .error = pcc_gpu_enter(&device->gpu),
                                         .mode = CU_STREAM_CAPTURE_MODE_RELAXED};

    /* Otherwise half of the driver's calls would break a graph that another thread records. */
    if (entered.error == 0 && device->gpu.cuda->capture_mode(&entered.mode) != CUDA_SUCCESS)
        entered.mode = -1;
    return entered;
}

void pcc_client_gpu_leave(struct pcc_client_entered *entered)
{
    if (entered->error != 0)
        return;
    if (entered->mode >= 0)
        (void)entered->device->gpu.cuda->capture_mode(&entered->mode);
    pcc_gpu_leave(&entered->device->gpu);
}

struct pcc_allocation pcc_client_allocation(const struct pcc_client_device *device,
                                            CUdeviceptr address)
{
    struct pcc_allocation found = {0};

    if (device->gpu.cuda->address_range(&found.base, &found.length_bytes, address) != CUDA_SUCCESS)
        found.length_bytes = 0;
    return found;
}

static void nap(uint64_t *nap_ns)
{
    const struct timespec pause = {.tv_nsec = (long)*nap_ns};

    (void)nanosleep(&pause, NULL);
    *nap_ns = *nap_ns * 2 < NAP_NS_MAX ? *nap_ns * 2 : NAP_NS_MAX;
}

int pcc_client_gpu_await(struct pcc_client *client, struct pcc_client_device *device, CUevent event,
                         bool is_thread)
{
    const uint64_t deadline = pcc_now_ns() + PCC_READ(&client->patience_ns);
    uint64_t nap_ns = NAP_NS_MIN;

    for (;;) {
        const CUresult result = device->gpu.cuda->event_query(event);
        if (result != CUDA_ERROR_NOT_READY)
            return pcc_client_gpu_code(device, result);
        if (pcc_now_ns() >= deadline) {
            PCC_WRITE(&device->broken, true);
            return -PCC_E_DEVICE_LOST;
        }
        if (is_thread)
            (void)pcc_client_expire(client);
        nap(&nap_ns);
    }
}

void pcc_client_await_unarmed(struct pcc_client *client)
{
    uint64_t nap_ns = NAP_NS_MIN;

    while (pcc_client_expire(client) != UINT64_MAX)
        nap(&nap_ns);
}

/* -- opening -- */

/* The page as this GPU's streams see it; says why when they cannot. Within PCC_CLIENT_GPU. */
static void page_map(struct pcc_client *client, uint32_t index)
{
    struct pcc_client_device *device = &client->devices[index];
    const struct pcc_cuda *cuda = device->gpu.cuda;
    char words[PCC_CUDA_WORDS_BYTES];

    void *page = pcc_map_alias(client->view.page, WORDS_BYTES);
    CUresult result = page == NULL
                          ? CUDA_ERROR_OUT_OF_MEMORY
                          : cuda->host_register(page, WORDS_BYTES, CU_MEMHOSTREGISTER_DEVICEMAP);
    if (result == CUDA_SUCCESS)
        device->page_at = page;
    else if (page != NULL)
        (void)munmap(page, WORDS_BYTES);
    if (!device->gpu.memory_ops) {
        (void)snprintf(device->cannot_pull, sizeof(device->cannot_pull),
                       "its streams cannot wait for 64-bit words in memory");
        return;
    }
    if (result == CUDA_SUCCESS)
        result = cuda->host_device_pointer(&device->page, page, 0);
    if (result == CUDA_SUCCESS)
        return;
    device->page = 0;
    pcc_cuda_describe(result, words, sizeof(words));
    (void)snprintf(device->cannot_pull, sizeof(device->cannot_pull),
                   "the session page cannot be mapped for it: %s", words);
}

/* False: the driver still has it. */
static bool page_unmap(struct pcc_client_device *device)
{
    if (device->page_at == NULL)
        return true;
    PCC_CLIENT_GPU(gpu, device);
    return gpu.error == 0 && device->gpu.cuda->host_unregister(device->page_at) == CUDA_SUCCESS &&
           munmap(device->page_at, WORDS_BYTES) == 0;
}

/* Within PCC_CLIENT_GPU; members that were not made are NULL. */
static void streams_destroy(struct pcc_client_device *device)
{
    const struct pcc_cuda *cuda = device->gpu.cuda;
    CUstream const streams[] = {device->copy, device->side, device->load};

    for (size_t i = 0; i < sizeof(streams) / sizeof(*streams); i++) {
        if (streams[i] != NULL)
            (void)cuda->stream_destroy(streams[i]);
    }
    if (device->scratch != NULL)
        (void)cuda->event_destroy(device->scratch);
    if (device->loaded != NULL)
        (void)cuda->event_destroy(device->loaded);
}

static CUresult streams_create(struct pcc_client_device *device)
{
    const struct pcc_cuda *cuda = device->gpu.cuda;
    CUstream *const streams[] = {&device->copy, &device->side, &device->load};
    CUresult result = CUDA_SUCCESS;

    for (size_t i = 0; result == CUDA_SUCCESS && i < sizeof(streams) / sizeof(*streams); i++)
        result = cuda->stream_create(streams[i], CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        result = cuda->event_create(&device->scratch, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS)
        result = cuda->event_create(&device->loaded, CU_EVENT_DISABLE_TIMING);
    return result;
}

static int driver_objects_make(struct pcc_client *client, uint32_t index)
{
    struct pcc_client_device *device = &client->devices[index];

    PCC_CLIENT_GPU(gpu, device);
    if (gpu.error != 0)
        return gpu.error;
    const int error = pcc_client_gpu_code(device, streams_create(device));
    if (error == 0)
        page_map(client, index);
    else
        streams_destroy(device);
    return error;
}

static int device_make(struct pcc_client *client, uint32_t index)
{
    struct pcc_client_device *device = &client->devices[index];
    int error = pcc_gpu_device_open(index, &device->gpu);

    if (error != 0)
        return error;
    error = driver_objects_make(client, index);
    if (error != 0) {
        pcc_gpu_device_close(&device->gpu);
        *device = (struct pcc_client_device){0};
        return error == -ENOMEM ? -PCC_E_DEVICE : error;
    }
    device->flying = device->loading = (struct pcc_chunk_list){PCC_NO_CHUNK, PCC_NO_CHUNK};
    return 0;
}

int pcc_client_device_open(struct pcc_client *client, uint32_t device)
{
    if (device >= PCC_DEVICES)
        return -EINVAL;
    PCC_LOCKED(&client->gpu_lock);
    struct pcc_client_device *mine = &client->devices[device];
    if (PCC_READ(&mine->open))
        return PCC_READ(&mine->broken) ? -PCC_E_DEVICE_LOST : 0;
    const int error = device_make(client, device);
    /* Release: a thread that sees it open sees all of it. */
    if (error == 0)
        PCC_WRITE_RELEASE(&mine->open, true);
    return error;
}

const char *pcc_client_device_cannot_pull(struct pcc_client *client, uint32_t device)
{
    const struct pcc_client_device *mine = pcc_client_device(client, device);

    return mine != NULL ? mine->cannot_pull : "it is not open";
}

int pcc_client_capturing(struct pcc_client *client, uint32_t device, uint64_t stream, bool *out)
{
    struct pcc_client_device *mine = pcc_client_device(client, device);
    int status = CU_STREAM_CAPTURE_STATUS_NONE;

    if (mine == NULL)
        return -EINVAL;
    PCC_CLIENT_GPU(gpu, mine);
    if (gpu.error != 0)
        return gpu.error;
    const CUresult result = mine->gpu.cuda->stream_capturing((CUstream)(uintptr_t)stream, &status);
    /* The default stream while another one captures: just as forbidden. */
    *out = result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || status != CU_STREAM_CAPTURE_STATUS_NONE;
    return result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ? 0 : pcc_client_gpu_code(mine, result);
}

/* -- closing -- */

/* Whether one of the trainer's streams still has to read or write a word of the page. */
static bool is_on_its_way(const struct pcc_client *client, uint32_t index)
{
    const struct pcc_cuda *cuda = client->devices[index].gpu.cuda;

    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        const struct pcc_job_device *part = &client->jobs[i].devices[index];
        if ((part->marked != NULL && cuda->event_query(part->marked) == CUDA_ERROR_NOT_READY) ||
            (part->page_used != NULL && cuda->event_query(part->page_used) == CUDA_ERROR_NOT_READY))
            return true;
    }
    return false;
}

/* True when nothing of the client runs on the GPU any more, and none of the trainer's streams still
 * has to read or write a word of the page. */
static bool quiet(const struct pcc_client *client, uint32_t index, uint64_t deadline_ns)
{
    const struct pcc_client_device *device = &client->devices[index];
    CUstream const streams[] = {device->copy, device->side, device->load};
    uint64_t nap_ns = NAP_NS_MIN;
    bool busy = true;

    while (busy) {
        busy = is_on_its_way(client, index);
        /* Any other answer: the context is lost or the driver has ended, nothing runs. */
        for (size_t i = 0; !busy && i < sizeof(streams) / sizeof(*streams); i++)
            busy = device->gpu.cuda->stream_query(streams[i]) == CUDA_ERROR_NOT_READY;
        if (busy && pcc_now_ns() >= deadline_ns)
            return false;
        if (busy)
            nap(&nap_ns);
    }
    return !device->unfenced;
}

/* Within PCC_CLIENT_GPU. */
static void events_destroy(struct pcc_client *client, uint32_t index)
{
    const struct pcc_cuda *cuda = client->devices[index].gpu.cuda;

    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        const struct pcc_job_device *part = &client->jobs[i].devices[index];
        CUevent const events[] = {part->marked, part->copied, part->page_used};
        for (size_t k = 0; k < sizeof(events) / sizeof(*events); k++)
            if (events[k] != NULL)
                (void)cuda->event_destroy(events[k]);
    }
    for (uint32_t i = 0; i < client->view.geometry.chunk_capacity; i++) {
        if (client->flights[i].event != NULL && client->flights[i].device == index)
            (void)cuda->event_destroy(client->flights[i].event);
    }
}

static void driver_objects_close(struct pcc_client *client, uint32_t index)
{
    struct pcc_client_device *device = &client->devices[index];

    PCC_CLIENT_GPU(gpu, device);
    pcc_client_staging_free(gpu.error == 0 ? device->gpu.cuda : NULL, device->staging);
    if (gpu.error != 0)
        return;
    events_destroy(client, index);
    streams_destroy(device);
}

void pcc_client_devices_close(struct pcc_client *client)
{
    const uint64_t deadline = pcc_now_ns() + client->close_patience_ns;

    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_client_device *device = pcc_client_device(client, i);
        if (device == NULL)
            continue;
        PCC_CLIENT_GPU(gpu, device);
        if (gpu.error == 0 && !quiet(client, i, deadline))
            client->leaked = true;
    }
    pcc_client_exposure_free(client);
    if (client->leaked) { /* what the driver knows stays as it is, until the process ends */
        for (uint32_t i = 0; i < PCC_DEVICES; i++)
            pcc_client_staging_free(NULL, client->devices[i].staging);
        return;
    }
    for (uint32_t i = 0; i < client->segment_count; i++)
        pcc_client_segment_unmap(client, &client->segments[i], true);
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        if (pcc_client_device(client, i) == NULL)
            continue;
        client->leaked = !page_unmap(&client->devices[i]) || client->leaked;
        driver_objects_close(client, i);
        pcc_gpu_device_close(&client->devices[i].gpu);
    }
}

/* -- staging -- */

static int memory_alloc(struct pcc_client_device *device, uint64_t length_bytes, CUdeviceptr *out)
{
    PCC_CLIENT_GPU(gpu, device);
    return gpu.error != 0
               ? gpu.error
               : pcc_client_gpu_code(device, device->gpu.cuda->memory_alloc(out, length_bytes));
}

int pcc_client_staging_make(struct pcc_client_device *device, uint64_t length_bytes)
{
    CUdeviceptr address;

    if (length_bytes > STAGING_BYTES_MAX)
        return -ENOMEM;
    const uint64_t whole = pcc_align_up(length_bytes + PROBE_ROOM_BYTES, STAGING_UNIT_BYTES);
    struct pcc_staging *staging = malloc(sizeof(*staging));
    if (staging == NULL)
        return -ENOMEM;
    const int error = memory_alloc(device, whole, &address);
    if (error != 0) {
        free(staging);
        return error;
    }
    *staging = (struct pcc_staging){.next = device->staging,
                                    .address = address,
                                    .length_bytes = whole - PROBE_ROOM_BYTES,
                                    .whole_bytes = whole};
    device->staging = staging;
    return 0;
}

int pcc_client_staging(struct pcc_client *client, uint32_t device, uint64_t length_bytes,
                       uint64_t *address_out)
{
    struct pcc_client_device *mine = pcc_client_device(client, device);
    int error = 0;

    if (mine == NULL)
        return -EINVAL;
    PCC_LOCKED(&client->gpu_lock);
    if (mine->staging == NULL || mine->staging->length_bytes < length_bytes)
        error = pcc_client_staging_make(mine, length_bytes);
    if (error == 0)
        *address_out = mine->staging->address;
    return error;
}

void pcc_client_staging_free(const struct pcc_cuda *cuda, struct pcc_staging *first)
{
    while (first != NULL) {
        struct pcc_staging *next = first->next;
        if (cuda != NULL)
            (void)cuda->memory_free(first->address);
        free(first);
        first = next;
    }
}

void pcc_client_staging_trim(struct pcc_client *client)
{
    PCC_LOCKED(&client->gpu_lock);
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_client_device *device = pcc_client_device(client, i);
        if (device == NULL || device->staging == NULL || device->staging->next == NULL)
            continue;
        PCC_CLIENT_GPU(gpu, device);
        if (gpu.error != 0)
            continue;
        pcc_client_staging_free(device->gpu.cuda, device->staging->next);
        device->staging->next = NULL;
    }
}

struct batch { /* copies on one GPU, for one call of its driver */
    CUdeviceptr to[BATCH_COPIES_MAX], from[BATCH_COPIES_MAX];
    size_t lengths[BATCH_COPIES_MAX];
    size_t count;
    struct pcc_allocation allocation; /* that a source lies in */
};

/* Neighbours become one copy, with the few bytes that may lie between them. But no copy may run
 * across two allocations, even if they are neighbours. */
static bool batch_extend(struct batch *batch, const struct pcc_client_device *device,
                         CUdeviceptr to, CUdeviceptr from, size_t length)
{
    if (batch->count == 0)
        return false;
    const size_t last = batch->count - 1;
    const uint64_t gap = from - (batch->from[last] + batch->lengths[last]);
    if (gap >= PCC_EXPOSED_GAP_MAX || to - (batch->to[last] + batch->lengths[last]) != gap)
        return false;
    if (!pcc_allocation_has(&batch->allocation, batch->from[last]))
        batch->allocation = pcc_client_allocation(device, batch->from[last]);
    if (!pcc_allocation_has(&batch->allocation, from))
        return false;
    batch->lengths[last] += gap + length;
    return true;
}

/* Enqueues the copies on `side` with one launch. A launch for each would fill the stream's queue,
 * and then the driver blocks the caller until the stream gets on. A driver that lacks or refuses
 * the call gets a launch for each nevertheless; copies that it has enqueued by then are made twice.
 */
static CUresult batch_enqueue(const struct pcc_client_device *device, struct batch *batch)
{
    const struct pcc_cuda *cuda = device->gpu.cuda;
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    size_t first = 0, refused;
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;

    if (batch->count == 0)
        return CUDA_SUCCESS;
    if (cuda->copy_batch != NULL)
        result = cuda->copy_batch(batch->to, batch->from, batch->lengths, batch->count, &attributes,
                                  &first, 1, &refused, device->side);
    if (result != CUDA_SUCCESS) {
        result = CUDA_SUCCESS;
        for (size_t i = 0; result == CUDA_SUCCESS && i < batch->count; i++)
            result =
                cuda->copy_on_device(batch->to[i], batch->from[i], batch->lengths[i], device->side);
    }
    batch->count = 0;
    return result;
}

static CUresult batch_fill(const struct pcc_client_device *device,
                           const struct pcc_device_copy *copies, uint64_t copy_count)
{
    struct batch batch;
    CUresult result = CUDA_SUCCESS;

    batch.count = 0;
    batch.allocation = (struct pcc_allocation){0};
    for (uint64_t i = 0; result == CUDA_SUCCESS && i < copy_count; i++) {
        const CUdeviceptr to = device->staging->address + copies[i].staging_offset_bytes;
        if (copies[i].length_bytes == 0 ||
            batch_extend(&batch, device, to, copies[i].address, copies[i].length_bytes))
            continue;
        if (batch.count == BATCH_COPIES_MAX)
            result = batch_enqueue(device, &batch);
        batch.to[batch.count] = to;
        batch.from[batch.count] = copies[i].address;
        batch.lengths[batch.count++] = copies[i].length_bytes;
    }
    return result == CUDA_SUCCESS ? batch_enqueue(device, &batch) : result;
}

/* All on `side`: the driver refuses batches on the default stream, on which most trainers run. With
 * gpu_lock held, within PCC_CLIENT_GPU. */
static CUresult stage(struct pcc_client_device *device, CUstream stream,
                      const struct pcc_device_copy *copies, uint64_t copy_count, bool aside)
{
    const struct pcc_cuda *cuda = device->gpu.cuda;

    CUresult result = cuda->event_record(device->scratch, stream);
    if (result == CUDA_SUCCESS)
        result = cuda->stream_wait_event(device->side, device->scratch, 0);
    if (result == CUDA_SUCCESS)
        result = batch_fill(device, copies, copy_count);
    if (result != CUDA_SUCCESS || aside)
        return result;
    result = cuda->event_record(device->scratch, device->side);
    return result == CUDA_SUCCESS ? cuda->stream_wait_event(stream, device->scratch, 0) : result;
}

int pcc_client_stage(struct pcc_client *client, uint32_t device, uint64_t stream,
                     const struct pcc_device_copy *copies, uint64_t copy_count, bool aside)
{
    struct pcc_client_device *mine = pcc_client_device(client, device);

    if (mine == NULL)
        return -EINVAL;
    PCC_LOCKED(&client->gpu_lock);
    const uint64_t room = mine->staging != NULL ? mine->staging->length_bytes : 0;
    for (uint64_t i = 0; i < copy_count; i++) {
        if (!pcc_is_within(copies[i].staging_offset_bytes, copies[i].length_bytes, room))
            return -EINVAL;
    }
    PCC_CLIENT_GPU(gpu, mine);
    if (gpu.error != 0)
        return gpu.error;
    return pcc_client_gpu_code(mine,
                               stage(mine, (CUstream)(uintptr_t)stream, copies, copy_count, aside));
}
