"""Groups in one process: the operations of several workers on a virtual network's clock.

For protocol tests and simulations. An operation is complete when all workers of the group have
come to it and its seeded time has passed, which differs by worker: whoever is done goes on. What a
back end may answer with garbage or a hang is an :class:`InvariantError` here: workers that are in
different operations, or in one with other shapes, and memory that changed under an operation (after
a reduce_scatter until all have begun the next one).

    group = VirtualGroup(network, [worker_id(0), worker_id(1)], seed=7, link=LinkModel())
    channel = group.channel(0)            # for the actor of worker 0
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

import torch

from psdist.errors import InvariantError, PsdistError
from psdist.protocol.memory import allocate, as_bytes
from psdist.transport.virtual import LinkModel, VirtualNetwork
from psdist.workers.group.channel import (
    CALLS,
    Pending,
    Slices,
    T,
    add_in_worker_order,
    check_calls,
    stretches_of,
)

Tensors = list[torch.Tensor]


class VirtualGroup:
    """What the workers of one group share."""

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
        self._beside: VirtualGroup | None = None
        self._come: dict[int, dict[int, _Operation[Any]]] = {}

    def channel(self, place: int) -> VirtualChannel:
        return VirtualChannel(self, place, len(self._members))

    def beside(self) -> VirtualGroup:
        """One more, of the same workers; the same for whoever asks."""
        if self._beside is None:
            self._beside = VirtualGroup(
                self._network, self._members, seed=self._seed + 1, link=self._link
            )
        return self._beside

    def join(self, number: int, operation: _Operation[Any]) -> None:
        """A worker has come to its operation ``number``, which must be the same for all."""
        come = self._come.setdefault(number, {})
        for other in come.values():
            if other.signature != operation.signature:
                raise InvariantError(
                    "workers of one group are in different operations: place "
                    f"{other.place} in {other.signature}, place {operation.place} in "
                    f"{operation.signature}"
                )
        come[operation.place] = operation
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
        """What others may still read: the seam's rule for reduce_scatter."""
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

    def beside(self) -> VirtualChannel:
        return self._group.beside().channel(self.place)

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        stretches_of(flats, slices)  # which refuses what is wrong
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
        operation = _Operation(self, (name, *shape), given, finish, self._lent)
        self._lent = None
        self._number += 1
        self._group.join(self._number, operation)
        return operation


def _shape(flats: Sequence[torch.Tensor], slices: Slices) -> tuple[Any, ...]:
    return [(len(flat), flat.dtype) for flat in flats], [list(spans) for spans in slices]


class _Operation(Generic[T]):
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
        self._results: list[T] = []
        self._error: PsdistError | None = None

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
        if self._channel.is_closed:
            return
        try:
            self._results.append(self._finish(brought))
        except PsdistError as error:
            self._error = error

    def is_done(self) -> bool:
        return bool(self._results) or self._error is not None

    def wait(self, at_most_s: float) -> None:
        pass

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        if not self._results:
            raise InvariantError(f"the result of {self.signature[0]} before it was done")
        return self._results[0]


class _Unchanged:
    """Memory as it was when this was made."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._checksums = list(map(_checksum, self._tensors))

    def is_so(self) -> bool:
        return list(map(_checksum, self._tensors)) == self._checksums


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(as_bytes(tensor))
