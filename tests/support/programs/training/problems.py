"""Small learning problems, and the training loops that psdist and plain PyTorch both run on them.

problem = Problem(num_samples=480)
model = problem.model()
train(model, optimizer, problem.batches(size=8, part=worker, num_parts=3, count=50))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Classify points of ``num_inputs`` numbers; everything follows from ``seed``."""

    num_samples: int = 480
    num_inputs: int = 20
    num_hidden: int = 64
    num_classes: int = 5
    seed: int = 0

    def model(self, *, seed: int = 0) -> nn.Sequential:
        """float32, no batch norm, no dropout: about 3,600 parameters, so 4 chunks of 4 KiB."""
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(self.num_inputs, self.num_hidden),
            nn.Tanh(),
            nn.Linear(self.num_hidden, self.num_hidden // 2),
            nn.Tanh(),
            nn.Linear(self.num_hidden // 2, self.num_classes),
        )

    def data(self) -> Batch:
        """All samples: (num_samples, num_inputs) and (num_samples,)."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.num_samples, self.num_inputs, generator=generator)
        teacher = torch.randn(self.num_inputs, self.num_classes, generator=generator)
        return x, (x @ teacher).argmax(dim=1)

    def batches(
        self, *, size: int, count: int, part: int = 0, num_parts: int = 1
    ) -> Iterator[Batch]:
        """Part ``part`` of ``count`` joint batches of ``size * num_parts`` samples; the joint
        batches are the same however many parts there are, if ``size * num_parts`` is."""
        x, y = self.data()
        for index in range(count):
            start = (index * num_parts + part) * size
            chosen = torch.arange(start, start + size) % self.num_samples
            yield x[chosen], y[chosen]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    *,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after_step()


def flat(model: nn.Module) -> Tensor:
    """A copy of all parameters, one behind the other, in float64."""
    return torch.cat([p.detach().double().flatten().clone() for p in model.parameters()])


def relative_distance(a: Tensor, b: Tensor) -> float:
    """norm(a - b) / norm(b)"""
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))
