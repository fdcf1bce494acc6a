"""torch.distributed.checkpoint with real ranks: saved by two, killed, and loaded by one and by
four, equal bit by bit."""

from __future__ import annotations

import random
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from pccheck import (
    CheckpointState,
    DaemonUnreachableError,
    NoCheckpointError,
    PCcheckClient,
    PccheckWarning,
    Shard,
    StateMismatchError,
    UsageError,
    capture_rng,
    restore_rng,
)
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.torchrun import started

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as torch_dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: E402
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
)

from pccheck.integrations import dcp  # noqa: E402
from tests.support.dcptraining import (  # noqa: E402
    LAST,
    built,
    differences,
    optimizer_of,
    state_of,
    whole,
)


def ranks(daemon: Daemon, number: int, what: str, place: Path) -> tuple[int, str]:
    program = ("tests.support.dcptraining", what, place)
    with started(daemon, "job", number, *program) as launcher:
        said = launcher.finish()
    assert launcher.returncode is not None
    return launcher.returncode, said


@pytest.mark.long
def test_two_ranks_save_and_one_or_four_load(start_daemon: Start, ctl: Ctl, tmp_path: Path) -> None:
    daemon = start_daemon("--slots", "6")
    _, said = ranks(daemon, 2, "save", tmp_path)
    assert "Signal 9 (SIGKILL)" in said, said  # they die after a barrier
    wanted = torch.load(tmp_path / "whole.pt", weights_only=True)

    for job in ("job", "planned"):
        loaded(daemon, job, wanted)
    attached(daemon, wanted)
    exported(ctl, daemon, tmp_path, wanted)
    refused(daemon)
    code, said = ranks(daemon, 4, "load", tmp_path)
    assert code == 0 and "NOT restored" not in said, said
    loaded(daemon, "job", wanted, LAST + 1)
    goes_on(daemon, wanted)


def loaded(daemon: Daemon, job: str, wanted: dict[str, Any], step: int = LAST) -> None:
    """One process without torch.distributed and without DTensors."""
    model = built(seed=1)
    state = state_of(model, optimizer_of(model))
    assert differences(whole(state), wanted)
    done = dcp.load(state, job=job, socket=daemon.socket)
    assert (done.step, bool(done)) == (step, True)
    assert not (lines := differences(whole(state), wanted)), lines


def goes_on(daemon: Daemon, wanted: dict[str, Any]) -> None:
    """One process with a client: the checkpoints of four ranks count as restored."""
    model = built(seed=1)
    state = state_of(model, optimizer_of(model))
    with PCcheckClient("job", socket=daemon.socket) as client, warnings.catch_warnings():
        warnings.simplefilter("error", PccheckWarning)
        assert dcp.load(state, client=client).step == LAST + 1
        for step in range(LAST + 2, LAST + 5):
            assert dcp.save(state, client=client, step=step).state is CheckpointState.DURABLE
    loaded(daemon, "job", wanted, LAST + 4)


def attached(daemon: Daemon, wanted: dict[str, Any]) -> None:
    """The optimizer was made of named parameters: its state is found by the numbers of its
    state_dict(), and by those names."""
    model = built(seed=1)
    optimizer = optimizer_of(model)
    state_of(model, optimizer)  # makes the moments
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch_dcp.load(
        state, storage_reader=dcp.PCcheckReader("attached", socket=daemon.socket), no_dist=True
    )
    assert not (lines := differences(whole(state["model"]), wanted["model"])), lines
    for index, (name, _) in enumerate(model.named_parameters()):
        moments = whole(state["optimizer"]["state"][index])
        lines = differences(moments, wanted["optimizer"]["state"][name])
        assert not lines, lines

    reader = dcp.PCcheckReader("attached", socket=daemon.socket)
    model = built(seed=2)
    state = state_of(model, optimizer_of(model))
    del state["progress"]
    torch_dcp.load(state, storage_reader=reader, no_dist=True)
    assert not (lines := differences(whole(state), {key: wanted[key] for key in state})), lines

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = {"optimizer": get_optimizer_state_dict(model, optimizer_of(model), options=options)}
    flat["optimizer"]["param_groups.0.weight.lr"] = 0.5
    torch_dcp.load(flat, storage_reader=reader, no_dist=True)
    assert flat["optimizer"]["param_groups.0.weight.lr"] == 0.01
    for name, moments in wanted["optimizer"]["state"].items():
        found = {key: flat["optimizer"][f"state.{name}.{key}"] for key in moments}
        assert not (lines := differences(whole(found), moments)), lines


def exported(ctl: Ctl, daemon: Daemon, place: Path, wanted: dict[str, Any]) -> None:
    """A rank stores only a part of what torch planned; an exported file has all of it."""
    target = place / "planned.pt"
    ran = ctl(daemon.storage, "export", "planned", "-o", target, "--only", "tensors")
    assert ran.code == 0, ran.err
    found = torch.load(target, weights_only=True)
    names = {f"model.{name}": tensor for name, tensor in wanted["model"].items()}
    for name, state in wanted["optimizer"]["state"].items():
        names |= {f"optimizer.state.{name}.{key}": tensor for key, tensor in state.items()}
    assert not (lines := differences(found, {key: names[key] for key in found})), lines
    assert found.keys() == names.keys()


def refused(daemon: Daemon) -> None:
    state = {"step": 0}
    with pytest.raises(NoCheckpointError, match=r"no checkpoint of step 77; it has steps 3, 2"):
        dcp.load(state, job="job", socket=daemon.socket, step=77)
    assert not dcp.load(state, job="nothing", socket=daemon.socket)
    with pytest.raises(torch_dcp.CheckpointException, match=r"Missing key.*: step"):
        dcp.load(state, job="job", socket=daemon.socket)
    with (
        PCcheckClient("other", socket=daemon.socket) as client,
        pytest.raises(UsageError, match="leave client= out"),
    ):
        dcp.load(state, job="job", client=client)
    (volume,) = daemon.storage.rglob("planned/rank-1.*.pcc")
    volume.rename(daemon.root / "away")
    with pytest.raises(NoCheckpointError, match="rank"):
        dcp.load(state, job="planned", socket=daemon.socket)
    (daemon.root / "away").rename(volume)


class Halves(torch_dcp.DefaultSavePlanner):
    """Plans every vector as two blocks of one name."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            if data is None or len(data.size) != 1:
                items.append(item)
                continue
            for first, end in ((0, 2), (2, data.size[0])):
                chunk = ChunkStorageMetadata(torch.Size([first]), torch.Size([end - first]))
                index = replace(item.index, offset=chunk.offsets)
                half = replace(data, chunk=chunk)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=half))
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: Any) -> Any:
        found = self.state_dict[index.fqn]
        if getattr(found, "ndim", 0) != 1:
            return found
        return found[:2] if index.offset == torch.Size([0]) else found[2:]


def test_one_process_with_planners_of_its_own(daemon: Daemon) -> None:
    state = {"a": torch.arange(7.0), "b": {"c": torch.eye(3), "d": "text"}, "e": [1, (2, None)]}
    with PCcheckClient("planned", socket=daemon.socket, on_error="raise") as client:
        for step in (1, 2):
            state["a"] += 1
            planner = torch_dcp.DefaultSavePlanner(enable_plan_caching=True)
            torch_dcp.save(state, storage_writer=dcp.PCcheckWriter(client, step), planner=planner)
        assert not differences(zeroed_and_loaded(state, client), state)
        torch_dcp.save(state, storage_writer=dcp.PCcheckWriter(client, 3), planner=Halves())
        assert not differences(zeroed_and_loaded(state, client), state)

        doubled = zeroed(state) | {"a": torch.zeros(7, dtype=torch.float64)}
        dcp.load(doubled, client=client)
        assert torch.equal(doubled["a"], state["a"].double())

        writer = dcp.PCcheckWriter(client, 4)
        with pytest.raises(UsageError, match="checkpoint_id"):
            torch_dcp.save(state, storage_writer=writer, checkpoint_id="/4")
        with pytest.raises(torch_dcp.CheckpointException, match=r"dcp\.async_save"):
            torch_dcp.async_save(state, storage_writer=writer).result()


def zeroed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else type(state)()


def zeroed_and_loaded(state: dict[str, Any], client: PCcheckClient) -> dict[str, Any]:
    found: dict[str, Any] = zeroed(state)
    assert dcp.load(found, client=client)
    return found


def test_generators_and_values_that_are_no_tensors(daemon: Daemon) -> None:

    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    state = {
        "rng": capture_rng(), "array": numpy.arange(5), "size": torch.Size([2, 3]), "none": None,
        "pair": (torch.ones(2), torch.bfloat16), "listed": [torch.ones(1), {"x": 1.5}],
    }  # fmt: skip
    with PCcheckClient("values", socket=daemon.socket) as client:
        dcp.save(state, client=client, step=1)
        then = drawn()
        found = {
            "rng": capture_rng(), "array": 0, "size": 0, "none": 0, "pair": 0,
            "listed": [torch.zeros(1), {"x": 0.0}],
        }  # fmt: skip
        assert dcp.load(found, client=client).step == 1
    restore_rng(found["rng"])
    assert drawn() == then
    assert numpy.array_equal(found["array"], state["array"])
    assert (found["size"], found["none"]) == (state["size"], None)
    assert torch.equal(found["pair"][0], torch.ones(2)) and found["pair"][1] is torch.bfloat16
    assert not differences(found["listed"], state["listed"])


def test_states_that_torch_cannot_name(daemon: Daemon) -> None:
    target = {"a": {"b": torch.zeros(2)}}
    with PCcheckClient("odd", socket=daemon.socket) as client:
        dcp.save({"a": {"b": torch.ones(2)}, "a.b": torch.ones(3)}, client=client, step=1)
        with pytest.raises(StateMismatchError, match=r"two values of the state have the name a\.b"):
            dcp.load(target, client=client)
        client.checkpoint([torch.ones(2)], step=2).wait_durable(60)
        with pytest.raises(StateMismatchError, match="the checkpoint has a list"):
            dcp.load(target, client=client)
        client.checkpoint({"a": {"b": Shard(torch.ones(1), (2,), (1,))}}, step=3).wait_durable(60)
        with pytest.raises(StateMismatchError, match=r"a\.b: the ranks saved all but 1 of the 2"):
            dcp.load(target, client=client)
    assert not target["a"]["b"].any()


class Behind(dcp.PCcheckReader):
    """Another rank has opened the checkpoint before, while the job went on saving."""

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        plans = super().prepare_global_plan(plans)
        return [replace(plan, storage_data=plan.storage_data - 1) for plan in plans]


def test_all_ranks_read_the_same_step(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"a": torch.zeros(2)}
    with PCcheckClient("job", socket=daemon.socket) as client:
        for step in (1, 2):
            dcp.save({"a": torch.full((2,), float(step))}, client=client, step=step)
        reader = Behind("job", socket=daemon.socket)
        torch_dcp.load(target, storage_reader=reader)
        assert (reader.result.step, target["a"].tolist()) == (1, [1, 1])
        dcp.save({"a": torch.ones(3)}, client=client, step=3)
        with pytest.raises(
            torch_dcp.CheckpointException,
            match="a differs between step 3, which this rank found at first, and step 2",
        ):
            torch_dcp.load({"a": torch.ones(3)}, storage_reader=Behind("job", socket=daemon.socket))

    monkeypatch.delenv("PCCHECK_JOB", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with (
        PCcheckClient(socket=daemon.socket) as client,
        pytest.raises(UsageError, match="set PCCHECK_JOB"),
    ):
        dcp.load(target, client=client)


def test_training_continues_without_a_daemon(tmp_path: Path) -> None:
    state = {"a": torch.ones(2)}
    with PCcheckClient("job", socket=tmp_path / "none.sock") as client:
        handle = dcp.save(state, client=client, step=1)
        writer = dcp.PCcheckWriter(client, 2)
        torch_dcp.save(state, storage_writer=writer)
    for made in (handle, writer.checkpoint):
        assert made is not None and made.state is CheckpointState.FAILED
    with pytest.raises(DaemonUnreachableError):
        dcp.load(state, job="job", socket=tmp_path / "none.sock")
