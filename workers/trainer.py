"""One iteration of a worker in a parameter set, from ``p.grad`` to the next parameters in place.

This is what ``optimizer.step()`` runs: collect -> agree in the group -> reduce this worker's slice
in the group -> push it and receive it back -> gather the slices of the group. Everything leaves
in ``step()``, so accumulation, clipping and looking at gradients behave as in plain PyTorch.

    trainer = make_trainer(loop, group, partition=...)     # psdist.workers.assembly
    trainer.step(gradient_scale=1.0, is_skipped=False)

The same without blocking, for an actor of a virtual network:

    for wait in trainer.iterate(gradient_scale=1.0, is_skipped=False):
        ...                                   # until wait.is_done()

It decides nothing about consistency: a reply that the mode does not allow yet does not come.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch

from psdist.errors import NonFiniteGradientError, UsageError
from psdist.history.writers import WorkerHistory
from psdist.protocol.header import NEVER
from psdist.protocol.ids import describe_workers
from psdist.protocol.partition import Partition, Span, runs_of
from psdist.workers.group.channel import GroupChannel
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.step_table import Row, StepTable, in_group, max_norm_of, set_of
from psdist.workers.uses import Uses

_NON_FINITE_REMEDY: Final = (
    'Lower the learning rate, or set on_nonfinite = "skip" to leave such iterations out'
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

    def as_told(self) -> dict[str, Any]:
        """As a control message carries it."""
        return {**asdict(self), "staleness": {str(key): n for key, n in self.staleness.items()}}


@dataclass(slots=True, kw_only=True)
class _Reduced:
    """An iteration between the reduction in the group and the push."""

    weight: float
    """This worker's."""
    group_weight: float
    hyper: bytes
    absent: frozenset[int]
    """Pieces of which no worker of the group has a gradient."""
    norm: float = math.nan
    """Of the group's gradient before it was clipped, where it was."""
    problem: str = ""
    """Why nothing may be pushed, if ``on_nonfinite`` is an error."""


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
    ) -> None:
        """``order``: in which all groups send the chunks, none of them for ascending;
        ``look_for_changes(flat, clock)`` raises where the model is not what was prepared;
        ``hyperparameters()``: the optimizer's, packed, as they are now; ``max_norm``: to which
        every step clips, 0 for none: the group's gradient here (``clips_itself``), or the joint one
        on the servers."""
        self.clock = 0
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
        slices = partition.slices(group.size, order)
        self._mine = slices[group.place]
        self._batch: tuple[int, float] = (0, 0.0)
        """(samples, samples of a full batch) handed out and not yet used."""
        self._has_loader = False
        self._reduced: _Reduced | None = None
        self._samples_in_iteration = 0
        self._weighed_in_iteration = 0
        self._nominal_in_iteration = 0.0
        self._samples = 0
        self._waited_s = 0.0
        # Of what is in memory now.
        self._min_done = [NEVER] * len(self._mine)
        self._spans = [partition.spans(chunks) for chunks in slices]
        # With the versions behind the parameters.
        num_flats = len(flat.values)
        self._recorded_spans = [
            (*spans, *(Span(num_flats, 2 * run.start, 2 * run.stop) for run in runs_of(chunks)))
            for spans, chunks in zip(self._spans, slices, strict=True)
        ]
        self._uses = Uses(partition, flat, owners, history)

    # -- the iteration -------------------------------------------------------------------------

    def on_batch(self, num_samples: int, nominal: float) -> None:
        """The loader hands out a batch: a short one weighs less. It counts once a forward pass
        with gradients (or the step) follows; the batches of an evaluation do not."""
        self._batch = num_samples, nominal
        self._has_loader = True

    def record_use(self, num_samples: int = 0) -> None:
        """A forward pass uses the parameters that are in memory now. It counts when the iteration
        ends in a step; passes over the same parameters are one use. ``num_samples``: of the pass,
        which count (but do not weigh) where the script has batches of its own."""
        self._samples_in_iteration += self._batch[0] if self._has_loader else num_samples
        self._weighed_in_iteration += self._batch[0]
        self._nominal_in_iteration += self._batch[1]
        self._batch = 0, 0.0
        self._uses.record(self._staleness_by_chunk)

    def _staleness_by_chunk(self) -> Counter[int]:
        return Counter(max(0, self.clock - min_done) for min_done in self._min_done)

    def step(self, gradient_scale: float, is_skipped: bool) -> None:
        """End iteration ``clock``: push, and bring the parameters for the next one.

        ``gradient_scale`` multiplies the gradients; ``is_skipped``: this worker has none to give
        (GradScaler found an overflow). Raises :class:`NonFiniteGradientError`,
        :class:`HyperparameterError` where the group's workers disagree, and :class:`UsageError`
        where the model is not any more what was prepared.
        """
        for wait in self.iterate(gradient_scale, is_skipped):
            self._loop.carry_on(wait)

    def iterate(self, gradient_scale: float, is_skipped: bool) -> Iterator[Wait]:
        """As :meth:`step`, but hands out what there is to wait for."""
        if self._reduced is None:
            yield from self._reduce(gradient_scale, is_skipped=is_skipped)
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
            raise NonFiniteGradientError(
                f"iteration {self.clock}: the gradient of {reduced.problem} holds NaN or infinity; "
                f"nothing was pushed. {_NON_FINITE_REMEDY}"
            )
        yield from self._exchange(reduced)

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
        for wait in self._reduce(1.0, clip_to=max_norm):
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
        mine = Row(weight=0.0, set_index=0, hyper=b"", has_ended=True)
        while True:
            table = yield from self._steps.gather(mine)
            if all(row.has_ended for row in table):
                return
            stepped = trainers[set_of(table, self._loop.core.seat.members)]
            yield from stepped._take_part(table, mine)

    def _take_part(self, table: Sequence[Row], mine: Row) -> Iterator[Wait]:
        self.record_use()
        self._flat.clear_gradients()
        yield from self._exchange((yield from self._reduce_rows(table, mine)))

    def _reduce(
        self, gradient_scale: float, *, is_skipped: bool = False, clip_to: float | None = None
    ) -> Generator[Wait, None, None]:
        """``clip_to``: the script clips; whether an overflow is skipped its scaler says later."""
        may_be_skipped = clip_to is not None
        self._look_for_changes(self._flat, self.clock)
        self.record_use()
        absent = self._flat.collect_gradients(scale=gradient_scale)
        non_finite = [] if is_skipped else self._flat.non_finite()
        nominal = self._nominal_in_iteration
        mine = Row(
            weight=self._weighed_in_iteration / nominal if nominal else 1.0,
            set_index=self._loop.core.set_index,
            hyper=self._hyperparameters(),
            is_skipped=is_skipped or (may_be_skipped and bool(non_finite)),
            is_finite=may_be_skipped or not non_finite,
            max_norm=self._clips_to if clip_to is None else clip_to,
            absent=frozenset(absent),
        )
        table = yield from self._steps.gather(mine)
        set_of(table, self._loop.core.seat.members)
        self._reduced = yield from self._reduce_rows(table, mine)
        if non_finite:
            name = self._partition.pieces[non_finite[0]].name
            more = f" (and {len(non_finite) - 1} more)" if len(non_finite) > 1 else ""
            self._reduced.problem = f"{name}{more}"
        elif not all(row.is_finite for row in table):
            members = zip(self._loop.core.seat.members, table, strict=True)
            who = describe_workers(worker for worker, row in members if not row.is_finite)
            self._reduced.problem = f"{who}, in this worker's group,"

    def _reduce_rows(self, table: Sequence[Row], mine: Row) -> Generator[Wait, None, _Reduced]:
        """This worker's slice of the gradients becomes the group's weighted mean, clipped where
        that is asked for, and lies on the host."""
        hyper = yield from self._steps.hyperparameters(table, mine.hyper, clock=self.clock)
        is_usable = all(row.is_finite and not row.is_skipped for row in table)
        reduced = _Reduced(
            weight=mine.weight,
            group_weight=sum(row.weight for row in table) if is_usable else 0.0,
            hyper=hyper,
            absent=frozenset.intersection(*(row.absent for row in table if not row.has_ended)),
        )
        max_norm = max_norm_of(table, clock=self.clock)
        if not reduced.group_weight:
            return reduced
        if self._group.size > 1:
            yield from self._average(share=mine.weight / reduced.group_weight)
        if max_norm:
            own = [self._gradient(chunk) for chunk in self._mine]
            squares = [
                float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in own
            ]
            total = yield from self._steps.total(self._mine, squares)
            reduced.norm = math.sqrt(total)
            coefficient = max_norm / (reduced.norm + 1e-6)
            if coefficient < 1:
                for part in own:
                    part.mul_(coefficient)
        self._flat.gradients_to_host()
        return reduced

    def _gradient(self, index: int) -> torch.Tensor:
        chunk = self._partition.chunks[index]
        return self._flat.gradients[chunk.buffer][chunk.start : chunk.start + chunk.length]

    def _average(self, share: float) -> Generator[Wait, None, None]:
        """This worker's slice becomes the group's mean. ``share`` is this worker's, all shares add
        up to 1."""
        for flat in self._flat.gradients:
            flat.mul_(share)
        pending = self._group.reduce_scatter(self._flat.gradients, self._spans)
        yield from in_group(pending, "optimizer.step")

    def _exchange(self, reduced: _Reduced) -> Generator[Wait, None, None]:
        """Push and bring; the iteration is over."""
        self._begin_push(reduced)
        pushed_s = time.monotonic()
        yield self._loop.wait_for_replies()
        self._waited_s += time.monotonic() - pushed_s
        yield from self._take_new_values("optimizer.step")
        self._uses.commit(self.clock)
        self._samples += self._samples_in_iteration
        self._samples_in_iteration = self._weighed_in_iteration = 0
        self._nominal_in_iteration = 0.0
        self.clock += 1
        self._on_iteration()

    def _begin_push(self, reduced: _Reduced) -> None:
        weight, gone = reduced.group_weight, reduced.absent
        chunks = self._partition.chunks
        empty = {
            chunk
            for chunk in self._mine
            if not weight or (gone and all(s.piece in gone for s in chunks[chunk].segments))
        }
        self._look_for_writes()
        if self._history is not None:
            self._history.push(self.clock, reduced.weight, weight, empty, len(self._mine))
        self._loop.begin_push(
            clock=self.clock,
            hyper=reduced.hyper,
            absent=sorted(gone),
            weight=weight,
            empty=empty,
        )

    def pull(self) -> None:
        """The freshest parameters that the mode allows; every worker of the group calls it.

        Those in memory are allowed, so this waits for nobody, but for groups that were suspended
        in a collective while this one went on: they count again, and the next use is of these.
        """
        for wait in self.bring():
            self._loop.carry_on(wait)

    def bring(self) -> Iterator[Wait]:
        """As :meth:`pull`, but hands out what there is to wait for."""
        yield from in_group(self._group.agree("pull"), "pull")
        self._look_for_writes()
        self._loop.begin_pull(clock=self.clock, chunks=self._mine, is_fresh=False)
        yield self._loop.wait_for_replies()
        yield from self._take_new_values("pull")

    def set_values(self) -> None:
        """The parameters in this worker's memory become the servers'; on the chief, while everybody
        is in a collective."""
        for wait in self.begin_setting_values():
            self._loop.carry_on(wait)

    def begin_setting_values(self) -> Iterator[Wait]:
        """As :meth:`set_values`, but hands out what there is to wait for."""
        self._flat.values_to_host()
        self._loop.begin_load(clock=self.clock)
        yield self._loop.wait_for_replies()

    def _look_for_writes(self) -> None:
        """What the script has written is no version of a server's: the next one replaces it."""
        if written := set(self._flat.written_by_others()):
            chunks = self._partition.chunks
            self._loop.core.forget_values(
                chunk
                for chunk in self._mine
                if any(segment.piece in written for segment in chunks[chunk].segments)
            )

    def _take_new_values(self, call: str) -> Generator[Wait, None, None]:
        """Replies have landed on the host: gather the group's, tell the device and autograd.

        All workers of a group use the same version of a chunk, that of its slice's owner.
        """
        self._flat.host_to_device()
        for index, chunk in enumerate(self._mine):
            version = self._loop.core.versions[chunk]
            self._min_done[index] = version.min_done
            if self._history is not None:
                self._uses.versions[chunk, 0] = version.position
                self._uses.versions[chunk, 1] = 2 * version.clock + version.is_checksummed
        flats, spans = self._flat.values, self._spans
        if self._history is not None:
            flats, spans = [*flats, self._uses.versions.view(-1)], self._recorded_spans
        yield from in_group(self._group.all_gather(flats, spans), call)
        self._flat.values_changed()
        self._uses.values_changed()

    @property
    def flat(self) -> FlatModel:
        """The memory that the model lies in."""
        return self._flat

    @property
    def num_samples(self) -> int:
        """Samples in this worker's finished iterations."""
        return self._samples

    @property
    def waited_s(self) -> float:
        """Seconds in which this worker has pushed and waited for replies."""
        return self._waited_s

    @property
    def staleness(self) -> int:
        """Of what is in memory, at its stalest."""
        return max((max(0, self.clock - min_done) for min_done in self._min_done), default=0)

    def statistics(self) -> WorkerStatistics:
        counts = self._loop.core.counts()
        return WorkerStatistics(
            clock=self.clock,
            samples=self._samples,
            bytes_pushed=counts.bytes_pushed,
            bytes_pulled=counts.bytes_pulled,
            max_staleness_seen=max(self._uses.staleness, default=0),
            staleness=dict(sorted(self._uses.staleness.items())),
        )
