"""The user as whom targets run: root, or another one who can run a Python, too."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.programs import ROOT

#: Of Debian, for users who cannot reach this one (in root's home, for example).
_OTHER = "/usr/bin/python3"


@dataclass(frozen=True)
class Who:
    uid: int = 0

    @cached_property
    def process(self) -> dict[str, Any]:
        """For subprocess."""
        return {"user": self.uid, "group": self.uid, "extra_groups": []} if self.uid else {}

    @cached_property
    def python(self) -> str:
        for program in (sys.executable, _OTHER):
            if self._can_run(program):
                return program
        raise AssertionError(f"user {self.uid} can run neither {sys.executable} nor {_OTHER}")

    @cached_property
    def environment(self) -> dict[str, str]:
        """That of this process, without PCcheck's variables."""
        keep = {k: v for k, v in os.environ.items() if not k.startswith("PCCHECK_")}
        paths = [str(ROOT), str(ROOT / "client"), str(ROOT / "native")]
        paths.append(sysconfig.get_path("purelib"))
        return keep | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}

    def own(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, self.uid, self.uid)
        return folder

    def _can_run(self, program: str) -> bool:
        command = [program, "-c", "import msgpack, torch"]
        try:
            tried = subprocess.run(
                command, env=self.environment, cwd="/", capture_output=True, **self.process
            )
        except PermissionError:
            return False
        return tried.returncode == 0
