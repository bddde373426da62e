"""Rows in checkpoints: by part, in order of buckets, so that any division reads them again.

    region = region_of(3, stores, specs)              # the state of a part: tensors for a keeper
    for table, bucket, rows in rows_in(kept, specs, part=0): ...     # of any number of parts
    num_rows_in(kept)                                 # by table

A part is a region of one piece. Its state has, table after table: ``ids``, ``values`` and ``state``
of the rows in their order (TableSpec.hashes), ``num_rows`` by bucket, and ``counts`` of admission
by bucket. ``tables`` describes the tables. A server that restores reads the buckets of its parts
from all files, at most ``_BLOCK_VALUES`` values at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from psdist.checkpoint.index import difference_of_tables
from psdist.checkpoint.reading import KeptSet
from psdist.errors import CheckpointError, ProtocolError
from psdist.protocol.optimizer_state import Whole
from psdist.servers.shard.regions import Region
from psdist.tables.kernels.reference import SKETCH
from psdist.tables.specs import TableSpecs
from psdist.tables.store import RowStore, StoredRows, state_words

_BLOCK_VALUES: Final = 1 << 24
"""Values of rows that are copied or read at a time, at most."""
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
    """Some rows of a table, or counts from ``first_bucket`` on."""

    table: int
    first_bucket: int
    rows: StoredRows


def region_of(part: int, stores: Sequence[RowStore], specs: TableSpecs) -> Region:
    """Return the region of a part. Its copies take the memory of the rows once more, until they are
    written; sorting takes another 20 bytes for each row of one table at a time."""
    num_rows = np.zeros((len(stores), len(specs.buckets_of_part(part))), np.int64)
    flat: dict[str, npt.NDArray[Any]] = {
        "tables": np.frombuffer(specs.encode(), np.uint8).copy(),
        "num_rows": num_rows.reshape(-1),
        "counts": np.concatenate([each.counts.reshape(-1) for each in stores]),
        "ids": np.empty(sum(map(len, stores)), np.int64),
        "values": np.empty(sum(len(each) * each.spec.dim for each in stores), np.float32),
        "state": np.empty(sum(len(each) * state_words(each.spec) for each in stores), np.float32),
    }
    at = dict.fromkeys(("ids", "values", "state"), 0)
    for number, store in zip(num_rows, stores, strict=True):
        slots, most = store.in_order(), max(1, _BLOCK_VALUES // store.spec.dim)
        for start in range(0, len(slots), most):
            rows = store.stored(slots[start : start + most])
            buckets = store.spec.buckets_of(rows.ids) - specs.buckets_of_part(part).start
            number += np.bincount(buckets, minlength=len(number))
            blocks: list[npt.NDArray[Any]] = [rows.ids, rows.values, rows.state]
            for key, block in zip(at, blocks, strict=True):
                flat[key][at[key] : at[key] + block.size] = block.reshape(-1)
                at[key] += block.size
    return Region(
        piece=part,
        start=0,
        values=torch.zeros(1),
        state={key: Whole(f"{each.dtype}", each.shape) for key, each in flat.items()},
        elements={key: torch.from_numpy(each) for key, each in flat.items()},
    )


def tables_in(kept: KeptSet) -> TableSpecs:
    """Return the tables of a checkpoint. Raises :class:`CheckpointError`."""
    try:
        return TableSpecs.decode(_Reader(kept, 0).read("tables").tobytes())
    except ProtocolError as error:
        raise CheckpointError(f"damaged: {error}") from None


def num_rows_in(kept: KeptSet) -> list[int]:
    """Return the rows of each table in a checkpoint."""
    specs = tables_in(kept)
    parts = [_Reader(kept, part).num_rows(specs).sum(axis=1) for part in range(kept.num_pieces)]
    return [int(each) for each in np.sum(parts, axis=0)]


def rows_in(kept: KeptSet, specs: TableSpecs, part: int) -> Iterator[TableRows]:
    """Yield the rows of ``part``, in order, and then the counts, of each table in a checkpoint of
    any number of parts. Raises :class:`CheckpointError` if the checkpoint has other tables."""
    mine, there = specs.buckets_of_part(part), tables_in(kept)
    if words := difference_of_tables(there.tables, specs.tables):
        raise CheckpointError(f"{words}; resume with the script that wrote the checkpoint")
    for piece in range(kept.num_pieces):
        buckets = there.buckets_of_part(piece)
        common = range(max(mine.start, buckets.start), min(mine.stop, buckets.stop))
        if common:
            yield from _Reader(kept, piece).rows(there, buckets, common)


class _Reader:
    """The state of a part, key by key."""

    def __init__(self, kept: KeptSet, piece: int) -> None:
        self._kept = kept
        self._piece = piece
        self._state = kept.state(piece)

    def read(self, key: str, start: int = 0, length: int = -1) -> npt.NDArray[Any]:
        entry = self._state.get(key)
        if not isinstance(entry, Whole) or entry.dtype != _DTYPES[key] or len(entry.shape) != 1:
            raise self._damaged(key)
        length = entry.shape[0] - start if length < 0 else length
        if not 0 <= start <= start + length <= entry.shape[0]:
            raise self._damaged(key)
        found: npt.NDArray[Any] = self._kept.read(self._piece, key, start, length).numpy()
        return found

    def _damaged(self, key: str) -> CheckpointError:
        return CheckpointError(f"damaged: {key} of part {self._piece} of the tables")

    def num_rows(self, specs: TableSpecs) -> npt.NDArray[np.int64]:
        """Return the rows of each table and bucket of the part."""
        found = self.read("num_rows")
        shape = len(specs.tables), len(specs.buckets_of_part(self._piece))
        if found.size != math.prod(shape) or not (found >= 0).all():
            raise self._damaged("num_rows")
        return found.reshape(shape)

    def rows(self, specs: TableSpecs, buckets: range, wanted: range) -> Iterator[TableRows]:
        at, cells = dict.fromkeys(_DTYPES, 0), math.prod(SKETCH)
        skipped = wanted.start - buckets.start
        for table, (spec, numbers) in enumerate(
            zip(specs.tables, self.num_rows(specs), strict=True)
        ):
            widths = {"ids": 1, "values": spec.dim, "state": state_words(spec)}
            nothing = StoredRows(
                np.empty(0, np.int64),
                np.empty((0, spec.dim), np.float32),
                np.empty((0, widths["state"]), np.float32),
                np.empty((0, *SKETCH), np.uint8),
            )
            first = int(numbers[:skipped].sum())
            last = first + int(numbers[skipped : skipped + len(wanted)].sum())
            most = max(1, _BLOCK_VALUES // spec.dim)
            for row in range(first, last, most):
                num = min(most, last - row)
                ids, values, state = (
                    self.read(key, at[key] + row * width, num * width).reshape(num, width)
                    for key, width in widths.items()
                )
                found = nothing._replace(ids=ids.reshape(-1), values=values, state=state)
                yield TableRows(table, wanted.start, found)
            if spec.admit > 1:
                start = at["counts"] + skipped * cells
                counts = self.read("counts", start, len(wanted) * cells).reshape(-1, *SKETCH)
                yield TableRows(table, wanted.start, nothing._replace(counts=counts))
                at["counts"] += len(buckets) * cells
            for key, width in widths.items():
                at[key] += int(numbers.sum()) * width
