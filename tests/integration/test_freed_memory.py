"""Memory that is freed, exchanged or cut short while a checkpoint reads it: the checkpoint fails
and names the tensor, or is whole, and training goes on. The daemon is slow, so that every change
happens while the memory is read. Each script is a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import programs
from tests.support.daemon import Daemon, Start

SCRIPT = """
import ctypes, faulthandler, os, sys, threading, warnings
import torch
import torch.multiprocessing as mp
from pccheck import PCcheckClient

warnings.simplefilter("ignore")
if "unmapped" in sys.argv:  # what is freed goes back to the system at once
    M_MMAP_THRESHOLD = -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
torch.manual_seed(0)
trained = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
frozen = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).requires_grad_(False)
model = torch.nn.ModuleDict({"trained": trained, "frozen": frozen})
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
gate = "manual" if "manual" in sys.argv else "auto"
client = PCcheckClient(job="job", socket=sys.argv[1], gate=gate)

def train():
    optimizer.zero_grad(set_to_none=True)
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

def saved(handle):
    handle.exception(60)
    print(handle.state.name, handle.reason)
"""
#: The checkpoint of step 2 is read while the change is made; that of step 3 is whole again.
LIVED = """
client.attach(model=model, optimizer=optimizer)
train()
saved(client.checkpoint(step=1))
if "faulthandler" in sys.argv:  # it takes the place of the client's handler
    faulthandler.enable()
train()
handle = client.checkpoint(step=2)
change()
saved(handle)
restore()
train()
saved(client.checkpoint(step=3))
client.close()
print("trained")
"""
RESIZED = """
def change():
    global kept
    kept = {one}.data.clone()
    {one}.untyped_storage().resize_(0)

def restore():
    {one}.untyped_storage().resize_(kept.nbytes)
    {one}.data.copy_(kept)
"""
GROWN = """
def change():
    trained[3].weight.data.resize_(600, 512)  # the parameter has its shape, in other memory

def restore():
    pass
"""
SHARED = """
def change():
    model.share_memory()

def restore():
    pass
"""
QUEUED = """
def change():
    queue = mp.Queue()
    queue.put(model.state_dict())  # a thread of the queue moves each tensor to shared memory
    assert len(queue.get()) == 16

def restore():
    pass
"""
CUT = """
path = os.path.join(sys.argv[2], "base.pt")
kept = {name: one.clone() for name, one in frozen.state_dict().items()}
torch.save(kept, path)
frozen.load_state_dict(torch.load(path, mmap=True), assign=True)
frozen.requires_grad_(False)

def change():
    os.truncate(path, 4096)

def restore():
    frozen.load_state_dict(kept, assign=True)
    frozen.requires_grad_(False)
"""


@pytest.fixture
def daemon(start_daemon: Start) -> Daemon:
    return start_daemon("--chunk", "128KiB", "--dram", "512KiB", "--max-bandwidth", "16MiB")


def said(daemon: Daemon, text: str, *words: str) -> list[str]:
    """What the script prints, line by line, once it has trained to its end."""
    with programs.script(SCRIPT + text, daemon.socket, *words) as running:
        printed = running.finish()
        assert running.returncode == 0, (running.returncode, printed)
    lines = printed.splitlines()
    assert lines.pop() == "trained", printed
    return lines


@pytest.mark.parametrize("after", ["unmapped", "reused"])
@pytest.mark.parametrize("one", ["trained[3].weight", "frozen[3].weight"])
def test_a_storage_resized_to_nothing_fails_by_name(daemon: Daemon, one: str, after: str) -> None:
    lines = said(daemon, RESIZED.format(one=one) + LIVED, after)
    path = "model." + one.replace("[3]", ".3")
    assert [line.split()[0] for line in lines] == ["DURABLE", "FAILED", "DURABLE"]
    assert path in lines[1] and "freed" in lines[1]


def test_a_storage_is_freed_while_others_handle_the_signals(daemon: Daemon) -> None:
    lines = said(
        daemon, RESIZED.format(one="trained[3].weight") + LIVED, "unmapped", "faulthandler"
    )
    assert [line.split()[0] for line in lines] == ["DURABLE", "FAILED", "DURABLE"]  # nothing else


@pytest.mark.parametrize(
    ("change", "after"),
    [(GROWN, "reused"), (GROWN, "unmapped"), (SHARED, "unmapped"), (QUEUED, "unmapped")],
    ids=["grown, reused", "grown", "shared", "queued"],
)
def test_a_storage_moved_to_other_memory_fails_by_name(
    daemon: Daemon, change: str, after: str
) -> None:
    lines = said(daemon, change + LIVED, after)
    assert [line.split()[0] for line in lines] == ["DURABLE", "FAILED", "DURABLE"]
    assert "model." in lines[1] and "moved to other memory" in lines[1]


def test_a_mapped_file_that_is_cut_fails_by_name(daemon: Daemon, tmp_path: Path) -> None:
    lines = said(daemon, CUT + LIVED, str(tmp_path))
    assert [line.split()[0] for line in lines] == ["DURABLE", "FAILED", "DURABLE"]
    assert "model.frozen." in lines[1] and "cut short" in lines[1]


OFFERED = """
frozen = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)])
model = torch.nn.ModuleDict({"trained": trained, "frozen": frozen})
"""
BEFORE = """
client.attach(model=model, optimizer=optimizer)
train()
saved(client.checkpoint(step=1))
change()
for step in (2, 3):
    train()
    saved(client.checkpoint(step=step))
restore()
train()
saved(client.checkpoint(step=4))
client.close()
print("trained")
"""


def test_a_large_base_that_is_cut_fails_each_time_by_name(daemon: Daemon, tmp_path: Path) -> None:
    """It is only read, for its checksums."""
    lines = said(daemon, OFFERED + CUT + BEFORE, str(tmp_path))
    assert [line.split()[0] for line in lines] == ["DURABLE", "FAILED", "FAILED", "DURABLE"]
    assert all("model.frozen." in line and "cut short" in line for line in lines[1:3])


BUFFER = """
model.register_buffer("table", frozen[0].weight.data)
client.attach(model=model, optimizer=optimizer)
train()
saved(client.checkpoint(step=1))
os.truncate(path, 0)
train()
saved(client.checkpoint(step=2))
restore()
model.table = frozen[0].weight.data
train()
saved(client.checkpoint(step=3))
client.close()
print("trained")
"""


def test_a_buffer_in_a_file_that_is_cut_fails_in_the_call(daemon: Daemon, tmp_path: Path) -> None:
    """It is copied at once, on the thread that trains."""
    lines = said(daemon, CUT + BUFFER, str(tmp_path))
    assert [line.split()[0] for line in lines] == ["DURABLE", "FAILED", "DURABLE"]
    assert "model." in lines[1] and "cut short" in lines[1]


ARRAY = """
import numpy as np
array = np.ones((4, 512, 512))
client.attach(model=model, optimizer=optimizer, more={"array": array})

def change():
    array.resize((4, 512, 600), refcheck=False)

def restore():
    pass
"""


def test_an_array_that_is_resized_fails_by_name(daemon: Daemon) -> None:
    lines = said(daemon, ARRAY + LIVED, "unmapped", "manual")
    assert [line.split()[0] for line in lines] == ["DURABLE", "FAILED", "DURABLE"]
    assert "more.array" in lines[1]


WAITED = """
client.attach(model=model)  # without an optimizer the call returns when all is copied
saved(client.checkpoint(step=1))
read = threading.Event()

def free():
    read.wait()
    trained[3].weight.untyped_storage().resize_(0)

thread = threading.Thread(target=free)
thread.start()
submit = client._saver._wait

def wait(*arguments):
    read.set()
    return submit(*arguments)

client._saver._wait = wait
saved(client.checkpoint(step=2))
thread.join()
trained[3].weight.untyped_storage().resize_(1 << 20)
saved(client.checkpoint(step=3))
client.close()
print("trained")
"""


def test_memory_freed_by_a_thread_while_the_call_waits_fails(daemon: Daemon) -> None:
    lines = said(daemon, WAITED, "unmapped")
    assert [line.split()[0] for line in lines] == ["DURABLE", "FAILED", "DURABLE"]
