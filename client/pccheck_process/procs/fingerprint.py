"""What a restored process needs of its machine: programs and libraries, mounts, kernel and CPU.

A snapshot stores the fingerprint. A restore measures the same things again and compares, before a
process is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from pccheck_process.looking.memory import maps
from pccheck_process.procs.elf import build_id
from pccheck_process.procs.procfs import Proc, file_stat, shown

Document = dict[str, object]

SCHEMA = 1

_ESCAPED = re.compile(r"\\([0-7]{3})")
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_MOST_NAMED = 5


def fingerprint(pids: Iterable[int], proc: Path = Path("/proc")) -> Document:
    """Of these processes, as a document for JSON. A process that ended adds nothing."""
    files = Proc(proc)
    needed: set[str] = set()
    opened: set[str] = set()
    for pid in pids:
        needed.update(_mapped(files, pid))
        for fd in files.names(pid, "fd") or []:
            target = files.link(pid, "fd", fd) or ""
            if target.startswith("/") and not target.endswith(" (deleted)"):
                opened.add(target)
    return _measured(files, sorted(needed), sorted(needed | opened))


def measured_again(stored: Document, proc: Path = Path("/proc")) -> Document:
    """The fingerprint of this machine today, for the files and paths of a stored fingerprint."""
    paths = [path for path, _ in _rows(stored, "files", "path")]
    places = [path for one in _items(stored, "mounts") for path in _texts(one, "paths")]
    return _measured(Proc(proc), paths, places)


def differences(stored: Document, now: Document) -> list[str]:
    """One sentence for each difference that breaks a restore; `now` is of `measured_again`."""
    found = []
    machines = _text(stored, "machine"), _text(now, "machine")
    if machines[0] != machines[1]:
        found.append(f"the machine is {machines[1]}; the snapshot was taken on {machines[0]}")
    missing = sorted(set(_texts(stored, "cpu_flags")) - set(_texts(now, "cpu_flags")))
    if missing:
        named = ", ".join(map(shown, missing[:_MOST_NAMED]))
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        found.append(f"this CPU lacks features that the process may use: {named}{more}")
    today = dict(_rows(now, "files", "path"))
    for path, before in _rows(stored, "files", "path"):
        found += _file_difference(path, before, today.get(path))
    found += _mount_differences(stored, now)
    return found


def notes(stored: Document, now: Document) -> list[str]:
    """Differences that a restore survives, one sentence each."""
    names = {"kernel": "kernel release", "hostname": "host name"}
    return [
        f"the {name} is {shown(_text(now, key))}; the snapshot was taken with "
        f"{shown(_text(stored, key))}"
        for key, name in names.items()
        if _text(now, key) != _text(stored, key)
    ]


def _mapped(files: Proc, pid: int) -> Iterator[str]:
    """The program and each mapped file that the process only reads."""
    if (program := files.link(pid, "exe")) and not program.endswith(" (deleted)"):
        yield program
    for one in maps(files.text(pid, "maps")):
        is_written = one.shared and "w" in one.permissions
        if one.is_file and not is_written and not one.path.startswith("/dev/"):
            yield one.path


def _measured(files: Proc, needed: Iterable[str], placed: Iterable[str]) -> Document:
    return {
        "schema": SCHEMA,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "hostname": platform.node(),
        "cpu_flags": cpu_flags(files.text("cpuinfo")),
        "files": [described for path in needed if (described := _file(path))],
        "mounts": _mounts(files.text("self", "mountinfo"), placed),
    }


def cpu_flags(cpuinfo: str) -> list[str]:
    """Sorted, of the first CPU: "flags" on x86, "Features" on Arm."""
    for line in cpuinfo.split("\n"):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(set(value.split()))
    return []


# -- files -------------------------------------------------------------------------------------


def _file(path: str) -> Document | None:
    """None when there is no such regular file. Files without build id have a sample of pages."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError):
        file = file_stat(path)
        return _described(path, file, "", "") if file and stat.S_ISREG(file.st_mode) else None
    try:
        file = os.fstat(descriptor)
        if not stat.S_ISREG(file.st_mode):
            return None
        identity = sample = ""
        with contextlib.suppress(OSError):
            identity = build_id(lambda offset, size: os.pread(descriptor, size, offset))
            sample = "" if identity else _sample(descriptor, file.st_size)
        return _described(path, file, identity, sample)
    finally:
        os.close(descriptor)


def _described(path: str, file: os.stat_result, identity: str, sample: str) -> Document:
    return {
        "path": path,
        "size": file.st_size,
        "mtime_ns": file.st_mtime_ns,
        "build_id": identity,
        "sample": sample,
    }


def _sample(descriptor: int, size: int) -> str:
    """A digest of pages from first to last; a whole library would take seconds to read."""
    digest = hashlib.sha256()
    for number in range(_SAMPLES):
        offset = max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1)
        digest.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
    return digest.hexdigest()


def _file_difference(path: str, before: Document, now: Document | None) -> list[str]:
    """A new time alone is none: the same package was installed again."""
    name = shown(path)
    if now is None:
        return [f"{name} is missing, which the process has mapped"]
    if before.get("size") != now.get("size"):
        sizes = f"{before.get('size')} bytes, now {now.get('size')}"
        return [f"{name} changed since the snapshot: it had {sizes}"]
    kinds = [key for key in ("build_id", "sample") if before.get(key) and now.get(key)]
    if kinds:
        differs = any(before[key] != now[key] for key in kinds)
    else:
        differs = before.get("mtime_ns") != now.get("mtime_ns")
    return [f"{name} changed since the snapshot: it has other contents"] if differs else []


# -- mounts ------------------------------------------------------------------------------------


def _mounts(table: str, paths: Iterable[str]) -> list[Document]:
    """The mounts that hold these paths, each with its paths."""
    points = [point for line in table.split("\n") if (point := _mount(line))]
    held: dict[str, tuple[str, str, list[str]]] = {}
    for path in dict.fromkeys(paths):
        best = None
        for place, kind, source in points:  # a later mount covers an earlier one
            inside = path == place or path.startswith(place.rstrip("/") + "/")
            if inside and (best is None or len(place) >= len(best[0])):
                best = place, kind, source
        if best:
            held.setdefault(best[0], (best[1], best[2], []))[2].append(path)
    return [
        {"place": place, "fstype": kind, "source": source, "paths": inside}
        for place, (kind, source, inside) in sorted(held.items())
    ]


def _mount(line: str) -> tuple[str, str, str] | None:
    """Mount point, file system and source in a line of mountinfo."""
    fields = line.split(" ")
    tail = fields[fields.index("-") + 1 :] if "-" in fields else []
    if len(fields) < 7 or len(tail) < 2:
        return None
    place, source = (_ESCAPED.sub(lambda one: chr(int(one[1], 8)), text)
                     for text in (fields[4], tail[1]))  # fmt: skip
    return place, tail[0], source


def _mount_differences(stored: Document, now: Document) -> list[str]:
    today = {path: one for one in _items(now, "mounts") for path in _texts(one, "paths")}
    found: dict[str, str] = {}
    for before in _items(stored, "mounts"):
        for path in _texts(before, "paths"):
            if text := _moved(path, before, today.get(path, {})):
                found.setdefault((text.partition(": ")[2]), text)
    return list(found.values())


def _moved(path: str, before: Document, now: Document) -> str:
    """Block devices may get other names at the next boot; only servers are compared by name."""
    was, place = _text(before, "place"), _text(now, "place")
    sources = _text(before, "source"), _text(now, "source")
    kinds = _text(before, "fstype"), _text(now, "fstype")
    if was != place:
        change = f"it was on the mount {shown(was)}, now on {shown(place) or 'none'}"
    elif kinds[0] != kinds[1]:
        change = f"the mount {shown(was)} was {shown(kinds[0])}, now {shown(kinds[1])}"
    elif sources[0] != sources[1] and ":" in sources[0]:
        change = f"the mount {shown(was)} was of {shown(sources[0])}, now {shown(sources[1])}"
    else:
        return ""
    return f"{shown(path)} is on another file system: {change}"


# -- documents, which come from a disk ---------------------------------------------------------


def _items(document: Document, key: str) -> list[Document]:
    value = document.get(key)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _rows(document: Document, key: str, name: str) -> list[tuple[str, Document]]:
    return [(_text(one, name), one) for one in _items(document, key)]


def _text(document: Document, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""


def _texts(document: Document, key: str) -> list[str]:
    value = document.get(key)
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
