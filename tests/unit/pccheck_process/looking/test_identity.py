"""Processes that are never snapshotted, each refused by one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pccheck_process.looking import look
from pccheck_wire.errors import UsageError
from tests.support.as_user import fork_as

from .children import OTHER_UID, child, refusals, sentences, shell
from .fakes import FakeProc


def test_init_is_refused_by_one_sentence() -> None:
    assert refusals(1) == ["process 1 is the init of this system"]


def test_a_kernel_thread_is_refused(fake: FakeProc) -> None:
    fake.process(70, comm="kworker/0:1", flags=0x00208040, argv="")
    assert sentences(fake.look()) == ["P is a kernel thread"]


def test_a_zombie_is_refused() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert refusals(pid) == ["P has ended and waits for its parent to collect it"]
    os.waitpid(pid, 0)
    with pytest.raises(UsageError, match=f"there is no process {pid}"):
        look(pid, tree=False, root=True)


@pytest.mark.parametrize("pid", [0, -1, 1 << 40])
def test_a_pid_that_no_process_can_have_is_unknown(pid: int) -> None:
    with pytest.raises(UsageError, match="there is no process"):
        look(pid, tree=False, root=True)


def test_another_users_process_is_refused_by_one_sentence() -> None:
    with shell() as pid:
        looked = look(pid, tree=False, root=False, uid=1)
        assert sentences(looked) == [f"P belongs to uid {OTHER_UID}, and uid 1 asks"]
        assert sentences(look(pid, tree=False, root=False, uid=OTHER_UID)) == []
        assert sentences(look(pid, tree=False, root=True)) == []
        assert (looked.uid, looked.gid, looked.argv[:2]) == (
            OTHER_UID,
            OTHER_UID,
            ("/bin/sh", "-c"),
        )


def test_a_user_looks_at_a_process_of_their_own() -> None:
    def work(pid: int) -> str:
        looked = look(pid, tree=False, root=False)
        return f"{sentences(looked)} {looked.image_bytes > 0}"

    with shell() as own, child() as foreign:
        assert fork_as(OTHER_UID, lambda: work(own)) == "[] True"
        assert "belongs to uid 0, and uid 4242 asks" in fork_as(OTHER_UID, lambda: work(foreign))


def test_a_process_with_several_uids_is_refused() -> None:
    with child("import os; os.setresuid(0, 4242, 0)") as pid:
        said = refusals(pid)
    assert said == ["P runs with several uids, as setuid and setgid programs do: 0, 4242, 0, 4242"]
    with child("import os; os.setresgid(0, 4242, 0)") as pid:
        assert "several gids" in refusals(pid)[0]


def test_a_process_of_another_namespace_is_refused_by_one_sentence() -> None:
    unshare = "import ctypes; assert not ctypes.CDLL(None).unshare({:#x})"
    for flag, name in ((0x08000000, "ipc"), (0x04000000, "uts"), (0x20000000, "pid")):
        with child(unshare.format(flag)) as pid:
            assert refusals(pid) == [f"P is in another namespace ({name}), as in a container"]


def test_each_other_namespace_is_named_once(fake: FakeProc) -> None:
    fake.process(70, ns={"net": "net:[7]", "mnt": "mnt:[7]"})
    fake.link("self/ns/pid_for_children", "pid:[100]")
    fake.link("70/ns/pid_for_children", "pid:[7]")
    assert sentences(fake.look()) == [
        "P is in another namespace (net, mnt, pid), as in a container"
    ]


@pytest.mark.parametrize(
    ("comm", "argv"),
    [
        ("pccheckd", "/usr/bin/python3\0/usr/bin/pccheckd\0"),
        ("python3", "python3\0/opt/bin/pccheckd\0--storage\0/x\0"),
        ("python3", "python3\0-P\0-m\0pccheckd.front.program\0"),
    ],
)
def test_pccheckd_is_refused_by_one_sentence(fake: FakeProc, comm: str, argv: str) -> None:
    fake.process(70, comm=comm, argv=argv)
    assert sentences(fake.look()) == ["P is pccheckd, which stores the snapshots"]


def test_a_trainer_that_names_pccheckd_is_no_daemon(fake: FakeProc) -> None:
    fake.process(70, argv="python\0train.py\0--with\0pccheckd\0")
    assert sentences(fake.look()) == []


def test_a_tree_of_two_users_is_refused_even_for_root(fake: FakeProc) -> None:
    fake.process(71, parent=70, Uid="7\t7\t7\t7")
    assert sentences(fake.look(tree=True)) == [
        "process 71 (python) belongs to uid 7, another user than that of P"
    ]


def test_a_target_that_cannot_be_read_at_all_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no process 5"):
        look(5, tree=False, root=True, proc=tmp_path)
