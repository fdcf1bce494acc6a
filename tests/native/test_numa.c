/* Nodes read from made-up machines; which one a process is bound to; writers that follow. */
#include "base/pcc_numa.h"

#include <sys/wait.h>

#include "numa_fixture.h"
#include "save_fixture.h"

static struct tree tree;
static uint32_t asked, moved; /* calls that reached the kernel */

int __real_sched_getaffinity(pid_t pid, size_t length, cpu_set_t *out);
int __wrap_sched_getaffinity(pid_t pid, size_t length, cpu_set_t *out);
int __wrap_sched_getaffinity(pid_t pid, size_t length, cpu_set_t *out)
{
    (void)__atomic_fetch_add(&asked, 1, __ATOMIC_RELAXED);
    return __real_sched_getaffinity(pid, length, out);
}

int __real_sched_setaffinity(pid_t pid, size_t length, const cpu_set_t *cpus);
int __wrap_sched_setaffinity(pid_t pid, size_t length, const cpu_set_t *cpus);
int __wrap_sched_setaffinity(pid_t pid, size_t length, const cpu_set_t *cpus)
{
    (void)__atomic_fetch_add(&moved, 1, __ATOMIC_RELAXED);
    return __real_sched_setaffinity(pid, length, cpus);
}

/* -- reading -- */

static bool has_cpu(const struct pcc_cpus *cpus, uint32_t cpu)
{
    return (cpus->bits[cpu / 64] >> cpu % 64 & 1u) != 0;
}

/* A node with that list; false when it is not taken. */
static bool reads(const char *list, struct pcc_numa *out)
{
    char root[64];

    root_make(root);
    tree_write(root, "node3", list);
    pcc_numa_read(root, out);
    tree_remove(root, "node3");
    CHECK(rmdir(root) == 0);
    CHECK(out->count <= 1 && (out->count == 0 || out->nodes[0] == 3));
    return out->count == 1;
}

static void test_lists(void)
{
    static struct pcc_numa numa;
    static const char *const bad[] = {
        "",    "\n",  "-",     "1-",   "3-1", "1,",   ",1",  "1,,2",
        "1 2", "a-b", "1-2-3", "8192", "-1",  "1\n2", "0x1", "99999999999999999999"};

    CHECK(reads("0-3,8,10-11\n", &numa));
    for (uint32_t cpu = 0; cpu < PCC_NUMA_CPUS_MAX; cpu++)
        CHECK_EQUAL(has_cpu(&numa.cpus[0], cpu), cpu <= 3 || cpu == 8 || cpu == 10 || cpu == 11);
    CHECK(reads("7", &numa) && has_cpu(&numa.cpus[0], 7) && !has_cpu(&numa.cpus[0], 6));
    CHECK(reads("8190-8191\n", &numa) && has_cpu(&numa.cpus[0], 8191));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        CHECK(!reads(bad[i], &numa));
}

static void test_a_list_without_end(void)
{
    static struct pcc_numa numa;
    static char list[1 << 16];

    for (size_t i = 0; i + 2 < sizeof(list); i += 2)
        memcpy(list + i, "1,", 2);
    list[sizeof(list) - 1] = '\0';
    CHECK(!reads(list, &numa));
}

static void test_other_names_are_no_nodes(void)
{
    static const char *const names[] = {"node", "nodes", "node1x", "node1024", "cpu1", "node-1"};
    static struct pcc_numa numa;
    char root[64];

    root_make(root);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        tree_write(root, names[i], "0\n");
    pcc_numa_read(root, &numa);
    CHECK_EQUAL(numa.count, 0);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        tree_remove(root, names[i]);
    pcc_numa_read(root, &numa);
    CHECK_EQUAL(numa.count, 0);
    CHECK(rmdir(root) == 0);
    pcc_numa_read(root, &numa); /* not there */
    CHECK_EQUAL(numa.count, 0);
}

/* In a process of its own: the machine is read once. */
static void one_node(void)
{
    char root[64];
    uint8_t page[64] = {0};

    root_make(root);
    tree_write(root, "node0", "0-8191\n");
    pcc_numa_root = root;
    asked = moved = 0;
    CHECK_EQUAL(pcc_numa_count(), 1);
    CHECK_EQUAL(pcc_numa_of_process(getpid()), PCC_NUMA_ANYWHERE);
    CHECK_EQUAL(pcc_numa_of_memory(page), PCC_NUMA_ANYWHERE);
    pcc_numa_prefer(page, sizeof(page), 0);
    pcc_numa_run_near(0);
    CHECK(asked == 0 && moved == 0);
    tree_remove(root, "node0");
    CHECK(rmdir(root) == 0);
}

static void test_one_node_asks_nothing(void)
{
    int status;
    const pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        one_node();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* -- processes -- */

/* The node of a process that may use only these. */
static int32_t node_of_bound(uint32_t nodes)
{
    cpu_set_t cpus;
    int status, go[2];
    char byte;

    CHECK(pipe(go) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        (void)close(go[1]);
        _exit(read(go[0], &byte, 1) == 0 ? 0 : 1); /* until the test lets it end */
    }
    CPU_ZERO(&cpus);
    for (int node = 0; node < NODES; node++)
        if ((nodes >> node & 1u) != 0)
            CPU_SET(tree.cpus[node], &cpus);
    CHECK(sched_setaffinity(child, sizeof(cpus), &cpus) == 0);
    const int32_t found = pcc_numa_of_process(child);
    CHECK(close(go[0]) == 0 && close(go[1]) == 0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK_EQUAL(pcc_numa_of_process(child), PCC_NUMA_ANYWHERE); /* it is gone */
    return found;
}

static void test_the_node_of_a_process(void)
{
    CHECK_EQUAL(pcc_numa_count(), NODES);
    CHECK_EQUAL(node_of_bound(1u << 0), 0);
    CHECK_EQUAL(node_of_bound(1u << 1), 1);
    CHECK_EQUAL(node_of_bound(3), PCC_NUMA_ANYWHERE);
    CHECK_EQUAL(pcc_numa_of_process(0), PCC_NUMA_ANYWHERE); /* unknown, not "this one" */
    CHECK_EQUAL(pcc_numa_of_process(-1), PCC_NUMA_ANYWHERE);
}

/* -- writers -- */

static void save_one(struct owner *owner, uint64_t tag)
{
    struct payload payload;

    CHECK_EQUAL(payload_begin(owner, tag, 3 * CHUNK, &payload), 0);
    payload_fill(&payload);
    CHECK(owner_wait(owner, tag).end == PCC_SAVE_DURABLE);
    free(payload.memory);
}

/* One lane of one writer, which does all the work. */
static struct owner *owner_near(const _Atomic int32_t *place)
{
    struct owner *owner = owner_new(4, 1, 1, 0);
    const struct pcc_saver_spec spec = {.lanes = 1,
                                        .writers_per_lane = 1,
                                        .chunk_bytes = CHUNK,
                                        .events = &owner_events,
                                        .owner = owner,
                                        .near_node = place};

    pcc_saver_close(owner->saver);
    CHECK_EQUAL(pcc_saver_open(owner->volume, &spec, &owner->saver), 0);
    return owner;
}

static void test_writers_follow_the_memory(void)
{
    static const int32_t places[] = {PCC_NUMA_ANYWHERE, 1, 0, PCC_NUMA_ANYWHERE, 1, 7, 0};
    _Atomic int32_t place = PCC_NUMA_ANYWHERE;
    struct owner *owner = owner_near(&place);

    for (uint32_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        atomic_store(&place, places[i]);
        save_one(owner, i + 1);
        /* There is no node 7. */
        CHECK_EQUAL(threads_near(&tree, "pcc-write", places[i] == 7 ? -1 : places[i]), 1);
    }
    const uint32_t before = moved;
    save_one(owner, 100);
    save_one(owner, 101);
    CHECK_EQUAL(moved, before); /* it is there already */
    owner_free(owner);
}

static void test_writers_without_a_place(void)
{
    struct owner *owner = owner_near(NULL);
    const uint32_t before = moved;

    save_one(owner, 1);
    CHECK_EQUAL(threads_near(&tree, "pcc-write", -1), 1);
    CHECK_EQUAL(moved, before);
    owner_free(owner);
}

/* A node of which this process may use no CPU is as good as none. */
static void bound_to_one(void)
{
    _Atomic int32_t place = 1;

    bind_to(&tree, 0, 0);
    struct owner *owner = owner_near(&place);
    save_one(owner, 1);
    CHECK_EQUAL(threads_near(&tree, "pcc-write", 0), 1);
    owner_free(owner);
}

static void test_only_what_the_process_may_use(void)
{
    int status;
    const pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        bound_to_one();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(void)
{
    RUN(test_lists);
    RUN(test_a_list_without_end);
    RUN(test_other_names_are_no_nodes);
    RUN(test_one_node_asks_nothing);
    if (!tree_open(&tree))
        return 0;
    RUN(test_the_node_of_a_process);
    RUN(test_writers_follow_the_memory);
    RUN(test_writers_without_a_place);
    RUN(test_only_what_the_process_may_use);
    tree_close(&tree);
    return 0;
}
