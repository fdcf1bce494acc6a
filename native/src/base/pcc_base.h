/* The vocabulary of the C core: assertions, result codes, units and small arithmetic.
 *
 * Every function returns 0 or a negative code: -errno for what the kernel said, -PCC_E_* for what
 * we found ourselves. The two ranges do not overlap. */
#pragma once

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PCC_MUST_CHECK __attribute__((warn_unused_result))

/* Of atomics. Without a name of its own, the order is relaxed. */
#define PCC_READ(at) atomic_load_explicit(at, memory_order_relaxed)
#define PCC_READ_ACQUIRE(at) atomic_load_explicit(at, memory_order_acquire)
#define PCC_WRITE(at, value) atomic_store_explicit(at, value, memory_order_relaxed)
#define PCC_WRITE_RELEASE(at, value) atomic_store_explicit(at, value, memory_order_release)

/* Stays on in release builds: a broken invariant must stop the program before it reaches a disk.
 * For programmer errors only; I/O errors and hostile input are returned. */
#define PCC_ASSERT(condition)                                                                      \
    ((condition) ? (void)0 : pcc_assert_failed(#condition, __FILE__, __LINE__))
_Noreturn void pcc_assert_failed(const char *condition, const char *file, int line);

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the volume format is little-endian and this code stores structs as they lie in memory"
#endif

/* X(name, text): PCC_E_<name>, and its text for users. Its number is its place in this list. */
#define PCC_CODES(X)                                                                               \
    X(NOT_A_VOLUME, "no valid commit record: not a volume")                                        \
    X(DAMAGED, "a checksum does not fit: damaged") /* or a binding, or a digest */                 \
    X(OLDER_FORMAT, "its volume format is 1 or 2, which no release wrote; this version reads 3")   \
    X(NEWER_FORMAT, "its volume format is above 3, the latest that this version reads")            \
    X(UNKNOWN_FLAG, "a checkpoint has a flag that this version must understand, and does not")     \
    X(FOREIGN_BASE, "a part of it lies in another volume, which this version does not read")       \
    X(TRUNCATED, "the file is shorter than its records say")                                       \
    X(LOCKED, "another process has the volume open for writing")                                   \
    X(NO_SLOT, "no free slot") /* now */                                                           \
    X(NO_LANE, "as many checkpoints are in flight as the volume allows")                           \
    X(TOO_LARGE, "the checkpoint does not fit into a slot")                                        \
    X(STOPPED, "a commit record could not be written: nothing is published until the volume "      \
               "is opened again")                                                                  \
    X(ABORTED, "given up on request") /* the trainer died or abandoned it */                       \
    X(BAD_PEER, "shared memory holds what no honest peer writes")                                  \
    X(NO_MEMORY, "the DRAM budget is used up") /* M */                                             \
    X(SHUT_DOWN, "it is being closed")                                                             \
    X(UNSUPPORTED, "the file system or the kernel lacks what is needed")                           \
    X(NO_DRIVER, "there is no CUDA driver that can be used")                                       \
    X(DEVICE, "the CUDA driver refused or failed a call")                                          \
    X(DEVICE_LOST, "the GPU's context is gone for this process")                                   \
    X(BAD_HANDLE, "this GPU memory cannot be shared with the daemon")                              \
    X(UNREADABLE, "the disk could not read it") /* whether it is whole is not known */             \
    X(REMOVED, "the file was removed or moved away while it was open")                             \
    X(REPLACED, "another file was put in the place of the open one")                               \
    X(OTHER_MEMORY, "the trainer does not read there what the daemon reads")                       \
    X(OTHER_BYTES, "what was pulled is not what the trainer's stream had there")

#define PCC_E_FIRST 10000
enum {
    PCC_E_BEFORE = PCC_E_FIRST - 1,
#define PCC_E_MEMBER(name, text) PCC_E_##name,
    PCC_CODES(PCC_E_MEMBER)
#undef PCC_E_MEMBER
};

/* The code's name ("DAMAGED", "EIO"), for messages and tests. Never NULL. */
const char *pcc_error_name(int code);
/* The text of a PCC_E_* code. */
const char *pcc_error_text(int code);

/* Where a save fails. ROW(NAME, name): PCC_STAGE_<NAME>; the numbers stand in the session page. */
#define PCC_STAGES(ROW)                                                                            \
    ROW(NONE, "")                                                                                  \
    ROW(BEGIN, "begin") /* before anything was copied */                                           \
    ROW(COPY, "copy")                                                                              \
    ROW(BASE, "base") /* the earlier checkpoint that it refers to */                               \
    ROW(WRITE, "write")                                                                            \
    ROW(FLUSH, "flush")                                                                            \
    ROW(PUBLISH, "publish") /* the commit record */
enum pcc_stage {
#define PCC_STAGE_MEMBER(name, text) PCC_STAGE_##name,
    PCC_STAGES(PCC_STAGE_MEMBER)
#undef PCC_STAGE_MEMBER
        PCC_STAGE_COUNT
};
/* "" for NONE and for what is no stage. */
const char *pcc_stage_name(uint32_t stage);

#define PCC_IO_ALIGN 4096u       /* offset, length and address of every direct I/O */
#define PCC_BLOCK_BYTES_MIN 512u /* the smallest unit of checksums */

static inline uint64_t pcc_align_up(uint64_t value, uint64_t alignment)
{
    return (value + alignment - 1) / alignment * alignment;
}

static inline uint64_t pcc_ceil_div(uint64_t value, uint64_t divisor)
{
    return (value + divisor - 1) / divisor;
}

/* The length of the piece that begins at `at`, of a whole in pieces: the last one may be shorter.
 */
static inline uint64_t pcc_piece_bytes(uint64_t whole_bytes, uint64_t at, uint64_t piece_bytes)
{
    const uint64_t left = whole_bytes - at;

    return left < piece_bytes ? left : piece_bytes;
}

/* Whether [offset, offset + length) lies in a whole of so many bytes. */
static inline bool pcc_is_within(uint64_t offset, uint64_t length, uint64_t whole)
{
    return offset <= whole && length <= whole - offset;
}

uint64_t pcc_now_ns(void);  /* CLOCK_MONOTONIC */
uint64_t pcc_wall_ns(void); /* CLOCK_REALTIME, for display only */
