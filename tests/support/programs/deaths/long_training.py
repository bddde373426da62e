"""A training script that takes its time: a small regression, with EPOCHS and PAUSE_S between steps.
The chief prints the loss that it ends with, on samples that nobody has trained on."""

from __future__ import annotations

import os
import time

import torch
from torch.utils.data import TensorDataset

import psdist

EPOCHS = int(os.environ.get("EPOCHS", "10"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.01"))
SAMPLES, FEATURES, BATCH = 2048, 32, 32


def samples(seed: int, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one function, with noise."""
    torch.manual_seed(3)
    weights = torch.randn(FEATURES, 8) / FEATURES**0.5
    torch.manual_seed(seed)
    x = torch.randn(num, FEATURES)
    return x, torch.sin(x @ weights).sum(1, keepdim=True) + 0.1 * torch.randn(num, 1)


def main() -> None:
    job = psdist.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = job.prepare(model, optimizer)
    dataset = TensorDataset(*samples(5, SAMPLES))
    for _ in job.epochs(EPOCHS):
        for x, y in job.loader(dataset, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(PAUSE_S)
    job.pull()
    if job.is_chief:
        x, y = samples(6, SAMPLES)
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(x), y)
        print(f"loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
