"""Trains a table whose rows all have the gradient 1, on every worker in every step; worker 1 is
killed by SIGKILL when some of the messages of a push have left, and others have not.

The mean of a step is 1 for any contributors: rows show where part of a push was applied.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn

import psdist
from psdist.workers.tables.loop import TableLoop

NUM_ROWS, DIM, NUM_STEPS, LR = 400, 4, 12, 0.25
CLOCK, NUMBER = 5, 3


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = psdist.Embedding(NUM_ROWS, DIM, optimizer=psdist.RowSGD())
        self.top = nn.Linear(1, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum() + self.top(torch.ones(1)).sum()


def die_in_the_middle() -> None:
    send = TableLoop._send_part

    def send_or_die(self: TableLoop, part: int, clock: int, number: int, *given: Any) -> None:
        send(self, part, clock, number, *given)
        if (clock, number) == (CLOCK, NUMBER):
            os.kill(os.getpid(), signal.SIGKILL)

    TableLoop._send_part = send_or_die  # type: ignore[method-assign]


def main() -> None:
    with psdist.init() as job:
        model = Ones()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model, optimizer = job.prepare(model, optimizer)
        if job.worker == 1:
            die_in_the_middle()
        ids = torch.arange(NUM_ROWS)
        with torch.no_grad():
            first = model.table(ids)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
        with torch.no_grad():
            error = (model.table(ids) - (first - LR * NUM_STEPS)).abs().max()
        print(f"worker {job.worker}: error {float(error):.1e}")


if __name__ == "__main__":
    main()
