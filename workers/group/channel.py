"""The seam for a group's own collectives: what a worker may ask of the other workers of its group.

The implementations: :mod:`~psdist.workers.group.shared_memory` (workers of one host),
:mod:`~psdist.workers.group.process_group` (torch.distributed),
:mod:`~psdist.workers.group.mpi`, :mod:`~psdist.workers.group.reductions` (NCCL's own),
:mod:`~psdist.workers.group.two_levels` (several hosts: one of the others on each, and one between
them), :class:`AloneChannel` (a group of one), and in the tests
``tests.support.virtual.group`` (one process, a virtual clock). The rules:

* All workers of a group call the same operations in the same order; :meth:`GroupChannel.agree`
  carries what the script has called, so that calls that differ end in an error.
* Nothing here waits: every operation returns a :class:`Pending`. Until it is done, the memory that
  was passed belongs to the operation; that of :meth:`GroupChannel.reduce_scatter`, outside the
  worker's own slice, until the next operation that this worker begins is done.
* Sums are made **in worker order**, in the dtype of the memory, one worker after the other: in a
  group of several hosts so on each host, then, in the order of hosts (by their first workers), of
  these sums. Only *two_levels* is offered there. So results do not depend on the implementation, on
  delays, or on who holds which slice. *reductions* is the exception: the order is the back end's.

    rows = loop.wait_for(channel.agree("optimizer.step", [1.0, 0.0]), "the group")
    loop.wait_for(channel.reduce_scatter(gradients, slices), "the group")
    loop.wait_for(channel.all_gather(parameters, slices), "the group")
"""

# ruff: noqa: ARG002 - AloneChannel has the seam's signatures

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import torch

from psdist.errors import CollectiveError, InvariantError
from psdist.protocol.memory import allocate
from psdist.protocol.modes import SET_MODE
from psdist.protocol.partition import Span

CALLS = (
    *("optimizer.step", "save", "mean", "barrier", "pull", "prepare", "finish"),
    *("any", "all", "loader", "push", "optimizer_state", "start", "checkpoint", "written"),
    SET_MODE,
)
"""What workers of a group may meet in; an agreement carries the index."""

Slices = Sequence[Sequence[Span]]
"""For each place in the group, the stretches of flat memory that the worker there owns; no two
places share any. What was passed once is not changed any more."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """An operation that was begun."""

    def is_done(self) -> bool:
        """Whether :meth:`result` returns at once; makes progress. May raise what that would."""
        ...

    def wait(self, at_most_s: float) -> None:
        """Block until it is done, or for so many seconds; may return earlier."""
        ...

    def result(self) -> T_co:
        """What the operation brought; call it once, when it is done. Raises what went wrong:
        :class:`CollectiveError`, :class:`TransportError`."""
        ...


class GroupChannel(Protocol):
    """One worker's end of its group."""

    @property
    def place(self) -> int:
        """This worker's place in the group, 0 .. size - 1."""
        ...

    @property
    def size(self) -> int: ...

    def allocate(self, num_bytes: int) -> memoryview:
        """Zeroed memory for flats: as good as any, or one that is reduced without a copy. Raises
        :class:`TransportError` where there is not so much."""
        ...

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        """Meet the others in ``call`` (one of :data:`CALLS`): every worker's ``values``, by place.

        Values are float64 and arrive bit by bit; workers may bring different numbers of them.
        :class:`CollectiveError`, the same on every worker, if they have made different calls.
        """
        ...

    def duplicate(self) -> GroupChannel:
        """Another end of the same group: its operations and these do not meet, and a worker may be
        in one of each. Memory that either has allocated is as good for both. All workers of the
        group call it at the same time; it blocks."""
        ...

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        """This worker's slice of ``flats`` becomes the sum over the group, in the order above; or
        ``sums`` do, a tensor for each span of the slice, and ``flats`` stay as they are.

        ``flats``: 1-D tensors, of the same lengths and dtypes on every worker. What is in nobody's
        slice takes no part, and stays the caller's. Outside this worker's slice nothing changes.
        """
        ...

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        """Every worker's slice of ``flats`` is copied to all others, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        """Copy ``tensor`` of the worker at ``place`` to every worker's."""
        ...


class Exchanging(GroupChannel, Protocol):
    """An end over which bytes go from each worker to each: what joins hosts."""

    def duplicate(self) -> Exchanging: ...

    def exchange(
        self,
        given: torch.Tensor,
        to: Sequence[int],
        taken: torch.Tensor,
        of: Sequence[int],
        *,
        in_turns: int = 1,
    ) -> Pending[None]:
        """The first ``to[0]`` bytes of ``given`` go to place 0, the next ``to[1]`` to place 1, and
        so on; ``of[p]`` bytes of place p come into ``taken``, one place behind the other.
        ``in_turns``: in so many parts, the same number on all workers; how, not what."""
        ...


class Done(Generic[T]):
    """A :class:`Pending` that is done."""

    def __init__(self, value: T) -> None:
        self._value = value

    def is_done(self) -> bool:
        return True

    def wait(self, at_most_s: float) -> None:
        pass

    def result(self) -> T:
        return self._value


def check_calls(codes: Sequence[int]) -> None:
    """:class:`CollectiveError` unless the workers of a group, by place, have called the same."""
    if len(set(codes)) > 1:
        called = "; ".join(
            f"the worker at place {place} of the group called {CALLS[code]}"
            for place, code in enumerate(codes)
        )
        raise CollectiveError(
            f"workers of one group made different calls: {called}; every worker must make the same "
            "calls in the same order"
        )


class Stretch(NamedTuple):
    """Neighbouring spans of one flat, of places in their order, one of each at most."""

    buffer: int
    start: int
    lengths: list[int]
    """Elements of each place, one place behind the other."""


def stretches_of(flats: Sequence[torch.Tensor], slices: Slices) -> list[Stretch]:
    """The spans of all places, as few stretches as there can be. :class:`InvariantError` where
    places share elements, or a flat has not so many."""
    stretches: list[Stretch] = []
    at, last = (-1, 0), -1
    for (buffer, start, stop), place in _owned(slices):
        if at[0] == buffer and start < at[1]:
            raise InvariantError(f"slices give elements from {start} on of flat {buffer} twice")
        if stop > len(flats[buffer]):
            raise InvariantError(f"slices end at element {stop} of {len(flats[buffer])}")
        if at != (buffer, start) or place <= last:
            stretches.append(Stretch(buffer, start, [0] * len(slices)))
        stretches[-1].lengths[place] += stop - start
        at, last = (buffer, stop), place
    return stretches


def _owned(slices: Slices) -> list[tuple[Span, int]]:
    return sorted((span, place) for place, spans in enumerate(slices) for span in spans)


def add_in_worker_order(rows: Iterable[torch.Tensor], total: torch.Tensor) -> None:
    """total = ((rows[0] + rows[1]) + rows[2]) + ..., of two rows or more; ``total`` is none of
    them."""
    first, second, *others = rows
    torch.add(first, second, out=total)
    for row in others:
        total.add_(row)


_MOST: Final = 256


class KnownSlices(Generic[T]):
    """A cache of what flat memory and slices determine: trainers pass the same ones again."""

    def __init__(self, make: Callable[[Sequence[torch.Tensor], Slices], T]) -> None:
        """``make`` may look at lengths and dtypes of the flats only: they are what is compared."""
        self._make = make
        self._known: dict[int, tuple[Slices, list[tuple[int, torch.dtype]], T]] = {}
        """By slices' id: they, which keeps the id theirs, what memory they were used with, and
        what came of it."""

    def of(self, flats: Sequence[torch.Tensor], slices: Slices) -> T:
        """:class:`InvariantError` where slices share elements, or leave the flats."""
        shapes = [(len(flat), flat.dtype) for flat in flats]
        known = self._known.get(id(slices))
        if known is not None and known[0] is slices and known[1] == shapes:
            return known[2]
        stretches_of(flats, slices)  # which refuses what is wrong
        if len(self._known) == _MOST:
            self._known.clear()
        made = self._make(flats, slices)
        self._known[id(slices)] = slices, shapes, made
        return made


class AloneChannel:
    """A group of one worker: each operation is done when it is called, and moves nothing."""

    place = 0
    size = 1

    def allocate(self, num_bytes: int) -> memoryview:
        return allocate(num_bytes)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        return Done([list(values)])

    def duplicate(self) -> AloneChannel:
        return self

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        if sums is not None:
            for (buffer, start, stop), total in zip(slices[0], sums, strict=True):
                total.copy_(flats[buffer][start:stop])
        return Done(None)

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        return Done(None)

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        return Done(None)
