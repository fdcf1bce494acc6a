"""`pccheckd`: flags in, exit code out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pccheck_wire.errors import PccheckError

from .base import logs
from .config import coordinator, metrics_place
from .config import sources as config
from .config.options import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after an orderly stop, 2 for a wrong flag or value, else the error's exit code."""
    flags = config.parser().parse_args(arguments)
    if flags.help_config:
        from .config import text as config_text

        print(config_text.file_text(), end="")
        return 0
    sources = config.Sources(vars(flags))
    try:
        chosen = sources.load()
        if chosen.metrics:
            metrics_place.require(chosen.metrics)
        if flags.check_config:
            return _checked(chosen, as_json=flags.json)
        if chosen.coordinator_credentials:
            coordinator.check(
                coordinator.parse(chosen.coordinator), Path(chosen.coordinator_credentials)
            )
        logs.set_up(chosen.log_format, chosen.log_level)
        for warning in (*config.unknown_variables(os.environ), *config.warnings(chosen)):
            logs.LOG.warning("%s", warning)
        from .storage import lock as storage

        storage.check(chosen, make=True)
        from . import lifecycle

        return lifecycle.run(chosen, sources)
    except PccheckError as error:
        if flags.check_config and flags.json:
            document = {"code": error.code, "message": error.message, "hint": error.hint}
            warnings = config.unknown_variables(os.environ)
            print(json.dumps({"schema": 1, "error": document, "warnings": warnings}))
        print(f"pccheckd: {error}", file=sys.stderr)
        return error.exit_code


def _checked(chosen: Config, *, as_json: bool) -> int:
    """Prints the values. The storage directory may be one of another machine: a problem with it
    here is a warning, and not an error of the configuration."""
    from .config import text as config_text
    from .storage import lock as storage

    if as_json:
        print(json.dumps(config_text.document(chosen, "files"), indent=2))
        return 0
    file = chosen.file or f"none ({config.DEFAULT_FILE} does not exist)"
    print(f"pccheckd: the configuration is valid; file: {file}")
    print(config_text.effective(chosen))
    for warning in (*config.unknown_variables(os.environ), *config.warnings(chosen)):
        print(f"pccheckd: warning: {warning}", file=sys.stderr)
    try:
        if chosen.storage.exists() or not chosen.storage.parent.is_dir():  # else it is created
            storage.check(chosen)
    except PccheckError as error:
        print(
            f"pccheckd: warning: pccheckd would not start on this machine: {error}", file=sys.stderr
        )
    return 0
