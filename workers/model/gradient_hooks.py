"""Gradients as autograd finishes them: copied into flat memory, noted, counted.

    hooks = GradientHooks(flat, on_gradient=lambda piece, count: ..., is_training=lambda: True)
    hooks.attach()                       # again where a parameter has begun to want gradients
    hooks.counts[piece]                  # how often the piece's gradient has come since begin()
    hooks.is_as_noted(piece)             # whether it is still what the last copy was made of
    hooks.begin()                        # the next iteration

A hook runs on autograd's thread, so what it copies is what backward has made. Who is told does no
more than put it into a queue: what is to be done with it is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch.utils.hooks import RemovableHandle

from psdist.workers.model.flat import FlatModel


class GradientHooks:
    def __init__(
        self,
        flat: FlatModel,
        *,
        on_gradient: Callable[[int, int], None],
        is_training: Callable[[], bool],
        before_gradient: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_gradient(piece, count)``: its gradient has come, for the count-th time in this
        iteration, and lies in the flat memory, or an earlier one, or none (:attr:`copies`); not
        called for a gradient that is not dense where it should be copied. What comes while the
        model is evaluated (``is_training()``) is neither copied nor counted; ``before_gradient()``
        is called before any of that."""
        self.copies: Literal["all", "first", "none"] = "all"
        """Only the first of an iteration where its bytes may be under way when another comes."""
        self.counts = [0] * len(flat.parameters)
        self._flat = flat
        self._on_gradient = on_gradient
        self._is_training = is_training
        self._before_gradient = before_gradient
        self._noted: list[tuple[int, int] | None] = [None] * len(flat.parameters)
        self._noted_before = self._noted
        """The same, in the iteration before."""
        self._handles: dict[int, RemovableHandle] = {}

    def attach(self) -> None:
        """To the parameters that want gradients."""
        # A backward pass in a compiled function would have these hooks compiled.
        note = torch.compiler.disable(self._note)  # type: ignore[no-untyped-call] # torch's
        for piece, parameter in enumerate(self._flat.parameters):
            if piece not in self._handles and parameter.requires_grad:
                hook = partial(note, piece)
                handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call] # torch's
                    hook
                )
                self._handles[piece] = handle

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def begin(self) -> None:
        """The gradients of the next iteration are counted from here."""
        self.counts = [0] * len(self.counts)
        self._noted_before, self._noted = self._noted, [None] * len(self.counts)

    def is_as_noted(self, piece: int) -> bool:
        """Whether the gradient is the tensor that was copied, and torch has seen no write to it."""
        noted = self._noted[piece]
        return noted is not None and noted == self._flat.identity(piece)

    def _note(self, piece: int, _parameter: torch.Tensor) -> None:
        self._before_gradient()
        if not self._is_training():
            return
        count = self.counts[piece] + 1
        if count == 1 and self.copies == "first" and self._is_added(piece):
            count = 2
        self.counts[piece] = count
        if self.copies == "all" or (self.copies == "first" and count == 1):
            self._noted[piece] = self._flat.take_gradient(piece)
            if self._noted[piece] is None:
                return
        self._on_gradient(piece, count)

    def _is_added(self, piece: int) -> bool:
        """True if the gradient was added to the one of the iteration before, because the script has
        not called zero_grad(). Then both gradients count."""
        before = self._noted_before[piece]
        if before is None:
            return False
        gradient, version = before
        return self._flat.identity(piece) == (gradient, version + 1)
