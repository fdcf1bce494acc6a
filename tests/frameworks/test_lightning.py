"""Lightning's Trainer with PCcheckCallback: killed trainings continue bit for bit; waiting comes
after forward and backward; paths of PCcheck. One process imports Lightning, and forks the
trainings."""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from pccheck import UsageError
from tests.conftest import SMALL
from tests.frameworks.forked import Forks, printed
from tests.support.daemon import Daemon
from tests.support.torchrun import started

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("lightning"), reason="lightning is not installed"
)
PROGRAM = "tests.support.lightningrun"
KILLED = "CODE -9"
WHOLE_BYTES = 3 * 4 * (16 * 512 + 512 + 2 * 512 + 512 + 1)  # parameters and both moments
STEPS = ("STEP", "VALIDATION", "END")
Read = Callable[..., list[str]]

ALONE: list[tuple[str, dict[str, object]]] = [
    ("whole", {"validate": True}),
    # In the middle of an epoch, of 6 steps.
    ("killed", {"job": "middle", "every": 4, "kill": 10, "saved": 8, "validate": True}),
    ("resumed", {"job": "middle", "every": 4, "validate": True}),
    # At its end: what the checkpoint has is the state after validation.
    ("killed-at-end", {"job": "end", "every": 6, "kill": 7, "saved": 6, "validate": True}),
    ("resumed-at-end", {"job": "end", "every": 6, "validate": True}),
    ("stopped", {"job": "stop", "every": 4, "stop": 9, "validate": True}),
    ("resumed-stopped", {"job": "stop", "every": 4, "validate": True}),
    # The training was complete, and gets another epoch.
    ("shorter", {"job": "longer", "every": 5, "epochs": 2, "validate": True}),
    ("again", {"job": "longer", "every": 5, "epochs": 2, "validate": True}),
    ("longer", {"job": "longer", "every": 5, "validate": True}),
    ("whole-accumulated", {"accumulate": 4}),
    ("killed-accumulated", {"job": "sum", "every": 1, "kill": 4, "saved": 3, "accumulate": 4}),
    ("resumed-accumulated", {"job": "sum", "every": 1, "accumulate": 4}),
    ("whole-averaged", {"average": True}),
    ("killed-averaged", {"job": "mean", "every": 4, "kill": 10, "saved": 8, "average": True}),
    ("resumed-averaged", {"job": "mean", "every": 4, "average": True}),
    ("plain", {"job": "plain", "every": 6, "plain": True, "epochs": 1, "odd": [{"a": "b"}]}),
    ("drawn", {"job": "drawn", "every": 6, "drawn": True, "epochs": 1}),
    ("folds", {"job": "folds", "kind": "folds", "every": 5, "epochs": 1}),
    ("order", {"job": "order", "kind": "order", "epochs": 1}),
    ("paths", {"job": "paths", "kind": "paths"}),
    ("crowded", {"job": "crowded", "kind": "crowded"}),
    ("crowded-at-end", {"job": "crowded-at-end", "kind": "crowded", "epochs": 2}),
    ("refused", {"job": "refused", "kind": "refused"}),
    ("fabric", {"job": "fabric", "kind": "fabric"}),
]


def reader(folder: Path) -> Read:
    def read(name: str, *starts: str, rank: int = 0) -> list[str]:
        lines = (folder / f"{name}.{rank}").read_text().splitlines()
        return [line for line in lines if line.startswith(starts or "")]

    return read


def run_alone(
    factory: pytest.TempPathFactory, name: str, scenarios: list[tuple[str, dict[str, object]]]
) -> Read:
    """Runs the trainings one after another, in one process each: one worker for all workers."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    made = [(each, options | {"folder": str(folder / "files")}) for each, options in scenarios]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            with Daemon(*SMALL) as daemon:  # with the default --slots, which allow one pin
                _run_all(daemon.start(), folder, made)
            (folder / "done").touch()
    return reader(folder)


def _run_all(daemon: Daemon, folder: Path, scenarios: list[tuple[str, dict[str, object]]]) -> None:
    output = folder / "program"
    with Forks(PROGRAM, PCCHECK_SOCKET=str(daemon.socket)) as forks:
        codes = forks.run(output, folder=str(folder), scenarios=scenarios)
    assert codes == [0], printed(output)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return run_alone(tmp_path_factory, "lightning", ALONE)


def require_resumed(whole: list[str], killed: list[str], resumed: list[str], first: int) -> None:
    """The resumed training begins with step `first`, and both computed what the whole one did."""
    assert killed[-1] == KILLED and resumed[-1] == "CODE 0", resumed
    killed, resumed = killed[:-1], [line for line in resumed if line.startswith(STEPS)]
    assert killed == whole[: len(killed)]
    assert resumed[0].split()[:2] == ["STEP", str(first)]
    assert resumed == whole[-len(resumed) :]


@pytest.mark.parametrize(
    ("suffix", "reference", "first"),
    [
        ("", "whole", 8),
        ("-at-end", "whole", 6),
        ("-accumulated", "whole-accumulated", 3),
        ("-averaged", "whole-averaged", 8),  # by a callback that comes after PCcheckCallback
    ],
)
def test_a_killed_training_goes_on_bit_for_bit(
    alone: Read, suffix: str, reference: str, first: int
) -> None:
    """Losses, batches with their random numbers, learning rates, places in the epoch, validation;
    at the end parameters, buffers and moments."""
    whole = alone(reference, *STEPS)
    require_resumed(
        whole, alone(f"killed{suffix}", *STEPS, "CODE"), alone(f"resumed{suffix}"), first
    )


def test_a_training_that_was_stopped_in_mid_epoch_goes_on_there(alone: Read) -> None:
    """Lightning counts the epoch as complete when training ends."""
    whole, resumed = alone("whole", *STEPS), alone("resumed-stopped", *STEPS)
    assert alone("stopped", "STEP")[-1].split()[:2] == ["STEP", "8"]
    assert resumed[0].split()[:2] == ["STEP", "9"]
    assert resumed == whole[-len(resumed) :]


def test_a_complete_training_may_get_more_epochs(alone: Read) -> None:
    whole = alone("whole", *STEPS)
    assert alone("shorter", *STEPS)[:-1] == whole[: len(alone("shorter", *STEPS)) - 1]
    assert alone("again", *STEPS) == []  # nothing is left to do
    longer = alone("longer", *STEPS)
    assert longer[0].startswith("STEP 12 ") and longer == whole[-len(longer) :]


def test_a_plain_loader_and_odd_hyper_parameters_are_told(alone: Read) -> None:
    lines = alone("plain")
    assert lines[-1] == "CODE 0"
    assert sum("StatefulDataLoader" in line for line in lines) == 1
    assert not any("StatefulDataLoader" in line for line in alone("whole") + alone("resumed"))


def test_a_sampler_without_a_state_is_told(alone: Read) -> None:
    assert sum("RandomSampler has no state" in line for line in alone("drawn")) == 1
    assert not any("Sampler has no state" in line for line in alone("whole") + alone("resumed"))


def test_it_is_shown_whether_a_run_was_resumed(alone: Read) -> None:
    """Lightning prints that it restores from the path, also when there is no checkpoint."""
    assert sum("has no checkpoint yet, so training begins" in one for one in alone("killed")) == 1
    assert not any("continues from step" in line for line in alone("killed"))
    assert sum("job 'middle' continues from step 8" in one for one in alone("resumed")) == 1
    assert not any("has no checkpoint yet" in line for line in alone("resumed"))
    assert not any("an earlier client of this process saved" in line for line in alone("resumed"))


def test_a_second_run_in_one_process_is_warned_of(alone: Read) -> None:
    lines = alone("folds")
    assert sum("an earlier client of this process saved" in line for line in lines) == 1
    assert len([line for line in lines if line.startswith("STEP")]) == 6  # only the first trains


def test_a_loop_of_fabric_goes_on_bit_for_bit(alone: Read) -> None:
    """Its optimizer is attached without the wrapper, whose own hooks never run."""
    lines = alone("fabric", "STEP", "CODE")
    assert lines[-1] == "CODE 0" and len(lines) == 13, alone("fabric")
    assert lines[6:12] == lines[:6]


def test_forward_and_backward_come_before_the_gate(alone: Read) -> None:
    """From the second step on; before its first step the client does not know that the attached
    optimizer trains."""
    lines = alone("order", "SAVE", "FORWARD", "GRADIENTS", "GATE", "UPDATED")
    starts = [index for index, line in enumerate(lines) if line.startswith("SAVE")]
    assert len(starts) == 6
    for begin, end in itertools.pairwise(starts):
        step = lines[begin].split()[1]
        assert lines[begin].endswith("wait=''")
        turn = [f"FORWARD {step}", f"GRADIENTS {step}", "GATE", f"UPDATED {step}"]
        assert lines[begin + 1 : end] == turn


@pytest.mark.parametrize(
    ("name", "step"),
    [("120", 120), ("7b-epoch=1-step=100.ckpt", 100), ("2026-11-22-step=5-v1.ckpt", 5)],
)
def test_the_step_of_a_path(name: str, step: int) -> None:
    from pccheck.integrations.lightning_io import place_of

    assert place_of(f"pccheck://job/{name}") == ("job", name, step)
    with pytest.raises(UsageError, match="no step is named"):
        place_of("pccheck://job/7b-last.ckpt")


def test_paths_of_pccheck(alone: Read) -> None:
    """Lightning saves the new best checkpoint before it removes the old one, and there are not
    enough slots to pin both."""
    lines = alone("paths")
    assert lines[-1] == "CODE 0", lines
    assert not any("not kept" in line for line in lines)
    assert alone("paths", "SHARED") == ["SHARED True"]
    before, after = alone("paths", "PINNED")
    assert "(18, True)" in before and "(12, True)" not in before
    assert "True" not in after and "(18, False)" in after
    assert "BEST pccheck://paths/epoch=2-step=18.ckpt FILES ['step=18.ckpt']" in lines
    assert "LOADED True" in lines
    errors = alone("paths", "ERROR")
    for line, words in zip(
        errors,
        ["job 'other'", "no step is named", "is at step 18", "parameters without", "of step 7"],
        strict=True,
    ):
        assert words in line


@pytest.mark.parametrize(("name", "pinned"), [("crowded", 18), ("crowded-at-end", 6)])
def test_a_best_checkpoint_without_a_pin_is_told_once(alone: Read, name: str, pinned: int) -> None:
    lines = alone(name)
    assert lines[-1] == "CODE 0", lines
    told = [line for line in lines if "not kept" in line]
    assert len(told) == 1 and "step=12.ckpt: not kept" in told[0] and "slots" in told[0]
    assert alone(name, "PINNED") == [f"PINNED [{pinned}]"]


def test_a_model_checkpoint_that_cannot_save_is_refused_before_training(alone: Read) -> None:
    errors = alone("refused", "ERROR")
    fixes = ["remove save_last", "a directory for files", "{step}", "{step}", "pccheck://refused"]
    for line, fix in zip(errors, fixes, strict=True):
        assert fix in line
    assert alone("refused", "STEP") == []


def test_ranks_save_one_copy_and_go_on_bit_for_bit(
    stack: ExitStack, daemon: Daemon, tmp_path: Path
) -> None:
    """Three steps make an epoch: the resumed ranks are in the middle of the second one. A loader
    whose order Lightning draws is named in a warning."""
    ranks: dict[str, object] = {"devices": 2, "strategy": "ddp"}
    scenarios = [
        ("whole", ranks),
        ("killed", ranks | {"job": "ranks", "every": 4, "kill": 5, "saved": 4}),
        ("resumed", ranks | {"job": "ranks", "every": 4}),
        ("shuffled", ranks | {"job": "shuffled", "every": 3, "epochs": 1, "shuffle": True}),
    ]
    program = (PROGRAM, tmp_path, json.dumps(scenarios))
    launcher = stack.enter_context(started(daemon, "ranks", 2, *program))
    said = launcher.finish()
    assert launcher.returncode == 0, said
    read = reader(tmp_path)
    require_ranks_resumed(read)
    sizes = [int(read("resumed", "BYTES", rank=rank)[0].split()[1]) for rank in range(2)]
    assert max(sizes) < WHOLE_BYTES < sum(sizes)
    told = [
        sum("sampler=DistributedSampler" in line for line in read(name, rank=rank))
        for name in ("killed", "resumed", "shuffled")
        for rank in range(2)
    ]
    assert told == [0, 0, 0, 0, 1, 0]


def require_ranks_resumed(read: Read) -> None:
    for rank in range(2):
        require_resumed(
            read("whole", *STEPS, rank=rank),
            read("killed", *STEPS, "CODE", rank=rank),
            read("resumed", rank=rank),
            4,
        )
    assert read("whole", *STEPS, rank=0) != read("whole", *STEPS, rank=1)


def test_two_nodes_go_on_bit_for_bit_and_keep_the_best(
    stack: ExitStack, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Each node has a whole copy, and pins and unpins of its own."""
    daemons = [start_daemon(), start_daemon()]
    environments = {
        rank: {
            "PCCHECK_SOCKET": str(daemon.socket), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
        }
        for rank, daemon in enumerate(daemons)
    }  # fmt: skip
    ranks: dict[str, object] = {
        "devices": 1, "nodes": 2, "strategy": "ddp", "environments": environments
    }  # fmt: skip
    scenarios = [
        ("whole", ranks),
        ("killed", ranks | {"job": "ranks", "every": 4, "kill": 5, "saved": 4}),
        ("resumed", ranks | {"job": "ranks", "every": 4}),
        ("best", ranks | {"job": "best", "kind": "crowded", "best": 1}),
    ]
    program = (PROGRAM, tmp_path, json.dumps(scenarios))
    launcher = stack.enter_context(started(daemons[0], "ranks", 2, *program))
    said = launcher.finish()
    assert launcher.returncode == 0, said
    read = reader(tmp_path)
    require_ranks_resumed(read)
    for rank in range(2):
        assert int(read("resumed", "BYTES", rank=rank)[0].split()[1]) > WHOLE_BYTES
        assert read("best", "PINNED", "CODE", rank=rank) == ["PINNED [9]", "CODE 0"]
