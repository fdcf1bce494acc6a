/* Who holds which chunk: choosing, granting, taking back. Everything here runs under the channel's
 * lock and costs a walk of the chunk table (some thousand entries) at most. */
#include <string.h>
#include <sys/socket.h>

#include "pcc_channel_private.h"
#include "pcc_futex.h"

/* Chunks of a checkpoint that is not durable yet are taken for new data only when the client has
 * fewer than this many left to fill: late, but before it stalls. */
#define CHUNKS_AHEAD 4u

enum rank { /* smaller is taken first */
            RANK_FREE,
            RANK_ENDED, /* content of a checkpoint that is durable: only recovery from DRAM loses */
            RANK_SPARED, /* content that the caller asked to spare */
            RANK_FLIGHT, /* its checkpoint could not be moved to another slot after a write error */
            RANK_NEVER,
};

static struct pcc_channel_save *save_of(struct pcc_channel *channel, uint64_t tag)
{
    struct pcc_channel_save *save = &channel->saves[(tag & 0xff) % PCC_CHANNEL_SAVES];

    return tag != 0 && save->tag == tag && save->save != NULL ? save : NULL;
}

static enum rank rank_of(struct pcc_channel *channel, const struct pcc_channel_chunk *chunk,
                         uint64_t spare, bool gently)
{
    if (pcc_channel_retires(channel, chunk))
        return RANK_NEVER;
    if (chunk->state == PCC_CHUNK_FREE)
        return RANK_FREE;
    if (chunk->state != PCC_CHUNK_CACHED)
        return RANK_NEVER;
    if (save_of(channel, chunk->tag) != NULL)
        return gently ? RANK_NEVER : RANK_FLIGHT;
    return spare != 0 && chunk->sequence == spare ? RANK_SPARED : RANK_ENDED;
}

/* A save that is being moved to another slot still reads its chunks and refuses. */
static bool uncache(struct pcc_channel *channel, uint32_t index)
{
    struct pcc_channel_chunk *chunk = &channel->chunks[index];
    struct pcc_channel_save *save = save_of(channel, chunk->tag);

    if (chunk->state == PCC_CHUNK_CACHED && save != NULL) {
        if (!pcc_save_uncache(channel->bindings[save->binding].saver, chunk->tag, index))
            return false;
        save->immovable = true;
    }
    pcc_channel_chunk_free(channel, index);
    return true;
}

int64_t pcc_channel_pick(struct pcc_channel *channel, uint64_t spare, bool gently)
{
    uint64_t refused_stamp = 0; /* in-flight chunks up to this age have refused */

    for (;;) {
        enum rank best_rank = RANK_NEVER;
        uint32_t best = 0;
        for (uint32_t i = 0; i < channel->chunk_count; i++) {
            const struct pcc_channel_chunk *chunk = &channel->chunks[i];
            const enum rank rank = rank_of(channel, chunk, spare, gently);
            if (rank == RANK_NEVER || (rank == RANK_FLIGHT && chunk->stamp <= refused_stamp))
                continue;
            if (rank < best_rank ||
                (rank == best_rank && chunk->stamp < channel->chunks[best].stamp)) {
                best_rank = rank;
                best = i;
            }
            if (rank == RANK_FREE)
                break;
        }
        if (best_rank == RANK_NEVER)
            return -1;
        const uint64_t stamp = channel->chunks[best].stamp;
        if (uncache(channel, best))
            return best;
        refused_stamp = stamp;
    }
}

bool pcc_channel_uncache(struct pcc_channel *channel, uint32_t index)
{
    const struct pcc_channel_save *save = save_of(channel, channel->chunks[index].tag);

    /* While its save may still have to be written elsewhere, it may be the only copy. */
    return (save == NULL || save->immovable) && uncache(channel, index);
}

void pcc_channel_chunk_free(struct pcc_channel *channel, uint32_t index)
{
    struct pcc_channel_chunk *chunk = &channel->chunks[index];

    chunk->state = PCC_CHUNK_FREE;
    chunk->lent_cached = false;
    chunk->tag = 0;
    chunk->sequence = 0;
    chunk->stamp = 0;
}

void pcc_channel_chunks_forget(struct pcc_channel *channel, uint64_t tag, bool keep_cached)
{
    for (uint32_t i = 0; i < channel->chunk_count; i++) {
        struct pcc_channel_chunk *chunk = &channel->chunks[i];
        if (chunk->tag != tag)
            continue;
        if (chunk->state == PCC_CHUNK_FULL || (chunk->state == PCC_CHUNK_CACHED && !keep_cached))
            pcc_channel_chunk_free(channel, i);
    }
}

void pcc_channel_wake_client(struct pcc_channel *channel)
{
    if (channel->attached)
        pcc_bell_ring(&channel->view.page->client_bell);
}

int pcc_channel_push(struct pcc_channel *channel, const struct pcc_message *message)
{
    const int error = pcc_ring_push(&channel->view.to_client, message);

    if (error != 0) /* an honest client's ring has room for every chunk and the loads */
        pcc_channel_break(channel);
    return error;
}

static bool grant_send(struct pcc_channel *channel, uint32_t index)
{
    const struct pcc_segment *memory = &channel->segments[index].memory;
    struct pcc_grant grant = {
        .magic = PCC_GRANT_MAGIC,
        .kind = PCC_GRANT_ADD,
        .segment = channel->segments[index].number,
        .first_chunk = memory->first_chunk,
        .chunk_count = memory->chunk_count,
        .bytes = memory->length_bytes,
    };
    struct iovec part = {.iov_base = &grant, .iov_len = sizeof(grant)};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {.bytes = {0}};
    struct msghdr packet = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof(control.bytes),
    };
    struct cmsghdr *header = CMSG_FIRSTHDR(&packet);

    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &memory->fd, sizeof(int));
    /* A client that does not read its socket gets no memory; nobody waits for it. */
    return sendmsg(channel->socket_fd, &packet, MSG_DONTWAIT | MSG_NOSIGNAL) ==
           (ssize_t)sizeof(grant);
}

void pcc_channel_grant_segments(struct pcc_channel *channel)
{
    if (!channel->attached || channel->broken)
        return;
    bool sent = false;
    for (uint32_t i = 0; i < channel->segment_count; i++) {
        if (channel->segments[i].granted || channel->segments[i].told)
            continue;
        if (!grant_send(channel, i))
            break;
        channel->segments[i].granted = true;
        sent = true;
    }
    if (sent)
        pcc_channel_wake_client(channel); /* it maps them before it needs them */
}

void pcc_channel_hand_out(struct pcc_channel *channel)
{
    bool sent = false;

    if (!channel->attached || channel->broken || channel->granted_count >= channel->missing)
        return;
    pcc_channel_grant_segments(channel);
    while (channel->granted_count < channel->missing) {
        const int64_t index = pcc_channel_pick(channel, 0, channel->granted_count >= CHUNKS_AHEAD);
        if (index < 0)
            break;
        struct pcc_channel_chunk *chunk = &channel->chunks[index];
        if (!channel->segments[chunk->segment].granted)
            break; /* the socket is full: tried again with the next chunk that moves */
        const struct pcc_message message = {.kind = PCC_MSG_FREE, .chunk = (uint32_t)index};
        if (pcc_channel_push(channel, &message) != 0)
            break;
        chunk->state = PCC_CHUNK_GRANTED;
        channel->granted_count++;
        sent = true;
    }
    if (sent)
        pcc_channel_wake_client(channel);
}
