"""Check before every push that the model is the prepared one.

    watch = ModelWatch(module, parameters=[...], names=[...], frozen=[...])
    watch.look(flat, clock=3)            # UsageError for a model that would train wrongly

Servers do not see values that the script writes into the model: their next values replace these.
Parameters that are other objects than the prepared ones do not train at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from psdist.errors import UsageError
from psdist.protocol.partition import ITEM_BYTES
from psdist.workers.model.flat import FlatModel
from psdist.workers.model.forward_hooks import DroppedInCopies

logger = logging.getLogger("psdist")

_REMEDY: Final = (
    "load and initialise models before job.prepare, or call job.set_parameters() on all workers "
    "after it, which makes the chief's values the servers'"
)
_MOST_WRITES: Final = 3
"""Iterations with a write until the job ends. The first one is a warning: a script may write once
for an evaluation."""


class ModelWatch:
    def __init__(
        self,
        module: torch.nn.Module,
        *,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        frozen: Sequence[tuple[str, torch.nn.Parameter]],
        is_held: Callable[[torch.nn.Parameter], bool] = lambda _parameter: False,
    ) -> None:
        """``parameters``: the pieces; ``names``: of the pieces; ``frozen``: other parameters with
        their names, which must stay frozen unless another set holds them (``is_held``)."""
        self._names = names
        self._frozen = frozen
        self._is_held = is_held
        self._places = [
            (each, table, key, value, f"{path}.{key}" if path else key)
            for path, each in module.named_modules()
            for table in ("_modules", "_parameters")
            for key, value in getattr(each, table).items()
            if value is not None
        ]
        """(module, table, key, value, name) at job.prepare()."""
        self._before_load: list[torch.Tensor] = []
        self._num_writes = 0
        """Iterations with a write that the servers have not seen."""
        self._parameters = parameters
        hook = _LoadHook(self._keep_values)
        self._handles: list[RemovableHandle] = [
            each.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call] # torch's
            for each in module.modules()
        ]

    def stop(self) -> None:
        """Stop: training has ended, and the script may load values."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before_load = []

    def accept(self) -> None:
        """Accept the values in memory, which the servers have now (job.set_parameters)."""
        self._before_load = []

    def look(self, flat: FlatModel, clock: int, *, is_local: bool = False) -> None:
        """``clock``: of the iteration that is about to end; ``is_local``: a local step, whose
        writes belong to the worker's progress. Raises :class:`UsageError`."""
        self.require_same(clock=clock)
        written = flat.written_by_others()
        before, self._before_load = self._before_load, []
        if written:  # also since the last pull, which restores the servers' values
            self._look_for_a_load(before, clock)
        if not is_local and (changed := flat.samples.changed(written)):
            self._report(changed, clock)

    def _report(self, pieces: Sequence[int], clock: int) -> None:
        """Raises :class:`UsageError` if the script writes again and again."""
        self._num_writes += 1
        others = f" (and {len(pieces) - 1} more)" if len(pieces) > 1 else ""
        told = (
            f"iteration {clock}: the script has written to parameter {self._names[pieces[0]]}"
            f"{others} since the servers sent its values"
        )
        if self._num_writes == _MOST_WRITES:
            raise UsageError(
                f"{told}, as in {_MOST_WRITES - 1} iterations before; the servers do not see such "
                "writes, and their next values replace them: call job.set_parameters() on all "
                "workers after each write, or express it in the model (torch.nn.utils.parametrize)"
            )
        if self._num_writes == 1:
            logger.warning(
                "%s; the servers do not see such a write, and their next values replace it: %s",
                told,
                _REMEDY,
            )

    def require_same(self, *, clock: int) -> None:
        """Raises :class:`UsageError` unless every parameter is the object that was prepared."""
        for module, table, key, value, name in self._places:
            if getattr(module, table).get(key) is not value:
                raise UsageError(
                    f"iteration {clock}: {name} is not any more what job.prepare() was given "
                    "(replaced, or loaded with assign=True), and what is there now is not trained; "
                    "change the model before job.prepare()"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad and not self._is_held(parameter):
                raise UsageError(
                    f"iteration {clock}: parameter {name} was frozen at job.prepare() but now "
                    "requires gradients, and servers do not train it: they hold what the "
                    f"optimizer holds, in {', '.join(ITEM_BYTES)}; give it to the optimizer before "
                    "job.prepare(), where it may be frozen as well"
                )

    def _keep_values(self) -> None:
        if not self._before_load:
            self._before_load = [each.detach().clone() for each in self._parameters]

    def _look_for_a_load(self, before: Sequence[torch.Tensor], clock: int) -> None:
        """Raise UsageError for loaded values. A script may load averaged weights for an evaluation
        and load the old values again."""
        for value, parameter in zip(before, self._parameters, strict=bool(before)):
            if not torch.equal(value, parameter.detach()):
                raise UsageError(
                    f"iteration {clock}: load_state_dict() has changed the model since "
                    "job.prepare(), and the servers, which hold the parameters, have not seen it: "
                    f"{_REMEDY}"
                )


class _LoadHook(DroppedInCopies):
    """A hook before load_state_dict. In a copied or pickled model it does nothing."""

    def __init__(self, on_load: Callable[[], None] | None = None) -> None:
        self._on_load = on_load

    def __call__(self, *_arguments: Any) -> None:
        if self._on_load is not None:
            self._on_load()
