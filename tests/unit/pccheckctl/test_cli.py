"""Arguments, exit codes, and errors as text and as JSON. No daemon, no volumes."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pccheck_wire.errors import UsageError
from pccheckctl import cli
from pccheckctl.output.files import Output

ROOT = Path(__file__).parents[3]
HEAVY = ("zmq", "torch", "pccheck", "numpy", "rich", "dataclasses", "asyncio")


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PCCHECK_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.delenv("PCCHECK_STORAGE", raising=False)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["show"],
        ["recover", "job"],
        ["recover", "job", "--output", "x", "--rank", "1", "--all-ranks"],
        ["recover", "job", "--output", "x", "--step", "1"],
        ["export", "job"],
        ["export", "job", "--output", "x", "--format", "pickle"],
        ["export", "job", "--output", "x", "--step", "1", "--sequence", "2"],
        ["show", "job", "--step", "1", "--sequence", "2"],
        ["show", "job", "--step", "one"],
        ["wait", "job", "--step", "-3"],
        ["list", "--rank", "-5"],
        ["wait", "job"],
        ["status", "--stor", "/tmp"],
        ["status", "--unknown"],
        ["bench", "--writers", "0"],
        ["config", "set"],
    ],
)
def test_wrong_usage_is_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("pccheckctl: ")
    assert "see: pccheckctl" in told.err.partition("hint: ")[2]


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--json", "--uid", "5", "statsu"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == "there is no command 'statsu'"
    assert error["hint"].startswith("did you mean status? ")
    assert cli.main(["fly"]) == 2
    assert "hint: see: pccheckctl --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["status", "--strage", "x"], "--storage"),
        (["--strage", "x", "status"], "--storage"),
        (["--sockt=x", "list"], "--socket"),
        (["export", "job", "-o", "x", "--formt=dcp"], "--format"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert f"did you mean {meant}? see: pccheckctl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "job", "-o", "x", "--rank=--"],
        ["bench", "--size=--"],
        ["tune", "--slowdown=--"],
        ["report", "-o", "x", "--last=--"],
        ["export", "job", "-o--"],
        ["list", "--storage=--"],
        ["--storage=--", "list"],
    ],
)
def test_two_dashes_are_no_value(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert ": -- is not a value\n" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--storage", "--socket"])
def test_a_place_without_a_name_is_refused(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--storage "$DIR"` with an unset DIR must not drop a job of another place."""
    monkeypatch.setenv("PCCHECK_STORAGE", str(tmp_path))
    for arguments in ([option, "", "drop", "job", "--yes"], ["drop", "job", "--yes", f"{option}="]):
        assert cli.main(arguments) == 2
        assert f"argument {option}: '' is not a path" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["z" * 100_000, "9" * 100_000])
@pytest.mark.parametrize(
    "before", ["", "status --", "list --rank=", "bench --size=", "wait j --timeout=", "completion "]
)
def test_a_long_argument_is_not_repeated_whole(
    before: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(f"{before}{word}".split()) == 2
    told = capsys.readouterr().err
    assert len(told) < 1200 and f"{word[:100]}" in told and "hint: see: pccheckctl" in told


def test_config_of_nobody_is_twelve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The daemon does not answer; the output names what a daemon started from this shell lacks."""
    monkeypatch.setenv("PCCHECK_CONFIG", os.devnull)
    assert cli.main(["config", "show"]) == 12
    told = capsys.readouterr().err
    assert "no daemon listens at" in told and "would fail: --storage is missing" in told
    monkeypatch.setenv("PCCHECK_STORAGE", str(tmp_path))
    monkeypatch.setenv("PCCHECK_SOCKET", "/nonexistent/nobody")
    assert cli.main(["config", "show"]) == 0


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["status", "--help"]])
def test_help_and_version_are_zero(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert "pccheckctl" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "list",
        "verify",
        "show job",
        "recover job -o x",
        "export job -o x",
    ],
)
def test_no_daemon_is_twelve_with_both_ways_out(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == 12
    told = capsys.readouterr().err
    assert "no daemon listens at" in told
    assert "pccheckd --storage DIR" in told
    assert "--storage" in told


def test_commands_that_name_a_daemon_or_directory_themselves_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> int:
        raise UsageError("no", hint="ask pccheckctl --socket /y list, or pccheckctl list; pccheckd")

    monkeypatch.setattr("pccheckctl.commands.status.run", run)
    assert cli.main(["--socket", "/x y", "status", "--uid", "5"]) == 2
    told = capsys.readouterr().err
    assert "ask pccheckctl --socket /y list, or " in told
    assert "or pccheckctl --socket '/x y' --uid 5 list; pccheckd\n" in told
    assert cli.main(["status"]) == 2
    assert "or pccheckctl list; pccheckd\n" in capsys.readouterr().err


def test_errors_are_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--json"]) == 12
    told = capsys.readouterr()
    assert told.err == ""
    error = json.loads(told.out)["error"]
    assert (error["code"], error["exit_code"]) == ("DAEMON_UNREACHABLE", 12)
    assert error["retryable"] is True
    assert error["hint"]


def test_wrong_usage_is_json_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "USAGE"


@pytest.mark.parametrize("before", [True, False])
def test_common_flags_stand_on_either_side(*, before: bool, tmp_path: Path) -> None:
    flags = ["--socket", "/x", "--storage", str(tmp_path), "--json", "--uid", "3"]
    chosen = cli.parser().parse_args([*flags, "status"] if before else ["status", *flags])
    assert (chosen.socket, chosen.storage, chosen.uid) == ("/x", str(tmp_path), 3)
    assert chosen.json is True


def test_a_user_is_given_by_number_or_name() -> None:
    name = pwd.getpwuid(os.getuid()).pw_name
    for text, uid in ((name, os.getuid()), (str(os.getuid()), os.getuid()), ("54321", 54321)):
        assert cli.parser().parse_args(["--uid", text, "status"]).uid == uid


@pytest.mark.parametrize("text", ["nobody-here", "-5", "1.5", "4294967295", "9" * 5000, ""])
def test_who_is_no_user_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"--uid={text}", "status"]) == 2
    assert "neither a user of this machine nor a uid" in capsys.readouterr().err


@pytest.mark.parametrize("imported", ["pccheckctl.cli", "argparse", "pccheckctl.commands.status"])
def test_ctrl_c_is_130_also_while_modules_are_imported(imported: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entry, _, name = project["scripts"]["pccheckctl"].partition(":")
    code = f"""if True:
        import sys
        class Interrupted:
            def find_spec(self, name, *_):
                if name == {imported!r}:
                    raise KeyboardInterrupt
        sys.modules.pop({imported!r}, None)
        sys.meta_path.insert(0, Interrupted())
        sys.argv = ["pccheckctl", "status"]
        from {entry} import {name}
        sys.exit({name}())"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (ran.returncode, ran.stderr) == (130, "")


@pytest.mark.parametrize(
    ("flags", "more"), [([], ["pccheck_native"]), (["--storage", "/"], ["msgpack", "socket"])]
)
def test_starts_without_the_heavy_modules(flags: list[str], more: list[str]) -> None:
    """Nothing that takes longer than the answer itself is imported to ask, or to list."""
    heavy = [*HEAVY, *more]
    code = (
        f"import sys; from pccheckctl import cli; cli.main([*{flags!r}, 'status', '--json']); "
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    ran = subprocess.run(
        f"{sys.executable} -m pccheckctl --json status | true",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["completion", "bash"]])
@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ('"$@" >&-', 0, ""),
        ('"$@" >&- 2>&- <&-', 0, ""),
        ('"$@" >/dev/full', 1, "pccheckctl: cannot write the output: No space left on device\n"),
        ('"$@" >/dev/full 2>&1', 1, ""),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(
    tmp_path: Path, words: list[str], shell: str, code: int, said: str, buffered: bool
) -> None:
    """A closed one, as cron jobs may have, is no error."""
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / ".pccheckd.lock").touch()
    command = [sys.executable, "-m", "pccheckctl", "--storage", str(storage), *words]
    ran = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", *command], check=False, capture_output=True, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (code, said)


def test_a_job_name_that_is_no_text_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(_: object) -> int:
        "\udcff".encode()
        return 0

    monkeypatch.setattr("pccheckctl.commands.status.run", encode)
    assert cli.main(["status"]) == 2


@pytest.mark.parametrize(
    "words",
    [
        "list", "show", "verify", "recover -o x", "export -o x", "wait --newest", "drop --yes",
        "report -o x", "tune --job", "import",
    ],
)  # fmt: skip
def test_a_name_that_no_job_can_have_is_refused_in_the_same_words(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = [str(tmp_path)] * (words == "import")
    assert cli.main([*words.split(), "größe", *file, "--storage", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "pccheckctl: 'größe' is not a valid job name\nhint: use letters, digits, '.', '_' and '-', "
        "at most 128, not starting with '.' or '-'\n"
    )


def test_a_torch_file_gets_no_name_by_which_torch_takes_it_for_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.load() reads *.safetensors with safetensors."""
    words = ["export", "job", "--format", "torch", "-o", str(tmp_path / "model.safetensors")]
    assert cli.main([*words, "--storage", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "torch.load() takes" in told and "--format safetensors" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["bench", "tune --checkpoint 1GiB --step-time 1s"])
def test_a_file_is_no_place_to_measure(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert cli.main([*words.split(), "--storage", str(tmp_path / "file")]) == 10
    assert capsys.readouterr().err == (
        f"pccheckctl: {tmp_path}/file is not a directory\n"
        "hint: name the directory for the checkpoints\n"
    )


def test_output_is_a_file_and_not_stdout() -> None:
    with pytest.raises(UsageError, match="does not write to stdout"):
        Output(Path("-"), force=False)


def test_an_output_does_not_take_the_place_of_a_device(tmp_path: Path) -> None:
    """`--output /dev/null --force` by root: every process of the machine then wrote into a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (pipe, Path(os.devnull)):
        with pytest.raises(UsageError, match="is not a regular file"):
            Output(target, force=True)
