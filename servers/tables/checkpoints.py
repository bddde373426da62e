"""Rows in checkpoints: by part, sorted by bucket and id, so that any division reads them again.

    region = region_of(3, stores, specs)              # the state of a part: tensors for a keeper
    for rows in rows_in(kept, specs, part=0): ...     # of the parts of a checkpoint, by table

A part is a region of one piece. Its state has, table after table: ``ids``, ``values`` and ``state``
of the rows, ``num_rows`` by bucket, and ``counts`` of admission by bucket. ``tables`` describes the
tables. A server that restores reads the buckets of its parts from all files, at most ``_READ_ROWS``
rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from psdist.errors import CheckpointError
from psdist.protocol.optimizer_state import PieceState, Whole
from psdist.servers.shard.regions import KeptPieces, Region
from psdist.tables.kernels.reference import SKETCH
from psdist.tables.optimizers import row_optimizer
from psdist.tables.specs import TableSpec, TableSpecs
from psdist.tables.store import RowStore, StoredRows

_READ_ROWS: Final = 1 << 20
_DTYPES: Final = {
    "tables": "uint8",
    "num_rows": "int64",
    "ids": "int64",
    "values": "float32",
    "state": "float32",
    "counts": "uint8",
}
"""Keys of a part's state. All are flat."""


class TableRows(NamedTuple):
    """Rows of a table to restore."""

    table: int
    first_bucket: int
    rows: StoredRows


def state_words(table: TableSpec) -> int:
    """Return the 4-byte words that a row's state has in a checkpoint."""
    optimizer = row_optimizer(table.optimizer, table.arguments)
    return optimizer.state_words(table.dim) + bool(table.evict)


def region_of(part: int, stores: Sequence[RowStore], specs: TableSpecs) -> Region:
    """Return the region of a part: copies."""
    found: dict[str, list[npt.NDArray[Any]]] = {key: [] for key in _DTYPES}
    found["tables"].append(np.frombuffer(specs.encode(), np.uint8))
    for store in stores:
        for key, values in store.rows()._asdict().items():
            found[key].append(values)
    elements, state = dict[str, torch.Tensor](), PieceState()
    for key, dtype in _DTYPES.items():
        blocks = [np.ascontiguousarray(each).reshape(-1) for each in found[key]]
        flat = np.concatenate([np.empty(0, dtype), *blocks]).astype(dtype, copy=False)
        elements[key] = torch.from_numpy(flat)
        state[key] = Whole(dtype, (len(flat),))
    return Region(piece=part, start=0, values=torch.zeros(1), state=state, elements=elements)


def rows_in(kept: KeptPieces, specs: TableSpecs, part: int) -> Iterator[TableRows]:
    """Yield the rows of ``part`` in a checkpoint of any number of parts. Raise
    :class:`CheckpointError` if the checkpoint has other tables."""
    mine = specs.buckets_of_part(part)
    for piece in range(kept.num_pieces):
        reader = _Reader(kept, piece)
        there = TableSpecs.decode(reader.read("tables").tobytes())
        _require_same(there, specs)
        buckets = there.buckets_of_part(piece)
        common = range(max(mine.start, buckets.start), min(mine.stop, buckets.stop))
        if common:
            yield from reader.rows(there, buckets, common)


def _require_same(there: TableSpecs, here: TableSpecs) -> None:
    if len(there.tables) != len(here.tables):
        raise CheckpointError(
            f"the checkpoint has {len(there.tables)} tables, the script {len(here.tables)}"
        )
    for mine, its in zip(there.tables, here.tables, strict=True):
        for each in fields(TableSpec):
            one, other = getattr(mine, each.name), getattr(its, each.name)
            if one != other:
                raise CheckpointError(
                    f"table {its.name}: {each.name} is {one!r} in the checkpoint, {other!r} in the "
                    "script; resume with the script that wrote it, or start in another run_dir"
                )


class _Reader:
    """The state of a part, key by key."""

    def __init__(self, kept: KeptPieces, piece: int) -> None:
        self._kept = kept
        self._piece = piece
        self._state = kept.state(piece)

    def read(self, key: str, start: int = 0, length: int = -1) -> npt.NDArray[Any]:
        entry = self._state.get(key)
        if not isinstance(entry, Whole) or entry.dtype != _DTYPES[key] or len(entry.shape) != 1:
            raise CheckpointError(f"damaged: no {key} of part {self._piece} of the tables")
        length = entry.shape[0] - start if length < 0 else length
        if not 0 <= start <= start + length <= entry.shape[0]:
            raise CheckpointError(
                f"damaged: {key} of part {self._piece} of the tables is too short"
            )
        found: npt.NDArray[Any] = self._kept.read(self._piece, key, start, length).numpy()
        return found

    def rows(self, specs: TableSpecs, buckets: range, wanted: range) -> Iterator[TableRows]:
        """Yield the rows of the ``wanted`` ones of the part's ``buckets``."""
        by_table = self.read("num_rows").reshape(len(specs.tables), len(buckets))
        at = dict.fromkeys(("ids", "values", "state", "counts"), 0)
        for table, (spec, num_rows) in enumerate(zip(specs.tables, by_table, strict=True)):
            sizes = {"ids": 1, "values": spec.dim, "state": state_words(spec)}
            ends = np.concatenate([[0], np.cumsum(num_rows)])
            first, last = (int(ends[each - buckets.start]) for each in (wanted.start, wanted.stop))
            cells = prod(SKETCH) * (spec.admit > 1)
            begin = at["counts"] + (wanted.start - buckets.start) * cells
            counts = self.read("counts", begin, len(wanted) * cells).reshape(-1, *SKETCH)
            for row in range(first, max(last, first + 1), _READ_ROWS):
                num = min(_READ_ROWS, last - row)
                found = [
                    self.read(key, at[key] + row * size, num * size).reshape(num, size)
                    for key, size in sizes.items()
                ]
                rows = StoredRows(num_rows, found[0].reshape(num), found[1], found[2], counts)
                yield TableRows(table, wanted.start, rows)
            for key, size in sizes.items():
                at[key] += int(ends[-1]) * size
            at["counts"] += len(buckets) * cells
