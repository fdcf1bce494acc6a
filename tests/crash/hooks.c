/* Stand-ins that the linker puts before the real functions (-Wl,--wrap): the moment of the
 * acknowledgement becomes visible, and time and randomness repeat with the seed. */
#include "pcc_volume.h"
#include "sim_io.h"

#include <string.h>
#include <sys/random.h>

static struct rng hooks_rng;
static uint64_t hooks_clock_ns;

void hooks_seed(uint64_t seed)
{
    hooks_rng = rng_from(seed, 0x77);
    hooks_clock_ns = 1000000000;
}

uint64_t __wrap_pcc_now_ns(void);
uint64_t __wrap_pcc_now_ns(void)
{
    return hooks_clock_ns += 1000;
}

uint64_t __wrap_pcc_wall_ns(void);
uint64_t __wrap_pcc_wall_ns(void)
{
    return hooks_clock_ns += 1000;
}

ssize_t __wrap_getrandom(void *bytes, size_t length, unsigned flags);
ssize_t __wrap_getrandom(void *bytes, size_t length, unsigned flags)
{
    (void)flags;
    for (size_t i = 0; i < length; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)rng_next(&hooks_rng);
    return (ssize_t)length;
}

struct inner {
    uint64_t sequence;
    void (*on_durable)(void *context);
    void *context;
};

static void acknowledged(void *context)
{
    struct inner *inner = context;
    sim_mark(sim_current, SIM_ACK, inner->sequence);
    if (inner->on_durable)
        inner->on_durable(inner->context);
}

int __real_pcc_volume_publish(struct pcc_volume *volume, uint32_t slot,
                              const struct pcc_slot_entry *entry, bool *superseded_out,
                              void (*on_durable)(void *context), void *context);
int __wrap_pcc_volume_publish(struct pcc_volume *volume, uint32_t slot,
                              const struct pcc_slot_entry *entry, bool *superseded_out,
                              void (*on_durable)(void *context), void *context);
int __wrap_pcc_volume_publish(struct pcc_volume *volume, uint32_t slot,
                              const struct pcc_slot_entry *entry, bool *superseded_out,
                              void (*on_durable)(void *context), void *context)
{
    struct inner inner = {entry->sequence, on_durable, context};
    enum sim_purpose before = sim_current->purpose;
    sim_current->purpose = PURPOSE_SAVE;
    int result =
        __real_pcc_volume_publish(volume, slot, entry, superseded_out, acknowledged, &inner);
    sim_current->purpose = before;
    return result;
}
