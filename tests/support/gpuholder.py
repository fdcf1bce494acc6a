"""A process that holds others in the stand-in driver and obeys commands, as `pccheckctl snapshot`
would: a program of its own, since the loader finds the stand-in by LD_LIBRARY_PATH.

    with Holder(directory, "holder", version=13000) as holder:
        facts = holder("hold", pids=[target])["facts"]
        holder("release")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from . import standin
from .programs import ROOT
from .standin import Faults


class HolderError(AssertionError):
    """What a command raised there."""

    def __init__(self, kind: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.kind, self.message, self.hint = kind, message, hint


class Holder:
    """`limits` are those of pccheck_process.gpu, in seconds."""

    def __init__(self, directory: Path, name: str, **options: Any) -> None:
        self.faults = Faults(directory / name)
        runtime = directory / "runtime"
        runtime.mkdir(mode=0o700, exist_ok=True)
        environment = standin.environment(directory, faults=self.faults, **options)
        paths = os.pathsep.join(str(ROOT / one) for one in (".", "client", "native"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.gpuholder"],
            env=os.environ | environment | {"PYTHONPATH": paths, "XDG_RUNTIME_DIR": str(runtime)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, do: str, **words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in found:
            raise HolderError(*found["error"])
        return found

    def __call__(self, do: str, **words: Any) -> dict[str, Any]:
        self.start(do, **words)
        return self.answer()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()


class _Commands:
    """Of the program."""

    def hold(self, pids: list[int], limits: dict[str, float]) -> dict[str, Any]:
        from pccheck_process.gpu import holding

        found = holding.hold_all(pids, _limits(limits), lambda: None, needed=True)
        self.held = found
        guard = found._guard
        return {"facts": found.facts, "guard": guard._process.pid if guard else 0}

    def release(self) -> dict[str, Any]:
        if (trouble := self.held.release()) is not None:
            raise trouble
        return {}

    def forget(self) -> dict[str, Any]:
        """As when CRIU has ended the processes, whose image has what they had on their GPUs."""
        self.held.forget()
        return {}

    def wake(
        self, facts: dict[str, Any], gpus: dict[str, str], limits: dict[str, float]
    ) -> dict[str, Any]:
        from pccheck_process.gpu import holding

        holding.wake(facts, None, gpus, _limits(limits))
        return {}

    def refusals(self, facts: dict[str, Any], gpus: dict[str, str]) -> dict[str, Any]:
        from pccheck_process import gpu

        return {"refusals": gpu.refusals(facts, gpus)}

    def recover(self) -> dict[str, Any]:
        from pccheck_process import gpu

        going, troubles = gpu.recover()
        return {"going": going, "troubles": [*map(str, troubles)]}

    def inspect(self, pid: int) -> dict[str, Any]:
        from pccheck_process import gpu
        from pccheck_process.looking import look

        before = look(pid, tree=False, root=True)
        found = gpu.inspect(before)
        more = found.image_bytes - before.image_bytes
        refusals = [one.what for one in found.refusals[len(before.refusals) :]]
        return {"gpu": found.gpu, "bytes": more, "refusals": refusals}


def _limits(words: dict[str, float]) -> Any:
    from pccheck_process.gpu.driver import CallLimits

    return CallLimits(**words)


def main() -> None:
    from pccheck_wire.errors import PccheckError

    commands = _Commands()
    for line in sys.stdin:
        words = json.loads(line)
        try:
            found = getattr(commands, words.pop("do"))(**words)
        except PccheckError as error:
            found = {"error": [type(error).__name__, error.message, error.hint]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
