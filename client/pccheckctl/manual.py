"""Man pages, made from an argument tree: what --help says, in roff. `docs/man/make.py` writes them
and a test holds the written ones against the code."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple


class Page(NamedTuple):
    name: str
    section: int
    about: str  # in one line
    version: str
    sections: tuple[tuple[str, str], ...] = ()  # heading and roff, behind the options


def page(
    parser: argparse.ArgumentParser,
    about: Page,
    *,
    told: str = "",
    elsewhere: frozenset[str] = frozenset(),
) -> str:
    """The whole page of one program. The flags in `elsewhere` are told by `told`, roff for the end
    of the options."""
    lines = [
        f'.\\" Made by docs/man/make.py from the arguments of {about.name}: do not edit.',
        f'.TH {about.name.upper()} {about.section} "" "pccheck {about.version}" "PCcheck"',
        ".SH NAME",
        f"{about.name} \\- {_text(about.about)}",
        ".SH SYNOPSIS",
        *_synopsis(parser, about.name, elsewhere),
        *(["[\\fIOPTION\\fR ...]"] if elsewhere else []),
        ".SH DESCRIPTION",
        _text(parser.description or ""),
        ".SH OPTIONS",
        *_options(parser, elsewhere),
        told.rstrip(),
    ]
    commands = _commands(parser)
    if commands:
        lines += [".SH COMMANDS", "The options above may also stand behind the command."]
        known = _flags(parser)
        for name, text, sub in commands:
            lines += [f".SS {_bold(name)}", *_synopsis(sub, f"{about.name} {name}", known), ".PP",
                      _sentence(text), *_options(sub, known)]  # fmt: skip
    for heading, text in about.sections:
        lines += [f".SH {heading}", text]
    return "\n".join(line for line in lines if line) + "\n"


def exit_codes(text: str) -> str:
    """The table of --help as it stands there."""
    return f".nf\n{_text(text.split(':', 1)[1].strip(chr(10)))}\n.fi"


def _commands(
    parser: argparse.ArgumentParser,
) -> list[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            return [(name, helps.get(name, ""), sub) for name, sub in action.choices.items()]
    return []


def _synopsis(
    parser: argparse.ArgumentParser, name: str, without: frozenset[str] = frozenset()
) -> list[str]:
    """argparse's own usage is worded anew by every version of Python."""
    grouped = {
        id(action): group for group in parser._mutually_exclusive_groups
        for action in group._group_actions
    }  # fmt: skip
    words, said = [], set()
    for action in _shown(parser, without):
        group = grouped.get(id(action))
        if group is None:
            words.append(_usage(action, required=action.required))
        elif id(group) not in said:
            said.add(id(group))
            either = " | ".join(_bare(one) for one in group._group_actions)
            words.append(f"({either})" if group.required else f"[{either}]")
    if _commands(parser):
        words.append("\\fICOMMAND\\fR ...")
    return [".PP", f".B {_text(name)}", *words]


def _usage(action: argparse.Action, *, required: bool) -> str:
    return _bare(action) if required else f"[{_bare(action)}]"


def _bare(action: argparse.Action) -> str:
    """With the last of its flags, which is the long one or the only one."""
    if not action.option_strings:
        return _name(action) + (" ..." if action.nargs == "*" else "")
    long = next((f for f in action.option_strings if f.startswith("--")), action.option_strings[0])
    return " ".join([_bold(long), *_value(action)])


def _shown(parser: argparse.ArgumentParser, without: frozenset[str]) -> list[argparse.Action]:
    return [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction)
        and not without.intersection(action.option_strings)
    ]


def _flags(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(flag for action in parser._actions for flag in action.option_strings)


def _options(parser: argparse.ArgumentParser, without: frozenset[str] = frozenset()) -> list[str]:
    """One paragraph each; those that the program has for all its commands are said once."""
    lines = []
    for action in _shown(parser, without):
        lines += [".TP", _name(action)]
        text = (action.help or "").replace("%(prog)s", parser.prog).replace("%%", "%")
        lines.append(_sentence(text) if text else "\\&")
    return lines


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        words = list(map(str, action.choices or ()))
        shown = "|".join(words) if words else str(action.metavar or action.dest).upper()
        return f"\\fI{_text(shown)}\\fR"
    flags = ", ".join(_bold(flag) for flag in action.option_strings)
    return " ".join([flags, *_value(action)])


def _value(action: argparse.Action) -> list[str]:
    """What stands behind a flag."""
    if action.nargs == 0:
        return []
    few = list(map(str, action.choices)) if action.choices else []
    value = action.metavar or ("|".join(few) if 0 < len(few) <= 16 else action.dest.upper())
    shown = f"\\fI{_text(str(value))}\\fR"
    return [f"[{shown}]" if action.nargs == "?" else shown]


def _bold(text: str) -> str:
    return f"\\fB{_text(text)}\\fR"


def _sentence(text: str) -> str:
    said = text[:1].upper() + text[1:]
    return _text(said if said.endswith(".") else said + ".")


def _text(text: str) -> str:
    """Plain text as roff: nothing in it is a request, and hyphens are those that are typed."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)
