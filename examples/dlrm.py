"""A ranking model (DLRM) on a click log that is made on the fly, with tables on the servers.

    psdist run -n 3 examples/dlrm.py                 # small: seconds
    psdist run --workers 4 examples/dlrm.py --full   # Criteo-Kaggle's 33.8 million rows

The log has the shape of Criteo's: 13 numbers and 26 ids per impression, and the label says whether
it was clicked. A planted model draws the labels, so the area under the ROC curve shows learning.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import psdist

CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Distinct ids of each of Criteo-Kaggle's 26 features."""
NUM_DENSE = 13
Batch = tuple[Tensor, Tensor, Tensor]
"""Numbers (N, 13) float32, ids (N, 26) int64, clicks (N,) float32."""


def uniform(counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Hash each counter to a number in [0, 1), as splitmix64 does (Steele et al., 2014)."""
    x = counters * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x >>= np.uint64(11)
    return x.astype(np.float64) * 2.0**-53


def centred(draws: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """From [0, 1) to mean 0 and variance 1."""
    return (draws - 0.5) * 12**0.5


class Clicks(Dataset[Batch]):
    """``count`` impressions, from number ``first`` on, of the endless log that ``seed`` names.

    The ids of each feature follow Zipf's law with the exponent ``zipf``, which must not be 1. Their
    order is mixed: frequent ids are not the small ones. The logit of a click is a sum over the
    numbers, the ids, and all pairs of ids: a factorisation machine (Rendle, 2010) with 2 random
    factors per id.
    """

    def __init__(
        self, count: int, rows: Sequence[int], *, first: int = 0, seed: int = 0, zipf: float = 1.05
    ) -> None:
        self.count, self.first, self.zipf = count, first, zipf
        self.rows = np.asarray(rows, dtype=np.int64)
        self.origin = np.uint64(seed) << np.uint64(50)
        self.planted = self.origin + np.uint64(1 << 63)
        self.columns = np.arange(len(rows), dtype=np.uint64)[:, None] << np.uint64(32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        dense, ids, clicks = self.__getitems__([index])
        return dense[0], ids[0], clicks[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Make a whole batch at once: 1,024 impressions take about 5 ms."""
        numbers = np.asarray(indices, dtype=np.int64) + self.first
        num_rows, num_draws = len(self.rows), NUM_DENSE + len(self.rows) + 1
        counters = (numbers[:, None] * 64 + np.arange(num_draws)).view(np.uint64)
        draws = uniform(counters + self.origin)
        dense = centred(draws[:, :NUM_DENSE])
        ids = self._ids(draws[:, NUM_DENSE : NUM_DENSE + num_rows].T)
        chance = 1 / (1 + np.exp(-self.logits(dense, ids)))
        clicks = (draws[:, -1] < chance).astype(np.float32)
        return (
            torch.from_numpy(dense.astype(np.float32)),
            torch.from_numpy(np.ascontiguousarray(ids.T)),
            torch.from_numpy(clicks),
        )

    def _ids(self, draws: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Invert the distribution function of Zipf's law (its integral) for each feature's row."""
        power, rows = 1 - self.zipf, self.rows[:, None]
        ranks = ((np.power(rows + 1.0, power) - 1) * draws + 1) ** (1 / power) - 1
        # 2,654,435,761 is prime, so it maps the ranks onto all ids.
        return np.minimum(ranks.astype(np.int64), rows - 1) * 2_654_435_761 % rows

    def logits(
        self, dense: npt.NDArray[np.float64], ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        keys = np.asarray(self.columns + ids.view(np.uint64)) * np.uint64(4) + self.planted
        effects, *factors = (centred(uniform(keys + np.uint64(each))) for each in (1, 2, 3))
        pairs = [(each.sum(0) ** 2 - (each * each).sum(0)) / 2 for each in factors]
        slopes = np.linspace(-1, 1, NUM_DENSE)
        logits: npt.NDArray[np.float64] = (
            -1.2 + 0.2 * dense @ slopes + 0.2 * effects.sum(0) + 0.03 * np.sum(pairs, axis=0)
        )
        return logits


def as_it_is(batch: Any) -> Any:
    """Collate nothing: the dataset makes whole batches."""
    return batch


def make_loader(clicks: Clicks, batch_size: int) -> "DataLoader[Batch]":
    return DataLoader(clicks, batch_size, collate_fn=as_it_is)


def layers(*widths: int) -> list[nn.Module]:
    return [
        layer
        for inputs, outputs in itertools.pairwise(widths)
        for layer in (nn.Linear(inputs, outputs), nn.ReLU())
    ]


class Ranker(nn.Module):
    """The dense part of DLRM (Naumov et al., 2019)."""

    def __init__(
        self, num_tables: int, dim: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.bottom = nn.Sequential(*layers(NUM_DENSE, *bottom, dim))
        num_pairs = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(*layers(dim + num_pairs, *top), nn.Linear(top[-1], 1))

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Numbers (N, 13), rows of the tables (N, tables, dim) -> logits (N,)."""
        x = self.bottom(dense)
        every = torch.cat([x.unsqueeze(1), vectors], dim=1)
        pairs = torch.triu_indices(every.shape[1], every.shape[1], offset=1)
        dots = torch.bmm(every, every.mT)[:, pairs[0], pairs[1]]
        logits: Tensor = self.top(torch.cat([x, dots], dim=1)).squeeze(1)
        return logits


class DLRM(nn.Module):
    def __init__(
        self, rows: Sequence[int], dim: int, bottom: Sequence[int], top: Sequence[int], **table: Any
    ) -> None:
        """``table``: more options of each table, such as ``admit``."""
        super().__init__()
        row_wise = psdist.RowWiseAdagrad()
        self.tables = nn.ModuleList(
            psdist.Embedding(each, dim, optimizer=row_wise, **table) for each in rows
        )
        self.ranker = Ranker(len(rows), dim, bottom, top)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Numbers (N, 13), ids (N, tables) -> logits (N,)."""
        vectors = [table(ids[:, column]) for column, table in enumerate(self.tables)]
        logits: Tensor = self.ranker(dense, torch.stack(vectors, dim=1))
        return logits


def area_under_curve(scores: Tensor, clicks: Tensor) -> float:
    """Return the chance that a click has a higher score than an impression without one."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    num = float(clicks.sum())
    below = float(ranks[clicks > 0].sum()) - num * (num + 1) / 2
    return below / (num * (len(scores) - num))


@torch.no_grad()
def evaluate(model: nn.Module, clicks: Clicks, device: torch.device) -> float:
    model.eval()
    batches = list(make_loader(clicks, 2048))
    scores = [model(dense.to(device), ids.to(device)).cpu() for dense, ids, _ in batches]
    model.train()
    return area_under_curve(torch.cat(scores), torch.cat([each[2] for each in batches]))


def main() -> None:
    parser = argparse.ArgumentParser(description="DLRM on a click log with planted structure.")
    parser.add_argument("--full", action="store_true", help="the full size")
    args = parser.parse_args()
    scale, count, batch_size = (1.0, 40_000_000, 2048) if args.full else (1e-4, 40_000, 256)
    bottom, top = ((512, 256, 64), (512, 256)) if args.full else ((32,), (32,))

    torch.manual_seed(0)
    job = psdist.init()
    if job.is_chief and not args.full:
        print("full size: psdist run --workers 4 examples/dlrm.py --full")
    rows = [max(2, round(each * scale)) for each in CARDINALITIES]
    model = DLRM(rows, 16, bottom, top).to(job.device)
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.Adagrad(model.parameters(), lr=0.02),
        make_loader(Clicks(count, rows), batch_size),
    )
    test = Clicks(20_000, rows, first=count)
    for dense, ids, clicks in loader:
        optimizer.zero_grad()
        logits = model(dense.to(job.device), ids.to(job.device))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks.to(job.device))
        loss.backward()
        optimizer.step()
        if job.is_chief and job.clock % 50 == 0:
            job.log(loss=loss)
    job.pull()
    if job.is_chief:
        area = evaluate(model, test, job.device)
        job.log(loss=loss, auc=area)
        print(f"area under the curve {area:.3f}")
    job.save("dlrm.safetensors")


if __name__ == "__main__":
    main()
