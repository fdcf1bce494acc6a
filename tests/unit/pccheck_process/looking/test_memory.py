"""The size of an image, and mappings that CRIU cannot keep."""

from __future__ import annotations

import os

import pytest

from pccheck_process.looking import look
from pccheck_process.looking.memory import maps

from .children import child, sentences
from .fakes import MAPS, FakeProc

MIB = 1 << 20


def _growth(code: str, *, tree: bool = False) -> int:
    with child() as pid:
        before = look(pid, tree=False, root=True).image_bytes
    with child(code) as pid:
        return look(pid, tree=tree, root=True).image_bytes - before


@pytest.mark.parametrize(
    "code",
    [
        "heap = bytearray(b'x') * (32 << 20)",
        "import mmap; m = mmap.mmap(-1, 64 << 20); m[:32 << 20] = bytes(32 << 20)",
        "import os; os.posix_fallocate(os.memfd_create('x'), 0, 32 << 20)",
    ],
)
def test_touched_memory_counts_once(code: str) -> None:
    assert 31 * MIB <= _growth(code) <= 36 * MIB


def test_memory_that_a_tree_shares_counts_once() -> None:
    code = """
import mmap, os, sys
m = mmap.mmap(-1, 32 << 20); m[:] = b"x" * (32 << 20)
if os.fork() == 0: m[0] = 1; m[:] = b"y" * (32 << 20); sys.stdin.read(); os._exit(0)
"""
    assert 31 * MIB <= _growth(code, tree=True) <= 80 * MIB


def test_the_size_is_private_and_swapped_memory(fake: FakeProc) -> None:
    assert fake.look().image_bytes == 3 * MIB
    (fake.root / "70/smaps_rollup").unlink()
    fake.process(70, RssAnon="100 kB", VmSwap="28 kB")
    (fake.root / "70/smaps_rollup").unlink()
    assert fake.look().image_bytes == 128 << 10


def test_memory_of_pccheckd_is_not_in_the_image(fake: FakeProc) -> None:
    fake.process(70, maps=MAPS + "1000-9000 rw-s 0 00:01 7 /memfd:pccheck-segment (deleted)\n")
    fake.fd(70, 3, "/memfd:pccheck-segment (deleted)")
    assert fake.look().image_bytes == 3 * MIB


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("rw-s 0 00:01 7 /SYSV00000000 (deleted)", "P has System V shared memory mapped"),
        ("rw-s 0 00:01 7 anon_inode:[io_uring]", "P has memory of io_uring mapped"),
        ("rw-s 0 00:01 7 anon_inode:[perf_event]", "P has anon_inode:[perf_event] mapped"),
        ("rw-s 0 00:01 7 /dev/infiniband/uverbs0", "P has /dev/infiniband/uverbs0 mapped"),
    ],
)
def test_mappings_that_criu_cannot_keep_are_refused(
    fake: FakeProc, line: str, sentence: str
) -> None:
    fake.process(70, maps=f"{MAPS}1000-2000 {line}\n")
    said = sentences(fake.look())
    assert len(said) == 1
    assert said[0].startswith(sentence)


@pytest.mark.parametrize(
    "path", ["/dev/zero (deleted)", "/memfd:x (deleted)", "/[aio] (deleted)", "[anon_shmem:x]"]
)
def test_shared_mappings_are_kept(fake: FakeProc, path: str) -> None:
    fake.process(70, maps=f"{MAPS}1000-2000 rw-s 0 00:01 7 {path}\n", RssShmem="2 kB")
    looked = fake.look()
    assert looked.refusals == ()
    assert looked.ghost_bytes == 0
    assert looked.image_bytes == 3 * MIB + (0 if "aio" in path else 2048)


def test_a_removed_library_is_a_file_without_a_name(fake: FakeProc) -> None:
    fake.process(70, maps=f"{MAPS}1000-3000 r-xp 1000 00:01 7 /lib/x.so (deleted)\n")
    assert fake.look().ghost_bytes == 0x3000


def test_a_gpu_and_huge_pages_are_reported(fake: FakeProc) -> None:
    text = f"{MAPS}1000-2000 rw-s 0 00:01 7 /dev/nvidia0\n3000-4000 rw-p 0 0:1 8 /anon_hugepage\n"
    fake.process(70, maps=text)
    looked = fake.look()
    assert looked.gpu
    assert looked.refusals == ()
    assert "uses huge pages" in looked.notes[0]


def test_lines_that_cannot_be_read_are_left_out() -> None:
    table = "x\n1-2-3 r 0 0:0 0\n1-2 r 0 0:0 zz\n1-2 rw-p 0 00:00 0 /a b\\012c (deleted)\n"
    (one,) = maps(table)
    assert (one.path, one.removed, one.key) == ("/a b\nc", True, (os.makedev(0, 0), 0))
