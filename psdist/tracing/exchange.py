"""Activity of each worker's chunks and of its group's operations, from the spans of all ranks.

    ways = exchanges(traces)[0]                 # of worker 0
    ways.moving, ways.at_servers                # times: Covered
    ways.waiting                                # {worker: Covered}: for whom this worker waited

A push has five parts. It is *offered* until its server begins to receive it, and *received* until
the server has it. It *waits for others* until the push of another group has come that the reply
needs. It is *at the server* until the reply begins, and *answered* until the reply has landed. An
offer, a transfer and an answer are *moving*.

In sync a reply needs the last push of the iteration. In ssp and async each push is a step by
itself: a reply follows its step in the same turn of the server, or was parked until the newest push
of another group released it. With ``overlap = full`` replies to one worker leave in portions: a
reply that begins as another one ends counts as at the server, not as waiting.

An operation of a group, and a collective of the job, waits for others until the last member has
come to it. Members call them in one order, so the k-th of a kind is the same for all. A wait for a
worker that itself waited in an operation of its group counts for the member that came last there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from psdist.tracing import NONE, Lane, Span
from psdist.tracing.covered import Covered
from psdist.tracing.files import Spans, Trace

IN_GROUP: Final = (Span.AGREE, Span.REDUCE, Span.GATHER, Span.BROADCAST)

_Interval: TypeAlias = tuple[int, int]
_Waits: TypeAlias = dict[int, list[_Interval]]
"""By the worker that was waited for."""
_Update: TypeAlias = tuple[int, int, int, int]
"""Set, chunk, iteration, and the worker or group."""
_FIELDS: Final = (
    *("kind", "begin_ns", "end_ns", "set_index"),
    *("chunk", "clock", "other", "num_bytes"),
)
_LAST: Final = 2**31
"""After every group."""


@dataclass(frozen=True)
class Ways:
    """The activity of one worker."""

    moving: Covered
    """Times in which a chunk or an operation of the group was under way in the network."""
    at_servers: Covered
    """Times in which a server had a chunk; waits for others may lie in them."""
    waiting: dict[int, Covered]
    """Worker -> times in which a chunk, an operation or a collective waited for it."""


def _no_waits() -> _Waits:
    return defaultdict(list)


@dataclass
class _Parts:
    moving: list[_Interval] = field(default_factory=list)
    at_servers: list[_Interval] = field(default_factory=list)
    waiting: _Waits = field(default_factory=_no_waits)
    """For pushes, and in collectives."""
    in_group: _Waits = field(default_factory=_no_waits)
    """In operations of the group."""


class _Arrival(NamedTuple):
    time_ns: int
    group: int
    worker: int


def exchanges(traces: Sequence[Trace]) -> dict[int, Ways]:
    """Return what each worker's chunks did. A push counts as moving if its server has no spans."""
    workers = [trace for trace in traces if trace.about.is_worker]
    parts = {trace.about.index: _Parts() for trace in workers}
    at_servers = AtServers(traces)
    for trace in workers:
        for row in rows(trace.of(Span.PUSH, Span.PULL)):
            at_servers.take_apart(trace, row, parts[trace.about.index])
    of_group = defaultdict(list)
    for trace in workers:
        of_group[trace.about.group].append(trace)
    for members in of_group.values():
        for lane in (Lane.GROUP, Lane.EARLY):
            for kind in IN_GROUP:
                called = [(each, _of_lane(each, kind, lane)) for each in members]
                _meet(called, parts, is_in_group=True)
    collectives = [(each, each.of(Span.COLLECTIVE)) for each in workers]
    for name in sorted({int(each) for _, spans in collectives for each in spans["other"]}):
        called = [(each, spans[spans["other"] == name]) for each, spans in collectives]
        _meet(called, parts, is_in_group=False)
    in_group = {
        worker: {member: _covered(times) for member, times in each.in_group.items()}
        for worker, each in parts.items()
    }
    return {worker: _ways(each, in_group) for worker, each in parts.items()}


def _ways(own: _Parts, in_group: Mapping[int, Mapping[int, Covered]]) -> Ways:
    """``in_group``: of each worker, whom it waited for in operations of its group."""
    found: dict[int, list[Covered]] = defaultdict(list)
    for worker, times in own.waiting.items():
        rest = _covered(times)
        for member, others in in_group.get(worker, {}).items():
            for_member, rest = rest.split_by(others)
            found[member].append(for_member)
        found[worker].append(rest)
    for member, times in own.in_group.items():
        found[member].append(_covered(times))
    waiting = {worker: Covered.union(parts) for worker, parts in sorted(found.items())}
    return Ways(_covered(own.moving), _covered(own.at_servers), waiting)


# -- pushes and pulls --------------------------------------------------------------------------


class Row(NamedTuple):
    """A span, in Python's numbers."""

    kind: int
    begin_ns: int
    end_ns: int
    set_index: int
    chunk: int
    clock: int
    other: int
    num_bytes: int


def rows(spans: Spans) -> Iterable[Row]:
    return map(Row._make, zip(*(spans[name].tolist() for name in _FIELDS), strict=True))


class AtServers:
    """The work of servers on each chunk, by update."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._group_of = {each.about.index: _group(each) for each in traces if each.about.is_worker}
        self._received: dict[_Update, _Interval] = {}
        self._applied: dict[_Update, _Interval] = {}
        self._replies: dict[_Update, list[int]] = defaultdict(list)
        self._ended: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        """(rank of a server, set, worker) -> when replies ended."""
        self._rank_of: dict[tuple[int, int], int] = {}
        """(set, chunk) -> rank of its server."""
        self._arrivals: dict[tuple[int, int], list[_Arrival]] = defaultdict(list)
        self._of_iteration: dict[tuple[int, int, int], list[_Arrival]] = defaultdict(list)
        for trace in traces:
            for row in rows(trace.of(Span.RECEIVE, Span.APPLY, Span.REPLY)):
                self._take(trace.about.rank, row)
        for (number, chunk, clock, worker), (_, end_ns) in self._received.items():
            group = self._group_of.get(worker, NONE)
            self._arrive(number, chunk, clock, _Arrival(end_ns, group, worker))
        for trace in traces:
            for row in rows(trace.of(Span.PUSH)):
                if not row.num_bytes:  # a header alone, which takes no receive slot
                    arrival = _Arrival(row.begin_ns, _group(trace), trace.about.index)
                    self._arrive(row.set_index, row.chunk, row.clock, arrival)
        for found in self._arrivals.values():
            found.sort()
        for times in self._ended.values():
            times.sort()

    def _take(self, rank: int, row: Row) -> None:
        key = (row.set_index, row.chunk, row.clock, row.other)
        self._rank_of[row.set_index, row.chunk] = rank
        if row.kind == Span.RECEIVE:
            self._received[key] = row.begin_ns, row.end_ns
        elif row.kind == Span.APPLY:
            self._applied[key] = row.begin_ns, row.end_ns
        else:
            self._replies[key].append(row.begin_ns)
            self._ended[rank, row.set_index, row.other].append(row.end_ns)

    def _arrive(self, number: int, chunk: int, clock: int, arrival: _Arrival) -> None:
        self._arrivals[number, chunk].append(arrival)
        self._of_iteration[number, chunk, clock].append(arrival)

    def times(self, trace: Trace, row: Row) -> tuple[int, int]:
        """Return when the server had this push or request of a worker, and when its reply began."""
        begin_ns, end_ns = row.begin_ns, row.end_ns
        key = (row.set_index, row.chunk, row.clock, trace.about.index)
        here_ns = begin_ns
        if row.kind == Span.PUSH and row.num_bytes:
            _, here_ns = self._received.get(key, (end_ns, end_ns))
            here_ns = min(max(here_ns, begin_ns), end_ns)
        replies = [
            each
            for each in self._replies.get(key, ())
            if here_ns - trace.bound_ns <= each <= end_ns + trace.bound_ns
        ]
        # Without one the server had nothing new to send, or its spans were left out.
        return here_ns, min(max(replies[-1], here_ns), end_ns) if replies else end_ns

    def take_apart(self, trace: Trace, row: Row, parts: _Parts) -> None:
        """Put the times of a push or a pull where they belong."""
        begin_ns, end_ns = row.begin_ns, row.end_ns
        which = (row.set_index, row.chunk, row.clock)
        rank, worker = self._rank_of.get(which[:2]), trace.about.index
        if rank is None:
            parts.moving.append((begin_ns, end_ns))
            return
        here_ns, reply_ns = self.times(trace, row)
        parts.moving += [(begin_ns, here_ns), (reply_ns, end_ns)]
        parts.at_servers.append((here_ns, reply_ns))
        step = self._applied.get((*which, NONE)) if row.kind == Span.PUSH else None
        if step is not None:
            from_ns, until_ns = here_ns, min(step[0], reply_ns)
            last = self._last(self._of_iteration[which], trace, from_ns, until_ns)
        else:
            _, own_ns = self._applied.get((*which, _group(trace)), (here_ns, here_ns))
            from_ns = min(max(own_ns, here_ns), reply_ns)
            last = self._last(self._between(which[:2], from_ns, reply_ns), trace, from_ns, reply_ns)
            if last is not None and self._is_in_portions(
                rank, row.set_index, worker, last, reply_ns
            ):
                return
        if last is not None:
            parts.waiting[last.worker].append((from_ns, last.time_ns))

    def _is_in_portions(
        self, rank: int, number: int, worker: int, last: _Arrival, reply_ns: int
    ) -> bool:
        """True if a reply to the worker ended after that push came, and this reply followed it."""
        ended = self._ended.get((rank, number, worker), [])
        at = bisect_right(ended, reply_ns)
        return at > 0 and ended[at - 1] > last.time_ns

    @staticmethod
    def _last(
        arrivals: Iterable[_Arrival], trace: Trace, from_ns: int, until_ns: int
    ) -> _Arrival | None:
        """The last push of another group after the one time and at most at the other."""
        own = _group(trace)
        found = (each for each in arrivals if each.group != own)
        return max((each for each in found if from_ns < each.time_ns <= until_ns), default=None)

    def _between(self, which: tuple[int, int], from_ns: int, until_ns: int) -> list[_Arrival]:
        """Pushes of the chunk after the one time and at most at the other."""
        arrivals = self._arrivals.get(which, [])
        first, end = (bisect_right(arrivals, (each, _LAST, 0)) for each in (from_ns, until_ns))
        return arrivals[first:end]


def _group(trace: Trace) -> int:
    return NONE if trace.about.group is None else trace.about.group


# -- operations that several workers come to -----------------------------------------------------


def _of_lane(trace: Trace, kind: Span, lane: Lane) -> Spans:
    spans = trace.of(kind)
    of_lane: Spans = spans[spans["lane"] == lane]
    return of_lane


def _meet(
    called: Sequence[tuple[Trace, Spans]], parts: dict[int, _Parts], *, is_in_group: bool
) -> None:
    """Each worker waits in its k-th call until the last one has begun its k-th call."""
    ordered = [
        (each, spans[np.argsort(spans["begin_ns"], kind="stable")]) for each, spans in called
    ]
    for number in range(max((len(spans) for _, spans in ordered), default=0)):
        there = [(each, spans[number]) for each, spans in ordered if number < len(spans)]
        last, span = max(there, key=lambda pair: int(pair[1]["begin_ns"]))
        come_ns = int(span["begin_ns"])
        for trace, span in there:
            begin_ns, end_ns = int(span["begin_ns"]), int(span["end_ns"])
            until_ns = min(come_ns, end_ns)
            mine = parts[trace.about.index]
            waits = mine.in_group if is_in_group else mine.waiting
            waits[last.about.index].append((begin_ns, until_ns))
            if is_in_group:
                mine.moving.append((until_ns, end_ns))


def _covered(intervals: Sequence[_Interval]) -> Covered:
    times: Any = np.array(intervals, np.int64).reshape(-1, 2)
    return Covered(times[:, 0], times[:, 1])
