"""Trainings whose state changes outside of a plain `optimizer.step()`, by name.

A trainer process runs one of them with a client or undisturbed, kills itself after a step, and
reports its losses bit for bit.
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import torch
from torch import distributed, nn

from pccheck import PCcheckClient, PccheckWarning, UsageError
from tests.support.trainer import Commands, Trainer

WIDTH = 32
#: So many bytes that training changes something before a copy is complete.
HIDDEN = 4096


def batch() -> torch.Tensor:
    """Drawn from torch's generator, which is part of a checkpoint."""
    return torch.randn(8, WIDTH)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Dropout(0.1), nn.ReLU(), nn.Linear(HIDDEN, 1))


class Training:
    """A model and its optimizer; `things` has what a scenario attaches."""

    def __init__(self) -> None:
        self.model = network()
        self.gate: Callable[[], None] = lambda: None
        self.things: dict[str, Any] = {"model": self.model}

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(batch()).sub(1).square().mean()
        return found

    def step(self, number: int) -> float:
        raise NotImplementedError


class AveragesForEvaluation(Training):
    """A moving average, put into the model by load_state_dict() for an evaluation, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.things |= {"optimizer": self.optimizer, "average": self.average}

    def step(self, number: int) -> float:
        evaluated = self.evaluate() if number % 2 else 0.0  # while the last snapshot is read
        self.optimizer.zero_grad()
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        with torch.no_grad():
            now = list(self.model.parameters())
            torch._foreach_lerp_(list(self.average.parameters()), now, 0.5)
        return evaluated

    def evaluate(self) -> float:
        self.gate()
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self.average.state_dict())
        found = self.loss().item()
        self.model.load_state_dict(own)
        return found


class SkippedSteps(Training):
    """A GradScaler that skips steps, also the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.things |= {"optimizer": self.optimizer, "scaler": self.scaler}

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss() * (float("inf") if number in (1, 4, 5) else 1.0)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() + float(self.loss().detach())


class Accumulation(Training):
    """Three micro-batches for each step, with gradients that are kept as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.things |= {"optimizer": self.optimizer}

    def step(self, number: int) -> float:
        losses = []
        for _ in range(3):
            loss = self.loss() / 3
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return sum(losses)


class InBackward(Training):
    """One optimizer for each parameter; its step runs in backward."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.model.named_parameters():
            optimizer = torch.optim.Adam([parameter], lr=1e-3)
            self.things[name.replace(".", "_")] = optimizer
            parameter.register_post_accumulate_grad_hook(self._stepping(optimizer))

    @staticmethod
    def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def step(_parameter: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    def step(self, number: int) -> float:
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()


class ScheduleFree(Training):
    """Averages in place of a schedule: eval() and train() change the parameters."""

    def __init__(self) -> None:
        super().__init__()
        import schedulefree  # type: ignore[import-untyped]

        self.optimizer = schedulefree.AdamWScheduleFree(
            self.model.parameters(), lr=0.01, warmup_steps=3
        )
        self.things |= {"optimizer": self.optimizer}

    def step(self, number: int) -> float:
        self.gate()
        self.optimizer.train()
        self.optimizer.zero_grad()
        self.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if number % 2:
            return 0.0
        self.optimizer.eval()  # and saved so
        return self.loss().item()


class Several(Training):
    """Two models that train in turn, each with an optimizer and a scheduler; and a third model."""

    def __init__(self) -> None:
        super().__init__()
        self.other = network()
        first = torch.optim.Adam(self.model.parameters())
        second = torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)
        self.pairs = [
            (first, torch.optim.lr_scheduler.CosineAnnealingLR(first, 9)),
            (second, torch.optim.lr_scheduler.StepLR(second, 2)),
        ]
        self.things["other"] = self.other
        for name, (optimizer, scheduler) in zip("ab", self.pairs, strict=True):
            self.things |= {f"optimizer_{name}": optimizer, f"scheduler_{name}": scheduler}

    def step(self, number: int) -> float:
        optimizer, scheduler = self.pairs[number % 3 == 0]
        optimizer.zero_grad()
        loss = (self.other(batch()) - self.model(batch())).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return float(loss.detach())


class Compiled(Training):
    """Forward, backward, clipping and the optimizer's step in one compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.things |= {"optimizer": self.optimizer}

        def train(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(x).sub(1).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        self.train = torch.compile(train, backend="eager")

    def step(self, number: int) -> float:
        return float(self.train(batch()))


TRAININGS: dict[str, Callable[[], Training]] = {
    "averages": AveragesForEvaluation,
    "skipped-steps": SkippedSteps,
    "accumulation": Accumulation,
    "in-backward": InBackward,
    "schedule-free": ScheduleFree,
    "several": Several,
    "compiled": Compiled,
}


class EndCommands(Commands):
    """Adds `train`, and loops that a signal stops."""

    def train(self, name: str, socket: str = "", *, steps: int, kill: int = 0) -> tuple[int, Any]:
        """Returns the first step, and the losses up to `steps` as text. Without a socket it trains
        undisturbed. After step `kill` it waits until that step is durable, and kills itself."""
        warnings.simplefilter("error", PccheckWarning)
        torch.manual_seed(7 + bool(socket and not kill))  # a resumed run must not need the seed
        training = TRAININGS[name]()
        if not socket:
            torch.manual_seed(1)
            return 1, [training.step(number).hex() for number in range(1, steps + 1)]
        with PCcheckClient(name, socket=socket, on_error="raise") as client:
            training.gate = client.gate
            client.attach(rng=True, **training.things)
            first = client.restore().step + 1
            if first == 1:
                torch.manual_seed(1)
            losses = []
            for number in range(first, steps + 1):
                losses.append(training.step(number).hex())
                client.checkpoint(step=number)
                if number == kill:
                    saved = client.flush(60)
                    assert saved is not None and saved.step == kill, saved
                    os.kill(os.getpid(), signal.SIGKILL)
        return first, losses

    def compiled(self, socket: str) -> tuple[dict[str, int], dict[str, int]]:
        """Dynamo's counters without a client, and with a client that saves every step."""
        from torch._dynamo import config
        from torch._dynamo.utils import counters

        found = []
        for saves in (False, True):
            torch._dynamo.reset()
            counters.clear()
            training = Compiled()
            with PCcheckClient("compiled", socket=socket, on_error="raise") as client:
                if saves:
                    client.attach(rng=True, **training.things)
                for number in range(1, 9):
                    # torch itself compiles again when the gradients and Adam's state exist.
                    config.error_on_recompile = number > 4
                    training.step(number)
                    if saves:
                        handle = client.checkpoint(step=number)
                assert not saves or (client._planner.wait == "" and handle.wait_durable(60))
            breaks = sum(counters["graph_break"].values())
            found.append(dict(counters["stats"]) | {"breaks": breaks})
        return found[0], found[1]

    def until_stopped(self, socket: str, rank: int, world_size: int, store: str) -> tuple[int, int]:
        """Runs `until_stopped` as a rank. Reports ("durable", step) after each step."""
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        client = PCcheckClient("ranks", rank, world_size, socket=socket, on_error="raise")
        return until_stopped(client, lambda step: self.native.send(("durable", step)))

    def paced(self, socket: str, rank: int, store: str, steps: int, pause_s: float) -> list[int]:
        """One of two ranks: returns the steps at which should_checkpoint() was true, at least three
        of them."""
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=2
        )
        saved = []
        with PCcheckClient("ranks", rank, 2, socket=socket, on_error="raise") as client:
            client.attach(rng=True)
            for step in itertools.count():
                if step >= steps and len(saved) > 2:
                    break
                time.sleep(pause_s)
                if client.should_checkpoint(step):
                    client.checkpoint(step=step)
                    saved.append(step)
            client.flush()
        return saved

    def cut_off(self, socket: str, rank: int, store: str) -> list[bool]:
        """One of two ranks; rank 1 loses its connection for a while. Returns what should_stop() was
        before, meanwhile, afterwards, and when rank 1 got a signal."""
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=2
        )
        with PCcheckClient("ranks", rank, 2, socket=socket, on_error="raise") as client:
            client.stop_on(signal.SIGTERM)
            says = [client.should_stop()]
            reduce = distributed.all_reduce
            if rank == 1:
                distributed.all_reduce = _lost
            says.append(client.should_stop())
            distributed.all_reduce = reduce
            says.append(client.should_stop())
            distributed.barrier()  # the script's own collectives still work
            if rank == 1:
                signal.raise_signal(signal.SIGTERM)
            return [*says, client.should_stop()]

    def signalled(self, socket: str) -> dict[str, Any]:
        """The effects of signals on one process, step by step."""
        seen: list[int] = []
        found: dict[str, Any] = {"seen": seen}
        signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
        client = PCcheckClient("alone", socket=socket, on_error="raise")
        training = Closure()
        client.attach(rng=True, **training.things)
        found["early"] = _error(client.should_stop)
        found["nothing"] = _error(client.stop_on)
        found["kill"] = _error(lambda: client.stop_on(signal.SIGKILL))
        with ThreadPoolExecutor(1) as pool:
            found["thread"] = pool.submit(_error, lambda: client.stop_on(signal.SIGTERM)).result()
        client.stop_on(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, deadline_s=60)
        found["before"] = client.should_stop()
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR1)
            os._exit(0)
        found["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found["parent"] = client.should_stop()
        training.in_the_step = lambda: os.kill(os.getpid(), signal.SIGTERM)
        training.step(1)
        found["after"] = client.should_stop()
        signal.raise_signal(signal.SIGINT)  # no KeyboardInterrupt
        handle = client.checkpoint(step=1)
        client.close()
        found["state"] = str(handle.state)
        signal.raise_signal(signal.SIGTERM)
        found["handlers"] = [signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL]
        found["handlers"].append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        return found


def _lost(*_: object) -> NoReturn:
    raise RuntimeError("Connection reset by peer")


class Closure(Training):
    """Calls `in_the_step` in the middle of an optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.things |= {"optimizer": self.optimizer}
        self.in_the_step: Callable[[], object] = lambda: None

    def step(self, number: int) -> float:
        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            self.in_the_step()
            return loss.item()

        return float(self.optimizer.step(closure))


def _error(function: Callable[[], object]) -> str:
    try:
        function()
    except UsageError as error:
        return f"{error.message}; {error.hint}"
    return ""


def until_stopped(client: PCcheckClient, tell: Callable[[int], object]) -> tuple[int, int]:
    """Trains in lockstep with the other ranks, and saves only before it stops. Returns the last
    step and the durable step."""
    with client:
        training = Accumulation()
        client.attach(rng=True, **training.things)
        client.stop_on(signal.SIGTERM, deadline_s=60)
        number, stops = client.restore().step, False
        while not stops:
            number += 1
            training.step(number)
            distributed.barrier()  # as the sum of gradients does
            tell(number)
            stops = client.should_stop()
        client.checkpoint(step=number)
        saved = client.flush()
        assert saved is not None and saved.step is not None
        return number, saved.step


def main() -> None:
    """A rank that torchrun has started."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    last, saved = until_stopped(PCcheckClient(), lambda step: print(f"STEP {step}", flush=True))
    print(f"RANK {rank} LAST {last} SAVED {saved}", flush=True)
    distributed.destroy_process_group()


class EndTrainer(Trainer):
    commands = EndCommands


if __name__ == "__main__":
    main()
