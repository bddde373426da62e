"""Writers of the recorded history: what servers applied, what workers used and pushed.

Each event is packed into one preallocated buffer, which goes to its file when it is full or a
quarter of a second old. This module exports the names that a user of histories needs.

    history = ServerHistory(run_dir / "history", server=0)
    history.member(EventKind.JOIN, group=0, clock=0, weight=2.0)
    history.step(chunk, [(group, clock, weight, is_empty, codec)], lr_scale)
    reply_position = history.position                           # contains all of the above
    history.close()

Longer than other modules: a method for each event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from psdist.errors import InvariantError
from psdist.history import (
    CHECKSUM,
    EVENT,
    IS_CORRECTED,
    NO_CHUNK,
    OF_MEMBERSHIP,
    PUSH,
    EventFlag,
    EventKind,
    FileKind,
    History,
    code_of,
)
from psdist.history.files import (
    copy_name,
    history_folder,
    read_histories,
    read_history,
)
from psdist.history.recorder import Recorder
from psdist.history.run_record import RunRecord, write_run

__all__ = [
    "EventCount",
    "EventKind",
    "History",
    "RunRecord",
    "ServerHistory",
    "WorkerHistory",
    "history_folder",
    "read_histories",
    "read_history",
    "slice_places",
    "write_run",
]


Contributions = Sequence[tuple[int, int, float, bool, int]]
"""(group, clock, weight, True without a gradient, number of the codec) of each update in a step."""


class EventCount:
    """A server's log without its events, for runs without ``--record``: it has their number."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        """Number of events so far: a reply made now contains exactly these (read only)."""
        self.num_checksums = 0
        """Number of checksums so far (read only)."""

    def step(self, _chunk: int, contributions: Contributions, _lr_scale: float = 1.0) -> None:
        """Add the updates of a step, which the chunk contains now: in sync all of one iteration, in
        group order; in the other modes one. Call it after the bytes of the shard have changed and
        before the next reply is made."""
        self.position += len(contributions)

    def member(self, kind: EventKind, group: int, clock: int, weight: float = 0.0) -> None:
        """Add a membership event. ``clock``: iterations that the group has finished; others wait
        for these alone (after DEATH: the fewest that a chunk of this server contains; 0 for
        RESUME). ``weight``: the workers of the group."""
        if kind not in OF_MEMBERSHIP:
            raise InvariantError(f"{kind.name} is not a membership event")
        self._event(kind, NO_CHUNK, group, clock, weight)

    def load(self, chunk: int, group: int, clock: int, crc: int | None) -> None:
        """Add that the chief, of ``group``, has set the chunk's values after ``clock`` iterations.
        ``crc``: crc32 of the bytes that workers will receive, None if it is not known."""
        flags = EventFlag.NONE if crc is None else EventFlag.CRC
        self._event(EventKind.LOAD, chunk, group, clock, float(crc or 0), 1.0, flags)

    def kept(self, kind: EventKind, chunk: int, number: int, crc: int | None) -> None:
        """Add SNAPSHOT or RESTORE: the checkpoint named after the clock ``number`` has the chunk as
        it is now. ``crc``: crc32 of the values that the optimizer steps, None without bytes."""
        flags = EventFlag.NONE if crc is None else EventFlag.CRC
        self._event(kind, chunk, 0, number, float(crc or 0), 1.0, flags)

    def inherit(self, chunk: int, group: int, clock: int) -> None:
        """Add that the update ``clock`` of ``group`` has arrived whole before the group's DEATH,
        which follows: the chunk will contain it."""
        self._event(EventKind.INHERIT, chunk, group, clock)

    def missed(self, chunk: int, round_number: int, groups: Sequence[int]) -> None:
        """Add that these groups, ascending, have missed the round of the chunk's next step; call it
        before :meth:`step`."""
        for group in groups:
            self._event(EventKind.MISSED, chunk, group, round_number)

    def taken_over(self, host: int) -> None:
        """Add that the server has failed: its replica, on server ``host``, continues."""
        self._event(EventKind.TAKEOVER, NO_CHUNK, 0, host)

    def filled(self, keeper: int, position: int) -> None:
        """Add that server ``keeper`` has another replica of the shard. The replica's log begins
        with this event, at ``position`` of this log."""
        self._event(EventKind.FILLED, NO_CHUNK, 0, keeper, float(position))

    def mode(self, round_number: int, mode: str, staleness: int) -> None:
        """Add that the mode changes with ``round_number``."""
        self._event(EventKind.MODE, NO_CHUNK, 0, round_number, float(code_of(mode, staleness)))

    def _event(self, _kind: int, _chunk: int, *_fields: Any, **_more: Any) -> None:
        """Count an event; its fields are not kept."""
        self.position += 1

    def checksum(self, chunk: int, crc: int, *, worker: int, clock: int) -> None:
        """Add crc32 of the chunk's bytes as workers must receive them, computed from the shard, for
        the reply to ``worker`` that is made now and stamped with ``clock``."""

    def checksum_of(self, _compute: Callable[[], int | None]) -> int | None:
        """Return the checksum to add, which ``compute`` returns; None if none is kept."""
        return None

    def flush(self) -> None:
        """Pass buffered records to the operating system. This happens by itself, with the first
        record after ``FLUSH_EVERY_S``; call it after a failure is noticed."""

    def close(self, *, is_complete: bool = True) -> None:
        """Flush and end the files; ``is_complete=False`` if the run failed. May be repeated."""


class ServerHistory(EventCount):
    """One server's log.

    Its ``position`` is the only count of a server's events: a reply is stamped with it.
    """

    def __init__(
        self,
        path_dir: Path,
        server: int,
        *,
        copy: int = 0,
        position: int = 0,
    ) -> None:
        """``copy``: number of the replica whose keeper writes it, 0 for the server itself;
        ``position``: that of its first event in the shard's log."""
        super().__init__(position)
        path = path_dir / (copy_name(server, copy) if copy else f"server-{server}")
        self._events = Recorder(path.with_suffix(".events"), FileKind.EVENTS, server)
        self._checksums = Recorder(path.with_suffix(".checksums"), FileKind.CHECKSUMS, server)

    def step(self, chunk: int, contributions: Contributions, lr_scale: float = 1.0) -> None:
        last = len(contributions) - 1
        for index, (group, clock, weight, is_empty, codec) in enumerate(contributions):
            flags = (index == last) | is_empty << 1
            self._event(EventKind.APPLY, chunk, group, clock, weight, lr_scale, flags, codec)

    def checksum_of(self, compute: Callable[[], int | None]) -> int | None:
        return compute()

    def checksum(self, chunk: int, crc: int, *, worker: int, clock: int) -> None:
        sums = self._checksums
        if sums.used == sums.CAPACITY:
            sums.flush()
        CHECKSUM.pack_into(
            sums.bytes, sums.used * CHECKSUM.size, self.position, clock, worker, chunk, crc
        )
        sums.used += 1
        self.num_checksums += 1
        if monotonic() >= sums.flush_at_s:
            sums.flush()

    def flush(self) -> None:
        self._events.flush()
        self._checksums.flush()

    def close(self, *, is_complete: bool = True) -> None:
        self._events.close(is_complete=is_complete)
        self._checksums.close(is_complete=is_complete)

    def _event(
        self,
        kind: int,
        chunk: int,
        group: int,
        clock: int,
        weight: float = 0.0,
        lr_scale: float = 1.0,
        flags: int = EventFlag.NONE,
        codec: int = 0,
    ) -> None:
        events = self._events
        if events.used == events.CAPACITY:
            events.flush()
        EVENT.pack_into(
            events.bytes,
            events.used * EVENT.size,
            clock,
            weight,
            lr_scale,
            chunk,
            group,
            kind,
            flags,
            codec,
        )
        events.used += 1
        self.position += 1
        if monotonic() >= events.flush_at_s:
            events.flush()


class WorkerHistory:
    """One worker's record of the versions it used and of what it pushed."""

    def __init__(self, path_dir: Path, worker: int) -> None:
        path = path_dir / f"worker-{worker}"
        self._uses = Recorder(path.with_suffix(".uses"), FileKind.USES, worker)
        self._pushes = Recorder(path.with_suffix(".pushes"), FileKind.PUSHES, worker)

    def uses(
        self,
        iteration: int,
        chunks: npt.ArrayLike,
        servers: npt.ArrayLike,
        positions: npt.ArrayLike,
        replies: npt.ArrayLike,
        has_crc: npt.ArrayLike = False,
        crcs: npt.ArrayLike = 0,
    ) -> None:
        """The forward pass of ``iteration`` used these versions.

        ``chunks`` [n], and for each its server, the position that its last reply carried, the
        clock which that reply was stamped with, and where ``has_crc`` the crc32 of *this worker's
        own memory* of the chunk, taken now. A scalar applies to all.
        """
        chunks = np.asarray(chunks)
        num, recorder = len(chunks), self._uses
        if recorder.used + num > recorder.CAPACITY:
            recorder.flush()
        if num > recorder.CAPACITY:
            half = num // 2
            columns = [
                np.broadcast_to(np.asarray(values), chunks.shape)
                for values in (chunks, servers, positions, replies, has_crc, crcs)
            ]
            self.uses(iteration, *(column[:half] for column in columns))
            self.uses(iteration, *(column[half:] for column in columns))
            return
        into = recorder.buffer[recorder.used : recorder.used + num]
        into["iteration"] = iteration
        into["chunk"] = chunks
        into["server"] = servers
        into["position"] = positions
        into["reply"] = replies
        into["has_crc"] = has_crc
        into["crc"] = crcs
        recorder.used += num
        if monotonic() >= recorder.flush_at_s:
            recorder.flush()

    def push(
        self,
        iteration: int,
        own: float,
        weight: float,
        empty: Collection[int],
        num_chunks: int,
    ) -> None:
        """This worker now pushes its slice of ``iteration``, of ``num_chunks`` chunks.

        ``own``: the weight of its own batches, ``weight``: that of its group, which the pushes
        carry; ``empty``: the chunks of the slice that are pushed without a gradient.
        """
        is_empty = len(empty) == num_chunks
        self._push(iteration, NO_CHUNK, own, weight, is_empty)
        if not is_empty:
            for chunk in sorted(empty):
                self._push(iteration, chunk, own, weight, True)

    def _push(self, iteration: int, chunk: int, own: float, weight: float, is_empty: bool) -> None:
        pushes = self._pushes
        if pushes.used == pushes.CAPACITY:
            pushes.flush()
        place = pushes.used * PUSH.size
        PUSH.pack_into(pushes.bytes, place, iteration, chunk, own, weight, is_empty, IS_CORRECTED)
        pushes.used += 1
        if monotonic() >= pushes.flush_at_s:
            pushes.flush()

    def flush(self) -> None:
        self._uses.flush()
        self._pushes.flush()

    def close(self, *, is_complete: bool = True) -> None:
        """Flush and end the files; ``is_complete=False`` when the run failed. May be repeated."""
        self._uses.close(is_complete=is_complete)
        self._pushes.close(is_complete=is_complete)


def slice_places(
    slices: Callable[[int], Sequence[Sequence[int]]], groups: Iterable[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """``RunRecord.slices``; ``slices(n)`` are those of a group of n workers."""
    sizes = {len(group) for group in groups}
    return tuple(
        _places(slices(size)) if size in sizes else () for size in range(1, max(sizes) + 1)
    )


def _places(slices: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """By chunk."""
    found = {chunk: place for place, chunks in enumerate(slices) for chunk in chunks}
    return tuple(found[chunk] for chunk in range(len(found)))
