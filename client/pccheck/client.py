"""PCcheckClient: what training scripts use."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Never, NoReturn, SupportsIndex

import torch

from pccheck_native import LEVEL_DISK
from pccheck_wire import tree
from pccheck_wire.basics import Closing, socket_name
from pccheck_wire.errors import (
    CheckpointFailedError,
    NoStoreError,
    PccheckError,
    TornStateError,
    UnsupportedStateError,
    UsageError,
)
from pccheck_wire.messages import CheckpointState, Pin

from .advice import Advice
from .daemon.autostart import PrivateDaemon, private_daemon
from .daemon.connection import Connection
from .daemon.session import DISCONNECTED, Session
from .daemon.together import warn_if_together
from .flight.in_flight import InFlight
from .flight.phases import Durable
from .flight.waiting import wait_global
from .garbage import no_collection
from .job.agreement import RankAgreement
from .job.naming import identify
from .job.steps import steps_of
from .job.stop import Stop
from .options import Options, check_flag, check_names, check_path, check_seconds, check_step
from .restoring.begin import LIST_LIMIT_S, Recovery, Saved
from .restoring.reading import OPEN_LIMIT_S, Found, RestoreResult
from .saving.exposure import NoStagingError
from .saving.handle import Checkpoint
from .saving.hooks import runs
from .saving.interval import Interval
from .saving.planner import Planner
from .saving.saver import Saver
from .state.attaching import Stateful, is_gathered
from .state.metadata import metadata_node
from .warn import LOG, Warner

#: How long `close()` and `flush()` wait for checkpoints in flight, if no signal asked to stop.
DRAIN_LIMIT_S = 60.0
#: How long after a signal: torchrun kills its workers 30 s after SIGTERM.
STOP_LIMIT_S = 25.0
#: ... and at least, when the last step took longer than that.
LATE_LIMIT_S = 5.0
#: How long close() waits until the last checkpoint, which is durable, is so on all nodes: the store
#: through which the nodes agree may end with this process.
AGREED_LIMIT_S = 3.0
#: How long `close()` waits after failures for the daemon's answer what can be restored.
LAST_LOOK_S = 5.0
_BETWEEN = "let the signal handler set a flag, and check it between two steps"


class PCcheckClient(Closing):
    """Checkpoints of one rank of one job, by the daemon of this node.

    Args:
        job: name of the training run; default PCCHECK_JOB, else the script's name. A job with the
            script's name continues only from what the same command saved in the same directory.
            Notebooks must give a name. The checkpoints are kept under (uid, job, rank).
        rank, world_size: default RANK and WORLD_SIZE, as torchrun sets them, else those of
            torch.distributed if init_process_group() was called before, else 0 and 1.
        socket: the daemon's socket; default PCCHECK_SOCKET, else where pccheckd listens by default.
        transfer: how GPU tensors reach the daemon. "pull": the daemon copies them out of this
            process's memory by CUDA IPC, or the checkpoint fails. "push": a thread of this process
            copies. "auto": pull where pull works (pccheckctl status shows why not). CPU tensors are
            always pushed.
        snapshot: when GPU tensors are copied. "overlap": beside training; an update waits for the
            rest of the copy, so the copy costs nothing when forward and backward take longer.
            "device": first into more memory on the GPU, as large as the state; updates wait for
            this first copy only, and the next checkpoint for the rest. For steps too short to hide
            the copy. "blocking": before `checkpoint()` returns; slow, but nothing competes with
            training.
        gate: how updates are held back until the copy has read the tensors. "auto": an attached
            optimizer's step waits (on GPUs its stream does). "manual": the script calls `gate()`
            before every update, and before every replay of a CUDA graph with an update; then the
            state of attached wrappers is read in the background, too. With "auto" and without an
            attached optimizer, `checkpoint()` returns when the copy is complete.
        on_busy: "wait" for a free slot, the space of one checkpoint on the disk (up to
            `stall_limit_s`), or "skip" the checkpoint.
        on_error: "warn" once and keep training, or "raise".
        stall_limit_s: the longest time for which anything here delays training.
        slowdown: how much longer than without checkpoints training may take, as a factor, when
            `should_checkpoint()` decides how often to save.
        durable_every: 10: of ten checkpoints one goes to the disk, and the others stay in the
            daemon's memory until a newer one is there on all ranks. They survive the end of this
            process, not of the node or the daemon. Needs room for three states of each rank there.
            "auto": all stay in memory, and the daemon writes as many as the disk takes.
        fresh: begins without the job's checkpoints, which may then be overwritten.
        solo: only this rank saves, whatever the world size (plain DDP, rank 0).
        replicated: every rank has the same parameters and optimizer state (plain DDP), and all of
            them make a client and save. Each stores a part, and any number of ranks can restore the
            whole. Buffers of modules, generators and all else are each rank's own.
        autostart, storage: start a private daemon on this directory (default PCCHECK_STORAGE)
            unless one runs there; PCCHECK_SOCKET is ignored.

    Everything but waiting on handles is for one thread, the one that trains: a `checkpoint()` in
    another thread while that one runs is warned of once. In a forked child (a data loader's worker)
    a client does nothing. A later client of the same process for the same job and rank closes this
    one. Signal handlers should only set a flag, as those of `stop_on` do: a
    checkpoint in the middle of a step, or of another call, is skipped, and so is one after a step
    that an exception ended. In the middle of another call of the same thread (in a signal handler,
    a `__del__`, a method of an attached object) `flush()` returns what is known, `gate()` returns
    at once, `should_checkpoint()` is False, and `should_stop()` is what an earlier call returned;
    `close()` takes effect when the other call ends; handles and `pin()` work as in any thread; all
    else raises UsageError. A client that goes out of scope is closed, and so is every client at
    the end of the process.
    """

    _closed = True  # until it is made
    _has_left = False  # the daemon

    def __init__(
        self,
        job: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        socket: str | os.PathLike[str] | None = None,
        transfer: Literal["auto", "pull", "push"] = "auto",
        snapshot: Literal["overlap", "device", "blocking"] = "overlap",
        gate: Literal["auto", "manual"] = "auto",
        on_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["warn", "raise"] = "warn",
        stall_limit_s: float = 30,
        slowdown: float = 1.03,
        durable_every: int | Literal["auto"] = 1,
        fresh: bool = False,
        solo: bool = False,
        replicated: bool = False,
        autostart: bool = False,
        storage: str | os.PathLike[str] | None = None,
    ) -> None:
        self._options = Options(
            transfer, snapshot, gate, on_busy, on_error, stall_limit_s, slowdown, durable_every
        )
        fresh, solo = check_flag("fresh", fresh), check_flag("solo", solo)
        identity = identify(job, rank, world_size, solo=solo)
        replicated = check_flag("replicated", replicated)
        autostart = check_flag("autostart", autostart)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        _check_together(solo, replicated, autostart, storage)
        if durable_every == "auto" and identity.is_wide and not solo:
            raise UsageError(
                'durable_every="auto" writes what the idle disk of each node takes, so the '
                f"{identity.world_size} ranks of this job, {identity.local_world_size} of them on "
                "this node, would have almost no checkpoint on the disk in common",
                hint="name a number: durable_every=10 writes every tenth checkpoint on all nodes",
            )
        several = identity.world_size > 1
        self._fresh, self._alone = fresh, solo and several
        saving = 1 if solo else identity.world_size  # ranks
        part = identity.part if identity.is_wide else None
        self._planner = Planner(
            self._options, identity.rank, saving, replicated=replicated, part=part
        )
        self._step = 0
        self._came_from = -1  # the step of the last checkpoint() since a restore; -1: there is none
        self._steps = steps_of(identity.job, identity.rank, identity.world_size)
        self._took_one = False  # this client has taken a snapshot
        self._done = False
        self._flushed = False  # after the signal, and since the last checkpoint()
        path = check_path("socket", socket)
        private = private_daemon(check_path("storage", storage), path) if autostart else None
        self._private = private
        self._warner = _warner_for(private, path)
        copies = 1 if replicated or identity.rank else saving  # only rank 0 warns of copies
        gathers = several and identity.rank == 0
        self._advice = Advice(self._planner, self._warner, copies=copies, gathers=gathers)
        self._agreement = RankAgreement(saving, self._warner)
        self._stop = Stop(self._agreement)
        self._interval: Interval | None = None  # once should_checkpoint() was called
        self._call: FrameType | None = None  # that no other may come in the middle of
        self._close_after: bool | None = None  # close(done=...) was called in the middle of it

        def where() -> str:  # without `self`: a client without references is closed at once
            return socket_name(private.socket if private is not None else path)

        self._session = Session(
            identity, where, fresh=fresh, solo=solo, replicated=replicated,
            stall_limit_s=stall_limit_s, warner=self._warner,
        )  # fmt: skip
        self._saver = Saver(self._session, self._warner, self._options, self._planner.moved)
        self._recovery = Recovery(
            self._session, self._planner, self._steps, self._warner, replicated=replicated
        )
        serves = socket_name(path) if private is None else str(private.storage)
        self.place = identity.job, identity.rank, serves
        self.where = where  #: the daemon's socket; of a private daemon once that is found
        self._replace_earlier()
        self._first_connect()

    def _replace_earlier(self) -> None:
        """Closes an earlier client for this rank, and has this one closed as the process ends."""
        for other in list(_CLIENTS):
            if other.place == self.place:
                other.close()
        self._closed = False
        _CLIENTS.add(self)
        # A process of multiprocessing may not run what its parent has registered.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        if multiprocessing.parent_process() is not None:
            # One that was forked runs no atexit, and runs finalizers before it joins its children.
            util.Finalize(None, _close_all, exitpriority=100)

    def _first_connect(self) -> None:
        try:
            with self._calling("PCcheckClient()"):
                if self._private is not None:
                    self._private.ensure()
                self._session.require()
        except PccheckError as error:
            if self._options.raises:
                raise
            if self._session.error is None:
                self._warner.once(
                    DISCONNECTED,
                    f"training continues WITHOUT checkpoints, and restore() raises: {error}",
                )
            else:
                self._session.warn_disconnected(private=self._private is not None)

    @property
    def connected(self) -> bool:
        """Whether the client has a connection to a daemon now."""
        return not self._inert() and self._session.current() is not None

    @property
    def on_error(self) -> str:
        """The option `on_error`, as it was given."""
        return self._options.on_error

    @property
    def has_guessed_job(self) -> bool:
        """Whether the job's name comes from the script: another command may have it, too."""
        return self._session.identity.guessed

    @property
    def spans_nodes(self) -> bool:
        """Whether the ranks that save with this client are on several nodes."""
        return self._session.identity.is_wide and not self._alone

    @property
    def closed(self) -> bool:
        """Whether the client has ended: by close(), by a newer client for its job and rank, or
        because this process was forked."""
        return self._closed or self._inert()

    def attach(
        self,
        /,
        *unnamed: Never,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        rng: bool = False,
        **more: Stateful | dict[Any, Any],
    ) -> None:
        """Defines what a checkpoint has: modules, optimizers, anything with `state_dict` and
        `load_state_dict`, dicts of plain values, which are restored in place, and with rng=True the
        generators of Python, NumPy and torch. What torch.compile, DistributedDataParallel or
        Accelerate wrapped is attached without the wrapper.

        With gate="auto" the step of every attached optimizer waits until the copy has read the
        tensors, once each optimizer has made a step. Other code that changes tensors (a decay by
        hand, a moving average) must call `gate()` first. A change before the copy has read the
        tensors fails that checkpoint with one warning, and later calls wait. torch counts such
        changes, but not changes through `.data`, NumPy and some fused kernels: then the checkpoint
        mixes two steps. Frozen parameters are read in the background, too. Between `checkpoint()`
        and that step tensors may be replaced. Call `gate()` before the memory of one is freed or
        moved (`resize_()`, `share_memory_()`), or that checkpoint fails. GPU memory that was part
        of a checkpoint is kept until the next one, or `close()`. Attach before a CUDA graph with
        the step is recorded, or use gate="manual". A name that is attached again is replaced.
        Raises UsageError for what has no state, or whose state_dict() fails in the call made here;
        UnsupportedStateError by path for a value that cannot be stored, and for a module that
        cannot load its own state dict. The first step of an attached optimizer raises
        UnsupportedStateError if its state cannot be stored.
        """
        if unnamed:  # an old habit from torch.save(model)
            kinds = ", ".join(kind.__name__ for kind in map(type, unnamed))
            raise UsageError(
                f"attach({kinds}): everything is attached under a name",
                hint="call attach(model=model, optimizer=optimizer)",
            )
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        things = {name: thing for name, thing in given.items() if thing is not None} | more
        with self._calling("attach()"):
            if not self._inert():
                self._require_open()
            if self._alone and is_gathered(things):
                raise UsageError(
                    "solo=True saves on one rank, and FullyShardedDataParallel gathers the model "
                    "from all ranks for each checkpoint: checkpoint() would wait for ever",
                    hint="make a client without solo=True on every rank, and use fully_shard()",
                )
            self._saver.gate(on_cpu=True)
            self._planner.attach(things, rng=rng)
            self._advice.attached(things)
            if self._options.gate == "auto":
                stepped = self._planner.stepped()
                self._planner.hooks.put(self._before_step, stepped, self._after_step)
            connection = self._session.current()
            if self._options.writes_every > 1:
                self._warn_if_together(connection)
            if connection is not None and self._planner.gpus():
                # The daemon's context takes its GPU memory now, not when torch has taken the rest.
                self._expose(connection, self._step)

    def _warn_if_together(self, connection: Connection | None) -> None:
        welcome = connection.welcome if connection is not None else None
        warn_if_together(self._warner, welcome, private=self._private is not None)

    def gate(self) -> None:
        """Call this before a change of tensors that a checkpoint may still be reading
        (gate="manual"), and before every replay of a CUDA graph with such a change.

        Returns at once when nothing is read. For CPU tensors the call returns when they may be
        changed. For GPU tensors the current streams wait: what is enqueued in them afterwards may
        change the tensors. Both last for stall_limit_s at most. While a graph is recorded the call
        only waits, and adds nothing to the graph.
        """
        if self._options.gate == "manual":
            self._planner.hooks.thread = threading.get_ident()
        self._gate("gate() was called", "call gate() before every replay()")

    def _before_step(self) -> None:
        self._planner.hooks.thread = threading.get_ident()
        self._gate(
            "an attached optimizer made a step",
            'to keep training meanwhile, use gate="manual" and call gate() before every replay()',
        )
        self._make_way()

    def _make_way(self) -> None:
        """For a snapshot of this process (`pccheckctl snapshot`), which no connection survives."""
        connection = self._session.current()
        if connection is not None and connection.has_to_make_way() and not self._is_inside():
            with self._calling("a step"):
                self._saver.make_way()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises what the first checkpoint() would raise, before hours of training are lost."""
        if self._inert():
            return
        try:
            self._advice.stepped(optimizer)
        except UnsupportedStateError as error:
            if not self._took_one:
                raise
            self._warner.once("state", f"checkpoints will fail: {error}")

    def _gate(self, what: str, hint: str) -> None:
        if self._inert() or self._is_inside():
            return
        self._steps.moved()
        capturing = self._saver.capturing()
        if capturing:
            self._planner.hooks.trusted = False
            then = "" if self._options.gate == "manual" else "checkpoint() waits from now on; "
            self._warner.once(
                "graph",
                f"{what} while a CUDA graph was recorded. A replay does not repeat the call: "
                f"{then}{hint}",
            )
        with self._calling("gate()"):  # also waits for another thread's checkpoint()
            self._saver.gate(on_cpu=capturing)

    def checkpoint(
        self, state: object = None, *, step: int | None = None, metadata: object = None,
        to: Literal["disk", "memory", "device", None] = None,
    ) -> Checkpoint:  # fmt: skip
        """Takes a snapshot of the attached state, or of `state`: a dict, list or nested state.

        Returns at once when a gate holds the next update back, else when the copy is complete. The
        tensors may be changed after `gate()` or in an attached optimizer's step. Module buffers,
        and parameters that are neither frozen nor trained by an attached optimizer, are copied
        before this returns; on a GPU they are copied in the order of its current stream. A GPU
        tensor is saved with the result of the work that was enqueued before this call: in the
        current stream, and in the stream of an attached optimizer's last step.

        Args:
            step: the training step that has just ended, recorded with the checkpoint; needed for
                attached state. For a `state` the default is one more than the last step; 1 for the
                first.
            metadata: what a logger gets: numbers, text, dicts, lists; by value. pccheckctl shows
                the metadata, and `restore().metadata` returns them.
            to: "memory" leaves this one in the daemon's memory, "disk" writes it; the default is
                as `durable_every` says. A memory-only checkpoint is written when this process
                ends, and for `wait_durable()`, `pin()`, `flush()` and `close()`. "device"
                copies nothing from the GPU: if this process dies before the next update, the
                daemon reads the memory that it leaves behind. The update ends the checkpoint.

        Raises UsageError for a call that cannot be right: without a step, while a CUDA graph is
        recorded, after close(); UnsupportedStateError by path for what cannot be stored, unless an
        earlier checkpoint of this client was. With on_error="raise" also failures of the daemon,
        the storage or a GPU, of earlier checkpoints, too. Otherwise the handle has the reason.
        """
        if self._inert():
            if self._options.raises:
                self._require_open()
            reason = "this client belongs to the parent process, and saves nothing in a forked one"
            self._warner.once("forked", f"{reason}: make a PCcheckClient in this process")
            made = InFlight.ended(step or 0, CheckpointState.SKIPPED, reason)
            return Checkpoint(made, self._warner)
        if self._is_inside():
            number = self._step if step is None else check_step(step)
            return self._failed(
                number, self._skipped("in the middle of another call of the client")
            )
        with self._calling("checkpoint()"):
            self._require_open()
            self._flushed = False
            number = self._numbered(state, step)
            level = self._saver.levels.choose(to)
            self._steps.called(number)
            self._came_from = number
            self._advice.calling()
            try:
                self._require_between_steps()
                made = self._checkpoint(state, number, metadata, level)
            except (PccheckError, OSError) as error:
                if isinstance(error, UnsupportedStateError) and not self._took_one:
                    raise
                self._step = number
                return self._failed(number, error)
            self._step = number
            if self._interval is not None:
                self._interval.requested(made)
        handle = Checkpoint(made, self._warner)
        if self._options.raises and made.state is CheckpointState.FAILED:
            self._saver.raised(made)
            raise CheckpointFailedError(f"checkpoint of step {number} failed: {handle.reason}")
        return handle

    def _numbered(self, state: object, step: int | None) -> int:
        """The step of a call. Raises UsageError."""
        if step is None and state is None and self._planner.attached:
            raise UsageError(
                "checkpoint() of attached state needs step=",
                hint="call checkpoint(step=step) with the number of the step that has just ended: "
                "restore() returns it, and the loop continues with the next step",
            )
        if isinstance(state, (bool, int, float, complex, str, bytes)):
            raise UsageError(
                f"checkpoint({state!r}): type {type(state).__name__} cannot be a state",
                hint="call checkpoint(step=...) to save what is attached; a state is a tensor, or "
                "a dict or list with tensors",
            )
        number = self._step + 1 if step is None else check_step(step)
        if number < self._came_from:
            self._warner.once(
                "back",
                f"checkpoint(step={number}) follows step {self._came_from} without a restore(). "
                "Both are saved; restore() returns the one that was saved last, whatever its step. "
                "Count steps upwards, or call restore() before going back",
            )
        return number

    def _checkpoint(self, state: object, step: int, metadata: object, level: int) -> InFlight:
        if self._recovery.torn:
            raise TornStateError(
                f"{self._recovery.torn}, so this state is not saved",
                hint="call restore() again, or restart the training",
            )
        if self._saver.capturing():
            raise UsageError(
                "checkpoint() was called while a CUDA graph is recorded",
                hint="call it before or after the recording",
            )
        connection = self._saver.ready()
        if level != LEVEL_DISK:  # also without attach(), or for this call only
            self._warn_if_together(connection)
        self._planner.retry_staging()
        self._session.warn_if_unrestored()
        if state is None:
            self._advice.saving(step)
        node = metadata_node(metadata)
        try:
            return self._submit(connection, state, step, node, level)
        except NoStagingError as error:
            self._warner.once(
                "staging",
                f"{error.message}. Checkpoints continue, but checkpoint() now returns only when "
                "the GPU tensors have been read"
                + ("; a copy on the GPU is tried again later" if error.retryable else ""),
            )
            self._planner.stop_staging(for_good=not error.retryable)
            return self._submit(connection, state, step, node, level)

    def _submit(
        self, connection: Connection, state: Any, step: int, node: tree.Node, level: int
    ) -> InFlight:
        self._planner.hooks.follow()
        snapshot = self._planner.snapshot(
            connection.native.chunk_bytes, state, step, node, self._saver.pushed,
            replica=self._saver.replica,
        )  # fmt: skip
        self._took_one = True
        interval = self._interval.steps if self._interval is not None else 0
        try:
            return self._saver.submit(connection, step, snapshot, self._steps, interval, level)
        except ConnectionError as error:  # the core noticed it first
            raise connection.gone() from error

    def _failed(self, step: int, error: PccheckError | OSError) -> Checkpoint:
        """Daemon, storage or GPU failed: an exception or one warning, as the user chose."""
        if self._options.raises or isinstance(error, UsageError):
            raise error
        torn = isinstance(error, TornStateError)
        busy = isinstance(error, CheckpointFailedError) and not torn
        if torn:
            self._warner.once("torn", f"checkpoints fail: {error}")
        elif not busy and self._session.current() is not None:
            self._saver.failures.report(step, str(error))
        elif not busy:
            self._session.warn_disconnected(private=self._private is not None)
        if self._private is not None and self._session.current() is None:
            self._private.ensure_later()
        LOG.debug("step %d: %s", step, error)
        state = CheckpointState.SKIPPED if busy else CheckpointState.FAILED
        made = InFlight.ended(step, state, str(error))
        if state is CheckpointState.FAILED:
            self._session.uncounted += 1
            self._saver.failures.failed(made)
        return Checkpoint(made, self._warner)

    def restore(
        self,
        step: int | None = None,
        *,
        strict_optimizer: bool = True,
        only: Collection[str] | None = None,
        start: str = "",
        without: str | Collection[str] = (),
    ) -> RestoreResult:
        """Puts the newest valid checkpoint, or that of `step`, in place into what was attached,
        tensors directly, on the device where they are now. Missing optimizer state is made beside
        its parameter, unless the checkpoint had it off the GPU. An object with its own
        load_state_dict gets CPU tensors.

        Args:
            step: one of `steps()`, to go back to. With several ranks all of them name it. Newer
                checkpoints stay until they are replaced. Until this run has saved one, a restart
                gets the newest.
            strict_optimizer: False accepts an optimizer of another class: only its `lr`,
                `weight_decay` and what schedulers keep in the groups are taken, and the attached
                one keeps its own state. If the class is not known (an import), False also takes
                options that the attached optimizer does not have.
            only: names of attached things. The rest of the checkpoint is neither compared nor
                read, and the other attached things stay as they are. This does not count as
                restored: call `adopt()` afterwards if this run continues the job.
            start: which start continues, if starts of a job on several nodes ran apart: the
                beginning of its id, which the refusal names, or "newest".
            without: host names of nodes that will not come back, if restore() refuses to continue
                without them. What only these nodes have is given up.

        Returns what was restored; a falsy result only when the storage was read and holds nothing.
        Raises DaemonUnreachableError and the like when this is not known; UsageError with
        fresh=True before this run has saved, in the middle of a step of an attached optimizer, and
        for a checkpoint by another command when the job has only the script's name;
        StateMismatchError by path when the checkpoint does not fit; DamagedError, UnreadableError
        and NoCheckpointError when no checkpoint is valid. Nothing is
        changed then, unless the load_state_dict() of an attached object refused: similar objects
        may have changed, tensors only if that state has some. Call restore() again, or restart.
        Generators are set a second time after `loader` has made its next iterator, which draws. If
        the checkpoint has none, attached generators stay as they are, with a warning.
        """
        if not self._planner.attached:
            raise UsageError(
                "restore() was called before attach(): nothing to restore into",
                hint="call attach(model=..., optimizer=...) first",
            )
        if self._fresh and not self._took_one:
            raise UsageError(
                "fresh=True begins without the job's checkpoints, and restore() reads one",
                hint="remove fresh=True to continue the job, or restore() to begin a new run",
            )
        if isinstance(only, str):
            only = (only,)
        if only is not None:
            unknown = set(only) - self._planner.attached.keys()
            if unknown or not only:
                raise UsageError(
                    f"restore(only=...) names what is not attached: {', '.join(sorted(unknown))}"
                    if unknown
                    else "restore(only=...) has no names, so nothing would be restored",
                    hint=f"attached are: {', '.join(sorted(self._planner.attached))}",
                )
        step = None if step is None else check_step(step)
        if not isinstance(start, str):
            raise UsageError(
                f"start={start!r} is not text", hint="use the id that restore() has named"
            )
        words = start, check_names("without", without)
        # Until all that was made for it is gone.
        with self._calling("restore()"), no_collection():
            if self._planner.hooks.stepping:
                raise UsageError(
                    "restore() was called in the middle of a step of an optimizer, which would go "
                    "on and mix two steps",
                    hint=_BETWEEN,
                )
            connection = self._connection()
            result, on_gpu, payload_bytes = self._recovery.restore(
                connection, step, words, strict_optimizer=strict_optimizer, only=only
            )
            if result and only is None:
                self._planner.hooks.restored()
                self._continue_from(result)
                if on_gpu and not self._saver.exposes(connection):  # attach() did not
                    self._expose(connection, result.step)
                self._session.announce(connection, payload_bytes, self._saver.levels.used)
            return result

    def recover(self, step: int | None = None) -> Found:
        """The newest valid checkpoint, or that of `step`, as the structure that went in, with all
        tensors on the CPU.

        Falsy when the storage was read and holds nothing. Without `step` the call counts as a
        restore: newer checkpoints may then replace the newest checkpoint of the run before. With
        `step` the call does not count: see `adopt`. With several ranks, in a run that has trained,
        the call is only a look: the numbers of the next steps do not depend on it. Raises as
        `restore` does.
        """
        step = None if step is None else check_step(step)
        with self._calling("recover()"), no_collection():
            found = self._recovery.recover(self._connection(), step)
            if found and step is None:
                self._came_from = -1
                alone = self._session.saves_alone(self._session.identity.world_size)
                if alone or not self._steps.turn:
                    self._continue_from(found)
            return found

    def _continue_from(self, found: RestoreResult) -> None:
        self._step, self._came_from = max(0, found.step), -1
        self._saver.followed.restored(Durable(found.sequence, found.step), self._recovery.newest)
        self._advice.restored(found.step, self._recovery.trainable)

    def adopt(self) -> None:
        """Counts the job's checkpoints as restored: this run got its state by restore(only=...),
        recover(step), an export or another tool. Otherwise the newest checkpoint of the run before
        is protected (not replaced) until restore(), and takes a slot. Raises
        DaemonUnreachableError and the like."""
        with self._calling("adopt()"):
            self._recovery.adopt(self._connection())
            self._came_from = -1
            self._saver.followed.note_saved(self._recovery.newest)

    def settle(self) -> None:
        """Waits until all that was copied is written, as `restore()` does before it reads: what is
        in memory only, too. A `Reader` sees only what is durable. Raises DaemonUnreachableError and
        the like."""
        with self._calling("settle()"):
            self._recovery.settle(self._connection())

    def steps(self) -> list[Saved]:
        """What `restore(step=...)` can restore, newest first; with several ranks what all of them
        have. And pinned checkpoints whose step was saved again: `.sequence` tells them apart, and a
        `Reader` opens them by it. Raises UnreadableError when that is nothing, but a volume of the
        job cannot be read; DaemonUnreachableError and the like."""
        with self._calling("steps()"):
            self._require_open()
            return self._recovery.saved(self._session.require(timeout_s=OPEN_LIMIT_S))

    def pin(self, step: int) -> None:
        """Keeps the durable checkpoint of `step`, the newest of several, on all ranks of the job
        until `unpin(step)`, over restarts too; `pccheckctl drop` and --expire-finished still remove
        the checkpoint with its job. Each pin takes a slot. Any thread and every rank may call this.
        A memory-only checkpoint is written first.

        Raises NoCheckpointError when no checkpoint of the step is durable (on all ranks), or no
        longer; RefusedError with the numbers when too few slots would be left; the error of the
        disk when it cannot be written.
        """
        body = Pin(check_step(step))
        save = None if self._inert() else self._saver.followed.in_memory(body.step)
        if save is not None:
            with contextlib.suppress(PccheckError):  # the daemon says what that means for the pin
                wait_global(save, LIST_LIMIT_S)
        self._pin(body)

    def unpin(self, step: int) -> None:
        """Newer checkpoints may replace those of `step` again. Does nothing without a pin."""
        self._pin(Pin(check_step(step), pinned=False))

    def _pin(self, body: Pin) -> None:
        self._require_open()
        connection = self._session.current()
        if connection is None:
            with self._calling("pin() or unpin()"):
                self._require_open()  # a signal handler may have closed the client since
                connection = self._session.require()
        with self._warner.errors():
            connection.request(body, timeout_s=LIST_LIMIT_S)

    @contextlib.contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        """A call that no other call may come in the middle of: signal handlers, `__del__` and the
        methods of attached objects run in the same thread, which holds the lock already. Raises
        UsageError there; calls that need not raise check `_is_inside` first."""
        with self._lock, self._warner.errors():
            if self._is_inside():
                raise UsageError(
                    f"{name} was called in the middle of another call of the client", hint=_BETWEEN
                )
            # Ctrl-C at the end of __enter__, or at the start of __exit__, delays the reset below
            # until the traceback is gone. So the frame says whether the call runs, and no flag.
            self._call = call = sys._getframe(2)
            try:
                yield
            finally:
                if self._call is call:
                    self._call = None
                if self._close_after is not None:
                    done, self._close_after = self._close_after, None
                    self.close(done=done)

    def _is_inside(self) -> bool:
        """Whether this thread is in the middle of another call of the client."""
        call = self._call
        return call is not None and runs(threading.get_ident(), call)

    def _require_between_steps(self) -> None:
        """Raises CheckpointFailedError when what is attached is half updated."""
        hooks = self._planner.hooks
        if hooks.stepping:
            raise self._skipped("in the middle of a step of an optimizer")
        if hooks.halfway:
            raise self._skipped(
                "when an exception (Ctrl-C) had ended a step of an optimizer: the tensors may be "
                "of two steps",
                "the next whole step of this optimizer, or restore(), ends this. To save after a "
                "signal, use stop_on()",
            )

    def _skipped(self, when: str, hint: str = _BETWEEN) -> CheckpointFailedError:
        """Warns once for each `when`."""
        error = CheckpointFailedError(f"checkpoint() was called {when}", hint=hint)
        self._warner.once(
            when, f"{error.message}, and is skipped: {error.hint}. Training continues"
        )
        return error

    def _require_open(self) -> None:
        """Raises UsageError."""
        if self._inert():
            raise UsageError(
                "this client belongs to the parent process, and does nothing in a forked one",
                hint="make a PCcheckClient in this process",
            )
        if self._closed:
            raise UsageError(
                "this client is closed: by close(), the end of its with block, or a newer client "
                "for the same job and rank",
                hint="make a new PCcheckClient, or call this before the end of the block",
            )

    def _connection(self) -> Connection:
        self._require_open()
        self._saver.gate(on_cpu=True)  # nothing may still read what is written now
        if self._session.current() is None:
            self._saver.leave()
            if self._private is not None:
                self._private.ensure()
        return self._session.require(timeout_s=OPEN_LIMIT_S)

    def _expose(self, connection: Connection, step: int) -> None:
        """Shares GPU memory before the first checkpoint, which meets the same failure again."""
        try:
            made = self._planner.snapshot(
                connection.native.chunk_bytes, None, step, None, self._saver.pushed
            )
            self._saver.expose(connection, made)
        except (PccheckError, OSError) as error:
            LOG.debug("before the first checkpoint: %s", error)

    def flush(self, deadline_s: float | None = None) -> Durable | None:
        """Waits until the newest checkpoint is durable on all ranks of the job. If it fails, waits
        for the checkpoint before it.

        Args:
            deadline_s: the longest time to wait. The default is a minute, or after a signal of
                `stop_on` what is left of its deadline.

        Returns step and sequence of the newest durable checkpoint that this client knows of: what a
        restart gets. After restore(step=) that is the newest checkpoint, until this run has saved.
        None when this client knows of none. A dead daemon, a failed checkpoint and a passed
        deadline do not raise: compare the step. Raises UsageError.
        """
        if self._inert():
            return None
        if self._is_inside():
            return self._saver.followed.known()
        if deadline_s is None:
            deadline_s = self._drain_limit_s()
        with self._calling("flush()"):
            self._require_open()
            found = self._saver.flush(check_seconds("deadline_s", deadline_s))
            self._flushed = self._stop.left_s() is not None
            return found

    def _drain_limit_s(self) -> float:
        left_s = self._stop.left_s()
        if left_s is None:
            return DRAIN_LIMIT_S
        return min(DRAIN_LIMIT_S, max(left_s, 0 if self._flushed else LATE_LIMIT_S))

    def stop_on(self, *signals: int, deadline_s: float = STOP_LIMIT_S) -> None:
        """From now on these signals (`signal.SIGTERM`, say) do not end the process, but make
        `should_stop()` true. An earlier handler of the script is called, too; Python's own handler
        of Ctrl-C (KeyboardInterrupt) is not. `close()` puts the earlier handlers back.

        Call this in the main thread, and for a job of several ranks on every rank, after
        `init_process_group()`: the ranks then stop after the same step. With solo=True
        `should_stop()` reports only signals to this rank.

        Args:
            deadline_s: the time from the signal to the end of `flush()` and `close()`. torchrun
                sends SIGKILL 30 s after SIGTERM.

        Raises UsageError, also outside the main thread.
        """
        if self._inert():
            return
        limit_s = check_seconds("deadline_s", deadline_s)
        with self._calling("stop_on()"):
            self._require_open()
            self._stop.on(signals, limit_s)

    def should_stop(self) -> bool:
        """Whether one of the signals of `stop_on` has come, to this rank or another one.

        Call this between two steps, after the same steps on every rank: the ranks reduce one number
        on the CPU (gloo), so that all of them stop after the same step. If that fails, the call
        warns, and from then on reports only signals to this rank. Raises UsageError without
        `stop_on`.
        """
        if self._inert():
            return False
        self._require_open()
        if not self._stop.active:
            raise UsageError(
                "should_stop() was called before stop_on()",
                hint="call stop_on(signal.SIGTERM) before the loop, on every rank",
            )
        return self._stop.agreed if self._is_inside() else self._stop.asked()

    def should_checkpoint(self, step: int) -> bool:
        """Whether to save after this step: `if client.should_checkpoint(step):
        client.checkpoint(step=step)`.

        The interval follows the measured times of steps and checkpoints, so that training takes at
        most `slowdown` times as long and no checkpoint waits for the disk (section 3.4 of the
        paper). The first checkpoint comes after a few steps, which show how long a step takes. When
        the disk becomes slower, checkpoints become rarer at once; they become more frequent again
        when shorter intervals were enough several times in a row. `pccheckctl status` shows the
        interval.

        Call this after every step, with the number of the step, and with several ranks on every
        rank: when a checkpoint may be due, the ranks reduce a number on the CPU (gloo), and get the
        same answer. With several ranks `init_process_group()` must come first. Raises UsageError.
        """
        if self._inert() or self._is_inside():
            return False
        now_s = time.monotonic()
        with self._calling("should_checkpoint()"):
            self._require_open()
            self._saver.make_way()
            if self._interval is None:
                self._agreement.begin("should_checkpoint()")
                options = self._options
                self._interval = Interval(
                    options.slowdown, self._agreement.largest, options.writes_every
                )
            return self._interval.due(check_step(step), now_s)

    def close(self, *, done: bool = False) -> None:
        """Waits until what is in flight is durable (at most a minute, and not longer than the
        deadline after a signal of `stop_on`), and ends the session. On several nodes it also waits
        until they agree on the last checkpoint, for a moment at most, unless an exception ends the
        script. With `done` the job is finished: only its newest checkpoint and pinned checkpoints
        stay. When the last checkpoints failed, a warning names the reason, and the step from which
        a restart resumes.

        `close(done=True)` after the with block, or after `close()`, connects again for this, and
        raises when no daemon answers.
        """
        if self._inert():
            return
        done = check_flag("done", done)
        if self._is_inside():
            self._close_after = done or bool(self._close_after)
            return
        with self._calling("close()"):
            if not self._closed:
                self._drain(done)
            elif done and not self._done:
                self._finish()
            elif not self._has_left:  # Ctrl-C came in an earlier call
                self._leave()

    def _drain(self, done: bool) -> None:
        saved: tuple[int | None, bool] = None, False
        broken = False
        self._closed = True
        self._planner.hooks.remove()
        self._planner.forget()
        try:
            if self._stop.left_s() is None:
                self._saver.gate(on_cpu=True)
            drained = self._saver.drain(self._drain_limit_s())
            if drained and self.spans_nodes and not _is_failing():
                self._saver.flush(min(AGREED_LIMIT_S, self._drain_limit_s()))
            saved = self._newest_saved()
            broken = self._saver.followed.has_broken()
            if drained or (done and not broken):  # the answer comes when all is saved
                self._done = self._session.say_goodbye(done, self._stop.left_s()) and done
        except PccheckError as error:
            if self._options.raises:
                raise
            LOG.warning("PCcheck: close() did not wait until all is durable: %s", error)
        finally:  # Ctrl-C ends the waiting and the session
            self._leave()
        self._saver.failures.report_last(saved[0], known=saved[1])
        if done and broken:  # the daemon looks for it with other ranks once the session has ended
            self._finish_broken()

    def _finish_broken(self) -> None:
        """In a session of its own, after a CUDA error."""
        try:
            self._finish()
        except PccheckError as error:
            if self._options.raises:
                raise
            LOG.warning("PCcheck: the job is not marked as finished: %s", error)

    def _newest_saved(self) -> tuple[int | None, bool]:
        """The newest durable step, when checkpoints after it failed, and whether that is known. The
        daemon knows better than this process: files may have been removed."""
        connection = self._session.current()
        if connection is None or not self._saver.failures.count:
            return None, False
        try:
            found = self._recovery.saved(connection, limit_s=LAST_LOOK_S)
        except NoStoreError:
            return None, True
        except PccheckError as error:
            LOG.debug("the newest durable checkpoint is not known: %s", error)
            return None, False
        newest = max(found, key=lambda one: one.sequence, default=None)
        return (newest.step if newest else None), True

    def _finish(self) -> None:
        try:
            if self._private is not None:
                self._private.ensure()
            self._session.require(timeout_s=OPEN_LIMIT_S)
            self._done = self._session.say_goodbye(True)
        finally:
            self._leave()

    def _leave(self) -> None:
        with contextlib.ExitStack() as ends:  # the last one comes first, and Ctrl-C skips none
            if self._private is not None:
                ends.callback(self._private.release)
            ends.callback(self._session.close)
            ends.callback(self._saver.end)
            self._stop.off()
        self._has_left = True

    def _inert(self) -> bool:
        return os.getpid() != self._pid

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError(  # for copy and pickle; the end of a copy would close this client
            "a PCcheckClient cannot be copied or pickled, because its session belongs to this "
            "object and process: leave the client out of what is copied, and make a PCcheckClient "
            "where one is needed"
        )

    def __del__(self) -> None:
        if not self._closed:
            _close(self, "that went out of scope")


#: Closed at the end of the process, and made inert in forked children.
_CLIENTS: weakref.WeakSet[PCcheckClient] = weakref.WeakSet()


def open_client(job: str | None, rank: int, world_size: int) -> PCcheckClient | None:
    """This process's client for that job and rank, to be shared. Raises as PCcheckClient does."""
    wanted = identify(job, rank, world_size).job, rank
    return next((one for one in _CLIENTS if one.place[:2] == wanted and not one.closed), None)


def _warner_for(private: PrivateDaemon | None, socket: Path | None) -> Warner:
    """Its commands ask the daemon of the client."""
    if private is not None:
        return Warner("--storage", str(private.storage))
    return Warner("--socket", str(socket)) if socket else Warner()


def _check_together(solo: bool, replicated: bool, autostart: bool, storage: object) -> None:
    """Raises UsageError for options that exclude each other."""
    if solo and replicated:
        raise UsageError(
            "solo=True and replicated=True cannot be combined",
            hint="use solo=True if one rank saves, replicated=True if every rank saves a part",
        )
    if storage is not None and not autostart:
        raise UsageError(
            "storage= is for a private daemon only, and needs autostart=True",
            hint="add autostart=True; or leave storage= out to use the daemon of this node",
        )


def _is_failing() -> bool:
    """An exception ends the script, most likely because a rank has died: the launcher waits for
    the end of this process, and a new rank may meet it instead of its successor."""
    return sys.exc_info()[0] is not None or hasattr(sys, "last_type")


def _close(client: PCcheckClient, which: str) -> None:
    try:
        client.close()
    except Exception:
        LOG.exception("PCcheck: close() of a client %s failed", which)


def _close_all() -> None:
    for client in list(_CLIENTS):
        _close(client, "at the end of the process")


def _forget_all() -> None:
    for client in list(_CLIENTS):
        client._lock = threading.RLock()  # another thread of the parent may hold the old one
        try:
            client._session.forget_in_child()
        except Exception:  # the next client's lock must be replaced too
            LOG.exception("PCcheck: a client of the parent process could not be left")


os.register_at_fork(after_in_child=_forget_all)
