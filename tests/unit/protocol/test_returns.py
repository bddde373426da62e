"""What workers and the registrar tell one another of samples that go back to the epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.protocol.header import NEVER
from psdist.protocol.returns import (
    DataStanding,
    Return,
    pack_refusal,
    pack_return,
    pack_standing,
    unpack_return,
    unpack_standing,
)

COUNT = st.integers(0, 10**9)
SOME = st.lists(COUNT, max_size=5).map(tuple)


@st.composite
def standings(draw: st.DrawFn) -> DataStanding:
    counts = draw(st.lists(st.integers(1, 99), max_size=4))
    dataset = draw(st.none() | st.integers(0, len(counts) - 1)) if counts else None
    is_open = dataset is not None and draw(st.booleans())
    numbers = [draw(COUNT) for _ in range(4)]
    return DataStanding(
        numbers[0], numbers[1], dataset, is_open, numbers[2], numbers[3], tuple(counts)
    )


@given(standings())
def test_a_standing_comes_as_it_was(standing: DataStanding) -> None:
    assert unpack_standing(pack_standing(standing)) == standing


@given(
    st.builds(
        Return,
        dataset=st.none() | st.integers(0, 9),
        ordinal=COUNT,
        at=COUNT,
        num_batches=COUNT,
        living=st.lists(COUNT, min_size=1, max_size=5).map(tuple),
        brought=st.lists(st.tuples(COUNT, COUNT), max_size=4).map(tuple),
        lost=COUNT,
        counts=SOME,
    )
)
def test_what_is_dealt_anew_comes_as_it_was(told: Return) -> None:
    assert unpack_return(pack_return(told)) == told


def test_why_nothing_goes_back_comes_as_it_was() -> None:
    data = pack_refusal("several \u00e9 datasets")
    assert unpack_standing(data) == unpack_return(data) == "several ? datasets"
    assert unpack_return(pack_refusal("x" * 999)) == "x" * 200


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"no ", b"no \n", b"yes", b"1 2 3 0 5", b"1 2 -3 0 5 6", b"1 2 0 2 5 6", b"1  2"),
        b"1 1 0 1 5 6",  # in a pass of no dataset
        b"1 1 2 0 5 6 1",  # of a dataset that there is not
        b"1 1 1 1 5 6 0",  # of which no pass was begun
        b"1" * 19 + b" 1 0 0 5 6",
        b"1 1 0 0 5 6" + b" 1" * 1001,
        b"%d 1 0 0 5 6" % NEVER,
    ],
    ids=range(14),
)
def test_anything_else_is_no_standing(data: bytes) -> None:
    assert unpack_standing(data) is None


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"no ", b"1 2 3", b"1 0 0 0 0 0 0", b"1 0 0 0 0 2 0 0", b"1 0 0 0 0 1 0 2 1 1 1"),
        b"1 0 0 0 0 9 0",
    ],
    ids=range(7),
)
def test_anything_else_deals_nothing(data: bytes) -> None:
    assert unpack_return(data) is None
