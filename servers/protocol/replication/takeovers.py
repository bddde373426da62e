"""What the registrar does about the death of a server that has a buddy; pure.

Only the registrar declares a server dead. The buddy takes its place (``TakeOver``, ``TakenOver``);
then everybody is told (``Moved``): workers send again what was not answered, and a primary whose
buddy has died goes on without one. What the dead server owed the registrar is asked again.

Where both servers of a pair are dead, or the dead one's place had been taken before, nobody has the
shard, and the job ends.

    takeovers = Takeovers(num_workers=2, buddies=(1, 2, 0))
    takeovers.on_server_lost(server_id(1), "server 1 (rank 1 on n1)")
    takeovers.on_taken_over(server_id(2), TakenOver(server=1))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from psdist.errors import ProtocolError, ServersLostError
from psdist.protocol.control import Moved, TakenOver, TakeOver
from psdist.protocol.ids import describe_peer, server_id, worker_id
from psdist.servers.protocol.actions import SendControl


@dataclass(slots=True)
class Move:
    """What is sent to ``server`` from now on goes to server ``host``, who has taken its place."""

    server: int
    host: int


@dataclass(frozen=True, slots=True)
class ServerDeath:
    """For people: a server has died, and another one goes on in its place."""

    server: int
    who: str
    host: int


TakeoverAction: TypeAlias = SendControl | Move | ServerDeath


class Takeovers:
    def __init__(self, *, num_workers: int, buddies: Sequence[int]) -> None:
        """``buddies``: by server, nothing where no server has one."""
        self._num_workers = num_workers
        self._buddies = buddies
        self._names: dict[int, str] = {}
        """Servers that have died, and who they were."""
        self._pending: set[int] = set()
        """Those of them whose place is about to be taken."""

    @property
    def alive(self) -> list[int]:
        """The ids of servers whose processes live."""
        servers = range(len(self._buddies))
        return [server_id(each) for each in servers if each not in self._names]

    @property
    def taken(self) -> list[int]:
        """Servers in whose places others go on."""
        return sorted(self._names.keys() - self._pending)

    @property
    def has_buddies(self) -> bool:
        return bool(self._buddies)

    def on_server_lost(self, peer: int, who: str) -> list[TakeoverAction]:
        """Raises :class:`ServersLostError` where nobody has the shard any more."""
        server = peer
        self._names[server] = who
        buddy = self._buddies[server]
        lost = [buddy] if buddy in self._names else []
        # Of a shard whose place this one had taken there is no other copy.
        lost += [other for other in self._names if self._buddies[other] == server]
        if lost:
            raise ServersLostError(who, [self._names[each] for each in lost])
        self._pending.add(server)
        return [SendControl(server_id(buddy), TakeOver(server=server))]

    def on_taken_over(self, peer: int, message: TakenOver) -> list[TakeoverAction]:
        server = message.server
        if server not in self._pending or peer != server_id(self._buddies[server]):
            raise ProtocolError(
                f"the registrar: {describe_peer(peer)} says that it has taken the place of server "
                f"{server}"
            )
        self._pending.remove(server)
        host = self._buddies[server]
        moved = Moved(server=server, host=host)
        peers = [*self.alive, *map(worker_id, range(self._num_workers))]
        return [
            Move(server, host),
            *(SendControl(peer, moved) for peer in peers),
            ServerDeath(server, self._names[server], host),
        ]
