"""The seam for the collectives of a group.

Implementations: :mod:`~psdist.workers.group.shared_memory` (workers of one host),
:mod:`~psdist.workers.group.process_group` (torch.distributed),
:mod:`~psdist.workers.group.mpi`, :mod:`~psdist.workers.group.reductions` (NCCL's own),
:mod:`~psdist.workers.group.two_levels` (several hosts: another channel on each host, and one
between them), :class:`AloneChannel` (a group of one), and in the tests
``tests.support.virtual.group`` (one process, a virtual clock). The rules:

* All workers of a group call the same operations in the same order; :meth:`GroupChannel.agree`
  carries the script's call, so that different calls end in an error.
* No operation blocks: each returns a :class:`Pending`. Until it is done, the memory that
  was passed belongs to the operation; that of :meth:`GroupChannel.reduce_scatter`, outside the
  worker's own slice, until the next operation that this worker begins is done.
* Sums are made **in worker order**, in the dtype of the memory, one worker after the other. In a
  group of several hosts (*two_levels*) this is done on each host, then with the hosts' sums, in the
  order of hosts (by their first workers). So results do not depend on the implementation, on
  delays, or on the owner of a slice. *reductions* is the exception: the back end chooses the order.

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
from psdist.protocol.collected import SET_MODE
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Span

CALLS = (
    *("optimizer.step", "save", "mean", "barrier", "pull", "prepare", "finish"),
    *("any", "all", "loader", "set_parameters", "optimizer_state"),
    *("start", "checkpoint", "written"),
    SET_MODE,
)
"""Calls of a script that an agreement names, by index."""

Slices = Sequence[Sequence[Span]]
"""For each place in the group the spans of flat memory that the worker there owns. Spans do not
overlap. Callers must not change slices that they have passed."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """An operation in progress."""

    def is_done(self) -> bool:
        """Make progress; True if :meth:`result` returns at once. May raise the same errors."""
        ...

    def wait(self, at_most_s: float) -> None:
        """Block until it is done, for at most ``at_most_s`` seconds; may return earlier."""
        ...

    def result(self) -> T_co:
        """Return the result; call it once, when it is done. Raises :class:`CollectiveError` or
        :class:`TransportError` if the operation has failed."""
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
        """Return zeroed memory for flats, which some channels reduce without a copy. Raises
        :class:`TransportError` if the memory is not available."""
        ...

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        """Exchange ``values`` in ``call`` (one of :data:`CALLS`). The result has the values of
        each worker, by place.

        Values are float64 and arrive with the same bits; their number may differ by worker. Raises
        :class:`CollectiveError`, the same on every worker, if the calls differ.
        """
        ...

    def duplicate(self) -> GroupChannel:
        """Return another end of the same group, with its own sequence of operations. Memory that
        one end has allocated serves both. A blocking collective over the group."""
        ...

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        """Sum this worker's slice of ``flats`` over the group, in the order above, in place. With
        ``sums``, a tensor for each span of the slice, write there and leave ``flats`` unchanged.

        ``flats``: 1-D tensors, of the same lengths and dtypes on every worker. Elements in no slice
        take no part and stay the caller's. Elements outside this worker's slice do not change.
        """
        ...

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        """Copy every worker's slice of ``flats`` to all other workers, in place."""
        ...

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        """Copy ``tensor`` of the worker at ``place`` to every worker's."""
        ...


class Exchanging(GroupChannel, Protocol):
    """A channel that can also send bytes from each worker to each, between hosts."""

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
        """Send the first ``to[0]`` bytes of ``given`` to place 0, the next ``to[1]`` to place 1,
        and so on. Receive ``of[p]`` bytes of place p into ``taken``, in the order of places.
        ``in_turns``: number of parts in which they are sent, the same on all workers."""
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
    """Raise :class:`CollectiveError` if workers, by place, have made different calls."""
    if len(set(codes)) > 1:
        called = "; ".join(
            f"the worker at place {place} of the group called {CALLS[code]}"
            for place, code in enumerate(codes)
        )
        raise CollectiveError(
            f"workers of one group made different calls: {called}; every worker must make the same "
            "calls in the same order"
        )


class JoinedSpans(NamedTuple):
    """Neighbouring spans of one flat, in the order of places, at most one span of each."""

    buffer: int
    start: int
    lengths: list[int]
    """Elements of each place, in the order of places."""


def joined_spans(flats: Sequence[torch.Tensor], slices: Slices) -> list[JoinedSpans]:
    """Join the spans of all places into the fewest stretches. Raises :class:`InvariantError` if
    spans overlap or exceed their flat."""
    stretches: list[JoinedSpans] = []
    at, last = (-1, 0), -1
    for (buffer, start, stop), place in _owned(slices):
        if at[0] == buffer and start < at[1]:
            raise InvariantError(f"slices give elements from {start} on of flat {buffer} twice")
        if stop > len(flats[buffer]):
            raise InvariantError(f"slices end at element {stop} of {len(flats[buffer])}")
        if at != (buffer, start) or place <= last:
            stretches.append(JoinedSpans(buffer, start, [0] * len(slices)))
        stretches[-1].lengths[place] += stop - start
        at, last = (buffer, stop), place
    return stretches


def _owned(slices: Slices) -> list[tuple[Span, int]]:
    return sorted((span, place) for place, spans in enumerate(slices) for span in spans)


def add_in_worker_order(rows: Iterable[torch.Tensor], total: torch.Tensor) -> None:
    """total = ((rows[0] + rows[1]) + rows[2]) + ..., for at least two rows. ``total`` must not be
    one of them."""
    first, second, *others = rows
    torch.add(first, second, out=total)
    for row in others:
        total.add_(row)


_MOST: Final = 256


class KnownSlices(Generic[T]):
    """A cache of values that follow from flats and slices: trainers pass the same ones again."""

    def __init__(self, make: Callable[[Sequence[torch.Tensor], Slices], T]) -> None:
        """``make`` must use only lengths and dtypes of the flats, which are compared."""
        self._make = make
        self._known: dict[int, tuple[Slices, list[tuple[int, torch.dtype]], T]] = {}
        """id of the slices -> (the slices, which keeps the id valid; lengths and dtypes of the
        flats; the value)."""

    def of(self, flats: Sequence[torch.Tensor], slices: Slices) -> T:
        """Return the value. Raises :class:`InvariantError` for invalid slices."""
        shapes = [(len(flat), flat.dtype) for flat in flats]
        known = self._known.get(id(slices))
        if known is not None and known[0] is slices and known[1] == shapes:
            return known[2]
        joined_spans(flats, slices)  # raises for invalid slices
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
