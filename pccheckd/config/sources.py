"""Flags, environment and file become checked values: flag over PCCHECK_* over file over default."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from pccheck_native import cgroups
from pccheck_wire.basics import STORAGE_MISSING, did_you_mean
from pccheck_wire.errors import UsageError
from pccheck_wire.messages import DEFAULT_SOCKET
from pccheck_wire.units import GIB, MIB

from . import file as config_file
from .options import (
    BY_FIELD,
    EXPIRE_S_MIN,
    IO_ALIGN,
    OPTIONS,
    SOCKET_DIRECTORY_BYTES_MAX,
    YES_NO,
    Group,
    Option,
    Origin,
    show_size,
)
from .options import Config as Config

DEFAULT_FILE = Path("/etc/pccheck/pccheckd.toml")
FILE_VARIABLE = "PCCHECK_CONFIG"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, and what was meant, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        words = [word for word in message.split() if word.startswith("-")]
        meant = did_you_mean(words, list(self._option_string_actions))
        hint = f"{meant if 'unrecognized' in message else ''}see: {self.prog} --help"
        self.exit(UsageError.exit_code, f"{self.prog}: {message} ({hint})\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="pccheckd",
        description="Per-node checkpoint service: keeps several checkpoints in flight, durable.",
        epilog="Every flag may also be an environment variable (--max-storage is "
        'PCCHECK_MAX_STORAGE) or a line of the file (max-storage = "2TiB"); a flag comes before a '
        "variable, a variable before the file. Sizes are written like 8GiB, times like 90s or "
        "5min.",
        allow_abbrev=False,
    )
    for group in Group:
        titled = made.add_argument_group(group.value)
        for option in OPTIONS:
            if option.group is group:
                _add(titled, option)
    others = made.add_argument_group("Configuration")
    others.add_argument(
        "--config", metavar="FILE",
        help=f"the file to read (default {DEFAULT_FILE}, if it is there); also {FILE_VARIABLE}",
    )  # fmt: skip
    others.add_argument(
        "--check-config", action="store_true",
        help="check it, print what would be used, open nothing; exit code 0 or 2",
    )  # fmt: skip
    others.add_argument("--json", action="store_true", help="--check-config as a JSON document")
    others.add_argument(
        "--help-config", nargs="?", const="text", metavar="text|toml|markdown|man",
        choices=("text", "toml", "markdown", "man"),
        help="describe every option: unit, range, default; toml makes a file to start from",
    )  # fmt: skip
    made.add_argument("--version", action="store_true", help="print the version")
    return made


def _add(to: argparse._ArgumentGroup, option: Option) -> None:
    text = f"{option.help} (default {option.shown_default})".replace("%", "%%")
    if option.hidden:
        text = argparse.SUPPRESS
    elif option.required:
        text = f"{option.help} (required)"
    if option.kind is YES_NO:  # the flag alone says yes
        to.add_argument(
            option.flag, dest=option.field, nargs="?", const="yes", metavar="yes|no", help=text
        )
    else:
        metavar = option.metavar or "|".join(option.choices) or None
        to.add_argument(option.flag, dest=option.field, metavar=metavar, help=text)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where values are looked for; `load` may be called again, for what the file says by now."""

    flags: Mapping[str, str | None]
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    default_file: Path = DEFAULT_FILE

    def load(self) -> Config:
        """The checked configuration. Raises UsageError that names the option and the fix."""
        file, lines = self._file()
        given: dict[str, object] = {}
        origins: dict[str, Origin] = {}
        for option in OPTIONS:
            found = self._find(option, file, lines)
            if found is None:
                origins[option.field] = Origin("default")
                continue
            text, origins[option.field] = found
            given[option.field] = _parse(option, text, origins[option.field])
        if "storage" not in given:
            raise UsageError(
                STORAGE_MISSING,
                hint=f"name a directory on a local disk, by flag, PCCHECK_STORAGE or in "
                f"{file or self.default_file}",
            )
        if "socket" not in given:
            given["socket"] = default_socket(self.environ)
        config = Config(**given, origins=origins, file=file)  # type: ignore[arg-type]
        if "dram_bytes" not in given:
            share = cgroups.memory_bytes()[0] // 4 // MIB * MIB
            config.dram_bytes = max(share, 2 * config.chunk_bytes)
        _check(config)
        return config

    def _file(self) -> tuple[Path | None, Mapping[str, str]]:
        named = self.flags.get("config") or self.environ.get(FILE_VARIABLE)
        if named:
            path = Path(named).absolute()
            return path, config_file.read(path)
        if config_file.exists(self.default_file):
            return self.default_file, config_file.read(self.default_file)
        return None, {}

    def _find(
        self, option: Option, file: Path | None, lines: Mapping[str, str]
    ) -> tuple[str, Origin] | None:
        text = self.flags.get(option.field)
        if text is not None:
            return text, Origin("flag", option.flag)
        text = self.environ.get(option.variable)
        if text is not None:
            return text, Origin("environment", option.variable)
        text = lines.get(option.key)
        return None if text is None else (text, Origin("file", str(file)))


def load(flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration of a start with these flags in this environment."""
    return Sources(flags, environ).load()


def _parse(option: Option, text: str, origin: Origin) -> object:
    where = _where(option, origin)
    try:
        value = option.kind.parse(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from None
    if option.choices and text not in option.choices:
        raise UsageError(
            f"{where}: {text!r} is not one of {', '.join(option.choices)}",
            hint=option.removed.get(text, ""),
        )
    return value


def _where(option: Option, origin: Origin | None) -> str:
    """How an error names the option: as it was given."""
    if origin is None or origin.kind == "default":
        return option.flag
    return f"{origin.name}: {option.key}" if origin.kind == "file" else origin.name


def default_socket(environ: Mapping[str, str]) -> Path:
    """/run/pccheck for root, else the user's runtime directory. Raises UsageError without one."""
    if os.geteuid() == 0 or os.access(Path(DEFAULT_SOCKET).parent, os.W_OK):
        return Path(DEFAULT_SOCKET)
    runtime = environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        raise UsageError(
            "no place for the attach socket: not root, and XDG_RUNTIME_DIR is not set",
            hint="give one with --socket PATH",
        )
    return Path(runtime) / "pccheck" / "attach.sock"


def ram_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check(config: Config) -> None:
    """Raises UsageError for a value out of its range, or that does not go with another one."""
    for option in OPTIONS:
        value = getattr(config, option.field)
        low, high = option.low, option.high
        if (low is not None and value < low) or (high is not None and value > high):
            told = option.kind.show(value) if option.kind.unit != "bytes" else f"{value} bytes"
            _refuse(config, option.field, told, f"use {option.range}")
    if 0 < config.expire_finished_s < EXPIRE_S_MIN:
        told = BY_FIELD["expire_finished_s"].show(config.expire_finished_s)
        _refuse(config, "expire_finished_s", told, "use at least 1h, or 0 for never")
    if config.keep >= config.slots:
        raise UsageError(
            f"{_where(BY_FIELD['keep'], config.origins.get('keep'))} must be less than --slots "
            f"(got {config.keep} and {config.slots})",
            hint="slots = N in flight + keep",
        )
    if config.block_bytes & (config.block_bytes - 1):
        _refuse(config, "block_bytes", f"{config.block_bytes} bytes", "use a power of two")
    if config.chunk_bytes % max(config.block_bytes, IO_ALIGN):
        _refuse(
            config, "chunk_bytes", f"{config.chunk_bytes} bytes",
            f"use a multiple of {show_size(max(config.block_bytes, IO_ALIGN))}",
        )  # fmt: skip
    if not 2 * config.chunk_bytes <= config.dram_bytes <= ram_bytes():
        _refuse(
            config, "dram_bytes", f"{config.dram_bytes} bytes",
            f"use at least two chunks ({2 * config.chunk_bytes}) and at most the RAM "
            f"({ram_bytes()})",
        )  # fmt: skip
    if len(os.fsencode(config.socket.parent)) > SOCKET_DIRECTORY_BYTES_MAX:
        _refuse(
            config, "socket", f"{config.socket}, whose directory has too long a name,",
            f"use at most {SOCKET_DIRECTORY_BYTES_MAX} bytes",
        )  # fmt: skip


def _refuse(config: Config, name: str, what: str, fix: str) -> None:
    where = _where(BY_FIELD[name], config.origins.get(name))
    raise UsageError(f"{where}: {what} cannot be", hint=fix)


def warnings(chosen: Config) -> list[str]:
    """What is allowed, and had better be otherwise."""
    room, bound = cgroups.memory_bytes()
    if chosen.dram_bytes <= room:
        return []
    return [
        f"--dram {show_size(chosen.dram_bytes)} is more than {bound} allows ({show_size(room)}): "
        "before the pool is that large, the kernel slows processes of this cgroup down or kills "
        "them, trainers among them. Lower --dram, or raise that limit"
    ]


def describe(chosen: Config) -> str:
    """The line that says what this daemon serves."""
    return (
        f"socket {chosen.socket}, storage {chosen.storage}, slots {chosen.slots} "
        f"(keep {chosen.keep}, {chosen.in_flight} in flight), "
        f"DRAM {chosen.dram_bytes / GIB:.2f} GiB"
    )
