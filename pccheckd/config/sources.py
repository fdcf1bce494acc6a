"""Flags, environment and file become checked values: flag over PCCHECK_* over file over default.

The file is TOML without tables; its keys are the flags without their dashes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from pccheck_native import cgroups
from pccheck_wire import basics
from pccheck_wire.basics import DEFAULT_SOCKET, STORAGE_MISSING, VARIABLES, size_text
from pccheck_wire.errors import UsageError
from pccheck_wire.units import GIB, MIB
from pccheckd import VERSION

from .options import (
    BY_FIELD,
    BY_KEY,
    EXPIRE_S_MIN,
    FILE,
    IO_ALIGN,
    OPTIONS,
    PATH,
    SOCKET_DIRECTORY_BYTES_MAX,
    YES_NO,
    Config,
    Option,
    OptionOrigin,
    Topic,
    show_size,
)

DEFAULT_FILE = Path("/etc/pccheck/pccheckd.toml")
FILE_VARIABLE = "PCCHECK_CONFIG"
_PREFIX = "PCCHECK_"
_SEE = "for a description of every key: pccheckd --help-config"


class _Parser(argparse.ArgumentParser):
    """Prints what is wrong, and what was probably meant, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        words = [word for word in message.split() if word.startswith("-")]
        meant = basics.did_you_mean(words, list(self._option_string_actions))
        hint = f"{meant if 'unrecognized' in message else ''}see: {self.prog} --help"
        self.exit(UsageError.exit_code, f"{self.prog}: {message} ({hint})\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="pccheckd",
        description="Per-node checkpoint service: keeps several checkpoints in flight, durable.",
        epilog="Every flag may also be an environment variable (--max-storage is "
        'PCCHECK_MAX_STORAGE) or a line of the file (max-storage = "2TiB"). A flag overrides a '
        "variable, and a variable overrides the file. Sizes are written like 8GiB, times like 90s "
        "or 5min.",
        allow_abbrev=False,
    )
    for group in Topic:
        titled = made.add_argument_group(group.value)
        for option in OPTIONS:
            if option.group is group:
                _add(titled, option)
    others = made.add_argument_group("Configuration")
    others.add_argument(
        "--config", metavar="FILE",
        help=f"the file to read (default {DEFAULT_FILE}, if it exists); also {FILE_VARIABLE}",
    )  # fmt: skip
    others.add_argument(
        "--check-config", action="store_true",
        help="check the configuration and print its values; starts nothing; exit code 0 or 2",
    )  # fmt: skip
    others.add_argument("--json", action="store_true", help="--check-config as a JSON document")
    others.add_argument(
        "--help-config", action="store_true",
        help="print a file to start from: every option with its unit, range and default",
    )  # fmt: skip
    made.add_argument(
        "--version", action="version", version=f"pccheckd {VERSION}", help="print the version"
    )
    return made


def _add(to: argparse._ArgumentGroup, option: Option) -> None:
    text = f"{option.help} (default {option.shown_default})".replace("%", "%%")
    if option.hidden:
        text = argparse.SUPPRESS
    elif option.required:
        text = f"{option.help} (required)"
    if option.kind is YES_NO:  # the flag alone means yes
        to.add_argument(
            option.flag, dest=option.field, nargs="?", const="yes", metavar="yes|no", help=text
        )
    else:
        metavar = option.metavar or "|".join(option.choices) or None
        to.add_argument(option.flag, dest=option.field, metavar=metavar, help=text)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where values come from; `load` may be called again, for what the file has by now."""

    flags: Mapping[str, str | None]
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    default_file: Path = DEFAULT_FILE

    def load(self) -> Config:
        """The checked configuration. Raises UsageError that names the option and the fix."""
        named = self.flags.get("config") or self.environ.get(FILE_VARIABLE)
        file = Path(named).absolute() if named else self.default_file
        lines = _lines(file) if named or _exists(file) else None
        given: dict[str, object] = {}
        origins: dict[str, OptionOrigin] = {}
        for option in OPTIONS:
            places = (
                (self.flags.get(option.field), OptionOrigin("flag", option.flag)),
                (self.environ.get(option.variable), OptionOrigin("environment", option.variable)),
                ((lines or {}).get(option.key), OptionOrigin("file", str(file))),
            )
            text, origin = next(
                (found for found in places if found[0] is not None), (None, OptionOrigin("default"))
            )
            origins[option.field] = origin
            if text is not None:
                given[option.field] = _parse(option, text, origin)
        if "storage" not in given:
            raise UsageError(
                STORAGE_MISSING,
                hint=f"name a directory on a local disk, by flag, PCCHECK_STORAGE or in {file}",
            )
        if "socket" not in given:
            given["socket"] = default_socket(self.environ)
        read = file if lines is not None else None
        config = Config(**given, origins=origins, file=read)  # type: ignore[arg-type]
        if "dram_bytes" not in given:
            share = cgroups.memory_bytes()[0] // 4 // MIB * MIB
            config.dram_bytes = max(share, 2 * config.chunk_bytes)
        _check(config)
        return config


# -- the file ----------------------------------------------------------------------------------


def _exists(path: Path) -> bool:
    """True also for a file that may not be read: that is an error, not a missing file."""
    try:
        return path.exists()
    except OSError:  # its directory may not be searched
        return False


def _lines(path: Path) -> Mapping[str, str]:
    """The text of each value, by key, as it would be written on the command line. Raises UsageError
    for a file that cannot be read, is not TOML or has an unknown key."""
    import tomllib  # only where there is a file: the import takes time

    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            hint=(
                "name an existing file"
                if isinstance(error, FileNotFoundError)
                else f"make it readable for uid {os.geteuid()}"
            )
            + ", or start without it: --config /dev/null",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text", hint=_SEE) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # the latter: nested too deep
        raise UsageError(
            f"{path} is not TOML: {error}", hint='lines look like: storage = "/mnt/ssd"'
        ) from error
    unknown = [key for key in data if key not in BY_KEY]
    if unknown:
        raise _unknown(path, unknown, data)
    return {key: _text(path, key, value) for key, value in data.items()}


def _text(path: Path, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (str, int, float)):
        raise UsageError(f'{path}: {key} takes one value, like {key} = "..."', hint=_SEE)
    kind = BY_KEY[key].kind
    is_path = kind is PATH or (kind is FILE and value != "")
    if is_path and not Path(str(value)).is_absolute():
        raise UsageError(
            f"{path}: {key}: {str(value)!r} does not begin with /", hint="write the whole path"
        )
    return str(value)


def _unknown(path: Path, keys: list[str], data: Mapping[str, object]) -> UsageError:
    """One error for all of them, with what was probably meant."""
    shown = [option.key for option in OPTIONS if not option.hidden]
    tables = [key for key in keys if isinstance(data[key], dict)]
    found = []
    for key in keys:
        near = "" if key in tables else basics.nearest(key.lower().replace("_", "-"), shown)
        what = f"unknown table [{key}]" if key in tables else f"unknown key {key!r}"
        found.append(what + (f", did you mean {near!r}?" if near else ""))
    hint = "the file has no tables: every key is at the top level" if tables == keys else _SEE
    return UsageError(f"{path}: {'; '.join(found)}", hint=hint)


def unknown_variables(environ: Iterable[str]) -> list[str]:
    """Variables that begin like ours and that nothing reads: a sentence for each, with what was
    probably meant. Without their values, which may be secret."""
    known = {*VARIABLES, *(option.variable for option in OPTIONS)}
    shown = [*VARIABLES, *(option.variable for option in OPTIONS if not option.hidden)]
    rests = [variable.removeprefix(_PREFIX) for variable in shown]
    found = []
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            near = basics.nearest(name.removeprefix(_PREFIX), rests)
            meant = f": did you mean {_PREFIX}{near}?" if near else ""
            found.append(f"{name} is set, and nothing reads it{meant}")
    return found


# -- checks ------------------------------------------------------------------------------------


def _parse(option: Option, text: str, origin: OptionOrigin) -> object:
    where = _where(option, origin)
    try:
        value = option.kind.parse(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from None
    if option.choices and text not in option.choices:
        raise UsageError(f"{where}: {text!r} is not one of {', '.join(option.choices)}")
    return value


def _where(option: Option, origin: OptionOrigin | None) -> str:
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
            "no directory for the attach socket: pccheckd does not run as root, and "
            "XDG_RUNTIME_DIR is not set",
            hint="name a socket with --socket PATH",
        )
    return Path(runtime) / "pccheck" / "attach.sock"


def _check(config: Config) -> None:
    """Raises UsageError for a value out of its range, or that does not go with another one."""

    def require(holds: bool, name: str, rule: str, got: str, hint: str = "") -> None:
        if not holds:
            where = _where(BY_FIELD[name], config.origins.get(name))
            raise UsageError(f"{where} must be {rule} (got {got})", hint=hint)

    for option in OPTIONS:
        value, low, high = getattr(config, option.field), option.low, option.high
        got = f"{value} bytes" if option.kind.unit == "bytes" else option.kind.show(value)
        fits = (low is None or value >= low) and (high is None or value <= high)
        require(fits, option.field, option.range, got)
    slots, keep, block, chunk = config.slots, config.keep, config.block_bytes, config.chunk_bytes
    require(
        not 0 < config.expire_finished_s < EXPIRE_S_MIN, "expire_finished_s",
        "at least 1h, or 0 for never", BY_FIELD["expire_finished_s"].show(config.expire_finished_s),
    )  # fmt: skip
    require(
        keep < slots, "keep", "less than --slots", f"{keep} and {slots}",
        "slots = N in flight + keep",
    )  # fmt: skip
    require(not block & (block - 1), "block_bytes", "a power of two", f"{block} bytes")
    unit = max(block, IO_ALIGN)
    require(not chunk % unit, "chunk_bytes", f"a multiple of {show_size(unit)}", f"{chunk} bytes")
    ram_bytes, (room, bound) = cgroups.ram_bytes(), cgroups.memory_bytes()
    require(
        2 * chunk <= config.dram_bytes <= ram_bytes, "dram_bytes",
        f"at least two chunks ({size_text(2 * chunk)}) and at most the RAM of this host "
        f"({size_text(ram_bytes)})",
        size_text(config.dram_bytes),
        f"{bound} allows {size_text(room)}" if room < ram_bytes else "",
    )  # fmt: skip
    require(
        not 0 < config.max_dram_per_user_bytes < 2 * chunk, "max_dram_per_user_bytes",
        f"at least two chunks ({size_text(2 * chunk)}), or 0 for no limit",
        size_text(config.max_dram_per_user_bytes),
    )  # fmt: skip
    require(
        bool(config.coordinator or not config.coordinator_credentials), "coordinator_credentials",
        "given with --coordinator", "no --coordinator",
    )  # fmt: skip
    for name, place in (("storage", config.storage), ("socket", config.socket)):
        written = str(place).encode(errors="replace").decode()  # messages hold Unicode only
        require(
            written == str(place), name, "a path in UTF-8", str(place),
            "rename the directory, or choose another one",
        )  # fmt: skip
    require(
        len(os.fsencode(config.socket.parent)) <= SOCKET_DIRECTORY_BYTES_MAX, "socket",
        f"in a directory whose path has at most {SOCKET_DIRECTORY_BYTES_MAX} bytes",
        str(config.socket),
    )  # fmt: skip


def warnings(chosen: Config) -> list[str]:
    """Values that are allowed, and risky."""
    room, bound = cgroups.memory_bytes()
    if chosen.dram_bytes <= room:
        return []
    return [
        f"--dram {size_text(chosen.dram_bytes)} is more than {bound} allows ({size_text(room)}): "
        "when the pool grows beyond that, the kernel slows down or kills processes of this cgroup, "
        "trainers among them. Lower --dram, or raise that limit"
    ]


def describe(chosen: Config) -> str:
    """The log line with what this daemon serves."""
    return (
        f"socket {chosen.socket}, storage {chosen.storage}, slots {chosen.slots} "
        f"(keep {chosen.keep}, {chosen.in_flight} in flight), "
        f"DRAM {chosen.dram_bytes / GIB:.2f} GiB"
    )
