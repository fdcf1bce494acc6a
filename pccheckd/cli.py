"""`pccheckd`: flags in, exit code out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pccheck_wire.errors import PccheckError

from . import VERSION, config, logs


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after an orderly stop, 2 for a wrong flag or value, else the error's exit code."""
    flags = config.parser().parse_args(arguments)
    if flags.version:
        print(f"pccheckd {VERSION}")
        return 0
    try:
        chosen = config.load(vars(flags))
        logs.set_up(chosen.log_format)
        from . import storage  # the rest is imported once the values are right

        storage.check(chosen)
        if flags.check_config:
            print(f"pccheckd: the configuration is good: {config.describe(chosen)}")
            return 0
        from . import lifecycle

        return lifecycle.run(chosen)
    except PccheckError as error:
        print(f"pccheckd: {error}", file=sys.stderr)
        return error.exit_code
