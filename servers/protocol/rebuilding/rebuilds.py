"""What the registrar does about the death of a server of whose shard nobody has a copy; pure.

A server that lives makes the shard anew (``Rebuild``) of what workers hold, who are asked to tell
it (``TellHeld``). When that is done (``Rebuilt``) everybody is told (``Moved``): workers send
again what was not answered. A process that had made others' shards anew dies with all of them. One
death at a time: where a server dies while a shard is being made, the job ends.

    rebuilds = Rebuilds(num_workers=2, num_servers=3)
    rebuilds.on_server_lost(server_id(1), "server 1 (rank 1 on n1)", resumed_up_to=lambda _: 4)
    rebuilds.on_rebuilt(server_id(0), Rebuilt(server=1, num_lost=0, checkpoint=""))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from psdist.errors import PeerLostError, ProtocolError
from psdist.protocol.control import Moved, Rebuild, Rebuilt, Resumed, TellHeld
from psdist.protocol.ids import describe_peer, server_id, worker_id
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.replication.takeovers import Move


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRebuilt:
    """For people: ``server`` has died, as ``who``, and server ``host`` has made its shard anew."""

    server: int
    process: int
    """Whose process has died: its own, or that of who had made the shard anew before."""
    who: str
    host: int
    num_lost: int
    """Updates of one of its chunks each, that may be lost."""
    checkpoint: str
    """Where the optimizer's state is from; nothing where it is a fresh one."""


RebuildAction: TypeAlias = SendControl | Move | ServerRebuilt


class Rebuilds:
    TAKES = (Rebuilt,)

    def __init__(self, *, num_workers: int, num_servers: int) -> None:
        self._workers = [worker_id(worker) for worker in range(num_workers)]
        self._host_of = {server: server for server in range(num_servers)}
        """By server: in whose process its shard is, or is being made."""
        self._dead: dict[int, str] = {}
        """Servers whose processes have died, and who they were."""
        self._pending: dict[int, int] = {}
        """Servers whose shards are being made, and whose processes have died."""
        self._positions: dict[int, list[int]] = {}
        """By server: how long its logs were when it told last."""
        self._num_made: Counter[int] = Counter()
        """By server: how often its shard was made anew."""

    @property
    def alive(self) -> list[int]:
        """The ids of servers whose processes live."""
        return [server_id(each) for each in self._host_of if each not in self._dead]

    def on_resumed(self, message: Resumed) -> None:
        self._positions[message.server] = message.positions

    def on_server_lost(
        self, peer: int, who: str, *, resumed_up_to: Callable[[int], int]
    ) -> list[RebuildAction]:
        """``resumed_up_to(server)``: collectives of which that server has said that they are over.
        Raises :class:`PeerLostError` where the job cannot go on."""
        if self._pending:
            raise PeerLostError(
                who,
                "while the shard of a server that had died was being made anew: restart the job "
                "(psdist run --resume goes on from the last checkpoint)",
            )
        self._dead[peer] = who
        actions: list[RebuildAction] = []
        for server in [server for server, host in self._host_of.items() if host == peer]:
            host = self._host_of[server] = self._next_host()
            self._pending[server] = peer
            self._num_made[server] += 1
            rebuild = Rebuild(
                server=server,
                number=self._num_made[server],
                resumed_up_to=resumed_up_to(server),
                positions=self._positions.get(server, []),
            )
            actions.append(SendControl(server_id(host), rebuild))
            tell = TellHeld(server=server, host=host)
            actions += (SendControl(worker, tell) for worker in self._workers)
        return actions

    def _next_host(self) -> int:
        """Who lives and has the fewest shards."""
        load = Counter(self._host_of.values())
        return min((each for each in self._host_of if each not in self._dead), key=load.__getitem__)

    def on_rebuilt(self, peer: int, message: Rebuilt) -> list[RebuildAction]:
        server = message.server
        if server not in self._pending or peer != server_id(self._host_of[server]):
            _refuse(peer, f"has made the shard of server {server} anew")
        dead, host = self._pending.pop(server), self._host_of[server]
        moved = Moved(server=server, host=host)
        told = (SendControl(each, moved) for each in (*self.alive, *self._workers))
        people = ServerRebuilt(
            server=server,
            process=dead,
            who=self._dead[dead],
            host=host,
            num_lost=message.num_lost,
            checkpoint=message.checkpoint,
        )
        return [Move(server, host), *told, people]


def _refuse(peer: int, what: str) -> NoReturn:
    raise ProtocolError(f"the registrar: {describe_peer(peer)} says that it {what}")
