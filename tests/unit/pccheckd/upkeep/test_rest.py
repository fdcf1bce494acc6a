"""What a rank without a trainer lets go, and what the next trainer gets back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pccheckd.tenancy.binding import BindingState
from pccheckd.tenancy.outcomes import Chronicle
from pccheckd.tenancy.tenant import Tenant
from pccheckd.tenancy.volumes import Key
from tests.support.jobs import CONFIG

pytestmark = pytest.mark.anyio


class Port:
    """A channel whose volumes are bound, and perhaps busy with a load."""

    def __init__(self, *bound: str, busy: str = "") -> None:
        self.chunk_bytes = CONFIG.chunk_bytes
        self.bound, self.busy = set(bound), busy
        self.native = SimpleNamespace(bind=self.bound.add)

    async def unbind(self, volume: str, _limit_s: float) -> bool:
        if volume != self.busy:
            self.bound.discard(volume)
        return volume != self.busy


async def _call(_uid: int, function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def tenant(port: Port) -> Any:
    made: Any = Tenant(
        Key(7, "job", 0),
        SimpleNamespace(config=CONFIG, call=_call),
        None,
        Chronicle(),  # type: ignore[arg-type]
    )
    old, new = (
        SimpleNamespace(volume=name, path=name, info=SimpleNamespace(block_bytes=4096))
        for name in ("old", "new")
    )
    made.binding.volumes = SimpleNamespace(open=[old, new], current=new)
    made.binding.port = port
    made.binding.state = BindingState.BOUND
    return made


@pytest.mark.parametrize("busy", ["", "old", "new"])
async def test_a_trainer_after_a_rest_has_a_volume(busy: str) -> None:
    """Also when a reader loads from an outgrown volume meanwhile."""
    port = Port("new", busy=busy)
    rests = tenant(port)
    await rests.rest()
    assert port.bound == ({"new"} if busy == "new" else set())
    await rests.binding.open_port(in_use=False)
    assert port.bound == {"new"}


async def test_what_was_busy_ends_at_the_next_look() -> None:
    port = Port("old", "new", busy="old")
    rests = tenant(port)
    await rests.rest()
    assert port.bound == {"old"}
    port.busy = ""
    await rests.rest()
    assert port.bound == set()
