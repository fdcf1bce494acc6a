/* Whole transfers over engines that move less than asked, and the engine that limits bandwidth. */
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "volume_fixture.h"

static void test_short_and_interrupted_transfers_resume(void)
{
    struct memory_io *media = formatted(4, 2);
    uint8_t *buffer = aligned_alloc(4096, 5 * 4096), *back = aligned_alloc(4096, 5 * 4096);

    CHECK(buffer && back);
    memset(buffer, 0x5a, 5 * 4096);
    media->short_every = 6000;
    media->interrupts = 3;
    CHECK_EQUAL(pcc_io_write_all(&media->io, buffer, 5 * 4096, 32768), 0);
    media->interrupts = 3;
    CHECK_EQUAL(pcc_io_read_all(&media->io, back, 5 * 4096, 32768), 0);
    CHECK(memcmp(buffer, back, 5 * 4096) == 0);
    media->interrupts = -1;
    CHECK_EQUAL(pcc_io_write_all(&media->io, buffer, 4096, 32768), -EINTR);
    media->interrupts = 0;
    media->short_every = 512;
    CHECK_EQUAL(pcc_io_write_all(&media->io, buffer, 4096, 32768), -EIO);
    free(buffer);
    free(back);
    memory_free(media);
}

/* -- the throttle; time passes only while a thread waits for it -- */

#define SECOND 1000000000u

static uint64_t fake_now_ns; /* 0: the machine's */
static uint32_t waits;

uint64_t __real_pcc_now_ns(void);
uint64_t __wrap_pcc_now_ns(void);
uint64_t __wrap_pcc_now_ns(void)
{
    const uint64_t now = __atomic_load_n(&fake_now_ns, __ATOMIC_ACQUIRE);

    return now != 0 ? now : __real_pcc_now_ns();
}

int __real_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock,
                                  const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock,
                                  const struct timespec *until);
int __wrap_pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *lock,
                                  const struct timespec *until)
{
    (void)__atomic_fetch_add(&waits, 1, __ATOMIC_RELEASE);
    if (fake_now_ns == 0) /* only a broadcast ends it */
        return pthread_cond_wait(condition, lock);
    fake_now_ns = (uint64_t)until->tv_sec * SECOND + (uint64_t)until->tv_nsec;
    return ETIMEDOUT;
}

#define MIB (1u << 20)

struct throttled {
    struct memory_io *media;
    struct pcc_io *io;
    uint8_t *buffer;
};

static struct throttled throttled(uint64_t bytes_per_second)
{
    struct throttled t = {.media = memory_new(MIB), .buffer = aligned_alloc(4096, MIB)};

    CHECK(t.buffer);
    memset(t.buffer, 0x33, MIB);
    waits = 0;
    CHECK_EQUAL(pcc_io_throttle_open(&t.media->io, bytes_per_second, &t.io), 0);
    CHECK_EQUAL(pcc_io_limit_of(t.io), bytes_per_second);
    CHECK_EQUAL(t.io->size_bytes, MIB);
    return t;
}

static void throttled_close(struct throttled *t)
{
    pcc_io_close(t->io);
    free(t->buffer);
    memory_free(t->media);
    fake_now_ns = 0;
}

/* What one MiB waits, in milliseconds. */
static uint64_t took_ms(struct throttled *t)
{
    const uint64_t before = fake_now_ns;

    CHECK_EQUAL(pcc_io_write_all(t->io, t->buffer, MIB, 0), 0);
    CHECK(memcmp(t->media->bytes, t->buffer, MIB) == 0);
    return (fake_now_ns - before) / 1000000;
}

static void test_the_throttle_delays_but_changes_nothing(void)
{
    fake_now_ns = SECOND;
    struct throttled t = throttled(10 * MIB);

    CHECK_EQUAL(took_ms(&t), 100);
    CHECK_EQUAL(took_ms(&t), 100);
    fake_now_ns += 10 * SECOND; /* what it may catch up on is bounded */
    CHECK_EQUAL(took_ms(&t), 80);
    CHECK_EQUAL(took_ms(&t), 100);
    memset(t.buffer, 0, MIB);
    CHECK_EQUAL(pcc_io_read_all(t.io, t.buffer, MIB, 0), 0);
    CHECK_EQUAL(t.buffer[MIB - 1], 0x33);
    CHECK_EQUAL(pcc_io_write_durable_all(t.io, t.buffer, MIB, 0), 0);
    CHECK_EQUAL(waits, 6);
    t.media->fail_flushes = 1;
    CHECK_EQUAL(pcc_io_flush(t.io), -EIO);
    throttled_close(&t);
}

static void test_another_limit_counts_at_once(void)
{
    fake_now_ns = SECOND;
    struct throttled t = throttled(0);

    CHECK_EQUAL(took_ms(&t), 0);
    CHECK_EQUAL(waits, 0); /* not even the lock */
    pcc_io_limit(t.io, MIB);
    CHECK_EQUAL(pcc_io_limit_of(t.io), MIB);
    CHECK_EQUAL(took_ms(&t), 1000);
    pcc_io_limit(t.io, 4 * MIB);
    CHECK_EQUAL(took_ms(&t), 250);
    pcc_io_limit(t.io, 0);
    CHECK_EQUAL(took_ms(&t), 0);
    fake_now_ns += 3600 * SECOND;
    pcc_io_limit(t.io, 2 * MIB); /* the hour before is no credit */
    CHECK_EQUAL(took_ms(&t), 500);
    throttled_close(&t);
}

static void *write_slowly(void *argument)
{
    const struct throttled *t = argument;

    CHECK_EQUAL(pcc_io_write_all(t->io, t->buffer, MIB, 0), 0);
    return NULL;
}

/* With time as it is: at a byte per second they would wait twelve days. */
static void test_who_waits_hears_of_it(void)
{
    struct throttled t = throttled(1);
    pthread_t threads[3];

    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, write_slowly, &t), 0);
    while (__atomic_load_n(&waits, __ATOMIC_ACQUIRE) < 3)
        (void)usleep(500);
    pcc_io_limit(t.io, 0);
    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    throttled_close(&t);
}

int main(void)
{
    RUN(test_short_and_interrupted_transfers_resume);
    RUN(test_the_throttle_delays_but_changes_nothing);
    RUN(test_another_limit_counts_at_once);
    RUN(test_who_waits_hears_of_it);
    return 0;
}
