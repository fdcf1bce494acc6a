/* The service manager's end of a descriptor store: a thread that keeps what daemons store. */
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"
#include "pool/pcc_store.h"

#define LABEL "pccheck-0123456789abcdef"
#define STORED_MAX 64u
#define MESSAGE_FDS 16u

struct stored {
    char name[PCC_STORE_NAME_MAX + 1];
    int fd;
};

static struct {
    pthread_mutex_t lock;
    struct stored items[STORED_MAX];
    uint32_t count;
    int ears;
    char address[64];
    pthread_t thread;
} manager = {.lock = PTHREAD_MUTEX_INITIALIZER};

static inline void manager_drop(const char *name)
{
    for (uint32_t i = 0; i < manager.count; i++) {
        if (strcmp(manager.items[i].name, name) != 0)
            continue;
        CHECK(close(manager.items[i].fd) == 0);
        manager.items[i--] = manager.items[--manager.count];
    }
}

static inline void manager_handle(char *text, const int *fds, uint32_t fd_count)
{
    char *name = strstr(text, "FDNAME=");

    if (name != NULL) {
        name += strlen("FDNAME=");
        name[strcspn(name, "\n")] = '\0';
    }
    (void)pthread_mutex_lock(&manager.lock);
    if (strncmp(text, "FDSTORE=1", 9) == 0) {
        CHECK(name != NULL && fd_count == 1 && manager.count < STORED_MAX);
        struct stored *item = &manager.items[manager.count++];
        (void)snprintf(item->name, sizeof(item->name), "%s", name);
        item->fd = fds[0];
        fd_count = 0;
    } else if (strncmp(text, "FDSTOREREMOVE=1", 15) == 0) {
        CHECK(name != NULL);
        manager_drop(name);
    } else {
        CHECK(strcmp(text, "BARRIER=1") == 0 && fd_count == 1);
    }
    (void)pthread_mutex_unlock(&manager.lock);
    for (uint32_t i = 0; i < fd_count; i++)
        CHECK(close(fds[i]) == 0);
}

static inline void *manager_run(void *unused)
{
    (void)unused;
    for (;;) {
        char text[1024];
        struct iovec part = {.iov_base = text, .iov_len = sizeof(text) - 1};
        union {
            char bytes[CMSG_SPACE(MESSAGE_FDS * sizeof(int))];
            struct cmsghdr align;
        } control;
        struct msghdr message = {.msg_iov = &part,
                                 .msg_iovlen = 1,
                                 .msg_control = control.bytes,
                                 .msg_controllen = sizeof(control.bytes)};
        const ssize_t length = recvmsg(manager.ears, &message, MSG_CMSG_CLOEXEC);
        CHECK(length > 0);
        text[length] = '\0';
        if (strcmp(text, "END") == 0)
            return NULL;
        int fds[MESSAGE_FDS];
        uint32_t count = 0;
        const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        if (header != NULL) {
            count = (uint32_t)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(fds, CMSG_DATA(header), count * sizeof(int));
        }
        manager_handle(text, fds, count);
    }
}

static inline int manager_socket(bool listen)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    memcpy(address.sun_path, manager.address, strlen(manager.address));
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    const int error = listen ? bind(fd, (struct sockaddr *)&address, sizeof(address))
                             : connect(fd, (struct sockaddr *)&address, sizeof(address));
    CHECK(error == 0);
    return fd;
}

static inline void manager_start(void)
{
    char directory[] = "/tmp/pcc-restart-XXXXXX";

    CHECK(mkdtemp(directory) != NULL);
    (void)snprintf(manager.address, sizeof(manager.address), "%s/notify", directory);
    manager.ears = manager_socket(true);
    CHECK(pthread_create(&manager.thread, NULL, manager_run, NULL) == 0);
}

static inline void manager_end(void)
{
    const int voice = manager_socket(false);

    CHECK(send(voice, "END", 3, 0) == 3);
    CHECK(pthread_join(manager.thread, NULL) == 0);
    CHECK(close(voice) == 0 && close(manager.ears) == 0);
    CHECK(unlink(manager.address) == 0);
    *strrchr(manager.address, '/') = '\0';
    CHECK(rmdir(manager.address) == 0);
}

/* What is in the store after all messages so far: waits for a put and its barrier behind them. */
static inline uint32_t manager_count(void)
{
    struct pcc_store *store;
    const int any = open("/dev/null", O_RDONLY | O_CLOEXEC);

    CHECK(any >= 0 && pcc_store_open(manager.address, STORED_MAX, 0, &store) == 0);
    CHECK(pcc_store_put(store, any, "last") == 0);
    (void)pthread_mutex_lock(&manager.lock);
    manager_drop("last");
    const uint32_t count = manager.count;
    (void)pthread_mutex_unlock(&manager.lock);
    pcc_store_close(store);
    CHECK(close(any) == 0);
    return count;
}
