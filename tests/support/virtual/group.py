"""Groups in one process: the operations of several workers on a virtual network's clock.

For protocol tests and simulations. An operation is complete when all workers of the group have come
to it and its seeded time has passed, which differs by worker: a worker whose time has passed
continues. Where a back end may answer with garbage or a hang, this is an :class:`InvariantError`
here: workers that are in different operations, or in one with other shapes, and memory that changed
under an operation (after a reduce_scatter until all have begun the next one).

    group = VirtualGroup(network, [worker_id(0), worker_id(1)], seed=7, link=LinkModel())
    channel = group.channel(0)            # for the actor of worker 0
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

import torch

from psdist.errors import InvariantError
from psdist.protocol.memory import allocate, as_bytes
from psdist.workers.group.channel import (
    CALLS,
    Pending,
    Slices,
    T,
    add_in_worker_order,
    check_calls,
    joined_spans,
)
from psdist.workers.group.operations import Operation, Steps
from tests.support.virtual.network import LinkModel, VirtualNetwork

Tensors = list[torch.Tensor]


class VirtualGroup:
    """State shared by the workers of one group."""

    def __init__(
        self, network: VirtualNetwork, members: Sequence[int], *, seed: int, link: LinkModel
    ) -> None:
        """``members``: the stable id of the worker at each place. An operation takes each of them
        ``link``'s latency, jitter, and all that was brought over its bandwidth."""
        self._network = network
        self._members = members
        self._random = random.Random(f"{seed} {members[0]}")
        self._link = link
        self._seed = seed
        self._duplicate: VirtualGroup | None = None
        self._come: dict[int, dict[int, _Come[Any]]] = {}

    def channel(self, place: int) -> VirtualChannel:
        return VirtualChannel(self, place, len(self._members))

    def duplicate(self) -> VirtualGroup:
        """Return another group of the same workers; the same one on every call."""
        if self._duplicate is None:
            self._duplicate = VirtualGroup(
                self._network, self._members, seed=self._seed + 1, link=self._link
            )
        return self._duplicate

    def join(self, number: int, mine: _Come[Any]) -> None:
        """A worker has come to its operation ``number``, which must be the same for all."""
        come = self._come.setdefault(number, {})
        for other in come.values():
            if other.signature != mine.signature:
                raise InvariantError(
                    "workers of one group are in different operations: place "
                    f"{other.place} in {other.signature}, place {mine.place} in "
                    f"{mine.signature}"
                )
        come[mine.place] = mine
        if len(come) < len(self._members):
            return
        del self._come[number]
        brought = [come[place].read() for place in range(len(self._members))]
        num_bytes = sum(tensor.nbytes for tensors in brought for tensor in tensors)
        for place, member in enumerate(self._members):
            takes_s = self._link.latency_s + self._random.random() * self._link.jitter_s
            takes_s += num_bytes / self._link.bytes_per_s
            complete = come[place].complete_unless_closed
            self._network.schedule(
                takes_s,
                member,
                lambda complete=complete: complete(brought),  # type: ignore[misc]
            )


class VirtualChannel:
    """One worker's end of a :class:`VirtualGroup`."""

    def __init__(self, group: VirtualGroup, place: int, size: int) -> None:
        self.place = place
        self.size = size
        self._group = group
        self._number = 0
        self._lent: _Unchanged | None = None
        """Values that others may still read: the seam's rule for reduce_scatter."""
        self.is_closed = False

    def close(self) -> None:
        """Nothing that is under way ends here any more."""
        self.is_closed = True

    def allocate(self, num_bytes: int) -> memoryview:
        return allocate(num_bytes)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        row = torch.tensor([CALLS.index(call), *values], dtype=torch.float64)

        def compare(brought: list[Tensors]) -> list[list[float]]:
            rows = [tensors[0].tolist() for tensors in brought]
            check_calls([int(code) for code, *_ in rows])
            return [values for _, *values in rows]

        return self._begin("agree", (), [row], compare)

    def duplicate(self) -> VirtualChannel:
        return self._group.duplicate().channel(self.place)

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        joined_spans(flats, slices)  # which refuses what is wrong
        parts = [
            (place, flats[span.buffer][span.start : span.stop])
            for place, spans in enumerate(slices)
            for span in spans
        ]

        mine = [index for index, (place, _) in enumerate(parts) if place == self.place]
        totals = [parts[index][1] for index in mine] if sums is None else sums

        def add(brought: list[Tensors]) -> None:
            for index, total in zip(mine, totals, strict=True):
                add_in_worker_order([tensors[index] for tensors in brought], total)

        given = [part for _, part in parts]
        pending = self._begin("reduce_scatter", _shape(flats, slices), given, add)
        self._lent = _Unchanged(part for place, part in parts if place != self.place)
        return pending

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        parts = [[flats[span.buffer][span.start : span.stop] for span in spans] for spans in slices]

        def copy(brought: list[Tensors]) -> None:
            for place, tensors in enumerate(brought):
                if place != self.place:
                    for part, tensor in zip(parts[place], tensors, strict=True):
                        part.copy_(tensor)

        return self._begin("all_gather", _shape(flats, slices), parts[self.place], copy)

    def exchange(
        self,
        given: torch.Tensor,
        to: Sequence[int],
        taken: torch.Tensor,
        of: Sequence[int],
        *,
        in_turns: int = 1,
    ) -> Pending[None]:
        def copy(brought: list[Tensors]) -> None:
            arrived = [tensors[self.place] for tensors in brought]
            if [len(part) for part in arrived] != list(of):
                raise InvariantError(
                    f"place {self.place} of a group expects {list(of)} bytes, and "
                    f"{[len(part) for part in arrived]} come"
                )
            taken.copy_(torch.cat(arrived))

        return self._begin("exchange", (in_turns,), list(torch.split(given, list(to))), copy)

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        def copy(brought: list[Tensors]) -> None:
            if place != self.place:
                tensor.copy_(brought[place][0])

        given = [tensor] if place == self.place else []
        return self._begin("broadcast", (place, tensor.shape, tensor.dtype), given, copy)

    def _begin(
        self,
        name: str,
        shape: tuple[Any, ...],
        given: Tensors,
        finish: Callable[[list[Tensors]], T],
    ) -> Pending[T]:
        come = _Come(self, (name, *shape), given, finish, self._lent)
        self._lent = None
        self._number += 1
        self._group.join(self._number, come)
        return come.operation


def _shape(flats: Sequence[torch.Tensor], slices: Slices) -> tuple[Any, ...]:
    return [(len(flat), flat.dtype) for flat in flats], [list(spans) for spans in slices]


class _Come(Generic[T]):
    """A worker's input to an operation, and its callback for the inputs of all."""

    def __init__(
        self,
        channel: VirtualChannel,
        signature: tuple[Any, ...],
        given: Tensors,
        finish: Callable[[list[Tensors]], T],
        lent: _Unchanged | None,
    ) -> None:
        """``given``: what this worker brings; ``finish`` is called with what all have brought;
        ``lent``: what the operation before was given and others may have read until all are in
        this one."""
        self._channel = channel
        self.place = channel.place
        self.signature = signature
        self._given = given
        self._unchanged = _Unchanged(given)
        self._lent = lent
        self._finish = finish
        self._brought: list[Tensors] | None = None
        self.operation = Operation(self._steps())

    def _steps(self) -> Steps[T]:
        while self._brought is None:
            yield self
        return self._finish(self._brought)

    def wait(self, at_most_s: float) -> None:
        """Time is virtual here."""

    def read(self) -> Tensors:
        """A copy of what this worker brings, made when the last of the group has come."""
        if not self._unchanged.is_so():
            raise InvariantError(
                f"place {self.place} of a group has changed memory under its {self.signature[0]}"
            )
        if self._lent is not None and not self._lent.is_so():
            raise InvariantError(
                f"place {self.place} of a group has changed memory of its reduce_scatter before "
                f"all had begun the {self.signature[0]} after it"
            )
        return [tensor.clone() for tensor in self._given]

    def complete_unless_closed(self, brought: list[Tensors]) -> None:
        if not self._channel.is_closed:
            self._brought = brought
            self.operation.is_done()  # finishes it now


class _Unchanged:
    """Memory as it was when this was made."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._checksums = list(map(_checksum, self._tensors))

    def is_so(self) -> bool:
        return list(map(_checksum, self._tensors)) == self._checksums


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(as_bytes(tensor))
