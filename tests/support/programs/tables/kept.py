"""A training of tables with checkpoints, that may be killed: ``kept.py OUT KILL [other]``.

It makes STEPS iterations, with a checkpoint after every third, and saves the model and its rows to
OUT; where it resumes, the rest of them. After iteration KILL the last worker is killed (-1: never),
in the middle of a checkpoint, which waits for the one before: that is complete. With ``other`` the
table of items has more rows.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import psdist

EVERY, STEPS, DIM = 3, 12, 4


class Clicks(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        num_items = 600 if kind == "other" else 500
        self.items = psdist.EmbeddingBag(
            num_items, DIM, mode="sum", optimizer=psdist.RowWiseAdagrad(lr=0.1)
        )
        self.users = psdist.Embedding(
            None, DIM, optimizer=psdist.LazyAdam(lr=0.01), admit=2, evict="age:4"
        )
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, items: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.items(items), self.users(users)], dim=1)).squeeze(1)


def main(out: str, kill: int, kind: str = "") -> None:
    job = psdist.init()
    model = Clicks(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = job.prepare(model, optimizer)
    print(f"worker {job.worker} begins at {job.clock}", flush=True)
    while job.clock < STEPS:
        generator = torch.Generator().manual_seed(1000 * job.clock + job.worker)
        items = (torch.rand(16, 3, generator=generator) ** 2 * 500).long()
        users = (torch.rand(16, generator=generator) ** 3 * 200).long() * 2**53 - 2**60
        wanted = torch.rand(16, generator=generator)
        optimizer.zero_grad()
        (model(items, users) - wanted).square().mean().backward()
        optimizer.step()
        if job.clock % EVERY == 0:
            job.checkpoint()
        if job.clock == kill:
            job.checkpoint()
            if job.worker == job.num_workers - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    job.save(out, tables=out.replace(".safetensors", "-rows.safetensors"))
    job.close()


if __name__ == "__main__":
    out, kill, *kind = sys.argv[1:]
    main(out, int(kill), *kind)
