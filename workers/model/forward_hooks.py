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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_MAX_DEPTH: Final = 6
"""Levels of a tree of tensors that are searched."""
_MAX_TENSORS: Final = 64


class UseHook:
    """A forward pre-hook (with keywords) that reports a pass in which gradients are enabled."""

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

    def __reduce__(self) -> tuple[type[UseHook], tuple[()]]:
        return UseHook, ()


class OutputHook:
    """A forward hook (always called): the pass has ended."""

    def __init__(
        self, on_output: Callable[[Sequence[torch.autograd.graph.Node] | None], None] | None = None
    ) -> None:
        """``on_output(nodes)``: the nodes that backward begins with (empty: unknown); None if the
        pass has failed."""
        self._on_output = on_output

    def __call__(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        if self._on_output is None or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack():
            return  # the first nodes of backward belong to another pass
        if output is None and sys.exc_info()[0] is not None:
            self._on_output(None)
            return
        nodes = (each.grad_fn for each in tensors_in(output) if each.requires_grad)
        self._on_output([node for node in nodes if node is not None])

    def __reduce__(self) -> tuple[type[OutputHook], tuple[()]]:
        return OutputHook, ()


class EndHook:
    """A forward hook that tells when the model has read its parameters."""

    def __init__(self, on_end: Callable[[], None] | None = None) -> None:
        self._on_end = on_end

    def __call__(self, *_arguments: Any) -> None:
        if self._on_end is not None and not torch.compiler.is_compiling():
            self._on_end()

    def __reduce__(self) -> tuple[type[EndHook], tuple[()]]:
        return EndHook, ()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the first tensors in nested mappings, lists, tuples and objects with attributes."""
    return _first(_tensors(tree, _MAX_DEPTH), _MAX_TENSORS)


def storages_in(tree: Any) -> list[StorageWeakRef]:
    """Of :func:`tensors_in`; none for tensors that have no storage (sparse ones)."""
    return _storages_of(tensors_in(tree))


def _storages_of(tensors: Sequence[torch.Tensor]) -> list[StorageWeakRef]:
    found = []
    for each in tensors:
        try:
            found.append(StorageWeakRef(each.untyped_storage()))  # type: ignore[no-untyped-call] # torch's
        except (NotImplementedError, RuntimeError):
            continue
    return found


def _first(tensors: Iterator[torch.Tensor], count: int) -> list[torch.Tensor]:
    return [each for each, _ in zip(tensors, range(count), strict=False)]


def _tensors(tree: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif not depth:
        return
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()), depth)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each, depth - 1)
    elif dataclasses.is_dataclass(tree) or type(tree).__module__ != "builtins":
        yield from _tensors(list(getattr(tree, "__dict__", {}).values()), depth - 1)
