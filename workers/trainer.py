"""One iteration of a worker in a parameter set, from ``p.grad`` to the next parameters in place.

This is what ``optimizer.step()`` runs: collect -> agree in the group -> reduce this worker's slice
in the group -> push it and receive it back -> gather the slices of the group. Everything leaves
in ``step()``, so accumulation, clipping and looking at gradients behave as in plain PyTorch; but
for what psdist.workers.early.overlap has sent during backward.

    trainer = make_trainer(loop, group, partition=...)     # psdist.workers.assembly
    trainer.step(gradient_scale=1.0, is_skipped=False)

The same without blocking, for an actor of a virtual network:

    for wait in trainer.iterate(gradient_scale=1.0, is_skipped=False):
        ...                                   # until wait.is_done()

It decides nothing about consistency: a reply that the mode does not allow yet does not come.

Longer than other modules: an iteration that a step ends, one that the script drops and one that
is another worker's are the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Final, Literal

import torch

from psdist.codecs.feedback import CodingErrors
from psdist.errors import NonFiniteGradientError, UsageError
from psdist.history.writers import WorkerHistory
from psdist.protocol.ids import describe_workers
from psdist.protocol.partition import Partition, slices_of_the_living
from psdist.protocol.send_order import SendOrder
from psdist.workers.batches import Batches, Storage
from psdist.workers.early.early_pushes import EarlyPushes, Terms
from psdist.workers.early.group_overlap import GroupOverlap, Sums
from psdist.workers.early.group_pushes import GroupPushes
from psdist.workers.early.overlap import Overlap
from psdist.workers.early.progress import Driver
from psdist.workers.group.buckets import Buckets
from psdist.workers.group.channel import GroupChannel, Pending
from psdist.workers.late.pipelined import Pipelined
from psdist.workers.late.steps import LateSteps
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.reduction import Reduced, Reduction
from psdist.workers.step_table import Row, StepTable, in_group, set_of
from psdist.workers.values import Values

NON_FINITE_REMEDY: Final = (
    'Lower the learning rate, or set training.on_nonfinite = "skip" to leave such iterations out'
)


@dataclass(frozen=True, kw_only=True)
class WorkerStatistics:
    """A snapshot of one set; ``staleness`` counts this worker's chunk uses by staleness."""

    clock: int
    samples: int
    bytes_pushed: int
    bytes_pulled: int
    max_staleness_seen: int
    staleness: dict[int, int]
    early_pushes: int = 0
    """Chunks that left during backward."""
    local_steps: int = 0
    """Of the script's own optimizer, where a round has several."""
    rounds_cut: int = 0
    """Rounds that ended before all of their local steps were made."""
    rounds_missed: int = 0
    """Rounds that had closed without this worker's group, or that it has left out behind one."""
    bytes_before_coding: tuple[int, int] = (0, 0)
    """What pushes and pulls that a codec has coded would be without it."""
    coding_missed: tuple[float, ...] = ()
    """Squares of what codecs have left out of pushes, by bins of iterations,"""
    coding_wanted: tuple[float, ...] = ()
    """and of all that was to be pushed."""
    pushes_skipped: int = 0
    """Of chunks, that were left for later as a whole."""
    encodes_there: bool = False
    """Whether gradients are encoded where they lie, which is not on the host."""
    bytes_to_host: int = 0
    """Copied from a device for pushes."""

    def as_told(self) -> dict[str, Any]:
        """As a control message carries it."""
        return {**asdict(self), "staleness": {str(key): n for key, n in self.staleness.items()}}


class Trainer:
    def __init__(
        self,
        *,
        worker: int,
        partition: Partition,
        owners: Sequence[int],
        flat: FlatModel,
        loop: WorkerLoop,
        group: GroupChannel,
        order: Sequence[int],
        look_for_changes: Callable[[FlatModel, int], None],
        hyperparameters: Callable[[], bytes],
        on_nonfinite: Literal["error", "skip"],
        max_norm: float,
        clips_itself: bool,
        history: WorkerHistory | None,
        on_iteration: Callable[[], None] = lambda: None,
        overlap: Literal["auto", "strict", "off", "full"] = "off",
        progress: Driver | None = None,
        is_training: Callable[[], bool] = lambda: True,
        beside: GroupChannel | None = None,
        sums: Sums | None = None,
        first_clock: int = 0,
        module: torch.nn.Module | None = None,
        is_pipelined: bool = False,
        may_miss: bool = False,
        on_missed: Callable[[int], None] = lambda _rounds: None,
    ) -> None:
        """``order``: in which all groups send the chunks, none of them for ascending;
        ``look_for_changes(flat, clock)`` raises where the model is not what was prepared;
        ``hyperparameters()``: the optimizer's, packed, as they are now; ``max_norm``: to which
        every step clips, 0 for none: the group's gradient here (``clips_itself``), or the joint one
        on the servers; ``progress``: drives the loop during backward, where gradients may leave
        then, but not while the model is evaluated (``is_training()``); in a group of several
        ``beside`` reduces them, and they are pushed out of ``sums``; with overlap = full ``module``
        is the model whose parameters are awaited where they are read; ``is_pipelined``: the next
        step awaits the replies to this one's push (with overlap = off); ``may_miss``: rounds may
        close without this group, and ``on_missed(rounds)`` hears how many it leaves out behind
        such a one."""
        self.clock = first_clock
        self.is_open = False
        """Whether an iteration is under way in the group: all have agreed to it, and its values are
        not gathered."""
        self._partition = partition
        self._flat = flat
        self._loop = loop
        self._group = group
        self._steps = StepTable(group, worker=worker)
        self._look_for_changes = look_for_changes
        self._hyperparameters = hyperparameters
        self._on_nonfinite = on_nonfinite
        self._max_norm = max_norm
        self._clips_to = max_norm if clips_itself else 0.0
        self._history = history
        self._on_iteration = on_iteration
        self._may_miss = may_miss
        self._on_missed = on_missed
        self._rounds_missed = 0
        slices = partition.slices(group.size, order)
        self._first_slices = dict(zip(loop.core.seat.members, slices, strict=True))
        """By worker of the group, before any has died."""
        self._mine: Sequence[int] = slices[group.place]
        self.batches = Batches()
        self._reduced: Reduced | None = None
        self._waited_s = 0.0
        self._values = Values(partition, owners, flat, loop, group, history, slices=slices)
        self._progress = progress
        send_order = SendOrder(order, num_chunks=len(partition.chunks))
        self._in_group: GroupOverlap | None = None
        common: dict[str, Any] = {
            "partition": partition,
            "flat": flat,
            "loop": loop,
            "terms": self._terms,
            "driver": progress,
            "is_training": is_training,
            "before_gradient": self.finish_reads,
        }
        look = self._values.look_for_writes
        if beside is not None and sums is not None:
            buckets = Buckets(
                beside, partition, order, gradients=flat.gradients, sums=sums.by_chunk
            )
            self._in_group = GroupOverlap(
                overlap,
                group=group,
                slices=slices,
                sums=sums.by_chunk,
                early=GroupPushes(partition, order, flat, loop, buckets, look_for_writes=look),
                **common,
            )
        self._overlap: Overlap = self._in_group or Overlap(
            overlap,
            early=EarlyPushes(
                partition, send_order.sorted(self._mine), flat, loop, look_for_writes=look
            ),
            **common,
        )
        self._late: LateSteps | None = None
        if overlap == "full" and progress is not None and module is not None:
            self._late = LateSteps(
                partition,
                self._mine,
                flat,
                loop,
                self._values,
                module=module,
                overlap=self._overlap,
                driver=progress,
                group_size=group.size,
            )
        self._pipelined: Pipelined | None = None
        if is_pipelined and progress is not None:
            if flat.transfers.has_mirrors:
                self._values.look_as_they_land()
            self._pipelined = Pipelined(
                partition,
                self._mine,
                flat,
                loop,
                self._values,
                group,
                driver=progress,
                to_device=self._overlap.move_values,
            )
        self._reduction = Reduction(
            partition, flat, group, self._steps, slices=slices, overlap=self._in_group
        )

    # -- a group that goes on without its dead -------------------------------------------------

    def give_values(self, channel: GroupChannel, giver: int) -> Pending[None]:
        """The values of the iteration that has ended there come from place ``giver``."""
        return self._values.give(channel, giver)

    def take_over_from_the_dead(self, *, is_given_up: bool) -> None:
        """What they pushed and pulled is shared out among the members that are left.
        ``is_given_up``: the iteration under way counts only for what has been pushed of it."""
        living = self._loop.core.seat.members
        by_worker = slices_of_the_living(self._first_slices, living)
        slices = [by_worker[worker] for worker in living]
        self._mine = slices[self._group.place]
        self._values.take_slices(slices)
        self._reduction.take_slices(slices)
        self._loop.take_over(self._mine)
        if is_given_up and self.is_open and self._loop.core.clock > self.clock:
            self._loop.push_for_the_dead()

    # -- the iteration -------------------------------------------------------------------------

    def on_batch(
        self,
        num_samples: int,
        nominal: float,
        *,
        source: Hashable = None,
        storages: Iterable[Storage] = (),
    ) -> None:
        """A loader (``source``) hands out a batch, whose tensors have these storages. It weighs in
        the iteration that a forward pass over it, with its backward, belongs to."""
        self.batches.hand_out(num_samples, nominal, source=source, storages=storages)

    def record_use(self, num_samples: int = 0, storages: Iterable[Storage] = ()) -> None:
        """A forward pass, whose inputs have these storages, uses the parameters that are in memory
        now; passes over the same parameters are one use. ``num_samples``: of the pass, which count
        (but do not weigh) where the script has batches of its own."""
        if self.batches.has_counted and self._flat.is_without_gradients:
            self.batches.drop_gradients()
        self.batches.use(num_samples, storages)
        self._use_values()

    def _use_values(self) -> None:
        if self._late is not None and self._late.is_pending:
            self._late.use(self.clock)
        else:
            self._values.record_use(self.clock)

    def _terms(self) -> Terms:
        """Under which this worker would push now."""
        return Terms(clock=self.clock, hyper=self._hyperparameters(), weight=self.batches.weight)

    def push_ready(self) -> bool:
        """Push the chunks whose gradients are complete, if there are any; called by whoever drives
        the loop during backward."""
        return self._overlap.early.push_ready()

    @property
    def is_under_way(self) -> bool:
        """Whether the group's other workers owe something, during backward."""
        return self._overlap.early.is_under_way

    @property
    def may_be_cut(self) -> bool:
        """Whether a collective may come here: no gradient is under way that it would harm."""
        return True

    def require_may_be_cut(self, call: str) -> None:
        """Raises :class:`UsageError` where :attr:`may_be_cut` is False."""

    @property
    def is_half_pushed(self) -> bool:
        """Whether gradients of an iteration have left whose step has not come."""
        return self._overlap.is_half_pushed

    def take_over(self) -> None:
        """From here on the loop is this thread's. Raises what has gone wrong during backward."""
        if self._progress is not None:
            self._progress.take_over()

    def finish_reads(self) -> None:
        """The values that readers await are in place."""
        if self._late is not None:
            self._late.finish_now()

    def finish_late(self) -> None:
        """What the last step() has left to be done is done; before whatever needs it."""
        self.finish_reads()
        if self._pipelined is not None and self._pipelined.is_pending:
            self.take_over()
            for wait in self._finish_late():
                self._loop.carry_on(wait)

    def _finish_late(self) -> Generator[Wait, None, None]:
        """As :meth:`finish_late`; the loop is the script's."""
        yield from self._land_late()
        if self._pipelined is not None:
            yield from self._pipelined.gather()

    def land_late(self) -> None:
        """What of :meth:`finish_late` waits for other groups; of its own group for nobody."""
        self.take_over()
        for wait in self._land_late():
            self._loop.carry_on(wait)

    def _land_late(self) -> Generator[Wait, None, None]:
        """As :meth:`land_late`; the loop is the script's."""
        if self._late is not None:
            yield from self._late.finish()
        if self._pipelined is not None and self._pipelined.is_pending:
            self._loop.begin_waiting(self.clock - 1)
            yield from self._pipelined.land()

    def resume(self) -> None:
        """The script has used the loop, and computes again."""
        if self._late is not None:
            self._late.resume()
        if self._pipelined is not None:
            self._pipelined.resume()

    def step(self, gradient_scale: float, is_skipped: bool, has_scaler: bool = False) -> None:
        """End iteration ``clock``: push, and bring the parameters for the next one.

        ``gradient_scale`` multiplies the gradients; ``is_skipped``: this worker has none to give
        (GradScaler found an overflow); ``has_scaler``: there is one, which decides that in step().
        Raises :class:`NonFiniteGradientError`, :class:`HyperparameterError` where the group's
        workers disagree, and :class:`UsageError` where the model is not any more what was prepared.
        """
        for wait in self.iterate(gradient_scale, is_skipped, has_scaler):
            self._loop.carry_on(wait)

    def iterate(
        self, gradient_scale: float, is_skipped: bool, has_scaler: bool = False
    ) -> Iterator[Wait]:
        """As :meth:`step`, but hands out what there is to wait for."""
        self._overlap.compare()
        self.take_over()
        yield from self._land_late()
        self._loop.begin_waiting(self.clock)
        if self._reduced is None:
            yield from self._reduce(gradient_scale, is_skipped=is_skipped, has_scaler=has_scaler)
        elif gradient_scale != 1.0:
            raise UsageError(
                f"iteration {self.clock}: job.clip_grad_norm_ has clipped gradients that a "
                "GradScaler had scaled; call scaler.unscale_(optimizer) before it"
            )
        elif self._flat.gradients_changed():
            raise UsageError(
                f"iteration {self.clock}: gradients have changed since job.clip_grad_norm_, which "
                "has reduced them in the group already; call it last before optimizer.step()"
            )
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        if reduced.problem and not is_skipped and self._on_nonfinite == "error":
            more = " more" if self._overlap.is_half_pushed else ""
            self.is_open = False
            raise NonFiniteGradientError(
                f"iteration {self.clock}: the gradient of {reduced.problem} holds NaN or infinity; "
                f"nothing{more} was pushed. {NON_FINITE_REMEDY}"
            )
        yield from self._exchange(reduced, may_end_later=True)

    def clip(self, max_norm: float) -> float:
        """Reduce this iteration's gradients in the group, and clip what comes of it: the push of
        the next step. Returns the norm before, NaN where a gradient of the group is not finite.

        L2, as torch.nn.utils.clip_grad_norm_: coefficient min(1, max_norm / (norm + 1e-6)). Raises
        :class:`UsageError` where workers of the group clip differently.
        """
        if self._max_norm:
            raise UsageError(
                f"job.prepare(max_grad_norm={self._max_norm:g}) clips in every step; leave "
                "job.clip_grad_norm_ out"
            )
        if self._reduced is not None:
            raise UsageError(
                f"iteration {self.clock}: job.clip_grad_norm_ was called a second time; it is "
                "called once, last before optimizer.step()"
            )
        self._overlap.compare()
        self.take_over()
        self._loop.begin_waiting(self.clock)
        for wait in chain(self._land_late(), self._reduce(1.0, clip_to=max_norm)):
            self._loop.carry_on(wait)
        self._flat.note_gradients()
        assert self._reduced is not None
        return self._reduced.norm

    def sit_out(self, others: Sequence[Trainer] = ()) -> None:
        """This worker has no more data in this pass: take part with weight 0 in the iterations of
        the group's others, until they have none either. ``others``: the trainers of this worker's
        other parameter sets, in order behind this one, the first's."""
        for wait in self.iterate_for_others(others):
            self._loop.carry_on(wait)

    def iterate_for_others(self, others: Sequence[Trainer] = ()) -> Iterator[Wait]:
        """As :meth:`sit_out`, but hands out what there is to wait for."""
        trainers = (self, *others)
        for trainer in trainers:
            yield from trainer._land_late()
        while True:
            self._loop.begin_waiting(self.clock)
            begun = [each._overlap.num_begun for each in trainers]
            mine = Row(weight=0.0, set_index=0, hyper=b"", has_ended=True, begun=begun)
            table = yield from self._steps.gather(mine)
            if all(row.has_ended for row in table):
                return
            stepped = trainers[set_of(table)]
            yield from stepped._take_part(table, mine)

    def _take_part(self, table: Sequence[Row], mine: Row) -> Iterator[Wait]:
        self.is_open = True
        yield from self._land_late()
        self._flat.clear_gradients()
        reduced = yield from self._reduction.run(table, mine, clock=self.clock)
        if self._on_nonfinite == "error" and not all(row.is_finite for row in table):
            self.is_open = False
            return  # the others say so, and nothing is pushed
        reduced.hyper = reduced.hyper or self._hyperparameters()  # the others may have died
        self._use_values()
        yield from self._exchange(reduced)

    def _reduce(
        self,
        gradient_scale: float,
        *,
        is_skipped: bool = False,
        has_scaler: bool = False,
        clip_to: float | None = None,
    ) -> Generator[Wait, None, None]:
        """``clip_to``: the script clips; whether an overflow is skipped its scaler says later."""
        may_be_skipped = clip_to is not None
        self._look_for_changes(self._flat, self.clock)
        self.batches.end_forwards()
        self._values.record_use(self.clock)
        absent, terms = self._overlap.collect(
            self._terms(),
            scale=gradient_scale,
            is_skipped=is_skipped,
            has_scaler=has_scaler,
            is_clipped=clip_to is not None,
        )
        non_finite = [] if is_skipped else self._overlap.non_finite()
        mine = Row(
            weight=terms.weight,
            set_index=self._loop.core.set_index,
            hyper=terms.hyper,
            is_skipped=is_skipped or (may_be_skipped and bool(non_finite)),
            is_finite=may_be_skipped or not non_finite,
            max_norm=self._clips_to if clip_to is None else clip_to,
            absent=frozenset(absent),
            num_begun=self._overlap.num_begun,
            is_changed=self._overlap.is_changed,
            is_retermed=self._overlap.is_retermed,
            backward_s=self._overlap.backward_s,
        )
        table = yield from self._steps.gather(mine)
        set_of(table)
        self.is_open = True
        self._reduced = yield from self._reduction.run(table, mine, clock=self.clock)
        self._reduced.problem = self._problem(non_finite, table)

    def _problem(self, non_finite: Sequence[int], table: Sequence[Row]) -> str:
        """Whose gradient is not finite; nothing where all are."""
        if non_finite:
            name = self._partition.pieces[non_finite[0]].name
            more = f" (and {len(non_finite) - 1} more)" if len(non_finite) > 1 else ""
            return f"{name}{more}"
        bad = [row.worker for row in table if not row.is_finite]
        return f"{describe_workers(bad)}, in this worker's group," if bad else ""

    def _exchange(
        self, reduced: Reduced, *, may_end_later: bool = False
    ) -> Generator[Wait, None, None]:
        """Push and bring; the iteration is over, though values may be brought later."""
        if self._in_group is not None:
            yield from self._in_group.settle_in_group(
                absent=reduced.absent, is_skipped=reduced.is_skipped
            )
        if self._pipelined is not None:
            yield from self._pipelined.before_push()
            self._begin_push(reduced)
            self._end_iteration()
            self._on_iteration()
            self._pipelined.begin()
            return
        self._begin_push(reduced)
        late = self._late
        if late is not None and may_end_later and late.may_begin():
            self._end_iteration()
            self._on_iteration()
            late.begin(self.clock - 1)
            return
        yield from self._await_replies("optimizer.step")
        self._on_iteration()

    def _await_replies(self, call: str) -> Generator[Wait, None, None]:
        """Until the new parameters are in place."""
        pushed_s = self._loop.now_s()
        yield self._loop.wait_for_replies()
        joins_at = 0
        if self._may_miss:
            joins_at = yield from self._joining()
        if joins_at:
            yield from self._miss_until(joins_at)
        self._waited_s += self._loop.now_s() - pushed_s
        yield from self._values.take_new(call, self._overlap.move_values)
        self.is_open = False
        self._end_iteration()
        self.clock = max(self.clock, joins_at)

    def _joining(self) -> Generator[Wait, None, int]:
        """The round with which the group goes on, if it has missed this one; else 0. Only who
        pushes something has been told."""
        joins_at = self._loop.core.transfers.take_joining()
        if self._group.size == 1:
            return joins_at
        call = "optimizer.step"
        told = yield from in_group(self._group.agree(call, [joins_at]), call)
        return max(int(each) for (each,) in told)

    def _miss_until(self, joins_at: int) -> Generator[Wait, None, None]:
        """This round had closed without the group, which begins round ``joins_at`` together with
        the others: the parameters of that are brought."""
        skipped = range(self.clock + 1, joins_at)
        self._rounds_missed += 1 + len(skipped)
        if self._history is not None:
            for clock in skipped:
                self._history.push(clock, 0.0, 0.0, set(self._mine), len(self._mine))
        self._loop.core.transfers.miss_until(joins_at)
        self._on_missed(len(skipped))
        self._loop.begin_pull(clock=joins_at, chunks=self._mine, is_fresh=False)
        yield self._loop.wait_for_replies()

    def _end_iteration(self) -> None:
        self.batches.end_iteration()
        self._end_clock()

    def _end_clock(self) -> None:
        self._values.commit(self.clock)
        self.clock += 1
        self._overlap.end_iteration()

    def _begin_push(self, reduced: Reduced) -> None:
        weight, gone = reduced.group_weight, reduced.absent
        chunks = self._partition.chunks
        empty = {
            chunk
            for chunk in self._mine
            if reduced.is_skipped or (gone and all(s.piece in gone for s in chunks[chunk].segments))
        }
        self._overlap.absent = gone
        terms = Terms(clock=self.clock, hyper=reduced.hyper, weight=weight)
        if self._loop.core.is_pushing:
            empty = self._overlap.settle(empty, absent=gone, is_skipped=reduced.is_skipped)
            # What is left leaves under the terms of what has left.
            terms = self._overlap.early.terms or terms
            self._overlap.to_host(self._mine, terms, empty=empty, absent=gone)
            self._record_push(reduced.weight, weight, empty)
            self._loop.finish_push(empty=empty, absent=sorted(gone))
            return
        self._values.look_for_writes()
        self._overlap.to_host(self._mine, terms, empty=empty, absent=gone)
        empty |= self._loop.pushes.encoding.skipped(
            clock=self.clock, hyper=reduced.hyper, weight=weight, empty=empty
        )
        self._record_push(reduced.weight, weight, empty)
        self._loop.begin_push(
            clock=self.clock,
            hyper=reduced.hyper,
            absent=sorted(gone),
            weight=weight,
            empty=empty,
        )

    def _record_push(self, own: float, weight: float, empty: Collection[int]) -> None:
        if self._history is not None:
            self._history.push(self.clock, own, weight, empty, len(self._mine))

    def close(self) -> None:
        """The script ends. Raises :class:`UsageError` if gradients have left of an iteration that
        sees no step: servers may have applied them."""
        self.take_over()
        self.finish_late()
        for wait in self._overlap.meet_at_end():
            self._loop.carry_on(wait)
        self._overlap.stop()
        if self._late is not None:
            self._late.stop()

    def end_dropped(self, call: str) -> None:
        """The script calls ``call``, which others may come to after their step() only: an iteration
        whose gradients it has dropped has not begun, and no worker waits for it. Raises
        :class:`UsageError` if some of them have left."""
        self.finish_late()
        if self._in_group is None and self._group.size > 1:
            return
        for wait in self._overlap.meet_dropped(call):
            self._loop.carry_on(wait)

    def pull(self) -> None:
        """The freshest parameters that the mode allows; every worker of the group calls it.

        Those in memory are allowed, so this waits for nobody, but for groups that were suspended
        in a collective while this one went on: they count again, and the next use is of these.
        """
        for wait in self.bring():
            self._loop.carry_on(wait)

    def bring(self) -> Iterator[Wait]:
        """As :meth:`pull`, but hands out what there is to wait for."""
        yield from self._finish_late()
        self._loop.begin_waiting(self.clock)
        yield from in_group(self._group.agree("pull"), "pull")
        self._values.look_for_writes()
        self._loop.begin_pull(clock=self.clock, chunks=self._mine, is_fresh=False)
        yield self._loop.wait_for_replies()
        pipelined = self._pipelined
        move = self._overlap.move_values if pipelined is None else pipelined.move
        yield from self._values.take_new("pull", move)

    def show(self, pieces: Sequence[torch.Tensor]) -> None:
        """See :meth:`Values.show`."""
        self._values.show(pieces)

    def set_values(self) -> None:
        """The parameters in this worker's memory become the servers'; on the chief, while everybody
        is in a collective."""
        for wait in self.begin_setting_values():
            self._loop.carry_on(wait)

    def begin_setting_values(self) -> Iterator[Wait]:
        """As :meth:`set_values`, but hands out what there is to wait for."""
        yield from self._finish_late()
        self._flat.values_to_host()
        self._loop.begin_load(clock=self.clock)
        yield self._loop.wait_for_replies()

    @property
    def flat(self) -> FlatModel:
        """The memory that the model lies in."""
        return self._flat

    @property
    def num_samples(self) -> int:
        """Samples in this worker's finished iterations."""
        return self.batches.samples

    @property
    def late_steps(self) -> int:
        """Steps that have returned before their replies had come."""
        return self._late.num_late if self._late is not None else 0

    @property
    def coding_error(self) -> float:
        """||p - C(p)|| / ||p|| of what this worker has pushed in the iteration before; 0 without
        codecs."""
        encoder = self._loop.pushes.encoding.encoder
        return encoder.errors.of_newest(self.clock - 1) if encoder is not None else 0.0

    @property
    def waited_s(self) -> float:
        """Seconds in which this worker has pushed and waited for replies."""
        return self._waited_s + sum(
            each.waited_s for each in (self._late, self._pipelined) if each is not None
        )

    @property
    def staleness(self) -> int:
        """Of what is in memory, at its stalest; before values have come, of the last iteration."""
        is_pending = self._late is not None and self._late.is_pending
        return self._values.staleness(self.clock - is_pending)

    def statistics(self) -> WorkerStatistics:
        counts = self._loop.core.counts()
        pushes = self._loop.pushes.encoding
        encoder = pushes.encoder
        errors = encoder.errors if encoder is not None else CodingErrors()
        return WorkerStatistics(
            clock=self.clock,
            samples=self.num_samples,
            bytes_pushed=counts.bytes_pushed,
            bytes_pulled=counts.bytes_pulled,
            max_staleness_seen=max(self._values.staleness_seen, default=0),
            staleness=dict(sorted(self._values.staleness_seen.items())),
            early_pushes=self._overlap.early.num_pushed,
            rounds_missed=self._rounds_missed,
            bytes_before_coding=(
                pushes.bytes_before_coding,
                self._loop.replies.bytes_before_coding,
            ),
            coding_missed=tuple(errors.missed),
            coding_wanted=tuple(errors.wanted),
            pushes_skipped=encoder.num_skipped if encoder is not None else 0,
            encodes_there=pushes.on_device is not None,
            bytes_to_host=self._flat.num_bytes_to_host
            + (encoder.coder.num_bytes_to_host if encoder is not None else 0),
        )
