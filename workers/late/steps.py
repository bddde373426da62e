"""Steps that return before their replies have come (``overlap = full``).

They do so after the strategy has switched on, if reads of the model's parameters can be detected;
until then ``full`` is ``auto``, and the log says so once.

    strategy = LateWait(parts, driver=..., is_training=..., module=...)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final

import torch

from psdist.workers.blocking import Parts
from psdist.workers.early.overlap import EarlyPush, Pace
from psdist.workers.early.progress import Driver
from psdist.workers.late.guarded import ParameterTable
from psdist.workers.late.tail import Tail
from psdist.workers.loop import Wait


def why_not_late_here(*, group_size: int, has_mirrors: bool) -> str:
    """Return why step() must wait for the replies on this worker, or "". ``has_mirrors``: the
    parameters are on a device."""
    if group_size > 1:
        return "step() of a worker in a group of several gathers the others' slices"
    return "the model is on a device, which gets all values at once" if has_mirrors else ""


def why_not_late(module: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]) -> str:
    """Return why reads of these parameters cannot be detected, or ""."""
    if has_compiled() or any(_is_compiled(each) for each in module.modules()):
        return "torch.compile reads parameters unseen"
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            return f"{name or 'the model'} is compiled by torch.jit, which reads parameters unseen"
        if type(each.__dict__.get("_parameters")) not in (dict, ParameterTable):
            return f"{name or 'the model'} keeps its parameters in a table of its own"
    for parameter in parameters:
        if type(parameter) is not torch.nn.Parameter:
            return f"a parameter is a {type(parameter).__name__}, a class of its own"
    return ""


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def has_compiled() -> bool:
    """True if torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


_OF_STORAGE: Final = 2
"""Holders of the storage: the parameter, and the caller of the count."""
_OF_TENSOR: Final = 1
"""Holders of the tensor: Python."""


def first_shared(parameters: Sequence[torch.nn.Parameter]) -> int | None:
    """Return the index of the first parameter whose memory another object holds too, or None.

    Reads through such an object cannot be detected. A view, ``p.detach()``, ``p.data``, a numpy
    array or an unused autograd graph holds the storage; a module of torch.jit or an object of C++
    holds the tensor. Each parameter has its own storage (psdist.workers.model.flat).
    """
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


logger = logging.getLogger("psdist")


class LateWait(EarlyPush):
    """The strategy of a worker that is alone in its group, with a model on the CPU."""

    def __init__(
        self,
        parts: Parts,
        *,
        driver: Driver,
        is_training: Callable[[], bool],
        module: torch.nn.Module,
    ) -> None:
        """``module``: the model whose parameters are awaited when they are read; the rest as in
        :class:`EarlyPush`."""
        _, group, flat, loop, values, _ = parts
        self._tail = Tail(
            group.partition, group.mine, flat, loop, values, move=self.place, driver=driver
        )
        super().__init__(parts, driver=driver, is_training=is_training)
        self._pace = Pace(0.0)  # replies are hidden behind more than backward
        self._module = module
        self._has_tables = False
        self._has_said_shared = False
        self._why_not = ""

    @property
    def is_pending(self) -> bool:  # type: ignore[override]
        return self._tail.is_pending

    @property
    def num_awaited(self) -> int:
        """Chunks whose values are still to be put in place."""
        return self._tail.num_left

    @property
    def waited_s(self) -> float:
        return self._waited_s + self._tail.waited_s

    def staleness(self) -> int:
        return self.values.staleness(self.iteration.clock - self.is_pending)

    def record_use(self) -> None:
        if self.is_pending:
            self._tail.use(self.iteration.clock)
        else:
            super().record_use()

    def resume(self) -> None:
        self._tail.resume()

    def before_step(self) -> Generator[Wait, None, None]:
        yield from super().before_step()
        yield from self._tail.finish()

    def finish_reads(self) -> None:
        self._tail.finish_now()

    def finish(self) -> Generator[Wait, None, None]:
        return self._tail.finish()

    def land(self) -> Generator[Wait, None, None]:
        return self._tail.finish()

    def stop(self) -> None:
        super().stop()
        self._tail.guard.remove_tables()

    def _bring(self) -> Generator[Wait, None, None]:
        if not self._may_return():
            yield from super()._bring()
            return
        clock = self.iteration.clock
        self._end_iteration(clock + 1)
        self.num_late += 1
        self._move_written()
        self._tail.begin(clock)

    def _may_return(self) -> bool:
        """True if the step that has pushed everything may return now."""
        if self._why_not or not self._lands_beside:
            return False
        if has_compiled():
            self._why_not = "torch.compile reads parameters unseen"
        elif not self._has_tables:
            self._why_not = why_not_late(self._module, self.flat.parameters)
        if self._why_not:
            say_as_auto(self.loop.core.set_index, self._why_not)
            self._tail.guard.remove_tables()
            return False
        shared = first_shared(self.flat.parameters)
        if shared is not None:
            self._say_shared(shared)
            return False
        if not self._has_tables:
            self._has_tables = True
            self._tail.guard.use_tables(self._module)
            logger.info(
                "parameter set %d: overlap is full: step() returns before the replies",
                self.loop.core.set_index,
            )
        return True

    def _say_shared(self, piece: int) -> None:
        """Its values must be in place when this step returns; the next step may return early."""
        if not self._has_said_shared:
            self._has_said_shared = True
            logger.info(
                "parameter set %d: transfer.overlap = full is as auto while a view, .data or a "
                "graph of parameter %s is kept",
                self.loop.core.set_index,
                self.group.partition.pieces[piece].name,
            )


def say_as_auto(set_index: int, why_not: str) -> None:
    """Log once that ``overlap = full`` is ``auto`` here."""
    logger.info("parameter set %d: transfer.overlap = full is as auto: %s", set_index, why_not)
