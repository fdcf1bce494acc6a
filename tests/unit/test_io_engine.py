"""How the daemon comes by its storage engine, without a disk that is measured."""

from __future__ import annotations

import asyncio
import errno
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheck_native import EngineChoice
from pccheckd.config.options import Config
from pccheckd.core import io_engine
from pccheckd.core.io_engine import IoEngine

ROOM = 64 << 20
FIGURES = "auto: pwrite 3.5, uring 5.0 GB/s, 9 rounds of 64 MiB"


def config(**changes: object) -> Config:
    return Config(storage=Path("/s"), socket=Path("/r"), **changes)  # type: ignore[arg-type]


def choice(**measured: int | str) -> EngineChoice:
    best = max((v, k) for k, v in measured.items() if isinstance(v, int))[1]
    return EngineChoice(best, 9, ROOM, measured)


def decide(measure: Callable[..., EngineChoice], **changes: object) -> tuple[str, str]:
    """The engine of the first volume, and why."""

    async def work() -> tuple[str, str]:
        made = IoEngine(config(**changes), measure=measure)
        made.start()
        return await made.chosen(), made.reason

    return asyncio.run(work())


def measured(**figures: int | str) -> Callable[..., EngineChoice]:
    return lambda place, **options: choice(**figures)


def fail(*_: object, **__: object) -> EngineChoice:
    raise AssertionError("nothing was to be measured")


def test_what_is_named_is_not_measured() -> None:
    assert decide(fail, engine="mmap") == ("mmap", "")


def test_auto_takes_the_fastest_and_says_why() -> None:
    found = decide(measured(pwrite=3_500_000_000, uring=5_000_000_000, pmem="UNSUPPORTED"))
    assert found == ("uring", FIGURES)


def test_an_engine_that_cannot_be_had_is_told() -> None:
    engine, why = decide(measured(pwrite=3_500_000_000, uring="UNSUPPORTED"))
    assert engine == "pwrite"
    assert "pwrite 3.5 GB/s" in why and "uring: the kernel or the container" in why
    assert decide(measured(pwrite=1, uring="EIO"))[1].endswith("; uring: EIO")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "full"), "64 MiB of room"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (RuntimeError("odd"), "odd"),
    ],
)
def test_an_error_leaves_pwrite_and_its_reason(error: Exception, told: str) -> None:
    def broken(*_: object, **__: object) -> EngineChoice:
        raise error

    engine, why = decide(broken)
    assert engine == "pwrite"
    assert why.startswith("auto: not measured: ") and told in why


def test_a_bandwidth_limit_is_kept_by_the_measurement_too() -> None:
    engine, why = decide(fail, max_bandwidth_bytes=1 << 20)
    assert (engine, why) == ("pwrite", "auto: not measured, because of --max-bandwidth")


@pytest.mark.parametrize("wanted", ["auto", "uring"])
def test_rings_need_descriptors(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    engine, why = decide(measured(pwrite=1, uring=2), engine=wanted)
    assert engine == "pwrite"
    assert "uring: only 1024 files may be open; it needs 4096" in why


def test_nobody_waits_long_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_engine, "MEASURE_LIMIT_S", 0.01)
    goes_on, ended = threading.Event(), asyncio.Event()

    def slow(*_: object, **__: object) -> EngineChoice:
        goes_on.wait(30)
        return choice(pwrite=1, uring=2)

    async def work() -> None:
        made = IoEngine(config(), measure=slow)
        take = made._take

        def taken(found: EngineChoice | Exception) -> None:
            take(found)
            ended.set()

        made._take = taken  # type: ignore[method-assign]
        made.start()
        assert await asyncio.gather(*(made.chosen() for _ in range(3))) == ["pwrite"] * 3
        assert made.reason == "auto: not measured within 0.01 s"
        goes_on.set()
        await asyncio.wait_for(ended.wait(), 30)  # it comes too late: volumes are open
        assert (await made.chosen(), made.choice) == ("pwrite", None)

    asyncio.run(work())


def test_before_the_start_it_is_pwrite() -> None:
    async def work() -> str:
        return await IoEngine(config(), measure=fail).chosen()

    assert asyncio.run(work()) == "pwrite"


def test_status_says_what_volumes_really_got() -> None:
    made = IoEngine(config(engine="uring"), measure=fail)
    made.opened("pwrite")
    told = made.document()
    assert (told["engine"], told["engine_wanted"]) == ("pwrite", "uring")
    assert told["engine_reason"] == "uring: the kernel or the container does not allow io_uring"
    made.opened("uring")
    assert (made.running, made.reason) == ("uring", "")
