"""The commands of `pccheckctl` and their arguments: one table, from which the parser, the man page
and the completion of shells are made."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from pccheck_wire.errors import UsageError

WATCH_DEFAULT_S = 2.0
WRITERS_MAX = 64
EVERY_MAX_S = 366 * 86400.0
DIGITS_MAX = 19  # those of 2**63; Python refuses to convert thousands
SLOTS_MIN, SLOTS_MAX = 2, 32  # of a volume; a test compares them with the daemon's
_JOB = "its name, as status and list show it"


class Command:
    """One command. No named tuple: the first of these in a process takes as long to make as
    `status` takes to answer."""

    def __init__(
        self, name: str, module: str, about: str,
        arguments: Callable[[argparse.ArgumentParser], None],
    ) -> None:  # fmt: skip
        self.name = name
        self.module = module  #: its run(arguments) returns the exit code
        self.help = about
        self.arguments = arguments


def _from(low: int, high: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or len(text) > DIGITS_MAX or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return int(text)

    return count


def _size(text: str) -> int:
    from pccheck_wire.units import parse_size  # imports re

    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive_size(text: str) -> int:
    if not (size := _size(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0")
    return size


def _job(text: str) -> str:
    from pccheck_wire.messages import require_job_name  # imports re

    require_job_name(text)
    return text


def _number(text: str) -> int:
    """A step, a rank or a sequence number."""
    if not text.isdecimal() or len(text) > DIGITS_MAX or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _duration(text: str) -> float:
    from pccheck_wire.units import parse_duration

    try:
        return parse_duration(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _period(text: str) -> float:
    """The period of --watch, a flag that may stand before a job's name."""
    try:
        period_s = _duration(text)
    except argparse.ArgumentTypeError:
        period_s = 0.0
    if period_s <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time above 0: write --watch=2, or --watch at the end"
        )
    return period_s


def _watched(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--watch", "-w", nargs="?", type=_period, const=WATCH_DEFAULT_S, metavar="SECONDS",
        help="repeat (every 2 s) until Ctrl-C; with --json, one line each time",
    )  # fmt: skip


def _status(to: argparse.ArgumentParser) -> None:
    _watched(to)
    to.add_argument("--all", action="store_true", help="include all jobs without a trainer")
    to.add_argument(
        "--cluster",
        action="store_true",
        help="jobs on several nodes: what each node holds, and what they would restore",
    )


def _doctor(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--peers",
        action="store_true",
        help="let every node of jobs on several nodes try to read from every other one",
    )
    to.add_argument(
        "--gpu",
        action="store_true",
        help="share a little memory of each GPU with the daemon, as a trainer does",
    )


def _list(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", nargs="?", type=_job, help="only this job")
    to.add_argument("--rank", type=_number, help="only this rank")
    _watched(to)


def _show(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", type=_job, help=_JOB)
    to.add_argument("--rank", type=_number, help="of this rank; default: the lowest")
    _which(to, "the newest")


def _which(to: argparse.ArgumentParser, default: str) -> None:
    chosen = to.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=_number, help=f"of this step; default: {default}")
    chosen.add_argument(
        "--sequence", type=_number, help="with this sequence number, as list shows it"
    )


def _verify(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", nargs="*", type=_job, default=[], help="only these jobs")
    to.add_argument("--rank", type=_number, help="only this rank")
    _which(to, "all")
    to.add_argument(
        "--read-data-subset", dest="subset", metavar="PART",
        help="a part of each checkpoint: 5%% of its pieces at random, or 2/20, the second of 20",
    )  # fmt: skip
    to.add_argument("--seed", type=int, metavar="N", help="read the pieces of a run with this N")


def _recover(to: argparse.ArgumentParser) -> None:
    _file(to)
    to.set_defaults(step=None, sequence=None, only="", format=None, max_shard_size=None)


def _export(to: argparse.ArgumentParser) -> None:
    _file(to)
    _which(to, "the newest valid one")
    to.add_argument(
        "--only", default="", metavar="NAME",
        help="only this part, named as in show: model, or model.layers.0; the names in the file "
        "leave that beginning out",
    )  # fmt: skip
    to.add_argument(
        "--format", choices=("torch", "safetensors", "huggingface", "dcp"),
        help="default: by the ending of FILE (.safetensors, else torch); with huggingface FILE "
        "becomes a directory for from_pretrained(), with dcp one for torch.distributed.checkpoint",
    )  # fmt: skip
    to.add_argument(
        "--max-shard-size", type=_positive_size, metavar="SIZE",
        help="with --format huggingface: most bytes of tensors in a file (default 5 GB = 5*10^9)",
    )  # fmt: skip


def _import(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", type=_job, help="the name of the new job")
    to.add_argument(
        "input", metavar="FILE", help="a file or directory in a format that export can write"
    )
    to.add_argument(
        "--as", dest="names", action="append", default=[], metavar="NAME[=KEY]",
        help="what scripts attach: all of FILE, or the part KEY of it; may be repeated, and then "
        "NAME means NAME=NAME; default: the parts of FILE under their own names, or model",
    )  # fmt: skip
    to.add_argument("--step", type=_number, help="of the checkpoint; default: what FILE says, or 0")
    to.add_argument(
        "--format", choices=("torch", "safetensors", "dcp"), help="default: by name and content"
    )


def _file(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", type=_job, help=_JOB)
    to.add_argument(
        "--output", "-o", required=True, metavar="FILE",
        help="the file to write: FILE.safetensors, or FILE.pt for torch.load",
    )  # fmt: skip
    ranks = to.add_mutually_exclusive_group()
    ranks.add_argument("--rank", type=_number, help="of one rank")
    ranks.add_argument(
        "--all-ranks", action="store_true",
        help="one file per rank: FILE.rank-R.EXT, or {rank} in FILE replaced",
    )  # fmt: skip
    to.add_argument("--force", action="store_true", help="overwrite FILE")


def _wait(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", type=_job, nargs="?", help=f"{_JOB}; without it: all, with --ended")
    to.add_argument("--rank", type=_number, help="of this rank (default: the lowest on this node)")
    to.add_argument(
        "--for", dest="state", choices=("copied", "durable", "global"), default="durable",
        help="safe when the trainer ends; on the disk (default); on the disk of every rank",
    )  # fmt: skip
    step = to.add_mutually_exclusive_group(required=True)
    step.add_argument("--step", type=_number, help="this step or a later one")
    step.add_argument("--newest", action="store_true", help="the newest request, or the next one")
    step.add_argument("--ended", action="store_true",
                      help="what ended trainers have left to write")  # fmt: skip
    to.add_argument("--timeout", type=_duration, default=60.0, metavar="TIME",
                    help="such as 90s or 5min (default 60s)")  # fmt: skip


def _drop(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", type=_job, help=_JOB)
    to.add_argument("--rank", type=_number, help="only the volume of this rank")
    to.add_argument("--dry-run", action="store_true", help="show what would be removed, and stop")
    to.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _every(text: str) -> float:
    period_s = _duration(text)
    if not 0 < period_s < EVERY_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 10min, of a year at most")
    return period_s


def _place(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path")
    return text


def _pid(text: str) -> int:
    if not text.isdecimal() or len(text) > DIGITS_MAX or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


def _snapshot(to: argparse.ArgumentParser) -> None:
    to.add_argument("pid", type=_pid, metavar="PID", help="the process")
    to.add_argument("--tree", action="store_true", help="with its child processes")
    to.add_argument("--leave-running", action="store_true",
                    help="let it go on; default: it ends once the snapshot is durable")  # fmt: skip
    to.add_argument(
        "--name", type=_job, metavar="JOB", help="of its snapshots (default COMMAND-PID)"
    )
    to.add_argument("--every", type=_every, metavar="TIME",
                    help="again and again, such as 10min, until it ends")  # fmt: skip
    to.add_argument("--dry-run", action="store_true",
                    help="size, pause, room, and every reason against it")  # fmt: skip


def _gpus(text: str) -> dict[str, str]:
    found = dict(one.partition("=")[::2] for one in text.split(","))
    for uuid in (*found, *found.values()):
        if not re.fullmatch(r"GPU(-[0-9a-f]+)+", uuid) or len(uuid.replace("-", "")) != 35:
            raise argparse.ArgumentTypeError(
                f"{uuid!r} is not the UUID of a GPU, as nvidia-smi -L prints it"
            )
    return found


def _restore_process(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", type=_job, help=_JOB)
    to.add_argument("--step", type=_number, help="of this step; default: the newest that is intact")
    to.add_argument("--stdout", type=_place, metavar="FILE",
                    help="output and errors are added to FILE")  # fmt: skip
    to.add_argument("--cgroup", type=_place, metavar="DIR",
                    help="the process goes there (default: where this command runs)")  # fmt: skip
    to.add_argument("--gpus", type=_gpus, default={}, metavar="OLD=NEW[,...]",
                    help="UUIDs of GPUs: where the process had OLD it gets NEW")  # fmt: skip
    to.add_argument("--own-pids", action="store_true",
                    help="in a PID namespace, where the pids that it had are free")  # fmt: skip
    to.add_argument("--detach", action="store_true", help="do not stay its parent")
    to.add_argument("--force", action="store_true",
                    help="although libraries, mounts or the CPU are different")  # fmt: skip


def _bench(to: argparse.ArgumentParser) -> None:
    to.add_argument("--size", type=_size, metavar="SIZE",
                    help="size of the test file (default 2GiB, less on a small disk)")  # fmt: skip
    to.add_argument("--chunk", type=_size, metavar="SIZE", help="size of a write (default 16MiB)")
    to.add_argument("--writers", type=_from(1, WRITERS_MAX), metavar="P",
                    help="only with this many threads (default 1, 2 and 4)")  # fmt: skip


def _tune(to: argparse.ArgumentParser) -> None:
    add = to.add_argument
    add("--job", type=_job, help="read m and t from this job's latest checkpoints")
    add("--checkpoint", type=_size, metavar="SIZE", help="state of one rank (m)")
    add("--step-time", type=_duration, metavar="TIME", help="time of a step (t), such as 350ms")
    add("--slowdown", type=float, default=1.03, metavar="Q", help="allowed factor (q; 1.03)")
    add("--dram", type=_size, metavar="SIZE", help="DRAM of this rank (M; default 2m)")
    add("--keep", type=_from(1, SLOTS_MAX - 1), default=2, metavar="N",
        help="durable checkpoints to keep (default 2)")  # fmt: skip
    add("--slots", type=_from(SLOTS_MIN, SLOTS_MAX), metavar="N",
        help="default: as many as are useful")  # fmt: skip
    add("--bandwidth", type=_size, metavar="SIZE", help="bytes per second that the disk writes")
    add("--copy-bandwidth", type=_size, metavar="SIZE", help="bytes per second of a copy to DRAM")
    add(
        "--mtbf", type=_duration, metavar="TIME",
        help="time between failures of all nodes together; gives the interval of best goodput",
    )  # fmt: skip
    add("--restart", type=_duration, default=60.0, metavar="TIME",
        help="time from a failure until training runs again (default 60s)")  # fmt: skip
    add("--output", "-o", metavar="FILE", help="writes the daemon's options: pccheckd.toml")
    add("--force", action="store_true", help="overwrite FILE")


def _trace(to: argparse.ArgumentParser) -> None:
    to.add_argument("--last", type=_duration, default=60.0, metavar="AGE",
                    help="checkpoints of this time (default 60s)")  # fmt: skip
    to.add_argument("--output", "-o", metavar="FILE", help="default: stdout")
    to.add_argument("--force", action="store_true", help="overwrite FILE")


def _report(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", nargs="?", type=_job, help="only this job")
    to.add_argument("--output", "-o", required=True, metavar="FILE", help="the page: report.html")
    to.add_argument("--trace", metavar="FILE", help="what `trace` wrote to FILE; asks no daemon")
    to.add_argument("--last", type=_duration, default=600.0, metavar="AGE",
                    help="how far back (default 10min)")  # fmt: skip
    to.add_argument("--force", action="store_true", help="overwrite FILE")


def _config(to: argparse.ArgumentParser) -> None:
    to.add_argument("action", choices=("show",), metavar="show", help="the values in use")
    to.add_argument("--origin", action="store_true", help="show where each value comes from")


def _completion(to: argparse.ArgumentParser) -> None:
    to.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="bash|zsh|fish",
                    help="the shell that runs the script")  # fmt: skip


COMMANDS = (
    Command("status", "commands.status", "what the daemon does, or what the volumes hold", _status),
    Command("list", "commands.listing", "the checkpoints, newest first", _list),
    Command("show", "commands.show", "the tensors, values and metadata of one checkpoint", _show),
    Command("recover", "export.command",
            "after a crash: writes the newest valid state to a file (to choose, see export)",
            _recover),
    Command("export", "export.command",
            "for other software: writes a checkpoint, or a part of one, to a file (after a crash, "
            "see recover)", _export),
    Command("import", "importing.command",
            "saves what other software wrote as the first checkpoint of a new job", _import),
    Command("verify", "commands.verify", "reads and checks every byte of the checkpoints", _verify),
    Command("wait", "commands.wait", "returns when a step is copied, durable or global", _wait),
    Command("drop", "commands.drop", "removes the volumes of a job that has ended", _drop),
    Command("snapshot", "process.snapshot",
            "saves a whole process that knows nothing of PCcheck, and ends it", _snapshot),
    Command("restore-process", "process.restore",
            "makes a process again from its snapshot, and returns its exit code",
            _restore_process),
    Command("doctor", "doctor.command",
            "checks this machine and the daemon; each finding has its effect and a fix", _doctor),
    Command("bench", "measure.bench", "measures how fast a disk is with checkpoints", _bench),
    Command("tune", "measure.tune", "computes how often to save, and with how many slots", _tune),
    Command("trace", "commands.trace",
            "a timeline of the last minutes, for Perfetto or chrome://tracing", _trace),
    Command("report", "report.command",
            "a page for a browser: what the last checkpoints did, and what they cost", _report),
    Command("config", "commands.config", "the daemon's options, and where each value comes from",
            _config),
    Command("completion", "commands.completion", "prints the completion script for a shell",
            _completion),
)  # fmt: skip
