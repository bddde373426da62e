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
    RULES,
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
_KINDS: Final[dict[str, Any]] = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "": None}
_PASSES: Final = dict.fromkeys(RULES, "ppnpppn") | {
    "find": "ppnp",
    "add": "pppn",
    "reindex": "pnp",
    "gather": "pppnp",
    "merge": "pnnppp>n",
    "distinct": "pnppp>n",
    "sum_at": "pnpnnp",
    "count": "pppnpp",
}
"""Passes of rows.c -> arguments and result, pointers and numbers."""


class _Memory(ctypes.Structure):
    """memory_t of rows.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("records", "index")),
        *((name, ctypes.c_int64) for name in ("capacity", "stride", "key_words", "dim")),
        ("first", ctypes.c_uint64),
        *((name, ctypes.c_float) for name in ("step", "fill")),
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
        self._c: Any = library
        for name, kinds in _PASSES.items():
            arguments, _, result = kinds.partition(">")
            each = getattr(library, f"rows_{name}")
            each.argtypes, each.restype = [_KINDS[kind] for kind in arguments], _KINDS[result]

    def find(self, memory: RowMemory, ids: Ids) -> Slots:
        ids, slots = _plain(ids), np.empty(len(ids), np.int32)
        self._c.rows_find(_passed(memory), _at(ids), len(ids), _at(slots))
        return slots

    def add(self, memory: RowMemory, ids: Ids, slots: Slots) -> None:
        ids, slots = _plain(ids), _plain(slots)
        self._c.rows_add(_passed(memory), _at(ids), _at(slots), len(ids))

    def reindex(self, memory: RowMemory, is_live: npt.NDArray[np.bool_]) -> None:
        self._c.rows_reindex(_passed(memory), len(is_live), _at(is_live))

    def gather(self, memory: RowMemory, ids: Ids, slots: Slots, into: Rows) -> None:
        ids = _plain(ids)
        self._c.rows_gather(_passed(memory), _at(ids), _at(slots), len(ids), _at(into))

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
        num = self._c.rows_merge(
            ctypes.addressof(table), len(given), dim, _at(at), _at(found), _at(sums)
        )
        return found[:num], sums[:num]

    def distinct(self, ids: Ids) -> tuple[Ids, npt.NDArray[np.int64]]:
        ids, num = _plain(ids), len(ids)
        memory = np.empty((6, num), np.int64)
        work = _at(memory)
        found, at = work + 4 * memory.strides[0], work + 5 * memory.strides[0]
        num_found = self._c.rows_distinct(_at(ids), num, work, found, at)
        return memory[4, :num_found], memory[5]

    def sum_at(self, rows: Rows, at: npt.NDArray[np.int64], num: int) -> Rows:
        if rows.strides[1] != 4 or rows.strides[0] % 4 or not rows.flags.aligned:
            rows = rows.copy()
        at, sums = _plain(at), np.zeros((num, rows.shape[1]), np.float32)
        stride = rows.strides[0] // 4
        self._c.rows_sum_at(_at(rows), stride, _at(at), len(at), rows.shape[1], _at(sums))
        return sums

    def count(
        self, cells: Cells, hashes: npt.NDArray[np.uint64], buckets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        counts, is_seen = np.empty(len(hashes), np.uint8), np.zeros(len(cells), np.uint8)
        num = len(hashes)
        self._c.rows_count(_at(cells), _at(hashes), _at(buckets), num, _at(is_seen), _at(counts))
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
        update = getattr(self._c, f"rows_{rule}")
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
    places = _at(memory.records), _at(memory.index), len(memory.index)
    if memory.passed is None or memory.passed[0] != places:
        numbers = memory.records.shape[1], memory.key_words, memory.dim, memory.first
        memory.passed = places, _Memory(*places, *numbers, memory.step, memory.fill)
    return ctypes.byref(memory.passed[1])


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
    """Return what the passes make of hard rows."""
    generator, num = np.random.default_rng(7), 500
    scales = np.array([1.0, 1e-3, 3e-39, 1e18], np.float32)
    found = list[npt.NDArray[Any]]()
    for number, rule in enumerate(RULES):
        words = 2 - number % 2
        memory = RowMemory(
            records=np.zeros((num, words + 3 * dim + 2), np.float32), index=empty_index(num // 2),
            key_words=words, dim=dim, first=number + 2**63, step=np.float32(1e-7), fill=0.25,
        )  # fmt: skip
        ids = np.unique(generator.integers(0, 2 ** (32 * words - 1), num // 2))
        kernels.add(memory, ids[::2], np.arange(len(ids[::2]), dtype=np.int32))
        for _ in range(3):
            rows = generator.standard_normal((len(ids), dim)).astype(np.float32)
            rows *= generator.choice(scales, (len(ids), 1))
            rows[:5], rows[5:9, ::2] = 0.0, -0.0
            given = [Contribution(ids, rows, 1.0), Contribution(ids[::3], rows[::3], -0.3)]
            merged, sums = kernels.merge(given, dim)
            slots, sizes = kernels.find(memory, merged), np.array([0.3, 0.7])
            is_here, numbers = slots >= 0, (0.05, 1e-8, 0.1, 0.001)
            kernels.update(memory, rule, slots[is_here], sums[is_here], numbers, sizes)
            into = np.empty((len(merged), dim), np.float32)
            kernels.gather(memory, merged, slots, into)
            found += [merged, sums, slots, into]
        memory.index, cells = empty_index(num // 2), np.zeros((3, *SKETCH), np.uint8)
        kernels.reindex(memory, np.arange(len(ids[::2])) % 3 > 0)
        different, at = kernels.distinct(generator.choice(ids, num) - ids[num // 4])
        counts = kernels.count(cells, memory.hashes(ids), np.arange(len(ids)) % 2 + 1)
        sums = kernels.sum_at(rows[:, 1:], at[: len(rows)], len(different))
        found += [kernels.find(memory, ids), different, at, counts, cells, sums, memory.records]
    return [each.tobytes() for each in found]
