"""The torch class of an optimizer's name, and an optimizer of this class on one tensor.

Owns finding the class (in torch.optim, or by the import that the server's own configuration
allows) and constructing it from hyperparameters: arguments that its signature does not name, and
those that choose how a step is computed, are never passed on from outside. Whether a name is
allowed is psdist.protocol.optimizers' decision.

    adam = find_class("torch.optim.Adam")                # or OptimizerRefusedError
    optimizer = construct(adam, [tensor], {"lr": 0.1}, is_fused=True)
    torch_step(adam)(optimizer)

**Without torch._dynamo.** torch exempts its optimizers from compilation, and imports torch._dynamo
for that: in the first constructor and in the first ``step``. The import takes 2 s of a core and
about 75 MiB. A server compiles nothing, so both are called here without their wrappers. A torch
whose wrappers are not recognised imports torch._dynamo, and all else is the same.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from psdist.errors import OptimizerRefusedError
from psdist.protocol.optimizers import LOCAL_KEYS, HyperValue, canonical_name
from psdist.protocol.optimizers import traits as look_up

OptimizerClass: TypeAlias = type[torch.optim.Optimizer]


def find_class(name: str, *, extra: Sequence[str] = ()) -> OptimizerClass:
    """The class of an allowed name; only the server's own configuration makes it import one."""
    look_up(name, extra=extra)
    if is_torch(name):
        found = getattr(torch.optim, name.rpartition(".")[2], None)
        if found is None:
            raise OptimizerRefusedError(
                f"{name} is not in torch {torch.__version__} of this server; install the same "
                "torch on all hosts"
            )
    else:
        module, _, qualified = name.partition(":")
        try:
            found = functools.reduce(getattr, qualified.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise OptimizerRefusedError(
                f"setting training.optimizers: {name} cannot be imported on this server: {error}"
            ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise OptimizerRefusedError(f"{name} is not a subclass of torch.optim.Optimizer")
    return found


def construct(
    optimizer_class: OptimizerClass,
    parameters: Sequence[Tensor],
    hyper: Mapping[str, HyperValue],
    *,
    is_fused: bool,
) -> torch.optim.Optimizer:
    """One on ``parameters``, never foreach; raises OptimizerRefusedError with torch's own
    text."""
    accepts = inspect.signature(optimizer_class).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepts.values())
    arguments: dict[str, Any] = {
        key: value
        for key, value in hyper.items()
        if (key in accepts or takes_any) and key not in LOCAL_KEYS
    }
    name = canonical_name(optimizer_class)
    if is_torch(name):
        arguments |= {"foreach": False} if "foreach" in accepts else {}
        arguments |= {"fused": is_fused} if "fused" in accepts else {}
    try:
        return make(optimizer_class, parameters, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise OptimizerRefusedError(
            f"{name} refuses {format_hyperparameters(hyper)}: {error}"
        ) from error


def is_torch(name: str) -> bool:
    return name.startswith("torch.optim.")


def format_hyperparameters(hyper: Mapping[str, HyperValue]) -> str:
    """Hyperparameters in words, for errors."""
    return ", ".join(f"{key}={value!r}" for key, value in hyper.items()) or "its defaults"


def make(
    optimizer_class: OptimizerClass, parameters: Sequence[Tensor], **arguments: Any
) -> torch.optim.Optimizer:
    """Return an optimizer with these arguments. Raises what torch raises."""
    add = optimizer_class.add_param_group
    if not (
        is_torch(canonical_name(optimizer_class)) and _is_made_by(add, "torch._compile", "inner")
    ):
        return optimizer_class(list(parameters), **arguments)
    optimizer = optimizer_class.__new__(optimizer_class)
    # torch's constructor calls the method through the instance, which has its own for this call.
    its_own = vars(optimizer)
    its_own["add_param_group"] = MethodType(_bare(add), optimizer)
    optimizer_class.__init__(optimizer, list(parameters), **arguments)
    del its_own["add_param_group"]
    return optimizer


def torch_step(optimizer_class: OptimizerClass) -> Callable[[torch.optim.Optimizer], Any]:
    """Return ``step`` without torch's wrappers: of hooks and the profiler, which take 16 to 25 us,
    and of torch.optim, which turns gradients off. A wrapper that is not recognised stays."""
    step: Callable[[torch.optim.Optimizer], Any] = optimizer_class.step
    if getattr(step, "hooked", False):
        step = _bare(step)
    if is_torch(canonical_name(optimizer_class)) and _is_made_by(
        step, "torch.optim.optimizer", "_use_grad"
    ):
        return torch.no_grad()(_bare(step))
    return step


def _is_made_by(wrapper: Any, module: str, name: str) -> bool:
    """True if the function is a wrapper that ``module`` defines by this name."""
    code, its_globals = getattr(wrapper, "__code__", None), getattr(wrapper, "__globals__", {})
    is_it = getattr(code, "co_name", "") == name and its_globals.get("__name__") == module
    return is_it and hasattr(wrapper, "__wrapped__")


def _bare(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(wrapper, "__wrapped__", wrapper)
    return function
