/* What is mapped of the trainer's GPUs: exposures opened, shared between layouts, and closed.
 * Driver calls happen without the tenant's lock. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_tenant_private.h"

/* Into the reason, of PCC_REASON_BYTES. */
__attribute__((format(printf, 2, 3))) static void say(char *reason, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(reason, PCC_REASON_BYTES, format, arguments);
    va_end(arguments);
}

/* -- closing -- */

void pcc_tenant_map_put(struct pcc_tenant *tenant, struct pcc_tenant_map *map)
{
    if (map == NULL)
        return;
    PCC_ASSERT(map->holders > 0);
    if (--map->holders > 0)
        return;
    map->next = tenant->pull.unused;
    tenant->pull.unused = map;
}

/* With the lock held. True when the caller has to close it. */
static bool import_put(struct pcc_tenant *tenant, struct pcc_tenant_import *import)
{
    PCC_ASSERT(import->holders > 0);
    if (--import->holders > 0)
        return false;
    tenant->pull.mappings--;
    tenant->pull.pieces -= import->pieces;
    tenant->pull.exposed_bytes -= import->length_bytes;
    return true;
}

static void import_close(struct pcc_tenant_import *import)
{
    if (import->pieces > 0)
        pcc_gpu_unmap(import->gpu, import->address, import->pieces,
                      import->length_bytes / import->pieces);
    else
        pcc_gpu_import_close(import->gpu, import->address);
    free(import);
}

static void imports_close(struct pcc_tenant *tenant, struct pcc_tenant_map *map)
{
    /* A map that was never opened as a whole has NULLs among them. */
    for (uint32_t i = 0; map->imports != NULL && i < map->view.head.allocation_count; i++) {
        struct pcc_tenant_import *import = map->imports[i];
        if (import == NULL)
            continue;
        pcc_tenant_lock(tenant);
        const bool close = import_put(tenant, import);
        pcc_tenant_unlock(tenant);
        if (close)
            import_close(import);
    }
    free(map->imports);
    map->imports = NULL;
}

void pcc_tenant_lent_put(struct pcc_tenant *lender, struct pcc_tenant_map *lent)
{
    pcc_tenant_lock(lender);
    pcc_tenant_map_put(lender, lent);
    pcc_tenant_unlock(lender);
    pcc_tenant_maps_close(lender);
}

static void map_close(struct pcc_tenant *tenant, struct pcc_tenant_map *map)
{
    if (map->lender != NULL) {
        pcc_tenant_lent_put(map->lender, map->lent);
    } else {
        imports_close(tenant, map);
        for (uint32_t i = 0; i < PCC_DEVICES; i++)
            if (map->gpus[i] != NULL)
                pcc_gpu_put(map->gpus[i]);
    }
    pcc_exposure_free(&map->view);
    free(map);
    PCC_LOCKED(&tenant->lock);
    tenant->pull.maps--;
    tenant->pull.mapped_ns = pcc_now_ns();
}

void pcc_tenant_maps_close(struct pcc_tenant *tenant)
{
    pcc_tenant_lock(tenant);
    struct pcc_tenant_map *map = tenant->pull.unused;
    tenant->pull.unused = NULL;
    pcc_tenant_unlock(tenant);
    while (map != NULL) {
        struct pcc_tenant_map *next = map->next;
        map_close(tenant, map);
        map = next;
    }
}

/* -- opening -- */

static int gpus_take(struct pcc_tenant *tenant, struct pcc_tenant_map *map, char *reason)
{
    for (uint32_t i = 0; i < map->view.head.allocation_count; i++) {
        const struct pcc_exposed_allocation *allocation = &map->view.allocations[i];
        if (map->gpus[allocation->device] != NULL)
            continue;
        const int error =
            pcc_gpus_use(tenant->gpus, allocation->uuid, &map->gpus[allocation->device]);
        if (error == -ENODEV)
            say(reason, "the daemon does not see the trainer's GPU %u", allocation->device);
        else if (error == -PCC_E_DEVICE_LOST)
            say(reason, "the daemon has lost GPU %u and cannot use it before it is restarted",
                allocation->device);
        else if (error == -EBUSY)
            say(reason, "GPU %u accepts one process only (its compute mode; nvidia-smi -c DEFAULT)",
                allocation->device);
        else if (error == -ENOMEM)
            say(reason, "GPU %u has no memory left for the daemon (ENOMEM)", allocation->device);
        else if (error != 0)
            say(reason, "the daemon cannot use GPU %u: %s", allocation->device,
                pcc_error_name(error));
        if (error != 0)
            return error == -ENODEV ? -PCC_E_BAD_HANDLE : error;
    }
    return 0;
}

/* A device of the exposure that is pulled no more, or PCC_DEVICES. */
static uint32_t distrusted_find(struct pcc_tenant *tenant, const struct pcc_tenant_map *map)
{
    PCC_LOCKED(&tenant->lock);
    for (uint32_t i = 0; i < map->view.head.allocation_count; i++)
        if ((tenant->pull.distrusted >> map->view.allocations[i].device & 1u) != 0)
            return map->view.allocations[i].device;
    return PCC_DEVICES;
}

static int trust_check(struct pcc_tenant *tenant, const struct pcc_tenant_map *map, char *reason)
{
    const uint32_t device = distrusted_find(tenant, map);

    if (device == PCC_DEVICES)
        return 0;
    say(reason,
        "the trainer did not show that it reads what the daemon reads on GPU %u, which is not "
        "pulled until the trainer connects again",
        device);
    return -PCC_E_OTHER_MEMORY;
}

static void import_failed(char *reason, int error, const struct pcc_gpu_answers *answers)
{
    const CUresult result = answers->first;
    char name[PCC_CUDA_WORDS_BYTES], second[PCC_CUDA_WORDS_BYTES];

    pcc_cuda_describe(result, name, sizeof(name));
    pcc_cuda_describe(answers->second, second, sizeof(second));
    if (answers->second != CUDA_SUCCESS)
        say(reason, "the length of the trainer's GPU memory cannot be found: %s, %s", name, second);
    else if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_MAP_FAILED)
        say(reason,
            "the trainer's GPU memory cannot be opened by the daemon: %s; is it another user's, or "
            "in another container (PID or IPC namespace)?",
            name);
    else if (result == CUDA_SUCCESS)
        say(reason, "the trainer's GPU memory cannot be opened: %s", pcc_error_name(error));
    else
        say(reason, "the trainer's GPU memory cannot be opened: %s", name);
}

/* The import with this handle in the previous map. The handles of both maps ascend, so `at` only
 * advances. */
static struct pcc_tenant_import *import_share(struct pcc_tenant *tenant,
                                              const struct pcc_tenant_map *before,
                                              const struct pcc_exposed_allocation *wanted,
                                              struct pcc_gpu *gpu, uint32_t *at)
{
    struct pcc_tenant_import *found = NULL;

    while (before != NULL && *at < before->view.head.allocation_count) {
        struct pcc_tenant_import *import = before->imports[before->view.by_handle[*at]];
        const int order = memcmp(import->handle, wanted->handle, sizeof(import->handle));
        if (order == 0 && import->buffer_id == wanted->buffer_id && import->gpu == gpu &&
            import->pieces == wanted->pieces)
            found = import;
        if (order >= 0)
            break;
        ++*at;
    }
    if (found != NULL) {
        PCC_LOCKED(&tenant->lock);
        found->holders++;
    }
    return found;
}

/* By its handle, or a run by its descriptors. */
static int memory_open(const struct pcc_exposed_allocation *wanted, const int *fds,
                       struct pcc_tenant_import *import, struct pcc_gpu_answers *answers)
{
    if (wanted->pieces == 0)
        return pcc_gpu_import(import->gpu, wanted->handle, &import->address, &import->length_bytes,
                              answers);
    import->pieces = wanted->pieces;
    import->length_bytes = wanted->length_bytes;
    return pcc_gpu_map(import->gpu, fds, wanted->pieces, wanted->length_bytes / wanted->pieces,
                       &import->address, answers);
}

static int import_open(struct pcc_tenant *tenant, const struct pcc_exposed_allocation *wanted,
                       const int *fds, struct pcc_gpu *gpu, struct pcc_tenant_import **out,
                       char *reason)
{
    struct pcc_gpu_answers answers;
    struct pcc_tenant_import *import = calloc(1, sizeof(*import));

    if (import == NULL)
        return -ENOMEM;
    import->gpu = gpu;
    const int error = memory_open(wanted, fds, import, &answers);
    if (error != 0) {
        import_failed(reason, error, &answers);
        free(import);
        return answers.first == CUDA_ERROR_ALREADY_MAPPED ? -EEXIST : error;
    }
    memcpy(import->handle, wanted->handle, sizeof(import->handle));
    import->buffer_id = wanted->buffer_id;
    import->holders = 1;
    pcc_tenant_lock(tenant);
    tenant->pull.mappings++;
    tenant->pull.pieces += import->pieces;
    tenant->pull.exposed_bytes += import->length_bytes;
    pcc_tenant_unlock(tenant);
    *out = import;
    return 0;
}

/* What the previous map has, too. The number of pieces that are left, with a descriptor each. */
static uint64_t imports_share(struct pcc_tenant *tenant, struct pcc_tenant_map *map,
                              const struct pcc_tenant_map *before)
{
    uint64_t pieces = map->view.pieces;
    uint32_t at = 0;

    for (uint32_t i = 0; i < map->view.head.allocation_count; i++) {
        const uint32_t number = map->view.by_handle[i];
        const struct pcc_exposed_allocation *wanted = &map->view.allocations[number];
        map->imports[number] = import_share(tenant, before, wanted, map->gpus[wanted->device], &at);
        if (map->imports[number] != NULL)
            pieces -= wanted->pieces;
    }
    return pieces;
}

static int imports_open(struct pcc_tenant *tenant, struct pcc_tenant_map *map,
                        const struct pcc_tenant_map *before,
                        const struct pcc_descriptors *descriptors, char *reason)
{
    const uint32_t count = map->view.head.allocation_count;
    const int *fds = descriptors->fds;

    map->imports = calloc(count, sizeof(struct pcc_tenant_import *));
    if (map->imports == NULL)
        return -ENOMEM;
    const uint64_t pieces = imports_share(tenant, map, before);
    if (pieces != descriptors->count) {
        say(reason, "%llu descriptors of GPU memory came, not %llu",
            (unsigned long long)descriptors->count, (unsigned long long)pieces);
        return -PCC_E_BAD_HANDLE;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct pcc_exposed_allocation *wanted = &map->view.allocations[i];
        if (map->imports[i] != NULL)
            continue;
        const int error =
            import_open(tenant, wanted, fds, map->gpus[wanted->device], &map->imports[i], reason);
        if (error != 0)
            return error;
        fds += wanted->pieces;
    }
    return 0;
}

static int memory_pin(struct pcc_tenant *tenant, const struct pcc_tenant_map *map, char *reason)
{
    const int error = pcc_tenant_pin_for(tenant, map->gpus);

    if (error != 0)
        say(reason, "the driver does not pin the daemon's memory: %s", pcc_error_name(error));
    return error;
}

static bool ranges_fit(const struct pcc_tenant_map *map, const struct pcc_exposed_range *ranges,
                       uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (ranges[i].allocation_offset_bytes + ranges[i].length_bytes >
            map->imports[ranges[i].allocation]->length_bytes)
            return false;
    return true;
}

/* Nothing is read beyond what the driver says is there, whatever the trainer said. */
static int lengths_check(const struct pcc_tenant_map *map, char *reason)
{
    const struct pcc_exposure *head = &map->view.head;
    const bool fit = head->probe_offset_bytes + sizeof(head->probe) <=
                         map->imports[head->probe_allocation]->length_bytes &&
                     ranges_fit(map, map->view.ranges, head->range_count) &&
                     ranges_fit(map, map->view.replica, head->replica_count);

    if (!fit)
        say(reason, "an allocation is shorter here than the trainer says");
    return fit ? 0 : -PCC_E_BAD_HANDLE;
}

static int probe(const struct pcc_tenant_map *map, char *reason)
{
    const struct pcc_exposure *head = &map->view.head;
    const struct pcc_tenant_import *import = map->imports[head->probe_allocation];
    uint8_t got[sizeof(head->probe)];

    const struct pcc_gpu_copy copy = {
        .from = import->address + head->probe_offset_bytes, .to = got, .length_bytes = sizeof(got)};
    const int error = pcc_gpu_read(import->gpu, &copy, 1);
    if (error != 0) {
        say(reason, "the trainer's GPU memory cannot be read: %s", pcc_error_name(error));
        return error;
    }
    if (memcmp(got, head->probe, sizeof(got)) == 0)
        return 0;
    say(reason, "the trainer's handles open other memory in the daemon");
    return -PCC_E_BAD_HANDLE;
}

static int map_open(struct pcc_tenant *tenant, struct pcc_tenant_map *map,
                    const struct pcc_tenant_map *before, const struct pcc_descriptors *descriptors,
                    char *reason)
{
    int error = trust_check(tenant, map, reason);

    if (error == 0)
        error = gpus_take(tenant, map, reason);
    if (error == 0)
        error = imports_open(tenant, map, before, descriptors, reason);
    if (error == 0)
        error = lengths_check(map, reason);
    if (error == 0)
        error = memory_pin(tenant, map, reason);
    if (error == 0)
        error = probe(map, reason);
    return error;
}

/* Makes `map` the one exposed last, in the place of `before`. */
static void map_replace(struct pcc_tenant *tenant, struct pcc_tenant_map *before,
                        struct pcc_tenant_map *map)
{
    pcc_tenant_lock(tenant);
    tenant->pull.map = map;
    pcc_tenant_map_put(tenant, before);
    pcc_tenant_unlock(tenant);
    pcc_tenant_maps_close(tenant);
}

/* With control held, so that neither the session nor the previous map goes away meanwhile. */
static int expose(struct pcc_tenant *tenant, uint64_t number, const void *bytes,
                  uint64_t length_bytes, const struct pcc_descriptors *descriptors, char *reason)
{
    const char *why;
    struct pcc_tenant_map *map = calloc(1, sizeof(*map));

    if (map == NULL)
        return -ENOMEM;
    map->number = number;
    map->holders = 1;
    int error = pcc_exposure_parse(bytes, length_bytes, tenant->spec.chunk_bytes, &map->view, &why);
    if (error != 0)
        say(reason, "%s", why);

    pcc_tenant_lock(tenant);
    struct pcc_tenant_map *before = tenant->pull.map;
    tenant->pull.map = NULL; /* no new save through it, and its imports stay while we hold it */
    tenant->pull.maps++;
    pcc_tenant_unlock(tenant);
    if (error == 0)
        error = map_open(tenant, map, before, descriptors, reason);
    if (error == -EEXIST) { /* drivers refuse an address while what was there is still mapped */
        imports_close(tenant, map);
        map_replace(tenant, before, NULL);
        before = NULL;
        error = map_open(tenant, map, NULL, descriptors, reason);
    }
    if (error == 0) {
        reason[0] = '\0';
        map_replace(tenant, before, map);
    } else {
        map_replace(tenant, before, NULL);
        map_replace(tenant, map, NULL);
    }
    return error == -EEXIST ? -PCC_E_BAD_HANDLE : error;
}

int pcc_tenant_expose(struct pcc_tenant *tenant, uint64_t map, const void *bytes,
                      uint64_t length_bytes, const struct pcc_descriptors *descriptors,
                      char reason[PCC_REASON_BYTES])
{
    int error = 0;

    reason[0] = '\0';
    PCC_LOCKED(&tenant->control);
    pcc_tenant_lock(tenant);
    if (!tenant->attached || tenant->broken)
        error = -ENOTCONN;
    else if (map == 0)
        error = -PCC_E_BAD_PEER;
    pcc_tenant_unlock(tenant);
    const char *missing = error == 0 ? pcc_cuda_missing() : "";
    if (error == 0 && (tenant->gpus == NULL || missing[0] != '\0')) {
        say(reason, "%s", missing[0] != '\0' ? missing : "the daemon uses no GPU");
        error = -PCC_E_NO_DRIVER;
    }
    if (error == 0)
        error = expose(tenant, map, bytes, length_bytes, descriptors, reason);
    if (error != 0 && reason[0] == '\0')
        say(reason, "%s", pcc_error_name(error));
    return error;
}
