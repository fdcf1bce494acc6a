"""Children, debuggers and protections of a process."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest

from pccheck_process.looking import look

from .children import child, refusals, sentences
from .fakes import FakeProc

PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17
_FORKS = "import os, sys\nif os.fork() == 0: sys.stdin.read(); os._exit(0)"


def test_a_plain_process_has_nothing_against_it() -> None:
    with child() as pid:
        looked = look(pid, tree=False, root=True)
    assert looked.refusals == ()
    assert (looked.pid, looked.tree, looked.threads) == (pid, (pid,), 1)
    assert (looked.uid, looked.gid) == (os.getuid(), os.getgid())
    assert looked.start_time > 0
    flags = looked.shell_job, looked.file_locks, looked.tcp_established, looked.gpu
    assert flags == (False, False, False, False)
    assert (looked.ghost_bytes, looked.attached, looked.outer_terminals) == (0, (), ())


def test_children_need_the_tree() -> None:
    with child(_FORKS) as pid:
        without = look(pid, tree=False, root=True)
        whole = look(pid, tree=True, root=True)
    assert sentences(without) == [f"P has child processes: {without.tree[1]}"]
    assert without.refusals[0].fix == "add --tree"
    assert whole.refusals == ()
    assert (len(whole.tree), whole.threads) == (2, 2)


def test_many_children_are_counted(fake: FakeProc) -> None:
    for pid in range(71, 79):
        fake.process(pid, parent=70)
    fake.process(90, parent=78)
    assert sentences(fake.look()) == ["P has child processes: 71, 72, 73, 74, 75 and 4 more"]
    assert fake.look(tree=True).tree == (70, 71, 72, 73, 74, 75, 76, 77, 78, 90)


def test_an_ended_child_needs_no_tree(fake: FakeProc) -> None:
    fake.process(71, parent=70, state="Z")
    assert sentences(fake.look()) == []


def test_the_asking_process_never_freezes_itself(fake: FakeProc) -> None:
    me = os.getpid()
    said = f"process {me}, which asks for the snapshot, is in the tree of P"
    assert said in refusals(me)
    fake.process(me, parent=70)
    assert sentences(fake.look(tree=True)) == [said]


def test_a_traced_process_is_refused() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with child() as pid:
        assert libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0
        said = refusals(pid)
        tracer = threading.get_native_id()
        assert said == [f"P is traced by process {tracer}"]


def test_a_traced_thread_is_refused(fake: FakeProc) -> None:
    fake.put("70/task/75/status", "TracerPid:\t9\nUid:\t1000\t1000\t1000\t1000\n")
    assert sentences(fake.look()) == ["P is traced by process 9"]


def test_a_thread_of_another_user_is_refused(fake: FakeProc) -> None:
    fake.put("70/task/75/status", "TracerPid:\t0\nUid:\t0\t0\t0\t0\n")
    assert sentences(fake.look()) == ["a thread (75) of P has other uids than its process"]


def test_a_seccomp_filter_needs_root(fake: FakeProc) -> None:
    fake.uid = os.geteuid()
    fake.process(70, Seccomp="2")
    assert sentences(fake.look(root=True)) == []
    assert sentences(fake.look(root=False)) == [
        "P has a seccomp filter, which only root can snapshot"
    ]


def test_capabilities_need_root(fake: FakeProc) -> None:
    os.chown(fake.root / "70/maps", 1000, 1000)
    fake.process(70, CapPrm="0000000000000400")
    assert sentences(fake.look(root=True)) == []
    assert sentences(fake.look(root=False)) == ["P has capabilities, which only root can restore"]


def test_a_process_that_hides_its_memory_needs_root(fake: FakeProc) -> None:
    """The kernel gives the files of such a process to root."""
    os.chown(fake.root / "70/maps", 0, 0)
    assert "P made itself unreadable" in sentences(fake.look(root=False))[0]
    assert sentences(fake.look(root=True)) == []
    os.chown(fake.root / "70/maps", 1000, 1000)
    assert sentences(fake.look(root=False)) == []


def test_hidden_memory_is_seen_at_a_real_process() -> None:
    with child("import os; os.setresgid(42, 42, 42); os.setresuid(42, 42, 42)") as pid:
        said = sentences(look(pid, tree=False, root=False, uid=42))
    assert len(said) == 1
    assert said[0].startswith("P made itself unreadable (PR_SET_DUMPABLE")


def test_yama_allows_only_root(fake: FakeProc) -> None:
    os.chown(fake.root / "70/maps", 1000, 1000)
    fake.put("sys/kernel/yama/ptrace_scope", "1\n")
    assert "kernel.yama.ptrace_scope is 1" in sentences(fake.look(root=False))[0]
    assert sentences(fake.look(root=True)) == []


def test_another_root_directory_is_refused() -> None:
    with child("import os; os.chroot('/tmp')") as pid:
        assert refusals(pid) == ["P has the root directory /tmp (chroot)"]


def test_a_stopped_process_stays_stopped(fake: FakeProc) -> None:
    fake.process(70, state="T")
    looked = fake.look()
    assert looked.refusals == ()
    assert looked.notes == (
        "process 70 (python) is stopped by a signal, and a restored process is stopped, too",
    )


@pytest.mark.parametrize(("session", "terminal"), [(60, 0), (70, 34816)])
def test_a_job_of_a_shell_is_known(fake: FakeProc, session: int, terminal: int) -> None:
    fake.process(70, session=session, terminal=terminal)
    assert fake.look().shell_job


def test_memory_that_is_gone_means_that_the_process_ends(fake: FakeProc) -> None:
    fake.put("70/maps", "")
    assert sentences(fake.look()) == ["P is ending"]
