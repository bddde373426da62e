"""Description of the tables of a job: which part of a table holds which row.

    specs = TableSpecs((TableSpec(name="items", num_rows=10_000, dim=16, ...),), num_parts=2)
    specs.parts_of(0, ids)                    # by id: the part, a number below num_parts
    specs.split(0, ids)                       # by part: the positions of its ids
    TableSpecs.decode(specs.encode())         # raises ProtocolError

All tables are one parameter set. A *part* is one chunk of the set: its rows of every table. A hash
of its table and its id puts each row into one of ``NUM_BUCKETS`` buckets, and a part has a stretch
of the buckets. So checkpoints, which keep rows by bucket, fit any number of parts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from typing import Any, Final, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from psdist.errors import ProtocolError
from psdist.protocol.partition import ALIGN, ITEM_BYTES, Partition, Piece

Ids: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = npt.NDArray[np.float32]
"""[n, dim], by id."""

NUM_BUCKETS: Final = 4096
MOST_TABLES: Final = 10_000
MOST_DIM: Final = 1 << 16
MOST_PARTS: Final = NUM_BUCKETS
PARTS_PER_SERVER: Final = 8
"""With servers of different weights, which then differ by whole parts."""
_MOST_BYTES: Final = 1 << 26
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,500}")
_MIX: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Multipliers of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the numbers, scrambled by splitmix64's finalizer: a bijection of 64 bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(_MIX[0])
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(_MIX[1])
    return numbers ^ (numbers >> np.uint64(31))


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table. Values are float32."""

    name: str
    """Qualified name of its module."""
    num_rows: int | None
    """Ids are 0 to ``num_rows`` - 1; None: any int64."""
    dim: int
    """Values of a row."""
    optimizer: str
    """A name of psdist.tables.optimizers."""
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Its arguments that never change; those that schedules change are hyperparameters."""
    seed: int = 0
    scale: float = 0.0
    """First values are uniform in [-scale, scale)."""
    admit: int = 0
    """Occurrences of an id until it gets a row; 0 and 1: at once."""
    evict: str = ""
    """psdist.tables.retention; "": never."""

    @cached_property
    def key(self) -> np.uint64:
        """Hash of the name."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))

    def hashes(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """Return a number for each id, distinct ones for distinct ids: rows in files have its
        order."""
        return mixed(ids.view(np.uint64) ^ self.key)

    def buckets_of(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the bucket of each id: the top 12 bits of its hash."""
        return (self.hashes(ids) >> np.uint64(52)).astype(np.int64)

    def problem(self) -> str:
        """Return what is wrong with the values; "" if nothing is."""
        checks = {
            "a name that is no text of 1 to 500 characters": _NAME.fullmatch(self.name),
            "num_rows": self.num_rows is None or 0 < self.num_rows < 2**62,
            "dim": 0 < self.dim <= MOST_DIM,
            "scale": 0 <= self.scale < math.inf,
            "admit": 0 <= self.admit < 256,
            "arguments": len(self.arguments) < 32
            and all(math.isfinite(each) for each in self.arguments.values()),
        }
        return next((what for what, is_right in checks.items() if not is_right), "")


@dataclass(frozen=True, kw_only=True)
class TableSpecs:
    """All tables of a job, in the order of their modules."""

    tables: tuple[TableSpec, ...]
    num_parts: int
    max_rows: int = 1 << 20
    """Rows of all tables in one message, at most."""
    codec: str = "none"
    """How messages encode rows: psdist.tables.payloads."""

    def parts_of(self, table: int, ids: Ids) -> npt.NDArray[np.int64]:
        """Return the part of each id."""
        return (self.tables[table].buckets_of(ids) * self.num_parts) // NUM_BUCKETS

    def split(self, table: int, ids: Ids) -> list[npt.NDArray[np.intp]]:
        """Return, by part, the positions of its ids, ascending."""
        if self.num_parts == 1:
            return [np.arange(len(ids))]
        parts = self.parts_of(table, ids)
        order = np.argsort(parts, kind="stable")
        bounds = np.searchsorted(parts[order], np.arange(1, self.num_parts))
        return np.split(order, bounds)

    def buckets_of_part(self, part: int) -> range:
        """Return the buckets of a part."""
        first, end = (-(-each * NUM_BUCKETS // self.num_parts) for each in (part, part + 1))
        return range(first, end)

    def partition(self) -> Partition:
        """Return the partition of the set: a chunk of one element, which is never used, for each
        part. An optimizer group for each table carries its hyperparameters; the first group has
        the elements."""
        pieces = [
            Piece(name=f"part {n}", shape=(1,), stride=(1,), dtype="float32", optimizer_group=0)
            for n in range(self.num_parts)
        ]
        return Partition.cut(pieces, chunk_bytes=ALIGN * ITEM_BYTES["float32"])

    def owners(self, weights: Sequence[float]) -> tuple[int, ...]:
        """Return the server of each part. ``weights``: by server."""
        return self.partition().shard(weights)

    def encode(self) -> bytes:
        packed = msgpack.packb(astuple(self))
        assert isinstance(packed, bytes)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> TableSpecs:
        """Return what :meth:`encode` has packed. Raises :class:`ProtocolError`."""
        try:
            if len(data) > _MOST_BYTES:
                raise ProtocolError(f"description of tables with {len(data)} bytes")
            tables, num_parts, max_rows, codec = msgpack.unpackb(data)
            if not 0 < len(tables) <= MOST_TABLES:
                raise ProtocolError(f"description of {len(tables)} tables")
            return cls(
                tables=tuple(map(_table, tables)),
                num_parts=_whole(num_parts, 1, MOST_PARTS),
                max_rows=_whole(max_rows, 1, 2**31),
                codec=str(codec),
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"description of tables that is damaged: {error}") from None


_KINDS: Final = (str, int | None, int, str, dict, int, float, int, str)
"""Types of the fields of a table."""


def _table(values: Any) -> TableSpec:
    given = dict[str, Any]()
    for each, value, kind in zip(fields(TableSpec), values, _KINDS, strict=True):
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{each.name} of a table is {value!r:.80}")
        given[each.name] = value
    given["arguments"] = {str(key): float(each) for key, each in given["arguments"].items()}
    table = TableSpec(**given)
    if problem := table.problem():
        raise ValueError(f"a table with {problem} outside its limits")
    return table


def _whole(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.80} where a whole number from {least} to {most} belongs")
    return value


def num_parts_for(weights: Sequence[float]) -> int:
    """Return the parts of a job's tables. ``weights``: by server."""
    each = 1 if len(set(weights)) == 1 else PARTS_PER_SERVER
    return min(MOST_PARTS, each * len(weights))
