"""The training programs of ``tests.benchmarks.tables.race``: one model, one log, three libraries.

    python -m tests.benchmarks.tables.racers torchrec --store file:///s --rank 0 --ranks 2 --out o
    psdist run -n 3 -m tests.benchmarks.tables.racers psdist --out o

Each worker writes OUT/RANK.json: its samples per second, the seconds of each measured step, the
CPU time of a step, and its largest memory. torchrec and ddp are started once for each rank. All
have the same dense part, learning rates and batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from examples.dlrm import DLRM, Batch, Clicks, Ranker, as_it_is

TABLES, DIM = 26, 16
DENSE: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "wide": ((512, 256, 64), (512, 256)),
    "narrow": ((64,), (64,)),
}
"""Widths of the bottom and the top. The wide ones are those of DLRM's own script for Criteo-Kaggle
(bench/dlrm_s_criteo_kaggle.sh), and make three quarters of a step."""
LR = 0.02
Step = Callable[[Tensor, Tensor, Tensor], None]
"""Numbers, ids and clicks of a batch."""


class Kept(Dataset[Batch]):
    """Impressions that are made before the race."""

    def __init__(self, clicks: Clicks) -> None:
        self.dense, self.ids, self.clicks = clicks.__getitems__(range(len(clicks)))

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices)
        return self.dense[chosen], self.ids[chosen], self.clicks[chosen]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant", choices=("torchrec", "ddp", "psdist"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", help="where the ranks of torchrec and ddp meet")
    parser.add_argument("--rank", type=int, default=int(os.environ.get("SLURM_PROCID", 0)))
    parser.add_argument("--ranks", type=int, default=2, help="workers")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--dense", choices=DENSE, default="wide")
    parser.add_argument("--stacked", action="store_true", help="psdist: one table for all features")
    parser.add_argument("--steps", type=int, default=40, help="measured ones")
    parser.add_argument("--warm-up", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.contestant == "psdist":
        race_psdist(options)
        return
    dist.init_process_group(
        "gloo", init_method=options.store, rank=options.rank, world_size=options.ranks
    )
    step = {"torchrec": torchrec_step, "ddp": ddp_step}[options.contestant](options)
    count = (options.steps + options.warm_up) * options.batch
    kept = Kept(Clicks(count, [options.rows] * TABLES, first=options.rank * count))
    dist.barrier()
    loader = DataLoader(kept, options.batch, collate_fn=as_it_is)
    measure(loader, step, options, options.rank)
    dist.barrier()
    dist.destroy_process_group()


def measure(loader: Iterable[Batch], step: Step, options: argparse.Namespace, rank: int) -> None:
    ends, busy = [], []
    for batch in loader:
        step(*batch)
        ends.append(time.perf_counter())
        busy.append(time.process_time())
    kept = ends[options.warm_up - 1 :]
    report = {
        "samples_per_s": options.steps * options.batch / (kept[-1] - kept[0]),
        "seconds": [round(end - begin, 5) for begin, end in itertools.pairwise(kept)],
        "busy_s": (busy[-1] - busy[options.warm_up - 1]) / options.steps,
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    (options.out / f"{rank}.json").write_text(json.dumps(report))


def step_of(
    forward: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer | Any
) -> Step:
    def step(dense: Tensor, ids: Tensor, clicks: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(forward(dense, ids), clicks).backward()
        optimizer.step()

    return step


def race_psdist(options: argparse.Namespace) -> None:
    import psdist

    class Stacked(nn.Module):
        """All features have the rows of one table, each its own stretch."""

        def __init__(self) -> None:
            super().__init__()
            rows = TABLES * options.rows
            self.table = psdist.Embedding(rows, DIM, optimizer=psdist.RowWiseAdagrad())
            self.ranker = Ranker(TABLES, DIM, *DENSE[options.dense])

        def forward(self, dense: Tensor, ids: Tensor) -> Any:
            return self.ranker(dense, self.table(ids))

    job = psdist.init()
    count = (options.steps + options.warm_up) * options.batch * options.ranks
    rows = [options.rows] * TABLES
    kept = Kept(Clicks(count, rows))
    if options.stacked:
        kept.ids += options.rows * torch.arange(TABLES)
    model = Stacked() if options.stacked else DLRM(rows, DIM, *DENSE[options.dense])
    model, optimizer, loader = job.prepare(
        model,
        torch.optim.Adagrad(model.parameters(), lr=LR),
        DataLoader(kept, options.batch, collate_fn=as_it_is),
    )
    job.barrier()
    measure(loader, step_of(model, optimizer), options, job.worker)


def ddp_step(options: argparse.Namespace) -> Step:
    """Sparse gradients of nn.Embedding, gathered by gloo; torch's Adagrad, which is elementwise."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(
                nn.Embedding(options.rows, DIM, sparse=True) for _ in range(TABLES)
            )
            self.ranker = Ranker(TABLES, DIM, *DENSE[options.dense])

        def forward(self, dense: Tensor, ids: Tensor) -> Any:
            rows = [table(ids[:, column]) for column, table in enumerate(self.tables)]
            return self.ranker(dense, torch.stack(rows, dim=1))

    model = DistributedDataParallel(Model())
    return step_of(model, torch.optim.Adagrad(model.parameters(), lr=LR))


def torchrec_step(options: argparse.Namespace) -> Step:
    """DistributedModelParallel on the CPU, row-wise Adagrad fused into the backward pass.

    Tables are placed whole: torchrec 1.8 has no other division of a table for the CPU.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys = [f"f{each}" for each in range(TABLES)]
    lengths = torch.ones(TABLES * options.batch, dtype=torch.int32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=each,
                        embedding_dim=DIM,
                        num_embeddings=options.rows,
                        feature_names=[each],
                    )
                    for each in keys
                ],
                device=torch.device("meta"),
            )
            self.ranker = Ranker(TABLES, DIM, *DENSE[options.dense])

        def forward(self, dense: Tensor, ids: Tensor) -> Any:
            features = KeyedJaggedTensor(keys=keys, values=ids.T.reshape(-1), lengths=lengths)
            return self.ranker(dense, self.tables(features).values().view(-1, TABLES, DIM))

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": 1e-10}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=options.ranks, compute_device="cpu"),
        constraints={each: ParameterConstraints(sharding_types=["table_wise"]) for each in keys},
    )
    model: Any = Model()
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    dense = [p for name, p in parallel.named_parameters() if "ranker" in name]
    return step_of(parallel, torch.optim.Adagrad(dense, lr=LR))


if __name__ == "__main__":
    main()
