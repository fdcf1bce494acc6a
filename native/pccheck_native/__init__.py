"""The native core of PCcheck and what can be said about a storage directory without a daemon."""

from pccheck_native._core import *  # noqa: F403 -- _core.pyi is the list
