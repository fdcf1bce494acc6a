"""`pccheckctl completion`: the script with which a shell completes the words of `pccheckctl`, made
by shtab from the arguments themselves.

source <(pccheckctl completion bash)      # in ~/.bashrc
"""

from __future__ import annotations

import argparse

from pccheck_wire.errors import PccheckError
from pccheckctl import cli
from pccheckctl.output.documents import write

#: What a value is, by the name that --help gives it; everything else completes to nothing.
_FILES, _DIRECTORIES = ("FILE", "PATH"), ("DIR",)


def run(arguments: argparse.Namespace) -> int:
    write(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Raises PccheckError where shtab is not installed."""
    try:
        import shtab
    except ImportError as error:
        raise PccheckError(
            f"cannot make the completion script: {error}", hint="pip install shtab"
        ) from error
    parser = cli.parser()
    for action in cli.actions(parser):
        kind = (
            shtab.FILE if action.metavar in _FILES
            else shtab.DIRECTORY if action.metavar in _DIRECTORIES
            else None
        )  # fmt: skip
        if kind is not None:
            action.complete = kind  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))
