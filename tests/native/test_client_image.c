/* Images of processes: pipes in, a checkpoint of open length out; and what no honest client says of
 * a length. */
#include <fcntl.h>
#include <signal.h>

#include "handmade_client.h"

static const struct settings roomy = {.payload_capacity = 2u << 20, .memory_bytes = 4u << 20};
static const struct settings scarce = {
    .payload_capacity = 2u << 20, .memory_bytes = 3 * CHUNK, .bytes_per_second = 8u << 20};

struct writer { /* of a pipe, in a thread */
    pthread_t thread;
    int fd;
    const uint8_t *bytes;
    uint64_t count;
    int error;
};

static void *write_all(void *argument)
{
    struct writer *writer = argument;

    for (uint64_t at = 0; at < writer->count && writer->error == 0;) {
        const ssize_t count = write(writer->fd, writer->bytes + at, writer->count - at);
        writer->error = count < 0 ? errno : 0;
        at += count < 0 ? 0 : (uint64_t)count;
    }
    CHECK(close(writer->fd) == 0);
    return NULL;
}

static void stream(struct fixture *f, struct writer *writer, uint32_t number, bool bulk,
                   const uint8_t *bytes, uint64_t count)
{
    int ends[2];

    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    *writer = (struct writer){.fd = ends[1], .bytes = bytes, .count = count};
    CHECK(pcc_client_image_stream(f->client, 1, ends[0], number, bulk) == 0);
    CHECK(close(ends[0]) == 0);
    CHECK(pthread_create(&writer->thread, NULL, write_all, writer) == 0);
}

static void begin_image(struct fixture *f, const struct settings *settings, uint64_t bound_bytes)
{
    const struct pcc_request request = {
        .kind = PCC_KIND_IMAGE, .payload_bytes = bound_bytes, .step = 5};

    fixture_open(f, settings);
    link_open(f);
    CHECK(pcc_client_request(f->client, 1) == 0);
    CHECK(pcc_client_image_begin(f->client, 1, &request) == 0);
    CHECK(queue_event(f, 1).kind == PCC_EVENT_BEGUN);
}

/* Puts the streams together as the extents say, and compares. */
static void streams_equal(struct fixture *f, uint64_t sequence, const struct writer *writers,
                          const struct pcc_image_extent *extents, uint64_t extent_count)
{
    static uint8_t got[2u << 20];
    uint64_t at[3] = {0};

    for (uint64_t i = 0; i < extent_count; i++) {
        const struct pcc_range range = {.address = (uintptr_t)got,
                                        .offset_bytes = extents[i].offset_bytes,
                                        .length_bytes = extents[i].length_bytes};
        const struct writer *writer = &writers[extents[i].stream];
        CHECK(load(f, sequence, 10 + i, &range, 1, range.offset_bytes, range.length_bytes) == 0);
        CHECK(memcmp(got, writer->bytes + at[extents[i].stream], range.length_bytes) == 0);
        at[extents[i].stream] += range.length_bytes;
    }
    for (uint32_t i = 0; i < 3; i++)
        CHECK(at[i] == writers[i].count);
}

/* Three pipes at once, of which one is collected; the first chunks are written long before the last
 * one is read, also where memory holds a tenth of the image. */
static void image_is_saved(const struct settings *settings)
{
    struct fixture f;
    static uint8_t bytes[3][1u << 20];
    struct writer writers[3];
    struct pcc_image_extent *extents;
    uint64_t extent_count;

    begin_image(&f, settings, 2u << 20);
    for (uint32_t i = 0; i < 3; i++) {
        pattern(bytes[i], sizeof(bytes[i]), i + 1);
        stream(&f, &writers[i], i, i != 1, bytes[i], i == 1 ? 70001 : 700 * 1024 + i);
    }
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_DRAINED, soon()) == 0);
    CHECK(pcc_client_image_extents(f.client, 1, &extents, &extent_count) == 0);
    CHECK(pcc_client_image_end(f.client, 1, "the tree", 8) == 0);
    CHECK(pcc_client_image_end(f.client, 1, "again", 5) != 0);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_DURABLE, soon()) == 0);
    const uint64_t payload_bytes = 70001 + 2 * 700 * 1024 + 2 + 8;
    CHECK(event_until(&f, PCC_EVENT_COPIED).payload_bytes == payload_bytes);
    const struct pcc_event durable = event_until(&f, PCC_EVENT_DURABLE);
    streams_equal(&f, durable.sequence, writers, extents, extent_count);
    free(extents);
    for (uint32_t i = 0; i < 3; i++)
        CHECK(pthread_join(writers[i].thread, NULL) == 0 && writers[i].error == 0);
    fixture_end(&f);
}

static void test_an_image_is_saved(void)
{
    image_is_saved(&roomy);
}

static void test_an_image_is_saved_with_little_memory(void)
{
    image_is_saved(&scarce);
}

/* The writer of a pipe gets EPIPE, whatever ends the image. */
enum way { GIVEN_UP, TOO_LONG, DAEMON_ENDED, CLOSED, WAYS };

static void test_pipes_are_cut_when_the_image_ends(void)
{
    struct fixture f;
    static uint8_t bytes[4u << 20];
    struct writer writer;

    for (enum way way = 0; way < WAYS; way++) {
        begin_image(&f, way == TOO_LONG ? &roomy : &scarce,
                    way == TOO_LONG ? 2 * CHUNK + 1 : 2u << 20);
        stream(&f, &writer, 0, true, bytes, way == TOO_LONG ? sizeof(bytes) : UINT32_MAX);
        while (way != TOO_LONG && pcc_client_image_bytes(f.client, 1) < CHUNK)
            (void)usleep(200);
        if (way == GIVEN_UP)
            CHECK(pcc_client_abandon(f.client, 1));
        else if (way == DAEMON_ENDED)
            CHECK(shutdown(f.sockets[0], SHUT_RDWR) == 0);
        else if (way == CLOSED)
            pcc_client_close(f.client);
        CHECK(pthread_join(writer.thread, NULL) == 0);
        CHECK(writer.error == EPIPE);
        if (way == CLOSED) {
            f.client = NULL;
        } else {
            struct pcc_client_state state;
            CHECK(pcc_client_image_stream(f.client, 1, f.sockets[1], 1, true) == -ENOENT);
            CHECK(pcc_client_state(f.client, 1, &state) == 0);
            CHECK(state.error == (way == TOO_LONG       ? -EFBIG
                                  : way == DAEMON_ENDED ? -ECONNRESET
                                                        : 0));
        }
        fixture_end(&f);
    }
}

/* An image that is given up leaves slot, lane and chunks for the next snapshots. */
static void test_the_next_one_is_saved_after_one_that_was_given_up(void)
{
    struct fixture f;
    static uint8_t bytes[300000];
    struct writer writer;
    const struct pcc_request request = {.kind = PCC_KIND_IMAGE, .payload_bytes = 1u << 20};
    struct pcc_image_extent *extents;
    uint64_t extent_count;

    begin_image(&f, &scarce, 2u << 20);
    for (uint64_t snapshot = 2; snapshot < 40; snapshot++) {
        CHECK(pcc_client_abandon(f.client, snapshot - 1));
        CHECK(event_until(&f, PCC_EVENT_FAILED).id == snapshot - 1);
        CHECK(pcc_client_request(f.client, snapshot) == 0);
        CHECK(pcc_client_image_begin(f.client, snapshot, &request) == 0);
        CHECK(queue_event(&f, snapshot).kind == PCC_EVENT_BEGUN);
    }
    CHECK(pcc_client_abandon(f.client, 39));
    CHECK(event_until(&f, PCC_EVENT_FAILED).id == 39);
    CHECK(pcc_client_request(f.client, 65) == 0); /* the entry of 1 */
    CHECK(pcc_client_image_begin(f.client, 65, &request) == 0);
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    writer = (struct writer){.fd = ends[1], .bytes = bytes, .count = sizeof(bytes)};
    CHECK(pcc_client_image_stream(f.client, 65, ends[0], 0, true) == 0);
    CHECK(close(ends[0]) == 0);
    CHECK(pthread_create(&writer.thread, NULL, write_all, &writer) == 0);
    CHECK(pcc_client_wait(f.client, 65, PCC_WAIT_DRAINED, soon()) == 0);
    CHECK(pcc_client_image_extents(f.client, 65, &extents, &extent_count) == 0);
    free(extents);
    CHECK(pcc_client_image_end(f.client, 65, "t", 1) == 0);
    CHECK(pcc_client_wait(f.client, 65, PCC_WAIT_DURABLE, soon()) == 0);
    CHECK(pthread_join(writer.thread, NULL) == 0 && writer.error == 0);
    fixture_end(&f);
}

/* -- what no honest client says -- */

enum lie {
    NO_BYTES,
    ABOVE_THE_BOUND,
    OVERFLOWS,
    TWICE,
    OF_TENSORS,
    INSIDE_WHAT_CAME,
    SHORT_BEFORE,
    LIES
};

static struct pcc_message length_of(uint64_t snapshot, uint64_t offset_bytes, uint32_t tree_bytes)
{
    return (struct pcc_message){.kind = PCC_MSG_LENGTH,
                                .id = snapshot,
                                .offset_bytes = offset_bytes,
                                .length_bytes = tree_bytes};
}

static void lie(struct fixture *f, enum lie what, uint32_t chunk)
{
    struct pcc_message first = full(f, 1, chunk, 0);
    struct pcc_message length = length_of(1, CHUNK, 100);

    if (what == NO_BYTES)
        length = length_of(1, 0, 0);
    else if (what == ABOVE_THE_BOUND)
        length = length_of(1, PAYLOAD, 1);
    else if (what == OVERFLOWS)
        length = length_of(1, UINT64_MAX, 2);
    else if (what == SHORT_BEFORE)
        first.length_bytes = 100;
    if (what == INSIDE_WHAT_CAME)
        length = length_of(1, 100, 100);
    if (what == INSIDE_WHAT_CAME || what == SHORT_BEFORE)
        say(f, &first);
    if (what == TWICE)
        say(f, &length);
    if (what != SHORT_BEFORE)
        say(f, &length);
    ring(f);
}

static void test_lies_about_a_length_end_the_session(void)
{
    struct fixture f;
    struct pcc_message message;

    for (enum lie what = 0; what < LIES; what++) {
        fixture_open(&f, &roomy);
        page_open(&f);
        struct pcc_request block = {.snapshot = 1, .payload_bytes = PAYLOAD};
        block.kind = what == OF_TENSORS ? PCC_KIND_TENSORS : PCC_KIND_IMAGE;
        word_set(&f, 1, PCC_WORD_REQUESTED);
        ask(&f, 1, &block);
        CHECK(queue_event(&f, 1).kind == PCC_EVENT_BEGUN);
        CHECK(pcc_ring_pop(&f.page.to_client, &message) == 1);
        lie(&f, what, message.chunk);
        CHECK(event_until(&f, PCC_EVENT_BAD_PEER).session == f.session);
        fixture_end(&f);
    }
}

/* What an image cannot have is refused in the request. */
static void test_a_request_for_what_no_image_has_is_refused(void)
{
    struct fixture f;

    fixture_open(&f, &roomy);
    page_open(&f);
    for (uint64_t snapshot = 1; snapshot <= 5; snapshot++) {
        struct pcc_request block = {
            .snapshot = snapshot, .payload_bytes = PAYLOAD, .kind = PCC_KIND_IMAGE};
        uint64_t *const fields[] = {&block.map, &block.tree_bytes, &block.types_bytes,
                                    &block.division};
        if (snapshot <= 4)
            *fields[snapshot - 1] = 1;
        else
            block.level = PCC_LEVEL_MEMORY;
        word_set(&f, snapshot, PCC_WORD_REQUESTED);
        ask(&f, snapshot, &block);
        CHECK(queue_event(&f, snapshot).error == -EINVAL);
    }
    fixture_end(&f);
}

int main(void)
{
    (void)signal(SIGPIPE, SIG_IGN);
    RUN(test_an_image_is_saved);
    RUN(test_an_image_is_saved_with_little_memory);
    RUN(test_pipes_are_cut_when_the_image_ends);
    RUN(test_the_next_one_is_saved_after_one_that_was_given_up);
    RUN(test_lies_about_a_length_end_the_session);
    RUN(test_a_request_for_what_no_image_has_is_refused);
    return 0;
}
