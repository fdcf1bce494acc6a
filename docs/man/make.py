"""Writes the man pages from the programs' own arguments.

python docs/man/make.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pccheckctl
from pccheckctl import cli
from pccheckd.config import sources as config
from pccheckd.config.options import OPTIONS
from pccheckd.config.text import changes, groups, sentence, takes

HERE = Path(__file__).parent

_ENVIRONMENT = """\
.TP
\\fBPCCHECK_SOCKET\\fR
The attach socket, in the place of \\fB\\-\\-socket\\fR.
.TP
\\fBPCCHECK_STORAGE\\fR
The storage directory that is read when no daemon answers."""

_EXAMPLES = """\
.nf
pccheckctl doctor \\-\\-storage /mnt/ssd/checkpoints
pccheckctl tune \\-\\-checkpoint 40GiB \\-\\-step\\-time 350ms \\-\\-storage /mnt/ssd/checkpoints
pccheckctl status \\-\\-watch
pccheckctl wait gpt \\-\\-newest \\-\\-for=durable \\-\\-timeout 10min
pccheckctl \\-\\-storage /mnt/moved recover gpt \\-\\-output state.safetensors
pccheckctl export gpt \\-\\-step 4000 \\-\\-only model \\-\\-output model.safetensors
pccheckctl drop gpt \\-\\-dry\\-run
.fi"""

_SIGNALS = """\
.TP
SIGTERM, SIGINT
Stop: no process may connect any more, what is copied becomes durable (see
\\fB\\-\\-drain\\-limit\\fR), then the end. The second one ends at once.
.TP
SIGHUP
Read the configuration again, and take over what can change while running."""

_DAEMON_EXIT = """\
0 after a stop with all that was copied durable, 1 when something of it was not, 2 for a wrong flag
or value, 10 when the storage directory cannot hold volumes, 11 when another pccheckd serves it."""


def pages() -> dict[str, str]:
    """File names and what belongs in them."""
    control, daemon = cli.parser(), config.parser()
    codes = cli.EXIT_CODES.partition("\n")[2].rstrip()
    table = "\n".join(_table())
    described = frozenset(option.flag for option in OPTIONS)
    return {
        "pccheckctl.1": _page(
            control, 1, "queries a checkpoint daemon; inspects and manages its volumes",
            "[\\fIOPTION\\fR ...] \\fICOMMAND\\fR ...",
            (
                ("OPTIONS", _options(control)),
                ("COMMANDS", _commands(control)),
                ("EXIT STATUS", f".nf\n{_text(codes)}\n.fi"),
                ("ENVIRONMENT", _ENVIRONMENT),
                ("EXAMPLES", _EXAMPLES),
                ("SEE ALSO", ".BR pccheckd (8)"),
            ),
        ),
        "pccheckd.8": _page(
            daemon, 8, "per-node checkpoint service for PyTorch training",
            "\\fB\\-\\-storage\\fR \\fIDIR\\fR [\\fIOPTION\\fR ...]",
            (
                ("OPTIONS", f"{_options(daemon, described)}\n{table}"),
                ("SIGNALS", _SIGNALS),
                ("EXIT STATUS", _DAEMON_EXIT),
                ("SEE ALSO", ".BR pccheckctl (1)"),
            ),
        ),
    }  # fmt: skip


def _page(
    parser: argparse.ArgumentParser, section: int, about: str, usage: str,
    sections: tuple[tuple[str, str], ...],
) -> str:  # fmt: skip
    name = parser.prog
    head = f"""\
.\\" Made by docs/man/make.py from the arguments of {name}: do not edit.
.TH {name.upper()} {section} "" "pccheck {pccheckctl.VERSION}" "PCcheck"
.SH NAME
{name} \\- {_text(about)}
.SH SYNOPSIS
.B {name}
{usage}
.SH DESCRIPTION
{_text(parser.description or "")}
"""
    return head + "".join(f".SH {heading}\n{text}\n" for heading, text in sections)


def _commands(parser: argparse.ArgumentParser) -> str:
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    known = frozenset(flag for action in parser._actions for flag in action.option_strings)
    parts = ["The options above may also follow the command."]
    for name, sub in commands.choices.items():
        parts += [
            f".SS {_text(name)}",
            _text(_sentence(sub.description or "")),
            _options(sub, known),
        ]
    return "\n".join(part for part in parts if part)


def _options(parser: argparse.ArgumentParser, without: frozenset[str] = frozenset()) -> str:
    """A paragraph for each argument that is not described elsewhere."""
    lines = []
    for action in parser._actions:
        hidden = action.help == argparse.SUPPRESS or action.nargs == argparse.PARSER
        if hidden or without.intersection(action.option_strings):
            continue
        choices = "|".join(map(str, action.choices or ()))
        value = str(action.metavar or choices or action.dest.upper())
        flags = ", ".join(f"\\fB{_text(flag)}\\fR" for flag in action.option_strings)
        shown = f"\\fI{_text(value)}\\fR" if action.nargs != 0 else ""
        shown = f"[{shown}]" if action.nargs == "?" else shown
        text = (action.help or "").replace("%(prog)s", parser.prog).replace("%%", "%")
        lines += [".TP", f"{flags} {shown}".strip(), _text(_sentence(text))]
    return "\n".join(lines)


def _table() -> Iterator[str]:
    """The options of the daemon, in a section for each group."""
    for group, options in groups():
        yield f".SS {group}"
        for option in options:
            metavar = option.metavar or "|".join(option.choices)
            yield ".TP"
            yield f".BR {_text(option.flag)}" + (f' " \\fI{metavar}\\fR"' if metavar else "")
            default = "Required" if option.required else f"Default: {option.shown_default}"
            yield _text(
                f"{sentence(option.help)} Takes: {takes(option)}. {default}. Changes: "
                f"{changes(option)}. Variable: {option.variable}."
            )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _text(text: str) -> str:
    """Plain text as roff: no line of it is a request, and a hyphen is the one that is typed."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text)
