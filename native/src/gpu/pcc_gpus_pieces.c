/* Memory of cuMemCreate, which comes as a descriptor for each physical piece: the pieces are mapped
 * side by side into one range of addresses, for reading only. */
#include "gpu/pcc_gpu.h"

/* Maps one piece. Its handle is released at once: the mapping keeps the memory. */
static CUresult piece_map(const struct pcc_gpu *gpu, int descriptor, CUdeviceptr address,
                          uint64_t piece_bytes)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties = {0};
    CUresult result = cuda->piece_import(&handle, (void *)(intptr_t)descriptor,
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

    if (result != CUDA_SUCCESS)
        return result;
    result = cuda->piece_properties(&properties, handle);
    if (result == CUDA_SUCCESS && (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                                   properties.location.id != gpu->device.device))
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS) /* fails unless the piece is exactly this long */
        result = cuda->piece_map(address, piece_bytes, 0, handle, 0);
    (void)cuda->piece_release(handle);
    return result;
}

static void unmap(const struct pcc_cuda *cuda, CUdeviceptr address, uint64_t mapped_bytes,
                  uint64_t length)
{
    if (mapped_bytes > 0)
        (void)cuda->range_unmap(address, mapped_bytes);
    (void)cuda->range_free(address, length);
}

static CUresult map_all(const struct pcc_gpu *gpu, const struct pcc_gpu_pieces *pieces,
                        CUdeviceptr *address_out)
{
    const struct pcc_cuda *cuda = gpu->device.cuda;
    const CUmemAccessDesc readable = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu->device.device},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};
    const uint64_t length = pieces->count * pieces->piece_bytes;
    CUdeviceptr address = 0;
    uint64_t mapped = 0;
    CUresult result = cuda->range_reserve(&address, length, 0, 0, 0);

    if (result != CUDA_SUCCESS)
        return result;
    for (uint32_t i = 0; result == CUDA_SUCCESS && i < pieces->count; i++) {
        result = piece_map(gpu, pieces->descriptors[i], address + mapped, pieces->piece_bytes);
        if (result == CUDA_SUCCESS)
            mapped += pieces->piece_bytes;
    }
    if (result == CUDA_SUCCESS)
        result = cuda->range_access(address, length, &readable, 1);
    if (result == CUDA_SUCCESS)
        *address_out = address;
    else
        unmap(cuda, address, mapped, length);
    return result;
}

int pcc_gpu_pieces_open(struct pcc_gpu *gpu, const struct pcc_gpu_pieces *pieces,
                        CUdeviceptr *address_out, struct pcc_gpu_answers *answers_out)
{
    *answers_out = (struct pcc_gpu_answers){0};
    if (!gpu->device.cuda->shares_pieces) {
        answers_out->first = CUDA_ERROR_NOT_SUPPORTED;
        return -PCC_E_BAD_HANDLE;
    }
    int error = pcc_gpu_enter(&gpu->device);
    if (error != 0)
        return error;
    answers_out->first = map_all(gpu, pieces, address_out);
    error = pcc_gpu_code(gpu, answers_out->first);
    pcc_gpu_leave(&gpu->device);
    return error == 0 || error == -ENOMEM || error == -PCC_E_DEVICE_LOST ? error
                                                                         : -PCC_E_BAD_HANDLE;
}

void pcc_gpu_pieces_close(struct pcc_gpu *gpu, CUdeviceptr address, uint64_t length)
{
    if (pcc_gpu_is_lost(gpu) || pcc_gpu_enter(&gpu->device) != 0)
        return;
    unmap(gpu->device.cuda, address, length, length);
    pcc_gpu_leave(&gpu->device);
}
