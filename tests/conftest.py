"""Fixtures: daemons and trainers that end with the test, also when the test fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from pccheckctl import cli
from tests.support import workers
from tests.support.ctl import Ctl, Ran
from tests.support.daemon import Daemon
from tests.support.volumes import make

if TYPE_CHECKING:  # the process that only distributes tests need not import torch
    from tests.support.gpunode import Node
    from tests.support.trainer import Trainer

#: So small that a checkpoint of a few MiB has many chunks and blocks; and, on any disk, the storage
#: engine whose calls the fault shim intercepts.
SMALL = ("--chunk", "1MiB", "--block-bytes", "64KiB", "--dram", "64MiB", "--engine", "pwrite")

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
LOG_SHOWN = 6000  # characters of a log
PROCESS = os.getpid()

# torch's threads, here and in the processes that tests start. With two in each worker a test takes
# twice the CPU time, because the threads wait for each other in loops.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control starts background jobs with SIGINT ignored, and children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Workers of this machine are forked; see tests/support/workers.py."""
    places = config.getoption("tx", None) or []
    if places == ["popen"] * len(places) and places and not hasattr(config, "workerinput"):
        stack = ExitStack()
        config.add_cleanup(stack.close)
        place = stack.enter_context(TemporaryDirectory(prefix="pcc-"))
        python = stack.enter_context(workers.begun(Path(place)))
        config.option.tx = [f"popen//python={python}"] * len(places)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker begins with other modules, and finds the rest compiled by the other workers."""
    report = yield
    if isinstance(collector, pytest.Directory):
        number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        first = len(report.result) * number // WORKERS
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test's fork that raises ends here, else it would be a second worker with the same pipes. A
    test that fails shows what its daemons have logged."""
    if os.getpid() != PROCESS:
        ended = f"a fork in {item.nodeid} has ended: {call.excinfo and call.excinfo.getrepr()}\n"
        os.write(2, ended.encode())
        os._exit(70)
    report = yield
    for one in Daemon.all if report.failed else ():
        if one.log.exists():
            log = one.log.read_text(errors="replace")[-LOG_SHOWN:]
            report.sections.append((f"log of the daemon at {one.socket}", log))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """The process that distributes tests imports the class of each warning that it prints at the
    end, and with PccheckWarning torch."""
    kind = warning_message.category
    if kind.__module__ != "builtins":
        text = f"{kind.__name__}: {warning_message.message}"
        warning_message.message, warning_message.category = UserWarning(text), UserWarning


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first on each worker, so that no worker has them when the others are done."""
    items.sort(key=lambda item: item.path)
    long = [item for item in items if item.get_closest_marker("long")]
    short = [item for item in items if not item.get_closest_marker("long")]
    for item in long:
        item.add_marker(pytest.mark.timeout(1800))
    share = -(-len(short) // WORKERS)
    items[:] = [
        item
        for number in range(WORKERS)
        for item in (*long[number::WORKERS], *short[number * share : (number + 1) * share])
    ]


gc.disable()  # it would look at all of torch again and again while tests are imported


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of asynchronous tests and fixtures."""
    return "asyncio"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_daemon(stack: ExitStack) -> Callable[..., Daemon]:
    """A started daemon; its flags override those of the small geometry."""

    def start(*flags: str, shim: str = "", storage: object = None) -> Daemon:
        return stack.enter_context(Daemon(*SMALL, *flags, shim=shim, storage=storage)).start()  # type: ignore[arg-type]

    return start


@pytest.fixture
def start_trainer(stack: ExitStack) -> Callable[..., Trainer]:
    """A trainer connected to a daemon; `counts` are float32 elements per tensor."""

    def start(daemon: Daemon, counts: list[int] | None = None, **options: object) -> Trainer:
        from tests.support.trainer import Trainer

        environment = options.pop("environment", {})
        trainer = stack.enter_context(Trainer(**environment))  # type: ignore[arg-type]
        options.setdefault("job", "job")
        trainer.open(counts or [300_000, 7, 90_001], socket=str(daemon.socket), **options)
        return trainer

    return start


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon()


@pytest.fixture
def trainer(start_trainer: Callable[..., Trainer], daemon: Daemon) -> Trainer:
    return start_trainer(daemon)


@pytest.fixture
def start_node(stack: ExitStack) -> Callable[..., Node]:
    """A daemon with GPUs; see Node for the options."""

    def start(*flags: str, **options: object) -> Node:
        from tests.support.gpunode import Node

        return stack.enter_context(Node(*SMALL, *flags, **options)).start()  # type: ignore[arg-type]

    return start


@pytest.fixture
def node(start_node: Callable[..., Node]) -> Node:
    return start_node()


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ctl:
    """`pccheckctl` without a daemon; the first argument is the storage directory, or None."""
    monkeypatch.delenv("PCCHECK_STORAGE", raising=False)
    monkeypatch.setenv("PCCHECK_SOCKET", "/nonexistent/socket")

    def run(storage: Path | None, *arguments: object) -> Ran:
        place = [] if storage is None else ["--storage", str(storage)]
        code = cli.main([*place, *map(str, arguments)])
        told = capsys.readouterr()
        return Ran(code, told.out, told.err)

    return run


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A directory with checkpoints of steps 10, 20 and 30."""
    return make(tmp_path / "storage", 10, 20, 30)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(tmp_path)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip("may not mount")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)
