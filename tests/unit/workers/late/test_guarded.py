"""Who reads a guarded parameter is told of; who looks at its shape or its gradient is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from psdist.errors import InvariantError
from psdist.workers.late.guarded import Guard, Guarded, ParameterTable, plainly


class Watched:
    """A layer whose parameters are guarded, and what was read of them."""

    def __init__(self) -> None:
        self.layer = nn.Linear(3, 2)
        self.parameters = list(self.layer.parameters())
        self.read: list[int] = []
        self.guard = Guard(self.parameters, on_read=self.on_read)
        self.guard.close()

    def on_read(self, index: int) -> None:
        self.read.append(index)
        with torch.no_grad():
            self.guard.open([index])
            self.parameters[index].fill_(7.0)

    @property
    def weight(self) -> Any:
        return self.parameters[0]


@pytest.fixture
def watched() -> Watched:
    return Watched()


READS: list[Callable[[Any], Any]] = [
    lambda p: p + 1,
    lambda p: p.sum(),
    lambda p: p.detach(),
    lambda p: p.data,
    lambda p: p[0],
    lambda p: p.data_ptr(),
    lambda p: p.untyped_storage(),
    lambda p: p.tolist(),
    lambda p: list(p),
    lambda p: p == 0,
    lambda p: p.to(torch.float64),
    lambda p: p.clone(),
    lambda p: torch.equal(p, p),
    lambda p: torch.stack([p]),
    lambda p: torch.cat(tensors=[p, p]),
    lambda p: torch.add(input=p, other=1),
    lambda p: torch._foreach_norm([p]),
    lambda p: torch.empty(2, 3).copy_(p.detach()),
    lambda p: nn.functional.linear(torch.ones(1, 3), p),
    lambda p: torch.ops.aten.mul(p, p),
    lambda p: torch.autograd.grad(p.sum(), p),
    repr,
    copy.copy,
    copy.deepcopy,
]


@pytest.mark.parametrize("read", READS)
def test_a_read_is_told_before_it_happens(read: Callable[[Any], Any], watched: Watched) -> None:
    read(watched.weight)
    assert watched.read == [0]
    assert type(watched.weight) is nn.Parameter


LOOKS: list[Callable[[Any], Any]] = [
    lambda p: p.shape,
    lambda p: p.size(0),
    lambda p: p.grad,
    lambda p: p.requires_grad,
    lambda p: p.numel(),
    lambda p: p.dtype,
    lambda p: p.device,
    lambda p: p._version,
    lambda p: p.is_leaf,
    lambda p: p.stride(),
    hash,
    id,
    lambda p: isinstance(p, nn.Parameter),
    lambda p: p.requires_grad_(True),
    lambda p: setattr(p, "grad", torch.zeros(2, 3)),
    lambda p: p.register_hook(lambda _: None),
]


@pytest.mark.parametrize("look", LOOKS)
def test_what_reads_no_value_is_told_to_nobody(
    look: Callable[[Any], Any], watched: Watched
) -> None:
    look(watched.weight)
    assert watched.read == []
    assert type(watched.weight) is Guarded


def test_values_are_those_that_came_while_it_was_told(watched: Watched) -> None:
    assert watched.weight.tolist() == [[7.0] * 3] * 2


def test_each_parameter_of_an_operation_is_told_once(watched: Watched) -> None:
    nn.functional.linear(torch.ones(1, 3), *watched.parameters)
    assert watched.read == [0, 1]


def test_one_that_is_not_there_afterwards_is_an_error() -> None:
    parameter = nn.Parameter(torch.ones(2))
    guard = Guard([parameter], on_read=lambda _index: None)
    guard.close()
    with pytest.raises(InvariantError, match="parameter 0 was awaited, and is not there"):
        parameter.sum()


def test_copies_are_plain_and_go_on_alone(watched: Watched) -> None:
    twin = copy.deepcopy(watched.layer)
    assert all(type(each) is nn.Parameter for each in twin.parameters())
    assert torch.equal(twin.weight, watched.layer.weight)


def test_a_class_that_was_kept_makes_plain_parameters(watched: Watched) -> None:
    made = type(watched.weight)(torch.ones(2), requires_grad=False)
    assert type(made) is nn.Parameter
    assert not made.requires_grad


def test_gradients_flow_through_what_was_guarded(watched: Watched) -> None:
    watched.layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(watched.weight.grad, torch.ones(2, 3))


def test_a_table_tells_of_what_is_given_to_an_extension(watched: Watched) -> None:
    watched.guard.use_tables(watched.layer)
    _unused: Tensor = watched.layer.weight
    assert watched.read == [0]
    assert list(watched.layer._parameters.values())[1] is watched.parameters[1]
    assert watched.read == [0]
    _unused = watched.layer.bias
    assert watched.read == [0, 1]


def test_tables_are_used_once_and_copies_have_none(watched: Watched) -> None:
    watched.guard.use_tables(watched.layer)
    table = watched.layer._parameters
    watched.guard.use_tables(watched.layer)
    assert watched.layer._parameters is table
    assert type(table) is ParameterTable
    assert type(copy.deepcopy(watched.layer)._parameters) is dict
    assert type(table.copy()) is dict
    watched.guard.remove_tables()
    assert type(watched.layer._parameters) is dict
    assert watched.layer._parameters == dict(table)


UNSEEN: list[Callable[[Any], Any]] = [
    lambda p: torch.tensor(p),
    lambda p: torch.func.vmap(lambda w: w * 1)(p),
    lambda p: torch.func.vjp(lambda w: w * 1, p)[0],
    lambda p: torch.jit.script(times_one)(p),
    lambda p: torch.Tensor._make_subclass(nn.Parameter, p).detach(),
]


def times_one(x: Tensor) -> Tensor:
    return x * 1


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("read", UNSEEN)
def test_who_reads_past_all_finds_nan_and_not_what_was_there(
    read: Callable[[Any], Any], watched: Watched
) -> None:
    assert read(watched.weight).isnan().all()
    watched.guard.open([0, 1])
    assert not watched.weight.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_guarded_keeps_its_form_and_gets_its_memory_back(dtype: torch.dtype) -> None:
    images = torch.ones(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last)
    parameters = [nn.Parameter(images), nn.Parameter(torch.ones(0, dtype=dtype))]
    before = [(each.stride(), each.shape, each.dtype, each.data_ptr()) for each in parameters]
    version = parameters[0]._version
    guard = Guard(parameters, on_read=lambda _index: None)
    guard.close()
    during = [(each.stride(), each.shape, each.dtype) for each in parameters]
    guard.open([0, 1])
    assert during == [each[:3] for each in before]
    assert before == [(p.stride(), p.shape, p.dtype, p.data_ptr()) for p in parameters]
    assert parameters[0]._version == version


def in_fakes(values: nn.Parameter) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        _unused = values * 1
    return values


TRANSFORMATIONS: list[Callable[[nn.Parameter], Tensor]] = [
    lambda p: torch.func.grad(lambda x: (x * p).sum())(torch.ones(3)),
    lambda p: torch.func.vmap(lambda x: x * p)(torch.ones(2, 3))[0],
    in_fakes,
]


@pytest.mark.parametrize("use", TRANSFORMATIONS)
def test_a_transformation_does_not_see_how_values_come(
    use: Callable[[nn.Parameter], Tensor],
) -> None:
    parameter = nn.Parameter(torch.zeros(3), requires_grad=False)
    place = parameter.data

    def on_read(index: int) -> None:
        with plainly():
            place.copy_(torch.ones(3))
            guard.open([index])

    guard = Guard([parameter], on_read=on_read)
    guard.close()
    assert torch.equal(use(parameter).detach(), torch.ones(3))
    assert torch.equal(place, torch.ones(3))
