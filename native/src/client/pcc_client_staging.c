/* Staging: device memory for copies made on the device, before training continues or beside it. */
#include <stdlib.h>

#include "client/pcc_client_private.h"

/* Staging has whole units: memory smaller than that may share its physical block, and so its IPC
 * handle, with other allocations of the process. */
#define STAGING_UNIT_BYTES (2ull << 20)
#define STAGING_BYTES_MAX (1ull << 46)
#define PROBE_ROOM_BYTES 256u

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

/* With gpu_lock held, within PCC_CLIENT_GPU. */
static CUresult stage(struct pcc_client_device *device, CUstream stream,
                      const struct pcc_device_copy *copies, uint64_t copy_count, bool aside)
{
    const struct pcc_cuda *cuda = device->gpu.cuda;
    CUresult result = CUDA_SUCCESS;

    if (aside) {
        result = cuda->event_record(device->scratch, stream);
        if (result == CUDA_SUCCESS)
            result = cuda->stream_wait_event(device->side, device->scratch, 0);
        stream = device->side;
    }
    for (uint64_t i = 0; result == CUDA_SUCCESS && i < copy_count; i++) {
        if (copies[i].length_bytes > 0)
            result = cuda->copy_on_device(device->staging->address + copies[i].staging_offset_bytes,
                                          copies[i].address, copies[i].length_bytes, stream);
    }
    return result;
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
