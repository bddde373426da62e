"""Where a server keeps a shard: the values, the codecs, the log and the checkpoints of each set.

    store = ShardStore(TensorShard, wire=wire, make_history=make_history, keeper=keeper)
    store.of_set(0)                       # for SetLoop, or for a replica

A server that takes over a failed one continues with the stores of its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import NamedTuple, TypeAlias

from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.history.writers import EventCount, ServerHistory
from psdist.protocol.control import Setup
from psdist.protocol.partition import Partition
from psdist.servers.shard.executor import MakeExecutor
from psdist.servers.shard.regions import Keeper

Log: TypeAlias = EventCount
"""A history, or a count of the events if no history is written."""


class SetStore(NamedTuple):
    """Where one parameter set of a server is kept."""

    wire: Wire
    """The codecs of the set, whose level may change."""
    make_executor: MakeExecutor
    make_log: Callable[[int], Log]
    """Return the log whose next event has this position."""
    keeper: Keeper


class ShardStore:
    def __init__(
        self,
        make_executor: MakeExecutor,
        *,
        wire: Wire = RAW_WIRE,
        make_history: Callable[[int, int], ServerHistory | None] = lambda _set_index, _position: (
            None
        ),
        keeper: Keeper | None = None,
    ) -> None:
        """``make_history(set_index, position)`` returns the history of a set, whose next event has
        this position; None if no history is written. Without ``keeper`` there are no
        checkpoints."""
        self.wire = wire
        self.keeper = keeper or Keeper()
        self._make_executor = make_executor
        self._make_history = make_history

    def of_set(self, set_index: int) -> SetStore:
        return SetStore(
            self.wire.of_set(),
            self._make_executor,
            lambda position: self._make_history(set_index, position) or EventCount(position),
            self.keeper,
        )


class BuiltSet(NamedTuple):
    """A parameter set as the chief described it."""

    set_index: int
    partition: Partition
    owners: tuple[int, ...]
    """By chunk: its server."""
    setup: Setup

    def chunks_of(self, server: int) -> list[int]:
        return [chunk for chunk, owner in enumerate(self.owners) if owner == server]


def describe_set(
    set_index: int, setup: Setup, weights: Sequence[float], held: list[int]
) -> BuiltSet:
    """Return a set that the chief describes. ``weights``: by server, for the part of each;
    ``held``: by server, the bytes of the sets before it; this set adds its own."""
    partition = Partition.decode(setup.partition)
    owners = partition.shard(weights, held)
    held[:] = map(add, held, partition.bytes_by_server(owners, len(held)))
    return BuiltSet(set_index, partition, owners, setup)
