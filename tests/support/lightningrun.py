"""Trainings with Lightning that print their results with all digits.

    python -m tests.support.lightningrun FOLDER '[["name", {"option": value}], ...]'

Each runs in a forked process of its own, which may kill itself, so that Lightning is imported once.
FOLDER/NAME.RANK gets the output, with the exit code as last line. Under torchrun every rank does
the same. A training without "job" is undisturbed: the other trainings must have the same results.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from pccheck import PCcheckClient, UsageError
from pccheck.integrations.lightning import PCcheckCallback
from tests.support.lightningshapes import SHAPES, hexadecimal
from tests.support.waiting import until

ITEMS, BATCH, WIDTH = 48, 8, 16
Options = dict[str, Any]


class Items(Dataset[torch.Tensor]):
    """Draws random numbers for every item; no two items are equal."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(0, 1, WIDTH) * (index + 1) / ITEMS + torch.rand(()) / 100


class Model(LightningModule):
    def __init__(self, odd: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 512), nn.BatchNorm1d(512), nn.Dropout(0.1), nn.Linear(512, 1)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        say(f"FORWARD {self.global_step}")
        loss = self.net(batch).square().mean() + self.net(batch).mean()
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        lr, place = optimizer.param_groups[0]["lr"], f"epoch {self.current_epoch} batch {batch_idx}"
        say(f"STEP {self.global_step} {place} {hexadecimal(loss)} {hexadecimal(batch)} lr {lr}")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        say(f"VALIDATION {self.global_step} {hexadecimal(self.net(batch))}")

    def on_train_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        moments = [v for entry in optimizer.state.values() for v in entry.values()]
        tensors = [*self.state_dict().values(), *moments]
        say(f"END {self.global_step} {' '.join(map(hexadecimal, tensors))}")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        say(f"GRADIENTS {self.global_step}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(lambda *_: say(f"UPDATED {self.global_step}"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Kill(Callback):
    """Kills this process after step `at`, once the checkpoint of step `saved` is on all ranks."""

    def __init__(self, at: int, saved: int, saver: PCcheckCallback) -> None:
        self.at, self.saved, self.saver = at, saved, saver

    def on_train_batch_end(self, trainer: Trainer, *_more: object) -> None:
        if trainer.global_step == self.at:
            client = self.saver.client
            until(lambda: self.saved in [one.step for one in client.steps()])
            os.kill(os.getpid(), signal.SIGKILL)


class Stop(Callback):
    """Ends training after step `at`, in the middle of an epoch."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Trainer, *_more: object) -> None:
        trainer.should_stop = trainer.global_step == self.at


class Average(Callback):
    """The average of the parameters over all steps."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, *_more: object) -> None:
        now = [parameter.detach() for parameter in trainer.lightning_module.parameters()]
        before = self.sums or [torch.zeros_like(one) for one in now]
        self.sums = [one + two for one, two in zip(before, now, strict=True)]

    def on_train_end(self, trainer: Trainer, *_more: object) -> None:
        say(f"END average {' '.join(map(hexadecimal, self.sums))}")

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sums = state_dict["sums"]


def say(text: str) -> None:
    print(text, flush=True)


def trainer_of(options: Options, *callbacks: Callback, files: bool = False, **more: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=options.get("devices", 1), num_nodes=options.get("nodes", 1),
        strategy=options.get("strategy", "auto"), max_epochs=options.get("epochs", 3),
        callbacks=list(callbacks), enable_checkpointing=files, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        accumulate_grad_batches=options.get("accumulate", 1), **more,
    )  # fmt: skip


def loader_of(options: Options) -> Any:
    seed_everything(5, verbose=False)
    kind = DataLoader if options.get("plain") else StatefulDataLoader
    ranks = options.get("devices", 0) * options.get("nodes", 1)
    if ranks and not options.get("shuffle"):  # an order that depends on seed and epoch only
        sampler = DistributedSampler(Items(), ranks, int(os.environ["RANK"]), seed=5)
        return kind(Items(), BATCH, sampler=sampler)
    if options.get("drawn"):
        return kind(Items(), BATCH, sampler=RandomSampler(Items()))
    return kind(Items(), BATCH, shuffle=True)


def train(options: Options) -> None:
    """`every`, `kill` at a step when `saved` is durable, `stop` after a step, `epochs`,
    `accumulate`, `average`, `validate`, `plain` loader, an order that is `drawn` by torch's
    sampler, `devices`, `shuffle` with several of them.
    """
    callbacks: list[Callback] = []
    if job := options.get("job"):
        saver = PCcheckCallback(options["every"], job=job)
        callbacks = [saver]
        if stop := options.get("stop"):
            callbacks.insert(0, Stop(stop))
        if kill := options.get("kill"):
            callbacks.append(Kill(kill, options["saved"], saver))
    if options.get("average"):
        callbacks.append(Average())
    data = [loader_of(options)]
    if options.get("validate"):
        data.append(DataLoader(Items(), BATCH))
    path = "pccheck://" if job else None
    trainer_of(options, *callbacks).fit(Model(options.get("odd")), *data, ckpt_path=path)
    if job:
        with PCcheckClient(job, replicated=bool(options.get("strategy"))) as client:
            say(f"BYTES {client.steps()[0].nbytes}")


def order(options: Options) -> None:
    """Records when the training waits for a copy."""
    saver = PCcheckCallback(1, job=options["job"])

    class Spy(Callback):
        def on_train_start(self, *_more: object) -> None:
            gate = saver.client._saver._gate
            wait, checkpoint = gate.wait, saver.client.checkpoint

            def spied(**options: Any) -> None:
                if not gate.idle:
                    say("GATE")
                wait(**options)

            def saved(*arguments: Any, **more: Any) -> Any:
                say(f"SAVE {more['step']} wait={saver.client._planner.wait!r}")
                return checkpoint(*arguments, **more)

            type(gate).wait = lambda _self, **options: spied(**options)  # type: ignore[method-assign]
            saver.client.checkpoint = saved  # type: ignore[method-assign]

    trainer_of(options, saver, Spy()).fit(Model(), loader_of(options))


def folds(options: Options) -> None:
    """Two runs under one job name, as in a cross validation."""
    for _ in range(2):
        train(options)


def paths(options: Options) -> None:
    """ModelCheckpoint and save_checkpoint() with pccheck:// paths; the script has a client, too."""
    job, folder = options["job"], Path(options["folder"])
    client = PCcheckClient(job)
    saver = PCcheckCallback(0)  # finds the client by PCCHECK_JOB
    best = ModelCheckpoint(f"pccheck://{job}", monitor="epoch", mode="max", save_top_k=1)
    files = ModelCheckpoint(folder, filename="{step}", save_top_k=1)
    trainer = trainer_of(options, saver, best, files, files=True)
    model = Model()
    trainer.fit(model, loader_of(options), ckpt_path="pccheck://")
    say(f"SHARED {saver.client is client and not client.closed}")
    say(f"PINNED {[(one.step, one.pinned) for one in client.steps()]}")
    say(f"BEST {best.best_model_path} FILES {sorted(path.name for path in folder.iterdir())}")

    trainer.strategy.remove_checkpoint(best.best_model_path)
    say(f"PINNED {[(one.step, one.pinned) for one in client.steps()]}")
    told = hexadecimal(next(model.parameters()))
    with torch.no_grad():
        next(model.parameters()).zero_()
    trainer.validate(model, DataLoader(Items(), BATCH), ckpt_path="best", verbose=False)
    say(f"LOADED {hexadecimal(next(model.parameters())) == told}")
    for attempt in (
        lambda: trainer.save_checkpoint("pccheck://other/18"),
        lambda: trainer.save_checkpoint(f"pccheck://{job}/last.ckpt"),
        lambda: trainer.save_checkpoint(f"pccheck://{job}/5"),
        lambda: trainer.save_checkpoint(f"pccheck://{job}", weights_only=True),
        lambda: trainer.validate(model, DataLoader(Items()), ckpt_path=f"pccheck://{job}/7"),
    ):
        try:
            attempt()
            say("ERROR none")
        except Exception as error:
            say(f"ERROR {type(error).__name__} {error}")
    client.close()


def crowded(options: Options) -> None:
    """ModelCheckpoint keeps `best` checkpoints; each is a new best. Two may not be pinned."""
    job, kept = options["job"], options.get("best", 2)
    best = ModelCheckpoint(f"pccheck://{job}", monitor="epoch", mode="max", save_top_k=kept)
    with PCcheckClient(job, replicated=bool(options.get("strategy"))) as client:
        trainer = trainer_of(options, PCcheckCallback(0, client=client), best, files=True)
        trainer.fit(Model(), loader_of(options))
        say(f"PINNED {[one.step for one in client.steps() if one.pinned]}")


def refused(options: Options) -> None:
    """ModelCheckpoints that cannot save to their path: fit() raises, and does not train."""
    place = f"pccheck://{options['job']}"
    for files in (
        ModelCheckpoint(place, save_last=True),
        ModelCheckpoint(place, save_weights_only=True),
        ModelCheckpoint(place, filename="{epoch}"),
        ModelCheckpoint(place, filename="best-{step}", auto_insert_metric_name=False),
        ModelCheckpoint("pccheck://other"),
    ):
        trainer = trainer_of(options, PCcheckCallback(0, job=options["job"]), files, files=True)
        try:
            trainer.fit(Model(), loader_of(options))
            say("ERROR none")
        except UsageError as error:
            say(f"ERROR {error}")


def fabric(_options: Options) -> None:
    """A loop of Fabric: first whole and undisturbed, then in two runs."""
    made = Fabric(accelerator="cpu", devices=1)

    def run(last: int, client: PCcheckClient | None) -> None:
        torch.manual_seed(1)
        items = [torch.rand(WIDTH) for _ in range(ITEMS)]
        net = nn.Linear(WIDTH, 1)
        model, optimizer = made.setup(net, torch.optim.AdamW(net.parameters(), 0.1))
        loader = StatefulDataLoader(items, BATCH, shuffle=True)
        batches, done = made.setup_dataloaders(loader), 0
        if client:
            client.attach(model=model, optimizer=optimizer, loader=loader, rng=True)
            done = client.restore().step
        for step, batch in enumerate(batches, done + 1):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            made.backward(loss)
            optimizer.step()
            say(f"STEP {step} {hexadecimal(loss)}")
            if client:
                client.checkpoint(step=step)
            if step == last:
                break

    run(6, None)
    for last in (3, 6):
        with PCcheckClient() as client:
            run(last, client)


def shaped(options: Options) -> None:
    """A training of `lightningshapes`: `shape`, `every`, `kill`, `saved`, `stop`, `epochs`,
    `steps`; `last`: the saver is the last callback."""
    shape, job = SHAPES[options["shape"]](), options.get("job")
    callbacks = shape.callbacks
    if job:
        saver = PCcheckCallback(options["every"], job=job)
        callbacks = [*callbacks, saver] if options.get("last") else [saver, *callbacks]
        if kill := options.get("kill"):
            callbacks.append(Kill(kill, options["saved"], saver))
        if stop := options.get("stop"):
            callbacks.append(Stop(stop))
    Path(options["folder"]).mkdir(exist_ok=True)
    trainer = trainer_of(
        options,
        *callbacks,
        default_root_dir=options["folder"],
        max_steps=options.get("steps", -1),
        **shape.trainer,
    )
    data = None if shape.loads else loader_of(options), DataLoader(Items(), BATCH)
    trainer.fit(shape.model, *data, ckpt_path="pccheck://" if job else None)


def terminated(options: Options) -> None:
    """As the page says: a last checkpoint after the step in which SIGTERM came."""
    with PCcheckClient(options["job"]) as client:
        client.stop_on(signal.SIGTERM)
        saver = PCcheckCallback(options["every"], client=client)

        class StopOn(Callback):
            def on_train_batch_end(self, trainer: Trainer, *_more: object) -> None:
                if trainer.global_step == options["at"]:
                    os.kill(os.getpid(), signal.SIGTERM)
                if client.should_stop():
                    saver.every_n_steps = 1

        shape = SHAPES[options["shape"]]()
        trainer = trainer_of(options, saver, StopOn(), *shape.callbacks, **shape.trainer)
        data = loader_of(options), DataLoader(Items(), BATCH)
        trainer.fit(shape.model, *data, ckpt_path="pccheck://")


KINDS = {
    "train": train, "shaped": shaped, "terminated": terminated, "folds": folds, "order": order,
    "paths": paths, "crowded": crowded, "refused": refused, "fabric": fabric,
}  # fmt: skip


def meet(place: Path) -> None:
    """Rank 0 opens another store: torchrun's store has addresses of the previous training."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place.with_suffix(".new").write_text(str(free.getsockname()[1]))
        place.with_suffix(".new").rename(place)
    until(place.exists)
    os.environ["MASTER_PORT"] = place.read_text()


def forked(output: Path, options: Options) -> int:
    """The exit code, -9 when it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            if "RANK" in os.environ:
                meet(output.with_suffix(".port"))
                os.environ.update(options.get("environments", {}).get(os.environ["RANK"], {}))
            os.environ["PCCHECK_JOB"] = options.get("job", "")
            KINDS[options.get("kind", "train")](options)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(folder: str, scenarios: list[tuple[str, Options]]) -> None:
    for name, options in scenarios:
        output = Path(folder) / f"{name}.{os.environ.get('RANK', '0')}"
        code = forked(output, options)
        with output.open("a") as file:
            file.write(f"CODE {code}\n")


def main() -> None:
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # optimizers import it
    run(sys.argv[1], json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
