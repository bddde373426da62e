"""Which pushes and pulls leave when, and which replies are taken; pure.

``begin_push`` starts an iteration's pushes of this worker's slice, ``begin_pull`` and
``begin_copy`` ask for chunks; all return actions, and the events return more until ``is_idle``.

At most ``credits`` messages are outstanding at one server, in ascending order of chunks (a server's
freedom from deadlock rests on that, see the server's receive_pool), and each worker
starts at another server. The reply to a push is the pull. A credit comes back with the reply; a
push to a server to which there is more to push than credits asks for a receipt, and its credit
comes back with that, where it comes first. ``begin_load`` sends the chief's values of every chunk
of the model, which become the servers'; all that comes back are receipts.

    transfers = Transfers(seat, owners=owners, mine=range(8), chunk_bytes=sizes, credits=4)
    for action in transfers.begin_push(clock=0, settings=1, weight=1.0, empty=()): ...
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.events import Arrived, Offered
from psdist.protocol.header import CodecCode, Flag, Header, Kind
from psdist.protocol.ids import describe_peer, server_id, worker_id
from psdist.protocol.payloads import PayloadRule
from psdist.workers.protocol.actions import (
    AcceptCopy,
    AcceptReply,
    Action,
    DecodeCopy,
    DecodeReply,
    DiscardReply,
    SendPull,
    SendPush,
    SendValues,
)
from psdist.workers.protocol.seat import Seat

_PUSH = int(Kind.PUSH)
_PULL = int(Kind.PULL)
_REPLY = int(Kind.REPLY)
_RECEIPT = int(Kind.RECEIPT)


@dataclass(slots=True)
class Version:
    """What a chunk in the worker's memory contains. A copy that is made aside changes nothing."""

    position: int
    min_done: int
    clock: int
    is_checksummed: bool
    number: int
    """``chunk_version`` of the values that lie there; 0: they are none of the server's."""


class Transfers:
    def __init__(
        self,
        seat: Seat,
        *,
        owners: Sequence[int],
        mine: Collection[int],
        chunk_bytes: Sequence[int],
        credits: int,
        replies: PayloadRule,
        set_index: int = 0,
    ) -> None:
        """``owners``: chunk -> server; ``mine``: the chunks of this worker's slice;
        ``chunk_bytes``: each chunk's gradient or parameters, as they lie in memory; ``replies``:
        which payloads bring parameters."""
        self._num_chunks = len(owners)
        if len(chunk_bytes) != self._num_chunks:
            raise InvariantError(
                f"worker {seat.worker}: {self._num_chunks} owners and {len(chunk_bytes)} sizes of "
                "chunks do not fit together"
            )
        self._seat = seat
        self._set_index = set_index
        self.owners = owners
        self.mine = sorted(mine)
        self._own = frozenset(mine)
        self.servers = sorted({owners[chunk] for chunk in mine})
        """The servers of this worker's slice."""
        self._push_order = self._rotated(self.servers)
        self.chunk_bytes = chunk_bytes
        self._credits = credits
        self._replies = replies
        self.dtypes = replies.dtypes
        """Each chunk's, of gradients and parameters alike."""
        self._is_decoding = replies.codec != CodecCode.RAW
        self._queues: defaultdict[int, deque[Header]] = defaultdict(deque)
        self._outstanding: defaultdict[int, int] = defaultdict(int)
        """By server: messages whose credit has not come back."""
        in_slice = Counter(owners[chunk] for chunk in self.mine)
        self._asks_receipts = {server for server, n in in_slice.items() if n > credits}
        self._received: set[int] = set()
        """Chunks whose push was received, by a receipt, and whose reply is awaited."""
        self.awaited: dict[int, tuple[int, int]] = {}
        """Chunk, ascending -> clock of the reply that is awaited and the number of the pull that it
        answers (0: a push). Replies of one clock differ by what came between them, and any may come
        a second time. Where values are set, the receipt that is awaited."""
        self._num_pulls = 0
        """Pulls, and times that values were set: one count."""
        self._newest_load = 0
        """Its number when values were set last."""
        self._is_loading = False
        """Whether what is under way sets values."""
        self._is_copying: bool
        """Whether what is under way goes into memory aside."""
        self._incoming: set[int] = set()
        """Chunks whose awaited reply is on its way into memory. Nothing else ever lands there: what
        a server calls unchanged must be what it has sent last."""
        self.clock = 0
        """Iterations whose push has begun."""
        self.versions: dict[int, Version] = {}
        """By chunk, once a reply has brought it."""
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.duplicates = 0

    def require_next(self, clock: int) -> None:
        """:class:`InvariantError` unless iteration ``clock`` may be pushed now."""
        if clock != self.clock or self.awaited:
            raise InvariantError(
                f"worker {self._seat.worker} pushes iteration {clock} after {self.clock} "
                f"iterations, {len(self.awaited)} replies outstanding"
            )

    # -- commands ------------------------------------------------------------------------------

    def begin_push(
        self, *, clock: int, settings: int, weight: float, empty: Collection[int]
    ) -> list[Action]:
        """Push iteration ``clock`` of every chunk of the slice; chunks in ``empty`` have no
        gradient: their message only advances the clock."""
        sender, group = worker_id(self._seat.worker), self._seat.group
        sizes, dtypes, set_index = self.chunk_bytes, self.dtypes, self._set_index
        owners, asks = self.owners, self._asks_receipts
        headers = (
            Header(
                kind=Kind.PUSH,
                sender=sender,
                group=group,
                chunk=chunk,
                clock=clock,
                settings=settings,
                weight=weight,
                length=0 if chunk in empty else sizes[chunk],
                dtype=dtypes[chunk],
                flags=Flag.RECEIPT if owners[chunk] in asks else Flag.NONE,
                set_index=set_index,
                chunk_version=self._held(chunk),
            )
            for chunk in self.mine
        )
        actions = self._begin(headers, self._push_order)
        self.clock += 1
        return actions

    def begin_pull(self, *, clock: int, chunks: Collection[int], is_fresh: bool) -> list[Action]:
        """Ask for ``chunks``, into place: the newest there is (``is_fresh``), or what the mode
        allows for iteration ``clock``."""
        return self._begin_pull(clock, chunks, Flag.FRESH if is_fresh else Flag.NONE)

    def begin_copy(self, *, clock: int, chunks: Collection[int]) -> list[Action]:
        """Ask for the newest there is of ``chunks``, into memory of its own."""
        return self._begin_pull(clock, chunks, Flag.FRESH, is_copying=True)

    def _begin_pull(
        self, clock: int, chunks: Collection[int], flags: int, *, is_copying: bool = False
    ) -> list[Action]:
        self._num_pulls += 1
        headers = (
            Header(
                kind=Kind.PULL,
                sender=worker_id(self._seat.worker),
                group=self._seat.group,
                chunk=chunk,
                clock=clock,
                pull_number=self._num_pulls,
                flags=flags,
                set_index=self._set_index,
                chunk_version=0 if is_copying else self._held(chunk),
            )
            for chunk in sorted(chunks)
        )
        servers = sorted({self.owners[chunk] for chunk in chunks})
        return self._begin(headers, self._rotated(servers), is_copying=is_copying)

    def begin_load(self, *, clock: int) -> list[Action]:
        """Set every chunk of the model on its server: to the values in this worker's memory."""
        self._num_pulls += 1
        headers = (
            Header(
                kind=Kind.INIT,
                sender=worker_id(self._seat.worker),
                group=self._seat.group,
                chunk=chunk,
                clock=clock,
                pull_number=self._num_pulls,
                length=self.chunk_bytes[chunk],
                dtype=self.dtypes[chunk],
                set_index=self._set_index,
            )
            for chunk in range(self._num_chunks)
        )
        self._newest_load = self._num_pulls
        return self._begin(headers, self._rotated(sorted(set(self.owners))), is_loading=True)

    def _held(self, chunk: int) -> int:
        """``chunk_version`` of what lies in place, 0 for nothing that a server could rely on."""
        version = self.versions.get(chunk)
        return version.number if version is not None else 0

    def forget_values(self, chunks: Iterable[int]) -> None:
        """Others have written to the memory of these chunks: the next replies must bring them."""
        for chunk in chunks:
            if chunk in self.versions:
                self.versions[chunk].number = 0

    def _rotated(self, servers: list[int]) -> list[int]:
        """In the order in which this worker sends: each worker starts at another server."""
        order = deque(servers)
        order.rotate(-self._seat.worker)
        return list(order)

    def _begin(
        self,
        headers: Iterable[Header],
        servers: list[int],
        *,
        is_copying: bool = False,
        is_loading: bool = False,
    ) -> list[Action]:
        if self.awaited:
            raise InvariantError(
                f"worker {self._seat.worker}: a push or pull began before the last one was over"
            )
        self._is_copying, self._is_loading = is_copying, is_loading
        for header in headers:
            queue = self._queues[self.owners[header.chunk]]
            if queue and header.chunk <= queue[-1].chunk:
                raise InvariantError(
                    f"worker {self._seat.worker}: chunk {header.chunk} behind chunk "
                    f"{queue[-1].chunk} for one server; all workers send them ascending"
                )
            queue.append(header)
            self.awaited[header.chunk] = header.clock, header.pull_number
        return [action for server in servers for action in self._send_next(server)]

    def _send_next(self, server: int) -> list[Action]:
        queue = self._queues[server]
        actions: list[Action] = []
        outstanding = self._outstanding[server]
        while queue and outstanding < self._credits:
            header = queue.popleft()
            outstanding += 1
            if header.kind == _PUSH:
                actions.append(SendPush(server_id(server), header))
            elif header.kind == _PULL:
                actions.append(SendPull(server_id(server), header))
            else:
                actions.append(SendValues(server_id(server), header))
        self._outstanding[server] = outstanding
        return actions

    # -- events --------------------------------------------------------------------------------

    def on_offered(self, event: Offered) -> list[Action]:
        chunk = event.chunk
        is_awaited = self.awaited.get(chunk) == (event.clock, event.pull_number)
        if is_awaited:
            self._check_owed(event.peer, event)
        else:
            self._check_late(event.peer, event)
        if not is_awaited or chunk in self._incoming:
            self.duplicates += 1
            return [DiscardReply(event.ticket, event.num_bytes)]
        self._incoming.add(chunk)
        accept = AcceptCopy if self._is_copying else AcceptReply
        return [accept(event.ticket, chunk)]

    def on_arrived(self, event: Arrived) -> list[Action]:
        peer, header = event.peer, event.header
        if header.kind == _RECEIPT:
            return self._on_receipt(peer, header)
        chunk = header.chunk
        if self.awaited.get(chunk) != (header.clock, header.pull_number):
            self._check_late(peer, header)
            self.duplicates += 1
            return []
        self._check_owed(peer, header)
        if header.flags & Flag.UNCHANGED:
            self._check_unchanged(peer, header)
        elif not self._replies.takes(header):
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} {self._replies.refusal(header)}"
            )
        self._incoming.discard(chunk)
        del self.awaited[chunk]
        server = self.owners[chunk]
        if chunk in self._received:
            self._received.remove(chunk)
        else:
            self._outstanding[server] -= 1
        self.bytes_pulled += header.length
        if not self._is_copying:
            self.versions[chunk] = Version(
                position=header.position,
                min_done=header.min_done,
                clock=header.clock,
                is_checksummed=bool(header.flags & Flag.RECORDED),
                # What a codec has made of them are not the server's values.
                number=0 if self._is_decoding else header.chunk_version,
            )
        if not self._is_decoding:  # who decodes holds no version: none comes without payload
            return self._send_next(server)
        decode = DecodeCopy(chunk) if self._is_copying else DecodeReply(chunk)
        return [decode, *self._send_next(server)]

    def _on_receipt(self, peer: int, header: Header) -> list[Action]:
        chunk, clock, load = header.chunk, header.clock, header.pull_number
        if chunk < self._num_chunks and peer == server_id(server := self.owners[chunk]):
            queue = self._queues[server]
            is_sent = not queue or chunk < queue[0].chunk
            if load:
                if self.awaited.get(chunk) != (clock, load) and load <= self._newest_load:
                    self.duplicates += 1
                    return []
                if self._is_loading and is_sent and self.awaited.get(chunk) == (clock, load):
                    del self.awaited[chunk]
                    self._outstanding[server] -= 1
                    return self._send_next(server)
            elif server in self._asks_receipts and chunk in self._own and 0 <= clock < self.clock:
                if self.awaited.get(chunk) != (clock, 0) or chunk in self._received:
                    self.duplicates += 1
                    return []
                if is_sent:
                    self._received.add(chunk)
                    self._outstanding[server] -= 1
                    return self._send_next(server)
        raise ProtocolError(
            f"worker {self._seat.worker}: {describe_peer(peer)} sent a receipt of iteration "
            f"{clock} of chunk {chunk}{f', number {load}' if load else ''}, which this worker has "
            "not sent it, or not asked one for"
        )

    def _check_owed(self, peer: int, said: Offered | Header) -> None:
        """A reply of this clock and number is awaited: it must come from the chunk's server."""
        server = self.owners[said.chunk]
        if peer != server_id(server) or said.kind != _REPLY or self._is_loading:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent a message of kind "
                f"{said.kind} about chunk {said.chunk}; server {server} owes a "
                f"{'receipt' if self._is_loading else 'reply'}"
            )

    def _check_unchanged(self, peer: int, header: Header) -> None:
        """What a server calls unchanged must lie in place, and is not sent."""
        chunk = header.chunk
        held = 0 if self._is_copying else self._held(chunk)
        if not held or held != header.chunk_version or header.length or chunk in self._incoming:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent {header.length} bytes of "
                f"chunk {chunk}, which it says is unchanged since version "
                f"{header.chunk_version}; this worker holds "
                f"{f'version {held}' if held else 'none that it has asked about'}"
            )

    def _check_late(self, peer: int, said: Offered | Header) -> None:
        """A reply that nobody waits for must be one that was waited for: :class:`ProtocolError`."""
        chunk, pull = said.chunk, said.pull_number
        if said.kind != _REPLY or chunk >= self._num_chunks:
            problem = f"a message of kind {said.kind} about chunk {chunk}, which no worker takes"
        elif peer != server_id(self.owners[chunk]):
            problem = f"a reply about chunk {chunk} of server {self.owners[chunk]}"
        elif pull > self._num_pulls:
            problem = f"a reply to pull {pull}; this worker has made {self._num_pulls}"
        elif not pull and said.clock >= self.clock:
            problem = (
                f"a reply to iteration {said.clock} of chunk {chunk}; this worker has pushed "
                f"{self.clock} iterations"
            )
        else:
            return
        raise ProtocolError(f"worker {self._seat.worker}: {describe_peer(peer)} sent {problem}")

    # -- for people and tests ------------------------------------------------------------------

    def missing(self) -> list[tuple[int, int]]:
        """(chunk, server) of the replies or receipts that are awaited, ascending."""
        return [(chunk, self.owners[chunk]) for chunk in self.awaited]

    def describe(self) -> str:
        """What the replies that are missing, one at least, are replies to."""
        clock, pull = next(iter(self.awaited.values()))
        if self._is_loading:
            return "servers to set the values of job.push"
        return "parameters" if pull else f"the replies to iteration {clock}"

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. Linear in the chunks."""
        num_awaited = Counter(self.owners[chunk] for chunk in self.awaited)
        for chunk, (clock, pull) in self.awaited.items():
            is_known = (pull == self._num_pulls) if pull else (clock == self.clock - 1)
            if not is_known or (not pull and chunk not in self.mine):
                raise InvariantError(
                    f"chunk {chunk} waits for clock {clock} or pull {pull}, which is not under way"
                )
        for server, queue in self._queues.items():
            outstanding = self._outstanding[server]
            if outstanding > self._credits:
                raise InvariantError(
                    f"{outstanding} messages outstanding at server {server}, {self._credits} "
                    "credits"
                )
            received = sum(self.owners[chunk] == server for chunk in self._received)
            if outstanding + received + len(queue) != num_awaited[server]:
                raise InvariantError(
                    f"server {server} owes {num_awaited[server]} replies; {outstanding} messages "
                    f"were sent, {received} received and {len(queue)} wait"
                )
            if queue and outstanding < self._credits:
                raise InvariantError(f"credits of server {server} are unused while chunks wait")
            chunks = [header.chunk for header in queue]
            if chunks != sorted(set(chunks)) or not self.awaited.keys() >= set(chunks):
                raise InvariantError(f"chunks {chunks} wait for server {server}, not in order")
