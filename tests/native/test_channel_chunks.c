/* Choosing chunks takes a few steps, however many there are: 512 GiB are 32,768 chunks of 16 MiB,
 * and all of one snapshot's are handed out under the channel's lock. */
#include <stdlib.h>

#include "check.h"
#include "daemon/pcc_channel_private.h"

#define CHUNKS 32768u

static struct pcc_channel *table_new(void)
{
    struct pcc_channel *channel = calloc(1, sizeof *channel);

    CHECK(channel != NULL);
    channel->chunks = calloc(CHUNKS, sizeof *channel->chunks);
    CHECK(channel->chunks != NULL);
    channel->chunk_count = CHUNKS;
    channel->segment_count = channel->lasting_count = 2;
    for (uint32_t i = 0; i < CHUNKS; i++)
        channel->chunks[i].segment = i < CHUNKS / 2 ? 0 : 1;
    pcc_channel_lists_clear(channel);
    pcc_channel_chunks_add(channel, 0, CHUNKS);
    return channel;
}

static void table_free(struct pcc_channel *channel)
{
    free(channel->chunks);
    free(channel);
}

/* Every chunk once, in the order of the table; then none is left. */
static void pick_all(struct pcc_channel *channel, enum pcc_chunk_state state)
{
    const uint64_t began_ns = pcc_now_ns(), before = channel->looked_at;

    for (uint32_t i = 0; i < CHUNKS; i++) {
        CHECK_EQUAL(pcc_channel_pick(channel, 0, true), i);
        pcc_channel_chunk_set(channel, &channel->chunks[i], state);
    }
    CHECK_EQUAL(pcc_channel_pick(channel, 0, false), -1);
    CHECK_EQUAL(channel->looked_at - before, CHUNKS);
    printf("%u chunks chosen in %.2f ms\n", CHUNKS, (double)(pcc_now_ns() - began_ns) / 1e6);
}

static void test_a_step_for_each_chunk(void)
{
    struct pcc_channel *channel = table_new();

    pick_all(channel, PCC_CHUNK_GRANTED);
    for (uint32_t i = 0; i < CHUNKS; i++)
        pcc_channel_chunk_set(channel, &channel->chunks[i], PCC_CHUNK_CACHED);
    pick_all(channel, PCC_CHUNK_GRANTED); /* the oldest content goes first */
    table_free(channel);
}

static void test_what_is_spared_goes_last(void)
{
    struct pcc_channel *channel = table_new();

    for (uint32_t i = 0; i < CHUNKS; i++) {
        channel->chunks[i].sequence = i < 10 ? 7 : 8;
        pcc_channel_chunk_set(channel, &channel->chunks[i], PCC_CHUNK_CACHED);
    }
    CHECK_EQUAL(pcc_channel_pick(channel, 7, true), 10);
    CHECK_EQUAL(pcc_channel_pick(channel, 7, true), 10); /* free until it gets another state */
    for (uint32_t i = 10; i < CHUNKS; i++)
        pcc_channel_chunk_set(channel, &channel->chunks[i], PCC_CHUNK_FULL);
    CHECK_EQUAL(pcc_channel_pick(channel, 7, true), 0);
    table_free(channel);
}

static void test_what_retires_is_not_chosen(void)
{
    struct pcc_channel *channel = table_new();

    channel->lasting_count = 1;
    pcc_channel_chunks_retire(channel);
    for (uint32_t i = 0; i < CHUNKS / 2; i++) {
        CHECK_EQUAL(pcc_channel_pick(channel, 0, false), i);
        pcc_channel_chunk_set(channel, &channel->chunks[i], PCC_CHUNK_FULL);
    }
    pcc_channel_chunk_free(channel, CHUNKS - 1);
    CHECK_EQUAL(pcc_channel_pick(channel, 0, false), -1);
    table_free(channel);
}

int main(void)
{
    RUN(test_a_step_for_each_chunk);
    RUN(test_what_is_spared_goes_last);
    RUN(test_what_retires_is_not_chosen);
    return 0;
}
