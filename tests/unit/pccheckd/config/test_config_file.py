"""The file: its keys, its errors, its place behind flags and variables, and what is made of it."""

from __future__ import annotations

import json
import runpy
import tomllib
from pathlib import Path

import pytest

from pccheck_wire.errors import UsageError
from pccheckd import cli
from pccheckd.config import text as config_text
from pccheckd.config.options import OPTIONS, Config, OptionOrigin
from pccheckd.config.sources import Sources

ROOT = Path(__file__).parents[4]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pccheckd.toml"


def load(file: Path, text: str, *, flags: dict[str, str] | None = None, **environ: str) -> Config:
    file.write_text(f'storage = "/srv/x/y"\nsocket = "/run/x/a.sock"\ndram = "256MiB"\n{text}')
    return Sources({"config": str(file), **(flags or {})}, environ).load()


def test_flag_over_variable_over_file_over_default(file: Path) -> None:
    def chosen(**given: str) -> tuple[int, OptionOrigin]:
        flags = {"slots": "8"} if "flag" in given else {}
        environ = {"PCCHECK_SLOTS": "7"} if "variable" in given else {}
        config = load(file, "slots = 6" if "file" in given else "", flags=flags, **environ)
        return config.slots, config.origins["slots"]

    assert chosen(flag="", variable="", file="") == (8, OptionOrigin("flag", "--slots"))
    assert chosen(variable="", file="") == (7, OptionOrigin("environment", "PCCHECK_SLOTS"))
    assert chosen(file="") == (6, OptionOrigin("file", str(file)))
    assert chosen() == (4, OptionOrigin("default"))


def test_values_are_written_as_toml_has_them(file: Path) -> None:
    config = load(
        file, 'allow-any-filesystem = true\nmax-storage = "1TiB"\nmax-bandwidth = 1048576\n'
        "drain-limit = 12.5\nchronicle = false",
    )  # fmt: skip
    assert config.allow_any_filesystem and not config.chronicle
    assert (config.max_storage_bytes, config.max_bandwidth_bytes) == (1 << 40, 1 << 20)
    assert config.drain_limit_s == 12.5
    assert config.file == file


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("slot = 4", r"unknown key 'slot', did you mean 'slots'\?"),
        ("max_storage = 4", r"unknown key 'max_storage', did you mean 'max-storage'\?"),
        ("zebra = 4", r"unknown key 'zebra' \("),
        ("slots = 4\n[pool]\ndram = 1", r"unknown table \[pool\] .*no tables"),
        ("slots = [4]", r"slots takes one value"),
        ("slots = 33", r"pccheckd.toml: slots must be 2 to 32 \(got 33\)"),
        ("slots = true", r"pccheckd.toml: slots: 'yes' is not a whole number"),
        ('engine = "mmapp"', r"engine: 'mmapp' is not one of"),
        ("slots = ", r"is not TOML: Invalid value"),
        ("slots = " + "[" * 100_000, r"is not TOML: maximum recursion depth"),
    ],
)
def test_mistakes_are_named(file: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load(file, text)


def test_paths_in_the_file_are_whole(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('storage = "here"')
    with pytest.raises(UsageError, match=r"storage: 'here' does not begin with /"):
        Sources({"config": str(tmp_path / "c.toml")}, {}).load()
    (tmp_path / "c.toml").write_text(r'storage = "/a\u0000b"')
    with pytest.raises(UsageError, match=r"storage: '/a\\x00b' is not a path"):
        Sources({"config": str(tmp_path / "c.toml")}, {}).load()


def test_a_named_file_has_to_be_there_the_default_one_not(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    flags = {"storage": "/srv", "socket": "/run/x/a.sock"}
    assert Sources(flags, {}, absent).load().file is None
    for given in (Sources({**flags, "config": str(absent)}, {}),
                  Sources(flags, {"PCCHECK_CONFIG": str(absent)})):  # fmt: skip
        with pytest.raises(UsageError, match=r"absent.toml cannot be read: No such file") as raised:
            given.load()
        assert raised.value.hint.startswith("name an existing file")
    absent.write_text("slots = 5")
    assert Sources(flags, {}, absent).load().slots == 5


def test_check_config_says_what_would_be_used(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load(file, f'slots = 6\nmax-bandwidth = "1GiB"\n# {tmp_path}')
    assert cli.main(["--config", str(file), "--check-config"]) == 0
    told = capsys.readouterr()
    assert f"the configuration is valid; file: {file}" in told.out
    assert any(line.split() == ["slots", "6", str(file)] for line in told.out.splitlines())
    assert any(line.split() == ["writers", "2", "default"] for line in told.out.splitlines())
    assert "would not start on this machine: the storage directory /srv/x/y" in told.err
    assert cli.main(["--config", str(file), "--check-config", "--keep", "9"]) == 2
    assert "--keep must be less than --slots (got 9 and 6)" in capsys.readouterr().err


def test_check_config_as_a_document(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(file, "slots = 6")
    monkeypatch.setenv("PCCHECK_SLOTTS", "7")
    misspelt = ["PCCHECK_SLOTTS is set, and nothing reads it: did you mean PCCHECK_SLOTS?"]
    assert cli.main(["--config", str(file), "--check-config"]) == 0
    assert f"warning: {misspelt[0]}" in capsys.readouterr().err
    assert cli.main(["--config", str(file), "--check-config", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["source"], document["file"]) == (1, "files", str(file))
    (slots,) = [row for row in document["options"] if row["name"] == "slots"]
    assert (slots["value"], slots["origin"], slots["origin_kind"]) == (6, str(file), "file")
    assert document["warnings"] == misspelt
    assert cli.main(["--config", str(file), "--check-config", "--json", "--slots", "1"]) == 2
    refused = json.loads(capsys.readouterr().out)
    assert "--slots" in refused["error"]["message"]
    assert refused["warnings"] == misspelt


def test_the_file_that_is_shipped_is_the_table_and_every_line_holds(file: Path) -> None:
    made = config_text.file_text()
    assert (ROOT / "systemd" / "pccheckd.toml").read_text() == made, "make reference"
    lines = [
        line.removeprefix("# ")
        for line in made.splitlines()
        if line.partition(" = ")[0].removeprefix("# ") in {option.key for option in OPTIONS}
    ]
    given = tomllib.loads("\n".join(lines))
    assert given.keys() == {option.key for option in OPTIONS if not option.hidden}
    file.write_text("\n".join(line for line in lines if not line.startswith("dram")))
    config = Sources({"config": str(file)}, {}).load()
    for option in OPTIONS:
        if option.default is not None:
            assert getattr(config, option.field) == option.default, option.key


def test_the_document_has_the_table() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    _, begin, rest = text.partition("<!-- options: made by `make reference` -->\n")
    table, end, _ = rest.partition("<!-- end of options -->")
    assert begin and end
    assert table == runpy.run_path(str(ROOT / "docs" / "reference.py"))["table"](), "make reference"


@pytest.mark.parametrize(
    "place", ["systemd/pccheckd.toml", "docs/configuration.md", "docs/man/pccheckd.8"]
)
def test_every_option_is_described_everywhere(place: str) -> None:
    made = (ROOT / place).read_text().replace("\\-", "-")
    for option in OPTIONS:
        assert (option.key in made) is not option.hidden
