/* The hash library, the system's, compiled into whoever includes it; its warnings are not ours. */
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-function"
#define XXH_INLINE_ALL
#include <xxhash.h> /* install libxxhash-dev (Debian), xxhash-devel (Fedora) or xxhash (Arch) */
#pragma GCC diagnostic pop

#if defined(XXH_VERSION_NUMBER) && XXH_VERSION_NUMBER < 800
#error "xxHash 0.8.0 or newer is needed: XXH3 was not final before"
#endif
