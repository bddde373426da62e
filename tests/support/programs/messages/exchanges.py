"""A script for placement tests: so many exchanges of a model of so many float32 in 16 chunks."""

from __future__ import annotations

import sys

import torch

import psdist


def main() -> None:
    iterations, elements = int(sys.argv[1]), int(sys.argv[2])
    job = psdist.init()
    model = torch.nn.Linear(elements, 1, bias=False)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(iterations):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
