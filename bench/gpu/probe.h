/* What the steps of the GPU probe share: the driver's functions, the records of the JSON document,
 * other processes, and memory. See probe.c.
 *
 * A step runs in a process of its own, forked before CUDA was touched, and forks its peers before
 * it touches CUDA itself. Whatever fails is recorded and ends that process: `must` and `must_call`
 * never return then, so that no step has to check twice. */
#ifndef PROBE_H
#define PROBE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "gpu/pcc_cuda.h"

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define CHUNK_BYTES (16 * MIB) /* what the daemon copies at once */
#define SILENCE_LIMIT_S 20     /* the longest that a process waits for its peer */

typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct {
    int type; /* CU_MEM_LOCATION_TYPE_DEVICE = 1 */
    int id;
} CUmemLocation;

typedef struct {
    int type; /* CU_MEM_ALLOCATION_TYPE_PINNED = 1 */
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags; /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 */
} CUmemAccessDesc;

/* What the probe needs beyond the product's own table. */
#define PROBE_CALLS(X)                                                                             \
    X(memset32, cuMemsetD32_v2, (CUdeviceptr address, unsigned value, size_t words))               \
    X(memset32_async, cuMemsetD32Async,                                                            \
      (CUdeviceptr address, unsigned value, size_t words, CUstream stream))                        \
    X(module_load, cuModuleLoadData, (CUmodule * module, const void *image))                       \
    X(module_function, cuModuleGetFunction,                                                        \
      (CUfunction * function, CUmodule module, const char *name))                                  \
    X(launch, cuLaunchKernel,                                                                      \
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,   \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,                 \
       void **parameters, void **extra))                                                           \
    X(event_synchronize, cuEventSynchronize, (CUevent event))                                      \
    X(granularity, cuMemGetAllocationGranularity,                                                  \
      (size_t * bytes, const CUmemAllocationProp *properties, int option))                         \
    X(vmm_create, cuMemCreate,                                                                     \
      (CUmemGenericAllocationHandle * handle, size_t length,                                       \
       const CUmemAllocationProp *properties, unsigned long long flags))                           \
    X(vmm_reserve, cuMemAddressReserve,                                                            \
      (CUdeviceptr * address, size_t length, size_t alignment, CUdeviceptr wanted,                 \
       unsigned long long flags))                                                                  \
    X(vmm_map, cuMemMap,                                                                           \
      (CUdeviceptr address, size_t length, size_t offset, CUmemGenericAllocationHandle handle,     \
       unsigned long long flags))                                                                  \
    X(vmm_access, cuMemSetAccess,                                                                  \
      (CUdeviceptr address, size_t length, const CUmemAccessDesc *access, size_t count))           \
    X(alloc_async, cuMemAllocAsync, (CUdeviceptr * address, size_t length, CUstream stream))

/* Every function of both tables; one that the driver lacks returns CUDA_ERROR_NOT_FOUND. */
struct driver {
#define PROBE_MEMBER(name, symbol, parameters) CUresult(*name) parameters;
    PCC_CUDA_CALLS(PROBE_MEMBER)
    PROBE_CALLS(PROBE_MEMBER)
#undef PROBE_MEMBER
};
extern struct driver cu;

struct options {
    bool is_small; /* sizes for a stand-in driver or a small GPU */
    int ordinal;
};
extern struct options options;

/* -- records: each is one member of the step's JSON object, written at once ------------------- */

extern int record_descriptor; /* a pipe to the process that prints the document */

void say_number(const char *key, double value);
void say_count(const char *key, long long value);
void say_text(const char *key, const char *text);
void say_result(const char *key, CUresult result);
void say_numbers(const char *key, const double *values, size_t count);
/* Median, 99th percentile and maximum, as three members; sorts `values`. */
void say_spread(const char *key, double *values, size_t count);
/* Records what went wrong and ends this process. */
_Noreturn void fail(const char *what, const char *why);

void must_call(CUresult result, const char *call);
#define CU(call) must_call((call), #call)
void must(bool condition, const char *what);

/* -- the driver ---------------------------------------------------------------------------------
 */

#define EXIT_NO_DRIVER 3
/* Loads the driver and makes the device's primary context current; without a driver the process
 * ends with EXIT_NO_DRIVER. Returns the device. */
CUdevice gpu_begin(void);
void gpu_enter_thread(void);              /* the same context, for another thread of this process */
const char *gpu_name_of(CUresult result); /* never NULL */
CUdeviceptr gpu_memory(size_t length);
CUstream gpu_stream(void); /* non-blocking, as the product's are */

/* -- time, processes, memory --------------------------------------------------------------------
 */

double now_s(void); /* CLOCK_MONOTONIC: the same in all processes */
void sleep_s(double seconds);

struct note { /* one message between two processes of a step */
    CUresult result;
    uint64_t number;
    uint64_t bytes;
    double seconds;
    CUipcMemHandle handle;
    CUresult range, again; /* of imported memory: its length, and the same handle once more */
};
void tell(int socket, const struct note *note);
void hear(int socket,
          struct note *note); /* ends this process when the peer has gone or is silent */
/* The next note, or false once the peer has hung up: what a peer's loop asks. */
bool hear_next(int socket, struct note *note);

extern bool is_peer; /* whether this process was spawned by a step */
#define SAME_UID ((uid_t)-1)
struct peer {
    pid_t pid;
    int socket;
};
typedef void peer_body(int socket, void *argument);
/* A child that runs `body` and ends; it dies with this process, or by its own alarm. To be called
 * before this process has used CUDA. */
struct peer spawn(const char *role, uid_t uid, peer_body *body, void *argument);
void dismiss(struct peer *peer);     /* hangs up and waits; kills after a while */
double kill_peer(struct peer *peer); /* SIGKILL; seconds until it was gone */

void *shared_memory(size_t length);            /* anonymous, shared with peers, zeroed */
char *segment(size_t length, int *descriptor); /* touched memfd mapping, as the pool's are */
void drop_segment(char *bytes, size_t length, int descriptor);
char *pinned_segment(size_t length);
size_t available_bytes(void); /* of host memory */

/* Copies `source` over and over into `host`, a chunk at a time with four under way, until *stop;
 * returns the bytes copied by then and the seconds that took. */
struct copying {
    CUdeviceptr source;
    size_t source_bytes;
    char *host; /* pinned; of at least four chunks */
    size_t host_bytes;
    size_t chunk_bytes;
    CUstream stream;
    _Atomic int *stop;
    uint64_t copied_bytes;
    double seconds;
};
void copy_until_stopped(struct copying *copying);

/* -- the steps ----------------------------------------------------------------------------------
 */

void step_facts(void);
void step_page(void);
void step_overlap(void);
void step_death(void);
void step_uids(void);
void step_registration(void);
void step_bandwidth(void);

#endif
