"""The command line: what a daemon does, and what the volumes hold, with or without a daemon."""

from pccheck_store import VERSION as VERSION
