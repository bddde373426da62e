"""The gradients of a table's rows, as they follow the script's use of ``p.grad``.

A table has one parameter of one element, its *handle*: the optimizer's groups, ``zero_grad``, a
GradScaler and clipping treat it as any parameter. Each backward pass through rows adds ``GAUGE`` to
the handle's gradient, and keeps the gradient of the rows here. Changes of ``p.grad`` by the
script (dropping, accumulating, unscaling, clipping) are read off the handle and done to the rows.
``GAUGE`` is too small to move a norm, and the handle's value is used for nothing.

    gradients = RowGradients(handle)
    gradients.add(ids, gradient)              # in backward; the handle's gradient follows
    gradients.take(scale=1.0)                 # in step(): [(ids, gradient, factor), ...]
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from psdist.errors import UsageError
from psdist.tables.specs import Ids

GAUGE: Final = 2.0**-60
_MOST_FACTOR: Final = 2.0**30


class RowGradient(NamedTuple):
    ids: Ids
    """Strictly ascending."""
    rows: torch.Tensor
    """[n, dim], float32, on the model's device."""
    factor: float
    """The script has multiplied the gradient by it since."""


class RowGradients:
    def __init__(self, handle: torch.nn.Parameter) -> None:
        self._handle = handle
        self._arrived: list[tuple[int, RowGradient]] = []
        """Gradients of a backward pass that has not reached the handle, with the pass's number."""
        self._kept: list[RowGradient] = []
        """Those that the handle's gradient has."""
        self._gauge = 0.0
        """The handle's gradient after the last pass, in units of ``GAUGE``."""
        handle.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call] # torch's

    def add(self, ids: Ids, gradient: torch.Tensor) -> torch.Tensor:
        """Keep the gradient of rows, in backward; return that of the handle: NaN if the rows' is
        not finite."""
        number = torch._C._current_graph_task_id()
        self._arrived.append((number, RowGradient(ids, gradient.detach(), 1.0)))
        zero = float(gradient.detach().sum(dtype=torch.float64)) * 0.0
        return self._handle.new_full((1,), zero + GAUGE)

    def _accumulate(self, handle: torch.Tensor) -> None:
        """A backward pass has added to the handle's gradient. ``torch.autograd.grad`` does not."""
        number = torch._C._current_graph_task_id()
        arrived = [each for pass_, each in self._arrived if pass_ == number]
        self._arrived.clear()
        total = self._total(handle)
        self._rescale(total - len(arrived))
        self._kept += arrived
        self._gauge = total

    def _total(self, handle: torch.Tensor) -> float:
        return 0.0 if handle.grad is None else float(handle.grad) / GAUGE

    def _rescale(self, gauge: float) -> None:
        """The script has changed the handle's gradient to this, in units of ``GAUGE``."""
        if not gauge or not self._gauge:
            self._kept.clear()
            gauge = 0.0
        elif gauge != self._gauge:
            factor = gauge / self._gauge
            if abs(factor) > _MOST_FACTOR:
                raise UsageError(
                    "something was added to the gradient of a table's parameter rows_on_servers "
                    "(noise?); rows follow what multiplies it: leave parameters of that name out"
                )
            self._kept = [each._replace(factor=each.factor * factor) for each in self._kept]
        self._gauge = gauge

    def take(self, *, scale: float) -> list[RowGradient]:
        """Return the gradients for a step, each with its factor times ``scale``."""
        total = self._total(self._handle)
        if self._arrived and not self._kept and total:
            # The script has made the handle's gradient of torch.autograd.grad's.
            self._kept = [each for _, each in self._arrived]
            self._gauge = float(len(self._kept))
        self._arrived.clear()
        self._rescale(total)
        return [each._replace(factor=each.factor * scale) for each in self._kept]

    def restore(self, ids: Ids, rows: torch.Tensor) -> None:
        """Continue with these gradients; the handle's gradient is restored already."""
        self._kept, self._gauge = [RowGradient(ids, rows, 1.0)], self._total(self._handle)
