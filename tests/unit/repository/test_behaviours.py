"""What PCcheck believes of the driver holds on the stand-in, and a stand-in that lies is caught.

On a card the same beliefs are tried by `python tests/standin/behaviours.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.standin import behaviours
from tests.support import standin

SOURCE = Path(behaviours.__file__)
#: Lie -> a belief that it contradicts.
NOTICED = {
    "batch": "a_batch_is_copied_in_its_streams_order",
    "buffer": "numbers_of_allocations_never_come_back",
    "dead": "a_copy_outlives_its_owner",
    "descriptor": "a_descriptor_gives_memory_to_another_process",
    "event": "an_event_is_not_done_before_its_stream_is",
    "event-wait": "a_stream_waits_for_an_event",
    "freed": "a_handle_of_freed_memory_does_not_open",
    "hole": "copies_are_whole",
    "import": "a_descriptor_gives_memory_to_another_process",
    "late": "a_copy_has_arrived_when_its_event_is_done",
    "other": "a_handle_opens_the_memory_it_was_made_of",
    "reopened": "a_new_handle_opens_new_memory",
    "restored": "a_checkpointed_process_holds_no_memory",
    "shifted": "a_handle_opens_the_memory_it_was_made_of",
    "short": "copies_are_whole",
    "stale": "opened_memory_shows_what_its_owner_writes",
    "sync": "a_stream_is_busy_until_its_work_is_done",
    "unlocked": "a_locked_process_waits_in_the_driver",
    "word-early": "a_word_is_written_after_what_is_before_it",
    "word-overtakes": "a_word_is_written_after_what_is_before_it",
    "word-wait": "a_stream_waits_for_a_word",
    "word-wait-one": "a_stream_waits_for_a_word",
}
LONG_S = 20  #: a lie shows much earlier, and this wait ends when it does


@pytest.fixture
def directory() -> Iterator[Path]:
    with standin.device_memory() as made:
        yield made


def beliefs(directory: Path, *options: str, lie: str = "") -> dict[str, dict[str, Any]]:
    """What the program finds out; the bytes of a dead process are kept, as the card keeps them."""
    result = directory / "result.json"
    command = [sys.executable, "-I", "-S", str(SOURCE), "--json", str(result), *options]
    gpus = standin.environment(directory, dead="keep", lie=lie, version=behaviours.MAP_VERSION)
    done = subprocess.run(command, env=os.environ | gpus, stdout=subprocess.PIPE, text=True)
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())["beliefs"]
    assert done.returncode == any(one["found"] == "FALSE" for one in found.values())
    assert len(done.stdout.splitlines()) == len(found)
    return found


def test_every_belief_holds_on_the_stand_in(directory: Path) -> None:
    found = beliefs(directory, "--limit-s", "250")
    assert len(found) == len(behaviours.BELIEFS) > 40
    wrong = {name: one["why"] for name, one in found.items() if one["found"] != "holds"}
    assert not wrong or (set(wrong.values()) == {"not root"} and os.geteuid() != 0), wrong


def test_every_lie_is_noticed(directory: Path) -> None:
    made = re.findall(r'\[LIE_\w+\] = "([a-z-]+)"', (SOURCE.parent / "lie.c").read_text())
    assert set(made) == NOTICED.keys()
    for lie, belief in NOTICED.items():
        found = beliefs(directory, "--only", belief, "--held-s", str(LONG_S), lie=lie)
        assert found[belief]["found"] == "FALSE", lie
