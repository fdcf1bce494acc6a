/* The vocabulary of the C core: assertions, result codes, units and small arithmetic.
 *
 * Every function returns 0 or a negative code: -errno for what the kernel said, -PCC_E_* for what
 * we found ourselves. The two ranges do not overlap. */
#ifndef PCC_BASE_H
#define PCC_BASE_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PCC_MUST_CHECK __attribute__((warn_unused_result))

/* Stays on in release builds: a broken invariant must stop the program before it reaches a disk.
 * For programmer errors only; I/O errors and hostile input are returned. */
#define PCC_ASSERT(condition)                                                                      \
    ((condition) ? (void)0 : pcc_assert_failed(#condition, __FILE__, __LINE__))
_Noreturn void pcc_assert_failed(const char *condition, const char *file, int line);

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the volume format is little-endian and this code stores structs as they lie in memory"
#endif

enum {
    PCC_E_FIRST = 10000,
    PCC_E_NOT_A_VOLUME = 10000, /* no valid commit record, and nothing that looks like one */
    PCC_E_DAMAGED,              /* a checksum, a binding or a digest does not fit */
    PCC_E_NEWER_FORMAT,         /* written by a later format version */
    PCC_E_TRUNCATED,            /* the file is shorter than its records say */
    PCC_E_LOCKED,               /* another process has the volume open for writing */
    PCC_E_NO_SLOT,              /* no free slot now */
    PCC_E_NO_LANE,              /* as many checkpoints in flight as the volume allows */
    PCC_E_TOO_LARGE,            /* the checkpoint does not fit into a slot */
    PCC_E_STOPPED,              /* a commit record could not be written: nothing is published
                                   until the volume is reopened and read from the media */
    PCC_E_ABORTED,              /* given up on request: the trainer died or abandoned it */
    PCC_E_BAD_PEER,             /* shared memory holds what no honest client writes */
    PCC_E_NO_MEMORY,            /* the DRAM budget M is used up */
    PCC_E_SHUT_DOWN,            /* the object is being closed */
    PCC_E_UNSUPPORTED,          /* the file system or kernel lacks what we need */
    PCC_E_NO_DRIVER,            /* no CUDA driver, or none that can be used */
    PCC_E_DEVICE,               /* the CUDA driver refused or failed a call */
    PCC_E_DEVICE_LOST,          /* the GPU's context is gone for this process */
    PCC_E_BAD_HANDLE,           /* device memory that cannot be shared with the daemon */
    PCC_E_UNREADABLE,           /* data could not be read: whether it is whole is not known */
    PCC_E_REMOVED,              /* an open file is no longer at its path */
    PCC_E_REPLACED,             /* another file is at the path of an open one */
    PCC_E_LAST,
};

/* The code's name ("DAMAGED", "EIO"), for messages and tests. Never NULL. */
const char *pcc_error_name(int code);

#define PCC_IO_ALIGN 4096u       /* offset, length and address of every direct I/O */
#define PCC_BLOCK_BYTES_MIN 512u /* the smallest unit of checksums */
#define PCC_TENSOR_ALIGN 64u     /* extents start here within the payload */

static inline uint64_t pcc_align_up(uint64_t value, uint64_t alignment)
{
    return (value + alignment - 1) / alignment * alignment;
}

static inline uint64_t pcc_ceil_div(uint64_t value, uint64_t divisor)
{
    return (value + divisor - 1) / divisor;
}

uint64_t pcc_now_ns(void);  /* CLOCK_MONOTONIC */
uint64_t pcc_wall_ns(void); /* CLOCK_REALTIME, for display only */

#endif
