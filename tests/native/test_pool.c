/* New memory of the pool: every page is there before anybody gets it, and several threads share the
 * work. */
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/pcc_map.h"
#include "check.h"
#include "pool/pcc_pool.h"

#define MEMORY_BYTES (128ull << 20) /* a few pieces, the last one short */
#define LENGTH_BYTES (MEMORY_BYTES - 12288)
#define PIECE_BYTES_MIN (1ull << 20) /* less is not a piece */

static uint32_t meet;       /* threads that wait for each other in their first piece */
static _Atomic uint32_t in; /* of them, those that have come */
static int fail_code;       /* of the call for a piece, */
static _Atomic int fail_in; /* after so many */

int __real_madvise(void *bytes, size_t length_bytes, int advice);
int __wrap_madvise(void *bytes, size_t length_bytes, int advice);

int __wrap_madvise(void *bytes, size_t length_bytes, int advice)
{
    static _Thread_local bool met;

    if (advice != MADV_POPULATE_WRITE || length_bytes < PIECE_BYTES_MIN)
        return __real_madvise(bytes, length_bytes, advice);
    if (fail_code != 0 && atomic_fetch_sub(&fail_in, 1) <= 0) {
        errno = fail_code;
        return -1;
    }
    if (!met)
        (void)atomic_fetch_add(&in, 1);
    met = true;
    while (atomic_load(&in) < meet)
        (void)sched_yield();
    return __real_madvise(bytes, length_bytes, advice);
}

static void memory_check(void)
{
    static unsigned char resident[MEMORY_BYTES / 4096];
    int fd;
    void *bytes;

    CHECK(pcc_memfd_make("test-pool", LENGTH_BYTES, &fd, &bytes) == 0);
    CHECK(mincore(bytes, LENGTH_BYTES, resident) == 0);
    for (size_t i = 0; i < LENGTH_BYTES / (size_t)sysconf(_SC_PAGESIZE); i++)
        CHECK((resident[i] & 1) != 0);
    CHECK(munmap(bytes, LENGTH_BYTES) == 0 && close(fd) == 0);
}

/* They meet in their first piece: one thread alone would wait for ever. */
static void test_several_threads_touch(void)
{
    cpu_set_t cpus;

    CHECK(sched_getaffinity(0, sizeof(cpus), &cpus) == 0);
    meet = CPU_COUNT(&cpus) > 1 ? 2 : 1;
    memory_check();
    CHECK(atomic_load(&in) >= meet);
    meet = 0;
}

/* What one of the threads is refused is the answer, and nothing is left. */
static void test_too_little_memory(void)
{
    const uint32_t before = check_mappings("memfd:test-pool");
    int fd;
    void *bytes;

    fail_code = ENOMEM;
    for (int piece = 0; piece < 4; piece++) {
        atomic_store(&fail_in, piece);
        CHECK_EQUAL(pcc_memfd_make("test-pool", LENGTH_BYTES, &fd, &bytes), -ENOMEM);
    }
    fail_code = 0;
    CHECK_EQUAL(check_mappings("memfd:test-pool"), before);
}

/* Linux before 5.14 does not know the call. The memory is there nevertheless. */
static void test_old_kernel(void)
{
    fail_code = EINVAL;
    atomic_store(&fail_in, 0);
    memory_check();
    fail_code = 0;
}

int main(void)
{
    RUN(test_several_threads_touch);
    RUN(test_too_little_memory);
    RUN(test_old_kernel);
    return 0;
}
