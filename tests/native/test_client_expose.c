/* The exposure: what the client sends about device memory, and how long it is valid. */
#include "client_fixture.h"

struct exposure {
    struct pcc_exposure head;
    struct pcc_exposed_allocation allocations[8];
    struct pcc_exposed_range ranges[8];
};

static int expose(struct daemon *d, const struct pcc_device_range *ranges, uint64_t count,
                  struct exposure *out)
{
    uint8_t *bytes;
    uint64_t length;
    const int error = pcc_client_expose(d->client, ranges, count, 4 * CHUNK, &bytes, &length);

    if (error != 0)
        return error;
    memcpy(&out->head, bytes, sizeof(out->head));
    CHECK(out->head.allocation_count <= 8 && out->head.range_count <= 8);
    const size_t allocations = out->head.allocation_count * sizeof(*out->allocations);
    const size_t merged = out->head.range_count * sizeof(*out->ranges);
    CHECK_EQUAL(length, sizeof(out->head) + allocations + merged);
    memcpy(out->allocations, bytes + sizeof(out->head), allocations);
    memcpy(out->ranges, bytes + sizeof(out->head) + allocations, merged);
    free(bytes);
    CHECK(out->head.magic == PCC_EXPOSURE_MAGIC && out->head.device_bytes == 4 * CHUNK);
    return 0;
}

/* The allocation of that memory; its handle is the one that the driver gives. */
static uint32_t index_of(const struct exposure *exposure, CUdeviceptr base, uint32_t gpu)
{
    CUipcMemHandle wanted;
    uint32_t i = 0;

    CHECK(pcc_gpu_enter(&gpus[gpu]) == 0);
    CHECK(cuda->ipc_get(&wanted, base) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[gpu]);
    while (memcmp(exposure->allocations[i].handle, &wanted, sizeof(wanted)) != 0)
        CHECK(++i < exposure->head.allocation_count);
    CHECK(exposure->allocations[i].device == gpu);
    CHECK(memcmp(exposure->allocations[i].uuid, &gpus[gpu].uuid, 16) == 0);
    return i;
}

static void range_is(const struct pcc_exposed_range *range, uint32_t allocation, uint64_t into,
                     uint64_t offset, uint64_t length)
{
    CHECK_EQUAL(range->allocation, allocation);
    CHECK_EQUAL(range->allocation_offset_bytes, into);
    CHECK_EQUAL(range->offset_bytes, offset);
    CHECK_EQUAL(range->length_bytes, length);
}

static void test_exposure(void)
{
    struct daemon d;
    struct exposure first, second;
    uint64_t staging;
    const CUdeviceptr a = gpu_alloc(0, 2 * CHUNK), b = gpu_alloc(1, CHUNK);
    struct pcc_device_range ranges[] = {
        {a, 0, 1000, 0, 0},              /* neighbours in memory and payload */
        {a + 1000, 1000, 500, 0, 0},     /* one with it */
        {a + 1500, 2000, 500, 0, 0},     /* a gap in the payload */
        {a + 3000, 2500, 500, 0, 0},     /* a gap in memory */
        {b, 2 * CHUNK, CHUNK, 1, 0},     /* all of it, and another GPU */
        {b + 16, 3 * CHUNK, 100, 1, 0}}; /* once more: its business */

    daemon_open(&d, 0);
    CHECK(expose(&d, ranges, 6, &first) == -EINVAL); /* not open */
    CHECK(pcc_client_exposure_holds(d.client));
    CHECK(pcc_client_device_open(d.client, 0) == 0 && pcc_client_device_open(d.client, 1) == 0);
    CHECK(expose(&d, ranges, 6, &first) == 0);
    CHECK(pcc_client_staging(d.client, 0, 0, &staging) == 0);
    CHECK(first.head.allocation_count == 3 && first.head.range_count == 5);
    const uint32_t of_a = index_of(&first, a, 0), of_b = index_of(&first, b, 1);
    range_is(&first.ranges[0], of_a, 0, 0, 1500);
    range_is(&first.ranges[1], of_a, 1500, 2000, 500);
    range_is(&first.ranges[2], of_a, 3000, 2500, 500);
    range_is(&first.ranges[3], of_b, 0, 2 * CHUNK, CHUNK);
    range_is(&first.ranges[4], of_b, 16, 3 * CHUNK, 100);
    CHECK_EQUAL(first.allocations[of_a].length_bytes, 2 * CHUNK);
    CHECK_EQUAL(first.head.probe_allocation, index_of(&first, staging, 0));
    CHECK(memcmp(at(staging) + first.head.probe_offset_bytes, first.head.probe, 16) == 0);
    CHECK(first.head.probe_offset_bytes >= 65536);

    /* Handles are asked for once; the probe is fresh. */
    set(&control->export_fail_code, CUDA_ERROR_INVALID_VALUE);
    set(&control->export_fail_count, STANDIN_ALWAYS);
    CHECK(expose(&d, ranges, 6, &second) == 0);
    set(&control->export_fail_count, 0);
    CHECK(memcmp(first.allocations, second.allocations, 3 * sizeof(*first.allocations)) == 0);
    CHECK(memcmp(first.head.probe, second.head.probe, 16) != 0);
    CHECK(memcmp(at(staging) + first.head.probe_offset_bytes, second.head.probe, 16) == 0);

    /* What cannot be exposed. */
    ranges[4].length_bytes = CHUNK + 1;
    CHECK(expose(&d, ranges, 5, &second) == -PCC_E_BAD_HANDLE); /* beyond its allocation */
    ranges[4].length_bytes = 2 * CHUNK + 1;
    CHECK(expose(&d, ranges, 5, &second) == -EINVAL); /* beyond the payload */
    ranges[4].length_bytes = 0;
    CHECK(expose(&d, ranges, 5, &second) == -EINVAL);
    CHECK(expose(&d, ranges, 0, &second) == -EINVAL);
    ranges[1].offset_bytes = 999;
    CHECK(expose(&d, ranges, 4, &second) == -EINVAL); /* overlap */
    ranges[1].offset_bytes = 1000;
    CUdeviceptr unshareable;
    CHECK(pcc_gpu_enter(&gpus[0]) == 0);
    CHECK(alloc_unshareable(&unshareable, CHUNK) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[0]);
    ranges[0].address = unshareable;
    CHECK(expose(&d, ranges, 4, &second) == -PCC_E_BAD_HANDLE);
    ranges[0].address = (uintptr_t)&d;
    CHECK(expose(&d, ranges, 4, &second) == -PCC_E_BAD_HANDLE); /* no device memory at all */

    /* Freed, or freed and allocated anew at the same place: not what was exposed. */
    CHECK(pcc_client_exposure_holds(d.client));
    gpu_free(1, b);
    CHECK(!pcc_client_exposure_holds(d.client));
    const CUdeviceptr c = gpu_alloc(1, CHUNK);
    CHECK(!pcc_client_exposure_holds(d.client));
    ranges[0].address = a;
    ranges[4] = (struct pcc_device_range){c, 2 * CHUNK, CHUNK, 1, 0};
    CHECK(expose(&d, ranges, 5, &second) == 0 && pcc_client_exposure_holds(d.client));
    CHECK(first.allocations[of_b].buffer_id !=
          second.allocations[index_of(&second, c, 1)].buffer_id);
    daemon_close(&d);
    gpu_free(0, a);
    gpu_free(0, unshareable);
    gpu_free(1, c);
}

/* Very many small tensors, as torch's allocator puts them: every `step` bytes in memory. */
static uint64_t tiny(struct daemon *d, CUdeviceptr base, uint64_t count, uint64_t step,
                     uint64_t payload_step)
{
    struct pcc_device_range *ranges = calloc(count, sizeof(*ranges));
    struct pcc_exposure head = {0};
    uint8_t *bytes;
    uint64_t length;

    CHECK(ranges != NULL);
    for (uint64_t i = 0; i < count; i++)
        ranges[i] = on_gpu(0, base + i * step, i * payload_step, 4);
    const int error =
        pcc_client_expose(d->client, ranges, count, count * payload_step, &bytes, &length);
    free(ranges);
    if (error != 0) {
        CHECK_EQUAL(error, -PCC_E_TOO_LARGE);
        return 0;
    }
    memcpy(&head, bytes, sizeof(head));
    free(bytes);
    return head.range_count;
}

static void test_tiny(void)
{
    const uint64_t many = PCC_EXPOSED_RANGES_MAX + 1;
    const CUdeviceptr memory = gpu_alloc(0, many * 512);
    struct daemon d;

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    CHECK_EQUAL(tiny(&d, memory, many, 512, 512), 1); /* they have kept their distance */
    CHECK_EQUAL(tiny(&d, memory, 1000, 512, 64), 1000);
    CHECK_EQUAL(tiny(&d, memory, 1000, 520, 520), 1000); /* too far apart */
    CHECK_EQUAL(tiny(&d, memory, many - 1, 8, 12), many - 1);
    CHECK_EQUAL(tiny(&d, memory, many, 8, 12), 0); /* more than are exposed */
    daemon_close(&d);
    gpu_free(0, memory);
}

int main(void)
{
    standin_open();
    RUN(test_exposure);
    RUN(test_tiny);
    standin_close();
    return 0;
}
