"""What was exported loads where PCcheck is not installed: with torch, safetensors, transformers and
torch.distributed.checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.ctl import Ctl
from tests.support.daemon import Daemon

# The program imports it: workers would take a second each for it.
if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)


def test_other_software_loads_it(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    """A model of transformers with tied weights, in one file and in several, and back."""

    def run(*words: object) -> None:
        ran = ctl(None, "--socket", daemon.socket, *words)
        assert ran.code == 0, ran.err

    program = [sys.executable, str(Path(__file__).with_name("elsewhere.py")), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    errors = tmp_path / "stderr"
    with errors.open("w") as stderr, subprocess.Popen(
        program, env=environment, cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        # What transformers imports may print, too (DeepSpeed does).
        made = "made\n" in iter(process.stdout.readline, "")
        assert made, errors.read_text()
        run("import", "gpt", tmp_path / "gpt.pt")
        run("import", "pretrained", tmp_path / "pretrained")
        run("export", "gpt", "-o", tmp_path / "state.pt")
        run("export", "gpt", "-o", tmp_path / "dcp", "--format", "dcp")
        model = ("--only", "model", "-o")
        run("export", "gpt", *model, tmp_path / "model.safetensors")
        words = ("--format", "huggingface", *model)
        run("export", "gpt", *words, tmp_path / "huggingface")
        run("export", "gpt", *words, tmp_path / "sharded", "--max-shard-size", "20KiB")
        run("export", "pretrained", *words, tmp_path / "pretrained-again")
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
        said, _ = process.communicate("go\n")
    assert said.endswith("loaded\n") and process.returncode == 0, said + errors.read_text()
