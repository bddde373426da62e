"""A group of several hosts: on each host first, then between the hosts.

The channel combines two ends: *inner* of the host's own group, and *over* of the whole group, which
can also send bytes from each worker to each (:class:`Exchanging`). The workers of a host divide all
slices: the worker at index k takes those of every worker whose index on its own host is k, or k
plus a multiple of the number of workers here. So ``reduce_scatter`` is

1. on each host: the sum over its workers, each worker's part of the slices;
2. between hosts: the owner of a slice gets one such sum from every other host;
3. the owner adds them, in the order of hosts.

A slice crosses the network once for each other host, for any number of workers there, and hosts may
have different numbers of workers. ``all_gather`` is the reverse. Sums are made per host in worker
order, then in the order of hosts (by their first workers), for all implementations of *inner* and
*over*.

Operations run one at a time, as the memory rules of *inner* require.

    channel = TwoLevelChannel(inner, over, hosts=[0, 0, 1, 1])      # of places 0 .. 3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from psdist.errors import MemberLostError, TransportError
from psdist.protocol.partition import Span
from psdist.workers.group.channel import (
    Exchanging,
    GroupChannel,
    KnownSlices,
    Pending,
    Slices,
    T,
    add_in_worker_order,
)
from psdist.workers.group.operations import Operation, Steps, until_done

_ALIGN: Final = 16
"""Alignment of spans in staging memory: the largest element."""
_TURN_BYTES: Final = 256 << 10
"""Two long messages at once, one in each direction, sometimes halve the speed of a TCP link. Short
messages alternate."""
_MOST_TURNS: Final = 64


class TwoLevelChannel:
    """A worker's end of its group, on two hosts or more."""

    def __init__(self, inner: GroupChannel, over: Exchanging, *, hosts: Sequence[int]) -> None:
        """``hosts``: for each place the number of its host; ``inner``: the group of the places on
        this host, in their order."""
        self.place = over.place
        self.size = over.size
        self.inner = inner
        self.over = over
        self._hosts = hosts
        members: dict[int, list[int]] = {}
        for place, host in enumerate(hosts):
            members.setdefault(host, []).append(place)
        self._members = members
        """Places of each host, in the order of hosts."""
        self._line: deque[Operation[Any]] = deque()
        """Unfinished operations. One runs at a time."""
        self._cuts = KnownSlices(self._cut)
        self._memory: dict[tuple[int, torch.device], torch.Tensor] = {}
        """Staging memory: 0: for slices of other hosts, 1: for this worker's slice."""

    def allocate(self, num_bytes: int) -> memoryview:
        return self.inner.allocate(num_bytes)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        mine = list(values)
        return self._begin(_start(lambda: self.over.agree(call, mine)))

    def duplicate(self) -> TwoLevelChannel:
        return TwoLevelChannel(self.inner.duplicate(), self.over.duplicate(), hosts=self._hosts)

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        return self._begin(self._reduce_scatter(flats, self._cuts.of(flats, slices), slices, sums))

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        return self._begin(self._all_gather(flats, self._cuts.of(flats, slices), slices))

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        return self._begin(_start(lambda: self.over.broadcast(tensor, place)))

    def _begin(self, steps: Steps[T]) -> Pending[T]:
        return Operation(steps, self._line)

    # -- the operations -------------------------------------------------------------------------

    def _reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        cut: _Cut,
        slices: Slices,
        sums: Sequence[torch.Tensor] | None,
    ) -> Steps[None]:
        device = flats[0].device if flats else torch.device("cpu")
        there = self._staging(0, sum(cut.num_there) + cut.num_own, device)
        rows = self._staging(1, sum(cut.num_here), device)
        spans = cut.inner[self.inner.place]
        partial = [_part(there, at, span, flats) for at, span in zip(cut.at, spans, strict=True)]
        yield from _of_host(until_done(self.inner.reduce_scatter(flats, cut.inner, partial)))
        given, taken = there[: sum(cut.num_there)], rows[: sum(cut.num_here)]
        pending = self.over.exchange(
            given, cut.num_there, taken, cut.num_here, in_turns=cut.num_turns
        )
        yield from until_done(pending)
        for index, span in enumerate(slices[self.place]):
            total = flats[span.buffer][span.start : span.stop] if sums is None else sums[index]
            parts = [
                _part(rows, begin + cut.own_at[index], span, flats)
                if begin >= 0
                else _part(there, sum(cut.num_there) + cut.own_at[index], span, flats)
                for begin in cut.rows_at
            ]
            add_in_worker_order(parts, total)

    def _all_gather(self, flats: Sequence[torch.Tensor], cut: _Cut, slices: Slices) -> Steps[None]:
        device = flats[0].device if flats else torch.device("cpu")
        there = self._staging(0, sum(cut.num_there) + cut.num_own, device)
        rows = self._staging(1, sum(cut.num_here), device)
        for begin in cut.rows_at:
            if begin >= 0:
                for at, span in zip(cut.own_at, slices[self.place], strict=True):
                    own = flats[span.buffer][span.start : span.stop]
                    _part(rows, begin + at, span, flats).copy_(own)
        given, taken = rows[: sum(cut.num_here)], there[: sum(cut.num_there)]
        pending = self.over.exchange(
            given, cut.num_here, taken, cut.num_there, in_turns=cut.num_turns
        )
        yield from until_done(pending)
        for at, span in zip(cut.at, cut.inner[self.inner.place], strict=True):
            if at < len(taken):
                part = flats[span.buffer][span.start : span.stop]
                part.copy_(_part(there, at, span, flats))
        yield from _of_host(until_done(self.inner.all_gather(flats, cut.inner)))

    # -- the division of slices ----------------------------------------------------------------

    def _cut(self, flats: Sequence[torch.Tensor], slices: Slices) -> _Cut:
        host = self._hosts[self.place]
        here = self._members[host]
        index = here.index(self.place)
        inner: list[list[Span]] = [[] for _ in here]
        at: list[int] = []
        num_there = [0] * self.size
        rows_of = [0] * self.size
        own_at, num_own = _laid_out(flats, slices[self.place])
        for other, members in self._members.items():
            if other != host:
                rows_of[members[index % len(members)]] = num_own
        # Slices of other hosts' workers come first, by place: the order of the exchange.
        others = [place for place in range(self.size) if self._hosts[place] != host]
        end = 0
        for place in others:
            members = self._members[self._hosts[place]]
            takes = members.index(place) % len(here)
            inner[takes] += slices[place]
            if takes == index:
                starts, num_there[place] = _laid_out(flats, slices[place])
                at += [end + start for start in starts]
                end += num_there[place]
        for takes, place in enumerate(here):
            inner[takes] += slices[place]
        at += [end + start for start in own_at]
        most = max(_laid_out(flats, spans)[1] for spans in slices)
        begins = [sum(rows_of[:place]) for place in range(self.size)]
        rows_at = [
            -1 if other == host else begins[members[index % len(members)]]
            for other, members in self._members.items()
        ]
        return _Cut(
            inner=inner,
            at=at,
            num_there=num_there,
            num_here=rows_of,
            own_at=own_at,
            num_own=num_own,
            rows_at=rows_at,
            num_turns=min(max(-(-most // _TURN_BYTES), 1), _MOST_TURNS),
        )

    def _staging(self, which: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return staging memory. Kept, because new pages are as slow as the exchange."""
        memory = self._memory.get((which, device))
        if memory is None or len(memory) < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._memory[which, device] = memory
        return memory


class _Cut(NamedTuple):
    """The spans that this worker sums for its host, and their layout in staging memory."""

    inner: Slices
    """For each worker of this host the spans that it sums: those of other hosts' workers, then its
    own."""
    at: list[int]
    """Offsets of this worker's spans in staging memory, in bytes."""
    num_there: list[int]
    """Bytes of other hosts' slices there, by the place of the owner."""
    num_here: list[int]
    """Bytes that each place sends for this worker's slice: the sum of its host."""
    own_at: list[int]
    """Offsets of the spans of this worker's slice in such a row."""
    num_own: int
    rows_at: list[int]
    """Offset of each host's row, in the order of hosts; -1: this worker's own host."""
    num_turns: int
    """Turns of an exchange, by the largest slice, so the same on all workers."""


def _laid_out(flats: Sequence[torch.Tensor], spans: Sequence[Span]) -> tuple[list[int], int]:
    """Return the offsets of spans in sequence, and their end, in bytes."""
    starts, end = [], 0
    for span in spans:
        starts.append(end)
        end += (span.stop - span.start) * flats[span.buffer].itemsize
        end += -end % _ALIGN
    return starts, end


def _part(memory: torch.Tensor, at: int, span: Span, flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the staging memory of ``span``, in its dtype."""
    flat = flats[span.buffer]
    num_bytes = (span.stop - span.start) * flat.itemsize
    return memory[at : at + num_bytes].view(flat.dtype)


def _start(begin: Callable[[], Pending[T]]) -> Steps[T]:
    """Begin an operation of another channel when it is this one's turn."""
    return (yield from until_done(begin()))


def _of_host(steps: Steps[T]) -> Steps[T]:
    """Run steps of a host's own group. Its errors name places in that group."""
    try:
        return (yield from steps)
    except TransportError as error:
        kind = MemberLostError if isinstance(error, MemberLostError) else TransportError
        raise kind(f"among the workers of this host: {error}") from error
