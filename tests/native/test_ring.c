/* The parts below a tenant: the page and its rings, the pool's sealed memory, the hash that goes
 * with the copy, the queue of events. */
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pcc_hash.h"
#include "check.h"
#include "daemon/pcc_tenant.h"
#include "disk/pcc_format.h"
#include "pool/pcc_pool.h"
#include "shared/pcc_ring.h"

static void test_page(void)
{
    struct pcc_page_geometry geometry;
    struct pcc_page_view daemon, client;
    int fd;
    void *bytes;

    CHECK(pcc_page_plan(65536, 100, 8, &geometry) == -EINVAL);
    CHECK(pcc_page_plan(65536, 3 * 512, 8, &geometry) == -EINVAL);
    CHECK(pcc_page_plan(512, 512, 8, &geometry) == -EINVAL);
    CHECK(pcc_page_plan(0, 4096, 8, &geometry) == -EINVAL);
    CHECK(pcc_page_plan(65536, 4096, 0, &geometry) == -EINVAL);
    CHECK(pcc_page_plan(1u << 30, 512, 1u << 20, &geometry) == -EINVAL); /* above 4 GiB */
    CHECK(pcc_page_plan(65536, 4096, 8, &geometry) == 0);
    CHECK(geometry.ring_capacity == 512 && geometry.blocks_per_chunk == 16); /* and requests */

    CHECK(pcc_memfd_make("test-page", geometry.page_bytes, &fd, &bytes) == 0);
    CHECK(pcc_page_accept(bytes, geometry.page_bytes, &client) == -PCC_E_BAD_PEER); /* zeros */
    pcc_page_make(bytes, &geometry, 5, &daemon);
    CHECK(pcc_page_accept(bytes, geometry.page_bytes, &client) == 0);
    CHECK(pcc_page_accept(bytes, geometry.page_bytes - 1, &client) == -PCC_E_BAD_PEER);
    CHECK(pcc_page_accept(bytes, 10, &client) == -PCC_E_BAD_PEER);
    daemon.page->ring_capacity *= 2;
    CHECK(pcc_page_accept(bytes, geometry.page_bytes, &client) == -PCC_E_BAD_PEER);
    daemon.page->ring_capacity /= 2;
    daemon.page->chunk_capacity = UINT32_MAX;
    CHECK(pcc_page_accept(bytes, geometry.page_bytes, &client) == -PCC_E_BAD_PEER);
    CHECK(munmap(bytes, geometry.page_bytes) == 0 && close(fd) == 0);
}

static const struct pcc_reason reasons[] = {
    [PCC_OUTCOME_GIVEN_UP] = {.cause = 18, .argument = 7},
    [PCC_OUTCOME_FAILED] = {.stage = PCC_STAGE_WRITE, .error = -EIO, .argument = UINT64_MAX},
};

#define WRITTEN 200000u

static void *outcomes_written(void *entry)
{
    for (uint64_t snapshot = 1; snapshot <= WRITTEN; snapshot++) { /* no state comes twice */
        const enum pcc_outcome outcome = snapshot % 2 ? PCC_OUTCOME_GIVEN_UP : PCC_OUTCOME_FAILED;
        pcc_outcome_write(entry, snapshot, outcome, snapshot, 0, &reasons[outcome]);
    }
    return NULL;
}

static bool same(struct pcc_reason one, struct pcc_reason other)
{
    return one.cause == other.cause && one.stage == other.stage && one.error == other.error &&
           one.argument == other.argument;
}

/* A reader beside a writer sees an outcome with its own reason, or without any; a reason of another
 * snapshot, or of a state that a killed daemon was about to write, is never seen. */
static void test_an_outcome_has_its_own_reason(void)
{
    static struct pcc_snapshot entry;
    struct pcc_reason reason;
    pthread_t writer;

    CHECK(pcc_outcome_read(&entry, WRITTEN, &reason) == PCC_OUTCOME_REQUESTED);
    CHECK(pthread_create(&writer, NULL, outcomes_written, &entry) == 0);
    while (atomic_load(&entry.outcome) == 0) /* no snapshot has the number 0 */
        (void)sched_yield();
    for (uint32_t i = 0; i < 200000; i++) {
        const uint64_t snapshot = atomic_load(&entry.outcome) >> 8;
        const enum pcc_outcome outcome = pcc_outcome_read(&entry, snapshot, &reason);
        CHECK(same(reason, (struct pcc_reason){0}) || same(reason, reasons[outcome]));
    }
    CHECK(pthread_join(writer, NULL) == 0);
    CHECK(pcc_outcome_read(&entry, WRITTEN, &reason) == PCC_OUTCOME_FAILED);
    CHECK(same(reason, reasons[PCC_OUTCOME_FAILED]));
    CHECK(pcc_outcome_read(&entry, 1, &reason) == PCC_OUTCOME_REQUESTED);
    CHECK(same(reason, (struct pcc_reason){0}));
    atomic_store(&entry.explained, pcc_word(WRITTEN, PCC_OUTCOME_GIVEN_UP)); /* and killed */
    CHECK(pcc_outcome_read(&entry, WRITTEN, &reason) == PCC_OUTCOME_FAILED);
    CHECK(same(reason, (struct pcc_reason){0}));
}

static void test_rings(void)
{
    struct pcc_page_geometry geometry;
    struct pcc_page_view producer, consumer;
    struct pcc_message message = {.kind = PCC_MSG_FULL};
    int fd;
    void *bytes;

    CHECK(pcc_page_plan(65536, 4096, 8, &geometry) == 0);
    CHECK(pcc_memfd_make("test-page", geometry.page_bytes, &fd, &bytes) == 0);
    pcc_page_make(bytes, &geometry, 5, &consumer);
    CHECK(pcc_page_accept(bytes, geometry.page_bytes, &producer) == 0);
    CHECK(pcc_ring_pop(&consumer.to_daemon, &message) == 0);
    for (uint32_t round = 0; round < 5; round++) {
        for (uint32_t i = 0; i < geometry.ring_capacity; i++) {
            message.chunk = round * 100 + i;
            CHECK(pcc_ring_push(&producer.to_daemon, &message) == 0);
        }
        CHECK(pcc_ring_push(&producer.to_daemon, &message) == -ENOBUFS);
        for (uint32_t i = 0; i < geometry.ring_capacity; i++) {
            CHECK(pcc_ring_pop(&consumer.to_daemon, &message) == 1);
            CHECK(message.chunk == round * 100 + i);
        }
        CHECK(pcc_ring_pop(&consumer.to_daemon, &message) == 0);
    }
    /* Indices that no honest peer publishes. */
    atomic_fetch_add(&consumer.page->to_daemon.tail, geometry.ring_capacity + 1);
    CHECK(pcc_ring_pop(&consumer.to_daemon, &message) == -PCC_E_BAD_PEER);
    atomic_fetch_add(&consumer.page->to_client.head, 1);
    CHECK(pcc_ring_push(&consumer.to_client, &message) == -PCC_E_BAD_PEER);
    CHECK(munmap(bytes, geometry.page_bytes) == 0 && close(fd) == 0);
}

static void test_pool(void)
{
    struct pcc_pool *pool;
    struct pcc_segment first, second;
    uint64_t budget, used;

    CHECK(pcc_pool_open(8u << 20, &pool) == 0);
    CHECK(pcc_pool_take(pool, 5u << 20, "", &first) == 0);
    CHECK(pcc_pool_take(pool, 4u << 20, "", &second) == -PCC_E_NO_MEMORY);
    CHECK(pcc_pool_take(pool, 3u << 20, "", &second) == 0);
    pcc_pool_usage(pool, &budget, &used);
    CHECK(budget == 8u << 20 && used == 8u << 20);
    CHECK((uintptr_t)first.bytes % PCC_IO_ALIGN == 0 && first.bytes[(5u << 20) - 1] == 0);
    /* Sealed: neither side can truncate the pages while the other one uses them. */
    CHECK(ftruncate(first.fd, 0) != 0 && ftruncate(first.fd, 16u << 20) != 0);
    pcc_pool_return(pool, "", &first);
    pcc_pool_usage(pool, &budget, &used);
    CHECK(used == 3u << 20);
    pcc_pool_return(pool, "", &second);
    pcc_pool_close(pool);
}

/* Streamed in any pieces and in one go: the same as what the volume format says. */
static void test_hash(void)
{
    static uint8_t bytes[20000];
    struct pcc_hash hash;

    for (uint32_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)(i * i >> 3);
    for (uint32_t length = 0; length < sizeof(bytes); length += 1 + length / 7) {
        const uint64_t expected = pcc_hash_bytes(bytes, length);
        CHECK(pcc_hash_bytes(bytes, length) == expected);
        pcc_hash_start(&hash);
        pcc_hash_add(&hash, bytes, length / 3);
        pcc_hash_add(&hash, bytes + length / 3, length - length / 3);
        CHECK(pcc_hash_end(&hash) == expected);
    }
}

static void test_events(void)
{
    struct pcc_events *events;
    struct pcc_event event = {0}, taken[4];

    CHECK(pcc_events_open(3, &events) == -EINVAL);
    CHECK(pcc_events_open(8, &events) == 0);
    struct pollfd readable = {.fd = pcc_events_fd(events), .events = POLLIN};
    CHECK(poll(&readable, 1, 0) == 0);
    for (uint64_t round = 0; round < 5; round++) {
        for (event.id = 0; event.id < 6; event.id++)
            pcc_events_put(events, &event);
        CHECK(poll(&readable, 1, 0) == 1);
        CHECK(pcc_events_take(events, taken, 4) == 4 && taken[3].id == 3);
        CHECK(poll(&readable, 1, 0) == 1); /* something is left */
        CHECK(pcc_events_take(events, taken, 4) == 2 && taken[1].id == 5);
        CHECK(poll(&readable, 1, 0) == 0);
    }
    pcc_events_close(events);
}

int main(void)
{
    RUN(test_page);
    RUN(test_an_outcome_has_its_own_reason);
    RUN(test_rings);
    RUN(test_pool);
    RUN(test_hash);
    RUN(test_events);
    return 0;
}
