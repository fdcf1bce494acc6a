/* A real file, an engine on it, and threads that write and read at once. */
#pragma once

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/pcc_thread.h"
#include "volume_fixture.h"

#define MIB (1ull << 20)
#define FILE_BYTES (24 * MIB)
#define THREADS 12u

static char directory[] = "/tmp/pcc-engines-XXXXXX";
static char path[64]; /* of the one file in it */

static inline uint8_t *memory(uint64_t length, uint64_t seed)
{
    uint8_t *bytes = aligned_alloc(4096, length);
    CHECK(bytes);
    for (uint64_t at = 0; at < length; at += 8) {
        const uint64_t word = (seed + at) * 0x9e3779b97f4a7c15ull;
        memcpy(bytes + at, &word, 8);
    }
    return bytes;
}

static inline int fresh_file(void)
{
    const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && fallocate(fd, 0, 0, (off_t)FILE_BYTES) == 0);
    return fd;
}

static inline struct pcc_io_options options_of(enum pcc_io_engine engine)
{
    return (struct pcc_io_options){
        .engine = engine, .strict = true, .allow_buffered = true, .pmem_anywhere = true};
}

/* NULL where the engine is not available. */
static inline struct pcc_io *opened_engine(enum pcc_io_engine engine)
{
    const struct pcc_io_options options = options_of(engine);
    struct pcc_io *io;
    const int result = pcc_io_open(fresh_file(), &options, &io);

    if (result == -PCC_E_UNSUPPORTED) {
        printf("  %s is not to be had here\n", pcc_io_words_of(engine)->name);
        return NULL;
    }
    CHECK_EQUAL(result, 0);
    CHECK_EQUAL(strcmp(io->name, pcc_io_words_of(engine)->name), 0);
    CHECK_EQUAL(io->size_bytes, FILE_BYTES);
    return io;
}

static inline void check_file_holds(const uint8_t *bytes, uint64_t length, uint64_t offset)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint8_t *back = malloc(length);

    CHECK(fd >= 0 && back);
    CHECK_EQUAL(pread(fd, back, length, (off_t)offset), (long long)length);
    CHECK(memcmp(back, bytes, length) == 0);
    free(back);
    (void)close(fd);
}

struct worker {
    struct pcc_io *io;
    uint32_t number;
    pthread_t thread;
};

static inline void *write_and_read(void *argument)
{
    const struct worker *worker = argument;
    const uint64_t length = FILE_BYTES / THREADS;
    uint8_t *bytes = memory(length, worker->number), *back = memory(length, 0);

    for (uint32_t round = 0; round < 3; round++) {
        CHECK_EQUAL(pcc_io_write_all(worker->io, bytes, length, worker->number * length), 0);
        CHECK_EQUAL(pcc_io_flush(worker->io), 0);
        CHECK_EQUAL(pcc_io_read_all(worker->io, back, length, worker->number * length), 0);
        CHECK(memcmp(bytes, back, length) == 0);
    }
    free(bytes);
    free(back);
    return NULL;
}

static inline void make_directory(void)
{
    CHECK(mkdtemp(directory));
    (void)snprintf(path, sizeof path, "%s/file", directory);
}

static inline void remove_directory(void)
{
    (void)unlink(path);
    CHECK_EQUAL(rmdir(directory), 0); /* nothing else was left there */
}
