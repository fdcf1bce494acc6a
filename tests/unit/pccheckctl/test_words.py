"""Completion and man pages are made from the arguments, and say all of them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from pccheckctl import cli
from pccheckctl.arguments import COMMANDS
from pccheckctl.commands import completion

ROOT = Path(__file__).parents[3]


def test_the_quick_parser_is_the_whole_one_for_its_command() -> None:
    words = ["--storage", "list", "wait", "job", "--step", "3"]
    assert cli._named(words) == "wait"
    assert cli.parser("wait").parse_args(words) == cli.parser().parse_args(words)
    assert cli._named(["--json"]) is None


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_flag_is_in_the_script(shell: str) -> None:
    script = completion.script(shell)
    for command in COMMANDS:
        assert command.name in script
    for action in cli.actions(cli.parser()):
        for flag in action.option_strings:
            assert (flag if shell != "fish" else flag.lstrip("-")) in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_takes_the_script(shell: str, tmp_path: Path) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} here")
    script = tmp_path / "script"
    script.write_text(completion.script(shell))
    subprocess.run([found, "-n", str(script)], check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("sta", "status"),
        ("--storage /mnt ver", "verify"),
        ("--json --uid 5 wai", "wait"),
        ("wait job --for ", "copied durable global"),
        ("wait job --for gl", "global"),
        ("recover job --fo", "--force"),
        ("export job --fo", "--force --format"),
        ("export job --format sa", "safetensors"),
        ("completion f", "fish"),
        ("tune --slots ", ""),
    ],
)
def test_bash_completes(typed: str, offered: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(completion.script("bash"))
    words = " ".join(f"'{word}'" for word in ["pccheckctl", *typed.split(" ")])
    ask = (
        f"source {script}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        '_shtab_pccheckctl; echo "${COMPREPLY[*]}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == offered


def test_the_man_pages_are_what_the_code_makes() -> None:
    place = ROOT / "docs" / "man"
    spec = importlib.util.spec_from_file_location("make_man", place / "make.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    for name, text in maker.pages().items():
        assert (place / name).read_text() == text, f"run: make reference ({name})"
