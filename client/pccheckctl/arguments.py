"""The commands of `pccheckctl` and their arguments: one table, from which the parser, the shells'
completion and the man pages are made."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from pccheck_wire.errors import UsageError

WATCH_DEFAULT_S = 2.0
WRITERS_MAX = 64


class Command:
    """`module`: its run(arguments) -> exit code."""

    __slots__ = ("arguments", "help", "module", "name")

    def __init__(
        self,
        name: str,
        module: str,
        text: str,
        arguments: Callable[[argparse.ArgumentParser], None],
    ) -> None:
        self.name = name
        self.module = module
        self.help = text
        self.arguments = arguments


def _writers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= WRITERS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {WRITERS_MAX}")
    return int(text)


def _size(text: str) -> int:
    from pccheck_wire.units import parse_size

    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _duration(text: str) -> float:
    from pccheck_wire.units import parse_duration

    try:
        return parse_duration(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _period(text: str) -> float:
    """Of --watch, which may stand before a job's name."""
    from pccheck_wire.units import parse_duration

    try:
        period_s = parse_duration(text)
    except UsageError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds: write --watch=2, or --watch at the end"
        ) from None
    if period_s <= 0:
        raise argparse.ArgumentTypeError("the seconds between two looks have to be more than 0")
    return period_s


def _watched(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--watch", "-w", nargs="?", type=_period, const=WATCH_DEFAULT_S, metavar="SECONDS",
        help="again and again (every 2 s), until Ctrl-C; with --json one line each",
    )  # fmt: skip


def _status(to: argparse.ArgumentParser) -> None:
    _watched(to)
    to.add_argument("--all", action="store_true", help="also all jobs that nobody is connected to")


def _listing(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", nargs="?", default="", help="only this job")
    to.add_argument("--rank", type=int, help="only this rank")
    _watched(to)


def _show(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", help="its name, as status and list show it")
    to.add_argument("--rank", type=int, help="of this rank; default: the lowest")
    _which(to, "the newest")


def _which(to: argparse.ArgumentParser, default: str) -> None:
    chosen = to.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, help=f"of this step; default: {default}")
    chosen.add_argument("--sequence", type=int, help="with this sequence, as list shows it")


def _verify(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", nargs="*", default=[], help="only these jobs")
    to.add_argument("--rank", type=int, help="only this rank")
    _which(to, "all")
    to.add_argument(
        "--read-data-subset", dest="subset", metavar="PART",
        help="a part of each: 5%% of its pieces at random, or 2/20, the second of twenty",
    )  # fmt: skip
    to.add_argument("--seed", type=int, metavar="N", help="of that chance, to read the same again")


def _export(to: argparse.ArgumentParser) -> None:
    _file(to)
    _which(to, "the newest valid one")
    to.add_argument(
        "--only", default="", metavar="NAME",
        help="a part, as show names it, like model or model.layers.0; in the file its names begin "
        "behind that",
    )  # fmt: skip
    to.add_argument(
        "--format", choices=("torch", "safetensors", "dcp"),
        help="default: by FILE's ending (.safetensors, else torch); dcp: FILE becomes a directory "
        "for torch.distributed.checkpoint",
    )  # fmt: skip


def _recover(to: argparse.ArgumentParser) -> None:
    _file(to)
    to.set_defaults(step=None, sequence=None, only="", format=None)


def _file(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", help="its name, as status and list show it")
    to.add_argument(
        "--output", "-o", required=True, metavar="FILE",
        help="where to: FILE.safetensors, or FILE.pt for torch.load",
    )  # fmt: skip
    ranks = to.add_mutually_exclusive_group()
    ranks.add_argument("--rank", type=int, help="of one rank")
    ranks.add_argument(
        "--all-ranks", action="store_true",
        help="one file per rank: FILE.rank-R.EXT, or with {rank} in FILE replaced",
    )  # fmt: skip
    to.add_argument("--force", action="store_true", help="overwrite FILE")


def _wait(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", help="its name, as status and list show it")
    to.add_argument("--rank", type=int, default=0, help="of this rank (0)")
    to.add_argument(
        "--for", dest="state", choices=("copied", "durable", "global"), default="durable",
        help="safe from the trainer's end; on the disk (default); on every rank's disk",
    )  # fmt: skip
    step = to.add_mutually_exclusive_group(required=True)
    step.add_argument("--step", type=int, help="this step or a later one")
    step.add_argument(
        "--newest", action="store_true", help="the newest that is on its way now, or the next"
    )
    to.add_argument(
        "--timeout", type=_duration, default=60.0, metavar="TIME", help="like 90s or 5min (60s)"
    )


def _drop(to: argparse.ArgumentParser) -> None:
    to.add_argument("job", help="its name, as status and list show it")
    to.add_argument("--rank", type=int, help="only the volume of this rank")
    to.add_argument("--dry-run", action="store_true", help="show what would go, and stop")
    to.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _bench(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--size", type=_size, metavar="SIZE", help="of the file (2GiB, less on a small disk)"
    )
    to.add_argument("--chunk", type=_size, metavar="SIZE", help="bytes of one write (16MiB)")
    to.add_argument("--writers", type=_writers, metavar="P",
                    help="only with so many threads (1, 2 and 4)")  # fmt: skip


def _tune(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--checkpoint", type=_size, required=True, metavar="SIZE", help="of one rank's state (m)"
    )
    to.add_argument(
        "--step-time", type=_duration, required=True, metavar="TIME", help="of a step (t): 350ms"
    )
    to.add_argument(
        "--slowdown", type=float, default=1.03, metavar="Q", help="allowed factor (q; 1.03)"
    )
    to.add_argument("--dram", type=_size, metavar="SIZE", help="for this rank (M; twice the state)")
    to.add_argument("--keep", type=int, default=2, metavar="N", help="durable ones kept (2)")
    to.add_argument("--slots", type=int, metavar="N", help="default: what is of use")
    to.add_argument("--bandwidth", type=_size, metavar="SIZE", help="what the disk writes a second")
    to.add_argument(
        "--copy-bandwidth", type=_size, metavar="SIZE", help="what a copy into DRAM does a second"
    )


def _trace(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--last", type=_duration, default=60.0, metavar="AGE", help="how far back (60s)"
    )
    to.add_argument("--output", "-o", metavar="FILE", help="default: stdout")
    to.add_argument("--force", action="store_true", help="overwrite FILE")


def _config(to: argparse.ArgumentParser) -> None:
    to.add_argument("action", choices=("show",), metavar="show", help="the values in use")
    to.add_argument("--origin", action="store_true", help="where each value comes from")


def _completion(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "shell", choices=("bash", "zsh", "fish"), metavar="bash|zsh|fish", help="for this shell"
    )


def _nothing(_: argparse.ArgumentParser) -> None:
    pass


COMMANDS: tuple[Command, ...] = (
    Command("status", "commands.status", "what the daemon does; without one, what the volumes say",
            _status),
    Command("list", "commands.listing", "the checkpoints, newest first", _listing),
    Command("show", "commands.show", "what is in one checkpoint: tensors, values, metadata", _show),
    Command("recover", "export.command",
            "after a crash: all of the newest valid state, in a file; to choose, see export",
            _recover),
    Command("export", "export.command",
            "for other software: a checkpoint of your choice, or a part of one, in a file; after a "
            "crash, see recover",
            _export),
    Command("verify", "commands.verify", "reads every byte of the checkpoints and checks it",
            _verify),
    Command("wait", "commands.wait", "returns when a step is copied, durable or global", _wait),
    Command("drop", "commands.drop", "removes the volumes of a job that is over", _drop),
    Command("doctor", "doctor.command",
            "checks this machine and the daemon; says what each finding costs, and how to fix it",
            _nothing),
    Command("bench", "measure.bench", "measures how fast a disk is with checkpoints", _bench),
    Command("tune", "measure.tune", "how often to save, and with how many slots", _tune),
    Command("trace", "commands.trace", "a timeline of the last minutes, for Perfetto or chrome://tracing",
            _trace),
    Command("config", "commands.config",
            "the options that the daemon uses, and where each comes from", _config),
    Command("completion", "commands.completion", "prints what makes a shell complete our words",
            _completion),
)  # fmt: skip
