"""Where ``step()`` must not return before the replies have come, though gradients leave early."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from psdist.workers.late.guarded import ParameterTable


def why_not_late_here(*, group_size: int, has_mirrors: bool) -> str:
    """Why not on this worker, whatever its model does; nothing where it may. ``has_mirrors``: the
    parameters lie on a device."""
    if group_size > 1:
        return "step() of a worker in a group of several gathers the others' slices"
    return "the model is on a device, to which values are brought as a whole" if has_mirrors else ""


def why_not_late(module: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> str:
    """Why reads of these parameters cannot be told; nothing where they can."""
    if has_compiled() or any(_is_compiled(each) for each in module.modules()):
        return "torch.compile reads parameters unseen"
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            return f"{name or 'the model'} is compiled by torch.jit, which reads parameters unseen"
        if type(each.__dict__.get("_parameters")) not in (dict, ParameterTable):
            return f"{name or 'the model'} keeps its parameters in a table of its own"
    for parameter in parameters:
        if type(parameter) is not torch.nn.Parameter:
            return f"a parameter is a {type(parameter).__name__}, a class of its own"
    return ""


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


_OF_STORAGE: Final = 2
"""Holders of the storage: the parameter, and the caller of the count."""
_OF_TENSOR: Final = 1
"""Holders of the tensor: Python."""


def first_shared(parameters: Sequence[torch.nn.Parameter]) -> int | None:
    """Return the index of the first parameter whose memory another object holds too, or None.

    Reads through such an object cannot be detected. A view, ``p.detach()``, ``p.data``, a numpy
    array or an unused autograd graph holds the storage; a module of torch.jit or an object of C++
    holds the tensor. Each parameter has its own storage (psdist.workers.model.flat).
    """
    count = torch._C._storage_Use_Count
    for index, parameter in enumerate(parameters):
        holders = _OF_TENSOR
        if parameter.requires_grad:
            _node = torch.autograd.graph.get_gradient_edge(parameter).node  # holds it, if it lives
            holders += 1
        if (
            parameter._use_count() > holders  # type: ignore[attr-defined] # is not declared
            or count(parameter.untyped_storage()._cdata) > _OF_STORAGE
        ):
            return index
    return None
