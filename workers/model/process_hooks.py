"""Hooks that torch keeps for the whole process.

    steps = ProcessHook(register_optimizer_step_pre_hook)
    steps.call(watch.on_step)          # a method; its object may die
    steps.leave_out(watch.on_step)

torch walks through its table of hooks while it calls them. If one is removed meanwhile, by a
garbage collection or by another thread, the walk raises ``RuntimeError``. So psdist sets each hook
once, at its first use, and never removes it. The hook calls those methods whose objects still live.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any


class ProcessHook:
    def __init__(self, register: Callable[[Callable[..., None]], object]) -> None:
        """``register(hook)``: torch's function; it is called once, by the first :meth:`call`."""
        self._register = register
        self._is_registered = False
        self._lock = threading.Lock()
        self._methods: tuple[weakref.WeakMethod[Callable[..., None]], ...] = ()
        """Replaced, never changed: a call under way goes on with the old ones."""

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
