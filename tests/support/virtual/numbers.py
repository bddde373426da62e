"""The numbers that virtual workers train with: those that could be mistaken for others differ.

Gradients differ from element to element, and at every element by worker, iteration and piece; the
hyperparameters of eight versions differ. Values and gradients are multiples of 1/32 below 2, so
that sums over few workers, and their means over 1, 2 or 4, are exact in every order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

NUM_VERSIONS = 8


def initial_values(index: int, parameter: Tensor) -> Tensor:
    """Return the first values of the chief's piece ``index``."""
    return _wave(len(parameter), 5 * index, 2 * index + 1)


def gradient_of(worker: int, clock: int, index: int, parameter: Tensor) -> Tensor:
    """A worker's gradient of piece ``index``."""
    start = 37 * worker + 23 * clock + 11 * index
    step = 2 * (worker + 3 * clock + 5 * index) + 1
    return _wave(len(parameter), start, step)


def _wave(length: int, start: int, step: int) -> Tensor:
    return _period(step % 64)[start % 64 : start % 64 + length].clone()


@cache
def _period(step: int) -> Tensor:
    """Odd multiples of 1/32 from -2 to 2, each once in 64 elements; long enough for any piece."""
    return ((torch.arange(4096) * step) % 64 - 31.5) / 16


def lr_of(clock: int, lr: float) -> float:
    """Another one for each of :data:`NUM_VERSIONS` iterations."""
    return lr * (1 - clock % NUM_VERSIONS / NUM_VERSIONS)


def hyperparameters_of(
    part: float, *, lr: float, momentum: float, weight_decay: float, num_groups: int
) -> list[dict[str, Any]]:
    """Hyperparameters of every optimizer group, with the run's lr now times ``part``; all others
    too."""
    return [
        {
            "lr": lr * part / (1 + group),
            "momentum": momentum * part,
            "weight_decay": weight_decay * part,
        }
        for group in range(num_groups)
    ]
