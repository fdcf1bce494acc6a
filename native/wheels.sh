#!/bin/sh
# Makes dist/: the source, and wheels for x86-64 and arm64 that need glibc 2.28 or newer. The compiler
# is zig's, a Python package, which has the headers and symbols of every glibc. The flags are setup.py's.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-$PWD/.venv/bin/python} # an absolute path
glibc=2.28
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
setup() { "$python" -W ignore setup.py -q "$@" >"$room/log" 2>&1 || { cat "$room/log" >&2; exit 1; }; }

rm -rf dist
for machine in x86_64 aarch64; do
    # The pyconfig.h of a Debian's Python includes one from the machine's own folder. With the stable
    # ABI the same file is right for both machines.
    "$python" - "$room/include/$machine-linux-gnu" <<'EOF'
import pathlib, shutil, sys, sysconfig
headers = pathlib.Path(sysconfig.get_path("include"))
own = headers.parent / str(sysconfig.get_config_var("MULTIARCH")) / headers.name
if own.is_dir():
    shutil.copytree(own, pathlib.Path(sys.argv[1]) / headers.name)
EOF
    # Nothing comes from this Python's own flags: they name its processor and its folders.
    CC="$python -m ziglang cc -target $machine-linux-gnu.$glibc"
    export CC CFLAGS="-DNDEBUG -Werror" CPPFLAGS="-I$room/include" LDSHARED="$CC -shared -Wl,-s"
    native/xxhash.sh
    setup build --build-base "$room/$machine" \
        bdist_wheel --bdist-dir "$room/wheel" --plat-name "manylinux_$(echo $glibc | tr . _)_$machine"
done
setup sdist --formats gztar
ls dist
