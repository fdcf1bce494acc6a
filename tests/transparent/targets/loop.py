"""A training loop on the CPU: AdamW, dropout, random batches."""

from __future__ import annotations

import torch

from tests.transparent.targets.steps import Log, words


def main() -> None:
    options = words(threads=1).parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(7)
    log = Log(options)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(512, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, options.steps + 1):
        inputs = torch.randn(512, 64)  # large enough for every thread
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.step(step, loss.item().hex())


if __name__ == "__main__":
    main()
