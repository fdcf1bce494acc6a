/* The stand-in's insides. One lock guards everything; stream threads let go of it while they copy,
 * poll or call. Device memory lies in files of one directory, so that processes can share it, and
 * at addresses that the CPU can touch, so that tests can look at it. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "standin_control.h"

#define EXPORTED __attribute__((visibility("default")))

/* Signatures come from the table that the product calls through: no difference can hide. */
#define STANDIN_PROTOTYPE(name, symbol, parameters) EXPORTED CUresult symbol parameters;
PCC_CUDA_CALLS(STANDIN_PROTOTYPE)
PCC_CUDA_PIECE_CALLS(STANDIN_PROTOTYPE)
PCC_CUDA_SINGLE_CALLS(STANDIN_PROTOTYPE)

enum {
    DEVICES_MAX = 16,
    CODE_PEER_ACCESS_UNSUPPORTED = 217,
    CODE_CONTEXT_IS_DESTROYED = 709,
    CODE_OPERATING_SYSTEM = 304,
    CODE_ILLEGAL_STATE = 401,
    CODE_CAPTURE_INVALIDATED = 901,
    SCRAMBLED = 0xDB, /* what undefined bytes look like */
    FRESH = 0xCD,     /* device memory nobody has written to */
};

enum memory_kind {
    MEMORY_OWN,
    MEMORY_UNSHAREABLE,
    MEMORY_IMPORTED,
    MEMORY_HOST,
    MEMORY_RESERVED, /* addresses; memory is mapped there in pieces */
};

struct file_header { /* first page of a device memory file */
    uint64_t magic;
    uint64_t nonce;
    uint64_t length;
    uint64_t start_time; /* of the exporter: its pid may be another's by now */
    uint32_t pid;
    uint32_t device; /* the physical one */
    _Atomic uint32_t freed;
    uint32_t reserved;
};

struct memory {
    struct memory *next;
    enum memory_kind kind;
    CUdeviceptr address; /* as streams see it; of host memory another number than the CPU's */
    uint8_t *bytes;
    size_t length;
    struct CUctx_st *context;
    struct file_header *file; /* OWN and IMPORTED */
    struct piece *pieces;     /* RESERVED */
    uint64_t buffer_id;
    unsigned opens;      /* IMPORTED */
    uint64_t nonce;      /* IMPORTED: of the handle */
    uint8_t *first_read; /* IMPORTED: the bytes of the first copy, for LIE_STALE */
    unsigned flags;      /* HOST */
    unsigned busy;       /* enqueued operations that use it */
    bool going, shared;  /* being freed; somebody may have a handle */
};

struct record { /* one cuEventRecord, or the end of one operation that somebody waits for */
    unsigned references;
    bool done;
    CUresult error;
};

struct CUevent_st {
    struct CUevent_st *next;
    struct CUctx_st *context;
    struct record *record; /* the last one; NULL before the first */
};

enum operation_kind {
    DO_COPY,
    DO_BATCH,
    DO_FILL,
    DO_CALL,
    DO_RECORD,
    DO_WAIT_EVENT,
    DO_WAIT_VALUE,
    DO_WRITE
};

struct operation {
    struct operation *next;
    enum operation_kind kind;
    uint64_t order; /* of all operations in the process */
    struct memory *from, *to;
    const uint8_t *source;
    uint8_t *target; /* also the word of DO_WAIT_VALUE and DO_WRITE */
    size_t length;
    uint64_t value; /* also the pattern of DO_FILL */
    unsigned copy_kind, width;
    struct record *record; /* DO_RECORD, DO_WAIT_EVENT */
    struct record *ended;  /* NULL, or set at the end of the operation */
    void (*function)(void *);
    void *data;
    struct operation *parts; /* DO_BATCH: copies on the device, in any order */
    size_t part_count;
    CUresult code; /* the fault that it ends with */
};

struct CUstream_st {
    struct CUstream_st *next;
    struct CUctx_st *context;
    unsigned flags;
    bool null_stream, started, destroyed;
    struct operation *first, *last; /* `first` is the one that runs */
    uint64_t queued;
    CUresult error; /* of an operation; until somebody was told */
    int capturing;  /* 0, else 1 + mode */
    bool capture_broken;
    pthread_t capturer;
};

struct CUctx_st {
    CUdevice device;
    unsigned retained;
    _Atomic int lost; /* a code: every call fails with it */
    struct CUstream_st *null_stream;
    pthread_t locked_by; /* while `locked`: this thread waits in a call, and lets no other in */
    bool locked;
    const struct CUstream_st *engine[2]; /* whose copy runs: to the host, to the device */
};

enum dead_mode { DEAD_SCRAMBLE, DEAD_ERROR, DEAD_KEEP };

enum lie { /* lie.c says what is false */
           LIE_NONE,
           LIE_BATCH,
           LIE_BUFFER,
           LIE_DEAD,
           LIE_DESCRIPTOR,
           LIE_EVENT,
           LIE_EVENT_WAIT,
           LIE_FREED,
           LIE_HOLE,
           LIE_IMPORT,
           LIE_LATE,
           LIE_OTHER,
           LIE_REOPENED,
           LIE_RESTORED,
           LIE_SHIFTED,
           LIE_SHORT,
           LIE_STALE,
           LIE_SYNC,
           LIE_UNLOCKED,
           LIE_WORD_EARLY,
           LIE_WORD_OVERTAKES,
           LIE_WORD_WAIT,
           LIE_WORD_WAIT_ONE,
};

struct standin {
    pthread_mutex_t lock;
    pthread_cond_t moved; /* broadcast after every change that somebody may wait for */
    bool initialised;
    int device_count, contexts_held;
    int machine_devices; /* visible or not */
    int physical[DEVICES_MAX];
    const char *directory;
    enum dead_mode dead;
    enum lie lie;
    bool same_uid, free_waits;
    uint64_t device_bytes, context_bytes, next_order, next_buffer, start_time;
    struct CUctx_st contexts[DEVICES_MAX];
    struct memory *memories;
    struct CUstream_st *streams;
    struct CUevent_st *events;
    struct standin_control *control;
};
extern struct standin standin;

bool standin_read_machine(void); /* what needs no cuInit: directory, devices, their memory */
void device_uuid(int physical, CUuuid *uuid);

/* Entry of every call: with success the lock is held and standin_leave gives it back. */
enum { NEED_CONTEXT = 1, UNSAFE_IN_CAPTURE = 2 };
CUresult standin_enter(unsigned needs);
CUresult standin_leave(CUresult result);
struct CUctx_st *standin_current(void);             /* of this thread; NULL when none */
void context_await(const struct CUctx_st *context); /* until no other thread has it locked */
void context_lock(struct CUctx_st *context);
void context_unlock(struct CUctx_st *context);
void standin_in_callback(bool inside);

/* control.c */
CUresult control_open(void);
void count(uint64_t *word, int64_t change);
uint64_t peek(const uint64_t *word);
bool control_take(uint64_t *fail_count); /* whether this call shall fail */
CUresult control_copy_fault(unsigned kind, bool *async);
bool code_is_sticky(CUresult code);

/* memory.c */
struct memory *memory_find(CUdeviceptr address, size_t length); /* that holds all of it */
struct memory *memory_of_host(const void *bytes, size_t length, bool *partly);
struct memory *memory_add(enum memory_kind kind, uint8_t *bytes, size_t length);
void memory_remove(struct memory *memory); /* waits until nothing uses it */
void memory_drop_context(struct CUctx_st *context);
uint64_t process_start_time(int pid, bool *alive);
bool memory_source_alive(const struct memory *memory);

/* stream.c, worker.c */
CUresult stream_resolve(CUstream handle, struct CUstream_st **out);
CUresult stream_find(CUstream handle, struct CUstream_st **out); /* one that is not capturing */
CUresult stream_enqueue(struct CUstream_st *stream, struct operation operation, bool wait);
void stream_drain(struct CUctx_st *context); /* all that is enqueued by now */
void stream_drop_context(struct CUctx_st *context);
CUresult stream_null(struct CUctx_st *context);
void operation_uses(struct operation *operation, int change); /* memory: it is not freed then */
void *worker_main(void *stream);
void record_release(struct record *record);

/* lie.c */
CUresult lie_read(void); /* CUDA_ERROR_UNKNOWN: there is no lie of that name */
bool lies(enum lie lie);
void lie_late(const struct operation *operation, size_t from); /* what is behind `from`: later */
void lie_overtake(const struct operation *first); /* a word behind copies is written before them */
int lie_import(int fd);                           /* the descriptor that came before this one */
void lie_close(struct memory *memory);            /* what it maps is kept, for lie_reopen */
struct file_header *lie_reopen(uint32_t pid, uint32_t device, uint64_t length); /* or NULL */

/* vmm.c */
bool vmm_covers(const struct memory *memory, CUdeviceptr address, size_t length, int access);
void vmm_describe(const struct memory *memory, CUdeviceptr address, CUdeviceptr *base,
                  size_t *length, uint64_t *buffer_id);

/* checkpoint.c */
void checkpoint_begin(void); /* with the process's first context */
void checkpoint_end(void);
void checkpoint_note(int queued, int shares);
void checkpoint_await(void); /* until this process is not locked */
bool checkpoint_has_released(int pid);
void checkpoint_device(uint32_t device, bool used); /* a context of this process */
uint32_t checkpoint_devices(int pid);               /* bits: physical ones that it holds now */

/* capture.c */
bool capture_forbids(void); /* the calling thread, by any capture; it is spoilt then */
CUresult capture_check(struct CUstream_st *stream);
