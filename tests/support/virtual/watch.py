"""Accesses of ranks to the network and to memory, checked against the rules that bound them.

Counts at the seams, never by the machines' own words: :meth:`Watch.transport` stands between a loop
and its endpoint, :meth:`Watch.executor` between a server's loop and its memory. A broken rule is an
AssertionError at the moment it happens:

* a worker has more messages of a set outstanding at a server (neither answered nor received by a
  receipt) than it has credits, sends one twice, does not send a server's chunks in the order that
  all groups share, or pushes one before the reply to its last push has come; or a receipt comes of
  a push that did not ask for one;
* a receive slot is used for two messages at a time, what lies in it is thrown away, or is folded
  or stepped as something else than what it is;
* a step writes to memory that an open reply reads;
* a reply brings parameters that its reader has said to hold, or none that have changed since.

    watch = Watch(network, credits=2, orders=[[0, 2, 1]])
    loop = plain_loop(watch.transport(endpoint), ..., ShardStore(watch.executor(0, TensorShard)))
    watch.check_end()
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from typing import Any

import numpy as np

from psdist.protocol.events import Arrived, Event, Frame
from psdist.protocol.header import Flag, Header, Kind
from psdist.protocol.ids import describe_peer, is_worker, server_id
from psdist.servers.protocol.actions import (
    Fold,
    Hold,
    Load,
    SlotContent,
    StartSum,
    Step,
)
from psdist.servers.shard.executor import Executor, MakeExecutor, ShardSpec
from psdist.transport import ForwardingTransport, Transport
from tests.support.virtual.network import VirtualNetwork


class Use(Enum):
    FREE = "free"
    RECEIVING = "being received into"
    FULL = "holds a message"
    SUM = "holds a sum"


@dataclass
class Slot:
    """One receive slot of a server."""

    use: Use = Use.FREE
    sender: int = -1
    header: Header | None = None
    """Header of the message in it; for a sum, of the first message."""
    is_repeated: bool = False
    """The message has come a second time: the slot may be given away at once."""
    folded: list[tuple[int, int, float]] = field(default_factory=list)
    """(group, clock, weight) of what the sum consists of."""

    def free(self) -> None:
        self.use, self.header, self.is_repeated, self.folded = Use.FREE, None, False, []


class Watch:
    def __init__(
        self, network: VirtualNetwork, *, credits: int, orders: Sequence[Sequence[int]]
    ) -> None:
        """``orders``: of the chunks of each set."""
        self._network = network
        self._credits = credits
        self._ranks = [{chunk: rank for rank, chunk in enumerate(order)} for order in orders]
        self._outstanding: dict[tuple[int, int, int], set[tuple[int, int, int]]] = defaultdict(set)
        """(worker, server, set) -> (chunk, clock, number of the pull) without reply or receipt."""
        self._unanswered: dict[tuple[int, int, int], set[tuple[int, int, int]]] = defaultdict(set)
        """As above, without a reply."""
        self._asked: set[tuple[tuple[int, int, int], tuple[int, int, int]]] = set()
        """Pushes that asked for a receipt, and values that were set."""
        self.num_receipts = 0
        self._last_sent: dict[tuple[int, int, int], Header] = {}
        """By (worker, server, set)."""
        self._last_pushed: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(worker, server, set) -> (clock, rank)."""
        self._slots: dict[Frame, Slot] = {}
        self._taken: set[tuple[int, int, int, tuple[int, int, int, int]]] = set()
        """(server, sender, kind, (set, chunk, clock and number)) that have arrived with a
        payload."""
        self._addresses: dict[Frame, int] = {}
        self.out: Callable[[], Collection[int]] = frozenset
        """Peers that are not in the job any more: what is received of them is used or not."""
        self.most_outstanding = 0
        self._steps: dict[tuple[int, int], int] = defaultdict(int)
        """(set, chunk) -> those that its server has made, and how often its values were set."""
        self._held: dict[tuple[int, int, int], int] = {}
        """(worker, set, chunk) -> the newest version that it has reported to hold."""
        self.may_miss = False
        """Whether updates may come after their round has closed."""
        self.reforms = False
        """True if groups continue without failed workers, and push instead of them."""
        self._dropped: set[tuple[int, int, int, int]] = set()
        """(worker, set, chunk, clock) of updates that were received and not used."""
        self._missed: set[tuple[int, int, int, int]] = set()
        """The same, of updates whose senders were told that the round had closed without them."""
        self.num_unchanged = 0
        """Replies without payload."""

    # -- at the network ------------------------------------------------------------------------

    def transport(self, transport: Transport) -> WatchedTransport:
        return WatchedTransport(self, transport)

    def on_send(self, sender: int, peer: int, frame: Frame) -> None:
        header = Header.unpack(frame.header)
        if header.kind == Kind.MISSED:
            self._missed.add((peer, header.set_index, header.chunk, header.clock))
        elif header.kind == Kind.REPLY:
            self._check_reply(sender, peer, header)
        sets_values = header.kind == Kind.INIT and header.pull_number > 0
        if header.kind not in (Kind.PUSH, Kind.PULL) and not sets_values:
            return
        if not sets_values:
            self._held[sender, header.set_index, header.chunk] = header.chunk_version
        pair = sender, peer, header.set_index
        who = f"{describe_peer(sender)} at {describe_peer(peer)}"
        message = header.chunk, header.clock, header.pull_number
        outstanding, unanswered = self._outstanding[pair], self._unanswered[pair]
        assert message not in unanswered, f"{who} has sent {message} twice"
        unanswered.add(message)
        if (
            self.reforms
            and header.flags == Flag.RETRANSMIT
            and not (header.length or header.weight)
        ):
            return  # instead of a worker that has failed, which needs no slot, and holds no credit
        outstanding.add(message)
        if header.flags & Flag.RECEIPT or sets_values:
            self._asked.add((pair, message))
        assert len(outstanding) <= self._credits, (
            f"{who} has {len(outstanding)} messages outstanding, {self._credits} credits"
        )
        self.most_outstanding = max(self.most_outstanding, len(outstanding))
        ranks, last = self._ranks[header.set_index], self._last_sent.get(pair)
        if last is not None:
            is_new = (last.clock, last.pull_number) != (header.clock, header.pull_number)
            assert is_new or ranks[last.chunk] < ranks[header.chunk], (
                f"{who} has sent chunk {header.chunk} after chunk {last.chunk}"
            )
        self._last_sent[pair] = header
        if header.kind == Kind.PUSH:
            place = header.clock, ranks[header.chunk]
            assert place > self._last_pushed.get(pair, (-1, 0)), f"{who} has sent {message} late"
            self._last_pushed[pair] = place
            open_of_it = [each for each in unanswered if each[0] == header.chunk]
            assert open_of_it == [message], f"{who} has sent {message}; it awaits {open_of_it}"

    def _check_reply(self, server: int, worker: int, header: Header) -> None:
        is_unchanged = bool(header.flags & Flag.UNCHANGED)
        version = 1 + self._steps[header.set_index, header.chunk]
        held = self._held.get((worker, header.set_index, header.chunk), 0)
        says = header.chunk_version, is_unchanged, not header.length
        assert says == (version, held == version, held == version), (
            f"{describe_peer(server)} sent {describe_peer(worker)}, which holds version {held} of "
            f"chunk {header.chunk}, {header.length} bytes as version {header.chunk_version}; it "
            f"is at {version}"
        )
        self.num_unchanged += is_unchanged

    def on_event(self, me: int, event: Event) -> None:
        if not isinstance(event, Arrived):
            return
        header = event.header
        if is_worker(me):
            pair = me, event.peer, header.set_index
            message = header.chunk, header.clock, header.pull_number
            self._outstanding[pair].discard(message)
            if header.kind == Kind.RECEIPT and not header.map_version:  # that is of PUSH_ROWS
                assert (pair, message) in self._asked, f"{header}: without a request"
                self.num_receipts += 1
            if header.kind != Kind.RECEIPT or header.pull_number:
                self._unanswered[pair].discard(message)
            return
        slot = self._slots.get(event.frame) if event.frame is not None else None
        if slot is None:
            return
        assert slot.use is Use.RECEIVING, f"{describe_peer(me)}: arrived into a slot {slot}"
        slot.use, slot.header = Use.FULL, header
        about = header.set_index, header.chunk, header.clock, header.pull_number
        key = me, event.peer, header.kind, about
        slot.is_repeated = key in self._taken
        self._taken.add(key)

    def on_accept(self, me: int, sender: int, frame: Frame) -> None:
        slot = self._slots.get(frame)
        if slot is None:
            return
        is_given_up = slot.use in (Use.RECEIVING, Use.FULL) and slot.sender in self.out()
        is_used = slot.use is Use.FULL and (slot.is_repeated or self._is_dropped(slot))
        assert slot.use is Use.FREE or is_used or is_given_up, (
            f"{describe_peer(me)} receives into a slot that {slot.use.value}: {slot}"
        )
        slot.free()
        slot.use, slot.sender = Use.RECEIVING, sender

    def _is_dropped(self, slot: Slot) -> bool:
        """Whether it is an update that may come too late; then its sender is to be told so."""
        header = slot.header
        if self.reforms and header is not None and header.flags & Flag.RETRANSMIT:
            return True  # a failed worker had pushed it
        if not self.may_miss or header is None or header.kind != Kind.PUSH:
            return False
        self._dropped.add((slot.sender, header.set_index, header.chunk, header.clock))
        return True

    # -- at a server's memory ------------------------------------------------------------------

    def executor(self, server: int, make: MakeExecutor) -> MakeExecutor:
        def make_watched(spec: ShardSpec) -> Executor:
            executor = make(spec)
            original = {
                name: getattr(executor, name)
                for name in ("make_slots", "load", "start_sum", "fold", "hold", "step")
            }

            @wraps(original["make_slots"])
            def make_slots(count: int) -> list[Frame]:
                slots: list[Frame] = original["make_slots"](count)
                self._slots.update((slot, Slot()) for slot in slots)
                return slots

            @wraps(original["load"])
            def load(action: Load) -> None:
                slot = self._take(action.slot, Kind.INIT, action.chunk)
                assert slot.header is not None
                assert (slot.header.pull_number > 0) == (action.clock >= 0)
                if action.clock >= 0:
                    self._steps[slot.header.set_index, action.chunk] += 1
                slot.free()
                self._check_target(server, executor.payload(action.chunk, action.target))
                original["load"](action)

            @wraps(original["start_sum"])
            def start_sum(action: StartSum) -> None:
                slot = self._take(action.slot, Kind.PUSH, action.chunk)
                slot.folded = [_brought(slot, action.weight)]
                slot.use = Use.SUM
                original["start_sum"](action)

            @wraps(original["fold"])
            def fold(action: Fold) -> None:
                slot = self._take(action.slot, Kind.PUSH, action.chunk)
                self._sum(action.accumulator, action.chunk).folded.append(
                    _brought(slot, action.weight)
                )
                slot.free()
                original["fold"](action)

            held: dict[int, Slot] = {}

            @wraps(original["hold"])
            def hold(action: Hold) -> tuple[float, ...]:
                slot = self._sum(action.slot, action.chunk)
                assert action.chunk not in held, f"held before {held[action.chunk]} was stepped"
                held[action.chunk] = Slot(header=slot.header, folded=slot.folded)
                slot.free()
                squares: tuple[float, ...] = original["hold"](action)
                return squares

            @wraps(original["step"])
            def step(action: Step) -> None:
                brought = [each[:3] for each in action.contributions if not each.is_empty]
                assert (action.gradient is None) == (action.content is SlotContent.HELD)
                if action.gradient is None:
                    slot = held.pop(action.chunk)
                    assert slot.folded == brought, f"{slot.folded} was held, stepped {brought}"
                elif action.content is SlotContent.SUM:
                    slot = self._sum(action.gradient, action.chunk)
                    assert slot.folded == brought, f"{slot.folded} was summed, stepped {brought}"
                    assert brought == sorted(brought), f"not in group order: {brought}"
                else:
                    slot = self._take(action.gradient, Kind.PUSH, action.chunk)
                    (weight,) = (each.weight for each in action.contributions)
                    assert [_brought(slot, weight)] == brought, f"{slot} stepped as {brought}"
                assert slot.header is not None
                self._steps[slot.header.set_index, action.chunk] += 1
                slot.free()
                self._check_target(server, executor.payload(action.chunk, action.target))
                original["step"](action)

            executor.make_slots, executor.load = make_slots, load  # type: ignore[method-assign]
            executor.start_sum, executor.fold = start_sum, fold  # type: ignore[method-assign]
            executor.hold, executor.step = hold, step  # type: ignore[method-assign]
            return executor

        return make_watched

    def _take(self, frame: Frame, kind: Kind, chunk: int) -> Slot:
        """The slot of a message that is used now."""
        slot = self._slots[frame]
        header = slot.header
        assert slot.use is Use.FULL, f"used as a message: {slot}"
        assert header is not None
        assert (header.kind, header.chunk) == (kind, chunk), f"used for chunk {chunk}: {slot}"
        assert not slot.is_repeated, f"applied a second time: {slot}"
        return slot

    def _sum(self, frame: Frame, chunk: int) -> Slot:
        slot = self._slots[frame]
        assert slot.use is Use.SUM, f"used as a sum: {slot}"
        assert slot.header is not None
        assert slot.header.chunk == chunk, f"used for chunk {chunk}: {slot}"
        return slot

    def _check_target(self, server: int, target: memoryview | None) -> None:
        """No message that has not arrived reads this memory."""
        if target is None:
            return
        address = _address(target)
        for receiver, tickets in self._network._open.items():
            for ticket in tickets:
                if ticket.sender != server_id(server):
                    continue
                read = self._addresses.get(ticket.frame)
                if read is None and ticket.frame.payload is not None:
                    read = self._addresses[ticket.frame] = _address(ticket.frame.payload)
                assert read != address, (
                    f"server {server} steps in memory that an open reply to "
                    f"{describe_peer(receiver)} reads"
                )

    # -- at the end ----------------------------------------------------------------------------

    def check_end(self) -> None:
        """After a run that has ended well: nothing is owed and nothing lies in a slot."""
        owed = {pair: left for pair, left in self._unanswered.items() if left}
        assert not owed, f"never answered: {owed}"
        held = [slot for slot in self._slots.values() if slot.use is not Use.FREE]
        lost = [slot for slot in held if not slot.is_repeated and slot.use is not Use.RECEIVING]
        lost = [slot for slot in lost if not self._is_dropped(slot)]
        assert not lost, f"received and never used: {lost}"
        untold = self._dropped - self._missed
        assert not untold, f"dropped without a notice: {untold}"


def _brought(slot: Slot, weight: float) -> tuple[int, int, float]:
    header = slot.header
    assert header is not None
    assert header.weight == weight, f"a push of weight {header.weight} is applied with {weight}"
    return header.group, header.clock, weight


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


class WatchedTransport(ForwardingTransport):
    """An endpoint whose messages a watch checks."""

    def __init__(self, watch: Watch, transport: Transport) -> None:
        super().__init__(transport)
        self._watch = watch
        self._endpoint = transport.me
        """Endpoint of the watch's records. A spare that becomes a worker keeps it."""

    def send(self, peer: int, frame: Frame) -> None:
        self._watch.on_send(self._endpoint, peer, frame)
        self._transport.send(peer, frame)

    def accept(self, ticket: Any, frame: Frame) -> None:
        self._watch.on_accept(self._endpoint, ticket.sender, frame)
        self._transport.accept(ticket, frame)

    def poll(self) -> Event | None:
        event = self._transport.poll()
        if event is not None:
            self._watch.on_event(self._endpoint, event)
        return event
