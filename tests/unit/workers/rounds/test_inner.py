"""The optimizer that steps on a worker between two exchanges: its state is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from psdist.errors import OptimizerRefusedError
from psdist.workers.rounds.inner import LocalOptimizer, digest_of_state


def make(**options: Any) -> LocalOptimizer:
    return served(**options)[0]


def served(**options: Any) -> tuple[LocalOptimizer, Callable[[], Any]]:
    """And the step of the original, which psdist makes."""

    def step(_scale: float, _has_scaler: bool, _is_found: bool) -> None:
        raise AssertionError("nobody steps here")

    original = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], **options)
    own_step = original.step
    return LocalOptimizer(original, step=step), own_step


def step_once(made: tuple[LocalOptimizer, Callable[[], Any]], value: float) -> LocalOptimizer:
    optimizer, step = made
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = torch.full((3,), value)
    step()
    return optimizer


def test_what_is_loaded_takes_the_place_of_all_that_was_and_the_groups_stay() -> None:
    source, made = step_once(served(lr=0.5), 2.0), served(lr=0.1)
    target = made[0]
    groups = target.param_groups
    held = groups[0]
    held["of a scheduler"] = 7
    target.load_state_dict(source.state_dict())
    assert target.param_groups is groups
    assert groups[0] is held
    assert "of a scheduler" not in held, "torch drops what the loaded groups have not"
    assert held["lr"] == 0.5
    assert digest_of_state(target) == digest_of_state(source) != ""
    held["lr"] = 0.0
    before = held["params"][0].clone()
    step_once(made, 1.0)
    assert torch.equal(held["params"][0], before), "a step sees what is changed in the group"


def test_told_state_is_taken_and_groups_are_left() -> None:
    source, target = step_once(served(lr=0.5), 2.0), make(lr=0.1)
    target.take(source.told())
    assert digest_of_state(target) == digest_of_state(source)
    assert target.param_groups[0]["lr"] == 0.1
    assert target.name == "torch.optim.AdamW"


def test_state_that_differs_in_value_dtype_or_shape_has_another_digest() -> None:
    digests = {digest_of_state(make())}
    for entry in (
        *(torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.ones(4)),
        *(torch.zeros(8, dtype=torch.float16), 0.0),
    ):
        optimizer = make()
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {"entry": entry}
        digests.add(digest_of_state(optimizer))
    assert len(digests) == 7
    assert "" in digests, "where there is none"


def test_one_that_evaluates_the_loss_itself_is_refused() -> None:
    original = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(OptimizerRefusedError, match=r"LBFGS with local.steps"):
        LocalOptimizer(original, step=lambda *_: None)
