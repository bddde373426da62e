"""Trains five tables, each by another optimizer, and writes their rows: ``clicks.py RESULT``.

psdist run --workers 2 -m tests.support.programs.tables.clicks /tmp/result.pt
plain()                     # the same in plain torch, with joint batches in one process
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import psdist
from psdist.tables.optimizers import RowOptimizer
from psdist.tables.store import RowStore

NUM_ROWS, DIM, BAG, PADDING = 2_000, 8, 3, 0
NUM_STEPS, BATCH, NUM_WORKERS = 40, 32, 2
LR = 0.05
OPTIMIZERS: dict[str, RowOptimizer | None] = {
    "followed": None,  # of the model's: SGD
    "row_wise": psdist.RowWiseAdagrad(lr=0.1),
    "adagrad": psdist.RowAdagrad(lr=0.1),
    "adam": psdist.LazyAdam(lr=0.01),
    "ftrl": psdist.FTRL(lr=0.1, l1=1e-4),
}
MODES: dict[str, Any] = {"row_wise": "mean", "adam": "max"}


class Clicks(nn.Module):
    def __init__(self, optimizers: Iterable[str] = OPTIMIZERS) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tables = nn.ModuleDict(
            {
                name: psdist.EmbeddingBag(
                    NUM_ROWS,
                    DIM,
                    mode=MODES.get(name, "sum"),
                    optimizer=OPTIMIZERS[name],
                    padding_idx=PADDING,
                )
                for name in optimizers
            }
        )
        self.top = nn.Linear(len(self.tables) * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bags = [table(ids[:, n]) for n, table in enumerate(self.tables.values())]
        return self.top(torch.cat(bags, dim=1)).squeeze(1)


def data() -> TensorDataset:
    """Return ids with many duplicates, and stretches of nothing but padding."""
    drawn = torch.Generator().manual_seed(7)
    num = NUM_STEPS * NUM_WORKERS * BATCH
    ids = (torch.rand(num, len(OPTIMIZERS), BAG, generator=drawn) ** 3 * NUM_ROWS).long()
    ids[3 * BATCH : 5 * BATCH] = PADDING
    return TensorDataset(ids, torch.rand(num, generator=drawn))


def loss_of(model: Any, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (model(ids) - wanted).square().mean()


def result_of(model: Clicks) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        ids = torch.arange(NUM_ROWS).view(-1, 1)
        found = {name: table(ids) for name, table in model.tables.items()}
    return found | {"top": model.top.weight.detach().clone()}


def train(
    job: psdist.Job, *, num_steps: int = NUM_STEPS, optimizers: Iterable[str] = OPTIMIZERS
) -> dict[str, torch.Tensor]:
    """Train the tables of these optimizers in a job; return the result."""
    model = Clicks(optimizers)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer = job.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, NUM_STEPS // 2, gamma=0.5)
    batch = BATCH * NUM_WORKERS // job.num_workers
    for ids, wanted in islice(job.loader(data(), batch_size=batch), num_steps):
        optimizer.zero_grad()
        loss_of(model, ids, wanted).backward()
        optimizer.step()
        scheduler.step()
    return result_of(model)


def main(result: str) -> None:
    with psdist.init() as job:
        found = train(job)
        if job.is_chief:
            torch.save(found, result)
            print(f"pulled {job._sets.tables[0].num_pulled}", flush=True)


# -- the same in plain torch -----------------------------------------------------------------------


def plain() -> dict[str, torch.Tensor]:
    """Return the result of dense tables in one process, which steps on joint batches."""
    model = Clicks()
    for name, table in list(model.tables.items()):
        bag = nn.EmbeddingBag(NUM_ROWS, DIM, mode=table.mode, padding_idx=PADDING)
        spec = replace(table.spec, name=f"tables.{name}", optimizer="RowSGD")
        bag.weight.data = torch.from_numpy(RowStore(spec).gather(np.arange(NUM_ROWS)))
        model.tables[name] = bag
    tables = {name: bag.weight for name, bag in model.tables.items()}
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in tables}
    for step, (ids, wanted) in enumerate(_joint_batches()):
        decay = 0.5 if step >= NUM_STEPS // 2 else 1.0
        model.zero_grad()
        loss_of(model, ids, wanted).backward()
        with torch.no_grad():
            for parameter in model.top.parameters():
                parameter -= decay * LR * parameter.grad
            for n, (name, weight) in enumerate(tables.items()):
                optimizer = OPTIMIZERS[name]
                lr = decay * (LR if optimizer is None else optimizer.lr or LR)
                touched = torch.zeros(NUM_ROWS, dtype=torch.bool)
                touched[ids[:, n].flatten()] = True
                touched[PADDING] = False
                _step(name, weight, weight.grad, touched, lr, states[name])
    return result_of(model)


def _joint_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    ids, wanted = data().tensors
    return zip(ids.split(NUM_WORKERS * BATCH), wanted.split(NUM_WORKERS * BATCH), strict=True)


def _step(
    name: str, weight: Any, g: Any, rows: torch.Tensor, lr: float, state: dict[str, torch.Tensor]
) -> None:
    """Step the touched ``rows`` by gradient ``g`` as psdist.tables.optimizers describes."""
    if name == "followed":
        weight -= lr * g
    elif name in ("row_wise", "adagrad"):
        square = g.square().mean(dim=1, keepdim=True) if name == "row_wise" else g.square()
        total = state["sum"] = state.get("sum", torch.zeros_like(square)) + square
        weight -= lr * g / (total.sqrt() + (1e-8 if name == "row_wise" else 1e-10))
    elif name == "adam":
        m, v = (state.setdefault(key, torch.zeros_like(g)) for key in "mv")
        t = state.setdefault("t", torch.zeros(NUM_ROWS, 1))
        t[rows] += 1
        m[rows] += 0.1 * (g - m)[rows]
        v[rows] += 0.001 * (g.square() - v)[rows]
        size = lr * (1 - 0.999**t).sqrt() / (1 - 0.9**t)
        weight[rows] -= (size * m / (v.sqrt() + 1e-8))[rows]
    else:
        n, z = (state.setdefault(key, torch.zeros_like(g)) for key in "nz")
        seen = state.setdefault("seen", torch.zeros_like(rows))
        new = rows & ~seen
        seen |= rows
        # z begins where the formula gives the first values.
        z[new] = -(weight / lr + weight.sign() * 1e-4)[new]
        z[rows] += (g - ((n + g.square()).sqrt() - n.sqrt()) * weight / lr)[rows]
        n[rows] += g.square()[rows]
        over = (z.abs() - 1e-4).clamp(min=0)
        weight[rows] = (-z.sign() * over / ((1 + n.sqrt()) / lr))[rows]


if __name__ == "__main__":
    main(sys.argv[1])
