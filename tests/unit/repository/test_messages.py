"""The words that users meet most: what happened, what it means for the training run, what to do.

Each message is made by the call that a user would make, as far as that needs no daemon. A changed
word is changed here, too, and read as somebody reads it whose training has just stopped.
"""

from __future__ import annotations

import copy
import errno
import re
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from pccheck import (
    CheckpointFailedError,
    PCcheckClient,
    PccheckError,
    PccheckWarning,
    RefusedError,
    capture_rng,
    restore_rng,
)
from pccheck.daemon.autostart import PrivateDaemon
from pccheck.daemon.connection import Connection
from pccheck.flight.in_flight import InFlight
from pccheck.flight.verdict import fail_moved
from pccheck.flight.waiting import wait_durable
from pccheck.job import origin
from pccheck.job.naming import Identity, identify
from pccheck.job.origin import Origin, require_same
from pccheck.options import check_step
from pccheck.restoring.inplace import Placement
from pccheck.restoring.reading import Found, ask_open
from pccheck.saving.failures import Failures
from pccheck.saving.handle import Checkpoint
from pccheck.state.attaching import Values, checked
from pccheck.state.changes import Moved
from pccheck.state.flatten import Flattener
from pccheck.state.metadata import metadata_node
from pccheck.state.plan import AttachedPlan
from pccheck.warn import Warner
from pccheck_wire import attach, basics, tree
from pccheck_wire.connection import VARIABLE
from pccheck_wire.ends import Cause, Why, sentence
from pccheck_wire.messages import CheckpointState, Hello, Open, Registered, Role, Skipped, Writing
from pccheckctl import cli
from pccheckd.jobs.sessions import _check_names
from tests.support.fakelink import FakeConnection, FakeSession
from tests.support.payload import FakeDevices, tree_of
from tests.support.waiting import until
from tests.unit.pccheck.restoring.test_inplace import Buffers, Copied, put, save, trained

JOB = Identity("gpt", 0, 4, 4, "")


class Kit:
    """A client without a daemon, or with one that is a fake."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.patch = monkeypatch

    def client(self, **options: Any) -> PCcheckClient:
        self.patch.setattr(PCcheckClient, "_first_connect", lambda _: None)
        self.patch.setenv("PCCHECK_SOCKET", str(self.path / "none"))
        return PCcheckClient("gpt", **options)

    def connected(self, **options: Any) -> PCcheckClient:
        client = self.client(**options)
        session: Any = FakeSession(FakeConnection())
        client._session = client._saver._session = session
        return client

    def attached(self, **options: Any) -> PCcheckClient:
        client = self.connected(**options)
        client.attach(model=nn.Linear(2, 2))
        return client

    def session(self) -> Any:
        session = self.client()._session
        session.identity = JOB
        return session


def optimizer(cls: type = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    return {"optimizer": cls(nn.Linear(2, 2).parameters(), lr=0.1, **options)}


def placed(saved: dict[str, Any], now: dict[str, Any]) -> None:
    about = origin.node(saved, "client")
    Placement(tree_of(AttachedPlan(saved, mode="sync", about=lambda: about).snapshot(1, None)), now)


def scheduled(cls: Any, *options: Any) -> dict[str, Any]:
    made = optimizer()
    return made | {"scheduler": cls(made["optimizer"], *options)}


def imported(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """The checkpoint does not tell of which class anything is."""
    Placement(tree_of(AttachedPlan(saved, mode="sync").snapshot(1, None)), now)


def other_options(_: Kit) -> None:
    saved = optimizer(torch.optim.SGD)
    saved["optimizer"].param_groups[0]["rho"] = 0.05
    imported(saved, optimizer(torch.optim.SGD))


def renamed(_: Kit) -> None:
    pairs = list(nn.Linear(2, 2).named_parameters())
    placed(
        {"optimizer": torch.optim.AdamW(pairs)},
        {"optimizer": torch.optim.AdamW([(f"net.{name}", p) for name, p in pairs])},
    )


def reordered(_: Kit) -> None:
    saved = torch.optim.AdamW(model := list(nn.Linear(2, 3).parameters()))
    for p in model:
        p.grad = torch.ones_like(p)
    saved.step()
    placed({"optimizer": saved}, {"optimizer": torch.optim.AdamW(model[::-1])})


def shared(saved: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
    put(save({"model": Buffers(**saved)}), {"model": Buffers(**now)})


def tied(_: Kit) -> None:
    weight = torch.zeros(2)
    shared({"embed": torch.ones(2), "head": torch.zeros(2)}, {"embed": weight, "head": weight})


def copied_then(_: Kit) -> None:
    model = nn.Linear(1, 1, bias=False)
    put(
        save({"model": model, "best": Values({"weight": torch.ones(1, 1)})}),
        {"model": model, "best": Values({"weight": model.weight.detach()})},
    )


def closed(kit: Kit) -> None:
    client = kit.connected()
    client.close()
    client.steps()


def forked(kit: Kit) -> None:
    client = kit.client()
    client._pid += 1
    client.steps()


def backwards(kit: Kit) -> None:
    client = kit.attached()
    client.checkpoint(step=5)
    client.checkpoint(step=4)


def interrupted(kit: Kit) -> None:
    client = kit.attached()
    with client._calling("gate()"):
        client.checkpoint(step=5)


def nested(kit: Kit) -> None:
    client = kit.attached()
    with client._calling("gate()"):
        client.steps()


def beside(kit: Kit) -> None:
    """A checkpoint() in this thread, while another one trains."""
    client, ends, began = kit.attached(), threading.Event(), threading.Event()

    def train() -> None:
        client._planner.hooks.thread = threading.get_ident()
        began.set()
        while not ends.is_set():
            sum(range(10_000))

    trainer = threading.Thread(target=train, name="trainer")
    trainer.start()
    began.wait()
    try:  # the thread must have run between two calls
        until(lambda: client._advice.calling() or client._warner.over("thread"), every_s=0)
    finally:
        ends.set()
        trainer.join()


def copied(thing: object) -> None:
    with pytest.raises(TypeError) as refused:
        copy.copy(thing)
    raise RuntimeError(str(refused.value))


def elsewhere(kit: Kit) -> None:
    connection: Any = FakeConnection()
    connection.native.request(0)
    ended = InFlight(5, connection, 0)
    fail_moved(ended, Moved("model.weight", ""))
    raise RuntimeError(ended.reason)


def plain_ddp(kit: Kit, **options: Any) -> None:
    model = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)  # without processes
    model.module = nn.Linear(2, 2)
    kit.connected(world_size=4, **options).attach(model=model)


def moved(kit: Kit) -> None:
    failures = Failures(Warner())
    failures.moved(5, Moved("model.weight", ""))
    failures.report_moved()


def last_ones(kit: Kit, *steps: int, durable: int | None = None, known: bool = False) -> None:
    failures = Failures(Warner())
    if durable is not None:
        failures.durable(durable, 1)
    for step in steps:
        failures.failed(InFlight.ended(step, CheckpointState.FAILED, "no space left in /data"))
    failures.report_last(None, known=known)


def stalled(kit: Kit) -> None:
    made: Any = FakeConnection()
    kit.client()._saver._expired(InFlight(5, made, 1))


def unrestored(kit: Kit) -> None:
    session = kit.session()
    session._protected_step = 40
    session.warn_if_unrestored()


def in_part(kit: Kit) -> None:
    session = kit.session()
    session._protected_step = 40
    session.restored_in_part(40, ["model"])
    session.warn_if_unrestored()


def waits(what: str) -> Callable[[Kit], object]:
    def wait(_: Kit) -> None:
        connection: Any = FakeConnection()
        connection.saves_alone = True
        connection.native.request(1)
        getattr(Checkpoint(InFlight(5, connection, 1), Warner()), what)(0.01)

    return wait


def failed(state: CheckpointState) -> Callable[[Kit], object]:
    return lambda _: Checkpoint(
        InFlight.ended(5, state, "no space left in /data (raise --max-storage)"), Warner()
    ).wait_durable()


def left_out(kit: Kit) -> None:
    client = kit.attached()
    own: Any = optimizer(torch.optim.SGD)["optimizer"]
    own.momentum = torch.zeros(2, 2)
    client.attach(optimizer=own)
    client.checkpoint(step=1)


def weightless(kit: Kit) -> None:
    client = kit.attached()
    client.attach(**optimizer())
    client.checkpoint(step=1)


def optimizer_beside(kit: Kit) -> None:
    client, model = kit.connected(), nn.Linear(2, 2)
    client.attach(model=model)
    made = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    made.step()
    client.checkpoint(step=1)


def scheduler_beside(kit: Kit) -> None:
    client, model = kit.connected(), nn.Linear(2, 2)
    made = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(made, 2)
    client.attach(model=model, optimizer=made)
    client.checkpoint(step=1)


def converted(_: Kit) -> None:
    put(save({"optimizer": trained(Copied)}), {"optimizer": trained(Copied)})


def superseded(_: Kit) -> None:
    wait_durable(InFlight.ended(5, CheckpointState.SUPERSEDED, ""))


def unexpected(kit: Kit) -> None:
    client = kit.attached()
    kit.patch.setattr(AttachedPlan, "snapshot", lambda *_: {}["x"])
    client.checkpoint(step=5)


def writing(kit: Kit) -> None:
    kit.patch.setattr("pccheck.restoring.reading.STUCK_LIMIT_S", 0.0)
    answer = Writing(7, 2, 64 << 20, 32 << 20)
    ask_open(SimpleNamespace(request=lambda *_, **__: answer), Open())  # type: ignore[arg-type]


def listening(kit: Kit) -> Path:
    path = kit.path / "s"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(path))
    server.listen()
    kit.patch.setattr(socket.socket, "keep", server, raising=False)
    return path


def hello(**given: Any) -> None:
    _check_names(Hello(**{"protocol": 1, "role": Role.TRAINER, "version": "", "pid": 1, **given}))


def stranger(kit: Kit) -> None:
    kit.patch.setattr("pccheck_wire.connection.placed_by_root", lambda *_: False)
    kit.patch.setattr("pccheck_wire.connection._CREDENTIALS", SimpleNamespace(
        size=12, unpack=lambda _: (1, 1234, 1234)))  # fmt: skip
    kit.patch.setattr("os.geteuid", lambda: 1000)
    attach.connect(Hello(6, Role.OBSERVER, "", 1), listening(kit), timeout_s=0.2)


def staging(kit: Kit) -> None:
    FakeDevices().install(kit.patch)
    from tests.unit.pccheck.saving.test_saver import Kit as Saver

    made = Saver(kit.path, FakeDevices().install(kit.patch))
    made.attach()
    made.native.no_staging = True
    made.checkpoint()


def ctl(*words: str) -> Callable[[Kit], object]:
    def run(kit: Kit) -> None:
        kit.patch.setenv("PCCHECK_SOCKET", str(kit.path / "none"))
        kit.patch.setenv("TMPDIR", str(kit.path))  # no private daemon of this machine
        kit.patch.setattr(basics, "TEMPORARY", str(kit.path))
        kit.patch.delenv("XDG_RUNTIME_DIR", raising=False)
        cli.main(list(words))

    return run


def fake_daemon_unreachable(kit: Kit) -> None:
    with attach.connect(Hello(6, Role.OBSERVER, "", 1), kit.path / "none", timeout_s=1):
        pass


def raised(error: Exception) -> None:
    raise error


def gone(kit: Kit, *, unmapped: int) -> Exception:
    link, welcome = SimpleNamespace(unmapped=unmapped), SimpleNamespace(pid=77)
    ended: Any = SimpleNamespace(path=kit.path / "s", native=link, welcome=welcome)
    return Connection.gone(ended)


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not ready")

    def load_state_dict(self, _: object) -> None: ...


def plain_file(kit: Kit) -> Path:
    (kit.path / "file").write_text("")
    return kit.path / "file"


def uid_variable(kit: Kit) -> None:
    kit.patch.setenv(VARIABLE, "root")
    attach.observe(listening(kit), timeout_s=1)


def notebook(kit: Kit) -> None:
    kit.patch.setattr("sys.argv", ["/usr/lib/ipykernel_launcher.py"])
    identify(None, 0, 1, {})


def too_many() -> PccheckError:
    from pccheck.saving.saver import _too_many

    return _too_many()


def fewer_gpus(kit: Kit) -> None:
    kit.patch.setattr(torch.cuda, "is_available", lambda: False)
    restore_rng(capture_rng() | {"cuda": [torch.zeros(1), torch.zeros(1)]})


def skipped(kit: Kit) -> None:
    recovery = kit.client()._recovery
    session: Any = SimpleNamespace(took_over=lambda *_, **__: None, identity=JOB)
    recovery._session = session
    opened: Any = SimpleNamespace(sequence=8, step=40, wall_ns=0)
    described, connection = tree.Tree(40, None, True, [], None), FakeConnection()
    found = Found(skipped=[Skipped(9, 50, "bad checksum")])
    recovery._took_over(connection, found, (opened, described), None)  # type: ignore[arg-type]


def own(kit: Kit) -> None:
    recovery = kit.client()._recovery
    session: Any = SimpleNamespace(took_over=lambda *_, **__: None, identity=JOB)
    recovery._session = session
    opened: Any = SimpleNamespace(sequence=8, step=40, wall_ns=0)
    described = tree.Tree(40, None, True, [], None, about=origin.node({}, origin.name_client()))
    recovery._took_over(FakeConnection(), Found(), (opened, described), None)  # type: ignore[arg-type]


def other_rank(kit: Kit) -> None:
    client = kit.attached()
    client.attach(rng=True)
    client._recovery._session.identity = JOB
    opened: Any = SimpleNamespace(rank=1, step=40, world_size=2)
    client._recovery._left(
        opened, tree_of(AttachedPlan({"rng": True}, mode="sync").snapshot(1, None)), None
    )


def other_size(kit: Kit) -> None:
    client = kit.attached()
    client.attach(loader={"given": 3})
    client._recovery._session.identity = JOB
    opened: Any = SimpleNamespace(rank=0, step=40, world_size=2)
    client._recovery._left(opened, tree.Tree(40, None, True, [], None), None)


def no_generators(kit: Kit) -> None:
    client = kit.attached()
    client.attach(rng=True)
    opened: Any = SimpleNamespace(rank=0, step=40, world_size=1)
    client._recovery._left(opened, tree.Tree(40, None, True, [], None), None)


def order_is_drawn(kit: Kit) -> None:
    body = {
        "__module__": "torchdata.stateful_dataloader.stateful_dataloader",
        "batch_sampler": None,
        "sampler": torch.utils.data.RandomSampler([1]),
    }
    kind = type("StatefulDataLoader", (torch.optim.lr_scheduler.ConstantLR,), body)
    kit.attached().attach(loader=kind(torch.optim.SGD(nn.Linear(2, 2).parameters())))


def stale(kit: Kit) -> None:
    client = kit.connected()
    client._planner.hooks.progress.idle_since = lambda _: 5  # type: ignore[method-assign]
    client._advice.saving(9)


def graph(kit: Kit) -> None:
    client = kit.connected()
    kit.patch.setattr("pccheck.state.devices.capturing", lambda: True)
    client._before_step()


CALLS: dict[str, Callable[[Kit], object]] = {
    # -- no daemon
    "no daemon": lambda kit: PCcheckClient("gpt", socket=kit.path / "none"),
    "no daemon, raised": fake_daemon_unreachable,
    "silent daemon": lambda kit: attach.observe(listening(kit), timeout_s=0.05),
    "not a socket": lambda kit: attach.observe(plain_file(kit), timeout_s=1),
    "a directory": lambda kit: attach.observe(kit.path, timeout_s=1),
    "long socket path": lambda kit: attach.observe(kit.path / ("x" * 108), timeout_s=1),
    "stranger's daemon": stranger,
    "ended daemon": lambda kit: raised(gone(kit, unmapped=0)),
    "address space": lambda kit: raised(gone(kit, unmapped=errno.ENOMEM)),
    "daemon's uid": uid_variable,
    # -- making a client
    "notebook": notebook,
    "job's name": lambda _: identify("a b", 0, 1, {}),
    "rank": lambda _: identify("gpt", 4, 4, {}),
    "WORLD_SIZE": lambda _: identify("gpt", None, None, {"WORLD_SIZE": "two"}),
    "option": lambda kit: kit.client(snapshot="fast"),
    "stall limit": lambda kit: kit.client(stall_limit_s=0),
    "solo and replicated": lambda kit: kit.client(solo=True, replicated=True),
    "auto on several nodes": lambda kit: (
        kit.patch.setenv("LOCAL_WORLD_SIZE", "2"),
        kit.client(rank=0, world_size=4, durable_every="auto"),
    ),
    "storage without autostart": lambda kit: kit.client(storage="/data"),
    "autostart without storage": lambda kit: PCcheckClient("gpt", autostart=True),
    "autostart with socket": lambda kit: PCcheckClient(
        "gpt", autostart=True, storage=kit.path, socket="/s"
    ),
    "storage without a parent": lambda kit: PrivateDaemon(kit.path / "no" / "such").ensure(),
    # -- attach
    "DataLoader": lambda _: checked({"loader": torch.utils.data.DataLoader([1])}),  # type: ignore[arg-type]
    "StatefulDataLoader": order_is_drawn,
    "without a name": lambda kit: kit.connected().attach(nn.Linear(2, 2)),  # type: ignore[arg-type]
    "no state": lambda _: checked({"epoch": 3}),
    "rng": lambda _: checked({"rng": {"seed": 1}}),
    "state_dict() fails": lambda _: checked({"scaler": Broken()}),
    "lambda": lambda _: Flattener().node({"f": print}, "model"),
    "sparse tensor": lambda _: Flattener().node({"w": torch.ones(2, 2).to_sparse()}, "model"),
    "key": lambda _: Flattener().node({print: 1}, "extra"),
    "metadata": lambda _: metadata_node({"model": nn.Linear(1, 1)}),
    "large metadata": lambda _: metadata_node({"curve": np.zeros(70_000)}),
    # -- checkpoint
    "nothing attached": lambda kit: kit.connected().checkpoint(step=1),
    "no step": lambda kit: kit.attached().checkpoint(),
    "step as state": lambda kit: kit.attached().checkpoint(7),
    "step": lambda _: check_step(1.5),
    "closed": closed,
    "forked": forked,
    "backwards": backwards,
    "signal handler": interrupted,
    "call in a call": nested,
    "other thread": beside,
    "changed by another thread": elsewhere,
    "shared memory": lambda kit: kit.connected().attach(model=nn.Linear(2, 2).share_memory()),
    "copy of a client": lambda kit: copied(kit.client()),
    "copy of a handle": lambda kit: copied(Checkpoint(InFlight(5), kit.client()._warner)),
    "plain DDP": plain_ddp,
    "left out": left_out,
    "left out weights": weightless,
    "optimizer beside": optimizer_beside,
    "scheduler beside": scheduler_beside,
    "moved": moved,
    "stale": stale,
    "CUDA graph": graph,
    "stalled": stalled,
    "failed": lambda _: Failures(Warner()).report(5, "no space left in /data"),
    "last ones failed": lambda kit: last_ones(kit, 5, 6, durable=4),
    "all failed": lambda kit: last_ones(kit, 5, known=True),
    "none is known": lambda kit: last_ones(kit, 5),
    "unexpected": unexpected,
    "too many": lambda _: raised(too_many()),
    "no GPU memory": staging,
    "not copied": waits("wait_copied"),
    "not durable": waits("wait_durable"),
    "superseded": superseded,
    "handle failed": failed(CheckpointState.FAILED),
    "handle skipped": failed(CheckpointState.SKIPPED),
    "GPU copy": lambda _: raised(RuntimeError(str(sentence(Why(Cause.NOT_READ, code="EIO"))))),
    # -- restore
    "restore before attach": lambda kit: kit.connected().restore(),
    "restore with fresh": lambda kit: kit.attached(fresh=True).restore(),
    "another command": lambda _: require_same(
        "train", 7, 0, Origin("node1", "/work", "train.py --lr 1", 12)
    ),
    "more names": lambda _: placed(
        {name: nn.Linear(2, 2) for name in ("model", "ema", "scheduler")},
        {"model": nn.Linear(2, 2)},
    ),
    "other names": lambda _: placed(optimizer(), {"adam": optimizer()["optimizer"]}),
    "other shape": lambda _: placed({"model": nn.Linear(2, 2)}, {"model": nn.Linear(3, 2)}),
    "other scheduler": lambda _: placed(scheduled(StepLR, 2), scheduled(ExponentialLR, 0.9)),
    "other optimizer": lambda _: placed(
        optimizer() | {"model": nn.Linear(2, 2)},
        optimizer(torch.optim.SGD) | {"model": nn.Linear(2, 2)},
    ),
    "no optimizer": lambda _: imported({"optimizer": nn.Linear(2, 2)}, optimizer()),
    "other options": other_options,
    "other parameters": renamed,
    "other order": reordered,
    "expanded": lambda _: shared({"mask": torch.eye(2)}, {"mask": torch.zeros(2).expand(2, 2)}),
    "tied": tied,
    "copied then": copied_then,
    "converted state": converted,
    "meta device": lambda _: placed(
        {"model": nn.Linear(2, 2)}, {"model": nn.Linear(2, 2, device="meta")}
    ),
    "given state": lambda _: Placement(tree.Tree(1, None, False, [], None), {}),
    "disk stands still": writing,
    "fewer GPUs": fewer_gpus,
    "incomplete generators": lambda _: restore_rng({"numpy": capture_rng()["numpy"]}),
    "unrestored": unrestored,
    "restored in part": in_part,
    "absent ranks": lambda kit: kit.session()._warn_if_ranks_are_absent(
        Registered(4, 2, 2, 1, 2.0, "/data/v", [1, 2])
    ),
    "damaged checkpoint": skipped,
    "own checkpoint": own,
    "rank that did not save": other_rank,
    "another number of ranks": other_size,
    "no generators": no_generators,
    # -- the daemon refuses, and the command line
    "name at the daemon": lambda _: hello(job="../x"),
    "pccheckctl status": ctl("status"),
}


def words(kit: Kit, call: Callable[[Kit], object], capsys: pytest.CaptureFixture[str]) -> str:
    """What the user sees of it, without what differs from run to run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PccheckWarning)
        try:
            call(kit)
            text = ""
        except (PccheckError, RuntimeError) as error:
            text = str(error)
    shown = [str(one.message) for one in caught if issubclass(one.category, PccheckWarning)]
    others = [one for one in shown if "stall_limit_s" not in one]  # a fake daemon copies nothing
    text = text or "".join((others or shown)[:1]) or capsys.readouterr().err.strip()
    for pattern, name in ((re.escape(str(kit.path)), "DIR"), (r"\d+ days ago", "N days ago"),
                          (r"this process is .*?\)\.", "this process is ME.")):  # fmt: skip
        text = re.sub(pattern, name, text)
    return text.replace("x" * 108, "LONG")


#: What the user reads: a message with its hint in brackets, or a warning.
WORDS: dict[str, str] = {
    "no daemon": (
        "PCcheck: training continues WITHOUT checkpoints: no daemon listens at DIR/none "
        "(start it with: pccheckd --storage DIR). The client connects when a pccheckd runs "
        "there. Before that, restore() raises."
    ),
    "no daemon, raised": ("no daemon listens at DIR/none (start it with: pccheckd --storage DIR)"),
    "silent daemon": (
        "the daemon at DIR/s did not answer within 0.05 s (see its log: it may be "
        "stopped or overloaded)"
    ),
    "not a socket": ("no daemon listens at DIR/file (start it with: pccheckd --storage DIR)"),
    "a directory": (
        "DIR is a directory, not the socket of a pccheckd (pass the socket itself, such as "
        "DIR/attach.sock)"
    ),
    "long socket path": (
        "the socket path DIR/LONG is longer than 107 bytes (start pccheckd with a shorter "
        "--socket, and connect to that)"
    ),
    "stranger's daemon": (
        "the process at DIR/s runs as uid 1234, which is neither yours (1000) nor root: it "
        "could read and replace your checkpoints, so the client does not connect (if that "
        "daemon is trusted, set PCCHECK_DAEMON_UID=1234; else start your own, with its "
        "socket in a directory that only you can write to)"
    ),
    "ended daemon": (
        "pccheckd at DIR/s (pid 77) has ended (start it with: pccheckd --storage DIR)"
    ),
    "address space": (
        "this process cannot map the daemon's memory: Cannot allocate memory (raise the limit: "
        "ulimit -v, or vm.max_map_count)"
    ),
    "daemon's uid": ("PCCHECK_DAEMON_UID='root' is not a uid (set it to a number)"),
    "notebook": (
        "the job has no name: in a notebook, an interactive session, `python -c` or a worker "
        'there is no script to name it after (use PCcheckClient(job="NAME"), or set '
        "PCCHECK_JOB)"
    ),
    "job's name": (
        "'a b' is not a valid job name (use letters, digits, '.', '_' and '-', at most 128, "
        "not starting with '.' or '-')"
    ),
    "rank": (
        "rank must be from 0 to world_size - 1, not 4 with world_size 4 (see RANK and "
        "WORLD_SIZE, which torchrun sets, or pass rank= and world_size=)"
    ),
    "WORLD_SIZE": (
        "WORLD_SIZE='two' in the environment is not a number (unset WORLD_SIZE, or set it as "
        "torchrun does)"
    ),
    "option": ("snapshot='fast' is not an option (use one of overlap, device, blocking)"),
    "stall limit": (
        "stall_limit_s=0 is not a number of seconds above 0 (use the longest time for which "
        "checkpoints may delay training, say 30)"
    ),
    "solo and replicated": (
        "solo=True and replicated=True cannot be combined (use solo=True if one rank saves, "
        "replicated=True if every rank saves a part)"
    ),
    "auto on several nodes": (
        'durable_every="auto" writes what the idle disk of each node takes, so the 4 ranks of '
        "this job, 2 of them on this node, would have almost no checkpoint on the disk in common "
        "(name a number: durable_every=10 writes every tenth checkpoint on all nodes)"
    ),
    "storage without autostart": (
        "storage= is for a private daemon only, and needs autostart=True (add "
        "autostart=True; or leave storage= out to use the daemon of this node)"
    ),
    "autostart without storage": (
        "autostart=True needs a directory for the checkpoints (add storage=DIR, a directory "
        "on a local disk, or set PCCHECK_STORAGE)"
    ),
    "autostart with socket": (
        "autostart=True chooses its own socket, and socket= was given (leave socket= out; or "
        "leave autostart=True out to use the daemon there)"
    ),
    "storage without a parent": (
        "cannot make the storage directory DIR/no/such: No such file or directory (make "
        "DIR/no first, or mount its disk; or choose a directory on a local disk with storage=)"
    ),
    "DataLoader": (
        "attach(loader=...): type torch.utils.data.dataloader.DataLoader has no "
        "state_dict, load_state_dict (use torchdata's StatefulDataLoader (pip install "
        "torchdata): it takes the same arguments and saves its place in the data)"
    ),
    "StatefulDataLoader": (
        "PCcheck: attach(loader=...): RandomSampler has no state, so a run that resumes in the "
        "middle of an epoch draws another order for the rest of that epoch. Use shuffle=True, or a "
        "sampler whose order follows from the epoch (docs/python.md, recipes)"
    ),
    "without a name": (
        "attach(Linear): everything is attached under a name (call attach(model=model, "
        "optimizer=optimizer))"
    ),
    "no state": (
        "attach(epoch=...): type int has no state_dict, load_state_dict (attach a dict that "
        "has the value, or give the object these two methods)"
    ),
    "rng": ("attach(rng=...) takes True or False only (attach this under another name)"),
    "state_dict() fails": (
        "attach(scaler=...): state_dict() of Broken fails: RuntimeError: not ready (attach "
        "an object whose state_dict() works from the start; for a data loader use "
        "torchdata's StatefulDataLoader (in Accelerate: use_stateful_dataloader=True))"
    ),
    "lambda": (
        "model.f: a value of type builtin_function_or_method cannot be stored (convert it to "
        "plain Python values, tensors or NumPy arrays, or leave it out)"
    ),
    "sparse tensor": (
        "model.w: a tensor of layout torch.sparse_coo cannot be stored (store its indices "
        "and values)"
    ),
    "key": (
        "extra: a key or set item of type builtin_function_or_method cannot be stored (use "
        "int, str, float, bool, None, bytes, complex, or tuples of those)"
    ),
    "metadata": (
        "metadata.model: type Linear cannot be metadata (use numbers, text, dicts and lists; "
        "attach the rest: attach(extra={...}))"
    ),
    "large metadata": (
        "metadata.curve has 70000 numbers, and the limit in metadata is 65536 (attach it "
        "instead: attach(extra={...}))"
    ),
    "nothing attached": (
        "checkpoint() has nothing to save (call attach(model=..., optimizer=...) first, or "
        "pass a state)"
    ),
    "no step": (
        "checkpoint() of attached state needs step= (call checkpoint(step=step) with the "
        "number of the step that has just ended: restore() returns it, and the loop continues "
        "with the next step)"
    ),
    "step as state": (
        "checkpoint(7): type int cannot be a state (call checkpoint(step=...) to save what "
        "is attached; a state is a tensor, or a dict or list with tensors)"
    ),
    "step": ("step=1.5 is not an int (use the number of the training step)"),
    "closed": (
        "this client is closed: by close(), the end of its with block, or a newer client for "
        "the same job and rank (make a new PCcheckClient, or call this before the end of the "
        "block)"
    ),
    "forked": (
        "this client belongs to the parent process, and does nothing in a forked one (make a "
        "PCcheckClient in this process)"
    ),
    "backwards": (
        "PCcheck: checkpoint(step=4) follows step 5 without a restore(). Both are saved; "
        "restore() returns the one that was saved last, whatever its step. Count steps "
        "upwards, or call restore() before going back"
    ),
    "signal handler": (
        "PCcheck: checkpoint() was called in the middle of another call of the client, and "
        "is skipped: let the signal handler set a flag, and check it between two steps. "
        "Training continues"
    ),
    "call in a call": (
        "steps() was called in the middle of another call of the client (let the signal handler "
        "set a flag, and check it between two steps)"
    ),
    "other thread": (
        "PCcheck: checkpoint() was called in thread 'MainThread', while thread 'trainer' trains: a "
        "call in the middle of a step is skipped, and a change of the state during the call fails "
        "the checkpoint. Let thread 'MainThread' set a flag, and call checkpoint() in thread "
        "'trainer' between two steps. A lock that both threads hold, around checkpoint() and "
        "around each step, does the same"
    ),
    "changed by another thread": (
        "abandoned: model.weight was changed while it was copied, before checkpoint() returned, so "
        "by another thread or a signal handler. Call checkpoint() in the thread that changes the "
        "state, between two changes; or hold a lock around checkpoint() that every other thread "
        "holds for its changes"
    ),
    "shared memory": (
        "PCcheck: the memory of model.weight is shared, or a mapped file. If other processes write "
        "to this memory, a checkpoint that is read meanwhile mixes two states, and nothing detects "
        "that: torch counts the changes of this process only. In that case hold the lock of the "
        "writers from checkpoint() until handle.wait_copied() returns"
    ),
    "copy of a client": (
        "a PCcheckClient cannot be copied or pickled, because its session belongs to this object "
        "and process: leave the client out of what is copied, and make a PCcheckClient where one "
        "is needed"
    ),
    "copy of a handle": (
        "a Checkpoint cannot be copied or pickled, because it uses the session of this process: "
        "pass on handle.step, or the result of handle.wait_durable()"
    ),
    "left out": (
        "PCcheck: the state of optimizer.momentum is not saved: the state_dict() of the attached "
        "optimizer leaves it out, and a resumed run begins without it. Keep it in "
        "optimizer.state[parameter], or let the state_dict() and load_state_dict() of the "
        "optimizer include it"
    ),
    "left out weights": (
        "PCcheck: none of the parameters that the attached optimizer trains is saved: nothing that "
        "is attached has them. A resumed run would use the state of optimizer with other "
        "parameters. Attach the model that optimizer trains. If the model or optimizer was made "
        "again, attach both again: client.attach(model=model, optimizer=optimizer)"
    ),
    "optimizer beside": (
        "PCcheck: the state of an optimizer (AdamW) that trains the attached model is not saved: "
        "the optimizer is not attached. A resumed run begins without its state (moments, step "
        "counts). Attach it: client.attach(model=model, optimizer=optimizer)"
    ),
    "scheduler beside": (
        "PCcheck: the learning rate scheduler of the attached optimizer is not saved: the "
        "scheduler is not attached. A resumed run begins its schedule again, unless the script "
        "sets its place. Attach it: client.attach(scheduler=scheduler)"
    ),
    "moved": (
        "PCcheck: checkpoint of step 5 failed: model.weight was changed while it was read, "
        "outside of an attached optimizer's step. From now on checkpoint() returns only after "
        "reading the whole state. To keep training meanwhile, call gate() before such a change, "
        "or attach the optimizer that makes it"
    ),
    "stale": (
        "PCcheck: the attached optimizer has made no step since step 5, and checkpoints hold that "
        "state. If you made a new model or optimizer, attach it again: client.attach(model=..., "
        "optimizer=...)"
    ),
    "CUDA graph": (
        "PCcheck: an attached optimizer made a step while a CUDA graph was recorded. A replay "
        "does not repeat the call: checkpoint() waits from now on; to keep training "
        'meanwhile, use gate="manual" and call gate() before every replay()'
    ),
    "stalled": (
        "PCcheck: checkpoint of step 5 failed: the daemon did not copy it within "
        "stall_limit_s=30 s. Training continues; checkpoints are skipped until the daemon "
        "makes progress (see: pccheckctl status)"
    ),
    "failed": (
        "PCcheck: checkpoint of step 5 failed: no space left in /data. Training continues; a "
        "restart resumes from the newest durable checkpoint, if there is one. Until a later "
        "checkpoint is durable, further failures with this reason are only counted (see: "
        "pccheckctl status)"
    ),
    "last ones failed": (
        "PCcheck: 2 checkpoints failed since step 4, up to step 6: no space left in /data. The "
        "newest checkpoint that is known to be durable is step 4: a restart resumes there, or at a "
        "later one, and repeats the steps after it. Remove the cause before the restart (see: "
        "pccheckctl status)"
    ),
    "all failed": (
        "PCcheck: 1 checkpoint failed, up to step 5: no space left in /data. There is no durable "
        "checkpoint, so a restart begins at the start of training. Remove the cause before the "
        "restart (see: pccheckctl status)"
    ),
    "none is known": (
        "PCcheck: 1 checkpoint failed, up to step 5: no space left in /data. No checkpoint of this "
        "run is known to be durable: a restart resumes from the newest one of an earlier run, or "
        "begins at the start of training. Remove the cause before the restart (see: pccheckctl "
        "status)"
    ),
    "unexpected": (
        "the state cannot be described: KeyError: 'x' (attach objects of torch, or objects with "
        "state_dict and load_state_dict)"
    ),
    "too many": (
        "64 checkpoints are in flight, and no more fit (save less often, or see what delays "
        "the oldest one: pccheckctl status)"
    ),
    "no GPU memory": (
        "PCcheck: GPU 0 has no 0 MiB free for a copy on the GPU. Checkpoints continue, but "
        "checkpoint() now returns only when the GPU tensors have been read; a copy on the GPU "
        "is tried again later"
    ),
    "not copied": (
        "checkpoint of step 5 is not copied yet (wait longer, or see what delays it: "
        "pccheckctl status)"
    ),
    "not durable": (
        "checkpoint of step 5 is not durable yet (wait longer, or see what delays it: "
        "pccheckctl status)"
    ),
    "superseded": (
        "checkpoint of step 5: a newer checkpoint became durable first, and pccheckd did not "
        "report which (see: pccheckctl list)"
    ),
    "handle failed": ("checkpoint of step 5 failed: no space left in /data (raise --max-storage)"),
    "handle skipped": (
        "checkpoint of step 5 was skipped: no space left in /data (raise --max-storage)"
    ),
    "GPU copy": ("its tensors could not be copied (EIO); for a GPU see nvidia-smi and dmesg"),
    "restore before attach": (
        "restore() was called before attach(): nothing to restore into (call "
        "attach(model=..., optimizer=...) first)"
    ),
    "restore with fresh": (
        "fresh=True begins without the job's checkpoints, and restore() reads one (remove "
        "fresh=True to continue the job, or restore() to begin a new run)"
    ),
    "another command": (
        "step 7 of job 'train' was saved N days ago by another command, train.py --lr 1 (pid "
        "12 on node1, in /work), and this process is ME. This run has only the script's name, "
        "so nothing is restored (to continue from that checkpoint, set PCCHECK_JOB=train or "
        "job='train'; to start a separate run, use another job name)"
    ),
    "other names": (
        "only in the checkpoint: optimizer; only attached: adam (attach the same under the same "
        "names; or take what you need from recover())"
    ),
    "more names": (
        "only in the checkpoint: ema, scheduler (attach the same under the same names; or restore "
        'what both have: restore(only=["model"]), then adopt() if this run continues the job)'
    ),
    "other shape": (
        "model.weight: the checkpoint has float32 [2, 2], and float32 [2, 3] is attached "
        "(build the model as it was, or take what you need from recover())"
    ),
    "other scheduler": (
        "scheduler: the checkpoint has the state of StepLR, and ExponentialLR is attached (to "
        'continue with a new scheduler: restore(only=["optimizer"]), then adopt() if this run '
        "continues the job)"
    ),
    "other optimizer": (
        "optimizer: the checkpoint has the state of AdamW, and SGD is attached (to continue with a "
        'new optimizer: restore(only=["model"]), then adopt() if this run continues the job; '
        "restore(strict_optimizer=False) takes the learning rate and the weight decay from the "
        "checkpoint, too)"
    ),
    "no optimizer": (
        "optimizer: what the checkpoint has under this name is not the state of an optimizer "
        "(attach the optimizer under the name with which it was saved)"
    ),
    "other options": (
        "optimizer.param_groups.0: the attached SGD has no rho, and the checkpoint does not tell "
        "of which class its optimizer is (if it is of this class: restore(strict_optimizer=False); "
        "to continue with a new optimizer: call adopt() instead of restore())"
    ),
    "other parameters": (
        "optimizer.param_groups.0.param_names: only in the checkpoint: bias, weight; only "
        "attached: net.bias, net.weight (give the parameters the names that they had; or attach an "
        "optimizer without names (model.parameters()), of the same parameters in the same order; "
        "or to continue with a new optimizer: call adopt() instead of restore())"
    ),
    "other order": (
        "optimizer.state.0.exp_avg: the checkpoint has state of [3, 2] for a parameter of [3] "
        "(give the optimizer its parameters in the order that they had. Made of "
        "named_parameters() before it is saved, it takes them in any order)"
    ),
    "expanded": (
        "model.mask: elements of the attached tensor share memory, as after expand(), and did not "
        "when it was saved (attach a tensor with memory of its own (clone()), or take what you "
        "need from recover())"
    ),
    "tied": (
        "model.embed shares memory with model.head, as tied weights do, and the checkpoint has "
        "different values for the two (give each value of a dict its own memory (clone()), build "
        "the model as it was, or take what you need from recover())"
    ),
    "copied then": (
        "best.weight shares memory with model.weight, and did not when it was saved (give each "
        "value of a dict its own memory (clone()), build the model as it was, or take what you "
        "need from recover())"
    ),
    "converted state": (
        "PCcheck: the load_state_dict() of Copied has converted state.0.m from torch.float32 to "
        "torch.bfloat16, so training does not continue exactly. Let it keep the dtype, or let its "
        "state_dict() return the entries of optimizer.state"
    ),
    "meta device": (
        "model.weight: the checkpoint has float32 [2, 2], and float32 [2, 2] on the device meta is "
        'attached (give it memory before restore(): model.to_empty(device="cuda"))'
    ),
    "given state": (
        "the checkpoint was made by checkpoint(state), so it has no attached objects (get the "
        "state with recover(); to save values beside what is attached, use metadata= or "
        "attach a dict)"
    ),
    "disk stands still": (
        "pccheckd is still writing step 7: 32 of 64 MiB of 2 checkpoints, and nothing was "
        "written for 0 s (check the disk (pccheckctl status, dmesg), then restore again; do "
        "not restart pccheckd, which has the copied checkpoints in memory)"
    ),
    "fewer GPUs": (
        "PCcheck: the checkpoint has random generators of 2 GPUs, and this process has 0. "
        "The generators of GPUs are not restored, so training draws other numbers there; the "
        "generators of Python, NumPy and the CPU are restored. For the same numbers use 2 GPUs"
    ),
    "unrestored": (
        "PCcheck: job 'gpt' (rank 0) has a checkpoint of step 40 that was NOT restored. It stays "
        "on the disk, beside the checkpoints of this run. To continue from it, call restore() "
        "before training (in a framework: see docs/frameworks.md). To start over, use "
        "PCcheckClient(fresh=True). If this run got its state in another way, call adopt()."
    ),
    "restored in part": (
        "PCcheck: job 'gpt' (rank 0) has a checkpoint of step 40 that was restored only in part "
        "(model). It stays on the disk, beside the checkpoints of this run. If this run continues "
        "that job, call adopt() after restore(only=...)."
    ),
    "plain DDP": (
        "PCcheck: the model is in DistributedDataParallel, and each of the 4 ranks stores a copy "
        "of the model. To store one copy, pass PCcheckClient(replicated=True) on every rank. If "
        "only rank 0 saves, pass PCcheckClient(solo=True) there"
    ),
    "absent ranks": (
        "PCcheck: rank 0 of job 'gpt' saves, but of its 4 ranks these are not connected: 1, "
        "2. A checkpoint can be restored only if every rank saved it, so this rank's "
        "checkpoints are useless until those ranks connect. If only this rank should save "
        "(rank 0 of plain DDP), use PCcheckClient(solo=True); or make a client with "
        "PCcheckClient(replicated=True) on every rank, and each saves a part."
    ),
    "damaged checkpoint": (
        "PCcheck: checkpoint of step 50 was skipped (bad checksum), and step 40 was restored "
        "instead: training repeats the steps between. Check the disk: pccheckctl verify"
    ),
    "own checkpoint": (
        "PCcheck: job 'gpt' restores step 40, which an earlier client of this process saved. That "
        "is right when a notebook's cell is run again. A run of its own (the next fold, a second "
        "Trainer) needs a job name of its own: PCcheckClient(job=...), or in a framework "
        "PCcheckCallback(job=...)"
    ),
    "rank that did not save": (
        "PCcheck: step 40 was saved with world size 2, and the part of rank 0 is not among what "
        "can be read: its generators (rng) are not restored and keep the state of this process. "
        "Seed them on this rank if ranks must differ"
    ),
    "another number of ranks": (
        "PCcheck: step 40 was saved with world size 2, and this start has 4: each rank gets "
        "another part of the data. So the position in the data (loader) is not restored. The "
        "interrupted epoch begins again on every rank, and training gets its first batches a "
        "second time"
    ),
    "no generators": (
        "PCcheck: the checkpoint of step 40 has no generators (rng): random numbers continue from "
        "this process's seeds"
    ),
    "incomplete generators": ("rng: there is no state of the generator of python, torch"),
    "name at the daemon": (
        "'../x' is not a valid job name (use letters, digits, '.', '_' and '-', at most 128, "
        "not starting with '.' or '-')"
    ),
    "pccheckctl status": (
        "pccheckctl: no daemon listens at DIR/none\nhint: start it with: pccheckd --storage "
        "DIR; or read the files without a daemon: pccheckctl --storage DIR ..."
    ),
}

#: Words of an earlier style: processes are not persons, and a sentence is read once.
PRIVATE = re.compile(
    r"\b(anew|aloud|told|tells|says|said|lets? go|goes on|at the latest|all the same|by now|he|his|"
    r"to be had|nobody|somebody)\b"
)


@pytest.mark.parametrize("name", WORDS)
def test_the_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = words(Kit(tmp_path, monkeypatch), CALLS[name], capsys)
    assert text == WORDS[name]
    assert not PRIVATE.search(text)


@pytest.mark.parametrize("options", [{"replicated": True}, {"solo": True}, {"rank": 1}], ids=str)
def test_plain_ddp_needs_no_words(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_ddp(Kit(tmp_path, monkeypatch), **options)


@pytest.fixture(params=["--storage", "--socket"])
def pasted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[PCcheckClient, str]]:
    """A client with a fake of its own daemon, and how commands begin that ask that daemon: without
    an option they would ask another one, or none."""
    monkeypatch.setattr(PCcheckClient, "_first_connect", lambda _: None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = tmp_path / "a b"
    private: Any = {"autostart": True, "storage": place}
    client = PCcheckClient(
        "gpt", 0, 1, **(private if request.param == "--storage" else {"socket": place})
    )
    session: Any = FakeSession(FakeConnection())
    client._session = client._saver._session = session
    yield client, f"pccheckctl {request.param} '{place}'"
    client.close()


REASON = "no space; jobs to drop: pccheckctl drop old (1 GiB)"


def test_commands_in_a_warning_can_be_pasted(pasted: tuple[PCcheckClient, str]) -> None:
    client, command = pasted
    with pytest.warns(PccheckWarning) as caught:
        client._saver.failures.report(5, REASON)
    text = str(caught[0].message)
    assert f"drop: {command} drop old (1 GiB)" in text and f"(see: {command} status)" in text


def test_commands_in_an_error_can_be_pasted(pasted: tuple[PCcheckClient, str]) -> None:
    client, command = pasted
    client._session.connection.refusal = RefusedError("no pin", hint="see: pccheckctl list")
    for call in (client.adopt, client.steps, lambda: client.pin(1)):
        with pytest.raises(RefusedError) as refused:
            call()
        assert str(refused.value) == f"no pin (see: {command} list)"


def test_commands_in_the_reason_of_a_handle_can_be_pasted(
    pasted: tuple[PCcheckClient, str],
) -> None:
    """Also in the errors of the handle."""
    client, command = pasted
    handle = Checkpoint(InFlight.ended(5, CheckpointState.FAILED, REASON), client._warner)
    expected = f"no space; jobs to drop: {command} drop old (1 GiB)"
    assert handle.reason == expected
    assert str(handle.exception()) == f"checkpoint of step 5 failed: {expected}"
    for wait in (handle.wait_copied, handle.wait_global):
        with pytest.raises(CheckpointFailedError, match=re.escape(expected)):
            wait()


def test_every_call_has_its_words() -> None:
    assert CALLS.keys() == WORDS.keys() and len(WORDS) >= 60
