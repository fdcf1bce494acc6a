/* The hash library, compiled into whoever includes it; its warnings are not ours. */
#ifndef PCC_XXHASH_H
#define PCC_XXHASH_H

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-function"
#define XXH_INLINE_ALL
#include "../vendor/xxhash.h"
#pragma GCC diagnostic pop

#endif
