"""When PCcheckCallback saves in Lightning: behind all hooks, whatever the order of the callbacks,
and never while an optimizer adds up gradients. Killed trainings continue bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.frameworks.test_lightning import STEPS, Read, require_resumed, run_alone

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("lightning"), reason="lightning is not installed"
)
#: Name: shape, options of the killed run, and the step with which the resumed run begins. An epoch
#: has 6 batches.
KILLED: dict[str, tuple[str, dict[str, object], int]] = {
    "swap": ("swap", {"every": 6, "kill": 7}, 6),
    "swap-saver-last": ("swap", {"every": 6, "kill": 7, "last": True}, 6),
    "swap-mid-epoch": ("swap-mid-epoch", {"every": 3, "kill": 4}, 3),
    "swaps-itself": ("swaps-itself", {"every": 6, "kill": 13}, 12),
    "average": ("average", {"every": 3, "kill": 4}, 3),
    "average-saver-last": ("average", {"every": 6, "kill": 7, "last": True}, 6),
    "clips": ("clips", {"every": 4, "kill": 9}, 8),
    "clips-epoch": ("clips", {"every": 6, "kill": 7}, 6),
    "perturbs": ("perturbs", {"every": 4, "kill": 9}, 8),
    "perturbs-epoch": ("perturbs", {"every": 6, "kill": 7}, 6),
    "steps-itself": ("steps-itself", {"every": 3, "kill": 5}, 4),
    "anneals": ("anneals", {"every": 6, "kill": 7}, 6),
    "plateau": ("plateau", {"every": 4, "kill": 9}, 8),
    "plateau-early": ("plateau-early", {"every": 5, "kill": 11}, 10),
    "manual": ("manual", {"every": 1, "kill": 3}, 2),
    "manual-skips": ("manual-skips", {"every": 1, "kill": 4}, 3),
    "two": ("two", {"every": 1, "kill": 6}, 4),
    "turns": ("turns", {"every": 1, "kill": 5}, 4),
    "stream": ("stream", {"every": 6, "kill": 7}, 6),
    "schedule-free": ("schedule-free", {"every": 3, "kill": 4}, 3),
    "schedule-free-epoch": ("schedule-free", {"every": 6, "kill": 8}, 6),
    "unfreezes": ("unfreezes", {"every": 4, "kill": 9}, 8),
    "unfreezes-epoch": ("unfreezes", {"every": 6, "kill": 7}, 6),
    "swa": ("swa", {"every": 4, "kill": 17, "epochs": 4}, 16),
    "swa-before": ("swa", {"every": 4, "kill": 5, "epochs": 4}, 4),
    "swa-begun": ("swa", {"every": 4, "kill": 9, "epochs": 4}, 8),
    "swa-epoch": ("swa", {"every": 6, "kill": 13, "epochs": 4}, 12),
    "rate": ("rate", {"every": 4, "kill": 9}, 8),
    "size": ("size", {"every": 4, "kill": 13, "epochs": 1}, 12),
    "reloads": ("reloads", {"every": 4, "kill": 9, "epochs": 4}, 8),
}
#: Killed, resumed in the same epoch, killed again, and resumed again.
AGAIN = ("sized", "sized-worker")
#: Ends after two epochs; then a third one is asked for.
LONGER = {"clips": {}, "swap": {}, "swap-saver-last": {"last": True}, "swap-at-end": {}}


def scenarios() -> list[tuple[str, dict[str, object]]]:
    shapes = {shape for shape, _, _ in KILLED.values()} | {"swap-at-end"} | {*AGAIN}
    epochs = {shape: options.get("epochs", 3) for shape, options, _ in KILLED.values()}
    made: list[tuple[str, dict[str, object]]] = [
        (f"whole-{shape}", {"shape": shape, "epochs": epochs.get(shape, 3)})
        for shape in sorted(shapes)
    ]
    for name, (shape, options, first) in KILLED.items():
        resumed = options | {"shape": shape, "job": name, "kill": 0}
        made += [
            (f"killed-{name}", resumed | {"kill": options["kill"], "saved": first}),
            (f"resumed-{name}", resumed),
        ]
    for shape in AGAIN:
        mine = {"shape": shape, "job": f"again-{shape}", "every": 1}
        for at in (2, 4, 0):
            made.append((f"again-{shape}-{at}", mine | {"kill": at, "saved": at - 1}))
    searches: dict[str, object] = {"shape": "searches", "job": "searches", "every": 4, "epochs": 1}
    made += [("searches", searches), ("resumed-searches", searches | {"epochs": 2})]
    stopped: dict[str, object] = {"shape": "swap-mid-epoch", "every": 20}
    ended: dict[str, object] = {"shape": "swap-mid-epoch", "job": "ended", "every": 20}
    for at in (9, 12):  # in mid-epoch, and its end
        mine = ended | {"job": f"ended-{at}"}
        made.append((f"ended-{at}", mine | {"kind": "terminated", "at": at}))
        made.append((f"resumed-ended-{at}", mine))
    for at in (8, 9):  # with and without a validation that is due
        mine = stopped | {"job": f"stopped-{at}"}
        made += [(f"stopped-{at}", mine | {"stop": at}), (f"resumed-stopped-{at}", mine)]
        mine = stopped | {"job": f"steps-{at}"}
        made += [(f"steps-{at}", mine | {"steps": at}), (f"resumed-steps-{at}", mine)]
    for name, more in (LONGER | {"average": {}, "swa": {}}).items():
        shape = name.removesuffix("-saver-last")
        options = {"shape": shape, "job": f"longer-{name}", "every": 5, "epochs": 2, **more}
        made += [(f"shorter-{name}", options), (f"again-{name}", options)]
        made.append((f"longer-{name}", options | {"epochs": 3}))
    return [(name, {"kind": "shaped", **options}) for name, options in made]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return run_alone(tmp_path_factory, "moments", scenarios())


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_training_goes_on_behind_all_hooks(ran: Read, name: str) -> None:
    """Losses, batches, learning rates, logged steps, validations, and the last parameters."""
    shape, _, first = KILLED[name]
    killed, resumed = ran(f"killed-{name}", *STEPS, "CODE"), ran(f"resumed-{name}")
    require_resumed(ran(f"whole-{shape}", *STEPS), killed, resumed, first)


@pytest.mark.parametrize("shape", AGAIN)
def test_a_second_resume_in_one_epoch_gets_the_next_batch(ran: Read, shape: str) -> None:
    """Of a stream without a state, which has the batches that were had skipped one by one."""
    whole, lines = ran(f"whole-{shape}", *STEPS), ran(f"again-{shape}-0", *STEPS)
    require_resumed(whole, ran(f"again-{shape}-4", *STEPS, "CODE")[-1:], [*lines, "CODE 0"], 3)


@pytest.mark.parametrize("name", LONGER)
def test_a_finished_training_goes_on_with_its_own_weights(ran: Read, name: str) -> None:
    whole, longer = ran(f"whole-{name.removesuffix('-saver-last')}", *STEPS), f"longer-{name}"
    lines = ran(longer, *STEPS)
    assert lines and lines[0].startswith("STEP 12 ") and lines == whole[-len(lines) :], ran(longer)


def test_a_finished_training_leaves_the_same_model_again(ran: Read) -> None:
    left = ran("shorter-swap-at-end", "LEFT")
    assert len(left) == 1 and ran("again-swap-at-end", "LEFT", "STEP") == left


@pytest.mark.parametrize("name", ["average", "swa"])
def test_more_epochs_with_averaged_weights_are_told(ran: Read, name: str) -> None:
    told = [
        sum("put other weights" in line for line in ran(f"{kind}-{name}"))
        for kind in ("shorter", "again", "longer", "resumed")
    ]
    assert told == [0, 0, 1, 0]


@pytest.mark.parametrize("how", ["stopped", "steps"])
@pytest.mark.parametrize(("at", "first"), [(8, "STEP 8 "), (9, "VALIDATION 9 ")])
def test_a_stopped_training_goes_on_behind_its_last_batch(
    ran: Read, how: str, at: int, first: str
) -> None:
    """By `should_stop` or `max_steps`. Lightning validates when training ends, and the callback
    then exchanges the weights."""
    whole, lines = ran("whole-swap-mid-epoch", *STEPS), ran(f"resumed-{how}-{at}", *STEPS)
    assert lines[0].startswith(first) and lines == whole[-len(lines) :]


@pytest.mark.parametrize("at", [9, 12])
def test_a_terminated_training_goes_on_after_its_last_step(ran: Read, at: int) -> None:
    """A validation is due, and Lightning raises in it. The resumed run validates."""
    assert ran(f"ended-{at}", "STEP")[-1].startswith(f"STEP {at - 1} ")
    whole, lines = ran("whole-swap-mid-epoch", *STEPS), ran(f"resumed-ended-{at}", *STEPS)
    assert lines[0].startswith(f"VALIDATION {at} ") and lines == whole[-len(lines) :]


def test_a_resumed_training_needs_no_tuner(ran: Read) -> None:
    """... and has what the tuner had found."""
    assert sum("LearningRateFinder: skipped" in line for line in ran("resumed-rate")) == 1
    assert ran("resumed-size", "LOADER") == ["LOADER 0 2"]
    assert not any("skipped" in line for line in ran("killed-rate") + ran("killed-size"))


def test_counters_that_a_tuner_has_reset_are_refused(ran: Read) -> None:
    assert ran("searches", "CODE") == ["CODE 0"]
    assert ran("resumed-searches", "CODE") == ["CODE 1"]
    assert any("step 6 was loaded, and training would" in one for one in ran("resumed-searches"))


def test_loaders_made_in_another_epoch_are_told(ran: Read) -> None:
    assert ran("whole-reloads", "LOADER") == ["LOADER 0 8", "LOADER 2 8"]
    assert ran("resumed-reloads", "LOADER") == ["LOADER 1 8", "LOADER 2 8"]
    told = [
        sum("train_dataloader() was called in epoch 0" in line for line in ran(name))
        for name in ("killed-reloads", "resumed-reloads", "resumed-rate")
    ]
    assert told == [0, 1, 0]


class Batches:
    """Manual optimization with `count` optimizers, and what is asked after each batch."""

    def __init__(self, count: int = 1) -> None:
        from pccheck.integrations.lightning_moments import _Gradients

        self.parts = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
        self.optimizers = [torch.optim.SGD([each], lr=0.1) for each in self.parts]
        module = SimpleNamespace(automatic_optimization=False)
        trainer: Any = SimpleNamespace(lightning_module=module, optimizers=self.optimizers)
        self.gradients = _Gradients(trainer)

    def batch(self, *turns: Callable[[], object]) -> bool:
        for turn in turns:
            turn()
        return self.gradients.held(True)

    def backward(self, *parts: int) -> None:
        sum(self.parts[part].sum() for part in parts).backward()  # type: ignore[union-attr]

    def discard(self, part: int = 0) -> None:
        self.optimizers[part].zero_grad(set_to_none=False)


def test_gradients_that_a_step_has_used_are_not_held() -> None:
    one = Batches()
    step, backward = one.optimizers[0].step, lambda: one.backward(0)
    assert one.batch(backward) and not one.batch(backward, step)  # the gradient stays
    assert one.batch(backward) and not one.batch(step, one.discard) and not one.batch()
    assert one.batch(step, backward)


def test_gradients_of_another_optimizers_loss_are_not_held() -> None:
    two = Batches(2)
    first, second = (each.step for each in two.optimizers)
    assert not two.batch(lambda: two.backward(0), first, lambda: two.backward(0, 1), second)
    assert two.batch(two.discard, lambda: two.backward(0, 1), first)
    assert not two.batch(lambda: two.backward(0), first, second)


def test_gradients_that_stay_for_ever_are_told_and_saves_go_on() -> None:
    one = Batches()
    turn = one.optimizers[0].step, lambda: one.backward(0)
    with pytest.warns(UserWarning, match="optimizer 0 holds gradients"):
        answers = [one.batch(*turn) for _ in range(300)]
    assert answers.index(False) == 255 and not any(answers[255:])
