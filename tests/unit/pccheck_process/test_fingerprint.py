"""What a restore compares before it makes a process."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheck_process.procs import fingerprint
from pccheck_process.procs.elf import build_id

from .looking.children import child

Document = dict[str, object]


def _taken(code: str = "") -> Document:
    with child(code) as pid:
        taken = json.loads(json.dumps(fingerprint.fingerprint([pid])))
    assert isinstance(taken, dict)
    return taken


def _file(document: Document, path: str) -> Document:
    rows = document["files"]
    assert isinstance(rows, list)
    (found,) = [row for row in rows if row["path"] == path]
    assert isinstance(found, dict)
    return found


def test_nothing_differs_on_the_same_machine() -> None:
    taken = _taken()
    now = fingerprint.measured_again(taken)
    assert now == taken
    assert fingerprint.differences(taken, now) == []
    assert fingerprint.notes(taken, now) == []


def test_program_libraries_and_mounts_are_named() -> None:
    taken = _taken("import zlib; null = open('/dev/null')")
    program = os.path.realpath(sys.executable)
    assert _file(taken, program)["size"] == Path(program).stat().st_size
    assert any("/libc.so" in str(row["path"]) for row in taken["files"])  # type: ignore[attr-defined]
    places = [row["place"] for row in taken["mounts"]]  # type: ignore[attr-defined]
    assert {"/", "/dev"} <= set(places)
    assert taken["cpu_flags"] == sorted(taken["cpu_flags"])  # type: ignore[call-overload]


@pytest.fixture
def mapped(tmp_path: Path) -> Path:
    """A file without build id, which a process has mapped."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(100_000))
    return path


def _of_mapped(path: Path) -> Document:
    return _taken(
        f"import mmap; f = open({str(path)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1)"
    )


def test_a_changed_file_is_named(mapped: Path) -> None:
    taken = _of_mapped(mapped)
    content = bytearray(mapped.read_bytes())
    content[-1] ^= 1
    mapped.write_bytes(content)
    (said,) = fingerprint.differences(taken, fingerprint.measured_again(taken))
    assert said == f"{mapped} changed since the snapshot: it has other contents"


def test_a_file_with_a_new_time_is_the_same_file(mapped: Path) -> None:
    taken = _of_mapped(mapped)
    os.utime(mapped, ns=(1, 1))
    assert fingerprint.differences(taken, fingerprint.measured_again(taken)) == []


def test_a_file_of_another_size_is_named(mapped: Path) -> None:
    taken = _of_mapped(mapped)
    with mapped.open("ab") as file:
        file.write(b"x")
    (said,) = fingerprint.differences(taken, fingerprint.measured_again(taken))
    assert said.endswith("it had 100000 bytes, now 100001")


def test_a_missing_file_is_named(mapped: Path) -> None:
    taken = _of_mapped(mapped)
    mapped.unlink()
    said = fingerprint.differences(taken, fingerprint.measured_again(taken))
    assert said == [f"{mapped} is missing, which the process has mapped"]


def test_a_changed_library_is_known_by_its_build_id(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    program = os.path.realpath(sys.executable)
    shutil.copyfile(program, library)
    stored: Document = {"files": [{**_file(_taken(), program), "path": str(library)}]}
    again = fingerprint.measured_again(stored)
    if identity := _file(again, str(library))["build_id"]:
        content = library.read_bytes()
        library.write_bytes(content.replace(bytes.fromhex(str(identity)), bytes(20)))
    else:
        library.write_bytes(library.read_bytes()[:-1] + b"?")
    (said,) = [
        one
        for one in fingerprint.differences(stored, fingerprint.measured_again(stored))
        if "lib.so" in one
    ]
    assert said == f"{library} changed since the snapshot: it has other contents"


_DATA = {"place": "/data", "fstype": "ext4", "source": "/dev/sda1", "paths": ["/data/x"]}


def _machine(**changed: object) -> Document:
    plain: Document = {
        "schema": 1,
        "machine": "x86_64",
        "kernel": "6.1.0",
        "hostname": "a",
        "cpu_flags": ["avx", "avx2", "sse"],
        "files": [],
        "mounts": [_DATA],
    }
    return {**plain, **changed}


def _mount(**changed: object) -> Document:
    return _machine(mounts=[{**_DATA, **changed}])


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (_machine(machine="aarch64"), ["the machine is aarch64; the snapshot was taken on x86_64"]),
        (_machine(cpu_flags=["sse", "x"]),
         ["this CPU lacks features that the process may use: avx, avx2"]),
        (_machine(kernel="6.2.0", hostname="b"), []),
        (_mount(source="/dev/sdb1"), []),
        (_mount(place="/"),
         ["/data/x is on another file system: it was on the mount /data, now on /"]),
        (_machine(mounts=[]),
         ["/data/x is on another file system: it was on the mount /data, now on none"]),
        (_mount(fstype="xfs"),
         ["/data/x is on another file system: the mount /data was ext4, now xfs"]),
    ],
)  # fmt: skip
def test_what_breaks_a_restore_is_one_sentence(now: Document, said: list[str]) -> None:
    assert fingerprint.differences(_machine(), now) == said


def test_another_server_under_the_same_mount_is_named() -> None:
    said = fingerprint.differences(_mount(source="a:/export"), _mount(source="b:/export"))
    assert said == [
        "/data/x is on another file system: the mount /data was of a:/export, now b:/export"
    ]


def test_a_mount_that_moved_is_named_once() -> None:
    paths = [f"/data/{number}" for number in range(9)]
    assert len(fingerprint.differences(_mount(paths=paths), _mount(place="/", paths=paths))) == 1


def test_another_kernel_is_only_a_note() -> None:
    assert fingerprint.notes(_machine(), _machine(kernel="6.2.0")) == [
        "the kernel release is 6.2.0; the snapshot was taken with 6.1.0"
    ]


@pytest.mark.parametrize("odd", [{}, {"files": 1, "mounts": [3, {"paths": [4]}], "cpu_flags": "x"}])
def test_an_odd_document_is_no_crash(odd: Document) -> None:
    now = fingerprint.measured_again(odd)
    assert isinstance(fingerprint.differences(odd, now), list)
    assert isinstance(fingerprint.differences(now, odd), list)


def test_a_process_that_ended_adds_nothing() -> None:
    assert fingerprint.fingerprint([1 << 30])["files"] == []


# -- build ids -----------------------------------------------------------------------------------


def _elf(*, order: str = "<", bits: int = 64, identity: bytes = bytes(range(20))) -> bytes:
    """A file of one note segment with two notes."""
    other = struct.pack(order + "III", 4, 4, 1) + b"GNU\0" + bytes(4)
    notes = other + struct.pack(order + "III", 4, len(identity), 3) + b"GNU\0" + identity
    head = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1 if order == "<" else 2]) + bytes(10)
    if bits == 64:
        head += struct.pack(order + "HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
        size = len(notes)
        head += struct.pack(order + "IIQQQQQQ", 4, 4, 120, 0, 0, size, size, 4)
    else:
        head += struct.pack(order + "HHIIIIIHHHHHH", 3, 3, 1, 0, 52, 0, 0, 52, 32, 1, 0, 0, 0)
        size = len(notes)
        head += struct.pack(order + "IIIIIIII", 4, 84, 0, 0, size, size, 4, 4)
    return head + notes


def _reader(content: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, size: content[offset : offset + size]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("bits", [32, 64])
def test_a_build_id_is_read(order: str, bits: int) -> None:
    content = _elf(order=order, bits=bits)
    assert build_id(_reader(content)) == bytes(range(20)).hex()


def test_no_damaged_program_crashes() -> None:
    content = _elf()
    for at in range(len(content)):
        build_id(_reader(content[:at]))
        for value in (0, 1, 0x7F, 0xFF):
            build_id(_reader(content[:at] + bytes([value]) + content[at + 1 :]))
    assert build_id(_reader(b"#!/bin/sh\n" * 20)) == ""
