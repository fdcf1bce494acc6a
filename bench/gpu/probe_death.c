/* Step "death": a process is SIGKILLed while another has its memory open. How long do the bytes
 * stay right, idle and with copies under way, even when a third process takes what is free? And
 * does the memory come back once the mapping is closed? */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "probe.h"

#define IDLE_ROUNDS 2
#define COPYING_ROUNDS 5
#define ROUNDS (IDLE_ROUNDS + COPYING_ROUNDS)
#define SCRIBBLED 0xdeadbeefu
#define BACK_LIMIT_S 3.0

struct ground {
    uint32_t *expected; /* what every exporter's memory holds */
    size_t length;
};

static struct ground ground;

/* Every word tells its place, and none occurs in cleared or scribbled memory by chance. */
static void fill_expected(void)
{
    for (size_t i = 0; i < ground.length / 4; i++)
        ground.expected[i] = (uint32_t)i * 0x9e3779b1u + 0x7f4a7c15u;
}

static void exporter(int socket, void *unused)
{
    struct note note;
    (void)unused;
    hear(socket, &note);
    (void)gpu_begin();
    CUstream stream = gpu_stream();
    CUdeviceptr memory = gpu_memory(ground.length);
    CU(cu.copy_to_device(memory, ground.expected, ground.length, stream));
    CU(cu.stream_synchronize(stream));
    CU(cu.ipc_get(&note.handle, memory));
    tell(socket, &note);
    (void)hear_next(socket, &note); /* until killed */
}

/* Takes most of the memory that is free for a moment and writes it, as a trainer that starts again
 * would: if the dead one's pages were free, they would be among these. */
static void scribbler(int socket, void *unused)
{
    struct note note;
    size_t free_bytes = 0, total_bytes = 0, piece = options.is_small ? 16 * MIB : 2 * GIB;
    (void)unused;
    hear(socket, &note);
    (void)gpu_begin();
    CU(cu.memory_info(&free_bytes, &total_bytes));
    size_t wanted = options.is_small ? 64 * MIB : free_bytes / 10 * 9;
    note.bytes = 0;
    for (CUdeviceptr memory; note.bytes + piece <= wanted; note.bytes += piece) {
        if (cu.memory_alloc(&memory, piece) != CUDA_SUCCESS)
            break;
        CU(cu.memset32_async(memory, SCRIBBLED, piece / 4, NULL));
    }
    note.result = cu.stream_synchronize(NULL);
    tell(socket, &note);
    (void)hear_next(socket, &note);
}

static double free_mib(void)
{
    size_t free_bytes = 0, total_bytes = 0;
    CU(cu.memory_info(&free_bytes, &total_bytes));
    return (double)free_bytes / (double)MIB;
}

struct reader { /* the surviving process */
    CUdeviceptr source;
    char *host;
    CUstream stream;
    CUevent first; /* after the first chunk of a pass */
};

static CUresult enqueue_pass(struct reader *reader)
{
    CUresult result = CUDA_SUCCESS;
    memset(reader->host, 0, ground.length); /* nothing of the pass before may pass for this one's */
    for (size_t at = 0; result == CUDA_SUCCESS && at < ground.length; at += CHUNK_BYTES) {
        result =
            cu.copy_to_host(reader->host + at, reader->source + at, CHUNK_BYTES, reader->stream);
        if (result == CUDA_SUCCESS && at == 0)
            result = cu.event_record(reader->first, reader->stream);
    }
    return result;
}

static size_t wrong_chunks(const struct reader *reader)
{
    size_t count = 0;
    for (size_t at = 0; at < ground.length; at += CHUNK_BYTES)
        count += memcmp(reader->host + at, (char *)ground.expected + at, CHUNK_BYTES) != 0;
    return count;
}

struct found {       /* of one round */
    CUresult result; /* of the copies, the first bad one */
    double passes, wrong, first_wrong_s, dead_s, held_mib, back_mib, back_s;
};

static void one_pass(struct reader *reader, double killed_s, bool is_enqueued, struct found *found)
{
    CUresult result = is_enqueued ? CUDA_SUCCESS : enqueue_pass(reader);
    if (result == CUDA_SUCCESS)
        result = cu.stream_synchronize(reader->stream);
    if (found->result == CUDA_SUCCESS)
        found->result = result;
    size_t wrong = result == CUDA_SUCCESS ? wrong_chunks(reader) : 0;
    found->passes++;
    found->wrong += (double)wrong;
    if (wrong > 0 && isnan(found->first_wrong_s))
        found->first_wrong_s = now_s() - killed_s;
}

/* Closes the mapping and waits for the memory to come back. */
static void give_back(struct reader *reader, double before_mib, struct found *found)
{
    found->held_mib = before_mib - free_mib();
    CUresult result = cu.ipc_close(reader->source);
    if (found->result == CUDA_SUCCESS)
        found->result = result;
    double start_s = now_s();
    while (before_mib - free_mib() > 1 && now_s() - start_s < BACK_LIMIT_S)
        sleep_s(0.01);
    found->back_s = now_s() - start_s;
    found->back_mib = before_mib - free_mib();
}

static struct found play(struct reader *reader, struct peer *source, struct peer *scribbling,
                         bool is_copying)
{
    struct found found = {.first_wrong_s = NAN};
    struct note note = {0};
    double before_mib = free_mib(), watch_s = options.is_small ? 0.2 : is_copying ? 0.8 : 2;
    tell(source->socket, &note);
    hear(source->socket, &note);
    CU(cu.ipc_open(&reader->source, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    one_pass(reader, now_s(), false, &found); /* is right while the exporter lives */
    if (found.wrong > 0 || found.result != CUDA_SUCCESS)
        fail("the exporter lives", "its bytes are wrong already");
    if (is_copying) {
        CU(enqueue_pass(reader));
        CU(cu.event_synchronize(reader->first));
    }
    double killed_s = now_s();
    found.dead_s = kill_peer(source);
    one_pass(reader, killed_s, is_copying, &found);
    if (scribbling != NULL) {
        tell(scribbling->socket, &note);
        hear(scribbling->socket, &note);
        say_number("scribbled_gib", (double)note.bytes / (double)GIB);
        one_pass(reader, killed_s, false, &found);
        dismiss(scribbling);
    }
    while (now_s() - killed_s < watch_s && found.result == CUDA_SUCCESS) {
        one_pass(reader, killed_s, false, &found);
        if (!is_copying)
            sleep_s(0.2);
    }
    give_back(reader, before_mib, &found);
    return found;
}

static void say_rounds(const char *kind, const struct found *found, size_t count)
{
#define COLUMN(member)                                                                             \
    for (size_t i = 0; i < count; i++)                                                             \
        values[i] = found[i].member;                                                               \
    snprintf(key, sizeof(key), "%s_" #member, kind);                                               \
    say_numbers(key, values, count);
    double values[ROUNDS];
    char key[64];
    CUresult worst = CUDA_SUCCESS;
    double first_wrong_s = NAN;
    for (size_t i = 0; i < count; i++) {
        worst = worst == CUDA_SUCCESS ? found[i].result : worst;
        first_wrong_s = fmin(first_wrong_s, found[i].first_wrong_s);
    }
    snprintf(key, sizeof(key), "%s_copies", kind);
    say_result(key, worst);
    snprintf(key, sizeof(key), "%s_first_wrong_s", kind);
    say_number(key, first_wrong_s); /* null: never */
    COLUMN(passes)
    COLUMN(wrong)
    COLUMN(dead_s)
    COLUMN(held_mib)
    COLUMN(back_mib)
    COLUMN(back_s)
#undef COLUMN
}

void step_death(void)
{
    struct peer sources[ROUNDS], scribbling;
    struct found found[ROUNDS];
    struct reader reader = {0};
    ground.length = options.is_small ? 64 * MIB : 512 * MIB;
    ground.expected = shared_memory(ground.length);
    fill_expected();
    for (size_t i = 0; i < ROUNDS; i++)
        sources[i] = spawn("exporter", SAME_UID, exporter, NULL);
    scribbling = spawn("scribbler", SAME_UID, scribbler, NULL);
    (void)gpu_begin();
    reader.host = pinned_segment(ground.length);
    reader.stream = gpu_stream();
    CU(cu.event_create(&reader.first, CU_EVENT_DISABLE_TIMING));
    say_number("mib", (double)ground.length / (double)MIB);
    for (size_t i = 0; i < ROUNDS; i++) {
        bool is_copying = i >= IDLE_ROUNDS;
        found[i] = play(&reader, &sources[i], i == 0 ? &scribbling : NULL, is_copying);
        if (i + 1 == IDLE_ROUNDS)
            say_rounds("idle", found, IDLE_ROUNDS);
    }
    say_rounds("copying", found + IDLE_ROUNDS, COPYING_ROUNDS);
}
