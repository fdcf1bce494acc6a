"""The daemon's options: one dataclass, from whose fields come the flags and their help, the
environment variables, the keys of the file, the checks, `config show`, docs/configuration.md and
the man page.

To add an option: a field in `Config`, then `make reference` for the documents made from it."""

# ruff: noqa: RUF009 -- fields are made by `_option`
from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from pccheck_native import ENGINES
from pccheck_wire.basics import DEFAULT_SOCKET
from pccheck_wire.errors import UsageError
from pccheck_wire.units import GIB, KIB, MIB, TIB, parse_duration, parse_size

SLOTS_MAX = 32
IO_ALIGN = 4096
#: AF_UNIX paths end at 107 bytes; "/ctl-<32 hex>/<uid>.sock" goes behind the socket's directory.
SOCKET_DIRECTORY_BYTES_MAX = 107 - len("/ctl-") - 32 - len("/4294967295.sock")
#: A finished job stays at least this long: a number without its unit must not delete work.
EXPIRE_S_MIN = 3600.0

_YES = {"1": True, "yes": True, "true": True, "on": True,
        "0": False, "no": False, "false": False, "off": False, "": False}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OptionOrigin:
    """Where a value comes from: `kind` is "flag", "environment", "file" or "default"."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.kind


# -- kinds of values ---------------------------------------------------------------------------


def show_size(value: object) -> str:
    """The shortest text that parse_size() turns into the same number."""
    assert isinstance(value, int)
    for unit, letter in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value and value % unit == 0:
            return f"{value // unit}{letter}"
    return str(value)


def show_duration(value: object) -> str:
    assert isinstance(value, (int, float))
    for unit, letter in ((86400, "d"), (3600, "h"), (60, "min")):
        if value and value % unit == 0:
            return f"{int(value // unit)}{letter}"
    return f"{value:g}s"


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number") from None


def _yes(text: str) -> bool:
    try:
        return _YES[text.lower()]
    except KeyError:
        raise UsageError(f"{text!r} is neither yes nor no") from None


def _path(text: str) -> Path:
    if not text or "\0" in text:  # a variable of a script that is not set: not the directory here
        raise UsageError(f"{text!r} is not a path")
    return Path(text).absolute()


def _metrics(text: str) -> str:
    if text:
        from . import metrics_place

        metrics_place.parse(text)
    return text


def _coordinator(text: str) -> str:
    if text:
        from . import coordinator

        coordinator.parse(text)
    return text


def _listen(text: str) -> str:
    if text:
        from . import listen

        listen.parse(text)
    return text


def _file(text: str) -> str:
    return str(_path(text)) if text else ""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is written: `unit` is what a bare number counts."""

    name: str
    unit: str
    parse: Callable[[str], object]
    show: Callable[[object], str] = str


SIZE = Kind("size", "bytes", parse_size, show_size)
DURATION = Kind("duration", "seconds", parse_duration, show_duration)
COUNT = Kind("number", "", _integer)
PATH = Kind("path", "", _path)
TEXT = Kind("text", "", str)
METRICS = Kind("[ADDRESS:]PORT or a path ending in .prom", "", _metrics)
COORDINATOR = Kind("etcd://HOST:PORT[,HOST:PORT...], or etcds:// for TLS", "", _coordinator)
LISTEN = Kind("ADDRESS[:PORT] or an interface; several with commas", "", _listen)
FILE = Kind("path", "", _file)
YES_NO = Kind("yes or no", "", _yes, lambda value: "yes" if value else "no")


class Topic(enum.StrEnum):
    """Headings of the help and of the documents."""

    PLACES = "Places"
    ROOM = "Slots, memory and speed"
    ACCESS = "Who may connect"
    NODES = "Jobs on several nodes"
    RUNNING = "Running"
    SEEING = "Metrics, log and checks"


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    kind: Kind
    group: Topic
    help: str  # one sentence, no full stop
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    rule: str = ""  # what else must hold, in words
    zero: str = ""  # what 0 or nothing means
    default_text: str = ""  # when the default is not a constant
    required: bool = False
    live: bool = False  # takes effect at SIGHUP
    when: str = ""  # of a live one: for what it takes effect
    example: str = ""  # for the file that is shipped, where no constant is the default
    hidden: bool = False
    field: str = ""  # its name in `Config`
    default: object = None  # None when there is none, or none that is constant

    @property
    def key(self) -> str:
        """Its name in the file."""
        return self.flag.removeprefix("--")

    @property
    def variable(self) -> str:
        return "PCCHECK_" + self.key.upper().replace("-", "_")

    def show(self, value: object) -> str:
        """As one would write it."""
        return self.zero if not value and self.zero else self.kind.show(value)

    @property
    def shown_default(self) -> str:
        return self.default_text or ("none" if self.required else self.show(self.default))

    @property
    def range(self) -> str:
        """What may be given, in words."""
        if self.choices:
            return ", ".join(self.choices)
        low, high = (None if x is None else self.kind.show(x) for x in (self.low, self.high))
        bounds = f"{low} to {high}" if low and high else f"at least {low}" if low else ""
        return ", ".join(part for part in (bounds, self.rule) if part)


_T = TypeVar("_T")
_NONE = cast(Path, dataclasses.MISSING)  # the default of an option that must be given


def _option(
    default: _T, flag: str, kind: Kind, group: Topic, text: str, metavar: str = "", **more: object
) -> _T:
    made = Option(flag, kind, group, text, metavar, **more)  # type: ignore[arg-type]
    return field(default=default, metadata={"option": made})


@dataclass(slots=True)
class Config:
    """Checked values. Shared by all parts of the daemon; only `reload` changes it, on the loop, and
    only options that are `live`."""

    # fmt: off
    storage: Path = _option(
        _NONE, "--storage", PATH, Topic.PLACES,
        "directory for the volumes, on a local disk with ext4 or xfs", "DIR",
        required=True, example="/var/lib/pccheck",
    )
    socket: Path = _option(
        _NONE, "--socket", PATH, Topic.ACCESS,
        "where trainers and pccheckctl connect", "PATH",
        rule=f"a directory of at most {SOCKET_DIRECTORY_BYTES_MAX} bytes",
        default_text=f"{DEFAULT_SOCKET}; for an ordinary user "
        "$XDG_RUNTIME_DIR/pccheck/attach.sock", example=DEFAULT_SOCKET,
    )
    max_storage_bytes: int = _option(
        0, "--max-storage", SIZE, Topic.PLACES,
        "limit for all volumes together; a job that needs more is refused", "SIZE",
        zero="no limit", live=True, when="for new volumes",
    )
    max_storage_per_user_bytes: int = _option(
        0, "--max-storage-per-user", SIZE, Topic.PLACES,
        "limit for the volumes of one user; a job that needs more is refused", "SIZE",
        zero="no limit", live=True, when="for new volumes",
    )
    expire_finished_s: float = _option(
        0.0, "--expire-finished", DURATION, Topic.PLACES,
        "delete the volumes of a finished job (one that called close(done=True)) after it was not "
        "used for this long while pccheckd ran", "AGE", rule="at least 1h", zero="never", live=True,
    )
    allow_any_filesystem: bool = _option(
        False, "--allow-any-filesystem", YES_NO, Topic.PLACES,
        "accept file systems that promise less than a local disk, such as tmpfs (for tests)",
    )
    slots: int = _option(
        4, "--slots", COUNT, Topic.ROOM,
        "checkpoints for which a volume has space: in flight and kept; existing volumes keep their "
        "number of slots", "N", low=2, high=SLOTS_MAX,
    )
    keep: int = _option(
        2, "--keep", COUNT, Topic.ROOM,
        "newest durable checkpoints that stay; slots - keep checkpoints may be in flight", "N",
        low=1, rule="less than slots",
    )
    dram_bytes: int = _option(
        1 * GIB, "--dram", SIZE, Topic.ROOM,
        "memory for copied checkpoints that are not written yet; with twice the size of a rank's "
        "checkpoint, for each rank of the node, copying never waits for the disk", "SIZE",
        rule="at least two chunks, at most the RAM",
        default_text="a quarter of the RAM, or of the cgroup's limit if that is less",
        example="64GiB",
    )
    max_dram_per_user_bytes: int = _option(
        0, "--max-dram-per-user", SIZE, Topic.ROOM,
        "limit of this memory for the jobs of one user; at least two chunks for each of the user's "
        "ranks", "SIZE", zero="no limit", live=True, when="memory above the limit is taken back",
    )
    chunk_bytes: int = _option(
        16 * MIB, "--chunk", SIZE, Topic.ROOM,
        "unit in which a checkpoint is copied and written", "SIZE",
        low=IO_ALIGN, high=256 * MIB, rule="a multiple of the block (1MiB)",
    )
    writers: int = _option(
        2, "--writers", COUNT, Topic.ROOM,
        "threads that write each checkpoint", "P", low=1, high=64,
    )
    engine: str = _option(
        ENGINES[0][0], "--engine", TEXT, Topic.ROOM,
        f"how volumes are written: {', '.join(f'{name} {how}' for name, how, _ in ENGINES)}; the "
        f"daemon uses {ENGINES[0][0]} where another engine is not possible",
        choices=tuple(name for name, _, _ in ENGINES),
    )
    max_bandwidth_bytes: int = _option(
        0, "--max-bandwidth", SIZE, Topic.ROOM,
        "bytes per second that each volume may read and write, for disks shared with others",
        "SIZE", zero="no limit", live=True,
    )
    group: str = _option(
        "", "--group", TEXT, Topic.ACCESS,
        "group whose members may connect, besides the daemon's own user", "NAME",
        zero="the group of the daemon",
    )
    coordinator: str = _option(
        "", "--coordinator", COORDINATOR, Topic.NODES,
        "the etcd (3.4 or newer) through which the daemons of a job's nodes agree on checkpoints; "
        "it remembers them while the job is down", "PLACE",
        zero="the job's own torch store",
    )
    coordinator_credentials: str = _option(
        "", "--coordinator-credentials", FILE, Topic.NODES,
        "TOML file with what this etcd wants to see: user, password, ca, certificate, key", "FILE",
        zero="none",
    )
    listen: str = _option(
        "", "--listen", LISTEN, Topic.NODES,
        "where the other nodes of a job read checkpoints from this one, encrypted; without it a "
        "rank restores only on the node that has its part. Each user's server takes the first free "
        "port of PORT to PORT + 99",
        "PLACE", zero="other nodes cannot read from this one",
    )
    drain_limit_s: float = _option(
        60.0, "--drain-limit", DURATION, Topic.RUNNING,
        "time that a stop may take to make copied checkpoints durable", "TIME", low=0, live=True,
    )
    stall_limit_s: float = _option(
        30.0, "--stall-limit", DURATION, Topic.RUNNING,
        "a disk that finishes nothing for this long is reported as degraded", "TIME",
        low=0.1, live=True,
    )
    gpu_release_s: float = _option(
        60.0, "--gpu-release", DURATION, Topic.RUNNING,
        "after no trainer has shared memory of a GPU for this long, the daemon releases the GPU: "
        "its context, which takes GPU memory and keeps the clocks up", "TIME", low=0, live=True,
    )
    log_format: str = _option(
        "auto", "--log-format", TEXT, Topic.RUNNING,
        "format of log lines; auto is journal under systemd, else plain",
        choices=("auto", "plain", "journal", "json"), live=True,
    )
    log_level: str = _option(
        "info", "--log-level", TEXT, Topic.RUNNING, "lowest level of the lines that are logged",
        choices=("debug", "info", "warning", "error"), live=True,
    )
    metrics: str = _option(
        "", "--metrics", METRICS, Topic.SEEING,
        "address where Prometheus finds metrics, /healthz and /readyz (127.0.0.1 if only a port is "
        "given), or the file that node_exporter reads", "PLACE", zero="none",
    )
    scrub_rate_bytes: int = _option(
        32 * MIB, "--scrub-rate", SIZE, Topic.SEEING,
        "bytes per second at which kept checkpoints are read and checked in the background", "SIZE",
        zero="off", live=True,
    )
    scrub_interval_s: float = _option(
        604800.0, "--scrub-interval", DURATION, Topic.SEEING,
        "time from the start of one background check to the start of the next", "TIME",
        zero="off", live=True,
    )
    chronicle: bool = _option(
        True, "--chronicle", YES_NO, Topic.SEEING,
        "metrics, trace and a log line for every checkpoint; benchmarks turn it off",
        hidden=True, live=True,
    )
    block_bytes: int = _option(
        1 * MIB, "--block-bytes", SIZE, Topic.ROOM,
        "unit of the checksums in new volumes; tests use small ones", "SIZE",
        low=512, high=GIB, rule="a power of two", hidden=True,
    )
    # fmt: on
    #: Where each value came from, by field; the file that was read; values that the file has by now
    #: and that need a restart, by field.
    origins: Mapping[str, OptionOrigin] = field(default_factory=dict)
    file: Path | None = None
    pending: Mapping[str, object] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """N: slots - keep."""
        return self.slots - self.keep


def _options() -> Iterator[Option]:
    for item in dataclasses.fields(Config):
        if option := item.metadata.get("option"):
            constant = not (option.required or option.default_text)
            default = item.default if constant else None
            yield dataclasses.replace(option, field=item.name, default=default)


OPTIONS: tuple[Option, ...] = tuple(_options())
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}
BY_FIELD: Mapping[str, Option] = {option.field: option for option in OPTIONS}
