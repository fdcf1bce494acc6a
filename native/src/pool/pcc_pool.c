#include "pool/pcc_pool.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pcc_crew.h"
#include "base/pcc_map.h"
#include "base/pcc_thread.h"

struct pcc_pool {
    pthread_mutex_t lock;
    uint64_t budget_bytes;   /* M */
    uint64_t used_bytes;     /* sum of the segments taken */
    uint64_t lost_bytes;     /* of them, those that never come back */
    struct pcc_store *store; /* NULL: nothing outlives us */
};

int pcc_pool_open(uint64_t budget_bytes, struct pcc_pool **out)
{
    struct pcc_pool *pool = calloc(1, sizeof(*pool));

    if (pool == NULL)
        return -ENOMEM;
    (void)pthread_mutex_init(&pool->lock, NULL); /* cannot fail with default attributes */
    pool->budget_bytes = budget_bytes;
    *out = pool;
    return 0;
}

void pcc_pool_close(struct pcc_pool *pool)
{
    if (pool == NULL)
        return;
    PCC_ASSERT(pool->used_bytes == pool->lost_bytes);
    pcc_store_close(pool->store);
    (void)pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void pcc_pool_keep(struct pcc_pool *pool, struct pcc_store *store)
{
    PCC_ASSERT(pool->store == NULL && pool->used_bytes == 0);
    pool->store = store;
}

struct pcc_store_usage pcc_pool_stored(struct pcc_pool *pool)
{
    return pool->store != NULL ? pcc_store_usage(pool->store) : (struct pcc_store_usage){0};
}

void pcc_pool_usage(struct pcc_pool *pool, uint64_t *budget_out, uint64_t *used_out)
{
    PCC_LOCKED(&pool->lock);
    *budget_out = pool->budget_bytes;
    *used_out = pool->used_bytes;
}

/* One page of each huge page is touched, then the kernel is asked to make it whole: that needs no
 * privilege and no setting, and no memory is touched twice. Where it fails 4 KiB pages are used. */
static void populate_huge(uint8_t *bytes, uint64_t length_bytes)
{
    const uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t whole = length_bytes / PCC_HUGE_PAGE_BYTES * PCC_HUGE_PAGE_BYTES;

    for (uint64_t at = 0; at < whole; at += PCC_HUGE_PAGE_BYTES) {
        if (madvise(bytes + at, page_bytes, MADV_POPULATE_WRITE) != 0 ||
            madvise(bytes + at, PCC_HUGE_PAGE_BYTES, MADV_COLLAPSE) != 0)
            return;
    }
}

/* A memfd lies on no disk: where the kernel says "no space", it had no memory. */
static int memory_error(void)
{
    return errno == ENOSPC ? -ENOMEM : -errno;
}

#define PIECE_BYTES (32ull << 20) /* that one thread touches at a time */

struct touching {
    uint8_t *bytes;
    uint64_t length_bytes;
    _Atomic int error; /* errno of a piece */
};

static void piece_touch(void *context, uint64_t piece)
{
    struct touching *touching = context;
    const uint64_t at = piece * PIECE_BYTES;
    const uint64_t length = pcc_piece_bytes(touching->length_bytes, at, PIECE_BYTES);

    if (PCC_READ(&touching->error) != 0)
        return;
    populate_huge(touching->bytes + at, length);
    if (madvise(touching->bytes + at, length, MADV_POPULATE_WRITE) != 0)
        PCC_WRITE(&touching->error, errno);
}

/* Every page is touched here, by us: a peer never pays for it and never meets SIGBUS. By several
 * threads: the kernel clears new memory more slowly than a GPU fills it. */
static int populate(int fd, uint8_t *bytes, uint64_t length_bytes)
{
    struct touching touching = {.bytes = bytes, .length_bytes = length_bytes};
    struct pcc_crew crew;

    pcc_crew_open(&crew);
    pcc_crew_run(&crew, PCC_CREW_HELPERS, pcc_ceil_div(length_bytes, PIECE_BYTES), piece_touch,
                 &touching);
    pcc_crew_close(&crew);
    const int error = PCC_READ(&touching.error);
    if (error == 0)
        return 0;
    if (error != EINVAL)
        return -ENOMEM;
    /* Kernels before 5.14: fallocate reports a shortage where touching would kill us. */
    if (fallocate(fd, 0, 0, (off_t)length_bytes) != 0)
        return memory_error();
    memset(bytes, 0, length_bytes);
    return 0;
}

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

int pcc_memfd_make(const char *name, uint64_t length_bytes, int *fd_out, void **bytes_out)
{
    void *bytes = NULL;

    if (length_bytes == 0)
        return -EINVAL;
    const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return memory_error();
    int error = ftruncate(fd, (off_t)length_bytes) == 0 ? 0 : memory_error();
    if (error == 0)
        error = pcc_map_shared(fd, length_bytes, &bytes);
    if (error != 0)
        goto fail;
    error = populate(fd, bytes, length_bytes);
    /* A memfd that shrank would kill the process that has it mapped. */
    if (error == 0 && fcntl(fd, F_ADD_SEALS, SEALS) != 0)
        error = -errno;
    if (error != 0)
        goto fail_mapped;
    *fd_out = fd;
    *bytes_out = bytes;
    return 0;

fail_mapped:
    (void)munmap(bytes, length_bytes);
fail:
    (void)close(fd);
    return error;
}

/* -- the descriptor store -- */

static void name_make(char name[PCC_STORE_NAME_MAX + 1], const char *label, const char *kind,
                      uint64_t id)
{
    (void)snprintf(name, PCC_STORE_NAME_MAX + 1, "%.*s-%s-%016llx", (int)PCC_POOL_LABEL_MAX, label,
                   kind, (unsigned long long)id);
}

/* Puts it into the store: its id there; 0 when that failed, and the memory is used all the same. */
static uint64_t keep(struct pcc_pool *pool, int fd, const char *label, const char *kind)
{
    char name[PCC_STORE_NAME_MAX + 1];
    uint64_t id = 0;

    if (pool->store == NULL || label[0] == '\0')
        return 0;
    while (id == 0)
        if (getrandom(&id, sizeof(id), 0) != (ssize_t)sizeof(id))
            return 0;
    name_make(name, label, kind, id);
    return pcc_store_put(pool->store, fd, name) == 0 ? id : 0;
}

static void forget(struct pcc_pool *pool, const char *label, const char *kind, uint64_t id)
{
    char name[PCC_STORE_NAME_MAX + 1];

    if (pool->store == NULL || id == 0)
        return;
    name_make(name, label, kind, id);
    pcc_store_remove(pool->store, name);
}

/* Safe to map: sealed and whole like the segments of this pool, and no longer. */
static int found_length(int fd, uint64_t *length_out)
{
    struct stat about;
    const int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &about) != 0 || about.st_size <= 0)
        return -EINVAL;
    /* A hole would be filled when it is touched, and kill us when memory is short. */
    if ((uint64_t)about.st_blocks * 512 < (uint64_t)about.st_size)
        return -EINVAL;
    *length_out = (uint64_t)about.st_size;
    return 0;
}

void pcc_pool_unstore(struct pcc_pool *pool, const char *name)
{
    if (pool->store != NULL)
        pcc_store_remove(pool->store, name);
}

/* -- segments -- */

static int budget_take(struct pcc_pool *pool, uint64_t length_bytes)
{
    PCC_LOCKED(&pool->lock);
    if (length_bytes > pool->budget_bytes - pool->used_bytes)
        return -PCC_E_NO_MEMORY;
    pool->used_bytes += length_bytes;
    return 0;
}

static void budget_return(struct pcc_pool *pool, uint64_t length_bytes)
{
    PCC_LOCKED(&pool->lock);
    PCC_ASSERT(pool->used_bytes >= length_bytes);
    pool->used_bytes -= length_bytes;
}

int pcc_pool_take(struct pcc_pool *pool, uint64_t length_bytes, const char *label,
                  struct pcc_segment *out)
{
    int fd;
    void *bytes = NULL;

    if (length_bytes == 0)
        return -EINVAL;
    int error = budget_take(pool, length_bytes);
    if (error != 0)
        return error;
    error = pcc_memfd_make("pccheck-segment", length_bytes, &fd, &bytes);
    if (error != 0) {
        budget_return(pool, length_bytes);
        return error;
    }
    *out = (struct pcc_segment){.fd = fd,
                                .bytes = bytes,
                                .length_bytes = length_bytes,
                                .id = keep(pool, fd, label, "segment")};
    return 0;
}

int pcc_pool_adopt(struct pcc_pool *pool, int fd, uint64_t id, const char *label,
                   struct pcc_segment *out)
{
    uint64_t length_bytes;
    void *bytes = NULL;

    int error = found_length(fd, &length_bytes);
    if (error != 0 || id == 0 || label[0] == '\0' || length_bytes > PCC_SEGMENT_BYTES_MAX)
        return -EINVAL;
    error = budget_take(pool, length_bytes);
    if (error != 0)
        return error;
    error = pcc_map_shared(fd, length_bytes, &bytes);
    if (error != 0) {
        budget_return(pool, length_bytes);
        return error;
    }
    *out = (struct pcc_segment){.fd = fd, .bytes = bytes, .length_bytes = length_bytes, .id = id};
    return 0;
}

void pcc_pool_unadopt(struct pcc_pool *pool, struct pcc_segment *segment)
{
    (void)munmap(segment->bytes, segment->length_bytes);
    budget_return(pool, segment->length_bytes);
    *segment = (struct pcc_segment){.fd = -1};
}

static void room_back(struct pcc_pool *pool, const char *label, struct pcc_segment *segment)
{
    forget(pool, label, "segment", segment->id);
    (void)close(segment->fd);
    budget_return(pool, segment->length_bytes);
    *segment = (struct pcc_segment){.fd = -1};
}

void pcc_pool_return(struct pcc_pool *pool, const char *label, struct pcc_segment *segment)
{
    (void)munmap(segment->bytes, segment->length_bytes);
    room_back(pool, label, segment);
}

void pcc_pool_retire(struct pcc_pool *pool, const char *label, struct pcc_segment *segment)
{
    (void)mmap(segment->bytes, segment->length_bytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    room_back(pool, label, segment);
}

void pcc_pool_abandon(struct pcc_pool *pool, const char *label, struct pcc_segment *segment)
{
    forget(pool, label, "segment", segment->id);
    (void)close(segment->fd);
    PCC_LOCKED(&pool->lock);
    pool->lost_bytes += segment->length_bytes;
    *segment = (struct pcc_segment){.fd = -1};
}

/* -- state memfds -- */

int pcc_pool_state_make(struct pcc_pool *pool, const char *label, uint64_t length_bytes,
                        uint64_t *id_out, void **bytes_out)
{
    void *bytes = NULL;
    int fd;

    *id_out = 0;
    if (pool->store == NULL || label[0] == '\0')
        return 0;
    const int error = pcc_memfd_make("pccheck-state", length_bytes, &fd, &bytes);
    if (error != 0)
        return error;
    *id_out = keep(pool, fd, label, "state");
    (void)close(fd); /* the mapping and the store have it */
    if (*id_out == 0)
        (void)munmap(bytes, length_bytes);
    *bytes_out = bytes;
    return 0;
}

int pcc_pool_state_map(int fd, void **bytes_out, uint64_t *length_out)
{
    const int error = found_length(fd, length_out);

    return error != 0 ? error : pcc_map_shared(fd, *length_out, bytes_out);
}

void pcc_pool_state_drop(struct pcc_pool *pool, const char *label, uint64_t id, void *bytes,
                         uint64_t length_bytes)
{
    forget(pool, label, "state", id);
    (void)munmap(bytes, length_bytes);
}
