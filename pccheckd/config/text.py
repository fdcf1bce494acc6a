"""The options as text: the help, the documents and `config show`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pccheckd import VERSION

from .options import OPTIONS, Config, Group, Option
from .sources import unknown_variables

SCHEMA = 1
Document = dict[str, object]


def document(config: Config, source: str) -> Document:
    """What `config show --json` prints; `source` is "daemon" or "files"."""
    return {
        "schema": SCHEMA,
        "source": source,
        "daemon": {"version": VERSION, "pid": os.getpid()} if source == "daemon" else None,
        "file": None if config.file is None else str(config.file),
        "options": [_row(config, option) for option in OPTIONS],
        "warnings": unknown_variables(os.environ),
    }


def _row(config: Config, option: Option) -> Document:
    origin = config.origins.get(option.field)
    value = getattr(config, option.field)
    pending = config.pending.get(option.field)
    return {
        "name": option.key,
        "value": str(value) if isinstance(value, Path) else value,
        "text": option.show(value),
        "unit": option.kind.unit,
        "origin": str(origin or "default"),
        "origin_kind": origin.kind if origin else "default",
        "live": option.live,
        "hidden": option.hidden,
        "after_restart": None if pending is None else option.show(pending),
    }


def effective(config: Config) -> str:
    """The values and their origins, one per line, as --check-config prints them."""
    shown = [
        (option.key, option.show(getattr(config, option.field)),
         str(config.origins.get(option.field, "default")))
        for option in OPTIONS
        if not option.hidden or config.origins[option.field].kind != "default"
    ]  # fmt: skip
    names, values = (max(len(row[at]) for row in shown) for at in (0, 1))
    return "\n".join(f"  {name:{names}}  {value:{values}}  {why}" for name, value, why in shown)


def help_text(kind: str) -> str:
    """Every option described, as "toml", "markdown" or "man" (the option section)."""
    makers = {"toml": _toml, "markdown": _markdown, "man": _man}
    return "\n".join(makers[kind]()) + "\n"


def _groups() -> Iterator[tuple[Group, list[Option]]]:
    for group in Group:
        shown = [option for option in OPTIONS if option.group is group and not option.hidden]
        if shown:
            yield group, shown


def takes(option: Option) -> str:
    """Kind and range: "size, 4KiB to 256MiB"."""
    if option.choices:
        return option.range
    unit = f" (a bare number: {option.kind.unit})" if option.kind.unit else ""
    return ", ".join(part for part in (f"{option.kind.name}{unit}", option.range) if part)


def _reload(option: Option) -> str:
    if not option.live:
        return "needs a restart"
    return f"at SIGHUP, {option.when}" if option.when else "at SIGHUP"


def _toml() -> Iterator[str]:
    yield "# The configuration of pccheckd. A line '# KEY = VALUE' shows the default, or an example"
    yield "# where the default depends on the machine."
    yield "# KEY is also the flag --KEY and the variable PCCHECK_KEY, in capitals, with _ for -."
    yield "# Check a change before it takes effect:  pccheckd --config THIS-FILE --check-config"
    yield "# Apply the options that can change while running:  systemctl reload pccheckd"
    for group, options in _groups():
        yield f"\n# -- {group.lower()} --"
        for option in options:
            yield ""
            yield from textwrap.wrap(
                f"{_sentence(option.help)} Takes: {takes(option)}. Changes: {_reload(option)}.",
                94, initial_indent="# ", subsequent_indent="# ",
            )  # fmt: skip
            yield _toml_line(option)


def _toml_line(option: Option) -> str:
    """The line of the option; commented out unless the option is required."""
    if option.required:
        return f'{option.key} = "{option.example}"'
    if option.default_text:
        return f'# {option.key} = "{option.example}"  # default: {option.default_text}'
    value, remark = option.default, ""
    shown = f'"{option.kind.show(value)}"'
    if isinstance(value, bool):
        shown = str(value).lower()
    elif isinstance(value, int) and not option.kind.unit:
        shown = str(value)
    if not value and option.zero:
        shown, remark = '""' if isinstance(value, str) else "0", f"  # {option.zero}"
    return f"# {option.key} = {shown}{remark}"


def _markdown() -> Iterator[str]:
    for group, options in _groups():
        yield f"### {group}\n"
        yield "| key | takes | default | changes | what it is |"
        yield "|---|---|---|---|---|"
        for option in options:
            default = "*required*" if option.required else option.shown_default
            cells = (f"`{option.key}`", takes(option), default, _reload(option),
                     _sentence(option.help))  # fmt: skip
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _man() -> Iterator[str]:
    for group, options in _groups():
        yield f".SS {group}"
        for option in options:
            metavar = option.metavar or "|".join(option.choices)
            name = option.flag.replace("-", "\\-")
            yield ".TP"
            yield f".BR {name}" + (f' " \\fI{metavar}\\fR"' if metavar else "")
            default = "Required" if option.required else f"Default: {option.shown_default}"
            yield _roff(
                f"{_sentence(option.help)} Takes: {takes(option)}. {default}. Changes: "
                f"{_reload(option)}. Variable: {option.variable}."
            )


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + escaped if escaped.startswith((".", "'")) else escaped


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
