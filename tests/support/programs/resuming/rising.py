"""A small training of one worker whose loss blows up where rounds are long: ``rising.py LR ...``,
the learning rate of each epoch.

With the outer optimizer ``nesterov:lr=2,momentum=0.9`` an outer step is twice the way that a round
has come. On a quadratic that is stable where rounds come a part h of the way with lr h <
(2 + 2 m) / (1 + 2 m), and not where they come to its end.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import psdist

BATCHES = 96


def main(rates: list[float]) -> None:
    torch.manual_seed(0)
    job = psdist.init()
    model = nn.Linear(8, 2)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=rates[0]))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCHES * 16, 8, generator=generator)
    noise = 2 * torch.randn(len(x), 2, generator=generator)
    dataset = TensorDataset(x, x[:, :2] * 2 + 1 + noise)
    losses: list[float] = []
    for epoch in job.epochs(len(rates)):
        for group in optimizer.param_groups:
            group["lr"] = rates[epoch]
        for given, wanted in job.loader(dataset, batch_size=16):
            optimizer.zero_grad()
            loss = (model(given) - wanted).square().mean()
            loss.backward()
            job.report(loss.item())
            optimizer.step()
            losses.append(loss.item())
    job.log(final=sum(losses[-40:]) / 40)


if __name__ == "__main__":
    main([float(word) for word in sys.argv[1:]])
