"""Open files and devices of real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pccheck_process.looking import look
from pccheck_process.looking.files import GHOST_LIMIT_BYTES
from pccheck_process.procs.procfs import Proc

from .children import OTHER_UID, child, refusals, sentences, shell
from .fakes import FakeProc

MIB = 1 << 20


def test_written_files_are_listed_with_size_and_position(tmp_path: Path) -> None:
    code = f"""
import os
os.chdir({str(tmp_path)!r})
log = open("log", "a"); log.write("x" * 10); log.flush()
state = open("state", "w+"); state.write("y" * 30); state.flush(); state.seek(5)
open("data", "w").write("z" * 7)
data = open("data")
"""
    with child(code) as pid:
        looked = look(pid, tree=False, root=True)
    assert looked.refusals == ()
    here = [one for one in looked.written if one.path.startswith(str(tmp_path))]
    rows = {Path(one.path).name: one for one in here}
    assert sorted(rows) == ["log", "state"]
    log, state = rows["log"], rows["state"]
    assert (log.pid, log.size_bytes, log.append, log.size_checked) == (pid, 10, True, False)
    assert (state.size_bytes, state.position, state.append) == (30, 5, False)
    assert state.size_checked
    assert state.writable
    assert state.inode == (tmp_path / "state").stat().st_ino
    assert [Path(one.path).name for one in looked.read if str(tmp_path) in one.path] == ["data"]


def test_a_mapped_file_is_written_too(tmp_path: Path) -> None:
    code = f"""
import mmap
with open({str(tmp_path / "array")!r}, "wb+") as file:
    file.truncate(8192)
    array = mmap.mmap(file.fileno(), 8192)
import os
for fd in range(3, 9):
    if os.path.exists(f"/proc/self/fd/{{fd}}"): os.close(fd)  # mmap keeps a copy
"""
    with child(code) as pid:
        looked = look(pid, tree=False, root=True)
    found = [one for one in looked.written if one.path == str(tmp_path / "array")]
    assert [(one.fd, one.size_bytes, one.writable) for one in found] == [(-1, 8192, True)]


def test_a_removed_file_goes_into_the_image(tmp_path: Path) -> None:
    code = f"""
import os
file = open({str(tmp_path / "x")!r}, "wb+"); file.write(b"x" * (3 << 20)); file.flush()
os.unlink(file.name)
"""
    with child() as pid:
        before = look(pid, tree=False, root=True)
    with child(code) as pid:
        looked = look(pid, tree=False, root=True)
    assert looked.refusals == ()
    assert 3 * MIB <= looked.ghost_bytes <= 3 * MIB + 4096
    assert looked.image_bytes - before.image_bytes >= 3 * MIB - MIB // 2
    assert not [one for one in looked.written if "/x" in one.path]


def test_a_large_removed_file_is_refused(tmp_path: Path) -> None:
    size = GHOST_LIMIT_BYTES + 1
    code = f"""
import os
file = open({str(tmp_path / "x")!r}, "wb+"); file.truncate({size}); os.unlink(file.name)
"""
    with child(code) as pid:
        said = refusals(pid)
    assert said == [
        f"P uses {tmp_path}/x, which was removed and has {size} bytes, more than the limit of "
        f"{GHOST_LIMIT_BYTES}"
    ]


def test_a_removed_file_with_another_link_is_refused(tmp_path: Path) -> None:
    code = f"""
import os
os.chdir({str(tmp_path)!r})
file = open("x", "w"); os.link("x", "other"); os.unlink("x")
"""
    with child(code) as pid:
        said = refusals(pid)
    assert said == [
        f"P uses {tmp_path}/x, which was removed or replaced while the file has another hard link"
    ]


def test_a_file_that_is_called_deleted_is_not(tmp_path: Path) -> None:
    with child(f"file = open({str(tmp_path / 'x (deleted)')!r}, 'w')") as pid:
        looked = look(pid, tree=False, root=True)
    assert (looked.refusals, looked.ghost_bytes) == ((), 0)
    assert f"{tmp_path}/x (deleted)" in [one.path for one in looked.written]


def test_a_path_that_leads_elsewhere_is_refused(
    fake: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a mount on top of the path."""
    for name in ("open", "now"):
        (tmp_path / name).write_text("x")
    fake.fd(70, 3, str(tmp_path / "now"))
    assert fake.look().refusals == ()
    for path in (tmp_path / "now", tmp_path / "none"):
        fake.fd(70, 3, str(path))
        monkeypatch.setattr(Proc, "stat", lambda *_: (tmp_path / "open").stat())
        assert sentences(fake.look()) == [
            f"P has {path} open, and that path does not lead to the open file now"
        ]


def test_a_file_that_the_user_may_not_open_again_needs_root(tmp_path: Path) -> None:
    """As the log of a service, which its manager opened as root."""
    log = tmp_path / "log"
    log.touch(0o600)
    with log.open("a") as file, shell(stderr=file) as pid:
        said = sentences(look(pid, tree=False, root=False, uid=OTHER_UID))
        assert said == [f"P has {log} open, which its user may not open again"]
        assert refusals(pid) == []
        os.chown(log, OTHER_UID, OTHER_UID)
        assert sentences(look(pid, tree=False, root=False, uid=OTHER_UID)) == []
        os.chown(log, 0, OTHER_UID)
        log.chmod(0o620)
        assert sentences(look(pid, tree=False, root=False, uid=OTHER_UID)) == []


def test_inotify_needs_root(fake: FakeProc) -> None:
    os.chown(fake.root / "70/maps", 1000, 1000)
    fake.fd(70, 3, "anon_inode:inotify")
    assert fake.look().refusals == ()
    assert sentences(fake.look(root=False)) == [
        "P watches files with inotify (descriptor 3), which only root can snapshot"
    ]


def test_locks_are_seen(tmp_path: Path) -> None:
    code = f"import fcntl; f = open({str(tmp_path / 'x')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    with child(code) as pid:
        looked = look(pid, tree=False, root=True)
    assert looked.file_locks
    assert looked.refusals == ()


def test_ordinary_descriptors_are_kept() -> None:
    code = """
import ctypes, mmap, os, select, signal, socket
libc = ctypes.CDLL(None)
kept = [select.epoll(), os.memfd_create("x"), libc.eventfd(0, 0), libc.timerfd_create(1, 0)]
kept += [libc.inotify_init(), os.pidfd_open(os.getpid()), os.pipe(), socket.socketpair()]
kept += [libc.signalfd(-1, bytes(128), 0), os.openpty(), os.open("/proc/self/ns/net", 0)]
kept += [open("/dev/" + one) for one in ("null", "zero", "full", "random", "urandom")]
kept += [socket.socket(), socket.socket(type=socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)]
kept += [socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), mmap.mmap(-1, 4096)]
kept[-2].bind((0, 0)); kept[-5].bind(("127.0.0.1", 0)); kept[-5].listen()
"""
    with child(code) as pid:
        looked = look(pid, tree=False, root=True)
    assert looked.refusals == ()
    assert looked.outer_terminals == ()


_SYSCALLS = {
    "[io_uring]": "libc.syscall(425, 4, ctypes.create_string_buffer(256))",
    "[userfaultfd]": "libc.syscall(323, 0x80000 | 1)",
    "[fanotify]": "libc.fanotify_init(0, 0)",
    "[perf_event]": "libc.syscall(298, b'\\1\\0\\0\\0\\x80' + bytes(123), 0, -1, -1, 0)",
}


@pytest.mark.parametrize("name", _SYSCALLS)
def test_what_criu_cannot_keep_is_refused(name: str, fake: FakeProc) -> None:
    """A kernel may have no such call, or none for us: then the stand-in remains."""
    fake.fd(70, 3, f"anon_inode:{name}")
    said = [sentences(fake.look())]
    with child(f"import ctypes; libc = ctypes.CDLL(None); {_SYSCALLS[name]}") as pid:
        if any(name in str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()):
            said.append(refusals(pid))
    if name == "[io_uring]":
        wanted = "P uses io_uring (descriptor 3)"
    else:
        wanted = f"P has {name[1:-1]} open as descriptor 3, which CRIU cannot snapshot"
    assert all(one == [wanted] for one in said)


@pytest.mark.parametrize(
    "target", ["anon_inode:bpf-map", "net:[9]", "zombie", "/secretmem (deleted)"]
)
def test_unknown_descriptors_are_refused(fake: FakeProc, target: str) -> None:
    fake.fd(70, 3, target)
    said = sentences(fake.look())
    assert len(said) == 1
    assert said[0].endswith("open as descriptor 3, which CRIU cannot snapshot")


def test_a_pidfd_of_another_process_is_refused() -> None:
    with child("import os; fd = os.pidfd_open(os.getppid())") as pid:
        said = refusals(pid)
    assert said == [f"P has a pidfd of process {os.getpid()} open, which is outside the tree"]


def test_a_device_is_refused() -> None:
    with child("file = open('/dev/kmsg')") as pid:
        assert refusals(pid) == ["P has the device /dev/kmsg open as descriptor 3"]


def test_a_gpu_is_reported_and_left_to_the_caller(fake: FakeProc) -> None:
    fake.fd(70, 3, "/dev/nvidiactl")
    assert fake.look().gpu
    assert fake.look().refusals == ()


def test_shared_memory_files_are_not_in_the_image() -> None:
    path = f"/dev/shm/pccheck-look-{os.getpid()}"
    with child(f"import os; f = open({path!r}, 'wb+'); f.truncate(4096)") as pid:
        looked = look(pid, tree=False, root=True)
    Path(path).unlink()
    assert looked.refusals == ()
    assert any(path in one and "not in the image" in one for one in looked.notes)


def test_the_same_thing_in_two_processes_is_refused_for_each(fake: FakeProc) -> None:
    fake.process(71, parent=70)
    for pid in (70, 71):
        fake.fd(pid, 3, "anon_inode:[io_uring]")
    assert len(fake.look(tree=True).refusals) == 2
