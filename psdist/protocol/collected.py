"""Collectives: what workers bring to them, and the coordinator's answer; pure.

The answer to each worker must not grow with the workers. Each different payload is sent once, at
most :data:`MOST_TOLD` of them. Values are summed, and the sum is sent.

    answer = collected(3, [enter_of_worker_0, enter_of_worker_1])
    Brought.decode(answer).of(1)
    unpack_mode(pack_mode("ssp", 3))              # ("ssp", 3)
    unpack_join(pack_join([12], "state-12-1"))    # JoinBrought(clocks=(12,), state="state-12-1")
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from psdist.errors import InvariantError, ProtocolError
from psdist.mode_names import Mode
from psdist.protocol.checkpoints import pack_clocks, unpack_clocks
from psdist.protocol.control import Collected, Enter
from psdist.protocol.ids import describe_workers

SET_MODE: Final = "set_mode"
"""The collective that changes the mode of the run."""
JOIN: Final = "join"
"""The collective in which substitutes join; each worker brings its clocks."""
_MOST: Final = 2**31 - 1
_STATE: Final = re.compile(r"[a-z0-9-]{1,80}")
MOST_TOLD = 8
"""Different payloads in an answer."""
VALUE = np.dtype("<f8")
PREPARED = b"prepared"
"""Payload of all workers in the last collective of ``prepare``: then the job may lose workers."""
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
            f"and {describe_workers(wrong or [entered[0].worker])} a different number; numbers "
            f"have {VALUE.itemsize} bytes, and equal payloads have equally many"
        )
    total = np.zeros(num_bytes // VALUE.itemsize)
    with np.errstate(all="ignore"):  # infinities and their differences are the user's
        for enter in entered:
            total += np.frombuffer(enter.values, VALUE)
    return total.astype(VALUE).tobytes()


@dataclass(frozen=True)
class Brought:
    """Contributions of the job's workers to a collective."""

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
        """Return the contribution of ``worker``; None if there was none, or if there were too many
        different payloads to pass on."""
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


# -- changes of the mode ---------------------------------------------------------------------------


def pack_mode(mode: Mode, staleness: int) -> bytes:
    """``staleness``: 0 except in ssp."""
    return (f"ssp:{staleness}" if mode == "ssp" else mode).encode()


def unpack_mode(payload: bytes) -> tuple[Mode, int] | None:
    """The inverse; None for what is no mode."""
    if payload == b"sync":
        return "sync", 0
    if payload == b"async":
        return "async", 0
    digits = payload.removeprefix(b"ssp:")
    if digits == payload or not digits.isdigit() or len(digits) > 10 or int(digits) > _MOST:
        return None
    return "ssp", int(digits)


# -- workers that join -----------------------------------------------------------------------------


class JoinBrought(NamedTuple):
    """Payload of a worker in :data:`JOIN`."""

    clocks: tuple[int, ...]
    """Its own, by parameter set."""
    state: str
    """Name of the state that the chief has written, for the script of a substitute; "" from other
    workers, and if the chief could not write it."""


def pack_join(clocks: Sequence[int], state: str = "") -> bytes:
    return b"%s/%s" % (pack_clocks(clocks), state.encode())


def unpack_join(data: bytes) -> JoinBrought | None:
    """None for anything else."""
    packed, _, name = data.partition(b"/")
    clocks, state = unpack_clocks(packed), name.decode("ascii", "replace")
    if clocks is None or (state and not _STATE.fullmatch(state)) or data.count(b"/") != 1:
        return None
    return JoinBrought(clocks, state)
