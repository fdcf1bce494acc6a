"""`pccheckctl`: parses the arguments, runs one command, reports errors. A command is imported when
it runs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Sequence

from pccheck_wire.basics import did_you_mean
from pccheck_wire.errors import PccheckError, UsageError
from pccheckctl import VERSION
from pccheckctl.arguments import COMMANDS

TYPE_CHECKING = False  # the import of `typing` takes a fifth of the time of `status`
if TYPE_CHECKING:
    from typing import NoReturn

WIDTH = 96  # columns of --help
_WITH_VALUE = ("--socket", "--storage", "--uid")
UID_MAX = 2**32 - 2  # -1 is no user
MESSAGE_MAX = 1000  # characters of an error, which may repeat an argument of any length

EXIT_CODES = """exit codes:
  0 ok             1 error            2 usage          3 degraded
  10 no store      11 store locked    12 daemon unreachable
  13 no valid checkpoint              14 damage found  130, 143 signals
"""


#: argparse would import shutil to get the width.
_FORMATTER = functools.partial(argparse.RawDescriptionHelpFormatter, width=WIDTH)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that `--json` also holds for wrong arguments."""

    def error(self, message: str) -> NoReturn:
        words = [word for word in message.split() if word.startswith("-")]
        known = [flag for action in actions(self) for flag in action.option_strings]
        meant = did_you_mean(words, known) if "unrecognized" in message else ""
        raise UsageError(message, hint=f"{meant}see: {self.prog} --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> object:
        """For `--rank=--` argparse returns [] before Python 3.13, whatever the type is."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "-- is not a value")
        return super()._get_values(action, arg_strings)


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Those of the parser, and those of its commands."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found += sub._actions
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; --help and --version end in SystemExit(0), Ctrl-C
    in KeyboardInterrupt."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    _prepare_streams()
    try:
        code = _run(given)
    except BrokenPipeError:  # the reader of the output has ended
        code = PccheckError.exit_code
    except OSError as error:  # no space where the output goes
        with contextlib.suppress(OSError):
            print(f"pccheckctl: cannot write the output: {error.strerror}", file=sys.stderr)
        code = PccheckError.exit_code
    _discard_unwritten()
    return code


def _prepare_streams() -> None:
    """Opens what the caller has closed, so that no other file gets its number, and lets the locale
    refuse no character: names and texts are of any language."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123
        elif name != "stdin" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_unwritten() -> None:
    """What could not be written, which is known by now: otherwise Python complains at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(given: list[str]) -> int:
    chosen = argparse.Namespace()
    try:
        chosen = parser(_named(given)).parse_args(given)
        command = importlib.import_module(f"{__package__}.{chosen.module}")
        return int(command.run(chosen))
    except PccheckError as error:
        failure = error
    except UnicodeEncodeError as error:  # bytes of the command line that are no text
        failure = UsageError(f"{error.object!r:.80} is not text", hint="use UTF-8 text")
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        failure = PccheckError(f"{where}{error.strerror or error}")
    if len(failure.message) > MESSAGE_MAX:  # the middle quotes an argument
        kept = MESSAGE_MAX // 2
        failure.message = f"{failure.message[:kept]} ... {failure.message[-kept:]}"
    if failure.hint:
        from pccheckctl.output.documents import pasteable

        failure.hint = pasteable(failure.hint, chosen)
    report(failure, as_json="--json" in given)
    return failure.exit_code


def _named(given: list[str]) -> str | None:
    """The command, unless help is wanted: the first word that is neither a flag nor the value of
    one. Raises UsageError for an unknown command."""
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
            raise _unknown(word, options)
    return None


def _unknown(word: str, options: Sequence[str]) -> UsageError:
    """`options` stand before the word, which may be the value of a misspelt one."""
    what, meant = f"command {word!r}", did_you_mean([word], [one.name for one in COMMANDS])
    for option in options:
        if "=" not in option and (likely := did_you_mean([option], list(_WITH_VALUE))):
            what, meant = f"option {option}", likely
    return UsageError(f"there is no {what}", hint=f"{meant}see: pccheckctl --help")


def report(error: PccheckError, *, as_json: bool) -> None:
    """One error on stderr, or as a JSON document on stdout."""
    if as_json:
        import json

        names = ("code", "message", "hint", "retryable", "exit_code")
        fields = {name: getattr(error, name) for name in names}
        print(json.dumps({"schema": 1, "error": fields}, indent=2), flush=True)
        return
    from pccheckctl.output.render import safe

    print(f"pccheckctl: {safe(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {safe(error.hint)}", file=sys.stderr)


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """For all commands, or for one only, which takes a fraction of the time."""
    made = _Parser(
        prog="pccheckctl",
        description="Asks a running pccheckd, and reads the volumes that it wrote.",
        epilog=EXIT_CODES,
        formatter_class=_FORMATTER,
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
            formatter_class=_FORMATTER,
        )  # fmt: skip
        sub.set_defaults(command=command.name, module=command.module)
        _common(sub, defaults=False)
        command.arguments(sub)
    return made


def _path(text: str) -> str:
    """Refuses an empty path, such as an unset variable of a shell: it would mean the default."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path")
    return text


def _uid(text: str) -> int:
    import pwd  # most commands need none

    with contextlib.suppress(KeyError):
        return pwd.getpwnam(text).pw_uid
    if text.isdecimal() and len(text) <= len(str(UID_MAX)) and int(text) <= UID_MAX:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a user of this machine nor a uid")


def _common(to: argparse.ArgumentParser, *, defaults: bool) -> None:
    """Flags that may stand before or after the command."""
    default = None if defaults else argparse.SUPPRESS
    to.add_argument(
        "--socket", type=_path, metavar="PATH", default=default, help="the attach socket"
    )
    to.add_argument(
        "--storage", type=_path, metavar="DIR", default=default,
        help="a storage directory, to read or measure without a daemon",
    )  # fmt: skip
    to.add_argument("--uid", type=_uid, default=default,
                    help="whose jobs, by number or user name (for root)")  # fmt: skip
    to.add_argument("--json", action="store_true", default=False if defaults else default,
                    help="a JSON document on stdout")  # fmt: skip
