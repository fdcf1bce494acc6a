"""A training loop on a GPU, or on the stand-in for one: momentum, and noise from the CPU."""

from __future__ import annotations

import torch

from tests.support import fakegpu
from tests.transparent.targets.steps import Log, words


def main() -> None:
    options = words(size=512).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    log, gpu = Log(options), fakegpu.choose()
    shape = (options.size, options.size)
    weights, moment, noise = (gpu.like(torch.randn(shape)) for _ in range(3))
    for step in range(1, options.steps + 1):
        fresh = torch.randn(shape)

        def update(fresh: torch.Tensor = fresh) -> None:
            noise.copy_(fresh)
            moment.mul_(0.9).add_(noise)
            weights.add_(moment, alpha=-0.01)

        gpu.launch(update)
        log.step(step, gpu.read(weights).double().sum().item().hex())


if __name__ == "__main__":
    main()
