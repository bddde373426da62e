"""The fused kernels of torch, called as an optimizer's own step calls them, and proved before use.

Owns which optimizers have such a kernel, the call, and the proof that in this very process it
gives the bits of torch's own ``step``: these kernels are not public and may change with any torch.
It keeps no state of an optimizer and never decides what is stepped.

    kernel = kernel_for("torch.optim.SGD") if can_fuse("torch.optim.SGD", dtype, "cpu") else None
    if kernel and is_proven("torch.optim.SGD", group, switches(group), dtype, "cpu"):
        kernel([values], [grad], [optimizer.state[parameter]], group, lr)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from psdist.errors import OptimizerRefusedError
from psdist.protocol.optimizers import LOCAL_KEYS
from psdist.servers.shard.optimizer_classes import construct, is_torch, make, torch_step

_Tensors: TypeAlias = list[Tensor]
_States: TypeAlias = list[dict[str, Any]]
Group: TypeAlias = Mapping[str, Any]
"""An optimizer group as torch has it: its hyperparameters and ``params``."""
Switches: TypeAlias = tuple[tuple[str, bool], ...]
Kernel: TypeAlias = Callable[[_Tensors, _Tensors, _States, Group, float], None]
"""(values, gradients, states, group, lr): one step in place, on tensors that have their state."""


@functools.cache
def can_fuse(name: str, dtype: torch.dtype, device: str) -> bool:
    """By trying it: which dtypes and devices a fused step takes differs between torch versions."""
    if not is_torch(name):
        return False  # what another package calls fused is not known
    optimizer_class = getattr(torch.optim, name.rpartition(".")[2])
    if "fused" not in inspect.signature(optimizer_class).parameters:
        return False
    parameter = torch.zeros(8, dtype=dtype, device=device)
    parameter.grad = torch.zeros_like(parameter)
    try:
        torch_step(optimizer_class)(make(optimizer_class, [parameter], fused=True))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def kernel_for(name: str) -> Kernel | None:
    """The kernel call of this optimizer, if it has one; to be proved before it is used."""
    return _KERNELS.get(name)


# Each repeats the call that torch makes in the class's step once there is state.


def _step_sgd(values: _Tensors, grads: _Tensors, states: _States, group: Group, lr: float) -> None:
    momentum = group["momentum"]
    torch._fused_sgd_(
        values,
        grads,
        [state["momentum_buffer"] for state in states] if momentum != 0 else [],
        lr=lr,
        momentum=momentum,
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


def _step_adam(values: _Tensors, grads: _Tensors, states: _States, group: Group, lr: float) -> None:
    beta1, beta2 = group["betas"]
    # Before torch 2.7 this key was not there; an AdamW of such a torch is found out by the proof.
    is_decoupled = group.get("decoupled_weight_decay", False)
    kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    kernel(
        values,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        _counted(states),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def _step_adagrad(
    values: _Tensors, grads: _Tensors, states: _States, group: Group, lr: float
) -> None:
    torch._fused_adagrad_(
        values,
        grads,
        [state["sum"] for state in states],
        _counted(states),
        lr=lr,
        lr_decay=group["lr_decay"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


_KERNELS: dict[str, Kernel] = {
    "torch.optim.SGD": _step_sgd,
    "torch.optim.Adam": _step_adam,
    "torch.optim.AdamW": _step_adam,
    "torch.optim.Adagrad": _step_adagrad,
}


def _counted(states: _States) -> list[Tensor]:
    counters = [state["step"] for state in states]
    for counter in counters:
        counter.add_(_one(counter.dtype, counter.device))  # a python 1 would take 3 us more
    return counters


@functools.cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


def switches(group: Group) -> Switches:
    """Return the switches that decide which state exists and which branches a kernel takes."""
    return tuple((key, bool(group[key])) for key in sorted(group) if key != "params")


_PROVEN: dict[tuple[str, Switches, torch.dtype, str], bool] = {}


def is_proven(name: str, group: Group, on_off: Switches, dtype: torch.dtype, device: str) -> bool:
    """Whether the kernel call gives torch's own bits here; found out once for each key."""
    key = (name, on_off, dtype, device)
    if key not in _PROVEN:
        _PROVEN[key] = _reproduces_torch(name, group, dtype, device)
    return _PROVEN[key]


def _reproduces_torch(name: str, group: Group, dtype: torch.dtype, device: str) -> bool:
    optimizer_class = getattr(torch.optim, name.rpartition(".")[2])
    hyper = {key: value for key, value in group.items() if key not in LOCAL_KEYS}
    start = torch.linspace(-1.0, 2.0, 77, dtype=dtype, device=device)  # 77: vectors and a rest
    ours, theirs = start.clone(), start.clone()
    try:
        mine = construct(optimizer_class, [ours], hyper, is_fused=True)
        reference = construct(optimizer_class, [theirs], hyper, is_fused=True)
        step = torch_step(optimizer_class)
        for number in range(4):
            grad = (start * (number + 0.7)).cos()
            ours.grad, theirs.grad = grad.clone(), grad.clone()
            step(reference)
            if number == 0:
                step(mine)
            else:
                _KERNELS[name]([ours], [ours.grad], [mine.state[ours]], group, group["lr"])
        pairs = [(ours, theirs)] + [
            (value, reference.state[theirs][key])
            for key, value in mine.state[ours].items()
            if isinstance(value, Tensor)
        ]
        return all(torch.equal(one, other) for one, other in pairs)
    except (OptimizerRefusedError, RuntimeError, TypeError, AttributeError, KeyError):
        # A torch without this kernel or with other arguments, or values that a constructor would
        # not take and a scheduler set (lr < 0): step does the work.
        return False
