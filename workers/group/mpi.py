"""A group over MPI, on a communicator of its own: messages from each worker to each.

MPI's own reductions are not used: the library chooses their order of addition. Slices are exchanged
and their owner adds, in worker order.

    channel = MpiChannel(comm, is_spinning=False)    # comm: of this group's workers, by place
    ...
    channel.close()                                  # collective, when no operation is in progress

Messages of an operation carry its number as their tag, and messages of a pair keep their order.
They are sent from the caller's memory and received into it, so this memory is MPI's until the
operation is done. MPI does not wake a waiting worker, so a wait backs off.

One thread at a time uses the channel: the rule for MPI in a worker
(:mod:`psdist.workers.early.progress`). Memory of a GPU needs an MPI that supports it. The device
completes the values before MPI reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from mpi4py import MPI

from psdist.errors import TransportError
from psdist.protocol.memory import allocate, as_bytes
from psdist.protocol.partition import Span
from psdist.workers.group.channel import CALLS, KnownSlices, Pending, Slices, T, check_calls
from psdist.workers.group.operations import BackOff, Operation, Steps

_HEAD: Final = 16
"""Numbers in a worker's first message of an agreement: call, number of values, first values. The
others follow in a second message."""
_TAGS_OF_OPERATION: Final = 2
_LEAST_TAG_LIMIT: Final = 32767
_LONGEST: Final = 1 << 30
"""Bytes of a message: MPI counts in 32 bits."""


class MpiChannel:
    """A worker's end of its group, of two workers or more."""

    def __init__(self, comm: MPI.Comm, *, is_spinning: bool) -> None:
        """The channel owns ``comm``. ``is_spinning``: a core is to spare for waits."""
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.place = comm.Get_rank()
        self.size = comm.Get_size()
        self.is_spinning = is_spinning
        self._comm = comm
        self._others = [place for place in range(self.size) if place != self.place]
        self._number = 0
        limit = comm.Get_attr(MPI.TAG_UB)
        self._num_tags = (limit if limit is not None else _LEAST_TAG_LIMIT) // _TAGS_OF_OPERATION
        self._duplicates: list[MpiChannel] = []
        self._checked = KnownSlices(lambda _flats, _slices: None)
        self._received: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}
        """(buffer, start, dtype, device) -> [size - 1, length]. Kept, because new pages are as slow
        as the exchange."""

    def allocate(self, num_bytes: int) -> memoryview:
        return allocate(num_bytes)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        return self._begin("agreement", self._agree(CALLS.index(call), values, self._next_tag()))

    def duplicate(self) -> MpiChannel:
        duplicate = MpiChannel(self._comm.Dup(), is_spinning=self.is_spinning)
        self._duplicates.append(duplicate)
        return duplicate

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        self._checked.of(flats, slices)
        steps = self._reduce_scatter(flats, slices, sums, self._next_tag())
        return self._begin("reduce-scatter", steps)

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        self._checked.of(flats, slices)
        return self._begin("all-gather", self._all_gather(flats, slices, self._next_tag()))

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        return self._begin("broadcast", self._broadcast(tensor, place, self._next_tag()))

    def exchange(
        self,
        given: torch.Tensor,
        to: Sequence[int],
        taken: torch.Tensor,
        of: Sequence[int],
        *,
        in_turns: int = 1,
    ) -> Pending[None]:
        steps = self._exchange(given, to, taken, of, in_turns, self._next_tag())
        return self._begin("exchange between the hosts", steps)

    def close(self) -> None:
        """End the channel. A collective; no operation may be in progress."""
        for duplicate in self._duplicates:
            duplicate.close()
        self._comm.Free()

    def _begin(self, what: str, steps: Steps[T]) -> Pending[T]:
        return Operation(_named(what, steps))

    def _next_tag(self) -> int:
        self._number += 1
        return self._number % self._num_tags * _TAGS_OF_OPERATION

    # -- the operations -------------------------------------------------------------------------

    def _agree(self, code: int, values: Sequence[float], tag: int) -> Steps[list[list[float]]]:
        head = torch.zeros(_HEAD, dtype=torch.float64)
        first = [float(code), float(len(values)), *values[: _HEAD - 2]]
        head[: len(first)] = torch.tensor(first, dtype=torch.float64)
        rest = torch.tensor(values[_HEAD - 2 :], dtype=torch.float64)
        heads = torch.empty((self.size, _HEAD), dtype=torch.float64)
        heads[self.place] = head
        sends = [each for place in self._others for each in self._send(head, place, tag)]
        sends += [each for place in self._others for each in self._send(rest, place, tag + 1)]
        yield from self._finish(
            each for place in self._others for each in self._receive(heads[place], place, tag)
        )
        rows = heads.tolist()
        rests = [rest] * self.size
        receives: list[MPI.Request] = []
        for place in self._others:
            num_more = max(int(rows[place][1]) - (_HEAD - 2), 0)
            rests[place] = torch.empty(num_more, dtype=torch.float64)
            receives += self._receive(rests[place], place, tag + 1)
        yield from self._finish(receives + sends)
        check_calls([int(row[0]) for row in rows])
        return [
            row[2 : 2 + int(row[1])] + more.tolist() for row, more in zip(rows, rests, strict=True)
        ]

    def _reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None,
        tag: int,
    ) -> Steps[None]:
        _finish_on_device(flats)
        requests: list[MPI.Request] = []
        mine = [_part(flats, span) for span in slices[self.place]]
        received = [
            self._rows(span, part) for span, part in zip(slices[self.place], mine, strict=True)
        ]
        for index, place in enumerate(self._others):
            for rows in received:
                requests += self._receive(rows[index], place, tag)
        for place in self._others:
            for span in slices[place]:
                requests += self._send(_part(flats, span), place, tag)
        yield from self._finish(requests)
        for index, (own, rows) in enumerate(zip(mine, received, strict=True)):
            parts = list(rows)
            parts.insert(self.place, own)
            _add(parts, self.place, own if sums is None else sums[index])

    def _all_gather(self, flats: Sequence[torch.Tensor], slices: Slices, tag: int) -> Steps[None]:
        _finish_on_device(flats)
        requests: list[MPI.Request] = []
        for place in self._others:
            for span in slices[place]:
                requests += self._receive(_part(flats, span), place, tag)
        for place in self._others:
            for span in slices[self.place]:
                requests += self._send(_part(flats, span), place, tag)
        yield from self._finish(requests)

    def _broadcast(self, tensor: torch.Tensor, place: int, tag: int) -> Steps[None]:
        _finish_on_device([tensor])
        flat = tensor.detach().reshape(-1)
        if place == self.place:
            yield from self._finish(
                each for other in self._others for each in self._send(flat, other, tag)
            )
            return
        received = torch.empty_like(flat)
        yield from self._finish(self._receive(received, place, tag))
        tensor.copy_(received.view(tensor.shape))

    def _exchange(
        self,
        given: torch.Tensor,
        to: Sequence[int],
        taken: torch.Tensor,
        of: Sequence[int],
        in_turns: int,
        tag: int,
    ) -> Steps[None]:
        _finish_on_device([given, taken])
        out, into = torch.split(given, list(to)), torch.split(taken, list(of))
        into[self.place].copy_(out[self.place])
        for turn in range(in_turns):
            requests: list[MPI.Request] = []
            for place in self._others:
                requests += self._receive(_turn_of(into[place], turn, in_turns), place, tag)
            for place in self._others:
                requests += self._send(_turn_of(out[place], turn, in_turns), place, tag)
            yield from self._finish(requests)

    # -- messages ------------------------------------------------------------------------------

    def _send(self, memory: torch.Tensor, place: int, tag: int) -> Iterator[MPI.Request]:
        for part in _messages(memory):
            yield self._comm.Isend([part, MPI.BYTE], place, tag)

    def _receive(self, memory: torch.Tensor, place: int, tag: int) -> Iterator[MPI.Request]:
        for part in _messages(memory):
            yield self._comm.Irecv([part, MPI.BYTE], place, tag)

    def _finish(self, requests: Iterable[MPI.Request]) -> Steps[None]:
        waiting, back_off = list(requests), BackOff(is_spinning=self.is_spinning)
        while not MPI.Request.Testall(waiting):
            yield back_off

    def _rows(self, span: Span, own: torch.Tensor) -> torch.Tensor:
        key = span.buffer, span.start, own.dtype, own.device
        rows = self._received.get(key)
        if rows is None or rows.shape[1] != len(own):
            rows = torch.empty((self.size - 1, len(own)), dtype=own.dtype, device=own.device)
            self._received[key] = rows
        return rows


def _part(flats: Sequence[torch.Tensor], span: Span) -> torch.Tensor:
    return flats[span.buffer][span.start : span.stop]


def _turn_of(memory: torch.Tensor, turn: int, num_turns: int) -> torch.Tensor:
    size = len(memory)
    return memory[size * turn // num_turns : size * (turn + 1) // num_turns]


def _messages(memory: torch.Tensor) -> Iterator[Any]:
    """Return the bytes of a contiguous 1-D tensor as mpi4py takes them; empty for no elements."""
    octets = memory.detach().view(torch.uint8)
    for start in range(0, len(octets), _LONGEST):
        part = octets[start : start + _LONGEST]
        yield part if part.is_cuda else as_bytes(part)


def _add(parts: list[torch.Tensor], own: int, total: torch.Tensor) -> None:
    """Sum ``parts`` in order into ``total``, which may be the part at ``own``. Other parts are
    overwritten."""
    first = parts[0]
    for part in parts[1:own]:
        first.add_(part)
    rest = parts[max(own, 1) :]
    torch.add(first, rest[0], out=total)
    for part in rest[1:]:
        total.add_(part)


def _finish_on_device(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for the device's streams, which MPI does not see."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _named(what: str, steps: Steps[T]) -> Steps[T]:
    """Steps whose MPI errors name the operation."""
    try:
        return (yield from steps)
    except MPI.Exception as error:
        raise TransportError(
            f"the {what} of this worker's group failed, perhaps because another worker of it has "
            f"ended: {error.Get_error_string()}"
        ) from error
