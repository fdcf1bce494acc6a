/* Volumes as files: how one comes into being whole or not at all, and how one is opened. */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "disk/pcc_volume_private.h"

#define LOCK_TRIES 10

/* The directory's name ends before the last slash; "." when there is none. */
static int open_directory(const char *path)
{
    char directory[PATH_MAX];
    const char *slash = strrchr(path, '/');
    const size_t length = slash ? (size_t)(slash - path) : 0;

    if (length >= sizeof directory)
        return -ENAMETOOLONG;
    memcpy(directory, path, length);
    directory[length] = '\0';
    const char *name = !slash ? "." : length == 0 ? "/" : directory;
    const int fd = open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static int sync_directory(const char *path)
{
    const int fd = open_directory(path);

    if (fd < 0)
        return fd;
    const int result = fsync(fd) == 0 ? 0 : -errno;
    (void)close(fd);
    return result;
}

static int temporary_name(const char *path, char *out, size_t size)
{
    uint64_t random;

    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return -EIO;
    const int length = snprintf(out, size, "%s.%016llx.tmp", path, (unsigned long long)random);
    return length > 0 && (size_t)length < size ? 0 : -ENAMETOOLONG;
}

/* All room is taken now, so that a disk cannot fill up in mid-training. Takes nothing of fd. */
static int take_room_and_format(int fd, const struct pcc_volume_spec *spec, bool allow_buffered)
{
    const struct pcc_io_options options = {.allow_buffered = allow_buffered};
    struct pcc_geometry geometry;
    struct pcc_io *io;
    int result = pcc_geometry_plan(spec->payload_capacity_bytes, spec->slot_count,
                                   spec->block_bytes, spec->record_stride_bytes, &geometry);

    if (result != 0)
        return result;
    do {
        result = fallocate(fd, 0, 0, (off_t)geometry.volume_bytes) == 0 ? 0 : -errno;
    } while (result == -EINTR);
    if (result != 0)
        return result == -EOPNOTSUPP ? -PCC_E_UNSUPPORTED : result;
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return -errno;
    result = pcc_io_open(own, &options, &io);
    if (result != 0)
        return result;
    result = pcc_volume_format(io, spec);
    pcc_io_close(io);
    /* The size and the extents, too, not only the bytes. */
    if (result == 0 && fsync(fd) != 0)
        result = -errno;
    return result;
}

static int rename_without_replacing(const char *from, const char *to)
{
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS)
        return -errno;
    if (link(from, to) != 0)
        return -errno;
    (void)unlink(from); /* a left-over name ends in .tmp and is removed at the next start */
    return 0;
}

int pcc_volume_create(const char *path, const struct pcc_volume_spec *spec, bool allow_buffered)
{
    char temporary[PATH_MAX];
    int result = temporary_name(path, temporary, sizeof temporary);

    if (result != 0)
        return result;
    if (access(path, F_OK) == 0)
        return -EEXIST; /* before the room is taken; the rename decides */
    const int fd = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -errno;
    result = take_room_and_format(fd, spec, allow_buffered);
    (void)close(fd);
    if (result == 0)
        result = rename_without_replacing(temporary, path);
    if (result != 0) {
        (void)unlink(temporary);
        return result;
    }
    result = sync_directory(path);
    if (result != 0)
        (void)unlink(path); /* it is not used yet; a second try must not meet it */
    return result;
}

/* A reader that looks whether it is locked has it for a moment. */
static int lock(int fd)
{
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0)
            return 0;
        if (errno != EWOULDBLOCK)
            return -errno;
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return -PCC_E_LOCKED;
}

/* The kernel reports a failed write from its cache once, and the report must reach the writer. The
 * records of a writer are durable one by one: beside a writer there is nothing to sync. */
static bool has_writer(int fd)
{
    if (flock(fd, LOCK_SH | LOCK_NB) != 0)
        return errno == EWOULDBLOCK;
    (void)flock(fd, LOCK_UN);
    return false;
}

/* A copy of a volume has holes where the volume had only room (cp, tar): the room is taken again,
 * if there is as much. Otherwise the first write into a hole fails, and a restore still works. */
static void take_holes(int fd)
{
    struct stat file;
    struct statvfs disk;

    if (fstat(fd, &file) != 0 || fstatvfs(fd, &disk) != 0)
        return;
    const int64_t holes_bytes = (int64_t)file.st_size - (int64_t)file.st_blocks * 512;
    if (holes_bytes > 0 && (uint64_t)holes_bytes < disk.f_bavail * disk.f_frsize)
        (void)fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, file.st_size);
}

/* Locks for writing; and before anything is trusted, what a crashed writer left in the cache goes
 * to the media, so that no record is believed that a power cut could still take back. */
static int lock_and_sync(int fd, bool writable)
{
    const int result = writable ? lock(fd) : 0;

    if (result != 0 || (!writable && has_writer(fd)))
        return result;
    if (fsync(fd) == 0)
        return 0;
    /* A reader may stand on a read-only file system, where nothing is left to be written. */
    return !writable && (errno == EROFS || errno == EINVAL) ? 0 : -errno;
}

int pcc_volume_open_file(const char *path, bool writable, int *fd_out)
{
    const int fd =
        open(path, (writable ? O_RDWR | O_NOFOLLOW : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);

    if (fd < 0)
        return -errno;
    const int result = lock_and_sync(fd, writable);
    if (result != 0) {
        (void)close(fd);
        return result;
    }
    if (writable)
        take_holes(fd);
    *fd_out = fd;
    return 0;
}

int pcc_volume_open_at(const char *path, bool writable, const struct pcc_io_options *options,
                       struct pcc_volume **out)
{
    int fd = -1;
    const int result = pcc_volume_open_file(path, writable, &fd);

    return result != 0 ? result : pcc_volume_open_fd(fd, path, writable, options, out);
}

int pcc_volume_open_fd(int fd, const char *path, bool writable,
                       const struct pcc_io_options *options, struct pcc_volume **out)
{
    struct pcc_named_file file = {0};
    struct pcc_io *io;
    int result = pcc_named_file_take(fd, path, &file);

    if (result != 0) {
        (void)close(fd);
        return result;
    }
    result = pcc_io_open(fd, options, &io);
    if (result == 0)
        result = pcc_volume_open_io(io, writable, out);
    if (result == 0)
        (*out)->file = file;
    else
        pcc_named_file_destroy(&file);
    return result;
}

/* -- the first records -- */

static int first_record(struct pcc_record *record, const struct pcc_volume_spec *spec)
{
    struct pcc_geometry geometry;
    const size_t job_bytes = strlen(spec->job);

    if (spec->keep == 0 || spec->keep >= spec->slot_count || job_bytes > PCC_JOB_BYTES_MAX ||
        spec->next_sequence == 0)
        return -EINVAL;
    int result = pcc_geometry_plan(spec->payload_capacity_bytes, spec->slot_count,
                                   spec->block_bytes, spec->record_stride_bytes, &geometry);
    if (result != 0)
        return result;
    memset(record, 0, sizeof *record);
    record->magic = PCC_RECORD_MAGIC;
    record->format_version = PCC_FORMAT_VERSION;
    record->record_bytes = PCC_RECORD_BYTES;
    record->record_number = 1;
    record->volume_bytes = geometry.volume_bytes;
    record->record_stride_bytes = geometry.record_stride_bytes;
    record->slot_stride_bytes = geometry.slot_stride_bytes;
    record->slot_count = geometry.slot_count;
    record->block_bytes = geometry.block_bytes;
    record->checksum_algorithm = PCC_CHECKSUM_XXH3_64;
    record->keep = spec->keep;
    record->uid = spec->uid;
    record->rank = spec->rank;
    record->world_size = spec->world_size;
    record->job_bytes = (uint32_t)job_bytes;
    memcpy(record->job, spec->job, job_bytes);
    record->created_wall_ns = pcc_wall_ns();
    record->next_sequence = spec->next_sequence;
    record->incarnation = spec->incarnation;
    memcpy(record->start_id, spec->start_id, PCC_UUID_BYTES);
    if (getrandom(record->volume_uuid, sizeof record->volume_uuid, 0) !=
        (ssize_t)sizeof record->volume_uuid)
        return -EIO;
    return 0;
}

int pcc_volume_format(struct pcc_io *io, const struct pcc_volume_spec *spec)
{
    struct pcc_record *record = aligned_alloc(PCC_IO_ALIGN, PCC_RECORD_BYTES);
    struct pcc_record *blank = aligned_alloc(PCC_IO_ALIGN, PCC_RECORD_BYTES);
    int result = record && blank ? first_record(record, spec) : -ENOMEM;

    if (result == 0 && io->size_bytes < record->volume_bytes)
        result = -EINVAL;
    if (result == 0) {
        const struct pcc_geometry geometry = pcc_record_geometry(record);
        memset(blank, 0, PCC_RECORD_BYTES);
        /* Whatever the other generation's place held before must not outnumber ours. */
        for (uint32_t replica = 0; result == 0 && replica < PCC_REPLICAS; replica++)
            result = pcc_io_write_durable_all(io, blank, PCC_RECORD_BYTES,
                                              pcc_geometry_record_offset(&geometry, 0, replica));
        for (uint32_t replica = 0; result == 0 && replica < PCC_REPLICAS; replica++) {
            pcc_record_seal(record, 1, replica);
            PCC_ASSERT(pcc_record_accept(record, record->offset_bytes) == 0);
            result = pcc_io_write_durable_all(io, record, PCC_RECORD_BYTES, record->offset_bytes);
        }
    }
    free(blank);
    free(record);
    return result;
}
