"""A training loop that uses PCcheckClient: it also saves checkpoints of its own. PCCHECK_SOCKET and
PCCHECK_JOB say where."""

from __future__ import annotations

import os

import torch

from pccheck import PCcheckClient
from tests.transparent.targets.steps import Log, words


def main() -> None:
    options = words(every=5).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    log = Log(options)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with PCcheckClient(os.environ["PCCHECK_JOB"]) as client:
        client.attach(model=model, optimizer=optimizer, rng=True)
        client.restore()
        for step in range(1, options.steps + 1):
            inputs = torch.randn(64, 64)
            loss = (model(inputs).sum(1) - inputs.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % options.every == 0:
                client.checkpoint(step=step)
            log.step(step, loss.item().hex())
        durable = client.flush(60)
    log.line("durable", durable and durable.step)


if __name__ == "__main__":
    main()
