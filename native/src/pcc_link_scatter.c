/* Where loaded chunks go. Host memory is filled at once; copies to a GPU are enqueued, those of
 * several chunks one behind the other, and a chunk goes back to the daemon when its own are done.
 * As with push, the driver is left alone while a stream waits for the daemon. */
#include <string.h>

#include "pcc_link_private.h"

static uint64_t target_from(const struct pcc_link_load *load, uint64_t offset_bytes)
{
    return pcc_range_find(&load->targets->range, sizeof *load->targets, load->target_count,
                          offset_bytes);
}

/* A part of a chunk to where it belongs. On a GPU it is enqueued. Between pcc_link_gpu_enter and
 * leave of that GPU. */
static CUresult put(const struct pcc_link *link, const struct pcc_range *to, uint32_t place,
                    const uint8_t *bytes)
{
    if (to->length_bytes == 0)
        return CUDA_SUCCESS;
    if (place == PCC_HOST) {
        memcpy((uint8_t *)(uintptr_t)to->address, bytes, to->length_bytes);
        return CUDA_SUCCESS;
    }
    const struct pcc_link_device *device = &link->devices[place];
    return device->gpu.cuda->copy_to_device(to->address, bytes, to->length_bytes, device->load);
}

/* The chunk's bytes that belong to one place, host memory or a GPU. */
static CUresult scatter(const struct pcc_link *link, const struct pcc_message *message,
                        uint32_t place)
{
    const struct pcc_link_load *load = &link->load;
    const uint8_t *bytes = link->chunk_at[message->chunk];
    const uint64_t start = message->offset_bytes, end = start + message->length_bytes;
    CUresult result = CUDA_SUCCESS;

    for (uint64_t i = target_from(load, start); result == CUDA_SUCCESS && i < load->target_count &&
                                                load->targets[i].range.offset_bytes < end;
         i++) {
        if (load->targets[i].device != place)
            continue;
        const struct pcc_range part = pcc_range_cut(&load->targets[i].range, start, end);
        result = put(link, &part, place, bytes + (part.offset_bytes - start));
    }
    return result;
}

/* How many copies to each GPU the chunk takes. */
static void pieces_count(const struct pcc_link_load *load, uint64_t start, uint64_t end,
                         uint32_t pieces[PCC_DEVICES])
{
    for (uint64_t i = target_from(load, start);
         i < load->target_count && load->targets[i].range.offset_bytes < end; i++) {
        if (load->targets[i].device != PCC_HOST)
            pieces[load->targets[i].device]++;
    }
}

/* -- chunks that a GPU reads -- */

static void load_begun(struct pcc_link *link, struct pcc_link_device *device, uint32_t chunk,
                       uint32_t pieces)
{
    if (device->loading.first == PCC_NO_CHUNK)
        device->load_progress_ns = pcc_now_ns();
    link->flights[chunk].loading = true;
    link->flights[chunk].pieces = pieces;
    device->load_pieces += pieces;
    pcc_link_list_add(link, &device->loading, chunk);
    (void)pthread_mutex_lock(&link->lock);
    link->load.flying++;
    (void)pthread_mutex_unlock(&link->lock);
}

/* The copies of the first chunk in the list are done, or nobody asks for them any more. */
static uint32_t load_done(struct pcc_link *link, struct pcc_link_device *device, int error)
{
    const uint32_t chunk = pcc_link_list_take(link, &device->loading);

    link->flights[chunk].loading = false;
    device->load_pieces -= link->flights[chunk].pieces;
    device->load_progress_ns = pcc_now_ns();
    (void)pthread_mutex_lock(&link->lock);
    link->load.flying--;
    pcc_link_load_note(link, error);
    (void)pthread_mutex_unlock(&link->lock);
    return chunk;
}

/* True when the first chunk's copies are over, whatever came of them. Within enter/leave. */
static bool is_done(struct pcc_link *link, struct pcc_link_device *device, int *error_out)
{
    const uint32_t chunk = device->loading.first;
    CUresult result = CUDA_ERROR_DEINITIALIZED;

    if (!atomic_load_explicit(&device->broken, memory_order_relaxed))
        result = device->gpu.cuda->event_query(link->flights[chunk].event);
    if (result == CUDA_ERROR_NOT_READY &&
        pcc_now_ns() - device->load_progress_ns <=
            atomic_load_explicit(&link->patience_ns, memory_order_relaxed))
        return false;
    if (result != CUDA_SUCCESS) /* what a query says of others' work does not heal */
        atomic_store_explicit(&device->broken, true, memory_order_relaxed);
    *error_out = result == CUDA_SUCCESS ? 0 : -PCC_E_DEVICE_LOST;
    return true;
}

/* The first chunk in the list goes back. False when the daemon broke the protocol. */
static bool give_back(struct pcc_link *link, struct pcc_link_device *device, int error)
{
    const struct pcc_message message = {.kind = PCC_MSG_TAKEN,
                                        .chunk = load_done(link, device, error)};

    return pcc_link_tell(link, &message);
}

int pcc_link_load_land(struct pcc_link *link, struct pcc_link_device *device)
{
    int mode, error = 0, result = 0;
    const bool entered = pcc_link_gpu_enter(device, &mode) == 0;

    if (!entered) /* there is nothing to ask */
        atomic_store_explicit(&device->broken, true, memory_order_relaxed);
    while (result >= 0 && device->loading.first != PCC_NO_CHUNK && is_done(link, device, &error))
        result = give_back(link, device, error) ? 1 : -1;
    if (entered)
        pcc_link_gpu_leave(device, mode);
    return result;
}

void pcc_link_load_drain(struct pcc_link *link)
{
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_link_device *device = pcc_link_device(link, i);
        int mode, error = 0;
        if (device == NULL || device->loading.first == PCC_NO_CHUNK)
            continue;
        if (pcc_link_gpu_enter(device, &mode) != 0) {
            while (device->loading.first != PCC_NO_CHUNK)
                (void)load_done(link, device, -PCC_E_DEVICE_LOST);
            continue;
        }
        while (device->loading.first != PCC_NO_CHUNK) {
            if (error == 0) /* after the first failure nothing is waited for */
                error = pcc_link_gpu_await(link, device, link->flights[device->loading.first].event,
                                           true);
            (void)load_done(link, device, error);
        }
        pcc_link_gpu_leave(device, mode);
    }
}

/* -- taking chunks -- */

/* Within enter/leave: until the copies fit into the stream's queue; a full one blocks its caller,
 * who has deadlines to keep. */
static int room_await(struct pcc_link *link, struct pcc_link_device *device, uint32_t pieces)
{
    int error = 0;

    while (error == 0 && device->load_pieces > 0 && device->load_pieces + pieces > PCC_PIECES_MAX) {
        const uint32_t chunk = device->loading.first;
        error = pcc_link_gpu_await(link, device, link->flights[chunk].event, true);
        if (!give_back(link, device, error))
            error = -ECONNRESET;
    }
    return error;
}

/* Within enter/leave: the chunk's copies, and the event behind them. */
static int copies_enqueue(struct pcc_link *link, const struct pcc_message *message, uint32_t index,
                          uint32_t pieces, bool wait)
{
    struct pcc_link_device *device = &link->devices[index];
    CUevent event = device->loaded;
    CUresult result = CUDA_SUCCESS;

    if (!wait) {
        result = pcc_link_event_ready(link, message->chunk, index);
        event = link->flights[message->chunk].event;
    }
    if (result != CUDA_SUCCESS)
        return pcc_link_gpu_code(device, result);
    (void)pcc_link_pin(link, index, message->chunk);
    result = scatter(link, message, index);
    /* Also after a refusal: the copies before it read the chunk. */
    int error = pcc_link_gpu_code(device, device->gpu.cuda->event_record(event, device->load));
    if (error != 0)
        atomic_store_explicit(&device->broken, true, memory_order_relaxed);
    else if (wait)
        error = pcc_link_gpu_await(link, device, event, true);
    else
        load_begun(link, device, message->chunk, pieces);
    return error != 0 ? error : pcc_link_gpu_code(device, result);
}

/* What belongs to one GPU. With `wait` it is there on return. */
static int scatter_to_device(struct pcc_link *link, const struct pcc_message *message,
                             uint32_t index, uint32_t pieces, bool wait)
{
    struct pcc_link_device *device = &link->devices[index];
    int mode;

    if (atomic_load_explicit(&device->broken, memory_order_relaxed))
        return -PCC_E_DEVICE;
    pcc_link_await_unarmed(link);
    int error = pcc_link_gpu_enter(device, &mode);
    if (error != 0)
        return error;
    error = room_await(link, device, pieces);
    if (error == 0)
        error = copies_enqueue(link, message, index, pieces, wait);
    pcc_link_gpu_leave(device, mode);
    return error;
}

/* A chunk has one event: of several GPUs all but the last are waited for. Chunks hold parts of more
 * than one only when they were made in other sizes than now. */
static int scatter_to_devices(struct pcc_link *link, const struct pcc_message *message)
{
    const uint64_t start = message->offset_bytes, end = start + message->length_bytes;
    uint32_t pieces[PCC_DEVICES] = {0}, last = 0;
    int error = 0;

    pieces_count(&link->load, start, end, pieces);
    for (uint32_t i = 0; i < PCC_DEVICES; i++)
        last = pieces[i] > 0 ? i : last;
    for (uint32_t i = 0; error == 0 && i < PCC_DEVICES; i++) {
        if (pieces[i] > 0)
            error = scatter_to_device(link, message, i, pieces[i], i != last);
    }
    return error;
}

bool pcc_link_take_data(struct pcc_link *link, const struct pcc_message *message)
{
    uint64_t end;

    (void)pthread_mutex_lock(&link->lock);
    struct pcc_link_load *load = &link->load;
    const bool wanted = load->active && !load->ended && load->id == message->id &&
                        !__builtin_add_overflow(message->offset_bytes, message->length_bytes, &end);
    load->busy = wanted;
    (void)pthread_mutex_unlock(&link->lock);
    if (!wanted)
        return true; /* of a load that timed out */
    const int error = scatter_to_devices(link, message);
    (void)scatter(link, message, PCC_HOST);
    (void)pthread_mutex_lock(&link->lock);
    load->busy = false;
    pcc_link_load_note(link, error);
    (void)pthread_mutex_unlock(&link->lock);
    return !link->flights[message->chunk].loading;
}
