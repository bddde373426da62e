"""Optimizers of rows against torch's, the formulas of their sources, and the choice by torch's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from psdist.errors import OptimizerRefusedError, ProtocolError, UsageError
from psdist.tables.optimizers import (
    FTRL,
    ROW_OPTIMIZERS,
    LazyAdam,
    RowAdagrad,
    RowOptimizer,
    RowSGD,
    RowWiseAdagrad,
    following,
    row_optimizer,
)
from psdist.tables.specs import TableSpec
from psdist.tables.store import RowStore

NUM, DIM, LR = 40, 12, 0.05


def store_of(optimizer: RowOptimizer, dim: int = DIM) -> RowStore:
    return RowStore(
        TableSpec(
            name="items", num_rows=NUM, dim=dim, optimizer=optimizer.name,
            arguments=optimizer.arguments(), scale=0.3,
        )
    )  # fmt: skip


def trained(optimizer: RowOptimizer, torch_optimizer: Any, *, all_touched: bool = False) -> float:
    """Return the largest difference to a table of torch after 30 steps."""
    store, generator = store_of(optimizer), np.random.default_rng(4)
    every = np.arange(NUM)
    weight = torch.nn.Parameter(torch.from_numpy(store.gather(every)))
    stepped = torch_optimizer([weight])
    for step in range(30):
        ids = every if all_touched else np.unique(generator.integers(0, NUM, 15))
        rows = generator.standard_normal((len(ids), DIM)).astype(np.float32)
        at = torch.from_numpy(ids)[None]
        gradient = torch.sparse_coo_tensor(
            at, torch.from_numpy(rows), (NUM, DIM), check_invariants=True
        )
        weight.grad = gradient if all_touched else gradient.to_dense()
        stepped.step()
        store.apply(ids, rows, lr=LR, clock=step)
    return float(np.abs(store.gather(every) - weight.detach().numpy()).max())


def test_sgd_is_that_of_torch() -> None:
    assert trained(RowSGD(), lambda given: torch.optim.SGD(given, lr=LR)) <= 1e-6


def test_adagrad_is_that_of_torch() -> None:
    options = {"eps": 1e-6, "initial_accumulator_value": 0.1}
    torch_optimizer = lambda given: torch.optim.Adagrad(given, lr=LR, **options)  # noqa: E731
    assert trained(RowAdagrad(**options), torch_optimizer) <= 1e-6


def test_lazy_adam_of_rows_that_are_always_touched_is_sparse_adam() -> None:
    torch_optimizer = lambda given: torch.optim.SparseAdam(given, lr=LR, betas=(0.8, 0.99))  # noqa: E731
    assert trained(LazyAdam(betas=(0.8, 0.99)), torch_optimizer, all_touched=True) <= 1e-6


def test_lazy_adam_counts_the_steps_of_each_row() -> None:
    store, one = store_of(LazyAdam()), np.array([3])
    before = store.gather(one)
    for step in range(100):
        store.apply(np.array([2]), np.ones((1, DIM), np.float32), lr=LR, clock=step)
    store.apply(one, np.full((1, DIM), 0.25, np.float32), lr=LR, clock=100)
    # A first step of Adam moves each value by lr.
    np.testing.assert_allclose(before - store.gather(one), LR, rtol=1e-4)


@pytest.mark.parametrize("dim", [1, 3, 8, 12, 16, 64])
def test_row_wise_adagrad_has_one_accumulator_a_row(dim: int) -> None:
    store, ids = (
        store_of(RowWiseAdagrad(eps=1e-3, initial_accumulator_value=0.5), dim),
        np.arange(5),
    )
    values, sums = store.gather(ids).astype(np.float64), np.full(5, 0.5)
    generator = np.random.default_rng(1)
    for step in range(20):
        rows = generator.standard_normal((5, dim)).astype(np.float32)
        store.apply(ids, rows, lr=LR, clock=step)
        sums += (rows.astype(np.float64) ** 2).mean(axis=1)
        values -= (LR / (np.sqrt(sums) + 1e-3))[:, None] * rows
    np.testing.assert_allclose(store.gather(ids), values, atol=1e-6)
    assert store.statistics().state_bytes == 4 * 5


def test_row_wise_adam_has_one_second_moment_a_row() -> None:
    optimizer = LazyAdam(betas=(0.9, 0.99), eps=1e-6, row_wise=True)
    store, ids = store_of(optimizer), np.arange(5)
    values = store.gather(ids).astype(np.float64)
    first, second = np.zeros((5, DIM)), np.zeros((5, 1))
    generator = np.random.default_rng(1)
    for step in range(1, 21):
        rows = generator.standard_normal((5, DIM)).astype(np.float32)
        store.apply(ids, rows, lr=LR, clock=step)
        first += 0.1 * (rows - first)
        second += 0.01 * ((rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True) - second)
        size = LR * math.sqrt(1 - 0.99**step) / (1 - 0.9**step)
        values -= size * first / (np.sqrt(second) + 1e-6)
    np.testing.assert_allclose(store.gather(ids), values, atol=2e-6)
    assert store.statistics().state_bytes == 4 * 5 * (DIM + 2)


def test_ftrl_is_the_algorithm_of_its_paper() -> None:
    beta, l1, l2 = 0.5, 0.02, 0.1
    store, ids = store_of(FTRL(beta=beta, l1=l1, l2=l2)), np.arange(5)
    weights = store.gather(ids).astype(np.float64)
    squares = np.zeros_like(weights)
    sums = -weights * (beta / LR + l2) - np.sign(weights) * l1
    generator = np.random.default_rng(1)
    for step in range(1, 41):
        rows = generator.standard_normal((5, DIM)).astype(np.float32)
        store.apply(ids, rows, lr=LR, clock=step)
        square = rows.astype(np.float64) ** 2
        sigma = (np.sqrt(squares + square) - np.sqrt(squares)) / LR
        sums += rows - sigma * weights
        squares += square
        moved = -(sums - np.sign(sums) * l1) / ((beta + np.sqrt(squares)) / LR + l2)
        weights = np.where(np.abs(sums) <= l1, 0.0, moved)
    np.testing.assert_allclose(store.gather(ids), weights, atol=2e-6)


def test_ftrl_moves_a_first_value_little_and_an_l1_norm_zeroes_rows() -> None:
    ids, small = np.arange(5), np.full((5, DIM), 1e-4, np.float32)
    store = store_of(FTRL())
    before = store.gather(ids)
    store.apply(ids, small * 0, lr=LR, clock=0)
    assert store.gather(ids).tobytes() == before.tobytes()
    store.apply(ids, small, lr=LR, clock=1)
    assert np.abs(store.gather(ids) - before).max() < 1e-4
    store = store_of(FTRL(l1=100.0))
    for step in range(200):
        store.apply(ids, np.sign(before) * np.float32(1.0), lr=LR, clock=step)
    assert not store.gather(ids).any()


@pytest.mark.parametrize("optimizer", [each() for each in ROW_OPTIMIZERS.values()], ids=str)
def test_arguments_make_the_optimizer_again(optimizer: RowOptimizer) -> None:
    arguments = optimizer.arguments()
    assert all(type(each) is float for each in arguments.values())
    assert row_optimizer(optimizer.name, arguments) == optimizer
    for changed in (arguments | {"lr": 0.1}, arguments | {"more": 1.0}, {"beta1": -1.0}):
        with pytest.raises(ProtocolError, match="a table with the optimizer"):
            row_optimizer(optimizer.name, changed)


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (RowSGD, {"lr": -1.0}, "RowSGD: lr is -1.0; expected numbers of at least 0, and finite"),
        (RowAdagrad, {"eps": math.nan}, "RowAdagrad: eps is nan; expected"),
        (RowWiseAdagrad, {"lr": "0.1"}, "RowWiseAdagrad: lr is '0.1'; expected"),
        (LazyAdam, {"betas": (0.9, 1.0)}, "LazyAdam: betas is (0.9, 1.0); expected numbers from 0"),
        (FTRL, {"l1": math.inf}, "FTRL: l1 is inf; expected"),
    ],
)
def test_arguments_out_of_range_are_refused(
    kind: type[RowOptimizer], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**given)
    assert text in str(caught.value)


PARAMETER = torch.nn.Parameter(torch.zeros(0))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (torch.optim.SGD([PARAMETER], lr=0.1), RowSGD()),
        (
            torch.optim.Adagrad([PARAMETER], initial_accumulator_value=0.5, eps=1e-3),
            RowAdagrad(eps=1e-3, initial_accumulator_value=0.5),
        ),
        (torch.optim.Adam([PARAMETER], betas=(0.8, 0.9)), LazyAdam(betas=(0.8, 0.9))),
        (torch.optim.AdamW([PARAMETER], weight_decay=0, eps=1e-5), LazyAdam(eps=1e-5)),
        (torch.optim.SparseAdam([PARAMETER]), LazyAdam()),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_table_follows_the_optimizer_of_its_group(
    made: torch.optim.Optimizer, expected: RowOptimizer
) -> None:
    name = f"torch.optim.{type(made).__name__}"
    assert following(name, made.param_groups[0]) == expected


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (torch.optim.SGD([PARAMETER], momentum=0.9), "momentum is 0.9 in its parameter group"),
        (
            torch.optim.AdamW([PARAMETER]),
            "set it to 0.0 in a parameter group of the table, or give",
        ),
        (torch.optim.Adam([PARAMETER], amsgrad=True), "amsgrad is True"),
        (torch.optim.RMSprop([PARAMETER]), "torch.optim.RMSprop has no counterpart for rows; give"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_group_that_rows_cannot_follow_names_the_choices(
    made: torch.optim.Optimizer, text: str
) -> None:
    with pytest.raises(OptimizerRefusedError) as caught:
        following(f"torch.optim.{type(made).__name__}", made.param_groups[0], table="table items")
    assert str(caught.value).startswith("table items: ")
    assert text in str(caught.value)
    assert "psdist.RowWiseAdagrad" in str(caught.value)
