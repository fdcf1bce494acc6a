/* Segments: received over the link, checked, mapped; unmapped when the daemon asks for
 * them back and the client has stopped using them. */
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pcc_map.h"
#include "client/pcc_client_private.h"

#define PIECE_BYTES (16u << 20) /* whose page table one thread of the crew makes at a time */

struct mapping {
    uint8_t *bytes;
    uint64_t length_bytes;
};

/* The pages exist, and a shared mapping that was read may be written. So they are only read here:
 * the kernel then maps 16 pages at a time, where a write would map one. */
static void piece_populate(void *context, uint64_t piece)
{
    const struct mapping *mapping = context;
    const uint64_t at = piece * PIECE_BYTES;

    (void)madvise(mapping->bytes + at, pcc_piece_bytes(mapping->length_bytes, at, PIECE_BYTES),
                  MADV_POPULATE_READ);
}

static void page_table_make(struct pcc_client *client, void *bytes, uint64_t length_bytes)
{
    struct mapping mapping = {bytes, length_bytes};

    pcc_crew_run(&client->crew, PCC_CREW_HELPERS, pcc_ceil_div(length_bytes, PIECE_BYTES),
                 piece_populate, &mapping);
}

/* Takes fd. False when the grant does not fit what we know. */
static bool segment_map(struct pcc_client *client, const struct pcc_grant *grant, int fd)
{
    const struct pcc_page_geometry *geometry = &client->view.geometry;
    struct stat status;
    const uint64_t bytes = (uint64_t)grant->chunk_count * geometry->chunk_bytes;
    bool fits = grant->kind == PCC_GRANT_ADD && grant->bytes == bytes && bytes > 0 &&
                grant->first_chunk < geometry->chunk_capacity &&
                grant->chunk_count <= geometry->chunk_capacity - grant->first_chunk;

    for (uint32_t i = 0; fits && i < grant->chunk_count; i++)
        fits = client->chunk_at[grant->first_chunk + i] == NULL;
    /* Sealed: the pages cannot be taken away from under us. */
    fits = fits && fstat(fd, &status) == 0 && status.st_size >= 0 &&
           (uint64_t)status.st_size >= bytes && (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
    void *mapped = NULL;
    const int error = fits ? pcc_map_shared(fd, bytes, &mapped) : 0;
    if (error != 0) /* before `dead`, which says that the link has ended */
        PCC_WRITE(&client->unmapped, error);
    fits = fits && error == 0;
    (void)close(fd);
    if (!fits)
        return false;
    page_table_make(client, mapped, bytes); /* before it is needed */
    client->segments[client->segment_count++] =
        (struct pcc_client_segment){.bytes = mapped,
                                    .length_bytes = bytes,
                                    .number = grant->segment,
                                    .first_chunk = grant->first_chunk,
                                    .chunk_count = grant->chunk_count};
    (void)atomic_fetch_or_explicit(&client->pins_now, PCC_READ(&client->pins_for),
                                   memory_order_relaxed);
    for (uint32_t i = 0; i < grant->chunk_count; i++)
        client->chunk_at[grant->first_chunk + i] =
            (uint8_t *)mapped + (size_t)i * geometry->chunk_bytes;
    return true;
}

/* The descriptor that came with a packet, or -1. More than one is more than we asked for. */
static int descriptor_of(struct msghdr *packet)
{
    int fd = -1;

    for (struct cmsghdr *header = CMSG_FIRSTHDR(packet); header != NULL;
         header = CMSG_NXTHDR(packet, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int received;
            memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
            if (fd < 0)
                fd = received;
            else
                (void)close(received);
        }
    }
    return fd;
}

/* 1 = a packet was taken, 0 = none waits, -1 = hang-up or nonsense. */
static int grant_take(struct pcc_client *client)
{
    struct pcc_grant grant;
    struct iovec part = {.iov_base = &grant, .iov_len = sizeof(grant)};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr packet = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof(control.bytes),
    };
    const ssize_t length = recvmsg(client->socket_fd, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    if (length < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    const int fd = descriptor_of(&packet);
    if (length == 0) {
        if (fd >= 0)
            (void)close(fd);
        return -1;
    }
    if (length != (ssize_t)sizeof(grant) || grant.magic != PCC_GRANT_MAGIC || fd < 0) {
        if (fd >= 0)
            (void)close(fd);
        return -1;
    }
    return segment_map(client, &grant, fd) ? 1 : -1;
}

bool pcc_client_take_grants(struct pcc_client *client)
{
    struct pollfd socket = {.fd = client->socket_fd, .events = POLLIN | POLLRDHUP};
    int result = 1;

    if (poll(&socket, 1, 0) <= 0)
        return true;
    if ((socket.revents & (POLLHUP | POLLERR | POLLRDHUP | POLLNVAL)) != 0)
        return false;
    while (result > 0)
        result = grant_take(client);
    return result == 0;
}

/* -- taken back -- */

static struct pcc_client_segment *segment_find(struct pcc_client *client, uint64_t number)
{
    for (uint32_t i = 0; i < client->segment_count; i++)
        if (client->segments[i].number == number)
            return &client->segments[i];
    return NULL;
}

bool pcc_client_take_retire(struct pcc_client *client, const struct pcc_message *message)
{
    struct pcc_client_segment *segment = segment_find(client, message->id);

    /* The segment was sent before the message, but the socket may have been read before both. */
    if (segment == NULL && pcc_client_take_grants(client))
        segment = segment_find(client, message->id);
    if (segment == NULL || segment->first_chunk != message->chunk || segment->retiring)
        return false;
    segment->retiring = true;
    client->retiring++;
    return true;
}

static bool is_of(const struct pcc_client_segment *segment, uint32_t chunk)
{
    return chunk - segment->first_chunk < segment->chunk_count; /* a smaller one wraps */
}

/* Chunks that are ours and not begun go back. False when the daemon broke the protocol. */
static bool unused_go(struct pcc_client *client, const struct pcc_client_segment *segment)
{
    uint32_t left = 0;

    for (uint32_t i = 0; i < client->free_count; i++) {
        const uint32_t chunk = client->free_chunks[i];
        const struct pcc_message message = {.kind = PCC_MSG_TAKEN, .chunk = chunk};
        if (!is_of(segment, chunk)) {
            client->free_chunks[left++] = chunk;
            continue;
        }
        client->held[chunk] = false;
        if (!pcc_client_tell(client, &message))
            return false;
    }
    client->free_count = left;
    return true;
}

/* False while a GPU fills a chunk or reads one, and until the filled ones are handed over; and
 * while a stream waits for the daemon, since the driver must not be called then
 * (pcc_client_push.c). */
static bool may_go(const struct pcc_client *client, const struct pcc_client_segment *segment)
{
    for (uint32_t i = segment->first_chunk; is_of(segment, i); i++)
        if (client->held[i] || client->flights[i].loading)
            return false;
    return !pcc_client_is_pinned(segment) || !PCC_READ(&client->armed);
}

static bool segment_go(struct pcc_client *client, struct pcc_client_segment *segment)
{
    const struct pcc_message message = {
        .kind = PCC_MSG_RETURNED, .chunk = segment->first_chunk, .id = segment->number};

    pcc_client_segment_unmap(client, segment, false);
    for (uint32_t i = 0; i < segment->chunk_count; i++)
        client->chunk_at[segment->first_chunk + i] = NULL;
    *segment = client->segments[--client->segment_count];
    client->retiring--;
    return pcc_client_tell(client, &message);
}

int pcc_client_retire(struct pcc_client *client)
{
    int result = 0;

    for (uint32_t i = 0; client->retiring > 0 && i < client->segment_count;) {
        struct pcc_client_segment *segment = &client->segments[i];
        if (!segment->retiring) {
            i++;
            continue;
        }
        if (!unused_go(client, segment))
            return -1;
        if (!may_go(client, segment)) {
            client->polling = true;
            i++;
            continue;
        }
        if (!segment_go(client, segment))
            return -1;
        result = 1;
    }
    return result;
}
