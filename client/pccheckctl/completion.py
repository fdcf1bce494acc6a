"""`pccheckctl completion`: what makes a shell complete our words, made from the argument tree.

source <(pccheckctl completion bash)      # in ~/.bashrc
pccheckctl completion fish | source       # in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from . import cli

_FILES, _DIRECTORIES = ("FILE", "PATH"), ("DIR",)


class Option(NamedTuple):
    flags: tuple[str, ...]
    help: str
    takes: str  # "": nothing, "file", "directory", "value", or "choice"
    choices: tuple[str, ...]


class Words(NamedTuple):
    """What may be said after one command ("": before any)."""

    name: str
    help: str
    options: list[Option]
    positionals: list[tuple[str, ...]]  # choices, () for free words


def run(arguments: argparse.Namespace) -> int:
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    made = {"bash": bash, "zsh": zsh, "fish": fish}[shell]
    return made(words(cli.parser()))


def words(parser: argparse.ArgumentParser) -> list[Words]:
    """The root's first, then each command's."""
    found = [_of("", parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {one.dest: one.help or "" for one in action._choices_actions}
            for name, sub in action.choices.items():
                found.append(_of(name, sub)._replace(help=helps.get(name, "")))
    return found


def _of(name: str, parser: argparse.ArgumentParser) -> Words:
    options, positionals = [], []
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ())) if action.nargs != argparse.PARSER else ()
        if action.help == argparse.SUPPRESS or action.nargs == argparse.PARSER:
            continue
        if not action.option_strings:
            positionals.append(choices)
            continue
        if action.nargs == 0:
            takes = ""
        elif len(choices) > 16 or not choices:  # a range of numbers is no help
            metavar = str(action.metavar or "")
            takes = ("file" if metavar in _FILES else "directory" if metavar in _DIRECTORIES
                     else "value")  # fmt: skip
            choices = ()
        else:
            takes = "choice"
        text = (action.help or "").replace("%(prog)s", "pccheckctl").replace("%%", "%")
        options.append(Option(tuple(action.option_strings), text, takes, choices))
    return Words(name, "", options, positionals)


# -- bash --------------------------------------------------------------------------------------


def bash(tree: list[Words]) -> str:
    root, *commands = tree
    names = " ".join(one.name for one in commands)
    with_value = "|".join(f for o in root.options if o.takes for f in o.flags)
    cases = "\n".join(_bash_case(one) for one in tree)
    return f"""\
# pccheckctl: completion for bash, made by `pccheckctl completion bash`
_pccheckctl_say() {{
    mapfile -t COMPREPLY < <(compgen "$@" -- "$current")
}}
_pccheckctl() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command="" at=1
    if [[ $current == "=" ]]; then current=""; fi
    if [[ $before == "=" ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    while ((at < COMP_CWORD)); do
        case ${{COMP_WORDS[at]}} in
            {with_value}) ((at++)) ;;
            -*) ;;
            *) command=${{COMP_WORDS[at]}}; break ;;
        esac
        ((at++))
    done
    case $command/$before in
{cases}
    esac
    if [[ -z $command && $current != -* ]]; then
        _pccheckctl_say -W "{names}"
    fi
}}
complete -F _pccheckctl pccheckctl
"""


def _bash_case(one: Words) -> str:
    lines = []
    for option in one.options:
        patterns = "|".join(f"{one.name}/{flag}" for flag in option.flags)
        reply = {
            "file": "compopt -o filenames; _pccheckctl_say -f",
            "directory": "compopt -o filenames; _pccheckctl_say -d",
            "choice": f'_pccheckctl_say -W "{" ".join(option.choices)}"',
            "value": "COMPREPLY=()",
        }.get(option.takes)
        if reply:
            lines.append(f"        {patterns}) {reply}; return ;;")
    said = [flag for option in one.options for flag in option.flags]
    said += [word for choices in one.positionals for word in choices]
    lines.append(f'        {one.name}/*) _pccheckctl_say -W "{" ".join(said)}" ;;')
    return "\n".join(lines)


# -- zsh ---------------------------------------------------------------------------------------


def zsh(tree: list[Words]) -> str:
    root, *commands = tree
    described = "\n".join(f"        {_quoted(f'{c.name}:{c.help}')}" for c in commands)
    cases = "\n".join(
        f"                {c.name}) _arguments -s {' '.join(_zsh_words(c))} ;;" for c in commands
    )
    return f"""\
#compdef pccheckctl
# pccheckctl: completion for zsh, made by `pccheckctl completion zsh`
_pccheckctl() {{
    local context state line
    local -a commands
    commands=(
{described}
    )
    _arguments -C -s {" ".join(_zsh_words(root))} '1: :->command' '*:: :->rest'
    case $state in
        command) _describe command commands ;;
        rest)
            case $words[1] in
{cases}
            esac ;;
    esac
}}
if [[ $funcstack[1] == _pccheckctl ]]; then
    _pccheckctl "$@"
else
    compdef _pccheckctl pccheckctl
fi
"""


def _zsh_words(one: Words) -> Iterator[str]:
    for option in one.options:
        text = option.help.replace("[", "(").replace("]", ")").replace(":", ";")
        value = {
            "": "", "file": ":file:_files", "directory": ":directory:_files -/",
            "value": ":value: ",
            "choice": f":value:({' '.join(option.choices)})",
        }[option.takes]  # fmt: skip
        for flag in option.flags:
            yield _quoted(f"{flag}[{text}]{value}")
    if one.name:
        for number, choices in enumerate(one.positionals, 1):
            yield _quoted(f"{number}: :({' '.join(choices)})" if choices else f"{number}: : ")


# -- fish --------------------------------------------------------------------------------------


def fish(tree: list[Words]) -> str:
    commands = tree[1:]
    names = " ".join(one.name for one in commands)
    lines = [
        "# pccheckctl: completion for fish, made by `pccheckctl completion fish`",
        "complete -c pccheckctl -f",
    ]
    none = f"not __fish_seen_subcommand_from {names}"
    lines += [
        f"complete -c pccheckctl -n {_quoted(none)} -a {one.name} -d {_quoted(one.help)}"
        for one in commands
    ]
    for one in tree:
        when = f"__fish_seen_subcommand_from {one.name}" if one.name else none
        for option in one.options:
            lines.append(f"complete -c pccheckctl -n {_quoted(when)} {_fish_option(option)}")
        for choices in one.positionals:
            if choices:
                said = _quoted(" ".join(choices))
                lines.append(f"complete -c pccheckctl -n {_quoted(when)} -a {said}")
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    parts = [f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in option.flags]
    parts += {
        "": [], "file": ["-r -F"], "directory": ["-x -a '(__fish_complete_directories)'"],
        "value": ["-x"], "choice": [f"-x -a {_quoted(' '.join(option.choices))}"],
    }[option.takes]  # fmt: skip
    return " ".join([*parts, f"-d {_quoted(option.help)}"] if option.help else parts)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
