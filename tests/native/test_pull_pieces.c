/* Pull of memory that has no handle: runs of pieces, a descriptor for each. Bytes, layouts that
 * grow, 40 GB; descriptors that a daemon must refuse; and nothing stays open. */
#include "pull_fixture.h"

#define PIECE (2ull << 20)

static uint32_t open_files(void)
{
    uint32_t count = 0;
    DIR *directory = opendir("/proc/self/fd");

    CHECK(directory != NULL);
    while (readdir(directory) != NULL)
        count++;
    CHECK(closedir(directory) == 0);
    return count;
}

/* A handle's allocation and a run: ranges across the borders of pieces. */
static void mixed_layout(struct pull *p)
{
    (void)allocate(p, 0, 3 * CHUNK);
    (void)allocate_run(p, 0, 3 * PIECE, 3);
    fill(p, 1);
    range_add(p, 0, 256, CHUNK, 0);
    range_add(p, 1, PIECE - 1000, 2 * CHUNK, CHUNK + 64);
    range_add(p, 1, 3 * PIECE - 64, 64, 3 * CHUNK + 64);
    p->device_bytes = 4 * CHUNK;
}

static void usage_is(struct pull *p, uint32_t handles, uint32_t runs, uint32_t pieces)
{
    struct pcc_tenant_usage usage;

    pcc_tenant_usage(p->f.tenant, &usage);
    CHECK_EQUAL(usage.mappings, handles + runs);
    CHECK_EQUAL(usage.pieces, pieces);
    CHECK_EQUAL(peek(&p->control->open_mappings), handles + pieces);
}

static void test_bytes(void)
{
    struct pull p;

    pull_open(&p, 16 * CHUNK);
    mixed_layout(&p);
    expose(&p);
    descriptors_close(&p);
    usage_is(&p, 1, 1, 3);
    for (uint64_t snapshot = 1; snapshot <= 5; snapshot++) {
        fill(&p, snapshot);
        checkpoint(&p, snapshot);
    }
    /* A layout that has the run, and no descriptor: the run stays mapped. */
    p.ranges[1].allocation_offset_bytes += 512;
    expose(&p);
    usage_is(&p, 1, 1, 3);
    CHECK_EQUAL(peek(&p.control->reserved_bytes), 3 * PIECE);
    checkpoint(&p, 6);
    pull_close(&p);
}

/* The trainer's memory is there as long as the daemon has it mapped, and no longer. */
static void test_a_trainer_that_dies(void)
{
    struct pull p;
    uint64_t sequence;

    pull_open(&p, 16 * CHUNK);
    mixed_layout(&p);
    const uint32_t files = open_files();
    expose(&p);
    CHECK_EQUAL(open_files() <= files + 1, 1); /* the descriptors are the caller's still */
    descriptors_close(&p);
    CHECK(admit(&p, 1, &sequence) == 0);
    trainer_kill(&p.trainer);
    detach(&p.f);
    mappings_gone(&p);
    p.f.trainer = 0;
    trainer_page_open(&p);
    pull_close(&p);
}

static void refused(struct pull *p, int code, const char *word)
{
    char reason[PCC_REASON_BYTES];
    const uint32_t files = open_files();
    const int error = expose_as_is(p, reason);

    printf("  %s\n", reason);
    CHECK_EQUAL(error, code);
    CHECK(strstr(reason, word) != NULL);
    mappings_gone(p);
    CHECK_EQUAL(open_files(), files);
}

/* The descriptor that replaces one of the honest ones; closed. */
static void refused_with(struct pull *p, uint64_t at, int fd, const char *word)
{
    const int honest = p->fds[at];

    CHECK(fd >= 0);
    p->fds[at] = fd;
    refused(p, -PCC_E_BAD_HANDLE, word);
    p->fds[at] = honest;
    CHECK(close(fd) == 0);
}

static int piece_of(struct pull *p, uint32_t device, uint64_t length)
{
    const struct answer answer = trainer_ask(
        &p->trainer,
        (struct order){.what = ORDER_RUN, .device = device, .length = length, .pieces = 1});

    return trainer_descriptor(&p->trainer, answer.address);
}

static void test_what_cannot_be_exposed(void)
{
    struct pull p;

    pull_open(&p, 16 * CHUNK);
    mixed_layout(&p);
    expose(&p); /* the context's own descriptors are open from now on */
    detach(&p.f);
    trainer_page_open(&p);
    refused_with(&p, 1, memfd_create("no GPU memory", MFD_CLOEXEC), "cannot be opened");
    refused_with(&p, 1, dup(STDOUT_FILENO), "cannot be opened");
    refused_with(&p, 2, piece_of(&p, 0, 2 * PIECE), "INVALID_VALUE");
    refused_with(&p, 0, piece_of(&p, 1, PIECE), "INVALID_DEVICE");

    p.fd_count = 2;
    refused(&p, -PCC_E_BAD_HANDLE, "2 descriptors of GPU memory came, not 3");
    p.fd_count = 0;
    refused(&p, -PCC_E_BAD_HANDLE, "not 3");
    p.fd_count = 3;
    p.memory[1].exposed.pieces = 2;
    refused(&p, -PCC_E_BAD_HANDLE, "came, not 2");
    p.memory[1].exposed.pieces = 6; /* half of a driver's unit each */
    p.fds = realloc(p.fds, 6 * sizeof(int));
    for (int i = 3; i < 6; i++)
        p.fds[i] = dup(p.fds[i - 3]);
    p.fd_count = 6;
    refused(&p, -PCC_E_BAD_HANDLE, "INVALID_VALUE");
    p.memory[1].exposed.pieces = 7;
    refused(&p, -PCC_E_BAD_PEER, "differ in length");
    p.memory[1].exposed.pieces = PCC_EXPOSED_PIECES_MAX + 1;
    p.memory[1].exposed.length_bytes = (PCC_EXPOSED_PIECES_MAX + 1) * PIECE;
    refused(&p, -PCC_E_BAD_PEER, "too many pieces");
    p.memory[1].exposed.pieces = 1;
    p.memory[1].exposed.length_bytes = PCC_EXPOSED_RUNS_BYTES_MAX + PIECE;
    refused(&p, -PCC_E_BAD_PEER, "too many pieces");
    p.memory[1].exposed.length_bytes = 3 * PIECE;
    p.memory[1].exposed.pieces = 3;
    refused(&p, -PCC_E_BAD_HANDLE, "came, not 3"); /* the same descriptors twice */
    for (int i = 3; i < 6; i++)
        CHECK(close(p.fds[i]) == 0);
    p.fd_count = 3;
    poke(&p.control->open_fail_code, CUDA_ERROR_OUT_OF_MEMORY);
    poke(&p.control->open_fail_count, 1);
    refused(&p, -ENOMEM, "OUT_OF_MEMORY");
    expose(&p);
    checkpoint(&p, 1);
    descriptors_close(&p);
    pull_close(&p);
}

/* Of 40 GB only what is touched takes memory here; but for the thread sanitizer's notes. */
#ifdef __SANITIZE_THREAD__
#define LARGE_PIECE PIECE
#else
#define LARGE_PIECE (20ull << 20)
#endif
static void test_two_thousand_descriptors(void)
{
    const uint64_t piece = LARGE_PIECE;
    struct pull p;

    pull_open(&p, 16 * CHUNK);
    const uint32_t files = open_files();
    (void)allocate(&p, 0, CHUNK);
    for (uint32_t i = 0; i < 4; i++)
        (void)allocate_run(&p, 0, 500 * piece, 500);
    pattern(p.memory[0].expected, CHUNK, 1);
    (void)trainer_ask(&p.trainer, (struct order){.what = ORDER_FILL,
                                                 .address = p.memory[0].address,
                                                 .length = CHUNK,
                                                 .seed = 1});
    for (uint32_t i = 0; i < 4; i++) { /* from the last two pieces of each run */
        const uint64_t into = 499 * piece - 100, at = p.memory[1 + i].address + into;
        pattern(p.memory[1 + i].expected + into, CHUNK, i);
        (void)trainer_ask(
            &p.trainer,
            (struct order){.what = ORDER_FILL, .address = at, .length = CHUNK, .seed = i});
        range_add(&p, 1 + i, into, CHUNK, i * CHUNK);
    }
    p.device_bytes = 4 * CHUNK;
    expose(&p);
    CHECK_EQUAL(p.fd_count, 2000);
    descriptors_close(&p);
    usage_is(&p, 1, 4, 2000);
    checkpoint(&p, 1);
    detach(&p.f);
    mappings_gone(&p);
    CHECK(open_files() <= files + 2);
    trainer_page_open(&p);
    pull_close(&p);
}

static const struct test tests[] = {
    {"bytes", test_bytes},
    {"a trainer that dies", test_a_trainer_that_dies},
    {"what cannot be exposed", test_what_cannot_be_exposed},
    {"two thousand descriptors", test_two_thousand_descriptors},
};

int main(int argc, char **argv)
{
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
