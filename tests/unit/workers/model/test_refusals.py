"""Errors of job.prepare for models and optimizers that it cannot train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from psdist.errors import ModelError, UsageError, UserError
from psdist.workers.model.refusals import (
    WrappedParts,
    WrapperCheck,
    entered,
    optimizers_of,
    refuse_untrainable,
    wrapper_of,
)

CALL = "job.prepare(model, optimizer): "


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def text_of(make: Callable[[], object], kind: type[UserError] = ModelError) -> str:
    with pytest.raises(kind) as error:
        make()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone, as psdist.init() makes it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined] # not in __all__
    yield
    dist.destroy_process_group()


# -- the two arguments -----------------------------------------------------------------------------


def test_one_optimizer_and_sequences_of_several_come_back_as_a_list() -> None:
    model = nn.Linear(2, 2)
    first, second = sgd(model), sgd(model)
    assert optimizers_of(model, first) == [first]
    assert optimizers_of(model, [first, second]) == [first, second]
    assert optimizers_of(model, (first, second)) == [first, second]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, sgd(model)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            lambda m, o: ([m, m], o),
            "the model is a list, not a module; pass nn.ModuleList([a, b]), and one optimizer of "
            "the parameters of both",
        ),
        (
            lambda m, o: ((m, m), o),
            "the model is a tuple, not a module; pass nn.ModuleList([a, b]), and one optimizer of "
            "the parameters of both",
        ),
        (
            lambda m, o: ({"a": m}, o),
            "the model is a dict, not a module; pass nn.ModuleDict({...}) of its modules, and an "
            "optimizer of all their parameters",
        ),
        (
            lambda m, o: (o, m),
            "the model is a SGD, not a module; pass the model first and the optimizer second",
        ),
        (
            lambda *_: (DataLoader([0]), ()),
            "the model is a DataLoader, not a module; pass loaders after the model and the "
            "optimizer",
        ),
        (
            lambda _, o: (nn.Linear, o),
            "the model is the class Linear, not a module; pass the torch.nn.Module itself",
        ),
        (
            lambda m, o: (m, torch.optim.lr_scheduler.StepLR(o, 2)),
            "the optimizer is a StepLR, not an optimizer of torch; pass the torch.optim.Optimizer "
            "itself, or a list of several",
        ),
        (
            lambda m, o: (m, [o, m]),
            "the optimizer is a Linear, not an optimizer of torch; pass the torch.optim.Optimizer "
            "itself, or a list of several",
        ),
        (
            lambda m, _: (m, torch.optim.SGD),
            "the optimizer is the class SGD, not an optimizer of torch; pass the "
            "torch.optim.Optimizer itself, or a list of several",
        ),
    ],
)
def test_what_is_no_module_or_no_optimizer_is_named_with_what_to_pass(
    given: Callable[[Any, Any], tuple[object, object]], text: str
) -> None:
    wrong = given(*model_and_optimizer())
    assert text_of(lambda: optimizers_of(*wrong), UsageError) == CALL + text


def test_an_empty_list_of_optimizers_is_refused() -> None:
    text = text_of(lambda: optimizers_of(nn.Linear(2, 2), []), UsageError)
    assert text == "job.prepare(model, optimizer): no optimizer was given; pass it after the model"


# -- models ----------------------------------------------------------------------------------------


def with_parameter(parameter: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(parameter, requires_grad=parameter.is_floating_point())
    return model


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("mask", buffer)
    return model


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)),
            "module 1 is a LazyLinear, which has no parameters yet; run one batch through the "
            "model before prepare()",
        ),
        (
            lambda: nn.LazyBatchNorm1d(affine=False),
            "the model is a LazyBatchNorm1d, which has no parameters yet; run one batch through "
            "the model before prepare()",
        ),
        (
            lambda: nn.Linear(2, 2, device="meta"),
            "parameter weight is on the device meta, without values; call "
            "model.to_empty(device=job.device), initialise the model, and make the optimizer after "
            "that",
        ),
        (
            lambda: with_buffer(torch.ones(2, device="meta")),
            "buffer 0.mask is on the device meta, without values; call "
            "model.to_empty(device=job.device), initialise the model, and make the optimizer after "
            "that",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            "module 1 is a SyncBatchNorm, which would share statistics within a group of workers "
            "only; use nn.BatchNorm1d, 2d or 3d, which normalises each worker's batch, or "
            "nn.GroupNorm, which does not depend on the batch",
        ),
        (
            lambda: with_parameter(torch.eye(2).to_sparse()),
            "parameter 0.weight has the layout sparse_coo; servers hold dense tensors: call "
            "to_dense() on it, or keep a constant as a plain attribute of its module",
        ),
        (
            lambda: with_buffer(torch.eye(2).to_sparse()),
            "buffer 0.mask has the layout sparse_coo; servers hold dense tensors: call to_dense() "
            "on it, or keep a constant as a plain attribute of its module",
        ),
        (
            lambda: with_parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
            "parameter 0.weight has the layout nested; servers hold dense tensors: call to_dense() "
            "on it, or keep a constant as a plain attribute of its module",
        ),
        (
            made_for_inference,
            "parameter weight was made under torch.inference_mode(), where nothing can be trained; "
            "build the model outside of it",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*nested tensors", "ignore:.*Sparse")
def test_a_model_without_plain_values_is_named_with_what_to_do(
    make: Callable[[], nn.Module], text: str
) -> None:
    model = make()
    assert text_of(lambda: refuse_untrainable(model)) == text


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_the_remedies_for_lazy_models_and_models_on_meta_work() -> None:
    lazy = nn.Sequential(nn.LazyLinear(2))
    lazy(torch.ones(1, 3))
    refuse_untrainable(lazy)
    empty = nn.Linear(2, 2, device="meta").to_empty(device="cpu")
    empty.reset_parameters()
    refuse_untrainable(empty)


@pytest.mark.usefixtures("group")
def test_tensors_that_are_shared_out_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,))
    values = distribute_tensor(model.weight.detach(), mesh, [Replicate()])
    model.weight = nn.Parameter(values)
    assert text_of(lambda: refuse_untrainable(model)) == (
        "parameter weight is a DTensor; servers hold plain tensors: leave out the call that makes "
        "it one (distribute_module, parallelize_module, fully_shard, quantize_ ...)"
    )


def test_parameters_of_a_class_of_the_scripts_own_are_plain_tensors() -> None:
    class Own(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.bias = Own(model.bias.detach())
    refuse_untrainable(model)


# -- wrappers --------------------------------------------------------------------------------------

EXCHANGES = (
    ", which exchanges gradients or parameters itself; psdist does that: remove the line that "
    "wraps the model, and call the model that job.prepare returned"
)


@pytest.mark.usefixtures("group")
def test_a_model_that_is_wrapped_is_refused_with_the_name_of_the_wrapper() -> None:
    for make, what in (
        (DistributedDataParallel, "the model is wrapped in DistributedDataParallel"),
        (nn.DataParallel, "the model is wrapped in DataParallel"),
        (
            lambda inner: nn.Sequential(DistributedDataParallel(inner)),
            "module 0 is wrapped in DistributedDataParallel",
        ),
        (fully_shard, "the model is wrapped in fully_shard"),
    ):
        model = make(nn.Linear(2, 2))
        assert text_of(lambda: refuse_untrainable(model), UsageError) == what + EXCHANGES  # noqa: B023 - called here


@pytest.mark.usefixtures("group")
def test_a_model_that_is_sharded_after_prepare_is_refused_when_it_is_called() -> None:
    sharded = nn.Linear(2, 2)
    sharded.register_forward_pre_hook(WrapperCheck(type(sharded)))
    fully_shard(sharded)
    text = text_of(lambda: sharded(torch.ones(1, 2)), UsageError)
    assert text == "the prepared model has been wrapped in fully_shard" + EXCHANGES


@pytest.mark.usefixtures("group")
def test_a_wrapper_of_a_part_is_found_when_it_is_made_or_when_the_model_is_prepared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    held = {id(each) for each in model.parameters()}
    parts = WrappedParts(lambda parameter: id(parameter) in held)
    part = ", or a part of it, is wrapped in DistributedDataParallel" + EXCHANGES
    text = text_of(lambda: DistributedDataParallel(model[1]), UsageError)
    assert text == "the prepared model" + part

    later = nn.Sequential(nn.Linear(2, 2))
    wrapped = DistributedDataParallel(later[0])
    assert text_of(lambda: parts.require_none(later), UsageError) == "the model" + part
    del wrapped
    parts.stop()
    DistributedDataParallel(model[1])


@pytest.mark.usefixtures("group")
def test_copies_of_a_prepared_model_and_other_models_may_be_wrapped() -> None:
    model = nn.Linear(2, 2)
    parts = WrappedParts(lambda parameter: parameter is model.weight or parameter is model.bias)
    model.register_forward_pre_hook(WrapperCheck(type(model)))
    DistributedDataParallel(copy.deepcopy(model))(torch.ones(1, 2))
    parts.require_none(model)


def test_replicas_of_dataparallel_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(WrapperCheck(type(model)))
    replica = model._replicate_for_data_parallel()  # type: ignore[no-untyped-call] # torch's
    replica.weight = model.weight
    text = text_of(lambda: replica(torch.ones(1, 2)), UsageError)
    assert text == "the prepared model is called by DataParallel" + EXCHANGES


def test_classes_of_the_scripts_own_are_no_wrappers() -> None:
    class DataParallel(nn.Module):
        pass

    assert wrapper_of(DataParallel) == wrapper_of(nn.Linear) == ""


def test_of_a_container_its_members_are_called() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert entered(first) == [first]
    assert entered(nn.ModuleList([first, nn.ModuleDict({"b": second})])) == [first, second]
    both = nn.Sequential(first, second)
    assert entered(nn.ModuleList([both])) == [both]
