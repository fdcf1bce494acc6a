/* Loads on the client's side. Copies to a GPU are enqueued first, those of several chunks one
 * behind the other. Beside them, what came is checked block by block, and a block that matches goes
 * to host memory at once, while it is in the cache. A chunk goes back to the daemon when its own
 * copies are done; the daemon reads the next chunks meanwhile.
 *
 * So a GPU may get damaged bytes. Nobody uses them: the load does not end before the daemon knows
 * that the chunk was damaged. The daemon then sends these bytes again, which the same stream copies
 * later, or the load fails. As with push, the driver is left alone while a stream waits for the
 * daemon. */
#include <stdlib.h>

#include "base/pcc_copy.h"
#include "base/pcc_hash.h"
#include "client/pcc_client_private.h"

/* Host and device ranges as one ascending list of targets; NULL with *error_out. */
static struct pcc_source *targets_make(const struct pcc_range *ranges, uint64_t range_count,
                                       const struct pcc_device_range *device_ranges,
                                       uint64_t device_range_count, int *error_out)
{
    uint64_t total, end = 0, i = 0, d = 0;

    *error_out = -ENOMEM;
    if (__builtin_add_overflow(range_count, device_range_count, &total) ||
        total >= SIZE_MAX / sizeof(struct pcc_source))
        return NULL;
    struct pcc_source *targets = calloc(total + 1, sizeof(*targets));
    if (targets == NULL)
        return NULL;
    while (i + d < total) {
        struct pcc_source *target = &targets[i + d];
        if (d == device_range_count ||
            (i < range_count && ranges[i].offset_bytes <= device_ranges[d].offset_bytes)) {
            *target = (struct pcc_source){ranges[i++], PCC_HOST};
        } else {
            *target = pcc_source_on_device(&device_ranges[d++]);
        }
        if (target->range.offset_bytes < end ||
            __builtin_add_overflow(target->range.offset_bytes, target->range.length_bytes, &end)) {
            free(targets);
            *error_out = -EINVAL;
            return NULL;
        }
    }
    return targets;
}

/* Every GPU that the ranges name is open and in order. */
static int devices_check(struct pcc_client *client, const struct pcc_device_range *ranges,
                         uint64_t range_count)
{
    for (uint64_t i = 0; i < range_count; i++) {
        const struct pcc_client_device *device = pcc_client_device(client, ranges[i].device);
        if (device == NULL || ranges[i].reserved != 0)
            return -EINVAL;
        if (PCC_READ(&device->broken))
            return -PCC_E_DEVICE;
    }
    return 0;
}

int pcc_client_load_start(struct pcc_client *client, uint64_t load_id,
                          const struct pcc_range *ranges, uint64_t range_count,
                          const struct pcc_device_range *device_ranges, uint64_t device_range_count)
{
    int error = devices_check(client, device_ranges, device_range_count);

    if (error != 0)
        return error;
    struct pcc_source *targets =
        targets_make(ranges, range_count, device_ranges, device_range_count, &error);
    if (targets == NULL)
        return error;
    PCC_LOCKED(&client->lock);
    const bool dead = PCC_READ(&client->dead);
    if (dead || client->load.active) {
        free(targets);
        return dead ? -ECONNRESET : -EBUSY;
    }
    client->load = (struct pcc_client_load){.active = true,
                                            .id = load_id,
                                            .targets = targets,
                                            .target_count = range_count + device_range_count};
    pcc_bell_ring(&client->view.page->client_bell); /* chunks that lie idle here go back */
    return 0;
}

/* With lock held: a part of the load is done, or has failed (a code). */
static void load_note(struct pcc_client *client, int error)
{
    struct pcc_client_load *load = &client->load;

    if (error != 0 && !load->ended) {
        load->ended = true;
        load->result = error;
    } else if (load->all_sent && load->flying == 0) {
        load->ended = true; /* or it has failed here before */
    }
    (void)pthread_cond_broadcast(&client->idle);
    if (load->ended)
        pcc_bell_ring(&client->view.page->client_bell);
}

void pcc_client_take_end(struct pcc_client *client, const struct pcc_message *message)
{
    PCC_LOCKED(&client->lock);
    struct pcc_client_load *load = &client->load;
    /* It may have ended here already: a GPU failed. */
    if (load->active && !load->ended && !load->all_sent && load->id == message->id) {
        load->all_sent = true;
        load->result = message->result;
        load_note(client, 0);
    }
}

bool pcc_client_load_over(const struct pcc_client *client, uint64_t load_id)
{
    const struct pcc_client_load *load = &client->load;
    const bool over = load->ended || PCC_READ(&client->dead);

    return !load->active || load->id != load_id || (over && load->flying == 0);
}

int pcc_client_load_wait(struct pcc_client *client, uint64_t load_id, uint64_t deadline_ns)
{
    struct pcc_client_load *load = &client->load;
    int result = -ETIMEDOUT;

    PCC_CLIENT_WAITS(client);
    (void)!pcc_client_wait(client, load_id, PCC_WAIT_LOAD, deadline_ns);
    PCC_LOCKED(&client->lock);
    if (!load->active || load->id != load_id)
        return -ENOENT;
    if (load->ended)
        result = load->result; /* also -ENOENT: the checkpoint is gone */
    else if (PCC_READ(&client->dead))
        result = -ECONNRESET;
    load->ended = true;
    while (load->busy || load->flying > 0)
        (void)pthread_cond_wait(&client->idle, &client->lock);
    free(load->targets);
    load->targets = NULL;
    load->active = false;
    return result;
}

void pcc_client_loaded(struct pcc_client *client, uint64_t *cached_bytes, uint64_t *read_bytes)
{
    PCC_LOCKED(&client->lock);
    *cached_bytes = client->load.cached_bytes;
    *read_bytes = client->load.read_bytes;
}

/* -- where loaded chunks go -- */

static uint64_t target_from(const struct pcc_client_load *load, uint64_t offset_bytes)
{
    return pcc_range_find(&load->targets->range, sizeof *load->targets, load->target_count,
                          offset_bytes);
}

/* A part of a chunk to where it belongs. On a GPU it is enqueued. Within PCC_CLIENT_GPU
 * of that GPU. */
static CUresult put(const struct pcc_client *client, const struct pcc_range *to, uint32_t place,
                    const uint8_t *bytes)
{
    if (to->length_bytes == 0)
        return CUDA_SUCCESS;
    if (place == PCC_HOST) {
        pcc_copy_past_cache((uint8_t *)(uintptr_t)to->address, bytes, to->length_bytes);
        return CUDA_SUCCESS;
    }
    const struct pcc_client_device *device = &client->devices[place];
    return device->gpu.cuda->copy_to_device(to->address, bytes, to->length_bytes, device->load);
}

/* What of [start, end) of a chunk, whose bytes are there, belongs to one place, host memory or a
 * GPU. */
static CUresult scatter(const struct pcc_client *client, const struct pcc_message *message,
                        const uint8_t *bytes, uint64_t start, uint64_t end, uint32_t place)
{
    const struct pcc_client_load *load = &client->load;
    CUresult result = CUDA_SUCCESS;

    for (uint64_t i = target_from(load, start); result == CUDA_SUCCESS && i < load->target_count &&
                                                load->targets[i].range.offset_bytes < end;
         i++) {
        if (load->targets[i].device != place)
            continue;
        const struct pcc_range part = pcc_range_cut(&load->targets[i].range, start, end);
        result = put(client, &part, place, bytes + (part.offset_bytes - message->offset_bytes));
    }
    return result;
}

struct scattering { /* of one chunk into host memory, by the crew */
    const struct pcc_client *client;
    const struct pcc_message *message;
    _Atomic bool damaged;
};

static bool block_intact(const struct scattering *scattering, uint64_t block, uint64_t length_bytes)
{
    const struct pcc_client *client = scattering->client;
    const struct pcc_message *message = scattering->message;
    const uint8_t *bytes = client->chunk_at[message->chunk];

    return (message->result & PCC_DATA_CHECKED) != 0 ||
           pcc_hash_bytes(bytes + block * client->view.geometry.block_bytes, length_bytes) ==
               pcc_page_checksums(&client->view, message->chunk)[block];
}

/* Checked and, while it is in the cache, copied. */
static void scatter_block(void *context, uint64_t block)
{
    struct scattering *scattering = context;
    const struct pcc_message *message = scattering->message;
    const uint64_t block_bytes = scattering->client->view.geometry.block_bytes;
    const uint64_t start = block * block_bytes;
    const uint64_t length_bytes = pcc_piece_bytes(message->length_bytes, start, block_bytes);
    const uint64_t offset_bytes = message->offset_bytes + start;

    if (block_intact(scattering, block, length_bytes))
        (void)scatter(scattering->client, message, scattering->client->chunk_at[message->chunk],
                      offset_bytes, offset_bytes + length_bytes, PCC_HOST);
    else
        PCC_WRITE(&scattering->damaged, true);
}

/* False when some of the chunk is damaged. */
static bool scatter_to_host(struct pcc_client *client, const struct pcc_message *message)
{
    struct scattering scattering = {.client = client, .message = message};

    pcc_crew_run(&client->crew, PCC_CREW_HELPERS,
                 pcc_ceil_div(message->length_bytes, client->view.geometry.block_bytes),
                 scatter_block, &scattering);
    return !PCC_READ(&scattering.damaged);
}

/* How many copies to each GPU the chunk takes. */
static void pieces_count(const struct pcc_client_load *load, uint64_t start, uint64_t end,
                         uint32_t pieces[PCC_DEVICES])
{
    for (uint64_t i = target_from(load, start);
         i < load->target_count && load->targets[i].range.offset_bytes < end; i++) {
        if (load->targets[i].device != PCC_HOST)
            pieces[load->targets[i].device]++;
    }
}

/* -- chunks that a GPU reads -- */

static void load_begun(struct pcc_client *client, struct pcc_client_device *device, uint32_t chunk,
                       uint32_t pieces)
{
    if (device->loading.first == PCC_NO_CHUNK)
        device->load_progress_ns = pcc_now_ns();
    client->flights[chunk].loading = true;
    client->flights[chunk].pieces = pieces;
    device->load_pieces += pieces;
    pcc_client_list_add(client, &device->loading, chunk);
    PCC_LOCKED(&client->lock);
    client->load.flying++;
}

/* The copies of the first chunk in the list are done, or are not asked for any more. */
static uint32_t load_done(struct pcc_client *client, struct pcc_client_device *device, int error)
{
    const uint32_t chunk = pcc_client_list_take(client, &device->loading);

    client->flights[chunk].loading = false;
    device->load_pieces -= client->flights[chunk].pieces;
    device->load_progress_ns = pcc_now_ns();
    PCC_LOCKED(&client->lock);
    client->load.flying--;
    load_note(client, error);
    return chunk;
}

/* True when the first chunk's copies are over, whatever came of them. Within PCC_CLIENT_GPU. */
static bool is_done(struct pcc_client *client, struct pcc_client_device *device, int *error_out)
{
    const uint32_t chunk = device->loading.first;
    CUresult result = CUDA_ERROR_DEINITIALIZED;

    if (!PCC_READ(&device->broken))
        result = device->gpu.cuda->event_query(client->flights[chunk].event);
    if (result == CUDA_ERROR_NOT_READY &&
        pcc_now_ns() - device->load_progress_ns <= PCC_READ(&client->patience_ns))
        return false;
    if (result != CUDA_SUCCESS) /* what a query says of others' work does not heal */
        PCC_WRITE(&device->broken, true);
    *error_out = result == CUDA_SUCCESS ? 0 : -PCC_E_DEVICE_LOST;
    return true;
}

/* The first chunk in the list goes back. False when the daemon broke the protocol. */
static bool give_back(struct pcc_client *client, struct pcc_client_device *device, int error)
{
    const uint32_t chunk = load_done(client, device, error);
    const struct pcc_message message = {.kind = PCC_MSG_TAKEN,
                                        .chunk = chunk,
                                        .result =
                                            client->flights[chunk].damaged ? -PCC_E_DAMAGED : 0};

    return pcc_client_tell(client, &message);
}

int pcc_client_load_land(struct pcc_client *client, struct pcc_client_device *device)
{
    int error = 0, result = 0;

    PCC_CLIENT_GPU(gpu, device);
    if (gpu.error != 0) /* there is nothing to ask */
        PCC_WRITE(&device->broken, true);
    while (result >= 0 && device->loading.first != PCC_NO_CHUNK && is_done(client, device, &error))
        result = give_back(client, device, error) ? 1 : -1;
    return result;
}

void pcc_client_load_drain(struct pcc_client *client)
{
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_client_device *device = pcc_client_device(client, i);
        if (device == NULL || device->loading.first == PCC_NO_CHUNK)
            continue;
        PCC_CLIENT_GPU(gpu, device);
        int error = gpu.error != 0 ? -PCC_E_DEVICE_LOST : 0;
        while (device->loading.first != PCC_NO_CHUNK) {
            if (error == 0) /* after the first failure nothing is waited for */
                error = pcc_client_gpu_await(client, device,
                                             client->flights[device->loading.first].event, true);
            (void)load_done(client, device, error);
        }
    }
}

/* -- taking chunks -- */

/* Within PCC_CLIENT_GPU: waits until the copies fit into the stream's queue. A full queue would
 * block this thread, which has deadlines to keep. */
static int room_await(struct pcc_client *client, struct pcc_client_device *device, uint32_t pieces)
{
    int error = 0;

    while (error == 0 && device->load_pieces > 0 && device->load_pieces + pieces > PCC_PIECES_MAX) {
        const uint32_t chunk = device->loading.first;
        error = pcc_client_gpu_await(client, device, client->flights[chunk].event, true);
        if (!give_back(client, device, error))
            error = -ECONNRESET;
    }
    return error;
}

/* Within PCC_CLIENT_GPU: the chunk's copies, and the event behind them. */
static int copies_enqueue(struct pcc_client *client, const struct pcc_message *message,
                          uint32_t index, uint32_t pieces, bool wait)
{
    struct pcc_client_device *device = &client->devices[index];
    CUevent event = device->loaded;
    CUresult result = CUDA_SUCCESS;

    if (!wait) {
        result = pcc_client_event_ready(client, message->chunk, index);
        event = client->flights[message->chunk].event;
    }
    if (result != CUDA_SUCCESS)
        return pcc_client_gpu_code(device, result);
    const uint8_t *pinned = pcc_client_pin(client, index, message->chunk);
    result = scatter(client, message, pinned != NULL ? pinned : client->chunk_at[message->chunk],
                     message->offset_bytes, message->offset_bytes + message->length_bytes, index);
    /* Also after a refusal: the copies before it read the chunk. */
    int error = pcc_client_gpu_code(device, device->gpu.cuda->event_record(event, device->load));
    if (error != 0)
        PCC_WRITE(&device->broken, true);
    else if (wait)
        error = pcc_client_gpu_await(client, device, event, true);
    else
        load_begun(client, device, message->chunk, pieces);
    return error != 0 ? error : pcc_client_gpu_code(device, result);
}

/* What belongs to one GPU. With `wait` it is there on return. */
static int scatter_to_device(struct pcc_client *client, const struct pcc_message *message,
                             uint32_t index, uint32_t pieces, bool wait)
{
    struct pcc_client_device *device = &client->devices[index];

    if (PCC_READ(&device->broken))
        return -PCC_E_DEVICE;
    pcc_client_await_unarmed(client);
    PCC_CLIENT_GPU(gpu, device);
    const int error = gpu.error != 0 ? gpu.error : room_await(client, device, pieces);
    return error != 0 ? error : copies_enqueue(client, message, index, pieces, wait);
}

/* A chunk has one event. If several GPUs have parts of the chunk, all but the last are waited for
 * here; that happens only to a checkpoint that was saved with another chunk size. */
static int scatter_to_devices(struct pcc_client *client, const struct pcc_message *message)
{
    const uint64_t start = message->offset_bytes, end = start + message->length_bytes;
    uint32_t pieces[PCC_DEVICES] = {0}, last = 0;
    int error = 0;

    pieces_count(&client->load, start, end, pieces);
    for (uint32_t i = 0; i < PCC_DEVICES; i++)
        last = pieces[i] > 0 ? i : last;
    for (uint32_t i = 0; error == 0 && i < PCC_DEVICES; i++) {
        if (pieces[i] > 0)
            error = scatter_to_device(client, message, i, pieces[i], i != last);
    }
    return error;
}

bool pcc_client_take_data(struct pcc_client *client, const struct pcc_message *message,
                          int32_t *result_out)
{
    uint64_t end;

    (void)pthread_mutex_lock(&client->lock);
    struct pcc_client_load *load = &client->load;
    const bool wanted = load->active && !load->ended && load->id == message->id &&
                        !__builtin_add_overflow(message->offset_bytes, message->length_bytes, &end);
    load->busy = wanted;
    (void)pthread_mutex_unlock(&client->lock);
    if (!wanted)
        return true; /* of a load that timed out */
    const int error = scatter_to_devices(client, message);
    const bool intact = scatter_to_host(client, message); /* while the GPUs copy */
    client->flights[message->chunk].damaged = !intact;
    *result_out = intact ? 0 : -PCC_E_DAMAGED;
    PCC_LOCKED(&client->lock);
    load->busy = false;
    if (intact && (message->result & PCC_DATA_CACHED) != 0)
        load->cached_bytes += message->length_bytes;
    else if (intact)
        load->read_bytes += message->length_bytes;
    load_note(client, error);
    return !client->flights[message->chunk].loading;
}
