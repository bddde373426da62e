"""The tasks of ``psdist bench convergence``: small and real, with the same samples for each scheme.

task = task_of("chars")
model = task.make_model(seed=1)
for x, y in task.batches(seed=1, worker=0, batch_size=16): ...
task.loss(model(x), y), task.validation(model)
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from psdist.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    unit: str
    """Unit of the loss."""
    train: TensorDataset
    build: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    validation: Callable[[nn.Module], float]
    """The loss on validation data."""
    rate_factor: Callable[[int, int], float]
    """The learning rate's factor, by step and number of steps."""

    def make_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def batches(
        self, *, seed: int, worker: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end, drawn with replacement."""
        x, y = self.train.tensors
        generator = torch.Generator().manual_seed(seed * 1_000_003 + worker)
        while True:
            rows = torch.randint(len(x), (batch_size,), generator=generator)
            yield x[rows], y[rows]


def task_of(name: str, width: int | None = None) -> Task:
    """``width``: of the model of chars (``schemes.require_task`` has looked at it); None: as the
    task has it."""
    return _digits() if name == "digits" else _chars(width or _WIDTH)


def _digits() -> Task:
    """A small convolutional network, SGD with momentum; cross entropy on 360 images."""
    try:
        from psdist.examples import digits
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--task digits needs {error.name}: pip install 'psdist-mpi[examples]', "
            "or take --task chars"
        ) from error
    train, test = digits.load_data()

    @torch.no_grad()
    def validation(model: nn.Module) -> float:
        x, y = test.tensors
        return float(nn.functional.cross_entropy(model(x), y))

    return Task(
        name="digits",
        unit="cross entropy",
        train=train,
        build=digits.build_model,
        make_optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4
        ),
        loss=nn.functional.cross_entropy,
        validation=validation,
        rate_factor=lambda _step, _steps: 1.0,
    )


_LENGTH: Final = 64
_VALID_CHARS: Final = 20_000
_WIDTH: Final = 48


def _chars(width: int) -> Task:
    """A transformer of 75,984 parameters with a width of 48, of 1,050,144 with 192; AdamW, warm-up
    and cosine; bits per character of text."""
    from psdist.examples import chars

    train, valid = chars.load_text()
    valid_set = chars.windows(valid[:_VALID_CHARS], _LENGTH)
    return Task(
        name="chars",
        unit="bits per character",
        train=chars.windows(train, _LENGTH),
        build=lambda: chars.CharTransformer(length=_LENGTH, width=width),
        make_optimizer=lambda model: torch.optim.AdamW(
            chars.optimizer_groups(model, weight_decay=0.1), lr=4e-3
        ),
        loss=chars.bits_per_char,
        validation=lambda model: chars.validation_bits(model, valid_set, torch.device("cpu")),
        rate_factor=chars.learning_rate_factor,
    )
