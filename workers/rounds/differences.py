"""Rounds in which the script's own optimizer steps on each worker.

All workers of a group stay equal. At the round's end each pushes, of its slice, the difference

    anchor - parameters

where the anchor is what the last replies brought: to the servers' optimizer a gradient (Local SGD,
Stich 2019; as a pseudo-gradient of an outer optimizer: Reddi et al. 2020, DiLoCo 2023). The replies
are the next anchor. With SGD of lr 1 on the servers that is the mean over the groups, which weigh
alike.

With ``pipeline = 1`` the next round goes on from where this one has come to, and replies are worked
in a round later. With s_c where round c began and z_c where it has come to, what is pushed is
s_c - z_c; with r_c, the reply to that, which is there at the end of round c + 1,

    s_(c+1) = r_(c-1) + (z_c - s_c)          (z_c, where no reply is outstanding)

so what has come to the servers counts once, as part of the reply, and what has not is kept; with
``average`` a group that is alone trains as if nothing were sent. (Delayed averaging: DaSGD, Zhou et
al. 2020; Overlap Local-SGD, Wang et al. 2020; an outer step of delay, as in Streaming DiLoCo,
Douillard et al. 2025.)

    trainer = LocalTrainer(rounds=Rounds(length=EqualSteps(16), ...), step=..., ...)  # as a Trainer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from psdist.errors import UsageError
from psdist.workers.loop import Wait
from psdist.workers.model.samples import same_bits
from psdist.workers.reduction import Reduced
from psdist.workers.rounds.trainer import RoundTrainer
from psdist.workers.step_table import Row


class LocalTrainer(RoundTrainer):
    def __init__(
        self,
        *,
        step: Callable[[], Any],
        weight: float,
        **options: Any,
    ) -> None:
        """``step()``: one of the script's optimizer on this worker, with the gradients in
        ``p.grad``; ``weight``: of what this worker brings to its group's difference of a round."""
        super().__init__(**options)
        self._step_here = step
        self._weight = weight
        self._places = {
            piece: (buffer.index, start)
            for buffer in self._partition.buffers
            for piece, start in buffer.piece_starts
        }
        self._anchor = [flat.clone() for flat in self._flat.values]
        """Where the round began."""
        self._has_progress = False
        """Whether the anchor is what the round has brought, until the values come to which that is
        added."""
        if self._pipelined is not None:
            self._pipelined.newest = self._anchor
            self._values.look_as_they_land()

    def _before_step(self) -> None:
        """A round begins with the servers' values."""
        if self._in_round:
            return
        for piece in self._flat.written_by_others():
            buffer, start = self._places[piece]
            stretch = slice(start, start + math.prod(self._partition.pieces[piece].shape))
            if not same_bits(self._anchor[buffer][stretch], self._flat.values[buffer][stretch]):
                raise UsageError(
                    f"round {self.clock}: parameter {self._partition.pieces[piece].name} was "
                    "written since the last replies; call job.push(), which makes what the chief "
                    "has in memory the servers' values and every worker's"
                )

    def _take(self, reduced: Reduced) -> None:
        del reduced  # its gradient is in ``p.grad``
        self._step_here()
        self._flat.note_values()

    def _make_push(self) -> Row:
        for index in self._mine:
            chunk = self._partition.chunks[index]
            stretch = slice(chunk.start, chunk.start + chunk.length)
            anchor = self._anchor[chunk.buffer][stretch]
            values = self._flat.values[chunk.buffer][stretch]
            torch.sub(anchor, values, out=self._flat.gradient_part(chunk))
        if self._pipelined is None:  # else the servers' newest values lie beside
            self._loop.core.transfers.held.forget(self._mine)
        mine = [self._partition.chunks[each] for each in self._mine]
        return Row(
            weight=self._weight,
            set_index=self._loop.core.set_index,
            hyper=self._hyperparameters(),
            is_finite=not self._flat.non_finite_in(mine),
        )

    def _reduce_round(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """All workers of a group have come to the same parameters, of which each has its slice."""
        yield from ()
        is_finite = all(row.is_finite for row in table)
        return Reduced(
            weight=mine.weight,
            group_weight=sum(row.weight for row in table) if is_finite else 0.0,
            hyper=mine.hyper,
            absent=self._untouched,
            is_skipped=not is_finite,
        )

    def _before_exchange(self, reduced: Reduced) -> None:
        if self._pipelined is None:
            return
        if reduced.is_skipped:  # what the round has brought is dropped
            for anchor, values in self._pairs():
                values.copy_(anchor)
        if self._pipelined.is_pending:
            self._has_progress = True
            for anchor, values in self._pairs():
                torch.sub(values, anchor, out=anchor)

    def _after_replies(self) -> None:
        has_progress, self._has_progress = self._has_progress, False
        for anchor, values in self._pairs():
            if has_progress:
                values.add_(anchor)
            anchor.copy_(values)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self._anchor, self._flat.values, strict=True)
