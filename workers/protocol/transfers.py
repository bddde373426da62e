"""Which pushes and pulls leave when, and which replies are taken; pure.

``begin_iteration`` begins an iteration of this worker's slice. ``push_chunk`` pushes its chunks one
by one as they become ready, ``finish_push`` all that are left. ``begin_pull`` and ``begin_copy``
ask for chunks. Each returns its actions, as the events do.

At most ``credits`` messages are outstanding at one server, in the order of chunks that all groups
share (the freedom from deadlock of servers rests on this order, see their receive_pool). Messages
that leave at once start at another server on each worker. The reply to a push is the pull, and a
chunk is pushed again after its own reply. A credit returns with the reply. If a server has more
chunks of the slice than credits, pushes to it request a receipt, and the credit returns with the
receipt or the reply, whichever comes first. ``begin_load`` sends the chief's values of every chunk
of the model, which become the servers'; the answers are receipts.

    transfers = Transfers(seat, owners=owners, mine=range(8), chunk_bytes=sizes, ...)
    transfers.begin_iteration(clock=0, settings=1, weight=1.0)
    for action in transfers.push_chunk(0, is_empty=False): ...
    for action in transfers.finish_push(empty=()): ...

Longer than other modules: queues, credits and replies are one state, which is checked as a
whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NoReturn

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.events import Arrived, Offered
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import describe_peer, server_id, worker_id
from psdist.protocol.payloads import PayloadRule
from psdist.protocol.send_order import SendOrder
from psdist.workers.protocol import Seat
from psdist.workers.protocol.actions import (
    AcceptReply,
    Action,
    DiscardReply,
    SendPull,
    SendPush,
    SendValues,
)
from psdist.workers.protocol.versions import Aside, HeldVersions, held_by

_PUSH = int(Kind.PUSH)
_PULL = int(Kind.PULL)
_REPLY = int(Kind.REPLY)
_UNCHANGED = Flag.UNCHANGED


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
        order: Sequence[int] = (),
        first_clock: int = 0,
    ) -> None:
        """``owners``: chunk -> server; ``mine``: the chunks of this worker's slice;
        ``chunk_bytes``: bytes of each chunk's gradient or parameters in memory; ``replies``: the
        payloads that bring parameters; ``order``: the order of all chunks in which all groups send,
        () for ascending; ``first_clock``: the first iteration that is pushed."""
        self._num_chunks = len(owners)
        if len(chunk_bytes) != self._num_chunks:
            raise InvariantError(
                f"worker {seat.worker}: {self._num_chunks} owners and {len(chunk_bytes)} sizes of "
                "chunks do not fit together"
            )
        try:
            self.order = SendOrder(order, num_chunks=self._num_chunks)
        except ValueError as error:
            raise InvariantError(f"worker {seat.worker}: an order to send in {error}") from None
        self._seat = seat
        self._set_index = set_index
        self.owners = owners
        self._peers = [server_id(server) for server in owners]
        """By chunk: the id of its server."""
        self._me = worker_id(seat.worker)
        self.chunk_bytes = chunk_bytes
        self.credits = credits
        self._replies = replies
        self.dtypes = replies.dtypes
        """By chunk, of gradients and parameters."""
        self.held: HeldVersions = held_by(replies)
        self._copied = Aside(self.held)
        self._landing: HeldVersions = self.held
        """Where the awaited replies land: in place, or aside."""
        self.queues: defaultdict[int, deque[Header]] = defaultdict(deque)
        self.outstanding: defaultdict[int, int] = defaultdict(int)
        """By server: messages whose credit has not come back."""
        self._asks_receipts: set[int] = set()
        """Servers with more chunks of the slice than credits."""
        self.received: set[int] = set()
        """Chunks whose push was received, by a receipt, and whose reply is awaited."""
        self.awaited: dict[int, tuple[int, int]] = {}
        """Chunk -> clock of the awaited reply and the number of the pull that it answers (0: a
        push), in the order of sending. Replies of one clock differ by what came between them, and
        any may come a second time. Where values are set, the awaited receipt."""
        self.is_pushing = False
        """True while an iteration has begun and not all of its chunks were handed over."""
        self.unpushed: deque[int] = deque()
        """Its chunks that are still to come, in the send order."""
        self._settings, self._weight = 0, 0.0
        """Version of the settings, and weight, of its pushes."""
        self._num_pulls = 0
        """Count of pulls, and of times that values were set."""
        self.generation = 0
        """View number of the membership, by the newest message to this worker."""
        self._newest_load = 0
        """The number of the newest time that values were set."""
        self._is_loading = False
        """True while values are being set."""
        self.incoming: set[int] = set()
        """Chunks whose awaited reply is on its way into memory. Nothing else ever lands there: what
        a server calls unchanged must be what it has sent last."""
        self.clock = first_clock
        """Iterations whose push has begun, and rounds that were missed."""
        self._next_round = 0
        """The next round of the group if the round of its last push had closed without it; else
        0."""
        self._marks: dict[int, int] = {}
        """Chunk -> flags that its next push has in addition."""
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.duplicates = 0
        self._others: dict[int, Callable[[int, Header], list[Action]]] = {
            int(Kind.RECEIPT): self._on_receipt,
            int(Kind.MISSED): self._on_missed,
        }
        """Answers other than replies, by kind."""
        self._set_slice(mine)

    @classmethod
    def of_nothing(cls, seat: Seat) -> Transfers:
        """Return the transfers of a worker that has no slice yet."""
        rule = PayloadRule.of_nothing()
        return cls(seat, owners=(), mine=(), chunk_bytes=(), credits=1, replies=rule)

    def _set_slice(self, mine: Collection[int]) -> None:
        self.mine = sorted(mine)
        self._own = frozenset(mine)
        self._mine_in_order = self.order.sorted(self.mine)
        in_slice = Counter(self.owners[chunk] for chunk in self.mine)
        self.servers = sorted(in_slice)
        """The servers of this worker's slice."""
        self._push_order = self._rotated(self.servers)
        self._asks_receipts |= {server for server, n in in_slice.items() if n > self.credits}

    @property
    def is_idle(self) -> bool:
        """True if no iteration is half pushed and every push and pull is answered."""
        return not self.awaited and not self.is_pushing

    def is_done(self, chunk: int) -> bool:
        """Return True if nothing is awaited about ``chunk``: its gradient memory is the worker's
        again, and its parameters are those of the newest reply."""
        return chunk not in self.awaited

    def count_coded(self, num_bytes: int) -> None:
        """A codec has made the payload of a push longer by this many bytes (shorter: negative)."""
        self.bytes_pushed += num_bytes

    @property
    def versions(self) -> Mapping[int, Header]:
        """Chunk -> the reply whose values lie in this worker's memory, once one has come."""
        return self.held.replies

    def take_over(self, mine: Collection[int]) -> None:
        """The slice is ``mine`` from now on: the slice before, and chunks of failed workers of the
        group. These may have pushed the next iteration of them, so the first push of such a chunk
        is marked as sent again."""
        for chunk in set(mine) - self._own:
            self._marks[chunk] = Flag.RETRANSMIT
        self._set_slice(mine)

    def push_for_the_dead(self) -> list[Action]:
        """Push the last iteration of the chunks that were taken over, without a gradient, in case
        the failed workers have not pushed it. These pushes need no slot, so they need no credit.
        :attr:`awaited` has the replies."""
        if self.is_pushing or self._is_bringing:
            raise InvariantError(f"worker {self._seat.worker} pushes for failed workers meanwhile")
        actions: list[Action] = []
        self._landing = self.held
        new, self._marks = self._marks, {}
        for chunk in self.order.sorted(new):
            header = self._push_header(chunk, self.clock - 1, is_empty=True)
            header = header._replace(weight=0.0, flags=Flag.RETRANSMIT)
            self.received.add(chunk)
            self.awaited[chunk] = header.clock, 0
            actions.append(SendPush(self._peers[chunk], header))
        return actions

    def send_again(self, server: int) -> list[Action]:
        """Return the messages that ``server`` has not answered, for another process; this class
        keeps none."""
        del server
        return []

    def require_next(self, clock: int) -> None:
        """:class:`InvariantError` unless iteration ``clock`` may begin now. Replies to the one
        before may be outstanding: what waits for them is each chunk."""
        if clock != self.clock or self.is_pushing or self._is_bringing:
            raise InvariantError(
                f"worker {self._seat.worker} pushes iteration {clock} after {self.clock} "
                f"iterations, {len(self.unpushed)} chunks of the last one still to be pushed, "
                f"{len(self.awaited)} replies outstanding"
            )

    def require_handed_over(self, chunk: int | None = None) -> None:
        """:class:`InvariantError` where a wait for the replies (about ``chunk``) would not end: a
        step may be held until every chunk of the iteration was pushed, so no wait for a reply may
        begin before that."""
        if self.is_pushing and (
            chunk is None or (chunk in self.awaited and not self._is_unpushed(chunk))
        ):
            about = "replies" if chunk is None else f"the reply about chunk {chunk}"
            raise InvariantError(
                f"worker {self._seat.worker} waits for {about} in the middle of iteration "
                f"{self.clock - 1}, {len(self.unpushed)} chunks of it still to be pushed"
            )

    # -- commands ------------------------------------------------------------------------------

    def begin_iteration(self, *, clock: int, settings: int, weight: float) -> None:
        """Iteration ``clock`` of the slice is pushed from now on: in the order that all groups
        share, each chunk once its reply to the iteration before has come."""
        self.require_next(clock)
        self.is_pushing, self._is_loading, self._landing = True, False, self.held
        self.unpushed.extend(self._mine_in_order)
        self._settings, self._weight = settings, weight
        self.clock += 1

    def use_settings(self, version: int) -> None:
        """The chunks that are left were made under this version of the settings."""
        self._settings = version

    @property
    def has_unpushed(self) -> bool:
        """Whether chunks of the iteration are still to be pushed."""
        return bool(self.unpushed)

    def push_chunk(self, chunk: int, *, is_empty: bool) -> list[Action]:
        """Push the next chunk of the iteration; its gradient is complete, or (``is_empty``) there
        is none: the message only advances the clock."""
        if not self.unpushed or self.unpushed[0] != chunk:
            raise InvariantError(
                f"worker {self._seat.worker} pushes chunk {chunk} of iteration {self.clock - 1}; "
                f"to be pushed, in the order that all groups share, are {list(self.unpushed)}"
            )
        self._push_next(is_empty)
        return self._send_next(self.owners[chunk])

    def finish_push(self, *, empty: Collection[int]) -> list[Action]:
        """Push all chunks of the iteration that are left, those in ``empty`` without gradient."""
        if not self.is_pushing:
            raise InvariantError(f"worker {self._seat.worker} finishes a push that has not begun")
        while self.unpushed:
            self._push_next(self.unpushed[0] in empty)
        self.is_pushing = False
        return [action for server in self._push_order for action in self._send_next(server)]

    def _push_next(self, is_empty: bool) -> None:
        chunk, clock = self.unpushed[0], self.clock - 1
        if chunk in self.awaited:
            raise InvariantError(
                f"worker {self._seat.worker} pushes chunk {chunk} of iteration {clock} before the "
                f"reply to iteration {self.awaited[chunk][0]} has come"
            )
        self.unpushed.popleft()
        self._enqueue(self._push_header(chunk, clock, is_empty=is_empty))

    def _push_header(self, chunk: int, clock: int, *, is_empty: bool) -> Header:
        flags = Flag.RECEIPT if self.owners[chunk] in self._asks_receipts else Flag.NONE
        if self._marks:
            flags |= self._marks.pop(chunk, Flag.NONE)
        return Header(
            kind=_PUSH,
            sender=self._me,
            group=self._seat.group,
            chunk=chunk,
            clock=clock,
            settings=self._settings,
            weight=self._weight,
            length=0 if is_empty else self.chunk_bytes[chunk],
            dtype=self.dtypes[chunk],
            flags=flags,
            generation=self.generation,
            set_index=self._set_index,
            chunk_version=self.held.number(chunk),
        )

    def begin_pull(self, *, clock: int, chunks: Collection[int], is_fresh: bool) -> list[Action]:
        """Ask for ``chunks``, into place: the newest there is (``is_fresh``), or what the mode
        allows for iteration ``clock``."""
        return self._begin_pull(clock, chunks, Flag.FRESH if is_fresh else Flag.NONE, self.held)

    def begin_copy(self, *, clock: int, chunks: Collection[int]) -> list[Action]:
        """Ask for the newest there is of ``chunks``, into memory of its own."""
        return self._begin_pull(clock, chunks, Flag.FRESH, self._copied)

    def _begin_pull(
        self, clock: int, chunks: Collection[int], flags: int, landing: HeldVersions
    ) -> list[Action]:
        self._num_pulls += 1
        headers = (
            Header(
                kind=_PULL,
                sender=self._me,
                group=self._seat.group,
                chunk=chunk,
                clock=clock,
                pull_number=self._num_pulls,
                flags=flags,
                generation=self.generation,
                set_index=self._set_index,
                chunk_version=landing.number(chunk),
            )
            for chunk in self.order.sorted(chunks)
        )
        servers = sorted({self.owners[chunk] for chunk in chunks})
        return self._begin(headers, self._rotated(servers), landing)

    def begin_load(self, *, clock: int) -> list[Action]:
        """Set every chunk of the model on its server: to the values in this worker's memory."""
        self._num_pulls += 1
        headers = (
            Header(
                kind=Kind.INIT,
                sender=self._me,
                group=self._seat.group,
                chunk=chunk,
                clock=clock,
                pull_number=self._num_pulls,
                length=self.chunk_bytes[chunk],
                dtype=self.dtypes[chunk],
                generation=self.generation,
                set_index=self._set_index,
            )
            for chunk in self.order.chunks
        )
        self._newest_load = self._num_pulls
        return self._begin(
            headers, self._rotated(sorted(set(self.owners))), self.held, is_loading=True
        )

    def _rotated(self, servers: list[int]) -> list[int]:
        """In the order in which this worker sends: each worker starts at another server."""
        order = deque(servers)
        order.rotate(-self._seat.worker)
        return list(order)

    def _begin(
        self,
        headers: Iterable[Header],
        servers: list[int],
        landing: HeldVersions,
        *,
        is_loading: bool = False,
    ) -> list[Action]:
        if self.awaited or self.is_pushing:
            raise InvariantError(
                f"worker {self._seat.worker}: a pull, or values to be set, began before the last "
                "push or pull was over"
            )
        self._landing, self._is_loading = landing, is_loading
        for header in headers:
            self._enqueue(header)
        return [action for server in servers for action in self._send_next(server)]

    @property
    def _is_bringing(self) -> bool:
        """Whether what is under way is no push."""
        return bool(self.awaited) and any(number for _, number in self.awaited.values())

    def _enqueue(self, header: Header) -> None:
        queue = self.queues[self.owners[header.chunk]]
        if queue and self._turn(header) <= self._turn(queue[-1]):
            raise InvariantError(
                f"worker {self._seat.worker}: chunk {header.chunk} behind chunk {queue[-1].chunk} "
                "for one server; all workers send them in one order"
            )
        queue.append(header)
        self.awaited[header.chunk] = header.clock, header.pull_number

    def _turn(self, header: Header) -> tuple[int, int]:
        """Messages to one server leave in this order."""
        return header.clock, self.order.rank[header.chunk]

    def _is_unpushed(self, chunk: int) -> bool:
        """Whether the iteration that is being pushed has still to reach this chunk."""
        rank = self.order.rank
        return bool(self.unpushed) and rank[chunk] >= rank[self.unpushed[0]]

    def _num_pushed(self, chunk: int) -> int:
        """Iterations of this chunk of the slice."""
        return self.clock - self._is_unpushed(chunk)

    def _send_next(self, server: int) -> list[Action]:
        actions: list[Action] = []
        queue = self.queues[server]
        if not queue:
            return actions
        peer, outstanding = server_id(server), self.outstanding[server]
        while queue and outstanding < self.credits:
            header = queue.popleft()
            outstanding += 1
            if header.kind == _PUSH:
                self.bytes_pushed += header.length
                actions.append(SendPush(peer, header))
            elif header.kind == _PULL:
                actions.append(SendPull(peer, header))
            else:
                actions.append(SendValues(peer, header))
        self.outstanding[server] = outstanding
        return actions

    # -- events --------------------------------------------------------------------------------

    def on_offered(self, event: Offered) -> list[Action]:
        chunk = event.chunk
        is_awaited = self.awaited.get(chunk) == (event.clock, event.pull_number)
        if not is_awaited:
            self._check_late(event.peer, event)
        elif event.peer != self._peers[chunk] or event.kind != _REPLY or self._is_loading:
            self._refuse_owed(event.peer, event)
        if not is_awaited or chunk in self.incoming:
            self.duplicates += 1
            return [DiscardReply(event.ticket, event.num_bytes)]
        self.incoming.add(chunk)
        return [AcceptReply(event.ticket, chunk)]

    def on_arrived(self, event: Arrived) -> list[Action]:
        peer, header = event.peer, event.header
        if (kind := header.kind) != _REPLY and kind in self._others:
            return self._others[kind](peer, header)
        chunk = header.chunk
        if self.awaited.get(chunk) != (header.clock, header.pull_number):
            self._check_late(peer, header)
            self.duplicates += 1
            return []
        if peer != self._peers[chunk] or kind != _REPLY or self._is_loading:
            self._refuse_owed(peer, header)
        if header.flags & _UNCHANGED:
            self._check_unchanged(peer, header)
        elif not self._replies.takes(header):
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} {self._replies.refusal(header)}"
            )
        self.incoming.discard(chunk)
        self.bytes_pulled += header.length
        return self._landing.landed(header) + self._answered(chunk)

    def _answered(self, chunk: int) -> list[Action]:
        """The awaited answer about ``chunk`` is here: send what its credit allows."""
        del self.awaited[chunk]
        server = self.owners[chunk]
        if chunk in self.received:
            self.received.remove(chunk)
        else:
            self.outstanding[server] -= 1
        return self._send_next(server)

    def _on_missed(self, peer: int, header: Header) -> list[Action]:
        """The round of a push had closed without the group: its gradient is dropped."""
        chunk, clock, next_round = header.chunk, header.clock, header.min_done
        is_of_server = chunk in self._own and peer == self._peers[chunk]
        is_pushed = is_of_server and 0 <= clock < self._num_pushed(chunk)
        if not is_pushed or next_round <= clock or header.length:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} says that this group has "
                f"missed round {clock} of chunk {chunk}, to continue with round {next_round}; "
                "this worker has not pushed that round to it, or the next one is no later"
            )
        if self.awaited.get(chunk) != (clock, 0):
            self.duplicates += 1
            return []
        self._next_round = max(self._next_round, next_round)
        return self._answered(chunk)

    def take_joining(self) -> int:
        """Return the next round of the group, once, if it has missed the last one; else 0."""
        next_round, self._next_round = self._next_round, 0
        return next_round

    def skip_to(self, clock: int) -> None:
        """Push nothing of the rounds before ``clock``; nothing is under way."""
        if self.awaited or self.is_pushing or clock < self.clock:
            raise InvariantError(
                f"worker {self._seat.worker} continues with round {clock} after {self.clock}, "
                f"{len(self.awaited)} replies outstanding"
            )
        self.clock = clock

    def _on_receipt(self, peer: int, header: Header) -> list[Action]:
        chunk, clock, load = header.chunk, header.clock, header.pull_number
        if chunk < self._num_chunks and peer == self._peers[chunk]:
            server = self.owners[chunk]
            queue = self.queues[server]
            is_sent = not queue or self._turn(header) < self._turn(queue[0])
            if load:
                if self.awaited.get(chunk) != (clock, load) and load <= self._newest_load:
                    self.duplicates += 1
                    return []
                if self._is_loading and is_sent and self.awaited.get(chunk) == (clock, load):
                    return self._answered(chunk)
            elif (
                server in self._asks_receipts
                and chunk in self._own
                and 0 <= clock < self._num_pushed(chunk)
            ):
                if self.awaited.get(chunk) != (clock, 0) or chunk in self.received:
                    self.duplicates += 1
                    return []
                if is_sent:
                    self.received.add(chunk)
                    self.outstanding[server] -= 1
                    return self._send_next(server)
        raise ProtocolError(
            f"worker {self._seat.worker}: {describe_peer(peer)} sent a receipt of iteration "
            f"{clock} of chunk {chunk}{f', number {load}' if load else ''}, which this worker has "
            "not sent it, or not asked one for"
        )

    def _refuse_owed(self, peer: int, said: Offered | Header) -> NoReturn:
        """An answer of this clock and number is awaited, and this is another one."""
        server = self.owners[said.chunk]
        raise ProtocolError(
            f"worker {self._seat.worker}: {describe_peer(peer)} sent a message of kind "
            f"{said.kind} about chunk {said.chunk}; server {server} owes a "
            f"{'receipt' if self._is_loading else 'reply'}"
        )

    def _check_unchanged(self, peer: int, header: Header) -> None:
        """A chunk that a server calls unchanged must lie in place, and is not sent."""
        chunk = header.chunk
        held = self._landing.number(chunk)
        if not held or held != header.chunk_version or header.length or chunk in self.incoming:
            raise ProtocolError(
                f"worker {self._seat.worker}: {describe_peer(peer)} sent {header.length} bytes of "
                f"chunk {chunk}, which it calls unchanged since version "
                f"{header.chunk_version}; this worker holds "
                f"{f'version {held}' if held else 'none that it has requested'}"
            )

    def _check_late(self, peer: int, said: Offered | Header) -> None:
        """Raise :class:`ProtocolError` unless a reply that is not awaited was awaited before."""
        chunk, pull = said.chunk, said.pull_number
        if said.kind != _REPLY or chunk >= self._num_chunks:
            problem = f"a message of kind {said.kind} about chunk {chunk}, which no worker takes"
        elif peer != self._peers[chunk]:
            problem = f"a reply about chunk {chunk} of server {self.owners[chunk]}"
        elif pull > self._num_pulls:
            problem = f"a reply to pull {pull}; this worker has made {self._num_pulls}"
        elif not pull and said.clock >= self._num_pushed(chunk):
            problem = (
                f"a reply to iteration {said.clock} of chunk {chunk}; this worker has pushed "
                f"{self._num_pushed(chunk)} iterations"
            )
        else:
            return
        raise ProtocolError(f"worker {self._seat.worker}: {describe_peer(peer)} sent {problem}")

    # -- for people and tests ------------------------------------------------------------------

    def missing(self) -> list[tuple[int, int]]:
        """(chunk, server) of the replies or receipts that are awaited, as they are sent."""
        return [(chunk, self.owners[chunk]) for chunk in self.awaited]

    def describe(self) -> str:
        """Return the cause of the missing replies, or what is still to be pushed, in words."""
        if not self.awaited:
            return f"the rest of iteration {self.clock - 1} to be pushed"
        clock, pull = next(iter(self.awaited.values()))
        if self._is_loading:
            return "servers to set the values of job.set_parameters"
        return "parameters" if pull else f"the replies to iteration {clock}"

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. Linear in the chunks."""
        num_awaited = Counter(self.owners[chunk] for chunk in self.awaited)
        for chunk, (clock, pull) in self.awaited.items():
            is_known = pull == self._num_pulls if pull else clock == self._num_pushed(chunk) - 1
            if not is_known or (not pull and chunk not in self.mine):
                raise InvariantError(
                    f"chunk {chunk} waits for clock {clock} or pull {pull}, which is not under way"
                )
        for server, queue in self.queues.items():
            outstanding = self.outstanding[server]
            if outstanding > self.credits:
                raise InvariantError(
                    f"{outstanding} messages outstanding at server {server}, {self.credits} credits"
                )
            received = sum(self.owners[chunk] == server for chunk in self.received)
            if outstanding + received + len(queue) != num_awaited[server]:
                raise InvariantError(
                    f"server {server} owes {num_awaited[server]} replies; {outstanding} messages "
                    f"were sent, {received} received and {len(queue)} wait"
                )
            if queue and outstanding < self.credits:
                raise InvariantError(f"credits of server {server} are unused while chunks wait")
            turns = [(header.clock, self.order.rank[header.chunk]) for header in queue]
            chunks = [header.chunk for header in queue]
            if turns != sorted(set(turns)) or not self.awaited.keys() >= set(chunks):
                raise InvariantError(f"chunks {chunks} wait for server {server}, not in order")
        if self.unpushed and not self.is_pushing:
            raise InvariantError(f"chunks {list(self.unpushed)} were never pushed")
        if self.is_pushing and self._is_bringing:
            raise InvariantError("a pull is under way in the middle of an iteration")
