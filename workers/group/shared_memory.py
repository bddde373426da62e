"""A group of one host whose workers read one another's memory, without messages.

Every worker has a *book*, a segment (:mod:`~psdist.workers.group.segments`) that only it writes.
For operation n it writes an entry (the operation, and the location of its data), then the number n;
the others wait for that number and read. The number is an aligned word of 8 bytes, which the
hardware reads and writes as a whole. It shows that the entry is complete; :func:`fence` keeps that
order.

Locations of data:

* Memory from :meth:`SharedMemoryChannel.allocate` is added in place. A trainer's flat gradients are
  there.
* Other data is copied into staging memory first, which grows on demand: the flat parameters (the
  script may write to them as soon as an operation is done, and a process that it forks must see the
  old values), and long entries.

The order of operations determines when memory may be reused. A worker has finished operation n only
after all have begun n, and no worker begins n before it has finished n - 1. So when a worker has
finished n, no other worker reads data of n - 1 or before. Therefore entries alternate between two
locations, and staging memory is reused two operations later. Shared memory that was passed to
``reduce_scatter`` is the caller's again, outside its own slice, when the next operation is done:
the rule of the seam.

A waiting worker looks a few times, yields the core in between, and then sleeps until the awaited
worker rings: an idle worker takes no core. Waiting workers check /proc a few times a second for
failed workers.

    channel, why_not = connect(over, is_spinning=False)      # over another channel

Longer than other modules: the order of writes and reads is one argument about both sides.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from psdist.errors import InvariantError, MemberLostError, TransportError
from psdist.protocol.partition import Span
from psdist.workers.group.channel import (
    CALLS,
    GroupChannel,
    KnownSlices,
    Pending,
    Slices,
    T,
    add_in_worker_order,
    check_calls,
)
from psdist.workers.group.operations import BackOff, Operation, Steps
from psdist.workers.group.segments import (
    Bell,
    Segment,
    bytes_of,
    fence,
    has_ended,
    open_bell,
    open_segment,
    ring,
    started_at,
)

_TOKEN, _BEGUN, _AWAITS = 0, 8, 16
"""Words of a book, each in its own cache line: a token that identifies it; the number of the last
operation; 1 + place of the worker for which its worker sleeps, or 0."""
_ENTRY_AT: Final = (512, 1024)
_ENTRY_WORDS: Final = 511
"""Entries of even and of odd operations: (number of words, words), or (-1, number of words,
location of the words)."""
_BOOK_BYTES: Final = 8 * 1536

_WHERE_WORDS: Final = 4
"""A location in a worker's memory: serial number, file descriptor and bytes of its segment, and
offset in the segment."""
_NOWHERE: Final = (0, 0, 0, 0)

_ALIGN: Final = 64
_BLOCK_BYTES: Final = 256 << 10
"""Sums of more than two rows are made by blocks, which stay in a core's cache."""

_LOOK_S: Final = 0.1
"""Interval at which a waiting worker checks that the others run."""
_SET_UP_S: Final = 0.05

_NO_OFFER: Final = (0.0, 0.0, -1.0, -1.0, 0.0)

_serials = itertools.count(1)
"""Serial numbers of this process's segments. A file descriptor may be reused after a close."""

_AGREE, _REDUCE_SCATTER, _ALL_GATHER, _BROADCAST = range(4)
_KINDS: Final = ("agree", "reduce_scatter", "all_gather", "broadcast")

Make = Callable[[int], Segment]


def connect(
    over: GroupChannel, *, is_spinning: bool, make: Make = Segment
) -> tuple[SharedMemoryChannel | None, str]:
    """Return this worker's end of a group in shared memory; or None, on all workers, and a reason.

    A blocking collective over the channel ``over``. ``make`` makes segments.
    """
    offer, why_not = None, ""
    try:
        offer = Offer(make)
    except OSError as error:
        why_not = f"cannot allocate shared memory: {error}"
    table = _wait(over.agree("start", _NO_OFFER if offer is None else offer.row))
    channel = None
    if offer is not None:
        try:
            channel = offer.accept(over.place, table, is_spinning=is_spinning)
        except (OSError, ValueError) as error:
            why_not = str(error)
    can = [bool(ok) for (ok,) in _wait(over.agree("start", [channel is not None]))]
    if all(can):
        return channel, ""
    if channel is not None:
        channel.close()
    elif offer is not None:
        offer.close()
    return None, why_not or f"the worker at place {can.index(False)} of the group could not"


def _wait(pending: Pending[T]) -> T:
    while not pending.is_done():
        pending.wait(_SET_UP_S)
    return pending.result()


class Offer:
    """A worker's book and bell, offered to the others before the group exists."""

    def __init__(self, make: Make = Segment) -> None:
        """Raises :class:`OSError` if the host has no memory."""
        self._make = make
        self._book = make(_BOOK_BYTES)
        self._bell = Bell()
        token, pid = secrets.randbits(53), os.getpid()
        self._book.bytes.view(torch.int64)[_TOKEN] = token
        self.row: list[float] = [pid, started_at(pid), self._book.fd, self._bell.fd, token]
        """Numbers that the others need to open them."""

    def accept(
        self, place: int, table: Sequence[Sequence[float]], *, is_spinning: bool
    ) -> SharedMemoryChannel:
        """Return the end at ``place`` of the group with these rows. Raises OSError or ValueError
        if another worker's memory cannot be opened."""
        others: list[_Other] = []
        try:
            for at, row in enumerate(table):
                if at != place:
                    others.append(_Other(at, *map(int, row)))
        except (OSError, ValueError):
            for other in others:
                other.close()
            raise
        return SharedMemoryChannel(place, self._book, self._bell, others, is_spinning, self._make)

    def close(self) -> None:
        self._book.close()
        self._bell.close()


class _Own:
    """A segment of this worker, with its serial number."""

    def __init__(self, segment: Segment, serial: int) -> None:
        self.segment = segment
        self.serial = serial
        self.used_by = 0
        """Number of the last operation that has used it."""

    def where(self, offset: int) -> tuple[int, int, int, int]:
        return self.serial, self.segment.fd, self.segment.num_bytes, offset

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the offset of ``tensor`` in this segment; None if it is elsewhere."""
        offset = tensor.data_ptr() - self.segment.address
        return offset if 0 <= offset <= self.segment.num_bytes - tensor.nbytes else None


class _Other:
    """Another worker of the group."""

    def __init__(self, place: int, pid: int, start: int, book: int, bell: int, token: int) -> None:
        """Raises :class:`OSError` or ValueError if its memory cannot be opened."""
        self.place = place
        self._pid, self._start = pid, start
        self._opened: dict[int, tuple[int, torch.Tensor]] = {}
        """File descriptor -> (serial number, bytes) of the segment."""
        if book < 0:
            raise ValueError(f"the worker at place {place} of the group could not allocate any")
        try:
            self._words = memoryview(open_segment(pid, book, _BOOK_BYTES)).cast("q")
            if self._words[_TOKEN] != token:
                raise ValueError("its number is another process's here")
            self._bell = open_bell(pid, bell)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"memory of process {pid}, of the worker at place {place} of the group, cannot be "
                f"opened: {error}"
            ) from error

    def close(self) -> None:
        os.close(self._bell)

    def wake(self, place: int) -> None:
        """Wake it if it sleeps until the worker at ``place`` begins an operation."""
        if self._words[_AWAITS] == 1 + place:
            ring(self._bell)

    def is_alive(self) -> bool:
        return started_at(self._pid) == self._start

    def has_begun(self, number: int) -> bool:
        return bool(self._words[_BEGUN] >= number)

    def entry(self, number: int) -> list[int]:
        """Return its entry for operation ``number``, which it has begun."""
        at = _ENTRY_AT[number & 1]
        length = self._words[at]
        if length >= 0:
            return self._words[at + 1 : at + 1 + length].tolist()
        num_words, *where = self._words[at + 1 : at + 2 + _WHERE_WORDS].tolist()
        words: list[int] = self.bytes_at(where)[: 8 * num_words].view(torch.int64).tolist()
        return words

    def bytes_at(self, where: Sequence[int]) -> torch.Tensor:
        """Return the bytes from this location to the end of the segment."""
        serial, fd, num_bytes, offset = where
        known, memory = self._opened.get(fd, (-1, None))
        if memory is None or known != serial:
            try:
                memory = bytes_of(open_segment(self._pid, fd, num_bytes))
            except (OSError, ValueError) as error:
                kind = MemberLostError if has_ended(self._pid, self._start) else TransportError
                raise kind(
                    f"memory of the worker at place {self.place} of this worker's group, process "
                    f"{self._pid}, cannot be opened: {error}"
                ) from error
            self._opened[fd] = serial, memory
        return memory[offset:]


class SharedMemoryChannel:
    """A worker's end of its group, of two workers or more."""

    def __init__(
        self,
        place: int,
        book: Segment,
        bell: Bell,
        others: Sequence[_Other],
        is_spinning: bool,
        make: Make,
    ) -> None:
        self.place = place
        self.size = 1 + len(others)
        self.is_spinning = is_spinning
        self._book, self._bell = book, bell
        self._words = memoryview(book.memory).cast("q")
        self._others = others
        self._make = make
        self._number = 0
        """Number of the last operation."""
        self._is_closed = False
        self._line: deque[Operation[Any]] = deque()
        """Unfinished operations. One runs at a time."""
        self._duplicates: list[SharedMemoryChannel] = []
        self._shared: list[_Own] = []
        """Segments of :meth:`allocate`: one list for this end and its duplicates."""
        self._staging: list[_Own] = []
        self._scratch = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
        self._signatures = KnownSlices(_signature)
        self._looked_s = 0.0

    def allocate(self, num_bytes: int) -> memoryview:
        return memoryview(self._add_segment(self._shared, num_bytes).segment.memory)[:num_bytes]

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        return self._begin(self._agree(CALLS.index(call), array("d", values)))

    def duplicate(self) -> SharedMemoryChannel:
        duplicate, why_not = connect(self, is_spinning=self.is_spinning, make=self._make)
        if duplicate is None:
            raise TransportError(
                f"cannot allocate memory for more operations of this worker's group: {why_not}; "
                "use hosts.group_tier = torch, which needs none"
            )
        duplicate._shared = self._shared
        self._duplicates.append(duplicate)
        return duplicate

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        signature = self._signatures.of(flats, slices)
        return self._begin(self._reduce_scatter(flats, slices, signature, sums))

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        return self._begin(self._all_gather(flats, slices, self._signatures.of(flats, slices)))

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        return self._begin(self._broadcast(tensor, place))

    def succeed(self, over: GroupChannel) -> SharedMemoryChannel:
        """Return this worker's end of the group of the remaining workers, which ``over`` joins.
        Operations in progress never end. The memory of :meth:`allocate` serves the new end. A
        blocking collective over ``over``. Raises :class:`TransportError` on all workers if they
        cannot open one another's memory."""
        channel, why_not = connect(over, is_spinning=self.is_spinning, make=self._make)
        if channel is None:
            _wait(over.agree("start"))  # raises if the reason is a failed worker
            raise TransportError(
                f"cannot allocate shared memory for the remaining workers of the group: {why_not}"
            )
        channel._shared, self._shared = self._shared, []
        self.close()
        return channel

    def close(self) -> None:
        """End the channel; memory of :meth:`allocate` stays. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for own in self._shared:
            own.segment.close()
        self._shared.clear()
        for duplicate in self._duplicates:
            duplicate.close()
        for own in self._staging:
            own.segment.close()
        self._book.close()
        self._bell.close()
        for other in self._others:
            other.close()

    def _begin(self, steps: Steps[T]) -> Pending[T]:
        return Operation(steps, self._line)

    # -- the operations -------------------------------------------------------------------------

    def _agree(self, code: int, values: array[float]) -> Steps[list[list[float]]]:
        number = self._next()
        words = [_AGREE, code, *array("q", values.tobytes())]
        entries = yield from self._meet("agreement", number, words)
        check_calls([code for _, code, *_ in entries])
        return [array("d", array("q", words).tobytes()).tolist() for _, _, *words in entries]

    def _reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        signature: int,
        sums: Sequence[torch.Tensor] | None,
    ) -> Steps[None]:
        number = self._next()
        wheres = self._places_of(flats, slices, number)
        words = [_REDUCE_SCATTER, signature]
        words += [word for where in wheres for word in where]
        entries = yield from self._meet("reduce-scatter", number, words)
        of_others: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for each, (index, start, stop) in enumerate(slices[self.place]):
            flat = flats[index]
            if index not in of_others:
                at = 2 + _WHERE_WORDS * index
                of_others[index] = [
                    (
                        other.place,
                        other.bytes_at(entries[other.place][at : at + _WHERE_WORDS]),
                    )
                    for other in self._others
                ]
            rows = [flat[start:stop]] * self.size
            for place, theirs in of_others[index]:
                part = theirs[start * flat.itemsize : stop * flat.itemsize]
                rows[place] = part.view(flat.dtype)
            self._add(rows, rows[self.place] if sums is None else sums[each])

    def _all_gather(
        self, flats: Sequence[torch.Tensor], slices: Slices, signature: int
    ) -> Steps[None]:
        number = self._next()
        parts = [
            [_bytes(flats[span.buffer][span.start : span.stop]) for span in spans]
            for spans in slices
        ]
        where = self._stage(parts[self.place], number)
        words = [_ALL_GATHER, signature, *where]
        entries = yield from self._meet("all-gather", number, words)
        for other in self._others:
            self._copy(other, entries[other.place], parts[other.place])

    def _broadcast(self, tensor: torch.Tensor, place: int) -> Steps[None]:
        number = self._next()
        flat = tensor.detach().reshape(-1)
        where = self._stage([_bytes(flat)], number) if place == self.place else _NOWHERE
        words = [_BROADCAST, _signature([flat], [[Span(place, 0, len(flat))]]), *where]
        entries = yield from self._meet("broadcast", number, words)
        for other in self._others:
            if other.place == place:
                target = torch.empty_like(flat)
                self._copy(other, entries[place], [_bytes(target)])
                tensor.copy_(target.view(tensor.shape))

    @staticmethod
    def _copy(other: _Other, entry: list[int], parts: Sequence[torch.Tensor]) -> None:
        """Copy the other worker's staged data into ``parts``."""
        if any(part.nbytes for part in parts):
            theirs = other.bytes_at(entry[2:])
            at = 0
            for part in parts:
                part.copy_(theirs[at : at + part.nbytes])
                at += _aligned(part.nbytes)

    def _add(self, rows: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Sum all rows in worker order into ``target``, which may be this worker's row."""
        before = rows[: self.place]
        if self.size == 2:
            torch.add(rows[0], rows[1], out=target)
            return
        step = _BLOCK_BYTES // target.itemsize
        scratch = self._scratch.view(target.dtype)
        for start in range(0, len(target), step):
            block = target[start : start + step]
            parts = [row[start : start + step] for row in rows]
            if len(before) < 2:
                torch.add(parts[0], parts[1], out=block)
                rest = parts[2:]
            else:
                total = scratch[: len(block)]
                add_in_worker_order(parts[: self.place], total)
                torch.add(total, parts[self.place], out=block)
                rest = parts[self.place + 1 :]
            for part in rest:
                block.add_(part)

    # -- the data of this worker ---------------------------------------------------------------

    def _places_of(
        self, flats: Sequence[torch.Tensor], slices: Slices, number: int
    ) -> list[tuple[int, int, int, int]]:
        """Return the locations of ``flats`` for the others. Copy flats that are not shared into
        staging memory."""
        used = {span.buffer for spans in slices for span in spans}
        return [
            self._place_of(index, flat, slices, number) if index in used else _NOWHERE
            for index, flat in enumerate(flats)
        ]

    def _place_of(
        self, index: int, flat: torch.Tensor, slices: Slices, number: int
    ) -> tuple[int, int, int, int]:
        for own in self._shared:
            if (offset := own.offset_of(flat)) is not None:
                return own.where(offset)
        staging = self._staging_for(flat.nbytes, number)
        source, target = _bytes(flat), staging.segment.bytes
        for place, spans in enumerate(slices):
            for buffer, start, stop in spans:
                if buffer == index and place != self.place:
                    part = slice(start * flat.itemsize, stop * flat.itemsize)
                    target[part].copy_(source[part])
        return staging.where(0)

    def _stage(self, parts: Sequence[torch.Tensor], number: int) -> tuple[int, int, int, int]:
        """Copy ``parts``, bytes, into staging memory, in order; return the location."""
        num_bytes = sum(_aligned(part.nbytes) for part in parts)
        if not num_bytes:
            return _NOWHERE
        staging = self._staging_for(num_bytes, number)
        at = 0
        for part in parts:
            staging.segment.bytes[at : at + part.nbytes].copy_(part)
            at += _aligned(part.nbytes)
        return staging.where(0)

    def _staging_for(self, num_bytes: int, number: int) -> _Own:
        """Return staging memory for operation ``number`` that no worker reads any more."""
        free = [own for own in self._staging if own.used_by < number - 1]
        large = [own for own in free if own.segment.num_bytes >= num_bytes]
        if large:
            staging = min(large, key=lambda own: own.segment.num_bytes)
        else:
            if free:  # it grows
                self._staging.remove(free[-1])
                free[-1].segment.free()
            staging = self._add_segment(self._staging, num_bytes)
        staging.used_by = number
        return staging

    def _add_segment(self, to: list[_Own], num_bytes: int) -> _Own:
        try:
            segment = self._make(num_bytes)
        except OSError as error:
            raise TransportError(
                f"cannot allocate {num_bytes} bytes of shared memory for this worker's group: "
                f"{error}; use hosts.group_tier = torch, which needs none"
            ) from error
        own = _Own(segment, next(_serials))
        to.append(own)
        return own

    # -- the book ------------------------------------------------------------------------------

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _meet(self, what: str, number: int, words: list[int]) -> Steps[list[list[int]]]:
        """Begin operation ``number`` with this entry. Return the entries of all, by place, when
        all have begun it."""
        self._write(number, words)
        for other in self._others:
            awaited = _Awaited(self._words, self._bell, other, number, is_spinning=self.is_spinning)
            while not other.has_begun(number):
                self._check_members(what, number)
                yield awaited
        fence()
        entries = [words] * self.size
        for other in self._others:
            entries[other.place] = other.entry(number)
        kinds = {kind for kind, *_ in entries}
        details = {detail for kind, detail, *_ in entries if kind != _AGREE}
        if len(kinds) > 1 or len(details) > 1:
            said = ", ".join(
                f"place {place} in {_KINDS[kind]} {detail}"
                for place, (kind, detail, *_) in enumerate(entries)
            )
            raise InvariantError(f"workers of one group are in different operations: {said}")
        return entries

    def _write(self, number: int, words: list[int]) -> None:
        at = _ENTRY_AT[number & 1]
        entry = array("q", words)
        if len(entry) <= _ENTRY_WORDS:
            self._words[at] = len(entry)
        else:
            where = self._stage([torch.frombuffer(entry, dtype=torch.uint8)], number)
            self._words[at] = -1
            entry = array("q", [len(entry), *where])
        self._words[at + 1 : at + 1 + len(entry)] = memoryview(entry)
        fence()
        self._words[_BEGUN] = number
        fence()
        for other in self._others:
            other.wake(self.place)

    def _check_members(self, what: str, number: int) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        for other in self._others:
            # The data of operations that it had begun is complete.
            if not other.is_alive() and not other.has_begun(number):
                raise MemberLostError(
                    f"the {what} of this worker's group failed, because the worker at place "
                    f"{other.place} of it has ended"
                )


class _Awaited(BackOff):
    """Sleeps until another worker has begun an operation."""

    def __init__(
        self, words: memoryview, bell: Bell, other: _Other, number: int, *, is_spinning: bool
    ) -> None:
        """``words`` and ``bell``: of this worker; ``number``: of the operation."""
        super().__init__(is_spinning=is_spinning)
        self._words, self._bell = words, bell
        self._other, self._number = other, number

    def sleep(self, at_most_s: float) -> None:
        self._words[_AWAITS] = 1 + self._other.place
        fence()  # the other worker rings for what it begins from now on; earlier ones are seen here
        if not self._other.has_begun(self._number):
            self._bell.wait(at_most_s)
        self._words[_AWAITS] = 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


def _signature(flats: Sequence[torch.Tensor], slices: Slices) -> int:
    """Return a number that is equal on workers with the same shapes and slices."""
    shapes = [(len(flat), flat.dtype) for flat in flats]
    return zlib.crc32(repr((shapes, [list(map(tuple, spans)) for spans in slices])).encode())
