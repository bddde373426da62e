"""A group that continues without failed members: its operations outlive the channel below.

An operation with a failed member waits until the membership has changed (psdist.workers.shrinking).
Then all remaining members ``cut`` the operations in progress, and ``go_on`` over another channel,
which joins them. Operations in progress end as follows:

* An agreement is complete on all members or on none. If one member has its result, the others get
  that. Otherwise all repeat it without the failed member.
* A sum raises :class:`~psdist.errors.GroupReformedError` on all members, also on those that begin
  it later.
* A gathering raises it, too, and its caller repeats it with the new slices. But if a member has the
  values, the others get them from there.

    channel = ShrinkingChannel(inner)
    agreed = channel.cut()                      # number and result of the last agreement
    channel.go_on(another, agreed=None, has_values=False, is_given_up=True)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from psdist.errors import GroupReformedError, InvariantError, MemberLostError
from psdist.workers.group.channel import CALLS, GroupChannel, Pending, Slices, T, check_calls
from psdist.workers.group.operations import Operation, Steps, until_done

logger = logging.getLogger("psdist")

Rows = list[list[float]]

_LOOK_S = 1e-3
"""Interval between two looks while the group has no channel."""


class Agreed(NamedTuple):
    """The last agreement of a group."""

    number: int
    """Agreements so far, with this one."""
    call: str
    rows: Rows
    """The result."""


class _UnderWay(NamedTuple):
    operation: Operation[Any]
    call: str
    """Call of an agreement; "" for other operations."""
    begin: Callable[[], Steps[Any]]
    """Return the steps over the current channel."""
    is_gathering: bool


class ShrinkingChannel:
    def __init__(self, inner: GroupChannel) -> None:
        self._inner: GroupChannel | None = inner
        """None while the group has no channel."""
        self._last = inner
        self._agreed = Agreed(0, CALLS[0], [])
        self._under_way: list[_UnderWay] = []
        self.is_given_up = False
        """True if the current iteration is no longer reduced."""

    @property
    def inner(self) -> GroupChannel:
        """The channel that carries the operations, or did until the group lost a member."""
        return self._last

    @property
    def place(self) -> int:
        return self._last.place

    @property
    def size(self) -> int:
        return self._last.size

    @property
    def agreed(self) -> Agreed:
        """The last agreement whose result the caller has received."""
        self._count_taken()
        return self._agreed

    def _count_taken(self) -> None:
        taken = [each for each in self._under_way if each.operation.is_taken]
        self._under_way = [each for each in self._under_way if not each.operation.is_taken]
        for operation, call, *_ in taken:
            if call and operation.error is None:
                self._agreed = Agreed(self._agreed.number + 1, call, operation.result())

    def allocate(self, num_bytes: int) -> memoryview:
        return self._last.allocate(num_bytes)

    def duplicate(self) -> GroupChannel:
        raise InvariantError("a group that survives failures reduces in step() only")

    # -- operations ----------------------------------------------------------------------------

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[Rows]:
        mine = list(values)
        return self._begin(lambda inner: inner.agree(call, mine), call=call)

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        if self.is_given_up:
            return Operation(_cut_off())
        return self._begin(lambda inner: inner.reduce_scatter(flats, slices, sums))

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        if self._inner is not None:
            self.is_given_up = False
        return self._begin(lambda inner: inner.all_gather(flats, slices), is_gathering=True)

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        return self._begin(lambda inner: inner.broadcast(tensor, place))

    def _begin(
        self,
        begin: Callable[[GroupChannel], Pending[T]],
        *,
        call: str = "",
        is_gathering: bool = False,
    ) -> Pending[T]:
        def steps() -> Steps[T]:
            try:
                return (yield from until_done(begin(self._last)))
            except MemberLostError as error:
                logger.info("waiting for the group's membership: %s", error)
                return (yield from _wait_for_restart())

        self._count_taken()
        operation = Operation(_wait_for_restart() if self._inner is None else steps())
        self._under_way.append(_UnderWay(operation, call, steps, is_gathering))
        return operation

    # -- when a member has failed --------------------------------------------------------------

    def cut(self) -> Agreed:
        """Stop all operations over the current channel. A result that its caller has not received
        is discarded."""
        agreed = self.agreed
        self._inner = None
        for each in self._under_way:
            each.operation.restart(_wait_for_restart())
        return agreed

    def go_on(
        self, inner: GroupChannel, *, agreed: Agreed | None, has_values: bool, is_given_up: bool
    ) -> None:
        """Continue over ``inner``, which joins the remaining members.

        ``agreed``: the result that another member has of an agreement unfinished here;
        ``has_values``: the gathered values have arrived by another way; ``is_given_up``: the
        current iteration is no longer reduced. Raises :class:`CollectiveError` if the members
        made different calls.
        """
        self._inner = self._last = inner
        self.is_given_up = is_given_up
        for operation, call, begin, is_gathering in self._under_way:
            if call and agreed is not None:
                check_calls([CALLS.index(agreed.call), CALLS.index(call)])
                operation.restart(_given(agreed.rows))
            elif call:
                operation.restart(begin())
            elif is_gathering and has_values:
                operation.restart(_given(None))
            else:
                operation.restart(_cut_off())


class _Nap:
    """Waits for a decision that comes through this worker's own loop."""

    def wait(self, at_most_s: float) -> None:
        time.sleep(min(at_most_s, _LOOK_S))


def _wait_for_restart() -> Steps[NoReturn]:
    while True:
        yield _Nap()


def _given(result: T) -> Steps[T]:
    yield from ()
    return result


def _cut_off() -> Steps[NoReturn]:
    yield from ()
    raise GroupReformedError
