"""`pccheckctl`: arguments in, text or JSON out, exit code back. Commands are imported lazily."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pccheck_wire.errors import PccheckError, UsageError

from . import VERSION

WIDTH = 96  # columns of --help
INTERRUPTED = 130  # 128 + SIGINT, as a shell would say it

EXIT_CODES = """exit codes:
  0 ok             1 error            2 usage          3 degraded
  10 no store      11 store locked    12 daemon unreachable
  13 no valid checkpoint              14 damage found  130, 143 signals
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse makes one for every argument, and imports shutil to ask for the width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=WIDTH)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that `--json` also holds for wrong arguments."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see: {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; --help and --version end in SystemExit(0)."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _run(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PccheckError.exit_code
    return code


def _run(given: list[str]) -> int:
    try:
        chosen = parser().parse_args(given)
        command = importlib.import_module(f"{__package__}.{chosen.module}")
        return int(command.run(chosen))
    except PccheckError as error:
        failure = error
    except BrokenPipeError:
        raise
    except OSError as error:
        failure = PccheckError(_told(error))
    report(failure, as_json="--json" in given)
    return failure.exit_code


def report(error: PccheckError, *, as_json: bool) -> None:
    """One error on stderr, or as a JSON document on stdout."""
    if as_json:
        document = {
            "schema": 1,
            "error": {
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "retryable": error.retryable,
                "exit_code": error.exit_code,
            },
        }
        print(json.dumps(document, indent=2), flush=True)
        return
    print(f"pccheckctl: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def _told(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="pccheckctl",
        description="Asks a pccheckd what it does, and reads the volumes that it wrote.",
        epilog=EXIT_CODES,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"pccheckctl {VERSION}")
    _common(made, defaults=True)
    commands = made.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog=made.prog
    )

    def command(name: str, module: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False, formatter_class=_Formatter
        )
        sub.set_defaults(module=module)
        _common(sub, defaults=False)
        return sub

    command("status", "status", "what the daemon does; without one, what the volumes say")
    listing = command("list", "listing", "the checkpoints, newest first")
    listing.add_argument("job", nargs="?", default="", help="only this job")
    listing.add_argument("--rank", type=int, help="only this rank")
    _which(command("show", "show", "what is in one checkpoint: tensors, leaves, metadata"))
    _recover(command("recover", "recover", "writes one checkpoint to a file"))
    verify = command("verify", "verify", "reads and checks every byte")
    _which(verify, job_required=False)
    _wait(command("wait", "wait", "returns when a step is copied or durable"))
    return made


def _common(to: argparse.ArgumentParser, *, defaults: bool) -> None:
    """Flags that may stand before and behind the command."""

    def default(value: object) -> object:
        return value if defaults else argparse.SUPPRESS

    to.add_argument("--socket", metavar="PATH", default=default(None), help="the attach socket")
    to.add_argument(
        "--storage", metavar="DIR", default=default(None),
        help="read this storage directory, without a daemon",
    )  # fmt: skip
    to.add_argument("--uid", type=int, default=default(None), help="whose jobs (for root)")
    to.add_argument(
        "--json", action="store_true", default=default(False), help="a JSON document on stdout"
    )


def _which(to: argparse.ArgumentParser, *, job_required: bool = True) -> None:
    if job_required:
        to.add_argument("job")
    else:
        to.add_argument("job", nargs="?", default="", help="only this job")
    to.add_argument("--rank", type=int, help="of one rank")
    chosen = to.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, help="of this step; default: the newest")
    chosen.add_argument("--sequence", type=int, help="with this sequence")


def _recover(to: argparse.ArgumentParser) -> None:
    to.add_argument("job")
    to.add_argument("--output", "-o", required=True, metavar="FILE")
    ranks = to.add_mutually_exclusive_group()
    ranks.add_argument("--rank", type=int, help="of one rank")
    ranks.add_argument(
        "--all-ranks", action="store_true",
        help="one file per rank: FILE.rank-R.EXT, or with {rank} in FILE replaced",
    )  # fmt: skip
    to.add_argument("--step", type=int, help="this step; default: the newest valid one")
    to.add_argument(
        "--format", choices=("torch", "safetensors"),
        help="default: by FILE's ending (.safetensors, else torch)",
    )  # fmt: skip
    to.add_argument("--force", action="store_true", help="overwrite FILE")


def _wait(to: argparse.ArgumentParser) -> None:
    to.add_argument("job")
    to.add_argument("--rank", type=int, default=0)
    to.add_argument("--for", dest="state", choices=("durable", "copied"), default="durable")
    to.add_argument("--step", type=int, required=True, help="this step or a later one")
    to.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds (60)")
