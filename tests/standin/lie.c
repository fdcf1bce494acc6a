/* The lies that PCCHECK_STANDIN_LIE names, one at a time: each breaks what the driver documents, or
 * what the card was seen to do, and tests/standin/behaviours.py must notice it. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"

static const char *const names[] = {
    [LIE_BATCH] = "batch",           /* a batch leaves out its second copy */
    [LIE_BUFFER] = "buffer",         /* a new allocation has the BUFFER_ID of a freed one */
    [LIE_DEAD] = "dead",             /* opened memory is lost when its owner dies */
    [LIE_DESCRIPTOR] = "descriptor", /* a descriptor is of other memory */
    [LIE_EVENT] = "event",           /* an event is done as soon as it is recorded */
    [LIE_EVENT_WAIT] = "event-wait", /* a stream does not wait for an event */
    [LIE_FREED] = "freed",           /* freed memory can be read and opened */
    [LIE_HOLE] = "hole",             /* a copy leaves out a page in its middle */
    [LIE_IMPORT] = "import",         /* a descriptor gives the memory of the one before */
    [LIE_LATE] = "late",             /* a copy's last bytes come after it has ended */
    [LIE_OTHER] = "other",           /* every second handle opens another allocation of its owner */
    [LIE_REOPENED] = "reopened",     /* a handle opens what was closed before */
    [LIE_RESTORED] = "restored",     /* restored memory has other bytes than before */
    [LIE_SHIFTED] = "shifted",       /* opened memory begins 4 KiB too far */
    [LIE_SHORT] = "short",           /* a copy leaves out its last 64 bytes */
    [LIE_STALE] = "stale",           /* copies of opened memory bring what the first one brought */
    [LIE_SYNC] = "sync",             /* a stream is said to be idle while it works */
    [LIE_UNLOCKED] = "unlocked",     /* a locked process continues */
    [LIE_WORD_EARLY] = "word-early", /* a stream writes a word before what is in front of it */
    [LIE_WORD_OVERTAKES] = "word-overtakes", /* a stream writes a word before its last copies */
    [LIE_WORD_WAIT] = "word-wait",           /* a stream does not wait for a word */
    [LIE_WORD_WAIT_ONE] = "word-wait-one",   /* the same, on GPU 0 only */
};

CUresult lie_read(void)
{
    const char *named = getenv("PCCHECK_STANDIN_LIE");
    standin.lie = LIE_NONE;
    for (unsigned i = 1; named && i < sizeof(names) / sizeof(names[0]); i++)
        if (!strcmp(names[i], named))
            standin.lie = i;
    return !named || !*named || standin.lie ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

bool lies(enum lie lie)
{
    return standin.lie == lie;
}

enum { LATE_NS = 500000000 };

struct tail {
    struct memory *to;
    uint8_t *target;
    size_t length;
    uint8_t bytes[];
};

static void *arrive(void *argument)
{
    struct tail *tail = argument;
    (void)nanosleep(&(struct timespec){.tv_nsec = LATE_NS}, NULL);
    (void)memcpy(tail->target, tail->bytes, tail->length);
    (void)pthread_mutex_lock(&standin.lock);
    tail->to->busy--;
    (void)pthread_cond_broadcast(&standin.moved);
    (void)pthread_mutex_unlock(&standin.lock);
    free(tail);
    return NULL;
}

void lie_late(const struct operation *operation, size_t from)
{
    const size_t length = operation->length - from;
    struct tail *tail = malloc(sizeof(*tail) + length);
    pthread_t thread;
    if (!tail)
        return;
    *tail = (struct tail){.to = operation->to, .target = operation->target + from};
    tail->length = length;
    (void)memcpy(tail->bytes, operation->source + from, length);
    (void)pthread_mutex_lock(&standin.lock);
    tail->to->busy++;
    (void)pthread_mutex_unlock(&standin.lock);
    if (!pthread_create(&thread, NULL, arrive, tail))
        (void)pthread_detach(thread);
}

void lie_overtake(const struct operation *first)
{
    const struct operation *at = first;
    while (at && (at->kind == DO_COPY || at->kind == DO_BATCH || at->kind == DO_FILL))
        at = at->next;
    if (!lies(LIE_WORD_OVERTAKES) || at == first || !at || at->kind != DO_WRITE ||
        __atomic_load_n((uint64_t *)(void *)at->target, __ATOMIC_SEQ_CST) == at->value)
        return;
    __atomic_store_n((uint64_t *)(void *)at->target, at->value, __ATOMIC_SEQ_CST);
    (void)pthread_mutex_unlock(&standin.lock);
    (void)nanosleep(&(struct timespec){.tv_nsec = LATE_NS}, NULL);
    (void)pthread_mutex_lock(&standin.lock);
}

int lie_import(int fd)
{
    static int before[DEVICES_MAX];
    struct file_header header;
    const bool is_memory = pread(fd, &header, sizeof(header), 0) == sizeof(header) &&
                           header.magic == FILE_MAGIC && header.device < DEVICES_MAX;
    if (!lies(LIE_IMPORT) || !is_memory)
        return dup(fd);
    const int mine = before[header.device];
    before[header.device] = dup(fd);
    return mine > 0 ? mine : dup(fd);
}

static struct file_header *closed[256];

void lie_close(struct memory *memory)
{
    for (size_t i = 0; i < sizeof(closed) / sizeof(closed[0]); i++)
        if (!closed[i]) {
            closed[i] = memory->file;
            return;
        }
}

struct file_header *lie_reopen(uint32_t pid, uint32_t device, uint64_t length)
{
    for (size_t i = sizeof(closed) / sizeof(closed[0]); lies(LIE_REOPENED) && i-- > 0;) {
        struct file_header *found = closed[i];
        if (found && found->pid == pid && found->device == device && found->length == length) {
            closed[i] = NULL;
            return found;
        }
    }
    return NULL;
}
