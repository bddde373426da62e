"""Memory that trained parameters share with each other or with anything else of the models.

    ties = Ties()
    moving = ties.require_none(model, trained, earlier=[...])     # ModelError
    ...                                                            # prepare moves the parameters
    ties.leave(moving)

Servers train each parameter by itself, and job.prepare gives it new memory. A second Parameter
object, a buffer or a view of the old memory would keep the old values. Plain torch would let it
follow the training, so this is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from psdist.errors import ModelError
from psdist.workers.model.overlaps import Extent, first_overlap


class Ties:
    def __init__(self) -> None:
        self._left: list[Extent] = []
        """Memory in which parameters were before they were prepared."""

    def require_none(
        self,
        model: nn.Module,
        trained: Iterable[tuple[str, nn.Parameter]],
        *,
        earlier: Iterable[nn.Module] = (),
        held: Collection[int] = (),
    ) -> list[Extent]:
        """Return the memory of ``trained``, the parameters with their names that are about to move.

        ``earlier``: models that are prepared; ``held``: the id() of each parameter that they
        train, which lies in memory of psdist's. Raises :class:`ModelError` naming two that overlap.
        """
        names = {id(parameter): name for name, parameter in trained}
        moving: list[Extent] = []
        staying: list[Extent] = []
        for label, tensor in _tensors_of(model):
            if id(tensor) in held:
                continue
            extent = Extent.of(label, tensor)
            (moving if id(tensor) in names else staying).append(extent)
        for module in earlier:
            staying += [
                Extent.of(f"{label} of another prepared model", tensor)
                for label, tensor in _tensors_of(module)
                if module is not model and id(tensor) not in held and id(tensor) not in names
            ]
        self._left = [each for each in self._left if each.is_alive]
        found = first_overlap([*moving, *self._left], staying)
        if found is not None:
            raise ModelError(_text(*found, moving))
        return moving

    def leave(self, moved: Iterable[Extent]) -> None:
        """Note that the parameters in this memory have moved."""
        self._left += [replace(each, name=f"{each.name}, prepared before,") for each in moved]


def _text(one: Extent, other: Extent, moving: list[Extent]) -> str:
    if one is other:
        return (
            f"{one.name} has elements that share memory (expand or as_strided); make it a "
            "parameter of the distinct elements, and expand it in forward()"
        )
    shares = f"{one.name} and {other.name} share memory, which training on servers would separate"
    if one not in moving or other not in moving:
        return (
            f"{shares}; register it once, and compute the other one from it in forward(), or give "
            "it memory of its own: clone()"
        )
    first, second = (each.name.removeprefix("parameter ") for each in (one, other))
    if (one.start, one.shape, one.stride) == (other.start, other.shape, other.stride):
        return f"{shares}; make them one object before the optimizer: {second} = {first}"
    return (
        f"{shares}; make them one object before the optimizer, {second} = {first}, and use its "
        "transpose or part in forward()"
    )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the model holds, once, except those without memory of their own."""
    seen: set[int] = set()
    named = [
        *((f"parameter {name}", each) for name, each in model.named_parameters()),
        *((f"buffer {name}", each) for name, each in model.named_buffers()),
        *_attributes(model),
    ]
    for label, tensor in named:
        if id(tensor) not in seen and _has_memory(tensor):
            seen.add(id(tensor))
            yield label, tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
    return is_strided and not is_traceable_wrapper_subclass(tensor) and tensor.numel() > 0


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that modules hold as plain attributes, such as a transpose of a parameter."""
    for path, module in model.named_modules():
        if module._forward_pre_hooks:
            continue  # such as spectral_norm's, which compute these again in each forward pass
        for key, value in vars(module).items():
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, torch.Tensor):
                    yield f"attribute {path}.{key}" if path else f"attribute {key}", each
