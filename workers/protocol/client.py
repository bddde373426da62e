"""The worker's side of push and pull as a state machine: what it decides, without doing any of it.

``begin_push`` starts an iteration's pushes of this worker's slice, ``begin_pull`` asks for chunks;
both return actions, and ``handle(event)`` returns more until ``is_idle``. Time, memory and the
network never appear here.

At most ``credits`` pushes are outstanding at one server, in ascending order of chunks (a server's
freedom from deadlock rests on that, see psdist.servers.protocol.receive_pool), and each worker
starts at another server. The reply to a push is the pull.

    client = ClientCore(worker=0, group=0, owners=owners, mine=range(8), credits=4)
    for action in client.begin_push(clock=0, settings=1, weight=1.0, empty=()): ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.events import Arrived, Offered
from psdist.protocol.header import NEVER, Flag, Header, Kind
from psdist.protocol.ids import describe_peer, server_id, worker_id


@dataclass(slots=True)
class SendPush:
    """Send this header with the chunk's gradient behind it (``with_payload``), or alone."""

    server: int
    header: Header
    with_payload: bool


@dataclass(slots=True)
class SendPull:
    server: int
    header: Header


@dataclass(slots=True)
class AcceptReply:
    """Receive the offered parameters of ``chunk`` into place."""

    ticket: Any
    chunk: int


@dataclass(slots=True)
class DiscardReply:
    """Receive an offered message that nobody waits for, and forget it."""

    ticket: Any
    num_bytes: int


ClientAction = SendPush | SendPull | AcceptReply | DiscardReply


@dataclass(slots=True)
class Version:
    """What a chunk in the worker's memory contains."""

    position: int = 0
    min_done: int = 0
    clock: int = -1
    is_checksummed: bool = False


class ClientCore:
    def __init__(
        self,
        *,
        worker: int,
        group: int,
        owners: Sequence[int],
        mine: Collection[int],
        chunk_bytes: Sequence[int],
        credits: int,
    ) -> None:
        """``owners``: chunk -> server; ``mine``: the chunks of this worker's slice;
        ``chunk_bytes``: payload of each chunk."""
        self._worker = worker
        self._group = group
        self._owners = owners
        self._mine = sorted(mine)
        self._chunk_bytes = chunk_bytes
        self._credits = credits
        self._queues: dict[int, deque[tuple[Header, bool]]] = {}
        self._outstanding: dict[int, int] = {}  # server -> messages without a reply yet
        self._awaited: dict[int, tuple[int, int]] = {}
        """Chunk -> clock of the reply that is awaited and the number of the pull that it answers
        (0: a push). Replies of one clock differ by what came between them, and any may come a
        second time."""
        self._num_pulls = 0
        # One transfer at a time may write a chunk's memory: a duplicate could otherwise land on
        # top of the reply that came first.
        self._incoming: dict[int, deque[Offered]] = {}
        self.versions = [Version() for _ in owners]
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.duplicates = 0

    @property
    def is_idle(self) -> bool:
        """Everything is answered, so the gradient memory is the worker's again: a reply proves
        that its push has arrived, whether or not the network has said ``Sent`` yet."""
        return not self._awaited

    def begin_push(
        self, *, clock: int, settings: int, weight: float, empty: Collection[int]
    ) -> list[ClientAction]:
        """Push iteration ``clock`` of every chunk of the slice; chunks in ``empty`` have no
        gradient: their message only advances the clock."""
        headers = [
            (
                Header(
                    kind=Kind.PUSH,
                    sender=worker_id(self._worker),
                    group=self._group,
                    chunk=chunk,
                    clock=clock,
                    settings=settings,
                    weight=weight,
                    length=0 if chunk in empty else self._chunk_bytes[chunk],
                ),
                chunk not in empty,
            )
            for chunk in self._mine
        ]
        return self._begin(headers)

    def begin_pull(
        self, *, clock: int, chunks: Collection[int], is_fresh: bool
    ) -> list[ClientAction]:
        """Ask for ``chunks``: the newest there is (``is_fresh``), or what the mode allows for
        iteration ``clock``."""
        flags = Flag.FRESH if is_fresh else Flag.NONE
        self._num_pulls += 1
        headers = [
            (
                Header(
                    kind=Kind.PULL,
                    sender=worker_id(self._worker),
                    group=self._group,
                    chunk=chunk,
                    clock=clock,
                    pull_number=self._num_pulls,
                    flags=flags,
                ),
                False,
            )
            for chunk in sorted(chunks)
        ]
        return self._begin(headers)

    def _begin(self, headers: list[tuple[Header, bool]]) -> list[ClientAction]:
        if not self.is_idle:
            raise InvariantError("a push or pull began before the last one was over")
        for header, with_payload in headers:
            server = self._owners[header.chunk]
            self._queues.setdefault(server, deque()).append((header, with_payload))
            self._awaited[header.chunk] = header.clock, header.pull_number
        servers = sorted(self._queues)
        first = self._worker % len(servers) if servers else 0
        actions: list[ClientAction] = []
        for server in servers[first:] + servers[:first]:
            actions += self._send_next(server)
        return actions

    def _send_next(self, server: int) -> list[ClientAction]:
        queue = self._queues[server]
        actions: list[ClientAction] = []
        while queue and self._outstanding.get(server, 0) < self._credits:
            header, with_payload = queue.popleft()
            self._outstanding[server] = self._outstanding.get(server, 0) + 1
            if header.kind == Kind.PULL:
                actions.append(SendPull(server, header))
            else:
                self.bytes_pushed += header.length
                actions.append(SendPush(server, header, with_payload))
        return actions

    def handle(self, event: Offered | Arrived) -> list[ClientAction]:
        if isinstance(event, Offered):
            if event.kind != Kind.REPLY or event.chunk >= len(self._owners):
                raise ProtocolError(
                    f"worker {self._worker}: {describe_peer(event.peer)} sent a message of kind "
                    f"{event.kind} about chunk {event.chunk}, which no worker takes"
                )
            if event.chunk in self._incoming:
                self._incoming[event.chunk].append(event)
                return []
            return [self._accept(event)]
        actions = self._on_reply(event.peer, event.header)
        later = self._incoming.pop(event.header.chunk, None)
        if later:
            action = self._accept(later.popleft())
            if isinstance(action, AcceptReply):
                self._incoming[action.chunk] = later
            else:
                actions += [DiscardReply(each.ticket, each.num_bytes) for each in later]
            actions.append(action)
        return actions

    def _accept(self, offer: Offered) -> AcceptReply | DiscardReply:
        if offer.chunk in self._awaited:
            self._incoming[offer.chunk] = deque()
            return AcceptReply(offer.ticket, offer.chunk)
        self.duplicates += 1
        return DiscardReply(offer.ticket, offer.num_bytes)

    def _on_reply(self, peer: int, header: Header) -> list[ClientAction]:
        chunk = header.chunk
        if self._awaited.get(chunk) != (header.clock, header.pull_number):
            self.duplicates += 1
            return []
        server = self._owners[chunk]
        if peer != server_id(server) or header.length != self._chunk_bytes[chunk]:
            raise ProtocolError(
                f"worker {self._worker}: reply of {header.length} bytes about chunk {chunk} from "
                f"{describe_peer(peer)}; server {server} owes {self._chunk_bytes[chunk]} bytes"
            )
        del self._awaited[chunk]
        self._outstanding[server] -= 1
        self.bytes_pulled += header.length
        version = self.versions[chunk]
        version.position = header.position
        version.min_done = header.min_done
        version.clock = header.clock
        version.is_checksummed = bool(header.flags & Flag.CHECKSUMMED)
        return self._send_next(server)

    def awaited(self) -> list[tuple[int, int]]:
        """(chunk, server) of the replies that are missing; for warnings to people."""
        return [(chunk, self._owners[chunk]) for chunk in sorted(self._awaited)]

    def staleness(self, chunk: int, iteration: int) -> int:
        """max(0, iteration - min_done) of what is in memory (design section 5)."""
        min_done = self.versions[chunk].min_done
        return 0 if min_done == NEVER else max(0, iteration - min_done)
