/* Choosing chunks takes a few steps, however many there are: 512 GiB are 32,768 chunks of 16 MiB,
 * and all of one snapshot's are handed out under the tenant's lock. */
#include <stdlib.h>

#include "check.h"
#include "daemon/pcc_tenant_private.h"

#define CHUNKS 32768u

static struct pcc_tenant *table_new(void)
{
    struct pcc_tenant *tenant = calloc(1, sizeof *tenant);

    CHECK(tenant != NULL);
    tenant->chunks = calloc(CHUNKS, sizeof *tenant->chunks);
    CHECK(tenant->chunks != NULL);
    tenant->chunk_count = CHUNKS;
    tenant->segment_count = tenant->lasting_count = 2;
    for (uint32_t i = 0; i < CHUNKS; i++)
        tenant->chunks[i].segment = i < CHUNKS / 2 ? 0 : 1;
    pcc_tenant_lists_clear(tenant);
    pcc_tenant_chunks_add(tenant, 0, CHUNKS);
    return tenant;
}

static void table_free(struct pcc_tenant *tenant)
{
    free(tenant->chunks);
    free(tenant);
}

/* Every chunk once, in the order of the table; then none is left. */
static void pick_all(struct pcc_tenant *tenant, enum pcc_chunk_state state)
{
    const uint64_t began_ns = pcc_now_ns(), before = tenant->looked_at;

    for (uint32_t i = 0; i < CHUNKS; i++) {
        CHECK_EQUAL(pcc_tenant_pick(tenant, 0, true), i);
        pcc_tenant_chunk_set(tenant, &tenant->chunks[i], state);
    }
    CHECK_EQUAL(pcc_tenant_pick(tenant, 0, false), -1);
    CHECK_EQUAL(tenant->looked_at - before, CHUNKS);
    printf("%u chunks chosen in %.2f ms\n", CHUNKS, (double)(pcc_now_ns() - began_ns) / 1e6);
}

static void test_a_step_for_each_chunk(void)
{
    struct pcc_tenant *tenant = table_new();

    pick_all(tenant, PCC_CHUNK_GRANTED);
    for (uint32_t i = 0; i < CHUNKS; i++)
        pcc_tenant_chunk_set(tenant, &tenant->chunks[i], PCC_CHUNK_CACHED);
    pick_all(tenant, PCC_CHUNK_GRANTED); /* the oldest content goes first */
    table_free(tenant);
}

static void test_what_is_spared_goes_last(void)
{
    struct pcc_tenant *tenant = table_new();

    for (uint32_t i = 0; i < CHUNKS; i++) {
        tenant->chunks[i].sequence = i < 10 ? 7 : 8;
        pcc_tenant_chunk_set(tenant, &tenant->chunks[i], PCC_CHUNK_CACHED);
    }
    CHECK_EQUAL(pcc_tenant_pick(tenant, 7, true), 10);
    CHECK_EQUAL(pcc_tenant_pick(tenant, 7, true), 10); /* free until it gets another state */
    for (uint32_t i = 10; i < CHUNKS; i++)
        pcc_tenant_chunk_set(tenant, &tenant->chunks[i], PCC_CHUNK_FULL);
    CHECK_EQUAL(pcc_tenant_pick(tenant, 7, true), 0);
    table_free(tenant);
}

static void test_what_retires_is_not_chosen(void)
{
    struct pcc_tenant *tenant = table_new();

    tenant->lasting_count = 1;
    pcc_tenant_chunks_retire(tenant);
    for (uint32_t i = 0; i < CHUNKS / 2; i++) {
        CHECK_EQUAL(pcc_tenant_pick(tenant, 0, false), i);
        pcc_tenant_chunk_set(tenant, &tenant->chunks[i], PCC_CHUNK_FULL);
    }
    pcc_tenant_chunk_free(tenant, CHUNKS - 1);
    CHECK_EQUAL(pcc_tenant_pick(tenant, 0, false), -1);
    table_free(tenant);
}

int main(void)
{
    RUN(test_a_step_for_each_chunk);
    RUN(test_what_is_spared_goes_last);
    RUN(test_what_retires_is_not_chosen);
    return 0;
}
