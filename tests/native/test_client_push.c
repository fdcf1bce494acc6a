/* Push from device memory: the client's thread copies it into granted chunks. */
#include "client/pcc_client_private.h"
#include "client_fixture.h"

static bool pushed(struct daemon *d, CUdeviceptr address, uint64_t length)
{
    return memcmp(d->payload, at(address), length) == 0 &&
           memcmp(d->payload + length, "tail", 4) == 0;
}

/* Two GPUs, host ranges, copied ranges and gaps, pieces that cut through chunks and neighbours that
 * become one copy; and bytes that the streams have yet to compute. */
static void test_mixed(void)
{
    struct daemon d;
    struct stream streams[2];
    const uint64_t host_at = 5 * CHUNK + 64, tail_at = host_at + 70000, payload = tail_at + 5;
    const CUdeviceptr first = gpu_alloc(0, 4 * CHUNK), second = gpu_alloc(1, CHUNK);
    uint8_t *expected = calloc(1, payload), host[60000], copied[3000];
    const struct pcc_device_range device_ranges[] = {
        on_gpu(0, first, 0, 100000), on_gpu(0, first + 100000, 100000, 60000),
        on_gpu(0, first + 200000, 160000, 1000), on_gpu(1, second + 7, 4 * CHUNK + 3, 60001)};
    const struct pcc_range range = {(uintptr_t)host, host_at, sizeof(host)};
    const struct pcc_range inlined = {(uintptr_t)copied, host_at + 61000, sizeof(copied)};
    const struct pcc_submission submission = {.ranges = &range,
                                              .range_count = 1,
                                              .inline_ranges = &inlined,
                                              .inline_count = 1,
                                              .tail = "tree",
                                              .tail_bytes = 5,
                                              .tail_offset_bytes = tail_at,
                                              .device_ranges = device_ranges,
                                              .device_range_count = 4};

    CHECK(expected != NULL);
    daemon_open(&d, 3);
    CHECK(pcc_client_request(d.client, 1) == 0);
    pattern(host, sizeof(host), 1);
    pattern(copied, sizeof(copied), 2);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(pcc_client_device_open(d.client, i) == 0 && pcc_client_device_open(d.client, i) == 0);
        stream_open(&streams[i], i);
        stream_block(&streams[i]);
        stream_fill(&streams[i], i == 0 ? first : second, (uint8_t)(0x10 + i), CHUNK);
        CHECK(pcc_client_mark(d.client, 1, i, handle(&streams[i]), false, false) == 0);
    }
    pattern(at(first + CHUNK), 3 * CHUNK, 3);
    CHECK(pcc_client_submit(d.client, 1, &submission) == 0);
    const uint64_t copies = seen(&control->copies_to_host);
    admit(&d, 1);
    CHECK(
        !pcc_client_hold_ready(d.client, 1, 1, 0, pcc_now_ns())); /* few chunks: not enqueued yet */
    atomic_store(&streams[0].blocked, false);
    atomic_store(&streams[1].blocked, false);
    collect(&d, payload);
    memset(expected, 0x10, CHUNK);
    memcpy(expected + CHUNK, at(first + CHUNK), 160000 - CHUNK);
    memcpy(expected + 160000, at(first + 200000), 1000);
    memset(expected + 4 * CHUNK + 3, 0x11, 60001);
    memcpy(expected + host_at, host, sizeof(host));
    memcpy(expected + host_at + 61000, copied, sizeof(copied));
    memcpy(expected + tail_at, "tree", 5);
    CHECK(memcmp(d.payload, expected, payload) == 0);
    CHECK_EQUAL(seen(&control->copies_to_host) - copies, 3 + 1 + 1);
    CHECK_EQUAL(d.bare_bytes, 4u * CHUNK); /* what a GPU has filled */
    CHECK_EQUAL(seen(&control->pageable_copies), 0);
    CHECK_EQUAL(seen(&control->registered_bytes),
                2 * ((uint64_t)CHUNKS * CHUNK + pcc_align_up(sizeof(struct pcc_page), 65536)));
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, soon()) == 0);
    CHECK(word_to(&d, 1, PCC_WORD_COPYING, PCC_WORD_COPIED));
    daemon_close(&d);
    for (uint32_t i = 0; i < 2; i++)
        stream_close(&streams[i]);
    gpu_free(0, first);
    gpu_free(1, second);
    free(expected);
}

/* The stream's next update is behind the copies, the CPU is not; and the stream may not wait before
 * all copies are enqueued. */
static void test_gate(void)
{
    struct daemon d;
    struct stream stream;
    const uint64_t length = 5 * CHUNK;
    const CUdeviceptr memory = gpu_alloc(0, length);
    uint8_t *before = malloc(length);

    CHECK(before != NULL);
    pattern(at(memory), length, 4);
    memcpy(before, at(memory), length);
    daemon_open_gpu(&d, 3, &stream, 0);
    set(&control->copy_hold_kinds, STANDIN_TO_HOST);
    push(&d, 1, &stream, memory, length);
    CHECK(hold(&d, 1, &stream, pcc_now_ns() + SECOND / 50) == -ETIMEDOUT); /* not admitted */
    admit(&d, 1);
    UNTIL(seen(&control->held_copies) == 1);
    CHECK(hold(&d, 1, &stream, pcc_now_ns() + SECOND / 50) == -ETIMEDOUT); /* 3 chunks of 5 */
    CHECK(!pcc_client_hold_ready(d.client, 1, 0, 0, pcc_now_ns()));
    CHECK(stream_idle(&stream));
    free_chunks(&d, 3, 2);
    CHECK(pcc_client_hold_ready(d.client, 1, 0, 0, soon()));
    CHECK(hold(&d, 1, &stream, soon()) == 0);
    stream_fill(&stream, memory, 0xff, length); /* the update */
    CHECK(!stream_idle(&stream) && !state_of(&d, 1).source_read);
    /* The tail waits for a chunk, too, but it is no memory of the trainer's. */
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_HOST_READ, soon()) == 0);
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, pcc_now_ns()) == -ETIMEDOUT);
    set(&control->copy_hold_kinds, 0);
    collect(&d, length + 4);
    CHECK(memcmp(d.payload, before, length) == 0);
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, soon()) == 0 && state_of(&d, 1).source_read);
    UNTIL(stream_idle(&stream));
    CHECK(all(at(memory), length, 0xff));
    CHECK(!pcc_client_abandon(d.client, 1)); /* it was read: nothing to let go of */
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
    free(before);
}

/* A GPU has one copy engine for this direction: a number that the trainer reads every step waits
 * for few of the client's copies. For a trainer that waits at the gate all copies are enqueued at
 * once. */
static void test_small_copies_pass(void)
{
    struct daemon d;
    struct stream stream;
    const uint64_t length = 12 * CHUNK;
    const CUdeviceptr memory = gpu_alloc(0, length), loss = gpu_alloc(0, 4);
    uint32_t seen_loss = 0;

    pattern(at(memory), length, 11);
    pattern(at(loss), 4, 12);
    daemon_open_gpu(&d, 14, &stream, 0);
    set(&control->copy_hold_kinds, STANDIN_TO_HOST);
    atomic_store(&d.client->ahead_bytes, 3 * CHUNK);
    push(&d, 1, &stream, memory, length);
    admit(&d, 1);
    UNTIL(seen(&control->to_host_queued) >= 3 * CHUNK);
    (void)usleep(50000); /* the thread could enqueue all of it in less */
    CHECK_EQUAL(seen(&control->to_host_queued), 3 * CHUNK);
    CHECK(pcc_gpu_enter(&gpus[0]) == 0);
    CHECK(cuda->host_register(&seen_loss, 4, 0) == CUDA_SUCCESS);
    CHECK(cuda->copy_to_host(&seen_loss, loss, 4, stream.handle) == CUDA_SUCCESS);
    set(&control->copy_hold_skip, 3 + 1);
    UNTIL(stream_idle(&stream));
    CHECK(memcmp(&seen_loss, at(loss), 4) == 0);
    pcc_gpu_leave(&gpus[0]);
    CHECK(hold(&d, 1, &stream, soon()) == 0);
    CHECK(seen(&control->to_host_queued) > 3 * CHUNK);
    set(&control->copy_hold_kinds, 0);
    set(&control->copy_hold_skip, 0); /* the small one may have overtaken some of the three */
    CHECK(pcc_gpu_enter(&gpus[0]) == 0);
    CHECK(cuda->host_unregister(&seen_loss) == CUDA_SUCCESS); /* waits for all copies */
    pcc_gpu_leave(&gpus[0]);
    collect(&d, length + 4);
    CHECK(pushed(&d, memory, length));
    atomic_store(&d.client->ahead_bytes, 0); /* two chunks go all the same, and nobody holds */
    push(&d, 2, &stream, memory, length);
    admit(&d, 2);
    collect(&d, length + 4);
    CHECK(pushed(&d, memory, length));
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
    gpu_free(0, loss);
}

static void *abandon_one(void *client)
{
    CHECK(pcc_client_abandon(client, 1));
    return NULL;
}

/* Chunks under copy come back only when the copies are done, and the next snapshot takes them. */
static void test_abandon(void)
{
    struct daemon d;
    struct stream stream;
    pthread_t thread;
    const CUdeviceptr memory = gpu_alloc(0, 2 * CHUNK);

    pattern(at(memory), 2 * CHUNK, 5);
    daemon_open_gpu(&d, 2, &stream, 0);
    set(&control->copy_hold_kinds, STANDIN_TO_HOST);
    push(&d, 1, &stream, memory, 2 * CHUNK);
    admit(&d, 1);
    CHECK(hold(&d, 1, &stream, soon()) == 0);
    UNTIL(seen(&control->held_copies) == 1);
    CHECK(pthread_create(&thread, NULL, abandon_one, d.client) == 0);
    UNTIL(state_of(&d, 1).word == PCC_WORD_ABANDONED);
    push(&d, 2, &stream, memory, 2 * CHUNK);
    admit(&d, 2);
    CHECK(hold(&d, 1, &stream, soon()) == 0); /* over: waits for nothing */
    CHECK(!pcc_client_hold_ready(d.client, 2, 0, 0, pcc_now_ns()));
    set(&control->copy_hold_kinds, 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(state_of(&d, 1).source_read && state_of(&d, 1).error == 0);
    collect(&d, 2 * CHUNK + 4);
    CHECK(pushed(&d, memory, 2 * CHUNK));
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* Memory that cannot be pinned: slower, but right, and the thread still serves other work while the
 * trainer's stream computes. */
static void test_pageable(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, 3 * CHUNK);
    uint8_t got[1000];
    const struct pcc_range range = {(uintptr_t)got, 0, sizeof(got)};

    pattern(at(memory), 3 * CHUNK, 6);
    set(&control->register_fail_code, CUDA_ERROR_OUT_OF_MEMORY);
    set(&control->register_fail_count, STANDIN_ALWAYS);
    daemon_open(&d, 2);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    CHECK(strstr(pcc_client_device_cannot_pull(d.client, 0), "OUT_OF_MEMORY") != NULL);
    stream_open(&stream, 0);
    stream_block(&stream);
    CHECK(pcc_client_request(d.client, 1) == 0);
    CHECK(pcc_client_mark(d.client, 1, 0, handle(&stream), true, false) == -PCC_E_DEVICE);
    CHECK(pcc_client_abandon(d.client, 1));
    push(&d, 2, &stream, memory, 3 * CHUNK);
    admit(&d, 2);
    CHECK(pcc_client_load_start(d.client, 9, &range, 1, NULL, 0) == 0);
    pattern(d.chunks + 9 * CHUNK, sizeof(got), 7);
    data(&d, 9, 9, 0, sizeof(got));
    say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = 9});
    CHECK(pcc_client_load_wait(d.client, 9, soon()) == 0);
    CHECK(memcmp(got, d.chunks + 9 * CHUNK, sizeof(got)) == 0);
    atomic_store(&stream.blocked, false);
    collect(&d, 3 * CHUNK + 4);
    CHECK(pushed(&d, memory, 3 * CHUNK));
    CHECK(seen(&control->pageable_copies) >= 3);
    set(&control->register_fail_count, 0);
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* Segments are pinned before the first copy, but not while a stream waits for the daemon. */
static void test_pinned_ahead(void)
{
    struct daemon d;
    struct stream stream;
    const struct pcc_submission part = {.tail = "tail",
                                        .tail_bytes = 4,
                                        .tail_offset_bytes = CHUNK,
                                        .pulled_bytes = CHUNK,
                                        .pulled_devices = 1};

    daemon_open_gpu(&d, 4, &stream, 0);
    CHECK(pcc_client_request(d.client, 1) == 0);
    CHECK(pcc_client_mark(d.client, 1, 0, handle(&stream), true, false) == 0);
    CHECK(pcc_client_submit(d.client, 1, &part) == 0);
    admit(&d, 1);
    CHECK(pcc_client_hold(d.client, 1, 0, handle(&stream), soon()) == 0);
    const uint64_t before = seen(&control->registered_bytes);
    pcc_client_pin_for(d.client, 0, false);
    for (uint64_t id = 1; id <= 2; id++) { /* turns of the thread */
        CHECK(pcc_client_load_start(d.client, id, NULL, 0, NULL, 0) == 0);
        say(&d, &(struct pcc_message){.kind = PCC_MSG_END, .id = id});
        CHECK(pcc_client_load_wait(d.client, id, soon()) == 0);
    }
    CHECK_EQUAL(seen(&control->registered_bytes), before);
    pulled(&d, 1, 0);
    UNTIL((listen_to(&d), seen(&control->registered_bytes) == before + (uint64_t)CHUNKS * CHUNK));
    daemon_close_gpu(&d, &stream);
}

/* A copy that the driver refuses fails its snapshot alone. */
static void test_refused_copy(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, 3 * CHUNK);

    pattern(at(memory), 3 * CHUNK, 8);
    daemon_open_gpu(&d, 3, &stream, 0);
    for (uint64_t snapshot = 1; snapshot <= 3; snapshot++) {
        set(&control->copy_fail_kinds, STANDIN_TO_HOST);
        set(&control->copy_fail_code, CUDA_ERROR_INVALID_VALUE);
        set(&control->copy_fail_at, snapshot);
        push(&d, 2 * snapshot, &stream, memory, 3 * CHUNK);
        admit(&d, 2 * snapshot);
        CHECK(pcc_client_wait(d.client, 2 * snapshot, PCC_WAIT_DURABLE, soon()) == 0);
        CHECK(state_of(&d, 2 * snapshot).word == PCC_WORD_ABANDONED);
        CHECK_EQUAL(state_of(&d, 2 * snapshot).error, -PCC_E_DEVICE);
        CHECK(hold(&d, 2 * snapshot, &stream, soon()) == 0);
        set(&control->copy_fail_at, 0);
        listen_to(&d);
        d.handed_bytes = 0;
        push(&d, 2 * snapshot + 1, &stream, memory, 3 * CHUNK);
        admit(&d, 2 * snapshot + 1);
        collect(&d, 3 * CHUNK + 4);
        CHECK(pushed(&d, memory, 3 * CHUNK));
        CHECK(word_to(&d, 2 * snapshot + 1, PCC_WORD_COPYING, PCC_WORD_COPIED));
    }
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

static bool has_landed(struct pcc_client *client, uint64_t snapshot)
{
    PCC_LOCKED(&client->lock);
    return client->jobs[snapshot % PCC_SNAPSHOTS].flights == 0;
}

/* What is copied has to be what the trainer's stream had there when it was sampled; every range is
 * sampled, also a small one. */
static void test_samples(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, 4 * CHUNK);
    const struct pcc_device_range ranges[] = {
        on_gpu(0, memory, 0, 2 * CHUNK + 100), on_gpu(0, memory + 3 * CHUNK, 2 * CHUNK + 128, 8),
        on_gpu(0, memory + 3 * CHUNK + 8, 2 * CHUNK + 192, 1)};
    const struct pcc_submission submission = {.device_ranges = ranges,
                                              .device_range_count = 3,
                                              .tail = "tail",
                                              .tail_bytes = 4,
                                              .tail_offset_bytes = 3 * CHUNK};

    daemon_open_gpu(&d, 3, &stream, 0);
    for (uint64_t snapshot = 1; snapshot <= 40; snapshot++) {
        const uint64_t changed = snapshot % 4;              /* 0: none */
        const bool fails = changed > 0 && snapshot % 5 > 0; /* else an update has withdrawn it */
        pattern(at(memory), 4 * CHUNK, snapshot);
        CHECK(pcc_client_request(d.client, snapshot) == 0);
        CHECK(pcc_client_sample(d.client, snapshot, 0, handle(&stream), ranges, 3) == 0);
        UNTIL(stream_idle(&stream));
        for (uint64_t i = 0; changed > 0 && i < ranges[changed - 1].length_bytes; i++)
            ((uint8_t *)at(ranges[changed - 1].address))[i] ^= 1;
        if (changed > 0 && !fails)
            atomic_store(&pcc_page_words(&d.view, snapshot, 1)->withdrawn, snapshot);
        CHECK(pcc_client_mark(d.client, snapshot, 0, handle(&stream), false, false) == 0);
        CHECK(pcc_client_submit(d.client, snapshot, &submission) == 0);
        admit(&d, snapshot);
        CHECK(!fails || pcc_client_wait(d.client, snapshot, PCC_WAIT_DURABLE, soon()) == 0);
        if (!fails) {
            collect(&d, 3 * CHUNK + 4);
            CHECK(memcmp(d.payload, at(memory), ranges[0].length_bytes) == 0);
            CHECK(word_to(&d, snapshot, PCC_WORD_COPYING, PCC_WORD_COPIED));
        }
        CHECK_EQUAL(state_of(&d, snapshot).error, fails ? -PCC_E_OTHER_BYTES : 0);
        UNTIL((listen_to(&d), has_landed(d.client, snapshot)));
        d.handed_bytes = 0;
    }
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* A stream that is late has yet to copy samples of an abandoned snapshot. The one that has its
 * entry now neither waits for that stream nor takes its samples. */
static void test_an_entry_in_use_is_not_sampled(void)
{
    struct daemon d;
    struct stream late, stream;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);
    const struct pcc_device_range range = on_gpu(0, memory, 0, CHUNK);

    daemon_open_gpu(&d, 3, &stream, 0);
    stream_open(&late, 0);
    stream_block(&late);
    CHECK(pcc_client_request(d.client, 1) == 0);
    CHECK(pcc_client_sample(d.client, 1, 0, handle(&late), &range, 1) == 0);
    CHECK(pcc_client_abandon(d.client, 1));
    for (uint64_t snapshot = 2; snapshot <= 1 + PCC_SNAPSHOTS; snapshot++) {
        const bool in_use = snapshot == 1 + PCC_SNAPSHOTS;
        CHECK(pcc_client_request(d.client, snapshot) == 0);
        CHECK(pcc_client_sample(d.client, snapshot, 0, handle(&stream), &range, 1) == 0);
        CHECK((pcc_page_samples(&d.view, snapshot)[0].length_bytes == 0) == in_use);
        UNTIL(stream_idle(&stream));
        CHECK(pcc_client_abandon(d.client, snapshot));
    }
    atomic_store(&late.blocked, false);
    UNTIL(stream_idle(&late));
    CHECK(pcc_client_request(d.client, 1 + 2 * PCC_SNAPSHOTS) == 0);
    CHECK(pcc_client_sample(d.client, 1 + 2 * PCC_SNAPSHOTS, 0, handle(&stream), &range, 1) == 0);
    CHECK(pcc_page_samples(&d.view, 1)[0].length_bytes > 0);
    stream_close(&late);
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* A lost GPU: its snapshots fail, the host's go on. */
static void test_lost_gpu(void)
{
    struct daemon d;
    struct stream stream;
    uint8_t host[3000];
    const struct pcc_range range = {(uintptr_t)host, 0, sizeof(host)};
    const struct pcc_submission submission = {
        .ranges = &range, .range_count = 1, .tail_offset_bytes = sizeof(host)};
    const CUdeviceptr memory = gpu_alloc(3, 3 * CHUNK);

    daemon_open_gpu(&d, 8, &stream, 3);
    set(&control->copy_fail_kinds, STANDIN_TO_HOST);
    set(&control->copy_fail_code, CUDA_ERROR_ILLEGAL_ADDRESS);
    set(&control->copy_fail_async, 1);
    set(&control->copy_fail_at, 2);
    push(&d, 1, &stream, memory, 3 * CHUNK);
    admit(&d, 1);
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_COPIED, soon()) == 0);
    CHECK_EQUAL(state_of(&d, 1).error, -PCC_E_DEVICE_LOST);
    set(&control->copy_fail_at, 0);
    set(&control->copy_fail_async, 0);
    listen_to(&d);
    d.handed_bytes = 0;
    CHECK(pcc_client_device_open(d.client, 3) == -PCC_E_DEVICE_LOST);
    pattern(host, sizeof(host), 9);
    CHECK(pcc_client_request(d.client, 2) == 0);
    CHECK(pcc_client_submit(d.client, 2, &submission) == 0);
    admit(&d, 2);
    collect(&d, sizeof(host));
    CHECK(memcmp(d.payload, host, sizeof(host)) == 0);
    pcc_client_close(d.client); /* what a lost context held is never seen again */
    CHECK(close(d.sockets[0]) == 0 && close(d.sockets[1]) == 0);
    free(d.payload);
}

/* The page and the segments are registered for each GPU alone: what is registered after another GPU
 * of the client was lost is as good as before. */
static void test_a_lost_gpu_takes_nothing_from_others(void)
{
    struct daemon d;
    struct stream lost, stream;
    uint8_t bytes[8];
    const CUdeviceptr gone = gpu_alloc(2, CHUNK), memory = gpu_alloc(1, 3 * CHUNK);

    pattern(at(memory), 3 * CHUNK, 14);
    daemon_open_gpu(&d, 4, &lost, 2);
    set(&control->copy_fail_kinds, STANDIN_TO_HOST);
    set(&control->copy_fail_code, CUDA_ERROR_ILLEGAL_ADDRESS);
    set(&control->copy_fail_at, 1);
    CHECK(pcc_gpu_enter(&gpus[2]) == 0);
    CHECK(gpus[2].cuda->copy_to_host(bytes, gone, sizeof(bytes), lost.handle) ==
          CUDA_ERROR_ILLEGAL_ADDRESS);
    pcc_gpu_leave(&gpus[2]);
    const uint64_t pageable = seen(&control->pageable_copies);
    CHECK(pcc_client_device_open(d.client, 1) == 0);
    CHECK_EQUAL(strlen(pcc_client_device_cannot_pull(d.client, 1)), 0);
    stream_open(&stream, 1);
    push(&d, 1, &stream, memory, 3 * CHUNK);
    admit(&d, 1);
    collect(&d, 3 * CHUNK + 4);
    CHECK(pushed(&d, memory, 3 * CHUNK));
    CHECK(word_to(&d, 1, PCC_WORD_COPYING, PCC_WORD_COPIED));
    CHECK_EQUAL(seen(&control->pageable_copies), pageable);
    pcc_client_close(d.client); /* what a lost context held is never seen again */
    CHECK(close(d.sockets[0]) == 0 && close(d.sockets[1]) == 0);
    free(d.payload);
    stream_close(&stream);
    gpu_free(1, memory);
}

/* A GPU that never answers: no call hangs, the client reports the GPU as dead, and later snapshots
 * get other chunks. */
static void test_dead_gpu(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);

    daemon_open_gpu(&d, 2, &stream, 0);
    stream_block(&stream);
    set(&control->copy_hold_kinds, STANDIN_TO_HOST);
    atomic_store(&d.client->patience_ns, SECOND / 50);
    push(&d, 1, &stream, memory, CHUNK);
    admit(&d, 1);
    /* Its own stream has not come so far: that is not the GPU's fault. */
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, pcc_now_ns() + SECOND / 10) == -ETIMEDOUT);
    CHECK(pcc_client_alive(d.client));
    atomic_store(&stream.blocked, false);
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, soon()) == -ECONNRESET);
    CHECK(!pcc_client_alive(d.client));
    set(&control->copy_hold_kinds, 0);
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* A GPU that is late still writes to the chunks after close(): the daemon is not told that they are
 * quiet, and uses them no more. What the driver knows stays until this process ends. */
static void test_a_late_gpu_is_not_quiet(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);

    pattern(at(memory), CHUNK, 13);
    daemon_open_gpu(&d, 2, &stream, 0);
    d.client->close_patience_ns = SECOND / 50;
    set(&control->copy_hold_kinds, STANDIN_TO_HOST);
    push(&d, 1, &stream, memory, CHUNK);
    admit(&d, 1);
    UNTIL(seen(&control->held_copies) == 1);
    pcc_client_close(d.client);
    CHECK_EQUAL(atomic_load(&d.view.page->quiet), 0);
    set(&control->copy_hold_kinds, 0);
    UNTIL(memcmp(d.chunks, at(memory), CHUNK) == 0 ||
          memcmp(d.chunks + CHUNK, at(memory), CHUNK) == 0);
    CHECK(close(d.sockets[0]) == 0 && close(d.sockets[1]) == 0);
    free(d.payload);
    stream_close(&stream);
    gpu_free(0, memory);
}

/* While a stream waits for the daemon, the client's thread does not call the driver. */
static void test_beside_pull(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);
    const struct pcc_submission submission = {.tail = "tail",
                                              .tail_bytes = 4,
                                              .tail_offset_bytes = CHUNK,
                                              .pulled_bytes = CHUNK,
                                              .pulled_devices = 1};

    pattern(at(memory), CHUNK, 10);
    daemon_open_gpu(&d, 4, &stream, 0);
    CHECK(pcc_client_request(d.client, 1) == 0);
    CHECK(pcc_client_mark(d.client, 1, 0, handle(&stream), true, false) == 0);
    CHECK(pcc_client_submit(d.client, 1, &submission) == 0);
    admit(&d, 1);
    CHECK(hold(&d, 1, &stream, soon()) == 0);
    collect(&d, 4);
    push(&d, 2, &stream, memory, CHUNK);
    admit(&d, 2);
    CHECK(!pcc_client_hold_ready(d.client, 2, 0, 0, pcc_now_ns() + SECOND / 50));
    pulled(&d, 1, 0);
    CHECK(hold(&d, 2, &stream, soon()) == 0);
    collect(&d, CHUNK + 4);
    CHECK(pushed(&d, memory, CHUNK));
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* The calls of the client's thread do not break a graph that the trainer records meanwhile. */
static void test_capture(void)
{
    struct daemon d;
    struct stream stream;
    bool capturing = false;
    const CUdeviceptr memory = gpu_alloc(0, 2 * CHUNK);

    daemon_open_gpu(&d, 4, &stream, 0);
    set(&control->copy_hold_kinds, STANDIN_TO_HOST);
    push(&d, 1, &stream, memory, 2 * CHUNK);
    CHECK(pcc_client_capturing(d.client, 0, handle(&stream), &capturing) == 0 && !capturing);
    CHECK(pcc_gpu_enter(&gpus[0]) == 0);
    CHECK(capture_begin(stream.handle, 0) == CUDA_SUCCESS);
    CHECK(pcc_client_capturing(d.client, 0, handle(&stream), &capturing) == 0 && capturing);
    admit(&d, 1);
    UNTIL(seen(&control->held_copies) == 1);
    set(&control->copy_hold_kinds, 0);
    collect(&d, 2 * CHUNK + 4);
    CHECK(capture_end(stream.handle) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[0]);
    CHECK_EQUAL(seen(&control->broken_captures), 0);
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

int main(void)
{
    standin_open();
    RUN(test_mixed);
    RUN(test_gate);
    RUN(test_small_copies_pass);
    RUN(test_abandon);
    RUN(test_pageable);
    RUN(test_pinned_ahead);
    RUN(test_refused_copy);
    RUN(test_samples);
    RUN(test_an_entry_in_use_is_not_sampled);
    RUN(test_dead_gpu);
    RUN(test_beside_pull);
    RUN(test_capture);
    RUN(test_a_late_gpu_is_not_quiet);
    RUN(test_a_lost_gpu_takes_nothing_from_others);
    RUN(test_lost_gpu);
    standin_close();
    return 0;
}
