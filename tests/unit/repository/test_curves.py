"""What a script prints becomes the losses of its ranks; where two runs are not the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.curves import Run, Trainer, differences


def launch(tmp_path: Path, text: str, end: int = 0) -> Trainer:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.stdout.write({text!r})\nsys.exit({end})\n")
    return Trainer(script, variables={})


def test_lines_of_ranks_that_ran_into_each_other_are_told_apart(tmp_path: Path) -> None:
    run = launch(
        tmp_path,
        "hello\nresumed at step 4, from dram\nstep 5 loss -1.5\n"
        "rank 0 step 6 loss 2.5e-07rank 1 step 6 loss nan\n\nrank 1 step 7 loss inf",
    ).finish()
    assert run.losses == {5: {0: "-1.5"}, 6: {0: "2.5e-07", 1: "nan"}, 7: {1: "inf"}}
    assert (run.resumed, run.last) == (4, 7)
    assert run.said == ["hello", "resumed at step 4, from dram"]


def test_a_script_that_fails_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"script\.py ended with 3\nno data"):
        launch(tmp_path, "no data\nstep 1 loss 0.5\n", end=3).finish()


def test_a_loss_that_differs_in_its_last_bit_is_found_and_the_first_comes_first() -> None:
    loss = 0.1 + 0.2
    wanted = Run({step: {0: repr(loss), 1: "1.0"} for step in (1, 2, 3)})
    same = Run({2: {0: repr(loss)}, 3: {1: "1.0"}})
    assert differences(wanted, wanted, same) == []
    other = Run({3: {0: repr(loss)}, 2: {1: "1.0", 0: "0.3"}, 4: {0: "1.0"}})
    found = differences(wanted, same, other)
    assert [(one.step, one.rank, one.wanted) for one in found] == [
        (2, 0, repr(loss)),
        (4, 0, "none"),
    ]
    assert str(found[0]) == "step 2, rank 0: loss 0.3 instead of 0.30000000000000004"
