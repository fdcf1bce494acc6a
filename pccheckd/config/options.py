"""What the daemon can be told: one table, from which come the flags and their help, the environment
variables, the keys of the file, the checks, `config show`, docs/configuration.md and the man page.

To add an option: a field in `Config` with its default, a line in `OPTIONS`, then
`make reference` for the documents that are made from it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pccheck_wire.errors import UsageError
from pccheck_wire.messages import DEFAULT_SOCKET
from pccheck_wire.units import GIB, KIB, MIB, TIB, parse_duration, parse_size

SLOTS_MAX = 32
IO_ALIGN = 4096
#: AF_UNIX paths end at 107 bytes; "/ctl-<32 hex>/<uid>.sock" goes behind the socket's directory.
SOCKET_DIRECTORY_BYTES_MAX = 107 - len("/ctl-") - 32 - len("/4294967295.sock")
#: A finished job stays at least so long: a number without its unit must not cost anybody's work.
EXPIRE_S_MIN = 3600.0

_YES = {"1": True, "yes": True, "true": True, "on": True,
        "0": False, "no": False, "false": False, "off": False, "": False}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from: `kind` is "flag", "environment", "file" or "default"."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.kind


@dataclass(slots=True)
class Config:
    """Checked values; see OPTIONS for what each means. Shared by all parts of the daemon; only
    `reload` changes it, on the loop, and only what the table calls live."""

    storage: Path
    socket: Path
    slots: int = 4
    keep: int = 2
    dram_bytes: int = 1 * GIB
    chunk_bytes: int = 16 * MIB
    writers: int = 2
    engine: str = "pwrite"
    max_storage_bytes: int = 0
    max_dram_per_user_bytes: int = 0
    max_storage_per_user_bytes: int = 0
    group: str = ""
    log_format: str = "auto"
    log_level: str = "info"
    allow_any_filesystem: bool = False
    max_bandwidth_bytes: int = 0
    block_bytes: int = 1 * MIB
    drain_limit_s: float = 60.0
    stall_limit_s: float = 30.0
    gpu_release_s: float = 60.0
    expire_finished_s: float = 0.0
    metrics: str = ""
    scrub_rate_bytes: int = 32 * MIB
    scrub_interval_s: float = 604800.0
    chronicle: bool = True
    #: Where each value came from, by field; the file that was read; what differs in the file by
    #: now and needs a restart, by field.
    origins: Mapping[str, Origin] = field(default_factory=dict)
    file: Path | None = None
    pending: Mapping[str, object] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """N: slots - keep."""
        return self.slots - self.keep


# -- kinds of values ---------------------------------------------------------------------------


def show_size(value: object) -> str:
    """The shortest text that parse_size() turns into the very same number."""
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
    if "\0" in text:
        raise UsageError(f"{text!r} is not a path")
    return Path(text).absolute()


def _metrics(text: str) -> str:
    if text:
        from . import metrics_place

        metrics_place.parse(text)
    return text


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
YES_NO = Kind("yes or no", "", _yes, lambda value: "yes" if value else "no")


class Group(enum.StrEnum):
    """Headings of the help and of the documents."""

    PLACES = "Places"
    ROOM = "Room and speed"
    ACCESS = "Who may connect"
    RUNNING = "Running"
    SEEING = "Seeing it work"


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    field: str
    kind: Kind
    group: Group
    help: str  # one sentence, no full stop
    metavar: str = ""
    choices: tuple[str, ...] = ()
    #: Former choices, and what to do now.
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    rule: str = ""  # what else must hold, in words
    zero: str = ""  # what 0 or nothing means
    default_text: str = ""  # when the default is not a constant
    required: bool = False
    live: bool = False  # taken over at SIGHUP
    when: str = ""  # of a live one: from when on it counts
    example: str = ""  # for the file that is shipped, where no constant is the default
    hidden: bool = False

    @property
    def key(self) -> str:
        """Its name in the file."""
        return self.flag.removeprefix("--")

    @property
    def variable(self) -> str:
        return "PCCHECK_" + self.key.upper().replace("-", "_")

    @property
    def default(self) -> object:
        """From `Config`; None when there is none, or none that is constant."""
        if self.required or self.default_text:
            return None
        found = next(f for f in dataclasses.fields(Config) if f.name == self.field)
        return None if found.default is dataclasses.MISSING else found.default

    def show(self, value: object) -> str:
        """As one would write it."""
        if not value and self.zero:
            return self.zero
        return self.kind.show(value)

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


OPTIONS: tuple[Option, ...] = (
    Option(
        "--storage", "storage", PATH, Group.PLACES,
        "directory for the volumes, on a local disk with ext4 or xfs", "DIR",
        required=True, example="/var/lib/pccheck",
    ),
    Option(
        "--max-storage", "max_storage_bytes", SIZE, Group.PLACES,
        "most that all volumes together may take; a job that needs more is refused", "SIZE",
        zero="no limit", live=True, when="of volumes made from then on",
    ),
    Option(
        "--max-storage-per-user", "max_storage_per_user_bytes", SIZE, Group.PLACES,
        "most that the volumes of one user may take; a job that needs more is refused", "SIZE",
        zero="no limit", live=True, when="of volumes made from then on",
    ),
    Option(
        "--expire-finished", "expire_finished_s", DURATION, Group.PLACES,
        "drop the volumes of a finished job, one that said close(done=True), that has been left "
        "alone for so long while pccheckd ran", "AGE", rule="at least 1h", zero="never", live=True,
    ),
    Option(
        "--allow-any-filesystem", "allow_any_filesystem", YES_NO, Group.PLACES,
        "accept file systems that promise less than a local disk, such as tmpfs (for tests)",
    ),
    Option(
        "--slots", "slots", COUNT, Group.ROOM,
        "room of a volume, in checkpoints: those in flight and those kept; volumes that are there "
        "already stay as they were made", "N", low=2, high=SLOTS_MAX,
    ),
    Option(
        "--keep", "keep", COUNT, Group.ROOM,
        "how many durable checkpoints are never overwritten; slots - keep may be in flight", "N",
        low=1, rule="less than slots",
    ),
    Option(
        "--dram", "dram_bytes", SIZE, Group.ROOM,
        "memory for what was copied and is not written yet; twice the size of a rank's checkpoint, "
        "for all ranks of the node, lets copying never wait for the disk", "SIZE",
        rule="at least two chunks, at most the RAM",
        default_text="a quarter of the RAM, or of the cgroup's limit if that is less",
        example="64GiB",
    ),
    Option(
        "--max-dram-per-user", "max_dram_per_user_bytes", SIZE, Group.ROOM,
        "most of the memory that the jobs of one user may have together; at least two chunks for "
        "each of his ranks", "SIZE", zero="no limit", live=True,
        when="what is above it is taken back",
    ),
    Option(
        "--chunk", "chunk_bytes", SIZE, Group.ROOM,
        "how much is handed over and written at a time", "SIZE",
        low=IO_ALIGN, high=256 * MIB, rule="a multiple of the block (1MiB)",
    ),
    Option(
        "--writers", "writers", COUNT, Group.ROOM,
        "threads that write each checkpoint", "P", low=1, high=64,
    ),
    Option(
        "--engine", "engine", TEXT, Group.ROOM,
        "how volumes are read and written: pwrite goes past the page cache, mmap through it, pmem "
        "to persistent memory (DAX); pwrite is used where the other two are not possible",
        choices=("pwrite", "mmap", "pmem"),
        removed={
            "auto": "pccheckd no longer measures engines at its start: remove the option, or set "
            "it to pwrite; `pccheckctl bench` compares the engines on a disk",
            "uring": "the engine uring was removed, since it was nowhere faster than pwrite: "
            "remove the option, or set it to pwrite",
        },
    ),
    Option(
        "--max-bandwidth", "max_bandwidth_bytes", SIZE, Group.ROOM,
        "bytes per second that each volume may read and write, for disks shared with others",
        "SIZE", zero="no limit", live=True,
    ),
    Option(
        "--socket", "socket", PATH, Group.ACCESS,
        "where trainers and pccheckctl connect", "PATH",
        rule=f"a directory of at most {SOCKET_DIRECTORY_BYTES_MAX} bytes",
        default_text=f"{DEFAULT_SOCKET}; of an ordinary user "
        "$XDG_RUNTIME_DIR/pccheck/attach.sock", example=DEFAULT_SOCKET,
    ),
    Option(
        "--group", "group", TEXT, Group.ACCESS,
        "group whose members may connect, besides the daemon's own user", "NAME",
        zero="the group of the daemon",
    ),
    Option(
        "--drain-limit", "drain_limit_s", DURATION, Group.RUNNING,
        "how long a stop may take to make durable what was copied", "TIME", low=0, live=True,
    ),
    Option(
        "--stall-limit", "stall_limit_s", DURATION, Group.RUNNING,
        "a disk that finishes nothing for so long is reported as degraded", "TIME",
        low=0.1, live=True,
    ),
    Option(
        "--gpu-release", "gpu_release_s", DURATION, Group.RUNNING,
        "a GPU whose memory no trainer has shared for so long is given back: what the daemon's "
        "context takes of its memory, and its clocks", "TIME", low=0, live=True,
    ),
    Option(
        "--log-format", "log_format", TEXT, Group.RUNNING,
        "how log lines look; auto is journal under systemd, else plain",
        choices=("auto", "plain", "journal", "json"),
        live=True,
    ),
    Option(
        "--log-level", "log_level", TEXT, Group.RUNNING, "what is worth a line in the log",
        choices=("debug", "info", "warning", "error"), live=True,
    ),
    Option(
        "--metrics", "metrics", METRICS, Group.SEEING,
        "where Prometheus finds metrics, /healthz and /readyz (on 127.0.0.1 when only a port is "
        "given), or the file that node_exporter reads", "PLACE", zero="none",
    ),
    Option(
        "--scrub-rate", "scrub_rate_bytes", SIZE, Group.SEEING,
        "bytes per second at which kept checkpoints are read and checked in the background", "SIZE",
        zero="off", live=True,
    ),
    Option(
        "--scrub-interval", "scrub_interval_s", DURATION, Group.SEEING,
        "time between the beginnings of two such checks of everything", "TIME",
        zero="off", live=True,
    ),
    Option(
        "--chronicle", "chronicle", YES_NO, Group.SEEING,
        "metrics, trace and a line for every checkpoint; benches turn it off", hidden=True,
        live=True,
    ),
    Option(
        "--block-bytes", "block_bytes", SIZE, Group.ROOM,
        "unit of the checksums in new volumes; tests use small ones", "SIZE",
        low=512, high=GIB, rule="a power of two", hidden=True,
    ),
)  # fmt: skip

BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}
BY_FIELD: Mapping[str, Option] = {option.field: option for option in OPTIONS}
