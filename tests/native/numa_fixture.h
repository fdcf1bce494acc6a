/* A fake machine with two nodes of one CPU each, both usable by this process; and the CPUs on which
 * the kernel runs a thread. */
#ifndef NUMA_FIXTURE_H
#define NUMA_FIXTURE_H

#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pcc_numa.h"
#include "check.h"

#define NODES 2

struct tree {
    char root[64];
    unsigned cpus[NODES]; /* the only one of each node */
};

static inline void tree_write(const char *root, const char *node, const char *list)
{
    char path[160];

    (void)snprintf(path, sizeof(path), "%s/%s", root, node);
    CHECK(mkdir(path, 0700) == 0);
    (void)snprintf(path, sizeof(path), "%s/%s/cpulist", root, node);
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fputs(list, file) >= 0 && fclose(file) == 0);
}

static inline void tree_remove(const char *root, const char *node)
{
    char path[160];

    (void)snprintf(path, sizeof(path), "%s/%s/cpulist", root, node);
    CHECK(unlink(path) == 0);
    (void)snprintf(path, sizeof(path), "%s/%s", root, node);
    CHECK(rmdir(path) == 0);
}

static inline void root_make(char root[64])
{
    const char *base = getenv("TMPDIR");

    (void)snprintf(root, 64, "%s/pcc-numa-XXXXXX",
                   base != NULL && strlen(base) < 32 ? base : "/tmp");
    CHECK(mkdtemp(root) != NULL);
}

/* False on a machine, or in a container, with one CPU: there is nothing to see there. */
static inline bool tree_open(struct tree *tree)
{
    cpu_set_t allowed;
    char list[16];
    int found = 0;

    CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
    for (unsigned cpu = 0; cpu < CPU_SETSIZE && found < NODES; cpu++)
        if (CPU_ISSET(cpu, &allowed))
            tree->cpus[found++] = cpu;
    if (found < NODES) {
        printf("one CPU: nothing to see\n");
        return false;
    }
    root_make(tree->root);
    for (int node = 0; node < NODES; node++) {
        char name[16];
        (void)snprintf(name, sizeof(name), "node%d", node);
        (void)snprintf(list, sizeof(list), "%u\n", tree->cpus[node]);
        tree_write(tree->root, name, list);
    }
    pcc_numa_root = tree->root;
    return true;
}

static inline void tree_close(struct tree *tree)
{
    tree_remove(tree->root, "node0");
    tree_remove(tree->root, "node1");
    CHECK(rmdir(tree->root) == 0);
}

/* Binds a process, or with 0 the calling thread, to the node's CPU. */
static inline void bind_to(const struct tree *tree, pid_t pid, int node)
{
    cpu_set_t cpus;

    CPU_ZERO(&cpus);
    CPU_SET(tree->cpus[node], &cpus);
    CHECK(sched_setaffinity(pid, sizeof(cpus), &cpus) == 0);
}

/* The Cpus_allowed_list of one of our threads. */
static inline void thread_cpus(const char *tid, char out[256])
{
    char path[64], line[512];

    out[0] = '\0';
    (void)snprintf(path, sizeof(path), "/proc/self/task/%.20s/status", tid);
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        (void)sscanf(line, "Cpus_allowed_list: %255s", out);
    if (file != NULL)
        (void)fclose(file);
}

static inline bool thread_is_named(const char *tid, const char *prefix)
{
    char path[64], name[32] = "";

    (void)snprintf(path, sizeof(path), "/proc/self/task/%.20s/comm", tid);
    FILE *file = fopen(path, "r");
    const bool found = file != NULL && fgets(name, sizeof(name), file) != NULL &&
                       strncmp(name, prefix, strlen(prefix)) == 0;
    if (file != NULL)
        (void)fclose(file);
    return found;
}

/* How many of our threads with this beginning of the name may run on the CPU of `node` only; with
 * -1: on all CPUs of the process. */
static inline int threads_near(const struct tree *tree, const char *prefix, int node)
{
    char wanted[256], cpus[256], self[24];
    DIR *tasks = opendir("/proc/self/task");
    const struct dirent *entry;
    int count = 0;

    CHECK(tasks != NULL);
    (void)snprintf(self, sizeof(self), "%d", (int)getpid());
    if (node >= 0)
        (void)snprintf(wanted, sizeof(wanted), "%u", tree->cpus[node]);
    else
        thread_cpus(self, wanted);
    while ((entry = readdir(tasks)) != NULL) {
        if (entry->d_name[0] == '.' || !thread_is_named(entry->d_name, prefix))
            continue;
        thread_cpus(entry->d_name, cpus);
        count += strcmp(cpus, wanted) == 0;
    }
    (void)closedir(tasks);
    return count;
}

#endif
