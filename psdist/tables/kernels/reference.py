"""The passes over the rows of a table in numpy: the reference for rows.c, and what hosts without a
compiler use.

    memory = RowMemory(records=..., index=empty_index(1_000), key_words=1, dim=16, ...)
    slots = kernels.find(memory, ids)                # negative: the id has no row
    kernels.add(memory, ids[slots < 0], new_slots)
    kernels.gather(memory, ids, slots, into)
    kernels.update(memory, "row_wise_adagrad", slots, gradients, numbers, sizes)

A record has a row's id (1 or 2 words), its values, and its state, all words of 4 bytes. An entry of
the index has the low byte of the id's hash and the slot of its record; a negative slot: free.
Collisions are resolved by linear probing. Ids are int64, ascending and without duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from psdist.tables.specs import Ids, Rows, mixed

Slots: TypeAlias = npt.NDArray[np.int32]
_Hashes: TypeAlias = npt.NDArray[np.uint64]

Cells: TypeAlias = npt.NDArray[np.uint8]
"""[buckets, 4, 256], or of one bucket [4, 256]: counts of psdist.tables.retention."""

SKETCH: Final = (4, 256)
ENTRY: Final = np.dtype([("tag", np.uint8), ("slot", np.int32)])
_GOLDEN: Final = 0x9E3779B97F4A7C15
_LANES: Final = 8


@dataclass(slots=True)
class RowMemory:
    """The memory of one part of one table."""

    records: Rows
    """[capacity, stride], by slot."""
    index: npt.NDArray[Any]
    """Of ``ENTRY``; some are always free."""
    key_words: int
    """2: ids are int64; 1: they are below 2^31."""
    dim: int
    first: int
    """Seeds the hashes of ids."""
    step: np.float32
    """First values are odd numbers below 2^24 times it."""
    fill: float
    """State of a new row."""
    passed: Any = None
    """As the compiled passes take it."""

    def keys(self, slots: Slots | slice) -> Ids:
        words = self.records[slots, : self.key_words]
        if self.key_words == 1:
            return words.view(np.int32)[:, 0].astype(np.int64)
        return np.ascontiguousarray(words).view(np.int64)[:, 0]

    def hashes(self, ids: Ids) -> _Hashes:
        return mixed(ids.view(np.uint64) ^ np.uint64(self.first))


def empty_index(num_entries: int) -> npt.NDArray[Any]:
    index = np.empty(num_entries, ENTRY)
    index["slot"] = -1
    return index


class Contribution(NamedTuple):
    """The gradient rows of one group."""

    ids: Ids
    rows: Rows
    weight: float


class Kernels:
    """The passes in numpy. Subclasses give the same bits."""

    name = "numpy"

    def find(self, memory: RowMemory, ids: Ids) -> Slots:
        """Return the slot of each id, negative if it has no row."""
        hashes = memory.hashes(ids)
        at, tags = _homes(memory, hashes), hashes.astype(np.uint8)
        found, left = np.full(len(ids), -1, np.int32), np.arange(len(ids))
        while len(left):
            entries = memory.index[at[left]]
            slots = entries["slot"]
            is_alike = (slots >= 0) & (entries["tag"] == tags[left])
            is_alike[is_alike] = memory.keys(slots[is_alike]) == ids[left[is_alike]]
            found[left[is_alike]] = slots[is_alike]
            left = left[(slots >= 0) & ~is_alike]
            at[left] = (at[left] + 1) % len(memory.index)
        return found

    def add(self, memory: RowMemory, ids: Ids, slots: Slots) -> None:
        """Write new rows with their first values to free slots."""
        end = memory.key_words + memory.dim
        words = np.ascontiguousarray(ids).view(np.float32).reshape(len(ids), 2)
        memory.records[slots, : memory.key_words] = words[:, : memory.key_words]
        memory.records[slots, memory.key_words : end] = _first_values(memory, ids)
        memory.records[slots, end:] = memory.fill
        _enter(memory, memory.hashes(ids), slots)

    def reindex(self, memory: RowMemory, is_live: npt.NDArray[np.bool_]) -> None:
        """Fill an empty index with the live ones of the first records."""
        slots = np.flatnonzero(is_live).astype(np.int32)
        _enter(memory, memory.hashes(memory.keys(slots)), slots)

    def gather(self, memory: RowMemory, ids: Ids, slots: Slots, into: Rows) -> None:
        """Write the values of each id to ``into`` ([n, dim]); first values where the slot is
        negative."""
        values = memory.records[:, memory.key_words :][:, : memory.dim]
        is_new = slots < 0
        into[~is_new] = values[slots[~is_new]]
        into[is_new] = _first_values(memory, ids[is_new])

    def merge(self, given: Sequence[Contribution], dim: int) -> tuple[Ids, Rows]:
        """Return the ids of all contributions, ascending, and the sums of their weighted rows.
        Sums begin with 0 and are added in the order of ``given``."""
        ids = np.unique(np.concatenate([np.empty(0, np.int64), *(each.ids for each in given)]))
        rows = np.zeros((len(ids), dim), np.float32)
        for each in given:
            rows[np.searchsorted(ids, each.ids)] += each.rows * np.float32(each.weight)
        return ids, rows

    def distinct(self, ids: Ids) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Return the distinct ids, ascending, and by id its place among them. ``ids``: any."""
        found, at = np.unique(ids, return_inverse=True)
        return found, at

    def sum_at(self, rows: Rows, at: npt.NDArray[np.int64], num: int) -> Rows:
        """Return ``num`` sums of rows: of those with each place, added in their order."""
        sums = np.zeros((num, rows.shape[1]), np.float32)
        np.add.at(sums, at, rows)
        return sums

    def count(
        self, cells: Cells, hashes: npt.NDArray[np.uint64], buckets: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        """Count an occurrence of each id (by ``hashes``) in the cells of its bucket; return the
        counts. A bucket is halved when half of its cells are in use."""
        depth, width = SKETCH
        shifts = (8 * np.arange(depth)).astype(np.uint64)
        columns = (mixed(hashes)[:, None] >> shifts) & np.uint64(width - 1)
        at = (buckets[:, None] * depth + np.arange(depth)) * width + columns.astype(np.int64)
        flat = cells.reshape(-1)
        before = flat[at].min(axis=1, initial=255)
        counts: npt.NDArray[np.uint8] = before + (before < 255)
        np.maximum.at(flat, at, counts[:, None])
        touched = np.unique(buckets)
        is_full = 2 * np.count_nonzero(cells[touched, 0], axis=1) > width
        cells[touched[is_full]] >>= 1
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
        """Step the rows at ``slots`` (each once) by psdist.tables.optimizers's ``rule``.
        ``numbers``: the learning rate, then the rule's own. ``sizes``: by step of a row, from the
        first: what the learning rate is multiplied by."""
        words = memory.records[slots, memory.key_words :]
        values, state = words[:, : memory.dim], words[:, memory.dim :]
        own = np.array(numbers, np.float32)
        with np.errstate(all="ignore"):  # as C does
            RULES[rule](_Update(values, state, gradients, own, float(numbers[0]), sizes))
        memory.records[slots, memory.key_words :] = words


def _homes(memory: RowMemory, hashes: _Hashes) -> npt.NDArray[np.int64]:
    """Return where the search for each hash begins."""
    size = np.uint64(len(memory.index))
    return (((hashes >> np.uint64(32)) * size) >> np.uint64(32)).astype(np.int64)


def _enter(memory: RowMemory, hashes: _Hashes, slots: Slots) -> None:
    at, left = _homes(memory, hashes), np.arange(len(slots))
    while len(left):
        is_free = memory.index["slot"][at[left]] < 0
        _, firsts = np.unique(at[left[is_free]], return_index=True)  # one each
        placed = left[is_free][firsts]
        memory.index["tag"][at[placed]] = hashes[placed].astype(np.uint8)
        memory.index["slot"][at[placed]] = slots[placed]
        left = np.setdiff1d(left, placed, assume_unique=True)
        at[left] = (at[left] + (memory.index["slot"][at[left]] >= 0)) % len(memory.index)


def _first_values(memory: RowMemory, ids: Ids) -> Rows:
    columns = np.arange(1, memory.dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    numbers = mixed(memory.hashes(ids)[:, None] + columns) >> np.uint64(40)
    return (2 * numbers.astype(np.int32) + 1 - 2**24).astype(np.float32) * memory.step


class _Update(NamedTuple):
    values: Rows
    state: Rows
    gradient: Rows
    numbers: npt.NDArray[np.float32]
    lr: float
    sizes: npt.NDArray[np.float64]

    def size_of_step(self) -> Rows:
        """Count a step of each row; return the steps' sizes, [n, 1]."""
        self.state[:, 0] += 1
        steps = np.minimum(self.state[:, :1].astype(np.int64), len(self.sizes))
        sizes: npt.NDArray[np.float64] = self.lr * self.sizes[steps - 1]
        return sizes.astype(np.float32)


def _mean_square(rows: Rows) -> Rows:
    """Return [n]. A row is summed in 8 lanes, which are then added in halves."""
    num, dim = rows.shape
    lanes = np.zeros((num, _LANES), np.float32)
    for at in range(0, dim, _LANES):
        part = rows[:, at : at + _LANES]
        lanes[:, : part.shape[1]] += part * part
    for half in (4, 2, 1):
        lanes[:, :half] += lanes[:, half : 2 * half]
    return lanes[:, 0] / np.float32(dim)


def _sgd(given: _Update) -> None:
    values, _, gradient, (lr, *_), _, _ = given
    values -= lr * gradient


def _row_wise_adagrad(given: _Update) -> None:
    values, state, gradient, (lr, eps, *_), _, _ = given
    state[:, 0] += _mean_square(gradient)
    values -= (lr / (np.sqrt(state[:, :1]) + eps)) * gradient


def _adagrad(given: _Update) -> None:
    values, state, gradient, (lr, eps, *_), _, _ = given
    squares = state[:, : values.shape[1]]
    squares += gradient * gradient
    values -= lr * gradient / (np.sqrt(squares) + eps)


def _adam(given: _Update) -> None:
    values, state, gradient, (_, eps, new_1, new_2), _, _ = given
    dim, size = values.shape[1], given.size_of_step()
    first, second = state[:, 1 : 1 + dim], state[:, 1 + dim : 1 + 2 * dim]
    first += (gradient - first) * new_1
    second += (gradient * gradient - second) * new_2
    values -= size * (first / (np.sqrt(second) + eps))


def _row_wise_adam(given: _Update) -> None:
    values, state, gradient, (_, eps, new_1, new_2), _, _ = given
    size, first = given.size_of_step(), state[:, 2 : 2 + values.shape[1]]
    state[:, 1] += (_mean_square(gradient) - state[:, 1]) * new_2
    first += (gradient - first) * new_1
    values -= size * (first / (np.sqrt(state[:, 1:2]) + eps))


def _ftrl(given: _Update) -> None:
    values, state, gradient, (lr, beta, l1, l2), _, _ = given
    dim = values.shape[1]
    sums, squares = state[:, :dim], state[:, dim : 2 * dim]
    now = squares + gradient * gradient
    start = values * (beta / lr + l2) + np.where(
        values == 0, np.float32(0), np.copysign(l1, values)
    )
    total = np.where(squares == 0, -start, sums)
    root = np.sqrt(now)
    total += gradient - (root - np.sqrt(squares)) / lr * values
    over = np.maximum(np.abs(total) - l1, np.float32(0))
    moved = np.copysign(over, -total) / ((beta + root) / lr + l2)
    is_same = now == 0
    values[:] = np.where(is_same, values, moved)
    sums[:] = np.where(is_same, sums, total)
    squares[:] = now


RULES: Final[Mapping[str, Callable[[_Update], None]]] = {
    "sgd": _sgd,
    "row_wise_adagrad": _row_wise_adagrad,
    "adagrad": _adagrad,
    "adam": _adam,
    "row_wise_adam": _row_wise_adam,
    "ftrl": _ftrl,
}
