/* Stand-ins that the linker puts before the real functions (-Wl,--wrap): the moment of the
 * acknowledgement becomes visible, and time and randomness repeat with the seed. */
#include "../native/fast_crc.h"
#include "base/pcc_hash.h"
#include "disk/pcc_volume.h"
#include "sim_io.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>

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

int __wrap_nanosleep(const struct timespec *pause, struct timespec *left);
int __wrap_nanosleep(const struct timespec *pause, struct timespec *left)
{
    (void)left;
    hooks_clock_ns += (uint64_t)pause->tv_nsec;
    return 0;
}

ssize_t __wrap_getrandom(void *bytes, size_t length, unsigned flags);
ssize_t __wrap_getrandom(void *bytes, size_t length, unsigned flags)
{
    (void)flags;
    for (size_t i = 0; i < length; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)rng_next(&hooks_rng);
    return (ssize_t)length;
}

/* The images of a history have most records in common, and half of the time went into their CRCs:
 * each is computed once, by the processor where it can, and found by a hash as long as those that
 * tell images apart. */
uint32_t __wrap_pcc_crc32c(uint32_t crc, const void *bytes, size_t length);
uint32_t __wrap_pcc_crc32c(uint32_t crc, const void *bytes, size_t length)
{
    static struct {
        uint64_t hash;
        uint32_t crc;
    } known[1u << 12];
    const uint64_t hash = (pcc_hash_bytes(bytes, length) ^ crc) | 1; /* 0: an empty place */
    const uint64_t at = hash >> 52;

    if (known[at].hash != hash) {
        known[at].hash = hash;
        known[at].crc = fast_crc32c(crc, bytes, length);
    }
    return known[at].crc;
}

static uint32_t published =
    PCC_SLOTS_MAX; /* the slot that the record under way puts in the table */

void hooks_died(void)
{
    published = PCC_SLOTS_MAX;
}

/* Slots that failed are used again when every other one is in the table, and not before. */
static bool may_reuse_quarantined(struct pcc_volume *volume)
{
    struct pcc_record record;

    pcc_volume_record(volume, &record);
    for (uint32_t i = 0; i < record.slot_count; i++)
        if (i != published && record.slots[i].state != PCC_SLOT_DURABLE &&
            !sim_current->slot_bad[i] && (record.slots[i].flags & PCC_SLOT_QUARANTINED) == 0)
            return false;
    return pcc_volume_free_slots(volume) == 0;
}

/* A failed flush concerns a slot, too, which the disk does not know of. */
void __real_pcc_volume_quarantine_slot(struct pcc_volume *volume, uint32_t slot);
void __wrap_pcc_volume_quarantine_slot(struct pcc_volume *volume, uint32_t slot);
void __wrap_pcc_volume_quarantine_slot(struct pcc_volume *volume, uint32_t slot)
{
    sim_current->slot_bad[slot] = true;
    __real_pcc_volume_quarantine_slot(volume, slot);
}

int __real_pcc_volume_take_slot(struct pcc_volume *volume, uint32_t *slot_out);
int __wrap_pcc_volume_take_slot(struct pcc_volume *volume, uint32_t *slot_out);
int __wrap_pcc_volume_take_slot(struct pcc_volume *volume, uint32_t *slot_out)
{
    const bool reuses = may_reuse_quarantined(volume);
    const int result = __real_pcc_volume_take_slot(volume, slot_out);
    if (result == 0 && reuses)
        memset(sim_current->slot_bad, 0, sizeof sim_current->slot_bad);
    return result;
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
                              const struct pcc_slot_entry *entry, enum pcc_published *out,
                              void (*on_durable)(void *context), void *context);
int __wrap_pcc_volume_publish(struct pcc_volume *volume, uint32_t slot,
                              const struct pcc_slot_entry *entry, enum pcc_published *out,
                              void (*on_durable)(void *context), void *context);
int __wrap_pcc_volume_publish(struct pcc_volume *volume, uint32_t slot,
                              const struct pcc_slot_entry *entry, enum pcc_published *out,
                              void (*on_durable)(void *context), void *context)
{
    struct inner inner = {entry->sequence, on_durable, context};
    enum sim_purpose before = sim_current->purpose;
    sim_current->purpose = PURPOSE_SAVE;
    published = slot;
    int result = __real_pcc_volume_publish(volume, slot, entry, out, acknowledged, &inner);
    published = PCC_SLOTS_MAX;
    sim_current->purpose = before;
    return result;
}
