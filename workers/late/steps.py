"""Steps of one parameter set that return before their replies have come (``overlap = full``).

They do so once overlap is on and the model is one whose reads can be told; until then, and from
whatever speaks against it on, ``full`` is ``auto``, and the log says so once.

    late = LateSteps(partition, chunks, flat, loop, values, module=..., overlap=..., driver=...)
    if late.may_begin(): late.begin(clock)     # at the end of step()
    late.use(clock)                            # while late.is_pending
    yield from late.finish()
    late.stop()
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Final

import torch

from psdist.protocol.partition import Partition
from psdist.workers.early.overlap import Overlap
from psdist.workers.early.progress import Driver
from psdist.workers.late.guarded import ParameterTable
from psdist.workers.late.tail import Tail
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.values import Values


def why_not_late_here(*, group_size: int, has_mirrors: bool) -> str:
    """Return why step() must wait for the replies on this worker, or "". ``has_mirrors``: the
    parameters are on a device."""
    if group_size > 1:
        return "step() of a worker in a group of several gathers the others' slices"
    return "the model is on a device, to which values are brought as a whole" if has_mirrors else ""


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


class LateSteps:
    def __init__(
        self,
        partition: Partition,
        chunks: Sequence[int],
        flat: FlatModel,
        loop: WorkerLoop,
        values: Values,
        *,
        module: torch.nn.Module,
        overlap: Overlap,
        driver: Driver,
        group_size: int,
    ) -> None:
        """``chunks``: those that this worker pushes; ``overlap`` says when gradients leave early;
        ``driver``: of the loop while the script computes."""
        self.num_late = 0
        """Steps that have returned early."""
        self._module = module
        self._flat = flat
        self._loop = loop
        self._overlap = overlap
        self._tail = Tail(
            partition, chunks, flat, loop, values, move=overlap.move_values, driver=driver
        )
        self._partition = partition
        self._has_said_shared = False
        self._is_on = False
        self._why_not = why_not_late_here(
            group_size=group_size, has_mirrors=flat.transfers.has_mirrors
        )
        if self._why_not:
            self._say_why_not()

    @property
    def is_pending(self) -> bool:
        """Whether the last step has left something to be done."""
        return self._tail.is_pending

    @property
    def waited_s(self) -> float:
        """Seconds in which reads have waited for replies."""
        return self._tail.waited_s

    def may_begin(self) -> bool:
        """Whether the step that has pushed everything may return now."""
        if self._why_not or not self._overlap.may_end_later:
            return False
        if has_compiled():
            self._why_not = "torch.compile reads parameters unseen"
        elif not self._is_on:
            self._why_not = why_not_late(self._module, self._flat.parameters)
        if self._why_not:
            self._say_why_not()
            self._tail.guard.remove_tables()
            return False
        shared = first_shared(self._flat.parameters)
        if shared is not None:
            self._say_shared(shared)
            return False
        if not self._is_on:
            self._is_on = True
            self._tail.guard.use_tables(self._module)
            logger.info(
                "parameter set %d: overlap is full: step() returns before the replies",
                self._loop.core.set_index,
            )
        return True

    def _say_why_not(self) -> None:
        set_index = self._loop.core.set_index
        logger.info(
            "parameter set %d: transfer.overlap = full is as auto: %s", set_index, self._why_not
        )

    def _say_shared(self, piece: int) -> None:
        """Its values must be in place when this step returns; the next one may be another."""
        if not self._has_said_shared:
            self._has_said_shared = True
            logger.info(
                "parameter set %d: transfer.overlap = full is as auto while a view, .data or a "
                "graph of parameter %s is kept",
                self._loop.core.set_index,
                self._partition.pieces[piece].name,
            )

    def begin(self, clock: int) -> None:
        """Everything of iteration ``clock`` was pushed, and it is over for the script."""
        self.num_late += 1
        self._overlap.move_written()
        self._tail.begin(clock)

    def use(self, clock: int) -> None:
        """A forward pass of iteration ``clock`` begins."""
        self._tail.use(clock)

    def finish(self) -> Generator[Wait, None, None]:
        """Until the values are in place. The loop is the script's."""
        yield from self._tail.finish()

    def finish_now(self) -> None:
        """As :meth:`finish`, whoever has the loop."""
        self._tail.finish_now()

    def resume(self) -> None:
        """The script has used the loop, and computes again."""
        self._tail.resume()

    def stop(self) -> None:
        """The job is over: nothing is pending, and the model is the script's again."""
        self._tail.guard.remove_tables()
