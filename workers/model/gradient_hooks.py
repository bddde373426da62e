"""Gradients as autograd finishes them: copied into flat memory, noted, counted.

    hooks = GradientHooks(flat, on_gradient=lambda piece, count: ..., is_training=lambda: True)
    hooks.attach()                       # again where a parameter has begun to want gradients
    hooks.counts[piece]                  # how often the piece's gradient has come since begin()
    hooks.is_as_noted(piece)             # whether it is still what the last copy was made of
    hooks.begin()                        # the next iteration

A hook runs on autograd's thread, so it copies the gradient that backward has made. The callback
only queues the piece; other modules decide its use.
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
        """``on_gradient(piece, count)``: the piece has got gradient number ``count`` of this
        iteration. The flat memory has this one, the first one, or none (:attr:`copies`). Not
        called for a gradient that should be copied and is not dense. Gradients of an evaluation
        (not ``is_training()``) are neither copied nor counted. ``before_gradient()`` is called
        before all that."""
        self.copies: Literal["all", "first", "none"] = "all"
        """"first": the bytes of the first gradient may be in flight when another one comes."""
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
        """Attach a hook to each parameter that requires a gradient."""
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
        """True if the gradient is the tensor that was copied, unwritten as far as torch sees."""
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
