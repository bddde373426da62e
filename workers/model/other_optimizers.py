"""Steps that the script makes past the servers, with an optimizer of its own.

    others = OtherOptimizers(served, original)       # optimizers with the same parameters
    others.have_stepped                              # since the last step of ``served``
    others.stop()

A wrapper whose ``step()`` calls that of ``served`` is no other optimizer. Nor is a step an error in
itself: an inner loop (Reptile) restores the values before the served step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class ProcessHook:
    """A hook that torch keeps for the whole process; it calls methods of objects that still live.

    It is set once, at its first use, and never removed. torch iterates over its table of hooks
    while it calls them: a removal by a garbage collection or another thread raises RuntimeError.
    """

    def __init__(self, register: Callable[[Callable[..., None]], object]) -> None:
        """``register(hook)``: torch's function; it is called once, by the first :meth:`call`."""
        self._register = register
        self._is_registered = False
        self._lock = threading.Lock()
        self._methods: tuple[weakref.WeakMethod[Callable[..., None]], ...] = ()
        """Replaced, never changed: a call in progress uses the old tuple."""

    def call(self, method: Callable[..., None]) -> None:
        """Call this bound method from now on, with torch's arguments, while its object lives."""
        with self._lock:
            living = (each for each in self._methods if each() is not None)
            self._methods = (*living, weakref.WeakMethod(method))
            if not self._is_registered:
                self._register(self._on_call)
                self._is_registered = True

    def leave_out(self, method: Callable[..., None]) -> None:
        """Call this method no more; no error if it is not called."""
        with self._lock:
            self._methods = tuple(each for each in self._methods if each() not in (None, method))

    def _on_call(self, *arguments: Any) -> None:
        for reference in self._methods:
            if (method := reference()) is not None:
                method(*arguments)


_BEFORE_STEPS: Final = ProcessHook(register_optimizer_step_pre_hook)
_AFTER_STEPS: Final = ProcessHook(register_optimizer_step_post_hook)


class OtherOptimizers:
    def __init__(self, served: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
        """``original``: steps of it are psdist's own."""
        self.have_stepped = False
        """True if another optimizer has changed a parameter since the last served step."""
        self._own = {id(served), id(original)}
        self._parameters = {id(each) for group in served.param_groups for each in group["params"]}
        self._num_served = 0
        self._before: dict[int, tuple[int, int]] = {}
        """By optimizer whose step is under way: served steps until then, and writes seen by torch
        to the parameters that it shares."""
        _BEFORE_STEPS.call(self._begin)
        _AFTER_STEPS.call(self._end)

    def note_served_step(self) -> None:
        """The servers have stepped, and their values replace others."""
        self._num_served += 1
        self.have_stepped = False

    def stop(self) -> None:
        """The parameters are the script's own again."""
        _BEFORE_STEPS.leave_out(self._begin)
        _AFTER_STEPS.leave_out(self._end)
        self.have_stepped = False

    def _begin(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        if id(optimizer) not in self._own:
            self._before[id(optimizer)] = self._num_served, self._count_writes(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        before = self._before.pop(id(optimizer), None)
        if before is None or before[0] != self._num_served:
            return
        if before[1] != self._count_writes(optimizer):
            self.have_stepped = True

    def _count_writes(self, optimizer: torch.optim.Optimizer) -> int:
        return sum(
            each._version
            for group in optimizer.param_groups
            for each in group["params"]
            if id(each) in self._parameters
        )
