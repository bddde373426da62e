"""All rows of the tables, from the servers to a file: on the chief, block by block.

    save_rows(Path("rows.safetensors"), loop)        # while all workers are in a collective

Each server sends one block (psdist.tables.row_files) at a time, so neither side holds a table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from psdist.errors import ProtocolError
from psdist.protocol.control import StateHeld
from psdist.protocol.optimizer_state import PART_ELEMENTS
from psdist.tables.row_files import Block, RowFile, blocks_of, row_file
from psdist.tables.specs import TableSpecs
from psdist.workers.tables.loop import TableLoop


def save_rows(path: Path, loop: TableLoop) -> None:
    """Write the file of psdist.tables.row_files. Raises OSError and :class:`CheckpointError`; there
    is no such file then."""
    tables, parts = loop.specs.tables, range(loop.specs.num_parts)
    found = _Rows(loop.specs)
    loop.fetch_state([(part, 0) for part in parts], found)
    dims = {each.name: each.dim for each in tables}
    with row_file(path, dims, found.totals()) as found.file:
        loop.fetch_state(list(found.begin()), found)
        if found.error is not None:
            raise found.error


class _Rows:
    """Takes the answers: first the numbers of rows, then the rows."""

    def __init__(self, specs: TableSpecs) -> None:
        self._specs = specs
        self._num_rows = np.zeros((specs.num_parts, len(specs.tables)), np.int64)
        self._blocks: dict[tuple[int, int], Block] = {}
        """By part and start."""
        self.file: RowFile | None = None
        self.error: OSError | None = None
        """The first one of the disk: what servers still send is dropped."""

    def totals(self) -> dict[str, int]:
        """Return the number of rows of each table."""
        numbers = self._num_rows.sum(axis=0).tolist()
        return {each.name: num for each, num in zip(self._specs.tables, numbers, strict=True)}

    def begin(self) -> dict[tuple[int, int], Block]:
        """Return what to ask for: all blocks of all parts."""
        dims = [each.dim for each in self._specs.tables]
        for part, numbers in enumerate(self._num_rows.tolist()):
            for at, block in enumerate(blocks_of(numbers, dims), start=1):
                self._blocks[part, at * PART_ELEMENTS] = block
        return self._blocks

    def keep(self, message: StateHeld, *, sender: str) -> None:
        part, values = message.chunk, message.values
        num_bytes = 8 * len(self._specs.tables)
        block = self._blocks.get((part, message.start), Block(0, 0, 0))
        table = self._specs.tables[block.table]
        if len(values) != num_bytes + block.num * (8 + 4 * table.dim):
            raise ProtocolError(f"{sender} sent {len(values)} bytes of rows of part {part}")
        numbers = np.frombuffer(values, np.int64, len(self._specs.tables))
        if not message.start:
            self._num_rows[part] = np.maximum(numbers, 0)
        if not np.array_equal(numbers, self._num_rows[part]):
            raise ProtocolError(f"{sender} sent other numbers of rows of part {part} than before")
        if self.file is None or self.error is not None:
            return
        ids = np.frombuffer(values, np.int64, block.num, num_bytes)
        rows = np.frombuffer(values, np.float32, -1, num_bytes + ids.nbytes)
        first = int(self._num_rows[:part, block.table].sum()) + block.first
        try:
            self.file.write(table.name, first, ids, rows)
        except OSError as error:
            self.error = error
