"""Others that hold a parameter's memory: nobody could tell of a read of one.

    piece = first_shared(parameters)           # None: each parameter is the script's alone

A view, ``p.detach()``, ``p.data``, an array of numpy, what a graph has saved that no backward pass
has used up: torch counts the tensors that hold a storage. A module of torch.jit, an object of C++:
it counts who holds the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

_OF_STORAGE: Final = 2
"""The parameter, and what asks."""
_OF_TENSOR: Final = 1
"""Python."""


def first_shared(parameters: Sequence[torch.nn.Parameter]) -> int | None:
    """The first that another tensor or anybody beside Python holds, too. Each has a storage of its
    own (psdist.workers.model.flat)."""
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
