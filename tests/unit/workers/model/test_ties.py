"""Parameters that share memory with something else, by name and with what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from psdist.errors import ModelError
from psdist.workers.model.ties import Ties

SEPARATES = " share memory, which training on servers would separate; "
ONCE = (
    "register it once, and compute the other one from it in forward(), or give it memory of its "
    "own: clone()"
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)


def tied() -> nn.Module:
    model = Two()
    model.out.weight.data = model.emb.weight.data
    return model


def transposed() -> nn.Module:
    model = Two()
    model.out = nn.Linear(6, 4, bias=False)
    model.out.weight = nn.Parameter(model.emb.weight.data.t())
    return model


def sliced() -> nn.Module:
    flat = torch.zeros(10)
    model = nn.Module()
    model.a = nn.Parameter(flat[:6])
    model.b = nn.Parameter(flat[5:])
    return model


def of_a_buffer() -> nn.Module:
    model = Two()
    model.register_buffer("seen", model.emb.weight.data[0])
    return model


def of_a_frozen_parameter() -> nn.Module:
    model = Two()
    model.last = nn.Parameter(model.emb.weight.data[-1:], requires_grad=False)
    return model


def of_an_attribute() -> nn.Module:
    model = Two()
    model.decoder = model.emb.weight.t()
    return model


def of_attributes_in_a_list() -> nn.Module:
    model = Two()
    model.out.rows = list(model.emb.weight.data)
    return model


def expanded() -> nn.Module:
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1).expand(4))
    return model


def strided() -> nn.Module:
    model = nn.Module()
    model.windows = nn.Parameter(torch.zeros(8).as_strided((3, 4), (2, 1)))
    return model


def names_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in model.named_parameters() if each.requires_grad]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            tied,
            "parameter emb.weight and parameter out.weight"
            + SEPARATES
            + "make them one object before the optimizer: out.weight = emb.weight",
        ),
        (
            transposed,
            "parameter emb.weight and parameter out.weight"
            + SEPARATES
            + "make them one object before the optimizer, out.weight = emb.weight, and use its "
            "transpose or part in forward()",
        ),
        (
            sliced,
            "parameter a and parameter b"
            + SEPARATES
            + "make them one object before the optimizer, b = a, and use its transpose or part in "
            "forward()",
        ),
        (of_a_buffer, "buffer seen and parameter emb.weight" + SEPARATES + ONCE),
        (of_a_frozen_parameter, "parameter last and parameter emb.weight" + SEPARATES + ONCE),
        (of_an_attribute, "attribute decoder and parameter emb.weight" + SEPARATES + ONCE),
        (of_attributes_in_a_list, "attribute out.rows and parameter emb.weight" + SEPARATES + ONCE),
        (
            expanded,
            "parameter scale has elements that share memory (expand or as_strided); make it a "
            "parameter of the distinct elements, and expand it in forward()",
        ),
        (
            strided,
            "parameter windows has elements that share memory (expand or as_strided); make it a "
            "parameter of the distinct elements, and expand it in forward()",
        ),
    ],
)
def test_shared_memory_is_refused_by_name(make: Callable[[], nn.Module], text: str) -> None:
    model = make()
    with pytest.raises(ModelError) as error:
        Ties().require_none(model, names_of(model))
    assert str(error.value) == text


def one_object() -> nn.Module:
    model = Two()
    model.out.weight = model.emb.weight
    return model


def fused() -> nn.Module:
    flat = torch.zeros(24)
    model = nn.Module()
    model.a, model.b = (nn.Parameter(part.view(3, 4)) for part in flat.split(12))
    matrix = torch.zeros(4, 6)
    model.q, model.k, model.v = map(nn.Parameter, matrix.split(2, dim=1))
    return model


def with_views_of_what_stays() -> nn.Module:
    model = Two()
    model.register_buffer("table", torch.arange(4.0))
    model.register_buffer("rows", model.table.expand(3, 4))
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    model.still, model.also = frozen, nn.Parameter(frozen.data, requires_grad=False)
    return model


def of_torch() -> nn.Module:
    return nn.Sequential(
        nn.LSTM(3, 3, 2),
        nn.MultiheadAttention(4, 2),
        nn.utils.spectral_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.Linear(0, 3),
    )


@pytest.mark.parametrize("make", [one_object, fused, with_views_of_what_stays, of_torch])
@pytest.mark.filterwarnings("ignore:Initializing zero-element", "ignore:.*spectral_norm")
def test_what_shares_no_memory_with_what_is_trained_is_fine(make: Callable[[], nn.Module]) -> None:
    model = make()
    moving = Ties().require_none(model, names_of(model))
    assert [each.name for each in moving] == [
        f"parameter {name}" for name, each in names_of(model) if each.numel()
    ]


def move(model: nn.Module) -> None:
    """As job.prepare does."""
    for _, parameter in names_of(model):
        parameter.data = parameter.data.clone()


def test_a_view_of_memory_that_a_model_prepared_before_has_left_is_refused() -> None:
    ties, first, second = Ties(), Two(), Two()
    second.out.weight.data = first.out.weight.data
    held = {id(each) for each in first.parameters()}
    ties.leave(ties.require_none(first, names_of(first)))
    move(first)
    with pytest.raises(ModelError) as error:
        ties.require_none(second, names_of(second), earlier=[first], held=held)
    assert str(error.value) == (
        "parameter out.weight and parameter out.weight, prepared before," + SEPARATES + ONCE
    )


def test_a_buffer_of_a_model_prepared_before_is_seen() -> None:
    ties, first, second = Ties(), Two(), Two()
    first.register_buffer("teacher", second.emb.weight.data)
    held = {id(each) for each in first.parameters()}
    ties.leave(ties.require_none(first, names_of(first)))
    move(first)
    with pytest.raises(
        ModelError, match=r"^buffer teacher of another prepared model and parameter"
    ):
        ties.require_none(second, names_of(second), earlier=[first], held=held)


def test_two_optimizers_of_one_model_in_two_calls_share_nothing() -> None:
    ties, model = Ties(), fused()
    names = names_of(model)
    ties.leave(ties.require_none(model, names[:2]))
    held = {id(each) for _, each in names[:2]}
    for _, parameter in names[:2]:
        parameter.data = parameter.data.clone()
    moving = ties.require_none(model, names[2:], earlier=[model], held=held)
    assert len(moving) == 3


def test_a_call_that_was_refused_leaves_nothing_behind() -> None:
    ties, model = Ties(), tied()
    with pytest.raises(ModelError):
        ties.require_none(model, names_of(model))
    mended = one_object()
    assert len(ties.require_none(mended, names_of(mended))) == 1


def test_memory_that_was_freed_may_be_used_again() -> None:
    ties = Ties()
    for _ in range(20):
        model = nn.Linear(3, 3)
        ties.leave(ties.require_none(model, names_of(model)))
