"""Rows that a table admits, and rows that it gives up: which, when, and how much memory is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from psdist.errors import UsageError
from psdist.tables.kernels import row_kernels
from psdist.tables.kernels.reference import Kernels
from psdist.tables.retention import Admission, Eviction, parse_eviction
from psdist.tables.specs import TableSpec, mixed
from psdist.tables.store import RowStore

DIM = 4


def store_of(num_rows: int | None = 1000, **changed: Any) -> RowStore:
    spec = TableSpec(
        name="items", num_rows=num_rows, dim=DIM, optimizer="RowSGD", scale=0.5, **changed
    )
    return RowStore(spec)


def touch(store: RowStore, ids: Any, clock: int) -> None:
    distinct = np.unique(np.asarray(ids, np.int64))
    store.apply(distinct, np.ones((len(distinct), DIM), np.float32), lr=1.0, clock=clock)


def stored(store: RowStore) -> list[int]:
    return sorted(store.stored(store.in_order()).ids.tolist())


def test_an_id_gets_a_row_at_its_nth_iteration() -> None:
    store = store_of(admit=3)
    first = store.gather(np.array([7]))
    for clock in (1, 2):
        touch(store, [7], clock)
        assert (store.gather(np.array([7])) == first).all()
    assert (len(store), store.statistics().num_dropped) == (0, 2)
    touch(store, [7, 8], 3)
    np.testing.assert_allclose(store.gather(np.array([7])), first - 1, atol=1e-6)
    assert stored(store) == [7]
    assert store.statistics().num_dropped == 3
    touch(store, [7], 4)
    np.testing.assert_allclose(store.gather(np.array([7])), first - 2, atol=1e-6)


def test_an_id_that_is_admitted_at_its_second_iteration_needs_two() -> None:
    store = store_of(admit=2)
    touch(store, [7], 1)
    assert stored(store) == []
    touch(store, [7, 8], 2)
    assert stored(store) == [7]


@pytest.mark.parametrize("admit", [0, 1])
def test_without_admission_every_id_gets_a_row_at_once(admit: int) -> None:
    store = store_of(admit=admit)
    touch(store, [1, 2], 1)
    assert stored(store) == [1, 2]


@pytest.mark.parametrize("kernels", [Kernels(), row_kernels()], ids=["numpy", "C"])
def test_an_id_is_never_admitted_late_and_seldom_early(kernels: Kernels) -> None:
    spec = TableSpec(name="t", num_rows=None, dim=1, optimizer="RowSGD")
    admission = Admission(3, range(4096), kernels)
    ids = np.arange(300_000)  # 73 a bucket: below half of its cells
    hashes, buckets = mixed(ids.view(np.uint64)), spec.buckets_of(ids)
    for share in (0.0, 0.02):
        assert admission.count(hashes, buckets).mean() <= share
    assert admission.count(hashes, buckets).all()
    assert admission.cells.nbytes == 4 << 20


@pytest.mark.parametrize("kernels", [Kernels(), row_kernels()], ids=["numpy", "C"])
def test_a_bucket_that_fills_is_halved_and_counts_stop_at_255(kernels: Kernels) -> None:
    cells, one = np.zeros((1, 4, 256), np.uint8), np.array([1], np.uint64)
    for _ in range(300):
        (count,) = kernels.count(cells, one, np.zeros(1, np.int64))
    assert count == 255
    others = mixed(np.arange(2, 2000, dtype=np.uint64))
    for part in np.array_split(others, 40):
        kernels.count(cells, part, np.zeros(len(part), np.int64))
        assert 2 * np.count_nonzero(cells[0, 0]) <= 256
    assert cells.max() < 32


@pytest.mark.parametrize(
    "text",
    ["lru", "lru:", "lru:0", "LRU:5", "age:-1", "mru:5", "lfu:1e6", "lru:5 ", f"age:{2**31}"],
)
def test_rules_of_eviction_that_cannot_be_read_name_those_that_can(text: str) -> None:
    with pytest.raises(UsageError, match="expected 'lru:CAP' or 'lfu:CAP'"):
        parse_eviction(text)


def test_rules_of_eviction_are_read() -> None:
    assert parse_eviction("lru:50_000_000") == Eviction("lru", 50_000_000)
    assert parse_eviction("lfu:1000").share(0.5) == Eviction("lfu", 500)
    assert parse_eviction("lru:1").share(0.01) == Eviction("lru", 1)
    assert parse_eviction("age:10").share(0.5) == Eviction("age", 10)


def test_lru_gives_up_the_rows_of_the_longest_time_ago() -> None:
    store = store_of(evict="lru:32")
    touch(store, range(16), 1)
    touch(store, range(16, 32), 2)
    touch(store, [0, 1], 3)
    assert len(store) == 32
    touch(store, [99], 4)  # down to 30: 2 and 3 and 4 are the oldest
    assert stored(store) == [0, 1, *range(5, 32), 99]
    assert store.statistics().num_evicted == 3


def test_lfu_gives_up_the_rows_of_the_fewest_iterations() -> None:
    store = store_of(evict="lfu:32")
    for clock in range(3):
        touch(store, range(10), clock)
    touch(store, range(10, 31), 4)
    touch(store, range(20, 40), 5)
    assert len(store) == 30
    assert stored(store) == [*range(10), *range(20, 31), *range(31, 40)]


def test_a_part_has_its_share_of_the_rows() -> None:
    spec = store_of(None, evict="lru:800").spec
    store = RowStore(spec, range(1024))
    for clock in range(60):
        ids = np.arange(clock * 100, clock * 100 + 400)
        touch(store, ids[spec.buckets_of(ids) < 1024], clock)
    assert 200 - 200 // 16 <= len(store) <= 200


def test_the_count_of_a_new_row_is_not_its_state() -> None:
    spec = TableSpec(
        name="items", num_rows=None, dim=DIM, optimizer="RowAdagrad", scale=0.5, evict="lfu:16",
        arguments={"eps": 1e-8, "initial_accumulator_value": 0.25},
    )  # fmt: skip
    store = RowStore(spec)
    touch(store, range(16), 1)
    rows = store.stored(store.in_order())
    assert rows.state[:, -1].view(np.int32).tolist() == [1] * 16


def test_age_gives_up_rows_that_were_not_touched_for_n_iterations() -> None:
    store = store_of(evict="age:5")
    touch(store, [1, 2], 1)
    for clock in range(2, 7):
        touch(store, [2], clock)
    assert stored(store) == [1, 2]
    touch(store, [], 7)
    assert stored(store) == [2]
    for clock in range(8, 13):
        touch(store, [], clock)
    assert stored(store) == []
    assert store.statistics().num_evicted == 2


def test_an_evicted_row_comes_back_with_its_first_value_and_state() -> None:
    spec = TableSpec(
        name="items", num_rows=None, dim=DIM, optimizer="RowAdagrad", scale=0.5, evict="age:1",
        arguments={"eps": 1e-8, "initial_accumulator_value": 0.25},
    )  # fmt: skip
    store, one = RowStore(spec), np.array([-3])
    first = store.gather(one)
    touch(store, one, 1)
    moved = store.gather(one)
    touch(store, [5], 2)
    touch(store, [5], 3)
    assert stored(store) == [5]
    assert (store.gather(one) == first).all()
    touch(store, one, 4)
    assert (store.gather(one) == moved).all()


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_memory_stays_flat_for_10_000_iterations(kind: str) -> None:
    """Case 9 of the acceptance: CAP is half of the ids."""
    num_ids = 2_000
    store, generator = store_of(num_ids, evict=f"{kind}:{num_ids // 2}"), np.random.default_rng(1)
    most, warm = list[int](), 500
    for clock in range(10_000):
        touch(store, generator.integers(0, num_ids, 40), clock)
        most.append(store.statistics().reserved_bytes)
        assert len(store) <= num_ids // 2
    assert max(most) <= 1.02 * most[warm]
    assert min(most[warm:]) >= 0.98 * most[warm]
    found = store.statistics()
    assert found.num_evicted > num_ids
    gone = np.setdiff1d(np.arange(num_ids), stored(store))
    assert (store.gather(gone) == store_of(num_ids).gather(gone)).all()


def test_slots_and_index_are_sound_after_many_evictions() -> None:
    store, generator = store_of(None, evict="lru:200"), np.random.default_rng(1)
    expected = dict[int, npt.NDArray[np.float32]]()
    fresh = store_of(None)
    for clock in range(400):
        ids = np.unique(generator.zipf(1.2, 60))
        touch(store, ids, clock)
        for id_ in ids.tolist():
            before = expected.get(id_, fresh.gather(np.array([id_]))[0])
            expected[id_] = before - np.float32(1)
        if len(store) < len(expected):  # some are gone
            left = set(stored(store))
            expected = {id_: row for id_, row in expected.items() if id_ in left}
            assert len(left) == len(store) == len(expected)
    assert store.statistics().num_evicted > 1000
    assert sorted(expected) == stored(store)
    rows = store.gather(np.array(sorted(expected)))
    assert (rows == np.stack([expected[id_] for id_ in sorted(expected)])).all()
