"""`pccheck.Reader` reads while a trainer saves, through restarts of the daemon, and from a
directory. A lease keeps an open checkpoint, but never delays a new one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck import (
    CheckpointFailedError,
    DaemonUnreachableError,
    DamagedError,
    NoCheckpointError,
    OpenCheckpoint,
    PccheckError,
    Reader,
    RecycledError,
    TensorInfo,
    UsageError,
    Wanted,
)
from pccheck_wire.attach import Attachment
from pccheck_wire.messages import CheckpointState as State
from pccheck_wire.messages import Opened, Role
from tests.support.as_user import fork_as, import_all
from tests.support.daemon import Daemon
from tests.support.handpage import Page, block_of
from tests.support.rank import Rank as Session
from tests.support.rank import payload_of
from tests.support.trainer import Trainer, expected
from tests.support.volumes import WIDE, Rank, damage, make, numbers
from tests.support.waiting import until

Start = Callable[..., Any]
COUNTS = [300_000, 7, 90_001]
KEEP = 2  # of every daemon here
SIZE = 4096


def save(trainer: Trainer, *, metadata: object = None, count: int = 1) -> int:
    """Makes steps, and waits until each is durable; returns the last step."""
    for _ in range(count):
        step = trainer.step()
        handle = trainer.checkpoint(metadata=metadata)
        assert trainer.wait_durable(handle) in ("durable", "global"), trainer.reason(handle)
    return step


def is_step(opened: OpenCheckpoint, step: int) -> bool:
    """Whether every byte of every tensor is that of the step."""
    return opened.step == step and all(
        torch.equal(opened.read(f"model.parts.{index}").detach(), expected(step, index, count))
        for index, count in enumerate(COUNTS)
    )


def steps(reader: Reader) -> list[int]:
    return [one.step for one in reader.steps()]


def check_reads(reader: Reader, step: int) -> None:
    """Whole values, blocks into memory of any strides, descriptions without a payload."""
    newest = reader.newest()
    assert newest is not None and newest.complete and newest.step == step
    assert newest.ranks[0].nbytes >= 4 * sum(COUNTS) and not newest.ranks[0].damaged
    one = reader.open()
    assert (one.step, one.sequence, one.ranks) == (step, newest.sequence, (0,))
    assert one.metadata == {"loss": 0.5}
    info = one.leaves()["model.parts.0"]
    assert info == TensorInfo((300_000,), torch.float32, (300_000,), (0,))
    assert one.describe()["model"]["parts.0"] == info
    assert is_step(one, step)
    state = one.read()
    assert isinstance(state["model"]["parts.2"], torch.Tensor)
    assert one.read("optimizer.param_groups.0.params") == [0, 1, 2]

    whole = expected(step, 0, COUNTS[0])
    row, column = torch.zeros(5), torch.zeros(10, 2)[:, 1]
    one.read_many(
        [
            Wanted("model.parts.0", row, offsets=[299_995]),
            Wanted("model.parts.0", column, 0, [17]),
            Wanted("model.parts.1", torch.zeros(0), offsets=[7]),
        ]
    )
    assert torch.equal(row, whole[-5:]) and torch.equal(column, whole[17:27])
    check_errors(reader, one, step)


def check_errors(reader: Reader, one: OpenCheckpoint, step: int) -> None:
    wrong: list[tuple[type[PccheckError], str, Callable[[], object]]] = [
        (UsageError, "did you mean model.parts.0", lambda: one.read("model.part.0")),
        (UsageError, "no rank 3", lambda: one.read(rank=3)),
        (UsageError, "is no tensor", lambda: one.read_into("optimizer", torch.zeros(1))),
        (UsageError, "dtype", lambda: one.read_into("model.parts.1", torch.zeros(7).int())),
        (UsageError, "shape", lambda: one.read_into("model.parts.1", torch.zeros(6))),
        (UsageError, "shape", lambda: one.read_into("model.parts.1", torch.zeros(7), offsets=[1])),
        (UsageError, "shape", lambda: one.read_into("model.parts.1", torch.zeros(1), offsets=[-1])),
        (UsageError, "share", lambda: one.read_into("model.parts.1", torch.zeros(1).expand(7))),
        (UsageError, "CPU", lambda: one.read_into("model.parts.1", torch.zeros(7, device="meta"))),
        (NoCheckpointError, f"it has steps {step}", lambda: reader.open(step + 50)),
    ]
    for kind, said, act in wrong:
        with pytest.raises(kind) as caught:
            act()
        assert said in str(caught.value)


def test_any_part_is_read_beside_the_trainer_and_from_the_directory(
    daemon: Daemon, start_trainer: Start
) -> None:
    trainer = start_trainer(daemon, COUNTS)
    step = save(trainer, metadata={"loss": 0.5}, count=3)
    with Reader("job", socket=daemon.socket) as reader:
        check_reads(reader, step)
    assert is_step_of_trainer(trainer, save(trainer, metadata={"loss": 0.5}))
    step += 1
    with Reader("job1", socket=daemon.socket) as reader:
        assert reader.steps() == [] and reader.newest() is None
        with pytest.raises(NoCheckpointError, match="'job1' has no checkpoint") as caught:
            reader.open()
        assert "did you mean job" in str(caught.value)
    trainer.kill()
    daemon.kill()
    with pytest.raises(DaemonUnreachableError, match="storage=DIR"):
        Reader("job", socket=daemon.socket)
    with Reader("job", storage=daemon.storage) as reader:
        check_reads(reader, step)


def is_step_of_trainer(trainer: Trainer, step: int) -> bool:
    return trainer.check(step) == ""


def test_a_lease_holds_an_old_step_until_the_reader_closes_or_is_killed(
    start_daemon: Start, start_trainer: Start, stack: ExitStack
) -> None:
    daemon = start_daemon("--slots", "4")
    trainer = start_trainer(daemon, COUNTS)
    old = save(trainer)
    with Reader("job", socket=daemon.socket) as reader:
        one = reader.open()
        last = save(trainer, count=6)
        assert steps(reader) == [last, last - 1, old] and is_step(one, old)
        again = reader.open(old)
        one.close()
        last = save(trainer, count=2)
        assert steps(reader) == [last, last - 1, old] and is_step(again, old)
    last = until_only_kept(daemon, trainer)

    holder = stack.enter_context(subprocess.Popen(
        [sys.executable, "-c", "import sys, pccheck\n"
         f"one = pccheck.Reader('job', socket={str(daemon.socket)!r}).open()\n"
         "print(one.step, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ))  # fmt: skip
    assert holder.stdout is not None and int(holder.stdout.readline()) == last
    newest = save(trainer, count=4)
    with Reader("job", socket=daemon.socket) as reader:
        assert steps(reader) == [newest, newest - 1, last]
    holder.kill()
    until_only_kept(daemon, trainer)


def until_only_kept(daemon: Daemon, trainer: Trainer) -> int:
    """Saves until the daemon has noticed the end of a reader and no lease is left. Returns the last
    step."""
    with Reader("job", socket=daemon.socket) as reader:
        for _ in range(50):
            last = save(trainer)
            if steps(reader) == [last, last - 1]:
                return last
    raise AssertionError(f"steps {steps(reader)} are still held")


@pytest.mark.parametrize("slots", [3, 4])
def test_leases_never_stop_checkpoints(
    start_daemon: Start, start_trainer: Start, slots: int
) -> None:
    """When a checkpoint has no slot, the oldest leases end. The reader gets an error, never the
    bytes of another checkpoint."""
    daemon = start_daemon("--slots", str(slots))
    trainer = start_trainer(daemon, COUNTS)
    with Reader("job", socket=daemon.socket) as reader:
        opened = []
        for _ in range(4):
            save(trainer)
            opened.append(reader.open())
        last = save(trainer, count=4)
        room = slots - KEEP - 1
        assert steps(reader)[:2] == [last, last - 1]
        ended, held = opened[: len(opened) - room], opened[len(opened) - room :]
        for one in ended:
            with pytest.raises(RecycledError, match="was replaced"):
                one.read("model.parts.0")
        assert all(is_step(one, one.step) for one in held)
        assert is_step(reader.open(), last)
    assert set(trainer.states()) <= {"durable", "superseded", "global"}


@pytest.mark.parametrize("world", [1, 2])
def test_a_lease_ends_rather_than_that_a_checkpoint_is_skipped(
    start_daemon: Start, stack: ExitStack, world: int
) -> None:
    """Also while another checkpoint is in flight that will free a slot."""
    daemon = start_daemon("--slots", "4")
    ranks = [
        stack.enter_context(Session(daemon.socket, rank=rank, world_size=world))
        for rank in range(world)
    ]

    def all_save(step: int) -> None:
        asked = [(one, one.begin(step, payload_of(step, SIZE))) for one in ranks]
        for one, snapshot in asked:
            one.wait(snapshot)
        for one, snapshot in asked if world > 1 else ():
            until(lambda: one.describe(snapshot).state is State.GLOBAL)  # noqa: B023

    for rank in ranks:
        rank.register(SIZE)
    all_save(1)
    reader = stack.enter_context(Session(daemon.socket, role=Role.READER))
    opened = reader.open()
    assert isinstance(opened, Opened) and opened.step == 1
    all_save(2)
    all_save(3)
    for rank in ranks:
        held = rank.begin(4, payload_of(4, SIZE), fill=False)  # it takes a slot, and never ends
        rank.until_copying(held)
    asked = [rank.begin(5, payload_of(5, SIZE), on_busy="skip") for rank in ranks]
    for rank, snapshot in zip(ranks, asked, strict=True):
        state = rank.wait(snapshot)
        assert state.outcome in (State.DURABLE, State.GLOBAL), rank.describe(snapshot)
    with pytest.raises(NoCheckpointError):
        reader.load(opened)


def test_a_killed_daemon_ends_what_is_open_and_the_next_one_has_it(
    daemon: Daemon, start_trainer: Start
) -> None:
    trainer = start_trainer(daemon, COUNTS)
    step = save(trainer)
    with Reader("job", socket=daemon.socket) as reader:
        one = reader.open()
        assert is_step(one, step)
        daemon.kill()
        with pytest.raises(DaemonUnreachableError, match="the daemon ended"):
            one.read("model.parts.0")
        daemon.start()
        with pytest.raises(DaemonUnreachableError, match="open the checkpoint again"):
            one.read("model.parts.0")
        assert is_step(reader.open(step), step)
        trainer.connects_again()
        last = save(trainer, count=3)
        assert is_step(reader.open(), last)


def test_a_read_that_was_interrupted_writes_nothing_afterwards(
    daemon: Daemon, start_trainer: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be another's by then. The checkpoint stays open."""
    save(start_trainer(daemon, COUNTS))
    with Reader("job", socket=daemon.socket) as reader:
        opened = reader.open()
        opened.leaves()
        dest = torch.zeros(COUNTS[0])
        request = Attachment.request

        def interrupted(self: Attachment, body: Any, **options: Any) -> Any:
            request(self, body, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
            context.setattr(Attachment, "request", interrupted)
            opened.read_into("model.parts.0", dest)
        dest.zero_()  # what came before the interrupt
        until(lambda: _reads(opened))
        assert not dest.any()
        assert is_step(opened, 1)


def _reads(opened: OpenCheckpoint) -> bool:
    """Whether the daemon has sent all of an earlier read."""
    try:
        return bool(opened.read("model.parts.1").numel())
    except CheckpointFailedError as error:
        assert "earlier read of this process has not ended" in error.message
        return False


def test_what_other_users_have_is_refused(daemon: Daemon, start_trainer: Start) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    daemon.open_to_everybody()
    trainer = start_trainer(daemon, COUNTS)
    save(trainer)
    import_all("pccheck")

    def foreign() -> str:
        told = []
        os.environ["PCCHECK_DAEMON_UID"] = "0"
        for options in ({}, {"uid": 0}):
            try:
                Reader("job", socket=daemon.socket, **options).open()
            except PccheckError as error:
                told.append(type(error).__name__)
        return " ".join(told)

    assert fork_as(65534, foreign) == "NoCheckpointError RefusedError"
    with Reader("job", socket=daemon.socket, uid=0) as reader:
        assert is_step(reader.open(), 1)
    with pytest.raises(NoCheckpointError):
        Reader("job", socket=daemon.socket, uid=65534).open()


def test_damage_is_an_error_and_the_one_before_is_read(tmp_path: Path) -> None:
    storage = make(tmp_path / "storage", 10, 20, 30)
    wide = torch.tensor(numbers(20, WIDE))
    with Reader("job", storage=storage) as reader:
        assert steps(reader) == [30, 20, 10]
        damage(storage, 30, at=150_000)
        one = reader.open()
        assert one.read("model.weight").shape == (3, 4)  # other blocks are whole
        with pytest.raises(DamagedError, match="step 30"):
            one.read("model.wide")
        assert torch.equal(reader.open(20).read("model.wide").detach(), wide)


def test_values_of_every_kind(tmp_path: Path) -> None:
    """Views, empty tensors, arrays; into memory of another layout."""
    with Reader("job", storage=make(tmp_path / "storage", 10)) as reader, reader.open() as one:
        assert one.metadata == {"note": "step 10"}
        state, leaves = one.read(), one.leaves()
        first = torch.tensor(numbers(10, 12)).view(3, 4)
        assert torch.equal(state["model"]["weight"], first)
        assert state["model"]["tied"].data_ptr() == state["model"]["weight"].data_ptr()
        assert torch.equal(one.read("model.transposed"), first.t())
        assert torch.equal(one.read("model.expanded"), first[0, :3].expand(2, 3))
        assert state["model"]["wide"].requires_grad and leaves["model.wide"].requires_grad
        assert leaves["model.empty"].shape == (0, 5) == one.read("model.empty").shape
        assert leaves["array"].dtype == state["array"].dtype == "<i4"
        assert state["array"].tolist() == one.read("array").tolist() == [10, -1, 2]
        assert leaves["optimizer.betas.1"] == one.read("optimizer.betas.1") == 0.999
        assert one.read("kind") is torch.float32 and one.read("raw") == b"\0\1"

        into = torch.zeros(2, 3)
        one.read_into("model.transposed", into, offsets=[2, 0])
        assert torch.equal(into, first.t()[2:])
        one.read_into("model.expanded", into)
        assert torch.equal(into, first[0, :3].expand(2, 3))
        scalar = torch.zeros(())
        one.read_into("model.scalar", scalar)
        assert scalar == first[0, 1]
        conjugated = torch.zeros(2, dtype=torch.complex128).conj()
        one.read_into("model.doubles", conjugated)
        assert conjugated.tolist() == [1 + 2j, 3 + 10j]
        one.read_into("model.empty", torch.zeros(0, 5, dtype=torch.int64))
        with pytest.raises(UsageError, match="array is no tensor"):
            one.read_into("array", torch.zeros(3, dtype=torch.int32))


def test_ranks_that_lack_a_step_are_named(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    for rank, saved in enumerate(((1, 2, 3), (1, 2))):
        with Rank(storage, rank=rank, world_size=2) as volume:
            for step in saved:
                volume.put(step)
    with Reader("job", storage=storage) as reader:
        newest = reader.newest()
        assert newest is not None and newest.step == 2 and sorted(newest.ranks) == [0, 1]
        assert [one.complete for one in reader.steps()] == [False, True, True]
        assert reader.open().step == 2
        with pytest.raises(NoCheckpointError, match=r"step 3 is missing on ranks \[1\]"):
            reader.open(3)


def test_reading_and_adopting_ends_the_warning_and_the_pin_on_every_rank(
    daemon: Daemon, start_trainer: Start
) -> None:

    def ranks() -> list[Trainer]:
        return [start_trainer(daemon, COUNTS, rank=rank, world_size=2) for rank in range(2)]

    before = ranks()
    for _ in range(3):
        for one in before:
            one.step()
        handles = [one.checkpoint() for one in before]
        for one, handle in zip(before, handles, strict=True):
            assert one.wait_global(handle) == "global"
    for one in before:
        one.kill()

    adopting = ranks()

    def save_all() -> None:
        for trainer in adopting:
            trainer.step()
        handles = [trainer.checkpoint() for trainer in adopting]
        for trainer, handle in zip(adopting, handles, strict=True):
            assert trainer.wait_global(handle) == "global"

    with Reader("job", socket=daemon.socket) as reader:
        newest = reader.newest()
        assert newest is not None and newest.step == 3
        one = reader.open()
        for rank, trainer in enumerate(adopting):
            state = one.read("model", rank=rank)
            assert torch.equal(state["parts.0"].detach(), expected(3, 0, COUNTS[0]))
            trainer.evaluate(adopt)
        for _ in range(4):
            save_all()
        complete = [one.step for one in reader.steps() if one.complete]
        assert complete[:2] == [7, 6] and complete[-1] == 3  # it is leased
        for rank in range(2):
            tensor = one.read("model.parts.0", rank=rank).detach()
            assert torch.equal(tensor, expected(3, 0, COUNTS[0]))
        one.close()
        with pytest.raises(UsageError, match="step 3 is closed"):
            one.read("model.parts.0")
        for _ in range(50):  # until the daemon has seen the end of the session
            save_all()
            if 3 not in steps(reader):
                break
        assert 3 not in steps(reader)  # nothing protects it
    warned = [text for trainer in adopting for text in trainer.warnings if "NOT restored" in text]
    assert not warned


def adopt(commands: Any) -> None:
    commands.client.adopt()
    commands.optimizer.now = 3


def test_a_reader_that_requests_a_checkpoint_is_hung_up_on(start_daemon: Start) -> None:
    daemon = start_daemon()
    with Session(daemon.socket) as trainer:
        trainer.register(SIZE)
        trainer.save(1, payload_of(1, SIZE))
    with Session(daemon.socket, role=Role.READER) as reader:
        page = Page(reader.attachment.page_fd)
        page.request(1, block_of(1, SIZE))
        until(lambda: not reader.native.alive())
        page.close()
    daemon.logs("violated the protocol")
