/* The lies that PCCHECK_STANDIN_LIE names, one at a time: each breaks what the driver documents, or
 * what the card was seen to do, and tests/standin/behaviours.py must notice it. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "standin.h"

static const char *const names[] = {
    [LIE_BUFFER] = "buffer",         /* a new allocation has the BUFFER_ID of a freed one */
    [LIE_DEAD] = "dead",             /* opened memory is lost when its owner dies */
    [LIE_DESCRIPTOR] = "descriptor", /* a descriptor is of other memory */
    [LIE_EVENT] = "event",           /* an event is done as soon as it is recorded */
    [LIE_EVENT_WAIT] = "event-wait", /* a stream does not wait for an event */
    [LIE_FREED] = "freed",           /* freed memory can be read and opened */
    [LIE_LATE] = "late",             /* a copy's last bytes come after it has ended */
    [LIE_OTHER] = "other",           /* every second handle opens another allocation of its owner */
    [LIE_RESTORED] = "restored",     /* restored memory has other bytes than before */
    [LIE_SHIFTED] = "shifted",       /* opened memory begins 4 KiB too far */
    [LIE_SHORT] = "short",           /* a copy leaves out its last 64 bytes */
    [LIE_STALE] = "stale",           /* copies of opened memory bring what the first one brought */
    [LIE_SYNC] = "sync",             /* a stream is said to be idle while it works */
    [LIE_UNLOCKED] = "unlocked",     /* a locked process continues */
    [LIE_WORD_EARLY] = "word-early", /* a stream writes a word before what is in front of it */
    [LIE_WORD_WAIT] = "word-wait",   /* a stream does not wait for a word */
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
