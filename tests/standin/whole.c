/* A device's memory as a whole. What any living process has of it, its own allocations, what it has
 * imported of others, living or dead, and its contexts, has a file in PCCHECK_STANDIN_DIR:
 * KIND-DEVICE-PID-NONCE, as long as what it stands for. Files with one nonce are the same memory.
 */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory.h"

enum { SEEN_MAX = 4096 };

void whole_path(char *out, const char *kind, uint32_t device, uint32_t pid, uint64_t nonce)
{
    (void)snprintf(out, PATH_BYTES, "%s/%s-%" PRIu32 "-%" PRIu32 "-%016" PRIx64, standin.directory,
                   kind, device, pid, nonce);
}

struct owner { /* of the last file that was looked at */
    uint32_t pid;
    bool holds;
};

/* Whether the process lives and has not given its memory to the host for a checkpoint. */
static bool holds_memory(struct owner *last, uint32_t pid)
{
    bool alive;
    if (last->pid != pid)
        *last = (struct owner){pid, process_start_time((int)pid, &alive) && alive &&
                                        !checkpoint_has_released((int)pid)};
    return last->holds;
}

/* Bytes, when the file is of this device and its process holds them. */
static uint64_t bytes_of(int directory, const char *name, uint32_t device, uint64_t *nonce,
                         struct owner *last)
{
    char kind[16];
    uint32_t of, pid;
    struct stat about;
    if (sscanf(name, "%15[a-z]-%" SCNu32 "-%" SCNu32 "-%" SCNx64, kind, &of, &pid, nonce) != 4 ||
        of != device || fstatat(directory, name, &about, 0) || !strcmp(kind, PROCESS_KIND) ||
        !holds_memory(last, pid))
        return 0;
    return (uint64_t)about.st_size - (strcmp(kind, "memory") ? 0 : HEADER_BYTES);
}

static uint64_t used_on(uint32_t device)
{
    static uint64_t seen[SEEN_MAX];
    DIR *directory = opendir(standin.directory);
    const struct dirent *entry;
    struct owner last = {0};
    uint64_t sum = 0, small = 0;
    size_t count_of = 0;
    while (directory && (entry = readdir(directory))) {
        uint64_t nonce;
        const uint64_t bytes = bytes_of(dirfd(directory), entry->d_name, device, &nonce, &last);
        size_t at = 0;
        while (at < count_of && seen[at] != nonce)
            at++;
        if (!bytes || at < count_of || count_of == SEEN_MAX)
            continue;
        seen[count_of++] = nonce;
        *(bytes < SHARED_BLOCK ? &small : &sum) += bytes;
    }
    if (directory)
        (void)closedir(directory);
    return sum + (small + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

uint64_t whole_free(uint32_t device)
{
    const uint64_t used = used_on(device);
    return used < standin.device_bytes ? standin.device_bytes - used : 0;
}

int whole_begin(void)
{
    const int fd = open(standin.directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0)
        (void)flock(fd, LOCK_EX);
    return fd;
}

void whole_end(int fd)
{
    if (fd >= 0)
        (void)close(fd);
}

void whole_note(const char *kind, uint32_t device, uint64_t nonce, uint64_t length)
{
    char path[PATH_BYTES];
    whole_path(path, kind, device, (uint32_t)getpid(), nonce);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return;
    (void)!ftruncate(fd, (off_t)length);
    (void)close(fd);
}

void whole_forget(const char *kind, uint32_t device, uint64_t nonce)
{
    char path[PATH_BYTES];
    whole_path(path, kind, device, (uint32_t)getpid(), nonce);
    (void)unlink(path);
}
