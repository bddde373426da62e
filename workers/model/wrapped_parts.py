"""DistributedDataParallel and its relatives around a prepared model or a part of it.

    parts = WrappedParts(is_held)
    parts.require_none(model)        # at job.prepare: what the script has wrapped before
    parts.stop()

A script may call such a part itself, and then no hook of the prepared model sees the wrapper. torch
reports each module that another one takes in, so the wrapper is found when the script makes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from psdist.workers.model.other_optimizers import ProcessHook
from psdist.workers.model.refusals import refusal_of_wrapper, wrapper_of

_MODULES: Final = ProcessHook(register_module_module_registration_hook)
_PART: Final = ", or a part of it, is wrapped in"


class WrappedParts:
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
