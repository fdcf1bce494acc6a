/* What clients expose, honest and hostile: every field wrong, then bits flipped at random. What is
 * accepted is walked chunk by chunk and must stay within what it names. */
#include <string.h>

#include "check.h"
#include "shared/pcc_exposure.h"

#define CHUNK 65536u
#define ALLOCATIONS 3u
#define RANGES 6u
#define REPLICA 3u
#define SHARES 2u

struct exposed { /* as it goes over the wire */
    struct pcc_exposure head;
    struct pcc_exposed_allocation allocations[ALLOCATIONS];
    struct pcc_exposed_range ranges[RANGES];
    struct pcc_exposed_range replica[REPLICA];
    struct pcc_exposed_share shares[SHARES];
};
_Static_assert(sizeof(struct exposed) ==
                   72 + ALLOCATIONS * 112 + (RANGES + REPLICA) * 32 + SHARES * 24,
               "no padding");

/* Two GPUs: three chunks of the first, from two allocations, one chunk of the second. */
static struct exposed honest(void)
{
    struct exposed e = {.head = {.magic = PCC_EXPOSURE_MAGIC,
                                 .allocation_count = ALLOCATIONS,
                                 .range_count = RANGES,
                                 .device_bytes = 4 * CHUNK,
                                 .probe_allocation = 1,
                                 .probe_offset_bytes = 1000,
                                 .replica_id = 4,
                                 .replica_count = REPLICA,
                                 .share_count = SHARES}};
    static const struct pcc_exposed_range ranges[RANGES] = {
        {.allocation = 0, .allocation_offset_bytes = 512, .offset_bytes = 0, .length_bytes = 100},
        {.allocation = 1, .allocation_offset_bytes = 0, .offset_bytes = 128, .length_bytes = CHUNK},
        {.allocation = 0, .offset_bytes = CHUNK + 128, .length_bytes = 10},
        {.allocation = 1, .offset_bytes = 2 * CHUNK - 1, .length_bytes = 2},
        {.allocation = 1, .offset_bytes = 2 * CHUNK + 1, .length_bytes = 64},
        {.allocation = 2, .offset_bytes = 3 * CHUNK + 64, .length_bytes = CHUNK - 64},
    };
    static const struct pcc_exposed_range replica[REPLICA] = {
        {.allocation = 2, .offset_bytes = 64, .length_bytes = CHUNK},
        {.allocation = 0,
         .allocation_offset_bytes = 7,
         .offset_bytes = CHUNK + 64,
         .length_bytes = CHUNK},
        {.allocation = 1, .offset_bytes = 3 * CHUNK, .length_bytes = 2 * CHUNK},
    };
    static const struct pcc_exposed_share shares[SHARES] = {
        {.replica_offset_bytes = 3 * CHUNK + 5, .offset_bytes = 0, .length_bytes = CHUNK},
        {.replica_offset_bytes = 64, .offset_bytes = 3 * CHUNK, .length_bytes = 64},
    };
    memcpy(e.ranges, ranges, sizeof(ranges));
    memcpy(e.replica, replica, sizeof(replica));
    memcpy(e.shares, shares, sizeof(shares));
    for (uint32_t i = 0; i < ALLOCATIONS; i++) {
        e.allocations[i] = (struct pcc_exposed_allocation){
            .length_bytes = 2 * CHUNK, .buffer_id = 70 + i, .device = i == 2 ? 5 : 0};
        e.allocations[i].handle[i] = (uint8_t)(9 - i);
        e.allocations[i].uuid[3] = i == 2 ? 77 : 33;
    }
    return e;
}

static int parse(const struct exposed *exposed, struct pcc_exposure_view *view)
{
    const char *why = NULL;
    const int result = pcc_exposure_parse(exposed, sizeof(*exposed), CHUNK, view, &why);

    CHECK((result == 0) == (why == NULL));
    return result;
}

/* Every chunk of every device once, filled from its start to its end, within the allocations. */
static uint64_t walk_all(const struct pcc_exposure_view *view)
{
    const uint64_t chunk_count = view->head.device_bytes / CHUNK;
    uint64_t chunks = 0, copied = 0, expected = 0;
    bool *seen = calloc(chunk_count, sizeof(*seen));

    CHECK(seen != NULL);
    for (uint32_t device = 0; device < PCC_DEVICES; device++) {
        struct pcc_exposure_walk walk = {0};
        struct pcc_exposure_step step;
        uint32_t of_device = 0;
        while (pcc_exposure_next_chunk(view, device, &walk)) {
            uint64_t at = walk.chunk_bytes;
            CHECK(at % CHUNK == 0 && at < view->head.device_bytes && !seen[at / CHUNK]);
            seen[at / CHUNK] = true;
            for (; pcc_exposure_next_step(view, &walk, &step); at += step.length_bytes) {
                CHECK(step.offset_bytes == at && step.length_bytes > 0);
                if (step.allocation == PCC_EXPOSURE_ZEROS)
                    continue;
                const struct pcc_exposed_allocation *from = &view->allocations[step.allocation];
                CHECK(step.allocation < view->head.allocation_count && from->device == device);
                CHECK(step.allocation_offset_bytes < from->length_bytes);
                CHECK(step.length_bytes <= from->length_bytes - step.allocation_offset_bytes);
                copied += step.length_bytes;
            }
            CHECK(at == walk.chunk_bytes + CHUNK);
            of_device++;
        }
        CHECK_EQUAL(of_device, view->chunks[device]);
        CHECK_EQUAL(of_device > 0, view->devices >> device & 1);
        chunks += of_device;
    }
    for (uint32_t i = 0; i < view->head.range_count; i++)
        expected += view->ranges[i].length_bytes;
    CHECK_EQUAL(chunks, chunk_count);
    CHECK_EQUAL(copied, expected);
    free(seen);
    return chunks;
}

static void test_an_honest_one(void)
{
    struct pcc_exposure_view view;
    struct pcc_exposure_walk walk = {0};
    struct pcc_exposure_step step;
    const struct exposed exposed = honest();

    CHECK_EQUAL(parse(&exposed, &view), 0);
    CHECK_EQUAL(walk_all(&view), 4);
    CHECK_EQUAL(view.chunks[0], 3);
    CHECK_EQUAL(view.chunks[5], 1);
    CHECK_EQUAL(view.by_handle[0], 2); /* 0 0 7, 0 8 0, 9 0 0 */
    CHECK_EQUAL(view.by_handle[2], 0);

    /* The second chunk: the rest of a range, a short one, a gap, one byte of the next. */
    CHECK(pcc_exposure_next_chunk(&view, 0, &walk));
    while (pcc_exposure_next_step(&view, &walk, &step)) {
    }
    CHECK(pcc_exposure_next_chunk(&view, 0, &walk));
    CHECK(pcc_exposure_next_step(&view, &walk, &step));
    CHECK(step.allocation == 1 && step.allocation_offset_bytes == CHUNK - 128);
    CHECK_EQUAL(step.length_bytes, 128);
    CHECK(pcc_exposure_next_step(&view, &walk, &step) && step.allocation == 0);
    CHECK(pcc_exposure_next_step(&view, &walk, &step) && step.allocation == PCC_EXPOSURE_ZEROS);
    CHECK_EQUAL(step.length_bytes, CHUNK - 128 - 10 - 1);
    CHECK(pcc_exposure_next_step(&view, &walk, &step) && step.length_bytes == 1);
    CHECK(!pcc_exposure_next_step(&view, &walk, &step));
    pcc_exposure_free(&view);
    pcc_exposure_free(&view); /* a zeroed one, too */
}

static void twist_head(uint32_t lie, struct pcc_exposure *head)
{
    static const uint64_t device_bytes[] = {
        0, CHUNK - 1, 4 * CHUNK + 1, 3 * CHUNK, 5 * CHUNK, UINT64_MAX, UINT64_MAX / CHUNK * CHUNK};
    static const uint32_t counts[] = {0, 1, 2, 4, 7, UINT32_MAX};

    if (lie == 0)
        head->magic++;
    else if (lie <= 6)
        head->allocation_count = counts[lie - 1];
    else if (lie <= 12)
        head->range_count = counts[lie - 7];
    else if (lie <= 19)
        head->device_bytes = device_bytes[lie - 13];
    else if (lie == 20)
        head->probe_allocation = ALLOCATIONS;
    else if (lie == 21)
        head->probe_allocation = UINT32_MAX;
    else if (lie == 22)
        head->probe_offset_bytes = 2 * CHUNK - 15;
    else
        head->probe_offset_bytes = UINT64_MAX - 7;
}

static void twist_rest(uint32_t lie, struct exposed *e)
{
    static const uint64_t lengths[] = {0, 2 * CHUNK + 1, UINT64_MAX, 3};

    if (lie == 0)
        e->allocations[1].length_bytes = 0;
    else if (lie == 1)
        e->allocations[1].length_bytes = CHUNK - 1; /* a range needs one more */
    else if (lie == 2)
        e->allocations[0].device = PCC_DEVICES;
    else if (lie == 3)
        e->allocations[0].device = UINT32_MAX;
    else if (lie == 4)
        e->allocations[1].uuid[0] = 1; /* device 0 has two GPUs */
    else if (lie == 5)
        memcpy(e->allocations[2].uuid, e->allocations[0].uuid, 16); /* a GPU is two devices */
    else if (lie == 6)
        memcpy(e->allocations[2].handle, e->allocations[0].handle, 64);
    else if (lie == 7)
        e->ranges[2].allocation = ALLOCATIONS;
    else if (lie == 8)
        e->ranges[2].allocation = 2; /* two devices in one chunk */
    else if (lie == 9)
        e->ranges[5].allocation = e->replica[0].allocation = 0; /* one device has all: fine */
    else if (lie <= 13)
        e->ranges[1].length_bytes = lengths[lie - 10]; /* the last one leaves nothing out: fine */
    else if (lie == 14)
        e->ranges[1].allocation_offset_bytes = CHUNK + 1;
    else if (lie == 15)
        e->ranges[1].allocation_offset_bytes = UINT64_MAX;
    else if (lie == 16)
        e->ranges[2].offset_bytes--; /* overlaps */
    else if (lie == 17)
        e->ranges[5].offset_bytes++; /* leaves the device part */
    else if (lie == 18)
        e->ranges[4].offset_bytes = UINT64_MAX - 10;
    else if (lie == 19)
        e->ranges[0].offset_bytes = CHUNK; /* the first chunk is empty */
    else
        e->ranges[5].offset_bytes -= CHUNK; /* and so is the last one */
}

static void twist_replica(uint32_t lie, struct exposed *e)
{
    if (lie == 0)
        e->head.replica_count = REPLICA + 1;
    else if (lie == 1)
        e->head.replica_count = UINT32_MAX;
    else if (lie == 2)
        e->head.share_count = 0;
    else if (lie == 3)
        e->head.share_count = UINT32_MAX;
    else if (lie == 4)
        e->replica[1].allocation = ALLOCATIONS;
    else if (lie == 5)
        e->replica[2].length_bytes++; /* leaves its allocation */
    else if (lie == 6)
        e->replica[1].allocation_offset_bytes = UINT64_MAX;
    else if (lie == 7)
        e->replica[1].offset_bytes--; /* overlaps */
    else if (lie == 8)
        e->replica[2].offset_bytes = UINT64_MAX - 3;
    else if (lie == 9)
        e->replica[0].length_bytes = 0;
    else if (lie == 10)
        e->ranges[5].allocation = 0; /* the GPU of replica[0] has no part */
    else if (lie == 11)
        e->shares[0].length_bytes = 3 * CHUNK + 1; /* overlaps */
    else if (lie == 12)
        e->shares[1].length_bytes = CHUNK + 1; /* leaves the device part */
    else if (lie == 13)
        e->shares[1].length_bytes = 0;
    else
        e->shares[1].replica_offset_bytes = UINT64_MAX - 3;
}

static void test_lies_about_the_replica_are_refused(void)
{
    struct pcc_exposure_view view;

    for (uint32_t lie = 0; lie < 15; lie++) {
        struct exposed exposed = honest();
        twist_replica(lie, &exposed);
        CHECK_EQUAL(parse(&exposed, &view), -PCC_E_BAD_PEER);
    }
}

/* What a rank has of another one's payload. */
static void test_elsewhere(void)
{
    struct exposed exposed = honest();
    struct pcc_exposure_view mine, other, found;

    /* Mine: one chunk of device 5, that is all shares. */
    exposed.head.device_bytes = CHUNK;
    exposed.head.range_count = 1;
    exposed.head.replica_count = 0;
    uint8_t bytes[sizeof(exposed)], *at = bytes;
    const struct pcc_exposed_range range = {.allocation = 2, .length_bytes = CHUNK};
    struct pcc_exposed_share shares[SHARES] = {
        {.replica_offset_bytes = CHUNK, .offset_bytes = 0, .length_bytes = 200},
        {.replica_offset_bytes = 2 * CHUNK, .offset_bytes = 1000, .length_bytes = 50},
    };
    for (uint32_t lack = 0; lack < 4; lack++) {
        const uint32_t count = lack == 3 ? 0 : SHARES;
        shares[1].replica_offset_bytes = lack == 1 ? 2 * CHUNK + 15 : 2 * CHUNK;
        exposed.head.share_count = count;
        at = mempcpy(bytes, &exposed, offsetof(struct exposed, ranges));
        at = mempcpy(at, &range, sizeof(range));
        at = mempcpy(at, shares, count * sizeof(shares[0]));
        const char *why = NULL;
        CHECK_EQUAL(pcc_exposure_parse(bytes, (uint64_t)(at - bytes), CHUNK, &mine, &why), 0);
        struct exposed theirs = honest();
        theirs.head.replica_id += lack == 2;
        /* One GPU has both allocations, else a chunk is of two. */
        theirs.allocations[2].device = 0;
        memcpy(theirs.allocations[2].uuid, theirs.allocations[0].uuid, 16);
        CHECK_EQUAL(parse(&theirs, &other), 0);
        CHECK_EQUAL(pcc_exposure_elsewhere(&mine, &other, &found), lack == 0 ? 0 : -ENOENT);
        pcc_exposure_free(&mine);
        pcc_exposure_free(&other);
        if (lack > 0)
            continue;
        CHECK(found.head.device_bytes == CHUNK && found.devices == 1 && found.chunks[0] == 1);
        CHECK_EQUAL(found.head.range_count, 3);
        CHECK(found.ranges[0].allocation == 2 && found.ranges[0].offset_bytes == 0);
        CHECK(found.ranges[0].allocation_offset_bytes == CHUNK - 64);
        CHECK(found.ranges[0].length_bytes == 64);
        CHECK(found.ranges[1].allocation == 0 && found.ranges[1].offset_bytes == 64);
        CHECK(found.ranges[1].allocation_offset_bytes == 7 && found.ranges[1].length_bytes == 136);
        CHECK(found.ranges[2].allocation_offset_bytes == 7 + CHUNK - 64);
        CHECK(found.ranges[2].offset_bytes == 1000 && found.ranges[2].length_bytes == 50);
        CHECK(pcc_exposure_at(&found, 64) == &found.ranges[1]);
        CHECK(pcc_exposure_at(&found, 200) == NULL && pcc_exposure_at(&found, 1050) == NULL);
        pcc_exposure_free(&found);
    }
}

static void test_every_lie_is_refused(void)
{
    struct pcc_exposure_view view;

    for (uint32_t lie = 0; lie < 24; lie++) {
        struct exposed exposed = honest();
        twist_head(lie, &exposed.head);
        CHECK_EQUAL(parse(&exposed, &view), -PCC_E_BAD_PEER);
    }
    for (uint32_t lie = 0; lie < 21; lie++) {
        struct exposed exposed = honest();
        twist_rest(lie, &exposed);
        const int result = parse(&exposed, &view);
        if (lie == 9 || lie == 13) {
            CHECK_EQUAL(result, 0);
            (void)walk_all(&view);
            pcc_exposure_free(&view);
        } else {
            CHECK_EQUAL(result, -PCC_E_BAD_PEER);
        }
    }
}

static void test_any_length_is_survived(void)
{
    struct pcc_exposure_view view;
    const char *why;
    const struct exposed exposed = honest();

    for (uint64_t length = 0; length < sizeof(exposed); length++) {
        uint8_t *bytes = malloc(length + 1); /* its end is where it says, for ASan */
        CHECK(bytes != NULL);
        memcpy(bytes, &exposed, length);
        CHECK_EQUAL(pcc_exposure_parse(bytes, length, CHUNK, &view, &why), -PCC_E_BAD_PEER);
        free(bytes);
    }
    CHECK_EQUAL(pcc_exposure_parse(&exposed, PCC_EXPOSURE_BYTES_MAX + 1ull, CHUNK, &view, &why),
                -PCC_E_BAD_PEER);
}

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* A few bits flipped, words set to what is at the edge of something. */
static void test_bits_flipped(void)
{
    static const uint64_t edges[] = {0,     1,         15,        16,         CHUNK - 1,
                                     CHUNK, CHUNK + 1, 2 * CHUNK, UINT32_MAX, UINT64_MAX};
    uint64_t random = 20250711;
    uint32_t accepted = 0;

    for (uint32_t round = 0; round < 200000; round++) {
        struct exposed exposed = honest();
        uint8_t *bytes = (uint8_t *)&exposed;
        struct pcc_exposure_view view;
        for (uint32_t i = next_random(&random) % 3; i < 3; i++) {
            const uint32_t at = next_random(&random) % sizeof(exposed);
            if (next_random(&random) % 2 == 0)
                bytes[at] ^= (uint8_t)(1u << next_random(&random) % 8);
            else
                memcpy(bytes + at / 8 * 8, &edges[next_random(&random) % 10], 8);
        }
        if (parse(&exposed, &view) != 0)
            continue;
        (void)walk_all(&view);
        pcc_exposure_free(&view);
        accepted++;
    }
    printf("  %u of 200000 accepted\n", accepted);
    CHECK(accepted > 1000); /* flipped where nothing depends on it: names, probes */
}

/* Ranges at random, which a model judges, too. */
static void test_random_layouts(void)
{
    uint64_t random = 4711;

    for (uint32_t round = 0; round < 20000; round++) {
        struct exposed exposed = honest();
        struct pcc_exposure_view view;
        uint64_t at = next_random(&random) % 200;
        exposed.replica[0].allocation = 0; /* the other GPU has no part */
        exposed.shares[0].length_bytes = 1;
        exposed.shares[1].offset_bytes = 1;
        exposed.shares[1].length_bytes = 1;
        for (uint32_t i = 0; i < RANGES; i++) {
            struct pcc_exposed_range *range = &exposed.ranges[i];
            *range = (struct pcc_exposed_range){.allocation = next_random(&random) % 2,
                                                .offset_bytes = at,
                                                .length_bytes = 1 + next_random(&random) % CHUNK};
            at += range->length_bytes + next_random(&random) % 3 * (next_random(&random) % 70000);
        }
        const struct pcc_exposed_range *last = &exposed.ranges[RANGES - 1];
        exposed.head.device_bytes = pcc_align_up(last->offset_bytes + last->length_bytes, CHUNK);
        bool empty = false;
        for (uint64_t chunk = 0; chunk < exposed.head.device_bytes; chunk += CHUNK) {
            bool hit = false;
            for (uint32_t i = 0; i < RANGES; i++)
                hit = hit ||
                      (exposed.ranges[i].offset_bytes < chunk + CHUNK &&
                       exposed.ranges[i].offset_bytes + exposed.ranges[i].length_bytes > chunk);
            empty = empty || !hit;
        }
        CHECK_EQUAL(parse(&exposed, &view), empty ? -PCC_E_BAD_PEER : 0);
        if (empty)
            continue;
        (void)walk_all(&view);
        pcc_exposure_free(&view);
    }
}

int main(void)
{
    RUN(test_an_honest_one);
    RUN(test_every_lie_is_refused);
    RUN(test_lies_about_the_replica_are_refused);
    RUN(test_elsewhere);
    RUN(test_any_length_is_survived);
    RUN(test_bits_flipped);
    RUN(test_random_layouts);
    return 0;
}
