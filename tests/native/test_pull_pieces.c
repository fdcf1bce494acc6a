/* Pull from memory that comes as descriptors of physical pieces, honest and hostile: the bytes are
 * right, and no descriptor and no mapping stays. */
#include <sys/resource.h>

#include "pull_fixture.h"

#define PIECE (2u << 20)

static uint32_t descriptors_open(void)
{
    uint32_t count = 0;
    DIR *directory = opendir("/proc/self/fd");

    CHECK(directory != NULL);
    while (readdir(directory) != NULL)
        count++;
    (void)closedir(directory);
    return count;
}

/* Memory of `count` pieces; its number. Its descriptors go to `out`. */
static uint32_t allocate_pieces(struct pull *p, uint32_t device, uint32_t count, int *out)
{
    const struct answer answer = trainer_ask(
        &p->trainer,
        (struct order){.what = ORDER_PIECES, .device = device, .length = PIECE, .seed = count});
    struct device_memory *memory = &p->memory[p->memory_count];

    CHECK(p->memory_count < ALLOCATIONS_MAX);
    memory->address = answer.address;
    memory->exposed = answer.exposed;
    memory->expected = malloc(answer.exposed.length_bytes);
    CHECK(memory->expected != NULL);
    trainer_descriptors(&p->trainer, answer.address, PIECE, count, out);
    return p->memory_count++;
}

static void descriptors_close(const int *descriptors, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        CHECK(close(descriptors[i]) == 0);
}

/* A cudaMalloc, and two expandable segments of three and two pieces; a range crosses a border of
 * pieces. All descriptors are in `out`. */
static void mixed_layout(struct pull *p, int out[5])
{
    (void)allocate(p, 0, 3 * CHUNK);
    (void)allocate_pieces(p, 0, 3, out);
    (void)allocate_pieces(p, 0, 2, out + 3);
    fill(p, 1);
    range_add(p, 0, 256, CHUNK, 0);
    range_add(p, 1, PIECE - CHUNK, 2 * CHUNK, CHUNK);
    range_add(p, 1, 2 * PIECE - 100, 1000, 3 * CHUNK);
    range_add(p, 2, 2 * PIECE - 64, 64, 3 * CHUNK + 2000);
    p->device_bytes = 4 * CHUNK;
}

static void test_bytes(void)
{
    struct pull p;
    int descriptors[6];

    pull_open(&p, 16 * CHUNK);
    const uint32_t before = descriptors_open();
    mixed_layout(&p, descriptors);
    p.descriptors = (struct pcc_descriptors){descriptors, 5};
    expose(&p);
    const uint64_t mapped = peek(&p.control->open_mappings);
    CHECK_EQUAL(mapped, 1 + 5);
    checkpoint(&p, 1);
    fill(&p, 2);
    /* The same memory once more: nothing is opened again. */
    expose(&p);
    CHECK_EQUAL(peek(&p.control->open_mappings), mapped);
    descriptors_close(descriptors, 5); /* the mapping does not need them */
    checkpoint(&p, 2);
    CHECK(descriptors_open() <= before + 1); /* the volume's cached one */
    pull_close(&p);
}

/* The pieces come in the order of the allocations. */
static void test_the_order_of_descriptors(void)
{
    struct pull p;
    int descriptors[5], swapped[5];

    pull_open(&p, 16 * CHUNK);
    mixed_layout(&p, descriptors);
    for (uint32_t i = 0; i < 5; i++)
        swapped[i] = descriptors[4 - i];
    p.descriptors = (struct pcc_descriptors){descriptors, 5};
    /* Handles in another order than the allocations: each gets its own pieces. */
    memset(p.memory[1].exposed.handle, 0xff, sizeof(p.memory[1].exposed.handle));
    memset(p.memory[2].exposed.handle, 0, sizeof(p.memory[2].exposed.handle));
    expose(&p);
    checkpoint(&p, 1);
    /* A client that sends its own pieces in another order harms itself only. */
    p.descriptors.items = swapped;
    p.memory[1].exposed.buffer_id = p.memory[2].exposed.buffer_id = 7;
    expose(&p);
    descriptors_close(descriptors, 5);
    pull_close(&p);
}

static void refused(struct pull *p, int error, const char *why)
{
    char reason[PCC_REASON_BYTES];
    const int result = expose_as_is(p, reason);

    if (result != error || strstr(reason, why) == NULL)
        printf("  %s: %s\n", pcc_error_name(result), reason);
    CHECK(result == error && strstr(reason, why) != NULL);
    mappings_gone(p);
}

static void test_hostile(void)
{
    struct pull p;
    int descriptors[6], twisted[6];

    pull_open(&p, 16 * CHUNK);
    mixed_layout(&p, descriptors);
    p.descriptors = (struct pcc_descriptors){NULL, 0};
    refused(&p, -PCC_E_BAD_PEER, "0 descriptors");
    p.descriptors = (struct pcc_descriptors){descriptors, 4};
    refused(&p, -PCC_E_BAD_PEER, "4 descriptors");
    descriptors[5] = descriptors[0];
    p.descriptors.count = 6;
    refused(&p, -PCC_E_BAD_PEER, "6 descriptors");

    /* No GPU memory: a file, a pipe's end, one that is closed. */
    p.descriptors = (struct pcc_descriptors){twisted, 5};
    const int file = memfd_create("liar", MFD_CLOEXEC);
    CHECK(file >= 0 && ftruncate(file, PIECE + 4096) == 0);
    const int others[] = {file, p.trainer.fd, -1};
    for (uint32_t i = 0; i < 3; i++) {
        memcpy(twisted, descriptors, sizeof(twisted));
        twisted[4] = others[i];
        refused(&p, -PCC_E_BAD_HANDLE, "cannot be opened");
    }
    CHECK(close(file) == 0);

    /* Pieces of another length. */
    p.descriptors = (struct pcc_descriptors){descriptors, 5};
    p.memory[1].exposed.length_bytes = 3 * 2 * (uint64_t)PIECE;
    refused(&p, -PCC_E_BAD_HANDLE, "cannot be opened");
    p.memory[1].exposed.length_bytes = 3 * (uint64_t)PIECE - 1;
    refused(&p, -PCC_E_BAD_PEER, "equal length");
    p.memory[1].exposed.length_bytes = 3 * (uint64_t)PIECE;
    p.memory[1].exposed.piece_count = PCC_EXPOSED_PIECES_MAX;
    refused(&p, -PCC_E_BAD_PEER, "too many pieces");
    p.memory[1].exposed.piece_count = 3;

    /* The driver fails at each piece in turn. */
    poke(&p.control->open_fail_code, CUDA_ERROR_INVALID_VALUE);
    poke(&p.control->open_fail_count, 1);
    refused(&p, -PCC_E_BAD_HANDLE, "CUDA_ERROR_INVALID_VALUE");
    expose(&p);
    checkpoint(&p, 1);
    descriptors_close(descriptors, 5);
    pull_close(&p);
}

/* Memory of one GPU that the client claims to be another's. */
static void test_another_gpus_pieces(void)
{
    struct pull p;
    int descriptors[6];

    pull_open(&p, 16 * CHUNK);
    mixed_layout(&p, descriptors);
    const struct answer other = trainer_ask(
        &p.trainer, (struct order){.what = ORDER_PIECES, .device = 1, .length = PIECE, .seed = 1});
    trainer_descriptors(&p.trainer, other.address, PIECE, 1, descriptors + 5);
    const int honest = descriptors[4];
    descriptors[4] = descriptors[5];
    p.descriptors = (struct pcc_descriptors){descriptors, 5};
    refused(&p, -PCC_E_BAD_HANDLE, "CUDA_ERROR_INVALID_DEVICE");
    descriptors[4] = honest;
    expose(&p);
    descriptors_close(descriptors, 6);
    pull_close(&p);
}

/* 40 GB in 2,000 pieces. */
static void test_many_pieces(void)
{
    enum { COUNT = 2000 };
    const uint64_t piece_bytes = 20u << 20;
    static int descriptors[COUNT];
    struct rlimit files;
    struct pull p;

    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = files.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur > COUNT + 100);
    pull_open(&p, 16 * CHUNK);
    (void)allocate(&p, 0, CHUNK);
    fill(&p, 1);
    const uint32_t before = descriptors_open();
    struct device_memory *memory = &p.memory[p.memory_count];
    const struct answer answer = trainer_ask(
        &p.trainer, (struct order){.what = ORDER_PIECES, .length = piece_bytes, .seed = COUNT});
    memory->exposed = answer.exposed;
    for (uint32_t at = 0; at < COUNT; at += DESCRIPTORS_A_MESSAGE)
        trainer_descriptors(&p.trainer, answer.address + at * piece_bytes, piece_bytes,
                            DESCRIPTORS_A_MESSAGE, descriptors + at);
    /* The last bytes of all, over the border of the last two pieces. */
    memory->expected = calloc(1, 1);
    memory->address = answer.address;
    p.memory_count++;
    range_add(&p, 0, 0, CHUNK, 0);
    range_add(&p, 1, (COUNT - 1) * piece_bytes - 8, 16, CHUNK);
    p.device_bytes = 2 * CHUNK;
    p.descriptors = (struct pcc_descriptors){descriptors, COUNT};
    expose(&p);
    CHECK_EQUAL(peek(&p.control->open_mappings), COUNT + 1);
    struct pcc_tenant_usage usage;
    pcc_tenant_usage(p.f.tenant, &usage);
    CHECK(usage.mappings == 2 && usage.exposed_bytes == COUNT * piece_bytes + CHUNK);
    descriptors_close(descriptors, COUNT);
    CHECK_EQUAL(descriptors_open(), before);
    pull_close(&p);
}

/* The trainer dies while its pieces are copied: all is unmapped. */
static void test_death(void)
{
    struct pull p;
    int descriptors[5];
    uint64_t sequence;

    pull_open(&p, 16 * CHUNK);
    mixed_layout(&p, descriptors);
    p.descriptors = (struct pcc_descriptors){descriptors, 5};
    expose(&p);
    descriptors_close(descriptors, 5);
    copies_hold(&p, 1);
    CHECK(admit(&p, 1, &sequence) == 0);
    ready_set(&p, 1, 0);
    wait_for(&p.control->held_copies, 1);
    trainer_kill(&p.trainer);
    copies_go_on(&p);
    pull_close(&p);
}

static const struct test tests[] = {
    {"test_bytes", test_bytes},
    {"test_the_order_of_descriptors", test_the_order_of_descriptors},
    {"test_hostile", test_hostile},
    {"test_another_gpus_pieces", test_another_gpus_pieces},
    {"test_many_pieces", test_many_pieces},
    {"test_death", test_death},
};

int main(int argc, char **argv)
{
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
