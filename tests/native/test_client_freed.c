#include <sched.h>
/* Memory that the trainer frees while the client reads it: that snapshot is given up, with the
 * address, and the next one is whole. */
#include <errno.h>
#include <signal.h>

#include "client/pcc_client_private.h"
#include "client_fixture.h"

#define HOST_BYTES (4 * CHUNK)
#define WHOLE_BYTES (HOST_BYTES + 100u)

static const char tail[100] = "tail";

static uint8_t *source_make(void)
{
    uint8_t *bytes =
        mmap(NULL, HOST_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(bytes != MAP_FAILED);
    pattern(bytes, HOST_BYTES, 5);
    return bytes;
}

/* The kernel answers as for memory that was unmapped, but no other thread gets it meanwhile. */
static void unmap(uint8_t *bytes, uint64_t length)
{
    CHECK(mprotect(bytes, length, PROT_NONE) == 0);
}

static struct pcc_submission submission_of(const struct pcc_range *range)
{
    return (struct pcc_submission){.ranges = range,
                                   .range_count = 1,
                                   .tail = tail,
                                   .tail_bytes = sizeof(tail),
                                   .tail_offset_bytes = HOST_BYTES};
}

static void submit(struct daemon *d, uint64_t snapshot, const uint8_t *bytes)
{
    const struct pcc_range range = {(uintptr_t)bytes, 0, HOST_BYTES};
    const struct pcc_submission submission = submission_of(&range);

    CHECK(pcc_client_request(d->client, snapshot) == 0);
    CHECK(pcc_client_submit(d->client, snapshot, &submission) == 0);
    admit(d, snapshot);
}

static void given_up(struct daemon *d, uint64_t snapshot, const uint8_t *gone)
{
    CHECK(pcc_client_wait(d->client, snapshot, PCC_WAIT_COPIED, soon()) == 0);
    CHECK(pcc_client_wait(d->client, snapshot, PCC_WAIT_READ, soon()) == 0);
    const struct pcc_client_state now = state_of(d, snapshot);
    CHECK_EQUAL(now.word, PCC_WORD_ABANDONED);
    CHECK_EQUAL(now.error, -EFAULT);
    CHECK(now.source_read && now.fault >= (uintptr_t)gone && now.fault < (uintptr_t)gone + 4096);
    CHECK(!pcc_client_abandon(d->client, snapshot));
}

static void whole(struct daemon *d, uint64_t snapshot)
{
    uint8_t *bytes = source_make();

    listen_to(d); /* what came before the fault */
    d->handed_bytes = 0;
    submit(d, snapshot, bytes);
    collect(d, WHOLE_BYTES);
    CHECK(memcmp(d->payload, bytes, HOST_BYTES) == 0);
    CHECK(state_of(d, snapshot).fault == 0);
    CHECK(munmap(bytes, HOST_BYTES) == 0);
}

/* Of every fourth page: in the first chunk and the last, at the edges of blocks and pieces. */
static void freed_pages_fail_the_snapshot(void)
{
    struct daemon d;
    uint64_t snapshot = 0;

    daemon_open(&d, 8);
    for (uint64_t page = 0; page < HOST_BYTES; page += 4 * 4096) {
        uint8_t *bytes = source_make();
        unmap(bytes + page, 4096);
        submit(&d, ++snapshot, bytes);
        given_up(&d, snapshot, bytes + page);
        whole(&d, ++snapshot);
        CHECK(munmap(bytes, HOST_BYTES) == 0);
    }
    daemon_close(&d);
}

static void test_freed_pages_fail_the_snapshot(void)
{
    freed_pages_fail_the_snapshot();
}

static void test_all_of_it_is_freed_while_it_is_read(void)
{
    struct daemon d;
    uint8_t *bytes = source_make();

    daemon_open(&d, 1);
    d.retiring = true; /* one chunk, and no more */
    submit(&d, 1, bytes);
    collect(&d, CHUNK);
    unmap(bytes, HOST_BYTES);
    free_chunks(&d, 0, 1);
    given_up(&d, 1, bytes + CHUNK);
    CHECK(munmap(bytes, HOST_BYTES) == 0);
    d.retiring = false;
    free_chunks(&d, 1, 3);
    whole(&d, 2);
    daemon_close(&d);
}

/* A thread that waits lets helpers read, too. */
static void *wait_for_1(void *client)
{
    CHECK(pcc_client_wait(client, 1, PCC_WAIT_COPIED, soon()) == 0);
    return NULL;
}

static bool is_waited_for(struct pcc_client *client)
{
    (void)pthread_mutex_lock(&client->lock);
    const bool waited_for = client->waiters > 0;
    (void)pthread_mutex_unlock(&client->lock);
    return waited_for;
}

static void test_helpers_meet_freed_memory(void)
{
    struct daemon d;
    pthread_t thread;
    uint8_t *bytes = source_make();
    const struct pcc_range range = {(uintptr_t)bytes, 0, HOST_BYTES};
    const struct pcc_submission submission = submission_of(&range);

    daemon_open(&d, 8);
    d.client->crew.cpus = 8;
    unmap(bytes + CHUNK, 4096);
    CHECK(pcc_client_request(d.client, 1) == 0);
    CHECK(pcc_client_submit(d.client, 1, &submission) == 0);
    CHECK(pthread_create(&thread, NULL, wait_for_1, d.client) == 0);
    UNTIL(is_waited_for(d.client));
    admit(&d, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    given_up(&d, 1, bytes + CHUNK);
    CHECK(munmap(bytes, HOST_BYTES) == 0);
    daemon_close(&d);
}

/* Frozen memory that is only read, for its checksums. */
static void test_offered_memory_is_freed(void)
{
    struct daemon d;
    uint8_t *bytes = source_make();
    const struct pcc_range range = {(uintptr_t)bytes, 0, HOST_BYTES};
    struct pcc_submission submission = submission_of(&range);

    daemon_open(&d, 8);
    submission.offered_bytes = HOST_BYTES;
    unmap(bytes + CHUNK + 5 * 4096, 4096);
    CHECK(pcc_client_request(d.client, 1) == 0);
    atomic_store(&pcc_page_snapshot(&d.view, 1)->base, 1);
    CHECK(pcc_client_submit(d.client, 1, &submission) == 0);
    struct pcc_message offer;
    while (pcc_ring_pop(&d.view.to_daemon, &offer) == 0)
        (void)sched_yield();
    CHECK(offer.kind == PCC_MSG_REQUEST);
    admit(&d, 1);
    given_up(&d, 1, bytes + CHUNK + 5 * 4096);
    CHECK(pcc_ring_pop(&d.view.to_daemon, &offer) == 1 && offer.kind == PCC_MSG_OFFER);
    CHECK(offer.offset_bytes == 0 && pcc_ring_pop(&d.view.to_daemon, &offer) == 0);
    whole(&d, 2);
    CHECK(munmap(bytes, HOST_BYTES) == 0);
    daemon_close(&d);
}

/* Volatile memory is copied in the call. */
static void test_memory_to_copy_at_once_is_freed(void)
{
    struct daemon d;
    uint8_t *bytes = source_make();
    const struct pcc_range range = {(uintptr_t)bytes, 0, HOST_BYTES};
    struct pcc_submission submission = submission_of(&range);

    daemon_open(&d, 8);
    submission.inline_ranges = &range;
    submission.inline_count = 1;
    submission.range_count = 0;
    unmap(bytes + 3 * CHUNK, 4096);
    CHECK(pcc_client_request(d.client, 1) == 0);
    CHECK_EQUAL(pcc_client_submit(d.client, 1, &submission), -EFAULT);
    CHECK(state_of(&d, 1).fault == (uintptr_t)bytes + 3 * CHUNK);
    CHECK(pcc_client_abandon(d.client, 1));
    whole(&d, 2);
    CHECK(munmap(bytes, HOST_BYTES) == 0);
    daemon_close(&d);
}

static void fail(int number)
{
    (void)number;
    _exit(3);
}

/* Another library handles the signals now: the kernel reads, and nothing else changes. */
static void test_another_handler_has_the_signals(void)
{
    struct sigaction ours;

    CHECK(sigaction(SIGSEGV, NULL, &ours) == 0);
    (void)signal(SIGSEGV, fail);
    freed_pages_fail_the_snapshot();
    test_offered_memory_is_freed();
    test_memory_to_copy_at_once_is_freed();
    CHECK(sigaction(SIGSEGV, &ours, NULL) == 0);
}

int main(void)
{
    standin_open();
    RUN(test_freed_pages_fail_the_snapshot);
    RUN(test_all_of_it_is_freed_while_it_is_read);
    RUN(test_helpers_meet_freed_memory);
    RUN(test_offered_memory_is_freed);
    RUN(test_memory_to_copy_at_once_is_freed);
    RUN(test_another_handler_has_the_signals);
    standin_close();
    return 0;
}
