"""What workers have brought to a collective: the coordinator's answer, and what a worker reads in
it.

Everything to everybody would be the square of the workers. Payloads are there to be compared: each
different one is told once, and of many different ones the first few. Values are there to be summed:
the sum is told.

    answer = collected(3, [enter_of_worker_0, enter_of_worker_1])
    Brought.decode(answer).of(1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Collected, Enter
from psdist.protocol.ids import describe_workers

MOST_TOLD = 8
"""Different payloads in an answer."""
VALUE = np.dtype("<f8")
PREPARED = b"prepared"
"""What all bring to the last collective of ``prepare``: from then on the job may lose workers."""
ABSENT = -1
"""In ``Collected.runs``, of workers that are not in the job any more."""


def collected(seq: int, entered: Sequence[Enter | None]) -> Collected:
    """``entered[worker]``, None of one that is not in the job any more. Values are summed in the
    order of the workers, so that all get the same bits in every run."""
    index_of: dict[bytes, int] = {}
    runs: list[int] = []
    for enter in entered:
        index = ABSENT if enter is None else index_of.get(enter.payload)
        if index is None:
            assert enter is not None
            index = len(index_of)
            if index < MOST_TOLD:
                index_of[enter.payload] = index
        if runs and runs[-2] == index:
            runs[-1] += 1
        else:
            runs += (index, 1)
    values = b""
    if len(index_of) == 1:
        values = _sum([enter for enter in entered if enter is not None])
    return Collected(seq=seq, payloads=list(index_of), runs=runs, values=values, error="")


def _sum(entered: Sequence[Enter]) -> bytes:
    num_bytes = len(entered[0].values)
    wrong = [enter.worker for enter in entered if len(enter.values) != num_bytes]
    if wrong or num_bytes % VALUE.itemsize:
        raise ProtocolError(
            f"to {entered[0].name} worker {entered[0].worker} brought {num_bytes} bytes of numbers "
            f"and {describe_workers(wrong or [entered[0].worker])} other ones; numbers "
            f"have {VALUE.itemsize} bytes, and whoever brings the same payload brings as many"
        )
    total = np.zeros(num_bytes // VALUE.itemsize)
    with np.errstate(all="ignore"):  # infinities and their differences are the user's
        for enter in entered:
            total += np.frombuffer(enter.values, VALUE)
    return total.astype(VALUE).tobytes()


@dataclass(frozen=True)
class Brought:
    """What the workers of the job have brought to a collective."""

    payloads: tuple[bytes, ...]
    """The different ones, at most a few, in the order of the workers that brought them first."""
    runs: tuple[tuple[int, int], ...]
    """Workers from 0 on: an index into ``payloads``, or :data:`ABSENT`, and for how many workers on
    end."""
    values: bytes
    """float64, little-endian: the sums in worker order, where all payloads are equal."""

    @classmethod
    def decode(cls, message: Collected) -> Brought:
        """Raises :class:`ProtocolError` if the runs do not fit the payloads."""
        indexes, lengths = message.runs[::2], message.runs[1::2]
        is_known = all(ABSENT <= index <= len(message.payloads) for index in indexes)
        if len(indexes) != len(lengths) or not is_known or min(lengths, default=1) < 1:
            raise ProtocolError(
                f"the coordinator sent Collected of {len(message.payloads)} payloads with runs "
                "that do not fit them"
            )
        runs = tuple(zip(indexes, lengths, strict=True))
        return cls(tuple(message.payloads), runs, message.values)

    @property
    def num_workers(self) -> int:
        """Those that have brought something."""
        return sum(length for index, length in self.runs if index != ABSENT)

    def of(self, worker: int) -> bytes | None:
        """What ``worker`` brought; None if it is one of too many different payloads to be told, or
        nothing was brought."""
        for index, length in self.runs:
            if worker < length:
                return self.payloads[index] if 0 <= index < len(self.payloads) else None
            worker -= length
        raise InvariantError(f"{self.num_workers} workers and not worker {worker} of them")

    def unlike(self, payload: bytes) -> list[int]:
        """The workers that brought something else."""
        workers: list[int] = []
        at = 0
        for index, length in self.runs:
            is_told = index < len(self.payloads)
            if index != ABSENT and not (is_told and self.payloads[index] == payload):
                workers += range(at, at + length)
            at += length
        return workers
