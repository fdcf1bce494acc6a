/* A client whose daemon is the test itself, and a trainer on the stand-in's GPUs: the test decides
 * what each side does, and in which order. */
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../standin/standin_control.h"
#include "base/pcc_futex.h"
#include "base/pcc_hash.h"
#include "check.h"
#include "client/pcc_client.h"
#include "gpu/pcc_cuda.h"
#include "shared/pcc_ring.h"

#define BLOCK 4096u
#define CHUNK 65536u
#define CHUNKS 64u
#define SECOND 1000000000ull
#define PATIENCE (90 * SECOND)

/* -- the trainer's GPUs -- */

static const struct pcc_cuda *cuda;
static struct standin_control *control;
static struct pcc_gpu_device gpus[4]; /* held for the whole program, as torch does */
static CUresult (*launch_host)(CUstream, void (*)(void *), void *);
static CUresult (*fill_async)(CUdeviceptr, unsigned char, size_t, CUstream);
static CUresult (*alloc_unshareable)(CUdeviceptr *, size_t);
static CUresult (*capture_begin)(CUstream, int);
static CUresult (*capture_end)(CUstream);
static CUresult (*load_module)(void);

static const struct pcc_client_replica no_replica = {0};

static inline void symbol(void *library, const char *name, void *out)
{
    void *found = dlsym(library, name);

    CHECK(found != NULL);
    memcpy(out, &found, sizeof(found));
}

static inline void standin_open(void)
{
    static char directory[] = "/tmp/pcc-client-XXXXXX";
    static char path[64];

    CHECK(mkdtemp(directory) != NULL);
    (void)snprintf(path, sizeof(path), "%s/control", directory);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, sizeof(*control)) == 0);
    control = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(control != MAP_FAILED && close(fd) == 0);
    control->magic = STANDIN_CONTROL_MAGIC;
    CHECK(setenv("PCCHECK_STANDIN_DIR", directory, 1) == 0);
    CHECK(setenv("PCCHECK_STANDIN_FAULTS", path, 1) == 0);
    CHECK(setenv("PCCHECK_STANDIN_DEVICES", "4", 1) == 0);
    void *library = dlopen(STANDIN, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    symbol(library, "cuLaunchHostFunc", &launch_host);
    symbol(library, "cuMemsetD8Async", &fill_async);
    symbol(library, "standinAllocUnshareable", &alloc_unshareable);
    symbol(library, "standinBeginCapture", &capture_begin);
    symbol(library, "standinEndCapture", &capture_end);
    symbol(library, "standinLoadModule", &load_module);
    CHECK(pcc_cuda_load(&cuda) == 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(pcc_gpu_device_open(i, &gpus[i]) == 0);
}

static inline void standin_close(void)
{
    const char *directory = getenv("PCCHECK_STANDIN_DIR");

    for (uint32_t i = 0; i < 4; i++)
        pcc_gpu_device_close(&gpus[i]);
    char page[128]; /* of a process that has lost a context, or has one still */
    (void)snprintf(page, sizeof(page), "%s/process-0-%d-%016d", directory, getpid(), 0);
    (void)unlink(page);
    CHECK(unlink(getenv("PCCHECK_STANDIN_FAULTS")) == 0);
    CHECK(rmdir(directory) == 0); /* no device memory is left in it */
}

static inline uint64_t seen(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void set(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint64_t soon(void)
{
    return pcc_now_ns() + PATIENCE;
}

#define UNTIL(condition)                                                                           \
    do {                                                                                           \
        const uint64_t until_deadline = soon();                                                    \
        while (!(condition)) {                                                                     \
            CHECK(pcc_now_ns() < until_deadline);                                                  \
            (void)usleep(100);                                                                     \
        }                                                                                          \
    } while (0)

static inline CUdeviceptr gpu_alloc(uint32_t gpu, uint64_t length)
{
    CUdeviceptr address;

    CHECK(pcc_gpu_enter(&gpus[gpu]) == 0);
    CHECK(cuda->memory_alloc(&address, length) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[gpu]);
    return address;
}

static inline void gpu_free(uint32_t gpu, CUdeviceptr address)
{
    CHECK(pcc_gpu_enter(&gpus[gpu]) == 0);
    CHECK(cuda->memory_free(address) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[gpu]);
}

/* Device memory of the stand-in can be touched. */
static inline uint8_t *at(CUdeviceptr address)
{
    return (uint8_t *)(uintptr_t)address;
}

static inline struct pcc_device_range on_gpu(uint32_t gpu, CUdeviceptr address, uint64_t offset,
                                             uint64_t length)
{
    return (struct pcc_device_range){
        .address = address, .offset_bytes = offset, .length_bytes = length, .device = gpu};
}

struct stream {
    uint32_t gpu;
    CUdeviceptr scratch;
    CUstream handle;
    _Atomic bool blocked;
};

static inline void stream_open(struct stream *stream, uint32_t gpu)
{
    *stream = (struct stream){.gpu = gpu};
    CHECK(pcc_gpu_enter(&gpus[gpu]) == 0);
    CHECK(cuda->stream_create(&stream->handle, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[gpu]);
}

static inline void stream_close(struct stream *stream)
{
    CHECK(pcc_gpu_enter(&gpus[stream->gpu]) == 0);
    CHECK(cuda->stream_destroy(stream->handle) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[stream->gpu]);
}

static inline bool stream_idle(const struct stream *stream)
{
    CHECK(pcc_gpu_enter(&gpus[stream->gpu]) == 0);
    const CUresult result = cuda->stream_query(stream->handle);
    pcc_gpu_leave(&gpus[stream->gpu]);
    CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY);
    return result == CUDA_SUCCESS;
}

static inline void stream_fill(const struct stream *stream, CUdeviceptr address, uint8_t value,
                               uint64_t length)
{
    CHECK(pcc_gpu_enter(&gpus[stream->gpu]) == 0);
    CHECK(fill_async(address, value, length, stream->handle) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[stream->gpu]);
}

static inline void stream_blocker(void *argument)
{
    while (atomic_load((_Atomic bool *)argument))
        (void)usleep(100);
}

/* The stream computes until the test ends that. */
static inline void stream_block(struct stream *stream)
{
    atomic_store(&stream->blocked, true);
    CHECK(pcc_gpu_enter(&gpus[stream->gpu]) == 0);
    CHECK(launch_host(stream->handle, stream_blocker, &stream->blocked) == CUDA_SUCCESS);
    pcc_gpu_leave(&gpus[stream->gpu]);
}

static inline uint64_t handle(const struct stream *stream)
{
    return (uintptr_t)stream->handle;
}

/* -- the daemon -- */

struct daemon {
    int sockets[2];
    struct pcc_page_view view;
    uint8_t *chunks; /* CHUNKS of them, in one segment */
    struct pcc_client *client;
    uint8_t *payload; /* what was handed over */
    uint64_t handed_bytes;
    uint64_t bare_bytes; /* of all that was: without checksums */
    uint32_t taken;      /* chunks that came back */
    uint64_t requested;  /* the snapshot of the last PCC_MSG_REQUEST */
    uint64_t wanted;     /* the snapshot of the last PCC_MSG_WRITE */
    uint32_t damaged;    /* of them, those that the client reports as damaged */
    uint32_t returned;   /* segments that did */
    bool retiring;       /* full chunks are not the client's again */
};

static inline void *sealed(uint64_t length, int *fd_out)
{
    *fd_out = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(*fd_out >= 0 && ftruncate(*fd_out, (off_t)length) == 0);
    CHECK(fcntl(*fd_out, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    void *bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, *fd_out, 0);
    CHECK(bytes != MAP_FAILED);
    return bytes;
}

static inline void grant(struct daemon *d, int fd, uint32_t number, uint32_t first, uint32_t count)
{
    struct pcc_grant told = {.magic = PCC_GRANT_MAGIC,
                             .kind = PCC_GRANT_ADD,
                             .segment = number,
                             .first_chunk = first,
                             .chunk_count = count,
                             .bytes = (uint64_t)count * CHUNK};
    struct iovec part = {.iov_base = &told, .iov_len = sizeof(told)};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } room = {0};
    struct msghdr packet = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = room.bytes,
                            .msg_controllen = sizeof(room.bytes)};

    CMSG_FIRSTHDR(&packet)->cmsg_level = SOL_SOCKET;
    CMSG_FIRSTHDR(&packet)->cmsg_type = SCM_RIGHTS;
    CMSG_FIRSTHDR(&packet)->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(CMSG_FIRSTHDR(&packet)), &fd, sizeof(int));
    CHECK(sendmsg(d->sockets[0], &packet, 0) == sizeof(told));
}

static inline void say(struct daemon *d, const struct pcc_message *message)
{
    CHECK(pcc_ring_push(&d->view.to_client, message) == 0);
    pcc_bell_ring(&d->view.page->client_bell);
}

/* Chunks [first, first+count) are the client's to fill. */
static inline void free_chunks(struct daemon *d, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++)
        say(d, &(struct pcc_message){.kind = PCC_MSG_FREE, .chunk = i});
}

static inline void daemon_open(struct daemon *d, uint32_t granted)
{
    struct pcc_page_geometry geometry;
    int page_fd, segment_fd;

    *d = (struct daemon){0};
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, d->sockets) == 0);
    CHECK(pcc_page_plan(CHUNK, BLOCK, CHUNKS, &geometry) == 0);
    pcc_page_make(sealed(geometry.page_bytes, &page_fd), &geometry, 1, &d->view);
    d->chunks = sealed((uint64_t)CHUNKS * CHUNK, &segment_fd);
    d->payload = calloc(CHUNKS, CHUNK);
    CHECK(d->payload != NULL);
    CHECK(pcc_client_open(d->sockets[1], page_fd, &d->client) == 0);
    grant(d, segment_fd, 1, 0, CHUNKS);
    free_chunks(d, 0, granted);
    CHECK(close(page_fd) == 0 && close(segment_fd) == 0);
}

/* The client leaves nothing behind on any GPU. */
static inline void daemon_close(struct daemon *d)
{
    pcc_client_close(d->client);
    CHECK_EQUAL(seen(&control->registered_bytes), 0);
    CHECK_EQUAL(seen(&control->events), 0);
    CHECK_EQUAL(seen(&control->waits), 0);
    CHECK(munmap(d->view.page, d->view.geometry.page_bytes) == 0);
    CHECK(munmap(d->chunks, (uint64_t)CHUNKS * CHUNK) == 0);
    if (d->sockets[0] >= 0)
        CHECK(close(d->sockets[0]) == 0);
    CHECK(close(d->sockets[1]) == 0);
    free(d->payload);
}

static inline bool word_to(struct daemon *d, uint64_t snapshot, enum pcc_word_state from,
                           enum pcc_word_state to)
{
    const bool moved = pcc_word_move(pcc_page_snapshot(&d->view, snapshot), snapshot, from, to);

    pcc_bell_ring(&d->view.page->client_bell);
    return moved;
}

static inline void admit(struct daemon *d, uint64_t snapshot)
{
    CHECK(word_to(d, snapshot, PCC_WORD_REQUESTED, PCC_WORD_COPYING));
}

static inline struct pcc_device_words *words(struct daemon *d, uint64_t snapshot, uint32_t gpu)
{
    return &d->view.page->devices[snapshot % PCC_SNAPSHOTS][gpu];
}

static inline void pulled(struct daemon *d, uint64_t snapshot, uint32_t gpu)
{
    atomic_store(&words(d, snapshot, gpu)->done, snapshot);
    pcc_bell_ring(&d->view.page->client_bell);
}

static inline void take_full(struct daemon *d, const struct pcc_message *message)
{
    const uint8_t *bytes = d->chunks + (size_t)message->chunk * CHUNK;
    const uint64_t *checksums = pcc_page_checksums(&d->view, message->chunk);

    d->bare_bytes += message->result == PCC_FULL_BARE ? message->length_bytes : 0;
    for (uint32_t block = 0; block < message->length_bytes; block += BLOCK) {
        const uint32_t left = message->length_bytes - block;
        CHECK(message->result == PCC_FULL_BARE ||
              checksums[block / BLOCK] ==
                  pcc_hash_bytes(bytes + block, left < BLOCK ? left : BLOCK));
    }
    memcpy(d->payload + message->offset_bytes, bytes, message->length_bytes);
    d->handed_bytes += message->length_bytes;
}

/* Takes the client's messages; full chunks are granted to the client again at once. */
static inline void listen_to(struct daemon *d)
{
    struct pcc_message message;
    int result;

    while ((result = pcc_ring_pop(&d->view.to_daemon, &message)) > 0) {
        if (message.kind == PCC_MSG_FULL) {
            take_full(d, &message);
            if (!d->retiring)
                free_chunks(d, message.chunk, 1);
        } else if (message.kind == PCC_MSG_REQUEST) {
            CHECK_EQUAL(pcc_page_request(&d->view, message.id)->snapshot, message.id);
            CHECK(message.id > d->requested);
            d->requested = message.id;
        } else if (message.kind == PCC_MSG_WRITE) {
            d->wanted = message.id;
        } else if (message.kind == PCC_MSG_RETURNED) {
            d->returned++;
        } else {
            CHECK(message.kind == PCC_MSG_TAKEN);
            d->taken++;
            d->damaged += message.result == -PCC_E_DAMAGED;
        }
    }
    CHECK(result == 0);
}

/* Until that much was handed over since the last call. */
static inline void collect(struct daemon *d, uint64_t length)
{
    UNTIL((listen_to(d), d->handed_bytes >= length));
    CHECK_EQUAL(d->handed_bytes, length);
    d->handed_bytes = 0;
}

/* Of what the chunk holds now. */
static inline void checksums_put(struct daemon *d, uint32_t chunk, uint32_t length)
{
    const uint8_t *bytes = d->chunks + (size_t)chunk * CHUNK;

    for (uint32_t block = 0; block < length; block += BLOCK)
        pcc_page_checksums(&d->view, chunk)[block / BLOCK] =
            pcc_hash_bytes(bytes + block, length - block < BLOCK ? length - block : BLOCK);
}

static inline void data(struct daemon *d, uint64_t load, uint32_t chunk, uint64_t offset,
                        uint32_t length)
{
    checksums_put(d, chunk, length);
    say(d, &(struct pcc_message){.kind = PCC_MSG_DATA,
                                 .chunk = chunk,
                                 .id = load,
                                 .offset_bytes = offset,
                                 .length_bytes = length});
}

static inline struct pcc_client_state state_of(struct daemon *d, uint64_t snapshot)
{
    struct pcc_client_state state;

    CHECK(pcc_client_state(d->client, snapshot, &state) == 0);
    return state;
}

/* A daemon, and a client that has the GPU and a stream on it. */
static inline void daemon_open_gpu(struct daemon *d, uint32_t granted, struct stream *stream,
                                   uint32_t gpu)
{
    daemon_open(d, granted);
    CHECK(pcc_client_device_open(d->client, gpu) == 0);
    stream_open(stream, gpu);
}

static inline void daemon_close_gpu(struct daemon *d, struct stream *stream)
{
    daemon_close(d);
    stream_close(stream);
}

/* Requests, marks for the daemon and submits: chunk 0 is the GPU's, behind it a tail. */
static inline void pull_to(struct daemon *d, uint64_t snapshot, const struct stream *stream,
                           bool aside, enum pcc_level level)
{
    const struct pcc_submission submission = {.request = {.level = level},
                                              .tail = "tail",
                                              .tail_bytes = 4,
                                              .tail_offset_bytes = CHUNK,
                                              .pulled_bytes = CHUNK,
                                              .pulled_devices = 1u << stream->gpu};

    CHECK(pcc_client_request(d->client, snapshot) == 0);
    CHECK(pcc_client_mark(d->client, snapshot, stream->gpu, handle(stream), true, aside) == 0);
    CHECK(pcc_client_submit(d->client, snapshot, &submission) == 0);
}

/* Requests, marks and submits device memory alone, with a tail behind it. */
static inline void push(struct daemon *d, uint64_t snapshot, const struct stream *stream,
                        CUdeviceptr address, uint64_t length)
{
    const struct pcc_device_range range = on_gpu(stream->gpu, address, 0, length);
    const struct pcc_submission submission = {.device_ranges = &range,
                                              .device_range_count = 1,
                                              .tail = "tail",
                                              .tail_bytes = 4,
                                              .tail_offset_bytes = length};

    CHECK(pcc_client_request(d->client, snapshot) == 0);
    CHECK(pcc_client_mark(d->client, snapshot, stream->gpu, handle(stream), false, false) == 0);
    CHECK(pcc_client_submit(d->client, snapshot, &submission) == 0);
}

static inline int hold(struct daemon *d, uint64_t snapshot, const struct stream *stream,
                       uint64_t deadline_ns)
{
    return pcc_client_hold(d->client, snapshot, stream->gpu, handle(stream), deadline_ns);
}

static inline bool all(const uint8_t *bytes, uint64_t count, uint8_t value)
{
    return bytes[0] == value && memcmp(bytes, bytes + 1, count - 1) == 0;
}
