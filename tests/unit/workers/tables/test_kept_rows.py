"""Rows that a worker keeps, and its record of the rows that each iteration used."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from psdist.protocol.header import Header, Kind
from psdist.tables.kernels.reference import Kernels
from psdist.tables.specs import Ids, Rows, TableSpec, TableSpecs
from psdist.workers.reduction import Reduced
from psdist.workers.tables import cache
from psdist.workers.tables.cache import RowCaches
from psdist.workers.tables.uses import RowUses
from tests.support.history.memory import WorkerHistory

DIM = 3


def specs(num_parts: int = 2) -> TableSpecs:
    tables = [
        TableSpec(name=name, num_rows=None, dim=DIM, optimizer="RowSGD") for name in ("a", "b")
    ]
    return TableSpecs(tables=tuple(tables), num_parts=num_parts)


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int64)


def rows_of(numbers: Ids, clock: int) -> Rows:
    """Return rows that name their id and the iteration that they were brought for."""
    columns = [numbers, np.full(len(numbers), clock), numbers * clock]
    return np.stack(columns, axis=1).astype(np.float32)


@pytest.fixture(params=["compiled", "numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(cache, "row_kernels", Kernels)


@pytest.mark.usefixtures("kernels")
class TestCache:
    def test_a_row_serves_the_iteration_it_was_brought_for_and_those_of_the_bound(self) -> None:
        kept = RowCaches(specs(), num_rows=10, staleness=2)
        kept.put(0, ids(4, 7), rows_of(ids(4, 7), 5), clock=5)
        for clock, num in ((5, 2), (6, 2), (7, 2), (8, 0)):
            found = kept.find(0, ids(3, 4, 7), clock=clock)
            assert found.at.tolist() == [1, 2][:num]
            assert np.array_equal(found.rows, rows_of(ids(4, 7)[:num], 5))
            assert found.clocks.tolist() == [5] * num
            assert kept.missing(0, ids(3, 4, 7), clock=clock).tolist() == [3, 4, 7][: 3 - num]
        assert not len(kept.find(1, ids(4, 7), clock=5).at)

    def test_newer_rows_take_the_place_of_older_ones(self) -> None:
        kept = RowCaches(specs(), num_rows=10, staleness=2)
        kept.put(0, ids(4, 7), rows_of(ids(4, 7), 5), clock=5)
        kept.put(0, ids(1, 7), rows_of(ids(1, 7), 7), clock=7)
        found = kept.find(0, ids(1, 4, 7), clock=8)
        assert np.array_equal(found.rows, rows_of(ids(1, 7), 7))
        assert found.parts.tolist() == specs().parts_of(0, ids(1, 7)).tolist()

    def test_a_full_cache_drops_the_rows_used_least_recently(self) -> None:
        kept = RowCaches(specs(), num_rows=4, staleness=100)
        for clock, each in enumerate((10, 11, 12, 13)):
            kept.put(0, ids(each), rows_of(ids(each), clock), clock=clock)
        kept.find(0, ids(10), clock=4)  # used again
        assert kept.missing(0, ids(12), clock=5).tolist() == []  # wanted again
        kept.put(0, ids(14), rows_of(ids(14), 5), clock=5)
        assert kept.missing(0, ids(10, 11, 12, 13, 14), clock=5).tolist() == [11]

    def test_more_rows_than_a_cache_takes_leave_the_first_ones(self) -> None:
        kept = RowCaches(specs(), num_rows=4, staleness=100)
        many = ids(*range(9))
        kept.put(0, many, rows_of(many, 1), clock=1)
        assert kept.missing(0, many, clock=1).tolist() == [4, 5, 6, 7, 8]

    @pytest.mark.parametrize("seed", range(5))
    def test_no_row_is_ever_another_ones(self, seed: int) -> None:
        drawn = np.random.default_rng(seed)
        num_rows, staleness = int(drawn.integers(8, 40)), int(drawn.integers(1, 6))
        kept = RowCaches(specs(), num_rows=num_rows, staleness=staleness)
        newest = OrderedDict[int, int]()
        for clock in range(60):
            batch = np.unique(
                (drawn.random(int(drawn.integers(1, num_rows))) ** 3 * 90).astype(int)
            )
            found = kept.find(0, batch, clock=clock)
            for at, row, brought in zip(found.at, found.rows, found.clocks, strict=True):
                assert brought == newest[int(batch[at])] >= clock - staleness
                assert np.array_equal(row, rows_of(batch[at : at + 1], int(brought))[0])
            wanted = kept.missing(0, batch, clock=clock)
            assert np.array_equal(wanted, np.delete(batch, found.at))
            kept.put(0, wanted, rows_of(wanted, clock), clock=clock)
            newest |= dict.fromkeys(wanted.tolist(), clock)
            assert not len(kept.missing(0, wanted, clock=clock))


def version(position: int, *, clock: int, min_done: int) -> Header:
    return Header(kind=int(Kind.REPLY), sender=0, clock=clock, position=position, min_done=min_done)


def reduced(*, is_skipped: bool = False) -> Reduced:
    weight = 0.0 if is_skipped else 2.0
    return Reduced(
        weight=1.0, group_weight=weight, hyper=b"", absent=frozenset(), is_skipped=is_skipped
    )


def records(history: WorkerHistory) -> list[tuple[int, ...]]:
    """Return iteration, part, rows, position and clock of the reply of each use."""
    uses = history.log().uses
    return [
        tuple(int(each[name]) for name in ("iteration", "chunk", "crc", "position", "reply"))
        for each in uses
    ]


def test_a_use_names_the_oldest_rows_of_each_part() -> None:
    history = WorkerHistory(None, 0)
    uses = RowUses([0, 1, 0], history, kept=2)
    uses.bring(
        4, {0: version(50, clock=3, min_done=4), 1: version(60, clock=3, min_done=4)}, [7, 2, 0]
    )
    uses.use(4)
    uses.commit(4, reduced(), pushed=[0, 1, 2])
    uses.commit(5, reduced(), pushed=[0, 1, 2])
    # Rows of part 0 that were kept, and rows of part 2 that a prefetch and a pull have brought.
    uses.bring(6, {2: version(90, clock=5, min_done=5)}, [0, 0, 3])
    uses.bring(6, {2: version(95, clock=6, min_done=6)}, [0, 0, 1])
    uses.use(6)
    uses.use_kept(np.array([4, 4, 4]), np.array([0, 0, 0]))
    uses.commit(6, reduced(is_skipped=True), pushed=[0, 1, 2])
    assert records(history) == [
        (4, 0, 7, 50, 3), (4, 1, 2, 60, 3), (4, 2, 0, 0, 0),
        (5, 0, 0, 0, 0), (5, 1, 0, 0, 0), (5, 2, 0, 0, 0),
        (6, 0, 3, 50, 3), (6, 1, 0, 0, 0), (6, 2, 4, 90, 5),
    ]  # fmt: skip
    assert uses.staleness == {0: 2, 2: 1, 1: 1}
    pushes = history.log().pushes
    assert pushes["iteration"].tolist() == [4, 5, 6]
    assert pushes["weight"].tolist() == [2.0, 2.0, 0.0]
    assert pushes["is_empty"].tolist() == [0, 0, 1]


def test_rows_that_nobody_looked_up_are_no_use() -> None:
    history = WorkerHistory(None, 0)
    uses = RowUses([0], history, kept=0)
    uses.bring(1, {0: version(5, clock=0, min_done=1)}, [7])
    uses.commit(1, reduced(), pushed=[0])
    assert records(history) == [(1, 0, 0, 0, 0)]
    assert not uses.staleness
