"""The warnings of `status` about the nodes of a job: what happened, what it means, what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_native.group import Refused
from pccheckd.nodes import seen
from pccheckd.nodes.member import MemberPhase


def wide(*, live: bool = True, waits_s: float = 0.0, etcd: bool = False, **of_member: Any) -> Any:
    values = {"phase": MemberPhase.RUNNING, "refused": None, "silent": "", "silent_s": 0.0,
              "missing": ""}  # fmt: skip
    store = object()
    return SimpleNamespace(
        member=SimpleNamespace(**values | of_member), start=object() if live else None,
        waits_s=waits_s, carrier=object() if etcd else store, voice=store,
    )  # fmt: skip


SILENT = {"silent_s": 12.3, "silent": "Connection reset by peer"}
GO_ON = "this node still saves checkpoints, but none becomes global"

CASES = {
    "refused": (
        wide(phase=MemberPhase.REFUSED, refused=Refused("no", "do this"), **SILENT),
        "this start is refused: no; do this",
    ),
    "the torch store is silent": (
        wide(**SILENT, waits_s=20.0),
        "the store of the job has not answered for 12 s (Connection reset by peer): "
        f"{GO_ON}; check that the process with the store (torchrun's agent, or rank 0) runs, and "
        "that this node reaches it",
    ),
    "etcd is silent": (
        wide(silent_s=12.3, etcd=True),
        f"etcd (--coordinator) has not answered for 12 s (no answer): {GO_ON}; check that etcd "
        "runs, and that this node reaches it",
    ),
    "not agreed": (
        wide(waits_s=11.0, missing="rank 1 of 2 did not come"),
        "its nodes have not agreed for 11 s, and no checkpoint is saved (rank 1 of 2 did not "
        "come): start the ranks that are missing; if they run, see pccheckctl status on their "
        "nodes",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_warning_says_what_to_do(case: str) -> None:
    given, said = CASES[case]
    assert [*seen.troubles(given)] == [said]


def test_what_is_short_or_over_is_no_trouble() -> None:
    for one in (wide(), wide(silent_s=9.0), wide(waits_s=9.0), wide(live=False, **SILENT)):
        assert not [*seen.troubles(one)]
