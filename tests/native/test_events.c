/* The event queue: in order, announced, and a put never waits for the one who takes. */
#include <poll.h>

#include "check.h"
#include "daemon/pcc_tenant.h"

static bool readable(const struct pcc_events *events)
{
    struct pollfd poller = {.fd = pcc_events_fd(events), .events = POLLIN};

    return poll(&poller, 1, 0) == 1;
}

/* Puts happen under a tenant's lock, for which the loop may be waiting. */
static void test_a_full_queue_grows(void)
{
    struct pcc_events *events;
    struct pcc_event out[64];
    uint64_t put = 0, taken = 0;

    CHECK_EQUAL(pcc_events_open(4, &events), 0);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 3 + 40 * round; i++)
            pcc_events_put(events, &(struct pcc_event){.id = put++});
        CHECK(readable(events));
        const uint32_t count = pcc_events_take(events, out, 2); /* the rest wraps around */
        for (uint32_t i = 0; i < count; i++)
            CHECK_EQUAL(out[i].id, taken++);
    }
    uint32_t count;
    while ((count = pcc_events_take(events, out, 64)) > 0)
        for (uint32_t i = 0; i < count; i++)
            CHECK_EQUAL(out[i].id, taken++);
    CHECK_EQUAL(taken, put);
    CHECK(!readable(events));
    pcc_events_close(events);
}

static void test_capacities(void)
{
    struct pcc_events *events;

    CHECK_EQUAL(pcc_events_open(0, &events), -EINVAL);
    CHECK_EQUAL(pcc_events_open(3, &events), -EINVAL);
    CHECK_EQUAL(pcc_events_open(1u << 25, &events), -EINVAL);
}

int main(void)
{
    RUN(test_a_full_queue_grows);
    RUN(test_capacities);
    return 0;
}
