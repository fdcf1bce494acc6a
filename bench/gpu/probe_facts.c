/* Step "facts": what this GPU and its driver say of themselves; which memory has a legacy IPC
 * handle; what another process's context costs. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "probe.h"

static const struct {
    const char *key;
    int attribute;
} attributes[] = {
    {"multiprocessors", 16},
    {"is_integrated", 18},
    {"compute_mode", 20},
    {"copy_engines", 40},
    {"unified_addressing", CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING},
    {"capability_major", 75},
    {"capability_minor", 76},
    {"compute_preemption", 90},
    {"host_pointer_for_registered_memory", 91},
    {"vmm", 102},
    {"memory_pools", 115},
    {"memory_ops_64", CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS},
    {"ipc_events", 125},
};

static void say_attributes(CUdevice device)
{
    char name[128] = "";
    int value = 0;
    CUuuid uuid;
    size_t free_bytes = 0, total_bytes = 0;
    CU(cu.driver_version(&value));
    say_count("driver_version", value);
    CU(cu.device_name(name, sizeof(name) - 1, device));
    say_text("name", name);
    if (cu.device_uuid(&uuid, device) == CUDA_SUCCESS) {
        char text[33];
        for (size_t i = 0; i < sizeof(uuid.bytes); i++)
            snprintf(text + 2 * i, 3, "%02x", (unsigned)(unsigned char)uuid.bytes[i]);
        say_text("uuid", text);
    }
    for (size_t i = 0; i < sizeof(attributes) / sizeof(attributes[0]); i++)
        if (cu.device_attribute(&value, attributes[i].attribute, device) == CUDA_SUCCESS)
            say_count(attributes[i].key, value);
    CU(cu.memory_info(&free_bytes, &total_bytes));
    say_number("memory_total_gib", (double)total_bytes / (double)GIB);
    say_number("memory_free_gib", (double)free_bytes / (double)GIB);
}

static void say_device_file(void)
{
    char mode[16];
    struct stat about;
    if (stat("/dev/nvidia0", &about) == 0) {
        snprintf(mode, sizeof(mode), "%04o", (unsigned)(about.st_mode & 07777));
        say_text("device_file_mode", mode);
    }
}

static void say_sharing(const char *kind, CUdeviceptr address)
{
    char key[64];
    int is_capable = 0;
    CUipcMemHandle handle;
    CUdeviceptr base = 0;
    size_t length = 0;
    snprintf(key, sizeof(key), "%s_handle", kind);
    say_result(key, cu.ipc_get(&handle, address));
    CUresult result =
        cu.pointer_attribute(&is_capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address);
    snprintf(key, sizeof(key), "%s_ipc_capable", kind);
    if (result == CUDA_SUCCESS)
        say_count(key, is_capable);
    else
        say_result(key, result);
    snprintf(key, sizeof(key), "%s_address_range", kind);
    say_result(key, cu.address_range(&base, &length, address + 4096));
    snprintf(key, sizeof(key), "%s_range_is_right", kind);
    say_count(key, base == address);
}

/* As torch's expandable segments make their memory. */
static CUresult vmm_memory(CUdevice device, CUdeviceptr *address)
{
    CUmemAllocationProp properties = {.type = 1, .location = {.type = 1, .id = device}};
    CUmemAccessDesc access = {.location = {.type = 1, .id = device}, .flags = 3};
    CUmemGenericAllocationHandle handle = 0;
    size_t length = 0;
    CUresult result = cu.granularity(&length, &properties, 0);
    if (result == CUDA_SUCCESS)
        result = cu.vmm_create(&handle, length, &properties, 0);
    if (result == CUDA_SUCCESS)
        result = cu.vmm_reserve(address, length, 0, 0, 0);
    if (result == CUDA_SUCCESS)
        result = cu.vmm_map(*address, length, 0, handle, 0);
    if (result == CUDA_SUCCESS)
        result = cu.vmm_access(*address, length, &access, 1);
    return result;
}

static void say_kinds_of_memory(CUdevice device)
{
    CUdeviceptr address = 0;
    CUstream stream = gpu_stream();
    say_sharing("plain", gpu_memory(4 * MIB));
    CUresult result = vmm_memory(device, &address);
    say_result("vmm_made", result);
    if (result == CUDA_SUCCESS)
        say_sharing("vmm", address);
    result = cu.alloc_async(&address, 4 * MIB, stream);
    say_result("async_made", result);
    if (result == CUDA_SUCCESS) {
        CU(cu.stream_synchronize(stream));
        say_sharing("async", address);
    }
}

static void second_context(int socket, void *unused)
{
    struct note note = {0};
    (void)unused;
    while (hear_next(socket, &note)) {
        double start_s = now_s();
        (void)gpu_begin();
        note.seconds = now_s() - start_s;
        tell(socket, &note);
    }
}

void step_facts(void)
{
    struct peer peer = spawn("second context", SAME_UID, second_context, NULL);
    struct note note = {0};
    size_t before = 0, after = 0, total = 0;
    double start_s = now_s();
    CUdevice device = gpu_begin();
    say_number("context_seconds", now_s() - start_s);
    say_attributes(device);
    say_device_file();
    say_kinds_of_memory(device);
    CU(cu.memory_info(&before, &total));
    tell(peer.socket, &note);
    hear(peer.socket, &note);
    CU(cu.memory_info(&after, &total));
    say_number("second_context_seconds", note.seconds);
    say_number("second_context_mib", ((double)before - (double)after) / (double)MIB);
    dismiss(&peer);
}
