/* The probe's ground: the driver by dlopen, memory, copies. See probe.h. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "probe.h"

struct driver cu;
struct options options;

/* -- the driver ---------------------------------------------------------------------------------
 */

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define PROBE_MISSING(name, symbol, parameters)                                                    \
    static CUresult missing_##name parameters                                                      \
    {                                                                                              \
        return CUDA_ERROR_NOT_FOUND;                                                               \
    }
PCC_CUDA_CALLS(PROBE_MISSING)
PROBE_CALLS(PROBE_MISSING)
#pragma GCC diagnostic pop

static CUcontext primary;

/* For the step itself; that a peer has none, under another uid, is a failure of that peer. */
static _Noreturn void without_driver(const char *why)
{
    if (is_peer)
        fail("no driver", why);
    say_text("no_driver", why);
    _exit(EXIT_NO_DRIVER);
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        without_driver(why != NULL ? why : "dlopen");
    }
#define PROBE_FIND(name, symbol, parameters)                                                       \
    {                                                                                              \
        void *found = dlsym(library, #symbol);                                                     \
        cu.name = missing_##name;                                                                  \
        if (found != NULL)                                                                         \
            memcpy(&cu.name, &found, sizeof(found));                                               \
    }
    PCC_CUDA_CALLS(PROBE_FIND)
    PROBE_CALLS(PROBE_FIND)
#undef PROBE_FIND
}

CUdevice gpu_begin(void)
{
    CUdevice device = 0;
    int count = 0;
    load();
    CUresult result = cu.init(0);
    if (result == CUDA_SUCCESS)
        result = cu.device_count(&count);
    if (result != CUDA_SUCCESS || count == 0)
        without_driver(result == CUDA_SUCCESS ? "no device" : gpu_name_of(result));
    CU(cu.device_get(&device, options.ordinal));
    CU(cu.primary_retain(&primary, device));
    gpu_enter_thread();
    return device;
}

void gpu_enter_thread(void)
{
    CU(cu.context_push(primary));
}

const char *gpu_name_of(CUresult result)
{
    static _Thread_local char number[32];
    const char *name = NULL;
    if (cu.error_name != NULL && cu.error_name(result, &name) == CUDA_SUCCESS && name != NULL)
        return name;
    snprintf(number, sizeof(number), "CUDA error %d", result);
    return number;
}

CUdeviceptr gpu_memory(size_t length)
{
    CUdeviceptr address = 0;
    CU(cu.memory_alloc(&address, length));
    return address;
}

CUstream gpu_stream(void)
{
    CUstream stream = NULL;
    CU(cu.stream_create(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

/* -- memory -------------------------------------------------------------------------------------
 */

void *shared_memory(size_t length)
{
    void *bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(bytes != MAP_FAILED, "mmap");
    return bytes;
}

char *segment(size_t length, int *descriptor)
{
    int made = memfd_create("probe", MFD_CLOEXEC);
    must(made >= 0 && ftruncate(made, (off_t)length) == 0, "memfd");
    char *bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
    must(bytes != MAP_FAILED, "mmap");
    memset(bytes, 0, length);
    *descriptor = made;
    return bytes;
}

void drop_segment(char *bytes, size_t length, int descriptor)
{
    (void)munmap(bytes, length);
    close(descriptor);
}

char *pinned_segment(size_t length)
{
    int descriptor;
    char *bytes = segment(length, &descriptor);
    close(descriptor);
    CU(cu.host_register(bytes, length, CU_MEMHOSTREGISTER_PORTABLE));
    return bytes;
}

size_t available_bytes(void)
{
    char line[128];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "MemAvailable: %llu", &kib) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return (size_t)kib << 10;
}

/* -- copies -------------------------------------------------------------------------------------
 */

#define UNDER_WAY 4

void copy_until_stopped(struct copying *copying)
{
    CUevent events[UNDER_WAY];
    size_t from = 0, to = 0;
    uint64_t number = 0;
    double start_s = now_s();
    for (int i = 0; i < UNDER_WAY; i++)
        CU(cu.event_create(&events[i], CU_EVENT_DISABLE_TIMING));
    copying->copied_bytes = 0;
    for (; !atomic_load(copying->stop); number++) {
        CUevent event = events[number % UNDER_WAY];
        if (number >= UNDER_WAY) {
            CU(cu.event_synchronize(event));
            copying->copied_bytes += copying->chunk_bytes;
        }
        CU(cu.copy_to_host(copying->host + to, copying->source + from, copying->chunk_bytes,
                           copying->stream));
        CU(cu.event_record(event, copying->stream));
        from += copying->chunk_bytes;
        to += copying->chunk_bytes;
        if (from + copying->chunk_bytes > copying->source_bytes)
            from = 0;
        if (to + copying->chunk_bytes > copying->host_bytes)
            to = 0;
    }
    copying->seconds = now_s() - start_s; /* what is still under way is not counted */
    CU(cu.stream_synchronize(copying->stream));
    for (int i = 0; i < UNDER_WAY; i++)
        CU(cu.event_destroy(events[i]));
}
