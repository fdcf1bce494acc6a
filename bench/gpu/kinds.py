"""Ten kinds of training scripts on a GPU, each killed twice: are the losses those of a whole run?

    python -m bench.gpu.kinds [--only KIND...] [--device cpu] [--lanes 3] [--budget-s 110]
                              [--directory DIR] [--json FILE]

A kind trains once without PCcheck. Then it trains with a checkpoint every third step, and is killed
with SIGKILL after step 8, started again, killed after step 16, and started again. The losses of all
steps of all starts, and every parameter at the end, must be those of the first run, bit for bit;
the document has their hashes. What this machine lacks is reported as "not here". Ends with 1 when a
kind's losses differ, or when a kind fails.
"""

from __future__ import annotations

import os

# Before torch is loaded: deterministic kernels, and no look at the GPU that would forbid forks.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import multiprocessing
import multiprocessing.connection
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench import common, ours
from bench.gpu import contender
from bench.gpu.contender import Report
from bench.gpu.model import TINY, Gpt
from pccheck import PCcheckClient

STEPS, EVERY = 24, 3
KILLED_AFTER = (8, 16)
NOT_INITIALISED = 3  # of CUDA's driver
#: By kind; loaded before the forks.
FRAMEWORKS = {
    "timm": "timm", "accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning",
}  # fmt: skip


@dataclass(slots=True)
class Run:
    """What one start of a kind gets; `socket` is empty when it trains without PCcheck."""

    kind: str
    device: torch.device
    socket: str
    pipe: Connection

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def need_gpu(self) -> None:
        if not self.on_gpu:
            raise ModuleNotFoundError("a GPU")

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(1)
        return Gpt(TINY).to(self.device, dtype)

    def batch(self, step: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(step)
        return torch.randint(TINY.symbols, (4, TINY.window), generator=made).to(self.device)

    def say(self, step: int, loss: torch.Tensor) -> None:
        self.pipe.send((step, float(loss.detach().item()).hex()))

    def end(self, model: nn.Module) -> None:
        found = hashlib.sha256()
        for tensor in model.state_dict().values():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        self.pipe.send((0, found.hexdigest()))

    @contextlib.contextmanager
    def client(self, attach: Callable[[PCcheckClient], None], **options: Any) -> Iterator[Any]:
        """The client with what `attach` attaches, restored; None without PCcheck."""
        if not self.socket:
            yield None
            return
        with PCcheckClient(job=self.kind, socket=self.socket, **options) as client:
            attach(client)
            client.restore()
            yield client

    def loop(
        self, step_of: Callable[[int], torch.Tensor], attached: dict[str, Any], **options: Any
    ) -> None:
        """A loop of the script's own."""

        def attach(client: PCcheckClient) -> None:
            client.attach(**attached, at=at, rng=True)

        at = {"step": 0}
        with self.client(attach, **options) as client:
            for step in range(at["step"] + 1, STEPS + 1):
                if client is not None and options.get("gate") == "manual":
                    client.gate()
                self.say(step, step_of(step))
                at["step"] = step
                if client is not None and step % EVERY == 0:
                    client.checkpoint(step=step)
            self.end(attached["model"])


# -- the kinds ------------------------------------------------------------------------------------


def plain(run: Run, **options: Any) -> None:
    model = run.model(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run.loop(stepper(run, model, optimizer), {"model": model, "optimizer": optimizer}, **options)


def stepper(
    run: Run, model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[int], torch.Tensor]:
    def step_of(step: int) -> torch.Tensor:
        loss = model(run.batch(step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step_of


def push(run: Run) -> None:
    plain(run, transfer="push")


def device(run: Run) -> None:
    plain(run, snapshot="device")


def compiled(run: Run) -> None:
    run.need_gpu()
    model = run.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fast = torch.compile(model, mode="reduce-overhead")
    run.loop(stepper(run, fast, optimizer), {"model": model, "optimizer": optimizer})


def graph(run: Run) -> None:
    """A whole step as a CUDA graph. The steps before the capture are the same in every start."""
    run.need_gpu()
    model: Any = run.model()
    tokens = run.batch(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    step_of = stepper(run, lambda _: model(tokens), optimizer)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step_of(0)
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        loss = model(tokens)  # step_of would copy a batch from the CPU
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def replay(step: int) -> torch.Tensor:
        tokens.copy_(run.batch(step))
        recorded.replay()
        found: torch.Tensor = loss
        return found

    run.loop(replay, {"model": model, "optimizer": optimizer}, gate="manual")


def timm(run: Run) -> None:
    """fp16 with a scaler, BatchNorm's buffers, and an average of the weights."""
    library: Any = importlib.import_module("timm")
    torch.manual_seed(1)
    model = library.create_model("mobilenetv3_small_050", num_classes=10).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler: Any = torch.amp.GradScaler(run.device.type)
    average = library.utils.ModelEmaV3(model, decay=0.99)
    half = torch.float16 if run.on_gpu else torch.bfloat16

    def step_of(step: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 64, 64, generator=made).to(run.device)
        with torch.autocast(run.device.type, half):
            loss = nn.functional.cross_entropy(model(images), torch.arange(8, device=run.device))
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update(model, step=step)
        return loss

    run.loop(
        step_of, {"model": model, "optimizer": optimizer, "scaler": scaler, "average": average}
    )


def accelerate(run: Run) -> None:
    library: Any = importlib.import_module("accelerate")
    ours_of: Any = importlib.import_module("pccheck.integrations.accelerate")
    accelerator = library.Accelerator(
        mixed_precision="fp16" if run.on_gpu else "no", cpu=not run.on_gpu
    )
    bare = run.model()
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    at = {"step": 0}
    with run.client(lambda client: ours_of.attach(client, accelerator, at=at)) as client:
        for step in range(at["step"] + 1, STEPS + 1):
            with accelerator.accumulate(model):
                loss = model(run.batch(step))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            run.say(step, loss)
            at["step"] = step
            if client is not None and step % EVERY == 0:
                client.checkpoint(step=step)
        run.end(bare)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10 * STEPS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(number)
        row = torch.randint(TINY.symbols, (16,), generator=made)
        return {"input_ids": row, "labels": row}


def trainer(run: Run) -> None:
    """Hugging Face's Trainer."""
    library: Any = importlib.import_module("transformers")
    ours_of: Any = importlib.import_module("pccheck.integrations.huggingface")
    torch.manual_seed(1)
    config = library.GPT2Config(
        vocab_size=TINY.symbols, n_embd=64, n_layer=2, n_head=2, n_positions=16
    )

    class Told(library.Trainer):  # type: ignore[misc]
        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            found = super().compute_loss(*arguments, **named)
            run.say(self.state.global_step + 1, found)
            return found

    with tempfile.TemporaryDirectory() as folder:
        made = Told(
            model=library.GPT2LMHeadModel(config), train_dataset=Rows(),
            args=library.TrainingArguments(
                folder, max_steps=STEPS, per_device_train_batch_size=4, fp16=run.on_gpu,
                use_cpu=not run.on_gpu, save_strategy="no", report_to=[], disable_tqdm=True,
                full_determinism=False, seed=1, logging_strategy="no",
            ),
        )  # fmt: skip
        if run.socket:
            made.add_callback(
                ours_of.PCcheckCallback(every_n_steps=EVERY, job=run.kind, socket=run.socket)
            )
            made.train(resume_from_checkpoint=ours_of.pccheck_resume(made))
        else:
            made.train()
        run.end(made.model)


def lightning(run: Run) -> None:
    library: Any = importlib.import_module("lightning")
    bare = run.model()

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = bare

        def training_step(self, _batch: torch.Tensor, _number: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(run.batch(self.global_step + 1))
            run.say(self.global_step + 1, loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.inner.parameters(), lr=1e-3)

    callbacks, path = [], None
    if run.socket:
        ours_of: Any = importlib.import_module("pccheck.integrations.lightning")
        callbacks = [ours_of.PCcheckCallback(every_n_steps=EVERY, job=run.kind, socket=run.socket)]
        path = "pccheck://"
    made = library.Trainer(
        accelerator="gpu" if run.on_gpu else "cpu", devices=1, max_steps=STEPS, logger=False,
        precision="16-mixed" if run.on_gpu else "32-true", callbacks=callbacks,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Rows())
    made.fit(Module(), loader, ckpt_path=path)
    run.end(bare)


def fsdp2(run: Run) -> None:
    """One rank."""
    from torch.distributed.fsdp import fully_shard

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if run.on_gpu else "gloo", store=store, rank=0, world_size=1,
        device_id=run.device if run.on_gpu else None,
    )  # fmt: skip
    mesh = dist.init_device_mesh(run.device.type, (1,))  # type: ignore[attr-defined]
    model = run.model()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.loop(stepper(run, model, optimizer), {"model": model, "optimizer": optimizer})


KINDS: dict[str, Callable[[Run], None]] = {
    "plain": plain, "push": push, "device": device, "trainer": trainer, "lightning": lightning,
    "graph": graph, "timm": timm, "accelerate": accelerate, "compiled": compiled, "fsdp2": fsdp2,
}  # fmt: skip


# -- killing them ---------------------------------------------------------------------------------


def start(kind: str, device_name: str, socket: str, pipe: Connection) -> None:
    """The process of one start."""
    torch.use_deterministic_algorithms(True)  # to warn only would choose other kernels
    torch.backends.cudnn.deterministic = True
    run = Run(kind, torch.device(device_name), socket, pipe)
    try:
        KINDS[kind](run)
    except (ModuleNotFoundError, ImportError) as error:
        pipe.send((-1, f"not here: {error}"))
    except Exception as error:
        pipe.send((-1, f"failed: {type(error).__name__}: {error}"[:500]))
    pipe.close()


@dataclass(slots=True)
class Outcome:
    losses: dict[int, str] = field(default_factory=dict)
    first: int = 0  # step
    parameters: str = ""
    error: str = ""


def attempt(context: Any, kind: str, device_name: str, socket: str, kill_after: int) -> Outcome:
    ours_end, theirs = context.Pipe(duplex=False)
    process = context.Process(target=start, args=(kind, device_name, socket, theirs))
    process.start()
    theirs.close()
    found = Outcome()
    with contextlib.suppress(EOFError):
        while True:
            step, text = ours_end.recv()
            if step < 0:
                found.error = text
            elif step == 0:
                found.parameters = text
            else:
                found.first = found.first or step
                found.losses[step] = text
            if step == kill_after:
                process.kill()
    process.join()
    return found


def digest(losses: dict[int, str]) -> str:
    return hashlib.sha256(" ".join(losses[step] for step in sorted(losses)).encode()).hexdigest()


def tried(context: Any, kind: str, device_name: str, socket: str) -> dict[str, Any]:
    """One kind's row. "equal" is None when it could not be tried."""
    start_s = time.monotonic()
    whole = attempt(context, kind, device_name, "", 0)
    row: dict[str, Any] = {"kind": kind, "equal": None, "error": whole.error}
    if whole.error:
        return row
    starts = [attempt(context, kind, device_name, socket, at) for at in (*KILLED_AFTER, 0)]
    row["error"] = next((one.error for one in starts if one.error), "")
    seen: dict[int, str] = {}
    different = set()
    for one in starts:
        different |= {step for step, loss in one.losses.items() if whole.losses.get(step) != loss}
        seen |= one.losses
    firsts = [one.first for one in starts]
    return row | {
        "equal": not different
        and seen.keys() == whole.losses.keys()
        and starts[-1].parameters == whole.parameters
        and 1 == firsts[0] < firsts[1] < firsts[2],
        "first_steps": firsts,
        "different_steps": sorted(different),
        "losses": [digest(whole.losses), digest(seen)],
        "parameters": [whole.parameters, starts[-1].parameters],
        "seconds": round(time.monotonic() - start_s, 1),
    }


def lane(kinds: list[str], device_name: str, socket: str, method: str, pipe: Connection) -> None:
    context = multiprocessing.get_context(method)
    for kind in kinds:
        pipe.send(tried(context, kind, device_name, socket))
    pipe.close()


def method_of(device_name: str) -> str:
    """Forks of this process, which has imported everything, unless that has started CUDA."""
    if device_name == "cpu":
        return "fork"
    cuda = ctypes.CDLL("libcuda.so.1")
    untouched = cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == NOT_INITIALISED
    return "fork" if untouched else "spawn"


def measure(options: argparse.Namespace, report: Report, directory: Path) -> list[dict[str, Any]]:
    for name in (FRAMEWORKS[kind] for kind in options.only if kind in FRAMEWORKS):
        with contextlib.suppress(Exception):  # its kind reports it
            importlib.import_module(name)
    rows: list[dict[str, Any]] = []
    method = method_of(options.device)
    context: Any = multiprocessing.get_context(method)
    daemon = ours.Daemon("--dram", "512MiB", storage=directory)
    with daemon:
        daemon.start()
        pipes, lanes = [], []
        for number in range(options.lanes):
            here, there = context.Pipe(duplex=False)
            kinds = options.only[number :: options.lanes]
            socket = str(daemon.socket)
            lanes.append(
                context.Process(target=lane, args=(kinds, options.device, socket, method, there))
            )
            lanes[-1].start()
            there.close()
            pipes.append(here)
        while pipes and report.has_time():
            ready: list[Any] = multiprocessing.connection.wait(pipes, 1)
            for pipe in ready:
                try:
                    rows.append(pipe.recv())
                    print(f"  {rows[-1]['kind']}: {ending(rows[-1])}", flush=True)
                    report.keep(rows=rows)
                except EOFError:
                    pipes.remove(pipe)
        for process in lanes:
            process.kill()
        daemon.stop()
    there_are = {row["kind"] for row in rows}
    rows += [
        {"kind": kind, "equal": None, "error": "no time"}
        for kind in options.only if kind not in there_are
    ]  # fmt: skip
    return rows


def ending(row: dict[str, Any]) -> str:
    if row["equal"] is None or row["error"]:
        return str(row["error"])
    return "the same losses" if row["equal"] else f"other losses: {row['different_steps']}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{STEPS} steps, a checkpoint every {EVERY}; killed with SIGKILL after steps "
        f"{KILLED_AFTER[0]} and {KILLED_AFTER[1]}.",
        "",
        "| kind | ended | the starts began with steps | sha256 of the losses | of the parameters |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        losses, parameters = (row.get(key, [""])[-1][:16] for key in ("losses", "parameters"))
        firsts = ", ".join(map(str, row.get("first_steps", [])))
        lines.append(f"| {row['kind']} | {ending(row)} | {firsts} | {losses} | {parameters} |")
    return lines


def main() -> int:
    parser = contender.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--lanes", type=int, default=3, help="kinds that run at a time")
    options = contender.begin(parser)
    report = Report("kinds", options)
    with common.scratch(options.directory) as scratch:
        rows = measure(options, report, scratch)
    report.keep(rows=rows)
    report.finish(table(rows))
    return int(any(row["equal"] is False or row["error"].startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(common.exit_code(main))
