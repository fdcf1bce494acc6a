"""Unchanged tensors are written once: adapters on a frozen base, through the real daemon, to
restore, export, verify and damage; with two ranks; and where slots are few."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_native import catalog
from pccheck_store.remote import DaemonSource
from pccheck_wire.errors import RefusedError
from pccheck_wire.messages import CheckpointState, Opened, Pin, Restored
from tests.support.ctl import Ctl, written
from tests.support.daemon import Daemon, Start
from tests.support.loratrainer import ADAPTERS, CHANGED, FROZEN, LAYERS, LoraTrainer, frozen
from tests.support.rank import Rank, payload_of
from tests.support.volumes import bases, damage

GEOMETRY = ("--block-bytes", "16KiB", "--chunk", "256KiB", "--dram", "128MiB")


@contextmanager
def trainer(daemon: Daemon) -> Iterator[Any]:
    with LoraTrainer() as one:
        one.open([], socket=str(daemon.socket), job="lora")
        yield one


@pytest.mark.timeout(1800)
def test_adapters_on_a_frozen_base(start_daemon: Start, ctl: Ctl, tmp_path: Path) -> None:
    daemon = start_daemon(*GEOMETRY)
    with trainer(daemon) as one:
        for step in range(1, 6):
            one.train(step)
        sizes = {step: sum(some) for step, some in written(ctl, daemon.socket).items()}
        assert sizes[1] > FROZEN
        assert all(2 * ADAPTERS < sizes[step] <= 1.05 * CHANGED for step in range(2, 6)), sizes
        assert bases(daemon.storage) == {(0, 5): 1, (0, 4): 1}
        wanted = one.digest()
        listed(ctl(None, "list", "--socket", daemon.socket).out)
        online = DaemonSource(str(daemon.socket), daemon.storage).held(job="lora", sizes=True)
        offline = catalog.scan(daemon.storage, sizes=True)
        places = [
            [(c.id.step, c.base, c.own_bytes) for c in f.checkpoints] for f in (online, offline)
        ]
        assert places[0] == places[1]
        daemon.kill()
        one.kill()

    listed(ctl(daemon.storage, "list").out)
    newest, before, base = ctl(daemon.storage, "list", "--json").json["checkpoints"]
    assert 2 * ADAPTERS < newest["own_bytes"] < CHANGED and newest["base_step"] == 1
    assert before["own_bytes"] == newest["own_bytes"]
    assert base["own_bytes"] == base["payload_bytes"] and base["base_step"] is None
    shown = ctl(daemon.storage, "show", "lora").out
    assert "1.00 MiB of it was written; the rest lies in the checkpoint of step 1" in shown
    # Without a daemon: checked, exported, and what is in the base alone is of the export, too.
    assert ctl(daemon.storage, "verify").code == 0
    exported = tmp_path / "lora.pt"
    assert ctl(daemon.storage, "export", "lora", "-o", exported).code == 0
    model = torch.load(exported)["model"]
    assert torch.equal(model["base3"], frozen(3))

    daemon.start()
    with trainer(daemon) as one:
        assert one.resume() == 5
        assert one.digest() == wanted
        one.train(6)
        assert written(ctl, daemon.socket)[6][0] <= 1.05 * CHANGED  # of the run before
        one.merge()
        one.train(7)
        (size,) = written(ctl, daemon.socket)[7]
        assert FROZEN // LAYERS * 2 < size < FROZEN // LAYERS * 3  # what has changed, only
        wanted = one.digest()
        one.close()
    with trainer(daemon) as one:
        assert one.resume() == 7
        assert one.digest() == wanted
        one.close()
    daemon.stop()

    damage(daemon.storage, 1, at=FROZEN // 2 + 100)
    ran = ctl(daemon.storage, "verify", "--json")
    assert ran.code == 14
    found = {item["step"] for item in ran.json["checkpoints"] if item["result"] == "damaged"}
    assert found == {1, 6, 7}


def listed(table: str) -> None:
    """Size, written bytes, and the checkpoint with the other bytes."""
    headings, *lines = table.splitlines()
    assert headings.split()[5:8] == ["size", "written", "base"]
    found = [line.split()[-6:-1] for line in lines]
    assert found == [["MiB", "1.00", "MiB", "1", "1"]] * 2 + [["MiB", "25.0", "MiB", "-", "1"]]


FEW = 200_000  # frozen bytes of a payload of the ranks below
SIZE = 300_000


def payload(step: int, rank: int) -> bytes:
    return payload_of(1000 + rank, FEW) + payload_of(step * 10 + rank, SIZE - FEW)


def save_all(ranks: list[Rank], steps: range) -> None:
    for step in steps:
        asked = [(one, one.begin(step, payload(step, one.rank), frozen=FEW)) for one in ranks]
        for one, snapshot in asked:
            one.wait(snapshot)


def read_all(daemon: Daemon, launch: str, step: int) -> None:
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Rank(daemon.socket, rank=rank, world_size=2, launch=launch))
            for rank in range(2)
        ]
        for one in ranks:
            found = one.open()
            assert isinstance(found, Opened) and found.step == step
            assert one.load(found) == (0, payload(step, one.rank))
        for one in ranks:
            one.ask(Restored(step))


def test_two_ranks(start_daemon: Start) -> None:
    daemon = start_daemon("--block-bytes", "4KiB")
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Rank(daemon.socket, rank=rank, world_size=2, launch="a"))
            for rank in range(2)
        ]
        for one in ranks:
            one.register(SIZE)
        save_all(ranks, range(1, 9))
        with_base = [one for one in catalog.scan(daemon.storage).checkpoints if one.base]
        assert {one.id.rank for one in with_base} == {0, 1}
        daemon.kill()
    daemon.start()
    read_all(daemon, "b", 8)


@pytest.mark.parametrize("slots", [4, 6])
def test_a_pin_takes_a_slot_for_the_base_as_well(start_daemon: Start, slots: int) -> None:
    daemon = start_daemon("--slots", str(slots), "--block-bytes", "4KiB")
    with Rank(daemon.socket) as one:
        one.register(SIZE)
        save_all([one], range(1, 5))
        if slots == 4:
            with pytest.raises(RefusedError, match="1 for their unchanged tensors"):
                one.ask(Pin(4))
        else:
            one.ask(Pin(4))
        save_all([one], range(5, 13))
        found = {item.id.step: item for item in catalog.scan(daemon.storage).checkpoints}
        assert 12 in found and (4 in found) == (slots == 6)
        if slots == 6:
            assert found[4].base == found[1].id.sequence


@pytest.mark.parametrize(("slots", "keep"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2)])
def test_few_slots(start_daemon: Start, slots: int, keep: int) -> None:
    """Every setting can go on for ever; also for a run that has not restored, if it could without
    bases."""
    daemon = start_daemon("--slots", str(slots), "--keep", str(keep), "--block-bytes", "4KiB")
    with Rank(daemon.socket) as one:
        one.register(SIZE)
        save_all([one], range(1, 9))
        used = [found for found in catalog.scan(daemon.storage).checkpoints if found.base]
        assert bool(used) == (slots >= 4)
    if slots - keep < 2:
        return
    with Rank(daemon.socket) as one:
        one.register(SIZE)
        for step in range(11, 19):
            snapshot = one.begin(step, payload(step, 0), frozen=FEW)
            assert one.wait(snapshot).outcome != CheckpointState.FAILED, one.describe(snapshot)
        found = catalog.scan(daemon.storage).checkpoints
        assert {8, 18} <= {item.id.step for item in found}
