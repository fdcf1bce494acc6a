"""How runs end: flush(), a signal that stops training, and trainings that change their state
outside of a plain `optimizer.step()`, killed and resumed bit for bit."""

from __future__ import annotations

import functools
import itertools
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from pccheck import (
    CheckpointState,
    PCcheckClient,
    PccheckWarning,
    UsageError,
    WaitTimeoutError,
)
from tests.support.daemon import Daemon, Start
from tests.support.endtraining import TRAININGS, EndTrainer
from tests.support.torchrun import torchrun
from tests.support.trainer import Commands, Connect

STEPS, KILLED = 8, 4
#: So many bytes that training changes something before a copy is complete.
SLOW = ("--dram", "2MiB", "--max-bandwidth", "16MiB")


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_go_on_bit_for_bit_after_a_kill(
    start_daemon: Start, stack: ExitStack, name: str
) -> None:
    socket = str(start_daemon(*SLOW).socket)
    undisturbed, killed, resumed = (stack.enter_context(EndTrainer()) for _ in range(3))
    _, losses = undisturbed.train(name, steps=STEPS)
    killed.post("train", name, socket, steps=STEPS, kill=KILLED)
    with pytest.raises(EOFError):
        killed.answer()
    assert resumed.train(name, socket, steps=STEPS) == (KILLED + 1, losses[KILLED:])


def test_a_client_neither_breaks_graphs_nor_compiles_again(
    daemon: Daemon, stack: ExitStack
) -> None:
    alone, saving = stack.enter_context(EndTrainer()).compiled(str(daemon.socket))
    assert saving["unique_graphs"] == alone["unique_graphs"] > 0
    assert saving["calls_captured"] == alone["calls_captured"]
    assert saving["breaks"] <= alone["breaks"]


@pytest.mark.parametrize("told", [(1,), (0, 1)])
def test_ranks_stop_after_the_same_step(
    daemon: Daemon, stack: ExitStack, tmp_path: Path, told: tuple[int, ...]
) -> None:
    """Also when only one rank gets the signal."""
    socket = str(daemon.socket)
    ranks = [stack.enter_context(EndTrainer(LOCAL_WORLD_SIZE="2")) for _ in range(2)]
    for rank, trainer in enumerate(ranks):
        trainer.post("until_stopped", socket, rank, 2, str(tmp_path / "store"))
    for rank in told:
        ranks[rank].wait_for_durable(ranks[rank].durable + 3)  # steps, in this test
        ranks[rank].signal(signal.SIGTERM)
    (first, saved), other = (trainer.answer() for trainer in ranks)
    assert other == (first, saved) and saved == first >= 2


def test_ranks_that_cannot_agree_any_more_neither_hang_nor_stop_without_a_signal(
    daemon: Daemon, stack: ExitStack, tmp_path: Path
) -> None:
    socket = str(daemon.socket)
    ranks = [stack.enter_context(EndTrainer(LOCAL_WORLD_SIZE="2")) for _ in range(2)]
    for rank, trainer in enumerate(ranks):
        trainer.post("cut_off", socket, rank, str(tmp_path / "store"))
    assert [trainer.answer() for trainer in ranks] == [[False] * 4, [False] * 3 + [True]]
    for trainer in ranks:
        assert sum("only signals to this rank" in one for one in trainer.warnings) == 1


def test_torchrun_stops_all_ranks_after_the_same_step(daemon: Daemon, stack: ExitStack) -> None:
    """Each worker gets the signal at another point of its step."""
    run = torchrun(daemon, "job", 2, "tests.support.endtraining")
    stack.callback(run.terminate)
    assert run.stdout is not None
    # Lines of two ranks may run together.
    before = list(itertools.takewhile(lambda line: "STEP 3" not in line, run.stdout))
    run.send_signal(signal.SIGTERM)
    told, _ = run.communicate(timeout=800)
    found = re.findall(r"RANK (\d) LAST (\d+) SAVED (\d+)", told)
    assert sorted(rank for rank, _, _ in found) == ["0", "1"], (before, told)
    assert len({number for _, *steps in found for number in steps}) == 1, found


def test_a_signal_is_noted_and_handed_on(daemon: Daemon, stack: ExitStack) -> None:
    found = stack.enter_context(EndTrainer()).signalled(str(daemon.socket))
    assert "call stop_on(signal.SIGTERM) before the loop" in found["early"]
    assert "names no signal" in found["nothing"] and "not a signal" in found["kill"]
    assert "call stop_on() in the main thread" in found["thread"]
    assert (found["before"], found["parent"], found["after"]) == (False, False, True)
    assert found["child"] == -signal.SIGUSR1  # as a forked worker should
    assert found["state"] == "durable"
    assert found["seen"] == [signal.SIGTERM] * 2  # handed on, and after close() as before
    assert found["handlers"] == [True, True]


def attached(client: PCcheckClient) -> torch.optim.Optimizer:
    """A state whose updates wait, so that checkpoint() returns at once."""
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    client.attach(model=model, optimizer=optimizer)
    optimizer.step()
    return optimizer


@pytest.mark.filterwarnings("ignore::pccheck.PccheckWarning")
def test_flush_returns_what_a_restart_gets(daemon: Daemon) -> None:
    with PCcheckClient("job", socket=daemon.socket) as client:
        attached(client)
        assert client.flush() is None
        client.checkpoint(step=1)
        first = client.flush(60)
        assert first is not None and first.step == 1
        daemon.kill(signal.SIGSTOP)
        client.checkpoint(step=2)
        assert client.flush(0.1) == first == client.flush(0)
        daemon.kill(signal.SIGCONT)
        second = client.flush()
        assert second is not None and second == (first.sequence + 1, 2)
        daemon.kill(signal.SIGSTOP)
        lost = client.checkpoint(step=3)
        daemon.kill()
        assert client.flush() == second
        assert lost.state is CheckpointState.FAILED
        client.checkpoint(step=4)  # no daemon answers
        assert client.flush() == second
        with pytest.raises(UsageError, match="deadline_s='soon'"):
            client.flush("soon")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="closed"):
        client.flush()
    daemon.start()
    with PCcheckClient("job", socket=daemon.socket) as client:
        attached(client)
        client.restore()
        assert client.flush(0) == second
    for takes in (lambda one: one.restore(step=1), PCcheckClient.adopt):
        with PCcheckClient("job", socket=daemon.socket) as client:
            attached(client)
            takes(client)
            assert client.flush(0) == second  # as long as this run has saved nothing


def test_flush_is_for_all_ranks(daemon: Daemon, start_trainer: Connect) -> None:
    environment = {"LOCAL_WORLD_SIZE": "2"}
    ranks = [
        start_trainer(daemon, rank=rank, world_size=2, environment=environment) for rank in range(2)
    ]
    for rank in ranks:
        rank.step()
        rank.checkpoint()
    assert ranks[0].evaluate(functools.partial(flushed, deadline_s=60)) == 1
    ranks[0].save()
    assert ranks[0].evaluate(functools.partial(flushed, deadline_s=0)) == 1
    ranks[1].step()
    ranks[1].checkpoint()
    assert [rank.evaluate(functools.partial(flushed, deadline_s=60)) for rank in ranks] == [2, 2]


def flushed(commands: Commands, deadline_s: float) -> int | None:
    found = commands.client.flush(deadline_s)
    return found and found.step


def test_after_a_signal_nothing_waits_for_long(daemon: Daemon) -> None:
    """Until the deadline, and for at least 5 s."""
    client = PCcheckClient("job", socket=daemon.socket, stall_limit_s=1e5)
    attached(client)
    client.stop_on(signal.SIGUSR1, deadline_s=0.5)
    client.checkpoint(step=1)
    client.flush()
    daemon.kill(signal.SIGSTOP)
    client.checkpoint(step=2)
    signal.raise_signal(signal.SIGUSR1)
    found = client.flush()
    assert found is not None and found.step == 1
    with pytest.warns(PccheckWarning, match="step 2 is lost .*close\\(\\) stopped waiting"):
        client.close()


def test_what_is_copied_at_the_deadline_has_not_failed(start_daemon: Start) -> None:
    """flush() has waited until the deadline, so close() does not wait again."""
    daemon = start_daemon("--max-bandwidth", "128KiB")
    client = PCcheckClient("job", socket=daemon.socket)
    attached(client)
    client.stop_on(signal.SIGUSR1, deadline_s=0.5)
    handle = client.checkpoint(step=1)
    handle.wait_copied(60)
    signal.raise_signal(signal.SIGUSR1)
    assert client.flush() is None
    with pytest.warns(PccheckWarning) as told:
        client.close()
    (warning,) = told
    assert "step 1 is copied, and pccheckd is still writing it" in str(warning.message)
    assert CheckpointState.COPIED <= handle.state < CheckpointState.DURABLE
    with pytest.raises(WaitTimeoutError):
        handle.wait_durable(0)
    with PCcheckClient("job", socket=daemon.socket) as again:
        attached(again)
        assert again.restore().step == 1
