/* What tests see of the stand-in driver beside the driver API: the control file and a few calls of
 * its own. tests/support/fakegpu.py has the same list of words.
 *
 * A test gives every process a control file of its own (PCCHECK_STANDIN_FAULTS=path). It writes
 * the first part at any time; the process writes the second. Every word is a uint64_t. Without the
 * variable there are no faults, and nobody sees the counters. */
#pragma once

#include "gpu/pcc_cuda.h"

#define STANDIN_CONTROL_MAGIC 0x4c5254434e415453ull /* "STANCTRL" */
#define STANDIN_ALWAYS UINT64_MAX                   /* as a count of failures */

enum { STANDIN_TO_HOST = 1, STANDIN_TO_DEVICE = 2, STANDIN_ON_DEVICE = 4 };
enum {
    STANDIN_STATE = 1,
    STANDIN_LOCK = 2,
    STANDIN_CHECKPOINT = 4,
    STANDIN_RESTORE = 8,
    STANDIN_UNLOCK = 16
};

struct standin_control {
    uint64_t magic;

    /* Written by tests. Counts fall by one with each failure, but for STANDIN_ALWAYS. */
    uint64_t copy_fail_at;    /* n: the nth copy of these kinds from now fails; 0 = none */
    uint64_t copy_fail_kinds; /* sum of STANDIN_TO_HOST, ... */
    uint64_t copy_fail_code;
    uint64_t copy_fail_async; /* 0: the call fails; 1: what is behind the copy does */
    uint64_t copy_slow_kinds; /* these kinds take */
    uint64_t copy_us_per_mib; /* so much longer */
    uint64_t copy_hold_kinds; /* copies of these kinds wait until this is 0 again, */
    uint64_t copy_hold_skip;  /* but for so many that may still run */
    uint64_t batch_fail_code; /* cuMemcpyBatchAsync, each time; 801: not supported */
    uint64_t open_fail_count; /* cuIpcOpenMemHandle, cuMemImportFromShareableHandle */
    uint64_t open_fail_code;
    uint64_t open_us;    /* opening takes so long, also for other threads in its context */
    uint64_t range_fail; /* of imported memory: 1 cuMemGetAddressRange, 2 the attributes, 3 both */
    uint64_t export_fail_count; /* cuIpcGetMemHandle, cuMemExportToShareableHandle */
    uint64_t export_fail_code;
    uint64_t alloc_fail_count;    /* cuMemAlloc: out of memory */
    uint64_t register_fail_count; /* cuMemHostRegister */
    uint64_t register_fail_code;
    uint64_t compute_mode;     /* attribute 20; 3: one process at a time */
    uint64_t no_memory_ops;    /* 1: streams cannot wait for words (attribute 122 is 0) */
    uint64_t init_fail_code;   /* cuInit, for instance 100: no device; */
    uint64_t init_fail_count;  /* 0: always, else in so many processes, and in each for good */
    uint64_t init_us;          /* cuInit takes so long, */
    uint64_t init_hold;        /* and until this is 0 again */
    uint64_t one_queue;        /* 1: all streams share one hardware queue: work runs in the order in
                                  which it was enqueued, whatever its stream, as the scheduler may
                                  have it (CUDA_DEVICE_MAX_CONNECTIONS=1) */
    uint64_t launch_queue;     /* so many operations a stream takes (0: 1024); who enqueues one more
                                  waits in the driver, and with him who needs the context */
    uint64_t write_fail_count; /* cuStreamWriteValue64: out of memory */
    uint64_t lose_context;     /* a code: from the next call on, every context is lost with it */

    /* Of the process that asks for checkpoints of others: which calls, as a sum of STANDIN_STATE,
     */
    uint64_t process_fail_calls; /* ...; these fail, */
    uint64_t process_fail_skip;  /* but for so many that may still succeed, */
    uint64_t process_fail_code;
    uint64_t process_slow_calls; /* these take */
    uint64_t process_slow_us;    /* so much longer, */
    uint64_t process_hold_calls; /* and these do not return until this is 0 again, */
    uint64_t process_hold_skip;  /* but for so many that may still return: */
    uint64_t process_hold_done;  /* 1: they have done their work by then */
    uint64_t process_no_map;     /* 1: Restore accepts a map of devices, and ignores it */

    /* Written by the process. Gauges start at 0 with cuInit, counters go on. */
    uint64_t pid;
    uint64_t open_mappings;  /* gauge: imported allocations */
    uint64_t reserved_bytes; /* of addresses, by cuMemAddressReserve */
    uint64_t registered_bytes;
    uint64_t register_pause_us; /* the shortest between two large ones; 0 = there were no two */
    uint64_t allocations;
    uint64_t allocated_bytes;
    uint64_t contexts; /* primary contexts that are retained */
    uint64_t streams;
    uint64_t events;
    uint64_t waits;            /* for a word or an event, enqueued and not yet over */
    uint64_t to_device_queued; /* bytes: copies to the device, enqueued and not yet over */
    uint64_t to_host_queued;   /* the same for copies to the host */
    uint64_t held_copies;      /* copies that stand at copy_hold_kinds now */
    uint64_t opens;            /* counter: cuIpcOpenMemHandle that succeeded */
    uint64_t closes;
    uint64_t copies_to_host;
    uint64_t copies_to_device;
    uint64_t copies_on_device;
    uint64_t bytes_to_host;
    uint64_t bytes_to_device;
    uint64_t bytes_on_device;
    uint64_t to_device_queued_most; /* the largest that it has been */
    uint64_t pageable_copies;       /* of them: from or to host memory that is not registered */
    uint64_t scrambled;             /* copies that read memory of a dead or a freed exporter */
    uint64_t broken_captures;       /* graphs that a forbidden call has spoilt */
    uint64_t inits;                 /* cuInit that has started the driver */
    uint64_t launches;              /* operations that streams have taken; a batch is one */
    uint64_t held_calls;            /* calls that have come to process_hold_calls */
};

/* The driver API has these, pcc_cuda.h has not. tests/unit/pccheck_native/test_cuda_header.py
 * compares both with NVIDIA's. */
enum {
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3,
    CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1,
    CU_PROCESS_STATE_RUNNING = 0,
    CU_PROCESS_STATE_LOCKED = 1,
    CU_PROCESS_STATE_CHECKPOINTED = 2,
    CU_PROCESS_STATE_FAILED = 3,
};

typedef struct {
    unsigned timeoutMs; /* 0: no limit */
    unsigned reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;

typedef struct {
    uint64_t reserved[8];
} CUcheckpointCheckpointArgs, CUcheckpointRestoreArgs, CUcheckpointUnlockArgs;

CUresult cuCtxGetCurrent(CUcontext *context);
CUresult cuCtxSetCurrent(CUcontext context);
CUresult cuCtxGetDevice(CUdevice *device);
CUresult cuCtxSynchronize(void);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active);
CUresult cuEventSynchronize(CUevent event);
CUresult cuGetErrorString(CUresult result, const char **text);
CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data);
CUresult cuMemcpyDtoH_v2(void *host, CUdeviceptr device, size_t length);
CUresult cuMemcpyHtoD_v2(CUdeviceptr device, const void *host, size_t length);
CUresult cuMemsetD8Async(CUdeviceptr device, unsigned char value, size_t count, CUstream stream);
CUresult cuMemsetD32Async(CUdeviceptr device, unsigned value, size_t count, CUstream stream);

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       int option);
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t length,
                     const CUmemAllocationProp *properties, unsigned long long flags);

/* Checkpoints of another process by the driver (R570 and later). */
CUresult cuCheckpointProcessGetState(int pid, int *state);
CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid);
CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *arguments);
CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *arguments);
CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *arguments);
CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *arguments);

/* Memory without a legacy IPC handle: what expandable segments and cudaMallocAsync give. Freed by
 * cuMemFree. */
CUresult standinAllocUnshareable(CUdeviceptr *address, size_t length);
/* A capture that records nothing. Modes as in CUstreamCaptureMode: 0 global, 1 thread, 2 relaxed.
 */
CUresult standinBeginCapture(CUstream stream, int mode);
/* What the first launch of a lazily loaded kernel does: waits for all streams of the context, and
 * keeps other threads out of the context meanwhile. */
CUresult standinLoadModule(void);
/* CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901) when a forbidden call has spoilt it. */
CUresult standinEndCapture(CUstream stream);
