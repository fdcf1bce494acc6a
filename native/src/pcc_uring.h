/* io_uring by raw system calls: one submission and one completion ring, polled by nobody. The ABI
 * is declared here, because the kernel's header is younger than the systems wheels are built on.
 *
 * One thread at a time; nothing here locks. What is queued goes to the kernel with the next
 * pcc_uring_enter. The memory of a request belongs to the kernel until its completion was taken. */
#ifndef PCC_URING_H
#define PCC_URING_H

#include "pcc_base.h"

struct pcc_uring_request { /* struct io_uring_sqe, as far as reads and writes need it */
    uint8_t opcode;
    uint8_t flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t length;
    uint32_t rw_flags;
    uint64_t tag; /* comes back with the completion */
    uint8_t unused[24];
};
_Static_assert(sizeof(struct pcc_uring_request) == 64, "struct io_uring_sqe");

enum { PCC_URING_NOP = 0, PCC_URING_READ = 22, PCC_URING_WRITE = 23 };
/* A flag of a request (IOSQE_ASYNC): a thread of the kernel issues it, and may wait for that. */
#define PCC_URING_MAY_WAIT 16u

struct pcc_uring_done { /* struct io_uring_cqe */
    uint64_t tag;
    int32_t result; /* bytes moved or -errno */
    uint32_t flags;
};
_Static_assert(sizeof(struct pcc_uring_done) == 16, "struct io_uring_cqe");

struct pcc_uring {
    int fd;
    uint8_t *rings; /* both, in one mapping */
    uint64_t rings_bytes;
    struct pcc_uring_request *requests;
    uint64_t requests_bytes;
    _Atomic uint32_t *queue_head; /* the kernel's */
    _Atomic uint32_t *queue_tail;
    uint32_t *queue_index;
    uint32_t queue_entries;
    _Atomic uint32_t *done_head;
    _Atomic uint32_t *done_tail; /* the kernel's */
    const struct pcc_uring_done *done;
    uint32_t done_entries;
};

/* -PCC_E_UNSUPPORTED: a kernel before 5.6, or io_uring forbidden (containers, sysctl
 * kernel.io_uring_disabled, a locked memory limit that is too small for the rings). */
PCC_MUST_CHECK int pcc_uring_open(uint32_t entries, struct pcc_uring *out);
void pcc_uring_close(struct pcc_uring *ring); /* no request may be under way */

/* A zeroed request, queued behind the others; NULL when the ring is full. */
struct pcc_uring_request *pcc_uring_queue(struct pcc_uring *ring);
uint32_t pcc_uring_queued(const struct pcc_uring *ring); /* not yet the kernel's */
/* Takes back what is queued. */
void pcc_uring_unqueue(struct pcc_uring *ring);

/* Hands over up to `submit` queued requests, in their order, and then, if all of them were taken,
 * waits for `wait` completions. 0 or -errno. */
PCC_MUST_CHECK int pcc_uring_enter(struct pcc_uring *ring, uint32_t submit, uint32_t wait);
/* False when there is no completion now. */
bool pcc_uring_take(struct pcc_uring *ring, struct pcc_uring_done *out);

#endif
