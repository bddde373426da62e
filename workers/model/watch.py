"""Whether the model is still what was prepared: looked at before every push.

    watch = ModelWatch(module, parameters=[...], names=[...], frozen=[...])
    watch.look(flat, clock=3)            # UsageError for what would train wrongly

What the script puts into the model behind psdist's back the servers never see: their next values
replace it, and parameters that are other objects than the prepared ones do not train at all.
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

logger = logging.getLogger("psdist")

_REMEDY: Final = (
    "load and initialise models before job.prepare, or call job.push() on all workers after it, "
    "which makes the chief's values the servers'"
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
        """``parameters``: the pieces; ``names`` of them; ``frozen``: parameters that are none, with
        their names, and must stay frozen unless another set has come that holds them:
        ``is_held``."""
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
        """What lay where: tables of the modules, their keys and values, and names."""
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
        """The model is trained no more: the script may load into it what it likes."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before_load = []

    def accept(self) -> None:
        """What is in memory now are the servers' values (job.push)."""
        self._before_load = []

    def look(self, flat: FlatModel, *, clock: int, is_local: bool = False) -> None:
        """``clock``: of the iteration that is about to end; ``is_local``: a step of several on this
        worker, to whose progress belongs what the script writes. Raises :class:`UsageError`."""
        self.require_same(clock=clock)
        written = flat.written_by_others()
        before, self._before_load = self._before_load, []
        if written:  # since the last pull, too, which brings the servers' values back
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
                "writes, and their next values replace them: call job.push() on all workers after "
                "each write, or express it in the model (torch.nn.utils.parametrize)"
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
        """Averages of weights may be loaded for an evaluation, if what was there is loaded back."""
        for value, parameter in zip(before, self._parameters, strict=bool(before)):
            if not torch.equal(value, parameter.detach()):
                raise UsageError(
                    f"iteration {clock}: load_state_dict() has changed the model since "
                    "job.prepare(), and the servers, which hold the parameters, have not seen it: "
                    f"{_REMEDY}"
                )


class _LoadHook:
    """Told before every load_state_dict. A copied or pickled model's tells nobody."""

    def __init__(self, on_load: Callable[[], None] | None = None) -> None:
        self._on_load = on_load

    def __call__(self, *_arguments: Any) -> None:
        if self._on_load is not None:
            self._on_load()

    def __reduce__(self) -> tuple[type[_LoadHook], tuple[()]]:
        return _LoadHook, ()
