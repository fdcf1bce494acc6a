/* The smallest harness: named tests in one program, the first failed check ends it with 1. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>

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

#endif
