"""The targets with their words."""

from __future__ import annotations

from dataclasses import dataclass

_TARGETS = "tests.transparent.targets"
_TCP = ("--tcp-established", "--network-lock", "skip")


@dataclass(frozen=True)
class Case:
    """A program, and what is special about it."""

    name: str
    module: str
    words: tuple[str, ...] = ()
    steps: int = 100
    pace: float = 0.03
    ringless: bool = False  #: may not make an io_uring
    ranks: int = 0  #: with any, torchrun starts so many
    may_refuse: bool = False  #: with a sentence; then the target must go on to its end
    criu: tuple[str, ...] = ()  #: options that CRIU alone needs

    def command(self, python: str, log: object) -> list[str]:
        """`python -m`, as a user would type it."""
        start = [python, "-m"]
        if self.ringless:
            start += [f"{_TARGETS}.ringless", *start]
        if self.ranks:
            start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
            start.append("-m")
        options = ["--steps", str(self.steps), "--pace", str(self.pace), *self.words]
        return [*start, f"{_TARGETS}.{self.module}", str(log), *options]


CASES = (
    Case("loop-1", "loop"),
    Case("loop-2", "loop", ("--threads", "2")),
    Case("loader", "loader"),
    Case("huggingface", "huggingface"),
    Case("torchrun-as-is", "ranked", ranks=1, may_refuse=True, criu=_TCP),
    Case("torchrun-1", "ranked", ringless=True, ranks=1, criu=_TCP),
    Case("torchrun-2", "ranked", ringless=True, ranks=2, may_refuse=True, criu=_TCP),
    Case("files", "files"),
    Case("pipes", "pipes"),
    Case("listener", "listener"),
    Case("heap", "heap", steps=300),
    Case("client", "client"),
)
