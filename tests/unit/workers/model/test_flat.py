"""Parameters in flat memory: the same bytes as the wire's, and to torch tensors like any other."""

from __future__ import annotations

import io

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from psdist.errors import ModelError
from psdist.protocol.memory import dtype_name
from psdist.protocol.partition import Partition, Piece
from psdist.workers.model.flat import FlatModel
from psdist.workers.model.samples import same_bits
from tests.support.late_transfers import on_a_device


def flattened(model: nn.Module, *, encodes_there: bool = False) -> tuple[FlatModel, Partition]:
    pieces = [
        Piece(
            name=name,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            dtype=dtype_name(parameter.dtype),
            optimizer_group=0,
        )
        for name, parameter in model.named_parameters()
    ]
    partition = Partition.cut(pieces, chunk_bytes=None, whole_tensors=False)
    parameters = list(model.parameters())
    return FlatModel(partition, parameters, encodes_there=encodes_there), partition


def saved_bytes(value: object) -> int:
    stream = io.BytesIO()
    torch.save(value, stream)
    return len(stream.getvalue())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_model_is_saved_in_the_size_of_the_part(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 1)).to(dtype)
    plain = [saved_bytes(each) for each in (model, model[1], model[1].state_dict(), model[1].bias)]
    flattened(model)
    ours = [saved_bytes(each) for each in (model, model[1], model[1].state_dict(), model[1].bias)]
    assert ours == pytest.approx(plain, abs=512)  # names and padding of the archive


def test_state_dict_is_the_parameters_own_memory_as_in_plain_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    flat, partition = flattened(model)
    for value in model.state_dict().values():
        value.copy_(torch.full_like(value, 7.0))
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())
    (chunk,) = partition.chunks
    wire = torch.frombuffer(flat.parameter_bytes(chunk), dtype=torch.float32)
    assert int((wire == 7).sum()) == sum(parameter.numel() for parameter in model.parameters())


def test_strides_and_values_of_a_parameter_stay() -> None:
    model = nn.Module()
    values = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    model.transposed = nn.Parameter(values)
    before = values.clone()
    flattened(model)
    assert model.transposed.stride() == values.stride()
    assert torch.equal(model.transposed, before)


def test_a_parameter_keeps_the_flat_memory_alive() -> None:
    model = nn.Linear(100, 100)
    before = model.weight.detach().clone()
    flattened(model)  # and thrown away
    torch.full((200, 100), 9.0)
    assert torch.equal(model.weight, before)


def test_safetensors_takes_the_parameters_for_tensors_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    flattened(model)
    loaded = load(save(model.state_dict()))
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


# -- on a device -----------------------------------------------------------------------------------


def test_what_mpi_sees_of_a_model_on_a_device_is_brought_and_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with on_a_device():
        flat, partition = flattened(model)
    (chunk,) = partition.chunks
    seen = torch.frombuffer(flat.parameter_bytes(chunk), dtype=torch.float32)
    assert torch.equal(seen, flat.values[0])
    seen.fill_(2.0)
    assert not any(bool((parameter == 2.0).any()) for parameter in model.parameters())
    flat.host_to_device([chunk])
    assert all(bool((parameter == 2.0).all()) for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    flat.collect_gradients(scale=0.5)
    sent = torch.frombuffer(flat.gradient_bytes(chunk), dtype=torch.float32)
    assert not sent.count_nonzero()
    flat.gradients_to_host([chunk])
    assert torch.equal(sent, flat.gradients[0])
    assert int((sent == 1.5).sum()) == sum(each.numel() for each in model.parameters())


def test_gradients_that_a_device_encodes_have_no_mirror_and_a_models_on_the_cpu_are_none() -> None:
    with on_a_device():
        flat, partition = flattened(nn.Linear(4, 3), encodes_there=True)
    (chunk,) = partition.chunks
    assert flat.encodes_there
    assert len(flat.gradient_part(chunk)) == chunk.length
    with pytest.raises(IndexError):
        flat.gradient_bytes(chunk)
    assert len(flat.parameter_bytes(chunk)) == chunk.num_bytes
    on_cpu, _ = flattened(nn.Linear(4, 3), encodes_there=True)
    assert not on_cpu.encodes_there
    assert len(on_cpu.gradient_bytes(chunk)) == chunk.num_bytes


@pytest.mark.parametrize("has_mirrors", [False, True])
def test_gradients_that_are_not_bit_by_bit_in_flat_memory_are_found(has_mirrors: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with on_a_device():
        flat, _ = flattened(model) if has_mirrors else (None, None)
    if flat is None:
        flat, _ = flattened(model)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    flat.collect_gradients(scale=1.0)
    assert not flat.unlike_flat(range(4))
    assert parameters[0].grad is not None
    parameters[0].grad.view(-1)[-1] = -0.0
    parameters[2].grad = None
    assert flat.unlike_flat(iter(range(4))) == {0, 2}
    assert flat.unlike_flat([1, 2]) == {2}
    assert not flat.unlike_flat([])


def test_a_model_on_no_device_that_is_trained_is_refused() -> None:
    with pytest.raises(ModelError, match=r"on meta; .*job\.device"):
        flattened(nn.Linear(4, 3, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_bits_are_compared_and_not_values(dtype: torch.dtype, is_transposed: bool) -> None:
    one = torch.arange(12.0).reshape(3, 4).to(dtype)
    one[1, 2], one[2, 3] = float("nan"), 0.0
    one = one.t() if is_transposed else one
    other = one.clone(memory_format=torch.preserve_format)
    assert same_bits(one, other)  # NaN, too
    other[2 if not is_transposed else 3, 3 if not is_transposed else 2] = -0.0
    assert torch.equal(other.nan_to_num(), one.nan_to_num())
    assert not same_bits(one, other)
    assert same_bits(one[:0], other[:0])
