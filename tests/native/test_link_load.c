/* Loads into device memory: checked chunks come, the link's thread copies them to where they
 * belong. */
#include "link_fixture.h"

/* Host memory and two GPUs, ranges that cut through chunks; a copy that is refused ends its load
 * alone. */
static void test_load(void)
{
    struct daemon d;
    uint8_t host[1000], expected[3 * CHUNK];
    const CUdeviceptr first = gpu_alloc(0, 2 * CHUNK), second = gpu_alloc(1, CHUNK);
    const struct pcc_range range = {(uintptr_t)host, CHUNK + 500, sizeof(host)};
    const struct pcc_device_range device_ranges[] = {on_gpu(0, first + 100, 10, CHUNK + 90),
                                                     on_gpu(0, first, CHUNK + 1600, 100),
                                                     on_gpu(1, second, 2 * CHUNK + 1, CHUNK - 1)};
    const struct pcc_device_range closed = on_gpu(2, first, 0, 1);

    daemon_open(&d, 0);
    CHECK(pcc_link_load_start(d.link, 1, NULL, 0, &closed, 1) == -EINVAL);
    CHECK(pcc_link_device_open(d.link, 0) == 0 && pcc_link_device_open(d.link, 1) == 0);
    for (uint64_t load = 1; load <= 3; load++) {
        pattern(expected, sizeof(expected), load);
        memcpy(d.chunks, expected, sizeof(expected));
        d.taken = 0;
        CHECK(pcc_link_load_start(d.link, load, &range, 1, device_ranges, 3) == 0);
        if (load == 2) { /* one of its copies is refused: the load ends, chunks come back */
            set(&control->copy_fail_kinds, STANDIN_TO_DEVICE);
            set(&control->copy_fail_code, CUDA_ERROR_INVALID_VALUE);
            set(&control->copy_fail_at, 2);
        }
        for (uint32_t i = 0; i < 3; i++)
            data(&d, load, i, (uint64_t)i * CHUNK, CHUNK);
        say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = load});
        const int result = pcc_link_load_wait(d.link, load, soon());
        CHECK_EQUAL(result, load == 2 ? -PCC_E_DEVICE : 0);
        UNTIL((listen_to(&d), d.taken == 3));
        set(&control->copy_fail_at, 0);
        if (load == 2)
            continue;
        CHECK(memcmp(at(first + 100), expected + 10, CHUNK + 90) == 0);
        CHECK(memcmp(at(first), expected + CHUNK + 1600, 100) == 0);
        CHECK(memcmp(at(second), expected + 2 * CHUNK + 1, CHUNK - 1) == 0);
        CHECK(memcmp(host, expected + CHUNK + 500, sizeof(host)) == 0);
    }
    daemon_close(&d);
    gpu_free(0, first);
    gpu_free(1, second);
}

/* A GPU that is lost during the load ends it; loads into host memory go on. */
static void test_lost_gpu(void)
{
    struct daemon d;
    uint8_t host[1000];
    const CUdeviceptr memory = gpu_alloc(2, CHUNK);
    const struct pcc_device_range device_range = on_gpu(2, memory, 0, CHUNK);
    const struct pcc_range range = {(uintptr_t)host, 0, sizeof(host)};

    daemon_open(&d, 0);
    CHECK(pcc_link_device_open(d.link, 2) == 0);
    set(&control->copy_fail_kinds, STANDIN_TO_DEVICE);
    set(&control->copy_fail_code, CUDA_ERROR_ILLEGAL_ADDRESS);
    set(&control->copy_fail_async, 1);
    set(&control->copy_fail_at, 1);
    CHECK(pcc_link_load_start(d.link, 1, NULL, 0, &device_range, 1) == 0);
    data(&d, 1, 0, 0, CHUNK);
    CHECK_EQUAL(pcc_link_load_wait(d.link, 1, soon()), -PCC_E_DEVICE_LOST);
    set(&control->copy_fail_at, 0);
    set(&control->copy_fail_async, 0);
    UNTIL((listen_to(&d), d.taken == 1));
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 1});
    CHECK(pcc_link_load_start(d.link, 2, NULL, 0, &device_range, 1) == -PCC_E_DEVICE);
    CHECK(pcc_link_load_start(d.link, 3, &range, 1, NULL, 0) == 0);
    pattern(d.chunks, sizeof(host), 3);
    data(&d, 3, 0, 0, sizeof(host));
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 3});
    CHECK(pcc_link_load_wait(d.link, 3, soon()) == 0);
    CHECK(memcmp(host, d.chunks, sizeof(host)) == 0);
    pcc_link_close(d.link); /* what a lost context held is never seen again */
    CHECK(close(d.sockets[0]) == 0 && close(d.sockets[1]) == 0);
    free(d.payload);
}

int main(void)
{
    standin_open();
    RUN(test_load);
    RUN(test_lost_gpu);
    standin_close();
    return 0;
}
