"""Rounds at unchanged parameters: gradients are added up, and servers run the script's optimizer.

What a round pushes is the mean of all its gradients, g_i of a batch of weight w_i, over steps and
the group's workers,

    sum_i w_i g_i / sum_i w_i

as if one iteration had been of all these samples (gradient accumulation). It weighs sum_i w_i / H:
a round of H full batches as much as an iteration of one, a round that is cut so much less. The
group reduces once a round; in each step its workers only say whether it counts.

    trainer = AccumulatingTrainer(rounds=..., steps=16, ...)    # as a Trainer
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import torch

from psdist.errors import UsageError
from psdist.protocol.checkpoints import CHECKPOINT
from psdist.protocol.collected import JOIN
from psdist.workers.loop import Wait
from psdist.workers.reduction import Reduced
from psdist.workers.rounds.trainer import RoundTrainer
from psdist.workers.step_table import Row

_OF_PSDIST: Final = (CHECKPOINT, JOIN, "finish")
"""What psdist calls in front of a batch, at the end of a pass, or at that of the job."""


class AccumulatingTrainer(RoundTrainer):
    def __init__(self, *, steps: int, has_pending: Callable[[], bool], **options: Any) -> None:
        """``steps``: H, of a whole round; ``has_pending()``: whether the script has computed
        gradients that no step has used."""
        super().__init__(**options)
        self._steps_of_round = steps
        self._has_pending = has_pending
        self._sums = [
            torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
            for flat in self._flat.gradients
        ]
        """w_i g_i of this worker, as the flat gradients; of float16 and bfloat16 in float32."""
        self._weight = 0.0
        """w_i of this worker."""

    def clip(self, max_norm: float) -> float:
        raise UsageError(
            f"job.clip_grad_norm_({max_norm:g}) with local.outer = accumulate: a step's gradient "
            "is one of several, of which servers get the mean; "
            f"job.prepare(max_grad_norm={max_norm:g}) clips that"
        )

    @property
    def may_be_cut(self) -> bool:
        return not (self._in_round and self._has_pending())

    def _before_step(self) -> None:
        """Values that the script writes are replaced, as without rounds."""

    def _require_cut(self, call: str) -> None:
        super()._require_cut(call)
        if call not in _OF_PSDIST:
            self.require_may_be_cut(call)

    def require_may_be_cut(self, call: str) -> None:
        if not self.may_be_cut:
            raise UsageError(
                f"{call} between backward() and optimizer.step() with local.outer = accumulate: it "
                f"ends the round, after {self._in_round} steps, and the next parameters are not "
                "those of which this gradient is; call it behind optimizer.step()"
            )

    def _reduce_in_group(
        self, table: Sequence[Row], mine: Row, *, gives_back: bool
    ) -> Generator[Wait, None, Reduced]:
        """What is reduced is the round's sum."""
        del gives_back
        yield from ()
        is_usable = all(row.is_finite and not row.is_skipped for row in table)
        return Reduced(
            weight=mine.weight,
            group_weight=sum(row.weight for row in table),
            hyper=mine.hyper,
            absent=frozenset.intersection(*(row.absent for row in table if not row.has_ended)),
            is_skipped=not is_usable,
        )

    def _take(self, reduced: Reduced) -> None:
        for total, flat in zip(self._sums, self._flat.gradients, strict=True):
            total.add_(flat, alpha=reduced.weight)
        self._weight += reduced.weight

    def _make_push(self) -> Row:
        for total, flat in zip(self._sums, self._flat.gradients, strict=True):
            flat.copy_(total.div_(self._weight or 1.0))
            total.zero_()
        weight, self._weight = self._weight / self._steps_of_round, 0.0
        return Row(
            weight=weight,
            set_index=self._loop.core.set_index,
            hyper=self._hyperparameters(),
            is_finite=not self._flat.non_finite(),
            max_norm=self._clips_to,
            absent=self._untouched,
        )

    def _reduce_round(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        return (yield from self._reduction.run(table, mine, clock=self.clock))

    def _before_exchange(self, reduced: Reduced) -> None: ...

    def _after_replies(self) -> None: ...
