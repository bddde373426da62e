"""What the workers of a group bring to an iteration, on which they must agree before they reduce.

    steps = StepTable(group, worker=3)
    table = yield from steps.gather(Row(...))              # a row of each worker, by place
    set_of(table)                                          # the parameter set that is stepped
    hyper = yield from steps.hyperparameters(table, hyper, clock=7)
    total = yield from steps.total([0, 2], [4.5, 0.5])

Generators hand out what there is to wait for, as :meth:`psdist.workers.trainer.Trainer.iterate`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

from psdist.errors import HyperparameterError, UsageError
from psdist.protocol.optimizers import difference, unpack_hyperparameters
from psdist.workers.group.channel import GroupChannel, Pending, T
from psdist.workers.loop import Wait, wait_for_group

_CALL: Final = "optimizer.step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Of one worker."""

    weight: float
    set_index: int
    """The parameter set that is stepped; of a worker that has ended, any."""
    hyper: bytes
    """Packed; of another worker's row a digest."""
    is_skipped: bool = False
    is_finite: bool = True
    max_norm: float = 0.0
    """The norm to which the group's gradient is clipped; 0: it is not."""
    has_ended: bool = False
    """It has no more data in this pass, and takes part for the others' sake."""
    absent: frozenset[int] = frozenset()
    num_begun: int = 0
    """Operations that it has begun during backward (psdist.workers.group.buckets)."""
    begun: Sequence[int] = ()
    """The same of a worker that has ended, in each set."""
    is_changed: bool = False
    """Gradients are others than those that have left."""
    is_retermed: bool = False
    """Hyperparameters or weight are others than those under which gradients have left."""
    backward_s: float = 0.0
    """Seconds from its first gradient to ``step()``, while overlap watches; else 0."""
    worker: int = -1
    """Whose row it is, in the table."""

    def num_begun_in(self, set_index: int) -> int:
        """Operations that it has begun in this set, which is the one that is stepped."""
        return self.begun[set_index] if self.has_ended else self.num_begun


def in_group(pending: Pending[T], what: str) -> Generator[Wait, None, T]:
    """The result of an operation of the group."""
    if not pending.is_done():
        yield wait_for_group(pending, what)
    return pending.result()


class StepTable:
    def __init__(self, group: GroupChannel, *, worker: int) -> None:
        self._group = group
        self._worker = worker

    def gather(self, mine: Row) -> Generator[Wait, None, list[Row]]:
        flags = mine.is_skipped + 2 * mine.is_finite + 4 * mine.has_ended
        flags += 8 * mine.is_changed + 16 * mine.is_retermed
        row = [mine.weight, mine.set_index, flags, mine.max_norm, _digest(mine.hyper)]
        row += [mine.backward_s, self._worker]
        row += mine.begun if mine.has_ended else [mine.num_begun, *sorted(mine.absent)]
        table = yield from in_group(self._group.agree(_CALL, row), _CALL)
        return [_row_of(row) for row in table]

    def hyperparameters(
        self, table: Sequence[Row], mine: bytes, *, clock: int
    ) -> Generator[Wait, None, bytes]:
        """Those of the workers that bring a gradient, which must be alike in every mode: each
        worker's slice would be stepped with hyperparameters of its own; this worker's, where all
        that bring one have died since. Raises :class:`HyperparameterError`."""
        if all(row.hyper == table[0].hyper for row in table):
            return mine
        rows = yield from in_group(self._group.agree(_CALL, [self._worker, *mine]), _CALL)
        stepping = {row.worker for row in table if not row.has_ended}
        brought = [  # who has died since the table was gathered says nothing
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

    def total(self, chunks: Sequence[int], values: Sequence[float]) -> Generator[Wait, None, float]:
        """The sum of what all bring of their chunks, in the order of chunks: the same bits on each,
        whoever has which."""
        table = yield from in_group(self._group.agree(_CALL, [*chunks, *values]), _CALL)
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
    """The parameter set that all of them step: one. Raises :class:`UsageError`."""
    stepping = [(row.set_index, row.worker) for row in table if not row.has_ended]
    (first, one), (last, other) = min(stepping), max(stepping)
    if first != last:
        raise UsageError(
            f"workers {one} and {other} of one group step different optimizers at the same time, "
            f"those of parameter sets {first} and {last} (counted in the order of job.prepare); "
            "every worker must step the same optimizers in the same order"
        )
    return first


def max_norm_of(table: Sequence[Row], *, clock: int) -> float:
    """To which the group's gradient is clipped; 0: it is not. Raises :class:`UsageError`."""
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
