/* A piece of virtual memory (cuMemCreate) of this process, as a descriptor for others. Any thread;
 * within the context of its GPU. */
#pragma once

#include "gpu/pcc_cuda.h"

/* Whether the memory that is mapped at this address can be given to other processes: it was made
 * with descriptors, and the driver has the calls. */
bool pcc_piece_has_descriptor(const struct pcc_cuda *cuda, CUdeviceptr address);
/* A new descriptor, the caller's to close. It keeps the memory. */
PCC_MUST_CHECK CUresult pcc_piece_export(const struct pcc_cuda *cuda, CUdeviceptr address,
                                         int *fd_out);
