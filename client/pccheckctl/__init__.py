"""The command line: what a daemon does, and what the volumes hold, with or without a daemon."""

VERSION = "0.1.0"
