"""`pccheckctl import`: `restore()` returns what other software wrote, bit for bit; and an export
can be imported again."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from pccheck import PCcheckClient, capture_rng
from pccheck_store.safetensors_layout import DTYPES
from pccheck_wire import tree
from pccheckctl.importing import dcp_directory
from tests.support.ctl import Ctl, Ran
from tests.support.daemon import Daemon

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
#: torch cannot save these; the export reports how it stores them.
UNSAVED = {
    name for name in tree.ITEM_BYTES
    if name.startswith("bits") or name.strip("uint") in map(str, range(1, 8))
}  # fmt: skip
HELD = sorted(name for name in tree.ITEM_BYTES if hasattr(torch, name) and name not in UNSAVED)


class Things:
    """The things that a script attaches."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        norm = torch.nn.BatchNorm1d(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), norm, torch.nn.Linear(5, 5, False))
        self.model.append(torch.nn.Linear(5, 5, False)).bfloat16()
        self.model[3].weight = self.model[2].weight  # tied
        self.optimizer: torch.optim.Optimizer
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=seed)
        for parameter in self.model.parameters():
            parameter.data.copy_(torch.rand(parameter.shape, generator=draw))
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        bits = torch.randint(0, 256, (6, 16), generator=draw, dtype=torch.uint8)
        self.kinds = {
            name: (bits > 128 if name == "bool" else bits.clone().view(getattr(torch, name)))
            for name in HELD
        }
        self.kinds["empty"] = torch.empty(0, 3)
        self.kinds["scalar"] = torch.tensor(float(seed))
        self.values = {"epoch": seed, "loss": seed / 3, "names": ["a", "b"], "none": None}

    def attach(self, client: PCcheckClient, **more: Any) -> None:
        client.attach(model=self.model, optimizer=self.optimizer, kinds=self.kinds, **more)
        client.attach(values=self.values)

    def same(self, other: Things, *, kinds: set[str]) -> None:
        theirs = other.model.state_dict()
        for name, tensor in self.model.state_dict().items():
            assert identical(tensor, theirs[name]), name
        mine, theirs = self.optimizer.state_dict(), other.optimizer.state_dict()
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for number, entry in mine["state"].items():
            for name, tensor in entry.items():
                assert identical(tensor, theirs["state"][number][name]), (number, name)
        for name in kinds:
            assert identical(self.kinds[name], other.kinds[name]), name
        assert self.values == other.values


def identical(one: Any, other: Any) -> bool:
    def raw(tensor: Any) -> bytes:
        return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())

    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def online(ctl: Ctl, daemon: Daemon, *words: object) -> Ran:
    return ctl(None, "--socket", daemon.socket, *words)


def saved(daemon: Daemon, job: str, things: Things, step: int) -> dict[str, Any]:
    """Saves; returns the generators' states."""
    with PCcheckClient(job, 0, 1, socket=daemon.socket, on_error="raise") as client:
        things.attach(client, rng=True)
        state = capture_rng()
        client.checkpoint(step=step, metadata={"note": "x"}).wait_durable(60)
    return state


def test_a_part_may_have_any_name(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    """Also the name of the first parameter of a method."""
    path = tmp_path / "in.pt"
    torch.save({"self": {"w": torch.ones(3)}}, path)
    assert online(ctl, daemon, "import", "job", path).code == 0
    mine = {"w": torch.zeros(3)}
    with PCcheckClient("job", 0, 1, socket=daemon.socket) as client:
        client.attach(self=mine)
        assert client.restore()
    assert mine["w"].tolist() == [1, 1, 1]


def test_what_was_exported_comes_back(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    """Every dtype, an optimizer with moments, generators, tied tensors and values: in all formats,
    through the daemon, and from the directory."""
    given = Things(3)
    generators = saved(daemon, "source", given, 7)
    torch.rand(9)
    for kind in ("torch", "dcp"):
        target = tmp_path / kind
        words = ("export", "source", "--format", kind, "-o", target)
        ran = online(ctl, daemon, *words) if kind == "torch" else ctl(daemon.storage, *words)
        assert ran.code == 0, ran.err
        ran = online(ctl, daemon, "import", kind, target, "--json")
        assert ran.code == 0, ran.out
        assert ran.json["imported"]["attached"] == ["kinds", "model", "optimizer", "rng", "values"]
        assert (ran.json["imported"]["format"], ran.json["imported"]["step"]) == (kind, 7)
        fresh = Things(4)
        with PCcheckClient(kind, 0, 1, socket=daemon.socket, on_error="raise") as client:
            fresh.attach(client, rng=True)
            assert client.restore().step == 7
        given.same(fresh, kinds=set(given.kinds))
        assert fresh.model[3].weight.data_ptr() == fresh.model[2].weight.data_ptr()
        now = capture_rng()
        assert now["python"] == generators["python"]
        assert torch.equal(now["torch"], generators["torch"])
        assert numpy.array_equal(now["numpy"][1], generators["numpy"][1])
        torch.rand(9)
    ran = ctl(daemon.storage, "show", "torch", "--json")
    places = {one["path"]: one["offset"] for one in ran.json["tensors"]}
    assert places["model.2.weight"] == places["model.3.weight"]  # stored once, as it was


def test_an_optimizer_without_state_comes_back(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    """torch.distributed.checkpoint leaves out the empty dict of states."""
    given = Things(3)
    given.optimizer = torch.optim.SGD(given.model.parameters(), lr=3.0)
    given.optimizer.step()
    saved(daemon, "source", given, 7)
    for kind in ("torch", "dcp"):
        words = ("export", "source", "--format", kind, "-o", tmp_path / kind)
        assert online(ctl, daemon, *words).code == 0
        assert online(ctl, daemon, "import", kind, tmp_path / kind).code == 0
        fresh = Things(4)
        fresh.optimizer = torch.optim.SGD(fresh.model.parameters(), lr=4.0)
        with PCcheckClient(kind, 0, 1, socket=daemon.socket, on_error="raise") as client:
            fresh.attach(client, rng=True)
            assert client.restore().step == 7
        given.same(fresh, kinds=set(given.kinds))


@pytest.mark.parametrize("kind", ["safetensors", "huggingface"])
def test_a_model_comes_back_from_safetensors(
    daemon: Daemon, ctl: Ctl, tmp_path: Path, kind: str
) -> None:
    """The format holds only a part; the rest is named."""
    given = Things(3)
    saved(daemon, "source", given, 7)
    for part in ("model", "kinds"):
        size = ("--max-shard-size", 100) if kind == "huggingface" else ()
        words = ("export", "source", "--only", part, "--format", kind, *size)
        ran = online(ctl, daemon, *words, "-o", tmp_path / part, "--json")
        assert ran.code == 0, ran.out
        lost = {"complex128", "complex32"} if part == "kinds" else set[str]()
        changed = ran.json["written"][0]["changed"]
        assert {text.split()[0] for text in changed if "left out" in text} == lost
        assert set(HELD) - lost <= set(DTYPES) or part == "model"
        file = tmp_path / part
        ran = online(ctl, daemon, "import", part, file, "--as", part, "--format", "safetensors")
        assert ran.code == 0, ran.err
        assert "step 7" in ran.out  # which the file says
        fresh = Things(4)
        for name in lost:
            del fresh.kinds[name]
        with PCcheckClient(part, 0, 1, socket=daemon.socket, on_error="raise") as client:
            fresh.attach(client)
            assert client.restore(only=[part]).step == 7
            client.adopt()
        fresh.optimizer, fresh.values = given.optimizer, given.values
        fresh.model = fresh.model if part == "model" else given.model
        given.same(fresh, kinds=set(given.kinds) - lost if part == "kinds" else set())


def test_a_directory_of_shards_is_as_hugging_face_has_it(
    daemon: Daemon, ctl: Ctl, tmp_path: Path
) -> None:
    given = Things(3)
    saved(daemon, "source", given, 7)
    target = tmp_path / "hf"
    words = ("export", "source", "--only", "model", "--format", "huggingface", "-o", target)
    ran = online(ctl, daemon, *words, "--max-shard-size", 60)
    assert ran.code == 0, ran.err
    assert "3.weight is stored once, as 2.weight" in ran.err
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert count > 2
    found: dict[str, Any] = {}
    for file in files:
        some = safetensors_torch.load_file(target / file)
        assert {index["weight_map"][name] for name in some} == {file}
        assert len(some) == 1 or sum(tensor.nbytes for tensor in some.values()) <= 60
        with safetensors_torch.safe_open(target / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        found |= some
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert index["metadata"]["3.weight"] == "2.weight"
    wanted = given.model.state_dict()
    assert found.keys() == index["weight_map"].keys() == wanted.keys() - {"3.weight"}
    assert all(identical(tensor, wanted[name]) for name, tensor in found.items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]

    ran = online(ctl, daemon, *words)
    assert (ran.code, "--force" in ran.err) == (2, True)
    assert online(ctl, daemon, *words, "--force").code == 0  # all in one file now
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    model = Things(4).model
    assert safetensors_torch.load_model(model, target / "model.safetensors") == (set(), [])
    assert all(identical(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    (target / "config.json").write_text("{}")
    for force in ([], ["--force"]):
        ran = online(ctl, daemon, *words, *force)
        assert (ran.code, "with --force" in ran.err) == (2, False)
        assert "not what --format huggingface writes" in ran.err
    ran = online(ctl, daemon, "export", "source", "-o", tmp_path / "a", "--max-shard-size", 90)
    assert (ran.code, "--format huggingface" in ran.err) == (2, True)
    for size in ("5GB", "0"):
        assert online(ctl, daemon, *words, "--max-shard-size", size).code == 2


def test_files_of_scripts(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    """As scripts write them: parts beside numbers, parts of other names, and a bare state dict."""
    given, file = Things(3), tmp_path / "state.pt"
    model, optimizer = given.model.state_dict(), given.optimizer.state_dict()

    def imported(
        job: str, state: Any, *words: object, **options: Any
    ) -> tuple[int, dict[str, Any]]:
        torch.save(state, file, **options)
        ran = online(ctl, daemon, "import", job, file, *words)
        assert ran.code == 0, ran.err
        with PCcheckClient(job, 0, 1, socket=daemon.socket) as client:
            found = client.recover()
        return found.step, {"": found.metadata, **found.state}

    whole = {"model": model, "optimizer": optimizer, "epoch": 2, "global_step": 12, "run": "x"}
    step, found = imported("parts", whole)
    assert step == 12 and found.keys() == {"", "model", "optimizer"}
    wanted = {"imported_from": "state.pt", "epoch": 2, "global_step": 12, "run": "x"}
    assert found[""] == wanted
    assert found["optimizer"]["param_groups"] == optimizer["param_groups"]

    old = {"_use_new_zipfile_serialization": False}  # torch's format before 1.6
    step, found = imported("bare", model, **old)
    assert step == 0 and found.keys() == {"", "model"}
    assert all(identical(tensor, found["model"][name]) for name, tensor in model.items())

    imagenet = {
        "epoch": 3, "arch": "resnet18", "state_dict": model, "optimizer": optimizer,
        "best_acc1": torch.tensor(61.5), "scheduler": {"last_epoch": 3}, "iter_num": 7,
        "phase": 1j,
    }  # fmt: skip
    step, found = imported("imagenet", imagenet)
    assert step == 7 and found.keys() == {"", "state_dict", "optimizer", "scheduler"}
    wanted = {"epoch": 3, "arch": "resnet18", "best_acc1": 61.5, "iter_num": 7}
    assert found[""] == {"imported_from": "state.pt", **wanted}
    step, found = imported("several", imagenet, "--as", "model=state_dict", "--as", "optimizer")
    assert found.keys() == {"", "model", "optimizer"}
    assert found["optimizer"]["param_groups"] == optimizer["param_groups"]
    step, found = imported("extra", {**model, "0._extra_state": {"scale": 2}, "step": 9})
    assert step == 9 and found["model"]["0._extra_state"] == {"scale": 2}
    step, found = imported("count", {"model": model, "step": torch.tensor(4)})
    assert step == 4 and found.keys() == {"", "model"}
    torch.save({**imagenet, "history": torch.ones(9)}, file)
    ran = online(ctl, daemon, "import", "refused", file)
    assert ran.code == 2 and "has tensors beside its parts: history\n" in ran.err
    ready = ran.err.partition("without these tensors: ")[2].split()
    assert ready == [
        *("--as", "state_dict=state_dict"), *("--as", "optimizer=optimizer"),
        *("--as", "scheduler=scheduler"),
    ]  # fmt: skip
    assert online(ctl, daemon, "import", "offered", file, *ready).code == 0
    torch.save({"model_state_dict": model, "rng": torch.ones(9)}, file)
    assert "tensors: --as model=model_state_dict\n" in online(ctl, daemon, "import", "x", file).err
    ran = online(ctl, daemon, "import", "refused", file, "--as", "model", "--as", "optimizer")
    assert ran.code == 2 and "there is no 'model' in" in ran.err

    torch.save({"model": model, "step": 0}, file)
    assert "names none" not in online(ctl, daemon, "import", "zero", file).err

    nested = {"net": {"a.b": model}, "optimizers": [optimizer], "step": True}
    step, found = imported(
        "named", nested, "--as", "model=net.a.b", "--as", "optimizer=optimizers.0", "--step", 5
    )
    assert step == 5 and found.keys() == {"", "model", "optimizer"}
    fresh = Things(4)
    with PCcheckClient("named", 0, 1, socket=daemon.socket, on_error="raise") as client:
        client.attach(model=fresh.model, optimizer=fresh.optimizer)
        assert client.restore().step == 5
        client.checkpoint(step=6).wait_durable(60)
    fresh.values = given.values
    given.same(fresh, kinds=set())


def test_without_a_daemon(ctl: Ctl, tmp_path: Path) -> None:
    """A private daemon imports, also into a new directory."""
    safetensors_torch.save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors", {"step": "4"})
    words = ("import", "job", tmp_path / "w.safetensors")
    ran = ctl(tmp_path / "storage", *words)
    assert ran.code == 0, ran.err
    (one,) = ctl(tmp_path / "storage", "list", "--json").json["checkpoints"]
    assert (one["job"], one["step"]) == ("job", 4)
    ran = ctl(tmp_path / "storage", *words)
    assert ran.code == 1
    assert "job 'job' has checkpoints already (step 4)" in ran.err and "drop job" in ran.err
    safetensors_torch.save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    ran = ctl(tmp_path / "storage", "import", "other", tmp_path / "w.safetensors")
    assert "job other: step 0 from" in ran.out
    assert "step 0, because the file names none; --step sets it" in ran.err
    ran = ctl(None, *words)
    assert ran.code == 12 and "--storage" in ran.err
    ran = ctl(tmp_path / "storage", "--uid", 12345, *words)
    assert (ran.code, "run it as uid 12345" in ran.err) == (2, True)


class Config:
    """Not known to torch's safe loader."""


class Executed:
    """Creates a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_nothing_in_a_file_is_executed(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    trap, model = tmp_path / "executed", {"w": torch.ones(2)}

    def refused(place: Path, named: str) -> str:
        ran = online(ctl, daemon, "import", "job", place)
        assert ran.code == 2, (ran.code, ran.err)
        assert named in ran.err and "would execute code" in ran.err, ran.err
        assert not trap.exists()
        return ran.err

    for number, (value, named) in enumerate(
        [(Config(), "test_ctl_import.Config"), (Executed(trap), "posix.mkdir")]
    ):
        file = tmp_path / f"{number}.pt"
        torch.save({"model": model, "args": value}, file)
        assert "weights_only=False" in refused(file, named)
        place = tmp_path / f"value-{number}"
        dcp.save({"model": model, "args": value}, checkpoint_id=place, no_dist=True)
        assert "args: " in refused(place, named)
    place = tmp_path / "metadata"
    dcp.save({"model": model}, checkpoint_id=place, no_dist=True)
    (place / ".metadata").write_bytes(pickle.dumps(Executed(trap)))
    refused(place, "posix.mkdir")
    assert online(ctl, daemon, "list").code == 0
    assert online(ctl, daemon, "show", "job").code == 13
    with pytest.raises(pickle.UnpicklingError):
        dcp_directory._member(dict, "fromkeys")


@pytest.fixture
def told(daemon: Daemon, ctl: Ctl) -> Iterator[Callable[..., str]]:
    """The error of an import into job "job" that fails with this exit code, and saves nothing."""

    def told(place: Path, *words: object, code: int) -> str:
        ran = online(ctl, daemon, "import", "job", place, *words)
        assert ran.code == code, ran.err
        assert "hint: " in ran.err and "Traceback" not in ran.err, ran.err
        return ran.err

    yield told
    assert online(ctl, daemon, "show", "job").code == 13


def test_a_damaged_safetensors_file_is_refused(told: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"

    def header(entries: object, more: bytes = b"") -> None:
        text = json.dumps(entries).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + more)

    def entry(kind: str, shape: list[int], *offsets: int) -> dict[str, object]:
        return {"dtype": kind, "shape": shape, "data_offsets": list(offsets)}

    safetensors_torch.save_file({"w": torch.ones(300)}, file)
    whole = file.read_bytes()
    for length in (0, 5, 8, 40, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert str(file) in told(file, code=14)
    for entries in (
        [], {"w": 3}, {"w": entry("F32", [2], 0, 9)}, {"w": entry("F32", [-1, -1], 0, 4)},
        {"w": entry("F32", [2], -8, 0)}, {"w": entry("U8", [2**70], 0, 2**70)},
        {"__metadata__": 3}, {"w": entry("F4", [3], 0, 1)},
    ):  # fmt: skip
        header(entries, b"\0" * 8)
        told(file, code=14)
    file.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    told(file, code=14)
    header({"w": entry("F6_E2M3", [4], 0, 3)}, b"\0" * 3)
    assert "w has dtype F6_E2M3" in told(file, code=2)


def test_an_index_that_does_not_fit_its_files_is_refused(
    told: Callable[..., str], tmp_path: Path
) -> None:
    file, index = tmp_path / "a.safetensors", tmp_path / "a.safetensors.index.json"
    safetensors_torch.save_file({"w": torch.ones(300)}, file)
    whole = file.read_bytes()
    for names, words, code in (
        ({"w": "no.safetensors"}, "copy all files", 1), ({"w": "../a.safetensors"}, "name of", 14),
        ({"v": file.name}, "no tensor 'v'", 14), ([], "not an index", 14),
    ):  # fmt: skip
        index.write_text(json.dumps({"weight_map": names}))
        assert words in told(index, code=code)
    index.write_text("{")
    told(index, code=14)
    index.unlink()
    (tmp_path / "b.safetensors").write_bytes(whole)
    assert "a.safetensors, b.safetensors" in told(tmp_path, code=2)


def test_a_file_that_torch_did_not_write_is_refused(
    told: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "a.pt"
    for foreign in (b"root:x:0:0:root:/root:/bin/bash\n", b"hello\n", b"\x80\x02u."):
        file.write_bytes(foreign)  # that torch executes as instructions
        assert str(file) in told(file, code=1)
    assert "there is no" in told(tmp_path / "nothing.pt", code=2)
    (tmp_path / "empty").mkdir()
    told(tmp_path / "empty", code=2)

    safetensors_torch.save_file({"w": torch.ones(300)}, tmp_path / "a.safetensors")
    for data in (b"", b"PK", b"hello", (tmp_path / "a.safetensors").read_bytes()):
        file.write_bytes(data)
        assert "--format" in told(file, code=1)
    told(file, "--format", "dcp", code=1)
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for data in (b"", pickle.dumps({}), (tmp_path / "dcp" / ".metadata").read_bytes()[:-20]):
        (tmp_path / "dcp" / ".metadata").write_bytes(data)
        told(tmp_path / "dcp", code=1)


def test_a_torch_file_without_the_named_parts_is_refused(
    told: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2)}, "step": -1}, file)
    assert "there is no 'net' in" in told(file, "--as", "model=net", code=2)
    for names in (["=x"], ["model="], ["a", "a=model"]):
        told(file, *(word for name in names for word in ("--as", name)), code=2)
    for step in ("-1", "x", 2**63):
        told(file, f"--step={step}", code=2)
    for state in ([torch.ones(2)], torch.ones(2), {3: torch.ones(2)}, {"step": 3}):
        torch.save(state, file)
        told(file, code=2)
    torch.save({"model": {"w": torch.ones(2)}, "rng": {"torch": torch.ones(2)}}, file)
    assert "--as generators=rng" in told(file, code=2)


def test_a_whole_state_in_safetensors_is_refused(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    source = tmp_path / "whole.safetensors"
    saved(daemon, "source", Things(3), 7)
    assert online(ctl, daemon, "export", "source", "-o", source).code == 0
    ran = online(ctl, daemon, "import", "job", source)
    assert ran.code == 2 and "--only model" in ran.err


@pytest.mark.parametrize("name", ["Adam", "NAdam", "ASGD", "Rprop"])
def test_state_of_an_earlier_torch_is_made_to_fit(
    name: str, daemon: Daemon, ctl: Ctl, tmp_path: Path
) -> None:
    """Before torch 1.12 the step was a number, and groups had fewer options: torch's
    load_state_dict() takes them, and the next step must not end training."""
    path = tmp_path / "in.pt"

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        return model, getattr(torch.optim, name)(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()

    model, optimizer = made()
    train(model, optimizer)
    state = optimizer.state_dict()
    for entry in state["state"].values():
        numbers = {key: value.item() for key, value in entry.items() if value.dim() == 0}
        entry.update(numbers | {"step": int(entry["step"])})
    for group in state["param_groups"]:
        for option in ("foreach", "fused", "capturable", "maximize", "differentiable"):
            group.pop(option, None)
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    expected, resumed = made(), made()
    expected[0].load_state_dict(model.state_dict())
    expected[1].load_state_dict(state)
    assert online(ctl, daemon, "import", "job", path).code == 0
    with PCcheckClient("job", 0, 1, socket=daemon.socket) as client:
        client.attach(model=resumed[0], optimizer=resumed[1])
        assert client.restore()
        train(*resumed)
    train(*expected)
    for one, other in zip(expected[0].parameters(), resumed[0].parameters(), strict=True):
        assert identical(one, other)
