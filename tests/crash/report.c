#include "report.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char case_program[64];
static char case_text[512];
static uint64_t case_seed;

uint64_t report_seed(void)
{
    const char *text = getenv("PCC_SEED");
    return text && *text ? strtoull(text, NULL, 0) : 20250711;
}

static void write_replay(const char *what)
{
    char path[128];
    snprintf(path, sizeof path, "build/replay-%s-%llu.txt", case_program,
             (unsigned long long)case_seed);
    FILE *file = fopen(path, "w");
    if (!file)
        return;
    fprintf(file, "PCC_SEED=%llu build/%s %s\n%s\n", (unsigned long long)case_seed, case_program,
            case_text, what);
    fclose(file);
    fprintf(stderr, "%s: replay in tests/crash/%s\n", case_program, path);
}

/* A failed assertion is a violation like any other: it must leave its seed behind. */
static void on_abort(int number)
{
    (void)number;
    fprintf(stderr, "%s: aborted in case: %s (seed %llu)\n", case_program, case_text,
            (unsigned long long)case_seed);
    write_replay("assertion failed or hang");
    signal(SIGABRT, SIG_DFL);
    raise(SIGABRT);
}

void report_case(const char *program, uint64_t seed, const char *format, ...)
{
    if (!*case_program)
        signal(SIGABRT, on_abort);
    snprintf(case_program, sizeof case_program, "%s", program);
    case_seed = seed;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(case_text, sizeof case_text, format, arguments);
    va_end(arguments);
}

void report_violation(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s: VIOLATION: %s (seed %llu, case: %s)\n", case_program, text,
            (unsigned long long)case_seed, case_text);
    write_replay(text);
}

const char *report_option(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return i + 1 < argc ? argv[i + 1] : "";
    return NULL;
}

uint64_t report_number(int argc, char **argv, const char *name, uint64_t otherwise)
{
    const char *text = report_option(argc, argv, name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}
