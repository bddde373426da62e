"""A worker's iterations in rounds: several steps, then one exchange.

A *round* is what the clock counts. Its steps reduce gradients in the group, as every step does;
what else they are says a class that is derived from this one: ``differences``, where the script's
optimizer steps here, or ``sums``, where gradients are added up. At its end each worker pushes, of
its slice, what came of the round; with the replies begins the next one.

A round ends when its length says so (psdist.workers.rounds.lengths), and earlier before every
collective, ``pull`` and the end of the script: others may wait for it, and what they would read is
not on the servers yet.

With ``pipeline = 1`` a round's replies are awaited at the end of the next one
(psdist.workers.late.pipelined), whose steps go on meanwhile with what is in memory; their gradients
lie beside what is being pushed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from psdist.errors import NonFiniteGradientError, UsageError
from psdist.workers.batches import Storage
from psdist.workers.loop import Wait
from psdist.workers.reduction import Reduced
from psdist.workers.rounds.lengths import RoundLength
from psdist.workers.step_table import Row, in_group, set_of
from psdist.workers.trainer import NON_FINITE_REMEDY, Trainer, WorkerStatistics


@dataclass(frozen=True, kw_only=True)
class Rounds:
    length: RoundLength
    hyperparameters: Callable[[], bytes]
    """Of the script's optimizer, packed: the workers of a group must agree on them in each step."""
    max_norm: float
    """To which every step clips the group's gradient; 0: it does not."""
    on_step: Callable[[], None]
    """A step has ended, of which a round has several."""


class RoundTrainer(Trainer):
    def __init__(self, *, rounds: Rounds, **options: Any) -> None:
        """``options``: those of a :class:`Trainer` that sends nothing early; its
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
        self._ready: Reduced | None = None
        """Of gradients that job.clip_grad_norm_ has reduced already."""

    def on_batch(
        self,
        num_samples: int,
        nominal: float,
        *,
        source: Hashable = None,
        storages: Iterable[Storage] = (),
    ) -> None:
        super().on_batch(num_samples, nominal, source=source, storages=storages)
        self._rounds.length.use_batch()

    # -- what a round is made of -----------------------------------------------------------------

    @abstractmethod
    def _before_step(self) -> None:
        """Raises :class:`UsageError` where the round may not begin with what is in memory."""

    @abstractmethod
    def _take(self, reduced: Reduced) -> None:
        """A step, with the group's gradient."""

    @abstractmethod
    def _make_push(self) -> Row:
        """What came of the round is in the flat gradients; what its group must know of it."""

    @abstractmethod
    def _reduce_round(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """This worker's slice of them becomes the group's. ``table``: of all its workers."""

    @abstractmethod
    def _before_exchange(self, reduced: Reduced) -> None:
        """What is in memory is about to become what the servers have sent: of this round, or where
        its replies are awaited later of the one before."""

    @abstractmethod
    def _after_replies(self) -> None:
        """What is in memory now is what the servers have sent."""

    # -- a step --------------------------------------------------------------------------------

    def iterate(
        self, gradient_scale: float, is_skipped: bool, has_scaler: bool = False
    ) -> Iterator[Wait]:
        del has_scaler  # nothing has left that it could take back
        self.take_over()
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
        self.resume()

    def _bring_gradients(
        self, gradient_scale: float, *, is_skipped: bool, clip_to: float | None = None
    ) -> Generator[Wait, None, Reduced]:
        """``p.grad`` of every worker of the group becomes the group's mean, clipped where that is
        asked for. ``clip_to``: the script clips; whether an overflow is skipped its scaler says
        later."""
        may_be_skipped = clip_to is not None
        self._rounds.length.require_batches()
        self._look_for_changes(self._flat, self.clock)
        self._before_step()
        self.batches.end_forwards()
        self._values.record_use(self.clock)
        max_norm = self._rounds.max_norm if clip_to is None else clip_to
        absent = self._flat.collect_gradients(scale=gradient_scale)
        non_finite = [] if is_skipped else self._flat.non_finite()
        mine = Row(
            weight=self.batches.weight,
            set_index=self._loop.core.set_index,
            hyper=self._rounds.hyperparameters(),
            is_skipped=is_skipped or (may_be_skipped and bool(non_finite)),
            is_finite=may_be_skipped or not non_finite,
            max_norm=max_norm,
            absent=frozenset(absent),
        )
        table = yield from self._steps.gather(mine)
        set_of(table)
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

    @property
    def _untouched(self) -> frozenset[int]:
        """Pieces of which no worker of the group has had a gradient in this round."""
        return frozenset(range(len(self._partition.pieces))) - self._touched

    def _end_step(self, reduced: Reduced, *, is_skipped: bool) -> Generator[Wait, None, None]:
        if not is_skipped:
            self._take(reduced)
            self._touched.update(set(range(len(self._partition.pieces))) - reduced.absent)
        self.batches.end_iteration()
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
        self.take_over()
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
        self._use_values()
        yield from self._end_step(reduced, is_skipped=reduced.is_skipped)

    # -- the end of a round --------------------------------------------------------------------

    def _end_round(self, call: str, *, is_cut: bool = True) -> Generator[Wait, None, None]:
        """Push what came of it; with the replies begins the next one. ``is_cut``: some of the
        round's steps were not made."""
        if not self._in_round:
            return
        yield from self._land_late()
        self._loop.begin_waiting(self.clock)
        if is_cut:
            self._require_cut(call)
        if self._flat.is_diverted:
            self._flat.rejoin_gradients(keeps=True)
        mine = self._make_push()
        table = yield from self._steps.gather(mine)
        if not all(row.is_finite for row in table) and self._on_nonfinite == "error":
            raise NonFiniteGradientError(
                f"round {self.clock}: after {self._in_round} local steps what came of them holds "
                f"NaN or infinity; nothing was pushed. {NON_FINITE_REMEDY}"
            )
        reduced = yield from self._reduce_round(table, mine)
        self._rounds.length.end_round(self.clock)
        self._in_round = 0
        self._num_cut += is_cut
        self._touched.clear()
        self._before_exchange(reduced)
        yield from self._exchange(reduced)
        if self._pipelined is not None:
            self._flat.divert_gradients()
        self._rounds.length.exchanged()
        self._after_replies()

    def end_pass(self, *, is_whole: bool) -> int:
        """The pass over the loader is over, and so is the round: which one, or -1 where a
        collective has ended it already. ``is_whole``: the script has not left it before."""
        if not self._in_round:
            return -1
        clock = self.clock
        for wait in self._end_round("the next batch", is_cut=not is_whole):
            self._loop.carry_on(wait)
        return clock

    def _require_cut(self, call: str) -> None:
        """Raises :class:`UsageError` where the round may not end with ``call``."""
        if written := self._flat.written_by_others():
            raise UsageError(
                f"{call}: parameter {self._partition.pieces[written[0]].name} was written since "
                "the last optimizer.step(), in the middle of a round of local steps, which ends "
                f"here, after {self._in_round}; call job.pull(), which "
                "ends it, before the script writes to parameters (averaged weights for an "
                "evaluation, load_state_dict)"
            )

    def _end_iteration(self) -> None:
        """The batches of a round are those of its steps, which have ended; what has been handed out
        since is of a step behind it."""
        self._end_clock()

    # -- what ends a round early ---------------------------------------------------------------

    def end_dropped(self, call: str) -> None:
        for wait in self._end_round(call):
            self._loop.carry_on(wait)
        super().end_dropped(call)

    def finish_late(self) -> None:
        """Within a round replies land; into place they come when it ends."""
        if self._in_round:
            self.land_late()
        else:
            super().finish_late()

    def _finish_late(self) -> Generator[Wait, None, None]:
        was_pending = self._pipelined is not None and self._pipelined.is_pending
        yield from super()._finish_late()
        if was_pending:
            self._after_replies()

    def bring(self) -> Iterator[Wait]:
        yield from chain(self._end_round("job.pull"), super().bring())
        self._after_replies()

    def close(self) -> None:
        self.take_over()
        for wait in self._end_round("finish"):
            self._loop.carry_on(wait)
        super().close()

    def statistics(self) -> WorkerStatistics:
        return replace(super().statistics(), local_steps=self._num_steps, rounds_cut=self._num_cut)
