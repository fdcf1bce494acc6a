"""P6, apart: hostile clients of another user. During each attack the checkpoints of an innocent
trainer become durable, a later trainer can connect and save, and the memory of the daemon itself
stays within a bound. Latencies are printed, not checked."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.test_refusals import NOBODY, as_user, make_checkpoint
from tests.support.daemon import Daemon, Start
from tests.support.hostile import ATTACKS
from tests.support.rank import Rank, payload_of
from tests.support.trainer import Connect

ATTACKER = 4322
SIZE = 300_000
CHECKPOINTS = 8
#: More than the daemon uses without an attack: full queues, and unused memory of the heap.
GROWTH_KIB_MAX = 128 << 10
#: The resource that is scarce, by attack; by default storage.
SCARCE = {"minimal_sessions": ("--dram", "16MiB")}

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, for a user to attack another")


def own_memory_kib(pid: int) -> int:
    """The private memory of the daemon: without the pool, which is shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def save(rank: Rank, step: int) -> float:
    began_s = time.monotonic()
    rank.save(step, payload_of(step, SIZE))
    return time.monotonic() - began_s


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_the_others_go_on(start_daemon: Start, attack: str) -> None:
    daemon = start_daemon(*SCARCE.get(attack, ("--max-storage", "96MiB")))
    daemon.open_to_everybody()
    with Rank(daemon.socket, job="late") as late:
        late.register(SIZE)
        late.save(1, payload_of(1, SIZE))
    with Rank(daemon.socket, job="innocent") as rank:
        rank.register(SIZE)
        calm_s = [save(rank, step) for step in range(1, 4)]
        before_kib = own_memory_kib(daemon.pid)
        victim = {"endpoint": rank.welcome.endpoint, "token": rank.welcome.token.hex(),
                  "job": "innocent"}  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-m", "tests.support.as_user", str(ATTACKER), "tests.support.hostile",
             attack, str(daemon.socket), json.dumps(victim)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as attacker:  # fmt: skip
            assert attacker.stdout is not None and attacker.stdin is not None
            most_kib = before_kib
            attacked_s = []
            step, left = 3, CHECKPOINTS  # once the attack has begun
            while left > 0:
                step += 1
                attacked_s.append(save(rank, step))
                most_kib = max(most_kib, own_memory_kib(daemon.pid))
                if left < CHECKPOINTS:
                    left -= 1
                elif select.select([attacker.stdout], [], [], 0.02)[0]:
                    assert attacker.stdout.readline() == "enough\n"
                    left -= 1
                    with Rank(daemon.socket, job="late", launch="meanwhile") as late:
                        assert late.restore()[1] == payload_of(1, SIZE)
                        late.register(SIZE)
                        late.save(2, payload_of(2, SIZE))
            attacker.stdin.close()
            steps = int(attacker.stdout.readline())
        assert attacker.returncode == 0
        assert most_kib - before_kib < GROWTH_KIB_MAX, (before_kib, most_kib)
        with Rank(daemon.socket, job="late", launch="again") as late:  # sessions are possible
            assert late.restore()[1] == payload_of(2, SIZE)
            late.register(SIZE)
            late.save(3, payload_of(3, SIZE))
        _opened, data = rank.restore()
        assert data == payload_of(step, SIZE)
    print(
        f"{attack}: {steps} steps; a checkpoint took {max(calm_s):.3f} s at most, under attack "
        f"{max(attacked_s):.3f} s; memory {before_kib >> 10} MiB, at most {most_kib >> 10} MiB"
    )
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) >= 12


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
def test_another_uid_sees_and_gets_nothing(daemon: Daemon, start_trainer: Connect) -> None:
    make_checkpoint(daemon, start_trainer)
    daemon.open_to_everybody()
    ran = subprocess.run(
        as_user(NOBODY, "pccheckctl.cli", "--socket", str(daemon.socket), "list", "--json"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert '"schema"' in ran.stdout, ran.stderr
    assert '"job"' not in ran.stdout
    for command in ("list", "status", "verify", "trace"):  # not: "there is nothing"
        ran = subprocess.run(
            as_user(
                NOBODY, "pccheckctl.cli", "--socket", str(daemon.socket), "--uid", "0", command
            ),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (1, ""), (command, ran.stdout)
        assert "may not see or change jobs of uid 0" in ran.stderr, command
    ran = subprocess.run(
        as_user(NOBODY, "pccheckctl.cli", "--storage", str(daemon.storage), "list"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode != 0
    assert "Traceback" not in ran.stderr
