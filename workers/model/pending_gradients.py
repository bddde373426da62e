"""Gradients that the script has computed and no ``step()`` has used yet: what is accumulated.

    pending = PendingGradients(parameters)
    pending.note_used()                  # step() is over: what is in p.grad now has been used
    pending.collect()                    # {3: tensor}; {} where nothing has come since
    pending.is_any                       # whether one of them is not zero
    pending.restore({3: tensor})         # in another process

A gradient has been used if it is still the tensor that step() has left, unwritten since. Nothing is
copied and no hook is needed, so an iteration costs a look at each parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from psdist.errors import CheckpointError


class PendingGradients:
    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._used: list[tuple[weakref.ref[torch.Tensor], int] | None] = [None] * len(parameters)
        """Of each parameter, the gradient as the last step() has left it: the tensor and its
        version. An address would not do: the next gradient may have the same."""

    def note_used(self) -> None:
        self._used = [
            None if each.grad is None else (weakref.ref(each.grad), each.grad._version)
            for each in self._parameters
        ]

    def collect(self) -> dict[int, torch.Tensor | None]:
        """By number of the parameter; None for zeros. The tensors are live ones."""
        found: dict[int, torch.Tensor | None] = {}
        for number, (parameter, used) in enumerate(zip(self._parameters, self._used, strict=True)):
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:  # step() refuses others
                continue
            if used is not None and used[0]() is gradient and used[1] == gradient._version:
                continue
            found[number] = gradient if gradient.count_nonzero() else None
        return found

    @property
    def is_any(self) -> bool:
        """Whether there is one that is not zero."""
        return any(each is not None for each in self.collect().values())

    def restore(self, told: Mapping[int, torch.Tensor | None]) -> None:
        """Make the gradients those that :meth:`collect` has told. Raises
        :class:`CheckpointError` where they are not of these parameters."""
        for number, gradient in told.items():
            if not 0 <= number < len(self._parameters):
                raise CheckpointError(
                    f"a gradient of parameter {number} of {len(self._parameters)}"
                )
            parameter = self._parameters[number]
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)
                continue
            if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
                raise CheckpointError(
                    f"the gradient of parameter {number} is {list(gradient.shape)}, "
                    f"{gradient.dtype}; the parameter {list(parameter.shape)}, {parameter.dtype}"
                )
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
