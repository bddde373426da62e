"""Prints a worker's bytes by iteration, with tables of Criteo's cardinalities: ``criteo.py STEPS``.

PSDIST_TABLES_MODE=async PSDIST_TABLES_CACHE=20000 python -m tests.support.programs.tables.criteo 30
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import psdist
from examples.dlrm import CARDINALITIES, Clicks, as_it_is

BATCH, DIM = 2_048, 16


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(psdist.Embedding(each, DIM) for each in CARDINALITIES)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(sum(table(ids[:, n]) for n, table in enumerate(self.tables)))


def main(num_steps: int) -> None:
    with psdist.init() as job:
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = job.prepare(model, optimizer)
        clicks = Clicks(num_steps * BATCH, CARDINALITIES)
        for _, ids, _ in job.loader(clicks, batch_size=BATCH, collate_fn=as_it_is):
            optimizer.zero_grad()
            model(ids).mean().backward()
            optimizer.step()
            counts = job._sets.statistics()[-1]
            print("bytes", counts.bytes_pushed, counts.bytes_pulled, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
