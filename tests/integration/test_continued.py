"""A job continues with other settings than before: what is restored, what stays, what is
reported."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from pccheck import PCcheckClient, PccheckWarning, StateMismatchError, UsageError, capture_rng
from pccheck_native import catalog
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon

Connect = Callable[..., PCcheckClient]
OWN = "an earlier client of this process saved"


@pytest.fixture
def connect(daemon: Daemon) -> Iterator[Connect]:
    made: list[PCcheckClient] = []

    def start() -> PCcheckClient:
        made.append(PCcheckClient(job="job", socket=daemon.socket))
        return made[-1]

    yield start
    for client in made:
        client.close()


def kit(kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    return {"model": model, "optimizer": kind(model.parameters(), **options)}


def update(things: dict[str, Any]) -> None:
    things["optimizer"].zero_grad()
    things["model"](torch.ones(1, 3)).square().sum().backward()
    things["optimizer"].step()


def save(connect: Connect, step: int = 3, **things: Any) -> None:
    with connect() as client:
        client.attach(**things)
        update(things)
        client.checkpoint(step=step).wait_durable(60)


def said(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [text for one in caught if OWN not in (text := str(one.message))]


# -- generators that the checkpoint does not have ------------------------------------------------


def test_generators_that_were_not_saved_stay_as_they_are(connect: Connect) -> None:
    save(connect, **kit())
    client, things = connect(), kit()
    client.attach(**things, rng=True)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (told,) = said(client.restore)
    assert "checkpoint of step 3 has no generators (rng): random numbers continue from this" in told
    assert torch.equal(torch.get_rng_state(), before)
    assert things["optimizer"].state
    update(things)
    client.checkpoint(step=4).wait_durable(60)
    assert said(client.restore) == []


def test_an_imported_job_is_restored_by_a_script_with_generators(
    daemon: Daemon, connect: Connect, ctl: Ctl, tmp_path: Any
) -> None:
    daemon.stop()
    things = kit()
    update(things)
    torch.save({name: thing.state_dict() for name, thing in things.items()}, tmp_path / "old.pt")
    ran = ctl(daemon.storage, "import", "job", str(tmp_path / "old.pt"), "--step", "7")
    assert ran.code == 0, ran.err
    daemon.start()
    client, now = connect(), kit()
    client.attach(**now, rng=True)
    with pytest.warns(PccheckWarning, match="has no generators"):
        assert client.restore().step == 7
    assert torch.equal(now["model"].weight, things["model"].weight)


def test_an_incomplete_state_of_generators_changes_nothing(connect: Connect) -> None:
    things = kit()
    state = capture_rng()
    del state["numpy"]

    class Rng:
        def state_dict(self) -> dict[str, Any]:
            return state

        def load_state_dict(self, _: object) -> None: ...

    with connect() as client:
        client.attach(**things)
        client._planner.attached["rng"] = Rng()  # as an import names it
        client.checkpoint(step=3).wait_durable(60)
    client, now = connect(), kit()
    client.attach(**now, rng=True)
    before = now["model"].weight.detach().clone()
    with pytest.raises(StateMismatchError, match="generator of numpy") as told:
        client.restore()
    assert 'restore(only=["model", "optimizer"])' in told.value.hint
    assert torch.equal(now["model"].weight, before)
    assert client.restore(only=["model", "optimizer"]).step == 3


# -- names that are only attached, or only in the checkpoint -------------------------------------


def test_the_names_that_both_sides_have_are_in_the_hint(connect: Connect) -> None:
    things = kit()
    scheduler = torch.optim.lr_scheduler.StepLR(things["optimizer"], 2)
    save(connect, **things, scheduler=scheduler)
    client = connect()
    client.attach(**kit(), average=nn.Linear(3, 2))
    with pytest.raises(StateMismatchError) as told:
        client.restore()
    assert told.value.message == "only in the checkpoint: scheduler; only attached: average"
    assert 'restore(only=["model", "optimizer"]), then adopt()' in told.value.hint


def test_a_model_without_its_name_is_a_wrong_call(connect: Connect) -> None:
    with pytest.raises(UsageError, match=r"attach\(Linear, AdamW\).*attach\(model=model, opt"):
        connect().attach(*kit().values())  # type: ignore[arg-type]


# -- a part of a checkpoint ----------------------------------------------------------------------


def protected(daemon: Daemon) -> int:
    return sum(one.is_protected for one in catalog.scan(daemon.storage).checkpoints)


@pytest.mark.parametrize("continues", [True, False])
def test_a_run_that_restored_a_part_is_not_told_that_it_restored_nothing(
    connect: Connect, continues: bool
) -> None:
    save(connect, **kit())
    client, things = connect(), kit()
    client.attach(**things)
    assert client.restore(only=["model"]).step == 3
    if continues:
        client.adopt()
    told = said(lambda: client.checkpoint(step=4).wait_durable(60))
    for step in range(5, 9):
        client.checkpoint(step=step).wait_durable(60)
    kept = 3 in [one.step for one in client.steps()]
    if continues:
        assert told == [] and not kept
    else:
        assert "step 3 that was restored only in part (model)" in told[0] and kept
        assert "NOT restored" not in told[0] and "call adopt() after restore(only=...)" in told[0]


def test_a_part_of_another_checkpoint_is_no_part_of_the_protected_one(connect: Connect) -> None:
    with connect() as client:
        client.attach(**kit())
        for step in (3, 4):
            client.checkpoint(step=step).wait_durable(60)
    client = connect()
    client.attach(**kit())
    assert client.restore(step=3, only=["model"]).step == 3
    told = said(lambda: client.checkpoint(step=5).wait_durable(60))
    assert "step 4 that was NOT restored" in told[0]


# -- what a script sets after restore() ----------------------------------------------------------


def test_a_longer_cosine_and_a_new_rate_are_set_after_the_restore(connect: Connect) -> None:
    """As docs/python.md says; the curve is that of a run that had the new end from the start."""
    cosine, by_rule = torch.optim.lr_scheduler.CosineAnnealingLR, torch.optim.lr_scheduler.LambdaLR

    def run(first: int, last: int, things: dict[str, Any], scheduler: Any) -> list[float]:
        rates = []
        for _ in range(first, last):
            update(things)
            scheduler.step()
            rates.append(things["optimizer"].param_groups[0]["lr"])
        return rates

    whole = kit(lr=0.5)
    wanted = run(0, 40, whole, cosine(whole["optimizer"], 40))
    before = kit(lr=0.5)
    scheduler = cosine(before["optimizer"], 10)
    run(0, 9, before, scheduler)
    save(connect, step=10, **before, scheduler=scheduler)
    now = kit(lr=0.5)
    later = cosine(now["optimizer"], 40)
    client = connect()
    client.attach(**now, scheduler=later)
    client.restore()
    later.T_max = 40
    for group in now["optimizer"].param_groups:
        group["lr"] = group["initial_lr"] * (1 + math.cos(math.pi * 9 / 40)) / 2
    assert run(9, 40, now, later) == pytest.approx(wanted[9:])
    rule = by_rule(now["optimizer"], lambda step: 0.5**step)
    rule.base_lrs = [0.25]
    assert run(0, 1, now, rule) == [0.125]


# -- another optimizer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1}),
    ],
)
def test_another_optimizer_gets_only_what_it_has(
    connect: Connect, kind: Any, options: dict[str, Any]
) -> None:
    """The learning rate, the weight decay and what a scheduler keeps; its state is empty at
    first."""
    before = kit(lr=0.01, weight_decay=0.125, betas=(0.8, 0.9))
    torch.optim.lr_scheduler.StepLR(before["optimizer"], 2)
    save(connect, **before)
    now = kit(kind, **options)
    own = dict(now["optimizer"].param_groups[0])
    client = connect()
    client.attach(**now)
    with pytest.raises(StateMismatchError, match=f"of AdamW, and {kind.__name__} is att") as told:
        client.restore()
    assert told.value.hint.startswith('to continue with a new optimizer: restore(only=["model"])')
    assert client.restore(strict_optimizer=False).step == 3
    assert torch.equal(now["model"].weight, before["model"].weight)
    (group,) = now["optimizer"].param_groups
    assert group == own | {"lr": 0.01, "weight_decay": 0.125, "initial_lr": 0.01}
    assert not now["optimizer"].state
    update(now)
    client.checkpoint(step=4).wait_durable(60)


class Own(lr_scheduler.CosineAnnealingLR):
    """An optimizer class of the script."""


class Linear(lr_scheduler.LRScheduler):
    """A scheduler of the script, of no class of torch."""

    step_size = 1

    def get_lr(self) -> list[Any]:
        return [group["lr"] / 2 for group in self.optimizer.param_groups]


def in_turn(first: Any, second: Any) -> Any:
    return lambda o: lr_scheduler.SequentialLR(o, [first(o), second(o)], milestones=[2])


def constant(o: Any) -> Any:
    return lr_scheduler.ConstantLR(o, total_iters=2)


def cosine(o: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(o, 9)


def exponential(o: Any) -> Any:
    return lr_scheduler.ExponentialLR(o, 0.9)


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (lambda o: lr_scheduler.StepLR(o, 2), exponential, "StepLR, and ExponentialLR is"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, 9), cosine, "OneCycleLR, and CosineAnnealingLR"),
        (lr_scheduler.ReduceLROnPlateau, cosine, "ReduceLROnPlateau, and CosineAnnealingLR is"),
        (in_turn(constant, cosine), in_turn(constant, exponential),
         r"SequentialLR\(ConstantLR, CosineAnnealingLR\), and SequentialLR\(ConstantLR, Exp"),
    ],
)  # fmt: skip
def test_another_scheduler_is_refused(connect: Connect, then: Any, now: Any, words: str) -> None:
    """load_state_dict() of the scheduler accepts any attributes, and would compute with them."""
    before, after = kit(), kit()
    save(connect, **before, scheduler=then(before["optimizer"]))
    after["scheduler"] = now(after["optimizer"])
    kept = str(after["scheduler"].state_dict())
    client = connect()
    client.attach(**after)
    with pytest.raises(StateMismatchError, match=f"scheduler: .* state of {words}") as told:
        client.restore()
    assert 'restore(only=["model", "optimizer"]), then adopt()' in told.value.hint
    client.restore(only=["model", "optimizer"])
    client.adopt()
    assert str(after["scheduler"].state_dict()) == kept
    assert torch.equal(after["model"].weight, before["model"].weight)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (cosine, lambda o: Own(o, 9)), (lambda o: Own(o, 9), cosine), (Linear, Linear),
        (Linear, lambda o: lr_scheduler.StepLR(o, 2)), (in_turn(constant, cosine),) * 2,
    ],
)  # fmt: skip
def test_a_scheduler_of_a_class_of_the_script(connect: Connect, then: Any, now: Any) -> None:
    before, after = kit(), kit()
    before["scheduler"] = then(before["optimizer"])
    after["scheduler"] = now(after["optimizer"])
    update(before)
    before["scheduler"].step()
    save(connect, **before)
    client = connect()
    client.attach(**after)
    assert client.restore().step == 3
    assert after["scheduler"].last_epoch == 1


class Counting(torch.optim.SGD):
    """An optimizer that adds an option in its first step, as Lamb and Adan of timm do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("strict", [True, False])
def test_options_that_an_optimizer_makes_in_its_first_step(connect: Connect, strict: bool) -> None:
    before, now = kit(Counting, lr=0.1), kit(Counting, lr=0.1)
    save(connect, **before)
    client = connect()
    client.attach(**now)
    client.restore(strict_optimizer=strict)
    assert now["optimizer"].param_groups[0]["step"] > 0
    expected = {key: before["optimizer"].param_groups[0][key] for key in ("step", "lr", "momentum")}
    assert now["optimizer"].param_groups[0].items() >= expected.items()


def test_other_groups_are_told_how_to_go_on(connect: Connect) -> None:
    save(connect, **kit())
    now = kit()
    now["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    client = connect()
    client.attach(**now)
    with pytest.raises(StateMismatchError, match="1 in the checkpoint, 2 attached") as told:
        client.restore()
    assert 'restore(only=["model"]), then adopt()' in told.value.hint
