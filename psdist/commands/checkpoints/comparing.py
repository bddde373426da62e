"""``psdist checkpoint diff A B``: which parameters, state and values of workers differ, how much.

A parameter is read in blocks, so that models larger than memory can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from psdist.checkpoint import tree
from psdist.checkpoint.index import PieceRecord, difference_of_tables
from psdist.checkpoint.reading import STATE, VALUE, Checkpoint, KeptSet
from psdist.commands import print_json
from psdist.commands.checkpoints import find
from psdist.protocol.optimizer_state import PerElement, Whole
from psdist.protocol.optimizers import difference
from psdist.servers.tables.checkpoints import rows_in, tables_in
from psdist.tables.specs import NUM_BUCKETS, TableSpecs

SAME, DIFFERENT = 0, 1
_BLOCK_ELEMENTS: Final = 1 << 24
_MOST_LINES: Final = 50
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype by the bytes of an item."""


def compare(first: Path, second: Path, *, as_json: bool = False) -> int:
    """Print a line for each difference, and return the exit status."""
    one, other = find(first), find(second)
    lines = list(differences(one, other))
    num_pieces = sum(len(each.pieces) for each in one.index.sets if not each.tables)
    num_tables = sum(len(each.tables) for each in one.index.sets)
    tables = f", {num_tables} tables" * bool(num_tables)
    workers = len(set(one.workers) & set(other.workers))
    status = DIFFERENT if lines else SAME
    if as_json:
        content = {
            "first": one.name,
            "second": other.name,
            "num_parameters": num_pieces,
            "num_workers": workers,
            "differences": lines,
        }
        print_json("checkpoint diff", content)
        return status
    for line in lines[:_MOST_LINES]:
        print(line)
    if len(lines) > _MOST_LINES:
        print(f"and {len(lines) - _MOST_LINES} more")
    print(
        f"{one.name} and {other.name}: {num_pieces} parameters{tables} and what {workers} workers "
        "kept: " + (f"{len(lines)} differences" if lines else "the same, bit by bit")
    )
    return status


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[str]:
    """A line for each."""
    first, second = one.index.sets, other.index.sets
    if len(first) != len(second):
        yield f"{len(first)} parameter sets against {len(second)}"
    for set_index, (mine, its) in enumerate(zip(first, second, strict=False)):
        where = f"set {set_index}: " if len(first) > 1 else ""
        if mine.optimizer != its.optimizer:
            yield f"{where}optimizer {mine.optimizer} against {its.optimizer}"
        if mine.clocks != its.clocks:
            yield f"{where}clocks {list(mine.clocks)} against {list(its.clocks)}"
        if words := difference(mine.hyperparameters, its.hyperparameters):
            yield f"{where}{words}"
        if mine.tables or its.tables:
            tables = KeptSet(one, set_index), KeptSet(other, set_index)
            words = difference_of_tables(mine.tables, its.tables)
            yield from [words] if words else _differences_of_rows(*tables)
            continue
        at = {record.name: piece for piece, record in enumerate(its.pieces)}
        for piece, record in enumerate(mine.pieces):
            there = at.pop(record.name, None)
            if there is None:
                yield f"{where}parameter {record.name} is in the first alone"
                continue
            its_record = its.pieces[there]
            if (record.shape, record.dtype) != (its_record.shape, its_record.dtype):
                yield (
                    f"{where}parameter {record.name}: {record.dtype} {list(record.shape)} against "
                    f"{its_record.dtype} {list(its_record.shape)}"
                )
                continue
            places = (set_index, piece, record), (set_index, there, its_record)
            for line in _differences_of_piece((one, places[0]), (other, places[1])):
                yield f"{where}parameter {record.name}: {line}"
        for name in at:
            yield f"{where}parameter {name} is in the second alone"
    for worker in sorted(set(one.workers) | set(other.workers)):
        if worker not in one.workers or worker not in other.workers:
            which = "first" if worker in one.workers else "second"
            yield f"worker {worker} is in the {which} alone"
            continue
        trees = (tree.unpack(*each.worker(worker)) for each in (one, other))
        for line in _differences_of_trees(*trees, path=""):
            yield f"worker {worker}: {line}"


def _differences_of_rows(one: KeptSet, other: KeptSet) -> Iterator[str]:
    """Return lines for each table. The two may have other numbers of parts."""
    num_blocks = 1 + one.checkpoint.index.num_bytes // _BLOCK_ELEMENTS
    specs = replace(tables_in(one), num_parts=min(NUM_BUCKETS, num_blocks))
    numbers = np.zeros((len(specs.tables), 3), np.int64)
    for part in range(specs.num_parts):
        blocks = [_by_table(each, specs, part) for each in (one, other)]
        for number, mine, its in zip(numbers, *blocks, strict=True):
            common, at, there = np.intersect1d(mine[0], its[0], return_indices=True)
            number[0] += len(mine[0]) + len(its[0]) - 2 * len(common)
            number[1] += (mine[1][at] != its[1][there]).any(axis=1).sum()
            number[2] += not np.array_equal(mine[2], its[2])
    whats = "rows are in one alone", "rows differ, in values or state", "blocks of counts differ"
    for table, number in zip(specs.tables, numbers, strict=True):
        for count, what in zip(number.tolist(), whats, strict=True):
            if count:
                yield f"table {table.name}: {count} {what}"


def _by_table(kept: KeptSet, specs: TableSpecs, part: int) -> list[list[Any]]:
    """Return, by table, the ids of a part, its values and state as bits, and counts."""
    empty = [np.empty(0, np.int64), np.empty((0, 0), np.int32), np.empty(0, np.uint8)]
    found: list[list[list[Any]]] = [[[] for _ in empty] for _ in specs.tables]
    for table, _, rows in rows_in(kept, specs, part):
        words = np.concatenate([rows.values, rows.state], axis=1).view(np.int32)
        for into, each in zip(found[table], (rows.ids, words, rows.counts), strict=True):
            into.append(each)
    return [
        [np.concatenate(its) if its else nothing for its, nothing in zip(each, empty, strict=True)]
        for each in found
    ]


_Place = tuple[Checkpoint, tuple[int, int, PieceRecord]]


def _differences_of_piece(first: _Place, second: _Place) -> Iterator[str]:
    if line := _compared(first, second, VALUE):
        yield line
    states = [each.state_of(*place[:2]) for each, place in (first, second)]
    for key in dict.fromkeys([*states[0], *states[1]]):
        entries = [state.get(key) for state in states]
        if repr(entries[0]) != repr(entries[1]):
            yield f"state {key}: {_shown(entries[0])} against {_shown(entries[1])}"
        elif isinstance(entries[0], PerElement):
            if line := _compared(first, second, STATE + key):
                yield line
        elif isinstance(entries[0], Whole):
            values = [each.read_whole(*place[:2], STATE + key) for each, place in (first, second)]
            if line := _in_words(STATE + key, _counted(*values), values[0].numel()):
                yield line


def _shown(entry: object) -> str:
    if entry is None:
        return "nothing"
    value = getattr(entry, "value", entry)
    return f"{value}"


def _compared(first: _Place, second: _Place, key: str) -> str:
    (one, (set_index, piece, record)), (other, (_, there, its_record)) = first, second
    count = record.num_elements
    if record.stride != its_record.stride:  # they lie in another order
        values = [
            torch.as_strided(
                each.read_stretch(*place[:2], 0, count, key), record.shape, place[2].stride
            )
            for each, place in (first, second)
        ]
        return _in_words(key, _counted(*values), count)
    num_unlike, largest = 0, 0.0
    for start in range(0, count, _BLOCK_ELEMENTS):
        length = min(_BLOCK_ELEMENTS, count - start)
        unlike, by = _counted(
            one.read_stretch(set_index, piece, start, length, key),
            other.read_stretch(set_index, there, start, length, key),
        )
        num_unlike, largest = num_unlike + unlike, max(largest, by)
    return _in_words(key, (num_unlike, largest), count)


def _counted(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float]:
    """(elements whose bits differ, the largest difference between two that are numbers)."""
    unlike = _unlike(one, other)
    if not unlike.any():
        return 0, 0.0
    by = (one.double() - other.double()).abs().reshape(-1)[unlike]
    return int(unlike.sum()), float(torch.nan_to_num(by, nan=0.0, posinf=math.inf).max())


def _unlike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which elements have other bits."""
    bits = _BITS[one.element_size()]
    return one.reshape(-1).view(bits) != other.reshape(-1).view(bits)


def _in_words(key: str, counted: tuple[int, float], count: int) -> str:
    num_unlike, largest = counted
    if not num_unlike:
        return ""
    what = key.removeprefix(STATE) if key != VALUE else key
    return f"{what}: {num_unlike} of {count} elements differ, by {largest:.6g} at most"


def _differences_of_trees(one: Any, other: Any, *, path: str) -> Iterator[str]:
    if type(one) is not type(other):
        yield f"{path or 'the whole'} is a {type(one).__name__} against a {type(other).__name__}"
    elif isinstance(one, dict):
        for key in dict.fromkeys([*one, *other]):
            place = f"{path}[{key!r:.80}]"
            if key not in one or key not in other:
                yield f"{place} is in the {'first' if key in one else 'second'} alone"
            else:
                yield from _differences_of_trees(one[key], other[key], path=place)
    elif isinstance(one, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _differences_of_trees(*pair, path=f"{path}[{index}]")
    elif isinstance(one, torch.Tensor | np.ndarray):
        yield from _differences_of_tensors(torch.as_tensor(one), torch.as_tensor(other), path)
    elif repr(one) != repr(other):
        yield f"{path}: {one!r:.80} against {other!r:.80}"


def _differences_of_tensors(one: torch.Tensor, other: torch.Tensor, path: str) -> Iterator[str]:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        yield f"{path}: {one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
    elif num_unlike := int(_unlike(one, other).sum()):
        yield f"{path}: {num_unlike} of {one.numel()} elements differ"
