#!/bin/sh
# Sees to it that $CC finds xxhash.h, which hashes all data and is compiled in. Where it is not
# installed it is taken out of Debian's package, without root, to native/build (on every -I list).
set -eu
cd "$(dirname "$0")"
finds() { echo '#include <xxhash.h>' | ${CC:-cc} -Ibuild -E -x c - >/dev/null 2>&1; }
finds && exit 0
mkdir -p build
room=$(mktemp -d build/unpack-XXXXXX)
trap 'rm -rf "$room"' EXIT
if [ -e /usr/include/xxhash.h ]; then # a cross compiler does not look there
    cp /usr/include/xxhash.h "$room/"
else
    (cd "$room" && apt-get download -qq libxxhash-dev && dpkg -x ./*.deb . && mv usr/include/xxhash.h .) \
        >&2 2>/dev/null || true
fi
if [ -e "$room/xxhash.h" ]; then mv "$room/xxhash.h" build/xxhash.h; fi
finds && exit 0
echo "xxhash.h is missing: install libxxhash-dev (Debian, Ubuntu), xxhash-devel (Fedora) or xxhash (Arch)" >&2
exit 1
