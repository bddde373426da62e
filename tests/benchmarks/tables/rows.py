"""Rows per second of one core: psdist/tables/store.py against operators of torch.

    python -m tests.benchmarks.tables.rows [--rows 8_000_000] [--batch 20_000] [--dim 16]

The table has all rows. A call has a batch of distinct, uniformly random ids. The ways alternate,
and each has batches of its own. Medians of the seconds of the core, which other processes disturb
less than those of the clock.

apply        two contributions of half a batch each, merged, then one row-wise Adagrad step
update       the step alone, of a merged batch
gather       values of a batch, found by their ids
torch_gather weight[ids] of a dense table, for comparison
torch_step   row-wise Adagrad by torch operators (select, modify, index_copy_)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from psdist.tables.kernels import row_kernels
from psdist.tables.kernels.reference import Contribution
from psdist.tables.optimizers import ROW_OPTIMIZERS
from psdist.tables.specs import TableSpec
from psdist.tables.store import RowStore

FILL = 1 << 18


def filled(optimizer: str, num_rows: int, dim: int) -> RowStore:
    chosen = ROW_OPTIMIZERS[optimizer]()
    spec = TableSpec(
        name="items", num_rows=num_rows, dim=dim, optimizer=optimizer,
        arguments=chosen.arguments(), scale=0.1,
    )  # fmt: skip
    store = RowStore(spec)
    for first in range(0, num_rows, FILL):
        ids = np.arange(first, min(first + FILL, num_rows))
        store.apply(ids, np.ones((len(ids), dim), np.float32), lr=0.01, clock=0)
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--batch", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--optimizer", choices=ROW_OPTIMIZERS, default="RowWiseAdagrad")
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator, dim = np.random.default_rng(3), given.dim
    started = time.process_time()
    store = filled(given.optimizer, given.rows, dim)
    seconds = time.process_time() - started
    found = store.statistics()
    stored = found.value_bytes + found.state_bytes
    print(f"kernels: {row_kernels().name}; {given.rows} rows of dim {dim}, {given.batch} a call")
    print(f"first touch   {given.rows / seconds / 1e6:6.2f} M rows/s")
    print(f"memory        {found.reserved_bytes / stored:6.3f} x values and state")
    weight = torch.zeros(given.rows, dim)
    squares = torch.zeros(given.rows)
    gradients = generator.standard_normal((given.batch, dim)).astype(np.float32)
    dense = torch.from_numpy(gradients)

    def batch() -> np.ndarray:
        return np.unique(generator.integers(0, given.rows, given.batch))

    def apply(ids: np.ndarray) -> None:
        half = [Contribution(ids[at::2], gradients[: len(ids[at::2])], 0.5) for at in (0, 1)]
        store.apply(*store.merge(half), lr=0.01, clock=1)

    def torch_step(ids: np.ndarray) -> None:
        at, given_rows = torch.from_numpy(ids), dense[: len(ids)]
        sums = squares[at] + given_rows.square().mean(dim=1)
        squares.index_copy_(0, at, sums)
        rows = weight[at] - given_rows * (0.01 / (sums.sqrt() + 1e-8))[:, None]
        weight.index_copy_(0, at, rows)

    ways: dict[str, Callable[[np.ndarray], object]] = {
        "apply": apply,
        "update": lambda ids: store.apply(ids, gradients[: len(ids)], lr=0.01, clock=1),
        "gather": store.gather,
        "torch_gather": lambda ids: weight[torch.from_numpy(ids)],
        "torch_step": torch_step,
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, way in ways.items():
            ids = batch()
            started = time.process_time()
            way(ids)
            speeds[name].append(len(ids) / (time.process_time() - started))
    for name, each in speeds.items():
        print(f"{name:13} {statistics.median(each) / 1e6:6.2f} M rows/s")


if __name__ == "__main__":
    main()
