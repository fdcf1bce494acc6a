"""What a run begins from: restore(), recover() and adopt(), and which checkpoints there are."""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from pccheck.daemon.connection import Connection
from pccheck.daemon.session import Session
from pccheck.flight.phases import Durable
from pccheck.job import origin
from pccheck.job.steps import Steps
from pccheck.saving.planner import Planner
from pccheck.state.plan import RNG
from pccheck.unsaved import trainable
from pccheck.warn import LOG, Warner
from pccheck_native import Client, NativeError
from pccheck_store.reading.state_reader import StateReader
from pccheck_wire import tree
from pccheck_wire.errors import DamagedError, NoCheckpointError, StateMismatchError, UnreadableError
from pccheck_wire.messages import ListVolumes, Open, Opened, Report

from .inplace import Placement
from .loaders import Iterators, begin_again, has_position
from .reading import Found, RestoreResult, ask_open, read_newest
from .rebuild import state_of_tree

LIST_LIMIT_S = 30.0


class State(enum.Enum):
    """What is attached, as far as restores have changed it."""

    WHOLE = "of one step"
    CHANGING = "a restore changes all of it, or did not finish"
    CHANGING_PART = "a restore changes a part of it, or did not finish"
    MIX = "of two steps, though the last restore, of a part, has finished"
    CHANGING_PART_OF_MIX = "the same while a restore changes a part of it"


class Move(enum.Enum):
    ALL = "a restore of all begins to change it"
    PART = "a restore of a part begins to change it"
    END = "the restore has finished"


#: After an error or Ctrl-C the state stays as it is until the next restore begins.
MOVES: dict[State, dict[Move, State]] = {
    State.WHOLE: {Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART},
    State.CHANGING: {
        Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART_OF_MIX, Move.END: State.WHOLE
    },
    State.CHANGING_PART: {
        Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART_OF_MIX, Move.END: State.WHOLE
    },
    State.MIX: {Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART_OF_MIX},
    State.CHANGING_PART_OF_MIX: {
        Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART_OF_MIX, Move.END: State.MIX
    },
}  # fmt: skip


class Saved(NamedTuple):
    """A checkpoint that can be restored; or that is pinned, while its step was saved again."""

    step: int
    sequence: int  # the order of checkpoints; steps may go back
    age_s: float
    nbytes: int  # of this rank's part
    pinned: bool


class Recovery:
    """Used under the client's lock."""

    def __init__(
        self, session: Session, planner: Planner, steps: Steps, warner: Warner, *, replicated: bool
    ) -> None:
        self._state = State.WHOLE
        self._why_mixed = ""
        #: What a restart got when this run took over: at least as new as what it restored.
        self.newest: Durable | None = None
        #: Which parameters required gradients in what was restored, by the name of the module.
        self.trainable: dict[str, list[bool]] = {}
        self._session, self._planner, self._steps = session, planner, steps
        self._warner, self._replicated = warner, replicated

    @property
    def torn(self) -> str:
        """Why the attached state is a mix, after a restore that did not finish; else ""."""
        return "" if self._state is State.WHOLE else self._why_mixed

    def restore(
        self,
        connection: Connection,
        step: int | None,
        words: tuple[str, list[str]],
        *,
        strict_optimizer: bool,
        only: Collection[str] | None,
    ) -> tuple[RestoreResult, bool, int]:
        """Restores what is attached. `words`: the start and the nodes of `Open`. Also returns
        whether it has GPU tensors, and payload bytes."""
        # On several nodes the first question decides for all of them where this start continues.
        looks = step is not None and not self._session.identity.is_wide
        if only is None:
            _pin(connection.native, self._planner.gpus())
        newest = self.settle(connection) if looks else None

        def use(opened: Opened, reader: StateReader, described: tree.Tree) -> bool:
            self._require(opened, described)
            attached = self._planner.attached
            left = self._left(opened, described, only)
            self._planner.zero_options.inward()
            placement = Placement(
                described, attached, left, reader.others,
                strict_optimizer=strict_optimizer, only=only, reaches_gpus=reader.reaches_gpus,
            )  # fmt: skip
            placement.targets.compare(reader.read_into)
            self._move(Move.ALL if only is None else Move.PART)
            if self._state is not State.CHANGING_PART_OF_MIX:
                self._why_mixed = (
                    f"the attached state is a mix of two steps: the restore of step {opened.step} "
                    "did not finish"
                )
            chosen = attached if only is None else only
            iterators = Iterators({name: attached[name] for name in chosen})
            placement.targets.load(reader.read_into)
            self._planner.zero_options.outward()
            for name in left - {RNG}:
                begin_again(attached[name])
            iterators.restored(self._outdated)
            self._move(Move.END)
            return placement.on_gpu

        found, source = read_newest(
            connection,
            step,
            use,
            any_world_size=self._reads_all,
            words=words,
            job=self._session.identity.job,
        )
        self._planner.forget()
        if source is None:
            self._session.took_over(connection, 0)
            self._nothing_here()
            return RestoreResult(skipped=found.skipped), False, 0
        if only is None:
            self._took_over(connection, found, source, newest, base=found.sequence)
            self._steps.restored(found.sequence, self._session.incarnation)
        else:
            self._session.restored_in_part(found.step, only)
        result = RestoreResult(
            found.step, found.sequence, found.source, found.skipped, found.metadata
        )
        return result, found.state, source[0].payload_bytes

    def _move(self, move: Move) -> None:
        self._state = MOVES[self._state][move]

    def _outdated(self, name: str) -> None:
        self._warner.once(
            f"iterator {name}",
            f"an iterator of {name} that was made before restore() continues its own batches, not "
            "those after the checkpoint: restore() sets the position of the next iterator. Call "
            "restore() before iter(), cycle() and whatever fetches batches ahead",
        )

    def recover(self, connection: Connection, step: int | None) -> Found:
        """As a value. Without `step` it counts as restored."""
        found, source = read_newest(
            connection,
            step,
            lambda _, reader, described: state_of_tree(described, reader.read_into),
            any_world_size=self._reads_all,
            job=self._session.identity.job,
        )
        if source is not None:
            self._require(*source)
            if step is None:
                self._took_over(connection, found, source, None)
        else:
            self._nothing_here()
        return found

    def adopt(self, connection: Connection) -> None:
        """What there is counts as restored."""
        newest = self.settle(connection)
        self._session.took_over(connection, newest.sequence if newest else 0)
        self.newest = newest

    def settle(self, connection: Connection) -> Durable | None:
        """The newest checkpoint, once all that was copied is written; None without one. Nothing
        counts as restored."""
        try:
            opened = ask_open(connection, Open(None, None, self._reads_all))
        except (DamagedError, UnreadableError, NoCheckpointError):
            return None
        return Durable(opened.sequence, opened.step) if isinstance(opened, Opened) else None

    def saved(self, connection: Connection, *, limit_s: float = LIST_LIMIT_S) -> list[Saved]:
        """What `restore(step=...)` can restore, and what else is pinned, newest first. Raises
        UnreadableError when that is nothing, and a volume of the job cannot be read: the volume may
        hold checkpoints."""
        identity = self._session.identity
        report = connection.request(ListVolumes(identity.job), timeout_s=limit_s)
        assert isinstance(report, Report)
        rows = _own(report.document.get("checkpoints"))
        # Pinned is what every rank has pinned.
        loose = {(row["sequence"], row["world_size"]) for row in rows if not row["pinned"]}
        found: dict[tuple[int, int], Saved] = {}
        steps: set[int] = set()
        for row in sorted(rows, key=lambda row: (-row["sequence"], row["rank"] != identity.rank)):
            mine = row["rank"] == identity.rank or self._reads_all
            alone = mine and self._session.saves_alone(row["world_size"])
            if row["damaged"] or not (row["global"] or alone):
                continue
            age_s = max(0.0, time.time() - row["wall_ns"] / 1e9)
            pinned = row["pinned"] and (alone or (row["sequence"], row["world_size"]) not in loose)
            step, sequence = row["step"], row["sequence"]
            if pinned or step not in steps:
                one = Saved(step, sequence, age_s, row["payload_bytes"], pinned)
                found.setdefault((step, sequence), one)
            steps.add(step)
        for row in _own(report.document.get("unreadable")):
            path = row["path"]
            why = f"{path} cannot be read: {row['reason'].removeprefix(f'{path}: ')}"
            if not found:
                raise UnreadableError(
                    f"{why}. The checkpoints of job {identity.job!r} are not known",
                    hint="check the disk and the kernel's log",
                )
            self._warner.once(
                f"not listed {path}",
                f"{why}. Checkpoints in it are not among the steps that can be restored",
            )
        return list(found.values())

    @property
    def _reads_all(self) -> bool:
        """Whether this rank can use what other ranks have saved, in a world of any size."""
        return self._replicated or self._planner.sharded

    def _nothing_here(self) -> None:
        """Warns when the rank that saves (solo) may have been on another node before. Where every
        rank saves, the nodes have told each other what each of them has."""
        identity = self._session.identity
        if identity.is_wide and self._session.saves_alone(identity.world_size):
            self._warner.once(
                "other nodes",
                f"this node has no checkpoint of job {identity.job!r}, which has ranks on other "
                f"nodes, too. If rank {identity.rank} was on one of them before, its checkpoints "
                f"are on the disk of that node: start the job with rank {identity.rank} there "
                "(torchrun --node-rank)",
            )

    def _require(self, opened: Opened, described: tree.Tree) -> None:
        """Raises StateMismatchError for a part of a sharded state in a world of another size,
        UsageError for a checkpoint that may belong to another job."""
        identity = self._session.identity
        size = identity.world_size
        fits = opened.world_size in (1, size) or described.shared() or described.sharded()
        if not fits and opened.parts:
            raise StateMismatchError(
                f"step {opened.step} was saved by {opened.world_size} ranks without "
                f"replicated=True, each its own state, and this start has {size} ranks",
                hint=f"start the job with {opened.world_size} ranks, or use fresh=True to begin "
                "without the checkpoint",
            )
        if identity.guessed:
            origin.require_same(identity.job, opened.step, opened.wall_ns, origin.of(described))

    def _left(
        self, opened: Opened, described: tree.Tree, only: Collection[str] | None
    ) -> frozenset[str]:
        """What is not restored in a world of another size: a position in the data counts the
        batches of one rank among so many. And on a rank that gets the copy of another one, its
        generators: both would draw the same random numbers."""
        identity = self._session.identity
        alone = self._session.saves_alone(identity.world_size)
        attached = self._planner.attached
        wanted = {name: attached[name] for name in (attached if only is None else only)}
        if RNG in wanted and described.attached and RNG not in described.names():
            self._warner.once(
                "no generators",
                f"the checkpoint of step {opened.step} has no generators (rng): random numbers "
                "continue from this process's seeds",
            )
            del wanted[RNG]
        saved = f"step {opened.step} was saved with world size {opened.world_size}"
        if opened.world_size == (1 if alone else identity.world_size):
            # With solo=True the size of the world that saved is not known.
            return frozenset() if alone else self._left_of_another(opened, wanted, saved)
        places = frozenset(name for name, thing in wanted.items() if has_position(name, thing))
        if places:
            self._warner.once(
                "position",
                f"{saved}, and this start has {identity.world_size}: each rank gets another part "
                f"of the data. So the position in the data ({', '.join(sorted(places))}) is not "
                "restored. The interrupted epoch begins again on every rank, and training gets its "
                "first batches a second time",
            )
        return places | self._left_of_another(opened, wanted, saved)

    def _left_of_another(
        self, opened: Opened, wanted: Collection[str], saved: str
    ) -> frozenset[str]:
        """The generators, if this rank gets the copy of another one: it saved on another node, or
        not at all."""
        identity = self._session.identity
        if opened.rank == identity.rank or RNG not in wanted:
            return frozenset()
        if opened.world_size == identity.world_size:
            saved = f"on this node step {opened.step} was saved by rank {opened.rank}"
        self._warner.once(
            "left",
            f"{saved}, and the part of rank {identity.rank} is not among what can be read: its "
            "generators (rng) are not restored and keep the state of this process. Seed them on "
            "this rank if ranks must differ",
        )
        return frozenset({RNG})

    def _took_over(
        self, connection: Connection, found: Found, source: tuple[Opened, tree.Tree],
        newest: Durable | None, *, base: int = 0,
    ) -> None:  # fmt: skip
        opened, described = source
        if newest is None or newest.sequence < opened.sequence:
            newest = Durable(opened.sequence, opened.step)
        turn = self._steps.next_turn(self._session.incarnation) if base else 0
        self._session.took_over(connection, newest.sequence, base=base, turn=turn)
        self.newest = newest
        self.trainable = trainable.recorded(described)
        for item in found.skipped:
            known = f"checkpoint of step {item.step} was skipped ({item.reason})"
            self._warner.once(
                f"skipped {item.sequence} {item.reason}",
                f"{known if item.sequence else item.reason}, and step {opened.step} was restored "
                "instead: training repeats the steps between. Check the disk: pccheckctl verify",
            )
        identity = self._session.identity
        # One line shows whether a run was resumed. From every rank when the job is named after its
        # script: that may not be the job that the user means.
        log = LOG.warning if identity.guessed or identity.rank == 0 else LOG.info
        log(
            "PCcheck: job %r%s continues from step %d, saved %s by %s",
            identity.job, " (named after the script)" if identity.guessed else "",
            opened.step, origin.age(opened.wall_ns), origin.of(described).shortened(),
        )  # fmt: skip
        if identity.rank == 0 and origin.by_another_client(described, self._planner.client):
            self._warner.once(
                "own",
                f"job {identity.job!r} restores step {opened.step}, which an earlier client of "
                "this process saved. That is right when a notebook's cell is run again. A run of "
                "its own (the next fold, a second Trainer) needs a job name of its own: "
                "PCcheckClient(job=...), or in a framework PCcheckCallback(job=...)",
            )


def _pin(native: Client, gpus: set[int]) -> None:
    """Has the memory pinned that the daemon has granted, beside what comes before the load. What
    fails here fails in the load again, which reports it."""
    with contextlib.suppress(NativeError, ValueError, OSError):
        for gpu in gpus:
            native.device_open(gpu)
            native.pin_for(gpu)


def _own(listed: object) -> list[dict[str, Any]]:
    """The entries of this user in a list of the daemon, which shows root those of all users."""
    return [
        row for row in (listed if isinstance(listed, list) else ())
        if isinstance(row, dict) and row["uid"] == os.getuid()
    ]  # fmt: skip
