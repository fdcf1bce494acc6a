/* Push from GPU memory: the client's thread enqueues copies into granted chunks and asks when they
 * are done. It enqueues a few at a time, and all that are left once the trainer waits at the gate.
 *
 * It never waits inside the driver: host memory is pinned first, and no more copies are enqueued
 * than a stream's queue takes. The call for a copy into memory that could not be pinned lasts as
 * long as the copy, so it is made only when nothing is left to wait for. While a stream waits for
 * the daemon (`armed`), the thread makes no call at all: another thread may be inside a call that
 * ends with that wait and holds a driver lock, and only this thread can release the stream. */
#include "base/pcc_map.h"
#include "client/pcc_client_private.h"

void pcc_client_list_add(struct pcc_client *client, struct pcc_chunk_list *list, uint32_t chunk)
{
    client->flights[chunk].next = PCC_NO_CHUNK;
    if (list->first == PCC_NO_CHUNK)
        list->first = chunk;
    else
        client->flights[list->last].next = chunk;
    list->last = chunk;
}

uint32_t pcc_client_list_take(struct pcc_client *client, struct pcc_chunk_list *list)
{
    const uint32_t chunk = list->first;

    if (chunk != PCC_NO_CHUNK)
        list->first = client->flights[chunk].next;
    return chunk;
}

/* -- pinning --
 *
 * Memory is registered for one context (pcc_gpu_pin), so each GPU has a view of a segment. */

bool pcc_client_is_pinned(const struct pcc_client_segment *segment)
{
    for (uint32_t i = 0; i < PCC_DEVICES; i++)
        if (segment->views[i].bytes != NULL)
            return true;
    return false;
}

/* Within PCC_CLIENT_GPU, once for each GPU. If the driver refuses, copies are slower, and right. */
static void view_pin(struct pcc_client *client, uint32_t device, struct pcc_client_segment *segment)
{
    struct pcc_client_view *view = &segment->views[device];
    const uint64_t length = segment->length_bytes;
    const bool first = !pcc_client_is_pinned(segment);
    uint8_t *bytes = first ? segment->bytes : pcc_map_alias(segment->bytes, length);

    view->tried = true;
    if (bytes != NULL && pcc_gpu_pin(&client->devices[device].gpu, bytes, length) == 0)
        view->bytes = bytes;
    else if (bytes != NULL && !first)
        (void)munmap(bytes, length);
}

uint8_t *pcc_client_pin(struct pcc_client *client, uint32_t device, uint32_t chunk)
{
    for (uint32_t i = 0; i < client->segment_count; i++) {
        struct pcc_client_segment *segment = &client->segments[i];
        const struct pcc_client_view *view = &segment->views[device];
        if (chunk - segment->first_chunk >= segment->chunk_count)
            continue;
        if (!view->tried)
            view_pin(client, device, segment);
        return view->bytes == NULL
                   ? NULL
                   : view->bytes + (client->chunk_at[chunk] - (uint8_t *)segment->bytes);
    }
    return NULL;
}

void pcc_client_pin_for(struct pcc_client *client, uint32_t device, bool later)
{
    if (device >= PCC_DEVICES)
        return;
    if (later)
        (void)atomic_fetch_or_explicit(&client->pins_for, 1u << device, memory_order_relaxed);
    (void)atomic_fetch_or_explicit(&client->pins_now, 1u << device, memory_order_relaxed);
    pcc_bell_ring(&client->view.page->client_bell);
}

/* False when no segment is left to be pinned for the GPU, or the GPU is broken. */
static bool pin_one(struct pcc_client *client, uint32_t device)
{
    struct pcc_client_device *mine = pcc_client_device(client, device);

    for (uint32_t i = 0; mine != NULL && !PCC_READ(&mine->broken) && i < client->segment_count;
         i++) {
        struct pcc_client_segment *segment = &client->segments[i];
        if (segment->views[device].tried || segment->retiring)
            continue;
        PCC_CLIENT_GPU(gpu, mine);
        if (gpu.error == 0)
            view_pin(client, device, segment);
        return gpu.error == 0;
    }
    return false;
}

int pcc_client_pin_ahead(struct pcc_client *client)
{
    const uint32_t wanted = PCC_READ(&client->pins_now);

    if (wanted == 0 || client->segment_count == 0 || PCC_READ(&client->armed))
        return 0;
    const uint32_t device = (uint32_t)__builtin_ctz(wanted);
    if (!pin_one(client, device))
        (void)atomic_fetch_and_explicit(&client->pins_now, ~(1u << device), memory_order_relaxed);
    return 1;
}

static void view_unmap(struct pcc_client *client, uint32_t device, uint8_t *bytes, uint64_t length)
{
    struct pcc_client_device *mine = pcc_client_device(client, device);

    PCC_CLIENT_GPU(gpu, mine);
    if (gpu.error == 0 && pcc_gpu_unpin(&mine->gpu, bytes, length) == 0)
        (void)munmap(bytes, length);
    else /* the driver still has the addresses: nothing else comes there, and the pages go */
        (void)mmap(bytes, length, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

void pcc_client_segment_unmap(struct pcc_client *client, struct pcc_client_segment *segment,
                              bool quiet)
{
    bool in_use = false;

    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        uint8_t *bytes = segment->views[i].bytes;
        if (bytes == NULL)
            continue;
        in_use = in_use || bytes == segment->bytes;
        if (quiet || !PCC_READ(&client->devices[i].broken))
            view_unmap(client, i, bytes, segment->length_bytes);
    }
    if (!in_use)
        (void)munmap(segment->bytes, segment->length_bytes);
}

/* -- enqueueing -- */

/* Has our stream wait for what the snapshot depends on. 1; 0 = not yet; else a code. */
static int order(struct pcc_client *client, struct pcc_job *job, uint32_t chunk,
                 const struct pcc_part *part)
{
    struct pcc_client_device *device = &client->devices[part->device];
    struct pcc_job_device *mine = &job->devices[part->device];
    CUresult result = CUDA_SUCCESS;

    if ((pcc_client_pin(client, part->device, chunk) == NULL || part->pieces > PCC_PIECES_MAX) &&
        !mine->passed) {
        result = device->gpu.cuda->event_query(mine->marked);
        if (result == CUDA_ERROR_NOT_READY)
            return 0;
        mine->passed = result == CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS && !mine->ordered) {
        result = device->gpu.cuda->stream_wait_event(device->copy, mine->marked, 0);
        mine->ordered = result == CUDA_SUCCESS;
    }
    return result == CUDA_SUCCESS ? 1 : pcc_client_gpu_code(device, result);
}

/* Its own from its last flight, if that was on this GPU. */
CUresult pcc_client_event_ready(struct pcc_client *client, uint32_t chunk, uint32_t device)
{
    const struct pcc_cuda *cuda = client->devices[device].gpu.cuda;
    struct pcc_flight *flight = &client->flights[chunk];

    if (flight->event != NULL && flight->device == device)
        return CUDA_SUCCESS;
    if (flight->event != NULL)
        (void)cuda->event_destroy(flight->event);
    flight->event = NULL;
    flight->device = device;
    return cuda->event_create(&flight->event, CU_EVENT_DISABLE_TIMING);
}

/* Within PCC_CLIENT_GPU, in order and with an event at hand. */
static CUresult chunk_enqueue(struct pcc_client *client, struct pcc_job *job, uint32_t chunk,
                              const struct pcc_part *part)
{
    struct pcc_client_device *device = &client->devices[part->device];
    const struct pcc_cuda *cuda = device->gpu.cuda;
    struct pcc_job_device *mine = &job->devices[part->device];

    uint8_t *pinned = pcc_client_pin(client, part->device, chunk);
    CUresult result =
        pcc_client_gather(job, &job->cursor, pinned != NULL ? pinned : client->chunk_at[chunk],
                          job->filled_bytes, part->length_bytes, device);
    /* Also after a copy that was refused: the ones before it are under way. */
    const CUresult recorded = cuda->event_record(client->flights[chunk].event, device->copy);
    if (recorded != CUDA_SUCCESS) { /* when they end cannot be known */
        (void)cuda->event_destroy(client->flights[chunk].event);
        client->flights[chunk].event = NULL;
    }
    if (result == CUDA_SUCCESS)
        result = recorded;
    if (result == CUDA_SUCCESS && job->filled_bytes + part->length_bytes >= mine->end_bytes)
        result = cuda->event_record(mine->copied, device->copy);
    return result;
}

/* Whether another chunk may be put before the copies that the trainer enqueues from now on. While
 * the trainer waits at the gate, it enqueues none. */
static bool may_go_ahead(const struct pcc_client *client, const struct pcc_client_device *device,
                         const struct pcc_job *job, const struct pcc_part *part)
{
    const uint64_t two_chunks = 2ull * client->view.geometry.chunk_bytes;
    const uint64_t ahead = PCC_READ(&client->ahead_bytes);

    return job->snapshot <= PCC_READ(&client->at_gate) ||
           device->flying_bytes + part->length_bytes <= (ahead > two_chunks ? ahead : two_chunks);
}

int pcc_client_enqueue(struct pcc_client *client, struct pcc_job *job, uint32_t chunk,
                       const struct pcc_part *part, bool *taken_out)
{
    struct pcc_client_device *device = &client->devices[part->device];

    if (PCC_READ(&device->broken))
        return -PCC_E_DEVICE;
    if (PCC_READ(&client->armed))
        return 0;
    if (device->pieces > 0 && device->pieces + part->pieces > PCC_PIECES_MAX)
        return 0;
    if (!may_go_ahead(client, device, job, part))
        return 0;
    PCC_CLIENT_GPU(gpu, device);
    if (gpu.error != 0)
        return gpu.error;
    const int ordered = order(client, job, chunk, part);
    if (ordered <= 0)
        return ordered;
    int error = pcc_client_gpu_code(device, pcc_client_event_ready(client, chunk, part->device));
    if (error != 0)
        return error;
    if (device->flying.first == PCC_NO_CHUNK)
        device->progress_ns = pcc_now_ns();
    *taken_out = true;
    error = pcc_client_gpu_code(device, chunk_enqueue(client, job, chunk, part));
    return error == 0 ? 1 : error;
}

/* -- landing -- */

/* The copies of the first chunk in the list are done, or never will be. */
static void landed(struct pcc_client *client, struct pcc_client_device *device, int error)
{
    const uint32_t chunk = pcc_client_list_take(client, &device->flying);
    struct pcc_flight *flight = &client->flights[chunk];
    struct pcc_job *job = flight->job;

    device->pieces -= flight->pieces;
    device->flying_bytes -= flight->length_bytes;
    device->progress_ns = pcc_now_ns();
    if (error == 0)
        pcc_client_list_add(client, &client->landed, chunk);
    PCC_LOCKED(&client->lock);
    job->flying--;
    if (error != 0) {
        /* Perhaps the GPU still writes to it: the chunk is not used again. */
        job->flights--;
        if (pcc_client_job_abandon(client, job, error))
            pcc_bell_ring(&client->view.page->daemon_bell);
        pcc_client_job_end(job);
        pcc_bell_ring(&client->view.page->client_bell);
    } else {
        pcc_client_job_note(client, job);
    }
    (void)pthread_cond_broadcast(&client->idle);
}

/* True when the first chunk's copies could have run for long, and have not ended. Until the
 * trainer's stream has reached the mark, that is no fault of the GPU's. */
static bool is_dead(struct pcc_client *client, struct pcc_client_device *device)
{
    const struct pcc_flight *flight = &client->flights[device->flying.first];
    struct pcc_job_device *part = &flight->job->devices[flight->device];
    const uint64_t now = pcc_now_ns();

    if (!part->passed) {
        part->passed = device->gpu.cuda->event_query(part->marked) != CUDA_ERROR_NOT_READY;
        device->progress_ns = now;
    }
    return now - device->progress_ns > PCC_READ(&client->patience_ns);
}

int pcc_client_land(struct pcc_client *client, struct pcc_client_device *device)
{
    int result = 0;

    PCC_CLIENT_GPU(gpu, device);
    if (gpu.error != 0) {
        while (device->flying.first != PCC_NO_CHUNK)
            landed(client, device, -PCC_E_DEVICE);
        return 1;
    }
    while (result >= 0 && device->flying.first != PCC_NO_CHUNK) {
        const struct pcc_flight *flight = &client->flights[device->flying.first];
        const CUresult state = flight->event != NULL ? device->gpu.cuda->event_query(flight->event)
                                                     : CUDA_ERROR_UNKNOWN;
        if (state == CUDA_ERROR_NOT_READY) {
            if (!is_dead(client, device))
                break;
            PCC_WRITE(&device->broken, true);
            result = -1;
        } else {
            if (state != CUDA_SUCCESS) /* what a query says of others' work does not heal */
                PCC_WRITE(&device->broken, true);
            landed(client, device, pcc_client_gpu_code(device, state));
            result = 1;
        }
    }
    return result;
}
