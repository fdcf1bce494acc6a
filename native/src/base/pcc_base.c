#include "base/pcc_base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

_Noreturn void pcc_assert_failed(const char *condition, const char *file, int line)
{
    char text[512];
    const int length = snprintf(text, sizeof text, "pccheck: broken invariant: %s (%s:%d)\n",
                                condition, file, line);

    /* One system call, so that the line comes out whole next to other threads' output. */
    if (length > 0 && write(STDERR_FILENO, text, strnlen(text, sizeof text)) < 0)
        abort();
    abort();
}

static const char *const error_names[PCC_E_LAST - PCC_E_FIRST] = {
    [PCC_E_NOT_A_VOLUME - PCC_E_FIRST] = "NOT_A_VOLUME",
    [PCC_E_DAMAGED - PCC_E_FIRST] = "DAMAGED",
    [PCC_E_NEWER_FORMAT - PCC_E_FIRST] = "NEWER_FORMAT",
    [PCC_E_TRUNCATED - PCC_E_FIRST] = "TRUNCATED",
    [PCC_E_LOCKED - PCC_E_FIRST] = "LOCKED",
    [PCC_E_NO_SLOT - PCC_E_FIRST] = "NO_SLOT",
    [PCC_E_NO_LANE - PCC_E_FIRST] = "NO_LANE",
    [PCC_E_TOO_LARGE - PCC_E_FIRST] = "TOO_LARGE",
    [PCC_E_STOPPED - PCC_E_FIRST] = "STOPPED",
    [PCC_E_ABORTED - PCC_E_FIRST] = "ABORTED",
    [PCC_E_BAD_PEER - PCC_E_FIRST] = "BAD_PEER",
    [PCC_E_NO_MEMORY - PCC_E_FIRST] = "NO_MEMORY",
    [PCC_E_SHUT_DOWN - PCC_E_FIRST] = "SHUT_DOWN",
    [PCC_E_UNSUPPORTED - PCC_E_FIRST] = "UNSUPPORTED",
    [PCC_E_NO_DRIVER - PCC_E_FIRST] = "NO_DRIVER",
    [PCC_E_DEVICE - PCC_E_FIRST] = "DEVICE",
    [PCC_E_DEVICE_LOST - PCC_E_FIRST] = "DEVICE_LOST",
    [PCC_E_BAD_HANDLE - PCC_E_FIRST] = "BAD_HANDLE",
    [PCC_E_UNREADABLE - PCC_E_FIRST] = "UNREADABLE",
    [PCC_E_REMOVED - PCC_E_FIRST] = "REMOVED",
    [PCC_E_REPLACED - PCC_E_FIRST] = "REPLACED",
};

const char *pcc_error_name(int code)
{
    const long number = code < 0 ? -(long)code : code;
    const char *name = NULL;

    if (number == 0)
        return "OK";
    if (number >= PCC_E_FIRST && number < PCC_E_LAST)
        name = error_names[number - PCC_E_FIRST];
    else if (number < PCC_E_FIRST)
        name = strerrorname_np((int)number);
    return name ? name : "UNKNOWN";
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;

    PCC_ASSERT(clock_gettime(clock, &now) == 0);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t pcc_now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t pcc_wall_ns(void)
{
    return clock_ns(CLOCK_REALTIME);
}
