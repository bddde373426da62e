"""Which optimizers still have the step() of their class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from psdist.errors import OptimizerRefusedError
from psdist.protocol.optimizers import ACCEPTED
from psdist.workers.model.optimizer import ServedOptimizer
from psdist.workers.model.replaced_step import refuse_replaced_step


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    make: Callable[..., torch.optim.Optimizer] = kind
    return make([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)


def assert_refused(of: torch.optim.Optimizer, what: str) -> None:
    with pytest.raises(OptimizerRefusedError) as error:
        refuse_replaced_step(of)
    assert str(error.value) == (
        f"{what}, which would never be called: servers run the step() of torch; to change "
        "gradients use optimizer.register_step_pre_hook(), or write a class of optimizers and name "
        "it in the setting training.optimizers"
    )


def half_step(self: torch.optim.Optimizer, closure: Any = None) -> None:
    del closure
    with torch.no_grad():
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.05)


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_every_optimizer_of_torch_has_its_own_step(name: str) -> None:
    refuse_replaced_step(optimizer(getattr(torch.optim, name.rpartition(".")[2])))


def test_schedulers_scalers_and_hooks_of_torch_replace_nothing() -> None:
    for make in (
        lambda of: StepLR(of, 2),
        lambda of: CosineAnnealingLR(of, 4),
        lambda of: OneCycleLR(of, max_lr=1.0, total_steps=9),
    ):
        of = optimizer()
        make(of)
        make(of)
        refuse_replaced_step(of)
    of = optimizer()
    of.register_step_pre_hook(lambda *_: None)
    of.register_step_post_hook(lambda *_: None)
    of.found_inf = of.grad_scale = torch.zeros(())  # type: ignore[attr-defined] # GradScaler's
    refuse_replaced_step(of)


def test_a_scheduler_made_before_the_class_was_wrapped_again_replaces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = optimizer(torch.optim.RAdam)
    StepLR(of, 2)
    # As the compiler does with RAdam when it is loaded.
    monkeypatch.setattr(
        torch.optim.RAdam, "step", torch.optim.Optimizer.profile_hook_step(torch.optim.RAdam.step)
    )
    refuse_replaced_step(of)


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_a_step_assigned_to_an_object_is_refused(has_scheduler: bool) -> None:
    of = optimizer()
    of.step = MethodType(half_step, of)  # type: ignore[method-assign]
    if has_scheduler:
        StepLR(of, 2)
    assert_refused(of, "this SGD object has a step() of the script's own")


def test_a_step_that_only_pretends_to_be_the_one_it_wraps_is_refused() -> None:
    of = optimizer()
    StepLR(of, 2)

    @functools.wraps(of.step)
    def twice(*arguments: Any) -> None:
        for _ in range(2):
            type(of).step(of, *arguments)

    of.step = twice  # type: ignore[method-assign]
    assert_refused(of, "this SGD object has a step() of the script's own")


def test_another_callable_and_another_method_of_an_object_are_refused() -> None:
    of = optimizer()
    of.step = functools.partial(half_step, of)  # type: ignore[method-assign]
    assert_refused(of, "this SGD object has a step() of the script's own")
    of = optimizer()
    of._init_group = lambda *_: False  # type: ignore[attr-defined]
    assert_refused(of, "this SGD object has a _init_group() of the script's own")


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_step_assigned_to_a_class_of_torch_is_refused(
    comes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = optimizer()
    monkeypatch.setattr(torch.optim.SGD, "step", half_step)
    # Making an object of the class wraps the function, by the hook of torch's profiler.
    of = optimizer() if comes_first else before
    assert_refused(of, "the script has replaced torch.optim.sgd.SGD.step()")


def test_the_step_of_another_class_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of = optimizer()
    monkeypatch.setattr(torch.optim.SGD, "step", torch.optim.Adam.step)
    assert_refused(of, "the script has replaced torch.optim.sgd.SGD.step()")


class Halving(torch.optim.SGD):
    step = half_step  # type: ignore[assignment]


def test_a_class_of_the_scripts_own_keeps_its_step_for_servers_import_it() -> None:
    refuse_replaced_step(optimizer(Halving))


def test_an_optimizer_that_was_prepared_may_be_prepared_in_the_next_job() -> None:
    of = optimizer()
    ServedOptimizer(of, step=lambda *_: None)
    refuse_replaced_step(of)
