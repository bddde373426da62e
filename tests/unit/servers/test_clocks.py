"""Clocks of chunks, whose turn it is and the frontier, against counts that are kept plainly.

Groups come, stop after what every chunk contains of them, and count again; updates come in any
order that a server would apply them in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from psdist.errors import InvariantError
from psdist.protocol.header import NEVER
from psdist.servers.protocol.chunk_clock import ChunkClock, Limits
from psdist.servers.protocol.chunks import ChunkState, Push
from psdist.servers.protocol.chunks.frontier import Frontier
from psdist.servers.protocol.settings import PushSettings

SETTINGS = PushSettings(b"", frozenset())


def push_of(group: int, clock: int) -> Push:
    return Push(group, group, clock, 1.0, SETTINGS, None)


class Plain:
    """What every chunk contains of every group, and who counts; looked through every time."""

    def __init__(self, num_groups: int, num_chunks: int) -> None:
        self.groups = range(num_groups)
        self.chunks = range(num_chunks)
        self.done = [[0] * num_groups for _ in self.chunks]
        self.counting: set[int] = set()
        self.gathered: list[list[int]] = [[] for _ in self.chunks]

    def min_done(self, chunk: int) -> int:
        return min((self.done[chunk][group] for group in self.counting), default=NEVER)

    def missing(self, chunk: int) -> list[int]:
        lowest = self.min_done(chunk)
        return [each for each in sorted(self.counting) if self.done[chunk][each] == lowest]

    def turn(self, chunk: int) -> int | None:
        left = [each for each in self.missing(chunk) if each not in self.gathered[chunk]]
        return left[0] if left else None

    def frontier(self) -> int:
        clocks = [self.min_done(chunk) for chunk in self.chunks]
        return clocks.index(min(clocks))

    def stopped_at(self, group: int) -> int | None:
        """The clock of a group that every chunk contains alike."""
        clocks = {done[group] for done in self.done}
        return clocks.pop() if len(clocks) == 1 else None

    def may_stop(self) -> list[int]:
        inside = {group for gathered in self.gathered for group in gathered}
        return [
            each
            for each in self.counting
            if self.stopped_at(each) is not None and each not in inside
        ]

    def may_count(self) -> list[int]:
        """A group that would make an iteration begin again that others have begun is not let in:
        it comes back when all come back."""
        return [
            each
            for each in self.groups
            if each not in self.counting
            and all(
                not self.gathered[chunk] or self.min_done(chunk) == self.stopped_at(each)
                for chunk in self.chunks
            )
        ]


class Clocks(RuleBasedStateMachine):
    """Membership as ssp sees it: updates of any group that counts, in any order."""

    @initialize(num_groups=st.integers(1, 4), num_chunks=st.integers(1, 3))
    def start(self, num_groups: int, num_chunks: int) -> None:
        self.plain = Plain(num_groups, num_chunks)
        self.limits = Limits([0] * num_groups)
        self.chunks = [ChunkState(index, ChunkClock(self.limits)) for index in range(num_chunks)]
        self.frontier = Frontier(self.chunks)

    def note_frontier(self, change: Callable[[], ChunkState | None]) -> None:
        before = self.frontier.chunk
        moved_to = change()
        assert moved_to is self.frontier.chunk or (
            moved_to is None and self.frontier.chunk is before
        )
        assert moved_to is None or moved_to.clock.revision == self.limits.revision

    @precondition(lambda self: self.plain.may_count())
    @rule(data=st.data())
    def count(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.plain.may_count()))
        clock = self.plain.stopped_at(group)
        assert not self.limits.counts(group)
        assert self.limits.count(group) == clock
        assert self.limits.counts(group)
        self.plain.counting.add(group)
        self.note_frontier(lambda: self.frontier.admit(clock or 0))

    @precondition(lambda self: self.plain.may_stop())
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.plain.may_stop())))
        clock = self.plain.stopped_at(group)
        assert self.limits.contained[group] == (clock or 0) * len(self.chunks)
        self.limits.stop(group, clock or 0)
        assert not self.limits.counts(group)
        self.plain.counting.remove(group)
        self.note_frontier(self.frontier.move)

    @precondition(lambda self: self.plain.counting)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.plain.chunks))
        group = data.draw(st.sampled_from(sorted(self.plain.counting)))
        self.chunks[index].clock.catch_up()
        self.chunks[index].clock.advance(group)
        self.plain.done[index][group] += 1
        self.note_frontier(self.frontier.move)

    @rule()
    def move_although_nothing_has_changed(self) -> None:
        assert not self.frontier.move()

    @invariant()
    def the_frontier_is_the_lowest_chunk_of_the_lowest_iteration(self) -> None:
        assert self.frontier.chunk is self.chunks[self.plain.frontier()]

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Chunks catch up when they are looked at, and need not be looked at."""
        index = data.draw(st.sampled_from(self.plain.chunks))
        chunk = self.chunks[index]
        chunk.clock.catch_up()
        assert chunk.clock.done == self.plain.done[index]
        assert chunk.clock.min_done == self.plain.min_done(index)
        assert chunk.clock.missing() == self.plain.missing(index)
        required = [group for group in self.plain.groups if chunk.clock.is_required(group)]
        assert required == self.plain.missing(index)
        assert sorted(chunk.clock.done_of_counting()) == sorted(
            self.plain.done[index][group] for group in self.plain.counting
        )
        self.check(chunk)

    def check(self, chunk: ChunkState) -> None:
        chunk.check_invariants()
        self.limits.check_invariants()


class Turns(Clocks):
    """Membership as sync sees it: a chunk's groups are gathered in turn, then all advance."""

    @precondition(lambda self: any(
        self.plain.turn(chunk) is not None or self.plain.gathered[chunk]
        for chunk in self.plain.chunks
    ))  # fmt: skip
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        plain = self.plain
        index = data.draw(
            st.sampled_from(
                [
                    chunk
                    for chunk in plain.chunks
                    if plain.turn(chunk) is not None or plain.gathered[chunk]
                ]
            )
        )
        chunk = self.chunks[index]
        chunk.clock.catch_up()
        group = plain.turn(index)
        assert chunk.next_in_turn() == group
        assert chunk.next_in_turn() == group
        if group is not None:
            chunk.gathering.pushes[group] = push_of(group, plain.min_done(index))
            plain.gathered[index].append(group)
            return
        chunk.gathering.pushes.clear()
        for each in plain.gathered[index]:
            chunk.clock.advance(each)
            plain.done[index][each] += 1
        plain.gathered[index].clear()
        self.note_frontier(self.frontier.move)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.plain.chunks))
        self.chunks[index].clock.catch_up()
        assert self.chunks[index].next_in_turn() == self.plain.turn(index)
        self.check(self.chunks[index])


TestClocks = Clocks.TestCase
TestTurns = Turns.TestCase


def test_a_server_that_holds_nothing_has_no_frontier() -> None:
    frontier = Frontier(())
    assert frontier.chunk is None
    assert not frontier.move()
    assert not frontier.admit(0)


def chunks_at(*clocks: int) -> tuple[Limits, list[ChunkState]]:
    """One group that counts, at these clocks."""
    limits = Limits([0] * 1)
    limits.count(0)
    chunks = [ChunkState(index, ChunkClock(limits)) for index in range(len(clocks))]
    for chunk, clock in zip(chunks, clocks, strict=True):
        for _ in range(clock):
            chunk.clock.advance(0)
    return limits, chunks


def test_what_is_within_reach_goes_round_from_the_frontier_on() -> None:
    _, chunks = chunks_at(3, 3, 2, 2)
    frontier = Frontier(chunks)
    assert frontier.chunk is chunks[2]
    assert [frontier.is_within(1, chunk) for chunk in chunks] == [False, False, True, False]
    assert [frontier.is_within(3, chunk) for chunk in chunks] == [True, False, True, True]
    assert list(frontier.next_chunks(3)) == [chunks[2], chunks[3], chunks[0]]
    assert list(frontier.next_chunks(9)) == [chunks[2], chunks[3], chunks[0], chunks[1]]


def test_the_frontier_says_whether_it_has_moved() -> None:
    limits, chunks = chunks_at(3, 2, 2)
    frontier = Frontier(chunks)
    assert frontier.chunk is chunks[1]
    assert not frontier.move()
    chunks[2].clock.advance(0)
    assert not frontier.move()
    chunks[1].clock.advance(0)
    assert frontier.move() is frontier.chunk is chunks[0]
    limits.stop(0, 3)
    assert frontier.move() is chunks[0]
    limits.count(0)
    assert frontier.admit(3) is chunks[0]
    assert not frontier.admit(3)
    assert not frontier.admit(4)
    assert frontier.admit(2) is chunks[0]


def test_the_newest_round_is_that_of_the_last_push_that_has_come() -> None:
    limits = Limits([0] * 2)
    chunk = ChunkState(0, ChunkClock(limits))
    assert chunk.newest_round_of(1) == -1
    for clock in range(3):
        chunk.add_push(push_of(1, clock))
        assert chunk.newest_round_of(1) == clock
    for clock in range(3):
        push = chunk.take_push(1)
        assert push is not None
        assert push.clock == clock
    assert chunk.take_push(1) is None
    assert chunk.pushes == {}


class Counted(list[int]):
    """How often something was looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


def test_a_round_costs_a_few_looks_at_each_group_however_often_it_is_asked_whose_turn_it_is() -> (
    None
):
    limits = Limits([0] * 100)
    for group in range(100):
        limits.count(group)
    chunk = ChunkState(0, ChunkClock(limits))
    chunk.clock.done = counted = Counted(chunk.clock.done)
    for group in range(100):
        for _ in range(3):
            assert chunk.next_in_turn() == group
        chunk.gathering.pushes[group] = push_of(group, 0)
    assert chunk.next_in_turn() is None
    assert counted.looks <= 5 * 100
    before = counted.looks
    assert chunk.next_in_turn() is None
    assert counted.looks == before


def test_a_chunk_that_has_caught_up_looks_at_nothing() -> None:
    limits = Limits([0] * 2)
    limits.count(0)
    clock = ChunkClock(limits)
    clock._how_many = {}
    clock.catch_up()
    assert clock.min_done == 0
    limits.count(1)
    clock.catch_up()
    assert clock.min_done == NEVER


def test_who_counts_again_may_be_in_turn_although_later_ones_were_looked_at() -> None:
    limits = Limits([0] * 3)
    for group in (1, 2):
        limits.count(group)
    chunk = ChunkState(0, ChunkClock(limits))
    assert chunk.next_in_turn() == 1
    chunk.gathering.pushes[1] = push_of(1, 0)
    assert chunk.next_in_turn() == 2
    limits.count(0)
    chunk.clock.catch_up()
    assert chunk.next_in_turn() == 0


def stop_elsewhere(limits: Limits, _: ChunkState) -> None:
    limits.stopped[7] = 1


def contain_more_than_it_stopped_at(limits: Limits, _: ChunkState) -> None:
    limits.stop(0, 3)


def miscount(_: Limits, chunk: ChunkState) -> None:
    chunk.clock._how_many[4] = 1


def say_another_minimum(_: Limits, chunk: ChunkState) -> None:
    chunk.clock.min_done = 1


def park_what_is_allowed(_: Limits, chunk: ChunkState) -> None:
    chunk.parked[2] = []


def open_a_reply_without_a_token(_: Limits, chunk: ChunkState) -> None:
    chunk.open_replies[1] += 1


def lose_an_open_reply(_: Limits, chunk: ChunkState) -> None:
    chunk.open_reply(0, implied_by=0)
    chunk.open_replies[0] = 0


def gather_for_another_iteration(_: Limits, chunk: ChunkState) -> None:
    chunk.gathering.pushes[1] = push_of(1, 2)


def pass_a_group(_: Limits, chunk: ChunkState) -> None:
    chunk.next_in_turn()
    chunk._turn = 1


def wait_without_a_push(_: Limits, chunk: ChunkState) -> None:
    chunk.waiting.append(0)


@pytest.mark.parametrize(
    "break_it",
    [
        *(stop_elsewhere, contain_more_than_it_stopped_at, miscount, say_another_minimum),
        *(park_what_is_allowed, open_a_reply_without_a_token, lose_an_open_reply),
        *(gather_for_another_iteration, pass_a_group, wait_without_a_push),
    ],
    ids=lambda each: each.__name__,
)
def test_a_chunk_that_contradicts_itself_is_caught(
    break_it: Callable[[Limits, ChunkState], None],
) -> None:
    limits = Limits([0] * 2)
    chunk = ChunkState(0, ChunkClock(limits))
    limits.count(0)
    limits.count(1)
    chunk.clock.catch_up()
    for group, clock in ((0, 2), (1, 3)):
        for _ in range(clock):
            chunk.clock.advance(group)
    chunk.parked[3] = []
    chunk.add_push(push_of(1, 3))
    chunk.waiting.append(1)
    chunk.check_invariants()
    limits.check_invariants()
    break_it(limits, chunk)
    with pytest.raises(InvariantError):  # noqa: PT012 - whichever of the two notices
        chunk.check_invariants()
        limits.check_invariants()
