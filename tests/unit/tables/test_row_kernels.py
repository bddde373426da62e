"""The compiled passes over rows: the bits of numpy, and what hosts without them do."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.tables import kernels as kernels_module
from psdist.tables.kernels import CompiledKernels, row_kernels
from psdist.tables.kernels.reference import Contribution, Kernels, RowMemory, empty_index
from psdist.tables.optimizers import ROW_OPTIMIZERS, LazyAdam, RowOptimizer

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no compiler on PATH"
)
OPTIMIZERS = [*(each() for each in ROW_OPTIMIZERS.values()), LazyAdam(row_wise=True)]


@needs_compiler
def test_the_compiled_passes_pass_their_trial() -> None:
    assert row_kernels.__wrapped__().name == "C"


def memory_of(optimizer: RowOptimizer, dim: int, key_words: int) -> RowMemory:
    stride = key_words + dim + optimizer.state_words(dim)
    return RowMemory(
        records=np.zeros((300, stride), np.float32),
        index=empty_index(320),  # long searches
        key_words=key_words,
        dim=dim,
        first=12345,
        step=np.float32(0.1 * 2.0**-24),
        fill=optimizer.fill,
    )


@needs_compiler
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@settings(max_examples=25, deadline=None)
@given(
    dim=st.integers(1, 70),
    key_words=st.sampled_from([1, 2]),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e15, np.inf]),
    lr=st.floats(1e-6, 10),
    seed=st.integers(0, 10_000),
)
def test_every_pass_has_the_bits_of_numpy(
    optimizer: RowOptimizer, dim: int, key_words: int, scale: float, lr: float, seed: int
) -> None:
    results = list[list[np.ndarray]]()
    for kernels in (Kernels(), row_kernels()):
        generator, memory = np.random.default_rng(seed), memory_of(optimizer, dim, key_words)
        most = 2**31 if key_words == 1 else 2**63
        known = np.unique(generator.integers(0, most, 290))
        kernels.add(memory, known, generator.permutation(300)[: len(known)].astype(np.int32))
        found = list[np.ndarray]()
        for _ in range(3):
            ids = np.unique(np.append(generator.choice(known, 100), generator.integers(0, most, 9)))
            with np.errstate(invalid="ignore"):
                rows = generator.standard_normal((len(ids), dim)).astype(np.float32)
                rows *= np.float32(scale)
            rows[::7] = 0.0
            half = Contribution(ids[::2], rows[::2], 0.75)
            ids, sums = kernels.merge([half, Contribution(ids, rows, 1.0)], dim)
            slots = kernels.find(memory, ids)
            there = slots >= 0
            assert (there == np.isin(ids, known)).all()
            numbers, sizes = optimizer.numbers(lr), optimizer.sizes()
            kernels.update(memory, optimizer.rule, slots[there], sums[there], numbers, sizes)
            values = np.empty((len(ids), dim), np.float32)
            kernels.gather(memory, ids, slots, values)
            found += [ids, sums, slots, values]
        keys = memory.keys(np.arange(300, dtype=np.int32))
        results.append([*found, keys, memory.records[:, key_words:]])
    for one, other in zip(*results, strict=True):
        # A NaN's sign depends on the processor's instruction.
        is_nan = np.isnan(one) & np.isnan(other)
        assert np.where(is_nan, 0, one).tobytes() == np.where(is_nan, 0, other).tobytes()


@needs_compiler
@pytest.mark.parametrize("kernels", [Kernels(), row_kernels()], ids=lambda each: each.name)
@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))))
def test_distinct_ids_are_those_of_torch_and_rows_are_summed_as_its_embedding_does(
    kernels: Kernels, ids: list[int]
) -> None:
    given_ids = torch.tensor(ids, dtype=torch.int64)
    distinct, at = kernels.distinct(given_ids.numpy())
    expected, inverse = torch.unique(given_ids, return_inverse=True)
    assert (distinct.tolist(), at.tolist()) == (expected.tolist(), inverse.tolist())
    values = torch.zeros(len(distinct), 5, requires_grad=True)
    rows = torch.randn(len(ids), 5)
    torch.nn.functional.embedding(inverse, values).backward(rows)
    assert values.grad is not None
    assert (
        kernels.sum_at(rows.numpy(), at, len(distinct)).tobytes() == values.grad.numpy().tobytes()
    )


def test_an_index_is_filled_with_the_rows_that_are_left() -> None:
    for kernels in (Kernels(), row_kernels()):
        memory = memory_of(OPTIMIZERS[0], 3, 2)
        ids = np.arange(-100, 180)
        kernels.add(memory, ids, np.arange(280, dtype=np.int32))
        is_live = ids % 3 == 0
        memory.index = empty_index(110)
        kernels.reindex(memory, is_live)
        slots = kernels.find(memory, ids)
        assert (slots == np.where(is_live, np.arange(280), -1)).all()


def test_without_a_compiler_numpy_updates_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert row_kernels.__wrapped__().name == "numpy"


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("values[i] -= size * gradient[i]", "values[i] += size * gradient[i]"),
     ("int half = 4; half; half /= 2", "int half = 1; half < 8; half *= 2"),
     ("total[i] += row[i] * weight", "total[i] = fmaf(row[i], weight, total[i])"),
     ("is_alike && key_of(memory, slot) == ids[done + i]", "is_alike")],
    ids=["sign", "order", "rounding", "search"],
)  # fmt: skip
def test_a_library_with_other_bits_is_not_used(
    right: str,
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Path(kernels_module.__file__).with_name("rows.c").read_text()
    assert right in source
    (tmp_path / "rows.c").write_text(source.replace(right, wrong))
    monkeypatch.setattr(kernels_module, "_SOURCE", tmp_path / "rows.c")
    assert row_kernels.__wrapped__().name == "numpy"
    assert "row kernels disabled: dim=3: their bits differ" in caplog.text


def test_the_compiled_passes_are_those_of_numpy_by_name() -> None:
    own = {name for name in vars(Kernels) if not name.startswith("_")}
    assert own == {name for name in vars(CompiledKernels) if not name.startswith("_")}
