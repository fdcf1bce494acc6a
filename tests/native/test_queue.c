/* The lock-free queue: order, bounds, and nothing lost or doubled among many threads. */
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "pcc_queue.h"

#define PRODUCERS 3
#define CONSUMERS 3
#define PER_PRODUCER 20000

static void test_fifo_and_full(void)
{
    struct pcc_queue queue = {0};
    uint64_t value;

    CHECK_EQUAL(pcc_queue_init(&queue, 4), 0);
    CHECK(!pcc_queue_pop(&queue, &value));
    for (uint64_t round = 0; round < 10; round++) {
        for (uint64_t i = 0; i < 4; i++)
            CHECK(pcc_queue_push(&queue, round * 4 + i));
        CHECK(!pcc_queue_push(&queue, 99));
        CHECK_EQUAL(pcc_queue_count(&queue), 4);
        for (uint64_t i = 0; i < 4; i++) {
            CHECK(pcc_queue_pop(&queue, &value));
            CHECK_EQUAL(value, round * 4 + i);
        }
        CHECK(!pcc_queue_pop(&queue, &value));
    }
    pcc_queue_destroy(&queue);
    pcc_queue_destroy(&queue);
}

static struct pcc_queue shared;
static _Atomic uint8_t seen[PRODUCERS * PER_PRODUCER];

static void *produce(void *argument)
{
    const uint64_t base = (uint64_t)(uintptr_t)argument * PER_PRODUCER;

    for (uint64_t i = 0; i < PER_PRODUCER; i++)
        while (!pcc_queue_push(&shared, base + i))
            (void)sched_yield();
    return NULL;
}

static void *consume(void *argument)
{
    uint64_t last[PRODUCERS] = {0}, value;
    uint64_t *count = argument;

    while (pcc_queue_pop_wait(&shared, &value)) {
        CHECK(value < PRODUCERS * PER_PRODUCER);
        CHECK_EQUAL(atomic_fetch_add(&seen[value], 1), 0);
        /* One producer's values come in its order, as seen by one consumer. */
        const uint64_t producer = value / PER_PRODUCER;
        CHECK(value % PER_PRODUCER + 1 > last[producer]);
        last[producer] = value % PER_PRODUCER + 1;
        ++*count;
    }
    return NULL;
}

static void test_many_threads_lose_nothing(void)
{
    pthread_t producers[PRODUCERS], consumers[CONSUMERS];
    uint64_t counts[CONSUMERS] = {0}, total = 0;

    CHECK_EQUAL(pcc_queue_init(&shared, 16), 0);
    for (uintptr_t i = 0; i < CONSUMERS; i++)
        CHECK_EQUAL(pthread_create(&consumers[i], NULL, consume, &counts[i]), 0);
    for (uintptr_t i = 0; i < PRODUCERS; i++)
        CHECK_EQUAL(pthread_create(&producers[i], NULL, produce, (void *)i), 0);
    for (int i = 0; i < PRODUCERS; i++)
        CHECK_EQUAL(pthread_join(producers[i], NULL), 0);
    pcc_queue_close(&shared);
    for (int i = 0; i < CONSUMERS; i++) {
        CHECK_EQUAL(pthread_join(consumers[i], NULL), 0);
        total += counts[i];
    }
    CHECK_EQUAL(total, PRODUCERS * PER_PRODUCER);
    pcc_queue_destroy(&shared);
}

int main(void)
{
    RUN(test_fifo_and_full);
    RUN(test_many_threads_lose_nothing);
    return 0;
}
