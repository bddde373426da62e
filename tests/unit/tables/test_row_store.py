"""The rows of a part: first values, updates, growth, checkpoints; with both kinds of kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.errors import InvariantError, ProtocolError, UsageError, UserError
from psdist.tables import store as store_module
from psdist.tables.kernels import row_kernels
from psdist.tables.kernels.reference import Contribution, Kernels
from psdist.tables.optimizers import ROW_OPTIMIZERS
from psdist.tables.specs import TableSpec, TableSpecs
from psdist.tables.store import RowStore

ROOT = Path(__file__).resolve().parents[3]


def spec_of(optimizer: str = "RowSGD", **changed: Any) -> TableSpec:
    values = {"name": "items", "num_rows": 100_000, "dim": 5, "seed": 3, "scale": 0.25}
    arguments = ROW_OPTIMIZERS[optimizer]().arguments() if optimizer in ROW_OPTIMIZERS else {}
    return TableSpec(**values | {"optimizer": optimizer, "arguments": arguments} | changed)


@pytest.fixture(params=["C", "numpy"], autouse=True, scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    found = row_kernels() if request.param == "C" else Kernels()
    if found.name != request.param:
        pytest.skip("no compiler on PATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "row_kernels", lambda: found)
        yield found


def ones(ids: npt.NDArray[np.int64], dim: int = 5) -> npt.NDArray[np.float32]:
    return np.ones((len(ids), dim), np.float32)


def all_rows(store: RowStore) -> dict[int, bytes]:
    """Return values and state by id."""
    ids, *words, _ = store.stored(store.in_order())
    return {
        int(id_): values.tobytes() + state.tobytes()
        for id_, values, state in zip(ids, *words, strict=True)
    }


def test_first_values_are_uniform_and_not_stored() -> None:
    store = RowStore(spec_of(dim=16, scale=0.25))
    values = store.gather(np.arange(20_000))
    assert values.dtype == np.float32
    assert -0.25 < values.min() < -0.2499
    assert 0.2499 < values.max() < 0.25
    assert abs(float(values.mean())) < 0.001
    assert abs(float(values.var()) - 0.25**2 / 3) < 1e-4
    by_column = np.corrcoef(values, rowvar=False) - np.eye(16)
    assert np.abs(by_column).max() < 0.04
    assert len(np.unique(values)) > 0.95 * values.size
    assert len(store) == store.statistics().num_rows == 0


def test_first_values_depend_on_seed_table_and_id_alone() -> None:
    ids = np.array([0, 1, 99_999])
    first = RowStore(spec_of()).gather(ids)
    assert first.tobytes() == RowStore(spec_of("LazyAdam", num_rows=None)).gather(ids).tobytes()
    for changed in ({"seed": 4}, {"seed": -1}, {"name": "users"}):
        assert not (RowStore(spec_of(**changed)).gather(ids) == first).any()
    assert not RowStore(spec_of(scale=0.0)).gather(ids).any()


def test_first_values_stay_as_they_are() -> None:
    """A new version that changes them would change every job that continues a checkpoint."""
    values = RowStore(spec_of()).gather(np.array([7]))
    assert values[0].tobytes().hex() == "3934033e48c4d7bcad8c613e52dad93d6b86293e"


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
@pytest.mark.parametrize("changed", [{}, {"admit": 2}, {"evict": "age:3"}], ids=str)
def test_any_number_of_parts_has_the_same_rows(optimizer: str, changed: dict[str, Any]) -> None:
    spec = spec_of(optimizer, num_rows=None, **changed)
    found = list[dict[int, bytes]]()
    for num_parts in (1, 2, 3, 7):
        generator, specs = np.random.default_rng(5), TableSpecs(tables=(spec,), num_parts=num_parts)
        stores = [RowStore(spec, specs.buckets_of_part(part)) for part in range(num_parts)]
        for clock in range(1, 12):
            ids = np.unique(generator.zipf(1.3, 300) - 20)
            rows = generator.standard_normal((len(ids), spec.dim)).astype(np.float32)
            for store, places in zip(stores, specs.split(0, ids), strict=True):
                store.apply(ids[places], rows[places], lr=0.1, clock=clock)
        found.append({key: each for store in stores for key, each in all_rows(store).items()})
    assert len(found[0]) > 30
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("num_rows", [2**31, 2**31 + 1, None])
def test_any_id_of_the_table_has_a_row_of_its_own(num_rows: int | None) -> None:
    store = RowStore(spec_of(num_rows=num_rows))
    ids = [0, 1, 2**31 - 1]
    ids += [] if num_rows == 2**31 else [2**31]
    ids += [] if num_rows else [-(2**63), -1, 2**32, 2**62, 2**63 - 1]
    rows = np.array(sorted(ids), np.int64)
    before = store.gather(rows)
    store.apply(
        rows, ones(rows) * np.arange(len(rows))[:, None].astype(np.float32), lr=1.0, clock=1
    )
    moved = before - store.gather(rows)
    np.testing.assert_allclose(moved[:, 0], np.arange(len(rows)), atol=1e-6)
    assert sorted(all_rows(store)) == sorted(ids)


def test_a_table_that_grows_keeps_its_rows_and_little_memory() -> None:
    store, generator = (
        RowStore(spec_of("RowWiseAdagrad", num_rows=None, dim=16)),
        np.random.default_rng(1),
    )
    ids = np.unique(generator.integers(-(2**63), 2**63 - 1, 60_000))
    generator.shuffle(ids)
    expected = store.gather(ids)
    for part in map(np.sort, np.array_split(ids, 23)):
        store.apply(part, np.zeros((len(part), 16), np.float32), lr=0.1, clock=1)
    assert store.gather(ids).tobytes() == expected.tobytes()
    found = store.statistics()
    assert found.num_rows == len(store) == len(ids)
    assert found.value_bytes == 64 * len(ids)
    assert found.state_bytes == 4 * len(ids)
    assert found.reserved_bytes < 1.35 * (found.value_bytes + found.state_bytes)


def test_contributions_are_added_in_their_order() -> None:
    store = RowStore(spec_of(dim=1))
    large, small = np.float32([[1e8]]), np.float32([[1.0]])
    one, two = np.array([4]), np.array([4, 9])
    given = [
        Contribution(one, large, 1.0),
        Contribution(two, np.concatenate([small, small]), 0.5),
        Contribution(one, -large, 1.0),
    ]
    ids, sums = store.merge(given)
    assert ids.tolist() == [4, 9]
    assert sums.tolist() == [[0.0], [0.5]]
    ids, sums = store.merge([given[0], given[2], given[1]])
    assert sums.tolist() == [[0.5], [0.5]]
    assert [len(each) for each in store.merge([])] == [0, 0]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.sets(st.integers(-5, 40) | st.just(2**63 - 1)), st.floats(0, 2, width=32)),
        max_size=6,
    ),
    seed=st.integers(0, 1000),
)
def test_merging_is_what_a_loop_gives(
    kernels: Kernels, groups: list[tuple[set[int], float]], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    expected, given_ = dict[int, npt.NDArray[np.float32]](), list[Contribution]()
    for ids, weight in groups:
        rows = generator.standard_normal((len(ids), 3)).astype(np.float32)
        given_.append(Contribution(np.array(sorted(ids), np.int64), rows, weight))
        for id_, row in zip(sorted(ids), rows, strict=True):
            total = expected.get(id_, np.zeros(3, np.float32))
            expected[id_] = total + row * np.float32(weight)
    found, sums = kernels.merge(given_, 3)
    assert found.tolist() == sorted(expected)
    assert all((expected[id_] == row).all() for id_, row in zip(found.tolist(), sums, strict=True))


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.sets(st.integers(-400, 400), max_size=200), max_size=12))
def test_rows_are_those_of_a_dictionary(kernels: Kernels, steps: list[set[int]]) -> None:
    del kernels
    store, moved = RowStore(spec_of(num_rows=None, scale=0.0)), dict[int, float]()
    for clock, step in enumerate(steps, start=1):
        ids = np.array(sorted(step), np.int64)
        store.apply(ids, ones(ids), lr=float(clock), clock=clock)
        moved |= {id_: moved.get(id_, 0.0) - clock for id_ in step}
    asked = np.arange(-410, 410)
    assert store.gather(asked)[:, 4].tolist() == [moved.get(int(id_), 0.0) for id_ in asked]
    assert len(store) == len(moved)


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_a_store_that_is_restored_goes_on_with_the_same_bits(optimizer: str) -> None:
    spec = spec_of(optimizer, num_rows=None, admit=2, evict="lfu:150")
    generator = np.random.default_rng(2)

    def step(stores: list[RowStore], clock: int) -> None:
        ids = np.unique(generator.zipf(1.2, 200) % 1000)
        rows = generator.standard_normal((len(ids), spec.dim)).astype(np.float32)
        for store in stores:
            store.apply(ids, rows, lr=0.1, clock=clock)

    first, again = RowStore(spec), RowStore(spec)
    for clock in range(1, 9):
        step([first], clock)
    rows = first.stored(first.in_order())
    again.restore(rows._replace(counts=first.counts), first_bucket=0)
    assert all_rows(first) == all_rows(again)
    for clock in range(9, 20):
        step([first, again], clock)
    assert all_rows(first) == all_rows(again)
    assert first.statistics().num_evicted > again.statistics().num_evicted > 0


def test_rows_are_in_order_of_hashes_and_so_of_buckets() -> None:
    store = RowStore(spec_of())
    ids = np.arange(5_000)
    store.apply(ids, ones(ids), lr=0.1, clock=1)
    found = store.stored(store.in_order()).ids
    assert sorted(found.tolist()) == ids.tolist()
    assert (np.diff(store.spec.buckets_of(found)) >= 0).all()
    assert (np.diff(store.spec.hashes(found).astype(np.float64)) > 0).all()
    some = store.stored(store.in_order()[100:200])
    assert some.ids.tolist() == found[100:200].tolist()
    assert some.values.tobytes() == store.gather(some.ids).tobytes()


def test_a_learning_rate_of_zero_changes_no_value() -> None:
    for optimizer in ROW_OPTIMIZERS:
        store, ids = RowStore(spec_of(optimizer)), np.arange(50)
        before = store.gather(ids)
        store.apply(ids, ones(ids), lr=0.0, clock=1)
        assert store.gather(ids).tobytes() == before.tobytes()


def test_a_description_that_cannot_be_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"a table with the optimizer 'os\.system'"):
        RowStore(spec_of("os.system"))
    with pytest.raises(UsageError, match="evict is 'lru'; expected 'lru:CAP'"):
        RowStore(spec_of(evict="lru"))


PROGRAM = """
import resource
import numpy as np
from psdist.errors import UserError
from psdist.tables.specs import TableSpec
from psdist.tables.store import RowStore

store = RowStore(TableSpec(name="items", num_rows=None, dim=64, optimizer="RowSGD"))
store.apply(np.arange(1), np.zeros((1, 64), np.float32), lr=0.1, clock=0)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20),) * 2)
try:
    for first in range(1, 10**9, 10_000):
        ids = np.arange(first, first + 10_000)
        store.apply(ids, np.zeros((10_000, 64), np.float32), lr=0.1, clock=1)
except UserError as error:
    print(error)
"""


def test_without_memory_one_line_names_table_rows_and_bytes(kernels: Kernels) -> None:
    if kernels.name == "numpy":
        pytest.skip("once is enough")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    (line,) = done.stdout.splitlines()
    assert line.startswith("table items: no memory for ")
    assert " rows on this server (" in line
    assert line.endswith("use more servers, a smaller dim, admit= or evict=")


def test_arrays_that_the_kernels_cannot_read_are_refused_or_copied() -> None:
    store, ids = RowStore(spec_of()), np.arange(4)
    rows = ones(ids)
    wrong: list[tuple[Any, Any]] = [
        (ids, rows[:3]),
        (ids, rows[:, :4]),
        (ids, rows.astype(np.float64)),
        (ids.astype(np.int32), rows),
    ]
    for each in wrong:
        with pytest.raises(InvariantError, match=r"table items: .* ids; dim is 5"):
            store.apply(*each, lr=0.1, clock=1)
        with pytest.raises(InvariantError, match="dim is 5"):
            store.merge([Contribution(*each, 1.0)])
    with pytest.raises(InvariantError, match="dim is 5"):
        store.gather(ids.astype(np.int32))
    before = store.gather(ids)
    memory = np.zeros(rows.nbytes + 1, np.uint8)
    unaligned = memory[1:].view(np.float32).reshape(4, 5)
    unaligned[:] = 1.0
    store.apply(np.arange(8)[::2] // 2, unaligned, lr=1.0, clock=1)
    np.testing.assert_allclose(store.gather(ids), before - 1, atol=1e-6)


def test_more_rows_than_slots_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MOST", 10)
    store = RowStore(spec_of())
    store.apply(np.arange(10), ones(np.arange(10)), lr=0.1, clock=1)
    with pytest.raises(UserError, match=r"no memory for 11 rows on this server .*use more servers"):
        store.apply(np.arange(11), ones(np.arange(11)), lr=0.1, clock=2)
