/* What a client refuses to copy. */
#include "client_fixture.h"

/* Before anything is copied: more GPUs than one in a chunk, GPUs that were not marked, bad numbers.
 */
static void test_bad_submissions(void)
{
    struct daemon d;
    struct stream streams[2];
    const CUdeviceptr memory = gpu_alloc(0, CHUNK), other = gpu_alloc(1, CHUNK);
    struct pcc_device_range ranges[] = {on_gpu(0, memory, 0, 100), on_gpu(1, other, 200, 100)};
    struct pcc_submission submission = {.device_ranges = ranges,
                                        .device_range_count = 2,
                                        .tail = "t",
                                        .tail_bytes = 1,
                                        .tail_offset_bytes = 3 * CHUNK};

    daemon_open(&d, 0);
    CHECK(pcc_client_request(d.client, 1) == 0);
    for (uint32_t i = 0; i < 2; i++) {
        stream_open(&streams[i], i);
        CHECK(pcc_client_mark(d.client, 1, i, handle(&streams[i]), false, false) == -EINVAL);
        CHECK(pcc_client_device_open(d.client, i) == 0);
    }
    CHECK(pcc_client_mark(d.client, 1, 0, handle(&streams[0]), false, false) == 0);
    CHECK(pcc_client_submit(d.client, 1, &submission) == -EINVAL); /* two GPUs in a chunk */
    ranges[1].offset_bytes = CHUNK;
    CHECK(pcc_client_submit(d.client, 1, &submission) == -EINVAL); /* one was not marked */
    ranges[1].device = PCC_DEVICES;
    CHECK(pcc_client_submit(d.client, 1, &submission) == -EINVAL);
    submission.device_range_count = 1;
    submission.pulled_bytes = CHUNK / 2;
    submission.pulled_devices = 1;
    CHECK(pcc_client_submit(d.client, 1, &submission) == -EINVAL); /* half a chunk */
    submission.pulled_bytes = CHUNK;
    CHECK(pcc_client_submit(d.client, 1, &submission) ==
          -EINVAL); /* a range in the daemon's part */
    submission.device_range_count = 0;
    CHECK(pcc_client_submit(d.client, 1, &submission) == -EINVAL); /* marked for push */
    submission.pulled_bytes = submission.pulled_devices = 0;
    CHECK(pcc_client_submit(d.client, 1, &submission) == 0);
    CHECK(pcc_client_abandon(d.client, 1));
    daemon_close(&d);
    for (uint32_t i = 0; i < 2; i++)
        stream_close(&streams[i]);
    gpu_free(0, memory);
    gpu_free(1, other);
}

int main(void)
{
    standin_open();
    RUN(test_bad_submissions);
    standin_close();
    return 0;
}
