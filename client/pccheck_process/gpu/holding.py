"""Holds processes in the driver while CRIU has them: all are locked, then all are checkpointed; and
in the end, whatever happened, all are restored, then unlocked.

A restore begins in the middle of that: CRIU has made the processes, which are checkpointed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pccheck_process.looking import Looked
from pccheck_process.procs.members import descendants
from pccheck_process.procs.procfs import Proc
from pccheck_wire.errors import CheckpointFailedError, DeviceError, PccheckError, RefusedError

from . import devices, driver, guard, journal
from .driver import CHECKPOINTED, LOCKED, RUNNING, SUCCESS, Asking, CallLimits
from .inspecting import GpuUser, user_of
from .journal import HeldProcess, HoldJournal

LIMITS = CallLimits()
_FILES = Proc(Path("/proc"))
#: A guard ends after so long, and when it has seen so often that all is well.
_GUARD_LIMIT_S, _GUARD_LOOK_S, _CALM_LOOKS = 3600.0, 0.3, 3


class HeldProcesses:
    """Is made by `hold`. Without a GPU it does nothing."""

    def __init__(self, asking: Asking | None = None) -> None:
        self.since_s = time.monotonic()  #: when the target began to stand still
        self.facts: dict[str, Any] = {}  #: for the image
        self._asking = asking
        self._noted: HoldJournal | None = None
        self._guard: guard.Guard | None = None

    def begin(self, users: Sequence[GpuUser], asking: Asking) -> None:
        """Raises PccheckError; `release` is due then, too."""
        found = _with_state(users, asking, RUNNING)
        if not found:
            return
        seen = asking.devices()
        used = {one.pid: devices.used_by(one, seen) for one in found}
        self.facts = devices.noted(used, seen, asking.driver.version)
        held = [_held(one, used[one.pid], {}, asking) for one in found]
        self.note(held)
        self.since_s = time.monotonic()
        for one in held:
            asking.lock(one.pid)
        for one in held:
            asking.checkpoint(one.pid, one.nbytes)
        _require_closed(held)

    def note(self, processes: Sequence[HeldProcess]) -> None:
        """On disk, before anything is locked; from then on a guard watches this process."""
        self._noted = journal.write(processes)
        with contextlib.suppress(OSError):  # without one the note is left to the next command
            self._guard = guard.Guard(self._noted)

    def release(self) -> PccheckError | None:
        """Lets all go on that are still there; returns what went wrong. Later calls do nothing."""
        if self._noted is None or self._asking is None:
            return None
        settled = self._asking.settle()
        troubles = undone(self._noted.processes, self._asking)
        if not settled:
            troubles.append(DeviceError("a call of the NVIDIA driver has still not returned"))
        self._close(done=not troubles)
        return troubles[0] if troubles else None

    def forget(self) -> None:
        """The processes are gone, or go on: there is nothing to undo."""
        if self._noted is not None:
            self._close(done=True)

    def _close(self, *, done: bool) -> None:
        assert self._noted is not None
        self._noted.close(done=done)
        self._noted = None
        if self._guard is not None:
            self._guard.close(done=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        trouble = self.release()
        if trouble is not None and isinstance(error, PccheckError):
            error.message += f"; {trouble.message}"
        elif trouble is not None and error is None:
            raise trouble


def hold(looked: Looked, lives: Callable[[], None] = lambda: None) -> HeldProcesses:
    """Takes what the processes of the tree have on GPUs into their own memory. The caller gets
    something to release. Raises PccheckError, and then they go on."""
    return hold_all(descendants(_FILES, looked.pid), LIMITS, lives, needed=looked.gpu)


def hold_all(
    pids: Iterable[int], limits: CallLimits, lives: Callable[[], None], *, needed: bool
) -> HeldProcesses:
    """`needed`: some use a GPU for certain."""
    users = [one for pid in pids if (one := user_of(_FILES, pid))]
    asking = _asking(lives, limits, needed=needed) if users else None
    if asking is None:
        return HeldProcesses()
    recover()
    held = HeldProcesses(asking)
    with contextlib.ExitStack() as stack:
        stack.enter_context(held)
        held.begin(users, asking)
        stack.pop_all()
    return held


def _asking(lives: Callable[[], None], limits: CallLimits, *, needed: bool) -> Asking | None:
    """With the driver started. None for a driver that cannot do it, and need not."""
    try:
        asking = Asking(driver.load(), limits, lives)
        asking.driver.start(asking)
    except (RefusedError, DeviceError):
        if needed:
            raise
        return None
    return asking


def _with_state(users: Iterable[GpuUser], asking: Asking, wanted: int) -> list[GpuUser]:
    """Those that have CUDA. Raises RefusedError when one is in another state."""
    found = []
    for one in users:
        code, state = asking.state_code(one.pid)
        if code != SUCCESS and one.devices:
            raise CheckpointFailedError(
                f"the driver does not know {one}, which has {one.devices[0]} open: "
                f"{asking.driver.name(code)}",
                hint="it may be starting, or use the GPU without CUDA: try again later",
                retryable=True,
            )
        if code == SUCCESS and state != wanted:
            raise RefusedError(
                f"{one} is {driver.state_name(state)} in the driver, not "
                f"{driver.state_name(wanted)}",
                hint="let the other program finish that did this (cuda-checkpoint, for example)",
            )
        if code == SUCCESS:
            found.append(one)
    return found


def _held(
    user: GpuUser, used: devices.UsedGpus, chosen: Mapping[str, str], asking: Asking
) -> HeldProcess:
    pairs = tuple(devices.pairs(used, chosen)) if asking.driver.takes_map else ()
    return HeldProcess(user.pid, user.member.stat.start_time, used, pairs)


def _require_closed(held: Iterable[HeldProcess]) -> None:
    """CRIU cannot dump what is still open then."""
    for one in held:
        user = user_of(_FILES, one.pid)
        if user is not None and user.devices:
            raise CheckpointFailedError(
                f"{user} keeps {', '.join(user.devices)} open although the driver has "
                "checkpointed it",
                hint="NVML, graphics and GPUDirect are not CUDA: let the program close them before",
            )


# -- going on ----------------------------------------------------------------------------------


def undone(processes: Sequence[HeldProcess], asking: Asking) -> list[PccheckError]:
    """Restores and unlocks, from whatever state each is in. Returns what went wrong. Goes through
    all: one that fails keeps no other from going on."""
    troubles: dict[int, PccheckError] = {}
    for step in (_restored, _unlocked):
        for one in processes:
            if one.pid in troubles or not one.is_there:
                continue
            try:
                step(one, asking)
            except PccheckError as error:
                if one.is_there:
                    troubles[one.pid] = error
    return [*troubles.values()]


def _restored(one: HeldProcess, asking: Asking) -> None:
    state = asking.state(one.pid, one.nbytes)
    if state == CHECKPOINTED:
        _await_room([one], asking, f"process {one.pid} stays checkpointed, in host memory")
        asking.restore(one.pid, one.nbytes, one.pairs)
    elif state not in (RUNNING, LOCKED):
        raise DeviceError(
            f"the driver has lost process {one.pid}, which is {driver.state_name(state)}",
            hint="end the process, and restore it from its newest snapshot",
        )


def _unlocked(one: HeldProcess, asking: Asking) -> None:
    if asking.state(one.pid, one.nbytes) == LOCKED:
        asking.unlock(one.pid)


def _await_room(processes: Sequence[HeldProcess], asking: Asking, otherwise: str) -> None:
    """Others may have taken the memory meanwhile. `otherwise`: what follows from that."""
    used = [one.used for one in processes]
    chosen = {old: new for one in processes for old, new in one.pairs}
    until_s = time.monotonic() + asking.limits.room_s
    while why := devices.lacking(used, chosen, asking.devices()):
        if not asking.wait(until_s):
            raise DeviceError(
                f"{why}, so {otherwise}",
                hint=f"end what uses that GPU; {driver.DOCTOR_HINT}",
                retryable=True,
            )


def recover() -> tuple[list[int], list[PccheckError]]:
    """Lets processes go on that a killed command of this user left in the driver: which do, and
    what went wrong with others. Without leftovers the driver is not touched."""
    going: list[int] = []
    troubles: list[PccheckError] = []
    for one in journal.left():
        found = _tried(one.processes) if one.processes else []
        one.close(done=not found)
        troubles += found
        going += [] if found else [held.pid for held in one.processes]
    return going, troubles


def held_now() -> list[int]:
    """Processes that a command of this user, or its guard, holds in the driver."""
    return sorted(one.pid for one in journal.busy())


def _tried(processes: Sequence[HeldProcess], limits: CallLimits = LIMITS) -> list[PccheckError]:
    try:
        asking = _asking(lambda: None, limits, needed=True)
        assert asking is not None
        return undone(processes, asking)
    except PccheckError as error:
        return [error]


def finish(noted: HoldJournal) -> None:
    """What a guard does: tries until all go on, or are gone. Looks again afterwards: a call of the
    dead command may have come to its end only then."""
    until_s, calm = time.monotonic() + _GUARD_LIMIT_S, 0
    while calm < _CALM_LOOKS and time.monotonic() < until_s:
        calm = 0 if _tried(noted.processes) else calm + 1
        if not any(one.is_there for one in noted.processes):
            break
        time.sleep(_GUARD_LOOK_S)
    noted.close(done=calm > 0 or not any(one.is_there for one in noted.processes))


# -- restoring ---------------------------------------------------------------------------------


def refusals(
    facts: Mapping[str, Any], chosen: Mapping[str, str], *, force: bool = False
) -> list[str]:
    """As those of `devices`, once nothing is left of killed commands, which takes room on GPUs."""
    if facts.get("processes"):
        recover()
    return devices.refusals(facts, chosen, force=force)


def wake(
    facts: Mapping[str, Any], maker: int | None, chosen: Mapping[str, str],
    limits: CallLimits = LIMITS,
) -> None:  # fmt: skip
    """Gives processes that CRIU has made their GPUs. `maker`: of their PID namespace, if they have
    one. `chosen`: old -> new UUID. Raises PccheckError, and then they are killed."""
    noted = devices.used_in(facts)
    if not noted:
        return
    outer = devices.outer_pids(noted.keys(), maker)
    used = {outer[pid]: one for pid, one in noted.items()}
    users = [one for pid in used if (one := user_of(_FILES, pid))]
    try:
        asking = _asking(lambda: None, limits, needed=True)
        assert asking is not None
        _woken(users, used, chosen, asking)
    except BaseException as error:
        _kill(users)
        if isinstance(error, PccheckError):
            error.hint = "the process was ended again, and its snapshot is as it was"
        raise


def _woken(
    users: Sequence[GpuUser], used: Mapping[int, devices.UsedGpus], chosen: Mapping[str, str],
    asking: Asking,
) -> None:  # fmt: skip
    held = HeldProcesses(asking)
    found = _with_state(users, asking, CHECKPOINTED)
    if len(found) < len(used):
        raise CheckpointFailedError("a restored process has nothing of its GPU in its image")
    processes = [_held(one, used[one.pid], chosen, asking) for one in found]
    try:
        held.note(processes)
        _await_room(processes, asking, "the process cannot go on there")
        for one in processes:
            asking.restore(one.pid, one.nbytes, one.pairs)
        _require_there(processes, chosen, asking)
        for one in processes:
            asking.unlock(one.pid)
    except BaseException:
        _kill(users)
        raise
    finally:
        held.forget()


def _require_there(
    processes: Sequence[HeldProcess], chosen: Mapping[str, str], asking: Asking
) -> None:
    seen = asking.devices()
    for one in processes:
        if where := devices.strayed(one.pid, one.used, chosen, seen):
            wanted = ", ".join(sorted(chosen.get(old, old) for old in one.used.nbytes))
            raise DeviceError(
                f"the driver has put process {one.pid} on GPU {where}, not on {wanted}"
            )


def _kill(users: Iterable[GpuUser]) -> None:
    for one in users:
        with contextlib.suppress(ProcessLookupError):
            if journal.is_there(one.pid, one.member.stat.start_time):
                os.kill(one.pid, signal.SIGKILL)
