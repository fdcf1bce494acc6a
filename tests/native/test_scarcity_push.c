/* The trainer's side of GPUs on a machine that has run out of resources: the client reports that,
 * and can still be used. */
#include "client_fixture.h"
#include "scarcity.h"

static struct daemon d;
static CUdeviceptr memory;

/* What the client does for a checkpoint of GPU memory that the daemon pulls; 0 when it can be. */
static int expose(void)
{
    const struct pcc_device_range range = on_gpu(0, memory, 0, CHUNK);
    uint64_t staging, length;
    uint8_t *bytes;

    int error = pcc_client_device_open(d.client, 0);
    if (error == 0)
        error = pcc_client_staging(d.client, 0, 2 * CHUNK, &staging);
    if (error == 0)
        error = pcc_client_expose(d.client, &range, 1, CHUNK, &no_replica, false, &bytes, &length);
    if (error == 0) {
        CHECK(((struct pcc_exposure *)(void *)bytes)->range_count == 1);
        __wrap_free(bytes); /* the core's */
    }
    return error;
}

static void push_if_possible(uint64_t snapshot, const struct stream *stream)
{
    const struct pcc_device_range range = on_gpu(0, memory, 0, CHUNK);
    const struct pcc_submission submission = {
        .device_ranges = &range, .device_range_count = 1, .tail_offset_bytes = CHUNK};

    CHECK(pcc_client_request(d.client, snapshot) == 0);
    int error = pcc_client_mark(d.client, snapshot, 0, handle(stream), false, false);
    if (error == 0)
        error = pcc_client_submit(d.client, snapshot, &submission);
    if (error != 0) {
        CHECK(was_refused());
        CHECK(pcc_client_abandon(d.client, snapshot));
        return;
    }
    admit(&d, snapshot);
    d.handed_bytes = 0;
    collect(&d, CHUNK);
    CHECK(memcmp(d.payload, at(memory), CHUNK) == 0);
    CHECK(word_to(&d, snapshot, PCC_WORD_COPYING, PCC_WORD_COPIED));
}

/* Out of host memory, so that the thread has mapped what it was granted. */
static void begin_well(uint64_t snapshot)
{
    static uint8_t host[CHUNK];
    const struct pcc_range range = {(uintptr_t)host, 0, sizeof(host)};
    const struct pcc_submission submission = {
        .ranges = &range, .range_count = 1, .tail_offset_bytes = sizeof(host)};

    CHECK(pcc_client_request(d.client, snapshot) == 0);
    CHECK(pcc_client_submit(d.client, snapshot, &submission) == 0);
    admit(&d, snapshot);
    collect(&d, sizeof(host));
    CHECK(word_to(&d, snapshot, PCC_WORD_COPYING, PCC_WORD_COPIED));
}

static void live(void)
{
    struct stream stream;
    const uint64_t left = scarce.left;

    plenty();
    memory = gpu_alloc(0, CHUNK);
    pattern(at(memory), CHUNK, 1);
    stream_open(&stream, 0);
    daemon_open(&d, 3);
    begin_well(1);
    refuse_at(left);
    for (uint64_t snapshot = 2; snapshot <= 3; snapshot++) {
        const int error = expose();
        CHECK(error == 0 || was_refused());
        if (error == 0)
            push_if_possible(snapshot, &stream);
    }
    plenty();
    CHECK(expose() == 0 && pcc_client_exposure_holds(d.client));
    push_if_possible(4, &stream);
    daemon_close(&d);
    stream_close(&stream);
    gpu_free(0, memory);
}

static void test_push(void)
{
    live(); /* the driver keeps what it takes at first */
    scarcity("push", live);
}

int main(void)
{
    char unused[64];

    scarcity_begin(unused);
    CHECK(rmdir(unused) == 0);
    standin_open();
    RUN(test_push);
    scarcity_end(6);
    standin_close();
    return 0;
}
