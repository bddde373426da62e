"""Makes the shard of a server that has died anew, of the values that workers hold.

For servers that have no buddies (``on_server_death = rebuild``). It owns the memory that values
arrive in, the new executors and the new logs; what a chunk contains is decided by
psdist.servers.protocol.rebuilding.

    rebuilding = Rebuilding(transport, options, server_options, make_executor)
    rebuilding.on_built(set_index, partition, owners, setup)       # of every set, from the start
    rebuilding.begin(Rebuild(server=1, ...))
    rebuilding.on_told(peer, message)
    rebuilding.take_made()          # its sets, behind the last of all values and of its state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from psdist.errors import InvariantError, ProtocolError
from psdist.history.writers import EventCount, EventKind, ServerHistory
from psdist.protocol.checkpoints import FirstClocks
from psdist.protocol.control import HeldValues, HeldVersions, Rebuild, Setup
from psdist.protocol.events import Frame
from psdist.protocol.ids import describe_peer
from psdist.protocol.partition import Partition
from psdist.servers.protocol.actions import Load
from psdist.servers.protocol.membership import Standing
from psdist.servers.protocol.rebuilding.collecting import Collecting
from psdist.servers.protocol.replication.picture import ShardPicture
from psdist.servers.protocol.state import ServerCore
from psdist.servers.set_loop import ServerOptions, shard_spec
from psdist.servers.shard.executor import Executor, MakeExecutor
from psdist.servers.shard.regions import Keeper, Region
from psdist.transport.base import Transport

WantedChunks: TypeAlias = Mapping[int, tuple[Partition, Sequence[int]]]
"""By set."""


@dataclass(frozen=True, slots=True)
class FoundState:
    checkpoint: str
    regions: Mapping[tuple[int, int], Sequence[Region]]
    """By set and chunk; nothing of a set that the checkpoint does not have."""


class StateSearch(Protocol):
    """What the newest checkpoint has of some chunks is looked for beside what the server does."""

    @property
    def is_over(self) -> bool: ...

    @property
    def found(self) -> FoundState | None:
        """None where there is no checkpoint. Raises what has kept it from being read."""
        ...


class NoState:
    """Where there are no checkpoints; see :class:`StateSearch`."""

    is_over = True
    found = None


@dataclass(frozen=True, kw_only=True)
class RebuildingOptions:
    """What servers need to know of one another, beside what each knows of itself."""

    groups: Sequence[tuple[int, ...]]
    """The workers of each."""
    make_core: Callable[[int, int, int, ShardPicture | None], ServerCore]
    """(server, set index, collectives that are over, what is known of the shard): the machine of a
    server whose place another one has taken."""
    make_history: Callable[[int, int, int, int], ServerHistory | None]
    """(server, set index, how often its shard has been made anew, position of the first event): the
    log of who has done that; None where nothing is recorded."""
    make_keeper: Callable[[int], Keeper | None]
    """Where the checkpoints of such a server go."""
    first_clocks: Callable[[int], FirstClocks | None] = lambda _set_index: None
    find_state: Callable[[WantedChunks], StateSearch] = lambda _wanted: NoState()
    """Begins to look for it."""


@dataclass(frozen=True, slots=True)
class RebuiltSet:
    """The part of a parameter set that the dead server had held."""

    setup: Setup
    picture: ShardPicture
    executor: Executor
    log: ServerHistory | EventCount


@dataclass(frozen=True, slots=True)
class RebuiltShard:
    server: int
    sets: Sequence[RebuiltSet]
    num_lost: int
    checkpoint: str
    """Where its optimizer's state is from; nothing for a fresh one."""


@dataclass(frozen=True, slots=True)
class _Described:
    partition: Partition
    owners: Sequence[int]
    setup: Setup


@dataclass(slots=True)
class _Shard:
    """One that is being made."""

    collecting: Collecting
    values: dict[tuple[int, int], Frame]
    """By set and chunk."""
    begun: Rebuild | None = None
    search: StateSearch | None = None
    """For the optimizer's state, once begun."""


class Rebuilding:
    def __init__(
        self,
        transport: Transport,
        options: RebuildingOptions,
        server_options: ServerOptions,
        make_executor: MakeExecutor,
    ) -> None:
        self.options = options
        self._transport = transport
        self._server_options = server_options
        self._make_executor = make_executor
        self._described: list[_Described] = []
        """By set."""
        self._shards: dict[int, _Shard] = {}
        """By server."""

    def on_built(
        self, set_index: int, partition: Partition, owners: Sequence[int], setup: Setup
    ) -> None:
        """The chief has described a parameter set."""
        if set_index != len(self._described):
            raise InvariantError(f"set {set_index} was described after {len(self._described)}")
        self._described.append(_Described(partition, owners, setup))

    def server_options(self, server: int) -> ServerOptions:
        """Those of a server whose place this one takes."""
        keeper = self.options.make_keeper(server)
        return replace(self._server_options, server=server, keeper=keeper)

    def begin(self, message: Rebuild) -> None:
        """The registrar wants the shard of a dead server to be made here."""
        shard = self._shard(message.server)
        if shard.begun is not None:
            raise InvariantError(f"told twice to make the shard of server {message.server} anew")
        shard.begun = message
        shard.search = self.options.find_state(
            {
                index: (each.partition, mine)
                for index, each in enumerate(self._described)
                if (mine := _mine(each, message.server))
            }
        )

    def _shard(self, server: int) -> _Shard:
        """What workers tell may come before the registrar's word."""
        shard = self._shards.get(server)
        if shard is None:
            sizes = [
                {chunk: each.partition.chunks[chunk].num_bytes for chunk in _mine(each, server)}
                for each in self._described
            ]
            collecting = Collecting(server=server, groups=self.options.groups, num_bytes=sizes)
            shard = self._shards[server] = _Shard(collecting, {})
        return shard

    def on_told(self, peer: int, message: HeldVersions | HeldValues) -> None:
        """A worker tells what it holds, or sends it."""
        if not 0 <= message.server < len(self._server_options.shard_weights):
            raise ProtocolError(
                f"{describe_peer(peer)} sent {type(message).__name__} of server {message.server}"
            )
        shard = self._shard(message.server)
        if isinstance(message, HeldVersions):
            for action in shard.collecting.on_held(peer, message):
                self._transport.send_control(action.peer, action.message)
            return
        shard.collecting.on_values(peer, message)
        key = message.set_index, message.chunk
        if key not in shard.values:
            from psdist.protocol.memory import allocate  # with torch: not in simulations

            chunk = self._described[message.set_index].partition.chunks[message.chunk]
            shard.values[key] = Frame(allocate(chunk.num_bytes))
        payload = shard.values[key].payload
        assert payload is not None
        payload[message.start : message.start + len(message.values)] = message.values

    def take_made(self) -> RebuiltShard | None:
        """A shard of which everything is here, if there is one; once."""
        for server, shard in self._shards.items():
            if shard.begun is None or shard.search is None:
                continue
            if shard.collecting.is_complete and shard.search.is_over:
                del self._shards[server]
                return self._make(shard, shard.begun, shard.search.found)
        return None

    def _make(self, shard: _Shard, begun: Rebuild, found: FoundState | None) -> RebuiltShard:
        server, options = begun.server, self.server_options(begun.server)
        sets = list[RebuiltSet]()
        for index, each in enumerate(self._described):
            setup = replace(each.setup, state=b"")  # which the chief had sent the dead one
            mine = _mine(each, server)
            executor = self._make_executor(shard_spec(options, setup, each.partition, mine))
            for chunk in mine:
                if found is not None and (index, chunk) in found.regions:
                    executor.restore(chunk, found.regions[index, chunk])
                executor.load(Load(chunk, shard.values[index, chunk]))
            sets.append(
                RebuiltSet(
                    setup=setup,
                    picture=self._picture(shard.collecting, index, mine, begun.resumed_up_to),
                    executor=executor,
                    log=self._begin_log(shard.collecting, index, mine, begun),
                )
            )
        checkpoint = found.checkpoint if found is not None else ""
        return RebuiltShard(server, sets, shard.collecting.num_lost, checkpoint)

    def _picture(
        self, collecting: Collecting, index: int, mine: Sequence[int], resumed_up_to: int
    ) -> ShardPicture:
        """As a buddy would know the shard. Leaders say again who waits in which collective."""
        num_groups = len(self.options.groups)
        first = self._first(index)
        picture = ShardPicture(chunks=mine, num_groups=num_groups, num_state_parts=0, first=first)
        for chunk in mine:
            found = collecting.chunk(index, chunk)
            picture.clocks[chunk] = list(found.clocks)
            picture.versions[chunk] = found.version
            picture.loaded.add(chunk)
        for group in range(num_groups):
            left = collecting.left.get((index, group))
            picture.standings[group] = Standing.ACTIVE if left is None else Standing.LEFT
            picture.stops[group] = first[group] if left is None else left
        picture.resumed_up_to = resumed_up_to
        return picture

    def _first(self, index: int) -> Sequence[int]:
        """By group, where its clock begins in a set."""
        first = self.options.first_clocks(index)
        return first.clocks if first is not None else [0] * len(self.options.groups)

    def _begin_log(
        self, collecting: Collecting, index: int, mine: Sequence[int], begun: Rebuild
    ) -> ServerHistory | EventCount:
        told = dict(enumerate(begun.positions)).get(index, 0)
        position = max(collecting.position(index), told)
        log: ServerHistory | EventCount | None = self.options.make_history(
            begun.server, index, begun.number, position
        )
        if log is None:
            log = EventCount(position)
        log.rebuilt(self._server_options.server)
        for group, workers in enumerate(self.options.groups):
            log.member(EventKind.JOIN, group, self._first(index)[group], float(len(workers)))
        for group, workers in enumerate(self.options.groups):
            if (left := collecting.left.get((index, group))) is not None:
                log.member(EventKind.LEAVE, group, left, float(len(workers)))
        found = [(chunk, collecting.chunk(index, chunk)) for chunk in mine]
        for chunk, each in found:
            log.held(chunk, each.group, each.version, each.position)
        for chunk, each in found:
            for group in each.lost:
                log.lost(chunk, group, each.clocks[group] - 1)
        return log


def _mine(each: _Described, server: int) -> list[int]:
    """The chunks of a server, ascending."""
    return [chunk for chunk, owner in enumerate(each.owners) if owner == server]
