"""The units: what systemd-analyze says of them, and that they agree with the daemon. Nothing is
started."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pccheck_wire.basics import DEFAULT_SOCKET
from pccheckd.config.options import Config
from pccheckd.config.sources import DEFAULT_FILE
from pccheckd.lifecycle import FILES_WANTED

UNITS = Path(__file__).parents[4] / "systemd"
EXPOSURE_MAX = 2.0

analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Copies whose program exists: pccheckd need not be installed here."""
    for name in ("pccheckd.service", "pccheckd.socket"):
        text = (UNITS / name).read_text()
        text = re.sub(r"(?m)^ExecStart=pccheckd", "ExecStart=/bin/true", text)
        (tmp_path / name).write_text(text)
    return tmp_path


def with_cuda(units: Path) -> None:
    (units / "pccheckd.service.d").mkdir()
    shutil.copy(UNITS / "50-cuda.conf", units / "pccheckd.service.d")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def exposure(units: Path) -> float:
    said = run("security", "--offline=true", "--no-pager", units / "pccheckd.service").stdout
    return float(re.findall(r"Overall exposure level for \S+: (\d+\.\d)", said)[0])


def setting(name: str, key: str) -> str:
    """The last value of a key; keys may come more than once."""
    return re.findall(rf"(?m)^{key}=(.*)$", (UNITS / name).read_text())[-1]


@analyze
def test_systemd_has_nothing_to_say(units: Path) -> None:
    for _ in range(2):
        done = run("verify", "--man=no", units / "pccheckd.service", units / "pccheckd.socket")
        assert (done.returncode, done.stderr) == (0, "")
        if not (units / "pccheckd.service.d").exists():
            with_cuda(units)


@analyze
def test_the_exposure_is_as_stated(units: Path) -> None:
    base = exposure(units)
    assert base <= EXPOSURE_MAX
    with_cuda(units)
    cuda = exposure(units)
    stated = re.findall(r": (\d\.\d) with this drop-in, (\d\.\d) without", (
        UNITS / "50-cuda.conf").read_text().replace("\n# ", " "))  # fmt: skip
    assert stated == [(str(cuda), str(base))]


def test_they_agree_with_the_daemon() -> None:
    assert setting("pccheckd.socket", "ListenSequentialPacket") == DEFAULT_SOCKET
    assert setting("pccheckd.socket", "FileDescriptorName") == "attach"
    runtime = Path(DEFAULT_SOCKET).parent
    assert f"d {runtime} 0750 pccheck pccheck" in (UNITS / "pccheckd.tmpfiles").read_text()
    assert Path("/run") / setting("pccheckd.service", "RuntimeDirectory") == runtime
    assert Path("/etc") / setting("pccheckd.service", "ConfigurationDirectory") == (
        DEFAULT_FILE.parent
    )
    assert int(setting("pccheckd.service", "LimitNOFILE")) == FILES_WANTED
    limit_s = Config(Path("/"), Path("/")).drain_limit_s
    assert int(setting("pccheckd.service", "TimeoutStopSec")) > limit_s
    storage = re.findall(r'(?m)^storage = "(.*)"', (UNITS / "pccheckd.toml").read_text())
    assert storage == [str(Path("/var/lib") / setting("pccheckd.service", "StateDirectory"))]


def test_the_descriptor_store_is_told_to_the_daemon() -> None:
    """systemd before 254 sets no $FDSTORE; without it the daemon stores nothing."""
    told = setting("pccheckd.service", "Environment").split("FDSTORE=")
    assert told == ["", setting("pccheckd.service", "FileDescriptorStoreMax")]


def test_sections_are_those_of_units() -> None:
    for name, sections in {
        "pccheckd.service": ["Unit", "Service", "Install"],
        "pccheckd.socket": ["Unit", "Socket", "Install"],
        "50-cuda.conf": ["Unit", "Service"],
    }.items():
        parsed = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
        parsed.read_string((UNITS / name).read_text())
        assert parsed.sections() == sections
