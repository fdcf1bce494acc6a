"""Which way a trainer's GPU tensors reach the daemon: the whole decision, as two pure functions.

Pull: the daemon copies out of memory that the trainer exposes. Push: the trainer copies into memory
of the daemon. The daemon decides (`offered`), and says so in `Welcome` and in its answer to every
exposure. The client takes that offer unless something on its own side is in the way (`chosen`), and
reports its choice (`Chose`). In each table the first row that applies counts. None applies: pull.

| `offered`, by the daemon | transfer | may pass |
|---|---|---|
| the CUDA driver is missing, or does not answer yet | push | as for the driver |
| the driver failed several pulled copies of the session in a row | push | yes |
| what was exposed cannot be opened or read; a proof has failed on its GPU | push | yes |

| `chosen`, by the client | transfer | may pass |
|---|---|---|
| its user has transfer="push" | push | no |
| one of its GPUs lacks what pull needs | push | no |
| the daemon offers push; or the client or the daemon refused the exposure | push | as offered |
| a checkpoint that waits for a slot needs the old exposure, which does not fit | push | yes |
"""

from __future__ import annotations

from dataclasses import dataclass, field

PULL, PUSH = "pull", "push"
#: Copies of one session in a row that fail at the driver before the daemon offers push.
FAILED_COPIES_MAX = 3
PUSHED = "GPU tensors are pushed instead"


@dataclass(frozen=True, slots=True)
class Decision:
    transfer: str
    reason: str = ""
    hint: str = ""
    may_pass: bool = False  # of push: pull is worth another try later


@dataclass(frozen=True, slots=True)
class DriverState:
    """The CUDA driver as the daemon knows it."""

    version: str = ""  # "driver 12.8"
    missing: str = ""  # why there is none; "" when the driver works
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """What the daemon knows of one trainer. The defaults stand in the way of nothing. Its user does
    not matter: the trainer has to show that it can read what it names (proofs in PROTOCOL.md)."""

    driver: DriverState = field(default_factory=DriverState)
    failed_copies: int = 0  # of its session, in a row, at the driver
    obstacle: str = ""  # that the daemon met when it opened the exposure


def offered(case: Case) -> Decision:
    """The daemon's decision for this trainer."""
    if case.driver.missing:
        return Decision(PUSH, case.driver.missing, PUSHED, case.driver.may_pass)
    if case.failed_copies >= FAILED_COPIES_MAX:
        reason = f"the GPU driver failed {case.failed_copies} pulled copies in a row"
        return Decision(PUSH, reason, PUSHED, may_pass=True)
    if case.obstacle:
        return Decision(PUSH, case.obstacle, PUSHED, may_pass=True)
    return Decision(PULL, f"CUDA IPC, {case.driver.version}")


def chosen(option: str, offer: Decision, *, lacks: str = "", stale: bool = False) -> Decision:
    """The client's choice. `option`: its user's ("auto", "pull" or "push"). `offer`: the daemon's
    latest decision. `lacks`: what a GPU of the client lacks, or "". `stale`: what is exposed does
    not fit, and has to stay."""
    auto = 'use transfer="auto", which pushes instead'
    if option == PUSH:
        return Decision(PUSH, 'the client has transfer="push"')
    if lacks:
        return Decision(PUSH, lacks, auto)
    if offer.transfer != PULL:
        return Decision(PUSH, offer.reason or "this daemon cannot pull", auto, offer.may_pass)
    if stale:
        return Decision(
            PUSH, "tensors were replaced while an earlier checkpoint waits for a slot",
            'use transfer="auto", or start pccheckd with more --slots', may_pass=True,
        )  # fmt: skip
    return Decision(PULL)
