"""One iteration of a worker, from the gradients in ``p.grad`` to the next parameters in place.

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

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from psdist.errors import HyperparameterError, NonFiniteGradientError
from psdist.history.writers import WorkerHistory
from psdist.protocol.header import NEVER
from psdist.protocol.ids import describe_workers
from psdist.protocol.optimizers import difference, unpack_hyperparameters
from psdist.protocol.partition import Partition, Span
from psdist.workers.group.channel import GroupChannel, Pending, T
from psdist.workers.loop import Wait, WorkerLoop, wait_for_group
from psdist.workers.model.flat import FlatModel
from psdist.workers.uses import Uses

logger = logging.getLogger("psdist")

_NON_FINITE_REMEDY: Final = (
    'Lower the learning rate, or set on_nonfinite = "skip" to leave such iterations out'
)


@dataclass(frozen=True, kw_only=True)
class WorkerStatistics:
    """A snapshot; ``staleness`` counts this worker's chunk uses by staleness."""

    clock: int
    samples: int
    bytes_pushed: int
    bytes_pulled: int
    max_staleness_seen: int
    staleness: dict[int, int]

    @classmethod
    def of_nothing(cls) -> WorkerStatistics:
        """Of a worker that trained no model."""
        return cls(
            clock=0,
            samples=0,
            bytes_pushed=0,
            bytes_pulled=0,
            max_staleness_seen=0,
            staleness={},
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """What a worker of the group brings to an iteration."""

    weight: float
    is_skipped: bool
    is_finite: bool
    hyper: int
    """A digest of its hyperparameters."""
    absent: frozenset[int]
    has_ended: bool = False
    """It has no more data in this pass, and takes part for the others' sake."""


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
        look_for_changes: Callable[[FlatModel, int], None],
        hyperparameters: Callable[[], bytes],
        on_nonfinite: Literal["error", "skip"],
        history: WorkerHistory | None,
        on_iteration: Callable[[], None] = lambda: None,
    ) -> None:
        """``look_for_changes(flat, clock)`` raises where the model is not what was prepared;
        ``hyperparameters()``: the optimizer's, packed, as they are now."""
        self.clock = 0
        self._worker = worker
        self._partition = partition
        self._flat = flat
        self._loop = loop
        self._group = group
        self._look_for_changes = look_for_changes
        self._hyperparameters = hyperparameters
        self._on_nonfinite = on_nonfinite
        self._history = history
        self._on_iteration = on_iteration
        slices = partition.slices(group.size)
        self._mine = slices[group.place]
        self._batch: tuple[int, float] = (0, 0.0)
        """(samples, samples of a full batch) handed out and not yet used."""
        self._has_loader = False
        self._samples_in_iteration = 0
        self._nominal_in_iteration = 0.0
        self._samples = 0
        self._waited_s = 0.0
        # Of what is in memory now.
        self._min_done = [NEVER] * len(self._mine)
        self._spans = [partition.spans(chunks) for chunks in slices]
        # With the versions behind the parameters.
        num_flats = len(flat.values)
        self._recorded_spans = [
            (*spans, Span(num_flats, 2 * chunks.start, 2 * chunks.stop))
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
        self._look_for_changes(self._flat, self.clock)
        self.record_use()
        absent = self._flat.collect_gradients(scale=gradient_scale)
        non_finite = [] if is_skipped else self._flat.non_finite()
        nominal = self._nominal_in_iteration
        weight = self._samples_in_iteration / nominal if nominal else 1.0
        hyper = self._hyperparameters()
        mine = _Row(weight, is_skipped, not non_finite, _digest(hyper), frozenset(absent))
        table = yield from self._agree(mine)
        hyper = yield from self._settle_hyperparameters(table, hyper)
        if non_finite and self._on_nonfinite == "error":
            name = self._partition.pieces[non_finite[0]].name
            more = f" (and {len(non_finite) - 1} more)" if len(non_finite) > 1 else ""
            raise NonFiniteGradientError(
                f"iteration {self.clock}: the gradient of {name}{more} holds NaN or infinity; "
                f"nothing was pushed. {_NON_FINITE_REMEDY}"
            )
        group_weight = sum(row.weight for row in table)
        if any(row.is_skipped or not row.is_finite for row in table):
            if self._on_nonfinite == "error" and any(not row.is_finite for row in table):
                members = self._loop.core.seat.members
                who = describe_workers(
                    worker for worker, row in zip(members, table, strict=True) if not row.is_finite
                )
                raise NonFiniteGradientError(
                    f"iteration {self.clock}: the gradient of {who}, in this worker's group, "
                    f"holds NaN or infinity; nothing was pushed. {_NON_FINITE_REMEDY}"
                )
            group_weight = 0.0
        yield from self._exchange(table, weight, group_weight, hyper)

    def sit_out(self) -> None:
        """This worker has no more data in this pass: take part with weight 0 in the iterations of
        the group's others, until they have none either."""
        for wait in self.iterate_for_others():
            self._loop.carry_on(wait)

    def iterate_for_others(self) -> Iterator[Wait]:
        """As :meth:`sit_out`, but hands out what there is to wait for."""
        while True:
            hyper = self._hyperparameters()
            table = yield from self._agree(
                _Row(0.0, False, True, _digest(hyper), frozenset(), has_ended=True)
            )
            if all(row.has_ended for row in table):
                return
            self.record_use()
            self._flat.clear_gradients()
            hyper = yield from self._settle_hyperparameters(table, hyper)
            is_usable = all(row.is_finite and not row.is_skipped for row in table)
            group_weight = sum(row.weight for row in table) if is_usable else 0.0
            yield from self._exchange(table, 0.0, group_weight, hyper)

    def _exchange(
        self, table: Sequence[_Row], weight: float, group_weight: float, hyper: bytes
    ) -> Generator[Wait, None, None]:
        """Reduce, push and bring; the iteration is over. ``weight``: this worker's."""
        if group_weight:
            yield from self._reduce(share=weight / group_weight)
        bringing = [row.absent for row in table if not row.has_ended]
        everywhere = frozenset.intersection(*bringing)
        self._begin_push(weight, group_weight, hyper, sorted(everywhere))
        pushed_s = time.monotonic()
        yield self._loop.wait_for_replies()
        self._waited_s += time.monotonic() - pushed_s
        yield from self._take_new_values("optimizer.step")
        self._uses.commit(self.clock)
        self._samples += self._samples_in_iteration
        self._samples_in_iteration = self._nominal_in_iteration = 0
        self.clock += 1
        self._on_iteration()

    def _in_group(self, pending: Pending[T], what: str) -> Generator[Wait, None, T]:
        if not pending.is_done():
            yield wait_for_group(pending, what)
        return pending.result()

    def _agree(self, mine: _Row) -> Generator[Wait, None, list[_Row]]:
        """What every worker of the group brings, by place."""
        pending = self._group.agree(
            "optimizer.step",
            [
                *(mine.weight, mine.is_skipped, mine.is_finite, mine.hyper, mine.has_ended),
                *sorted(mine.absent),
            ],
        )
        table = yield from self._in_group(pending, "optimizer.step")
        return [
            _Row(
                weight,
                bool(is_skipped),
                bool(is_finite),
                int(hyper),
                frozenset(map(int, absent)),
                has_ended=bool(has_ended),
            )
            for weight, is_skipped, is_finite, hyper, has_ended, *absent in table
        ]

    def _settle_hyperparameters(
        self, table: Sequence[_Row], hyper: bytes
    ) -> Generator[Wait, None, bytes]:
        """Those of the workers that bring a gradient, which must be alike in every mode: each
        worker's slice would be stepped with hyperparameters of its own."""
        if all(row.hyper == table[0].hyper for row in table):
            return hyper
        pending = self._group.agree("optimizer.step", [self._worker, *hyper])
        rows = yield from self._in_group(pending, "optimizer.step")
        brought = [
            (int(worker), bytes(map(int, packed)))
            for row, (worker, *packed) in zip(table, rows, strict=True)
            if not row.has_ended
        ]
        first, hyper = brought[0]
        for other, others in brought:
            if others != hyper:
                differ = difference(unpack_hyperparameters(hyper), unpack_hyperparameters(others))
                raise HyperparameterError(
                    f"iteration {self.clock}: workers {first} and {other} of one group disagree on "
                    f"hyperparameters: {differ}; nothing was pushed. Every worker must use the "
                    "same schedule: one that follows a loss must follow job.mean(loss)"
                )
        return hyper

    def _reduce(self, share: float) -> Generator[Wait, None, None]:
        """This worker's slice of the gradients becomes the group's mean, and lies on the host.
        ``share`` is this worker's, all shares add up to 1."""
        if self._group.size > 1:
            for flat in self._flat.gradients:
                flat.mul_(share)
            pending = self._group.reduce_scatter(self._flat.gradients, self._spans)
            yield from self._in_group(pending, "optimizer.step")
        self._flat.gradients_to_host()

    def _begin_push(self, own: float, weight: float, hyper: bytes, absent: list[int]) -> None:
        gone = set(absent)
        chunks = self._partition.chunks
        empty = {
            chunk
            for chunk in self._mine
            if not weight or (gone and all(s.piece in gone for s in chunks[chunk].segments))
        }
        if self._history is not None:
            self._history.push(self.clock, own, weight, empty, len(self._mine))
        self._loop.begin_push(
            clock=self.clock, hyper=hyper, absent=absent, weight=weight, empty=empty
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
        yield from self._in_group(self._group.agree("pull"), "pull")
        self._loop.begin_pull(clock=self.clock, chunks=self._mine, is_fresh=False)
        yield self._loop.wait_for_replies()
        yield from self._take_new_values("pull")

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
        yield from self._in_group(self._group.all_gather(flats, spans), call)
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


def _digest(hyper: bytes) -> int:
    """48 bits: a float64 carries them exactly."""
    return int.from_bytes(hashlib.blake2b(hyper, digest_size=6).digest(), "little")
