/* The order between a trainer's streams and a daemon that pulls: marks, holds, and everybody who
 * may let a stream go. And what the daemon is told: the exposure. */
#include <pthread.h>

#include "client/pcc_client_private.h"
#include "client_fixture.h"

#include <sys/wait.h>

static void pull(struct daemon *d, uint64_t snapshot, const struct stream *stream, bool aside)
{
    pull_to(d, snapshot, stream, aside, PCC_LEVEL_DISK);
}

static void open_one(struct daemon *d, struct stream *stream)
{
    daemon_open_gpu(d, 4, stream, 0);
    CHECK_EQUAL(strlen(pcc_client_device_cannot_pull(d->client, 0)), 0);
}

/* ready follows the stream, the stream follows done, the CPU follows neither. */
static void test_words(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);

    open_one(&d, &stream);
    for (uint64_t snapshot = 1; snapshot <= 3 * PCC_SNAPSHOTS; snapshot += PCC_SNAPSHOTS / 2 + 1) {
        stream_block(&stream);
        pull(&d, snapshot, &stream, false);
        CHECK(atomic_load(&words(&d, snapshot, 0)->ready) < snapshot);
        admit(&d, snapshot);
        CHECK(hold(&d, snapshot, &stream, soon()) == 0);
        stream_fill(&stream, memory, (uint8_t)snapshot, CHUNK);
        atomic_store(&stream.blocked, false);
        UNTIL(atomic_load(&words(&d, snapshot, 0)->ready) == snapshot);
        collect(&d, 4);
        CHECK(memcmp(d.payload + CHUNK, "tail", 4) == 0);
        CHECK(!stream_idle(&stream) && !state_of(&d, snapshot).source_read);
        CHECK(pcc_client_wait(d.client, snapshot, PCC_WAIT_HOST_READ, soon()) == 0);
        CHECK(pcc_client_wait(d.client, snapshot, PCC_WAIT_READ, pcc_now_ns()) == -ETIMEDOUT);
        pulled(&d, snapshot, 0);
        CHECK(pcc_client_wait(d.client, snapshot, PCC_WAIT_READ, soon()) == 0);
        CHECK(word_to(&d, snapshot, PCC_WORD_COPYING, PCC_WORD_COPIED));
        atomic_store(&pcc_page_snapshot(&d.view, snapshot)->outcome,
                     pcc_word(snapshot, PCC_OUTCOME_DURABLE));
        UNTIL(stream_idle(&stream));
        CHECK(all(at(memory), CHUNK, (uint8_t)snapshot));
        CHECK(hold(&d, snapshot, &stream, soon()) == 0 && stream_idle(&stream));
        CHECK(!pcc_client_abandon(d.client, snapshot));
    }
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* Marks and holds make no stream wait but the trainer's own: whatever shares a hardware queue with
 * another one would stand behind it. Yet close() waits until every stream has passed the page, also
 * one whose place in the page's entry another stream has taken. */
static void test_no_stream_of_ours_waits(void)
{
    struct daemon d;
    struct stream first, second;

    open_one(&d, &first);
    stream_open(&second, 0);
    stream_block(&first);
    pull(&d, 1, &first, false);
    CHECK_EQUAL(seen(&control->waits), 0);
    admit(&d, 1);
    CHECK(hold(&d, 1, &first, soon()) == 0);
    CHECK(hold(&d, 1, &second, soon()) == 0);
    CHECK_EQUAL(seen(&control->waits), 2 + 1); /* the second one's passes after the first one's */
    CHECK(pcc_client_abandon(d.client, 1));
    pull(&d, 1 + PCC_SNAPSHOTS, &second, false); /* the same entry */
    admit(&d, 1 + PCC_SNAPSHOTS);
    CHECK(pcc_client_abandon(d.client, 1 + PCC_SNAPSHOTS));
    CHECK(!stream_idle(&first));
    atomic_store(&first.blocked, false);
    daemon_close(&d);
    CHECK(stream_idle(&first) && stream_idle(&second));
    stream_close(&first);
    stream_close(&second);
}

/* Asks what lies at `address`; whether the client has said so, and not that it cannot. */
static bool shows(struct daemon *d, uint32_t device, uint32_t count, CUdeviceptr address,
                  uint32_t length)
{
    struct pcc_proof *proof = &d->view.page->proof;
    const uint64_t number = atomic_load(&proof->asked) + 1;

    proof->device = device;
    proof->count = count;
    for (uint32_t i = 0; i < count && i < PCC_PROOF_BLOCKS; i++)
        proof->blocks[i] = (struct pcc_proof_block){.address = address + i, .length_bytes = length};
    atomic_store(&proof->asked, number);
    pcc_bell_ring(&d->view.page->client_bell);
    UNTIL(atomic_load(&proof->answered) == number);
    for (uint32_t i = 0; proof->result == 0 && i < count; i++)
        CHECK(memcmp(proof->bytes[i], at(address) + i, length) == 0);
    return proof->result == 0;
}

/* The daemon asks what the GPU's memory holds: the client shows it, also while the training stream
 * is held, and says so when it cannot. */
static void test_questions(void)
{
    struct daemon d;
    struct stream stream;
    CUdeviceptr memory = gpu_alloc(0, CHUNK);

    open_one(&d, &stream);
    for (uint32_t i = 0; i < CHUNK / 256; i++)
        stream_fill(&stream, memory + i * 256, (uint8_t)i, 256);
    UNTIL(stream_idle(&stream));
    CHECK(shows(&d, 0, 1, memory + CHUNK - 200, 200));
    pull(&d, 1, &stream, false);
    admit(&d, 1);
    CHECK(hold(&d, 1, &stream, soon()) == 0);
    CHECK(shows(&d, 0, PCC_PROOF_BLOCKS, memory, PCC_PROOF_BYTES) && !stream_idle(&stream));
    CHECK(!shows(&d, 0, PCC_PROOF_BLOCKS + 1, memory, 1));
    CHECK(!shows(&d, 0, 1, memory, PCC_PROOF_BYTES + 1));
    CHECK(!shows(&d, 1, 1, memory, 1)); /* not open */
    CHECK(!shows(&d, PCC_DEVICES, 1, memory, 1));
    CHECK(shows(&d, 0, 2, memory + 5, 3));
    gpu_free(0, memory);
    CHECK(!shows(&d, 0, 1, memory, 8));
    pulled(&d, 1, 0);
    daemon_close_gpu(&d, &stream);
}

/* Streams may share one hardware queue: a stream that waits for the daemon, which waits for the
 * answer to its question, would keep the answer back. So the host waits, once for an exposure. */
static void test_the_host_waits_before_a_proof(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);

    open_one(&d, &stream);
    set(&control->one_queue, 1);
    stream_fill(&stream, memory, 9, CHUNK);
    UNTIL(stream_idle(&stream));
    for (uint64_t snapshot = 1; snapshot <= 3; snapshot++) {
        pull(&d, snapshot, &stream, false);
        pcc_page_request(&d.view, snapshot)->map = 5;
        admit(&d, snapshot);
        UNTIL(atomic_load(&words(&d, snapshot, 0)->ready) == snapshot);
        if (snapshot < 3) {
            CHECK(hold(&d, snapshot, &stream, pcc_now_ns()) == -ETIMEDOUT);
            CHECK(stream_idle(&stream) && shows(&d, 0, 1, memory, 8));
        }
        if (snapshot == 1) { /* it has to be shown again */
            pulled(&d, 1, 0);
        } else {
            atomic_store(&d.view.page->proof.proven[0], 5);
            CHECK(hold(&d, snapshot, &stream, soon()) == 0 && !stream_idle(&stream));
            pulled(&d, snapshot, 0);
        }
        CHECK(hold(&d, snapshot, &stream, soon()) == 0);
        UNTIL(stream_idle(&stream));
    }
    set(&control->one_queue, 0);
    daemon_close_gpu(&d, &stream);
    gpu_free(0, memory);
}

/* The byte of the payload at `offset`: of the ranges of test_samples. */
static uint8_t byte_at(uint64_t offset)
{
    return offset < 3000 ? 1 : offset < 2 * CHUNK ? 2 : 3;
}

/* The stream copies some bytes of each GPU to compare: what is there in stream order, at random
 * places and at ends of chunks. */
static void test_samples(void)
{
    struct daemon d;
    struct stream streams[2];
    const CUdeviceptr a = gpu_alloc(0, 4 * CHUNK), b = gpu_alloc(1, CHUNK);
    const struct pcc_device_range ranges[] = {on_gpu(0, a + 100, 0, 3000),
                                              on_gpu(0, a + CHUNK, 4096, 2 * CHUNK - 4096),
                                              on_gpu(1, b, 2 * CHUNK, 40)};
    const struct pcc_device_range bad[][2] = {{on_gpu(0, a, 64, 64), on_gpu(0, a + 64, 0, 64)},
                                              {on_gpu(0, a, 0, 64), on_gpu(0, a + 64, 64, 0)},
                                              {on_gpu(0, a, 0, 64), on_gpu(0, a, 64, -8ull)}};
    uint32_t ends = 0, others = 0;

    daemon_open_gpu(&d, 4, &streams[0], 0);
    CHECK(pcc_client_device_open(d.client, 1) == 0);
    stream_open(&streams[1], 1);
    CHECK(pcc_client_request(d.client, 1) == 0);
    for (uint32_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        CHECK(pcc_client_sample(d.client, 1, 0, handle(&streams[0]), bad[i], 2) == -EINVAL);
    CHECK(pcc_client_sample(d.client, 1, 0, handle(&streams[0]), ranges, 0) == 0);
    CHECK_EQUAL(pcc_page_samples(&d.view, 1)[0].length_bytes, 0);
    for (uint64_t snapshot = 2; snapshot < 20; snapshot++) {
        CHECK(pcc_client_request(d.client, snapshot) == 0);
        for (uint32_t gpu = 0; gpu < 2; gpu++) {
            stream_block(&streams[gpu]);
            stream_fill(&streams[gpu], gpu ? b : a, gpu ? 3 : 1, CHUNK);
            if (gpu == 0)
                stream_fill(&streams[0], a + CHUNK, 2, 2 * CHUNK);
            CHECK(pcc_client_sample(d.client, snapshot, gpu, handle(&streams[gpu]), ranges, 3) ==
                  0);
            CHECK(pcc_client_mark(d.client, snapshot, gpu, handle(&streams[gpu]), true, false) ==
                  0);
            stream_fill(&streams[gpu], gpu ? b : a, 9, CHUNK); /* the next step */
            atomic_store(&streams[gpu].blocked, false);
            UNTIL(atomic_load(&words(&d, snapshot, gpu)->ready) == snapshot);
        }
        for (uint32_t i = 0; i < PCC_SAMPLES; i++) {
            const struct pcc_sample *sample = &pcc_page_samples(&d.view, snapshot)[i];
            const uint64_t end = sample->offset_bytes + sample->length_bytes;
            CHECK(sample->length_bytes > 0 && sample->length_bytes <= PCC_SAMPLE_BYTES);
            const bool first = sample->offset_bytes < 2 * CHUNK;
            CHECK(first == (i % 2 == 0)); /* each GPU has half of them */
            CHECK(sample->offset_bytes / CHUNK == (end - 1) / CHUNK);
            CHECK(end <= 3000 || (sample->offset_bytes >= 4096 && end <= 2 * CHUNK + 40));
            CHECK(all(sample->bytes, sample->length_bytes, byte_at(sample->offset_bytes)));
            ends += end == CHUNK || end == 2 * CHUNK;
            others += first && end % CHUNK != 0;
        }
        CHECK(pcc_client_abandon(d.client, snapshot));
    }
    CHECK(ends > 18 && others > 36);
    CHECK(pcc_client_request(d.client, 2 + PCC_SNAPSHOTS) == 0);
    CHECK_EQUAL(pcc_page_samples(&d.view, 2)[3].length_bytes, 0);
    CHECK(pcc_client_abandon(d.client, 1));
    stream_close(&streams[1]);
    daemon_close_gpu(&d, &streams[0]);
    gpu_free(0, a);
    gpu_free(1, b);
}

static void *launch(void *argument)
{
    const struct stream *stream = argument;

    for (uint32_t i = 0; i < 20; i++)
        stream_fill(stream, stream->scratch, (uint8_t)i, CHUNK);
    return NULL;
}

static void *load(void *argument)
{
    (void)argument;
    CHECK(pcc_gpu_enter(&gpus[0]) == 0);
    CHECK(load_module() == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[0]);
    return NULL;
}

/* A thread of the trainer's that stands in the driver until the held stream goes on, and keeps all
 * others out: its queue of launches is full, or it loads a kernel. The deadline is kept. */
static void test_a_driver_that_is_locked(void)
{
    struct daemon d;
    struct stream stream;
    pthread_t thread;

    open_one(&d, &stream);
    stream.scratch = gpu_alloc(0, CHUNK);
    for (uint64_t snapshot = 1; snapshot <= 2; snapshot++) {
        pull(&d, snapshot, &stream, false);
        admit(&d, snapshot);
        UNTIL(atomic_load(&words(&d, snapshot, 0)->ready) == snapshot);
        CHECK(hold(&d, snapshot, &stream, pcc_now_ns() + SECOND / 20) == 0);
        set(&control->launch_queue, 8);
        CHECK(pthread_create(&thread, NULL, snapshot == 1 ? launch : load, &stream) == 0);
        UNTIL(state_of(&d, snapshot).word == PCC_WORD_ABANDONED);
        CHECK(pthread_join(thread, NULL) == 0);
        set(&control->launch_queue, 0);
        CHECK_EQUAL(state_of(&d, snapshot).error, -ETIMEDOUT);
        listen_to(&d);
    }
    daemon_close_gpu(&d, &stream);
    gpu_free(0, stream.scratch);
}

/* Of a deferred snapshot no stream waits: it withdraws it. If that cannot be enqueued, the snapshot
 * may be wanted instead, and then the stream waits as for any other. */
static void test_withdrawing(void)
{
    struct daemon d;
    struct stream stream;

    open_one(&d, &stream);
    pull_to(&d, 1, &stream, false, PCC_LEVEL_DEVICE);
    admit(&d, 1);
    CHECK(pcc_client_hold_ready(d.client, 1, 0, 0, soon())); /* a look alone withdraws nothing */
    set(&control->write_fail_count, 1);
    CHECK(hold(&d, 1, &stream, soon()) == -PCC_E_DEVICE);
    CHECK_EQUAL(atomic_load(&words(&d, 1, 0)->withdrawn), 0);
    pcc_client_write(d.client, 1);
    UNTIL((listen_to(&d), d.wanted == 1));
    CHECK(hold(&d, 1, &stream, soon()) == 0 && !stream_idle(&stream));
    pulled(&d, 1, 0);
    UNTIL(stream_idle(&stream));
    pull_to(&d, 2, &stream, false, PCC_LEVEL_DEVICE);
    admit(&d, 2);
    CHECK(hold(&d, 2, &stream, soon()) == 0);
    UNTIL(stream_idle(&stream));
    CHECK_EQUAL(atomic_load(&words(&d, 2, 0)->withdrawn), 2);
    pcc_client_write(d.client, 2); /* too late */
    listen_to(&d);
    CHECK_EQUAL(d.wanted, 1);
    daemon_close_gpu(&d, &stream);
}

/* The deadline lets go of its own snapshot, and of no other. */
static void test_deadline(void)
{
    struct daemon d;
    struct stream first, second;

    open_one(&d, &first);
    stream_open(&second, 0);
    pull(&d, 1, &first, false);
    pull(&d, 2, &second, false);
    admit(&d, 2);
    CHECK(hold(&d, 2, &second, soon()) == 0);
    CHECK(hold(&d, 1, &first, pcc_now_ns() + SECOND / 50) == 0);
    UNTIL(stream_idle(&first)); /* the daemon is stopped */
    CHECK(state_of(&d, 1).word == PCC_WORD_ABANDONED && state_of(&d, 1).error == -ETIMEDOUT);
    CHECK(!word_to(&d, 1, PCC_WORD_REQUESTED, PCC_WORD_COPYING)); /* it comes too late */
    CHECK_EQUAL(atomic_load(&words(&d, 1, 0)->done), 1);
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, soon()) == 0 && state_of(&d, 1).source_read);
    CHECK(hold(&d, 1, &first, soon()) == 0 && stream_idle(&first));
    CHECK(!stream_idle(&second) && state_of(&d, 2).word == PCC_WORD_COPYING);
    CHECK(hold(&d, 2, &second, pcc_now_ns()) == 0); /* an earlier one counts */
    UNTIL(stream_idle(&second));
    CHECK(state_of(&d, 2).word == PCC_WORD_ABANDONED);
    daemon_close(&d);
    stream_close(&first);
    stream_close(&second);
}

/* The caller, a daemon that refuses, one that dies, and close: each releases the stream. */
static void test_letting_go(void)
{
    struct daemon d;
    struct stream stream;

    open_one(&d, &stream);
    pull(&d, 1, &stream, false);
    admit(&d, 1);
    CHECK(hold(&d, 1, &stream, soon()) == 0);
    collect(&d, 4); /* the host's part is read, the GPU's is not */
    CHECK(pcc_client_abandon(d.client, 1));
    UNTIL(stream_idle(&stream));
    CHECK(!word_to(&d, 1, PCC_WORD_COPYING, PCC_WORD_COPIED));
    CHECK(state_of(&d, 1).error == 0);

    pull(&d, 2, &stream, false);
    CHECK(hold(&d, 2, &stream, soon()) == 0);
    CHECK(word_to(&d, 2, PCC_WORD_REQUESTED, PCC_WORD_REFUSED)); /* and it does not store done */
    UNTIL(stream_idle(&stream));
    CHECK(pcc_client_wait(d.client, 2, PCC_WAIT_READ, soon()) == 0);

    pull(&d, 3, &stream, false);
    CHECK(word_to(&d, 3, PCC_WORD_REQUESTED, PCC_WORD_REFUSED));
    CHECK(hold(&d, 3, &stream, soon()) == 0);
    UNTIL(stream_idle(&stream)); /* held after it was over: nothing to wait for */

    pull(&d, 4, &stream, false);
    admit(&d, 4);
    CHECK(hold(&d, 4, &stream, soon()) == 0);
    CHECK(close(d.sockets[0]) == 0); /* killed */
    d.sockets[0] = -1;
    CHECK(pcc_client_wait(d.client, 4, PCC_WAIT_READ, soon()) == -ECONNRESET);
    UNTIL(stream_idle(&stream));
    CHECK(state_of(&d, 4).word == PCC_WORD_ABANDONED && state_of(&d, 4).error == -ECONNRESET);
    CHECK(hold(&d, 4, &stream, soon()) == 0 && stream_idle(&stream));
    daemon_close(&d);

    daemon_open(&d, 4);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    pull(&d, 1, &stream, false);
    admit(&d, 1);
    CHECK(hold(&d, 1, &stream, soon()) == 0);
    CHECK(!stream_idle(&stream));
    daemon_close(&d);
    CHECK(stream_idle(&stream));
    stream_close(&stream);
}

/* Staged aside: training goes on at once, its next update after the staging, whatever the daemon
 * does; the daemon reads what was staged. */
static void test_staging(void)
{
    struct daemon d;
    struct stream stream;
    const CUdeviceptr memory = gpu_alloc(0, CHUNK);
    const struct pcc_device_copy copies[] = {{memory + 100, 0, 1000}, {memory + 5000, 4096, 60000}};
    const struct pcc_device_copy wide = {memory, (4u << 20) - CHUNK, CHUNK};
    uint8_t before[CHUNK];
    uint64_t small, large, same;

    open_one(&d, &stream);
    CHECK(pcc_client_stage(d.client, 0, handle(&stream), copies, 2, false) ==
          -EINVAL); /* no room */
    CHECK(pcc_client_staging(d.client, 0, 65536, &small) == 0);
    CHECK(pcc_client_staging(d.client, 0, 3u << 20, &large) == 0 && large != small);
    CHECK(pcc_client_staging(d.client, 0, 1000, &same) == 0 && same == large);
    CHECK_EQUAL(seen(&control->allocations), 3); /* the smaller one stays until it is trimmed */
    pcc_client_staging_trim(d.client);
    CHECK_EQUAL(seen(&control->allocations), 2);
    set(&control->alloc_fail_count, 1);
    CHECK(pcc_client_staging(d.client, 0, 16u << 20, &same) == -ENOMEM);
    CHECK(pcc_client_staging(d.client, 0, UINT64_MAX, &same) == -ENOMEM);
    CHECK(pcc_client_stage(d.client, 0, handle(&stream), &wide, 1, false) ==
          -EINVAL); /* the probe's */

    stream_block(&stream);
    stream_fill(&stream, memory, 7, 2000);
    set(&control->copy_hold_kinds, STANDIN_ON_DEVICE);
    pattern(before, sizeof(before), 1);
    memcpy(at(memory) + 2000, before + 2000, CHUNK - 2000);
    memset(before, 7, 2000);
    CHECK(pcc_client_stage(d.client, 0, handle(&stream), copies, 2, true) == 0);
    pull(&d, 1, &stream, true);
    admit(&d, 1);
    CHECK(hold(&d, 1, &stream, pcc_now_ns()) == 0); /* no deadline: nobody's copy is waited for */
    stream_fill(&stream, memory, 0xff, CHUNK);
    atomic_store(&stream.blocked, false);
    UNTIL(seen(&control->held_copies) == 1);
    CHECK(atomic_load(&words(&d, 1, 0)->ready) == 0 && !stream_idle(&stream));
    set(&control->copy_hold_kinds, 0);
    UNTIL(stream_idle(&stream));
    UNTIL(atomic_load(&words(&d, 1, 0)->ready) == 1);
    CHECK(all(at(memory), CHUNK, 0xff));
    CHECK(memcmp(at(large), before + 100, 1000) == 0);
    CHECK(memcmp(at(large) + 4096, before + 5000, 60000) == 0);
    CHECK(state_of(&d, 1).word == PCC_WORD_COPYING && !state_of(&d, 1).source_read);
    pulled(&d, 1, 0);
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, soon()) == 0);
    daemon_close(&d);
    CHECK_EQUAL(seen(&control->allocations), 1);
    stream_close(&stream);
    gpu_free(0, memory);
}

/* No memory operations: the daemon cannot pull, and words say why. */
static void test_cannot_pull(void)
{
    struct daemon d;
    struct stream stream;

    set(&control->no_memory_ops, 1);
    daemon_open(&d, 4);
    CHECK(pcc_client_device_open(d.client, PCC_DEVICES) == -EINVAL);
    CHECK(pcc_client_device_open(d.client, 5) == -PCC_E_DEVICE); /* there are four */
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    CHECK(strstr(pcc_client_device_cannot_pull(d.client, 0), "64-bit") != NULL);
    set(&control->no_memory_ops, 0);
    stream_open(&stream, 0);
    CHECK(pcc_client_request(d.client, 1) == 0);
    CHECK(pcc_client_mark(d.client, 1, 0, handle(&stream), true, false) == -PCC_E_DEVICE);
    CHECK(pcc_client_mark(d.client, 1, 0, handle(&stream), false, false) == 0);
    CHECK(hold(&d, 1, &stream, pcc_now_ns()) == -ETIMEDOUT); /* never submitted */
    daemon_close_gpu(&d, &stream);
}

/* A forked child (a data loader's worker) does not call the driver, and ends normally. */
static void test_fork(void)
{
    struct daemon d;
    struct stream stream;
    int status;

    open_one(&d, &stream);
    pull(&d, 1, &stream, false);
    admit(&d, 1);
    CHECK(hold(&d, 1, &stream, soon()) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        const struct pcc_cuda *ignored;
        _exit(pcc_cuda_load(&ignored) == -PCC_E_NO_DRIVER ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(!stream_idle(&stream));
    pulled(&d, 1, 0);
    UNTIL(stream_idle(&stream));
    daemon_close_gpu(&d, &stream);
}

/* A stream that has yet to say that it is ready, and one that has yet to pass its wait, though
 * nothing holds it any more: until then it uses the page, which stays, and close() does not stand
 * in the driver meanwhile. */
static void test_streams_that_come_late(void)
{
    for (int held = 0; held <= 1; held++) {
        struct daemon d;
        struct stream stream;

        open_one(&d, &stream);
        d.client->close_patience_ns = SECOND / 50;
        if (!held)
            stream_block(&stream);
        pull(&d, 1, &stream, false);
        admit(&d, 1);
        if (held) {
            UNTIL(atomic_load(&words(&d, 1, 0)->ready) == 1 && stream_idle(&stream));
            stream_block(&stream);
            CHECK(hold(&d, 1, &stream, soon()) == 0);
        }
        CHECK(pcc_client_abandon(d.client, 1));
        pcc_client_close(d.client);
        CHECK(!stream_idle(&stream));
        CHECK(seen(&control->registered_bytes) > 0);
        atomic_store(&stream.blocked, false);
        UNTIL(stream_idle(&stream));
        CHECK(close(d.sockets[0]) == 0 && close(d.sockets[1]) == 0);
        free(d.payload);
        stream_close(&stream);
    }
}

/* The process ends before the client does: the driver answers nothing any more. */
static struct daemon left_open;

static void close_at_exit(void)
{
    pcc_client_close(left_open.client);
    left_open.client = NULL;
}

static void test_exit(void)
{
    struct stream stream;

    open_one(&left_open, &stream);
    pull(&left_open, 1, &stream, false);
    admit(&left_open, 1);
    CHECK(hold(&left_open, 1, &stream, soon()) == 0);
}

int main(void)
{
    CHECK(atexit(close_at_exit) == 0); /* before the driver's own: it comes after it */
    standin_open();
    RUN(test_words);
    RUN(test_no_stream_of_ours_waits);
    RUN(test_questions);
    RUN(test_the_host_waits_before_a_proof);
    RUN(test_samples);
    RUN(test_a_driver_that_is_locked);
    RUN(test_withdrawing);
    RUN(test_deadline);
    RUN(test_letting_go);
    RUN(test_staging);
    RUN(test_cannot_pull);
    RUN(test_fork);
    RUN(test_streams_that_come_late);
    RUN(test_exit);
    standin_close();
    return 0;
}
