"""The description of a set of tables, for the loop of a server.

store = ShardStore(TensorShard, choose=contents_of, wire=wire)    # values and rows, as described
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psdist.codecs.wire import Wire
from psdist.errors import ProtocolError
from psdist.protocol.control import Setup
from psdist.protocol.optimizers import OptimizerKind, OptimizerTraits, unpack_hyperparameters
from psdist.servers.set_store import BuiltSet, Contents, ServerOptions
from psdist.servers.shard.executor import Executor, MakeExecutor, ShardSpec
from psdist.servers.shard.regions import Keeper
from psdist.servers.tables.checkpoints import rows_in
from psdist.servers.tables.shard import TableShard
from psdist.tables.row_files import ANY_NUMBER
from psdist.tables.specs import TableSpecs
from psdist.tables.wire import RowWire

_ROWS: Final = "rows"
"""Stands for the optimizers of the tables."""


class TableContents(Contents):
    def __init__(self, setup: Setup, wire: Wire) -> None:
        """``wire``: of parameters. Raises :class:`ProtocolError` for what no chief describes."""
        self._specs = TableSpecs.decode(setup.tables)
        self.wire = RowWire.of(wire, self._specs)
        faults = {
            "another partition": setup.partition != self._specs.partition().encode(),
            "hyperparameters of other groups": (
                len(unpack_hyperparameters(setup.hyper)) != len(self._specs.tables)
            ),
            "a norm to clip rows to": bool(setup.max_norm),
            "optimizer state": bool(setup.state),
        }
        for what, is_there in faults.items():
            if is_there:
                raise ProtocolError(f"the chief described tables with {what}")

    def describe(
        self, set_index: int, setup: Setup, weights: Sequence[float], held: list[int]
    ) -> BuiltSet:
        """Parts go by ``weights`` alone."""
        del held
        return BuiltSet(set_index, self._specs.partition(), self._specs.owners(weights), setup)

    def spec(self, options: ServerOptions, built: BuiltSet) -> ShardSpec:
        return ShardSpec(
            partition=built.partition,
            chunks=tuple(built.chunks_of(options.server)),
            optimizer=_ROWS,
            traits=OptimizerTraits(name=_ROWS, kind=OptimizerKind.ELEMENTWISE, lr_scales=True),
            hyper=built.setup.hyper,
            wire=self.wire,
        )

    def state_lengths(self, built: BuiltSet) -> list[int]:
        """Rows come and go: the executor says how many there are."""
        return [ANY_NUMBER] * len(built.partition.chunks)

    def restore(self, executor: Executor, keeper: Keeper, built: BuiltSet, chunk: int) -> None:
        assert isinstance(executor, TableShard)
        stores = executor.parts[chunk].stores
        for table, bucket, rows in rows_in(keeper.kept(built.set_index), self._specs, chunk):
            stores[table].restore(rows, first_bucket=bucket)

    def make_executor(self, spec: ShardSpec) -> TableShard:
        return TableShard(self._specs, chunks=spec.chunks, largest_push=spec.slot_bytes)


def contents_of(setup: Setup, wire: Wire, make_executor: MakeExecutor) -> Contents:
    """Return what a set consists of: rows of tables, or values of parameters."""
    return TableContents(setup, wire) if setup.tables else Contents(setup, wire, make_executor)
