/* The exposure: what the client sends about device memory, and how long it is valid. */
#include <sys/stat.h>

#include "client_fixture.h"

struct exposure {
    struct pcc_exposure head;
    struct pcc_exposed_allocation allocations[8];
    struct pcc_exposed_range ranges[8];
};

static int expose_knowing(struct daemon *d, const struct pcc_device_range *ranges, uint64_t count,
                          bool known, struct exposure *out)
{
    uint8_t *bytes;
    uint64_t length;
    const int error =
        pcc_client_expose(d->client, ranges, count, 4 * CHUNK, &no_replica, known, &bytes, &length);

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

static int expose(struct daemon *d, const struct pcc_device_range *ranges, uint64_t count,
                  struct exposure *out)
{
    return expose_knowing(d, ranges, count, false, out);
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

/* Between two ranges of the replica there may be the place of a tensor that this rank has
 * elsewhere: what lies between them in memory is not it. */
static void test_replica_gap(void)
{
    struct daemon d;
    uint8_t *bytes;
    uint64_t length;
    struct pcc_exposure head;
    const CUdeviceptr a = gpu_alloc(0, 2 * CHUNK);
    const struct pcc_device_range ranges[] = {{a, 0, 1000, 0, 0}};
    const struct pcc_device_range whole[] = {
        {a, 64, 1000, 0, 0},          /* ends at 1064 */
        {a + 1024, 1088, 448, 0, 0},  /* no other tensor fits between them */
        {a + 1536, 1600, 100, 0, 0}}; /* one of 64 bytes does */
    const struct pcc_client_replica replica = {.id = 7, .ranges = whole, .range_count = 3};

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    CHECK(pcc_client_expose(d.client, ranges, 1, CHUNK, &replica, false, &bytes, &length) == 0);
    memcpy(&head, bytes, sizeof(head));
    CHECK_EQUAL(head.replica_count, 2);
    const uint8_t *at = bytes + sizeof(head) +
                        head.allocation_count * sizeof(struct pcc_exposed_allocation) +
                        head.range_count * sizeof(struct pcc_exposed_range);
    struct pcc_exposed_range found[2];
    memcpy(found, at, sizeof(found));
    range_is(&found[0], found[0].allocation, 0, 64, 1472);
    range_is(&found[1], found[0].allocation, 1536, 1600, 100);
    free(bytes);
    daemon_close(&d);
    gpu_free(0, a);
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
    const int error = pcc_client_expose(d->client, ranges, count, count * payload_step, &no_replica,
                                        false, &bytes, &length);
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

/* -- memory with descriptors -- */

#define PIECE (2ull << 20)

static void piece_make(CUdeviceptr address, uint64_t length, int handle_types)
{
    const CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                            .requestedHandleTypes = handle_types,
                                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                    CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);

    *(void **)&create = dlsym(dlopen(STANDIN, RTLD_NOW), "cuMemCreate");
    CHECK(create(&handle, length, &properties, 0) == 0);
    CHECK(cuda->piece_map(address, length, 0, handle, 0) == 0);
    CHECK(cuda->piece_release(handle) == 0);
    CHECK(cuda->access_set(address, length, &access, 1) == 0);
}

/* How many descriptors there are, `at_once` at a time; each is of another file. */
static uint32_t descriptors_count(struct daemon *d, uint32_t at_once)
{
    uint32_t count, sum = 0;
    ino_t seen[16];
    int fds[16];

    do {
        CHECK(pcc_client_descriptors(d->client, fds, at_once, &count) == 0 && count <= at_once);
        for (uint32_t i = 0; i < count; i++, sum++) {
            struct stat about;
            CHECK(sum < 16 && fstat(fds[i], &about) == 0 && close(fds[i]) == 0);
            seen[sum] = about.st_ino;
            for (uint32_t k = 0; k < sum; k++)
                CHECK(seen[k] != about.st_ino);
        }
    } while (count > 0);
    return sum;
}

static void test_pieces(void)
{
    struct daemon d;
    struct exposure first, second;
    CUdeviceptr segment, a = gpu_alloc(0, CHUNK);

    CHECK(pcc_gpu_enter(&gpus[0]) == 0);
    CHECK(cuda->address_reserve(&segment, 16 * PIECE, 0, 0, 0) == 0);
    for (uint32_t i = 0; i < 5; i++)
        piece_make(segment + i * PIECE, PIECE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    piece_make(segment + 5 * PIECE, 2 * PIECE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    piece_make(segment + 9 * PIECE, PIECE, 0);
    struct pcc_device_range ranges[] = {
        {segment + PIECE - 100, 0, 200, 0, 0},     /* of pieces 0 and 1 */
        {segment + PIECE + 100, 200, 300, 0, 0},   /* its neighbour */
        {segment + 2 * PIECE, 1000, 100, 0, 0},    /* piece 2: the same run */
        {segment + 4 * PIECE, 2000, 100, 0, 0},    /* not its neighbour: another run */
        {segment + 5 * PIECE + 8, 3000, 50, 0, 0}, /* a larger piece: a third one */
        {a, CHUNK, 100, 0, 0}};

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    CHECK(expose(&d, ranges, 6, &first) == 0);
    CHECK(first.head.allocation_count == 5 && first.head.range_count == 5);
    uint32_t run = first.ranges[0].allocation;
    range_is(&first.ranges[0], run, PIECE - 100, 0, 500);
    range_is(&first.ranges[1], run, 2 * PIECE, 1000, 100);
    CHECK(first.allocations[run].pieces == 3 && first.allocations[run].length_bytes == 3 * PIECE);
    CHECK(first.allocations[first.ranges[2].allocation].pieces == 1);
    CHECK_EQUAL(first.allocations[first.ranges[3].allocation].length_bytes, 2 * PIECE);
    CHECK_EQUAL(first.allocations[first.ranges[4].allocation].pieces, 0);
    CHECK_EQUAL(descriptors_count(&d, 2), 5);
    CHECK(pcc_client_exposure_holds(d.client));

    /* What the daemon has keeps its name, and needs no descriptors; a run that grew does. */
    CHECK(expose_knowing(&d, ranges, 6, true, &second) == 0);
    CHECK(memcmp(first.allocations, second.allocations, 5 * sizeof(*first.allocations)) == 0);
    CHECK_EQUAL(descriptors_count(&d, 16), 0);
    ranges[2].address += PIECE - 50;
    CHECK(expose_knowing(&d, ranges, 6, true, &second) == 0);
    CHECK_EQUAL(second.allocations[second.ranges[0].allocation].pieces, 5);
    CHECK_EQUAL(descriptors_count(&d, 16), 5);
    CHECK(expose(&d, ranges, 6, &second) == 0); /* the daemon has refused it */
    CHECK_EQUAL(descriptors_count(&d, 16), 6);

    /* Other memory at the same address. */
    CHECK(expose(&d, ranges, 6, &first) == 0);
    CHECK(cuda->piece_unmap(segment + 4 * PIECE, PIECE) == 0);
    CHECK(!pcc_client_exposure_holds(d.client));
    piece_make(segment + 4 * PIECE, PIECE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CHECK(!pcc_client_exposure_holds(d.client));
    CHECK(expose_knowing(&d, ranges, 6, true, &second) == 0);
    run = second.ranges[0].allocation;
    CHECK(memcmp(first.allocations[run].handle, second.allocations[run].handle, 64) != 0);

    /* Memory without descriptors, a tensor in pieces of two lengths, and one beyond what is mapped.
     */
    const CUdeviceptr wrong[] = {segment + 9 * PIECE, segment + 5 * PIECE - 10,
                                 segment + 7 * PIECE - 10};
    for (uint32_t i = 0; i < 3; i++) {
        ranges[5].address = wrong[i];
        CHECK(expose(&d, ranges, 6, &second) == -PCC_E_BAD_HANDLE);
    }
    CHECK(cuda->piece_unmap(segment, PIECE) == 0);
    CHECK(expose(&d, ranges, 5, &second) == -PCC_E_BAD_HANDLE);
    pcc_gpu_leave(&gpus[0]);
    daemon_close(&d);
    gpu_free(0, a);
    CHECK(pcc_gpu_enter(&gpus[0]) == 0);
    for (uint32_t i = 1; i < 5; i++)
        CHECK(cuda->piece_unmap(segment + i * PIECE, PIECE) == 0);
    CHECK(cuda->piece_unmap(segment + 5 * PIECE, 2 * PIECE) == 0);
    CHECK(cuda->piece_unmap(segment + 9 * PIECE, PIECE) == 0);
    CHECK(cuda->address_free(segment, 16 * PIECE) == 0);
    CHECK_EQUAL(control->allocations, 0); /* nobody has kept a handle */
    pcc_gpu_leave(&gpus[0]);
}

int main(void)
{
    standin_open();
    RUN(test_exposure);
    RUN(test_replica_gap);
    RUN(test_pieces);
    RUN(test_tiny);
    standin_close();
    return 0;
}
