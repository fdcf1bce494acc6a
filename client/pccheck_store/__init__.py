"""Reads checkpoints from a storage directory or through its daemon, without torch. Used by the
command line and by `pccheck.Reader`."""

VERSION = "0.1.0"
