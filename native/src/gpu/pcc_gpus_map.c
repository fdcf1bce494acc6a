/* Memory of other processes that comes in pieces, a descriptor for each (cuMemCreate; torch's
 * expandable segments): the pieces are mapped side by side, to be read as one allocation. A mapping
 * keeps its memory, so neither handles nor descriptors are kept. */
#include "gpu/pcc_gpu.h"

static CUmemLocation location_of(const struct pcc_gpu *gpu)
{
    return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu->device.device};
}

/* A trainer may send any descriptor: of no GPU memory, of another GPU's, of another length. */
static CUresult piece_map(const struct pcc_gpu *gpu, int fd, CUdeviceptr at, uint64_t piece_bytes)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;
    CUmemAllocationProp properties = {0};
    CUmemGenericAllocationHandle handle;
    CUresult result =
        cuda->piece_import(&handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

    if (result != CUDA_SUCCESS)
        return result;
    result = cuda->piece_properties(&properties, handle);
    if (result == CUDA_SUCCESS && (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                                   properties.location.id != gpu->device.device))
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS)
        result = cuda->piece_map(at, piece_bytes, 0, handle, 0);
    (void)cuda->piece_release(handle);
    return result;
}

static void pieces_unmap(const struct pcc_gpu *gpu, CUdeviceptr address, uint32_t count,
                         uint64_t piece_bytes)
{
    for (uint32_t i = 0; i < count; i++)
        (void)gpu->device.cuda->piece_unmap(address + i * piece_bytes, piece_bytes);
}

/* Maps all or nothing. Within the context. */
static CUresult pieces_map(const struct pcc_gpu *gpu, const int *fds, uint32_t count,
                           uint64_t piece_bytes, CUdeviceptr address)
{
    const CUmemAccessDesc access = {.location = location_of(gpu),
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};
    CUresult result = CUDA_SUCCESS;
    uint32_t mapped = 0;

    while (result == CUDA_SUCCESS && mapped < count) {
        result = piece_map(gpu, fds[mapped], address + mapped * piece_bytes, piece_bytes);
        mapped += result == CUDA_SUCCESS;
    }
    if (result == CUDA_SUCCESS)
        result = gpu->device.cuda->access_set(address, count * piece_bytes, &access, 1);
    if (result != CUDA_SUCCESS)
        pieces_unmap(gpu, address, mapped, piece_bytes);
    return result;
}

int pcc_gpu_map(struct pcc_gpu *gpu, const int *fds, uint32_t count, uint64_t piece_bytes,
                CUdeviceptr *address_out, struct pcc_gpu_answers *answers_out)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;
    CUdeviceptr address = 0;

    *answers_out = (struct pcc_gpu_answers){.first = CUDA_ERROR_NOT_SUPPORTED};
    if (!cuda->descriptors)
        return -PCC_E_BAD_HANDLE;
    int error = pcc_gpu_enter(&gpu->device);
    if (error != 0)
        return error;
    CUresult result = cuda->address_reserve(&address, count * piece_bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        result = pieces_map(gpu, fds, count, piece_bytes, address);
        if (result != CUDA_SUCCESS)
            (void)cuda->address_free(address, count * piece_bytes);
    }
    answers_out->first = result;
    error = pcc_gpu_code(gpu, result);
    pcc_gpu_leave(&gpu->device);
    if (error != 0)
        return error == -ENOMEM || error == -PCC_E_DEVICE_LOST ? error : -PCC_E_BAD_HANDLE;
    *address_out = address;
    return 0;
}

void pcc_gpu_unmap(struct pcc_gpu *gpu, CUdeviceptr address, uint32_t count, uint64_t piece_bytes)
{
    if (pcc_gpu_is_lost(gpu) || pcc_gpu_enter(&gpu->device) != 0)
        return;
    pieces_unmap(gpu, address, count, piece_bytes);
    (void)gpu->device.cuda->address_free(address, count * piece_bytes);
    pcc_gpu_leave(&gpu->device);
}
