/* Step "overlap": do a trainer's kernels slow down while its memory is copied to the host, by
 * another process through an IPC mapping (pull) or by a stream of its own (push), MPS off? And do
 * the copies? Kernels that compute, short ones, and ones that only move memory. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "probe.h"

/* burn: `rounds` times eight multiply-adds a thread. sweep: adds to every 32-bit word. */
static const char kernels[] =
    ".version 6.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry burn(.param .u64 out, .param .u32 rounds)\n{\n"
    " .reg .pred %p<3>; .reg .f32 %f<4>; .reg .b32 %r<4>; .reg .b64 %d<3>;\n"
    " ld.param.u64 %d1, [out];\n cvta.to.global.u64 %d2, %d1;\n ld.param.u32 %r1, [rounds];\n"
    " mov.u32 %r2, %tid.x;\n cvt.rn.f32.u32 %f1, %r2;\n"
    " mov.f32 %f2, 0f3F7FFFFE;\n mov.f32 %f3, 0f3F800001;\n mov.u32 %r3, 0;\n"
    "again:\n"
    " fma.rn.f32 %f1, %f1, %f2, %f3;\n fma.rn.f32 %f1, %f1, %f2, %f3;\n"
    " fma.rn.f32 %f1, %f1, %f2, %f3;\n fma.rn.f32 %f1, %f1, %f2, %f3;\n"
    " fma.rn.f32 %f1, %f1, %f2, %f3;\n fma.rn.f32 %f1, %f1, %f2, %f3;\n"
    " fma.rn.f32 %f1, %f1, %f2, %f3;\n fma.rn.f32 %f1, %f1, %f2, %f3;\n"
    " add.u32 %r3, %r3, 1;\n setp.lt.u32 %p1, %r3, %r1;\n @%p1 bra again;\n"
    " setp.lt.f32 %p2, %f1, 0f00000000;\n @!%p2 bra done;\n" /* never: keeps the sum alive */
    " st.global.f32 [%d2], %f1;\n"
    "done:\n ret;\n}\n"
    ".visible .entry sweep(.param .u64 words, .param .u64 count)\n{\n"
    " .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %d<9>;\n"
    " ld.param.u64 %d1, [words];\n cvta.to.global.u64 %d2, %d1;\n ld.param.u64 %d3, [count];\n"
    " mov.u32 %r1, %ctaid.x;\n mov.u32 %r2, %ntid.x;\n mov.u32 %r3, %tid.x;\n"
    " mov.u32 %r4, %nctaid.x;\n mul.wide.u32 %d4, %r1, %r2;\n cvt.u64.u32 %d5, %r3;\n"
    " add.u64 %d4, %d4, %d5;\n mul.wide.u32 %d6, %r4, %r2;\n"
    "again:\n"
    " setp.ge.u64 %p1, %d4, %d3;\n @%p1 bra done;\n shl.b64 %d7, %d4, 2;\n"
    " add.u64 %d8, %d2, %d7;\n ld.global.u32 %r5, [%d8];\n add.u32 %r5, %r5, 1;\n"
    " st.global.u32 [%d8], %r5;\n add.u64 %d4, %d4, %d6;\n bra again;\n"
    "done:\n ret;\n}\n";

#define BATCH 16 /* launches between two events */

struct load { /* what the trainer's stream does */
    const char *name;
    CUfunction function;
    CUdeviceptr memory;
    uint64_t count; /* rounds of burn (32 bits of it), words of sweep */
    unsigned blocks;
    unsigned launches; /* in a batch */
};

static CUstream training;

static void launch(struct load *load)
{
    void *parameters[] = {&load->memory, &load->count}; /* little-endian: u32 reads the low half */
    CU(cu.launch(load->function, load->blocks, 1, 1, 256, 1, 1, 0, training, parameters, NULL));
}

/* Mean milliseconds of a launch over `seconds`, two batches under way; the slowest batch's, too. */
static double train(struct load *load, double seconds, double *slowest_ms)
{
    CUevent events[2];
    double start_s = now_s(), last_s = start_s;
    uint64_t batches = 0;
    *slowest_ms = 0;
    for (int i = 0; i < 2; i++)
        CU(cu.event_create(&events[i], CU_EVENT_DISABLE_TIMING));
    while (now_s() - start_s < seconds || batches < 4) {
        for (unsigned i = 0; i < load->launches; i++)
            launch(load);
        CU(cu.event_record(events[batches % 2], training));
        if (++batches > 1)
            CU(cu.event_synchronize(events[batches % 2]));
        double at_s = now_s();
        if (batches > 2)
            *slowest_ms = fmax(*slowest_ms, (at_s - last_s) * 1e3 / load->launches);
        last_s = at_s;
    }
    CU(cu.stream_synchronize(training));
    double took_s = now_s() - start_s;
    for (int i = 0; i < 2; i++)
        CU(cu.event_destroy(events[i]));
    return took_s * 1e3 / (double)(batches * load->launches);
}

struct shared {
    _Atomic int stop;
};

/* Copies as the daemon does; a note starts it, shared->stop ends it, a note tells how fast. */
static void puller(int socket, void *argument)
{
    struct shared *shared = argument;
    struct note note;
    hear(socket, &note);
    (void)gpu_begin();
    struct copying copying = {.source_bytes = note.bytes,
                              .host_bytes = 16 * CHUNK_BYTES,
                              .chunk_bytes = CHUNK_BYTES,
                              .stop = &shared->stop};
    note.result = cu.ipc_open(&copying.source, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (note.result == CUDA_SUCCESS) {
        CUdeviceptr base, second;
        size_t length;
        note.range = cu.address_range(&base, &length, copying.source);
        note.again = cu.ipc_open(&second, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        if (cu.pointer_attribute(&note.bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, copying.source))
            note.bytes = 0;
        copying.host = pinned_segment(copying.host_bytes);
        copying.stream = gpu_stream();
    }
    tell(socket, &note);
    while (hear_next(socket, &note)) {
        tell(socket, &note); /* on its way */
        copy_until_stopped(&copying);
        note.bytes = copying.copied_bytes;
        note.seconds = copying.seconds;
        tell(socket, &note);
    }
}

struct scene {
    struct peer peer;
    struct shared *shared;
    struct copying own; /* push */
    bool has_pull;
    double seconds; /* of one measurement */
};

static void *push(void *argument)
{
    gpu_enter_thread();
    copy_until_stopped(argument);
    return NULL;
}

static double idle(struct load *load, double seconds, double *slowest_ms)
{
    *slowest_ms = 0;
    if (load != NULL)
        return train(load, seconds, slowest_ms);
    sleep_s(seconds);
    return 0;
}

/* The kernels' time while the copies run; `rate` becomes theirs in GB/s. */
static double with_pull(struct scene *scene, struct load *load, double *rate, double *slowest_ms)
{
    struct note note = {0};
    atomic_store(&scene->shared->stop, 0);
    tell(scene->peer.socket, &note);
    hear(scene->peer.socket, &note);
    double found = idle(load, scene->seconds, slowest_ms);
    atomic_store(&scene->shared->stop, 1);
    hear(scene->peer.socket, &note);
    *rate = (double)note.bytes / note.seconds * 1e-9;
    return found;
}

static double with_push(struct scene *scene, struct load *load, double *rate, double *slowest_ms)
{
    pthread_t thread;
    atomic_store(&scene->shared->stop, 0);
    must(pthread_create(&thread, NULL, push, &scene->own) == 0, "pthread_create");
    double found = idle(load, scene->seconds, slowest_ms);
    atomic_store(&scene->shared->stop, 1);
    pthread_join(thread, NULL);
    *rate = (double)scene->own.copied_bytes / scene->own.seconds * 1e-9;
    return found;
}

static void say(const char *load, const char *what, double value)
{
    char key[96];
    snprintf(key, sizeof(key), "%s_%s", load, what);
    say_number(key, value);
}

/* Alone before and after, so that a clock that drifts is seen. */
static void measure(struct scene *scene, struct load *load)
{
    double slowest_ms, rate, before_ms, after_ms, pull_ms = 0, push_ms;
    before_ms = train(load, scene->seconds, &slowest_ms);
    say(load->name, "alone_ms", before_ms);
    say(load->name, "alone_slowest_ms", slowest_ms);
    if (scene->has_pull) {
        pull_ms = with_pull(scene, load, &rate, &slowest_ms);
        say(load->name, "with_pull_ms", pull_ms);
        say(load->name, "with_pull_slowest_ms", slowest_ms);
        say(load->name, "pull_gb_s", rate);
    }
    push_ms = with_push(scene, load, &rate, &slowest_ms);
    say(load->name, "with_push_ms", push_ms);
    say(load->name, "with_push_slowest_ms", slowest_ms);
    say(load->name, "push_gb_s", rate);
    after_ms = train(load, scene->seconds, &slowest_ms);
    say(load->name, "alone_again_ms", after_ms);
    double alone_ms = (before_ms + after_ms) / 2;
    if (scene->has_pull)
        say(load->name, "with_pull_ratio", pull_ms / alone_ms);
    say(load->name, "with_push_ratio", push_ms / alone_ms);
}

/* Rounds of burn for a launch of about `wanted_ms`. */
static void calibrate(struct load *load, double wanted_ms)
{
    double slowest_ms;
    load->count = 2000;
    (void)train(load, 0.2, &slowest_ms); /* clocks go up */
    double found_ms = train(load, 0.1, &slowest_ms);
    load->count = (uint64_t)fmax(1, 2000 * wanted_ms / fmax(found_ms, 1e-3));
}

static void measure_kernels(struct scene *scene, CUdevice device, size_t memory_bytes)
{
    CUmodule module = NULL;
    int processors = 0;
    CUresult result = cu.module_load(&module, kernels);
    say_result("kernels", result);
    if (result != CUDA_SUCCESS)
        return;
    CU(cu.device_attribute(&processors, 16, device));
    unsigned blocks = (unsigned)processors * 8;
    CUdeviceptr memory = gpu_memory(memory_bytes);
    struct load loads[] = {{.name = "compute", .blocks = blocks, .launches = BATCH},
                           {.name = "short", .blocks = blocks, .launches = 16 * BATCH},
                           {.name = "memory", .blocks = blocks, .launches = BATCH}};
    for (size_t i = 0; i < 3; i++) {
        const char *name = i == 2 ? "sweep" : "burn";
        loads[i].memory = memory;
        CU(cu.module_function(&loads[i].function, module, name));
    }
    calibrate(&loads[0], 1);
    calibrate(&loads[1], 0.02);
    loads[2].count = memory_bytes / 4;
    for (size_t i = 0; i < 3; i++)
        measure(scene, &loads[i]);
}

void step_overlap(void)
{
    struct scene scene = {.seconds = options.is_small ? 0.2 : 1};
    size_t source_bytes = options.is_small ? 64 * MIB : GIB;
    double rate, unused;
    struct note note = {.bytes = source_bytes};
    scene.shared = shared_memory(sizeof(*scene.shared));
    scene.peer = spawn("puller", SAME_UID, puller, scene.shared);
    CUdevice device = gpu_begin();
    training = gpu_stream();
    scene.own = (struct copying){.source = gpu_memory(source_bytes),
                                 .source_bytes = source_bytes,
                                 .host_bytes = 16 * CHUNK_BYTES,
                                 .chunk_bytes = CHUNK_BYTES,
                                 .stream = gpu_stream(),
                                 .stop = &scene.shared->stop};
    scene.own.host = pinned_segment(scene.own.host_bytes);
    note.result = cu.ipc_get(&note.handle, scene.own.source);
    say_result("export", note.result);
    if (note.result == CUDA_SUCCESS) {
        tell(scene.peer.socket, &note);
        hear(scene.peer.socket, &note);
        say_result("open", note.result);
        say_result("imported_address_range", note.range);
        say_count("imported_range_size_bytes", (long long)note.bytes); /* 0: refused */
        say_result("open_twice", note.again);
        scene.has_pull = note.result == CUDA_SUCCESS;
    }
    if (scene.has_pull) {
        (void)with_pull(&scene, NULL, &rate, &unused);
        say_number("pull_alone_gb_s", rate);
    }
    (void)with_push(&scene, NULL, &rate, &unused);
    say_number("push_alone_gb_s", rate);
    measure_kernels(&scene, device, options.is_small ? 64 * MIB : GIB);
    dismiss(&scene.peer);
}
