"""The warnings of `status` about the nodes of a job: what happened, what it means, what to do."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck_native.group import Refused
from pccheck_native.nodes.facts import Have
from pccheckd.nodes import seen
from pccheckd.nodes.member import MemberPhase
from pccheckd.nodes.view import NodesView
from tests.unit.pccheck_native.nodes.cluster import A, a_list, name


def wide(*, live: bool = True, waits_s: float = 0.0, etcd: bool = False, **of_member: Any) -> Any:
    silent = {key: of_member.pop(key, none) for key, none in (("silent", ""), ("silent_s", 0.0))}
    values = {"phase": MemberPhase.RUNNING, "refused": None, "missing": "", "list": None, "at": 0,
              "patient": SimpleNamespace(**silent)}  # fmt: skip
    store = object()
    return SimpleNamespace(
        member=SimpleNamespace(**values | of_member), start=object() if live else None,
        waits_s=waits_s, carrier=object() if etcd else store, voice=store,
    )  # fmt: skip


def behind(*, at: int = 0, late_s: float = 61.0) -> Any:
    """Two nodes have steps 7 and 8; the other one is writing step 7 only."""
    made = a_list(A)
    now = time.monotonic()
    times = iter([now - late_s, now - late_s + 5])
    view = NodesView(lambda: next(times, now))
    view.saw([Have(there=(), offered=(name(7),)), Have(there=(name(7),))])
    view.saw([Have(there=(), offered=(name(7), name(8))), Have(there=(name(7),))])
    return wide(list=made, at=at, view=view)


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


def test_a_node_that_does_not_save_is_named() -> None:
    (said,) = seen.troubles(behind(late_s=65.2))
    assert said == (
        "host b (rank 1) has not begun to save step 8, which other nodes have saved 60 s ago: "
        "without it no newer checkpoint becomes global; see pccheckctl status there, and its log"
    )


def test_what_is_short_or_over_is_no_trouble() -> None:
    short = wide(), wide(silent_s=9.0), wide(waits_s=9.0), wide(live=False, **SILENT)
    for one in (*short, behind(late_s=60.0), behind(at=1, late_s=99.0)):
        assert not [*seen.troubles(one)]
