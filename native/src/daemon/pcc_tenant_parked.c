/* Parked saves: copied into chunks that stay full, until the loop has them written or drops them.
 */
#include "daemon/pcc_tenant_private.h"

static struct pcc_tenant_save *parked_find(struct pcc_tenant *tenant, uint64_t sequence)
{
    for (uint32_t i = 0; sequence != 0 && i < PCC_TENANT_SAVES; i++) {
        struct pcc_tenant_save *save = &tenant->saves[i];
        if (save->save != NULL && save->sequence == sequence && pcc_save_is_parked(save->save))
            return save;
    }
    return NULL;
}

int pcc_tenant_write(struct pcc_tenant *tenant, uint64_t sequence)
{
    PCC_LOCKED(&tenant->lock);
    struct pcc_tenant_save *save = parked_find(tenant, sequence);
    return save != NULL ? pcc_save_write(save->save, &save->save) : 0;
}

bool pcc_tenant_drop(struct pcc_tenant *tenant, uint64_t sequence, const struct pcc_tenant_end *end)
{
    PCC_LOCKED(&tenant->lock);
    struct pcc_tenant_save *save = parked_find(tenant, sequence);
    if (save == NULL || !pcc_save_drop(save->save))
        return false;
    save->save = NULL;
    pcc_tenant_chunks_forget(tenant, save, false);
    tenant->bindings[save->binding].active--;
    if (pcc_tenant_of_session(tenant, save))
        pcc_tenant_outcome(tenant, save->snapshot, end);
    pcc_tenant_wake_client(tenant);
    pcc_tenant_pass_on(tenant);
    pcc_tenant_queue_look(tenant);
    return true;
}

void pcc_tenant_adopted_write(struct pcc_tenant *tenant)
{
    struct pcc_tenant_save *newest;

    do {
        newest = NULL;
        for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
            struct pcc_tenant_save *save = &tenant->saves[i];
            if (save->save != NULL && save->session == 0 && pcc_save_is_parked(save->save) &&
                (newest == NULL || save->sequence > newest->sequence))
                newest = save;
        }
    } while (newest != NULL && pcc_save_write(newest->save, &newest->save) == 0);
}
