"""The plain step strategy: everything leaves in ``step()``, which returns with the parameters of
the next iteration in place. Other strategies derive from it and replace the parts that differ:

* psdist.workers.early: gradients leave during backward,
* psdist.workers.late: replies are awaited after ``step()`` has returned,
* psdist.workers.rounds: several steps of the script make one exchange, by another strategy.

    iteration = Iteration(loop.core.clock, hyperparameters=..., on_end=...)
    strategy = Blocking(Parts(iteration, group, flat, loop, values, rule))

The loop belongs to the script's thread in each call, except during backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, Final, NamedTuple

import torch

from psdist.errors import GroupReformedError, UsageError
from psdist.workers.batches import Batches
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.missed_rounds import WorkerRule
from psdist.workers.model.flat import FlatModel
from psdist.workers.reduction import (
    CALL,
    Reduced,
    Row,
    Terms,
    WorkerGroup,
    absent_of,
    in_group,
    max_norm_of,
)
from psdist.workers.values import Values

NON_FINITE_REMEDY: Final = (
    'Lower the learning rate, or set training.on_nonfinite = "skip" to leave such iterations out'
)


class Iteration:
    """The iteration that is under way: its number, its batches, and its terms."""

    def __init__(
        self, clock: int, *, hyperparameters: Callable[[], bytes], on_end: Callable[[], None]
    ) -> None:
        """``hyperparameters()``: of the optimizer that the script steps, packed, as they are now;
        ``on_end()`` is called after each exchange with the servers."""
        self.clock = clock
        """Finished iterations."""
        self.is_open = False
        """True while the iteration is under way in the group: all workers have agreed to it, and
        its values are not gathered."""
        self.batches = Batches()
        self.hyperparameters = hyperparameters
        self.on_end = on_end

    def terms(self) -> Terms:
        """Return the terms under which this worker would push now."""
        return Terms(clock=self.clock, hyper=self.hyperparameters(), weight=self.batches.weight)


class Parts(NamedTuple):
    """The objects that every step strategy uses."""

    iteration: Iteration
    group: WorkerGroup
    flat: FlatModel
    loop: WorkerLoop
    values: Values
    rule: WorkerRule


class Blocking:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.iteration, self.group, self.flat, self.loop, self.values, self.rule = parts
        self._chunks = self.group.partition.chunks
        self._waited_s = 0.0

    # -- while the script computes -------------------------------------------------------------

    is_under_way: bool = False
    """True if other workers of the group still owe something during backward."""
    is_half_pushed: bool = False
    """True if gradients of an iteration have left whose ``step()`` has not come."""
    may_be_cut: bool = True
    """True if a collective may come now: it would harm no gradient."""
    num_late: int = 0
    """Steps that have returned before their replies."""
    is_pending: bool = False
    """True if the last step has left replies to be put in place."""
    lands_aside: bool = False
    """True if replies always land in memory next to the parameters."""

    def require_may_be_cut(self, call: str) -> None:
        """Raises :class:`UsageError` if ``call`` would harm a gradient."""

    def use_batch(self) -> None:
        """A loader of psdist's has handed out a batch to train with."""

    def record_use(self) -> None:
        """A forward pass uses the parameters in memory."""
        self.values.record_use(self.iteration.clock)

    def push_ready(self) -> bool:
        """Push the chunks whose gradients are complete; return True if there were any. Called by
        the driver of the loop during backward."""
        return False

    def finish_reads(self) -> None:
        """Put the values in place that readers await; whichever thread has the loop."""

    def take_over(self) -> None:
        """Give the loop to the script's thread. Raises what went wrong during backward."""

    def resume(self) -> None:
        """The script has used the loop and computes again."""

    def staleness(self) -> int:
        """Return the largest staleness of the values in memory."""
        return self.values.staleness(self.iteration.clock)

    @property
    def waited_s(self) -> float:
        """Seconds in which this worker has waited for replies."""
        return self._waited_s

    def counts(self) -> dict[str, Any]:
        """Return counts by their names in :class:`WorkerStatistics`."""
        return {"rounds_missed": self.rule.num_missed}

    # -- step(), until the gradients are reduced -----------------------------------------------

    num_begun: int = 0
    """Operations of the group that were begun during backward."""
    is_changed: bool = False
    is_retermed: bool = False
    backward_s: float = 0.0
    """See :class:`Row`."""

    def describe(self) -> str:
        """Return the name of the step for people."""
        return f"iteration {self.iteration.clock}"

    @property
    def consequence(self) -> str:
        """The consequence of an error in the gradients, for its text."""
        return f"nothing{' more' if self.is_half_pushed else ''} was pushed"

    def before_step(self) -> Generator[Wait, None, None]:
        """Take over the loop, and wait for what the last step has left to other groups."""
        yield from ()

    def require_ready(self) -> None:
        """Raises :class:`UsageError` if the step may not be made of what is in memory."""

    def require_clippable(self, max_norm: float) -> None:
        """Raises :class:`UsageError` if the script may not clip a step's gradient."""

    def collect(
        self,
        now: Terms,  # noqa: ARG002 - strategies that send early compare
        *,
        scale: float,
        is_skipped: bool,  # noqa: ARG002
        has_scaler: bool,  # noqa: ARG002
        is_clipped: bool,  # noqa: ARG002
    ) -> Collection[int]:
        """Collect the gradients, times ``scale``; return the pieces that have none.

        ``is_skipped``: a GradScaler has found an overflow; ``has_scaler``: there is one;
        ``is_clipped``: job.clip_grad_norm_ clips. Raises :class:`UsageError` if the terms ``now``
        differ from those under which a part has left.
        """
        return self.flat.collect_gradients(scale=scale)

    def non_finite(self) -> Sequence[int]:
        """Return the pieces whose collected gradient holds NaN or infinity."""
        return self.flat.non_finite()

    def reduce(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """Reduce the gradients of a step. ``table``: the row of each worker, by place; ``mine``: of
        this one, with its hyperparameters."""
        return self.reduce_slice(table, mine)

    def reduce_slice(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, Reduced]:
        """Reduce this worker's slice to the weighted mean of the group, clipped if the rows of
        ``table`` say so. Raises :class:`HyperparameterError`, :class:`UsageError`."""
        group, clock, hyper = self.group, self.iteration.clock, mine.hyper
        if not (yield from self.catch_up(table)):
            hyper = yield from group.hyperparameters(table, hyper, clock=clock)
        total = sum(row.weight for row in table)
        is_usable = all(row.is_finite and not row.is_skipped for row in table)
        reduced = Reduced(
            weight=mine.weight,
            group_weight=total if is_usable else 0.0,
            hyper=hyper,
            absent=absent_of(table),
            is_skipped=not (is_usable and total),
        )
        max_norm = max_norm_of(table, clock=clock)
        if reduced.is_skipped:
            return reduced
        try:
            yield from self.average(mine.weight / total)
        except GroupReformedError:
            # A gradient that is in no sum yet is dropped; pushes of other workers count.
            reduced.is_skipped, reduced.group_weight = True, 0.0
            return reduced
        if max_norm:
            reduced.norm = yield from group.clip(self.own_parts(), max_norm)
        return reduced

    def catch_up(self, table: Sequence[Row]) -> Generator[Wait, None, bool]:  # noqa: ARG002
        """Begin what any worker of ``table`` has begun during backward, if all gradients are
        finite. Return True if gradients have left: the group has compared hyperparameters then."""
        yield from ()
        return False

    def average(self, share: float) -> Generator[Wait, None, None]:
        """Reduce this worker's slice to the mean of the group. ``share``: the part of this worker
        in the mean; the shares of all workers add up to 1."""
        channel = self.group.channel
        if channel.size > 1:
            for flat in self.flat.gradients:
                flat.mul_(share)
            pending = channel.reduce_scatter(self.flat.gradients, self.group.spans)
            yield from in_group(pending, CALL)

    def own_parts(self) -> Sequence[torch.Tensor]:
        """Return the group's gradient of each chunk of this worker."""
        return [self.flat.gradient_part(self._chunks[chunk]) for chunk in self.group.mine]

    def note_clipped(self) -> None:
        """job.clip_grad_norm_ has reduced the gradients of this step."""
        self.flat.note_gradients()

    def require_as_clipped(self) -> None:
        """Raises :class:`UsageError` if gradients have changed since :meth:`note_clipped`."""
        if self.flat.gradients_changed():
            raise UsageError(
                f"{self.describe()}: gradients have changed since job.clip_grad_norm_, which has "
                "reduced them in the group already; call it last before optimizer.step()"
            )

    # -- step(), from the reduced gradients to the next parameters -----------------------------

    def end_step(self, reduced: Reduced, *, is_skipped: bool) -> Generator[Wait, None, None]:  # noqa: ARG002
        """End a step with the group's gradient. ``is_skipped``: the step of this worker is."""
        yield from self.rule.before_push(self.iteration.clock, reduced)
        yield from self.exchange(reduced)

    def exchange(self, reduced: Reduced) -> Generator[Wait, None, None]:
        """Push and end the iteration; the values may come later."""
        self._push(reduced)
        return self._bring()

    def _push(self, reduced: Reduced) -> None:
        self.values.look_for_writes()
        terms, empty = self._terms_of(reduced), self._without_gradient(reduced)
        self._to_host(terms, reduced, without=empty)
        empty |= self.loop.pushes.encoding.skipped(
            clock=terms.clock, hyper=terms.hyper, weight=terms.weight, empty=empty
        )
        self._record_push(reduced, empty)
        self.loop.begin_push(
            clock=terms.clock,
            hyper=terms.hyper,
            absent=sorted(reduced.absent),
            weight=terms.weight,
            empty=empty,
        )

    def _terms_of(self, reduced: Reduced) -> Terms:
        clock = self.iteration.clock
        return Terms(clock=clock, hyper=reduced.hyper, weight=reduced.group_weight)

    def _without_gradient(self, reduced: Reduced) -> set[int]:
        """Return the chunks of this worker that are pushed without bytes."""
        mine, absent = self.group.mine, reduced.absent
        if reduced.is_skipped:
            return set(mine)
        if not absent:
            return set()
        return {
            chunk
            for chunk in mine
            if all(segment.piece in absent for segment in self._chunks[chunk].segments)
        }

    def _to_host(self, terms: Terms, reduced: Reduced, *, without: Collection[int]) -> None:
        """Put the gradients of this worker's chunks, except ``without``, where pushes take them."""
        leaving = [chunk for chunk in self.group.mine if chunk not in without]
        pushes = self.loop.pushes.encoding.on_device
        if pushes is None:
            self.flat.gradients_to_host(self._chunks[chunk] for chunk in leaving)
            return
        computed = [self.flat.mark()] if leaving else []
        for chunk in leaving:  # each is waited for when it leaves
            pushes.begin(
                chunk,
                clock=terms.clock,
                hyper=terms.hyper,
                weight=terms.weight,
                absent=reduced.absent,
                after=computed,
            )

    def _record_push(self, reduced: Reduced, empty: Collection[int]) -> None:
        self.values.uses.record_push(
            self.iteration.clock, reduced.weight, reduced.group_weight, empty
        )

    def _bring(self) -> Generator[Wait, None, None]:
        """Wait for the replies, put them in place, and end the iteration."""
        loop, iteration = self.loop, self.iteration
        pushed_s = loop.now_s()
        yield loop.wait_for_replies()
        next_clock = yield from self.rule.next_clock(iteration.clock)
        self._waited_s += loop.now_s() - pushed_s
        yield from self.values.take_new(CALL, self.place)
        self._end_iteration(next_clock)

    def _end_iteration(self, next_clock: int) -> None:
        iteration = self.iteration
        iteration.is_open = False
        self.values.commit(iteration.clock)
        iteration.clock = next_clock
        self._end()
        iteration.on_end()

    def _end(self) -> None:
        """The iteration has ended, and the loop is idle."""

    def place(self, chunks: Sequence[int]) -> None:
        """Put the replies about ``chunks``, which have landed, in place."""
        self.flat.host_to_device(self._chunks[chunk] for chunk in chunks)

    def finish(self) -> Generator[Wait, None, None]:
        """Finish what the last step has left to be done; together in the group."""
        yield from ()

    def land(self) -> Generator[Wait, None, None]:
        """Wait for the part of :meth:`finish` that other groups owe."""
        yield from ()

    def after_replies(self) -> None:
        """The parameters in memory are the servers'."""

    # -- around collectives, and at the end ----------------------------------------------------

    def end_round(self, call: str, *, is_cut: bool = True) -> Generator[Wait, None, None]:  # noqa: ARG002
        """End the round of several steps that is under way. ``call``: what the script calls;
        ``is_cut``: some of the round's steps were not made."""
        yield from ()

    def meet_dropped(self, call: str) -> Generator[Wait, None, None]:  # noqa: ARG002
        """The script enters ``call``, and may have dropped the gradients of an iteration. Raises
        :class:`UsageError` if some of them have left."""
        yield from ()

    def meet_at_end(self) -> Generator[Wait, None, None]:
        """The script ends. Raises :class:`UsageError` if gradients have left of an iteration
        without ``step()``."""
        yield from ()

    def stop(self) -> None:
        """Release the model: the job has ended."""
