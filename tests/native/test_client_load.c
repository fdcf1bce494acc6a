/* Loads: chunks come, the client's thread checks them and copies them to where they belong. */
#include "client/pcc_client_private.h"
#include "client_fixture.h"

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
    CHECK(pcc_client_load_start(d.client, 1, NULL, 0, &closed, 1) == -EINVAL);
    CHECK(pcc_client_device_open(d.client, 0) == 0 && pcc_client_device_open(d.client, 1) == 0);
    for (uint64_t load = 1; load <= 3; load++) {
        pattern(expected, sizeof(expected), load);
        memcpy(d.chunks, expected, sizeof(expected));
        d.taken = 0;
        CHECK(pcc_client_load_start(d.client, load, &range, 1, device_ranges, 3) == 0);
        if (load == 2) { /* one of its copies is refused: the load ends, chunks come back */
            set(&control->copy_fail_kinds, STANDIN_TO_DEVICE);
            set(&control->copy_fail_code, CUDA_ERROR_INVALID_VALUE);
            set(&control->copy_fail_at, 2);
        }
        for (uint32_t i = 0; i < 3; i++)
            data(&d, load, i, (uint64_t)i * CHUNK, CHUNK);
        say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = load});
        const int result = pcc_client_load_wait(d.client, load, soon());
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

/* A block that does not match its checksum does not reach host memory, and the daemon learns which
 * chunk has it; what the daemon has checked itself is not doubted. */
static void test_damaged(void)
{
    struct daemon d;
    static uint8_t host[2 * CHUNK], expected[2 * CHUNK], nothing[CHUNK];
    const struct pcc_range range = {(uintptr_t)host, 0, 2 * CHUNK};

    daemon_open(&d, 0);
    pattern(expected, sizeof(expected), 8);
    memcpy(d.chunks, expected, sizeof(expected));
    CHECK(pcc_client_load_start(d.client, 1, &range, 1, NULL, 0) == 0);
    data(&d, 1, 0, 0, CHUNK);
    UNTIL((listen_to(&d), d.taken == 1));
    CHECK_EQUAL(d.damaged, 0);
    struct pcc_message message = {
        .kind = PCC_MSG_DATA, .chunk = 1, .id = 1, .offset_bytes = CHUNK, .length_bytes = CHUNK};
    checksums_put(&d, 1, CHUNK);
    d.chunks[CHUNK + 5] ^= 1;
    say(&d, &message);
    UNTIL((listen_to(&d), d.taken == 2));
    CHECK_EQUAL(d.damaged, 1);
    CHECK(memcmp(host, expected, CHUNK) == 0);
    CHECK(memcmp(host + CHUNK, nothing, BLOCK) == 0);
    d.chunks[CHUNK + 5] ^= 1;
    memset(pcc_page_checksums(&d.view, 1), 0, CHUNK / BLOCK * sizeof(uint64_t));
    message.result = PCC_DATA_CHECKED;
    say(&d, &message);
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 1});
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, soon()), 0);
    UNTIL((listen_to(&d), d.taken == 3));
    CHECK_EQUAL(d.damaged, 1);
    CHECK(memcmp(host, expected, sizeof(expected)) == 0);
    daemon_close(&d);
}

/* A GPU copies while the checksums are made. The daemon learns that the chunk was damaged when the
 * GPU has read it, not before, and sends the right bytes in another chunk, or fails the load. */
static void test_damaged_on_its_way_to_a_gpu(void)
{
    static uint8_t expected[CHUNK], host[8];
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);
    const struct pcc_device_range device_range = on_gpu(0, memory, 0, CHUNK);
    const struct pcc_range range = {(uintptr_t)host, CHUNK, sizeof(host)};
    struct daemon d;

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    pattern(expected, sizeof(expected), 9);
    for (uint64_t load = 1; load <= 2; load++) {
        d.taken = d.damaged = 0;
        memcpy(d.chunks, expected, CHUNK);
        CHECK(pcc_client_load_start(d.client, load, &range, 1, &device_range, 1) == 0);
        set(&control->copy_hold_kinds, STANDIN_TO_DEVICE);
        checksums_put(&d, 0, CHUNK);
        d.chunks[CHUNK - 1] ^= 1;
        say(&d, &(struct pcc_message){
                    .kind = PCC_MSG_DATA, .chunk = 0, .id = load, .length_bytes = CHUNK});
        data(&d, load, 1, CHUNK, sizeof(host)); /* behind it, and for host memory alone */
        UNTIL((listen_to(&d), d.taken == 1));
        CHECK_EQUAL(seen(&control->to_device_queued), CHUNK);
        CHECK_EQUAL(d.damaged, 0);
        set(&control->copy_hold_kinds, 0);
        UNTIL((listen_to(&d), d.taken == 2));
        CHECK_EQUAL(d.damaged, 1);
        CHECK_EQUAL(pcc_client_wait(d.client, load, PCC_WAIT_LOAD, pcc_now_ns()), -ETIMEDOUT);
        if (load == 2) { /* the disk has no other bytes */
            say(&d,
                &(struct pcc_message){.kind = PCC_MSG_END, .id = load, .result = -PCC_E_DAMAGED});
            CHECK_EQUAL(pcc_client_load_wait(d.client, load, soon()), -PCC_E_DAMAGED);
            continue;
        }
        memcpy(d.chunks + 2 * (size_t)CHUNK, expected, CHUNK);
        data(&d, load, 2, 0, CHUNK);
        say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = load});
        CHECK_EQUAL(pcc_client_load_wait(d.client, load, soon()), 0);
        CHECK(memcmp(at(memory), expected, CHUNK) == 0);
        UNTIL((listen_to(&d), d.taken == 3));
        CHECK_EQUAL(d.damaged, 1);
    }
    daemon_close(&d);
    gpu_free(0, memory);
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
    CHECK(pcc_client_device_open(d.client, 2) == 0);
    set(&control->copy_fail_kinds, STANDIN_TO_DEVICE);
    set(&control->copy_fail_code, CUDA_ERROR_ILLEGAL_ADDRESS);
    set(&control->copy_fail_async, 1);
    set(&control->copy_fail_at, 1);
    CHECK(pcc_client_load_start(d.client, 1, NULL, 0, &device_range, 1) == 0);
    data(&d, 1, 0, 0, CHUNK);
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, soon()), -PCC_E_DEVICE_LOST);
    set(&control->copy_fail_at, 0);
    set(&control->copy_fail_async, 0);
    UNTIL((listen_to(&d), d.taken == 1));
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 1});
    CHECK(pcc_client_load_start(d.client, 2, NULL, 0, &device_range, 1) == -PCC_E_DEVICE);
    CHECK(pcc_client_load_start(d.client, 3, &range, 1, NULL, 0) == 0);
    pattern(d.chunks, sizeof(host), 3);
    data(&d, 3, 0, 0, sizeof(host));
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 3});
    CHECK(pcc_client_load_wait(d.client, 3, soon()) == 0);
    CHECK(memcmp(host, d.chunks, sizeof(host)) == 0);
    pcc_client_close(d.client); /* what a lost context held is never seen again */
    CHECK(close(d.sockets[0]) == 0 && close(d.sockets[1]) == 0);
    free(d.payload);
}

/* Chunks [0, count) of a load that fills `memory`, and the end. */
static void send_all(struct daemon *d, uint64_t load, CUdeviceptr memory, uint32_t count)
{
    const struct pcc_device_range range = on_gpu(0, memory, 0, (uint64_t)count * CHUNK);

    CHECK(pcc_client_load_start(d->client, load, NULL, 0, &range, 1) == 0);
    for (uint32_t i = 0; i < count; i++)
        data(d, load, i, (uint64_t)i * CHUNK, CHUNK);
    say(d, &(struct pcc_message){.kind = PCC_MSG_END, .id = load});
}

/* The chunks of a load are on their way together. Each comes back when the GPU has read it, not
 * before, and the load is over when the last one has. */
static void test_many_in_flight(void)
{
    const uint32_t count = 6;
    const CUdeviceptr memory = gpu_alloc(0, (uint64_t)count * CHUNK);
    struct daemon d;

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    pattern(d.chunks, (uint64_t)count * CHUNK, 4);
    set(&control->copy_hold_skip, 2);
    set(&control->copy_hold_kinds, STANDIN_TO_DEVICE);
    send_all(&d, 1, memory, count);
    UNTIL(seen(&control->to_device_queued) == (uint64_t)(count - 2) * CHUNK);
    UNTIL((listen_to(&d), d.taken == 2));
    CHECK_EQUAL(pcc_client_wait(d.client, 1, PCC_WAIT_LOAD, pcc_now_ns()), -ETIMEDOUT);
    CHECK(pcc_client_load_start(d.client, 2, NULL, 0, NULL, 0) == -EBUSY);
    listen_to(&d);
    CHECK_EQUAL(d.taken, 2);
    set(&control->copy_hold_kinds, 0);
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, soon()), 0);
    CHECK(memcmp(at(memory), d.chunks, (uint64_t)count * CHUNK) == 0);
    UNTIL((listen_to(&d), d.taken == count));
    daemon_close(&d);
    gpu_free(0, memory);
}

/* Many small ranges: no more copies are on their way than a stream's queue takes. */
static void test_many_pieces(void)
{
    const uint32_t count = 8, per_chunk = 300, step = 200;
    const CUdeviceptr memory = gpu_alloc(0, (uint64_t)count * CHUNK);
    struct pcc_device_range *ranges = calloc((size_t)count * per_chunk, sizeof(*ranges));
    struct daemon d;

    CHECK(ranges != NULL);
    for (uint32_t i = 0; i < count * per_chunk; i++) {
        const uint64_t offset =
            (uint64_t)(i / per_chunk) * CHUNK + (uint64_t)(i % per_chunk) * step;
        ranges[i] = on_gpu(0, memory + offset, offset, 4);
    }
    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    pattern(d.chunks, (uint64_t)count * CHUNK, 5);
    set(&control->to_device_queued_most, 0);
    set(&control->copy_hold_kinds, STANDIN_TO_DEVICE);
    CHECK(pcc_client_load_start(d.client, 1, NULL, 0, ranges, (uint64_t)count * per_chunk) == 0);
    for (uint32_t i = 0; i < count; i++)
        data(&d, 1, i, (uint64_t)i * CHUNK, CHUNK);
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 1});
    UNTIL(seen(&control->to_device_queued) == per_chunk * 4);
    set(&control->copy_hold_kinds, 0);
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, soon()), 0);
    CHECK(seen(&control->to_device_queued_most) <= 512 * 4);
    for (uint32_t i = 0; i < count * per_chunk; i++)
        CHECK(memcmp(at(ranges[i].address), d.chunks + ranges[i].offset_bytes, 4) == 0);
    UNTIL((listen_to(&d), d.taken == count));
    daemon_close(&d);
    gpu_free(0, memory);
    free(ranges);
}

/* A caller that stops waiting returns when nothing writes to its memory any more. The next load is
 * not disturbed by what the daemon still sends of this one. */
static void test_broken_off(void)
{
    const uint32_t count = 4;
    const CUdeviceptr memory = gpu_alloc(0, (uint64_t)count * CHUNK);
    struct daemon d;

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    pattern(d.chunks, (uint64_t)count * CHUNK, 6);
    set(&control->copy_us_per_mib, 100000);
    set(&control->copy_slow_kinds, STANDIN_TO_DEVICE);
    send_all(&d, 1, memory, count);
    UNTIL(seen(&control->to_device_queued) > 0);
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, 1), -ETIMEDOUT);
    CHECK_EQUAL(seen(&control->to_device_queued), 0);
    set(&control->copy_slow_kinds, 0);
    UNTIL((listen_to(&d), d.taken == count));
    pattern(d.chunks, (uint64_t)count * CHUNK, 7);
    send_all(&d, 2, memory, count);
    CHECK_EQUAL(pcc_client_load_wait(d.client, 2, soon()), 0);
    CHECK(memcmp(at(memory), d.chunks, (uint64_t)count * CHUNK) == 0);
    UNTIL((listen_to(&d), d.taken == 2 * count));
    daemon_close(&d);
    gpu_free(0, memory);
}

/* The daemon hangs up while copies are on their way: they are waited for. */
static void test_hang_up(void)
{
    const CUdeviceptr memory = gpu_alloc(0, 2 * CHUNK);
    const struct pcc_device_range range = on_gpu(0, memory, 0, 2 * CHUNK);
    struct daemon d;

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    set(&control->copy_hold_kinds, STANDIN_TO_DEVICE);
    CHECK(pcc_client_load_start(d.client, 1, NULL, 0, &range, 1) == 0);
    data(&d, 1, 0, 0, CHUNK);
    data(&d, 1, 1, CHUNK, CHUNK);
    UNTIL(seen(&control->to_device_queued) == 2 * CHUNK);
    CHECK(close(d.sockets[0]) == 0);
    d.sockets[0] = -1;
    pcc_bell_ring(&d.view.page->client_bell);
    CHECK_EQUAL(pcc_client_wait(d.client, 1, PCC_WAIT_LOAD, pcc_now_ns() + SECOND / 20),
                -ETIMEDOUT);
    set(&control->copy_hold_kinds, 0);
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, soon()), -ECONNRESET);
    CHECK_EQUAL(seen(&control->to_device_queued), 0);
    daemon_close(&d);
    gpu_free(0, memory);
}

/* A GPU that never ends its copies is given up: no call waits for ever. */
static void test_dead_gpu(void)
{
    const CUdeviceptr memory = gpu_alloc(3, 2 * CHUNK);
    const struct pcc_device_range range = on_gpu(3, memory, 0, 2 * CHUNK);
    struct daemon d;

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 3) == 0);
    atomic_store(&d.client->patience_ns, SECOND / 50);
    set(&control->copy_hold_kinds, STANDIN_TO_DEVICE);
    CHECK(pcc_client_load_start(d.client, 1, NULL, 0, &range, 1) == 0);
    data(&d, 1, 0, 0, CHUNK);
    data(&d, 1, 1, CHUNK, CHUNK);
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, soon()), -PCC_E_DEVICE_LOST);
    UNTIL((listen_to(&d), d.taken == 2));
    set(&control->copy_hold_kinds, 0);
    daemon_close(&d);
    gpu_free(3, memory);
}

/* After any answer of the daemon the next load can begin. */
static void test_every_end_is_one(void)
{
    struct daemon d;
    const int results[] = {0, -ENOENT, -PCC_E_DAMAGED, -EIO, -EBUSY};

    daemon_open(&d, 0);
    for (uint64_t i = 0; i < sizeof(results) / sizeof(results[0]); i++) {
        CHECK_EQUAL(pcc_client_load_start(d.client, i + 1, NULL, 0, NULL, 0), 0);
        say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = i + 1, .result = results[i]});
        CHECK_EQUAL(pcc_client_load_wait(d.client, i + 1, soon()), results[i]);
    }
    daemon_close(&d);
}

int main(void)
{
    standin_open();
    RUN(test_load);
    RUN(test_damaged);
    RUN(test_damaged_on_its_way_to_a_gpu);
    RUN(test_every_end_is_one);
    RUN(test_many_in_flight);
    RUN(test_many_pieces);
    RUN(test_broken_off);
    RUN(test_hang_up);
    RUN(test_dead_gpu);
    RUN(test_lost_gpu);
    standin_close();
    return 0;
}
