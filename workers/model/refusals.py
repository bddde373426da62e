"""Refusals of models that job.prepare cannot train, before anything is moved.

    optimizers = optimizers_of(model, optimizer)         # what prepare was given, as a list
    refuse_untrainable(model)
    model.register_forward_pre_hook(WrapperCheck(type(model)))   # wrapped later, by DDP for example

Each error names the module, the parameter or the line of the script, and what to write instead.
These functions read the model and change nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader

from psdist.errors import ModelError, UsageError
from psdist.workers.model.forward_hooks import DroppedInCopies
from psdist.workers.model.other_optimizers import ProcessHook

_WRAPPERS: Final = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "DDP": "replicate",
    "ReplicateModule": "replicate",
}
"""Classes of torch whose modules exchange gradients or parameters themselves, and the call in the
script that makes such a module."""
_PLAIN: Final = "job.prepare(model, optimizer)"


def optimizers_of(model: object, optimizer: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers that job.prepare was given with ``model``; one or a sequence of them.

    Raises :class:`UsageError` unless these are a module and optimizers.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"{_PLAIN}: the model is {_kind(model)}, not a module; {_remedy(model)}")
    given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    found = [each for each in given if isinstance(each, torch.optim.Optimizer)]
    if wrong := [each for each in given if not isinstance(each, torch.optim.Optimizer)]:
        raise UsageError(
            f"{_PLAIN}: the optimizer is {_kind(wrong[0])}, not an optimizer of torch; pass the "
            "torch.optim.Optimizer itself, or a list of several"
        )
    if not found:
        raise UsageError(f"{_PLAIN}: no optimizer was given; pass it after the model")
    return found


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"


def _remedy(model: object) -> str:
    if isinstance(model, torch.optim.Optimizer):
        return "pass the model first and the optimizer second"
    if isinstance(model, DataLoader):
        return "pass loaders after the model and the optimizer"
    if isinstance(model, Mapping):
        return "pass nn.ModuleDict({...}) of its modules, and an optimizer of all their parameters"
    if isinstance(model, list | tuple):
        return "pass nn.ModuleList([a, b]), and one optimizer of the parameters of both"
    return "pass the torch.nn.Module itself"


# -- the model -------------------------------------------------------------------------------------


def refuse_untrainable(model: nn.Module) -> None:
    """Raise :class:`ModelError` for a model that servers cannot train, :class:`UsageError` for one
    that is wrapped."""
    for path, module in model.named_modules():
        name = f"module {path}" if path else "the model"
        if wrapper := wrapper_of(type(module)):
            raise refusal_of_wrapper(f"{name} is wrapped in {wrapper}")
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(
                f"{name} is a SyncBatchNorm, which would share statistics within a group of "
                "workers only; use nn.BatchNorm1d, 2d or 3d, which normalises each worker's batch, "
                "or nn.GroupNorm, which does not depend on the batch"
            )
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(map(is_lazy, own)):
            raise ModelError(
                f"{name} is a {type(module).__name__}, which has no parameters yet; run one batch "
                "through the model before prepare()"
            )
    for name, tensor in _registered(model):
        if why := _why_not(tensor):
            raise ModelError(f"{name} {why}")


def _registered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer


def _why_not(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot lie in plain memory, with the remedy; "" if it can."""
    kind = type(tensor)
    if is_traceable_wrapper_subclass(tensor) or _is_of(kind, ("torch.distributed.",)):
        return (
            f"is a {kind.__name__}; servers hold plain tensors: leave out the call that makes it "
            "one (distribute_module, parallelize_module, fully_shard, quantize_ ...)"
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return (
            f"has the layout {layout}; servers hold dense tensors: call to_dense() on it, or keep "
            "a constant as a plain attribute of its module"
        )
    if tensor.is_meta:
        return (
            "is on the device meta, without values; call model.to_empty(device=job.device), "
            "initialise the model, and make the optimizer after that"
        )
    if tensor.is_inference():
        return (
            "was made under torch.inference_mode(), where nothing can be trained; build the model "
            "outside of it"
        )
    return ""


def refusal_of_wrapper(what: str) -> UsageError:
    """Return the error for a wrapped module; ``what`` says which one, and in what."""
    return UsageError(
        f"{what}, which exchanges gradients or parameters itself; psdist does that: remove the "
        "line that wraps the model, and call the model that job.prepare returned"
    )


def wrapper_of(kind: type) -> str:
    """Return the call that has wrapped a module of this class, such as fully_shard; "" for none."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") and base.__name__ in _WRAPPERS:
            return _WRAPPERS[base.__name__]
    return ""


def _is_of(kind: type, prefixes: tuple[str, ...]) -> bool:
    return any(base.__module__.startswith(prefixes) for base in kind.__mro__)


class WrapperCheck(DroppedInCopies):
    """A forward pre-hook of a prepared model: it raises :class:`UsageError` if the model has been
    wrapped since. In a copied or pickled model, which is not prepared, it checks nothing."""

    def __init__(self, prepared: type[nn.Module] | None = None) -> None:
        """``prepared``: the model's class at job.prepare."""
        self._prepared = prepared

    def __call__(self, module: nn.Module, _arguments: object) -> None:
        if self._prepared is None:
            return
        if "_is_replica" in vars(module):
            raise refusal_of_wrapper("the prepared model is called by DataParallel")
        # fully_shard and replicate change the class of the module.
        if type(module) is not self._prepared and (wrapper := wrapper_of(type(module))):
            raise refusal_of_wrapper(f"the prepared model has been wrapped in {wrapper}")


def entered(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a script calls: ``model``, or the members of a container without
    forward(), such as nn.ModuleList."""
    if getattr(model.forward, "__func__", None) is not nn.Module.forward:
        return [model]
    return [each for child in model.children() for each in entered(child)]


def refuse_renormalised(
    module: torch.nn.Module, parameters: Collection[torch.nn.Parameter]
) -> None:
    """Raise :class:`ModelError` if ``module`` has an embedding with ``max_norm`` whose weight is
    one of ``parameters``, those that the servers hold.

    Such an embedding writes to its weight in forward: each worker would renormalise the rows of its
    own batch, and the servers would not see it.
    """
    held = {id(each) for each in parameters}
    for name, each in module.named_modules():
        if not isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if each.max_norm is not None and id(each.weight) in held:
            weight = f"{name}.weight" if name else "weight"
            norms = f"{each.norm_type:g}, 0, {each.max_norm:g}"
            raise ModelError(
                f"module {name or '(the model)'} ({type(each).__name__}) has max_norm = "
                f"{each.max_norm:g}, which writes to {weight} in forward, where the servers do not "
                "see it; build it without max_norm and renormalise with `with torch.no_grad(): "
                f"weight.renorm_({norms})` before job.prepare() and, followed by "
                "job.set_parameters(), after each optimizer.step()"
            )


_MODULES: Final = ProcessHook(register_module_module_registration_hook)
_PART: Final = ", or a part of it, is wrapped in"


class WrappedParts:
    """Finds DistributedDataParallel and its relatives around a prepared model or a part of it.

    A script may call such a part itself, and then no hook of the prepared model sees the wrapper.
    torch reports each module that another one takes in, so a wrapper is found when it is made.
    """

    def __init__(self, is_held: Callable[[nn.Parameter], bool]) -> None:
        """``is_held(parameter)``: True if the servers train it."""
        self._is_held = is_held
        self._found: list[tuple[weakref.ref[nn.Module], str]] = []
        """Modules that were wrapped and not yet prepared, each with its wrapper."""
        _MODULES.call(self._on_module)

    def _on_module(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is None or name != "module" or not (wrapper := wrapper_of(type(parent))):
            return
        if any(map(self._is_held, module.parameters())):
            raise refusal_of_wrapper(f"the prepared model{_PART} {wrapper}")
        self._found.append((weakref.ref(module), wrapper))

    def require_none(self, model: nn.Module) -> None:
        """Raise :class:`UsageError` if the script has wrapped a part of ``model``."""
        own = {id(each) for each in model.parameters()}
        for reference, wrapper in self._found:
            part = reference()
            if part is not None and any(id(each) in own for each in part.parameters()):
                raise refusal_of_wrapper(f"the model{_PART} {wrapper}")

    def stop(self) -> None:
        """The job has ended: the script may wrap what it likes."""
        _MODULES.leave_out(self._on_module)
        self._found.clear()
