"""Replace failed servers by their replicas, and make new replicas; pure.

Only the coordinator declares a server failed. The process with the replica of its shard takes its
place (``TakeOver``, ``TakenOver``). Then every rank gets ``Moved``. Workers send unanswered
messages again, and a server whose replica has failed continues without one. The coordinator asks
the new server again for what the failed one owed.

A shard without a replica gets another in two steps. A live process takes its log entries
(``KeepCopy``, ``KeepsCopy``). Then the server of the shard fills it while training continues
(``FillCopy``, ``CopyFilled``). If that server fails before the replica is complete, the job ends.

Spares are processes that serve nothing at the start. They can keep a replica and replace a server.
Where they can also replace workers, an idle spare may be lent for that.

    takeovers = Takeovers(num_workers=2, buddies=(1, 2, 0))
    takeovers.on_server_lost(server_id(1), "server 1 (rank 1 on n1)")
    takeovers.on_taken_over(server_id(2), TakenOver(server=1))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn, TypeAlias

from psdist.controller.snapshots import Fields
from psdist.errors import InvariantError, ProtocolError, ServersLostError
from psdist.protocol.control import (
    Control,
    CopyFilled,
    CopyLost,
    Departed,
    FillCopy,
    KeepCopy,
    KeepsCopy,
    Moved,
    TakenOver,
    TakeOver,
)
from psdist.protocol.ids import describe_peer, is_spare, server_id, spare_id, spare_of, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.coordinator import Actions, Coordinator, CoordinatorPart
from psdist.servers.protocol.replication.pairs import next_keeper
from psdist.servers.protocol.snapshots import OnWire


@dataclass(slots=True)
class Move:
    """Send what is for ``server`` to server ``host``, which has taken its place."""

    server: int
    host: int


@dataclass(frozen=True, slots=True)
class ServerDeath:
    """For users: a server has failed, and ``host``, a server or spare, replaces it."""

    server: int
    who: str
    host: int


@dataclass(frozen=True, slots=True)
class SpareDeath:
    """For users: spare number ``spare`` has failed. Other reports name the shards that it had."""

    spare: int
    who: str


@dataclass(frozen=True, slots=True)
class ShardAlone:
    """For people: of the shard of ``server`` there is one copy, that of ``host``."""

    server: int
    host: int


@dataclass(frozen=True, slots=True)
class ShardWhole:
    """For people: ``keeper`` has another copy of the shard of ``server``."""

    server: int
    keeper: int


TakeoverAction: TypeAlias = SendControl | Move | ServerDeath | SpareDeath | ShardAlone | ShardWhole


@dataclass(slots=True)
class ShardPlaces:
    host: int
    """Process that serves it, or is about to."""
    keeper: int | None
    """Process with its replica."""
    next_keeper: int | None = None
    """Process that is to have the replica, while there is none."""
    num_copies: int = 1
    """Replicas so far, including one that is being filled."""
    lost: str = ""
    """The last failed process that had it."""
    has_moved: bool = False
    """True if its first server does not serve it any more."""


class Takeovers(CoordinatorPart):
    NAME = "takeovers"
    TAKES = (TakenOver, KeepsCopy, CopyFilled)
    STATE = Fields(
        {
            list[int]: "_workers",
            set[int]: "_lent _pending",
            list[ShardPlaces]: "_shards",
            dict[int, str]: "failed",
            bool: "is_ending",
            list[Annotated[Departed, OnWire]]: "_departed",
        }
    )

    def __init__(
        self,
        *,
        num_workers: int,
        buddies: Sequence[int],
        hosts: Sequence[str] = (),
        racks: Sequence[str] = (),
        num_spares: int = 0,
        num_substitutes: int = 0,
    ) -> None:
        """``buddies``: by server, nothing where no server has one; ``hosts``, ``racks``: by server
        and then by spare, nothing or "" if that is not known; ``num_substitutes``: number of
        workers, the last ones, that join later; with ``num_spares`` they are the spares."""
        self._workers = [*range(num_workers)]
        """That may be told anything."""
        self._num_beginning = num_workers - num_substitutes
        self._may_lend = bool(num_spares and num_substitutes)
        if self._may_lend:
            del self._workers[self._num_beginning :]
        self._lent: set[int] = set()
        """The ids of spares that are workers."""
        self._shards = [ShardPlaces(host, buddy) for host, buddy in enumerate(buddies)]
        self._processes = [
            *map(server_id, range(len(buddies))),
            *map(spare_id, range(num_spares)),
        ]
        """Ids of all that may have a shard."""
        if not buddies:  # no rank needs the places of servers
            self._processes, hosts, racks = [], (), ()
        unknown = [""] * len(self._processes)
        self._hosts = dict(zip(self._processes, hosts or unknown, strict=True))
        self._racks = dict(zip(self._processes, racks or unknown, strict=True))
        self.failed: dict[int, str] = {}
        """By id of failed servers and spares: their descriptions."""
        self._pending: set[int] = set()
        """Shards whose place is about to be taken."""
        self.is_ending = False
        """Whether all workers are done: no copy is begun any more."""

        self._departed: list[Departed] = []
        """Workers that have failed after they were done."""

    def handle(self, peer: int, message: Control, job: Coordinator) -> Actions:
        if isinstance(message, KeepsCopy):
            return [*self.on_keeps_copy(peer, message)]
        if isinstance(message, CopyFilled):
            return [*self.on_copy_filled(peer, message)]
        assert isinstance(message, TakenOver)
        return [*self.on_taken_over(peer, message), *job.ask_again(message.server)]

    def on_done_lost(self, worker: int, job: Coordinator) -> Actions:
        """A server that replaces a failed one may lack what the worker sent to that one."""
        left = job.left.pop(worker, None)
        if left is None:
            return []
        departed = Departed(worker=worker, left=left)
        self._departed.append(departed)
        return [SendControl(server_id(each), departed) for each in self.taken]

    def ask_again(self, server: int, job: Coordinator) -> Actions:
        return [SendControl(server_id(server), each) for each in self._departed]

    def on_finishing(self) -> None:
        self.is_ending = True

    def to_stop(self, job: Coordinator) -> list[int]:
        return self.alive

    @property
    def num_idle_spares(self) -> int:
        return len(self.idle_spares)

    @property
    def shards(self) -> tuple[ShardPlaces, ...]:
        """By server: the processes that have its shard."""
        return tuple(self._shards)

    @property
    def alive(self) -> list[int]:
        """Ids of servers and spares whose processes run."""
        return [each for each in self._processes if each not in self.failed.keys() | self._lent]

    def lend(self, spare: int) -> None:
        """This spare, which has no shard, is a worker from now on."""
        self._lent.add(spare_id(spare))
        self._workers.append(self._num_beginning + spare)

    @property
    def idle_spares(self) -> list[int]:
        """Ids of spares that run and have no shard."""
        load = self._load()
        return [each for each in self.alive if is_spare(each) and not load[each]]

    @property
    def taken(self) -> list[int]:
        """Failed servers that have been replaced."""
        dead = {each for each in self.failed if not is_spare(each)}
        return sorted(dead - self._pending)

    @property
    def alone(self) -> list[int]:
        """Shards without a replica."""
        return [server for server, each in enumerate(self._shards) if each.keeper is None]

    # -- failures ------------------------------------------------------------------------------

    def on_server_lost(self, peer: int, who: str) -> Actions:
        """Raises :class:`ServersLostError` if no live process has some shard."""
        dead = peer
        if dead not in self._processes:
            raise InvariantError(f"the coordinator received that {describe_peer(dead)} has failed")
        if dead in self._lent:
            return []  # it was no spare any more
        self.failed[dead] = who
        served = [server for server, each in enumerate(self._shards) if each.host == dead]
        gone = {each.lost for each in self._of(served) if each.keeper is None}
        if gone:
            raise ServersLostError(who, sorted(gone))
        actions = Actions()
        if is_spare(dead):
            actions.append(SpareDeath(spare_of(dead), who))
        for server, shard in enumerate(self._shards):
            if is_spare(dead) and dead in (shard.keeper, shard.next_keeper):
                actions.append(SendControl(server_id(shard.host), CopyLost(server=server)))
            if shard.next_keeper == dead:
                shard.next_keeper = None
            if shard.keeper == dead:
                shard.keeper, shard.lost = None, who
                actions.append(ShardAlone(server, shard.host))
        for server, shard in zip(served, self._of(served), strict=True):
            assert shard.keeper is not None
            shard.host, shard.keeper, shard.lost = shard.keeper, None, who
            self._pending.add(server)
            actions.append(SendControl(server_id(shard.host), TakeOver(server=server)))
        return [*actions, *self._begin_copies()]

    def _of(self, servers: Sequence[int]) -> list[ShardPlaces]:
        return [self._shards[each] for each in servers]

    def on_taken_over(self, peer: int, message: TakenOver) -> list[TakeoverAction]:
        server = message.server
        if server not in self._pending or peer != server_id(self._shards[server].host):
            self._refuse(peer, f"has taken the place of server {server}")
        self._pending.remove(server)
        shard = self._shards[server]
        host = shard.host
        moved = Moved(server=server, host=host)
        peers = [*self.alive, *map(worker_id, self._workers)]
        actions: list[TakeoverAction] = [
            Move(server, host),
            *(SendControl(peer, moved) for peer in peers),
        ]
        if not shard.has_moved:
            actions.append(ServerDeath(server, self.failed[server], host))
        shard.has_moved = True
        return [*actions, ShardAlone(server, host), *self._begin_copies()]

    # -- other copies --------------------------------------------------------------------------

    def _begin_copies(self) -> list[TakeoverAction]:
        """Begin replicas of shards that have none, where a process can keep one. Wait until all
        failed servers are replaced: then every rank has evicted them."""
        actions: list[TakeoverAction] = []
        if self._pending or self.is_ending:
            return actions
        for server, shard in enumerate(self._shards):
            if shard.keeper is not None or shard.next_keeper is not None:
                continue
            others = [each for each in self.alive if each != shard.host]
            if not others:
                continue
            found = next_keeper(
                shard.host,
                others,
                hosts=self._hosts,
                racks=self._racks,
                load=self._load(),
                saves_spares=self._may_lend,
            )
            shard.next_keeper = found
            shard.num_copies += 1
            keep = KeepCopy(server=server, number=shard.num_copies)
            actions.append(SendControl(server_id(found), keep))
        return actions

    def _load(self) -> dict[int, int]:
        """By server and spare: how many shards it has or is about to have."""
        load = dict.fromkeys(self._processes, 0)
        for each in self._shards:
            for holder in (each.host, each.keeper, each.next_keeper):
                if holder is not None:
                    load[holder] += 1
        return load

    def on_keeps_copy(self, peer: int, message: KeepsCopy) -> list[TakeoverAction]:
        server, number = message.server, message.number
        shard = self._shard(server, number)
        if shard is None or shard.next_keeper is None or peer != server_id(shard.next_keeper):
            self._refuse(peer, f"keeps copy {number} of the shard of server {server}")
        if self.is_ending:
            return []
        fill = FillCopy(server=server, keeper=shard.next_keeper, number=number)
        return [SendControl(server_id(shard.host), fill)]

    def on_copy_filled(self, peer: int, message: CopyFilled) -> list[TakeoverAction]:
        server, number = message.server, message.number
        shard = self._shard(server, number)
        if shard is None or peer != server_id(server):
            self._refuse(peer, f"has filled copy {number} of the shard of server {server}")
        if shard.next_keeper is None or number != shard.num_copies:
            return []  # its keeper has failed since it was full
        shard.keeper, shard.next_keeper = shard.next_keeper, None
        return [ShardWhole(server, shard.keeper)]

    def _shard(self, server: int, number: int) -> ShardPlaces | None:
        """None where there is none, or no such copy of it yet."""
        if not 0 <= server < len(self._shards) or not 1 < number <= self._shards[server].num_copies:
            return None
        return self._shards[server]

    def _refuse(self, peer: int, what: str) -> NoReturn:
        raise ProtocolError(f"the coordinator: {describe_peer(peer)} says that it {what}")
