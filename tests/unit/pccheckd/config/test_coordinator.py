"""How etcd is named, and the file with its credentials."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from pccheck_wire.errors import UsageError
from pccheckd import cli
from pccheckd.config import coordinator
from pccheckd.config.coordinator import Coordinator, parse
from tests.unit.pccheckd.config.test_config import load


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("etcd://10.0.0.1:2379", Coordinator((("10.0.0.1", 2379),), tls=False)),
        ("etcds://a:1,b.c:65535", Coordinator((("a", 1), ("b.c", 65535)), tls=True)),
        ("etcds://[fd00::1]:2379", Coordinator((("fd00::1", 2379),), tls=True)),
    ],
)
def test_a_place_is_read(text: str, place: Coordinator) -> None:
    assert parse(text) == place


@pytest.mark.parametrize(
    "text",
    ["x", "http://a:1", "etcd://", "etcd://a", "etcd://a:0", "etcd://a:65536", "etcd://a:1,",
     "etcd://fd00::1:2379", "etcd://a:1/prefix", "ETCD://a:1", "etcd://a:1, b:2"],
)  # fmt: skip
def test_what_is_no_place_is_told_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError, match="etcds://a:2379,b:2379,c:2379"):
        parse(text)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(UsageError, match="--coordinator-credentials") as caught:
        parse("etcds://me:secret@a:1")
    assert "secret" not in str(caught.value)


def test_the_options(tmp_path: Path) -> None:
    assert load().coordinator == "" and load().coordinator_credentials == ""
    made = load(f"--coordinator etcds://a:1 --coordinator-credentials {tmp_path}/c")
    assert made.coordinator_credentials == f"{tmp_path}/c"
    with pytest.raises(UsageError, match="--coordinator-credentials must be given with"):
        load("--coordinator-credentials /c")
    with pytest.raises(UsageError, match="--coordinator: the coordinator begins with etcd"):
        load("--coordinator a:1")
    line = tmp_path / "file.toml"
    line.write_text('storage = "/s"\nsocket = "/s/a"\ncoordinator-credentials = "c"\n')
    with pytest.raises(UsageError, match="coordinator-credentials: 'c' does not begin with /"):
        load(PCCHECK_CONFIG=str(line))


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


USER = 'user = "u"\npassword = "secret"\n'


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (USER, 0o640, r"holds a password, and other users may read it \(chmod 600 "),
        (USER + "x", 0o600, "is not TOML"),
        ('[password]\nx = "secret"', 0o600, "'password' is not one of the keys user, password"),
        ('pasword = "secret"', 0o600, "'pasword' is not one of the keys"),
        ('password = "secret"', 0o600, "user goes with password"),
        ('key = "/k"', 0o600, "certificate with key"),
        ('ca = "/k"', 0o600, "names certificates, and etcd:// uses none"),
        (USER, 0o600, "would send the password unencrypted"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, mode: int, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        coordinator.check(parse("etcd://a:1"), written(tmp_path / "c", text, mode))
    assert "secret" not in str(caught.value)


def test_a_file_that_can(tmp_path: Path) -> None:
    path = written(tmp_path / "c", USER)
    for place in ("etcd://127.0.0.1:1", "etcd://[::1]:1,localhost:2", "etcds://a:1"):
        assert coordinator.check(parse(place), path).user == "u"
    assert "secret" not in repr(coordinator.read(path))
    assert coordinator.read(written(tmp_path / "d", "", 0o644)).user == ""
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        coordinator.read(tmp_path / "absent")


def test_the_file_in_the_document_holds(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()
    (example,) = re.findall(r"```toml\n(user = .*?)```", text, re.DOTALL)
    found = coordinator.check(parse("etcds://a:1"), written(tmp_path / "c", example))
    assert all(dataclasses.astuple(found))


def test_a_daemon_does_not_start_with_a_file_that_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "c", USER, 0o644)
    flags = f"--storage {tmp_path} --socket /tmp/a --allow-any-filesystem --config /dev/null"
    place = f"--coordinator etcds://a:1 --coordinator-credentials {path}"
    assert cli.main([*flags.split(), *place.split()]) == UsageError.exit_code
    assert f"chmod 600 {path}" in capsys.readouterr().err
