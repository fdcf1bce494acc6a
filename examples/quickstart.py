"""The shortest useful script: run it, stop it with Ctrl-C or kill -9, run it again."""

import torch

from pccheck import PCcheckClient

model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with PCcheckClient(autostart=True, storage="checkpoints") as client:
    client.attach(model=model, optimizer=optimizer, rng=True)
    done = client.restore()  # the newest checkpoint; falsy when there is none yet
    for step in range(done.step + 1 if done else 1, 2001):
        inputs = torch.randn(256, 64)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            client.checkpoint(step=step)  # returns at once; training continues
            print(f"step {step} loss {loss.item():.4f}")
print("all 2000 steps are done")
