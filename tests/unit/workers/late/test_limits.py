"""Models of which psdist cannot tell who reads a parameter, and when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psdist.workers.late.steps import why_not_late, why_not_late_here


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.utils.counters.clear()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def why(module: nn.Module) -> str:
    return why_not_late(module, module.parameters())


def test_plain_modules_may() -> None:
    assert why(model()) == ""
    assert why_not_late_here(group_size=1, has_mirrors=False) == ""


def test_groups_of_several_and_devices_may_not() -> None:
    assert "group of several" in why_not_late_here(group_size=2, has_mirrors=False)
    assert "device" in why_not_late_here(group_size=1, has_mirrors=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_compiled_in_part_or_as_a_whole_may_not() -> None:
    whole: nn.Module = torch.compile(model())  # type: ignore[assignment]
    part = model()
    part[1].compile()
    assert "torch.compile" in why(whole)
    assert "torch.compile" in why(part)


def test_where_something_else_was_compiled_it_may_not() -> None:
    torch._dynamo.utils.counters["frames"]["total"] += 1
    assert "torch.compile" in why(model())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torch_jit_may_not() -> None:
    part = model()
    part[1] = torch.jit.trace(part[1], torch.ones(1, 3))  # type: ignore[no-untyped-call]
    assert why(part) == "1 is compiled by torch.jit, which reads parameters unseen"


class Own(nn.Parameter):
    pass


class OwnTable(dict[str, "nn.Parameter | None"]):
    pass


def test_parameters_and_tables_of_classes_of_their_own_may_not() -> None:
    part = model()
    part[0].weight = Own(torch.ones(3, 3))
    assert why(part) == "a parameter is a Own, a class of its own"
    other = model()
    other[1]._parameters = OwnTable(other[1]._parameters)
    assert why(other) == "1 keeps its parameters in a table of its own"
