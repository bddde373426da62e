"""The wire of a set of tables, for both ends: payloads are rows, of varying number.

    wire = RowWire.of(run_wire, specs)
    payload_rule(wire.pushes(partition), partition)      # for a receiver's state machine

Rows have the codec of their specs (psdist.tables.payloads), whatever the codec of parameters, whose
changes leave this wire as it is. No push is skipped, and no reply is relative.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from psdist.codecs import RAW
from psdist.codecs.chunks import ChunkCoding, ChunkCodings
from psdist.codecs.schemes.plain import Exact
from psdist.codecs.wire import Wire
from psdist.protocol.header import CodecCode
from psdist.protocol.partition import Chunk, Partition
from psdist.tables.payloads import largest_push, largest_rows, smallest
from psdist.tables.specs import TableSpecs


@dataclass(frozen=True, kw_only=True)
class RowWire(Wire):
    specs: TableSpecs

    @classmethod
    def of(cls, wire: Wire, specs: TableSpecs) -> RowWire:
        """``wire``: of the run's parameters, :meth:`Wire.of_set`."""
        given = {each.name: getattr(wire, each.name) for each in fields(Wire)}
        given |= {"push": RAW, "reply": RAW, "skip": None, "burst": 0}
        return cls(**given | {"is_relative": False, "has_copies": False}, specs=specs)

    def pushes(self, partition: Partition) -> ChunkCodings:
        return RowCodings(partition, (smallest(self.specs), largest_push(self.specs)))

    def replies(self, partition: Partition) -> ChunkCodings:
        return RowCodings(partition, (smallest(self.specs), largest_rows(self.specs)))


class _Rows(Exact):
    """Stands for what psdist.tables.payloads does with rows."""

    code = int(CodecCode.ROWS)
    name = "rows"


class RowCoding(ChunkCoding):
    """The sizes of a part's payloads."""

    def __init__(self, chunk: Chunk, sizes: tuple[int, int]) -> None:
        super().__init__(_Rows(), chunk, exact=(), matrices=())
        self._sizes = sizes

    @property
    def sizes(self) -> tuple[int, int]:
        return self._sizes


class RowCodings(ChunkCodings):
    def __init__(self, partition: Partition, sizes: tuple[int, int]) -> None:
        """``sizes``: bytes of the smallest and of the largest payload."""
        super().__init__(_Rows(), partition)
        self._each = [RowCoding(chunk, sizes) for chunk in partition.chunks]
