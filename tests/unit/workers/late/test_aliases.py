"""Others that hold a parameter, or its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.workers.late.steps import first_shared


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 2)


def shared(layer: nn.Linear) -> int | None:
    return first_shared(list(layer.parameters()))


def loss(layer: nn.Linear) -> Tensor:
    return layer(torch.ones(4, 3, requires_grad=True)).tanh().square().sum()


HOLDERS: list[Callable[[nn.Linear], Any]] = [
    lambda layer: layer.weight.data,
    lambda layer: layer.weight.detach(),
    lambda layer: layer.weight.view(-1),
    lambda layer: layer.weight[0],
    lambda layer: layer.weight.detach().numpy(),
    lambda layer: torch.utils.dlpack.to_dlpack(layer.weight.detach()),
    lambda layer: layer.state_dict(),
    lambda layer: torch.jit.trace(layer, torch.ones(1, 3)),  # type: ignore[no-untyped-call]
    lambda layer: torch.jit.script(layer),
    loss,
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("hold", HOLDERS)
def test_who_holds_a_parameters_memory_is_found_while_it_does(
    hold: Callable[[nn.Linear], Any], layer: nn.Linear
) -> None:
    held = hold(layer)
    assert shared(layer) == 0
    del held
    assert shared(layer) is None


def test_one_that_is_frozen_is_looked_at_as_well(layer: nn.Linear) -> None:
    layer.bias.requires_grad_(False)
    assert shared(layer) is None
    _held = layer.bias.data
    assert shared(layer) == 1


def test_lists_hooks_optimizers_and_used_graphs_are_nobody(layer: nn.Linear) -> None:
    _listed = [layer.weight, layer.bias]
    _optimizer = torch.optim.Adam(layer.parameters())
    layer.weight.register_post_accumulate_grad_hook(lambda _parameter: None)  # type: ignore[no-untyped-call]
    used = loss(layer)
    used.backward()  # type: ignore[no-untyped-call]
    assert shared(layer) is None
