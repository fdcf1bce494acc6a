/* The service manager's file descriptor store (sd_notify: FDSTORE=1): what is put there outlives
 * this process, however it ends, and comes back to the next one as LISTEN_FDS.
 *
 * Any thread. Putting blocks until the manager has taken it (BARRIER=1), because it forgets the
 * messages of a process that has died meanwhile. A manager that does not answer within seconds has
 * not stored it, and is not asked again. */
#pragma once

#include "base/pcc_base.h"

#define PCC_STORE_NAME_MAX 255u /* no colon, no control characters: FDNAME= */

struct pcc_store;

struct pcc_store_usage {
    uint32_t stored;
    uint32_t limit;
    uint64_t refused; /* times that something could not be put there */
};

/* `address` is $NOTIFY_SOCKET, `limit` $FDSTORE, `stored` what is in it already. */
PCC_MUST_CHECK int pcc_store_open(const char *address, uint32_t limit, uint32_t stored,
                                  struct pcc_store **out);
void pcc_store_close(struct pcc_store *store); /* accepts NULL; what is stored stays */
/* 0; -ENOSPC when the store is full, -ETIMEDOUT, -errno. */
PCC_MUST_CHECK int pcc_store_put(struct pcc_store *store, int fd, const char *name);
void pcc_store_remove(struct pcc_store *store, const char *name);
struct pcc_store_usage pcc_store_usage(struct pcc_store *store);

/* One packet, with a descriptor unless `fd` is -1. `flags`: as for sendmsg. 0 or -errno. */
PCC_MUST_CHECK int pcc_packet_send(int socket_fd, const void *bytes, size_t length, int fd,
                                   int flags);
