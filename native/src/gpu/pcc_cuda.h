/* The CUDA driver, by dlopen of libcuda.so.1: declarations of the part of its API that is used
 * here, so that neither building nor installing needs a toolkit, and a machine without a driver
 * runs the same binary. Names, values and signatures are those of NVIDIA's cuda.h (API version 11.7
 * and later); tests/unit/pccheck_native/test_cuda_header.py compares them with 12.x and 13.x.
 *
 * Driver calls return CUresult; `pcc_cuda_code` translates it into a code of the core. */
#pragma once

#include "base/pcc_base.h"

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef unsigned long long CUdeviceptr;

typedef struct {
    char bytes[16];
} CUuuid;

typedef struct {
    char reserved[64];
} CUipcMemHandle;

typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint; /* of managed memory only */
    unsigned flags;
} CUmemcpyAttributes;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4, /* the process is ending */
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201, /* also: an IPC handle of this very process */
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,       /* a query: still under way */
    CUDA_ERROR_ILLEGAL_ADDRESS = 700, /* from here the context is lost */
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906, /* the default stream, while another one captures */
    CUDA_ERROR_UNKNOWN = 999,
};

enum {
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1, /* the only flag that opening takes */
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_STREAM_WAIT_VALUE_GEQ = 0,
    CU_STREAM_WRITE_VALUE_DEFAULT = 0, /* behind a fence for the whole system */
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2, /* this thread's calls do not break others' captures */
    CU_MEMORYTYPE_HOST = 1,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_BUFFER_ID = 7, /* of an allocation; never used again in a process */
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
    CU_COMPUTEMODE_DEFAULT = 0,
    CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
};

/* X(name in this table, symbol in the library, parameters) */
#define PCC_CUDA_CALLS(X)                                                                          \
    X(init, cuInit, (unsigned flags))                                                              \
    X(driver_version, cuDriverGetVersion, (int *version))                                          \
    X(error_name, cuGetErrorName, (CUresult result, const char **name))                            \
    X(device_count, cuDeviceGetCount, (int *count))                                                \
    X(device_get, cuDeviceGet, (CUdevice * device, int ordinal))                                   \
    X(device_name, cuDeviceGetName, (char *name, int length, CUdevice device))                     \
    X(device_uuid, cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device))                           \
    X(device_attribute, cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))        \
    X(primary_retain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))            \
    X(primary_release, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                            \
    X(context_push, cuCtxPushCurrent_v2, (CUcontext context))                                      \
    X(context_pop, cuCtxPopCurrent_v2, (CUcontext * context))                                      \
    X(memory_info, cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                   \
    X(memory_alloc, cuMemAlloc_v2, (CUdeviceptr * address, size_t length))                         \
    X(memory_free, cuMemFree_v2, (CUdeviceptr address))                                            \
    X(address_range, cuMemGetAddressRange_v2,                                                      \
      (CUdeviceptr * base, size_t * length, CUdeviceptr address))                                  \
    X(pointer_attribute, cuPointerGetAttribute, (void *value, int attribute, CUdeviceptr address)) \
    X(ipc_get, cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr base))                     \
    X(ipc_open, cuIpcOpenMemHandle_v2,                                                             \
      (CUdeviceptr * base, CUipcMemHandle handle, unsigned flags))                                 \
    X(ipc_close, cuIpcCloseMemHandle, (CUdeviceptr base))                                          \
    X(host_register, cuMemHostRegister_v2, (void *address, size_t length, unsigned flags))         \
    X(host_unregister, cuMemHostUnregister, (void *address))                                       \
    X(host_device_pointer, cuMemHostGetDevicePointer_v2,                                           \
      (CUdeviceptr * device, void *host, unsigned flags))                                          \
    X(stream_create, cuStreamCreate, (CUstream * stream, unsigned flags))                          \
    X(stream_destroy, cuStreamDestroy_v2, (CUstream stream))                                       \
    X(stream_query, cuStreamQuery, (CUstream stream))                                              \
    X(stream_synchronize, cuStreamSynchronize, (CUstream stream))                                  \
    X(stream_wait_event, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))      \
    X(stream_wait_value, cuStreamWaitValue64_v2,                                                   \
      (CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags))                      \
    X(stream_write_value, cuStreamWriteValue64_v2,                                                 \
      (CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags))                      \
    X(stream_capturing, cuStreamIsCapturing, (CUstream stream, int *status))                       \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode))                                \
    X(event_create, cuEventCreate, (CUevent * event, unsigned flags))                              \
    X(event_destroy, cuEventDestroy_v2, (CUevent event))                                           \
    X(event_record, cuEventRecord, (CUevent event, CUstream stream))                               \
    X(event_query, cuEventQuery, (CUevent event))                                                  \
    X(copy_to_host, cuMemcpyDtoHAsync_v2,                                                          \
      (void *host, CUdeviceptr device, size_t length, CUstream stream))                            \
    X(copy_to_device, cuMemcpyHtoDAsync_v2,                                                        \
      (CUdeviceptr device, const void *host, size_t length, CUstream stream))                      \
    X(copy_on_device, cuMemcpyDtoDAsync_v2,                                                        \
      (CUdeviceptr to, CUdeviceptr from, size_t length, CUstream stream))

/* Virtual memory, in pieces that descriptors share between processes. A driver without one of these
 * calls works without such memory. */
#define PCC_CUDA_PIECE_CALLS(X)                                                                    \
    X(piece_retain, cuMemRetainAllocationHandle,                                                   \
      (CUmemGenericAllocationHandle * handle, void *address))                                      \
    X(piece_properties, cuMemGetAllocationPropertiesFromHandle,                                    \
      (CUmemAllocationProp * properties, CUmemGenericAllocationHandle handle))                     \
    X(piece_export, cuMemExportToShareableHandle,                                                  \
      (void *descriptor, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)) \
    X(piece_import, cuMemImportFromShareableHandle,                                                \
      (CUmemGenericAllocationHandle * handle, void *descriptor, int type))                         \
    X(piece_release, cuMemRelease, (CUmemGenericAllocationHandle handle))                          \
    X(address_reserve, cuMemAddressReserve,                                                        \
      (CUdeviceptr * address, size_t length, size_t alignment, CUdeviceptr wanted,                 \
       unsigned long long flags))                                                                  \
    X(address_free, cuMemAddressFree, (CUdeviceptr address, size_t length))                        \
    X(piece_map, cuMemMap,                                                                         \
      (CUdeviceptr address, size_t length, size_t offset, CUmemGenericAllocationHandle handle,     \
       unsigned long long flags))                                                                  \
    X(piece_unmap, cuMemUnmap, (CUdeviceptr address, size_t length))                               \
    X(access_set, cuMemSetAccess,                                                                  \
      (CUdeviceptr address, size_t length, const CUmemAccessDesc *access, size_t count))

/* A driver may lack each of these by itself (the member is NULL then). Symbols keep the parameters
 * that they were made with: cuMemcpyBatchAsync has those of CUDA 12.8 in later drivers, too, which
 * call the one without `failed` cuMemcpyBatchAsync_v2. */
#define PCC_CUDA_SINGLE_CALLS(X)                                                                   \
    X(copy_batch, cuMemcpyBatchAsync,                                                              \
      (CUdeviceptr * to, CUdeviceptr * from, size_t * lengths, size_t count,                       \
       CUmemcpyAttributes * attributes, size_t * firsts, size_t attribute_count, size_t * failed,  \
       CUstream stream))

struct pcc_cuda {
#define PCC_CUDA_MEMBER(name, symbol, parameters) CUresult(*name) parameters;
    PCC_CUDA_CALLS(PCC_CUDA_MEMBER)
    PCC_CUDA_PIECE_CALLS(PCC_CUDA_MEMBER)
    PCC_CUDA_SINGLE_CALLS(PCC_CUDA_MEMBER)
#undef PCC_CUDA_MEMBER
    bool descriptors; /* all calls for pieces are there */
};

/* The driver, loaded and initialised at the first call of the process and kept; any thread.
 * -PCC_E_NO_DRIVER when there is none, it is too old or it has no device; pcc_cuda_missing() then
 * says which, in words. A child forked afterwards gets -PCC_E_NO_DRIVER: CUDA does not survive a
 * fork. */
PCC_MUST_CHECK int pcc_cuda_load(const struct pcc_cuda **out);
const char *pcc_cuda_missing(void);

/* 0, -ENOMEM (device or pinned memory), -PCC_E_BAD_HANDLE (an IPC handle that cannot be made or
 * opened), -PCC_E_DEVICE_LOST (the context is gone: only another process can use this GPU), else
 * -PCC_E_DEVICE. */
int pcc_cuda_code(CUresult result);
/* "CUDA_ERROR_LAUNCH_FAILED (719)", into `out`. */
#define PCC_CUDA_WORDS_BYTES 96
void pcc_cuda_describe(CUresult result, char *out, size_t out_bytes);

struct pcc_gpu_device { /* one GPU as this process sees it */
    const struct pcc_cuda *cuda;
    CUdevice device;
    CUcontext context; /* primary, retained */
    CUuuid uuid;
    bool memory_ops; /* streams can wait for and write 64-bit words */
};
/* Retains the primary context of the device with this ordinal, or with this UUID, beside another
 * process's (-ENODEV: this process sees no such GPU; -EBUSY: the GPU accepts one process only). */
PCC_MUST_CHECK int pcc_gpu_device_open(uint32_t ordinal, struct pcc_gpu_device *out);
PCC_MUST_CHECK int pcc_gpu_device_find(const CUuuid *uuid, struct pcc_gpu_device *out);
void pcc_gpu_device_close(struct pcc_gpu_device *device);
/* What comes between these two runs in the device's primary context; both on one thread. */
PCC_MUST_CHECK int pcc_gpu_enter(const struct pcc_gpu_device *device);
void pcc_gpu_leave(const struct pcc_gpu_device *device);

/* Copies under way per GPU, in bytes, and two chunks at least: the trainer's own copies queue
 * behind them, since one engine serves a direction. The client goes further once its trainer waits
 * at the gate. */
#define PCC_CUDA_AHEAD_BYTES (48ull << 20)

/* Pins host memory for this GPU alone, in pieces of up to PCC_PIN_BYTES_MAX (one call for very
 * large ranges fails on some drivers); all of it or nothing. Not for all contexts: those of GPUs
 * that are lost would be among them. The driver takes an address for one GPU only; another GPU
 * needs another mapping (pcc_map_alias). Within pcc_gpu_enter/leave. */
#define PCC_PIN_BYTES_MAX (64ull << 30)
PCC_MUST_CHECK int pcc_gpu_pin(const struct pcc_gpu_device *device, void *bytes, uint64_t length);
/* 0, or a code when the driver still has it registered: its addresses must not be used again then.
 */
int pcc_gpu_unpin(const struct pcc_gpu_device *device, void *bytes, uint64_t length);
