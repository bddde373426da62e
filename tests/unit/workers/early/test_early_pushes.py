"""Which chunks may leave during backward: those that are complete, in order, of this iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from psdist.protocol.partition import Chunk, Partition, Piece
from psdist.workers.blocking import Parts
from psdist.workers.early.early_pushes import EarlyPushes
from psdist.workers.missed_rounds import WorkerRule
from psdist.workers.reduction import Terms

PIECES = 4


@dataclass
class Copying:
    after: set[int]
    is_over: bool

    def is_done(self) -> bool:
        return self.is_over


class Flat:
    """Gradients that are finite."""

    def __init__(self) -> None:
        self.cleared: list[int] = []
        self.on_look: Callable[[], None] = lambda: None
        self.copies: dict[int, Copying] = {}
        """By chunk."""
        self.num_marks = 0
        self.is_on_host = True
        """Whether copies are done as soon as they are begun."""

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def begin_to_host(self, chunk: Chunk, *, after: Iterable[int]) -> Copying:
        assert chunk.index not in self.copies
        copy = self.copies[chunk.index] = Copying(after=set(after), is_over=self.is_on_host)
        return copy

    def is_finite(self, _chunk: object) -> bool:
        self.on_look()
        return True

    def clear_gradient(self, piece: int) -> None:
        self.cleared.append(piece)


class Loop:
    pushes = SimpleNamespace(encoding=SimpleNamespace(on_device=None))

    def __init__(self) -> None:
        self.pushed: list[tuple[int, bool]] = []
        self.begun: list[dict[str, Any]] = []

    def begin_iteration(self, **terms: Any) -> None:
        self.begun.append(terms)

    def push_chunk(self, chunk: int, *, is_empty: bool) -> None:
        self.pushed.append((chunk, is_empty))


class Pushes:
    """Four pieces, each of which is a chunk, or two of them."""

    def __init__(self, *, chunk_bytes: int = 256) -> None:
        pieces = [
            Piece(name=f"p{index}", shape=(4,), stride=(1,), dtype="float32", optimizer_group=0)
            for index in range(PIECES)
        ]
        partition = Partition.cut(pieces, chunk_bytes=chunk_bytes)
        assert len(partition.chunks) == PIECES * 256 // chunk_bytes
        self.flat, self.loop = Flat(), Loop()
        flat: Any = self.flat
        loop: Any = self.loop
        self.writes: list[int] = []
        values: Any = SimpleNamespace(
            look_for_writes=lambda: self.writes.append(len(self.loop.pushed))
        )
        group: Any = SimpleNamespace(partition=partition)
        parts = Parts(cast(Any, None), group, flat, loop, values, WorkerRule())
        self.early = EarlyPushes(parts, range(len(partition.chunks)))

    def begin(self, *, weight: float = 1.0, frozen: frozenset[int] = frozenset()) -> None:
        terms = Terms(clock=7, hyper=b"h", weight=weight)
        self.early.begin(terms, frozen=frozen, expected=frozenset())

    def add(self, *pieces: int) -> None:
        for piece in pieces:
            self.early.add(piece)


@pytest.fixture
def pushes() -> Pushes:
    return Pushes()


def test_those_that_are_complete_leave_in_order_under_the_terms_of_the_first(
    pushes: Pushes,
) -> None:
    pushes.early.allow(PIECES)
    pushes.begin()
    pushes.add(0, 2)
    assert pushes.early.push_ready()
    assert pushes.loop.pushed == [(0, False)]
    assert not pushes.early.push_ready()
    pushes.add(1, 3)
    assert pushes.early.push_ready()
    assert [chunk for chunk, _ in pushes.loop.pushed] == [0, 1, 2, 3]
    assert pushes.loop.begun == [{"clock": 7, "hyper": b"h", "absent": [], "weight": 1.0}]
    assert pushes.writes == [0]
    assert pushes.early.num_pushed == PIECES


@pytest.mark.parametrize("allowed", range(PIECES + 1))
def test_so_many_leave_as_are_allowed(allowed: int, pushes: Pushes) -> None:
    pushes.early.allow(allowed)
    assert set(pushes.early.pieces) == set(range(allowed))
    pushes.begin()
    pushes.add(*range(PIECES))
    pushes.early.push_ready()
    assert [chunk for chunk, _ in pushes.loop.pushed] == list(range(allowed))


def test_a_chunk_that_is_frozen_leaves_without_bytes(pushes: Pushes) -> None:
    pushes.early.allow(PIECES)
    pushes.begin(frozen=frozenset({1}))
    pushes.add(0)
    pushes.early.push_ready()
    assert pushes.loop.pushed == [(0, False), (1, True)]
    assert pushes.early.sent == {0: False, 1: True}


def test_what_is_frozen_beside_others_in_a_chunk_leaves_as_zeros() -> None:
    pushes = Pushes(chunk_bytes=512)
    pushes.early.allow(2)
    pushes.begin(frozen=frozenset({1, 2, 3}))
    assert pushes.flat.cleared == [1]
    pushes.add(0)
    pushes.early.push_ready()
    assert pushes.loop.pushed == [(0, False), (1, True)]


def test_gradients_that_come_before_an_iteration_begins_are_not_of_the_next(
    pushes: Pushes,
) -> None:
    pushes.early.allow(PIECES)
    pushes.begin()
    pushes.add(1)
    pushes.early.reset()
    pushes.begin()
    pushes.add(0)
    pushes.early.push_ready()
    assert pushes.loop.pushed == [(0, False)]


def test_nothing_leaves_once_it_is_stopped_or_of_an_iteration_without_weight(
    pushes: Pushes,
) -> None:
    pushes.early.allow(PIECES)
    pushes.begin(weight=0.0)
    pushes.add(0)
    assert not pushes.early.push_ready()
    pushes.early.reset()
    pushes.begin()
    pushes.add(0)
    pushes.flat.on_look = pushes.early.stop  # a hook's thread, meanwhile
    pushes.add(1)
    pushes.early.push_ready()
    assert not pushes.loop.pushed


def test_an_iteration_that_begins_while_the_loops_owner_looks_leaves_when_it_is_complete(
    pushes: Pushes,
) -> None:
    """Another set's gradients may have opened the window."""
    pushes.early.allow(PIECES)
    pushes.begin()
    pushes.add(*range(PIECES))
    pushes.early.push_ready()
    pushes.early.reset()

    class Ready(type(pushes.early._ready)):  # type: ignore[misc] # a deque
        def __len__(self) -> int:
            if pushes.early.terms is None:
                pushes.begin()
            length: int = super().__len__()
            return length

    pushes.early._ready = Ready()
    for _ in range(2):
        assert not pushes.early.push_ready()
    assert len(pushes.loop.pushed) == PIECES


def test_an_iteration_without_weight_is_stopped_before_the_loops_owner_can_see_it(
    pushes: Pushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Watched(EarlyPushes):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "terms" and value is not None:
                seen.append(self.is_stopped)
            super().__setattr__(name, value)

    monkeypatch.setattr(pushes.early, "__class__", Watched)
    pushes.begin(weight=0.0)
    assert seen == [True]


def test_a_chunk_leaves_when_its_copy_to_the_host_is_done_and_those_before_it_have_left(
    pushes: Pushes,
) -> None:
    pushes.flat.is_on_host = False
    pushes.early.allow(PIECES)
    pushes.begin()
    assert not pushes.early.is_under_way
    pushes.add(0, 1, 3)
    assert not pushes.early.push_ready()
    copies = pushes.flat.copies
    assert list(copies) == [0, 1]  # all that are complete, in order
    assert pushes.early.is_under_way
    copies[1].is_over = True
    assert not pushes.early.push_ready()
    copies[0].is_over = True
    assert pushes.early.push_ready()
    assert [chunk for chunk, _ in pushes.loop.pushed] == [0, 1]
    assert not pushes.early.is_under_way
    assert list(copies) == [0, 1]


def test_a_copy_begins_behind_all_that_was_written_to_its_chunk() -> None:
    pushes = Pushes(chunk_bytes=512)
    pushes.early.allow(2)
    pushes.begin(frozen=frozenset({3}))  # mark 1: what has none is zero
    pushes.add(2, 1, 0)  # marks 2, 3, 4
    pushes.early.push_ready()
    assert [copy.after for copy in pushes.flat.copies.values()] == [{1, 3, 4}, {1, 2}]


def test_what_is_copied_when_an_iteration_ends_is_not_the_nexts(pushes: Pushes) -> None:
    pushes.flat.is_on_host = False
    pushes.early.allow(PIECES)
    pushes.begin()
    pushes.add(0)
    pushes.early.push_ready()
    pushes.early.reset()
    assert not pushes.early.is_under_way
    (before,) = pushes.flat.copies.values()
    before.is_over = True
    pushes.flat.copies.clear()
    pushes.begin()
    pushes.add(0)
    assert not pushes.early.push_ready()
    assert list(pushes.flat.copies) == [0]
    assert before.after.isdisjoint(pushes.flat.copies[0].after)


def test_a_copy_waits_for_nothing_that_was_written_in_the_iteration_before(pushes: Pushes) -> None:
    pushes.early.allow(PIECES)
    pushes.begin()
    pushes.add(1)
    pushes.early.push_ready()
    pushes.early.reset()
    before = pushes.flat.num_marks
    pushes.begin()
    pushes.add(0, 1)
    pushes.early.push_ready()
    assert set(pushes.flat.copies) == {0, 1}
    assert all(mark > before for copy in pushes.flat.copies.values() for mark in copy.after)


def test_pieces_of_chunks_that_stay_are_absent_where_they_are_said_to_get_no_gradient(
    pushes: Pushes,
) -> None:
    pushes.early.allow(2)
    terms = Terms(clock=7, hyper=b"h", weight=1.0)
    pushes.early.begin(terms, frozen=frozenset({1}), expected=frozenset({3}))
    pushes.add(0)
    pushes.early.push_ready()
    assert [begun["absent"] for begun in pushes.loop.begun] == [[1, 3]]


def test_what_is_stopped_while_it_is_copied_stays(pushes: Pushes) -> None:
    pushes.flat.is_on_host = False
    pushes.early.allow(PIECES)
    pushes.begin()
    pushes.add(0)
    pushes.early.push_ready()
    pushes.early.stop()
    assert not pushes.early.is_under_way
    pushes.flat.copies[0].is_over = True
    assert not pushes.early.push_ready()
    assert not pushes.loop.pushed
