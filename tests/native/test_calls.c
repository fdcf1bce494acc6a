/* The system calls on which durability depends, in their order. tests/crash enumerates what is
 * above them on a disk that keeps its promises; this test checks that the core asks for those
 * promises. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "disk/pcc_save.h"
#include "volume_fixture.h"
#include "volume_open.h"

#define CHUNK 16384u

/* A letter for each call:
 *   x open, to make it; it must not be there     a fallocate     n renameat2
 *   r pread     w pwrite     d pwritev2 with RWF_DSYNC     u pwritev2 without
 *   f fdatasync     s fsync of a file     S fsync of a directory */
static char calls[256];
static size_t call_count;
static bool no_dsync; /* a kernel without the flag */

static void call(char letter)
{
    CHECK(call_count + 1 < sizeof(calls));
    calls[call_count++] = letter;
    calls[call_count] = '\0';
}

static void expect(const char *expected)
{
    if (strcmp(calls, expected) != 0)
        printf("  called %s, not %s\n", calls, expected);
    CHECK(strcmp(calls, expected) == 0);
    call_count = 0;
    calls[0] = '\0';
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __real_fallocate(int fd, int mode, off_t offset, off_t length);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t length);
int __real_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);
int __wrap_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags);
ssize_t __real_pread(int fd, void *bytes, size_t length, off_t offset);
ssize_t __wrap_pread(int fd, void *bytes, size_t length, off_t offset);
ssize_t __real_pwrite(int fd, const void *bytes, size_t length, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *bytes, size_t length, off_t offset);
ssize_t __real_pwritev2(int fd, const struct iovec *vectors, int count, off_t offset, int flags);
ssize_t __wrap_pwritev2(int fd, const struct iovec *vectors, int count, off_t offset, int flags);
int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);
int __real_fsync(int fd);
int __wrap_fsync(int fd);

int __wrap_open(const char *path, int flags, ...)
{
    if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL))
        call('x');
    return __real_open(path, flags, 0600);
}

int __wrap_fallocate(int fd, int mode, off_t offset, off_t length)
{
    call('a');
    return __real_fallocate(fd, mode, offset, length);
}

int __wrap_renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
    CHECK(flags == RENAME_NOREPLACE);
    call('n');
    return __real_renameat2(from_fd, from, to_fd, to, flags);
}

ssize_t __wrap_pread(int fd, void *bytes, size_t length, off_t offset)
{
    if (call_count == 0 || calls[call_count - 1] != 'r') /* however many */
        call('r');
    return __real_pread(fd, bytes, length, offset);
}

ssize_t __wrap_pwrite(int fd, const void *bytes, size_t length, off_t offset)
{
    call('w');
    return __real_pwrite(fd, bytes, length, offset);
}

ssize_t __wrap_pwritev2(int fd, const struct iovec *vectors, int count, off_t offset, int flags)
{
    if (no_dsync) {
        errno = EOPNOTSUPP;
        return -1;
    }
    call(flags == RWF_DSYNC ? 'd' : 'u');
    const ssize_t moved = __real_pwritev2(fd, vectors, count, offset, flags);
    /* qemu's user mode lacks it; here only the call counts. */
    return moved < 0 && errno == EOPNOTSUPP ? pwritev(fd, vectors, count, offset) : moved;
}

int __wrap_fdatasync(int fd)
{
    call('f');
    return __real_fdatasync(fd);
}

int __wrap_fsync(int fd)
{
    struct stat about;

    CHECK(fstat(fd, &about) == 0);
    call(S_ISDIR(about.st_mode) ? 'S' : 's');
    return __real_fsync(fd);
}

static void on_ended(void *owner, const struct pcc_save_result *result)
{
    CHECK_EQUAL(result->end, PCC_SAVE_DURABLE);
    *(bool *)owner = true;
}

/* Two chunks and a little. */
static void save(struct pcc_volume *volume)
{
    static _Alignas(PCC_IO_ALIGN) uint8_t bytes[3 * CHUNK];
    static const struct pcc_save_events events = {.ended = on_ended};
    bool ended = false;
    const struct pcc_saver_spec spec = {
        .lanes = 1, .chunk_bytes = CHUNK, .events = &events, .owner = &ended};
    const struct pcc_save_request request = {
        .tag = 1, .step = 1, .world_size = 1, .payload_bytes = 2 * CHUNK + 5};
    struct pcc_saver *saver;
    struct pcc_save *begun;
    uint64_t sequence;

    CHECK_EQUAL(pcc_saver_open(volume, &spec, &saver), 0);
    CHECK_EQUAL(pcc_save_begin(saver, &request, &begun, &sequence), 0);
    for (uint32_t i = 0; i < 3; i++) {
        const struct pcc_chunk chunk = {.bytes = bytes + i * CHUNK,
                                        .payload_offset_bytes = i * CHUNK,
                                        .length_bytes = i < 2 ? CHUNK : 5,
                                        .index = i};
        CHECK_EQUAL(pcc_save_chunk(begun, &chunk), 0);
    }
    CHECK_EQUAL(pcc_save_seal(begun), 0);
    while (pcc_saver_step(saver, 0) == 0)
        ;
    CHECK(ended);
    pcc_saver_close(saver);
}

static void test_the_order_of_calls(void)
{
    char directory[64], path[96];
    const struct pcc_volume_spec spec = spec_of(4, 2);
    struct pcc_volume *volume, *reader;
    const char *base = getenv("TMPDIR");

    (void)snprintf(directory, sizeof(directory), "%s/pcc-calls-XXXXXX",
                   base != NULL && strlen(base) < 40 ? base : "/tmp");
    CHECK(mkdtemp(directory) != NULL);
    (void)snprintf(path, sizeof(path), "%s/volume", directory);
    /* The room, then four record places, the size and the extents; then the name, and its
     * directory. */
    CHECK_EQUAL(pcc_volume_create(path, &spec, true), 0);
    expect("xaddddsnS");
    CHECK_EQUAL(pcc_volume_create(path, &spec, true), -EEXIST);
    expect("");
    /* What another writer has left is flushed before anything is read. */
    CHECK_EQUAL(volume_open(path, false, 0, &reader), 0);
    expect("sr");
    pcc_volume_close(reader);
    CHECK_EQUAL(volume_open(path, true, 0, &volume), 0);
    expect("srdd");
    /* Data and manifest; flush; the record twice. */
    save(volume);
    expect("wwwwfdd");
    CHECK_EQUAL(pcc_volume_flag(volume, 1, PCC_SLOT_PROTECTED, 0, true), 0);
    expect("dd");
    /* An error that the disk reports once must reach the writer. */
    CHECK_EQUAL(volume_open(path, false, 0, &reader), 0);
    expect("r");
    pcc_volume_close(reader);
    no_dsync = true;
    save(volume);
    expect("wwwwfwfwf");
    no_dsync = false;
    CHECK_EQUAL(volume_open(path, true, 0, &reader), -PCC_E_LOCKED);
    pcc_volume_close(volume);
    expect("");
    CHECK(unlink(path) == 0 && rmdir(directory) == 0);
}

int main(void)
{
    RUN(test_the_order_of_calls);
    return 0;
}
