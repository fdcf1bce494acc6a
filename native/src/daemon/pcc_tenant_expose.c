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

static void map_close(struct pcc_tenant *tenant, struct pcc_tenant_map *map)
{
    imports_close(tenant, map);
    for (uint32_t i = 0; i < PCC_DEVICES; i++)
        if (map->gpus[i] != NULL)
            pcc_gpu_put(map->gpus[i]);
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
            say(reason, "GPU %u takes one process only (its compute mode; nvidia-smi -c DEFAULT)",
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
        "the daemon read other bytes than the trainer in the memory of GPU %u, which is not "
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
        say(reason, "how long the trainer's GPU memory is cannot be found out: %s, %s", name,
            second);
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

/* Nothing is read beyond what the driver says is there, whatever the trainer said. */
static int lengths_check(const struct pcc_tenant_map *map, char *reason)
{
    for (uint32_t i = 0; i < map->view.head.range_count; i++) {
        const struct pcc_exposed_range *range = &map->view.ranges[i];
        if (range->allocation_offset_bytes + range->length_bytes <=
            map->imports[range->allocation]->length_bytes)
            continue;
        say(reason, "an allocation is shorter here than the trainer says");
        return -PCC_E_BAD_HANDLE;
    }
    return 0;
}

static int probe(const struct pcc_tenant_map *map, char *reason)
{
    const struct pcc_exposure *head = &map->view.head;
    const struct pcc_tenant_import *import = map->imports[head->probe_allocation];
    uint8_t got[sizeof(head->probe)];

    if (head->probe_offset_bytes + sizeof(got) > import->length_bytes) {
        say(reason, "an allocation is shorter here than the trainer says");
        return -PCC_E_BAD_HANDLE;
    }
    const struct pcc_gpu_copy copy = {
        .from = import->address + head->probe_offset_bytes, .to = got, .length_bytes = sizeof(got)};
    const int error = pcc_gpu_read(import->gpu, &copy, 1);
    if (error != 0) {
        say(reason, "the trainer's GPU memory cannot be read: %s", pcc_error_name(error));
        return error;
    }
    if (memcmp(got, head->probe, sizeof(got)) == 0)
        return 0;
    say(reason, "the trainer's handles mean other memory to the daemon");
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

/* -- proving: before a byte of an exposure gets into chunks, which the client sees, the client
 * shows that it reads the same as we do. So a handle that it has guessed gives it nothing, and a
 * mapping of other memory makes no checkpoint. -- */

/* A block that says nothing (pcc_proof_is_plain) is chosen again, so often in all. */
#define PROOF_CHOICES 16u
/* A wrong answer is asked for again: memory beside the tensors may change between two reads. */
#define PROOF_TRIES 3u
#define PROOF_READS (PCC_GPU_LANDING_BYTES / PCC_PROOF_BYTES)

static uint8_t *block_at(const struct pcc_tenant_proof *proof, uint32_t place)
{
    return proof->bytes + (size_t)place * PCC_PROOF_BYTES;
}

static bool is_plain(const struct pcc_tenant_proof *proof, uint32_t place)
{
    return pcc_proof_is_plain(block_at(proof, place), proof->places[place].length_bytes);
}

/* Reads places [first, end) into memory of our own. */
static int blocks_read(const struct pcc_tenant_proof *proof, uint32_t first, uint32_t end)
{
    struct pcc_gpu_copy copies[PROOF_READS];
    int error = 0;

    for (uint32_t at = first, count; error == 0 && at < end; at += count) {
        count = end - at < PROOF_READS ? end - at : PROOF_READS;
        for (uint32_t i = 0; i < count; i++) {
            const struct pcc_proof_place *place = &proof->places[at + i];
            const struct pcc_tenant_import *import = proof->map->imports[place->allocation];
            copies[i] = (struct pcc_gpu_copy){.from = import->address + place->offset_bytes,
                                              .to = block_at(proof, at + i),
                                              .length_bytes = place->length_bytes};
        }
        error = pcc_gpu_read(proof->map->gpus[proof->device], copies, count);
    }
    return error;
}

/* Plain blocks become others, if there is one among them that is not. */
static int blocks_improve(struct pcc_tenant_proof *proof, const bool *known)
{
    struct pcc_tenant_proof other = *proof;
    int error = 0;

    other.bytes = calloc(proof->count, PCC_PROOF_BYTES);
    if (other.bytes == NULL)
        return -ENOMEM;
    for (uint32_t i = 1; error == 0 && i < PROOF_CHOICES; i++) {
        uint32_t plain = 0;
        error =
            pcc_proof_choose(&proof->map->view, proof->device, known, &other.places, &other.count);
        if (error != 0)
            break;
        for (uint32_t k = 0; k < proof->count; k++)
            if (is_plain(proof, k))
                other.places[plain++] = other.places[k];
        error = blocks_read(&other, 0, plain);
        for (uint32_t k = 0, from = 0; error == 0 && k < proof->count && plain > 0; k++) {
            if (!is_plain(proof, k))
                continue;
            proof->places[k] = other.places[from];
            memcpy(block_at(proof, k), block_at(&other, from++), PCC_PROOF_BYTES);
        }
        free(other.places);
        if (plain == 0)
            break;
    }
    free(other.bytes);
    return error;
}

/* Chooses blocks, and reads them, into memory that no client sees. Without the lock. */
static int blocks_choose(struct pcc_tenant_proof *proof)
{
    const struct pcc_tenant_map *map = proof->map;
    bool *known = calloc(map->view.head.allocation_count, sizeof(*known));

    if (known == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < map->view.head.allocation_count; i++)
        known[i] = map->imports[i]->proven;
    int error = pcc_proof_choose(&map->view, proof->device, known, &proof->places, &proof->count);
    if (error == 0 && proof->count > 0) {
        proof->bytes = calloc(proof->count, PCC_PROOF_BYTES);
        error = proof->bytes == NULL ? -ENOMEM : blocks_read(proof, 0, proof->count);
    }
    if (error == 0 && proof->count > 0)
        error = blocks_improve(proof, known);
    free(known);
    return error;
}

/* With the lock held, as what follows: the next question. */
static void proof_ask(struct pcc_tenant *tenant, struct pcc_tenant_proof *proof)
{
    struct pcc_proof *page = &tenant->view.page->proof;
    const uint32_t left = proof->count - proof->next;

    proof->asked = left < PCC_PROOF_BLOCKS ? left : PCC_PROOF_BLOCKS;
    page->device = proof->device;
    page->count = proof->asked;
    for (uint32_t i = 0; i < proof->asked; i++) {
        const struct pcc_proof_place *place = &proof->places[proof->next + i];
        page->blocks[i] = (struct pcc_proof_block){
            .address =
                proof->map->view.allocations[place->allocation].address + place->offset_bytes,
            .length_bytes = place->length_bytes};
    }
    proof->deadline_ns = pcc_now_ns() + tenant->pull.limit_ns;
    /* Release pairs with the client's acquire: it sees the blocks. */
    PCC_WRITE_RELEASE(&page->asked, ++proof->question);
    pcc_tenant_wake_client(tenant);
}

void pcc_tenant_proof_drop(struct pcc_tenant *tenant)
{
    struct pcc_tenant_proof *proof = &tenant->pull.proof;

    free(proof->places);
    free(proof->bytes);
    pcc_tenant_map_put(tenant, proof->map);
    *proof = (struct pcc_tenant_proof){.question = tenant->attached ? proof->question : 0};
}

/* A client that cannot read it may have guessed the block, so the next snapshot asks again. Not of
 * counters in staging memory: all that is read of it was shown, and so was the probe. A descriptor
 * is proof enough of what its owner may read. */
static bool is_doubted(const struct pcc_tenant_proof *proof, uint32_t number)
{
    const struct pcc_proof_place *place = &proof->places[number];
    const struct pcc_exposure *head = &proof->map->view.head;
    const bool is_small = place->read_bytes == place->length_bytes &&
                          place->allocation == head->probe_allocation &&
                          !pcc_proof_is_plain(head->probe, sizeof(head->probe));

    return proof->map->imports[place->allocation]->pieces == 0 && is_plain(proof, number) &&
           !is_small;
}

/* Everything that was asked for is the trainer's. */
static void proof_accept(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    struct pcc_tenant_proof *proof = &tenant->pull.proof;
    bool doubted = false;

    for (uint32_t i = 0; i < proof->count; i++) {
        struct pcc_tenant_import *import = proof->map->imports[proof->places[i].allocation];
        import->proven = import->pieces == 0 && !is_plain(proof, i);
        doubted = doubted || is_doubted(proof, i);
    }
    save->sources[0].proven |= 1u << proof->device;
    if (!doubted) {
        proof->map->proven |= 1u << proof->device;
        PCC_WRITE(&tenant->view.page->proof.proven[proof->device], proof->map->number);
        pcc_tenant_wake_client(tenant);
    }
    pcc_tenant_proof_drop(tenant);
}

static bool blocks_match(const struct pcc_tenant *tenant, const struct pcc_tenant_proof *proof)
{
    for (uint32_t i = 0; i < proof->asked; i++)
        if (memcmp(tenant->view.page->proof.bytes[i], block_at(proof, proof->next + i),
                   proof->places[proof->next + i].length_bytes) != 0)
            return false;
    return true;
}

/* Whether the memory is still to be as it was at the snapshot: the word moves before a stream is
 * let go, and one that waits for nothing says so. */
static bool is_at_rest(const struct pcc_tenant *tenant, const struct pcc_tenant_save *save)
{
    return pcc_page_word(&tenant->view, save->snapshot) ==
               pcc_word(save->snapshot, PCC_WORD_COPYING) &&
           pcc_pull_words(tenant, save) != PCC_PULL_WITHDRAWN;
}

/* The client's bytes are others, again and again: the daemon has other memory mapped, or the client
 * cannot read what it has named. */
static void proof_reject(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    if (is_at_rest(tenant, save)) {
        tenant->pull.distrusted |= 1u << tenant->pull.proof.device;
        save->device = tenant->pull.proof.device;
        pcc_tenant_abort(tenant, save, -PCC_E_OTHER_MEMORY);
    } else if (!save->sources[0].deferred) {
        pcc_tenant_abort(tenant, save, -PCC_E_ABORTED);
    }
    pcc_tenant_proof_drop(tenant);
}

/* The blocks of the next question were read, or an error. */
static void proof_go_on(struct pcc_tenant *tenant, int error)
{
    struct pcc_tenant_proof *proof = &tenant->pull.proof;
    struct pcc_tenant_save *save = pcc_tenant_save_of(tenant, proof->tag);

    if (save != NULL && error != 0)
        pcc_tenant_abort(tenant, save, error);
    if (save == NULL || error != 0)
        pcc_tenant_proof_drop(tenant);
    else if (proof->next < proof->count)
        proof_ask(tenant, proof);
    else
        proof_accept(tenant, save);
}

/* With the lock held, which is released for reading again. True when something was done. */
static bool proof_continue(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    struct pcc_tenant_proof *proof = &tenant->pull.proof;
    struct pcc_proof *page = &tenant->view.page->proof;

    if (save == NULL || save->aborted) {
        pcc_tenant_proof_drop(tenant);
        return true;
    }
    /* Acquire pairs with the client's release: its bytes are there. */
    if (PCC_READ_ACQUIRE(&page->answered) != proof->question) {
        if (pcc_now_ns() < proof->deadline_ns)
            return false;
        pcc_tenant_abort(tenant, save, -ETIMEDOUT);
        pcc_tenant_proof_drop(tenant);
    } else if (page->result != 0) {
        pcc_tenant_abort(tenant, save, -PCC_E_DEVICE);
        pcc_tenant_proof_drop(tenant);
    } else if (blocks_match(tenant, proof)) {
        proof->next += proof->asked;
        proof->tries = 0;
        proof_go_on(tenant, 0);
    } else if (++proof->tries == PROOF_TRIES || !is_at_rest(tenant, save)) {
        proof_reject(tenant, save);
    } else {
        pcc_tenant_unlock(tenant);
        const int error = blocks_read(proof, proof->next, proof->next + proof->asked);
        pcc_tenant_lock(tenant);
        proof_go_on(tenant, error);
    }
    return true;
}

/* With the lock held: the part of a save that is to be proven now. */
static struct pcc_tenant_save *unproven_find(struct pcc_tenant *tenant, uint32_t *device_out)
{
    tenant->pull.proof.waits = false;
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        struct pcc_source *source = &save->sources[0];
        if (save->save == NULL || save->aborted || save->copied ||
            !pcc_tenant_of_session(tenant, save) || (source->parts & ~source->proven) == 0)
            continue;
        source->proven |= source->map->proven & source->parts; /* since it began */
        for (uint32_t device = 0; device < PCC_DEVICES; device++) {
            if (((source->parts & ~source->proven) >> device & 1u) == 0)
                continue;
            *device_out = device;
            /* Acquire: as in the pull of it. */
            if (PCC_READ_ACQUIRE(&pcc_page_words(&tenant->view, save->snapshot, device)->ready) >=
                    save->snapshot &&
                is_at_rest(tenant, save))
                return save;
            tenant->pull.proof.waits = tenant->pull.proof.waits || source->deferred;
        }
    }
    return NULL;
}

bool pcc_tenant_prove(struct pcc_tenant *tenant)
{
    struct pcc_tenant_proof *proof = &tenant->pull.proof;
    uint32_t device;

    PCC_LOCKED(&tenant->lock);
    if (tenant->broken)
        return false;
    if (proof->map != NULL)
        return proof_continue(tenant, pcc_tenant_save_of(tenant, proof->tag));
    struct pcc_tenant_save *save = unproven_find(tenant, &device);
    if (save == NULL)
        return false;
    proof->map = save->sources[0].map;
    proof->map->holders++;
    proof->tag = save->tag;
    proof->device = device;
    pcc_tenant_unlock(tenant);
    const int error = blocks_choose(proof);
    pcc_tenant_lock(tenant);
    proof_go_on(tenant, error);
    return true;
}
