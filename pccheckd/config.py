"""What the daemon is told: one table of options; flag over PCCHECK_* over default."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pccheck_wire.errors import UsageError
from pccheck_wire.messages import DEFAULT_SOCKET

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SLOTS_MAX = 32
IO_ALIGN = 4096
#: AF_UNIX paths end at 107 bytes; "/ctl-<32 hex>/<uid>.sock" goes behind the socket's directory.
SOCKET_DIRECTORY_BYTES_MAX = 107 - len("/ctl-") - 32 - len("/4294967295.sock")

_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_TRUE = {"1": True, "yes": True, "true": True, "on": True}
_FALSE = {"0": False, "no": False, "false": False, "off": False, "": False}


@dataclass(frozen=True, slots=True)
class Config:
    """Checked values; see OPTIONS for what each means."""

    storage: Path
    socket: Path
    slots: int = 4
    keep: int = 2
    dram_bytes: int = 1 * GIB
    chunk_bytes: int = 16 * MIB
    writers: int = 2
    engine: str = "auto"
    max_storage_bytes: int = 0
    group: str = ""
    log_format: str = "auto"
    allow_any_filesystem: bool = False
    max_bandwidth_bytes: int = 0
    block_bytes: int = 1 * MIB
    drain_limit_s: float = 60.0

    @property
    def in_flight(self) -> int:
        """N: slots - keep."""
        return self.slots - self.keep


def parse_size(text: str) -> int:
    """Bytes from "8GiB", "512M", "4096": KiB, MiB, GiB, TiB with or without "iB" are powers of
    1024; "KB", "MB", "GB", "TB" are too ambiguous and refused. Raises UsageError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:ib)?\s*", text, re.IGNORECASE)
    if found is None:
        raise UsageError(f"{text!r} is not a size", hint="write it like 8GiB, 512MiB or 4096")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number of seconds") from None
    if not 0 <= value < 1e9:
        raise UsageError(f"{text!r} is not a number of seconds")
    return value


def _yes(text: str) -> bool:
    try:
        return (_TRUE | _FALSE)[text.lower()]
    except KeyError:
        raise UsageError(f"{text!r} is neither yes nor no") from None


def _path(text: str) -> Path:
    return Path(text).absolute()


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    field: str
    parse: Callable[[str], object]
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    hidden: bool = False

    @property
    def variable(self) -> str:
        return "PCCHECK_" + self.flag.removeprefix("--").upper().replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option("--storage", "storage", _path, "directory on a local disk for the volumes", "DIR"),
    Option("--slots", "slots", _integer, "slots of a volume: N in flight + keep (default 4)", "N"),
    Option("--keep", "keep", _integer, "durable checkpoints never overwritten (default 2)", "N"),
    Option("--dram", "dram_bytes", parse_size, "DRAM for chunks (default a quarter)", "SIZE"),
    Option("--chunk", "chunk_bytes", parse_size, "bytes of a chunk (default 16MiB)", "SIZE"),
    Option("--writers", "writers", _integer, "writer threads a checkpoint (default 2)", "P"),
    Option("--engine", "engine", str, "how chunks are written", choices=("auto", "pwrite")),
    Option("--max-storage", "max_storage_bytes", parse_size, "limit of all volumes", "SIZE"),
    Option("--max-bandwidth", "max_bandwidth_bytes", parse_size, "bytes/s of a volume", "SIZE"),
    Option("--socket", "socket", _path, f"attach socket (default {DEFAULT_SOCKET})", "PATH"),
    Option("--group", "group", str, "group whose members may connect", "NAME"),
    Option("--log-format", "log_format", str, "", choices=("auto", "plain", "journal", "json")),
    Option("--drain-limit", "drain_limit_s", _seconds, "seconds to drain at SIGTERM (60)", "S"),
    Option(
        "--allow-any-filesystem",
        "allow_any_filesystem",
        _yes,
        "accept file systems that promise less than a local disk (for tests)",
    ),
    Option("--block-bytes", "block_bytes", parse_size, "", hidden=True),
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pccheckd",
        description="Per-node checkpoint service: keeps several checkpoints in flight, durable.",
        epilog="Every flag may be given as an environment variable: --max-storage is "
        "PCCHECK_MAX_STORAGE. Sizes are written like 8GiB.",
        allow_abbrev=False,
    )
    for option in OPTIONS:
        text = argparse.SUPPRESS if option.hidden else option.help
        if option.parse is _yes:
            made.add_argument(
                option.flag, dest=option.field, action="store_const", const="yes", help=text
            )
        else:
            metavar = option.metavar or "|".join(option.choices) or None
            made.add_argument(option.flag, dest=option.field, metavar=metavar, help=text)
    made.add_argument("--check-config", action="store_true", help="check everything, start nothing")
    made.add_argument("--version", action="store_true", help="print the version")
    return made


def load(flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> Config:
    """The checked configuration. Raises UsageError that names the option and the fix."""
    given: dict[str, object] = {}
    for option in OPTIONS:
        text, origin = flags.get(option.field), option.flag
        if text is None:
            text, origin = environ.get(option.variable), option.variable
        if text is None:
            continue
        try:
            given[option.field] = option.parse(text)
        except UsageError as error:
            raise UsageError(f"{origin}: {error.message}", hint=error.hint) from None
        if option.choices and text not in option.choices:
            raise UsageError(f"{origin}: {text!r} is not one of {', '.join(option.choices)}")
    if "storage" not in given:
        raise UsageError("--storage is missing", hint="name a directory on a local disk")
    if "socket" not in given:
        given["socket"] = default_socket(environ)
    given.setdefault("dram_bytes", ram_bytes() // 4)
    config = Config(**given)  # type: ignore[arg-type]
    _check(config)
    return config


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
    rules: Sequence[tuple[bool, str, str]] = (
        (2 <= config.slots <= SLOTS_MAX, f"--slots: {config.slots}", f"use 2 to {SLOTS_MAX}"),
        (
            1 <= config.keep < config.slots,
            f"--keep: {config.keep} with --slots {config.slots}",
            "use 1 to slots - 1: slots = N in flight + keep",
        ),
        (1 <= config.writers <= 64, f"--writers: {config.writers}", "use 1 to 64"),
        (
            512 <= config.block_bytes <= GIB and config.block_bytes & (config.block_bytes - 1) == 0,
            f"--block-bytes: {config.block_bytes}",
            "use a power of two from 512 up",
        ),
        (
            IO_ALIGN <= config.chunk_bytes <= 256 * MIB and config.chunk_bytes % IO_ALIGN == 0,
            f"--chunk: {config.chunk_bytes} bytes",
            "use a multiple of 4KiB up to 256MiB",
        ),
        (
            config.chunk_bytes % config.block_bytes == 0,
            f"--chunk: {config.chunk_bytes} bytes with blocks of {config.block_bytes}",
            "use a multiple of the block, 1MiB by default",
        ),
        (
            2 * config.chunk_bytes <= config.dram_bytes <= ram_bytes(),
            f"--dram: {config.dram_bytes} bytes",
            f"use at least two chunks ({2 * config.chunk_bytes}) and at most the RAM "
            f"({ram_bytes()})",
        ),
        (
            len(os.fsencode(config.socket.parent)) <= SOCKET_DIRECTORY_BYTES_MAX,
            f"--socket: the directory of {config.socket} has too long a name",
            f"use at most {SOCKET_DIRECTORY_BYTES_MAX} bytes",
        ),
    )
    for holds, what, fix in rules:
        if not holds:
            raise UsageError(f"{what} cannot be", hint=fix)


def describe(chosen: Config) -> str:
    """The line that says what this daemon serves."""
    return (
        f"socket {chosen.socket}, storage {chosen.storage}, slots {chosen.slots} "
        f"(keep {chosen.keep}, {chosen.in_flight} in flight), "
        f"DRAM {chosen.dram_bytes / GIB:.2f} GiB"
    )
