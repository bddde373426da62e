"""Operations of a group outlive the channel that carries them, where somebody of it fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psdist.errors import CollectiveError, GroupReformedError, InvariantError, MemberLostError
from psdist.protocol.partition import Span
from psdist.workers.group.channel import AloneChannel, Pending
from psdist.workers.group.shrinking import Agreed, ShrinkingChannel

SLICES = [[Span(0, 0, 2)]]


class Waits:
    """An operation that ends when it is told."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.error: Exception | None = None
        self.num_waits = 0

    def is_done(self) -> bool:
        return bool(self.results) or self.error is not None

    def wait(self, at_most_s: float) -> None:  # noqa: ARG002 - the seam's
        self.num_waits += 1

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.results[0]


class Slow(AloneChannel):
    """A group of two, whose operations wait."""

    size = 2

    def __init__(self) -> None:
        self.begun: list[tuple[str, Waits]] = []

    def _wait(self, name: str) -> Any:
        self.begun.append((name, Waits()))
        return self.begun[-1][1]

    def agree(self, call: str, values: Any = ()) -> Pending[list[list[float]]]:
        pending: Pending[list[list[float]]] = self._wait(f"{call} {list(values)}")
        return pending

    def reduce_scatter(self, flats: Any, slices: Any, sums: Any = None) -> Pending[None]:  # noqa: ARG002
        pending: Pending[None] = self._wait("reduce")
        return pending

    def all_gather(self, flats: Any, slices: Any) -> Pending[None]:  # noqa: ARG002
        pending: Pending[None] = self._wait("gather")
        return pending

    def broadcast(self, tensor: Any, place: int) -> Pending[None]:  # noqa: ARG002
        pending: Pending[None] = self._wait("broadcast")
        return pending


def go_on(channel: ShrinkingChannel, **given: Any) -> Slow:
    inner = Slow()
    channel.go_on(inner, **{"agreed": None, "has_values": False, "is_given_up": False, **given})
    return inner


def test_without_a_death_it_is_the_channel_that_it_has() -> None:
    inner = Slow()
    channel = ShrinkingChannel(inner)
    assert (channel.place, channel.size, channel.inner) == (0, 2, inner)
    assert len(channel.allocate(8)) == 8
    pending = channel.agree("save", [3.0])
    ((name, waits),) = inner.begun
    assert name == "save [3.0]"
    assert not pending.is_done()
    pending.wait(1.0)
    assert waits.num_waits == 1
    waits.results.append([[3.0], [4.0]])
    assert pending.is_done()
    assert channel.agreed.number == 0, "until it is taken"
    assert pending.result() == [[3.0], [4.0]]
    assert channel.agreed == Agreed(1, "save", [[3.0], [4.0]])
    for operation in (
        channel.reduce_scatter([torch.zeros(2)], SLICES),
        channel.all_gather([torch.zeros(2)], SLICES),
        channel.broadcast(torch.zeros(2), 0),
    ):
        for _, each in inner.begun:
            each.results.append(None)
        assert operation.result() is None
    with pytest.raises(InvariantError, match=r"reduces in step\(\) only"):
        channel.duplicate()


def test_a_result_that_nobody_waits_for_is_an_error() -> None:
    with pytest.raises(InvariantError, match="before it was done"):
        ShrinkingChannel(Slow()).agree("save").result()


def test_an_agreement_that_nobody_has_is_begun_anew() -> None:
    first = Slow()
    channel = ShrinkingChannel(first)
    pending = channel.agree("optimizer.step", [1.0])
    first.begun[0][1].results.append([[1.0], [2.0]])
    assert pending.is_done()
    assert channel.cut().number == 0, "what nobody has taken is none"
    assert not pending.is_done()
    inner = go_on(channel)
    assert [name for name, _ in inner.begun] == ["optimizer.step [1.0]"]
    inner.begun[0][1].results.append([[1.0]])
    assert pending.result() == [[1.0]]
    assert channel.agreed == Agreed(1, "optimizer.step", [[1.0]])


def test_an_agreement_that_others_have_is_theirs() -> None:
    channel = ShrinkingChannel(Slow())
    pending = channel.agree("optimizer.step", [1.0])
    channel.cut()
    inner = go_on(channel, agreed=Agreed(1, "optimizer.step", [[1.0], [5.0]]))
    assert inner.begun == []
    assert pending.result() == [[1.0], [5.0]]
    assert channel.agreed.number == 1


def test_others_that_have_agreed_to_another_call_are_an_error() -> None:
    channel = ShrinkingChannel(Slow())
    channel.agree("save")
    channel.cut()
    with pytest.raises(CollectiveError, match="different calls"):
        go_on(channel, agreed=Agreed(1, "barrier", [[], []]))


def test_a_sum_under_way_is_nobodys_and_nor_is_one_that_comes_later() -> None:
    channel = ShrinkingChannel(Slow())
    pending = channel.reduce_scatter([torch.zeros(2)], SLICES)
    channel.cut()
    inner = go_on(channel, is_given_up=True)
    assert pending.is_done()
    later = channel.reduce_scatter([torch.zeros(2)], SLICES)
    for each in (pending, later):
        with pytest.raises(GroupReformedError):
            each.result()
    assert inner.begun == []
    channel.all_gather([torch.zeros(2)], SLICES)  # ends the iteration
    channel.reduce_scatter([torch.zeros(2)], SLICES)
    assert [name for name, _ in inner.begun] == ["gather", "reduce"]


def test_a_sum_that_comes_while_nobody_knows_who_is_left_is_nobodys() -> None:
    channel = ShrinkingChannel(Slow())
    channel.cut()
    pending = channel.reduce_scatter([torch.zeros(2)], SLICES)
    assert not pending.is_done()
    go_on(channel, is_given_up=True)
    with pytest.raises(GroupReformedError):
        pending.result()


def test_a_gathering_is_over_where_the_values_have_come_and_else_begun_anew_by_its_caller() -> None:
    for has_values in (True, False):
        channel = ShrinkingChannel(Slow())
        pending = channel.all_gather([torch.zeros(2)], SLICES)
        channel.cut()
        inner = go_on(channel, has_values=has_values, is_given_up=not has_values)
        assert inner.begun == []
        if has_values:
            assert pending.result() is None
        else:
            with pytest.raises(GroupReformedError):
                pending.result()


def test_a_gathering_while_nobody_knows_who_is_left_ends_no_iteration() -> None:
    channel = ShrinkingChannel(Slow())
    channel.cut()
    go_on(channel, is_given_up=True)
    channel.cut()
    channel.all_gather([torch.zeros(2)], SLICES)
    assert channel.is_given_up


def test_who_waits_for_somebody_that_has_ended_waits_on() -> None:
    first = Slow()
    channel = ShrinkingChannel(first)
    pending = channel.agree("save")
    first.begun[0][1].error = MemberLostError("it has ended")
    assert not pending.is_done()
    pending.wait(60.0)  # returns soon
    channel.cut()
    inner = go_on(channel)
    inner.begun[0][1].results.append([[]])
    assert pending.result() == [[]]
    pending.wait(60.0)  # returns at once


def test_who_hears_of_it_when_it_looks_waits_on_as_well() -> None:
    class Looks(Waits):
        def is_done(self) -> bool:
            raise MemberLostError("it has ended")

    class Lost(Slow):
        def _wait(self, name: str) -> Any:  # noqa: ARG002 - as its base
            return Looks()

    channel = ShrinkingChannel(Lost())
    pending = channel.agree("save")
    assert not pending.is_done()
    channel.cut()
    assert [name for name, _ in go_on(channel).begun] == ["save []"]


def test_other_errors_are_the_callers() -> None:
    first = Slow()
    pending = ShrinkingChannel(first).agree("save")
    first.begun[0][1].error = CollectiveError("different calls")
    with pytest.raises(CollectiveError):
        pending.result()


def test_what_was_taken_is_not_cut() -> None:
    channel = ShrinkingChannel(AloneChannel())
    assert channel.agree("save", [1.0]).result() == [[1.0]]
    pending = channel.all_gather([torch.zeros(2)], SLICES)
    assert pending.result() is None
    channel.cut()
    assert go_on(channel).begun == []
