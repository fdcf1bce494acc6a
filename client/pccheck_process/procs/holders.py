"""Which other processes have a pipe or a socket open."""

from __future__ import annotations

from collections.abc import Collection

from .procfs import Proc, parse_stat, shown


class Holders:
    """Looks at every other process once, when first asked."""

    def __init__(self, proc: Proc, tree: Collection[int]) -> None:
        self._proc = proc
        self._tree = set(tree)
        self._pids: dict[str, int] | None = None
        self._seen_all = True

    def holder(self, target: str) -> int | None:
        """A process outside the tree with `target` ("pipe:[123]") open; None when none is known."""
        if self._pids is None:
            self._pids = {}
            self._look()
        return self._pids.get(target)

    def name(self, target: str) -> str:
        """For a sentence: the holder, or "another process"."""
        pid = self.holder(target)
        if pid is None:
            return "another process"
        stat = parse_stat(self._proc.text(pid, "stat"))
        return f"process {pid} ({shown(stat.comm)})" if stat else f"process {pid}"

    def nobody(self, target: str) -> bool:
        """No process has `target` open; False when some could not be looked at."""
        return self.holder(target) is None and self._seen_all

    def _look(self) -> None:
        assert self._pids is not None
        for pid in self._proc.pids():
            if pid in self._tree:
                continue
            numbers = self._proc.numbers(pid, "fd")
            if numbers is None and self._proc.stat(pid) is not None:
                self._seen_all = False
            for fd in numbers or []:
                target = self._proc.link(pid, "fd", fd)
                if target and target.startswith(("pipe:[", "socket:[")):
                    self._pids.setdefault(target, pid)
