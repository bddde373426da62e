"""Passes dealt by hands: every sample once, each group as many batches as it makes steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from psdist.controller.steps import Term
from psdist.errors import UsageError
from psdist.workers.data.assignments import (
    Allocation,
    AssignedBatches,
    AssignedPart,
    Assignment,
    assign,
)
from psdist.workers.data.loaders import Loaders
from psdist.workers.data.seen import Pass

GROUPS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5)


def hands_of(
    num_samples: int, steps: Sequence[int], sizes: Sequence[int], size: int, *, drop_last: bool
) -> list[Assignment]:
    hands: list[Assignment] = []
    while not hands or not hands[-1].is_last:
        start = hands[-1].positions.stop if hands else 0
        hand = assign(
            start, num_samples, steps=steps, sizes=sizes, batch_size=size, drop_last=drop_last
        )
        assert hand is not None
        hands.append(hand)
    return hands


def parts_of(hand: Assignment) -> list[list[range]]:
    """By worker."""
    places = [(group, each) for group, size in enumerate(hand.sizes) for each in range(size)]
    return [hand.batches(group=group, place=place) for group, place in places]


@given(GROUPS, st.integers(1, 5), st.integers(1, 400), st.booleans())
def test_hands_have_every_sample_once(
    groups: list[tuple[int, int]], size: int, num_samples: int, drop_last: bool
) -> None:
    steps, sizes = map(tuple, zip(*groups, strict=True))
    num_workers = sum(sizes)
    assume(num_samples >= num_workers * (size if drop_last else 1))
    hands = hands_of(num_samples, steps, sizes, size, drop_last=drop_last)
    taken = [part for hand in hands for worker in parts_of(hand) for part in worker]
    left = num_samples - hands[-1].positions.stop
    assert list(chain.from_iterable(taken)) == list(range(num_samples - left))
    assert 0 <= left <= (num_workers * size - 1 if drop_last else 0)
    for hand in hands:
        if not hand.is_last:
            assert hand.steps == steps
        assert all(1 <= n <= most for n, most in zip(hand.steps, steps, strict=True))
        lengths = {len(part) for worker in parts_of(hand) for part in worker}
        most = size if drop_last or not hand.is_last else size + 1
        assert max(lengths) - min(lengths) <= 1
        assert 1 <= min(lengths) <= max(lengths) <= most
        if drop_last or not hand.is_last:
            assert lengths == {size}


def test_the_last_hand_is_in_the_proportion_of_the_others() -> None:
    (first, last) = hands_of(2 * 8 + 8, (2, 6), (1, 1), 2, drop_last=False)
    assert (first.steps, last.steps) == ((2, 6), (1, 3))
    assert [list(map(len, worker)) for worker in parts_of(last)] == [[2], [2, 2, 2]]


def test_with_drop_last_no_batch_is_made_of_samples_that_are_not_there() -> None:
    (only,) = hands_of(7, (2, 2), (1, 1), 2, drop_last=True)
    assert sum(only.steps) == 3
    assert only.positions == range(6)


def test_fewer_samples_than_workers_join_the_hand_before() -> None:
    (only,) = hands_of(17, (2, 6), (1, 1), 2, drop_last=False)
    assert only.steps == (2, 6)
    assert sorted(len(part) for worker in parts_of(only) for part in worker) == [2] * 7 + [3]


def test_there_is_no_hand_without_a_batch_for_every_worker() -> None:
    assert assign(0, 1, steps=(1, 1), sizes=(1, 1), batch_size=2, drop_last=False) is None
    assert assign(0, 3, steps=(1, 1), sizes=(1, 1), batch_size=2, drop_last=True) is None


class Asked:
    """Answers for terms, and keeps what is told."""

    def __init__(self, steps: Callable[[Term], Sequence[int]]) -> None:
        self.terms: list[Term] = []
        self.dealt: list[AssignedPart | None] = []
        self._steps = steps

    def steps_of(self, term: Term) -> Sequence[int]:
        self.terms.append(term)
        return self._steps(term)

    def allocation(self, group: int) -> Allocation:
        return Allocation(
            sizes=(1, 1),
            group=group,
            place=0,
            steps_of=self.steps_of,
            on_batch=self.dealt.append,
        )

    def loaders(self, group: int) -> Loaders:
        return Loaders(
            seed=0,
            worker=group,
            num_workers=2,
            on_batch=lambda *_: None,
            on_end=lambda: None,
            collective=lambda *_: None,  # type: ignore[arg-type, return-value] # nobody calls it
            allocation=self.allocation(group),
        )

    def loader(
        self,
        group: int,
        num_samples: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        shard: bool = True,
    ) -> DataLoader[int]:
        """Of batches of two."""
        return self.loaders(group).make(
            list(range(num_samples)),
            batch_size=2,
            shuffle=shuffle,
            drop_last=drop_last,
            shard=shard,
            epoch=None,
            epochs=None,
            options={},
        )


def changing(term: Term) -> tuple[int, ...]:
    return ((2, 2), (1, 3), (3, 1))[min(term.block, 2)]


def epoch_of(loader: Any) -> list[int]:
    return [int(each) for batch in loader for each in batch]


def test_workers_that_hear_the_same_get_every_sample_once_in_every_pass() -> None:
    asked = [Asked(changing) for _ in range(2)]
    loaders = [each.loader(group, 101, shuffle=True) for group, each in enumerate(asked)]
    first = [epoch_of(each) for each in loaders]
    second = [epoch_of(each) for each in loaders]
    for each in (first, second):
        assert sorted(each[0] + each[1]) == list(range(101))
    assert first != second, "another order"
    for mine in asked:
        assert mine.terms == [Term(1, number, block) for number in (0, 1) for block in range(4)]
    ends = [each for each in asked[1].dealt if each is not None]
    assert [each.batches for each in ends[:6]] == [2, 3, 3, 3, 3, 1]
    assert [each.hand for each in ends] == [*range(13), *range(13)]
    assert [each.number for each in ends] == [0] * 13 + [1] * 13
    assert [each.end for each in ends[:13]] == [-1] * 12 + [101]
    assert {(each.left, each.may_leave) for each in ends} == {(0, 0)}


def test_a_hand_is_told_with_its_last_batch() -> None:
    asked = Asked(lambda _: (1, 3))
    batches = iter(asked.loader(1, 40, drop_last=True))
    for _ in range(3):
        next(batches)
    first, second, third = asked.dealt
    assert first is None
    assert second is None
    assert third == AssignedPart(
        loader=1, number=0, hand=0, start=2, stop=8, batches=3, end=-1, left=0, may_leave=3
    )


def test_behind_its_last_batch_a_pass_has_nothing_more_to_give() -> None:
    loaders = Asked(changing).loaders(0)
    batches = iter(loaders.share_out(DataLoader(list(range(20)), batch_size=2)))
    known = []
    for _ in range(4):
        next(batches)
        assert loaders.seen.newest is not None
        known.append(loaders.seen.newest.num_batches)
    assert known == [None, None, None, 4]


def test_a_pass_has_no_length_until_it_is_over() -> None:
    loader = Asked(changing).loaders(0).share_out(DataLoader(list(range(20)), batch_size=2))
    with pytest.raises(TypeError, match=r"local.steps_by = speed"):
        len(loader)
    assert epoch_of(loader) == [0, 1, 2, 3, 8, 9, 16, 17]


def test_a_loader_of_which_everybody_gets_all_samples_is_not_dealt() -> None:
    asked = Asked(changing)
    loader = asked.loader(0, 20, shard=False)
    assert len(loader) == 10
    assert epoch_of(loader) == list(range(20))
    assert not asked.terms


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_what_gives_all_workers_equal_parts_is_refused() -> None:
    loaders = Asked(changing).loaders(0)
    with pytest.raises(UsageError, match=r"job.sampler gives all workers as many samples"):
        loaders.sampler(list(range(20)), shuffle=True, drop_last=False, epoch=None)
    given = DataLoader(Stream(), batch_size=2)
    with pytest.raises(UsageError, match="a dataset without indices gives"):
        loaders.share_out(given)
    with pytest.raises(UsageError, match="batch_size=None gives"):
        loaders.share_out(DataLoader(Stream(), batch_size=None))
    sampler = WeightedRandomSampler([1.0] * 20, 20)
    with pytest.raises(UsageError, match="with the sampler WeightedRandomSampler gives"):
        loaders.share_out(DataLoader(list(range(20)), batch_size=2, sampler=sampler))


def batches_of(count: int, allocation: Allocation, *, drop_last: bool = False) -> AssignedBatches:
    """Of the first worker, in order."""
    return AssignedBatches(
        dataset=list(range(count)),
        loader=1,
        allocation=allocation,
        num_allocated=Counter(),
        batch_size=2,
        drop_last=drop_last,
        shuffle=False,
        seed=0,
        worker=0,
    )


def test_a_dataset_that_is_too_small_is_refused_at_once() -> None:
    allocation = Asked(changing).allocation(0)
    for count, drop_last in ((0, False), (1, False), (3, True)):
        batches = batches_of(count, allocation, drop_last=drop_last)
        with pytest.raises(UsageError):
            batches.require_joint_batches()


def test_what_was_consumed_is_of_the_pass_and_not_of_the_newest() -> None:
    allocation = Asked(changing).allocation(0)
    batches = batches_of(100, allocation)
    outer, inner = Pass(epoch=0), Pass(epoch=1)
    batches.start_pass(outer)
    sizes = batches.sizes()
    for _ in range(2):
        next(sizes)
    assert batches.consumed(outer) == 8
    batches.start_pass(inner)
    assert (batches.consumed(outer), batches.consumed(inner)) == (8, 0)
    with pytest.raises(UsageError, match="inside another pass over it"):
        next(sizes)


@pytest.mark.parametrize("is_over", [False, True])
def test_a_pass_begins_inside_of_another_one_only_where_that_is_left(is_over: bool) -> None:
    loader = Asked(changing).loader(0, 40)
    outer = iter(loader)
    next(outer)
    if is_over:
        del outer
        assert len(epoch_of(loader)) == 12
    else:
        with pytest.raises(UsageError, match="inside another pass over it"):
            iter(loader)
