"""Rounds at unchanged parameters: gradients are added up, and servers run the script's optimizer.

A round pushes the mean of all its gradients, g_i of a batch of weight w_i, over steps and the
group's workers,

    sum_i w_i g_i / sum_i w_i

as if one iteration had been of all these samples (gradient accumulation). It weighs sum_i w_i / H:
a round of H full batches has the weight of an iteration with one, a shorter round less. The group
reduces once a round; in each step its workers only report whether it counts.

    strategy = SummedGradients(Blocking(...), Rounds(...), steps=16, has_pending=..., clips_to=0.0)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Final

import torch

from psdist.errors import UsageError
from psdist.protocol.checkpoints import CHECKPOINT
from psdist.protocol.collected import JOIN
from psdist.workers.blocking import Blocking
from psdist.workers.loop import Wait
from psdist.workers.reduction import Reduced, Row, absent_of
from psdist.workers.rounds.local_steps import LocalSteps, Rounds

_OF_PSDIST: Final = (CHECKPOINT, JOIN, "finish")
"""Calls that psdist makes: before a batch, at the end of a pass, or at the end of the job."""


class SummedGradients(LocalSteps):
    def __init__(
        self,
        inner: Blocking,
        rounds: Rounds,
        *,
        steps: int,
        has_pending: Callable[[], bool],
        clips_to: float,
    ) -> None:
        """``steps``: H, of a whole round; ``has_pending()``: the script has computed gradients that
        no step has used; ``clips_to``: the clipping norm of the group's gradient of a round, 0
        for none."""
        super().__init__(inner, rounds)
        self._steps_of_round = steps
        self._has_pending = has_pending
        self._clips_to = clips_to
        self._sums = [
            torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
            for flat in self.flat.gradients
        ]
        """w_i g_i of this worker, as the flat gradients; of float16 and bfloat16 in float32."""
        self._weight = 0.0
        """w_i of this worker."""

    def require_clippable(self, max_norm: float) -> None:
        raise UsageError(
            f"job.clip_grad_norm_({max_norm:g}) with local.outer = accumulate: a step's gradient "
            "is one of several, and servers get their mean; "
            f"job.prepare(max_grad_norm={max_norm:g}) clips that"
        )

    @property
    def may_be_cut(self) -> bool:  # type: ignore[override]
        return not (self._in_round and self._has_pending())

    def _require_cut(self, call: str) -> None:
        super()._require_cut(call)
        if call not in _OF_PSDIST:
            self.require_may_be_cut(call)

    def require_may_be_cut(self, call: str) -> None:
        if not self.may_be_cut:
            raise UsageError(
                f"{call} between backward() and optimizer.step() with local.outer = accumulate: it "
                f"ends the round, after {self._in_round} steps, and the next parameters are not "
                "those of this gradient; call it after optimizer.step()"
            )

    def _reduce_step(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """Decide together if the step counts; the group reduces the round's sum."""
        yield from ()
        is_usable = all(row.is_finite and not row.is_skipped for row in table)
        return Reduced(
            weight=mine.weight,
            group_weight=sum(row.weight for row in table),
            hyper=mine.hyper,
            absent=absent_of(table),
            is_skipped=not is_usable,
        )

    def _take(self, reduced: Reduced) -> None:
        for total, flat in zip(self._sums, self.flat.gradients, strict=True):
            total.add_(flat, alpha=reduced.weight)
        self._weight += reduced.weight

    def _make_push(self) -> Row:
        for total, flat in zip(self._sums, self.flat.gradients, strict=True):
            flat.copy_(total.div_(self._weight or 1.0))
            total.zero_()
        weight, self._weight = self._weight / self._steps_of_round, 0.0
        return Row(
            weight=weight,
            set_index=self.loop.core.set_index,
            hyper=self._rounds.hyperparameters(),
            is_finite=not self.flat.non_finite(),
            max_norm=self._clips_to,
            absent=self._untouched,
        )

    def _reduce_round(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        return self.reduce_slice(table, mine)
