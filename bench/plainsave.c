/* plainsave FILE BYTES: the least that a checkpoint does. One thread copies BYTES into memory as
 * large as the file, and checksums each byte; two others write what is copied with O_DIRECT, as it
 * comes; one fdatasync ends it. The source is a GiB at most, and is read again from its beginning:
 * no cache holds it. Prints "ready", and then for each byte of input the seconds of one pass and
 * its CPU seconds. FILE exists and is BYTES long, a multiple of 4 MiB. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/pcc_copy.h"
#include "base/pcc_hash.h"
#include "hugememory.h"

enum { WRITERS = 2, BLOCK_BYTES = 1 << 20, BUFFER_BYTES = 4 << 20 };
#define SOURCE_BYTES_MAX (1ull << 30)

static struct {
    int fd;
    uint64_t bytes;
    uint64_t source_bytes;
    const uint8_t *source;
    uint8_t *pool;
    uint64_t *checksums;
    pthread_mutex_t lock;
    pthread_cond_t grown;
    uint64_t copied;  /* with the lock */
    uint64_t written; /* the next buffer's offset; with the lock */
    atomic_bool failed;
} job = {.lock = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER};

static void copy_all(void)
{
    for (uint64_t at = 0; at < job.bytes; at += BLOCK_BYTES) {
        const uint8_t *from = job.source + at % job.source_bytes;

        job.checksums[at / BLOCK_BYTES] = pcc_hash_bytes(from, BLOCK_BYTES);
        pcc_copy_past_cache(job.pool + at, from, BLOCK_BYTES);
        if ((at + BLOCK_BYTES) % BUFFER_BYTES != 0)
            continue;
        (void)pthread_mutex_lock(&job.lock);
        job.copied = at + BLOCK_BYTES;
        (void)pthread_cond_signal(&job.grown);
        (void)pthread_mutex_unlock(&job.lock);
    }
}

static void *writer_run(void *unused)
{
    (void)unused;
    for (;;) {
        (void)pthread_mutex_lock(&job.lock);
        const uint64_t offset = job.written;
        job.written += BUFFER_BYTES;
        while (offset < job.bytes && job.copied < offset + BUFFER_BYTES)
            (void)pthread_cond_wait(&job.grown, &job.lock);
        (void)pthread_cond_signal(&job.grown);
        (void)pthread_mutex_unlock(&job.lock);
        if (offset >= job.bytes)
            return NULL;
        if (pwrite(job.fd, job.pool + offset, BUFFER_BYTES, (off_t)offset) != BUFFER_BYTES)
            atomic_store(&job.failed, true);
    }
}

static double cpu_s(void)
{
    struct rusage used;

    (void)getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

/* False when a write failed. */
static bool pass(void)
{
    pthread_t writers[WRITERS];
    const double cpu_before_s = cpu_s();
    const uint64_t start_ns = pcc_now_ns();

    job.copied = job.written = 0;
    for (int i = 0; i < WRITERS; i++)
        if (pthread_create(&writers[i], NULL, writer_run, NULL) != 0)
            return false;
    copy_all();
    for (int i = 0; i < WRITERS; i++)
        (void)pthread_join(writers[i], NULL);
    if (fdatasync(job.fd) != 0 || atomic_load(&job.failed))
        return false;
    (void)printf("%.6f %.6f\n", (double)(pcc_now_ns() - start_ns) * 1e-9, cpu_s() - cpu_before_s);
    (void)fflush(stdout);
    return true;
}

int main(int argc, char **argv)
{
    job.bytes = argc == 3 ? strtoull(argv[2], NULL, 10) : 0;
    if (job.bytes == 0 || job.bytes % BUFFER_BYTES != 0) {
        (void)fputs("usage: plainsave FILE BYTES, a multiple of 4 MiB\n", stderr);
        return 2;
    }
    job.source_bytes = job.bytes < SOURCE_BYTES_MAX ? job.bytes : SOURCE_BYTES_MAX;
    job.fd = open(argv[1], O_RDWR | O_DIRECT);
    uint8_t *source = aligned_alloc(2 << 20, job.source_bytes);
    job.pool = huge_memory(job.bytes);
    job.checksums = calloc(job.bytes / BLOCK_BYTES, sizeof *job.checksums);
    if (job.fd < 0 || source == NULL || job.pool == NULL || job.checksums == NULL) {
        perror("plainsave");
        return 1;
    }
    for (uint64_t at = 0; at < job.source_bytes; at += sizeof at) /* no two blocks are equal */
        memcpy(source + at, &at, sizeof at);
    job.source = source;
    (void)puts("ready");
    (void)fflush(stdout);
    while (getchar() != EOF)
        if (!pass()) {
            perror("plainsave");
            return 1;
        }
    return 0;
}
