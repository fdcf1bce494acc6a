/* Proofs: the client can read all chunks. So before the first byte of an exposure gets into a
 * chunk, the client shows that it reads the same bytes as the daemon. A handle that a client has
 * guessed gives it nothing then, and a mapping of other memory makes no checkpoint.
 *
 * The drain thread alone runs this, one proof at a time: it chooses blocks and reads them, asks for
 * them in the page, and compares the client's bytes with its own (struct pcc_proof). */
#include <stdlib.h>
#include <string.h>

#include "daemon/pcc_tenant_private.h"

/* How often a block is chosen while it proves nothing (pcc_proof_is_plain). */
#define PROOF_CHOICES 16u
/* How often an answer may be wrong: memory beside the tensors may change between two reads. */
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

/* Each plain block is replaced by another choice, until none is plain or PROOF_CHOICES is reached.
 */
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

/* Chooses blocks and reads them, into memory that no client sees. Without the lock. */
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

/* The next question. From here on functions have the lock held. */
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

/* Whether the next snapshot has to ask again: a client that cannot read a plain block may have
 * guessed it. That is not so for a descriptor, which only a process that may read the memory has.
 * It is not so for counters in staging memory either: the block is all that is read there, and the
 * client knew the probe beside it. */
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

static bool blocks_match(const struct pcc_tenant *tenant, const struct pcc_tenant_proof *proof)
{
    for (uint32_t i = 0; i < proof->asked; i++)
        if (memcmp(tenant->view.page->proof.bytes[i], block_at(proof, proof->next + i),
                   proof->places[proof->next + i].length_bytes) != 0)
            return false;
    return true;
}

/* Whether the memory must still be as it was at the snapshot. The word moves before a stream is
 * released, and a stream that waits for nothing writes `withdrawn` first. */
static bool is_at_rest(const struct pcc_tenant *tenant, const struct pcc_tenant_save *save)
{
    return pcc_page_word(&tenant->view, save->snapshot) ==
               pcc_word(save->snapshot, PCC_WORD_COPYING) &&
           pcc_pull_words(tenant, save) != PCC_PULL_WITHDRAWN;
}

/* The client's bytes differed each time, or prove nothing: the daemon has other memory mapped, or
 * the client cannot read what it has named. */
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

/* All that was asked was answered. The daemon's own user can open handles without the daemon. But
 * the client of another user may have guessed a plain block. */
static void proof_accept(struct pcc_tenant *tenant, struct pcc_tenant_save *save)
{
    struct pcc_tenant_proof *proof = &tenant->pull.proof;
    bool doubted = false;

    for (uint32_t i = 0; i < proof->count; i++)
        doubted = doubted || is_doubted(proof, i);
    if (doubted && tenant->spec.foreign) {
        proof_reject(tenant, save);
        return;
    }
    for (uint32_t i = 0; i < proof->count; i++) {
        struct pcc_tenant_import *import = proof->map->imports[proof->places[i].allocation];
        import->proven = import->pieces == 0 && !is_plain(proof, i);
    }
    save->sources[0].proven |= 1u << proof->device;
    if (!doubted) {
        proof->map->proven |= 1u << proof->device;
        PCC_WRITE(&tenant->view.page->proof.proven[proof->device], proof->map->number);
        pcc_tenant_wake_client(tenant);
    }
    pcc_tenant_proof_drop(tenant);
}

/* The blocks of the next question have been read; or they could not be (error). */
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
