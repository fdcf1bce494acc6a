"""Of jobs on several nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon import Daemon

if TYPE_CHECKING:
    from tests.support.torchstore import TorchStore


@pytest.fixture
def store() -> Iterator[TorchStore]:
    """The torch store of a job."""
    from tests.support.torchstore import TorchStore

    with TorchStore() as server:
        yield server


@pytest.fixture
def nodes(start_daemon: Callable[..., Daemon]) -> list[Daemon]:
    """The daemons of two nodes."""
    return [start_daemon(), start_daemon()]
