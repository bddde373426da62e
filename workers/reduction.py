"""A worker's group in one parameter set: which worker pushes which chunks, what the workers agree
on in an iteration.

    group = WorkerGroup(channel, partition, order, members, worker=3)
    table = yield from group.gather(Row(...))                 # a row of each worker, by place
    set_of(table)                                             # the parameter set that is stepped
    hyper = yield from group.hyperparameters(table, hyper, clock=7)
    norm = yield from group.clip(parts, max_norm=1.0)

Generators yield what there is to wait for, as :meth:`psdist.workers.trainer.Trainer.iterate`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from psdist.errors import HyperparameterError, UsageError
from psdist.protocol.optimizers import difference, unpack_hyperparameters
from psdist.protocol.partition import Partition, Span, runs_of, slices_of_the_living
from psdist.protocol.send_order import SendOrder
from psdist.workers.group.channel import GroupChannel, Pending, Slices, T
from psdist.workers.loop import Wait, wait_for_group

CALL: Final = "optimizer.step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms under which an iteration is pushed."""

    clock: int
    hyper: bytes
    """Packed hyperparameters."""
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The contribution of one worker to the agreement of its group."""

    weight: float
    set_index: int
    """The parameter set that is stepped; of a worker that has ended, any."""
    hyper: bytes
    """Packed; in the row of another worker a digest."""
    is_skipped: bool = False
    is_finite: bool = True
    max_norm: float = 0.0
    """The clipping norm of the group's gradient; 0: none."""
    has_ended: bool = False
    """True if the worker has no more data in this pass and takes part with weight 0."""
    absent: frozenset[int] = frozenset()
    num_begun: int = 0
    """Operations that it has begun during backward (psdist.workers.group.buckets)."""
    begun: Sequence[int] = ()
    """The same in each set, of a worker that has ended."""
    is_changed: bool = False
    """True if gradients differ from the gradients that have left."""
    is_retermed: bool = False
    """True if hyperparameters or weight have changed since gradients left."""
    backward_s: float = 0.0
    """Seconds from its first gradient to ``step()`` while overlap watches; else 0."""
    worker: int = -1
    """The worker that sent the row, in the table."""

    def num_begun_in(self, set_index: int) -> int:
        """Return the operations that it has begun in this set, the one that is stepped."""
        return self.begun[set_index] if self.has_ended else self.num_begun


@dataclass(slots=True, kw_only=True)
class Reduced:
    """An iteration between the reduction in the group and the push."""

    weight: float
    """The weight of this worker."""
    group_weight: float
    """The weight of the push."""
    hyper: bytes
    absent: frozenset[int]
    """Pieces without a gradient on any worker of the group."""
    is_skipped: bool = False
    """True if no gradient of the group counts."""
    norm: float = math.nan
    """The norm of the group's gradient before it was clipped, if it was."""
    problem: str = ""
    """Why nothing may be pushed, if ``on_nonfinite`` is an error."""


def in_group(pending: Pending[T], what: str) -> Generator[Wait, None, T]:
    """Return the result of an operation of the group, when it has come."""
    if not pending.is_done():
        yield wait_for_group(pending, what)
    return pending.result()


class WorkerGroup:
    """The group of one worker. Its operations are made by all workers of the group together."""

    def __init__(
        self,
        channel: GroupChannel,
        partition: Partition,
        order: Sequence[int],
        members: Sequence[int],
        *,
        worker: int,
    ) -> None:
        """``order``: in which all groups send the chunks, empty for ascending; ``members``: the
        workers of the group, by place; ``worker``: this one."""
        self.channel = channel
        self.partition = partition
        self.order = SendOrder(order, num_chunks=len(partition.chunks))
        """The order in which all groups send the chunks."""
        self._worker = worker
        self._first = dict(zip(members, partition.slices(channel.size, order), strict=True))
        self.share_out(members)

    def share_out(self, living: Sequence[int]) -> None:
        """Share the chunks of failed workers out among ``living``, by place."""
        by_worker = slices_of_the_living(self._first, living)
        self.by_place: list[Sequence[int]] = [by_worker[worker] for worker in living]
        self.mine = self.by_place[self.channel.place]
        """The chunks of this worker, ascending."""
        self.spans = self.spans_of(self.by_place)
        self.recorded_spans = self.recorded_spans_of(self.by_place)

    def spans_of(self, by_place: Iterable[Sequence[int]]) -> Slices:
        """Return where the chunks of each place lie in the flat memory."""
        return [self.partition.spans(chunks) for chunks in by_place]

    def recorded_spans_of(self, by_place: Iterable[Sequence[int]]) -> Slices:
        """Return :meth:`spans_of`, and the versions of the chunks in one more flat tensor."""
        versions_at = len(self.partition.buffers)
        return [
            (
                *self.partition.spans(chunks),
                *(Span(versions_at, 2 * run.start, 2 * run.stop) for run in runs_of(chunks)),
            )
            for chunks in by_place
        ]

    def gather(self, mine: Row) -> Generator[Wait, None, list[Row]]:
        """Return the row of each worker, by place."""
        flags = mine.is_skipped + 2 * mine.is_finite + 4 * mine.has_ended
        flags += 8 * mine.is_changed + 16 * mine.is_retermed
        row = [mine.weight, mine.set_index, flags, mine.max_norm, _digest(mine.hyper)]
        row += [mine.backward_s, self._worker]
        row += mine.begun if mine.has_ended else [mine.num_begun, *sorted(mine.absent)]
        table = yield from in_group(self.channel.agree(CALL, row), CALL)
        return [_row_of(row) for row in table]

    def hyperparameters(
        self, table: Sequence[Row], mine: bytes, *, clock: int
    ) -> Generator[Wait, None, bytes]:
        """Return the hyperparameters of the workers that contribute a gradient, which must agree
        in every mode: each worker's slice would be stepped with its own. ``mine`` if all such
        workers have failed since. Raises :class:`HyperparameterError`."""
        if all(row.hyper == table[0].hyper for row in table):
            return mine
        agreed = self.channel.agree(CALL, [self._worker, *mine])
        rows = yield from in_group(agreed, CALL)
        stepping = {row.worker for row in table if not row.has_ended}
        brought = [  # a worker that has failed since the table was gathered has no row
            (int(worker), bytes(map(int, packed)))
            for worker, *packed in rows
            if int(worker) in stepping
        ]
        if not brought:
            return mine
        first, hyper = brought[0]
        for other, others in brought:
            if others != hyper:
                differ = difference(unpack_hyperparameters(hyper), unpack_hyperparameters(others))
                raise HyperparameterError(
                    f"iteration {clock}: workers {first} and {other} of one group disagree on "
                    f"hyperparameters: {differ}; nothing was pushed. Every worker must use the "
                    "same schedule: one that follows a loss must follow job.mean(loss)"
                )
        return hyper

    def clip(self, own: Sequence[torch.Tensor], max_norm: float) -> Generator[Wait, None, float]:
        """Clip the group's gradient; return its norm before."""
        squares = [float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in own]
        norm = math.sqrt((yield from self._total(squares)))
        coefficient = max_norm / (norm + 1e-6)
        if coefficient < 1:
            for part in own:
                part.mul_(coefficient)
        return norm

    def _total(self, values: Sequence[float]) -> Generator[Wait, None, float]:
        """Return the sum of ``values`` by chunk over the group, in the order of chunks: the same
        bits on each worker, whatever the slices are."""
        row = [*self.mine, *values]
        table = yield from in_group(self.channel.agree(CALL, row), CALL)
        by_chunk = [pair for row in table for pair in zip(*_halves(row), strict=True)]
        return sum(value for _, value in sorted(by_chunk))


def _halves(row: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    middle = len(row) // 2
    return row[:middle], row[middle:]


def _row_of(told: Sequence[float]) -> Row:
    weight, set_index, flags, max_norm, hyper, backward_s, worker, *rest = told
    bits, more = int(flags), list(map(int, rest))
    has_ended = bool(bits & 4)
    return Row(
        weight=weight,
        set_index=int(set_index),
        hyper=int(hyper).to_bytes(_DIGEST_BYTES, "little"),
        is_skipped=bool(bits & 1),
        is_finite=bool(bits & 2),
        has_ended=has_ended,
        max_norm=max_norm,
        absent=frozenset() if has_ended else frozenset(more[1:]),
        num_begun=0 if has_ended else more[0],
        begun=more if has_ended else (),
        is_changed=bool(bits & 8),
        is_retermed=bool(bits & 16),
        backward_s=backward_s,
        worker=int(worker),
    )


def set_of(table: Sequence[Row]) -> int:
    """Return the parameter set that all workers step. Raises :class:`UsageError` for several."""
    stepping = [(row.set_index, row.worker) for row in table if not row.has_ended]
    (first, one), (last, other) = min(stepping), max(stepping)
    if first != last:
        raise UsageError(
            f"workers {one} and {other} of one group step different optimizers at the same time, "
            f"those of parameter sets {first} and {last} (counted in the order of job.prepare); "
            "every worker must step the same optimizers in the same order"
        )
    return first


def absent_of(table: Sequence[Row]) -> frozenset[int]:
    """Return the pieces without a gradient on any worker of the group."""
    return frozenset.intersection(*(row.absent for row in table if not row.has_ended))


def max_norm_of(table: Sequence[Row], *, clock: int) -> float:
    """Return the clipping norm of the group's gradient, 0 for none. Raises :class:`UsageError` if
    the rows differ."""
    norms = {row.max_norm for row in table if not row.has_ended}
    if len(norms) > 1:
        raise UsageError(
            f"iteration {clock}: workers of one group clip to different norms: "
            f"{', '.join(f'{norm:g}' if norm else 'none' for norm in sorted(norms))}; every worker "
            "must call job.clip_grad_norm_ in the same iterations, with the same norm"
        )
    return norms.pop()


_DIGEST_BYTES: Final = 6
"""A float64 carries 48 bits exactly."""


def _digest(hyper: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(hyper, digest_size=_DIGEST_BYTES).digest(), "little")
