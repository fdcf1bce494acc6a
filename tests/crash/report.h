/* Seeds, summary lines and replay files of the programs here. */
#pragma once

#include <stdint.h>

/* PCC_SEED, or the default. */
uint64_t report_seed(void);
/* The case under way: named when the program aborts. */
void report_case(const char *program, uint64_t seed, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Prints what was violated and the seed, and writes build/replay-<program>-<seed>.txt with the
 * command that repeats it. */
void report_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The value of `--name value` or `--name` ("": present), NULL when absent. */
const char *report_option(int argc, char **argv, const char *name);
uint64_t report_number(int argc, char **argv, const char *name, uint64_t otherwise);
