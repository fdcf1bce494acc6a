/* Pool to durable, and nothing else: the C core's saver on a real volume, its chunks filled before.
 *
 *   savecore DIRECTORY PAYLOAD_BYTES SAVES ENGINE
 *
 * Three slots, chunks of 16 MiB from the pool, two writers, as the daemon has them. The first three
 * saves, which write each slot for the first time, are not reported: "ready" is. Then, for each
 * byte of input, a save and its seconds, from the hand-over of the first chunk to the durable
 * commit record. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "disk/pcc_save.h"
#include "pool/pcc_pool.h"

enum { CHUNK = 16 << 20, SLOTS = 3, SEGMENTS_MAX = 64 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool has_ended;
    struct pcc_save_result result;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};

static void check(int result, const char *what)
{
    if (result == 0)
        return;
    fprintf(stderr, "savecore: %s: %s\n", what, pcc_error_name(result));
    exit(1);
}

static void on_writing(void *owner, uint64_t tag)
{
    (void)owner, (void)tag;
}

static void on_chunk_written(void *owner, uint64_t tag, uint32_t index)
{
    (void)owner, (void)tag, (void)index;
}

static void on_ended(void *owner, const struct pcc_save_result *result)
{
    (void)owner;
    (void)pthread_mutex_lock(&state.lock);
    state.result = *result;
    state.has_ended = true;
    (void)pthread_cond_signal(&state.ended);
    (void)pthread_mutex_unlock(&state.lock);
}

static double save_once(struct pcc_saver *saver, const struct pcc_segment *segments,
                        uint64_t payload_bytes, uint64_t tag, const uint64_t *checksums)
{
    const struct pcc_save_request request = {
        .tag = tag, .step = (int64_t)tag, .world_size = 1, .payload_bytes = payload_bytes};
    struct pcc_save *save;
    uint64_t sequence;

    state.has_ended = false;
    check(pcc_save_begin(saver, &request, &save, &sequence), "begin");
    const uint64_t start = pcc_now_ns();
    for (uint64_t offset = 0; offset < payload_bytes; offset += CHUNK) {
        const uint64_t left = payload_bytes - offset;
        const struct pcc_chunk chunk = {
            .bytes =
                segments[offset / PCC_SEGMENT_BYTES_MAX].bytes + offset % PCC_SEGMENT_BYTES_MAX,
            .payload_offset_bytes = offset,
            .length_bytes = (uint32_t)(left < CHUNK ? left : CHUNK),
            .index = (uint32_t)(offset / CHUNK),
            .checksums = checksums,
        };
        check(pcc_save_chunk(save, &chunk), "chunk");
    }
    check(pcc_save_seal(save), "seal");
    (void)pthread_mutex_lock(&state.lock);
    while (!state.has_ended)
        (void)pthread_cond_wait(&state.ended, &state.lock);
    (void)pthread_mutex_unlock(&state.lock);
    check(state.result.end == PCC_SAVE_DURABLE ? 0 : -PCC_E_ABORTED,
          "the save did not end durable");
    return (double)(state.result.times.durable - start) * 1e-9;
}

/* With the engine that was asked for, or not at all. */
static struct pcc_volume *open_volume(const char *path, enum pcc_io_engine engine)
{
    const struct pcc_io_options options = {.engine = engine, .strict = true};
    struct pcc_volume *volume;
    struct pcc_io *io;
    int fd;

    check(pcc_volume_open_file(path, true, &fd), "open");
    check(pcc_io_open(fd, &options, &io), "engine");
    check(pcc_volume_open_io(io, true, &volume), "volume");
    return volume;
}

int main(int count, char **arguments)
{
    static const struct pcc_save_events events = {
        .writing = on_writing, .chunk_written = on_chunk_written, .ended = on_ended};
    static uint64_t checksums[CHUNK / PCC_BLOCK_BYTES_DEFAULT]; /* not read by this bench */
    struct pcc_segment segments[SEGMENTS_MAX];
    struct pcc_volume *volume;
    struct pcc_saver *saver;
    struct pcc_pool *pool;
    enum pcc_io_engine engine;
    char path[4096];

    if (count != 5 || pcc_io_engine_named(arguments[4], &engine) != 0)
        return 2;
    const uint64_t payload_bytes = strtoull(arguments[2], NULL, 10);
    const uint32_t saves = (uint32_t)strtoul(arguments[3], NULL, 10);
    const uint64_t segment_count = pcc_ceil_div(payload_bytes, PCC_SEGMENT_BYTES_MAX);
    const struct pcc_volume_spec spec = {
        .payload_capacity_bytes = payload_bytes,
        .record_stride_bytes = PCC_RECORD_STRIDE_DEFAULT,
        .slot_count = SLOTS,
        .keep = 1,
        .block_bytes = PCC_BLOCK_BYTES_DEFAULT,
        .world_size = 1,
        .job = "savecore",
        .next_sequence = 1,
    };
    const struct pcc_saver_spec saver_spec = {
        .lanes = 2, .writers_per_lane = 2, .chunk_bytes = CHUNK, .events = &events};

    if (segment_count == 0 || segment_count > SEGMENTS_MAX)
        return 2;
    (void)snprintf(path, sizeof path, "%s/savecore-%s.pcc", arguments[1], arguments[4]);
    check(pcc_volume_create(path, &spec, false), "create");
    volume = open_volume(path, engine);
    check(pcc_saver_open(volume, &saver_spec, &saver), "saver");
    check(pcc_pool_open(segment_count * PCC_SEGMENT_BYTES_MAX, &pool), "pool");
    for (uint64_t i = 0; i < segment_count; i++) {
        check(pcc_pool_take(pool, PCC_SEGMENT_BYTES_MAX, "", &segments[i]), "segment");
        memset(segments[i].bytes, 0x5a, segments[i].length_bytes);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        (void)save_once(saver, segments, payload_bytes, i + 1, checksums);
    (void)puts("ready");
    (void)fflush(stdout);
    for (uint32_t i = 0; i < saves && getchar() != EOF; i++) {
        (void)printf("%.6f\n", save_once(saver, segments, payload_bytes, SLOTS + i + 1, checksums));
        (void)fflush(stdout);
    }
    pcc_saver_close(saver);
    for (uint64_t i = 0; i < segment_count; i++)
        pcc_pool_return(pool, "", &segments[i]);
    pcc_pool_close(pool);
    pcc_volume_close(volume);
    (void)unlink(path);
    return 0;
}
