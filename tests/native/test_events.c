/* The event queue: in order, announced, and a put never waits for the reader. */
#include <poll.h>

#include "check.h"
#include "events/pcc_events.h"

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

static bool no_memory;

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);

void *__wrap_calloc(size_t count, size_t size)
{
    return no_memory ? NULL : __real_calloc(count, size);
}

/* A reserved event is put without waiting, also when memory has run out. */
static void test_what_was_reserved_needs_no_memory(void)
{
    struct pcc_events *events;
    struct pcc_event out[100];

    CHECK_EQUAL(pcc_events_open(4, &events), 0);
    pcc_events_put(events, &(struct pcc_event){.id = 0});
    CHECK_EQUAL(pcc_events_reserve(events, 60), 0);
    CHECK_EQUAL(pcc_events_reserve(events, 40), 0);
    no_memory = true;
    CHECK_EQUAL(pcc_events_reserve(events, 100), -ENOMEM);
    for (uint64_t id = 1; id < 100; id++)
        pcc_events_put(events, &(struct pcc_event){.id = id});
    no_memory = false;
    CHECK_EQUAL(pcc_events_take(events, out, 100), 100);
    for (uint64_t id = 0; id < 100; id++)
        CHECK_EQUAL(out[id].id, id);
    pcc_events_unreserve(events, 100);
    CHECK_EQUAL(pcc_events_reserve(events, 1u << 25), -ENOMEM);
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
    RUN(test_what_was_reserved_needs_no_memory);
    RUN(test_capacities);
    return 0;
}
