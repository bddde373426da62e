"""The passes over the rows of a table, compiled where the host can.

    kernels = row_kernels()
    kernels.name                                 # "C", or "numpy"
    slots = kernels.find(memory, ids)            # psdist.tables.kernels.reference has all passes

``rows.c`` is compiled once for each kind of processor (psdist.c_libraries). A trial compares its
bits with those of numpy. Without a compiler, or if bits differ, numpy does the work: the same
results at a fifth of the speed. Measured in tests/benchmarks/tables/rows.py.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from psdist.c_libraries import load_library
from psdist.tables.kernels.reference import (
    SKETCH,
    Cells,
    Contribution,
    Kernels,
    RowMemory,
    Slots,
    empty_index,
)
from psdist.tables.specs import Ids, Rows

_T = TypeVar("_T", bound=np.generic)

_log: Final = logging.getLogger(__name__)

_SOURCE: Final = Path(__file__).with_name("rows.c")
_RULES: Final = {
    "sgd": 1,
    "row_wise_adagrad": 2,
    "adagrad": 2,
    "adam": 4,
    "row_wise_adam": 4,
    "ftrl": 4,
}
"""Rule -> the numbers it takes."""


class _Memory(ctypes.Structure):
    """memory_t of rows.c."""

    _fields_ = (
        ("records", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("key_words", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("first", ctypes.c_uint64),
        ("step", ctypes.c_float),
        ("fill", ctypes.c_float),
    )


class _Contribution(ctypes.Structure):
    """contribution_t of rows.c."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num", ctypes.c_int64),
        ("weight", ctypes.c_float),
    )


class CompiledKernels(Kernels):
    """The passes of rows.c."""

    name = "C"

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._find, self._add, self._reindex, self._gather, self._merge, self._count = (
            getattr(library, f"rows_{name}")
            for name in ("find", "add", "reindex", "gather", "merge", "count")
        )
        self._distinct, self._sum_at = library.rows_distinct, library.rows_sum_at
        self._find.argtypes = (pointer, pointer, number, pointer)
        self._add.argtypes = (pointer, pointer, pointer, number)
        self._reindex.argtypes = (pointer, number, pointer)
        self._gather.argtypes = (pointer, pointer, pointer, number, pointer)
        self._merge.argtypes = (pointer, number, number, pointer, pointer, pointer)
        self._count.argtypes = (pointer, pointer, pointer, number, pointer, pointer)
        self._distinct.argtypes = (pointer, number, pointer, pointer, pointer)
        self._sum_at.argtypes = (pointer, number, pointer, number, number, pointer)
        self._rules = {rule: getattr(library, f"rows_{rule}") for rule in _RULES}
        passes = self._find, self._add, self._reindex, self._gather, self._count, self._sum_at
        for each in (*passes, *self._rules.values()):
            each.restype = None
        for rule in self._rules.values():
            rule.argtypes = (pointer, pointer, number, pointer, pointer, pointer, number)
        self._merge.restype = self._distinct.restype = number

    def find(self, memory: RowMemory, ids: Ids) -> Slots:
        ids, slots = _plain(ids), np.empty(len(ids), np.int32)
        self._find(_passed(memory), _at(ids), len(ids), _at(slots))
        return slots

    def add(self, memory: RowMemory, ids: Ids, slots: Slots) -> None:
        ids, slots = _plain(ids), _plain(slots)
        self._add(_passed(memory), _at(ids), _at(slots), len(ids))

    def reindex(self, memory: RowMemory, num: int, is_live: npt.NDArray[np.uint8] | None) -> None:
        self._reindex(_passed(memory), num, None if is_live is None else _at(is_live))

    def gather(self, memory: RowMemory, ids: Ids, slots: Slots, into: Rows) -> None:
        ids = _plain(ids)
        self._gather(_passed(memory), _at(ids), _at(slots), len(ids), _at(into))

    def merge(self, given: Sequence[Contribution], dim: int) -> tuple[Ids, Rows]:
        arrays = [(_plain(e.ids), _plain(e.rows)) for e in given]
        table = (_Contribution * len(given))(
            *(
                _Contribution(_at(ids), _at(rows), len(ids), each.weight)
                for each, (ids, rows) in zip(given, arrays, strict=True)
            )
        )
        most = sum(len(ids) for ids, _ in arrays)
        at, found = np.empty(len(given), np.int64), np.empty(most, np.int64)
        sums = np.empty((most, dim), np.float32)
        num = self._merge(ctypes.addressof(table), len(given), dim, _at(at), _at(found), _at(sums))
        return found[:num], sums[:num]

    def distinct(self, ids: Ids) -> tuple[Ids, npt.NDArray[np.int64]]:
        ids, num = _plain(ids), len(ids)
        memory = np.empty((6, num), np.int64)
        work = _at(memory)
        found, at = work + 4 * memory.strides[0], work + 5 * memory.strides[0]
        num_found = self._distinct(_at(ids), num, work, found, at)
        return memory[4, :num_found], memory[5]

    def sum_at(self, rows: Rows, at: npt.NDArray[np.int64], num: int) -> Rows:
        if rows.strides[1] != 4 or rows.strides[0] % 4 or not rows.flags.aligned:
            rows = rows.copy()
        at, sums = _plain(at), np.zeros((num, rows.shape[1]), np.float32)
        stride = rows.strides[0] // 4
        self._sum_at(_at(rows), stride, _at(at), len(at), rows.shape[1], _at(sums))
        return sums

    def count(
        self, cells: Cells, hashes: npt.NDArray[np.uint64], buckets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        counts, is_seen = np.empty(len(hashes), np.uint8), np.zeros(len(cells), np.uint8)
        num = len(hashes)
        self._count(_at(cells), _at(hashes), _at(buckets), num, _at(is_seen), _at(counts))
        return counts

    def update(
        self,
        memory: RowMemory,
        rule: str,
        slots: Slots,
        gradients: Rows,
        numbers: Sequence[float],
        sizes: npt.NDArray[np.float64],
    ) -> None:
        gradients, own = _plain(gradients), np.array(numbers, np.float64)
        update = self._rules[rule]
        passed, num = _passed(memory), len(slots)
        update(passed, _at(slots), num, _at(gradients), _at(own), _at(sizes), len(sizes))


def _plain(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """Return an array that C can read: rows of a message may begin anywhere."""
    is_plain = array.flags.c_contiguous and array.flags.aligned
    return array if is_plain else array.copy()


def _at(array: npt.NDArray[Any]) -> int:
    try:
        # A fifth of the time of ctypes.data.
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type] # numpy's
    except (TypeError, ValueError, BufferError):  # not writable, empty, or with gaps
        address: int = array.ctypes.data
        return address


def _passed(memory: RowMemory) -> Any:
    records, index, capacity = _at(memory.records), _at(memory.index), len(memory.index)
    passed = memory.passed
    if passed is None or (passed.records, passed.index, passed.capacity) != (
        records,
        index,
        capacity,
    ):
        passed = memory.passed = _Memory(
            records=records,
            index=index,
            capacity=capacity,
            stride=memory.records.shape[1],
            key_words=memory.key_words,
            dim=memory.dim,
            first=memory.first,
            step=memory.step,
            fill=memory.fill,
        )
    return ctypes.byref(passed)


@functools.cache
def row_kernels() -> Kernels:
    """Return the compiled passes if this host can compile them and their bits are those of numpy.
    The first call on a kind of processor takes about a second."""
    try:
        compiled = CompiledKernels(load_library(_SOURCE))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        _log.info("row kernels unavailable: %s: %s; numpy updates rows instead",
                  type(error).__name__, error)  # fmt: skip
        return Kernels()
    for dim in (3, 16, 40):
        if _trial(compiled, dim) != _trial(Kernels(), dim):
            _log.warning("row kernels disabled: dim=%d: their bits differ from those of numpy; "
                         "numpy updates rows instead", dim)  # fmt: skip
            return Kernels()
    return compiled


def _trial(kernels: Kernels, dim: int) -> list[bytes]:
    """Return what all passes make of hard rows."""
    generator, num = np.random.default_rng(7), 500
    found = list[bytes]()
    for key_words, rule in enumerate(_RULES):
        width = 2 - key_words % 2
        stride = width + dim + 2 * dim + 2
        memory = RowMemory(
            records=np.zeros((num, stride), np.float32), index=empty_index(num // 2 + 40),
            key_words=width, dim=dim, first=key_words + 2**63, step=np.float32(1e-7), fill=0.25,
        )  # fmt: skip
        most = 2**31 if width == 1 else 2**63
        ids = np.unique(generator.integers(0, most, num // 2))
        slots = np.arange(len(ids), dtype=np.int32)
        kernels.add(memory, ids[::2], slots[::2])
        scales = np.array([1.0, 1e-3, 3e-39, 1e18], np.float32)
        for step in range(3):
            rows = generator.standard_normal((len(ids), dim)).astype(np.float32)
            rows *= generator.choice(scales, (len(ids), 1))
            rows[:5], rows[5:9, ::2] = 0.0, -0.0
            given = [Contribution(ids, rows, 1.0), Contribution(ids[::3], rows[::3], -0.3)]
            merged, sums = kernels.merge(given, dim)
            places = kernels.find(memory, merged)
            if step == 1:
                kernels.add(memory, merged[places < 0], slots[1::2])
                memory.index = empty_index(num // 2 + 30)
                kernels.reindex(memory, len(ids), None)
                places = kernels.find(memory, merged)
            sizes, num_numbers = np.array([0.3, 0.7]), _RULES[rule]
            numbers = (0.05, 1e-8, 0.1, 0.001)[:num_numbers]
            kernels.update(memory, rule, places[places >= 0], sums[places >= 0], numbers, sizes)
            into = np.empty((len(merged), dim), np.float32)
            kernels.gather(memory, merged, places, into)
            found += [merged.tobytes(), sums.tobytes(), places.tobytes(), into.tobytes()]
        mixed_up = generator.choice(ids, num) * generator.choice([1, -1], num)
        different, at = kernels.distinct(mixed_up)
        sums = kernels.sum_at(rows[:, 1:], at[: len(rows)], len(different))
        found += [different.tobytes(), at.tobytes(), sums.tobytes()]
        cells = np.zeros((3, *SKETCH), np.uint8)
        for step in range(60):
            hashes = memory.hashes(ids[: 4 * step])
            buckets = np.arange(len(hashes)) % 2 + 1
            found.append(kernels.count(cells, hashes, buckets).tobytes())
        found += [memory.records.tobytes(), cells.tobytes()]
    return found
