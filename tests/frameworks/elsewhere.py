"""A process in which PCcheck cannot be imported. It makes the files of a Hugging Face model, waits
until these were imported and exported again, and loads what was exported.

python elsewhere.py DIRECTORY
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class Blocked(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name.startswith("pccheck"):
            raise ImportError(f"{name} is blocked")


def main(arguments: Sequence[str]) -> None:
    sys.meta_path.insert(0, Blocked())
    import torch
    from safetensors.torch import load_file
    from torch.distributed import checkpoint as dcp
    from transformers import GPT2Config, GPT2LMHeadModel

    warnings.simplefilter("ignore")
    place = Path(arguments[0])
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=24, vocab_size=97, n_positions=16)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(32).reshape(2, 16)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    whole = model.state_dict()
    torch.save({"model": whole, "optimizer": optimizer.state_dict(), "step": 5}, place / "gpt.pt")
    model.save_pretrained(place / "pretrained", max_shard_size="20KB")
    print("made", flush=True)
    sys.stdin.readline()

    def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        assert all(torch.equal(found[name], one) for name, one in wanted.items())

    logits = model.eval()(tokens).logits  # without dropout, as from_pretrained() returns it
    for name in ("huggingface", "sharded", "pretrained-again"):
        config.save_pretrained(place / name)
        loaded, said = GPT2LMHeadModel.from_pretrained(place / name, output_loading_info=True)
        assert not any(said.values()), (name, said)
        same(loaded.state_dict(), whole)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert torch.equal(loaded(tokens).logits, logits)
    same(load_file(place / "model.safetensors"), whole)
    state = torch.load(place / "state.pt", weights_only=True)
    same(state["model"], whole)
    for number, entry in optimizer.state_dict()["state"].items():
        same(state["optimizer"]["state"][number], entry)
    empty = {name: torch.zeros_like(one) for name, one in whole.items()}
    dcp.load({"model": empty}, checkpoint_id=place / "dcp", no_dist=True)
    same(empty, whole)
    assert not [name for name in sys.modules if name.startswith("pccheck")]
    print("loaded", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
