"""Row 8 of the fault plan in small; `make fuzz` runs all of it."""

from __future__ import annotations

from tests.integration import fuzz_campaign


def test_mutated_messages_are_decoded_or_refused() -> None:
    seen = fuzz_campaign.decode(30_000, seed=11)
    print(dict(seen))
    assert seen["decoded"] > 1000 and seen["refused"] > 10_000


def test_mutated_packets_hurt_nobody() -> None:
    seen = fuzz_campaign.packets(1000, seed=11)
    print(dict(seen))
    assert seen["saved"] == 5 and seen["requests"] > 500 and seen["hellos"] > 100
