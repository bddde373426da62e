"""A rank's part of a step: round trips for the latency, exchanges both ways for the bandwidth.

    num_bytes = Line(comm).prepare(peer, leads=True, window_s=0.5)
    flow = line.stream(peer, leads=True, num_bytes=num_bytes, window_s=0.5)
    together([flow, other])         # what all of them carried at the same time

One rank of a pair leads and decides. A rank in no pair sleeps in ``wait_for_all``; those that
exchange yield their CPU whenever there is nothing to do yet. That and Python add about a
microsecond to a latency, and keep figures meaningful where CPUs are shared. The first blocks of a
flow and the last do not count: there the network fills and empties.
"""

from __future__ import annotations

import bisect
import os
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from psdist.transport.waiting import Waiting

if TYPE_CHECKING:  # at run time only inside functions: importing it starts MPI
    from mpi4py import MPI

MAX_BYTES: Final = 8 << 20
_LATENCY_REPEATS: Final = 50
_WARM_UP: Final = 5
_FIRST_BYTES: Final = 64 << 10
_TAG: Final = 11
_WAIT_TIMEOUT_S: Final = 600.0
# First byte of a block: of the last but those that fly with it, and of all others.
_LAST, _MORE = 2, 1


REPEATS: Final = 10
"""Least number of measurements for a median."""
DEPTH: Final = 8
"""Blocks in flight at once, each way. One is not enough: the request for the block to receive waits
for the blocks that are sent, and the two ways would take turns."""
FEWEST: Final = REPEATS + 3 * DEPTH
"""Blocks of a flow, at least: a measured stretch is DEPTH of them, and as many are left out at
either end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    num_bytes: int
    """Size of a block."""
    done_s: tuple[float, ...]
    """When each had arrived, in seconds since all pairs began; ascending, FEWEST or more."""

    @property
    def inner_s(self) -> tuple[float, ...]:
        return self.done_s[DEPTH:-DEPTH]

    @property
    def bytes_per_s(self) -> float:
        """The median over all stretches of DEPTH blocks."""
        inner = self.inner_s
        stretches = [end - begin for begin, end in zip(inner, inner[DEPTH:], strict=False)]
        return DEPTH * self.num_bytes / statistics.median(stretches)

    def bytes_until(self, at_s: float) -> float:
        """Return the bytes that had arrived by then; blocks in flight count in part."""
        after = bisect.bisect_right(self.done_s, at_s)
        if after in (0, len(self.done_s)):
            return float(after * self.num_bytes)
        begin, end = self.done_s[after - 1], self.done_s[after]
        return self.num_bytes * (after + (at_s - begin) / (end - begin))


def together(flows: Sequence[Flow]) -> float:
    """Bytes per second of all flows, over the time in which all of them were under way; 0 for
    none. Pairs that share a link take more of it in turns: their medians do not add up."""
    begin = max((flow.inner_s[0] for flow in flows), default=0.0)
    end = min((flow.inner_s[-1] for flow in flows), default=0.0)
    if begin >= end:
        return 0.0
    carried = sum(flow.bytes_until(end) - flow.bytes_until(begin) for flow in flows)
    return carried / (end - begin)


class Line:
    """One rank's end of all measurements."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._sent = memoryview(b"")
        self._received = memoryview(b"")

    def wait_for_all(self) -> None:
        """A barrier that sleeps. Raises WaitTimeoutError where a rank does not come."""
        waiting = Waiting(is_spinning=False, warn_s=float("inf"), timeout_s=_WAIT_TIMEOUT_S)
        everybody_came = self._comm.Ibarrier()
        while not everybody_came.Test():
            waiting.idle("all ranks to end the step of a measurement")

    def latency(self, peer: int, *, leads: bool) -> float:
        """Seconds for 8 bytes one way: the median of half round trips."""
        self._reserve(8)
        times = []
        for _ in range(_WARM_UP + _LATENCY_REPEATS):
            before_s = time.perf_counter()
            if leads:
                self._send(peer, 8)
            self._receive(peer, 8)
            if not leads:
                self._send(peer, 8)
            times.append((time.perf_counter() - before_s) / 2)
        return statistics.median(times[_WARM_UP:])

    def prepare(self, peer: int, *, leads: bool, window_s: float) -> int:
        """Return the bytes of a block. The two can exchange a good number of such blocks in
        ``window_s`` while other pairs do the same."""
        num_bytes = _FIRST_BYTES
        while True:
            self._reserve(num_bytes)
            took_s = self._agreed(peer, self._swap(peer, num_bytes), leads=leads)
            factor = window_s / FEWEST / max(took_s, 1e-9)
            if factor < 2 or num_bytes == MAX_BYTES:
                break
            num_bytes = min(MAX_BYTES, int(num_bytes * min(factor, 8)) & ~4095)
        num_bytes = min(MAX_BYTES, max(_FIRST_BYTES, int(num_bytes * factor) & ~4095))
        self._reserve(num_bytes * DEPTH)
        return num_bytes

    def stream(self, peer: int, *, leads: bool, num_bytes: int, window_s: float) -> Flow:
        """Measure what flows each way while both ways are full, for about ``window_s``."""
        parts = [slice(at * num_bytes, (at + 1) * num_bytes) for at in range(DEPTH)]
        for part in parts:
            self._sent[part.start] = _MORE
        started_s = time.perf_counter()
        flying = deque(self._begin(peer, part) for part in parts)
        done_s: list[float] = []
        end = sys.maxsize  # blocks in all
        while flying:
            self._complete(flying.popleft())
            done_s.append(time.perf_counter())
            part = parts[(len(done_s) - 1) % DEPTH]
            following = len(done_s) - 1 + DEPTH
            if not leads and self._received[part.start] == _LAST:
                end = following
            if following >= end:
                continue
            is_enough = len(done_s) > FEWEST - 2 * DEPTH and done_s[-1] - started_s >= window_s
            if leads and is_enough and end == sys.maxsize:
                # The follower hears of it when it has begun all that fly with this block.
                self._sent[part.start] = _LAST
                end = following + DEPTH
            flying.append(self._begin(peer, part))
        return Flow(num_bytes=num_bytes, done_s=tuple(at - started_s for at in done_s))

    def _begin(self, peer: int, part: slice) -> list[MPI.Request]:
        """Receive and send a block; those in flight at once are adjacent."""
        from mpi4py import MPI

        return [
            self._comm.Irecv([self._received[part], MPI.BYTE], source=peer, tag=_TAG),
            self._comm.Isend([self._sent[part], MPI.BYTE], dest=peer, tag=_TAG),
        ]

    def _swap(self, peer: int, num_bytes: int) -> float:
        from mpi4py import MPI

        before_s = time.perf_counter()
        arriving = self._comm.Irecv([self._received[:num_bytes], MPI.BYTE], source=peer, tag=_TAG)
        leaving = self._comm.Isend([self._sent[:num_bytes], MPI.BYTE], dest=peer, tag=_TAG)
        self._complete([arriving, leaving])
        return time.perf_counter() - before_s

    def _agreed(self, peer: int, took_s: float, *, leads: bool) -> float:
        """The time that the leader saw."""
        if leads:
            self._sent[:8] = struct.pack("<d", took_s)
            self._send(peer, 8)
            return took_s
        self._receive(peer, 8)
        return float(struct.unpack("<d", self._received[:8])[0])

    def _send(self, peer: int, num_bytes: int) -> None:
        from mpi4py import MPI

        self._complete([self._comm.Isend([self._sent[:num_bytes], MPI.BYTE], dest=peer, tag=_TAG)])

    def _receive(self, peer: int, num_bytes: int) -> None:
        from mpi4py import MPI

        into = [self._received[:num_bytes], MPI.BYTE]
        self._complete([self._comm.Irecv(into, source=peer, tag=_TAG)])

    def _complete(self, requests: list[MPI.Request]) -> None:
        from mpi4py import MPI

        while not MPI.Request.Testall(requests):
            os.sched_yield()

    def _reserve(self, num_bytes: int) -> None:
        if len(self._sent) < num_bytes:
            # Every page is written: unwritten ones are one page of zeros, in the cache.
            self._sent = memoryview(bytearray(b"\1" * num_bytes))
            self._received = memoryview(bytearray(b"\1" * num_bytes))
