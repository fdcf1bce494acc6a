/* Volumes and savers on every engine, on a machine that has run out of resources. */
#include <fcntl.h>

#include "save_fixture.h"
#include "scarcity.h"

#define PAYLOAD 100000u

static char directory[64];
static char path[80];
static enum pcc_io_engine engine;

static int volume_open(struct pcc_volume **out)
{
    const struct pcc_io_options options = {.engine = engine, .allow_buffered = true};
    struct pcc_io *io;
    int fd;
    int result = pcc_volume_open_file(path, true, &fd);

    if (result == 0)
        result = pcc_io_open(fd, &options, &io);
    return result == 0 ? pcc_volume_open_io(io, true, out) : result;
}

/* Three in flight; returns the newest that was reported as durable. */
static uint64_t saves(struct owner *owner, uint64_t first)
{
    struct payload payloads[3];
    uint64_t durable = 0;
    bool begun[3];

    for (uint64_t i = 0; i < 3; i++) {
        const int result = payload_begin(owner, first + i, PAYLOAD, &payloads[i]);
        begun[i] = result == 0;
        CHECK(begun[i] || result == -ENOMEM);
        if (begun[i])
            payload_fill(&payloads[i]);
    }
    for (uint64_t i = 0; i < 3; i++) {
        if (!begun[i])
            continue;
        const struct pcc_save_result result = owner_wait(owner, first + i);
        CHECK(result.end == PCC_SAVE_DURABLE || result.end == PCC_SAVE_SUPERSEDED);
        if (result.end == PCC_SAVE_DURABLE && payloads[i].sequence > durable)
            durable = payloads[i].sequence;
        free(payloads[i].memory);
    }
    return durable;
}

/* Opens, saves and reads; the newest durable sequence. A volume that opens holds `before`. */
static uint64_t session(uint64_t before, bool must, uint64_t first_tag)
{
    struct owner *owner = calloc(1, sizeof(*owner));
    uint64_t durable = before;

    CHECK(owner != NULL);
    (void)pthread_mutex_init(&owner->lock, NULL);
    (void)pthread_cond_init(&owner->ended, NULL);
    const int opened = volume_open(&owner->volume);
    CHECK(opened == 0 || (!must && was_refused()));
    if (opened == 0) {
        const struct pcc_saver_spec spec = {.lanes = 3,
                                            .writers_per_lane = 2,
                                            .chunk_bytes = CHUNK,
                                            .events = &owner_events,
                                            .owner = owner};
        CHECK(pcc_volume_superseding(owner->volume) >= before);
        const int result = pcc_saver_open(owner->volume, &spec, &owner->saver);
        CHECK(result == 0 || (!must && was_refused()));
        const uint64_t newest = result == 0 ? saves(owner, first_tag) : 0;
        durable = newest > durable ? newest : durable;
        CHECK(!must || newest > before);
        if (durable > 0) {
            const int read = read_back(owner->volume, pcc_volume_superseding(owner->volume), 2);
            CHECK(read == 0 || (!must && read == -ENOMEM));
        }
        const int flagged = pcc_volume_begin_incarnation(owner->volume, first_tag, NO_ID, 1);
        CHECK(flagged == 0 || (!must && was_refused()));
        pcc_saver_close(owner->saver);
        pcc_volume_close(owner->volume);
    }
    (void)pthread_mutex_destroy(&owner->lock);
    (void)pthread_cond_destroy(&owner->ended);
    free(owner);
    return durable;
}

static void live(void)
{
    const struct pcc_volume_spec spec = spec_of(4, 1);
    int result = pcc_volume_create(path, &spec, true);

    if (result != 0) {
        CHECK(was_refused() && entries_of(directory) == 2); /* nothing is left behind */
        plenty();
        CHECK(pcc_volume_create(path, &spec, true) == 0);
    }
    uint64_t durable = session(0, false, 1);
    durable = session(durable, false, 11);
    plenty();
    (void)session(durable, true,
                  21); /* with enough again: nothing was lost, and saving continues */
    CHECK(unlink(path) == 0);
}

static void on(const char *name, enum pcc_io_engine wanted)
{
    engine = wanted;
    scarcity(name, live);
}

static void test_engines(void)
{
    on("pwrite", PCC_IO_PWRITE);
    on("mmap", PCC_IO_MMAP);
}

int main(void)
{
    scarcity_begin(directory);
    (void)snprintf(path, sizeof(path), "%s/volume", directory);
    RUN(test_engines);
    scarcity_end(25);
    CHECK(rmdir(directory) == 0);
    return 0;
}
