#include "gpu/pcc_piece.h"

bool pcc_piece_has_descriptor(const struct pcc_cuda *cuda, CUdeviceptr address)
{
    CUmemAllocationProp properties = {0};
    CUmemGenericAllocationHandle handle;

    if (!cuda->descriptors ||
        cuda->piece_retain(&handle, (void *)(uintptr_t)address) != CUDA_SUCCESS)
        return false;
    const CUresult result = cuda->piece_properties(&properties, handle);
    (void)cuda->piece_release(handle);
    return result == CUDA_SUCCESS && properties.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           (properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
}

CUresult pcc_piece_export(const struct pcc_cuda *cuda, CUdeviceptr address, int *fd_out)
{
    CUmemGenericAllocationHandle handle;
    CUresult result = cuda->piece_retain(&handle, (void *)(uintptr_t)address);

    if (result != CUDA_SUCCESS)
        return result;
    result = cuda->piece_export(fd_out, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    (void)cuda->piece_release(handle);
    return result;
}
