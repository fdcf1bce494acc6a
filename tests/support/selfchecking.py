"""Kinds of counting programs that look at their own memory before each number: a restored one with
a wrong page, a missing thread or a child that does not answer stops to count, or counts -1."""

from __future__ import annotations

from pathlib import Path

from tests.support.counting import Counter

_CHECKED = """import zlib
    memory = os.urandom(len(memory))
    sums = [zlib.crc32(memory[at:at + 65536]) for at in range(0, len(memory), 65536)]
    also = lambda number: True
    {more}
    class Checked:
        def write(self, text, log=log):
            at = int(text) * 7 % len(sums)
            good = zlib.crc32(memory[at << 16:at + 1 << 16]) == sums[at] and also(int(text))
            log.write(text if good else "-1\\n")
    log = Checked()"""
_TREE = """ask, asked = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(ask[1]), os.close(asked[0])
        while (got := os.read(ask[0], 8)): os.write(asked[1], got[::-1])
        os._exit(0)
    os.close(ask[0]), os.close(asked[1])
    def also(number):
        said = str(number).encode().ljust(8)
        return os.write(ask[1], said) == 8 and os.read(asked[0], 8) == said[::-1]"""
_THREADS = """import threading
    turns = [0, 0, 0]
    def turn(at):
        while True:
            turns[at] += 1
            time.sleep(0.001)
    for at in range(3): threading.Thread(target=turn, args=(at,), daemon=True).start()
    def also(number):
        before = [*turns]
        while any(now == old for now, old in zip(turns, before)): time.sleep(0.001)
        return True"""
#: Two models that are trained alike stay alike.
_TORCH = """import torch
    torch.set_num_threads(1)
    models = [torch.nn.Linear(64, 64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    def also(number):
        data = torch.randn(8, 64)
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(data).pow(2).mean().backward()
            optimizer.step()
        return all(torch.equal(*both) for both in zip(*(one.parameters() for one in models)))"""
#: Name -> what else it does, and how much memory it has.
KINDS = {
    "small": ("pass", 4), "large": ("pass", 60), "tree": (_TREE, 8), "threads": (_THREADS, 8),
    "torch": (_TORCH, 4),
}  # fmt: skip
MODES = ("a", "w", "r+", "w+", "a+")


def counter(root: Path, kind: str, mode: str, variable: str) -> Counter:
    """One that has begun to count; `variable` is in its environment."""
    (root / "log").touch()
    more, mib = KINDS[kind]
    setup = _CHECKED.replace("{more}", more)
    return Counter(root, mib=mib, mode=mode, setup=setup, prefix=("env", variable))
