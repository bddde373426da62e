"""Pulls of rows, and pushes that come in several messages, outside the rounds of a set of tables.

    loop = plain_loop(transport, make_core, options, store, seats=[RowService()])

PULL_ROWS asks for rows whose ids a worker did not have when it pushed. The answer needs no slot and
no parameter buffer: it is a copy of the rows as they are. It waits, as the reply to a push does,
until the part contains the updates that the mode requires. That is so at once, except when groups
have come back from a collective; with FRESH any rows do. A worker has one pull of a part open.

PUSH_ROWS carries rows of a push that is too long for one message. They are kept, with a receipt for
each message, until the PUSH of the same clock takes them. So nothing of a push is applied before it
is here whole.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from psdist.errors import ProtocolError
from psdist.protocol.events import Arrived, Event, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import MOST_CREDITS, CodecCode, Dtype, Flag, Header, Kind
from psdist.protocol.ids import describe_peer
from psdist.protocol.memory import allocate
from psdist.servers.loop import Decided, ServerPart
from psdist.servers.protocol.chunks import ChunkState
from psdist.servers.set_loop import SetLoop
from psdist.servers.set_store import BuiltSet
from psdist.servers.tables.shard import TableShard
from psdist.tables.payloads import largest_push, read_ids, read_push
from psdist.tables.specs import Ids


class RowFrame(Frame):
    """A message of rows that this part receives or sends."""


class _Key(NamedTuple):
    peer: int
    kind: int
    set_index: int
    chunk: int


class RowService(ServerPart):
    TAKES = (Kind.PULL_ROWS, Kind.PUSH_ROWS, RowFrame)

    def __init__(self) -> None:
        self._coming: set[_Key] = set()
        """Messages that are being received."""
        self._waiting: dict[_Key, tuple[Header, list[Ids]]] = {}
        """Pulls that the mode does not allow yet."""
        self._before_built: dict[int, list[Offered]] = {}
        """By set that the chief has not described yet."""
        self._num_sent = 0
        """Frames that the network has."""

    def handle(self, event: Event) -> Decided:
        if isinstance(event, Sent):
            self._num_sent -= 1
        elif isinstance(event, Offered):
            self._on_offered(event)
        elif isinstance(event, Arrived):
            self._on_arrived(event)
        return ()

    def on_built(self, built: BuiltSet) -> None:
        each = self.loop.sets[built.set_index]
        if isinstance(each.executor, TableShard):
            each.executor.group_of = each.core.group_of
        for event in self._before_built.pop(built.set_index, ()):
            self._on_offered(event)

    # -- receiving -----------------------------------------------------------------------------

    def _on_offered(self, event: Offered) -> None:
        sets, peer, index = self.loop.sets, event.peer, event.set_index
        if index >= len(sets) or sets[index].core.group_of(peer) is None:
            self._refuse(peer, f"sent rows of tables of set {index}, which it does not train")
        each = sets[index]
        if peer in each.core.rule.replies.dead:
            return
        if each.executor is None:
            held = self._before_built.setdefault(index, [])
            held.append(event)
            if len(held) > MOST_CREDITS:
                self._refuse(peer, f"sent rows, {len(held)} messages before there were tables")
            return
        shard = self._shard(each, peer, event.chunk)
        most = largest_push(shard.specs)
        if event.num_bytes > most:
            self._refuse(peer, f"offers {event.num_bytes} bytes of rows; {most} are most")
        key = _Key(peer, event.kind, index, event.chunk)
        if key in self._coming or key in self._waiting:
            self._refuse(peer, f"sent rows of part {event.chunk} before its last were answered")
        self._coming.add(key)
        self.loop.transport.accept(event.ticket, RowFrame(allocate(event.num_bytes)))

    def _on_arrived(self, event: Arrived) -> None:
        peer, header, frame = event.peer, event.header, event.frame
        key = _Key(peer, header.kind, header.set_index, header.chunk)
        if frame is None or frame.payload is None or key not in self._coming:
            self._refuse(peer, f"sent a message of kind {header.kind} without rows")
        self._coming.remove(key)
        if (header.dtype, header.codec) != (Dtype.FLOAT32, CodecCode.ROWS):
            self._refuse(peer, f"sent rows by codec {header.codec}, dtype {header.dtype}")
        each = self.loop.sets[header.set_index]
        core, shard = each.core, self._shard(each, peer, header.chunk)
        if peer in core.rule.replies.dead:
            return
        chunk, group = core.chunk_states[header.chunk], core.group_of(peer)
        assert group is not None
        furthest = core.rule.furthest_pull(chunk, group)
        if not 0 <= header.clock <= furthest or header.generation > core.generation:
            self._refuse(
                peer,
                f"sent rows of part {header.chunk} at iteration {header.clock}, view "
                f"{header.generation}; iteration {furthest} and view {core.generation} are most",
            )
        payload = frame.payload[: frame.num_received]
        try:
            if header.kind == Kind.PUSH_ROWS:
                push = read_push(shard.specs, payload, part=header.chunk)
            else:
                ids = read_ids(shard.specs, payload, part=header.chunk)
        except ProtocolError as error:
            self._refuse(peer, f"sent {error}")
        if header.kind == Kind.PUSH_ROWS:
            if header.group != group:
                self._refuse(peer, f"pushed rows for group {header.group}, which is not its own")
            if header.clock > chunk.newest_round_of(group):  # else the whole push came before
                number = header.map_version
                if problem := shard.take_early(header.chunk, group, header.clock, number, push):
                    self._refuse(peer, f"pushed rows of part {header.chunk}: {problem}")
            receipt = self._header(each, header, Kind.RECEIPT, chunk)
            self._send(peer, RowFrame(), receipt._replace(map_version=header.map_version))
            return
        self._waiting[key] = header, ids
        self._answer(key)

    def _shard(self, each: SetLoop, peer: int, part: int) -> TableShard:
        shard = each.executor
        if not isinstance(shard, TableShard) or part not in shard.parts:
            self._refuse(
                peer,
                f"sent rows of part {part} of set {each.set_index}, which this server does not "
                "hold; run the same script and psdist version on all ranks",
            )
        return shard

    def _refuse(self, peer: int, why: str) -> NoReturn:
        raise ProtocolError(f"{describe_peer(self.loop.transport.me)}: {describe_peer(peer)} {why}")

    # -- answering -----------------------------------------------------------------------------

    def go_on(self) -> bool:
        """Answer the pulls that are allowed by now."""
        for key in tuple(self._waiting):
            self._answer(key)
        return False

    def _answer(self, key: _Key) -> None:
        each, (header, ids) = self.loop.sets[key.set_index], self._waiting[key]
        chunk = each.core.chunk_states[key.chunk]
        chunk.clock.catch_up()
        replies = each.core.rule.replies
        if not header.flags & Flag.FRESH:
            if chunk.clock.min_done < replies.required_min_done(header.clock):
                return
            replies.highest_sent = max(replies.highest_sent, header.clock)
        del self._waiting[key]
        payload = self._shard(each, key.peer, key.chunk).rows_of(key.chunk, ids)
        answer = self._header(each, header, Kind.REPLY, chunk)
        flags = Flag.FOR_PULL | header.flags & Flag.FRESH
        answer = answer._replace(flags=flags, length=len(payload), codec=header.codec)
        self._send(key.peer, RowFrame(payload), answer._replace(dtype=header.dtype))

    def _header(self, each: SetLoop, asked: Header, kind: Kind, chunk: ChunkState) -> Header:
        return Header(
            kind=kind,
            sender=self.loop.transport.me,
            chunk=chunk.index,
            clock=asked.clock,
            pull_number=asked.pull_number,
            position=each.log.position,
            min_done=chunk.clock.min_done,
            generation=each.core.generation,
            set_index=each.set_index,
            chunk_version=chunk.version,
        )

    def _send(self, peer: int, frame: RowFrame, header: Header) -> None:
        header.pack_into(frame.header)
        self._num_sent += 1
        self.loop.transport.send(peer, frame)

    # -- the ends ------------------------------------------------------------------------------

    def on_lost(self, event: PeerLost) -> None:
        """Drop what the rank has sent and what no push will take."""
        peer = event.peer
        self._coming = {key for key in self._coming if key.peer != peer}
        self._waiting = {key: each for key, each in self._waiting.items() if key.peer != peer}
        for each in self.loop.sets:
            group = each.core.group_of(peer)
            if isinstance(each.executor, TableShard) and group is not None:
                for index, chunk in each.core.chunk_states.items():
                    each.executor.forget(index, group, newest=chunk.newest_round_of(group))

    @property
    def is_over(self) -> bool:
        return not self._num_sent
