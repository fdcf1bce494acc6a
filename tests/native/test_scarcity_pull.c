/* The daemon's side of GPUs on a machine that has run out of resources: what cannot be pulled is
 * refused, and can be pulled once there are enough again. */
#include "pull_fixture.h"
#include "scarcity.h"

/* A whole checkpoint, or a reported failure. */
static void try_checkpoint(struct pull *p, uint64_t snapshot)
{
    struct pcc_event event;
    uint64_t sequence;

    const int error = admit(p, snapshot, &sequence);
    if (error != 0) {
        CHECK(was_refused());
        return;
    }
    ready_set(p, snapshot, 0);
    push_tree(p, snapshot);
    do
        event = event_next(&p->f);
    while (event.id != snapshot ||
           (event.kind != PCC_EVENT_DURABLE && event.kind != PCC_EVENT_FAILED));
    CHECK(event.kind == PCC_EVENT_DURABLE || was_refused());
}

static void live(void)
{
    struct pull p;
    char reason[PCC_REASON_BYTES];
    const uint64_t left = scarce.left;

    plenty();
    pull_open(&p, 16 * CHUNK);
    usual_layout(&p);
    refuse_at(left);
    for (uint64_t snapshot = 1; snapshot <= 2; snapshot++) {
        const int error = expose_as_is(&p, reason);
        CHECK(error == 0 || (was_refused() && reason[0] != '\0'));
        if (error == 0) {
            proven(&p);
            try_checkpoint(&p, snapshot);
        }
    }
    plenty();
    expose(&p);
    checkpoint(&p, 3);
    pull_close(&p);
    CHECK(munmap(p.control, 4096) == 0);
}

static void open_only(void)
{
    struct pcc_gpus *gpus;

    if (pcc_gpus_open(&gpus) == 0)
        pcc_gpus_close(gpus);
    else
        CHECK(was_refused());
}

static void test_pull(void)
{
    char unused[64];

    scarcity_begin(unused);
    CHECK(rmdir(unused) == 0);
    live(); /* the driver keeps what it takes at first */
    scarcity("opening", open_only);
    scarcity("pull", live);
    scarcity_end(11);
}

static const struct test tests[] = {{"test_pull", test_pull}};

int main(int argc, char **argv)
{
    if (access("/dev/shm", W_OK) == 0)
        CHECK(setenv("TMPDIR", "/dev/shm", 1) == 0); /* flushed over and over */
    return pull_main(argc, argv, tests, 1);
}
