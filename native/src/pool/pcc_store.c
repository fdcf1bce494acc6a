#include "pool/pcc_store.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/pcc_thread.h"

#define ANSWER_LIMIT_MS 5000

struct pcc_store {
    pthread_mutex_t lock; /* the counts only: messages may pass each other */
    int socket_fd;
    bool silent; /* the manager did not answer once: it is not waited for again */
    struct pcc_store_usage usage;
};

static int address_make(const char *text, struct sockaddr_un *out, socklen_t *length_out)
{
    const size_t length = strlen(text);

    if (length < 2 || length >= sizeof(out->sun_path) || (text[0] != '/' && text[0] != '@'))
        return -EINVAL;
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path, text, length);
    if (text[0] == '@') /* the abstract namespace */
        out->sun_path[0] = '\0';
    *length_out = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    return 0;
}

int pcc_store_open(const char *address, uint32_t limit, uint32_t stored, struct pcc_store **out)
{
    struct sockaddr_un peer;
    socklen_t length;
    const struct timeval patience = {.tv_sec = ANSWER_LIMIT_MS / 1000};

    int error = address_make(address, &peer, &length);
    if (error != 0)
        return error;
    struct pcc_store *store = calloc(1, sizeof(*store));
    if (store == NULL)
        return -ENOMEM;
    (void)pthread_mutex_init(&store->lock, NULL);
    store->socket_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (store->socket_fd < 0 ||
        connect(store->socket_fd, (const struct sockaddr *)&peer, length) != 0 ||
        setsockopt(store->socket_fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) != 0) {
        error = -errno;
        pcc_store_close(store);
        return error;
    }
    store->usage = (struct pcc_store_usage){.stored = stored, .limit = limit};
    *out = store;
    return 0;
}

void pcc_store_close(struct pcc_store *store)
{
    if (store == NULL)
        return;
    (void)close(store->socket_fd);
    (void)pthread_mutex_destroy(&store->lock);
    free(store);
}

int pcc_packet_send(int socket_fd, const void *bytes, size_t length, int fd, int flags)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = length};
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {.bytes = {0}};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};

    if (fd >= 0) {
        packet.msg_control = control.bytes;
        packet.msg_controllen = sizeof(control.bytes);
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof(int));
    }
    return sendmsg(socket_fd, &packet, flags | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

static int message_send(const struct pcc_store *store, const char *text, int fd)
{
    return pcc_packet_send(store->socket_fd, text, strlen(text), fd, 0);
}

/* The manager closes its end of the pipe once it has dealt with all that came before. */
static int barrier(const struct pcc_store *store)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) != 0)
        return -errno;
    int error = message_send(store, "BARRIER=1", ends[1]);
    (void)close(ends[1]);
    if (error == 0) {
        struct pollfd hang_up = {.fd = ends[0]};
        int ready;
        do
            ready = poll(&hang_up, 1, ANSWER_LIMIT_MS);
        while (ready < 0 && errno == EINTR);
        error = ready == 1 ? 0 : -ETIMEDOUT;
    }
    (void)close(ends[0]);
    return error;
}

static bool is_name(const char *name)
{
    const size_t length = strlen(name);

    if (length == 0 || length > PCC_STORE_NAME_MAX)
        return false;
    for (size_t i = 0; i < length; i++)
        if (name[i] <= ' ' || name[i] > '~' || name[i] == ':')
            return false;
    return true;
}

int pcc_store_put(struct pcc_store *store, int fd, const char *name)
{
    char text[PCC_STORE_NAME_MAX + 64];
    int error = 0;

    if (!is_name(name))
        return -EINVAL;
    (void)pthread_mutex_lock(&store->lock);
    if (store->usage.stored < store->usage.limit && !store->silent)
        store->usage.stored++;
    else
        error = -ENOSPC;
    (void)pthread_mutex_unlock(&store->lock);
    if (error == 0) {
        /* FDPOLL=0: a memfd never hangs up, and the manager need not watch it. */
        (void)snprintf(text, sizeof(text), "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
        error = message_send(store, text, fd);
        if (error == 0)
            error = barrier(store);
        if (error != 0) /* in doubt it is taken back: a later one may come under this name */
            pcc_store_remove(store, name);
    }
    if (error != 0) {
        PCC_LOCKED(&store->lock);
        store->usage.refused++;
        store->silent = store->silent || error == -ETIMEDOUT || error == -EAGAIN;
    }
    return error;
}

void pcc_store_remove(struct pcc_store *store, const char *name)
{
    char text[PCC_STORE_NAME_MAX + 64];

    (void)snprintf(text, sizeof(text), "FDSTOREREMOVE=1\nFDNAME=%s", name);
    /* When it fails the next daemon gets a descriptor that nothing refers to, and closes it. */
    (void)!message_send(store, text, -1);
    PCC_LOCKED(&store->lock);
    if (store->usage.stored > 0)
        store->usage.stored--;
}

struct pcc_store_usage pcc_store_usage(struct pcc_store *store)
{
    PCC_LOCKED(&store->lock);
    return store->usage;
}
