"""Random jobs: any mode, any layout, a network that delays and repeats, and scripts that do what
scripts may do, in any order. A seed decides everything.

    job = RandomJob.of(seed=7)
    job.run(tmp_path).checked()               # on the virtual network
    run_over_mpi("random_scripts", tmp_path)  # CASES, with groups of several workers
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Stage
from tests.support.programs.training.problems import Problem, flat
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

PROBLEM = Problem()
NUM_HEADS = 3

COLLECTIVES: dict[str, Callable[[Job, Stage], object]] = {
    "save": lambda job, stage: job.save(stage.path / "model.safetensors"),
    "mean": lambda job, _stage: job.mean(job.worker),
    "barrier": lambda job, _stage: job.barrier(),
    "pull": lambda job, _stage: job.pull(),
    "nothing": lambda _job, _stage: None,
}


class Heads(nn.Module):
    """A batch uses one head: the others have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(PROBLEM.num_inputs, 64)
        self.heads = nn.ModuleList([nn.Linear(64, PROBLEM.num_classes) for _ in range(NUM_HEADS)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        logits: Tensor = self.heads[head](torch.tanh(self.body(x)))
        return logits


@dataclass(frozen=True, kw_only=True)
class RandomJob:
    seed: int
    groups: tuple[tuple[int, ...], ...]
    servers: int
    optimizer: str
    settings: dict[str, object]
    link: LinkModel
    parts: tuple[tuple[tuple[int, ...], str], ...]
    """(iterations of each group, what all of them do then)."""

    @classmethod
    def of(cls, seed: int, *, has_large_groups: bool = False) -> RandomJob:
        """``has_large_groups``: four workers, in groups of one to four, and at most two servers."""
        pick = random.Random(seed)
        groups = _groups(pick, num_workers=4) if has_large_groups else _groups(pick)
        is_even = pick.random() < 0.3
        parts = []
        for _ in range(pick.randint(1, 4)):
            most = pick.randint(0, 5)
            counts = tuple(most if is_even else pick.randint(0, 5) for _ in groups)
            parts.append((counts, pick.choice(sorted(COLLECTIVES))))
        return cls(
            seed=seed,
            groups=groups,
            servers=pick.randint(1, 2 if has_large_groups else 3),
            optimizer=pick.choice(["SGD", "AdamW", "Adagrad"]),
            parts=tuple(parts),
            settings={
                "mode": pick.choice(["sync", "ssp", "async"]),
                "staleness": pick.randint(0, 3),
                "record": True,
                "checksum_every": pick.choice([1, 3]),
                "on_nonfinite": "skip",
                "credits": pick.randint(1, 4),
                "receive_buffers": pick.randint(3, 6),
            },
            link=LinkModel(
                latency_s=1e-5,
                jitter_s=pick.choice([1e-5, 1e-3, 1e-2]),
                bytes_per_s=pick.choice([1e10, 1e7]),
                duplicate_rate=pick.choice([0.0, 0.05, 0.3]),
            ),
        )

    @property
    def clocks(self) -> list[int]:
        """Iterations of each group."""
        return [sum(counts) for counts in zip(*(counts for counts, _ in self.parts), strict=True)]

    @property
    def case(self) -> Case:
        return Case(
            name=f"random-{self.seed}",
            script=self._script,
            servers=self.servers,
            groups=self.groups,
            settings=self.settings,
        )

    def run(self, path: Path) -> Outcome:
        return run_virtually(self.case, path, seed=self.seed, link=self.link)

    def _script(self, job: Job, stage: Stage) -> Result:
        # What a group does together, and what is each worker's own.
        pick = random.Random(100 * self.seed + job.group)
        own = random.Random(-100 * self.seed - job.worker)
        model = Heads()
        optimizer_class = getattr(torch.optim, self.optimizer)
        model, optimizer = job.prepare(model, optimizer_class(model.parameters(), lr=0.01))
        pace_s = pick.choice([0.0, 1e-3, 1e-2])
        for counts, collective in self.parts:
            for _ in range(counts[job.group]):
                optimizer.zero_grad()
                self._backward(model, own)
                if pick.random() < 0.1:
                    job.pull()  # between backward and step: parameters change, gradients stay
                if pick.random() < 0.3:
                    stage.sleep(pace_s * own.random())
                optimizer.step()
                if pick.random() < 0.1:
                    job.pull()
            COLLECTIVES[collective](job, stage)
        return {"parameters": flat(model)}

    def _backward(self, model: Heads, own: random.Random) -> None:
        """Once, twice (accumulating), not at all, or with a result that is not finite."""
        for _ in range(own.choice([0, 1, 1, 1, 1, 1, 2])):
            ((x, y),) = PROBLEM.batches(size=8, count=1, part=own.randint(0, 9), num_parts=10)
            loss = nn.functional.cross_entropy(model(x, own.randrange(NUM_HEADS)), y)
            loss.backward()
            if own.random() < 0.1:
                assert model.body.bias.grad is not None
                model.body.bias.grad[0] = math.nan


def _groups(pick: random.Random, *, num_workers: int | None = None) -> tuple[tuple[int, ...], ...]:
    if num_workers is None:
        return tuple((worker,) for worker in range(pick.randint(1, 4)))
    starts = sorted({0, *(pick.randrange(num_workers) for _ in range(2))})
    ends = [*starts[1:], num_workers]
    return tuple(tuple(range(*bounds)) for bounds in zip(starts, ends, strict=True))


CASES = [RandomJob.of(seed, has_large_groups=True).case for seed in range(2000, 2024)]
