"""The options as text: the help, the documents and `config show`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pccheckd import VERSION

from .options import OPTIONS, Config, Option, Topic
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


def groups() -> Iterator[tuple[Topic, list[Option]]]:
    for group in Topic:
        shown = [option for option in OPTIONS if option.group is group and not option.hidden]
        if shown:
            yield group, shown


def takes(option: Option) -> str:
    """Kind and range: "size, 4KiB to 256MiB"."""
    if option.choices:
        return option.range
    unit = f" (a bare number: {option.kind.unit})" if option.kind.unit else ""
    return ", ".join(part for part in (f"{option.kind.name}{unit}", option.range) if part)


def changes(option: Option) -> str:
    if not option.live:
        return "needs a restart"
    return f"at SIGHUP, {option.when}" if option.when else "at SIGHUP"


def file_text() -> str:
    """A file to start from, with a description of every option: `--help-config` prints it."""
    return "\n".join(_file_lines()) + "\n"


def _file_lines() -> Iterator[str]:
    yield "# The configuration of pccheckd. A line '# KEY = VALUE' shows the default, or an example"
    yield "# where the default depends on the machine."
    yield "# KEY is also the flag --KEY and the variable PCCHECK_KEY, in capitals, with _ for -."
    yield "# Check a change before it takes effect:  pccheckd --config THIS-FILE --check-config"
    yield "# Apply the options that can change while running:  systemctl reload pccheckd"
    for group, options in groups():
        yield f"\n# -- {group.lower()} --"
        for option in options:
            yield ""
            yield from textwrap.wrap(
                f"{sentence(option.help)} Takes: {takes(option)}. Changes: {changes(option)}.",
                94, initial_indent="# ", subsequent_indent="# ",
            )  # fmt: skip
            yield _file_line(option)


def _file_line(option: Option) -> str:
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


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
