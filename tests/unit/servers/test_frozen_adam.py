"""Adam on servers, whose second moment stays as it is after so many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from psdist.protocol.optimizers import traits
from psdist.servers.shard.chunk_optimizer import ChunkOptimizer, SegmentSpec

AFTER, NUM_STEPS, LENGTH = 4, 11, 48
TWO = [SegmentSpec(piece=0, offset=0, length=16), SegmentSpec(piece=1, offset=16, length=32)]


def make(name: str, hyper: dict[str, Any], values: torch.Tensor, after: int) -> ChunkOptimizer:
    full = f"torch.optim.{name}"
    return ChunkOptimizer(
        name=full, traits=traits(full), hyper=hyper, values=values, segments=TWO, freeze_step=after
    )


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(LENGTH, generator=generator) for _ in range(NUM_STEPS)]


def by_the_formula(
    name: str, hyper: dict[str, Any], start: torch.Tensor, after: int
) -> torch.Tensor:
    """In float64. A piece is a part of a block of 256, so the mean is the piece's."""
    lr, eps, decay = hyper["lr"], hyper["eps"], hyper["weight_decay"]
    beta1, beta2 = hyper["betas"]
    found = []
    for each in TWO:
        part = slice(each.offset, each.offset + each.length)
        x = start[part].double()
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for t, grad in enumerate(gradients(), start=1):
            g = grad[part].double() * (-1 if hyper["maximize"] else 1)
            if name == "AdamW":
                x = x - lr * decay * x
            else:
                g = g + decay * x
            m = beta1 * m + (1 - beta1) * g
            if t <= after:
                v = beta2 * v + (1 - beta2) * g * g
            floor = v.mean() if t > after else 0.0 * v.mean()
            corrected = v.clamp(min=float(floor)) / (1 - beta2 ** min(t, after))
            x = x - lr * m / (1 - beta1**t) / (corrected.sqrt() + eps)
        found.append(x)
    return torch.cat(found).float()


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("maximize", [False, True])
def test_it_steps_by_the_formula(name: str, maximize: bool) -> None:
    hyper = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
    hyper["maximize"] = maximize
    start = torch.linspace(-1, 1, LENGTH)
    values, other = start.clone(), start.clone()  # two buffers in turn, as servers have
    optimizer = make(name, hyper, values, AFTER)
    usual = make(name, hyper, start.clone(), 0)
    free = start.clone()
    for number, grad in enumerate(gradients(), start=1):
        values, other = other.copy_(values), values
        step = {"hyper": hyper, "lr_scale": 1.0, "absent": frozenset[int]()}
        optimizer.step(values=values, grad=grad.clone(), **step)
        usual.step(values=free, grad=grad.clone(), **step)
        assert torch.equal(values, free) == (number <= AFTER), number
    expected = by_the_formula(name, hyper, start, AFTER)
    assert torch.allclose(values, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(free, by_the_formula(name, hyper, start, NUM_STEPS), rtol=1e-4, atol=1e-5)


def test_lr_of_one_step_counts_in_that_step_alone() -> None:
    hyper = {"lr": 0.05, "weight_decay": 0.0}
    whole, half = torch.ones(LENGTH), torch.ones(LENGTH)
    optimizers = [make("AdamW", hyper, each, 1) for each in (whole, half)]
    for grad in gradients()[:3]:
        before = whole.clone(), half.clone()
        for optimizer, values, scale in zip(optimizers, (whole, half), (1.0, 0.5), strict=True):
            optimizer.step(
                values=values, grad=grad.clone(), hyper=hyper, lr_scale=scale, absent=frozenset()
            )
        moved = [now - then for now, then in zip((whole, half), before, strict=True)]
        assert torch.allclose(moved[1], moved[0] / 2, rtol=1e-4, atol=1e-7)


def test_a_piece_that_was_absent_is_frozen_by_its_own_steps() -> None:
    """And what is left out of a step stays, state and all."""
    hyper = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.0, "maximize": False}
    values = torch.zeros(LENGTH)
    optimizer = make("Adam", hyper, values, 2)
    moments: list[list[torch.Tensor]] = []
    for number, grad in enumerate(gradients()):
        absent = frozenset({1}) if number in (0, 2, 6) else frozenset()
        before = values.clone()
        optimizer.step(values=values, grad=grad, hyper=hyper, lr_scale=1.0, absent=absent)
        assert torch.equal(values[16:], before[16:]) == bool(absent)
        assert not torch.equal(values[:16], before[:16])
        states = [optimizer.state_tensors(each.offset) for each in TWO]
        moments.append([corrected(state) if state else torch.zeros(1) for state in states])
    first, second = zip(*moments, strict=True)
    assert has_moved(first) == [True] + [False] * 9
    assert has_moved(second) == [True, False, True] + [False] * 7


def corrected(state: Mapping[str, Any]) -> torch.Tensor:
    moment: torch.Tensor = state["exp_avg_sq"] / (1 - 0.9 ** float(state["step"]))
    return moment


def has_moved(moments: Sequence[torch.Tensor]) -> list[bool]:
    return [
        one.shape != other.shape or not torch.allclose(one, other, rtol=1e-5)
        for one, other in pairwise(moments)
    ]


def test_who_goes_on_from_its_state_has_the_same_second_moment() -> None:
    """Frozen earlier, later or never by now."""
    hyper = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.0}
    values = torch.zeros(LENGTH)
    first = make("Adam", hyper, values, 3)
    for grad in gradients()[:6]:
        first.step(values=values, grad=grad, hyper=hyper, lr_scale=1.0, absent=frozenset())
    second = corrected(first.state_tensors(0))
    for after in (1, 3, 6):
        ours = values.clone()
        other = make("Adam", hyper, ours, after)
        other.begin_state(first.describe_state())
        for key in ("exp_avg", "exp_avg_sq"):
            for each in TWO:
                elements = each.offset, each.length
                other.state_elements(key, *elements).copy_(first.state_elements(key, *elements))
        for grad in gradients()[6:]:
            other.step(values=ours, grad=grad, hyper=hyper, lr_scale=1.0, absent=frozenset())
        assert torch.allclose(corrected(other.state_tensors(0)), second, rtol=1e-5)


def test_blocks_are_of_256_values_and_the_last_has_fewer() -> None:
    hyper = {"lr": 0.1, "betas": (0.0, 0.5), "eps": 0.0, "weight_decay": 0.0}
    grad = torch.ones(300)
    grad[5], grad[299] = 16.0, 8.0
    values = torch.zeros(300)
    full = "torch.optim.Adam"
    optimizer = ChunkOptimizer(
        name=full,
        traits=traits(full),
        hyper=hyper,
        values=values,
        segments=[SegmentSpec(piece=0, offset=0, length=300)],
        freeze_step=1,
    )
    for _ in range(2):
        values.zero_()
        optimizer.step(
            values=values, grad=grad.clone(), hyper=hyper, lr_scale=1.0, absent=frozenset()
        )
    means = (255 + 16**2) / 256, (43 + 8**2) / 44
    expected = torch.cat([torch.full((256,), means[0]), torch.full((44,), means[1])]).sqrt()
    expected[5], expected[299] = 16.0, 8.0
    assert torch.allclose(values, -0.1 * grad / expected, rtol=1e-5)
