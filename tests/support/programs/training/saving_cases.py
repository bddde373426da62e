"""Saving, and the other collectives of a job, over MPI: for tests/training/test_saving.py."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from psdist.job import Job
from tests.support.programs.training.cases import Case, Result, Script, Stage
from tests.support.programs.training.problems import Problem, flat

PROBLEM = Problem()
DATASET_SIZES = (56, 61, 73)
"""With 4 workers and batches of 6: no rest, one that joins the batch before, and 1 sample each."""
BATCH_SIZE = 6
EPOCHS = 2


class Everything(nn.Module):
    """Whatever a state_dict may hold: tied, frozen, empty, scalar and strided parameters, batch
    norm, buffers of several dtypes, one that is not persistent, and half precision."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(20, 16)
        self.norm = nn.BatchNorm1d(16)
        self.tied = nn.Linear(20, 16, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.outside = nn.Parameter(torch.randn(16))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.0 + seed))
        self.rounded = nn.Parameter(torch.randn(16).bfloat16())
        self.transposed = nn.Parameter(torch.randn(5, 16).t() / 4)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("mask", torch.rand(16) < 0.5 + seed)
        self.register_buffer("count", torch.tensor(7 + seed))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.register_buffer("doubles", torch.randn(2, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)) + self.tied(x)) * self.scale
        hidden = hidden + self.frozen + self.outside.detach() + self.rounded.float()
        kernel: Tensor = self.conv.weight.sum()
        logits: Tensor = hidden @ self.transposed * (1 + kernel) + self.empty.sum()
        return logits


def prepared(job: Job) -> tuple[Everything, torch.optim.Optimizer]:
    model = Everything(seed=job.worker)
    given = [p for name, p in model.named_parameters() if name != "outside"]
    return job.prepare(model, torch.optim.AdamW(given, lr=1e-2))


def train_everything(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, count: int
) -> None:
    batches = PROBLEM.batches(size=8, count=count, part=job.worker, num_parts=job.num_workers)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def saves(job: Job, stage: Stage) -> Result:
    """Saves in the middle and at the end; each worker reads the file as soon as save returns."""
    model, optimizer = prepared(job)
    found: Result = {}
    for moment in ("middle", "end"):
        stage.sleep(2e-3 * job.worker)
        train_everything(job, model, optimizer, count=5)
        path = stage.path / "models" / f"{moment}.safetensors"
        job.save(path)
        found[moment] = load_file(path)
    job.pull()
    found["state"] = {name: value.clone() for name, value in model.state_dict().items()}
    return found


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, num_samples: int) -> None:
        x, y = PROBLEM.data()
        self.x, self.y = x[:num_samples], y[:num_samples]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def loads(num_samples: int) -> Script:
    """Trains on short last batches, and evaluates in between, which must not weigh."""

    def run(job: Job, _stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        dataset, held_out = Points(num_samples), Points(17)
        sizes = []
        for _ in range(EPOCHS):
            for x, y in job.loader(dataset, batch_size=BATCH_SIZE, shuffle=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                sizes.append(len(x))
            model.eval()
            for x, y in job.loader(held_out, batch_size=4):
                with torch.no_grad():
                    job.mean(nn.functional.cross_entropy(model(x), y))
            model.train()
        return {"parameters": flat(model), "sizes": sizes}

    return run


CASES = [
    *(
        Case(
            name=f"saves-{mode}", script=saves, servers=2, groups=((0,), (1, 2, 3)),
            settings={"mode": mode, "staleness": 2, "record": True},
        )
        for mode in ("sync", "ssp", "async")
    ),
    *(
        Case(
            name=f"loads-{size}", script=loads(size), servers=1, groups=((0,), (1, 2, 3)),
            settings={"mode": "sync", "seed": 5},
        )
        for size in DATASET_SIZES
    ),
]  # fmt: skip
