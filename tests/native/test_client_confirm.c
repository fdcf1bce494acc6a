/* Provisional snapshots: the daemon does not accept them before they are confirmed, and one that is
 * abandoned instead returns its last chunk. */
#include "client/pcc_client_private.h"
#include "client_fixture.h"

#define HOST_BYTES (2 * CHUNK)
#define TAIL_BYTES 100u
#define WHOLE_BYTES (HOST_BYTES + TAIL_BYTES)

struct source {
    uint8_t bytes[HOST_BYTES];
    char tail[TAIL_BYTES];
};

static struct source source;

static void submit(struct daemon *d, uint64_t snapshot, bool provisional)
{
    const struct pcc_range range = {(uintptr_t)source.bytes, 0, HOST_BYTES};
    const struct pcc_submission submission = {.ranges = &range,
                                              .range_count = 1,
                                              .tail = source.tail,
                                              .tail_bytes = TAIL_BYTES,
                                              .tail_offset_bytes = HOST_BYTES,
                                              .provisional = provisional};

    pattern(source.bytes, HOST_BYTES, snapshot);
    CHECK(pcc_client_request(d->client, snapshot) == 0);
    CHECK(pcc_client_submit(d->client, snapshot, &submission) == 0);
    admit(d, snapshot);
}

static bool keeps_last(struct daemon *d, uint64_t snapshot)
{
    (void)pthread_mutex_lock(&d->client->lock);
    const bool kept = d->client->jobs[snapshot % PCC_SNAPSHOTS].kept;
    (void)pthread_mutex_unlock(&d->client->lock);
    return kept;
}

/* The source was read, and all chunks but the last one have come. A tail that is still being filled
 * when its snapshot is refused and then confirmed may come, too: the daemon takes no notice of it.
 */
static void read_all_but_one(struct daemon *d, uint64_t snapshot)
{
    collect(d, HOST_BYTES);
    CHECK(pcc_client_wait(d->client, snapshot, PCC_WAIT_READ, soon()) == 0);
    CHECK(state_of(d, snapshot).word == PCC_WORD_COPYING);
    UNTIL(keeps_last(d, snapshot));
}

static void test_confirmed(void)
{
    struct daemon d;

    daemon_open(&d, 4);
    submit(&d, 1, true);
    read_all_but_one(&d, 1);
    submit(&d, 2, false); /* a younger one is not kept */
    collect(&d, WHOLE_BYTES);
    pcc_client_confirm(d.client, 1);
    collect(&d, TAIL_BYTES);
    CHECK(!pcc_client_abandon(d.client, 1)); /* it was read, and is the daemon's */
    daemon_close(&d);
}

static void test_confirmed_before_it_was_read(void)
{
    struct daemon d;

    daemon_open(&d, 0);
    submit(&d, 1, true);
    pcc_client_confirm(d.client, 1);
    pcc_client_confirm(d.client, 7); /* unknown */
    free_chunks(&d, 0, 4);
    collect(&d, WHOLE_BYTES);
    daemon_close(&d);
}

static void test_given_up(void)
{
    struct daemon d;

    daemon_open(&d, 1);
    for (uint64_t snapshot = 1; snapshot <= 3 * PCC_SNAPSHOTS; snapshot++) {
        submit(&d, snapshot, true); /* with one chunk in all: each time the last one comes back */
        read_all_but_one(&d, snapshot);
        if (snapshot % 2 == 0)
            CHECK(pcc_client_abandon(d.client, snapshot));
        else
            CHECK(word_to(&d, snapshot, PCC_WORD_COPYING, PCC_WORD_REFUSED));
        pcc_client_confirm(d.client, snapshot); /* too late */
    }
    listen_to(&d);
    CHECK_EQUAL(d.handed_bytes, 0);
    daemon_close(&d);
}

static void test_closed(void)
{
    struct daemon d;

    daemon_open(&d, 4);
    submit(&d, 1, true);
    read_all_but_one(&d, 1);
    daemon_close(&d); /* nothing leaks */
}

/* The daemon's part is read later than ours: the last chunk waits for the verdict on both. */
static void test_pulled(void)
{
    struct daemon d;
    struct stream stream;
    const struct pcc_submission submission = {.tail = source.tail,
                                              .tail_bytes = TAIL_BYTES,
                                              .tail_offset_bytes = CHUNK,
                                              .pulled_bytes = CHUNK,
                                              .pulled_devices = 1,
                                              .provisional = true};

    daemon_open(&d, 4);
    stream_open(&stream, 0);
    CHECK(pcc_client_device_open(d.client, 0) == 0);
    CHECK(pcc_client_request(d.client, 1) == 0);
    CHECK(pcc_client_mark(d.client, 1, 0, handle(&stream), true, false) == 0);
    CHECK(pcc_client_submit(d.client, 1, &submission) == 0);
    admit(&d, 1);
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, pcc_now_ns()) == -ETIMEDOUT);
    pulled(&d, 1, 0);
    CHECK(pcc_client_wait(d.client, 1, PCC_WAIT_READ, soon()) == 0);
    listen_to(&d);
    CHECK_EQUAL(d.handed_bytes, 0);
    pcc_client_confirm(d.client, 1);
    collect(&d, TAIL_BYTES);
    UNTIL(stream_idle(&stream));
    daemon_close_gpu(&d, &stream);
}

int main(void)
{
    standin_open();
    RUN(test_confirmed);
    RUN(test_confirmed_before_it_was_read);
    RUN(test_given_up);
    RUN(test_closed);
    RUN(test_pulled);
    standin_close();
    return 0;
}
