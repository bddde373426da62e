"""Who has the chunks of a worker that has failed."""

from __future__ import annotations

import itertools

import pytest

from psdist.protocol.partition import heir, slices_of_the_living

SLICES = {2: list(range(0, 60, 3)), 5: list(range(1, 60, 3)), 7: list(range(2, 60, 3))}


def test_who_lives_keeps_what_it_had() -> None:
    for owner in SLICES:
        assert heir(owner, rank=3, members=(2, 5, 7), living={2, 5, 7}) == owner
    assert slices_of_the_living(SLICES, SLICES) == SLICES


def test_the_rest_is_dealt_evenly_in_turn() -> None:
    heirs = [heir(5, rank=rank, members=(2, 5, 7), living={2, 7}) for rank in range(6)]
    assert heirs == [2, 7, 2, 7, 2, 7]
    left = slices_of_the_living(SLICES, {2, 7})
    assert left[2] == sorted(SLICES[2] + SLICES[5][::2])
    assert left[7] == sorted(SLICES[7] + SLICES[5][1::2])
    assert list(slices_of_the_living(SLICES, {7, 2})) == [2, 7]


def test_who_dies_next_leaves_to_all_who_are_left_alike() -> None:
    members = (0, 1, 2, 3)
    slices = {each: list(range(24 * each, 24 * each + 24)) for each in members}
    for living in itertools.combinations(members, 2):
        counts = [len(each) for each in slices_of_the_living(slices, living).values()]
        assert counts == [48, 48], living


@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))))
def test_a_chunk_changes_hands_only_from_somebody_who_has_died(order: tuple[int, ...]) -> None:
    members = (0, 1, 2, 3)
    slices = {each: list(range(7 * each, 7 * each + 7)) for each in members}
    living = set(members)
    before = slices_of_the_living(slices, living)
    for dead in order:
        living.remove(dead)
        after = slices_of_the_living(slices, living)
        assert sorted(chunk for each in after.values() for chunk in each) == list(range(28))
        for worker in living:
            assert set(before[worker]) <= set(after[worker])
        before = after
    assert before == {3: list(range(28))}
