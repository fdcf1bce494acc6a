/* A tenant's memory and threads on a fake machine with two nodes: near the GPU that is pulled from,
 * else near the trainer. The pages themselves are where this machine has memory. */
#include "base/pcc_numa.h"

#include "numa_fixture.h"
#include "pull_fixture.h"

#define MEMORY (16u * CHUNK)

static struct tree tree;
static int gpu_node = PCC_NUMA_ANYWHERE; /* of every GPU */

int __real_pcc_gpu_device_find(const CUuuid *uuid, struct pcc_gpu_device *out);
int __wrap_pcc_gpu_device_find(const CUuuid *uuid, struct pcc_gpu_device *out);
int __wrap_pcc_gpu_device_find(const CUuuid *uuid, struct pcc_gpu_device *out)
{
    const int error = __real_pcc_gpu_device_find(uuid, out);

    if (error == 0)
        out->numa_node = gpu_node;
    return error;
}

static int32_t node_of(struct pull *p)
{
    struct pcc_tenant_usage usage;

    pcc_tenant_usage(p->f.tenant, &usage);
    return usage.numa_node;
}

/* The trainer comes again, to a tenant that has given its memory back. */
static void attach_again(struct pull *p)
{
    detach(&p->f);
    CHECK(pcc_tenant_release_memory(p->f.tenant) == 0);
    CHECK_EQUAL(node_of(p), PCC_NUMA_ANYWHERE);
    page_open(&p->f);
}

static void memory_take(struct pull *p)
{
    uint64_t granted;

    CHECK(pcc_tenant_grow(p->f.tenant, MEMORY, &granted) == 0 && granted == MEMORY);
}

static void test_near_the_trainer(void)
{
    struct pull p;

    if (!tree_open(&tree))
        return;
    pull_open(&p, MEMORY);
    usual_layout(&p);
    expose(&p);
    checkpoint(&p, 1);
    CHECK_EQUAL(node_of(&p), PCC_NUMA_ANYWHERE); /* he may run on both */
    CHECK_EQUAL(threads_near(&tree, "pcc-write", -1), 3 * 2);

    bind_to(&tree, p.trainer.pid, 1);
    attach_again(&p);
    memory_take(&p);
    CHECK_EQUAL(node_of(&p), 1);
    CHECK_EQUAL(threads_near(&tree, "pcc-write", -1), 3 * 2); /* until there is work */
    expose(&p);
    checkpoint(&p, 2);
    CHECK(threads_near(&tree, "pcc-write", 1) >= 1);
    CHECK_EQUAL(threads_near(&tree, "pcc-write", 0), 0);

    /* Memory stays where it is, and so do those who work on it. */
    detach(&p.f);
    bind_to(&tree, p.trainer.pid, 0);
    page_open(&p.f);
    CHECK_EQUAL(node_of(&p), 1);
    attach_again(&p);
    memory_take(&p);
    CHECK_EQUAL(node_of(&p), 0);
    expose(&p);
    checkpoint(&p, 3);
    CHECK(threads_near(&tree, "pcc-write", 0) >= 1);
    pull_close(&p);
    tree_close(&tree);
}

/* The copier begins with it; the test may be there before. */
static void wait_near(const char *prefix, int node)
{
    const uint64_t deadline = soon();

    while (threads_near(&tree, prefix, node) == 0) {
        CHECK(pcc_now_ns() < deadline);
        (void)usleep(500);
    }
}

static void test_near_the_gpu(void)
{
    struct pull p;

    if (!tree_open(&tree))
        return;
    gpu_node = 0;
    pull_open(&p, MEMORY);
    usual_layout(&p);
    bind_to(&tree, p.trainer.pid, 1);
    attach_again(&p);
    expose(&p);
    wait_near("pcc-gpu", 0);
    memory_take(&p);
    CHECK_EQUAL(node_of(&p), 0); /* not the trainer's */
    checkpoint(&p, 1);
    CHECK(threads_near(&tree, "pcc-write", 0) >= 1);
    CHECK_EQUAL(threads_near(&tree, "pcc-write", 1), 0);
    pull_close(&p);
    tree_close(&tree);
}

static const struct test tests[] = {
    {"test_near_the_trainer", test_near_the_trainer},
    {"test_near_the_gpu", test_near_the_gpu},
};

int main(int argc, char **argv)
{
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
