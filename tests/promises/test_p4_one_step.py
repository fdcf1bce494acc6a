"""P4, one step: a checkpoint with tensors of two steps never becomes durable. An optimizer step
waits for the copy; a change that nothing holds back fails that checkpoint. The daemon is slow here,
so that every change happens while the snapshot is read."""

from __future__ import annotations

import contextlib
import copy
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pccheck import CheckpointFailedError, CheckpointState, PCcheckClient, PccheckWarning
from pccheck.flight.waiting import wait_read
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect

WIDTH = 256
Change = Callable[[], object]

MIB = 1 << 18  # float32 elements of one MiB
SLOW = ("--max-bandwidth", "4MiB")


@pytest.fixture
def daemon(start_daemon: Start) -> Daemon:
    return start_daemon("--chunk", "128KiB", "--dram", "512KiB", "--max-bandwidth", "16MiB")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[PCcheckClient]:
    with PCcheckClient(job="job", socket=daemon.socket) as made:
        yield made


def layers() -> nn.Sequential:
    """A network of one value."""
    made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(1.0)
    return made


def frozen() -> nn.Sequential:
    return layers().requires_grad_(False)


class Sam(torch.optim.Optimizer):
    """SAM as it is commonly written: its step() is never called."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=1.0)

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(10.0)

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(10.0)
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("the script never calls it")


class Lookahead:
    """A wrapper around an optimizer, with no state of its own except `slow`."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = torch.optim.SGD(model.parameters(), lr=1.0)
        self.slow = copy.deepcopy(model)

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        for slow, fast in zip(self.slow.parameters(), self._fast(), strict=True):
            slow.lerp_(fast, 0.5)
            fast.copy_(slow)

    def _fast(self) -> list[nn.Parameter]:
        return list(self.inner.param_groups[0]["params"])

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def give_gradients(*models: nn.Module) -> None:
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)


def sam(client: PCcheckClient) -> list[Change]:
    model = layers()
    optimizer = Sam(model.parameters())
    client.attach(model=model, optimizer=optimizer)
    give_gradients(model)
    return [optimizer.first_step, optimizer.second_step]


def decay_by_hand(client: PCcheckClient) -> list[Change]:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    client.attach(model=model, optimizer=optimizer)
    give_gradients(model)

    @torch.no_grad()
    def decay() -> None:
        for parameter in model.parameters():
            parameter.mul_(0.5)

    return [decay, optimizer.step]


def another_optimizer(client: PCcheckClient) -> list[Change]:
    model = layers()
    attached = torch.optim.SGD(model.parameters(), lr=1.0)
    client.attach(model=model, optimizer=attached)
    give_gradients(model)
    attached.step()  # its hook is trusted
    return [torch.optim.SGD(model.parameters(), lr=2.0).step]


def wrapped(client: PCcheckClient) -> list[Change]:
    model = layers()
    optimizer = Lookahead(model)
    client.attach(model=model, wrapper=optimizer)
    give_gradients(model)
    return [optimizer.step]


def wrapped_and_attached(client: PCcheckClient) -> list[Change]:
    model = layers()
    optimizer = Lookahead(model)
    client.attach(model=model, wrapper=optimizer, optimizer=optimizer.inner)
    give_gradients(model)
    return [optimizer.step]


def average_swapped_in(client: PCcheckClient) -> list[Change]:
    model, average = layers(), layers()
    for parameter in average.parameters():
        parameter.data.fill_(7.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    client.attach(model=model, optimizer=optimizer)
    give_gradients(model)
    kept = copy.deepcopy(model.state_dict())

    def swap_in() -> None:
        kept.update(copy.deepcopy(model.state_dict()))
        model.load_state_dict(average.state_dict())

    return [swap_in, lambda: model.load_state_dict(kept), optimizer.step]


def clamp(client: PCcheckClient) -> list[Change]:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    client.attach(model=model, optimizer=optimizer)
    give_gradients(model)

    @torch.no_grad()
    def clamp_all() -> None:
        for parameter in model.parameters():
            parameter.add_(0.25).clamp_(-100.0, 100.0)

    return [clamp_all, optimizer.step]


def adversarial(client: PCcheckClient) -> list[Change]:
    """Two models and two optimizers, all attached."""
    model, other = layers(), layers()
    ours = torch.optim.SGD(model.parameters(), lr=1.0)
    theirs = torch.optim.SGD(other.parameters(), lr=1.0)
    client.attach(model=model, optimizer=ours, other=other, other_optimizer=theirs)
    give_gradients(model, other)
    return [theirs.step, ours.step]


def half_adversarial(client: PCcheckClient) -> list[Change]:
    """The optimizer of the other model is not attached."""
    model, other = layers(), layers()
    ours = torch.optim.SGD(model.parameters(), lr=1.0)
    client.attach(model=model, optimizer=ours, other=other)
    give_gradients(model, other)
    return [torch.optim.SGD(other.parameters(), lr=1.0).step, ours.step]


def average_after_the_checkpoint(client: PCcheckClient) -> list[Change]:
    model, average = layers(), frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    client.attach(model=model, optimizer=optimizer, average=average)
    give_gradients(model)

    @torch.no_grad()
    def follow() -> None:
        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(now, 0.5)

    return [follow, optimizer.step]


SCRIPTS = [
    sam, decay_by_hand, another_optimizer, wrapped, wrapped_and_attached, average_swapped_in, clamp,
    adversarial, half_adversarial, average_after_the_checkpoint,
]  # fmt: skip


def values(state: Any, name: str) -> set[float]:
    """The least and the largest of each tensor: one value if all elements are equal."""
    return {value.item() for tensor in state[name].values() for value in tensor.aminmax()}


def require_whole(client: PCcheckClient, step: int) -> None:
    state = client.recover(step=step).state
    for name in state.keys() & {"model", "other", "average"}:
        assert len(values(state, name)) == 1, name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_no_torn_checkpoint_is_durable(
    client: PCcheckClient, script: Callable[[PCcheckClient], list[Change]]
) -> None:
    durable = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PccheckWarning)
        changes = script(client)
        for step in range(1, 6):
            handle = client.checkpoint(step=step)
            for change in changes:
                change()
            with contextlib.suppress(CheckpointFailedError):
                handle.wait_durable(60)
                require_whole(client, step)
                durable += 1
    assert durable >= 3  # a checkpoint or two fail; later ones become durable
    told = [str(w.message) for w in caught if w.category is PccheckWarning]
    assert len(told) <= 1 and all("gate()" in text for text in told)


def test_the_tensor_that_was_changed_is_named_once(daemon: Daemon, client: PCcheckClient) -> None:
    changes = decay_by_hand(client)
    changes[1]()
    client.checkpoint(step=0).wait_durable(60)
    daemon.kill(signal.SIGSTOP)
    failed = client.checkpoint(step=1)
    with pytest.warns(PccheckWarning, match=r"model\.0\.weight .*gate\(\)") as warned:
        changes[0]()
        changes[1]()
    assert warned[0].filename == __file__  # not torch's file, which calls the hook
    daemon.kill(signal.SIGCONT)
    assert failed.state is CheckpointState.FAILED and "model.0.weight" in failed.reason
    handle = client.checkpoint(step=2)
    assert handle._in_flight.is_read()  # from now on checkpoint() returns when the state was read


def test_a_change_is_noticed_when_the_trainer_never_calls_again(
    daemon: Daemon, client: PCcheckClient
) -> None:
    """checkpoint(), a change, and then no call in which the client could compare."""
    changes = decay_by_hand(client)
    changes[1]()
    client.checkpoint(step=0).wait_durable(60)
    daemon.kill(signal.SIGSTOP)
    handle = client.checkpoint(step=1)
    link, number = handle._in_flight.connection.native, handle._in_flight.snapshot  # type: ignore[union-attr]
    changes[0]()
    daemon.kill(signal.SIGCONT)
    assert link.wait(number, "copied", time.monotonic_ns() + int(60e9))  # it has ended, not copied
    assert handle.state is CheckpointState.FAILED
    with pytest.warns(PccheckWarning, match="gate"):
        client.checkpoint(step=2)


def test_a_trainer_that_never_calls_again_is_saved(client: PCcheckClient) -> None:
    changes = decay_by_hand(client)
    changes[1]()
    handle = client.checkpoint(step=1)
    link = handle._in_flight.connection.native  # type: ignore[union-attr]
    assert link.wait(handle._in_flight.snapshot, "durable", time.monotonic_ns() + int(60e9))
    assert handle.state is CheckpointState.DURABLE


def test_steps_behind_the_gate_are_no_false_alarm(client: PCcheckClient) -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    client.attach(model=model, optimizer=optimizer)
    give_gradients(model)
    optimizer.step()
    handles = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", PccheckWarning)
        for step in range(1, 9):
            handles.append(client.checkpoint(step=step))
            optimizer.step()
        handles[-1].wait_durable(60)
    ends = {handle.state for handle in handles}
    assert ends <= {CheckpointState.DURABLE, CheckpointState.SUPERSEDED}


def test_a_restore_is_no_false_alarm(client: PCcheckClient) -> None:
    changes = decay_by_hand(client)
    changes[1]()
    client.checkpoint(step=1).wait_durable(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PccheckWarning)
        handle = client.checkpoint(step=2)
        assert client.restore().step in (1, 2)
        assert handle.wait_durable(60).step == 2


def test_what_was_read_may_be_changed(client: PCcheckClient) -> None:
    """After the handle reports that the state was read, no gate is needed."""
    changes = decay_by_hand(client)
    changes[1]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PccheckWarning)
        handle = client.checkpoint(step=1)
        wait_read(handle._in_flight, 60)
        changes[0]()
        handle.wait_durable(60)


def test_frozen_parameters_are_read_in_the_background(
    daemon: Daemon, client: PCcheckClient
) -> None:
    base, adapter = frozen(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=1.0)
    client.attach(model=base, adapter=adapter, optimizer=optimizer)
    give_gradients(adapter)
    optimizer.step()
    client.checkpoint(step=1).wait_durable(60)
    daemon.kill(signal.SIGSTOP)
    handle = client.checkpoint(step=2)
    assert not handle._in_flight.is_read()
    daemon.kill(signal.SIGCONT)
    handle.wait_durable(60)
    require_whole(client, 2)


def test_frozen_parameters_that_move_are_copied_at_once(
    daemon: Daemon, client: PCcheckClient
) -> None:
    changes = average_after_the_checkpoint(client)
    changes[1]()
    client.checkpoint(step=0).wait_durable(60)
    daemon.kill(signal.SIGSTOP)
    failed = client.checkpoint(step=1)
    with pytest.warns(PccheckWarning, match=r"average\.0\.weight.* frozen parameters of average"):
        changes[0]()
        changes[1]()
    assert failed.state is CheckpointState.FAILED
    handle = client.checkpoint(step=2)
    assert not handle._in_flight.is_read()  # what is trained is still read in the background
    changes[0]()
    daemon.kill(signal.SIGCONT)
    changes[1]()
    handle.wait_durable(60)
    require_whole(client, 2)


def test_the_update_waits_for_the_copy(start_daemon: Start, start_trainer: Connect) -> None:
    """P4: DRAM smaller than a checkpoint makes the copy slow; the gate holds every update
    meanwhile."""
    daemon = start_daemon("--dram", "4MiB", "--max-bandwidth", "48MiB")
    trainer = start_trainer(daemon, [8 * MIB])
    handles = []
    for _ in range(4):
        trainer.step()
        handles.append(trainer.checkpoint())
    trainer.wait_durable(handles[-1])
    found = trainer.recover()
    assert (found["step"], found["wrong"]) == (4, "")


def test_without_the_gate_the_snapshot_is_torn(start_daemon: Start, start_trainer: Connect) -> None:
    """Shows that the test above can fail: the same copy, with an update that has no gate and that
    torch does not count."""
    daemon = start_daemon("--dram", "4MiB", *SLOW)
    trainer = start_trainer(daemon, [8 * MIB], gate="manual", hook=False)
    trainer.damage_ungated(1)
    handle = trainer.checkpoint(step=1)
    assert trainer.watch(handle, "copying") == "copying"
    trainer.damage_ungated(2)
    trainer.wait_durable(handle)
    assert "off from step 1" in trainer.recover()["wrong"]


def test_a_torn_snapshot_fails_where_torch_counts_the_change(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """P4: the same update, which torch counts this time."""
    daemon = start_daemon("--dram", "4MiB", *SLOW)
    trainer = start_trainer(daemon, [8 * MIB], gate="manual", hook=False)
    trainer.damage_ungated(1)
    handle = trainer.checkpoint(step=1)
    assert trainer.watch(handle, "copying") == "copying"
    trainer.damage_ungated(2, counted=True)
    assert trainer.ended(handle) == "failed"
    assert "model.parts.0" in trainer.reason(handle)


def test_an_abandoned_snapshot_is_never_vouched_for(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """The daemon is stopped beyond the deadline of the gate, and continued. The update went on at
    the deadline, so the checkpoint must fail, although the daemon goes on copying."""
    daemon = start_daemon("--dram", "4MiB", *SLOW)
    trainer = start_trainer(daemon, [8 * MIB])
    trainer.save()
    trainer.shorten(1.0)
    trainer.step()
    handle = trainer.checkpoint()
    assert trainer.watch(handle, "copying") == "copying"
    daemon.kill(signal.SIGSTOP)
    assert trainer.step() == 3  # held for stall_limit_s, then released
    daemon.kill(signal.SIGCONT)
    assert trainer.state(handle) == "failed"
    trainer.kill()
    again = start_trainer(daemon, [8 * MIB])
    assert again.restored() == (1, "")
