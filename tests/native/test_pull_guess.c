/* A client of another user than the daemon names memory that it cannot read, and guesses what the
 * daemon asks for. */
#include "pull_fixture.h"

static uint64_t stolen(struct pull *p, uint64_t snapshot)
{
    uint64_t sequence;

    CHECK(admit(p, snapshot, &sequence) == 0);
    ready_set(p, snapshot, 0);
    push_tree(p, snapshot);
    return sequence;
}

static int is_secret(void *expected, const void *bytes, uint64_t offset, uint64_t length)
{
    return memcmp((const uint8_t *)expected + offset, bytes, length) == 0 ? 0 : -EBADMSG;
}

/* Of its own allocation it answers what is there, of the other one `guess`. */
static void answer_guess(struct pull *p, uint8_t guess)
{
    struct pcc_proof *proof = proof_of(p);
    const uint8_t *bytes;

    question(p);
    for (uint32_t i = 0; i < proof->count; i++) {
        if (proof->blocks[i].address - p->memory[1].address < p->memory[1].exposed.length_bytes) {
            memset(proof->bytes[i], guess, proof->blocks[i].length_bytes);
            continue;
        }
        (void)memory_at(p, proof->blocks[i].address, &bytes);
        memcpy(proof->bytes[i], bytes, proof->blocks[i].length_bytes);
    }
    answer(p, 0);
}

static void victim_start(struct pull *p, struct trainer *victim, uint64_t length, uint8_t *secret,
                         uint64_t secret_length)
{
    pull_open(p, 24 * CHUNK);
    p->f.tenant->spec.foreign = true;
    trainer_start(victim);
    (void)allocate(p, 0, CHUNK);
    (void)allocate(p, 0, CHUNK);
    fill(p, 1);
    const struct answer others =
        trainer_ask(victim, (struct order){.what = ORDER_ALLOCATE, .length = length});
    (void)trainer_ask(
        victim, (struct order){
                    .what = ORDER_FILL, .address = others.address, .length = length, .seed = 77});
    if (secret_length < length)
        (void)trainer_ask(victim, (struct order){.what = ORDER_CLEAR,
                                                 .address = others.address + secret_length,
                                                 .length = length - secret_length});
    pattern(secret, length, 77);
    p->memory[1].exposed = others.exposed;
    p->memory[1].address = others.exposed.address;
}

/* A session of the attacker, who answers each question with a next guess from *guess on, if it
 * changes. True when `stolen_bytes` at `at` of the payload are the secret. */
static bool session_steals(struct pull *p, const uint8_t *secret, uint64_t at,
                           uint64_t stolen_bytes, uint8_t *guess, uint8_t step)
{
    uint8_t *expected = calloc(1, p->device_bytes + TREE_BYTES);
    struct pcc_load *load;
    bool is_stolen = false;

    CHECK(expected != NULL);
    memcpy(expected + at, secret, stolen_bytes);
    pattern(expected + p->device_bytes, TREE_BYTES, 1);
    expose_unproven(p);
    const uint64_t sequence = stolen(p, 1);
    do {
        answer_guess(p, *guess);
        *guess = (uint8_t)(*guess + step);
        while (atomic_load(&proof_of(p)->asked) == atomic_load(&proof_of(p)->answered) &&
               word_of(p, 1) == pcc_word(1, PCC_WORD_COPYING))
            (void)usleep(100);
    } while (word_of(p, 1) == pcc_word(1, PCC_WORD_COPYING));
    if (end_of(p, 1).kind == PCC_EVENT_DURABLE) {
        CHECK(pcc_load_open(p->f.volume, sequence, &load) == 0);
        is_stolen = pcc_load_stream(load, 0, p->device_bytes + TREE_BYTES, CHUNK, 1, is_secret,
                                    expected) == 0;
        pcc_load_close(load);
    }
    free(expected);
    detach(&p->f);
    trainer_page_open(p);
    return is_stolen;
}

static void victim_end(struct pull *p, struct trainer *victim, uint8_t *secret)
{
    trainer_kill(victim);
    free(secret);
    pull_close(p);
}

/* Much of the memory is zeros: these are named often, and what is wanted once. */
static void test_zeros_beside_a_secret(void)
{
    struct pull p;
    struct trainer victim;
    uint8_t *secret = malloc(4 * CHUNK), guess = 0;

    CHECK(secret != NULL);
    victim_start(&p, &victim, 4 * CHUNK, secret, 2048);
    for (uint32_t i = 0; i < 5; i++)
        range_add(&p, 1, CHUNK, 3 * CHUNK, 3 * i * CHUNK);
    range_add(&p, 1, 0, 2048, 15 * CHUNK);
    p.device_bytes = 16 * CHUNK;
    for (uint32_t i = 0; i < 10; i++)
        CHECK(!session_steals(&p, secret, 15 * CHUNK, 2048, &guess, 0));
    victim_end(&p, &victim, secret);
}

/* Ranges of a byte: the block is a byte, too. */
static void test_ranges_of_a_byte(void)
{
    struct pull p;
    struct trainer victim;
    uint8_t *secret = malloc(CHUNK), guess = 0;

    CHECK(secret != NULL);
    victim_start(&p, &victim, CHUNK, secret, CHUNK);
    for (uint32_t i = 0; i < 60; i++)
        range_add(&p, 1, i, 1, i);
    p.device_bytes = CHUNK;
    for (uint32_t i = 0; i < 20; i++)
        CHECK(!session_steals(&p, secret, 0, 60, &guess, 1));
    victim_end(&p, &victim, secret);
}

static const struct test tests[] = {
    {"test_ranges_of_a_byte", test_ranges_of_a_byte},
    {"test_zeros_beside_a_secret", test_zeros_beside_a_secret},
};

int main(int argc, char **argv)
{
    return pull_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
