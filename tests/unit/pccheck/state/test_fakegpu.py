"""The GPU tensors that tests train on: they are where they seem to be, and work on them is late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support import fakegpu
from tests.support.fakegpu import DriftingBuffer, StandGpu, StreamSGD
from tests.support.standin import Driver, device_memory
from tests.support.standinpeer import Peer

BIG = 3 << 20  # float32 elements: an allocation of its own


@contextmanager
def started(**options: Any) -> Iterator[Peer]:
    with device_memory() as directory, Peer(directory, "peer", **options) as peer:
        yield peer


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with started() as made:
        yield made


def _gpu() -> StandGpu:
    gpu = fakegpu.choose()
    assert isinstance(gpu, StandGpu)
    return gpu


def places(_cuda: Driver) -> dict[str, Any]:
    gpu = _gpu()
    from pccheck.state import devices

    small, other = gpu.tensor((3,), torch.bfloat16), gpu.tensor((5,))
    far, big = gpu.tensor((3,), device=1), gpu.tensor((BIG,))
    model = fakegpu.module_to(gpu, torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()))
    model.append(model[0])  # type: ignore[operator]
    state = devices.empty((2, 3), (1, 2), torch.float32, like=far)
    found = {
        "devices": [devices.device_of(t) for t in (small, far, big, torch.zeros(1), state)],
        "model": {devices.device_of(p) for p in model.parameters()},
        "neighbours": other.data_ptr() - small.data_ptr(),
        "strides": state.stride(),
    }
    gpu.free(big)
    return found


def late(_cuda: Driver) -> tuple[bool, bool]:
    """Whether a step changes anything before the stream gets there, and after."""
    gpu = _gpu()
    weights = gpu.like(torch.ones(1000))
    optimizer = StreamSGD(gpu, [weights])
    busy = threading.Event()
    gpu.launch(busy.wait)
    optimizer.step()
    before = bool((weights == 1).all())
    busy.set()
    return before, bool((gpu.read(weights) == 1).any())


def trained(_cuda: Driver, seed: int) -> list[float]:
    gpu = _gpu()
    parameters = [gpu.like(torch.ones(100)), gpu.like(torch.ones(7, dtype=torch.bfloat16))]
    optimizer, module = StreamSGD(gpu, parameters, seed=seed), DriftingBuffer(gpu, 3)
    with gpu.on_stream(gpu.new_stream()):
        for _ in range(3):
            module()
            optimizer.step()
        assert gpu.read(module.seen).tolist() == [1.75] * 3
    return [float(gpu.read(one).double().sum()) for one in parameters]


def replayed(_cuda: Driver) -> list[float]:
    gpu = _gpu()
    value = gpu.like(torch.zeros(1))
    with gpu.capture() as graph:
        assert gpu.capturing()
        gpu.launch(lambda: value.add_(1))
    seen = [float(gpu.read(value))]
    graph.replay()
    graph.replay()
    return [*seen, float(gpu.read(value)), float(gpu.capturing())]


def test_tensors_are_on_their_devices() -> None:
    with started(devices=2) as peer:
        found = peer(places)
        assert peer.faults.allocations == 2  # one block on each device; the big one was freed
    assert found["devices"] == [0, 1, 0, -1, 1]
    assert found["model"] == {0}
    assert found["neighbours"] == 512
    assert found["strides"] == (1, 2)


def test_work_is_done_when_the_stream_gets_there(peer: Peer) -> None:
    assert peer(late) == (True, False)


def test_one_seed_is_one_result(peer: Peer) -> None:
    first = peer(trained, 1)
    assert peer(trained, 1) == first != peer(trained, 2)


def test_graphs_replay_what_was_launched(peer: Peer) -> None:
    assert peer(replayed) == [0.0, 2.0, 0.0]
