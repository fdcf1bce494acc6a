/* Step "page": words of a memfd page that one process has registered with its driver. Its streams
 * write them and wait for them; the CPU of another process, which has only mapped them, reads and
 * writes them. And what the driver still does for either process while a stream waits. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "probe.h"

#define TRIES 200
#define HOLD_S 0.3

struct words {                           /* of the page, a cache line each */
    _Alignas(64) _Atomic uint64_t ready; /* stream -> the other's CPU */
    _Alignas(64) _Atomic uint64_t done;  /* the other's CPU -> stream */
    _Alignas(64) _Atomic uint64_t after; /* stream, behind its wait for `done` */
};

struct board { /* between the CPUs; not registered */
    struct words *words;
    _Atomic uint64_t go;
    _Atomic uint64_t seen;
    double stamp_s[TRIES + 1];
};

enum { WATCH = 1, RELEASE, COPY, HOLD };

static void wait_for(_Atomic uint64_t *word, uint64_t value, const char *what)
{
    double limit_s = now_s() + 5;
    while (atomic_load(word) < value)
        if (now_s() > limit_s)
            fail(what, "not seen within 5 s");
}

/* Copies of the other process's memory, as a pull makes them; GB/s. */
static double pull(CUdeviceptr source, char *host, size_t length, CUstream stream)
{
    double start_s = now_s();
    for (size_t at = 0; at < length; at += CHUNK_BYTES)
        CU(cu.copy_to_host(host + at % (4 * CHUNK_BYTES), source + at, CHUNK_BYTES, stream));
    CU(cu.stream_synchronize(stream));
    return (double)length / (now_s() - start_s) * 1e-9;
}

static void other(int socket, void *argument)
{
    struct board *board = argument;
    struct note note;
    CUdeviceptr source = 0;
    char *host = NULL;
    CUstream stream = NULL;
    while (hear_next(socket, &note)) {
        for (uint64_t n = 1; note.number == WATCH && n <= TRIES; n++) {
            wait_for(&board->words->ready, n, "a stream's write");
            board->stamp_s[n] = now_s();
            atomic_store(&board->seen, n);
        }
        for (uint64_t n = 1; note.number == RELEASE && n <= TRIES; n++) {
            wait_for(&board->go, n, "the next try");
            board->stamp_s[n] = now_s();
            atomic_store(&board->words->done, n);
        }
        if (note.number == HOLD) {
            sleep_s(HOLD_S);
            atomic_store(&board->words->done, note.bytes);
        }
        if (note.number == COPY && source == 0) {
            (void)gpu_begin();
            CU(cu.ipc_open(&source, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
            host = pinned_segment(4 * CHUNK_BYTES);
            stream = gpu_stream();
            (void)pull(source, host, note.bytes, stream);
        }
        if (note.number == COPY)
            note.seconds = pull(source, host, note.bytes, stream);
        tell(socket, &note);
    }
}

static CUdeviceptr address_of(void *word)
{
    CUdeviceptr address = 0;
    CU(cu.host_device_pointer(&address, word, 0));
    return address;
}

/* A stream's write, until another process's CPU sees it. */
static void measure_writes(struct board *board, int socket, CUstream stream)
{
    double late_us[TRIES];
    struct note note = {.number = WATCH};
    CUdeviceptr ready = address_of(&board->words->ready);
    tell(socket, &note);
    for (uint64_t n = 1; n <= TRIES; n++) {
        double start_s = now_s();
        CU(cu.stream_write_value(stream, ready, n, CU_STREAM_WRITE_VALUE_DEFAULT));
        wait_for(&board->seen, n, "the other's answer");
        late_us[n - 1] = (board->stamp_s[n] - start_s) * 1e6;
    }
    hear(socket, &note);
    say_spread("stream_write_to_other_cpu_us", late_us, TRIES);
}

/* Another process's CPU store, until the waiting stream has gone on and said so. */
static void measure_releases(struct board *board, int socket, CUstream stream)
{
    double late_us[TRIES];
    long long early = 0, not_waiting = 0;
    struct note note = {.number = RELEASE};
    CUdeviceptr done = address_of(&board->words->done), after = address_of(&board->words->after);
    tell(socket, &note);
    for (uint64_t n = 1; n <= TRIES; n++) {
        CU(cu.stream_wait_value(stream, done, n, CU_STREAM_WAIT_VALUE_GEQ));
        CU(cu.stream_write_value(stream, after, n, CU_STREAM_WRITE_VALUE_DEFAULT));
        sleep_s(0.0003);
        not_waiting += cu.stream_query(stream) != CUDA_ERROR_NOT_READY;
        early += atomic_load(&board->words->after) >= n;
        atomic_store(&board->go, n);
        wait_for(&board->words->after, n, "the stream behind its wait");
        late_us[n - 1] = (now_s() - board->stamp_s[n]) * 1e6;
    }
    hear(socket, &note);
    say_spread("other_cpu_store_to_stream_us", late_us, TRIES);
    say_count("went_on_before_the_store", early);
    say_count("stream_not_seen_waiting", not_waiting);
}

/* The gate as it is used: the trainer's stream waits while the other process pulls. */
static void measure_pull_while_waiting(struct board *board, int socket, CUstream stream)
{
    struct note note = {.number = COPY, .bytes = options.is_small ? 64 * MIB : GIB};
    CUdeviceptr memory = gpu_memory(note.bytes);
    uint64_t next = atomic_load(&board->words->done) + 1;
    CU(cu.ipc_get(&note.handle, memory));
    tell(socket, &note);
    hear(socket, &note);
    say_number("pull_gb_s", note.seconds);
    CU(cu.stream_wait_value(stream, address_of(&board->words->done), next,
                            CU_STREAM_WAIT_VALUE_GEQ));
    say_result("query_while_waiting", cu.stream_query(stream));
    tell(socket, &note);
    hear(socket, &note);
    say_number("pull_while_stream_waits_gb_s", note.seconds);
    atomic_store(&board->words->done, next);
    CU(cu.stream_synchronize(stream));
    CU(cu.memory_free(memory));
}

struct call { /* one driver call of the process whose stream waits */
    const char *key;
    void (*run)(void);
};
static struct {
    CUstream stream; /* not the one that waits */
    CUdeviceptr memory;
    char *pinned, *plain;
    CUevent event;
} at_hand;

static void call_query(void)
{
    (void)cu.event_query(at_hand.event);
}
static void call_copy(void)
{
    CU(cu.copy_to_host(at_hand.pinned, at_hand.memory, CHUNK_BYTES, at_hand.stream));
    CU(cu.stream_synchronize(at_hand.stream));
}
static void call_fill(void)
{
    CU(cu.memset32_async(at_hand.memory, 7, CHUNK_BYTES / 4, at_hand.stream));
    CU(cu.stream_synchronize(at_hand.stream));
}
static void call_stream_create(void)
{
    (void)gpu_stream();
}
static void call_alloc(void)
{
    (void)gpu_memory(32 * MIB);
}
static void call_register(void)
{
    CU(cu.host_register(at_hand.plain, CHUNK_BYTES, CU_MEMHOSTREGISTER_PORTABLE));
}
static void call_unregister(void)
{
    CU(cu.host_unregister(at_hand.plain));
}
static void call_free(void)
{
    CU(cu.memory_free(at_hand.memory));
}

static const struct call calls[] = {
    {"event_query", call_query},           {"copy", call_copy},   {"fill", call_fill},
    {"stream_create", call_stream_create}, {"alloc", call_alloc}, {"register", call_register},
    {"unregister", call_unregister},       {"free", call_free},
};

/* Seconds that calls take while a stream waits; the other process lets it go after HOLD_S, so one
 * that takes as long was blocked. torch trains on the default stream (NULL), which is the one that
 * waits here. */
static void measure_calls_while_waiting(struct board *board, int socket)
{
    int unused;
    CUdeviceptr done = address_of(&board->words->done);
    at_hand.stream = gpu_stream();
    at_hand.memory = gpu_memory(CHUNK_BYTES);
    at_hand.pinned = pinned_segment(CHUNK_BYTES);
    at_hand.plain = segment(CHUNK_BYTES, &unused);
    CU(cu.event_create(&at_hand.event, CU_EVENT_DISABLE_TIMING));
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        struct note note = {.number = HOLD, .bytes = atomic_load(&board->words->done) + 1};
        char key[64];
        if (calls[i].run == call_query)
            CU(cu.event_record(at_hand.event, NULL));
        CU(cu.stream_wait_value(NULL, done, note.bytes, CU_STREAM_WAIT_VALUE_GEQ));
        tell(socket, &note);
        double start_s = now_s();
        calls[i].run();
        snprintf(key, sizeof(key), "%s_while_waiting_ms", calls[i].key);
        say_number(key, (now_s() - start_s) * 1e3);
        hear(socket, &note);
        CU(cu.stream_synchronize(NULL));
    }
    say_number("held_ms", HOLD_S * 1e3);
}

/* Ends while its stream waits: does that hurt anybody else? */
static void victim(int socket, void *argument)
{
    struct board *board = argument;
    struct note note;
    hear(socket, &note);
    (void)gpu_begin();
    CU(cu.host_register(board->words, 4096,
                        CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    CUstream stream = gpu_stream();
    CU(cu.stream_wait_value(stream, address_of(&board->words->done), UINT64_MAX >> 1,
                            CU_STREAM_WAIT_VALUE_GEQ));
    note.result = cu.stream_query(stream);
    tell(socket, &note);
    (void)hear_next(socket, &note);
}

static void measure_death_while_waiting(struct peer *peer)
{
    struct note note = {0};
    CUdeviceptr memory = gpu_memory(CHUNK_BYTES);
    char *host = pinned_segment(4 * CHUNK_BYTES);
    CUstream stream = gpu_stream();
    tell(peer->socket, &note);
    hear(peer->socket, &note);
    say_result("victim_query", note.result);
    say_number("victim_gone_ms", kill_peer(peer) * 1e3);
    double start_s = now_s();
    (void)pull(memory, host, CHUNK_BYTES, stream);
    say_number("copy_after_victim_ms", (now_s() - start_s) * 1e3);
}

void step_page(void)
{
    int descriptor;
    struct board *board = shared_memory(sizeof(*board));
    board->words = (struct words *)(void *)segment(4096, &descriptor);
    struct peer peer = spawn("other", SAME_UID, other, board);
    struct peer dying = spawn("victim", SAME_UID, victim, board);
    (void)gpu_begin();
    CUresult result = cu.host_register(board->words, 4096,
                                       CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    say_result("register_page", result);
    must_call(result, "cuMemHostRegister of the page");
    say_count("device_address_is_host_address",
              address_of(board->words) == (CUdeviceptr)(uintptr_t)board->words);
    CUstream stream = gpu_stream();
    measure_writes(board, peer.socket, stream);
    measure_releases(board, peer.socket, stream);
    measure_pull_while_waiting(board, peer.socket, stream);
    measure_calls_while_waiting(board, peer.socket);
    measure_death_while_waiting(&dying);
    dismiss(&peer);
}
