/* Events to the daemon's loop, from all tenants: how saves and loads go on, and how they end. They
 * go through a bounded queue and an eventfd that is readable while the queue holds something. Any
 * thread puts, the loop takes. */
#pragma once

#include "disk/pcc_save.h"
#include "shared/pcc_shared.h"

enum pcc_event_kind {
    PCC_EVENT_REQUESTED = 1, /* with an error it has ended, and `fault` says why */
    PCC_EVENT_BEGUN,         /* it has a lane and a slot, and is being copied; sequence 0: the loop
                                numbers it */
    PCC_EVENT_WAITS,         /* the first of the queue, for `error`: nothing ends that by itself */
    PCC_EVENT_REFUSED,       /* the queue has ended it for `error`. NO_LANE: skipped; ABORTED: the
                                client has abandoned it; ENOTCONN: the session has ended */
    PCC_EVENT_COPIED,        /* the snapshot is in the daemon's memory, the word is COPIED */
    PCC_EVENT_WRITING,       /* its first chunk went to the disk; comes after COPIED */
    PCC_EVENT_DURABLE,
    PCC_EVENT_SUPERSEDED,
    PCC_EVENT_GIVEN_UP,   /* by the group of ranks */
    PCC_EVENT_FAILED,     /* stage and error say why; "copy"/ABORTED: trainer died or gave up;
                             "copy"/DEVICE, DEVICE_LOST: the GPU failed the copy */
    PCC_EVENT_LOAD_ENDED, /* id is the load id */
    PCC_EVENT_BAD_PEER,   /* the session broke the protocol of the page; detach it */
    PCC_EVENT_DETACHED,   /* the ring is drained; every copy is complete or aborted */
    PCC_EVENT_WANTED, /* the client wants a parked save on the disk; once, perhaps before COPIED */
};

struct pcc_event {
    uint32_t kind;
    int32_t error;
    uint64_t tenant; /* the id given at open */
    uint64_t session;
    uint64_t id; /* snapshot or load */
    uint64_t sequence;
    uint32_t slot;
    uint32_t rehomed;
    uint64_t payload_bytes; /* of COPIED and WRITING */
    uint64_t copied_bytes;
    uint64_t written_bytes;
    enum pcc_stage stage;
    union {
        struct pcc_save_times times;
        struct pcc_event_requested {
            struct pcc_request request;
            struct pcc_reason fault; /* of one that has ended */
            uint64_t taken_ns;       /* CLOCK_MONOTONIC: when the drain thread read it */
        } requested;
    };
};

/* Put while a tenant is locked. `capacity` (a power of two) is a start: every tenant reserves
 * room for what it can put between two takes, and the queue grows further where that is not enough.
 */
struct pcc_events;
PCC_MUST_CHECK int pcc_events_open(uint32_t capacity, struct pcc_events **out);
void pcc_events_close(struct pcc_events *events);
int pcc_events_fd(const struct pcc_events *events);
/* Makes room for `count` more at a time, so that putting them needs no memory; or -ENOMEM. */
PCC_MUST_CHECK int pcc_events_reserve(struct pcc_events *events, uint32_t count);
void pcc_events_unreserve(struct pcc_events *events, uint32_t count);
void pcc_events_put(struct pcc_events *events, const struct pcc_event *event);
uint32_t pcc_events_take(struct pcc_events *events, struct pcc_event *out, uint32_t capacity);
