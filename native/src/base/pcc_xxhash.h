/* The hash library, the system's, compiled into whoever includes it; its warnings are not ours. */
#ifndef PCC_XXHASH_H
#define PCC_XXHASH_H

#if !__has_include(<xxhash.h>)
#error                                                                                             \
    "xxhash.h is missing: install libxxhash-dev (Debian, Ubuntu), xxhash-devel (Fedora) or xxhash (Arch), or run native/xxhash.sh"
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-function"
#define XXH_INLINE_ALL
#include <xxhash.h>
#pragma GCC diagnostic pop

#if defined(XXH_VERSION_NUMBER) && XXH_VERSION_NUMBER < 800
#error "xxHash 0.8.0 or newer is needed: XXH3 was not final before"
#endif

#endif
