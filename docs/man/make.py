"""Writes the man pages from the programs' own arguments.

python docs/man/make.py
"""

from __future__ import annotations

from pathlib import Path

import pccheckctl
from pccheckctl import cli, manual
from pccheckd.config import sources as config
from pccheckd.config import text as config_text
from pccheckd.config.options import OPTIONS

HERE = Path(__file__).parent

_ENVIRONMENT = """\
.TP
\\fBPCCHECK_SOCKET\\fR
The attach socket, in the place of \\fB\\-\\-socket\\fR.
.TP
\\fBPCCHECK_STORAGE\\fR
The storage directory that is read when no daemon answers."""

_EXAMPLES = """\
.nf
pccheckctl doctor \\-\\-storage /mnt/ssd/checkpoints
pccheckctl tune \\-\\-checkpoint 40GiB \\-\\-step\\-time 350ms \\-\\-storage /mnt/ssd/checkpoints
pccheckctl status \\-\\-watch
pccheckctl wait gpt \\-\\-newest \\-\\-for=durable \\-\\-timeout 10min
pccheckctl \\-\\-storage /mnt/moved recover gpt \\-\\-output state.safetensors
pccheckctl export gpt \\-\\-step 4000 \\-\\-only model \\-\\-output model.safetensors
pccheckctl drop gpt \\-\\-dry\\-run
.fi"""

_SIGNALS = """\
.TP
SIGTERM, SIGINT
Stop: nobody may connect any more, what is copied becomes durable (see
\\fB\\-\\-drain\\-limit\\fR), then the end. The second one ends at once.
.TP
SIGHUP
Read the configuration again, and take over what can change while running."""

_DAEMON_EXIT = """\
0 after a stop with all that was copied durable, 1 when something of it was not, 2 for a wrong flag
or value, 10 when the storage directory cannot hold volumes, 11 when another pccheckd serves it."""


def pages() -> dict[str, str]:
    """File names and what belongs into them."""
    control = manual.Page(
        "pccheckctl", 1, "asks a checkpoint daemon, reads and cares for its volumes",
        pccheckctl.VERSION,
        (
            ("EXIT STATUS", manual.exit_codes(cli.EXIT_CODES)),
            ("ENVIRONMENT", _ENVIRONMENT),
            ("EXAMPLES", _EXAMPLES),
            ("SEE ALSO", ".BR pccheckd (8)"),
        ),
    )  # fmt: skip
    daemon = manual.Page(
        "pccheckd", 8, "per-node checkpoint service for PyTorch training", pccheckctl.VERSION,
        (
            ("SIGNALS", _SIGNALS),
            ("EXIT STATUS", _DAEMON_EXIT),
            ("SEE ALSO", ".BR pccheckctl (1)"),
        ),
    )  # fmt: skip
    return {
        "pccheckctl.1": manual.page(cli.parser(), control),
        "pccheckd.8": manual.page(
            config.parser(), daemon, told=config_text.help_text("man"),
            elsewhere=frozenset(option.flag for option in OPTIONS),
        ),
    }  # fmt: skip


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text)
