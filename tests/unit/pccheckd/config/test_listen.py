"""--listen: what it takes, and which addresses that are now."""

from __future__ import annotations

import pytest

from pccheck_wire.errors import UsageError
from pccheckd.config import listen
from pccheckd.config.listen import ListenPlace


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("eth0", [("eth0", 0)]),
        ("10.0.0.1", [("10.0.0.1", 0)]),
        ("10.0.0.1:7788", [("10.0.0.1", 7788)]),
        ("eth0:7788, ib0", [("eth0", 7788), ("ib0", 0)]),
        ("fd00::1", [("fd00::1", 0)]),
        ("[fd00::1]:7788", [("fd00::1", 7788)]),
    ],
)
def test_places_are_addresses_or_interfaces(text: str, places: list[tuple[str, int]]) -> None:
    assert listen.parse(text) == tuple(ListenPlace(*one) for one in places)


@pytest.mark.parametrize("text", ["eth0:", "a b", "10.0.0.1:70000", ":7788", "eth0,,", "[::1"])
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        listen.parse(text)
    assert "10.0.0.1:7788" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["0.0.0.0", "0.0.0.0:7788", "::", "[::]:7788"])
def test_an_address_that_nobody_could_connect_to_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address that another node could connect to"):
        listen.parse(text)


def test_an_interface_is_looked_for_now() -> None:
    assert "127.0.0.1" in listen.addresses(ListenPlace("lo", 0))
    with pytest.raises(UsageError, match=r"not an interface with an address; there are .*lo"):
        listen.addresses(ListenPlace("nope0", 0))
