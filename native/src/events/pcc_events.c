/* Events are few per checkpoint, so a mutex costs nothing here. What matters is that the loop
 * sleeps in its poll and is woken once per burst. */
#include "events/pcc_events.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/pcc_thread.h"

#define CAPACITY_MAX (1u << 24)

struct pcc_events {
    pthread_mutex_t lock;
    pthread_cond_t taken;
    int fd;
    uint32_t capacity;
    uint32_t reserved;
    uint32_t head; /* free-running; count = tail - head */
    uint32_t tail;
    struct pcc_event *entries;
};

int pcc_events_open(uint32_t capacity, struct pcc_events **out)
{
    if (capacity == 0 || (capacity & (capacity - 1)) != 0 || capacity > CAPACITY_MAX)
        return -EINVAL;
    struct pcc_events *events = calloc(1, sizeof(*events));
    if (events == NULL)
        return -ENOMEM;
    (void)pthread_mutex_init(&events->lock, NULL); /* cannot fail with default attributes */
    (void)pthread_cond_init(&events->taken, NULL);
    events->entries = calloc(capacity, sizeof(*events->entries));
    events->fd = events->entries != NULL ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
    if (events->fd < 0) {
        const int error = events->entries != NULL ? -errno : -ENOMEM;
        pcc_events_close(events);
        return error;
    }
    events->capacity = capacity;
    *out = events;
    return 0;
}

void pcc_events_close(struct pcc_events *events)
{
    if (events == NULL)
        return;
    (void)close(events->fd);
    (void)pthread_cond_destroy(&events->taken);
    (void)pthread_mutex_destroy(&events->lock);
    free(events->entries);
    free(events);
}

int pcc_events_fd(const struct pcc_events *events)
{
    return events->fd;
}

/* With the lock held. */
static int make_room(struct pcc_events *events, uint32_t wanted)
{
    uint32_t capacity = events->capacity;

    while (capacity < wanted && capacity < CAPACITY_MAX)
        capacity *= 2;
    if (capacity < wanted)
        return -ENOMEM;
    if (capacity == events->capacity)
        return 0;
    struct pcc_event *entries = calloc(capacity, sizeof(*entries));
    if (entries == NULL)
        return -ENOMEM;
    const uint32_t count = events->tail - events->head;
    for (uint32_t i = 0; i < count; i++)
        entries[i] = events->entries[(events->head + i) % events->capacity];
    free(events->entries);
    events->entries = entries;
    events->capacity = capacity;
    events->head = 0;
    events->tail = count;
    return 0;
}

int pcc_events_reserve(struct pcc_events *events, uint32_t count)
{
    PCC_LOCKED(&events->lock);
    const int error = make_room(events, events->reserved + count);
    if (error == 0)
        events->reserved += count;
    return error;
}

void pcc_events_unreserve(struct pcc_events *events, uint32_t count)
{
    PCC_LOCKED(&events->lock);
    PCC_ASSERT(events->reserved >= count);
    events->reserved -= count;
}

/* The caller holds a tenant's lock, and the loop may be waiting for that lock: a put that waited
 * for the loop's take could wait forever. So every tenant has reserved what it may put between two
 * takes. */
void pcc_events_put(struct pcc_events *events, const struct pcc_event *event)
{
    PCC_LOCKED(&events->lock);
    while (make_room(events, events->tail - events->head + 1) != 0)
        (void)pthread_cond_wait(&events->taken, &events->lock);
    const bool was_empty = events->tail == events->head;
    events->entries[events->tail % events->capacity] = *event;
    events->tail++;
    if (was_empty)
        (void)eventfd_write(events->fd, 1);
}

uint32_t pcc_events_take(struct pcc_events *events, struct pcc_event *out, uint32_t capacity)
{
    uint32_t count = 0;
    eventfd_t ignored;

    PCC_LOCKED(&events->lock);
    while (count < capacity && events->head != events->tail) {
        out[count++] = events->entries[events->head % events->capacity];
        events->head++;
    }
    /* Readable for as long as something is left, so that a short `out` loses no wake-up. */
    if (events->head == events->tail)
        (void)eventfd_read(events->fd, &ignored);
    (void)pthread_cond_broadcast(&events->taken);
    return count;
}
