/* The smallest harness: named tests in one program, the first failed check ends it with 1. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("FAILED %s:%d: %s\n", __FILE__, __LINE__, #condition);                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_EQUAL(left, right)                                                                   \
    do {                                                                                           \
        const long long left_value = (long long)(left), right_value = (long long)(right);          \
        if (left_value != right_value) {                                                           \
            printf("FAILED %s:%d: %s = %lld, %s = %lld\n", __FILE__, __LINE__, #left, left_value,  \
                   #right, right_value);                                                           \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define RUN(test)                                                                                  \
    do {                                                                                           \
        printf("%s\n", #test);                                                                     \
        (void)fflush(stdout);                                                                      \
        test();                                                                                    \
    } while (0)

/* Mappings of this process whose file's name has `name` in it. */
static inline uint32_t check_mappings(const char *name)
{
    char line[512];
    uint32_t count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");

    CHECK(maps != NULL);
    while (fgets(line, sizeof(line), maps) != NULL)
        count += strstr(line, name) != NULL;
    CHECK(fclose(maps) == 0);
    return count;
}

/* Bytes that differ from seed to seed and from place to place. */
static inline void pattern(uint8_t *bytes, uint64_t count, uint64_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

    for (uint64_t i = 0; i < count; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        bytes[i] = (uint8_t)(x >> 56);
    }
}
