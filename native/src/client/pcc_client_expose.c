/* The exposure: which memory of the GPUs the daemon may read, as handles of whole allocations, or
 * as descriptors of the pieces of virtual memory; and the answers when the daemon asks what it
 * holds. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "client/pcc_client_private.h"
#include "gpu/pcc_piece.h"

struct table { /* ranges, and those of the exposure that they become */
    const struct pcc_device_range *ranges;
    uint64_t count;
    uint64_t gap_max; /* ranges with this between them stay two */
    struct pcc_exposed_range *merged;
    uint32_t merged_count;
};

struct builder {
    struct pcc_client *client;
    struct table payload, replica;
    bool known;                 /* the daemon has the last exposure */
    struct pcc_extent *extents; /* [capacity]; ascending by base, each once, when collected */
    uint64_t extent_count, capacity;
    struct pcc_exposed *allocations; /* ascending by base */
    uint64_t allocation_count;
    CUdeviceptr probe_at;
    uint8_t probe[16];
};

static int by_base(const void *left, const void *right)
{
    const CUdeviceptr a = ((const struct pcc_extent *)left)->base;
    const CUdeviceptr b = ((const struct pcc_extent *)right)->base;

    return a < b ? -1 : a > b;
}

/* What is there now, if the last exposure had it, too. */
static const struct pcc_extent *extent_before(const struct pcc_client *client,
                                              const struct pcc_extent *extent)
{
    const struct pcc_extent *found =
        client->extent_count > 0
            ? bsearch(extent, client->extents, client->extent_count, sizeof(*extent), by_base)
            : NULL;

    return found != NULL && found->buffer_id == extent->buffer_id &&
                   found->length_bytes == extent->length_bytes
               ? found
               : NULL;
}

/* A call that says something about the caller's memory: when the driver itself is well, the memory
 * is not of the kind that can be shared. */
static int memory_code(struct pcc_client_device *device, CUresult result)
{
    const int code = pcc_client_gpu_code(device, result);

    return code == -PCC_E_DEVICE && result != CUDA_ERROR_DEINITIALIZED ? -PCC_E_BAD_HANDLE : code;
}

/* -- where the ranges lie -- */

static bool ranges_fit(struct pcc_client *client, const struct table *table, uint64_t limit_bytes)
{
    uint64_t end = 0;

    for (uint64_t i = 0; i < table->count; i++) {
        const struct pcc_device_range *range = &table->ranges[i];
        if (range->offset_bytes < end || range->length_bytes == 0 || range->reserved != 0 ||
            __builtin_add_overflow(range->offset_bytes, range->length_bytes, &end) ||
            end > limit_bytes || pcc_client_device(client, range->device) == NULL)
            return false;
    }
    return true;
}

static int extent_add(struct builder *builder, const struct pcc_extent *extent)
{
    if (builder->extent_count == builder->capacity) {
        const uint64_t capacity = 2 * builder->capacity + 64;
        struct pcc_extent *extents =
            realloc(builder->extents, capacity * sizeof(*builder->extents));
        if (extents == NULL)
            return -ENOMEM;
        builder->extents = extents;
        builder->capacity = capacity;
    }
    builder->extents[builder->extent_count++] = *extent;
    return 0;
}

/* The allocation that the address lies in, or the piece. Within PCC_CLIENT_GPU. */
static int locate(const struct builder *builder, struct pcc_client_device *device, uint32_t number,
                  uint64_t address, struct pcc_extent *out)
{
    const struct pcc_cuda *cuda = device->gpu.cuda;
    CUdeviceptr base = 0;
    size_t length = 0;
    int capable = 1;

    CUresult result = cuda->address_range(&base, &length, (CUdeviceptr)address);
    *out = (struct pcc_extent){.base = base, .length_bytes = length, .device = number};
    if (result == CUDA_SUCCESS)
        result = cuda->pointer_attribute(&out->buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, base);
    if (result != CUDA_SUCCESS)
        return memory_code(device, result);
    const struct pcc_extent *before = extent_before(builder->client, out);
    if (before != NULL) {
        out->is_piece = before->is_piece;
        return 0;
    }
    result =
        cuda->pointer_attribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, base);
    out->is_piece = result == CUDA_SUCCESS && capable == 0;
    return out->is_piece && !pcc_piece_has_descriptor(cuda, base) ? -PCC_E_BAD_HANDLE : 0;
}

/* True when the address and what follows, if it is not a piece, lies in that extent: two
 * allocations have two handles. */
static bool is_in(const struct pcc_device_range *range, uint64_t address,
                  const struct pcc_extent *extent)
{
    const uint64_t into = address - extent->base;

    return range->device == extent->device && into < extent->length_bytes &&
           (extent->is_piece ||
            range->address + range->length_bytes - address <= extent->length_bytes - into);
}

/* The extents of a range: one allocation, or the pieces that it spans. */
static int locate_range(struct builder *builder, const struct pcc_device_range *range)
{
    struct pcc_client_device *device = &builder->client->devices[range->device];
    const uint64_t end = range->address + range->length_bytes;
    uint64_t at = range->address;

    PCC_CLIENT_GPU(gpu, device);
    int error = gpu.error;
    while (error == 0 && at < end) {
        const struct pcc_extent *last =
            builder->extent_count > 0 ? &builder->extents[builder->extent_count - 1] : NULL;
        struct pcc_extent extent;
        if (last != NULL && is_in(range, at, last)) {
            extent = *last;
        } else {
            error = locate(builder, device, range->device, at, &extent);
            if (error == 0 && !is_in(range, at, &extent))
                error = -PCC_E_BAD_HANDLE;
            if (error == 0)
                error = extent_add(builder, &extent);
        }
        at = error == 0 && extent.is_piece ? extent.base + extent.length_bytes : end;
    }
    return error;
}

/* -- allocations -- */

/* With gpu_lock held: the extents of all ranges and the probe's, each once. */
static int extents_collect(struct builder *builder)
{
    const uint32_t number = builder->payload.ranges[0].device;
    struct pcc_client_device *first = &builder->client->devices[number];
    struct pcc_extent extent;
    uint64_t kept = 0;
    int error = first->staging == NULL ? pcc_client_staging_make(first, 0) : 0;

    for (uint64_t i = 0; error == 0 && i < builder->payload.count; i++)
        error = locate_range(builder, &builder->payload.ranges[i]);
    for (uint64_t i = 0; error == 0 && i < builder->replica.count; i++)
        error = locate_range(builder, &builder->replica.ranges[i]);
    if (error != 0)
        return error;
    PCC_CLIENT_GPU(gpu, first);
    error = gpu.error != 0 ? gpu.error
                           : locate(builder, first, number, first->staging->address, &extent);
    if (error == 0)
        error = extent_add(builder, &extent);
    if (error != 0)
        return error;
    qsort(builder->extents, builder->extent_count, sizeof(extent), by_base);
    for (uint64_t i = 0; i < builder->extent_count; i++) {
        if (kept == 0 || builder->extents[i].base != builder->extents[kept - 1].base)
            builder->extents[kept++] = builder->extents[i];
    }
    builder->extent_count = kept;
    builder->probe_at = first->staging->address + first->staging->length_bytes;
    return 0;
}

/* True when the piece continues the run. */
static bool continues(const struct pcc_exposed *run, const struct pcc_extent *piece)
{
    return run != NULL && run->pieces > 0 && piece->is_piece && run->device == piece->device &&
           run->base + run->length_bytes == piece->base &&
           run->length_bytes / run->pieces == piece->length_bytes;
}

/* Allocations, and runs of pieces side by side. */
static int allocations_make(struct builder *builder)
{
    struct pcc_exposed *all = calloc(builder->extent_count, sizeof(*all));
    struct pcc_exposed *last = NULL;
    uint64_t pieces = 0;

    if (all == NULL)
        return -ENOMEM;
    builder->allocations = all;
    for (uint64_t i = 0; i < builder->extent_count; i++) {
        struct pcc_extent *extent = &builder->extents[i];
        if (!continues(last, extent)) {
            last = &all[builder->allocation_count++];
            *last = (struct pcc_exposed){.base = extent->base,
                                         .first_extent = i,
                                         .buffer_id = extent->is_piece ? 0 : extent->buffer_id,
                                         .device = extent->device,
                                         .index = (uint32_t)(last - all)};
        }
        last->length_bytes += extent->length_bytes;
        last->pieces += extent->is_piece;
        pieces += extent->is_piece;
    }
    return builder->allocation_count > PCC_EXPOSED_ALLOCATIONS_MAX ||
                   pieces > PCC_EXPOSED_PIECES_MAX
               ? -PCC_E_TOO_LARGE
               : 0;
}

static struct pcc_exposed *exposed_at(struct pcc_exposed *sorted, uint64_t count, uint64_t address)
{
    uint64_t low = 0;

    while (count - low > 1) { /* all before `low` begin too early, and `low` does not begin late */
        const uint64_t middle = low + (count - low) / 2;
        if (sorted[middle].base <= address)
            low = middle;
        else
            count = middle;
    }
    return count > 0 && sorted[low].base <= address ? &sorted[low] : NULL;
}

/* The allocation or run of the last exposure that is still the same memory. */
static const struct pcc_exposed *exposed_before(const struct builder *builder,
                                                const struct pcc_exposed *allocation)
{
    const struct pcc_client *client = builder->client;
    const struct pcc_exposed *found =
        exposed_at(client->exposed, client->exposed_count, allocation->base);
    const struct pcc_extent *extents = &builder->extents[allocation->first_extent];

    if (found == NULL || found->base != allocation->base || found->pieces != allocation->pieces ||
        found->length_bytes != allocation->length_bytes)
        return NULL;
    for (uint32_t i = 0; i < (found->pieces > 0 ? found->pieces : 1); i++)
        if (extents[i].buffer_id != client->extents[found->first_extent + i].buffer_id)
            return NULL;
    return found;
}

/* Within PCC_CLIENT_GPU. A run's name, too, stays as long as the daemon has it mapped. */
static int handle_get(struct builder *builder, struct pcc_client_device *device,
                      struct pcc_exposed *allocation)
{
    const struct pcc_exposed *known = exposed_before(builder, allocation);

    if (known != NULL && (allocation->pieces == 0 || builder->known)) {
        allocation->handle = known->handle;
        allocation->is_sent = true;
        return 0;
    }
    if (allocation->pieces == 0)
        return memory_code(device,
                           device->gpu.cuda->ipc_get(&allocation->handle, allocation->base));
    const ssize_t got = getrandom(&allocation->handle, sizeof(allocation->handle), 0);
    return got == (ssize_t)sizeof(allocation->handle) ? 0 : -EIO;
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
static bool is_next(const struct pcc_exposed_range *last, uint64_t into, uint64_t offset_bytes,
                    uint64_t gap_max)
{
    const uint64_t end = last->allocation_offset_bytes + last->length_bytes;

    return into >= end && into - end < gap_max &&
           offset_bytes - (last->offset_bytes + last->length_bytes) == into - end;
}

static int merge(const struct builder *builder, struct table *table)
{
    struct pcc_exposed_range *last = NULL;

    table->merged = calloc(table->count + 1, sizeof(*table->merged));
    if (table->merged == NULL)
        return -ENOMEM;
    for (uint64_t i = 0; i < table->count; i++) {
        const struct pcc_device_range *range = &table->ranges[i];
        const struct pcc_exposed *allocation =
            exposed_at(builder->allocations, builder->allocation_count, range->address);
        const uint64_t into = range->address - allocation->base;
        if (into + range->length_bytes > allocation->length_bytes)
            return -PCC_E_BAD_HANDLE; /* pieces of different lengths are two runs */
        if (last != NULL && last->allocation == allocation->index &&
            is_next(last, into, range->offset_bytes, table->gap_max)) {
            last->length_bytes = range->offset_bytes + range->length_bytes - last->offset_bytes;
            continue;
        }
        if (table->merged_count == PCC_EXPOSED_RANGES_MAX)
            return -PCC_E_TOO_LARGE;
        last = &table->merged[table->merged_count++];
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
    struct pcc_client_device *device = &builder->client->devices[builder->payload.ranges[0].device];
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

_Static_assert(sizeof(struct pcc_range) == sizeof(struct pcc_exposed_share) &&
                   offsetof(struct pcc_range, offset_bytes) ==
                       offsetof(struct pcc_exposed_share, offset_bytes),
               "shares are sent as they come");

static int bytes_make(const struct builder *builder, uint64_t device_bytes,
                      const struct pcc_client_replica *replica, uint8_t **out_bytes,
                      uint64_t *out_length)
{
    const struct pcc_exposed *probed = NULL;
    const size_t ranges_bytes = builder->payload.merged_count * sizeof(struct pcc_exposed_range);
    const size_t replica_bytes = builder->replica.merged_count * sizeof(struct pcc_exposed_range);
    const size_t shares_bytes = replica->share_count * sizeof(*replica->shares);
    const size_t length = sizeof(struct pcc_exposure) +
                          builder->allocation_count * sizeof(struct pcc_exposed_allocation) +
                          ranges_bytes + replica_bytes + shares_bytes;
    if (length > PCC_EXPOSURE_BYTES_MAX)
        return -PCC_E_TOO_LARGE;
    uint8_t *bytes = malloc(length);
    if (bytes == NULL)
        return -ENOMEM;
    uint8_t *at = bytes + sizeof(struct pcc_exposure);
    for (uint64_t i = 0; i < builder->allocation_count; i++) {
        const struct pcc_exposed *allocation = &builder->allocations[i];
        struct pcc_exposed_allocation said = {.length_bytes = allocation->length_bytes,
                                              .buffer_id = allocation->buffer_id,
                                              .address = allocation->base,
                                              .device = allocation->device,
                                              .pieces = allocation->pieces};
        memcpy(said.handle, &allocation->handle, sizeof(said.handle));
        memcpy(said.uuid, &builder->client->devices[allocation->device].gpu.uuid,
               sizeof(said.uuid));
        memcpy(at, &said, sizeof(said));
        at += sizeof(said);
        if (allocation->base <= builder->probe_at)
            probed = allocation;
    }
    memcpy(at, builder->payload.merged, ranges_bytes);
    memcpy(at + ranges_bytes, builder->replica.merged, replica_bytes);
    if (shares_bytes > 0)
        memcpy(at + ranges_bytes + replica_bytes, replica->shares, shares_bytes);
    struct pcc_exposure head = {.magic = PCC_EXPOSURE_MAGIC,
                                .allocation_count = (uint32_t)builder->allocation_count,
                                .range_count = builder->payload.merged_count,
                                .device_bytes = device_bytes,
                                .replica_id = replica->id,
                                .replica_count = builder->replica.merged_count,
                                .share_count = (uint32_t)replica->share_count,
                                .probe_allocation = probed->index,
                                .probe_offset_bytes = builder->probe_at - probed->base};
    memcpy(head.probe, builder->probe, sizeof(head.probe));
    memcpy(bytes, &head, sizeof(head));
    *out_bytes = bytes;
    *out_length = length;
    return 0;
}

/* With gpu_lock held. */
static int build(struct builder *builder, uint64_t device_bytes,
                 const struct pcc_client_replica *replica, uint8_t **out_bytes,
                 uint64_t *out_length)
{
    int error = extents_collect(builder);
    if (error == 0)
        error = allocations_make(builder);
    if (error == 0)
        error = handles_get(builder);
    if (error == 0)
        error = merge(builder, &builder->payload);
    if (error == 0)
        error = merge(builder, &builder->replica);
    if (error == 0)
        error = probe_write(builder);
    if (error == 0)
        error = bytes_make(builder, device_bytes, replica, out_bytes, out_length);
    return error;
}

int pcc_client_expose(struct pcc_client *client, const struct pcc_device_range *ranges,
                      uint64_t range_count, uint64_t device_bytes,
                      const struct pcc_client_replica *replica, bool known, uint8_t **out_bytes,
                      uint64_t *out_length)
{
    struct builder builder = {
        .client = client,
        .payload = {.ranges = ranges, .count = range_count, .gap_max = PCC_EXPOSED_GAP_MAX},
        /* A longer gap may be the place of what is not here. */
        .replica = {.ranges = replica->ranges,
                    .count = replica->range_count,
                    .gap_max = PCC_REPLICA_ALIGN},
        .known = known};

    if (range_count == 0 || !ranges_fit(client, &builder.payload, device_bytes) ||
        !ranges_fit(client, &builder.replica, UINT64_MAX))
        return -EINVAL;
    if (replica->share_count > PCC_EXPOSED_RANGES_MAX)
        return -PCC_E_TOO_LARGE;
    PCC_LOCKED(&client->gpu_lock);
    const int error = build(&builder, device_bytes, replica, out_bytes, out_length);
    if (error == 0) {
        pcc_client_exposure_free(client);
        client->exposed = builder.allocations;
        client->exposed_count = builder.allocation_count;
        client->extents = builder.extents;
        client->extent_count = builder.extent_count;
        PCC_WRITE(&client->has_shares, replica->share_count > 0);
        builder.allocations = NULL;
        builder.extents = NULL;
    }
    free(builder.allocations);
    free(builder.extents);
    free(builder.payload.merged);
    free(builder.replica.merged);
    return error;
}

int pcc_client_unshareable(struct pcc_client *client, const struct pcc_device_range *ranges,
                           uint64_t range_count, uint8_t *out)
{
    int error = 0;

    PCC_LOCKED(&client->gpu_lock);
    for (uint64_t i = 0; i < range_count; i++) {
        struct builder builder = {.client = client};
        error = pcc_client_device(client, ranges[i].device) != NULL
                    ? locate_range(&builder, &ranges[i])
                    : -EINVAL;
        free(builder.extents);
        if (error != 0 && error != -PCC_E_BAD_HANDLE)
            return error;
        out[i] = error != 0;
    }
    return 0;
}

void pcc_client_exposure_free(struct pcc_client *client)
{
    free(client->exposed);
    free(client->extents);
    client->exposed = NULL;
    client->extents = NULL;
    client->exposed_count = client->extent_count = 0;
    client->sending = 0;
}

/* -- descriptors -- */

/* The next piece that the daemon has no descriptor of, or NULL. With gpu_lock held. */
static const struct pcc_extent *piece_next(struct pcc_client *client)
{
    for (; client->sending < client->extent_count; client->sending++) {
        const struct pcc_extent *extent = &client->extents[client->sending];
        if (extent->is_piece &&
            !exposed_at(client->exposed, client->exposed_count, extent->base)->is_sent)
            return extent;
    }
    return NULL;
}

int pcc_client_descriptors(struct pcc_client *client, int *fds, uint32_t capacity,
                           uint32_t *count_out)
{
    const struct pcc_extent *piece;
    uint32_t count = 0;
    int error = 0;

    PCC_LOCKED(&client->gpu_lock);
    while (error == 0 && count < capacity && (piece = piece_next(client)) != NULL) {
        struct pcc_client_device *device = &client->devices[piece->device];
        PCC_CLIENT_GPU(gpu, device);
        error =
            gpu.error != 0
                ? gpu.error
                : memory_code(device, pcc_piece_export(device->gpu.cuda, piece->base, &fds[count]));
        count += error == 0;
        client->sending += error == 0;
    }
    *count_out = count;
    return error;
}

/* Of the extents from `first` on that lie on one GPU; *next_out is behind them. */
static bool still_there(const struct pcc_client *client, struct pcc_client_device *device,
                        uint64_t first, uint64_t *next_out)
{
    uint64_t i = first;

    PCC_CLIENT_GPU(gpu, device);
    bool holds = gpu.error == 0;
    for (; holds && i < client->extent_count &&
           client->extents[i].device == client->extents[first].device;
         i++) {
        unsigned long long buffer_id = 0;
        holds = device->gpu.cuda->pointer_attribute(&buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                                    client->extents[i].base) == CUDA_SUCCESS &&
                buffer_id == client->extents[i].buffer_id;
    }
    *next_out = i;
    return holds;
}

bool pcc_client_exposure_holds(struct pcc_client *client)
{
    PCC_LOCKED(&client->gpu_lock);
    for (uint64_t i = 0; i < client->extent_count;)
        if (!still_there(client, &client->devices[client->extents[i].device], i, &i))
            return false;
    return true;
}

/* -- the daemon's questions -- */

/* By the client's thread, as what follows, without the lock. */
static void answer(struct pcc_client *client, int result)
{
    struct pcc_proof *proof = &client->view.page->proof;

    client->proving = NULL;
    proof->result = result;
    /* Release: pairs with the daemon's acquire. */
    PCC_WRITE_RELEASE(&proof->answered, client->asked);
    pcc_bell_ring(&client->view.page->daemon_bell);
}

/* Has the GPU copy the blocks into the page, on a stream that never waits for the daemon. */
static int blocks_copy(struct pcc_client *client, struct pcc_client_device *device)
{
    const struct pcc_proof *proof = &client->view.page->proof;
    uint8_t *to = (uint8_t *)device->page_at + offsetof(struct pcc_page, proof.bytes);
    const uint32_t count = proof->count;

    PCC_CLIENT_GPU(gpu, device);
    if (gpu.error != 0)
        return gpu.error;
    CUresult result = count <= PCC_PROOF_BLOCKS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < count; i++, to += PCC_PROOF_BYTES) {
        const struct pcc_proof_block block = proof->blocks[i];
        result = block.length_bytes <= PCC_PROOF_BYTES
                     ? device->gpu.cuda->copy_to_host(to, block.address, block.length_bytes,
                                                      device->load)
                     : CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS)
        result = device->gpu.cuda->event_record(device->loaded, device->load);
    return pcc_client_gpu_code(device, result);
}

int pcc_client_prove(struct pcc_client *client)
{
    const struct pcc_proof *proof = &client->view.page->proof;
    struct pcc_client_device *device = client->proving;

    if (device == NULL) {
        /* Acquire pairs with the daemon's release. */
        const uint64_t asked = PCC_READ_ACQUIRE(&proof->asked);
        if (asked == client->asked)
            return 0;
        client->asked = asked;
        device = pcc_client_device(client, proof->device);
        const int error =
            device == NULL || device->page == 0 ? -PCC_E_DEVICE : blocks_copy(client, device);
        client->proving = device;
        client->polling = true;
        if (error != 0)
            answer(client, error);
        return 1;
    }
    PCC_CLIENT_GPU(gpu, device);
    const CUresult result =
        gpu.error == 0 ? device->gpu.cuda->event_query(device->loaded) : CUDA_SUCCESS;
    client->polling = client->polling || result == CUDA_ERROR_NOT_READY;
    if (result == CUDA_ERROR_NOT_READY)
        return 0;
    answer(client, gpu.error != 0 ? gpu.error : pcc_client_gpu_code(device, result));
    return 1;
}
