"""Restart without loss: what a daemon had copied before it was killed becomes durable after the
service manager has started it again, whether its trainer lives or not."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pccheck_native import LEVEL_MEMORY, catalog
from pccheck_wire.messages import CheckpointState
from tests.conftest import SMALL
from tests.support.daemon import Start
from tests.support.manager import ServedDaemon
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Connect, Trainer
from tests.support.waiting import until

from .restart_campaign import run

Serve = Callable[..., ServedDaemon]

MIB = 1 << 18
SLOW = ("--max-bandwidth", "4MiB")
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    def start(*flags: str, **options: object) -> ServedDaemon:
        return stack.enter_context(ServedDaemon(*SMALL, *flags, **options)).start()  # type: ignore[arg-type]

    return start


def test_copied_survives_the_daemon(serve: Serve, start_trainer: Connect) -> None:
    """The trainer has ended before: only the descriptor store has the bytes."""
    daemon = serve(*SLOW)
    trainer = _copied(start_trainer, daemon, 6)
    daemon.kill()
    trainer.kill()
    assert any("-segment-" in name for name in daemon.manager.names())
    daemon.start()

    _recovers(start_trainer(daemon, [6 * MIB]), 1)


def test_a_running_trainer_goes_on(serve: Serve, start_trainer: Connect) -> None:
    """The trainer reconnects at a later checkpoint; the old checkpoint is durable, and the newer
    one wins."""
    daemon = serve(*SLOW)
    trainer = _copied(start_trainer, daemon, 6)
    daemon.kill()
    daemon.start()
    durable = trainer.wait_durable(trainer.connects_again())
    assert durable in ("durable", "global", "superseded")
    newest = trainer.step(0)
    trainer.kill()
    steps = _durable(daemon)
    assert {1, newest} <= steps.keys() and steps[newest] > steps[1], steps
    _recovers(start_trainer(daemon, [6 * MIB]), newest)


def test_what_was_reported_as_failed_is_named_once_it_is_durable(
    serve: Serve, start_trainer: Connect
) -> None:
    """The handle stays failed, and its reason says that the checkpoint is durable after all."""
    daemon = serve(*SLOW)
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    handle = trainer.checkpoint()
    assert trainer.wait_copied(handle) in ("copied", "writing")
    daemon.kill()
    assert trainer.ended(handle) == "failed"
    assert f"pccheckctl --socket {daemon.socket} list" in trainer.reason(handle)  # not known yet
    daemon.start()

    def is_named() -> bool:
        trainer.step()
        trainer.ended(trainer.checkpoint())
        return "it is durable, as sequence 1" in trainer.reason(handle)

    until(is_named, lambda: trainer.reason(handle))
    assert trainer.state(handle) == "failed"


def test_what_was_published_as_the_daemon_died_is_named_when_it_is_restored(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon(shim="kill:record-b:1")  # replica A of the record is durable by then
    trainer = start_trainer(daemon)
    trainer.save()
    daemon.armed.touch()
    trainer.step()
    handle = trainer.checkpoint()
    assert trainer.ended(handle) == "failed"
    daemon.wait_end()
    daemon.shim = ""
    daemon.start()
    assert trainer.restore()["step"] == 2
    assert "it is durable, as sequence 2" in trainer.reason(handle)


def test_several_in_flight_keep_their_order(serve: Serve, start_trainer: Connect) -> None:
    """P3: two checkpoints are copied when the daemon dies; the newest wins, in any order of
    writes."""
    daemon = serve("--slots", "4", "--keep", "2", "--max-bandwidth", "256KiB")
    trainer = start_trainer(daemon, [4 * MIB])
    for _ in range(2):
        trainer.step()
        assert trainer.wait_copied(trainer.checkpoint()) in ("copied", "writing")
    daemon.kill()
    trainer.kill()
    daemon.start("--max-bandwidth", "1GiB")
    assert _kept(daemon)["adopted_checkpoints"] == 2
    _recovers(start_trainer(daemon, [4 * MIB]), 2)


def test_memory_smaller_than_a_checkpoint(serve: Serve, start_trainer: Connect) -> None:
    """A checkpoint larger than the DRAM: most chunks were written and used again, and their bytes
    are only in the slot."""
    daemon = serve("--dram", "4MiB", "--max-bandwidth", "12MiB")
    trainer = _copied(start_trainer, daemon, 8)
    daemon.kill()
    trainer.kill()
    daemon.start()
    _recovers(start_trainer(daemon, [8 * MIB]), 1)


def test_killed_again_and_again(serve: Serve, start_trainer: Connect) -> None:
    daemon = serve("--max-bandwidth", "256KiB")  # none of them gets to the end
    trainer = _copied(start_trainer, daemon, 6)
    trainer.kill()
    for bandwidth in ("256KiB", "256KiB", "1GiB"):
        daemon.kill()
        daemon.start("--max-bandwidth", bandwidth)
        assert _kept(daemon)["adopted_checkpoints"] == 1
    _recovers(start_trainer(daemon, [6 * MIB]), 1)


def test_what_was_not_copied_is_dropped(serve: Serve, start_trainer: Connect) -> None:
    daemon = serve("--dram", "4MiB", *SLOW)
    trainer = start_trainer(daemon, [8 * MIB])
    trainer.save()
    trainer.step()
    assert trainer.watch(trainer.checkpoint(), "copying") == "copying"
    daemon.kill()
    trainer.kill()
    daemon.start()
    assert _kept(daemon)["adopted_checkpoints"] == 0
    _recovers(start_trainer(daemon, [8 * MIB]), 1)


def test_a_drained_daemon_leaves_nothing(serve: Serve, start_trainer: Connect) -> None:
    daemon = serve(*SLOW)
    _copied(start_trainer, daemon, 6)
    assert len(daemon.manager.names()) >= 2
    assert daemon.stop() == 0
    assert daemon.manager.names() == []


def test_a_daemon_that_goes_on_drains_too(serve: Serve, start_trainer: Connect) -> None:
    daemon = serve(*SLOW)
    trainer = _copied(start_trainer, daemon, 6)
    daemon.kill()
    trainer.kill()
    daemon.start()
    assert daemon.stop() == 0
    assert daemon.manager.names() == []
    assert _durable(daemon).keys() == {1}


def test_a_chunk_that_was_changed_is_found(serve: Serve, start_trainer: Connect) -> None:
    """A trainer can always write to its segments; a change after `copied` fails the checkpoint."""
    daemon = serve("--max-bandwidth", "4MiB")
    trainer = start_trainer(daemon, [4 * MIB])
    trainer.save()
    trainer.step()
    trainer.wait_copied(trainer.checkpoint())
    daemon.kill()
    assert trainer.evaluate(_scribble) > 0
    trainer.kill()
    daemon.start()
    _recovers(start_trainer(daemon, [4 * MIB]), 1)
    states = {one["step"]: one for rank in daemon.status()["ranks"] for one in rank["checkpoints"]}
    assert states[2]["state"] == "failed" and "changed" in states[2]["reason"], states


def test_a_smaller_budget(serve: Serve, start_trainer: Connect) -> None:
    """Checkpoints that do not fit are dropped and reported, the others continue. The newest comes
    first."""
    daemon = serve("--dram", "64MiB", "--max-bandwidth", "4MiB")
    trainer = start_trainer(daemon, [8 * MIB])
    trainer.save()
    trainer.step()
    trainer.wait_copied(trainer.checkpoint())
    daemon.kill()
    trainer.kill()
    daemon.start("--dram", "2MiB")
    kept = _kept(daemon)
    assert kept["adopted_bytes"] <= 2 << 20
    assert kept["adopted_checkpoints"] == 0 and "step 2" in kept["dropped"][0], kept
    _recovers(start_trainer(daemon, [8 * MIB]), 1)


def test_smaller_chunks(serve: Serve, start_trainer: Connect) -> None:
    """--dram holds two of the new chunks, and none of those in which a checkpoint was copied.
    Before, the job was refused until the daemon was started once more."""
    daemon = serve("--chunk", "16MiB", shim="kill:flush:1")
    trainer = start_trainer(daemon, [6 * MIB])
    trainer.step()
    daemon.armed.touch()
    trainer.checkpoint()
    daemon.wait_end()
    daemon.shim = ""
    daemon.start("--chunk", "256KiB", "--dram", "4MiB", "--max-bandwidth", "4MiB")
    assert _kept(daemon)["adopted_checkpoints"] == 1
    assert trainer.wait_durable(trainer.connects_again()) in ("durable", "global", "superseded")
    newest = trainer.step(0)
    trainer.kill()
    _recovers(start_trainer(daemon, [6 * MIB]), newest)


def test_descriptors_of_others_are_closed(serve: Serve, start_trainer: Connect) -> None:
    daemon = serve(*SLOW)
    trainer = _copied(start_trainer, daemon, 6)
    daemon.kill()
    trainer.kill()
    for name, fd in _garbage(daemon):
        daemon.manager.put(name, fd)
    genuine = {n for n in daemon.manager.names() if n.startswith("pccheck-") and "bad" not in n}
    daemon.start()
    assert _kept(daemon)["adopted_checkpoints"] == 1
    _recovers(start_trainer(daemon, [6 * MIB]), 1)
    left = set(daemon.manager.names())
    assert not any(n.endswith(("bad0", "00ff")) or "fifo" in n for n in left), left
    assert genuine & left


def test_a_full_store(serve: Serve, start_trainer: Connect) -> None:
    """With a full store everything works, but fewer checkpoints survive the daemon."""
    daemon = serve(store_max=1)
    trainer = start_trainer(daemon)
    trainer.save()
    assert _kept(daemon)["refused"] > 0
    daemon.kill()
    trainer.kill()
    daemon.start()
    again = start_trainer(daemon)
    assert again.restore()["step"] == 1


def test_the_volume_was_used_in_between(serve: Serve, start_trainer: Connect) -> None:
    """A daemon without the store has used the volume in between: its durable checkpoints are
    newer."""
    daemon = serve(*SLOW)
    trainer = _copied(start_trainer, daemon, 6)
    daemon.kill()
    trainer.kill()
    plain = daemon.without_store()
    other = start_trainer(plain, [6 * MIB])
    other.step(7)
    other.wait_durable(other.checkpoint())
    other.kill()
    assert plain.stop() == 0
    daemon.start()
    assert _durable(daemon).keys() == {7}
    again = start_trainer(daemon, [6 * MIB])
    assert again.restore()["step"] == 7


def _copied(start_trainer: Connect, daemon: ServedDaemon, size: int) -> Trainer:
    """A trainer of `size` MIB with a checkpoint that is copied, and most likely not written yet."""
    trainer = start_trainer(daemon, [size * MIB])
    trainer.step()
    assert trainer.wait_copied(trainer.checkpoint()) in ("copied", "writing")
    return trainer


def _recovers(trainer: Trainer, step: int) -> None:
    assert trainer.restored() == (step, "")


def _scribble(trainer: Any) -> int:
    """Writes into every mapped segment of this process; returns their number."""
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "pccheck-segment" not in line:
            continue
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        for at in range(low + 100, high, 65536):
            ctypes.memset(at, 0x5A, 8)
        count += 1
    return count


def _garbage(daemon: ServedDaemon) -> list[tuple[str, int]]:
    label = next(n for n in daemon.manager.names() if "-state-" in n).rsplit("-", 2)[0]
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 1 << 20)  # not sealed
    sparse = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(sparse, 1 << 20)
    fcntl.fcntl(sparse, fcntl.F_ADD_SEALS, SEALS)
    noise = os.memfd_create("noise", os.MFD_ALLOW_SEALING)
    os.write(noise, os.urandom(1 << 16))
    fcntl.fcntl(noise, fcntl.F_ADD_SEALS, SEALS)
    odd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    os.write(odd, bytes(12345))
    fcntl.fcntl(odd, fcntl.F_ADD_SEALS, SEALS)
    reader, writer = os.pipe()
    os.close(writer)
    return [
        (f"{label}-segment-000000000000bad0", loose),
        (f"{label}-segment-000000000001bad0", sparse),
        (f"{label}-segment-000000000002bad0", odd),
        (f"{label}-state-00000000000000ff", noise),
        ("pccheck-0000000000000000-state-00000000000000ff", os.open("/dev/null", os.O_RDONLY)),
        ("fifo", reader),
    ]


def _kept(daemon: ServedDaemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["kept"]
    return found


def _durable(daemon: ServedDaemon) -> dict[int, int]:
    """Step -> sequence of the checkpoints in the volumes."""
    return {one.id.step: one.id.sequence for one in catalog.scan(daemon.storage).checkpoints}


def test_what_becomes_durable_later_is_protected_too(serve: Serve, start_trainer: Connect) -> None:
    """P7: the next run connects and does not restore, while a new daemon is still writing the
    checkpoint of the previous run."""
    daemon = serve("--slots", "4", "--keep", "1", "--max-bandwidth", "4MiB")
    trainer = _copied(start_trainer, daemon, 4)
    daemon.kill()
    trainer.kill()
    daemon.start()
    other = start_trainer(daemon, [4 * MIB])
    for _ in range(3):
        other.step(10)
        other.wait_durable(other.checkpoint())
    assert 1 in _durable(daemon), "the checkpoint that nobody has read yet is gone"


@pytest.mark.long
def test_restarts_at_random() -> None:
    """A short run of the campaign; `python -m tests.integration.restart_campaign` is the long
    one."""
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = run(12, seed)
    assert not tally.violations, (seed, tally.violations)
    assert sum(tally.kills.values()) == 12
    assert tally.copied >= 2  # usually more than half; how many depends on the speed of the machine


def test_what_is_parked_survives_the_daemon(serve: Serve) -> None:
    """Nothing had written it: the next daemon does."""
    daemon = serve()
    data = payload_of(5, 3 * MIB)
    with Rank(daemon.socket) as rank:
        rank.register(len(data))
        state = rank.wait(rank.begin(7, data, level=LEVEL_MEMORY), copied=True)
        assert state.outcome == CheckpointState.COPIED
        daemon.kill()
    daemon.start()

    with Rank(daemon.socket) as rank:
        opened, found = rank.restore()
        assert opened.step == 7
        assert found == data
