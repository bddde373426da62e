"""A network in one process: a virtual clock, seeded delays, and the same seam as MPI.

Servers and workers are *actors*: generators that take a turn and then yield, either None ("wake me
when an event arrives") or a number of seconds to sleep. Messages take seeded times. Messages of a
pair keep their order, and messages of different pairs overtake one another. Payload bytes are read
at delivery, not when they are sent, as under MPI. A job of one rank runs on this network; the tests
add failures, cuts and repeated messages.

    network = VirtualNetwork(seed=7)
    network.spawn(server_id(0), server_actor(network.endpoint(server_id(0))))
    network.run()
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from psdist.errors import InvariantError, ProtocolError
from psdist.protocol.control import Control, decode_control, encode_control
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, Sent
from psdist.protocol.header import HEADER_BYTES, Header
from psdist.protocol.ids import describe_peer

Actor = Generator[float | None, None, None]


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """The time of a message: latency, uniform jitter, and bytes over bandwidth."""

    latency_s: float = 1e-5
    jitter_s: float = 1e-4
    bytes_per_s: float = 1e10


@dataclass(slots=True, eq=False)
class Ticket:
    """A payload that waits for :meth:`VirtualTransport.accept`."""

    sender: int
    frame: Frame
    header: bytes
    num_bytes: int

    def require_capacity(self, frame: Frame) -> None:
        """Raises :class:`ProtocolError` if ``frame`` is too small."""
        if self.num_bytes > frame.capacity:
            raise ProtocolError(
                f"{describe_peer(self.sender)} sent {self.num_bytes} bytes where {frame.capacity} "
                "belong"
            )


class VirtualNetwork:
    def __init__(self, *, seed: int = 0, link: LinkModel | None = None) -> None:
        """``link``: the model of every pair."""
        self._random = random.Random(seed)
        self._model = link or LinkModel()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._last_delivery: dict[tuple[int, int], float] = {}
        self._endpoints: dict[int, VirtualTransport] = {}
        self._actors: dict[int, Actor] = {}
        self.now_s = 0.0
        self.after_event: Callable[[], None] = lambda: None
        """Called after each delivered event and its turn, to check invariants."""

    def endpoint(self, peer: int) -> VirtualTransport:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            endpoint = self._endpoints[peer] = VirtualTransport(self, peer)
        return endpoint

    def spawn(self, peer: int, actor: Actor) -> None:
        """Run ``actor``: its first turn at once, then one for each arrival for ``peer``."""
        self._actors[peer] = actor
        self._at(self.now_s, lambda: self._turn(peer))

    def schedule(self, delay_s: float, peer: int, happen: Callable[[], None]) -> None:
        """Call ``happen()`` after ``delay_s``, then give ``peer`` a turn."""

        def happen_and_wake() -> None:
            happen()
            self._turn(peer)

        self._at(self.now_s + delay_s, happen_and_wake)

    def run(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Deliver events until none is left or ``until()`` is true."""
        while not until() and self.step():
            pass

    def step(self) -> bool:
        """Deliver the next event; False if there is none."""
        if not self._heap:
            return False
        self.now_s, _, happen = heapq.heappop(self._heap)
        happen()
        self.after_event()
        return True

    @property
    def unfinished(self) -> list[int]:
        """Actors that have not ended. After ``run`` they would wait forever."""
        return sorted(self._actors)

    # -- for the endpoints ---------------------------------------------------------------------

    def transmit(self, sender: int, peer: int, frame: Frame) -> None:
        data, num_bytes = bytes(frame.header), frame.num_payload_bytes()
        header = Header.unpack(data)
        if num_bytes:
            offered = Offered(
                *(sender, header.kind, header.chunk, num_bytes),
                Ticket(sender, frame, data, num_bytes),
                set_index=header.set_index,
                clock=header.clock,
                pull_number=header.pull_number,
            )
            self._deliver(sender, peer, lambda: self._give(peer, offered))
            return
        self._deliver(sender, peer, lambda: self._give(peer, Arrived(sender, header, None)))
        self._at(self.now_s, lambda: self._give(sender, Sent(frame)))

    def transmit_control(self, sender: int, peer: int, message: Control, set_index: int) -> int:
        """Send, and return the bytes of the message with its header."""
        data = encode_control(message)
        arrived = ControlArrived(sender, decode_control(data), set_index)
        self._deliver(sender, peer, lambda: self._give(peer, arrived))
        return HEADER_BYTES + len(data)

    def transfer(self, receiver: int, ticket: Ticket, frame: Frame) -> None:
        ticket.require_capacity(frame)
        link = self._model
        takes_s = self._delay(link) + ticket.num_bytes / link.bytes_per_s
        self._at(self.now_s + takes_s, lambda: self._arrive(receiver, ticket, frame))

    def _arrive(self, receiver: int, ticket: Ticket, frame: Frame) -> None:
        if frame.payload is not None and ticket.frame.payload is not None:
            frame.payload[: ticket.num_bytes] = ticket.frame.payload[: ticket.num_bytes]
        frame.num_received = ticket.num_bytes
        self._give(receiver, Arrived(ticket.sender, Header.unpack(ticket.header), frame))
        self._give(ticket.sender, Sent(ticket.frame))

    # -- inside --------------------------------------------------------------------------------

    def _delay(self, link: LinkModel) -> float:
        return link.latency_s + self._random.random() * link.jitter_s

    def _deliver(self, sender: int, peer: int, happen: Callable[[], None]) -> None:
        earliest_s = self._last_delivery.get((sender, peer), 0.0)
        at_s = max(self.now_s + self._delay(self._model), earliest_s)
        self._last_delivery[sender, peer] = at_s
        self._at(at_s, happen)

    def _give(self, peer: int, event: Event) -> None:
        self.endpoint(peer).inbox.append(event)
        self._turn(peer)

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, happen))

    def _turn(self, peer: int) -> None:
        actor = self._actors.get(peer)
        if actor is None or self.endpoint(peer).is_asleep:
            return
        try:
            sleep_s = next(actor)
        except StopIteration:
            self._actors.pop(peer, None)
            return
        if sleep_s is not None:
            self.endpoint(peer).is_asleep = True
            self._at(self.now_s + sleep_s, lambda: self._wake(peer))

    def _wake(self, peer: int) -> None:
        self.endpoint(peer).is_asleep = False
        self._turn(peer)


class VirtualTransport:
    """One endpoint. With ``drives``, an empty ``poll`` delivers events of the whole network until
    one is for this endpoint. A script without MPI runs its job in one process that way. Its process
    does not fail, so no endpoint moves."""

    def __init__(self, network: VirtualNetwork, me: int) -> None:
        self._network = network
        self._me = me
        self.inbox: deque[Event] = deque()
        self.lost: dict[int, str] = {}
        self.moved: dict[int, str] = {}
        self.bytes_sent = 0
        self.is_asleep = False
        self.drives = False

    @property
    def me(self) -> int:
        return self._me

    def send(self, peer: int, frame: Frame) -> None:
        self._network.transmit(self._me, peer, frame)
        self.bytes_sent += HEADER_BYTES + frame.num_payload_bytes()

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        num_bytes = self._network.transmit_control(self._me, peer, message, set_index)
        if peer != self._me:
            self.bytes_sent += num_bytes

    def accept(self, ticket: Any, frame: Frame) -> None:
        self._network.transfer(self._me, ticket, frame)

    def host(self, peer: int) -> VirtualTransport:
        raise InvariantError(f"{describe_peer(peer)} moves in a job of one process")

    def move(self, peer: int, host: int) -> None:
        raise InvariantError(f"{describe_peer(peer)} moves to {host} in a job of one process")

    def become(self, peer: int) -> None:
        raise InvariantError(f"{describe_peer(self._me)} becomes {peer} in a job of one process")

    def poll(self) -> Event | None:
        if self.drives:
            while not self.inbox and self._network.step():
                pass
        return self.inbox.popleft() if self.inbox else None

    def drain(self, timeout_s: float) -> None:
        """Deliver messages in flight for at most ``timeout_s`` virtual seconds if this endpoint
        drives the network: it will not be driven afterwards."""
        deadline_s = self._network.now_s + timeout_s
        while self.drives and self._network.now_s < deadline_s and self._network.step():
            pass
