/* Where memory lies: the machine's NUMA nodes, which CPUs are near which, and threads that run near
 * the memory they work on.
 *
 * Only speed depends on it: what cannot be read, or the kernel refuses, is left out. On a machine
 * with one node the kernel is asked nothing. A node is named by the kernel's number for it; -1 is
 * anywhere. Any thread. */
#ifndef PCC_NUMA_H
#define PCC_NUMA_H

#include <stdatomic.h>

#include "base/pcc_base.h"

#define PCC_NUMA_ANYWHERE (-1)
#define PCC_NUMA_NODES_MAX 64u
#define PCC_NUMA_CPUS_MAX 8192u
#define PCC_NUMA_ROOT "/sys/devices/system/node"

struct pcc_cpus { /* as the kernel takes them: one bit each */
    unsigned long bits[PCC_NUMA_CPUS_MAX / (8 * sizeof(unsigned long))];
};

struct pcc_numa { /* the nodes that have CPUs; what cannot be read is not among them */
    uint32_t count;
    int32_t nodes[PCC_NUMA_NODES_MAX];
    struct pcc_cpus cpus[PCC_NUMA_NODES_MAX];
};

/* From a directory like PCC_NUMA_ROOT. */
void pcc_numa_read(const char *root, struct pcc_numa *out);

/* What the rest asks is read once, at its first use, from here. Tests set it before. */
extern const char *pcc_numa_root;
uint32_t pcc_numa_count(void);

/* The node whose CPUs are all that a process may run on. */
int32_t pcc_numa_of_process(int32_t pid);
/* The node of the page at `bytes`, which was touched. */
int32_t pcc_numa_of_memory(void *bytes);
/* Pages that are touched from now on come from that node while it has some. */
void pcc_numa_prefer(void *bytes, uint64_t length_bytes, int32_t node);
/* The calling thread runs on those CPUs of the node that the process may use; on all of these when
 * it is -1, or when the process may use none of the node's. Never from a process' main thread,
 * whose CPUs are what "the process may use". */
void pcc_numa_run_near(int32_t node);

/* A thread that follows a place: before each piece of work. `here` is the thread's own, and begins
 * with PCC_NUMA_ANYWHERE; a place of NULL is anywhere. */
static inline void pcc_numa_follow(const _Atomic int32_t *place, int32_t *here)
{
    /* Relaxed: one piece of work on the wrong CPU is only slower. */
    const int32_t node =
        place != NULL ? atomic_load_explicit(place, memory_order_relaxed) : PCC_NUMA_ANYWHERE;

    if (node == *here)
        return;
    pcc_numa_run_near(node);
    *here = node;
}

#endif
