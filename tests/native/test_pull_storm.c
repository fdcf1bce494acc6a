/* Sessions that pull, with trainers killed, copies failing or slow, snapshots let go and detached
 * at random: each checkpoint is right or failed, and no mapping is left. PCC_PULL_ROUNDS sessions
 * from PCC_SEED on. */
#include "pull_fixture.h"

#define MEMORY (12 * CHUNK)

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* One session: a few checkpoints with something going wrong at random. */
static void storm_session(struct pull *p, uint64_t *random, uint32_t *durable)
{
    uint64_t sequence;

    trainer_start(&p->trainer);
    p->memory_count = p->range_count = 0;
    for (uint32_t i = 0; i < 3; i++) {
        (void)allocate(p, i % 2, CHUNK + next_random(random) % (4 * CHUNK));
        range_add(p, i, 0, p->memory[i].exposed.length_bytes, i == 0 ? 0 : p->device_bytes);
        p->device_bytes =
            pcc_align_up(p->ranges[i].offset_bytes + p->ranges[i].length_bytes, CHUNK);
    }
    fill(p, 1);
    trainer_page_open(p);
    copies_fail(p, 0, 0, false); /* what the session before has left of it */
    expose(p);
    for (uint64_t snapshot = 1; snapshot <= 4 && p->trainer.pid != 0; snapshot++) {
        const uint32_t event = next_random(random) % 6;
        copies_fail(p, event == 1 ? 1 + next_random(random) % 12 : 0, CUDA_ERROR_INVALID_VALUE,
                    next_random(random) % 2);
        poke(&p->control->copy_us_per_mib, next_random(random) % 4000);
        CHECK(admit(p, snapshot, &sequence) == 0);
        ready_set(p, snapshot, next_random(random) % 2);
        if (event == 2)
            trainer_kill(&p->trainer);
        ready_set(p, snapshot, 0);
        ready_set(p, snapshot, 1);
        (void)usleep(next_random(random) % 2000);
        if (event == 3)
            (void)pcc_word_move(pcc_page_snapshot(&p->f.page, snapshot), snapshot, PCC_WORD_COPYING,
                                PCC_WORD_ABANDONED);
        if (event == 4 || p->trainer.pid == 0)
            break; /* detached in mid-copy */
        struct pcc_message message;
        const uint64_t deadline = soon();
        bool pushed = false;
        uint8_t *expected = NULL;
        struct pcc_event told = {0};
        do {
            CHECK(pcc_now_ns() < deadline);
            if (!pushed &&
                p->f.page.to_client.own != atomic_load(&p->f.page.to_client.index->tail)) {
                push_tree(p, snapshot);
                pushed = true;
            }
            if (pcc_events_take(p->f.events, &told, 1) == 0)
                (void)usleep(200);
        } while (told.id != snapshot || told.session != p->f.session ||
                 (told.kind != PCC_EVENT_DURABLE && told.kind != PCC_EVENT_FAILED));
        if (told.kind == PCC_EVENT_DURABLE) {
            expected = payload_expected(p, snapshot);
            saved_equals(p, sequence, expected);
            free(expected);
            ++*durable;
        }
        while (message_next(p, &message)) {
            message.kind = PCC_MSG_TAKEN;
            CHECK(pcc_ring_push(&p->f.page.to_daemon, &message) == 0);
        }
        if (p->trainer.pid != 0)
            fill(p, snapshot + 1);
    }
    detach(&p->f);
    trainer_kill(&p->trainer);
    mappings_gone(p);
    expected_free(p);
    renew(&p->f, &(struct settings){.memory_bytes = MEMORY}); /* it lived when its session ended */
}

static void test_storm(void)
{
    const char *rounds = getenv("PCC_PULL_ROUNDS"), *seed = getenv("PCC_SEED");
    uint64_t random = seed != NULL ? strtoull(seed, NULL, 0) : 20250711;
    uint32_t durable = 0;
    struct pull p;

    pull_open(&p, MEMORY);
    detach(&p.f);
    trainer_kill(&p.trainer);
    poke(&p.control->copy_slow_kinds, STANDIN_TO_HOST);
    for (int i = rounds != NULL ? atoi(rounds) : 40; i > 0; i--)
        storm_session(&p, &random, &durable);
    printf("  %u durable\n", durable);
    CHECK(durable > 0);
    trainer_page_open(&p);
    pull_close(&p);
}

static const struct test tests[] = {{"test_storm", test_storm}};

int main(int argc, char **argv)
{
    return pull_main(argc, argv, tests, 1);
}
