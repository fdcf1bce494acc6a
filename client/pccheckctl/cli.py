"""`pccheckctl`: arguments in, text or JSON out, exit code back. Commands are imported lazily."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from pccheck_wire.basics import did_you_mean
from pccheck_wire.errors import PccheckError, UsageError

from . import VERSION
from .commands import COMMANDS

TYPE_CHECKING = False  # see pccheck_wire/errors.py
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

WIDTH = 96  # columns of --help
_WITH_VALUE = ("--socket", "--storage", "--uid")
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
        words = [word for word in message.split() if word.startswith("-")]
        meant = did_you_mean(words, self._options()) if "unrecognized" in message else ""
        raise UsageError(message, hint=f"{meant}see: {self.prog} --help")

    def _options(self) -> list[str]:
        """Its own, and those of its commands."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    found += sub._option_string_actions
        return found


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
        chosen = parser(_named(given)).parse_args(given)
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


def _named(given: list[str]) -> str | None:
    """The command, unless somebody asks for help: the first word that is no flag and no flag's
    value. Raises UsageError for one that there is not."""
    if "-h" in given or "--help" in given:
        return None
    words, options = iter(given), list[str]()
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word.startswith("-"):
            options.append(word)
        elif any(word == command.name for command in COMMANDS):
            return word
        else:
            raise _no_such(word, options)
    return None


def _no_such(word: str, options: Sequence[str]) -> UsageError:
    """`options` stand in front of it: it may be the value of one that is misspelt."""
    what, meant = f"command {word!r}", did_you_mean([word], [one.name for one in COMMANDS])
    for option in options:
        if "=" not in option and (likely := did_you_mean([option], list(_WITH_VALUE))):
            what, meant = f"option {option}", likely
    return UsageError(f"there is no {what}", hint=f"{meant}see: pccheckctl --help")


def report(error: PccheckError, *, as_json: bool) -> None:
    """One error on stderr, or as a JSON document on stdout."""
    if as_json:
        import json

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
    from .render import safe

    print(f"pccheckctl: {safe(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {safe(error.hint)}", file=sys.stderr)


def _told(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The whole tree, or one with this command only, which takes a fraction of the time."""
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

    for command in COMMANDS:
        if only not in (None, command.name):
            continue
        sub = commands.add_parser(
            command.name, help=command.help, description=command.help, allow_abbrev=False,
            formatter_class=_Formatter,
        )  # fmt: skip
        sub.set_defaults(command=command.name, module=command.module)
        _common(sub, defaults=False)
        command.arguments(sub)
    return made


def _common(to: argparse.ArgumentParser, *, defaults: bool) -> None:
    """Flags that may stand before and behind the command."""

    def default(value: object) -> object:
        return value if defaults else argparse.SUPPRESS

    to.add_argument("--socket", metavar="PATH", default=default(None), help="the attach socket")
    to.add_argument(
        "--storage", metavar="DIR", default=default(None),
        help="a storage directory: to be read without a daemon, or measured",
    )  # fmt: skip
    to.add_argument("--uid", type=int, default=default(None), help="whose jobs (for root)")
    to.add_argument(
        "--json", action="store_true", default=default(False), help="a JSON document on stdout"
    )
