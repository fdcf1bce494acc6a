#include "pcc_pool.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pcc_map.h"

struct pcc_pool {
    pthread_mutex_t lock;
    uint64_t budget_bytes; /* M */
    uint64_t used_bytes;   /* sum of the segments taken */
    uint64_t lost_bytes;   /* of them, those that never come back */
};

int pcc_pool_open(uint64_t budget_bytes, struct pcc_pool **out)
{
    struct pcc_pool *pool = calloc(1, sizeof(*pool));

    if (pool == NULL)
        return -ENOMEM;
    const int error = pthread_mutex_init(&pool->lock, NULL);
    if (error != 0) {
        free(pool);
        return -error;
    }
    pool->budget_bytes = budget_bytes;
    *out = pool;
    return 0;
}

void pcc_pool_close(struct pcc_pool *pool)
{
    if (pool == NULL)
        return;
    PCC_ASSERT(pool->used_bytes == pool->lost_bytes);
    (void)pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void pcc_pool_usage(struct pcc_pool *pool, uint64_t *budget_out, uint64_t *used_out)
{
    (void)pthread_mutex_lock(&pool->lock);
    *budget_out = pool->budget_bytes;
    *used_out = pool->used_bytes;
    (void)pthread_mutex_unlock(&pool->lock);
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

/* Every page is touched here, by us: a peer never pays for it and never meets SIGBUS. */
static int populate(int fd, uint8_t *bytes, uint64_t length_bytes)
{
    populate_huge(bytes, length_bytes);
    if (madvise(bytes, length_bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    if (errno != EINVAL)
        return -ENOMEM;
    /* Kernels before 5.14: fallocate reports a shortage where touching would kill us. */
    if (fallocate(fd, 0, 0, (off_t)length_bytes) != 0)
        return errno == ENOSPC ? -ENOMEM : -errno;
    memset(bytes, 0, length_bytes);
    return 0;
}

#define NODES_MAX 1024u
#define NODE_BITS (8 * sizeof(unsigned long))

/* The pages that are touched from now on come from that node while it has some. Only speed depends
 * on it, so that a kernel that refuses is obeyed. */
static void prefer_node(void *bytes, uint64_t length_bytes, int numa_node)
{
    unsigned long mask[NODES_MAX / NODE_BITS] = {0};

    if (numa_node < 0 || (unsigned)numa_node >= NODES_MAX)
        return;
    mask[(unsigned)numa_node / NODE_BITS] = 1ul << ((unsigned)numa_node % NODE_BITS);
    /* The kernel reads one bit less than it is told. */
    (void)syscall(SYS_mbind, bytes, length_bytes, MPOL_PREFERRED, mask, NODES_MAX + 1ul, 0u);
}

static int memfd_make(const char *name, uint64_t length_bytes, int numa_node, int *fd_out,
                      void **bytes_out)
{
    void *bytes = NULL;

    if (length_bytes == 0)
        return -EINVAL;
    const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    int error = ftruncate(fd, (off_t)length_bytes) == 0 ? 0 : -errno;
    if (error == 0)
        error = pcc_map_shared(fd, length_bytes, &bytes);
    if (error != 0)
        goto fail;
    prefer_node(bytes, length_bytes, numa_node);
    error = populate(fd, bytes, length_bytes);
    /* Nobody can pull the pages away from under a mapping: a truncated one kills its user. */
    if (error == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
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

int pcc_memfd_make(const char *name, uint64_t length_bytes, int *fd_out, void **bytes_out)
{
    return memfd_make(name, length_bytes, -1, fd_out, bytes_out);
}

int pcc_pool_take(struct pcc_pool *pool, uint64_t length_bytes, int numa_node,
                  struct pcc_segment *out)
{
    int fd;
    void *bytes;
    int error = -PCC_E_NO_MEMORY;

    if (length_bytes == 0)
        return -EINVAL;
    (void)pthread_mutex_lock(&pool->lock);
    if (length_bytes <= pool->budget_bytes - pool->used_bytes) {
        pool->used_bytes += length_bytes;
        error = 0;
    }
    (void)pthread_mutex_unlock(&pool->lock);
    if (error != 0)
        return error;

    error = memfd_make("pccheck-segment", length_bytes, numa_node, &fd, &bytes);
    if (error != 0) {
        (void)pthread_mutex_lock(&pool->lock);
        pool->used_bytes -= length_bytes;
        (void)pthread_mutex_unlock(&pool->lock);
        return error;
    }
    *out = (struct pcc_segment){.fd = fd, .bytes = bytes, .length_bytes = length_bytes};
    return 0;
}

static void room_back(struct pcc_pool *pool, struct pcc_segment *segment)
{
    (void)close(segment->fd);
    (void)pthread_mutex_lock(&pool->lock);
    PCC_ASSERT(pool->used_bytes >= segment->length_bytes);
    pool->used_bytes -= segment->length_bytes;
    (void)pthread_mutex_unlock(&pool->lock);
    *segment = (struct pcc_segment){.fd = -1};
}

void pcc_pool_return(struct pcc_pool *pool, struct pcc_segment *segment)
{
    (void)munmap(segment->bytes, segment->length_bytes);
    room_back(pool, segment);
}

void pcc_pool_retire(struct pcc_pool *pool, struct pcc_segment *segment)
{
    (void)mmap(segment->bytes, segment->length_bytes, PROT_NONE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    room_back(pool, segment);
}

void pcc_pool_abandon(struct pcc_pool *pool, struct pcc_segment *segment)
{
    (void)close(segment->fd);
    (void)pthread_mutex_lock(&pool->lock);
    pool->lost_bytes += segment->length_bytes;
    (void)pthread_mutex_unlock(&pool->lock);
    *segment = (struct pcc_segment){.fd = -1};
}
