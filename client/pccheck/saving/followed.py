"""Every save in flight, until its end was noted and reported. Training thread only."""

from __future__ import annotations

import time
from operator import attrgetter

from pccheck.daemon.connection import Connection
from pccheck.flight.in_flight import FINAL, NOT_SAVED, InFlight
from pccheck.flight.phases import EXPLAINED, REPORTED, SAFE, SHOWN, Durable, Phase
from pccheck.flight.waiting import saved
from pccheck_native import SNAPSHOTS
from pccheck_wire.ends import Cause

from .failures import REPORTED as WORDS
from .failures import Failures

_NUMBER = attrgetter("snapshot")


class Followed:
    def __init__(self, failures: Failures, *, skips: bool) -> None:
        """`skips`: busy checkpoints are skipped, as the user asked, who reads nothing of them."""
        self._failures = failures
        self._skips = skips
        self._open: list[InFlight] = []  # their end is not noted yet
        self._recent: dict[int, InFlight] = {}  # by entry of the page
        self.newest: Durable | None = None  #: what a restart of the job gets, as far as is known

    def add(self, save: InFlight) -> None:
        """From now on its end is noted."""
        self._recent[save.snapshot % SNAPSHOTS] = save
        self._open.append(save)

    def drop(self, save: InFlight) -> None:
        """Its caller reports its end."""
        if save in self._open:
            self._open.remove(save)

    def going(self) -> list[InFlight]:
        """Those that have not ended."""
        return [save for save in self._open if save.state not in FINAL]

    def before(self, number: int) -> InFlight | None:
        """The save whose entry in the page the snapshot `number` is about to get."""
        return self._recent.get(number % SNAPSHOTS)

    def in_memory(self, step: int) -> InFlight | None:
        """The newest memory-only one of that step that has not ended. Any thread."""
        saves = sorted(self._recent.copy().values(), key=_NUMBER, reverse=True)
        mine = (one for one in saves if one.step == step and one.in_memory)
        return next((one for one in mine if one.state not in FINAL), None)

    def release(self, save: InFlight) -> None:
        """Its entry is used again, or its core is about to be closed."""
        self.note_saved(saved(save, 0, everywhere=True))
        save.settle()
        if self._recent.get(save.snapshot % SNAPSHOTS) is save:
            del self._recent[save.snapshot % SNAPSHOTS]

    def look(self) -> list[tuple[InFlight, Phase]]:
        """How far those have come whose end is not noted."""
        return [(save, save.phase) for save in self._open]

    def note(self, save: InFlight, phase: Phase, *, told: bool = False) -> Phase:
        """Takes note of a phase that `look` found, and reports an end when its reason is known,
        unless the user was `told`. Returns the phase that was noted before."""
        before, save.noted = save.noted, phase
        if phase in SAFE and before not in SAFE:
            self._failures.durable(save.step, save.requested_ns)
        skipped = phase is Phase.SKIPPED and (self._skips or save.on_device)
        if phase is Phase.SUPERSEDED or skipped:
            if phase is Phase.SUPERSEDED:
                save.ask()  # by which one: nobody can ask a daemon that has ended
            self.drop(save)
        elif _is_lost_elsewhere(save, phase) and save.in_memory and not save.is_wanted:
            self.drop(save)  # nobody wanted it on the disk, so its loss is no news
        elif phase in EXPLAINED:
            ends_now = SHOWN[phase] in NOT_SAVED and SHOWN[before] not in NOT_SAVED
            if ends_now and not _is_harmless(save):
                self._failures.failed(save)
            if not told:
                self._explain(save)
        elif phase in SAFE:
            alone = save.connection is None or save.connection.saves_alone
            if alone or phase is not Phase.DURABLE or self.before(save.snapshot) is not save:
                self.drop(save)  # it does not become global any more
        return before

    def _explain(self, save: InFlight) -> None:
        save.ask()
        reason, now = save.known_reason, save.phase
        if reason is None:
            return  # until the answer has come
        if now is not Phase.UNKNOWN:  # until another daemon has said what became of it
            self.drop(save)
        if _is_harmless(save):
            self._failures.report(save.step, reason, SHOWN[now])
        elif now not in REPORTED and SHOWN[now] in WORDS:  # not superseded meanwhile
            self._failures.failed_later(save.step, reason, SHOWN[now])

    def explain_all(self) -> None:
        """The last time that the daemon can be asked for a reason."""
        for save in (*self._open, *self._recent.values()):
            _ = save.reason
        for save, phase in self.look():
            self.note(save, phase)

    def find_out(self, connection: Connection) -> None:
        """What became of saves that an earlier daemon had copied."""
        for save in self._open:
            if save.phase is Phase.UNKNOWN:
                save.inquiry.find_out(connection, save.sequence)

    def restored(self, restored: Durable, newest: Durable | None) -> None:
        """Training continues from `restored`, which is named if reported as failed."""
        self.note_saved(newest)
        self._failures.durable(restored.step, time.monotonic_ns())
        for save in (*self._open, *self._recent.values()):
            if save.sequence == restored.sequence:
                save.inquiry.found(restored.sequence)

    def release_all(self) -> None:
        """The core has ended, or is about to be closed."""
        for save in list(self._recent.values()):
            save.keep_standing()
            self.release(save)

    def forget(self) -> None:
        """What a closed core had is noted, but for reasons and for what another daemon knows."""
        self._recent.clear()
        self._open = [save for save in self._open if save.state in NOT_SAVED][-SNAPSHOTS:]

    def has_broken(self) -> bool:
        """Whether the daemon looks for one with other ranks, once this session has ended."""
        return any(save.is_broken for save in self._recent.values())

    def note_saved(self, found: Durable | None) -> None:
        """It is durable on all ranks; `flush` returns the newest one."""
        if found is not None and (self.newest is None or found.sequence > self.newest.sequence):
            self.newest = found

    def known(self) -> Durable | None:
        """What `flush` returns already now. Changes nothing, and may come in any other call."""
        all_saved = [saved(one, 0, everywhere=True) for one in list(self._recent.values())]
        return max((one for one in (self.newest, *all_saved) if one is not None), default=None)

    def wait_saved(self, limit_s: float, *, everywhere: bool) -> None:
        """Waits for the newest one to be durable (`everywhere`); if it fails, the one before."""
        deadline = time.monotonic() + limit_s
        found = None
        for save in sorted(self._recent.values(), key=_NUMBER, reverse=True):
            # Older ones end by themselves when a newer one is durable.
            left_s = max(0.0, deadline - time.monotonic())
            save.want()
            durable = saved(save, left_s, everywhere=everywhere and not found)
            found = found or durable
            self.note_saved(saved(save, 0, everywhere=True))


def _is_lost_elsewhere(save: InFlight, phase: Phase) -> bool:
    """A rank of another node will never have it, and warns if that is a failure."""
    skipped = phase is Phase.SKIPPED and save.why.cause == Cause.OTHER_RANK
    return skipped or phase is Phase.GIVEN_UP


def _is_harmless(save: InFlight) -> bool:
    """Memory was busy: a newer one comes soon, and the one before is safe."""
    return save.why.cause == Cause.MEMORY_BUSY
