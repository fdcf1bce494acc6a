/* Copies on the device: of many tensors with few launches, in any order among themselves, and in
 * the order of the trainer's stream; also on drivers that do not take them in batches. */
#include <pthread.h>

#include "client/pcc_client_private.h"
#include "client_fixture.h"

#include <sys/wait.h>

#define TENSORS 1168u /* of GPT-2 with Adam */
#define STRIDE 2304u  /* from tensor to tensor: no neighbours */
#define MEMORY_BYTES (TENSORS * STRIDE)
#define LAUNCHES_MAX 8u

/* -- a driver without this call -- */

static const char *missing = "";

void *__real_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name);

void *__wrap_dlsym(void *library, const char *name)
{
    return strcmp(name, missing) == 0 ? NULL : __real_dlsym(library, name);
}

/* -- a trainer with many tensors -- */

struct job {
    struct daemon d;
    struct stream stream;
    CUdeviceptr memory;
    uint64_t staging;
    struct pcc_device_copy copies[TENSORS];
    uint64_t count, staged_bytes;
    bool aside;
    uint64_t seed;             /* of what the memory holds when the copies are made */
    uint64_t copied, launched; /* before them */
    _Atomic bool returned;
};
static struct job job;

static void job_open(void)
{
    job = (struct job){0};
    job.memory = gpu_alloc(0, MEMORY_BYTES);
    daemon_open_gpu(&job.d, 4, &job.stream, 0);
}

static void job_close(void)
{
    daemon_close_gpu(&job.d, &job.stream);
    gpu_free(0, job.memory);
}

static void copy_add(uint64_t from, uint64_t length)
{
    job.copies[job.count++] = (struct pcc_device_copy){.address = job.memory + from,
                                                       .staging_offset_bytes = job.staged_bytes,
                                                       .length_bytes = length};
    job.staged_bytes = pcc_align_up(job.staged_bytes + length, 64);
}

/* One of them is empty. */
static void many_tensors(void)
{
    job.count = job.staged_bytes = 0;
    for (uint64_t i = 0; i < TENSORS; i++)
        copy_add(i * STRIDE, i == 5 ? 0 : 1 + i * 37 % 1500);
    CHECK(pcc_client_staging(job.d.client, 0, job.staged_bytes, &job.staging) == 0);
}

static void write_memory(void *argument)
{
    (void)argument;
    pattern(at(job.memory), MEMORY_BYTES, job.seed);
}

static void *stage(void *argument)
{
    int *error = argument;

    *error =
        pcc_client_stage(job.d.client, 0, handle(&job.stream), job.copies, job.count, job.aside);
    atomic_store(&job.returned, true);
    return NULL;
}

static int stage_now(void)
{
    int error;

    job.copied = seen(&control->copies_on_device);
    job.launched = seen(&control->launches);
    (void)stage(&error);
    return error;
}

static uint64_t launches(void)
{
    return seen(&control->launches) - job.launched;
}

static struct stream side(void)
{
    return (struct stream){.handle = job.d.client->devices[0].side};
}

static void staged_is(void)
{
    uint8_t *expected = malloc(MEMORY_BYTES);

    CHECK(expected != NULL);
    pattern(expected, MEMORY_BYTES, job.seed);
    for (uint64_t i = 0; i < job.count; i++)
        CHECK(memcmp(at(job.staging) + job.copies[i].staging_offset_bytes,
                     expected + (job.copies[i].address - job.memory),
                     job.copies[i].length_bytes) == 0);
    free(expected);
}

static void staged(uint64_t copies)
{
    const struct stream on = side();

    UNTIL(stream_idle(&on));
    CHECK_EQUAL(seen(&control->copies_on_device), job.copied + copies);
    staged_is();
}

/* The GPU is behind, and its queue takes 16 launches: the call returns, and what it copies is what
 * the stream has written by then, also when what follows overwrites it. */
static void stage_behind_a_busy_stream(void)
{
    pthread_t thread;
    int error;

    job.copied = seen(&control->copies_on_device);
    atomic_store(&job.returned, false);
    stream_block(&job.stream);
    CHECK(pcc_gpu_enter(&gpus[0]) == 0);
    CHECK(launch_host(job.stream.handle, write_memory, NULL) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[0]);
    set(&control->launch_queue, 16);
    job.launched = seen(&control->launches);
    CHECK(pthread_create(&thread, NULL, stage, &error) == 0);
    UNTIL(atomic_load(&job.returned));
    CHECK(pthread_join(thread, NULL) == 0 && error == 0);
    CHECK(launches() <= LAUNCHES_MAX);
    CHECK_EQUAL(seen(&control->copies_on_device), job.copied);
    if (!job.aside)
        stream_fill(&job.stream, job.memory, 0xff, MEMORY_BYTES);
    atomic_store(&job.stream.blocked, false);
    staged(TENSORS - 1);
    UNTIL(stream_idle(&job.stream));
    set(&control->launch_queue, 0);
}

static void test_many_tensors_do_not_fill_the_queue(void)
{
    job_open();
    many_tensors();
    for (job.seed = 1; job.seed <= 4; job.seed++) {
        job.aside = job.seed % 2 == 1;
        stage_behind_a_busy_stream();
    }
    CHECK(pcc_client_stage(job.d.client, 0, handle(&job.stream), job.copies, 0, true) == 0);
    job_close();
}

/* -- staging memory that is used again -- */

/* The second snapshot's copies are enqueued while the daemon has yet to read the first one's. */
static void stage_twice(enum pcc_level level, uint64_t limit_ns)
{
    const struct stream on = side();

    many_tensors();
    job.aside = true;
    job.seed = 1;
    write_memory(NULL);
    CHECK(stage_now() == 0);
    pull_to(&job.d, 1, &job.stream, true, level);
    admit(&job.d, 1);
    staged(TENSORS - 1);
    CHECK(pcc_client_hold(job.d.client, 1, 0, PCC_STAGING, pcc_now_ns() + limit_ns) == 0);
    if (level == PCC_LEVEL_DEVICE)
        UNTIL(stream_idle(&on));
    job.seed = 2;
    write_memory(NULL);
    CHECK(stage_now() == 0);
    UNTIL(stream_idle(&job.stream));
}

static void test_copies_wait_until_what_was_staged_was_read(void)
{
    job_open();
    stage_twice(PCC_LEVEL_DISK, PATIENCE);
    CHECK_EQUAL(seen(&control->waits), 2); /* for the word, and then for the stream */
    job.seed = 1;
    staged_is();
    CHECK_EQUAL(seen(&control->copies_on_device), job.copied);
    pulled(&job.d, 1, 0);
    job.seed = 2;
    staged(TENSORS - 1);
    CHECK(pcc_client_hold(job.d.client, 1, 0, PCC_STAGING, soon()) == 0);
    job_close();
}

/* The daemon does not read it: at the deadline that snapshot is lost, and the next one is staged.
 */
static void test_copies_wait_no_longer_than_the_deadline(void)
{
    job_open();
    stage_twice(PCC_LEVEL_DISK, SECOND / 20);
    staged(TENSORS - 1);
    CHECK(state_of(&job.d, 1).word == PCC_WORD_ABANDONED);
    CHECK_EQUAL(state_of(&job.d, 1).error, -ETIMEDOUT);
    CHECK(!word_to(&job.d, 1, PCC_WORD_COPYING, PCC_WORD_COPIED));
    job_close();
}

/* Nor longer than the client lives. */
static void test_closing_lets_copies_go(void)
{
    job_open();
    stage_twice(PCC_LEVEL_DISK, PATIENCE);
    job_close();
    CHECK_EQUAL(seen(&control->copies_on_device), job.copied + TENSORS - 1);
}

/* What nobody reads before a death is withdrawn, by each stream that is going to change it. When a
 * second stream cannot, the first one's word counts. */
static void test_copies_withdraw_what_was_staged(void)
{
    job_open();
    stage_twice(PCC_LEVEL_DEVICE, PATIENCE);
    staged(TENSORS - 1);
    CHECK_EQUAL(atomic_load(&words(&job.d, 1, 0)->withdrawn), 1);
    set(&control->write_fail_count, 1);
    CHECK(hold(&job.d, 1, &job.stream, soon()) == -PCC_E_DEVICE);
    pcc_client_write(job.d.client, 1);
    CHECK(!job.d.client->jobs[1].wanted);
    job_close();
}

/* -- neighbours -- */

static struct pcc_cuda driver; /* as the GPU's, but for one call */

static CUresult two_allocations(CUdeviceptr *base, size_t *length, CUdeviceptr address)
{
    const bool second = address >= job.memory + 2048;

    *base = job.memory + (second ? 2048 : 0);
    *length = second ? MEMORY_BYTES - 2048 : 2048;
    return CUDA_SUCCESS;
}

/* Where staging memory has them at the same distance, neighbours and near ones are one copy. No
 * copy spans two allocations. */
static void test_neighbours_are_one_copy(void)
{
    job_open();
    job.seed = 9;
    write_memory(NULL);
    for (uint64_t from = 0; from < 4096; from += 512)
        copy_add(from, 512);
    job.staged_bytes += 511; /* one byte less than is too far */
    copy_add(4096 + 511, 100);
    job.staged_bytes = job.copies[job.count - 1].staging_offset_bytes + 100 + 512;
    copy_add(4096 + 511 + 100 + 512, 100);                               /* too far */
    copy_add(job.copies[job.count - 1].address - job.memory + 100, 100); /* not there */
    CHECK(pcc_client_staging(job.d.client, 0, job.staged_bytes, &job.staging) == 0);
    CHECK(stage_now() == 0);
    staged(3);
    driver = *job.d.client->devices[0].gpu.cuda;
    driver.address_range = two_allocations;
    job.d.client->devices[0].gpu.cuda = &driver;
    CHECK(stage_now() == 0);
    staged(4);
    job_close();
}

/* -- drivers that take no batches -- */

static void test_refused_batches_are_copied_one_by_one(void)
{
    job_open();
    many_tensors();
    job.seed = 5;
    write_memory(NULL);
    set(&control->batch_fail_code, CUDA_ERROR_NOT_SUPPORTED);
    CHECK(stage_now() == 0);
    CHECK(launches() > TENSORS);
    staged(TENSORS - 1);
    set(&control->batch_fail_code, 0);
    job.seed = 6;
    write_memory(NULL);
    CHECK(stage_now() == 0);
    CHECK(launches() <= LAUNCHES_MAX);
    staged(TENSORS - 1);
    job_close();
}

/* The driver takes what comes before the 700th copy, and then the whole batch once more. */
static void test_a_batch_fails_in_its_middle(void)
{
    job_open();
    many_tensors();
    job.seed = 7;
    write_memory(NULL);
    set(&control->copy_fail_kinds, STANDIN_ON_DEVICE);
    set(&control->copy_fail_code, CUDA_ERROR_INVALID_VALUE);
    set(&control->copy_fail_async, 0);
    set(&control->copy_fail_at, 700);
    CHECK(stage_now() == 0);
    staged(699 + TENSORS - 1);
    set(&control->copy_fail_at, STANDIN_ALWAYS);
    CHECK(stage_now() == -PCC_E_DEVICE);
    set(&control->copy_fail_at, 0);
    job.seed = 8;
    write_memory(NULL);
    CHECK(stage_now() == 0);
    staged(TENSORS - 1);
    job_close();
}

static void test_an_older_driver(void)
{
    CHECK(cuda->copy_batch == NULL && cuda->descriptors);
    job_open();
    many_tensors();
    job.seed = 3;
    write_memory(NULL);
    CHECK(stage_now() == 0);
    CHECK(launches() > TENSORS);
    staged(TENSORS - 1);
    job_close();
}

/* In a process of its own: the driver is loaded once. */
static void run_without(const char *call, void (*run)(void))
{
    int status;
    const pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        missing = call;
        standin_open();
        run();
        standin_close();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void test_a_driver_without_pieces(void)
{
    CHECK(cuda->copy_batch != NULL && !cuda->descriptors);
}

int main(void)
{
    run_without("cuMemcpyBatchAsync", test_an_older_driver);
    run_without("cuMemMap", test_a_driver_without_pieces);
    standin_open();
    RUN(test_many_tensors_do_not_fill_the_queue);
    RUN(test_copies_wait_until_what_was_staged_was_read);
    RUN(test_copies_wait_no_longer_than_the_deadline);
    RUN(test_closing_lets_copies_go);
    RUN(test_copies_withdraw_what_was_staged);
    RUN(test_neighbours_are_one_copy);
    RUN(test_refused_batches_are_copied_one_by_one);
    RUN(test_a_batch_fails_in_its_middle);
    standin_close();
    return 0;
}
