"""`pccheckctl status` reports a job without checkpoints first."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from pccheck import CheckpointFailedError, PCcheckClient
from tests.integration.test_observability import base, get
from tests.promises.test_p2_durable import pccheckctl, saved, until
from tests.support import live, waiting
from tests.support.ctl import Ran
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, Trainer

MIB = 1 << 18  # float32 elements


def test_a_job_that_is_refused_is_the_loudest(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--max-storage", "30MiB")
    fits = start_trainer(daemon, [MIB], job="fits")
    assert saved(fits)[0] == "durable"
    big = start_trainer(daemon, [8 * MIB], job="big")
    for _ in range(3):
        assert saved(big)[0] == "failed"
    told = pccheckctl(daemon, "status")
    assert told.code == 3
    first = told.out.index("checkpoints are NOT saved")
    assert first < told.out.index("fits")
    assert "30.0 MiB" in told.out
    assert "REFUSED" in next(line for line in told.out.splitlines() if line.startswith("big"))
    ranks = {rank["job"]: rank for rank in daemon.status()["ranks"]}
    assert ranks["big"]["counters"]["failed"] >= 2  # the next failure reports the last one
    assert "takes" in ranks["big"]["refused"]["message"]
    assert ranks["fits"]["refused"] is None
    daemon.logs("job 'big' rank 0 of uid")
    daemon.logs("checkpoints are NOT saved")


def test_every_refused_checkpoint_is_counted(start_daemon: Start, start_trainer: Connect) -> None:
    """Also in the metrics, and also the last one of a trainer that has ended."""
    daemon = start_daemon("--max-storage", "30MiB", "--metrics", "0")
    big = start_trainer(daemon, [8 * MIB], job="big")
    for _ in range(3):
        assert saved(big)[0] == "failed"
    big.close()
    gone(daemon, big)
    (rank,) = daemon.status()["ranks"]
    assert (rank["counters"]["failed"], rank["failing"]) == (3, 3)
    _, text = get(f"{base(daemon)}/metrics")
    job, uid = 'job_name="big",rank="0",', f'uid="{os.getuid()}"'
    assert f"pccheck_requests_total{{{job}{uid}}} 3.0" in text
    assert f'pccheck_checkpoints_total{{{job}result="failed",{uid}}} 3.0' in text
    (failures,) = re.findall(r"pccheck_failures_total(\{.*)", text)
    assert 'error="STORAGE_FULL"' in failures and failures.endswith("} 3.0")


def test_a_hint_names_jobs_only_if_they_make_room(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--max-storage", "40MiB")
    for job in ("one", "two"):
        trainer = start_trainer(daemon, [1000], job=job)
        assert saved(trainer)[0] == "durable"
        trainer.kill()
    large = start_trainer(daemon, [12 * MIB], job="large")
    saved(large)
    hint = status_of(daemon, "large")["hint"]
    assert "pccheckctl drop" not in hint  # it is larger than --max-storage
    assert "--max-storage" in hint
    medium = start_trainer(daemon, [5 * MIB], job="medium")
    saved(medium)
    hint = status_of(daemon, "medium")["hint"]
    assert "pccheckctl drop one" in hint
    assert "pccheckctl drop two" in hint


def status_of(daemon: Daemon, job: str) -> dict[str, str]:
    (rank,) = (rank for rank in daemon.status()["ranks"] if rank["job"] == job)
    found: dict[str, str] = rank["refused"]
    return found


def test_a_refusal_ends_with_the_room(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--max-storage", "30MiB")
    old = start_trainer(daemon, [2 * MIB], job="old")
    assert saved(old)[0] == "durable"
    old.kill()
    new = start_trainer(daemon, [3 * MIB], job="new")
    assert saved(new)[0] == "failed"
    assert pccheckctl(daemon, "status").code == 3
    assert pccheckctl(daemon, "drop", "old", "--yes").code == 0
    assert saved(new)[0] == "durable"
    told = pccheckctl(daemon, "status")
    assert (told.code, "REFUSED" in told.out) == (0, False)


def test_a_refusal_ends_with_the_next_checkpoint_that_fits(start_daemon: Start) -> None:
    """A larger state was refused. A state that fits into the existing volume needs no more
    space."""
    daemon = start_daemon("--max-storage", "30MiB")
    with PCcheckClient("job", socket=daemon.socket) as client:
        client.checkpoint([torch.zeros(MIB)], step=1).wait_durable(60)
        with pytest.raises(CheckpointFailedError, match="takes"):
            client.checkpoint([torch.zeros(8 * MIB)], step=2).wait_durable(60)
        told = pccheckctl(daemon, "status")
        assert (told.code, "REFUSED" in told.out) == (3, True)
        client.checkpoint([torch.zeros(MIB)], step=3).wait_durable(60)
        until(daemon, lambda _: pccheckctl(daemon, "status").code == 0)
        assert "REFUSED" not in pccheckctl(daemon, "status").out
    daemon.logs("checkpoints are saved again")


def ended(daemon: Daemon, job: str) -> bool:
    ranks = {rank["job"]: rank for rank in daemon.status()["ranks"]}
    return job in ranks and not ranks[job]["connected"] and not ranks[job]["in_flight"]


def gone(daemon: Daemon, trainer: Trainer) -> None:
    trainer.kill()
    until(daemon, lambda _: ended(daemon, "big"))


def test_a_refused_job_is_the_loudest_after_its_end(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """Without a volume only the daemon knows of the job, until the job is dropped."""
    daemon = start_daemon("--max-storage", "30MiB")
    assert saved(start_trainer(daemon, [MIB], job="fits"))[0] == "durable"
    big = start_trainer(daemon, [8 * MIB], job="big")
    assert saved(big)[0] == "failed"
    gone(daemon, big)
    for _ in range(2):
        told = pccheckctl(daemon, "status")
        assert told.code == 3
        assert told.out.index("checkpoints were NOT saved") < told.out.index("fits")
        assert "REFUSED" in next(line for line in told.out.splitlines() if line.startswith("big"))
        start_trainer(daemon, [8 * MIB], job="big").kill()  # a run that requests nothing
        until(daemon, lambda _: ended(daemon, "big"))
    assert pccheckctl(daemon, "drop", "big", "--yes").code == 0
    told = pccheckctl(daemon, "status")
    assert (told.code, "big" in told.out) == (0, False)
    assert pccheckctl(daemon, "drop", "big", "--yes").code == 13


def test_a_later_run_that_saves_ends_the_warning(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon("--max-storage", "30MiB")
    big = start_trainer(daemon, [8 * MIB], job="big")
    assert saved(big)[0] == "failed"
    gone(daemon, big)
    assert pccheckctl(daemon, "status").code == 3
    again = start_trainer(daemon, [MIB], job="big")
    assert saved(again)[0] == "durable"
    assert pccheckctl(daemon, "status").code == 0
    gone(daemon, again)
    told = pccheckctl(daemon, "status")
    assert (told.code, "REFUSED" in told.out) == (0, False)


def test_a_job_without_a_durable_checkpoint_is_named_by_the_next_daemon(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """The job has a volume, so a new daemon finds that it is empty."""
    daemon = start_daemon(shim="dead:data:1")
    trainer = start_trainer(daemon, job="big")
    daemon.armed.touch()
    assert saved(trainer)[0] == "failed"
    gone(daemon, trainer)
    told = pccheckctl(daemon, "status")
    assert told.code == 3
    assert "ended without a durable checkpoint: its last checkpoint failed" in told.out
    daemon.stop()
    offline = storage_status(daemon)
    assert (offline.code, "job 'big' rank 0 of uid" in offline.out) == (3, True), offline.out
    daemon.armed.unlink()
    daemon.start()
    told = pccheckctl(daemon, "status")
    assert told.code == 3
    assert "degraded" in told.out.splitlines()[0]
    assert "it has no durable checkpoint" in told.out
    row = next(line for line in told.out.splitlines() if line.startswith("big"))
    assert "NO CHECKPOINT" in row
    again = start_trainer(daemon, job="big")
    assert saved(again)[0] == "durable"
    gone(daemon, again)
    told = pccheckctl(daemon, "status")
    assert "with write errors" in told.out  # quarantined, and nothing else is wrong
    assert "durable checkpoint" not in told.out and "NO CHECKPOINT" not in told.out


def test_a_run_that_ends_in_its_first_copy_is_no_trouble_beside_older_checkpoints(
    daemon: Daemon, start_trainer: Connect
) -> None:
    """Older checkpoints exist, and the last one failed only because the run ended: nothing is
    wrong."""
    trainer = start_trainer(daemon, job="big")
    assert saved(trainer)[0] == "durable"
    gone(daemon, trainer)
    again = start_trainer(daemon, [4 * MIB, 4 * MIB], job="big", fresh=True)
    again.step()
    again.checkpoint()
    gone(daemon, again)
    assert pccheckctl(daemon, "status").code == 0


def storage_status(daemon: Daemon) -> Ran:
    ran = subprocess.run(
        [sys.executable, "-m", "pccheckctl", "--storage", str(daemon.storage), "status"],
        capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def test_failures_while_the_daemon_was_away_are_counted(daemon: Daemon, trainer: Trainer) -> None:
    assert saved(trainer)[0] == "durable"
    daemon.kill()
    ends = [saved(trainer)[0] for _ in range(5)]
    assert ends == ["failed"] * 5
    daemon.start()
    waiting.until(lambda: ends.append(saved(trainer)[0]) or ends[-1] == "durable", lambda: ends)
    (rank,) = daemon.status()["ranks"]
    assert rank["counters"]["failed"] == len(ends) - 1
    daemon.stop()
    daemon.start()
    ends.clear()
    waiting.until(lambda: ends.append(saved(trainer)[0]) or ends[-1] == "durable", lambda: ends)
    (rank,) = daemon.status()["ranks"]
    # Told once: the count begins with the daemon.
    assert rank["counters"]["failed"] == len(ends) - 1
    assert rank["failing"] == 0


def test_a_job_whose_last_checkpoints_failed_is_named(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon(shim="eio:record-a:1")
    trainer = start_trainer(daemon, job="unlucky")
    assert saved(trainer)[0] == "durable"
    daemon.armed.touch()
    assert saved(trainer)[0] == "failed"
    told = pccheckctl(daemon, "status")
    assert told.code == 3
    assert "failing" in next(line for line in told.out.splitlines() if line.startswith("unl"))
    (rank,) = daemon.status()["ranks"]
    assert rank["failing"] == 1
    assert saved(trainer)[0] == "durable"
    waiting.until(lambda: pccheckctl(daemon, "status").code == 0)


def test_a_run_whose_last_checkpoints_failed_says_so_at_its_end(
    daemon: Daemon, start_trainer: Connect
) -> None:
    """The run reports its lost checkpoints at its end, with the step from which a restart resumes:
    exit code 0 and one early warning are not enough."""
    trainer = start_trainer(daemon)
    for _ in range(3):
        assert saved(trainer)[0] == "durable"
    shutil.move(daemon.storage, daemon.root / "away")
    for _ in range(5):
        assert saved(trainer)[0] == "failed"
    *before, last = trainer.warnings
    assert len(before) <= 1, before  # none when the daemon looked at the directory before step 4
    for first in before:  # whose words no longer suffice
        assert "step 4 failed: the volume's file was removed or moved away" in first
    assert f"step {4 + len(before)} failed: the storage directory" in last
    assert "create the directory again" in last
    assert "Traceback" not in daemon.log.read_text()  # not a defect
    trainer.close()
    last = trainer.warnings[-1]
    assert "5 checkpoints failed since step 3, up to step 8: the storage directory" in last
    assert "There is no durable checkpoint" in last
    shutil.move(daemon.root / "away", daemon.storage)
    again = start_trainer(daemon)
    again.restore()
    daemon.kill()
    assert saved(again)[0] == "failed"
    again.close()
    assert "1 checkpoint failed since step 3, up to step 4" in again.warnings[-1]
    assert (
        "newest checkpoint that is known to be durable is step 3: a restart resumes there, or at a "
        "later one" in again.warnings[-1]
    )


def test_a_run_that_never_met_its_daemon_does_not_deny_earlier_checkpoints(
    daemon: Daemon, start_trainer: Connect
) -> None:
    before = start_trainer(daemon)
    assert saved(before)[0] == "durable"
    before.close()
    daemon.kill()
    after = start_trainer(daemon)
    assert saved(after)[0] == "failed"
    after.close()
    assert "no durable checkpoint" not in after.warnings[-1]
    assert "resumes from the newest one of an earlier run" in after.warnings[-1]


def test_a_run_whose_last_checkpoint_is_durable_ends_without_a_word(
    daemon: Daemon, trainer: Trainer
) -> None:
    assert saved(trainer)[0] == "durable"
    live.remove(daemon.storage / str(os.getuid()))
    ends = [saved(trainer)[0] for _ in range(8)]
    assert (ends[0], ends[-1]) == ("failed", "durable")
    (said,) = trainer.warnings
    assert "a later checkpoint goes into a new volume" in said
    trainer.close()
    assert trainer.warnings == [said]


def test_a_volume_that_cannot_be_made_is_no_busy_daemon(
    daemon: Daemon, start_trainer: Connect
) -> None:
    """Any error except a full disk. Before, such checkpoints were skipped, and a run ended without
    a warning."""
    place = daemon.storage / str(os.geteuid())
    trainer = start_trainer(daemon)
    place.touch()  # a file in place of the user's directory
    for _ in range(3):
        assert saved(trainer)[0] == "failed"
    (first,) = trainer.warnings
    assert "checkpoint of step 1 failed: " in first and "is not a directory" in first
    place.unlink()
    assert saved(trainer)[0] == "durable"
    trainer.close()
    assert len(trainer.warnings) == 1
