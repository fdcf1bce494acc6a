/* Segments that the daemon asks for: the client gives back what it does not use, and nothing that
 * it uses. */
#include "client/pcc_client_private.h"
#include "client_fixture.h"

static void retire(struct daemon *d, uint64_t number, uint32_t first)
{
    d->retiring = true;
    say(d, &(struct pcc_message){.kind = PCC_MSG_RETIRE, .chunk = first, .id = number});
}

/* Mappings of segments: the test's own, and the client's. The page is there twice. */
static uint32_t mappings(void)
{
    return check_mappings("memfd:test") - 2;
}

/* Other memory at the same chunk numbers. */
static void grant_anew(struct daemon *d, uint32_t number, uint32_t first, uint32_t count)
{
    int fd;
    void *fresh = sealed((uint64_t)count * CHUNK, &fd);

    CHECK(munmap(fresh, (uint64_t)count * CHUNK) == 0);
    CHECK(mmap(d->chunks + (size_t)first * CHUNK, (uint64_t)count * CHUNK, PROT_READ | PROT_WRITE,
               MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED);
    grant(d, fd, number, first, count);
    CHECK(close(fd) == 0);
    d->retiring = false;
}

static void copy_host(struct daemon *d, uint64_t snapshot, uint64_t length)
{
    uint8_t *bytes = malloc(length);
    const struct pcc_range range = {(uintptr_t)bytes, 0, length};
    const struct pcc_submission submission = {
        .ranges = &range, .range_count = 1, .tail_offset_bytes = length};

    CHECK(bytes != NULL);
    pattern(bytes, length, snapshot);
    CHECK(pcc_client_request(d->client, snapshot) == 0);
    CHECK(pcc_client_submit(d->client, snapshot, &submission) == 0);
    admit(d, snapshot);
    collect(d, length);
    CHECK(pcc_client_wait(d->client, snapshot, PCC_WAIT_READ, soon()) == 0);
    CHECK(memcmp(d->payload, bytes, length) == 0);
    CHECK(word_to(d, snapshot, PCC_WORD_COPYING, PCC_WORD_COPIED));
    free(bytes);
}

/* Half of the memory goes and comes back as other memory, again and again; then all of it goes. */
static void test_idle(void)
{
    struct daemon d;
    const uint32_t half = CHUNKS / 2;

    daemon_open(&d, 3);
    copy_host(&d, 1, 5 * CHUNK + 10);
    CHECK_EQUAL(mappings(), 2);
    retire(&d, 1, 0);
    UNTIL((listen_to(&d), d.returned == 1));
    CHECK_EQUAL(d.taken, 3);
    CHECK_EQUAL(mappings(), 1);
    grant_anew(&d, 2, 0, half);
    free_chunks(&d, 0, 2);
    for (uint32_t number = 3; number < 20; number++) {
        grant_anew(&d, number, half, half);
        free_chunks(&d, half, 2);
        copy_host(&d, 2 * number, 9 * CHUNK + number);
        CHECK_EQUAL(mappings(), 4);
        d.taken = d.returned = 0;
        retire(&d, number, half);
        UNTIL((listen_to(&d), d.returned == 1));
        CHECK_EQUAL(d.taken, 2); /* the other two are still the client's */
        CHECK_EQUAL(mappings(), 3);
        d.retiring = false;
        copy_host(&d, 2 * number + 1, 3 * CHUNK);
    }
    retire(&d, 2, 0);
    UNTIL((listen_to(&d), d.returned == 2));
    CHECK_EQUAL(mappings(), 2);
    daemon_close(&d);
}

/* A turn of the client's thread with nothing else to do. */
static void turn(struct daemon *d, uint64_t id)
{
    CHECK(pcc_client_load_start(d->client, id, NULL, 0, NULL, 0) == 0);
    say(d, &(struct pcc_message){.kind = PCC_MSG_END, .id = id});
    CHECK(pcc_client_load_wait(d->client, id, soon()) == 0);
}

/* Memory that comes after it was asked for is pinned before any copy; what comes later only if that
 * was asked for, too. */
static void test_pinned_when_granted(void)
{
    struct daemon d;
    const uint32_t half = CHUNKS / 2;

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    const uint64_t page = seen(&control->registered_bytes);
    retire(&d, 1, 0);
    UNTIL((listen_to(&d), d.returned == 1));
    pcc_client_pin_for(d.client, 0, false);
    turn(&d, 1);
    grant_anew(&d, 2, 0, half);
    free_chunks(&d, 0, 1); /* rings */
    UNTIL(seen(&control->registered_bytes) == page + (uint64_t)half * CHUNK);
    turn(&d, 2);
    turn(&d, 3);
    grant_anew(&d, 3, half, half / 2);
    free_chunks(&d, half, 1);
    turn(&d, 4);
    turn(&d, 5);
    CHECK_EQUAL(seen(&control->registered_bytes), page + (uint64_t)half * CHUNK);
    pcc_client_pin_for(d.client, 0, true);
    UNTIL(seen(&control->registered_bytes) == page + (uint64_t)(half + half / 2) * CHUNK);
    turn(&d, 6);
    turn(&d, 7);
    grant_anew(&d, 4, half + half / 2, half / 2);
    free_chunks(&d, half + half / 2, 1);
    UNTIL(seen(&control->registered_bytes) == page + (uint64_t)CHUNKS * CHUNK);
    daemon_close(&d);
}

/* What a GPU is filling is handed over first; then the segment is unpinned before it is unmapped.
 */
static void test_copies_under_way(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, 2 * CHUNK);

    pattern(at(memory), 2 * CHUNK, 5);
    daemon_open_gpu(&d, 5, &stream, 0);
    set(&control->copy_hold_kinds, STANDIN_TO_HOST);
    push(&d, 1, &stream, memory, 2 * CHUNK);
    admit(&d, 1);
    d.retiring = true;
    UNTIL((listen_to(&d), d.handed_bytes == 4)); /* the tail comes last: all chunks are begun */
    UNTIL(seen(&control->held_copies) == 1);
    const uint64_t pinned = seen(&control->registered_bytes);
    retire(&d, 1, 0);
    UNTIL((listen_to(&d), d.taken == 2)); /* those that are not begun, at once */
    CHECK(d.returned == 0 && d.handed_bytes == 4);
    CHECK_EQUAL(seen(&control->registered_bytes), pinned);
    set(&control->copy_hold_kinds, 0);
    collect(&d, 2 * CHUNK + 4);
    CHECK(memcmp(d.payload, at(memory), 2 * CHUNK) == 0);
    UNTIL((listen_to(&d), d.returned == 1));
    CHECK_EQUAL(d.taken, 2);
    CHECK_EQUAL(pinned - seen(&control->registered_bytes), (uint64_t)CHUNKS * CHUNK);
    CHECK_EQUAL(mappings(), 1 + 1); /* and the page for the GPU */
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* A read by a GPU for a restore is completed. */
static void test_load_under_way(void)
{
    struct daemon d;
    const CUdeviceptr memory = gpu_alloc(0, 2 * CHUNK);
    const struct pcc_device_range range = on_gpu(0, memory, 0, 2 * CHUNK);
    const uint64_t queued = seen(&control->to_device_queued);

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    pattern(d.chunks, 2 * CHUNK, 6);
    set(&control->copy_hold_kinds, STANDIN_TO_DEVICE);
    CHECK(pcc_client_load_start(d.client, 1, NULL, 0, &range, 1) == 0);
    for (uint32_t i = 0; i < 2; i++)
        data(&d, 1, i, (uint64_t)i * CHUNK, CHUNK);
    UNTIL(seen(&control->to_device_queued) == queued + 2 * CHUNK);
    retire(&d, 1, 0);
    for (uint32_t turn = 1; turn <= 3; turn++) { /* of the thread: a chunk of the other segment */
        free_chunks(&d, CHUNKS / 2, 1);
        UNTIL((listen_to(&d), d.taken == turn));
    }
    CHECK_EQUAL(d.returned, 0);
    CHECK_EQUAL(mappings(), 2 + 1);
    set(&control->copy_hold_kinds, 0);
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 1});
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, soon()), 0);
    CHECK(memcmp(at(memory), d.chunks, 2 * CHUNK) == 0);
    UNTIL((listen_to(&d), d.returned == 1));
    CHECK_EQUAL(d.taken, 5);
    CHECK_EQUAL(mappings(), 1 + 1); /* and the page for the GPU */
    daemon_close(&d);
    gpu_free(0, memory);
}

/* While a stream waits for the daemon the driver is left alone. */
static void test_armed(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);
    const struct pcc_submission pulled_part = {.tail = "tail",
                                               .tail_bytes = 4,
                                               .tail_offset_bytes = CHUNK,
                                               .pulled_bytes = CHUNK,
                                               .pulled_devices = 1};

    daemon_open_gpu(&d, 4, &stream, 0);
    push(&d, 1, &stream, memory, CHUNK);
    admit(&d, 1);
    collect(&d, CHUNK + 4);
    CHECK(word_to(&d, 1, PCC_WORD_COPYING, PCC_WORD_COPIED));
    CHECK(pcc_client_request(d.client, 2) == 0);
    CHECK(pcc_client_mark(d.client, 2, 0, handle(&stream), true, false) == 0);
    CHECK(pcc_client_submit(d.client, 2, &pulled_part) == 0);
    admit(&d, 2);
    CHECK(pcc_client_hold(d.client, 2, 0, handle(&stream), soon()) == 0);
    retire(&d, 1, 0);
    UNTIL((listen_to(&d), d.taken > 0));
    CHECK(pcc_client_load_start(d.client, 1, NULL, 0, NULL, 0) ==
          0); /* a turn of the thread later */
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 1});
    CHECK(pcc_client_load_wait(d.client, 1, soon()) == 0);
    listen_to(&d);
    CHECK(d.returned == 0 && !stream_idle(&stream));
    pulled(&d, 2, 0);
    UNTIL((listen_to(&d), d.returned == 1));
    CHECK(stream_idle(&stream));
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* A GPU that never ends its copies: its driver would wait for them, and the thread has the
 * deadlines of the other GPUs to keep. */
static void test_dead_gpu(void)
{
    struct daemon d;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);
    const struct pcc_device_range range = on_gpu(0, memory, 0, CHUNK);

    daemon_open(&d, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    atomic_store(&d.client->patience_ns, SECOND / 50);
    set(&control->copy_hold_kinds, STANDIN_TO_DEVICE);
    CHECK(pcc_client_load_start(d.client, 1, NULL, 0, &range, 1) == 0);
    data(&d, 1, 0, 0, CHUNK);
    CHECK_EQUAL(pcc_client_load_wait(d.client, 1, soon()), -PCC_E_DEVICE_LOST);
    const uint64_t pinned = seen(&control->registered_bytes);
    retire(&d, 1, 0);
    UNTIL((listen_to(&d), d.returned == 1));
    CHECK_EQUAL(seen(&control->registered_bytes), pinned);
    set(&control->copy_hold_kinds, 0); /* should it go on after all, it may read to the end */
    pcc_client_close(d.client);        /* its memory is never seen again */
    CHECK(close(d.sockets[0]) == 0 && close(d.sockets[1]) == 0);
    free(d.payload);
    gpu_free(0, memory);
}

/* A message that no honest daemon sends ends the client. */
static void test_nonsense(void)
{
    for (uint32_t lie = 0; lie < 4; lie++) {
        struct daemon d;

        daemon_open(&d, 2);
        retire(&d, lie == 0 ? 2 : 1, lie == 1 ? 1 : 0);
        if (lie == 2)
            retire(&d, 1, 0);
        if (lie == 3) { /* a chunk that went with its segment */
            UNTIL((listen_to(&d), d.returned == 1));
            free_chunks(&d, 5, 1);
        }
        UNTIL(!pcc_client_alive(d.client));
        daemon_close(&d);
    }
}

int main(void)
{
    standin_open();
    RUN(test_idle);
    RUN(test_pinned_when_granted);
    RUN(test_copies_under_way);
    RUN(test_load_under_way);
    RUN(test_armed);
    RUN(test_nonsense);
    RUN(test_dead_gpu);
    standin_close();
    return 0;
}
