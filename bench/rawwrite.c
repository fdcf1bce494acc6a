/* The plain C direct writer and reader that the benches hold as the limit beside fio.
 *
 *   rawwrite write|read FILE BYTES THREADS BUFFER_BYTES buffers|kept|memfd|copied
 *
 * FILE exists and is BYTES long (a multiple of BUFFER_BYTES). THREADS threads take buffers of the
 * file in turn with O_DIRECT; a write ends with one fdatasync. `buffers`: each thread re-uses one
 * buffer, as fio does; `kept`: the bytes come from (go to) memory as large as the file, as a
 * checkpoint's do; `memfd`: such memory is a memfd of 4 KiB pages; `copied`: a thread also copies
 * what it has read to its place in memory as large as the file, as a restore does. Memory is
 * touched before the clock starts. Prints the seconds; with `kept` "ready" first, and then the
 * seconds of another pass from the same memory for each byte of input. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { THREADS_MAX = 64, HUGE_PAGE = 2 << 20 };

static struct {
    int fd;
    int writing;
    uint64_t bytes;
    uint64_t buffer_bytes;
    uint8_t *whole;  /* NULL: a buffer per thread */
    uint8_t *target; /* NULL: nothing is copied */
    atomic_uint_fast64_t next;
    atomic_int error;
} job;

static void die(const char *what)
{
    fprintf(stderr, "rawwrite: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint8_t *memory(uint64_t bytes, int use_memfd)
{
    int fd = -1;
    if (use_memfd) {
        fd = memfd_create("rawwrite", 0);
        if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
            die("memfd");
    }
    uint64_t room = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE + HUGE_PAGE;
    uint8_t *at = mmap(NULL, use_memfd ? bytes : room, PROT_READ | PROT_WRITE,
                       use_memfd ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    if (at == MAP_FAILED)
        die("mmap");
    if (!use_memfd) { /* huge pages, where they can be had, are the faster source by far */
        at = (uint8_t *)(((uintptr_t)at + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
        (void)madvise(at, room - HUGE_PAGE, MADV_HUGEPAGE);
    }
    uint64_t seed = 0x9E3779B97F4A7C15u; /* no storage layer gets zeroes to leave out */
    for (uint64_t i = 0; i + 8 <= bytes; i += 8) {
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        memcpy(at + i, &seed, 8);
    }
    return at;
}

static void *worker(void *buffer)
{
    for (;;) {
        uint64_t offset = atomic_fetch_add(&job.next, job.buffer_bytes);
        if (offset >= job.bytes || atomic_load(&job.error))
            return NULL;
        uint8_t *at = job.whole ? job.whole + offset : buffer;
        for (uint64_t done = 0; done < job.buffer_bytes;) {
            uint64_t left = job.buffer_bytes - done;
            ssize_t moved = job.writing ? pwrite(job.fd, at + done, left, (off_t)(offset + done))
                                        : pread(job.fd, at + done, left, (off_t)(offset + done));
            if (moved <= 0 && errno != EINTR) {
                atomic_store(&job.error, moved < 0 ? errno : EIO);
                return NULL;
            }
            done += moved > 0 ? (uint64_t)moved : 0;
        }
        if (job.target)
            memcpy(job.target + offset, at, job.buffer_bytes);
    }
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double pass(int threads, uint8_t *const *buffers)
{
    pthread_t ids[THREADS_MAX];
    double start = now_s();

    atomic_store(&job.next, 0);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&ids[i], NULL, worker, buffers[i]) != 0)
            die("pthread_create");
    for (int i = 0; i < threads; i++)
        pthread_join(ids[i], NULL);
    if ((errno = atomic_load(&job.error)) || (job.writing && fdatasync(job.fd) != 0))
        die(job.writing ? "write" : "read");
    return now_s() - start;
}

static void print_line(const char *line)
{
    puts(line);
    fflush(stdout);
}

int main(int count, char **words)
{
    if (count != 7) {
        fputs("usage: rawwrite write|read FILE BYTES THREADS BUFFER_BYTES "
              "buffers|kept|memfd|copied\n",
              stderr);
        return 2;
    }
    int threads = atoi(words[4]);
    job.writing = strcmp(words[1], "write") == 0;
    job.bytes = strtoull(words[3], NULL, 10);
    job.buffer_bytes = strtoull(words[5], NULL, 10);
    if (threads < 1 || threads > THREADS_MAX || !job.buffer_bytes || job.bytes % job.buffer_bytes)
        return 2;
    job.fd = open(words[2], O_RDWR | O_DIRECT);
    if (job.fd < 0)
        die(words[2]);
    int in_memfd = strcmp(words[6], "memfd") == 0, kept = strcmp(words[6], "kept") == 0;
    if (in_memfd || kept)
        job.whole = memory(job.bytes, in_memfd);
    if (strcmp(words[6], "copied") == 0)
        job.target = memory(job.bytes, 0);
    uint8_t *buffers[THREADS_MAX] = {0};
    for (int i = 0; i < threads && !job.whole; i++)
        buffers[i] = memory(job.buffer_bytes, 0);

    if (kept)
        print_line("ready");
    while (!kept || getchar() != EOF) {
        char line[32];
        snprintf(line, sizeof line, "%.6f", pass(threads, buffers));
        print_line(line);
        if (!kept)
            break;
    }
    return 0;
}
