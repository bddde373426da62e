"""Rows of tables in one safetensors file, for use without psdist; and how servers send them.

    with row_file(path, {"items": 16}, {"items": 5_000}) as file:      # dims, numbers of rows
        file.write("items", 0, ids, rows)            # rows 0 to len(ids) - 1 of the file
    blocks_of([5_000], [16])                         # [Block(table=0, first=0, num=5_000)]

A table is two tensors: NAME.ids, int64 [n], and NAME.rows, float32 [n, dim]: the rows that were
trained, in order of TableSpec.hashes. The order does not depend on the number of servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from psdist.checkpoint.container import Shaped, header
from psdist.checkpoint.disk import DISK, Disk
from psdist.errors import InvariantError
from psdist.protocol.optimizer_state import PART_ELEMENTS
from psdist.tables.specs import Ids, Rows

ANY_NUMBER: Final = 1 << 60
"""Elements of a part of tables: the executor decides how many there are. A message has at most
``PART_ELEMENTS`` values."""


class Block(NamedTuple):
    """Rows of a part that are sent in one message."""

    table: int
    first: int
    num: int


def blocks_of(num_rows: Sequence[int], dims: Sequence[int]) -> list[Block]:
    """Return the messages that bring a part of the tables. ``num_rows``, ``dims``: by table."""
    found = []
    for table, (num, dim) in enumerate(zip(num_rows, dims, strict=True)):
        most = max(1, PART_ELEMENTS // dim)
        found += [Block(table, at, min(most, num - at)) for at in range(0, num, most)]
    return found


class RowFile:
    def __init__(
        self, file: FileIO, dims: Mapping[str, int], num_rows: Mapping[str, int], disk: Disk
    ) -> None:
        """Write the head."""
        ids = [Shaped(f"{name}.ids", "I64", (num_rows[name],)) for name in dims]
        rows = [Shaped(f"{name}.rows", "F32", (num_rows[name], dims[name])) for name in dims]
        head = header([*ids, *rows], text="")
        self._begins = dict[str, int]()
        end = len(head)
        for each in (*ids, *rows):
            self._begins[each.name] = end
            end += each.num_bytes
        self.num_missing = sum(num_rows.values())
        """Rows that were not written yet."""
        self._file, self._disk = file, disk
        disk.write(file, head)

    def write(self, name: str, first: int, ids: Ids, rows: Rows) -> None:
        """Write rows ``first`` to ``first + len(ids) - 1`` of a table; each once, in any order.
        Raises OSError."""
        for key, each in ((f"{name}.ids", ids), (f"{name}.rows", rows)):
            self._file.seek(self._begins[key] + first * (each.nbytes // max(1, len(ids))))
            self._disk.write(self._file, each.tobytes())
        self.num_missing -= len(ids)


@contextlib.contextmanager
def row_file(
    path: Path, dims: Mapping[str, int], num_rows: Mapping[str, int], *, disk: Disk = DISK
) -> Iterator[RowFile]:
    """Yield the file to write: it is complete in the end, or absent. Raises OSError, and
    :class:`CheckpointError` for names that are too long."""
    partial = path.with_name(path.name + ".partial")
    try:
        disk.make_folder(path.parent)
        with disk.create(partial) as file:
            found = RowFile(file, dims, num_rows, disk)
            yield found
            if found.num_missing:
                raise InvariantError(f"{found.num_missing} rows were not written to {path}")
            disk.sync(file)
        disk.rename(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
