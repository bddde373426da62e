"""A worker's iterations in rounds: several steps of the script's optimizer here, then one exchange.

A *round* is what the clock counts. Its steps reduce gradients in the group, as every step does, and
run the script's own optimizer on each worker, so that all workers of a group stay equal. At its end
each pushes, of its slice, the difference

    anchor - parameters

where the anchor is what the last replies brought: to the servers' optimizer a gradient (Local SGD,
Stich 2019; as a pseudo-gradient of an outer optimizer: Reddi et al. 2020, DiLoCo 2023). The replies
are the next anchor. With SGD of lr 1 on the servers that is the mean over the groups, which weigh
alike.

A round ends when its length says so (psdist.workers.rounds.lengths), and earlier before every
collective, ``pull`` and the end of the script: others may wait for it, and what they would read is
not on the servers yet.

    trainer = LocalTrainer(rounds=Rounds(length=EqualSteps(16), ...), ...)       # as a Trainer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from psdist.errors import NonFiniteGradientError, UsageError
from psdist.workers.loop import Wait
from psdist.workers.model.bits import same_bits
from psdist.workers.reduction import Reduced
from psdist.workers.rounds.lengths import RoundLength
from psdist.workers.step_table import Row, in_group, set_of
from psdist.workers.trainer import NON_FINITE_REMEDY, Trainer, WorkerStatistics


@dataclass(frozen=True, kw_only=True)
class Rounds:
    length: RoundLength
    step: Callable[[], Any]
    """One step of the script's optimizer on this worker, with the gradients in ``p.grad``."""
    hyperparameters: Callable[[], bytes]
    """Of that optimizer, packed: the workers of a group must agree on them."""
    weight: float
    """Of what this worker brings to its group's difference."""
    max_norm: float
    """To which every step clips the group's gradient; 0: it does not."""
    on_step: Callable[[], None]
    """A step has ended, of which a round has several."""


class LocalTrainer(Trainer):
    def __init__(self, *, rounds: Rounds, **options: Any) -> None:
        """``options``: those of a :class:`Trainer` that clips nothing and sends nothing early; its
        ``hyperparameters()`` are those of the servers' optimizer."""
        super().__init__(**options)
        self._rounds = rounds
        self._in_round = 0
        """Steps of this round so far."""
        self._num_steps = self._num_cut = 0
        self._touched: set[int] = set()
        """Pieces that had a gradient in a step of this round."""
        partition, group = self._partition, self._group
        self._spans = [
            partition.spans(chunks) for chunks in partition.slices(group.size, options["order"])
        ]
        self._places = {
            piece: (buffer.index, start)
            for buffer in partition.buffers
            for piece, start in buffer.piece_starts
        }
        self._anchor = [flat.clone() for flat in self._flat.values]
        self._ready: Reduced | None = None
        """Of gradients that job.clip_grad_norm_ has reduced already."""

    def on_batch(self, num_samples: int, nominal: float) -> None:
        super().on_batch(num_samples, nominal)
        self._rounds.length.use_batch()

    # -- a step --------------------------------------------------------------------------------

    def iterate(
        self, gradient_scale: float, is_skipped: bool, has_scaler: bool = False
    ) -> Iterator[Wait]:
        del has_scaler  # nothing has left that it could take back
        self._loop.begin_waiting(self.clock)
        reduced, self._ready = self._ready, None
        if reduced is None:
            reduced = yield from self._bring_gradients(gradient_scale, is_skipped=is_skipped)
        elif gradient_scale != 1.0:
            raise UsageError(
                f"round {self.clock}: job.clip_grad_norm_ has clipped gradients that a GradScaler "
                "had scaled; call scaler.unscale_(optimizer) before it"
            )
        if reduced.problem and not is_skipped and self._on_nonfinite == "error":
            raise NonFiniteGradientError(
                f"round {self.clock}, step {self._in_round}: the gradient of {reduced.problem} "
                f"holds NaN or infinity; no step was made of it. {NON_FINITE_REMEDY}"
            )
        yield from self._end_step(reduced, is_skipped=reduced.is_skipped or is_skipped)

    def _bring_gradients(
        self, gradient_scale: float, *, is_skipped: bool, clip_to: float | None = None
    ) -> Generator[Wait, None, Reduced]:
        """``p.grad`` of every worker of the group becomes the group's mean, clipped where that is
        asked for. ``clip_to``: the script clips; whether an overflow is skipped its scaler says
        later."""
        may_be_skipped = clip_to is not None
        self._rounds.length.require_batches()
        self._look_for_changes(self._flat, self.clock)
        self._require_anchor()
        self._batches.use_unseen()
        self._values.record_use(self.clock)
        max_norm = self._rounds.max_norm if clip_to is None else clip_to
        absent = self._flat.collect_gradients(scale=gradient_scale)
        non_finite = [] if is_skipped else self._flat.non_finite()
        mine = Row(
            weight=self._batches.weight,
            set_index=self._loop.core.set_index,
            hyper=self._rounds.hyperparameters(),
            is_skipped=is_skipped or (may_be_skipped and bool(non_finite)),
            is_finite=may_be_skipped or not non_finite,
            max_norm=max_norm,
            absent=frozenset(absent),
        )
        table = yield from self._steps.gather(mine)
        set_of(table, self._loop.core.seat.members)
        yield from self._begin_round()
        is_as_it_is = self._group.size == 1 and gradient_scale == 1.0 and not max_norm
        reduced = yield from self._reduce_in_group(table, mine, gives_back=not is_as_it_is)
        reduced.problem = self._problem(non_finite, table)
        return reduced

    def _begin_round(self) -> Iterator[Wait]:
        """Behind the group's agreement on a step: those of its workers that have no more data in
        this pass are in it, too, and whoever waits here for another worker waits for none that
        waits in that agreement."""
        if not self._in_round:
            yield from self._rounds.length.begin(self.clock)

    def _reduce_in_group(
        self, table: Sequence[Row], mine: Row, *, gives_back: bool
    ) -> Generator[Wait, None, Reduced]:
        reduced = yield from self._reduction.run(table, mine, clock=self.clock)
        if reduced.is_skipped:
            return reduced
        if self._group.size > 1:
            pending = self._group.all_gather(self._flat.gradients, self._spans)
            yield from in_group(pending, "optimizer.step")
        if gives_back:
            self._flat.give_gradients(reduced.absent)
        return reduced

    def _end_step(self, reduced: Reduced, *, is_skipped: bool) -> Generator[Wait, None, None]:
        if not is_skipped:
            self._rounds.step()
            self._touched.update(set(range(len(self._partition.pieces))) - reduced.absent)
            self._flat.note_values()
        self._batches.end_iteration()
        self._in_round += 1
        self._num_steps += 1
        self._rounds.on_step()
        if self._rounds.length.end_step(self._in_round):
            yield from self._end_round("optimizer.step", is_cut=False)

    def clip(self, max_norm: float) -> float:
        if self._rounds.max_norm:
            raise UsageError(
                f"job.prepare(max_grad_norm={self._rounds.max_norm:g}) clips in every step; leave "
                "job.clip_grad_norm_ out"
            )
        if self._ready is not None:
            raise UsageError(
                f"round {self.clock}: job.clip_grad_norm_ was called a second time; it is called "
                "once, last before optimizer.step()"
            )
        self._loop.begin_waiting(self.clock)
        bring = self._bring_and_keep(max_norm)
        for wait in bring:
            self._loop.carry_on(wait)
        assert self._ready is not None
        return self._ready.norm

    def _bring_and_keep(self, max_norm: float) -> Generator[Wait, None, None]:
        self._ready = yield from self._bring_gradients(1.0, is_skipped=False, clip_to=max_norm)

    def _take_part(self, table: Sequence[Row], mine: Row) -> Iterator[Wait]:
        yield from self._begin_round()
        self._flat.clear_gradients()
        reduced = yield from self._reduce_in_group(table, mine, gives_back=True)
        if self._on_nonfinite == "error" and not all(row.is_finite for row in table):
            return  # the others say so
        self.record_use()
        yield from self._end_step(reduced, is_skipped=reduced.is_skipped)

    # -- the end of a round --------------------------------------------------------------------

    def _end_round(self, call: str, *, is_cut: bool = True) -> Generator[Wait, None, None]:
        """Push the difference to the anchor; what comes back is the next one. ``is_cut``: some of
        the round's steps were not made."""
        if not self._in_round:
            return
        self._loop.begin_waiting(self.clock)
        if is_cut and (written := self._flat.written_by_others()):
            raise UsageError(
                f"{call}: parameter {self._partition.pieces[written[0]].name} was written since "
                "the last optimizer.step(), in the middle of a round of local steps, which ends "
                f"here, after {self._in_round}; call job.pull(), which "
                "ends it, before the script writes to parameters (averaged weights for an "
                "evaluation, load_state_dict)"
            )
        mine = Row(
            weight=self._rounds.weight,
            set_index=self._loop.core.set_index,
            hyper=self._hyperparameters(),
            is_finite=self._make_difference(),
        )
        table = yield from self._steps.gather(mine)
        is_finite = all(row.is_finite for row in table)
        if not is_finite and self._on_nonfinite == "error":
            raise NonFiniteGradientError(
                f"round {self.clock}: after {self._in_round} local steps parameters hold NaN or "
                f"infinity; nothing was pushed. {NON_FINITE_REMEDY}"
            )
        everything = frozenset(range(len(self._partition.pieces)))
        reduced = Reduced(
            weight=mine.weight,
            group_weight=sum(row.weight for row in table) if is_finite else 0.0,
            hyper=mine.hyper,
            absent=everything - self._touched,
            is_skipped=not is_finite,
        )
        self._rounds.length.end_round(self.clock)
        self._in_round = 0
        self._num_cut += is_cut
        self._touched.clear()
        self._loop.core.forget_values(self._mine)  # what replies may be relative to is the anchor
        yield from self._exchange(reduced)
        self._rounds.length.exchanged()
        self._drop_anchor()

    def _make_difference(self) -> bool:
        """This worker's slice of the flat gradients becomes anchor - parameters; whether that is
        finite."""
        for index in self._mine:
            chunk = self._partition.chunks[index]
            stretch = slice(chunk.start, chunk.start + chunk.length)
            anchor = self._anchor[chunk.buffer][stretch]
            values = self._flat.values[chunk.buffer][stretch]
            torch.sub(anchor, values, out=self._flat.gradient_part(chunk))
        return not self._flat.non_finite_in([self._partition.chunks[each] for each in self._mine])

    def _drop_anchor(self) -> None:
        """What is in memory now is what the servers have sent."""
        for anchor, values in zip(self._anchor, self._flat.values, strict=True):
            anchor.copy_(values)

    def _require_anchor(self) -> None:
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

    # -- what ends a round early ---------------------------------------------------------------

    def end_dropped(self, call: str) -> None:
        super().end_dropped(call)
        for wait in self._end_round(call):
            self._loop.carry_on(wait)

    def bring(self) -> Iterator[Wait]:
        yield from chain(self._end_round("job.pull"), super().bring())
        self._drop_anchor()

    def close(self) -> None:
        for wait in self._end_round("finish"):
            self._loop.carry_on(wait)
        super().close()

    def statistics(self) -> WorkerStatistics:
        return replace(super().statistics(), local_steps=self._num_steps, rounds_cut=self._num_cut)
