"""Rounds in which the script's own optimizer steps on each worker.

All workers of a group stay equal. At the round's end each pushes, of its slice, the difference

    anchor - parameters

where the anchor is what the last replies brought: to the servers' optimizer a gradient (Local SGD,
Stich 2019; as a pseudo-gradient of an outer optimizer: Reddi et al. 2020, DiLoCo 2023). The replies
are the next anchor. With SGD of lr 1 on the servers that is the mean over the groups, which have
equal weights.

With ``pipeline = 1`` the next round begins with the parameters at the end of this one, and replies
are added a round later. Let round c begin at s_c and end at z_c; it pushes s_c - z_c. With r_c, the
reply to that, which has come at the end of round c + 1,

    s_(c+1) = r_(c-1) + (z_c - s_c)          (z_c, where no reply is outstanding)

so progress that has reached the servers counts once, as part of the reply, and other progress is
kept; with ``average`` a single group trains as if nothing were sent. (Delayed averaging: DaSGD,
Zhou et al. 2020; Overlap Local-SGD, Wang et al. 2020; an outer step of delay, as in Streaming
DiLoCo, Douillard et al. 2025.)

    strategy = LocalDifferences(Pipelined(...), Rounds(...), step=..., weight=1.0, anchor=anchor)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any

import torch

from psdist.errors import UsageError
from psdist.workers.blocking import Blocking
from psdist.workers.loop import Wait
from psdist.workers.model.samples import same_bits
from psdist.workers.reduction import CALL, Reduced, Row, Terms, in_group
from psdist.workers.rounds.local_steps import LocalSteps, Rounds


class LocalDifferences(LocalSteps):
    def __init__(
        self,
        inner: Blocking,
        rounds: Rounds,
        *,
        step: Callable[[], Any],
        weight: float,
        anchor: Sequence[torch.Tensor],
    ) -> None:
        """``step()``: one of the script's optimizer on this worker, with the gradients in
        ``p.grad``; ``weight``: of this worker in its group's difference of a round; ``anchor``: a
        copy of the flat values."""
        super().__init__(inner, rounds)
        self._step_here = step
        self._weight = weight
        self._places = {
            piece: (buffer.index, start)
            for buffer in self.group.partition.buffers
            for piece, start in buffer.piece_starts
        }
        self._anchor = anchor
        """The values with which the round began."""
        self._has_progress = False
        """True if the anchor is the progress of the round, until the values come that it is added
        to."""
        self._is_scaled = False
        """True if the gradients of the step were scaled when they were collected."""
        if inner.lands_aside:
            self.values.uses.check_as_values_land()

    def require_ready(self) -> None:
        """A round begins with the servers' values."""
        super().require_ready()
        if self._in_round:
            return
        pieces = self.group.partition.pieces
        for piece in self.flat.written_by_others():
            buffer, start = self._places[piece]
            stretch = slice(start, start + math.prod(pieces[piece].shape))
            if not same_bits(self._anchor[buffer][stretch], self.flat.values[buffer][stretch]):
                raise UsageError(
                    f"round {self.iteration.clock}: parameter {pieces[piece].name} was "
                    "written since the last replies; call job.set_parameters(), which "
                    "sends the chief's values to the servers and to every worker"
                )

    def collect(
        self, now: Terms, *, scale: float, is_skipped: bool, has_scaler: bool, is_clipped: bool
    ) -> Collection[int]:
        self._is_scaled = scale != 1.0
        return super().collect(
            now, scale=scale, is_skipped=is_skipped, has_scaler=has_scaler, is_clipped=is_clipped
        )

    def _reduce_step(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """Give the script the group's gradients, as ``p.grad``."""
        reduced = yield from self.reduce_slice(table, mine)
        if reduced.is_skipped:
            return reduced
        channel = self.group.channel
        if channel.size > 1:
            yield from in_group(channel.all_gather(self.flat.gradients, self.group.spans), CALL)
        if channel.size > 1 or self._is_scaled or mine.max_norm:
            self.flat.give_gradients(reduced.absent)
        return reduced

    def _take(self, reduced: Reduced) -> None:
        del reduced  # its gradient is in ``p.grad``
        self._step_here()
        self.flat.note_values()

    def _make_push(self) -> Row:
        mine = self.group.mine
        chunks = [self._chunks[each] for each in mine]
        for chunk in chunks:
            stretch = slice(chunk.start, chunk.start + chunk.length)
            anchor = self._anchor[chunk.buffer][stretch]
            values = self.flat.values[chunk.buffer][stretch]
            torch.sub(anchor, values, out=self.flat.gradient_part(chunk))
        if not self._inner.lands_aside:  # else the servers' newest values are in other memory
            self.loop.core.transfers.held.forget(mine)
        return Row(
            weight=self._weight,
            set_index=self.loop.core.set_index,
            hyper=self._rounds.hyperparameters(),
            is_finite=not self.flat.non_finite_in(chunks),
        )

    def _reduce_round(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """All workers of a group have come to the same parameters; each pushes its slice."""
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
        if not self._inner.lands_aside:
            return
        if reduced.is_skipped:  # the progress of the round is dropped
            for anchor, values in self._pairs():
                values.copy_(anchor)
        if self._inner.is_pending:
            self._has_progress = True
            for anchor, values in self._pairs():
                torch.sub(values, anchor, out=anchor)

    def after_replies(self) -> None:
        has_progress, self._has_progress = self._has_progress, False
        for anchor, values in self._pairs():
            if has_progress:
                values.add_(anchor)
            anchor.copy_(values)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self._anchor, self.flat.values, strict=True)
