"""A loop that a DataLoader with workers feeds; they draw random numbers, and each epoch has new
workers, so that a restored process must be able to fork."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from tests.transparent.targets.steps import Log, words

ITEMS, BATCH = 240, 8


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(64) + index / ITEMS


def main() -> None:
    options = words(workers=2).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    log = Log(options)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Noisy(), BATCH, shuffle=True, num_workers=options.workers)
    step = 0
    while step < options.steps:
        for batch in loader:
            if (step := step + 1) > options.steps:
                break
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(step, loss.item().hex())


if __name__ == "__main__":
    main()
