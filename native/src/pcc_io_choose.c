/* Engine `auto`: each engine that can be had writes and flushes the same region in turn, with two
 * threads and chunks as savers have them. `pwrite` stays unless another one is faster in nearly
 * every round, and by more than noise: it is the simplest, and no container forbids it.
 *
 * `mmap` is left out: it takes memory for the page cache from whatever runs beside, and how fast it
 * is depends on what happens to be cached, so that a figure of now says nothing about later. */
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "pcc_io_file.h"
#include "pcc_thread.h"

#define REGION_MIN (4ull << 20)
#define REGION_MAX (64ull << 20)
#define CHUNK_MAX (16ull << 20)
#define STEP (1ull << 20)    /* the region is laid out by such steps */
#define LAYOUT_NS 50000000u  /* for so long; what is laid out then is the region */
#define ROUND_NS 60000000u   /* what a round of one engine should take at most */
#define BUDGET_NS 400000000u /* for the rounds that count */
#define ROUNDS_MAX 9u
#define ROUNDS_MIN 3u
#define ROUNDS_CONVINCING 5u
#define WRITERS 2u
#define MARGIN_PERCENT 105u /* of pwrite: below it the difference is noise */

static const enum pcc_io_engine candidates[] = {PCC_IO_PWRITE, PCC_IO_URING, PCC_IO_PMEM};
#define CANDIDATES (sizeof candidates / sizeof *candidates)

struct contest {
    struct pcc_io *io[CANDIDATES]; /* NULL: not to be had */
    uint64_t ns[CANDIDATES][ROUNDS_MAX];
    uint8_t *bytes; /* one chunk per writer */
    uint64_t offset, length, chunk;
    uint32_t rounds;
};

struct round {
    struct contest *contest;
    struct pcc_io *io;
    _Atomic uint64_t next;
    _Atomic int error;
    _Atomic uint32_t writer;
};

static void *write_chunks(void *argument)
{
    struct round *round = argument;
    const struct contest *contest = round->contest;
    const uint8_t *bytes =
        contest->bytes +
        atomic_fetch_add_explicit(&round->writer, 1, memory_order_relaxed) * contest->chunk;

    for (;;) {
        const uint64_t at =
            atomic_fetch_add_explicit(&round->next, contest->chunk, memory_order_relaxed);
        if (at >= contest->length)
            return NULL;
        const uint64_t left = contest->length - at;
        const int error = pcc_io_write_all(
            round->io, bytes, left < contest->chunk ? left : contest->chunk, contest->offset + at);
        if (error != 0) /* any of two errors: read after both have ended */
            atomic_store_explicit(&round->error, error, memory_order_relaxed);
    }
}

static int run_round(struct contest *contest, struct pcc_io *io, uint64_t *ns_out)
{
    struct round round = {.contest = contest, .io = io};
    pthread_t writer;
    const uint64_t start = pcc_now_ns();

    int result = pcc_thread_start(&writer, write_chunks, &round, "pcc-measure");
    if (result != 0)
        return result;
    (void)write_chunks(&round);
    (void)pthread_join(writer, NULL);
    result = atomic_load_explicit(&round.error, memory_order_relaxed);
    if (result == 0)
        result = pcc_io_flush(io);
    *ns_out = pcc_now_ns() - start;
    return result;
}

static void set_length(struct contest *contest, uint64_t length)
{
    const uint64_t chunk = length / WRITERS / STEP * STEP;

    contest->length = length;
    contest->chunk = chunk < CHUNK_MAX ? chunk : CHUNK_MAX;
}

/* The first write of a block costs more than later ones; a slow disk gets a small region. */
static int lay_out(struct contest *contest)
{
    const uint64_t start = pcc_now_ns();
    uint64_t done = 0;

    while (done < contest->length && (done < REGION_MIN || pcc_now_ns() - start < LAYOUT_NS)) {
        const int error =
            pcc_io_write_all(contest->io[0], contest->bytes, STEP, contest->offset + done);
        if (error != 0)
            return error;
        done += STEP;
    }
    set_length(contest, done);
    return pcc_io_flush(contest->io[0]);
}

static int compare_ns(const void *left, const void *right)
{
    const uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static void leave(struct contest *contest, uint32_t candidate)
{
    pcc_io_close(contest->io[candidate]);
    contest->io[candidate] = NULL;
}

/* Each once, from either end by the toss of a coin: no engine always comes first, when a disk (or a
 * limit on it) has had time to rest. One that meets an error is out; pwrite's error ends it all. */
static int run_each(struct contest *contest, uint32_t round, struct pcc_io_choice *out)
{
    const bool forwards = pcc_now_ns() % 2 == 0;

    for (uint32_t step = 0; step < CANDIDATES; step++) {
        const uint32_t i = forwards ? step : (uint32_t)CANDIDATES - 1 - step;
        if (!contest->io[i])
            continue;
        const int error = run_round(contest, contest->io[i], &contest->ns[i][round]);
        if (error != 0 && i == 0)
            return error;
        if (error != 0) {
            out->measured[candidates[i]].error = error;
            leave(contest, i);
        }
    }
    return 0;
}

/* The first turn warms up and shows how much a round can take. */
static int run_rounds(struct contest *contest, struct pcc_io_choice *out)
{
    uint64_t slowest = 0;
    int error = run_each(contest, 0, out);

    for (uint32_t i = 0; i < CANDIDATES; i++)
        if (contest->io[i] && contest->ns[i][0] > slowest)
            slowest = contest->ns[i][0];
    if (slowest > ROUND_NS) {
        const uint64_t fits = contest->length / STEP * ROUND_NS / slowest * STEP;
        set_length(contest, fits > REGION_MIN ? fits : REGION_MIN);
    }
    const uint64_t start = pcc_now_ns();
    while (error == 0 && contest->rounds < ROUNDS_MAX &&
           (contest->rounds < ROUNDS_MIN || pcc_now_ns() - start < BUDGET_NS)) {
        error = run_each(contest, contest->rounds, out);
        contest->rounds++;
    }
    return error;
}

/* Clearly faster than pwrite, round by round: so many wins are no accident (1 in 50 for 8 of 9). A
 * disk that is too slow for so many rounds is what one waits for, whatever the engine. */
static bool convinces(const struct contest *contest, uint32_t candidate)
{
    uint32_t wins = 0;

    for (uint32_t round = 0; round < contest->rounds; round++)
        wins += contest->ns[candidate][round] * MARGIN_PERCENT < contest->ns[0][round] * 100;
    return contest->rounds >= ROUNDS_CONVINCING && wins >= contest->rounds - contest->rounds / 8;
}

static uint64_t median_speed(struct contest *contest, uint32_t candidate)
{
    uint64_t sorted[ROUNDS_MAX];

    memcpy(sorted, contest->ns[candidate], sizeof sorted);
    qsort(sorted, contest->rounds, sizeof sorted[0], compare_ns);
    const uint64_t median = sorted[contest->rounds / 2];
    return (uint64_t)((double)contest->length * 1e9 / (double)(median > 0 ? median : 1));
}

static void judge(struct contest *contest, struct pcc_io_choice *out)
{
    out->rounds = contest->rounds;
    out->round_bytes = contest->length;
    for (uint32_t i = 0; i < CANDIDATES; i++) {
        if (!contest->io[i])
            continue;
        const uint64_t speed = median_speed(contest, i);
        out->measured[candidates[i]].bytes_per_second = speed;
        if (i > 0 && convinces(contest, i) && speed > out->measured[out->engine].bytes_per_second)
            out->engine = candidates[i];
    }
}

/* Data that no layer below leaves out or packs: not zeros, not the same twice. */
static int take_bytes(struct contest *contest)
{
    uint64_t word;

    if (getrandom(&word, sizeof word, 0) != (ssize_t)sizeof word)
        return -EIO;
    void *bytes =
        mmap(NULL, WRITERS * CHUNK_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED)
        return -errno;
    (void)madvise(bytes, WRITERS * CHUNK_MAX, MADV_HUGEPAGE);
    contest->bytes = bytes;
    word |= 1;
    for (uint64_t at = 0; at < WRITERS * CHUNK_MAX; at += sizeof word) {
        word ^= word << 13, word ^= word >> 7, word ^= word << 17;
        memcpy(contest->bytes + at, &word, sizeof word);
    }
    return 0;
}

static int open_all(struct contest *contest, int fd, bool allow_buffered, struct pcc_io_choice *out)
{
    for (uint32_t i = 0; i < CANDIDATES; i++) {
        const struct pcc_io_options options = {
            .engine = candidates[i], .strict = true, .allow_buffered = allow_buffered};
        const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        const int error = own < 0 ? -errno : pcc_io_open(own, &options, &contest->io[i]);
        if (error == 0)
            continue;
        contest->io[i] = NULL;
        out->measured[candidates[i]].error = error;
        if (i == 0)
            return error;
    }
    return 0;
}

int pcc_io_choose(int fd, uint64_t offset, uint64_t length, bool allow_buffered,
                  struct pcc_io_choice *out)
{
    struct pcc_io_choice choice = {.engine = PCC_IO_PWRITE};
    struct contest contest = {.offset = offset};

    contest.length = (length < REGION_MAX ? length : REGION_MAX) / STEP * STEP;
    if (contest.length < REGION_MIN || offset % PCC_IO_ALIGN != 0)
        return -EINVAL;
    int result = take_bytes(&contest);
    if (result != 0)
        return result;
    result = open_all(&contest, fd, allow_buffered, &choice);
    if (result == 0 &&
        (offset > contest.io[0]->size_bytes || contest.length > contest.io[0]->size_bytes - offset))
        result = -EINVAL;
    if (result == 0)
        result = lay_out(&contest);
    if (result == 0)
        result = run_rounds(&contest, &choice);
    if (result == 0) {
        judge(&contest, &choice);
        *out = choice;
    }
    for (uint32_t i = 0; i < CANDIDATES; i++)
        leave(&contest, i);
    (void)munmap(contest.bytes, WRITERS * CHUNK_MAX);
    return result;
}

/* A file that vanishes with its descriptor, whatever happens in between. */
static int open_nameless(const char *directory)
{
    char path[PATH_MAX];
    int fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR))
        return fd < 0 ? -errno : fd;
    const int length = snprintf(path, sizeof path, "%s/.measure-XXXXXX.tmp", directory);
    if (length < 0 || (size_t)length >= sizeof path)
        return -ENAMETOOLONG;
    fd = mkostemps(path, 4, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    (void)unlink(path);
    return fd;
}

int pcc_io_choose_in(const char *directory, bool allow_buffered, struct pcc_io_choice *out)
{
    const int fd = open_nameless(directory);

    if (fd < 0)
        return fd;
    int result = fallocate(fd, 0, 0, (off_t)REGION_MAX) == 0 ? 0 : -errno;
    if (result == 0)
        result = pcc_io_choose(fd, 0, REGION_MAX, allow_buffered, out);
    (void)close(fd);
    return result;
}
