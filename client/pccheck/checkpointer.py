"""PCcheckClient: what training scripts use."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Literal, Self

import torch

from pccheck_wire import tree
from pccheck_wire.errors import (
    CheckpointFailedError,
    PccheckError,
    StateMismatchError,
    UnsupportedStateError,
    UsageError,
)
from pccheck_wire.messages import CheckpointState, Opened, Skipped

from . import lifetime
from .alone import Alone
from .arguments import Options, check_step, metadata_node
from .autostart import PrivateDaemon, private_daemon
from .exposure import NoStagingError
from .handle import Checkpoint
from .inplace import Placement
from .naming import identify
from .plan import RNG
from .planner import Planner
from .restore import Found, RestoreResult, payload_loader, read_newest, whole_state
from .saver import Saver
from .session import Session
from .steps import steps_of
from .transport import Connection
from .warn import LOG, Warner

#: How long `close()` waits for checkpoints in flight.
DRAIN_LIMIT_S = 60.0


class PCcheckClient:
    """Checkpoints of one rank of one job, by the daemon of this node.

    Args:
        job: name of the training run; default PCCHECK_JOB, else the script's name. The checkpoints
            are kept under (uid, job, rank).
        rank, world_size: default RANK and WORLD_SIZE, as torchrun sets them, else 0 and 1.
        socket: the daemon's; default PCCHECK_SOCKET, else where a pccheckd listens by default.
        transfer: how GPU tensors reach the daemon. "pull": it copies them out of this process's
            memory by CUDA IPC, or the checkpoint fails. "push": a thread here copies. "auto": pull
            where it can be had (pccheckctl status says why not). CPU tensors are always pushed.
        snapshot: when GPU tensors are copied. "overlap": beside training; an update waits for the
            rest of the copy, so this costs nothing when forward and backward take longer.
            "device": first into memory of ours on the GPU, as large as the state; updates wait for
            that only, and the next checkpoint for the rest. For steps too short to hide the copy.
            "blocking": before `checkpoint()` returns; slow, but nothing competes with training.
        gate: "auto": an attached optimizer's step waits for the copy (on GPUs its stream does).
            "manual": the script calls `gate()` before every update, and before every replay of a
            CUDA graph with one. Without either `checkpoint()` returns when copied.
        on_busy: "wait" for a free slot (up to `stall_limit_s`), or "skip" the checkpoint.
        on_error: "warn" once and train on, or "raise".
        stall_limit_s: the longest that anything here holds training up.
        fresh: this is a new beginning; checkpoints of an earlier run may be overwritten.
        solo: only this rank saves, whatever the world size (plain DDP, rank 0).
        replicated: every rank has the same parameters and optimizer state (plain DDP), and all of
            them make a client and save: each stores a part, all of them restore the whole, any
            number of ranks can. Buffers of modules, generators and all else is each rank's own.
        autostart, storage: start a private daemon on this directory (default PCCHECK_STORAGE)
            unless that runs; PCCHECK_SOCKET is not asked.

    Everything but waiting on handles is meant for one thread, the one that trains. In a forked
    child (a data loader's worker) a client does nothing. A signal handler had better set a flag: a
    checkpoint in the middle of a step, or of another call, is skipped.
    """

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
        fresh: bool = False,
        solo: bool = False,
        replicated: bool = False,
        autostart: bool = False,
        storage: str | os.PathLike[str] | None = None,
    ) -> None:
        self._options = Options(transfer, snapshot, gate, on_busy, on_error, stall_limit_s)
        identity = identify(job, rank, world_size)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        if solo and replicated:
            raise UsageError(
                "solo=True and replicated=True exclude each other",
                hint="solo=True: one rank saves; replicated=True: every rank saves a part",
            )
        self._replicated = replicated
        self._planner = Planner(
            self._options, identity.rank, identity.world_size if replicated else 0
        )
        self._step = 0
        self._steps = steps_of(identity.job, identity.rank, identity.world_size)
        if fresh:
            self._steps.restored()  # from nothing
        self._torn = ""  # what is wrong with the attached state after a restore that broke off
        self._closed = False
        self._warner = Warner()
        self._alone = Alone(self._planner.hooks, self._warner)
        self._private: PrivateDaemon | None = None
        if autostart:
            self._private = private_daemon(storage, socket)
        self._session = Session(
            identity, self._private.socket if self._private else Path(socket) if socket else None,
            fresh=fresh, solo=solo, stall_limit_s=stall_limit_s, warner=self._warner,
        )  # fmt: skip
        self._saver = Saver(self._session, self._warner, self._options)
        lifetime.watch(self)
        self._first_connect()

    def _first_connect(self) -> None:
        try:
            if self._private is not None:
                self._private.ensure()
            self._session.require()
        except PccheckError as error:
            if self._options.raises:
                raise
            if self._session.error is None:
                self._warner.once("daemon", f"training goes on WITHOUT checkpoints: {error}")
            else:
                self._session.complain()

    @property
    def connected(self) -> bool:
        """Whether a daemon serves this client now."""
        return not self._inert() and self._session.current() is not None

    def attach(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        loader: Any = None,
        rng: bool = False,
        **more: Any,
    ) -> None:
        """Says what a checkpoint consists of: modules, optimizers, anything with `state_dict` and
        `load_state_dict`, and with rng=True the generators of Python, NumPy and torch.

        With gate="auto" the step of every attached optimizer waits until a snapshot was read.
        Between `checkpoint()` and that step tensors may be replaced, but their storages not
        resized, which would free memory under the copy; call `gate()` before. GPU memory that was
        part of a checkpoint is kept until the next one, or `close()`. Attach before a CUDA graph
        with the step is recorded, or say gate="manual". A name that is attached again is replaced.
        Raises UsageError.
        """
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        things = {name: thing for name, thing in given.items() if thing is not None} | more
        with self._lock, self._alone.call():
            self._saver.gate(on_cpu=True)
            self._planner.attach(things, rng=rng)
            if self._options.gate == "auto":
                self._planner.hooks.put(self._before_step, self._planner.attached.values())

    def gate(self) -> None:
        """Call it before changing what a checkpoint may still be reading (gate="manual"), and
        before every replay of a CUDA graph that does.

        Returns at once when nothing is read. For CPU tensors it returns when they may be changed.
        For GPU tensors it makes the current streams wait: what is enqueued in them afterwards may
        change the tensors. Both last for stall_limit_s at most. While a graph is recorded it does
        nothing but wait: no part of it gets into the graph.
        """
        self._gate("gate() was called", "call it before every replay()")

    def _before_step(self) -> None:
        self._gate(
            "an attached optimizer made a step",
            'to train on meanwhile say gate="manual" and call gate() before every replay()',
        )

    def _gate(self, what: str, hint: str) -> None:
        if self._inert():
            return
        capturing = self._saver.capturing()
        if capturing:
            self._planner.hooks.trusted = False
            then = "" if self._options.gate == "manual" else "checkpoint() waits from now on; "
            self._warner.once(
                "graph", f"{what} while a CUDA graph was recorded; replays will not: {then}{hint}"
            )
        with self._lock, self._alone.call():  # also waits for what another thread hands over now
            self._saver.gate(on_cpu=capturing)

    def checkpoint(
        self, state: Any = None, *, step: int | None = None, metadata: Any = None
    ) -> Checkpoint:
        """Takes a snapshot of the attached state, or of `state`: a dict, list or nested state.

        Returns at once when a gate holds the next update back, else when the copy is complete. The
        tensors may be changed after `gate()` or an attached optimizer's step let go; module buffers
        and all that no gate guards are copied before this returns, on a GPU in order with what its
        current stream does. What is saved of a GPU is what work enqueued there so far makes.

        Args:
            step: recorded with the checkpoint; default one more than the last one's, or than the
                restored one's; 1 for the first.
            metadata: JSON-like values, shown by pccheckctl and returned by recover().

        Raises UnsupportedStateError for what cannot be stored, by its path; UsageError while a CUDA
        graph is recorded; with on_error="raise" also what the daemon, the storage and a GPU failed
        at, be it with one before. Otherwise the handle says so.
        """
        if self._inert():
            return Checkpoint.ended(step or 0, CheckpointState.SKIPPED, "in a forked process")
        with self._lock:
            number, closed = self._step + 1 if step is None else check_step(step), self._closed
            self._steps.called(number)
            try:
                self._alone.require()
                with self._alone.call():
                    made = self._checkpoint(state, number, metadata)
            except UnsupportedStateError:
                raise
            except (PccheckError, OSError, ValueError) as error:
                self._step = number
                if self._closed and not closed:  # by a signal handler, under our feet
                    return self._failed(number, CheckpointFailedError("it was closed meanwhile"))
                if isinstance(error, ValueError):
                    raise
                return self._failed(number, error)
            self._step = number
        if self._options.raises and made.state is CheckpointState.FAILED:
            raise CheckpointFailedError(f"the checkpoint of step {number} failed: {made.reason}")
        return made

    def _checkpoint(self, state: Any, step: int, metadata: Any) -> Checkpoint:
        if self._closed:
            raise UsageError("the client is closed")
        if self._torn:
            raise CheckpointFailedError(self._torn, hint="restore() again, or restart")
        if self._saver.capturing():
            raise UsageError(
                "a CUDA graph is being captured", hint="call checkpoint() outside of it"
            )
        connection = self._saver.ready()
        self._session.warn_if_unrestored()
        node = metadata_node(metadata)
        try:
            return self._submit(connection, state, step, node)
        except NoStagingError as error:
            self._warner.once(
                "staging",
                f"{error.message}: from now on checkpoint() returns when they were read. "
                'With gate="manual" frozen parameters need no copy on the GPU.',
            )
            self._planner.plain = True
            return self._submit(connection, state, step, node)

    def _submit(
        self, connection: Connection, state: Any, step: int, metadata: tree.Node
    ) -> Checkpoint:
        snapshot = self._planner.snapshot(connection.link.chunk_bytes, state, step, metadata)
        return self._saver.submit(connection, step, snapshot, self._steps)

    def _failed(self, step: int, error: PccheckError | OSError) -> Checkpoint:
        """Trouble with daemon or storage: an exception or one warning, as the user chose."""
        if self._options.raises or isinstance(error, UsageError):
            raise error
        busy = isinstance(error, CheckpointFailedError)
        torn = bool(self._torn) and self._torn in str(error)
        if not busy and self._session.current() is not None:
            self._saver.tell_failed(step, str(error))
        elif torn:
            self._warner.once("torn", self._torn)
        elif not busy:
            self._session.complain()
        LOG.debug("step %d: %s", step, error)
        state = CheckpointState.SKIPPED if busy and not torn else CheckpointState.FAILED
        return Checkpoint.ended(step, state, str(error))

    def restore(self) -> RestoreResult:
        """Puts the newest valid checkpoint in place into what was attached, tensors directly, on
        whichever device they lie now. Optimizer state that is not there yet is made beside its
        parameter, unless it was kept off the GPU then. What has a load_state_dict of its own gets
        CPU tensors.

        Returns what it did; a falsy result only when the volume was read and holds nothing.
        Raises DaemonUnreachableError and the like when that is not known,
        StateMismatchError by path when the checkpoint does not fit (nothing is changed
        then), DamagedError, UnreadableError and NoCheckpointError when no checkpoint is valid.
        """
        if not self._planner.attached:
            raise UsageError("restore() has nothing to restore into", hint="call attach() first")
        with self._lock, self._alone.call():
            connection = self._connection()

            def use(opened: Opened, described: tree.Tree) -> bool:
                self._require_whole(opened, described)
                placement = Placement(described, self._planner.attached, self._left(opened))
                self._torn = (
                    f"the attached state is a mix, because restoring step {opened.step} broke off"
                )
                placement.load(payload_loader(connection, opened))
                self._torn = ""
                return placement.on_gpu

            found = read_newest(connection, None, use, replicated=self._replicated)
            self._planner.forget()
            if isinstance(found, list):
                self._session.took_over(connection, 0)
                self._steps.restored()
                return RestoreResult(skipped=found)
            opened, described, on_gpu, skipped = found
            self._took_over(connection, opened, skipped)
            if on_gpu:
                self._expose(connection, opened.step)
            self._session.announce(connection, opened.payload_bytes)
            return RestoreResult(
                opened.step, opened.sequence, opened.source, skipped, tree.plain(described.metadata)
            )

    def recover(self, step: int | None = None) -> Found:
        """The newest valid checkpoint, or that of `step`, as the structure that went in, with all
        tensors on the CPU.

        Falsy when the volume was read and holds nothing. Without `step` it counts as restored: the
        newest checkpoint of the run before need not be protected any longer.
        """
        if step is not None:
            step = check_step(step)
        with self._lock, self._alone.call():
            connection = self._connection()
            found = read_newest(
                connection, step, whole_state(connection), replicated=self._replicated
            )
            if isinstance(found, list):
                return Found(skipped=found)
            opened, described, state, skipped = found
            self._require_whole(opened, described)
            if step is None:
                self._took_over(connection, opened, skipped)
            return Found(
                opened.step, opened.sequence, opened.source, skipped,
                tree.plain(described.metadata), state,
            )  # fmt: skip

    def _require_whole(self, opened: Opened, described: tree.Tree) -> None:
        """Raises StateMismatchError for a part of a sharded state in a world of another size."""
        size = self._session.identity.world_size
        if opened.world_size not in (1, size) and not described.shared() and self._replicated:
            raise StateMismatchError(
                f"step {opened.step} was saved by {opened.world_size} ranks without "
                f"replicated=True, each its own state; this start has {size}",
                hint=f"start the job with {opened.world_size} ranks, or use fresh=True to begin "
                "without the checkpoint",
            )

    def _left(self, opened: Opened) -> frozenset[str]:
        """What is not restored on a rank that was not there when it was saved: it would draw the
        same random numbers, and the same batches, as the rank whose copy it gets."""
        rank = self._session.identity.rank
        if opened.rank in (None, rank):
            return frozenset()
        left = frozenset((RNG, "loader")) & self._planner.attached.keys()
        if left:
            self._warner.once(
                "left",
                f"rank {rank} did not save step {opened.step} (world size {opened.world_size}): "
                f"{' and '.join(sorted(left))} of this rank were not restored and go on as this "
                "start made them",
            )
        return left

    def _connection(self) -> Connection:
        if self._inert():
            raise UsageError("this client belongs to the parent process", hint="make one here")
        if self._closed:
            raise UsageError("the client is closed")
        self._saver.gate(on_cpu=True)  # nothing may still be reading what is written now
        if self._session.current() is None:
            self._saver.leave()
            if self._private is not None:
                self._private.ensure()
        return self._session.require()

    def _expose(self, connection: Connection, step: int) -> None:
        """Ahead of the first checkpoint, which will meet what fails here again."""
        try:
            made = self._planner.snapshot(connection.link.chunk_bytes, None, step, None)
            self._saver.expose(connection, made)
        except (PccheckError, OSError) as error:
            LOG.debug("ahead of the first checkpoint: %s", error)

    def _took_over(self, connection: Connection, opened: Opened, skipped: list[Skipped]) -> None:
        self._session.took_over(connection, opened.sequence)
        self._steps.restored()
        self._step = max(0, opened.step)
        for item in skipped:
            if item.sequence:
                self._warner.once(
                    f"damaged {item.sequence}",
                    f"the checkpoint of step {item.step} was passed over: {item.reason}; "
                    f"step {opened.step} is used",
                )

    def close(self, *, done: bool = False) -> None:
        """Waits until what is in flight is durable (at most a minute) and says goodbye. With `done`
        the job is finished: its volume is trimmed to the newest checkpoint."""
        if self._inert() or self._closed:
            return
        with self._lock, self._alone.call():
            self._closed = True
            self._planner.hooks.remove()
            self._planner.forget()
            try:
                self._saver.gate(on_cpu=True)
                self._saver.drain(DRAIN_LIMIT_S)
                self._session.say_goodbye(done)
            except PccheckError as error:
                if self._options.raises:
                    raise
                LOG.warning("close: %s", error)
            finally:  # Ctrl-C ends the waiting, and the session all the same
                self._saver.leave()
                self._session.close()
                if self._private is not None:
                    self._private.release()

    def _inert(self) -> bool:
        return os.getpid() != self._pid

    def forget_in_child(self) -> None:
        """Runs in a forked child: lets go of the sockets, so that the daemon notices our end."""
        self._session.forget_in_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
