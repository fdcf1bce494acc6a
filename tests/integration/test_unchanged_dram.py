"""Unchanged tensors are not copied into DRAM either: what a checkpoint of adapters on a frozen base
copies, and how it survives failures of daemon, trainer, base or disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from pccheck_native import catalog
from tests.support.ctl import Ctl, written
from tests.support.daemon import Daemon, Start
from tests.support.loratrainer import CHANGED, FROZEN, LAYERS, LoraTrainer
from tests.support.manager import ServedDaemon
from tests.support.volumes import bases, damage
from tests.support.waiting import until

CHUNK = 256 << 10
GEOMETRY = ("--block-bytes", "16KiB", "--chunk", "256KiB")
ROOM = ("--dram", "128MiB")
LAYER = FROZEN // LAYERS

pytestmark = pytest.mark.timeout(1800)


@contextmanager
def trainer(daemon: Daemon) -> Iterator[Any]:
    with LoraTrainer() as one:
        one.open([], socket=str(daemon.socket), job="lora")
        yield one


def copied(ctl: Ctl, daemon: Daemon) -> dict[int, int]:
    """By step, the bytes that the newest session's checkpoints copied into DRAM."""
    return {step: sizes[-1] for step, sizes in written(ctl, daemon.socket, "copied_bytes").items()}


def resumed(daemon: Daemon, step: int, digest: str) -> None:
    with trainer(daemon) as one:
        assert one.resume() == step
        assert one.digest() == digest
        one.close()


def test_only_what_changed_is_copied(start_daemon: Start, ctl: Ctl) -> None:
    daemon = start_daemon(*GEOMETRY, *ROOM)
    with trainer(daemon) as one:
        for step in range(1, 6):
            one.train(step)
        sizes = copied(ctl, daemon)
        assert sizes[1] > FROZEN
        assert all(0 < sizes[step] <= 1.05 * CHANGED for step in range(2, 6)), sizes
        assert bases(daemon.storage) == {(0, 5): 1, (0, 4): 1}
        digest = one.digest()
        one.kill()
    with trainer(daemon) as one:  # from DRAM
        assert one.resume() == 5
        assert one.digest() == digest
        one.train(6)  # a session that has never seen the base's checksums
        assert copied(ctl, daemon)[6] <= 1.05 * CHANGED
        digest = one.digest()
        one.kill()
    daemon.kill()
    daemon.start()
    resumed(daemon, 6, digest)  # from the disk
    with trainer(daemon) as one:
        assert one.resume() == 6
        one.merge()  # through `.data`: only the checksums notice
        one.train(7)
        size = copied(ctl, daemon)[7]
        assert 2 * LAYER < size <= 2 * LAYER + 1.05 * CHANGED
        digest = one.digest()
        one.kill()
    resumed(daemon, 7, digest)


def test_a_pool_smaller_than_what_is_frozen(start_daemon: Start, ctl: Ctl) -> None:
    daemon = start_daemon(*GEOMETRY, "--dram", "4MiB")
    with trainer(daemon) as one:
        for step in range(1, 4):
            one.train(step)
        assert copied(ctl, daemon)[3] <= 1.05 * CHANGED
        one.merge()
        one.train(4)
        digest = one.digest()
        one.kill()
    resumed(daemon, 4, digest)
    daemon.kill()
    daemon.start()
    resumed(daemon, 4, digest)


def damaged(daemon: Daemon) -> set[int]:
    """The steps of the checkpoints that are flagged as damaged in the volume."""
    return {one.id.step for one in catalog.scan(daemon.storage).checkpoints if one.is_damaged}


@pytest.mark.parametrize("shim", ["", "kill:record-a:1"])
def test_the_daemon_is_killed(stack: ExitStack, ctl: Ctl, shim: str) -> None:
    """A copied checkpoint has no chunks of frozen tensors; the next daemon finds these in the
    base."""
    slow = ("--max-bandwidth", "16MiB") if not shim else ()
    daemon = stack.enter_context(ServedDaemon(*GEOMETRY, *ROOM, *slow, shim=shim)).start()
    with trainer(daemon) as one:
        one.train(1)
        one.train(2)
        daemon.armed.touch()
        handle = one.save(3)
        assert one.wait_copied(handle) in ("copied", "writing", "failed")
        digest = one.digest()
        if shim:
            daemon.wait_end()
        else:
            daemon.kill()
        one.kill()
    daemon.shim = ""
    daemon.start()
    resumed(daemon, 3, digest)
    found = {one.id.step: one for one in catalog.scan(daemon.storage, sizes=True).checkpoints}
    assert found[3].base == found[1].id.sequence and found[3].own_bytes <= CHANGED


def test_a_damaged_base(start_daemon: Start, ctl: Ctl) -> None:
    """The damage is found while the job runs: the next checkpoint is whole, and does not refer to
    the base."""
    daemon = start_daemon(*GEOMETRY, *ROOM, "--scrub-interval", "1", "--scrub-rate", "1GiB")
    with trainer(daemon) as one:
        for step in range(1, 4):
            one.train(step)
        damage(daemon.storage, 1, at=FROZEN // 2 + 100)
        until(lambda: damaged(daemon) >= {1, 3})
        one.train(4)
        assert copied(ctl, daemon)[4] > FROZEN
        one.train(5)
        assert copied(ctl, daemon)[5] <= 1.05 * CHANGED
        assert bases(daemon.storage)[0, 5] == 4
        digest = one.digest()
        one.kill()
    daemon.kill()
    daemon.start()
    resumed(daemon, 5, digest)
