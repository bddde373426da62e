"""Which chunks may leave during backward: those that are complete, in order, of this iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from psdist.protocol.partition import Partition, Piece
from psdist.workers.early.early_pushes import EarlyPushes, Terms

PIECES = 4


class Flat:
    """Gradients that are finite."""

    def __init__(self) -> None:
        self.cleared: list[int] = []
        self.on_look: Callable[[], None] = lambda: None

    def is_finite(self, _chunk: object) -> bool:
        self.on_look()
        return True

    def clear_gradient(self, piece: int) -> None:
        self.cleared.append(piece)


class Loop:
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
        self.early = EarlyPushes(
            partition,
            range(len(partition.chunks)),
            flat,
            loop,
            look_for_writes=lambda: self.writes.append(len(self.loop.pushed)),
        )

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
