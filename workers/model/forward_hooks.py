"""Forward passes of the user's model: when one begins, over which inputs, and whether its backward
comes.

    use = UseHook(on_use)            # model.register_forward_pre_hook(use, with_kwargs=True)
    output = OutputHook(on_output)   # model.register_forward_hook(output, always_call=True)
    storages = storages_in(batch)    # what on_use() gets of the inputs, of a loader's batch

Copying or pickling the model copies its hooks. A copied hook does nothing: a bound method of the
job would copy the whole job, too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Final, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_MAX_DEPTH: Final = 6
"""Levels of a tree of tensors that are searched."""
_MAX_TENSORS: Final = 64
_MAX_NODES: Final = 1000
"""A batch may hold a tokenizer, a dataset or a million numbers, and every pass is searched."""
_LEAVES: Final = (int, float, complex, str, bytes, NoneType)


class DroppedInCopies:
    """A hook that a copied or pickled model has without its callback."""

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class UseHook(DroppedInCopies):
    """A forward pre-hook (with keywords): the parameters are used with gradients in mind."""

    def __init__(
        self, on_use: Callable[[int, Sequence[StorageWeakRef]], None] | None = None
    ) -> None:
        """``on_use(samples, storages)``: the first dimension of the first input, and the storages
        of all inputs."""
        self._on_use = on_use

    def __call__(self, _module: torch.nn.Module, arguments: Any, keywords: Any) -> None:
        if self._on_use is not None and torch.is_grad_enabled():
            inputs = tensors_in([arguments, keywords])
            num_samples = next((len(each) for each in inputs if each.dim()), 0)
            # A compiler that traces this hook cannot make weak references.
            storages = [] if torch.compiler.is_compiling() else _storages_of(inputs)
            self._on_use(num_samples, storages)


class OutputHook(DroppedInCopies):
    """A forward hook (always called): the pass has ended."""

    def __init__(
        self, on_output: Callable[[Sequence[torch.autograd.graph.Node] | None], None] | None = None
    ) -> None:
        """``on_output(nodes)``: those that backward begins with, none where that is unknown; None
        where the pass has failed."""
        self._on_output = on_output

    def __call__(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        if self._on_output is None or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
            return  # what backward begins with is not of this pass
        if output is None and sys.exc_info()[0] is not None:
            self._on_output(None)
            return
        nodes = (each.grad_fn for each in tensors_in(output) if each.requires_grad)
        self._on_output([node for node in nodes if node is not None])


class EndHook(DroppedInCopies):
    """A forward hook that is called when the model has read its parameters."""

    def __init__(self, on_end: Callable[[], None] | None = None) -> None:
        self._on_end = on_end

    def __call__(self, *_arguments: Any) -> None:
        if self._on_end is not None and not torch.compiler.is_compiling():
            self._on_end()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the first tensors of nested mappings, lists, tuples and objects with attributes, in
    their order. The search ends after a bounded number of nodes, and finds what is near the root
    first."""
    nodes, num_left = [tree], _MAX_NODES
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        has_inner = False
        for node in nodes:
            if isinstance(node, torch.Tensor):
                below.append(node)
                continue
            for child in _children(node):
                if not num_left:
                    break
                num_left -= 1
                if not isinstance(child, _LEAVES):
                    below.append(child)
                    has_inner = has_inner or not isinstance(child, torch.Tensor)
        nodes = below
        if not has_inner:
            break
    return [each for each in nodes if isinstance(each, torch.Tensor)][:_MAX_TENSORS]


def storages_in(tree: Any) -> list[StorageWeakRef]:
    """Return the storages of :func:`tensors_in`; tensors without storage (sparse) are left out."""
    return _storages_of(tensors_in(tree))


def _storages_of(tensors: Sequence[torch.Tensor]) -> list[StorageWeakRef]:
    found = []
    for each in tensors:
        try:
            found.append(StorageWeakRef(each.untyped_storage()))  # type: ignore[no-untyped-call] # torch's
        except (NotImplementedError, RuntimeError):
            continue
    return found


def _children(node: Any) -> Iterable[Any]:
    """Return what is directly in ``node``. A long list that begins with a number or a text counts
    as a list without tensors."""
    if isinstance(node, list | tuple):
        is_plain = len(node) > _MAX_TENSORS and isinstance(node[0], _LEAVES)
        return () if is_plain else node
    if isinstance(node, Mapping):
        return node.values()
    if isinstance(node, torch.nn.Module):
        return ()
    if dataclasses.is_dataclass(node) or type(node).__module__ != "builtins":
        values: Iterable[Any] = getattr(node, "__dict__", {}).values()
        return values
    return ()
