#include "base/pcc_numa.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WORD_BITS (8 * sizeof(unsigned long))
#define NODE_MAX 1024u   /* above every number that kernels give */
#define LIST_BYTES 16384 /* a list with more text than this is not read */

/* -- the nodes -- */

/* Reads a number of the list, and moves *text behind it; false without a number, or for an
 * impossible one. */
static bool number_take(const char **text, uint32_t *out)
{
    uint32_t value = 0;

    if (**text < '0' || **text > '9')
        return false;
    for (; **text >= '0' && **text <= '9'; (*text)++) {
        value = value * 10 + (uint32_t)(**text - '0');
        if (value >= PCC_NUMA_CPUS_MAX)
            return false;
    }
    *out = value;
    return true;
}

/* "0-3,8,10-11\n". False for anything else, and for no CPU at all. */
static bool list_parse(const char *text, struct pcc_cpus *out)
{
    memset(out, 0, sizeof(*out));
    for (;;) {
        uint32_t first, last;
        if (!number_take(&text, &first))
            return false;
        last = first;
        if (*text == '-') {
            text++;
            if (!number_take(&text, &last) || last < first)
                return false;
        }
        for (uint32_t cpu = first; cpu <= last; cpu++)
            out->bits[cpu / WORD_BITS] |= 1ul << (cpu % WORD_BITS);
        if (*text != ',')
            return *text == '\0' || strcmp(text, "\n") == 0;
        text++;
    }
}

static bool list_read(const char *root, uint32_t node, struct pcc_cpus *out)
{
    char path[512], text[LIST_BYTES];
    size_t length = 0;

    if (snprintf(path, sizeof(path), "%s/node%u/cpulist", root, node) >= (int)sizeof(path))
        return false;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t got;
    while ((got = read(fd, text + length, sizeof(text) - 1 - length)) > 0)
        length += (size_t)got;
    (void)close(fd);
    text[length] = '\0';
    return got == 0 && length < sizeof(text) - 1 && list_parse(text, out);
}

/* The N of "nodeN". */
static bool name_parse(const char *name, uint32_t *out)
{
    if (strncmp(name, "node", 4) != 0)
        return false;
    name += 4;
    return number_take(&name, out) && *name == '\0' && *out < NODE_MAX;
}

void pcc_numa_read(const char *root, struct pcc_numa *out)
{
    DIR *directory = opendir(root);
    const struct dirent *entry;
    uint32_t node;

    out->count = 0;
    if (directory == NULL)
        return;
    while (out->count < PCC_NUMA_NODES_MAX && (entry = readdir(directory)) != NULL) {
        if (!name_parse(entry->d_name, &node) || !list_read(root, node, &out->cpus[out->count]))
            continue;
        out->nodes[out->count++] = (int32_t)node;
    }
    (void)closedir(directory);
}

/* -- the machine's -- */

const char *pcc_numa_root = PCC_NUMA_ROOT;

static struct pcc_numa machine;
static pthread_once_t machine_once = PTHREAD_ONCE_INIT;

static void machine_read(void)
{
    pcc_numa_read(pcc_numa_root, &machine);
}

uint32_t pcc_numa_count(void)
{
    (void)pthread_once(&machine_once, machine_read);
    return machine.count;
}

static const struct pcc_cpus *cpus_of(int32_t node)
{
    for (uint32_t i = 0; i < machine.count; i++)
        if (machine.nodes[i] == node)
            return &machine.cpus[i];
    return NULL;
}

static bool allowed_read(int32_t pid, struct pcc_cpus *out)
{
    memset(out, 0, sizeof(*out));
    return sched_getaffinity(pid, sizeof(*out), (cpu_set_t *)(void *)out) == 0;
}

/* The CPUs that are in both sets; false when there are none. */
static bool common(const struct pcc_cpus *one, const struct pcc_cpus *other, struct pcc_cpus *out)
{
    unsigned long any = 0;

    for (size_t i = 0; i < sizeof(out->bits) / sizeof(out->bits[0]); i++) {
        out->bits[i] = one->bits[i] & other->bits[i];
        any |= out->bits[i];
    }
    return any != 0;
}

int32_t pcc_numa_of_process(int32_t pid)
{
    struct pcc_cpus allowed, both;

    if (pcc_numa_count() < 2 || pid <= 0 || !allowed_read(pid, &allowed))
        return PCC_NUMA_ANYWHERE;
    for (uint32_t i = 0; i < machine.count; i++)
        if (common(&allowed, &machine.cpus[i], &both) && memcmp(&both, &allowed, sizeof(both)) == 0)
            return machine.nodes[i];
    return PCC_NUMA_ANYWHERE;
}

int32_t pcc_numa_of_memory(void *bytes)
{
    int node = PCC_NUMA_ANYWHERE;

    if (pcc_numa_count() < 2 || syscall(SYS_get_mempolicy, &node, NULL, 0ul, bytes,
                                        (unsigned long)(MPOL_F_NODE | MPOL_F_ADDR)) != 0)
        return PCC_NUMA_ANYWHERE;
    return node;
}

void pcc_numa_prefer(void *bytes, uint64_t length_bytes, int32_t node)
{
    unsigned long mask[NODE_MAX / WORD_BITS] = {0};

    if (node < 0 || (uint32_t)node >= NODE_MAX || pcc_numa_count() < 2)
        return;
    mask[(uint32_t)node / WORD_BITS] = 1ul << ((uint32_t)node % WORD_BITS);
    /* The kernel reads one bit less than the given number. */
    (void)syscall(SYS_mbind, bytes, length_bytes, MPOL_PREFERRED, mask, NODE_MAX + 1ul, 0u);
}

void pcc_numa_run_near(int32_t node)
{
    struct pcc_cpus allowed, near;

    /* The process' CPUs are asked for each time: a cpuset may change while it runs. */
    if (pcc_numa_count() < 2 || !allowed_read(getpid(), &allowed))
        return;
    const struct pcc_cpus *cpus = cpus_of(node);
    if (cpus == NULL || !common(&allowed, cpus, &near))
        near = allowed;
    (void)sched_setaffinity(0, sizeof(near), (const cpu_set_t *)(const void *)&near);
}
