"""A thousand odd targets: /proc holds anything, and changes while it is looked at."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheck_process.looking import Looked
from pccheck_process.procs import fingerprint
from pccheck_process.procs.procfs import Proc, parse_stat
from pccheck_wire.errors import UsageError

from .fakes import MAPS, FakeProc

ROUNDS = int(os.environ.get("PCC_LOOKS", "1000"))
TREE = (70, 71, 72)
TARGETS = [
    "/dev/null", "/dev/kmsg", "/etc/passwd", "/gone (deleted)", "pipe:[1]", "pipe:[2]",
    "socket:[3]", "socket:[4]", "socket:[5]", "anon_inode:[eventfd]", "anon_inode:[pidfd]",
    "net:[1]", "", "x" * 300, "/memfd:x (deleted)", "/dev/nvidia0", "socket:[", "/proc/1/stat",
    "pipe:[99999999999999999999]", "anon_inode:", "/\udcff\n\x1b[0m", "anon_inode:[\n\u202e]",
]  # fmt: skip


def test_no_odd_target_crashes_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _target(FakeProc(tmp_path / "proc"))
    odd = Odd(fake)
    odd.watch(monkeypatch)
    ended = 0
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        odd.change(chance)
        try:
            looked = fake.look(tree=chance.random() < 0.8, root=chance.random() < 0.5)
        except UsageError as error:
            assert "process 70" in error.message
            ended += 1
        else:
            _check(fake, looked, odd)
        odd.steps_left = -1
        document = fingerprint.fingerprint(TREE, fake.root)
        assert isinstance(fingerprint.differences(document, {}), list)
        odd.undo()
    assert 10 < ended < ROUNDS // 2
    assert fake.look(tree=True).tree == TREE


def _check(fake: FakeProc, looked: Looked, odd: Odd) -> None:
    """What a look says can be printed, and the process is the one that was asked for."""
    for text in [*map(str, looked.refusals), *looked.notes]:
        assert text.isprintable()
    for refusal in looked.refusals:
        assert refusal.what
        assert refusal.fix
    now = parse_stat(Proc(fake.root).text(70, "stat"))
    if odd.steps_left > 0:  # nothing vanished after the look
        assert now is not None
        assert looked.start_time == now.start_time
        assert not now.ended or looked.refusals
    assert looked.image_bytes >= 0
    assert looked.ghost_bytes >= 0


def _target(fake: FakeProc) -> FakeProc:
    fake.uid = os.geteuid()
    for pid, parent in ((60, 1), *((pid, pid - 1) for pid in TREE)):
        fake.process(pid, parent=parent)
        for fd, target in enumerate(["/dev/null", "pipe:[1]", f"pipe:[{pid}]", "socket:[3]"]):
            fake.fd(pid, fd, target, info="lock:\t1: FLOCK\nPid:\t5\ntty-index:\t1\n")
    fake.fd(71, 9, "/etc/passwd", flags=0)
    fake.put("71/maps", MAPS + "1000-2000 rw-s 0 00:01 7 /dev/zero (deleted)\n")
    fake.put("72/maps", MAPS + "1000-2000 rw-s 0 00:01 7 /x.so (deleted)\n")
    fake.unix(70, (3, "/run/x"), (4, ""))
    fake.tcp(70, "0100007F:0001 0100007F:0002 01 0 5", "0100007F:0002 0100007F:0001 01 0 6")
    fake.put("self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n")
    fake.peers = {3: 4, 4: 3}
    return fake


class Odd:
    """Changes a fake /proc at random, also after so many reads, and puts everything back."""

    def __init__(self, fake: FakeProc) -> None:
        self.fake = fake
        self.steps_left = -1
        self._then: Callable[[], None] = lambda: None
        self._changed: set[Path] = set()
        self._was = {
            path: str(path.readlink()) if path.is_symlink() else path.read_bytes()
            for path in fake.root.rglob("*")
            if path.is_symlink() or path.is_file()
        }
        self._names = sorted(self._was)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counts what a look reads; at the last count something happens."""
        for name in ("read", "link", "names", "stat"):
            plain = getattr(Proc, name)

            def counted(proc: Proc, *names: object, plain: Callable[..., object] = plain) -> object:
                self.steps_left -= 1
                if self.steps_left == 0:
                    self._then()
                return plain(proc, *names)

            monkeypatch.setattr(Proc, name, counted)

    def change(self, chance: random.Random) -> None:
        for _ in range(chance.randrange(4)):
            self._spoil(chance)
        self.steps_left = chance.randrange(1, 300)
        kind = chance.randrange(4)
        pid = chance.choice((*TREE, 60))
        if kind == 0:
            self._then = lambda: self._remove(pid)
        elif kind == 1:
            self._then = lambda: self._replace(pid, chance)
        else:
            self._then = lambda: self._spoil(chance)

    def undo(self) -> None:
        for path in self._changed:
            if not path.is_symlink() and path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            was = self._was[path]
            if isinstance(was, str):
                path.symlink_to(was)
            else:
                path.write_bytes(was)
        self._changed.clear()

    def _remove(self, pid: int) -> None:
        """The process ends."""
        place = self.fake.root / str(pid)
        self._changed.update(path for path in self._was if place in path.parents)
        shutil.rmtree(place, ignore_errors=True)

    def _replace(self, pid: int, chance: random.Random) -> None:
        """The process becomes a zombie, or its pid is used again."""
        path = self.fake.root / str(pid) / "stat"
        if path.is_file():
            self._changed.add(path)
            old, new = chance.choice(((b") S ", b") Z "), (b" 500 ", b" 501 ")))
            path.write_bytes(path.read_bytes().replace(old, new))

    def _spoil(self, chance: random.Random) -> None:
        """A file has other contents, is a directory, or is gone."""
        path = chance.choice(self._names)
        if not path.is_symlink() and not path.is_file():
            return
        self._changed.add(path)
        was = self._was[path]
        path.unlink()
        kind = chance.randrange(6)
        if kind == 0:
            return
        if kind == 1:
            path.mkdir()
        elif isinstance(was, str):
            path.symlink_to(chance.choice(TARGETS) or "?")
        else:
            path.write_bytes(_spoilt(was, chance))


def _spoilt(was: bytes, chance: random.Random) -> bytes:
    kind = chance.randrange(5)
    at = chance.randrange(len(was) + 1)
    if kind == 0:
        return was[:at]
    if kind == 1:
        return chance.randbytes(chance.randrange(200))
    if kind == 2:
        return was[:at] + chance.randbytes(3) + was[at:]
    if kind == 3:
        words = was.split(b" ")
        words[chance.randrange(len(words))] = chance.choice(
            (
                b"-1",
                b"",
                b"9" * 23,
                b"0x",
                b"\xff\xfe",
                b"\xd9\xa1",
                b"Z",
                b"7" * 5000,
            )
        )
        return b" ".join(words)
    return was * 50
