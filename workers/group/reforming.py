"""A group that goes on without those of its workers that have died: an end whose operations outlive
the channel that carries them.

Until the others of the group know of a death (psdist.workers.reforming) an operation in which
somebody is missing stays as it is. Then all of them ``cut`` what is under way, and ``go_on`` over
another channel, which joins those who are left. Of what was under way

* an agreement is whole: where one worker has its result, the others get that; where none has, all
  begin it anew, without the dead;
* a sum is nobody's: who reduces an iteration's gradients is told so
  (:class:`~psdist.errors.GroupReformedError`), and so is whoever comes to that operation later;
* so is a gathering, which is then begun anew with what has become everybody's slice, but where
  somebody has its result: those who have not get the values from there, meanwhile.

    channel = ReformingChannel(inner)
    standing = channel.cut()                    # agreements so far, and the last one's result
    channel.go_on(another, agreed=None, has_values=False, is_given_up=True)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple

import torch

from psdist.errors import GroupReformedError, InvariantError, MemberLostError
from psdist.workers.group.channel import CALLS, GroupChannel, Pending, Slices, T, check_calls

logger = logging.getLogger("psdist")

Rows = list[list[float]]

_LOOK_S = 1e-3
"""Between two looks of a worker that waits while its group has no channel."""


class Agreed(NamedTuple):
    """What the workers of a group have agreed upon last."""

    number: int
    """Agreements so far."""
    call: str
    rows: Rows
    """As every worker got them."""


class ReformingChannel:
    def __init__(self, inner: GroupChannel) -> None:
        self._inner: GroupChannel | None = inner
        """None while the group has no channel."""
        self._last = inner
        self.agreed = Agreed(0, CALLS[0], [])
        self._under_way: list[_Operation[None] | _Operation[Rows]] = []
        self._is_given_up = False
        """Whether the iteration that is under way is reduced no more."""

    @property
    def inner(self) -> GroupChannel:
        """What carries the operations, or has until the group lost somebody."""
        return self._last

    @property
    def place(self) -> int:
        return self._last.place

    @property
    def size(self) -> int:
        return self._last.size

    def allocate(self, num_bytes: int) -> memoryview:
        return self._last.allocate(num_bytes)

    def beside(self) -> GroupChannel:
        raise InvariantError("a group that goes on without its dead reduces in step() alone")

    # -- operations ----------------------------------------------------------------------------

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[Rows]:
        mine = list(values)

        def note(rows: Rows) -> None:
            self.agreed = Agreed(self.agreed.number + 1, call, rows)

        return self._begin(_Operation(lambda inner: inner.agree(call, mine), note, call=call))

    def reduce_scatter(
        self,
        flats: Sequence[torch.Tensor],
        slices: Slices,
        sums: Sequence[torch.Tensor] | None = None,
    ) -> Pending[None]:
        operation = _Operation(lambda inner: inner.reduce_scatter(flats, slices, sums), _nothing)
        if self._is_given_up:
            operation.end_cut()
            return operation
        return self._begin(operation)

    def all_gather(self, flats: Sequence[torch.Tensor], slices: Slices) -> Pending[None]:
        if self._inner is not None:
            self._is_given_up = False
        operation = _Operation(
            lambda inner: inner.all_gather(flats, slices), _nothing, is_gathering=True
        )
        return self._begin(operation)

    def broadcast(self, tensor: torch.Tensor, place: int) -> Pending[None]:
        return self._begin(_Operation(lambda inner: inner.broadcast(tensor, place), _nothing))

    def _begin(self, operation: _Operation[T]) -> _Operation[T]:
        self._under_way = [each for each in self._under_way if not each.is_taken]
        self._under_way.append(operation)  # type: ignore[arg-type] # one of both kinds
        if self._inner is not None:
            operation.begin(self._inner)
        return operation

    # -- when somebody has died ----------------------------------------------------------------

    def cut(self) -> Agreed:
        """Nothing goes on over the channel that there was. What counts is what callers have got:
        a result that was not taken is none."""
        self._inner = None
        self._under_way = [each for each in self._under_way if not each.is_taken]
        for each in self._under_way:
            each.hold()
        return self.agreed

    def go_on(
        self, inner: GroupChannel, *, agreed: Agreed | None, has_values: bool, is_given_up: bool
    ) -> None:
        """``inner`` joins those who are left. ``agreed``: what others have got of an agreement that
        is under way here; ``has_values``: what is gathered has come by another way;
        ``is_given_up``: the iteration that is under way counts no more."""
        self._inner = self._last = inner
        self._is_given_up = is_given_up
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            if each.call:
                self._under_way.append(each)
                if agreed is None:
                    each.begin(inner)
                else:
                    check_calls([CALLS.index(agreed.call), CALLS.index(each.call)])
                    each.end(agreed.rows)  # type: ignore[arg-type] # as its call says
            elif each.is_gathering and has_values:
                each.end(None)  # type: ignore[arg-type] # as above
            else:
                each.end_cut()


def _nothing(_result: None) -> None: ...


class _Operation(Generic[T]):
    def __init__(
        self,
        begin: Callable[[GroupChannel], Pending[T]],
        on_taken: Callable[[T], None],
        *,
        call: str = "",
        is_gathering: bool = False,
    ) -> None:
        """``begin(channel)`` begins it there; ``call``: of an agreement."""
        self._begin = begin
        self._on_taken = on_taken
        self.call = call
        self.is_gathering = is_gathering
        self._pending: Pending[T] | None = None
        self._results: list[T] = []
        self._is_cut = False
        self.is_taken = False
        """Whether its caller has the result."""

    def begin(self, channel: GroupChannel) -> None:
        self._pending = self._begin(channel)

    def hold(self) -> None:
        self._pending = None
        self._results.clear()

    def end(self, result: T) -> None:
        self._results.append(result)

    def end_cut(self) -> None:
        self._is_cut = True

    def is_done(self) -> bool:
        if self._results or self._is_cut:
            return True
        try:
            if self._pending is None or not self._pending.is_done():
                return False
            self._results.append(self._pending.result())
        except MemberLostError as error:
            logger.info("waiting for who of the group is left: %s", error)
            self._pending = None
            return False
        return True

    def wait(self, at_most_s: float) -> None:
        if self.is_done():
            return
        if self._pending is None:
            time.sleep(min(at_most_s, _LOOK_S))
        else:
            self._pending.wait(at_most_s)

    def result(self) -> T:
        self.is_taken = True
        if self._is_cut:
            raise GroupReformedError
        if not self.is_done():
            raise InvariantError("the result of an operation of a group before it was done")
        self._on_taken(self._results[0])
        return self._results[0]
