"""What SIGHUP changes: the options that may change, all or none; the log names the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pccheckd.base.logs import LOG
from pccheckd.base.notify import Notifier
from pccheckd.base.repeats import BURST, Repeats
from pccheckd.config import text as config_text
from pccheckd.config.options import OPTIONS, Config
from pccheckd.config.reload import Reloader
from pccheckd.config.sources import Sources

Reload = Callable[[str], None]


class Heard(Notifier):
    """Records what the manager would receive."""

    def __init__(self) -> None:
        super().__init__({})
        self.states: list[str] = []

    def send(self, *states: str) -> None:
        self.states += states


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "pccheckd.toml"
    made.write_text("")
    return made


@pytest.fixture
def sources(file: Path, tmp_path: Path) -> Sources:
    flags = {"storage": str(tmp_path), "socket": "/run/x/a.sock", "keep": "1",
             "dram": "64MiB", "config": str(file)}  # fmt: skip
    return Sources(flags, {})


@pytest.fixture
def config(sources: Sources) -> Config:
    return sources.load()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def reload(
    file: Path, sources: Sources, config: Config, heard: Heard,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> Reload:  # fmt: skip
    monkeypatch.setattr("pccheckd.base.logs.set_up", lambda *_: None)
    monkeypatch.setattr(LOG, "propagate", True)
    caplog.set_level(logging.INFO, LOG.name)  # not by the attribute: loggers remember

    async def once() -> None:
        done = asyncio.Event()
        reloader = Reloader(config, sources, heard)
        heard.send = lambda *s: (heard.states.extend(s), "READY=1" in s and done.set())  # type: ignore[method-assign, assignment, func-returns-value]
        reloader.start()
        reloader.request()
        await done.wait()
        await reloader.close()

    def write_and_reload(text: str) -> None:
        caplog.clear()
        file.write_text(text)
        asyncio.run(once())

    return write_and_reload


def test_live_values_are_taken_over(
    reload: Reload, config: Config, heard: Heard, caplog: pytest.LogCaptureFixture, file: Path
) -> None:
    reload('max-storage = "2TiB"\ndrain-limit = "5min"\nlog-level = "debug"')
    assert (config.max_storage_bytes, config.drain_limit_s) == (2 << 40, 300)
    assert config.log_level == "debug"
    assert config.origins["max_storage_bytes"].name == str(file)
    assert "drain-limit 1min -> 5min" in caplog.text
    assert heard.states[0] == "RELOADING=1"
    assert heard.states[1].startswith("MONOTONIC_USEC=")
    assert heard.states[-1] == "READY=1"
    reload("")
    assert config.max_storage_bytes == 0
    assert config.origins["max_storage_bytes"].kind == "default"


def test_every_reload_is_reported(reload: Reload, caplog: pytest.LogCaptureFixture) -> None:
    """Lines that repeat are left out of the log, but somebody waits for these."""
    repeats = Repeats(clock=lambda: 0.0)
    for number in range(4 * BURST):
        reload("drain-limit = 5" if number % 2 else "drain-limit = ")
        assert len(list(filter(repeats.filter, caplog.records))) == 1


def test_what_needs_a_restart_is_named_once_and_kept(
    reload: Reload, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    reload('slots = 8\nchunk = "32MiB"\nstall-limit = 7')
    assert (config.slots, config.chunk_bytes, config.stall_limit_s) == (4, 16 << 20, 7)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "slots 4 -> 8" in warning and "chunk 16MiB -> 32MiB" in warning
    assert config.origins["slots"].kind == "default"
    rows = config_text.document(config, "daemon")["options"]
    assert isinstance(rows, list)
    assert {r["name"]: r["after_restart"] for r in rows if r["after_restart"]} == {
        "slots": "8", "chunk": "32MiB",
    }  # fmt: skip
    reload("")
    assert not config.pending


def test_a_flag_stays_above_the_file(reload: Reload, config: Config) -> None:
    reload("keep = 3")
    assert config.keep == 1 and not config.pending


@pytest.mark.parametrize("text", ["slots = ", "max_storage = 4", "drain-limit = 9\nslots = 99"])
def test_a_broken_file_changes_nothing(
    reload: Reload, config: Config, heard: Heard, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    reload("drain-limit = 5")
    heard.states.clear()
    reload(text)
    assert config.drain_limit_s == 5
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "no option changed" in error.getMessage()
    assert heard.states[-1] == "READY=1"


def test_a_reload_that_fails_half_way_changes_nothing_and_the_next_one_works(
    reload: Reload,
    config: Config,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise OSError("the journal is not there")

    with monkeypatch.context() as patch:
        patch.setattr("pccheckd.base.logs.set_up", broken)
        reload("drain-limit = 5\nslots = 8")
    assert config.drain_limit_s == 60 and not config.pending
    assert config.origins["drain_limit_s"].kind == "default"
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "no option changed" in error.getMessage()
    reload("drain-limit = 5")
    assert config.drain_limit_s == 5


def test_one_that_cannot_take_it_over_does_not_keep_the_others_or_the_next_reload(
    file: Path, sources: Sources, config: Config, heard: Heard, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("pccheckd.base.logs.set_up", lambda *_: None)
    monkeypatch.setattr(LOG, "propagate", True)
    told: list[float] = []

    def broken() -> None:
        raise RuntimeError("no")

    async def twice() -> None:
        reloader, over = Reloader(config, sources, heard), asyncio.Event()
        heard.send = lambda *s: "READY=1" in s and over.set()  # type: ignore[method-assign, assignment, func-returns-value]
        reloader.then(broken, lambda: told.append(config.drain_limit_s))
        reloader.start()
        for limit_s in (5, 7):
            file.write_text(f"drain-limit = {limit_s}")
            over.clear()
            reloader.request()
            await asyncio.wait_for(over.wait(), 20)
        await reloader.close()

    asyncio.run(twice())
    assert told == [5, 7]
    assert caplog.text.count("could not apply it") == 2


def test_every_live_option_can_be_set() -> None:
    """A frozen or copied field would make the reload fail at the worst of times."""
    config = Config(Path("/"), Path("/s"))
    for option in OPTIONS:
        if option.live:
            setattr(config, option.field, getattr(config, option.field))
