"""Where a server keeps a shard: the values, the codecs, the log and the checkpoints of each set.

    store = ShardStore(TensorShard, wire=wire, make_history=make_history, keeper=keeper)
    store.of_set(0)                       # for SetLoop, or for a replica

A server that takes over a failed one continues with the stores of its replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple, TypeAlias

from psdist.codecs.wire import RAW_WIRE, Wire
from psdist.errors import ProtocolError
from psdist.history.writers import EventCount, ServerHistory
from psdist.protocol.control import Setup
from psdist.protocol.optimizer_state import unpack_states
from psdist.protocol.optimizers import check_mode, traits
from psdist.protocol.partition import Partition
from psdist.servers.shard.executor import Executor, MakeExecutor, ShardSpec
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
    choose: ChooseContents
    """Returns what a set consists of."""


class ShardStore:
    def __init__(
        self,
        make_executor: MakeExecutor,
        *,
        choose: ChooseContents | None = None,
        wire: Wire = RAW_WIRE,
        make_history: Callable[[int, int], ServerHistory | None] = lambda _set_index, _position: (
            None
        ),
        keeper: Keeper | None = None,
    ) -> None:
        """``choose``: None for parameters alone. ``make_history(set_index, position)`` returns the
        history of a set, whose next event has this position; None if no history is written. Without
        ``keeper`` there are no checkpoints."""
        self.wire = wire
        self.keeper = keeper or Keeper()
        self._choose = choose or Contents
        self._make_executor = make_executor
        self._make_history = make_history

    def of_set(self, set_index: int) -> SetStore:
        return SetStore(
            self.wire.of_set(),
            self._make_executor,
            lambda position: self._make_history(set_index, position) or EventCount(position),
            self.keeper,
            self._choose,
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


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server's loop, in addition to its state machine."""

    server: int
    shard_weights: tuple[float, ...]
    """By server: the weight of its part of the model (Partition.shard)."""
    modes: Sequence[str]
    """All modes that may occur in the run."""
    receive_buffers: int | None
    """Number of receive slots; None: psdist.protocol.flow chooses."""
    reply_window: int | None = None
    """Maximum bytes of replies in flight to one worker, except for a single one; None: no limit."""
    extra_optimizers: tuple[str, ...] = ()
    checksum_every: int = 16
    compensation: float = 0.0
    """lambda of psdist.servers.shard.given; 0: no delay compensation."""
    freeze_step: int = 0
    """Number of steps after which Adam's second moment is frozen; 0: never."""

    def spec(self, wire: Wire, built: BuiltSet) -> ShardSpec:
        """Return the chief's description of this server's chunks. Raises if a mode cannot step
        with this optimizer."""
        setup, partition = built.setup, built.partition
        marks = traits(setup.optimizer, extra=self.extra_optimizers)
        for mode in self.modes:
            check_mode(marks, mode)
        return ShardSpec(
            partition=partition,
            chunks=tuple(built.chunks_of(self.server)),
            optimizer=setup.optimizer,
            traits=marks,
            hyper=setup.hyper,
            wire=wire,
            extra_optimizers=self.extra_optimizers,
            compensation=self.compensation,
            freeze_step=self.freeze_step,
            is_holding=tuple(self.modes) == ("sync",) and setup.max_norm > 0,
            states=unpack_states(setup.state, pieces=range(len(partition.pieces))),
        )


class Contents:
    """The contents of a parameter set on a server: the values of parameters. Other contents
    extend this class (psdist.servers.tables)."""

    def __init__(self, setup: Setup, wire: Wire, make_executor: MakeExecutor) -> None:
        """``wire``: of parameters. Raises :class:`ProtocolError` for a set of tables."""
        if setup.tables:
            raise ProtocolError("the chief described tables; this server keeps no rows of tables")
        self.wire = wire
        self.make_executor: Callable[[ShardSpec], Executor] = make_executor

    def describe(
        self, set_index: int, setup: Setup, weights: Sequence[float], held: list[int]
    ) -> BuiltSet:
        """See :func:`describe_set`."""
        return describe_set(set_index, setup, weights, held)

    def spec(self, options: ServerOptions, built: BuiltSet) -> ShardSpec:
        """Return the description of this server's chunks. Raises if a mode cannot step them."""
        return options.spec(self.wire, built)

    def state_lengths(self, built: BuiltSet) -> list[int]:
        """Return the elements of each chunk, whose optimizer state the chief may ask for."""
        return [chunk.length for chunk in built.partition.chunks]

    def restore(self, executor: Executor, keeper: Keeper, built: BuiltSet, chunk: int) -> None:
        """Begin with the contents that the chunk has in the job's first checkpoint."""
        executor.restore(chunk, keeper.regions(built.set_index, built.partition, chunk))


ChooseContents: TypeAlias = Callable[[Setup, Wire, MakeExecutor], Contents]
"""Called with the chief's description, the wire of parameters and their executor."""
