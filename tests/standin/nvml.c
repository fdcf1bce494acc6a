/* The part of NVML, NVIDIA's library to watch GPUs, that PCcheck asks; build/libnvidia-ml.so.1 is a
 * link to this library. Needs no cuInit. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "memory.h"

enum { NVML_SUCCESS = 0, NVML_INVALID = 2, NVML_INSUFFICIENT_SIZE = 7, NVML_UNKNOWN = 999 };

typedef struct standin_nvml_device *nvmlDevice_t; /* 1 + the number of the physical device */

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

EXPORTED int nvmlInit_v2(void);
EXPORTED int nvmlSystemGetDriverVersion(char *out, unsigned length);
EXPORTED int nvmlDeviceGetCount_v2(unsigned *count_of);
EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out);
EXPORTED int nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned length);
EXPORTED int nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned length);
EXPORTED int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out);
EXPORTED int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count_of,
                                                     nvmlProcessInfo_t *out);

static uint32_t number_of(nvmlDevice_t device)
{
    return (uint32_t)(uintptr_t)device - 1;
}

int nvmlInit_v2(void)
{
    (void)pthread_mutex_lock(&standin.lock);
    const bool found = standin_read_machine();
    (void)pthread_mutex_unlock(&standin.lock);
    return found ? NVML_SUCCESS : NVML_UNKNOWN;
}

int nvmlSystemGetDriverVersion(char *out, unsigned length)
{
    const char *named = getenv("PCCHECK_STANDIN_RELEASE");
    (void)snprintf(out, length, "%s", named && *named ? named : "580.1.1");
    return NVML_SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count_of)
{
    *count_of = (unsigned)standin.machine_devices;
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    *out = (nvmlDevice_t)(uintptr_t)(index + 1);
    return index < (unsigned)standin.machine_devices ? NVML_SUCCESS : NVML_INVALID;
}

int nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned length)
{
    CUuuid uuid;
    char text[64] = "GPU";
    device_uuid((int)number_of(device), &uuid);
    for (size_t i = 0, at = 3; i < sizeof(uuid.bytes); i++) {
        const bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        at += (size_t)snprintf(text + at, sizeof(text) - at, "%s%02x", dash ? "-" : "",
                               (unsigned char)uuid.bytes[i]);
    }
    (void)snprintf(out, length, "%s", text);
    return NVML_SUCCESS;
}

int nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned length)
{
    const char *odd = getenv("PCCHECK_STANDIN_ODD"); /* this device is of another type */
    const bool is_odd = odd && *odd && (uint32_t)atoi(odd) == number_of(device);
    (void)snprintf(out, length, "Stand-in %s", is_odd ? "B" : "A");
    return NVML_SUCCESS;
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out)
{
    (void)pthread_mutex_lock(&standin.lock);
    out->total = standin.device_bytes;
    out->free = whole_free(number_of(device));
    out->used = out->total - out->free;
    (void)pthread_mutex_unlock(&standin.lock);
    return NVML_SUCCESS;
}

static uint64_t bytes_of(uint32_t device, unsigned pid)
{
    DIR *directory = opendir(standin.directory);
    const struct dirent *entry;
    uint64_t sum = 0;
    while (directory && (entry = readdir(directory))) {
        unsigned of, owner;
        struct stat about;
        if (sscanf(entry->d_name, "memory-%u-%u-", &of, &owner) == 2 && of == device &&
            owner == pid && !fstatat(dirfd(directory), entry->d_name, &about, 0))
            sum += (uint64_t)about.st_size;
    }
    if (directory)
        (void)closedir(directory);
    return sum;
}

/* Adds the process when it has a context on the device. */
static void add(uint32_t device, unsigned pid, unsigned room, unsigned *found,
                nvmlProcessInfo_t *out)
{
    if (!(checkpoint_devices((int)pid) & 1u << device))
        return;
    if (*found < room)
        out[*found] = (nvmlProcessInfo_t){.pid = pid, .usedGpuMemory = bytes_of(device, pid)};
    ++*found;
}

int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count_of,
                                            nvmlProcessInfo_t *out)
{
    const unsigned room = *count_of;
    unsigned found = 0;
    (void)pthread_mutex_lock(&standin.lock);
    DIR *directory = opendir(standin.directory);
    const struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        unsigned pid;
        if (sscanf(entry->d_name, PROCESS_KIND "-0-%u-", &pid) == 1)
            add(number_of(device), pid, room, &found, out);
    }
    if (directory)
        (void)closedir(directory);
    (void)pthread_mutex_unlock(&standin.lock);
    *count_of = found;
    return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
