/* The exposure: which memory of the GPUs the daemon may read, as handles of whole allocations. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "client/pcc_client_private.h"

struct builder {
    struct pcc_client *client;
    const struct pcc_device_range *ranges;
    uint64_t range_count;
    struct pcc_exposed *of; /* [range_count]: where each range lies; only base and device */
    struct pcc_exposed *allocations; /* ascending by base, each once */
    uint64_t allocation_count;
    struct pcc_exposed_range *merged;
    uint32_t merged_count;
    CUdeviceptr probe_at;
    uint8_t probe[16];
};

static int by_base(const void *left, const void *right)
{
    const CUdeviceptr a = ((const struct pcc_exposed *)left)->base;
    const CUdeviceptr b = ((const struct pcc_exposed *)right)->base;

    return a < b ? -1 : a > b;
}

static struct pcc_exposed *find(struct pcc_exposed *sorted, uint64_t count, CUdeviceptr base)
{
    const struct pcc_exposed key = {.base = base};

    return count > 0 ? bsearch(&key, sorted, count, sizeof(key), by_base) : NULL;
}

/* A call that says something about the caller's memory: when the driver itself is well, the memory
 * is not of the kind that can be shared. */
static int memory_code(struct pcc_client_device *device, CUresult result)
{
    const int code = pcc_client_gpu_code(device, result);

    return code == -PCC_E_DEVICE && result != CUDA_ERROR_DEINITIALIZED ? -PCC_E_BAD_HANDLE : code;
}

/* -- where the ranges lie -- */

static bool ranges_fit(const struct builder *builder, uint64_t device_bytes)
{
    uint64_t end = 0;

    for (uint64_t i = 0; i < builder->range_count; i++) {
        const struct pcc_device_range *range = &builder->ranges[i];
        if (range->offset_bytes < end || range->length_bytes == 0 || range->reserved != 0 ||
            __builtin_add_overflow(range->offset_bytes, range->length_bytes, &end) ||
            end > device_bytes || pcc_client_device(builder->client, range->device) == NULL)
            return false;
    }
    return builder->range_count > 0;
}

static int locate(struct pcc_client_device *device, const struct pcc_device_range *range,
                  struct pcc_exposed *out)
{
    CUdeviceptr base;
    size_t length;
    const CUresult result =
        device->gpu.cuda->address_range(&base, &length, (CUdeviceptr)range->address);

    if (result != CUDA_SUCCESS)
        return memory_code(device, result);
    *out = (struct pcc_exposed){.base = base, .length_bytes = length, .device = range->device};
    return 0;
}

/* True when the range lies in that allocation; two allocations have two handles. */
static bool within(const struct pcc_device_range *range, const struct pcc_exposed *allocation)
{
    const uint64_t into = range->address - allocation->base;

    return range->device == allocation->device && into < allocation->length_bytes &&
           range->length_bytes <= allocation->length_bytes - into;
}

static int locate_all(struct builder *builder)
{
    const struct pcc_exposed *last = NULL;

    for (uint64_t i = 0; i < builder->range_count; i++) {
        const struct pcc_device_range *range = &builder->ranges[i];
        struct pcc_client_device *device = &builder->client->devices[range->device];
        if (last != NULL && within(range, last)) {
            builder->of[i] = *last;
            continue;
        }
        PCC_CLIENT_GPU(gpu, device);
        const int error = gpu.error != 0 ? gpu.error : locate(device, range, &builder->of[i]);
        if (error != 0)
            return error;
        last = &builder->of[i];
        if (!within(range, last))
            return -PCC_E_BAD_HANDLE;
    }
    return 0;
}

/* -- allocations -- */

/* With gpu_lock held: the allocations of all ranges and the probe's, each once. */
static int allocations_collect(struct builder *builder)
{
    struct pcc_client_device *first = &builder->client->devices[builder->ranges[0].device];
    uint64_t count = builder->range_count, kept = 0;

    if (first->staging == NULL) {
        const int error = pcc_client_staging_make(first, 0);
        if (error != 0)
            return error;
    }
    struct pcc_exposed *all = calloc(count + 1, sizeof(*all));
    if (all == NULL)
        return -ENOMEM;
    memcpy(all, builder->of, count * sizeof(*all));
    all[count++] = (struct pcc_exposed){.base = first->staging->address,
                                        .length_bytes = first->staging->whole_bytes,
                                        .device = builder->ranges[0].device};
    qsort(all, count, sizeof(*all), by_base);
    for (uint64_t i = 0; i < count; i++) {
        if (kept == 0 || all[i].base != all[kept - 1].base)
            all[kept++] = all[i];
    }
    for (uint64_t i = 0; i < kept; i++)
        all[i].index = (uint32_t)i;
    builder->allocations = all;
    builder->allocation_count = kept;
    builder->probe_at = first->staging->address + first->staging->length_bytes;
    return kept > PCC_EXPOSED_ALLOCATIONS_MAX ? -PCC_E_TOO_LARGE : 0;
}

/* Within PCC_CLIENT_GPU. */
static int handle_get(struct builder *builder, struct pcc_client_device *device,
                      struct pcc_exposed *allocation)
{
    const struct pcc_cuda *cuda = device->gpu.cuda;
    const struct pcc_client *client = builder->client;
    int capable = 1;

    CUresult result = cuda->pointer_attribute(&allocation->buffer_id,
                                              CU_POINTER_ATTRIBUTE_BUFFER_ID, allocation->base);
    if (result != CUDA_SUCCESS)
        return memory_code(device, result);
    const struct pcc_exposed *known =
        find(client->exposed, client->exposed_count, allocation->base);
    if (known != NULL && known->buffer_id == allocation->buffer_id &&
        known->length_bytes == allocation->length_bytes) {
        allocation->handle = known->handle;
        return 0;
    }
    result = cuda->pointer_attribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                     allocation->base);
    if (result == CUDA_SUCCESS && capable == 0)
        return -PCC_E_BAD_HANDLE;
    return memory_code(device, cuda->ipc_get(&allocation->handle, allocation->base));
}

static int handles_get(struct builder *builder)
{
    for (uint64_t i = 0; i < builder->allocation_count; i++) {
        struct pcc_exposed *allocation = &builder->allocations[i];
        struct pcc_client_device *device = &builder->client->devices[allocation->device];
        PCC_CLIENT_GPU(gpu, device);
        const int error = gpu.error != 0 ? gpu.error : handle_get(builder, device, allocation);
        if (error != 0)
            return error;
    }
    return 0;
}

/* -- ranges, probe -- */

/* True when the range is the last one's neighbour, or nearly: one copy takes both then, and what
 * lies between them in the allocation. */
static bool is_next(const struct pcc_exposed_range *last, uint64_t into, uint64_t offset_bytes)
{
    const uint64_t end = last->allocation_offset_bytes + last->length_bytes;

    return into >= end && into - end < PCC_EXPOSED_GAP_MAX &&
           offset_bytes - (last->offset_bytes + last->length_bytes) == into - end;
}

static int merge(struct builder *builder)
{
    struct pcc_exposed_range *last = NULL;

    for (uint64_t i = 0; i < builder->range_count; i++) {
        const struct pcc_device_range *range = &builder->ranges[i];
        const struct pcc_exposed *allocation =
            find(builder->allocations, builder->allocation_count, builder->of[i].base);
        const uint64_t into = range->address - allocation->base;
        if (last != NULL && last->allocation == allocation->index &&
            is_next(last, into, range->offset_bytes)) {
            last->length_bytes = range->offset_bytes + range->length_bytes - last->offset_bytes;
            continue;
        }
        if (builder->merged_count == PCC_EXPOSED_RANGES_MAX)
            return -PCC_E_TOO_LARGE;
        last = &builder->merged[builder->merged_count++];
        *last = (struct pcc_exposed_range){.allocation = allocation->index,
                                           .allocation_offset_bytes = into,
                                           .offset_bytes = range->offset_bytes,
                                           .length_bytes = range->length_bytes};
    }
    return 0;
}

/* Random bytes into the room behind the staged ones; they are there when this returns. With
 * gpu_lock held. */
static int probe_write(struct builder *builder)
{
    struct pcc_client_device *device = &builder->client->devices[builder->ranges[0].device];
    const struct pcc_cuda *cuda = device->gpu.cuda;

    if (getrandom(builder->probe, sizeof(builder->probe), 0) != (ssize_t)sizeof(builder->probe))
        return -EIO;
    PCC_CLIENT_GPU(gpu, device);
    if (gpu.error != 0)
        return gpu.error;
    CUresult result = cuda->copy_to_device(builder->probe_at, builder->probe,
                                           sizeof(builder->probe), device->load);
    if (result == CUDA_SUCCESS)
        result = cuda->event_record(device->scratch, device->load);
    const int error = pcc_client_gpu_code(device, result);
    return error != 0 ? error
                      : pcc_client_gpu_await(builder->client, device, device->scratch, false);
}

static int bytes_make(const struct builder *builder, uint64_t device_bytes, uint8_t **out_bytes,
                      uint64_t *out_length)
{
    const struct pcc_exposed *probed = NULL;
    const size_t ranges_bytes = builder->merged_count * sizeof(*builder->merged);
    const size_t length = sizeof(struct pcc_exposure) +
                          builder->allocation_count * sizeof(struct pcc_exposed_allocation) +
                          ranges_bytes;
    uint8_t *bytes = malloc(length);

    if (bytes == NULL)
        return -ENOMEM;
    uint8_t *at = bytes + sizeof(struct pcc_exposure);
    for (uint64_t i = 0; i < builder->allocation_count; i++) {
        const struct pcc_exposed *allocation = &builder->allocations[i];
        struct pcc_exposed_allocation said = {.length_bytes = allocation->length_bytes,
                                              .buffer_id = allocation->buffer_id,
                                              .device = allocation->device};
        memcpy(said.handle, &allocation->handle, sizeof(said.handle));
        memcpy(said.uuid, &builder->client->devices[allocation->device].gpu.uuid,
               sizeof(said.uuid));
        memcpy(at, &said, sizeof(said));
        at += sizeof(said);
        if (allocation->base <= builder->probe_at)
            probed = allocation;
    }
    memcpy(at, builder->merged, ranges_bytes);
    struct pcc_exposure head = {.magic = PCC_EXPOSURE_MAGIC,
                                .allocation_count = (uint32_t)builder->allocation_count,
                                .range_count = builder->merged_count,
                                .device_bytes = device_bytes,
                                .probe_allocation = probed->index,
                                .probe_offset_bytes = builder->probe_at - probed->base};
    memcpy(head.probe, builder->probe, sizeof(head.probe));
    memcpy(bytes, &head, sizeof(head));
    *out_bytes = bytes;
    *out_length = length;
    return 0;
}

/* With gpu_lock held. */
static int build(struct builder *builder, uint64_t device_bytes, uint8_t **out_bytes,
                 uint64_t *out_length)
{
    builder->of = calloc(builder->range_count, sizeof(*builder->of));
    builder->merged = calloc(builder->range_count, sizeof(*builder->merged));
    if (builder->of == NULL || builder->merged == NULL)
        return -ENOMEM;
    int error = locate_all(builder);
    if (error == 0)
        error = allocations_collect(builder);
    if (error == 0)
        error = handles_get(builder);
    if (error == 0)
        error = merge(builder);
    if (error == 0)
        error = probe_write(builder);
    if (error == 0)
        error = bytes_make(builder, device_bytes, out_bytes, out_length);
    return error;
}

int pcc_client_expose(struct pcc_client *client, const struct pcc_device_range *ranges,
                      uint64_t range_count, uint64_t device_bytes, uint8_t **out_bytes,
                      uint64_t *out_length)
{
    struct builder builder = {.client = client, .ranges = ranges, .range_count = range_count};

    if (!ranges_fit(&builder, device_bytes))
        return -EINVAL;
    PCC_LOCKED(&client->gpu_lock);
    const int error = build(&builder, device_bytes, out_bytes, out_length);
    if (error == 0) {
        free(client->exposed);
        client->exposed = builder.allocations;
        client->exposed_count = builder.allocation_count;
        builder.allocations = NULL;
    }
    free(builder.allocations);
    free(builder.merged);
    free(builder.of);
    return error;
}

/* Of the allocations from `first` on that lie on one GPU; *next_out is behind them. */
static bool still_there(const struct pcc_client *client, struct pcc_client_device *device,
                        uint64_t first, uint64_t *next_out)
{
    uint64_t i = first;

    PCC_CLIENT_GPU(gpu, device);
    bool holds = gpu.error == 0;
    for (; holds && i < client->exposed_count &&
           client->exposed[i].device == client->exposed[first].device;
         i++) {
        unsigned long long buffer_id = 0;
        holds = device->gpu.cuda->pointer_attribute(&buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                                    client->exposed[i].base) == CUDA_SUCCESS &&
                buffer_id == client->exposed[i].buffer_id;
    }
    *next_out = i;
    return holds;
}

bool pcc_client_exposure_holds(struct pcc_client *client)
{
    PCC_LOCKED(&client->gpu_lock);
    for (uint64_t i = 0; i < client->exposed_count;)
        if (!still_there(client, &client->devices[client->exposed[i].device], i, &i))
            return false;
    return true;
}
