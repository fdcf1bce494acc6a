/* Segments: received over the attach socket, checked, mapped for the life of the link. */
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pcc_link_private.h"
#include "pcc_map.h"

/* Takes fd. False when the grant does not fit what we know. */
static bool segment_map(struct pcc_link *link, const struct pcc_grant *grant, int fd)
{
    const struct pcc_page_geometry *geometry = &link->view.geometry;
    struct stat status;
    const uint64_t bytes = (uint64_t)grant->chunk_count * geometry->chunk_bytes;
    bool fits = grant->kind == PCC_GRANT_ADD && grant->bytes == bytes && bytes > 0 &&
                grant->first_chunk < geometry->chunk_capacity &&
                grant->chunk_count <= geometry->chunk_capacity - grant->first_chunk;

    for (uint32_t i = 0; fits && i < grant->chunk_count; i++)
        fits = link->chunk_at[grant->first_chunk + i] == NULL;
    /* Sealed: no one can take the pages away from under us. */
    fits = fits && fstat(fd, &status) == 0 && status.st_size >= 0 &&
           (uint64_t)status.st_size >= bytes && (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
    void *mapped = NULL;
    fits = fits && pcc_map_shared(fd, bytes, &mapped) == 0;
    (void)close(fd);
    if (!fits)
        return false;
    (void)madvise(mapped, bytes, MADV_POPULATE_WRITE); /* the page table, before it is needed */
    link->segments[link->segment_count++] =
        (struct pcc_link_segment){.bytes = mapped, .length_bytes = bytes, .pinned_by = PCC_HOST};
    for (uint32_t i = 0; i < grant->chunk_count; i++)
        link->chunk_at[grant->first_chunk + i] =
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
static int grant_take(struct pcc_link *link)
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
    const ssize_t length = recvmsg(link->socket_fd, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

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
    return segment_map(link, &grant, fd) ? 1 : -1;
}

bool pcc_link_take_grants(struct pcc_link *link)
{
    struct pollfd socket = {.fd = link->socket_fd, .events = POLLIN | POLLRDHUP};
    int result = 1;

    if (poll(&socket, 1, 0) <= 0)
        return true;
    if ((socket.revents & (POLLHUP | POLLERR | POLLRDHUP | POLLNVAL)) != 0)
        return false;
    while (result > 0)
        result = grant_take(link);
    return result == 0;
}
