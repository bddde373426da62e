"""An iteration weighs the batches of the forward passes whose backward has come in it."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import UsageError
from psdist.workers import batches as module
from psdist.workers.batches import Batches

FULL = 8


class Memory:
    """A storage that a test frees."""

    def __init__(self) -> None:
        self.is_freed = False

    def expired(self) -> bool:
        return self.is_freed


def weight_at_end(batches: Batches) -> float:
    batches.end_forwards()
    weight = batches.weight
    batches.end_iteration()
    return weight


def test_an_iteration_weighs_what_its_forward_passes_have_used() -> None:
    batches = Batches()
    for num_samples in (8, 4):
        batches.hand_out(num_samples, 8.0)
        batches.use(0)
    assert weight_at_end(batches) == 12 / 16
    assert batches.samples == 12


def test_a_batch_fetched_ahead_of_the_step_is_of_the_next_iteration() -> None:
    batches = Batches()
    batches.hand_out(8, 8.0)
    batches.use(0)
    batches.hand_out(2, 8.0)
    assert batches.weight == 1.0
    assert weight_at_end(batches) == 1.0
    assert batches.samples == 8
    batches.use(0)
    assert weight_at_end(batches) == 0.25
    assert batches.samples == 10


def test_without_a_forward_pass_that_is_seen_the_step_uses_what_was_handed_out() -> None:
    batches = Batches()
    batches.hand_out(4, 8.0)
    assert batches.weight == 0.5
    assert weight_at_end(batches) == 0.5
    assert batches.samples == 4


@pytest.mark.parametrize("is_forward", [True, False])
def test_without_a_loader_an_iteration_weighs_one(is_forward: bool) -> None:
    batches = Batches()
    if is_forward:
        batches.use(5)
    assert weight_at_end(batches) == 1.0
    assert batches.samples == 5 * is_forward


def test_a_pass_counts_when_its_backward_comes_and_once() -> None:
    batches = Batches()
    for num_samples in (8, 2):
        batches.hand_out(num_samples, 8.0)
        batches.use(num_samples)
        confirm = batches.await_backward()
    assert confirm is not None
    assert batches.weight == 10 / 16  # no backward yet: gradients may be the script's own
    confirm()
    confirm()
    assert weight_at_end(batches) == 0.25
    assert batches.samples == 2


def test_a_backward_that_comes_after_a_step_counts_in_the_next_one() -> None:
    batches = Batches()
    batches.hand_out(4, 8.0)
    batches.use(4)
    confirm = batches.await_backward()
    assert confirm is not None
    batches.end_iteration()
    batches.hand_out(8, 8.0)
    batches.use(8)
    confirm()
    assert weight_at_end(batches) == 12 / 16


def test_a_pass_that_failed_neither_weighs_nor_takes_the_batch_away() -> None:
    batches = Batches()
    batches.hand_out(4, 8.0)
    batches.use(4)
    batches.drop()
    batches.hand_out(8, 8.0)
    batches.use(8)
    assert weight_at_end(batches) == 1.0


def test_a_storage_of_batches_of_different_weight_identifies_none() -> None:
    batches, common = Batches(), Memory()
    own = [Memory() for _ in range(2)]
    for memory, num_samples in zip(own, (8, 4), strict=True):
        batches.hand_out(num_samples, 8.0, storages=[common, memory])
    batches.use(3, [common, own[1]])
    assert weight_at_end(batches) == 0.5
    batches.use(3, [common])
    assert weight_at_end(batches) == 1.0  # the other one, first handed out


def test_what_was_freed_is_forgotten_and_what_is_never_used_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_OUTSTANDING", 1_000)
    batches = Batches()
    most = 0
    for _ in range(20_000):
        memory = Memory()
        batches.hand_out(8, 8.0, storages=[memory])
        memory.is_freed = True
        most = max(most, batches.num_kept)
    assert most < 2_000


def test_passes_without_backward_are_not_kept() -> None:
    batches = Batches()
    for _ in range(10_000):
        batches.hand_out(8, 8.0)
        batches.use(8)
        assert batches.await_backward() is not None
    assert batches.num_kept == 0


# -- loops -----------------------------------------------------------------------------------------


def play(
    sizes: list[int],
    *,
    depth: int,
    is_known: bool,
    parts: int,
    skipped: Collection[int] = (),
    unused: Collection[int] = (),
) -> None:
    """A loop that fetches ``depth`` batches ahead, passes each in ``parts`` and makes a step of it;
    of those in ``unused`` an evaluation is made first. Each weighs what it is."""
    batches, memories = Batches(), [Memory() for _ in sizes]
    fetched = 0
    for number, size in enumerate(sizes):
        while fetched < min(number + depth + 1, len(sizes)):
            batches.hand_out(sizes[fetched], FULL, storages=[memories[fetched]])
            fetched += 1
        if number in skipped:
            continue
        for is_used in [False] * (number in unused) + [True]:
            for part in range(parts):
                num_samples = size * (part + 1) // parts - size * part // parts
                batches.use(num_samples, [memories[number]] if is_known else [Memory()])
                confirm = batches.await_backward()
                assert confirm is not None
                if is_used:
                    confirm()
        assert weight_at_end(batches) == size / FULL


ANY_SIZES = st.lists(st.integers(1, FULL), min_size=1, max_size=12)
FULL_BUT_LAST = st.builds(lambda n, last: [FULL] * n + [last], st.integers(1, 8), st.integers(1, 8))
DEPTH = st.integers(0, 4)
SOME = st.sets(st.integers(0, 12))


@given(ANY_SIZES, DEPTH, st.integers(1, 3), SOME, SOME)
def test_batches_that_the_model_sees_always_weigh_in_their_iteration(
    sizes: list[int], depth: int, parts: int, skipped: set[int], unused: set[int]
) -> None:
    play(sizes, depth=depth, is_known=True, parts=parts, skipped=skipped, unused=unused)


@given(FULL_BUT_LAST, DEPTH, SOME, SOME)
def test_copies_weigh_by_their_samples_also_where_batches_are_skipped(
    sizes: list[int], depth: int, skipped: set[int], unused: set[int]
) -> None:
    skipped.discard(0)  # a first pass shows that copies have the samples of their batch
    if depth >= len(sizes) - 1:
        skipped = set()
    play(sizes, depth=depth, is_known=False, parts=1, skipped=skipped, unused=unused)


@given(ANY_SIZES, DEPTH, SOME)
def test_copies_weigh_right_or_end_in_one_error(
    sizes: list[int], depth: int, skipped: set[int]
) -> None:
    try:
        play(sizes, depth=depth, is_known=False, parts=1, skipped=skipped)
    except UsageError as error:
        assert "drop_last" in str(error)  # noqa: PT017 - most loops end without one
        assert len(set(sizes)) > 1


@given(FULL_BUT_LAST, DEPTH, st.integers(2, 4), SOME)
def test_copies_of_parts_weigh_in_order_or_end_in_one_error(
    sizes: list[int], depth: int, parts: int, unused: set[int]
) -> None:
    try:
        play(sizes, depth=depth, is_known=False, parts=parts, unused=unused)
    except UsageError as error:
        assert "drop_last" in str(error)  # noqa: PT017 - most loops end without one
        assert len(set(sizes)) > 1


@given(st.integers(1, 12), st.integers(1, FULL), DEPTH, st.booleans(), st.integers(1, 4), SOME)
def test_batches_of_equal_weight_are_never_an_error(
    count: int, size: int, depth: int, is_known: bool, parts: int, skipped: set[int]
) -> None:
    play([size] * count, depth=depth, is_known=is_known, parts=parts, skipped=skipped)


def backward(batches: Batches, num_samples: int) -> None:
    batches.hand_out(num_samples, FULL)
    batches.use(num_samples)
    confirm = batches.await_backward()
    assert confirm is not None
    confirm()


def test_a_batch_whose_gradients_were_dropped_does_not_weigh() -> None:
    batches = Batches()
    backward(batches, FULL)
    batches.drop_gradients()
    backward(batches, FULL)
    assert weight_at_end(batches) == 1.0
    assert batches.samples == FULL
    backward(batches, 2)
    assert weight_at_end(batches) == 0.25


@pytest.mark.parametrize("sizes", [(FULL, 2), (2, FULL)])
def test_dropped_gradients_of_another_weight_are_an_error(sizes: tuple[int, int]) -> None:
    """They may be kept elsewhere, and be added to the others."""
    batches = Batches()
    backward(batches, sizes[0])
    batches.drop_gradients()
    backward(batches, sizes[1])
    with pytest.raises(UsageError, match=r"has left no gradient .* \(drop_last=True\)"):
        batches.end_forwards()
