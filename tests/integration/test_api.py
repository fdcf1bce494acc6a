"""The Python API against a real daemon: what its calls accept, return and refuse."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import (
    Checkpoint,
    CheckpointFailedError,
    CheckpointState,
    PCcheckClient,
    PccheckWarning,
    StateMismatchError,
    TornStateError,
    UnsupportedStateError,
    UsageError,
)
from pccheck_wire.messages import Describe
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon
from tests.support.programs import python

Connect = Callable[..., PCcheckClient]


@pytest.fixture
def connect(daemon: Daemon) -> Iterator[Connect]:
    made: list[PCcheckClient] = []

    def start(**options: Any) -> PCcheckClient:
        made.append(PCcheckClient(**{"job": "job", "socket": daemon.socket} | options))
        return made[-1]

    yield start
    for client in made:
        client.close()


def kit(seed: int = 1, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    return {"model": model, "optimizer": optimizer}


def update(things: dict[str, Any]) -> None:
    things["model"](torch.ones(1, 3)).sum().backward()
    things["optimizer"].step()


# -- steps -------------------------------------------------------------------------------------


def test_attached_state_needs_a_step(connect: Connect) -> None:
    client = connect()
    client.attach(**kit())
    with pytest.raises(UsageError, match=r"checkpoint\(step=step\)"):
        client.checkpoint()
    client.checkpoint(step=10).wait_durable(60)
    assert client.checkpoint([torch.ones(1)]).step == 11  # steps of a given state are counted


def test_steps_that_go_back_are_told_once(connect: Connect) -> None:
    client = connect()
    client.attach(**kit())
    client.checkpoint(step=5)
    with pytest.warns(PccheckWarning, match=r"step=4\) follows step 5"):
        client.checkpoint(step=4)
    client.checkpoint(step=3).wait_durable(60)
    assert client.restore().step == 3
    client.checkpoint(step=1).wait_durable(60)  # after a restore they may


# -- the end of a job --------------------------------------------------------------------------


def is_done(daemon: Daemon) -> bool:
    from pccheck_native import catalog

    (info,) = catalog.scan(daemon.storage).volumes.values()
    return bool(info.done)


def test_a_job_is_finished_after_its_with_block(daemon: Daemon, connect: Connect) -> None:
    with connect() as client:
        for step in (1, 2, 3):
            client.checkpoint([torch.ones(9)], step=step).wait_durable(60)
    assert not is_done(daemon)
    client.close(done=True)
    assert is_done(daemon)
    client.close(done=True)
    assert [one.step for one in connect().steps()] == [3]


def test_a_job_that_cannot_be_finished_is_told(daemon: Daemon, connect: Connect) -> None:
    client = connect()
    client.checkpoint([1]).wait_durable(60)
    client.close()
    daemon.kill()
    with pytest.raises(Exception, match="pccheckd"):
        client.close(done=True)


# -- values that cannot be stored --------------------------------------------------------------


def test_what_cannot_be_stored_is_raised_at_first_and_fails_later(connect: Connect) -> None:
    client, progress = connect(), {"best": 0.5}
    things = kit()
    client.attach(**things, progress=progress)
    progress["best"] = Path("x")  # type: ignore[assignment]
    with pytest.raises(UnsupportedStateError, match=r"progress\.best"):
        client.checkpoint(step=1)
    progress["best"] = 0.25
    client.checkpoint(step=2).wait_durable(60)
    progress["best"] = Path("x")  # type: ignore[assignment]
    with pytest.warns(PccheckWarning, match=r"progress\.best") as told:
        ends = [client.checkpoint(step=step) for step in (3, 4, 5)]
    assert len(told) == 1
    assert {end.state for end in ends} == {CheckpointState.FAILED}
    assert "progress.best" in ends[0].reason
    progress["best"] = 0.125
    client.checkpoint(step=6).wait_durable(60)


def test_a_state_dict_that_fails_later_ends_no_training(connect: Connect) -> None:
    class Loader:
        broken = False

        def state_dict(self) -> dict[str, int]:
            if self.broken:
                raise AttributeError("no iterator")
            return {"at": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    client, loader = connect(), Loader()
    client.attach(**kit(), loader=loader)
    client.checkpoint(step=1).wait_durable(60)
    loader.broken = True
    with pytest.warns(PccheckWarning, match="loader: its state_dict.*no iterator"):
        assert client.checkpoint(step=2).state is CheckpointState.FAILED


def test_an_optimizer_whose_state_is_left_out_is_named(connect: Connect) -> None:
    """SAM as it is commonly written: its state_dict() is torch's."""

    class Sam(torch.optim.Optimizer):
        def __init__(self, momentum: float) -> None:
            parameter = torch.nn.Parameter(torch.ones(2))
            super().__init__([parameter], {"lr": 0.1})
            self.base_optimizer = torch.optim.SGD(self.param_groups, momentum=momentum)
            parameter.grad = torch.ones(2)

    client, without, sam = connect(), Sam(0), Sam(0.9)
    without.base_optimizer.step()
    client.attach(optimizer=without)
    client.checkpoint(step=1)
    client.attach(optimizer=sam)
    client.checkpoint(step=2)  # there is no state yet
    sam.base_optimizer.step()
    with pytest.warns(PccheckWarning, match=r"Attach optimizer\.base_optimizer"):
        client.checkpoint(step=3)
    other = connect(job="other")
    other.attach(optimizer=sam, momentum=sam.base_optimizer)
    other.checkpoint(step=1)


def test_state_in_attributes_of_an_optimizer_is_named(connect: Connect) -> None:
    class Momentum(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.momentum = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    client, model = connect(), torch.nn.Linear(2, 2)
    client.attach(model=model, optimizer=Momentum(model.parameters()))
    with pytest.warns(PccheckWarning, match=r"state of optimizer\.momentum is not saved: .* Keep"):
        client.checkpoint(step=1)


# -- values beside attached state --------------------------------------------------------------


def test_values_come_back_by_metadata_and_by_an_attached_dict(connect: Connect) -> None:
    client, progress = connect(), {"epoch": 2}
    client.attach(**kit(), progress=progress)
    client.checkpoint(step=1, metadata={"lr": (0.1, 0.2)}).wait_durable(60)
    progress.update(epoch=7, extra=1)
    assert client.restore().metadata == {"lr": [0.1, 0.2]}
    assert progress == {"epoch": 2}


# -- restore -----------------------------------------------------------------------------------


def test_a_run_goes_back_to_a_step_and_goes_on_from_there(connect: Connect) -> None:
    client, things = connect(), kit()
    client.attach(**things)
    states = {}
    for step in (1, 2):
        update(things)
        states[step] = things["model"].weight.detach().clone()
        client.checkpoint(step=step).wait_durable(60)
    update(things)
    listed = client.steps()
    assert [(one.step, one.pinned) for one in listed] == [(2, False), (1, False)]
    assert all(0 <= one.age_s < 3600 and one.nbytes > 0 for one in listed)
    assert client.restore(step=1).step == 1
    assert torch.equal(things["model"].weight, states[1])
    client.checkpoint(step=2).wait_durable(60)
    client.close()
    again = connect()
    again.attach(**things)
    assert again.restore().sequence == 3  # the newest, not the highest step


def test_going_back_ends_the_protection_of_the_newest(daemon: Daemon, connect: Connect) -> None:
    client = connect()
    client.attach(**kit())
    for step in (1, 2):
        client.checkpoint(step=step).wait_durable(60)
    client.close()
    again = connect()
    again.attach(**kit())
    assert again.restore(step=1)
    for step in range(2, 8):
        again.checkpoint(step=step).wait_durable(60)
    assert [one.step for one in again.steps()] == [7, 6]
    assert {one.sequence for one in again.steps()} == {7, 8}


def test_adopting_ends_the_protection_of_the_newest(connect: Connect) -> None:
    client = connect()
    client.checkpoint([1], step=1).wait_durable(60)
    client.close()
    again = connect()
    assert again.recover(step=1).state == [1]
    again.adopt()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2, 8):
            again.checkpoint([2], step=step).wait_durable(60)
    assert [one.step for one in again.steps()] == [7, 6]


def test_an_optimizer_of_another_kind_is_refused(connect: Connect) -> None:
    client, things = connect(), kit()
    client.attach(**things)
    update(things)
    client.checkpoint(step=1).wait_durable(60)
    client.attach(**kit(kind=torch.optim.Adam))
    with pytest.raises(StateMismatchError, match=r"of AdamW, and Adam is attached.*strict_optim"):
        client.restore()
    assert client.restore(strict_optimizer=False).step == 1


def test_some_of_the_attached_things_are_restored(connect: Connect) -> None:
    model, seen = torch.nn.Linear(2, 2), {"items": 7}
    with connect() as client:
        client.attach(model=model, seen=seen, rng=True)
        client.checkpoint(step=1).wait_durable(60)
    saved = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    seen["items"] = 0
    with connect() as client:
        client.attach(seen=seen, other={"value": 1})
        with pytest.raises(UsageError, match="names what is not attached: model"):
            client.restore(only=["model"])
        with pytest.raises(UsageError, match="has no names, so nothing would be restored"):
            client.restore(only=[])
        with pytest.raises(StateMismatchError, match="other"):
            client.restore(only=["other"])
        assert client.restore(only=["seen"]).step == 1
        assert seen == {"items": 7} and not model.weight.any()
        client.attach(model=model)
        assert client.restore(only="model").step == 1
        assert torch.equal(model.weight, saved)
        with pytest.warns(
            PccheckWarning, match=r"step 1 that was restored only in part \(model, seen\)"
        ):
            client.checkpoint(step=2)


@pytest.mark.parametrize(
    "attached",
    [
        lambda model: {"model": model.state_dict()},
        lambda model: {"state": dict(model.named_parameters())},
        lambda model: {"state": {"epoch": 3, "model": model.state_dict()}},
    ],
)
def test_a_dict_of_a_models_tensors_is_put_back_into_the_model(
    connect: Connect, attached: Callable[[torch.nn.Module], dict[str, Any]]
) -> None:
    """As a script with torch.save does."""
    saved, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with connect() as client:
        client.attach(**attached(saved))
        client.checkpoint(step=1).wait_durable(60)
    with connect() as client:
        client.attach(**attached(model))
        assert client.restore().step == 1
    assert torch.equal(model.weight, saved.weight) and torch.equal(model.bias, saved.bias)


def test_parameters_in_a_list_of_a_dict_are_restored_into_the_optimizers_tensors(
    connect: Connect,
) -> None:
    """Master weights in a list: other tensors in that list would leave the optimizer with the
    first values."""

    def make() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        masters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        return masters, torch.optim.SGD(masters, 0.1)

    masters, optimizer = make()
    with connect() as client:
        client.attach(train={"masters": masters}, optimizer=optimizer)
        for one in masters:
            one.grad = torch.ones(3)
        optimizer.step()
        client.checkpoint(step=1).wait_durable(60)
    resumed, optimizer = make()
    with connect() as client:
        client.attach(train={"masters": resumed}, optimizer=optimizer)
        assert client.restore().step == 1
    for then, now in zip(masters, optimizer.param_groups[0]["params"], strict=True):
        assert torch.equal(then, now)


def test_the_state_dict_of_an_optimizer_is_refused(connect: Connect) -> None:
    state = kit()["optimizer"].state_dict()
    client = connect()
    for given, path in ({"optimizer": state}, "optimizer"), ({"all": {"o": state}}, "all.o"):
        with pytest.raises(UsageError, match=rf"attach\({path}=.*an optimizer's state_dict"):
            client.attach(**given)


@pytest.mark.parametrize("kind", [ValueError, TypeError, AttributeError, AssertionError])
def test_a_restore_that_broke_off_is_told_by_a_class_of_error(
    connect: Connect, kind: type[Exception]
) -> None:
    class Picky:
        refuses = False

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.refuses:
                raise kind("not this one")

    client, picky = connect(on_error="raise"), Picky()
    client.attach(**kit(), picky=picky)
    client.checkpoint(step=1).wait_durable(60)
    picky.refuses = True
    with pytest.raises(StateMismatchError, match=r"picky: .*not this one"):
        client.restore()
    with pytest.raises(TornStateError, match="is a mix of two steps: the restore of step 1 did"):
        client.checkpoint(step=2)
    assert client.restore(only=["model"]).step == 1
    with pytest.raises(TornStateError, match="is a mix"):  # the rest may be of another step
        client.checkpoint(step=2)
    picky.refuses = False
    assert client.restore().step == 1
    client.checkpoint(step=2).wait_durable(60)


def test_a_part_that_is_compiled_on_one_side_is_named(connect: Connect) -> None:
    client, part = connect(), nn.Linear(2, 2)
    client.attach(model=nn.Sequential(torch.compile(part, backend="eager")))
    client.checkpoint(step=1).wait_durable(60)
    client.attach(model=nn.Sequential(part))
    with pytest.raises(StateMismatchError, match=r"_orig_mod.*part\.compile\(\)"):
        client.restore()


def test_what_does_not_fit_is_no_wrong_call() -> None:
    assert not issubclass(StateMismatchError, UsageError)
    assert not issubclass(UnsupportedStateError, UsageError)


def test_nothing_to_restore_reads_so(connect: Connect) -> None:
    client = connect()
    client.attach(**kit())
    assert repr(client.restore()) == "<RestoreResult: nothing to restore>"
    client.checkpoint(step=3).wait_durable(60)
    assert repr(client.restore()).startswith("<RestoreResult step=3 source=")


# -- handles -----------------------------------------------------------------------------------


def test_a_handle_is_a_future(connect: Connect) -> None:
    client, called = connect(), threading.Event()
    seen: list[tuple[Checkpoint, int]] = []

    def callback(handle: Checkpoint) -> None:
        seen.append((handle, threading.get_ident()))
        called.set()

    handle = client.checkpoint([torch.ones(1000)], step=4)
    handle.add_done_callback(callback)
    assert handle.result(60).step == 4
    assert handle.done() and handle.exception(1) is None
    assert str(handle.state) == f"{handle.state}" == "durable"
    assert called.wait(800)
    assert seen[0][0] is handle and seen[0][1] != threading.get_ident()
    public = {name for name in dir(handle) if not name.startswith("_")}
    assert public == {
        "add_done_callback", "done", "exception", "reason", "result", "sequence", "state", "step",
        "wait_copied", "wait_durable", "wait_global",
    }  # fmt: skip


def test_a_failed_handle_calls_back_and_has_an_exception(daemon: Daemon, connect: Connect) -> None:
    client, called = connect(), threading.Event()
    client.checkpoint([1]).wait_durable(60)
    daemon.kill()
    with pytest.warns(PccheckWarning, match="WITHOUT"):
        handle = client.checkpoint([1])
    handle.add_done_callback(lambda _: 1 / 0)  # logged
    handle.add_done_callback(lambda _: called.set())
    assert called.wait(800)
    error = handle.exception(0)
    assert isinstance(error, CheckpointFailedError) and "step 2 failed" in str(error)
    with pytest.raises(CheckpointFailedError):
        handle.result()


def test_a_thread_that_waits_for_an_answer_holds_no_other_up(
    daemon: Daemon, connect: Connect
) -> None:
    client = connect()
    client.checkpoint([1]).wait_durable(60)
    connection = client._session.current()
    assert connection is not None
    daemon.kill(signal.SIGSTOP)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            connection.request(Describe(1), timeout_s=120)
        except Exception as error:
            errors.append(error)

    waits = threading.Thread(target=ask)
    waits.start()
    try:
        while not connection._waiting:
            pass
        connection.post(Describe(1))
        connection.pump()
        assert waits.is_alive()  # it still waits, and has released the lock
    finally:
        daemon.kill(signal.SIGCONT)
    waits.join(60)
    assert not waits.is_alive() and not errors


# -- the identity of a client --------------------------------------------------------------------


def test_a_second_client_of_this_process_takes_over(connect: Connect) -> None:
    first = connect()
    first.checkpoint([1]).wait_durable(60)
    second = connect()
    assert second.connected and not first.connected
    assert second.recover().step == 1
    with pytest.raises(UsageError, match="newer client"):
        first.checkpoint([1])


def test_a_storage_directory_without_autostart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="autostart"):
        PCcheckClient(job="x", storage=tmp_path)


def test_show_names_who_saved(daemon: Daemon, connect: Connect, ctl: Ctl) -> None:
    client = connect()
    client.attach(**kit())
    client.checkpoint(step=1).wait_durable(60)
    client.close()
    daemon.stop()
    assert f"pid {os.getpid()} on " in ctl(daemon.storage, "show", "job").out
    about = ctl(daemon.storage, "show", "job", "--json").json["about"]
    assert about["optimizers"] == {"optimizer": "AdamW"} and about["directory"] == str(Path.cwd())


SCRIPT = """
import sys, torch
from pccheck import PCcheckClient
model = torch.nn.Linear(2, 2)
with PCcheckClient(socket={socket!r}, on_error="raise") as client:
    client.attach(model=model)
    done = client.restore()
    print(done.step)
    client.checkpoint(step=done.step + 1).wait_durable(60)
"""


def test_scripts_of_one_name_do_not_go_on_from_each_other(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(socket=str(daemon.socket)))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*arguments: str, cwd: Path = tmp_path, **environ: str) -> tuple[int, list[str], str]:
        """The exit code, the step that was restored, and all that was printed."""
        with python(str(script), *arguments, cwd=cwd, environment=environ) as program:
            said = program.finish()
            assert program.returncode is not None
            return program.returncode, list(filter(str.isdigit, said.splitlines())), said

    assert run("--lr", "0.1")[:2] == (0, ["0"])
    code, steps, said = run("--lr", "0.1")
    assert (code, steps) == (0, ["1"])
    assert "PCcheck: job 'train' (named after the script) continues from step 1" in said
    assert "train.py --lr 0.1 (pid " in said and str(tmp_path) in said
    for other in (run("--lr", "0.01"), run("--lr", "0.1", cwd=elsewhere)):
        assert other[0] == 1
        assert "by another command, train.py --lr 0.1" in other[2] and "PCCHECK_JOB" in other[2]
    assert run("--lr", "0.01", PCCHECK_JOB="train")[:2] == (0, ["2"])
    assert run("--lr", "0.01", PCCHECK_JOB="other")[:2] == (0, ["0"])


def test_fresh_and_restore_contradict_each_other(daemon: Daemon) -> None:
    model = torch.nn.Linear(2, 2)
    with PCcheckClient(job="fresh", socket=daemon.socket) as client:
        client.attach(model=model)
        client.checkpoint(step=1).wait_durable(60)
    with PCcheckClient(job="fresh", socket=daemon.socket, fresh=True) as client:
        client.attach(model=model)
        with pytest.raises(UsageError, match="begins without"):
            client.restore()
        client.checkpoint(step=2).wait_durable(60)
        assert client.restore(step=2).step == 2  # its own


@pytest.mark.parametrize("state", [10, 3.0, "x", True, b"x"])
def test_a_step_given_as_the_state_is_refused(daemon: Daemon, state: object) -> None:
    with PCcheckClient(job="slip", socket=daemon.socket) as client:
        client.attach(model=torch.nn.Linear(2, 2))
        with pytest.raises(UsageError, match="cannot be a state"):
            client.checkpoint(state)
