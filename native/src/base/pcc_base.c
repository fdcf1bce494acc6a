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

static const struct {
    const char *name, *text;
} codes[] = {
#define CODE_ROW(name, text) {#name, text},
    PCC_CODES(CODE_ROW)
#undef CODE_ROW
};

static long number_of(int code)
{
    return code < 0 ? -(long)code : code;
}

static bool is_ours(long number)
{
    return number >= PCC_E_FIRST && number - PCC_E_FIRST < (long)(sizeof codes / sizeof codes[0]);
}

const char *pcc_error_name(int code)
{
    const long number = number_of(code);
    const char *name = NULL;

    if (number == 0)
        return "OK";
    if (is_ours(number))
        name = codes[number - PCC_E_FIRST].name;
    else if (number < PCC_E_FIRST)
        name = strerrorname_np((int)number);
    return name ? name : "UNKNOWN";
}

const char *pcc_error_text(int code)
{
    const long number = number_of(code);

    return is_ours(number) ? codes[number - PCC_E_FIRST].text : "failed";
}

const char *pcc_stage_name(uint32_t stage)
{
    static const char *const names[PCC_STAGE_COUNT] = {
#define STAGE_ROW(name, text) text,
        PCC_STAGES(STAGE_ROW)
#undef STAGE_ROW
    };

    return stage < PCC_STAGE_COUNT ? names[stage] : "";
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
