/* Saves that stay in the chunks that they were copied to: without a slot, a lane or a writer, until
 * the owner writes them or drops them. */
#include <string.h>

#include "disk/pcc_save_private.h"

bool pcc_save_is_parked(const struct pcc_save *save)
{
    return save->lane->parks;
}

/* With the locks of both lanes held. For the next daemon it is parked until its slot is stored; all
 * of it is in DRAM before and after. */
static void take_over(struct pcc_save *save, struct pcc_save *parked, uint32_t slot)
{
    const struct pcc_saver *saver = save->lane->saver;

    pcc_saver_exchange(save, parked);
    memcpy(&save->active, &parked->active, sizeof *save - offsetof(struct pcc_save, active));
    parked->active = false;
    save->slot = slot;
    save->has_slot = true;
    save->flush_failures = PCC_READ(&saver->flush_failures);
    pcc_kept_moved(saver->spec.kept, save->kept_place, slot, save->piece_count);
    for (uint32_t i = 0; i < save->piece_count; i++)
        pcc_save_queue_piece(save, i);
}

int pcc_save_write(struct pcc_save *parked, struct pcc_save **out)
{
    struct pcc_saver *saver = parked->lane->saver;
    uint32_t slot;

    if (pcc_volume_stopped(saver->volume))
        return -PCC_E_STOPPED;
    struct pcc_save *save = pcc_saver_take_place(saver, PCC_SAVE_ANY_PLACE, false);
    if (!save)
        return -PCC_E_NO_LANE;
    const int result = pcc_volume_take_slot(saver->volume, &slot);
    if (result != 0) {
        pcc_save_leave(save);
        return result;
    }
    pcc_save_lock(parked);
    const bool sealed = parked->active && parked->sealed && !parked->failed;
    if (sealed) {
        pcc_save_lock(save);
        take_over(save, parked, slot);
        pcc_save_unlock(save);
        *out = save;
    }
    pcc_save_unlock(parked);
    if (!sealed)
        pcc_volume_return_slot(saver->volume, slot);
    pcc_save_leave(sealed ? parked : save);
    return sealed ? 0 : -EBUSY;
}

bool pcc_save_unpark(struct pcc_save *parked, bool kept)
{
    pcc_save_lock(parked);
    const bool sealed = parked->active && parked->sealed && !parked->failed;
    if (sealed) {
        parked->active = false;
        if (!kept)
            pcc_kept_end(parked->lane->saver->spec.kept, parked->kept_place);
    }
    pcc_save_unlock(parked);
    if (sealed)
        pcc_save_leave(parked);
    return sealed;
}

bool pcc_save_drop(struct pcc_save *parked)
{
    return pcc_save_unpark(parked, false);
}
