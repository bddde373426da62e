"""The virtual network of psdist.transport.virtual with the faults of real ones.

Messages may be repeated or offered twice, and a sender may get its event long after the receiver
(``LinkModel.sent_s``). Memory that changes under an open send is reported, unless
``verify_open_sends`` is off. Endpoints fail by ``crash``, as under MPI with ULFM, continue in
another process (``host``, ``move``), and ``cut`` separates them for a while. Frames may have no
memory: then sizes alone travel, for simulations of large clusters.

    network = VirtualNetwork(seed=7, link=LinkModel(duplicate_rate=0.1))
    network.crash(worker_id(1), notice_s=1e-3)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from psdist.errors import InvariantError
from psdist.protocol.control import Control, decode_control, encode_control
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import HEADER_BYTES, Header, Kind
from psdist.protocol.ids import describe_peer
from psdist.transport.virtual import LinkModel as PlainLink
from psdist.transport.virtual import Ticket
from psdist.transport.virtual import VirtualNetwork as PlainNetwork
from psdist.transport.virtual import VirtualTransport as PlainTransport


@dataclass(frozen=True, kw_only=True)
class LinkModel(PlainLink):
    """As psdist's, with faults."""

    payload_s: float = 0.0
    """Maximum extra time of a payload: headers overtake it, and payloads one another."""
    duplicate_rate: float = 0.0
    """Share of messages with payload that are offered twice."""
    repeat_rate: float = 0.0
    """Share of ``repeatable`` messages without payload that are delivered twice in a row."""
    sent_s: float = 0.0
    """Maximum time between the receiver's event and the sender's. Under MPI the sender gets its
    event when it polls, and not always at the first poll."""


@dataclass(slots=True, eq=False)
class _Ticket(Ticket):
    crc: int
    copy: bytes = b""
    """Bytes of a second delivery: after the first one the sender may reuse the memory."""
    has_arrived: bool = False


class VirtualNetwork(PlainNetwork):
    def __init__(
        self,
        *,
        seed: int = 0,
        link: Callable[[int, int], LinkModel] | LinkModel | None = None,
        verify_open_sends: bool = True,
        repeatable: Collection[type[Control] | Kind] = (),
    ) -> None:
        """``link``: of all pairs, or a function of sender and receiver; ``repeatable``: messages
        without payload that their receivers take twice."""
        super().__init__(seed=seed)
        model = link or LinkModel()
        self._link: Callable[[int, int], LinkModel] = (
            model if callable(model) else lambda _from, _to: model
        )
        self._verify = verify_open_sends
        self._repeatable = frozenset(repeatable)
        self._endpoints: dict[int, VirtualTransport] = {}
        self.dead: set[int] = set()
        """Failed endpoints: their ids, second ids, and addresses."""
        self._hosted: dict[tuple[int, int], int] = {}
        """(host, failed peer that continues in its process) -> address. The address of any other
        peer is its id."""
        self._id_of: dict[int, int] = {}
        """Address -> id, where they differ."""
        self._host_of: dict[int, int] = {}
        """Address -> the peer whose process it is in, where they differ."""
        self._cuts: list[tuple[frozenset[int], float]] = []
        """(processes, end of their separation from the others, in seconds)."""
        self._other_of: dict[int, int] = {}
        """First id of an endpoint -> its second id."""
        self._first_of: dict[int, int] = {}
        """Second id of an endpoint -> its first id."""
        self._open: dict[int, dict[_Ticket, None]] = {}
        """Receiver -> payloads in flight, in order."""

    def endpoint(self, peer: int) -> VirtualTransport:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            endpoint = self._endpoints[peer] = VirtualTransport(self, peer)
        return endpoint

    def share(self, peer: int, other: int) -> None:
        """Make ``other`` the second id of the endpoint of ``peer``."""
        self._other_of[peer], self._first_of[other] = other, peer

    def found_at(self, peer: int) -> int:
        """The address of ``peer`` at home."""
        return self._first_of.get(peer, peer)

    def address(self, host: int, peer: int) -> int:
        """Return the address of ``peer`` in the process of ``host``."""
        address = self._hosted.get((host, peer))
        if address is None:
            address = self._hosted[host, peer] = -1 - len(self._hosted)
            self._id_of[address], self._host_of[address] = peer, host
        return address

    def hosted_endpoint(self, host: int, peer: int) -> VirtualTransport:
        address = self.address(host, peer)
        endpoint = self._endpoints[address] = VirtualTransport(self, peer, address=address)
        endpoint.known_dead |= self.endpoint(host).known_dead
        return endpoint

    def process_of(self, address: int) -> VirtualTransport:
        """Return the endpoint of the process that has this address: usually the same one."""
        return self.endpoint(self._host_of.get(address, address))

    def _id(self, address: int) -> int:
        return self._id_of.get(address, address)

    def become(self, address: int, peer: int) -> None:
        self._id_of[address] = peer

    def crash(self, peer: int, *, notice_s: float = 0.0) -> None:
        """Fail ``peer`` now: it takes no further turn, and no message reaches it.

        Headers and control messages that it has sent are still delivered, payloads are not. Each
        other endpoint gets :class:`PeerLost` after a delay of their link and at most ``notice_s``
        more, and not before the last message. It also gets the frames back that the failed peer
        had not received.
        """
        peer = self.found_at(peer)
        if peer in self.dead:
            return
        self.dead.add(peer)
        self._actors.pop(peer, None)
        self.endpoint(peer).inbox.clear()
        here = [peer, *(address for address, host in self._host_of.items() if host == peer)]
        noticed_at_s: dict[int, float] = {}
        for other in self._endpoints:
            delay_s = self._delay(self._link(peer, other)) + self._random.random() * notice_s
            last_s = max(self._last_delivery.get((each, other), 0.0) for each in here)
            noticed_at_s[other] = max(self.now_s + delay_s, last_s, self._cut_until_s(peer, other))
        self.dead.update(here, {self._other_of.get(peer, peer)})
        for address in here:
            for ticket in self._open.pop(address, {}):
                self._at(noticed_at_s[ticket.sender], partial(self._give_back, ticket))
        for other, at_s in noticed_at_s.items():
            self._at(at_s, partial(self._lose, other, peer))

    def cut(self, peers: Collection[int], duration_s: float) -> None:
        """Separate the processes of ``peers`` from the others for ``duration_s``. Messages and
        PeerLost arrive afterwards. No endpoint gets an event for the cut itself."""
        self._cuts = [each for each in self._cuts if each[1] > self.now_s]
        self._cuts.append((frozenset(peers), self.now_s + duration_s))

    def _cut_until_s(self, address: int, other: int) -> float:
        """Return the earliest time at which a message between them can pass, in seconds."""
        one, another = self._host_of.get(address, address), self._host_of.get(other, other)
        return max(
            (until_s for side, until_s in self._cuts if (one in side) != (another in side)),
            default=0.0,
        )

    # -- for the endpoints ---------------------------------------------------------------------

    def transmit(self, sender: int, peer: int, frame: Frame) -> None:
        header = bytes(frame.header)
        num_bytes = frame.num_payload_bytes()
        if not num_bytes:
            arrived = Arrived(self._id(sender), Header.unpack(header), None)
            link = self._link(sender, peer)
            for _ in range(self._how_often(link, Kind(arrived.header.kind))):
                self._deliver(sender, peer, lambda: self._give(peer, arrived))
            late_s = self._late_s(link)
            self._at(self.now_s + late_s, lambda: self._give(sender, Sent(frame)))
            return
        crc = zlib.crc32(frame.payload[:num_bytes]) if frame.payload is not None else 0
        ticket = _Ticket(sender, frame, header, num_bytes, crc)
        if peer in self.dead:
            self._at(
                self.now_s + self._delay(self._link(sender, peer)), partial(self._give_back, ticket)
            )
            return
        self._open.setdefault(peer, {})[ticket] = None
        self._deliver(sender, peer, lambda: self._offer(peer, ticket))
        if self._random.random() < self._link(sender, peer).duplicate_rate:
            if frame.payload is not None:
                ticket.copy = bytes(frame.payload[:num_bytes])
            self._deliver(sender, peer, lambda: self._offer(peer, ticket))

    def transmit_control(self, sender: int, peer: int, message: Control, set_index: int) -> int:
        """Send, and return the bytes of the message with its header."""
        data, said_by = encode_control(message), self._id(sender)
        for _ in range(self._how_often(self._link(sender, peer), type(message))):
            self._deliver(
                sender,
                peer,
                lambda: self._give(peer, ControlArrived(said_by, decode_control(data), set_index)),
            )
        return HEADER_BYTES + len(data)

    def transfer(self, receiver: int, ticket: _Ticket, frame: Frame) -> None:
        ticket.require_capacity(frame)
        link = self._link(ticket.sender, receiver)
        takes_s = self._delay(link) + ticket.num_bytes / link.bytes_per_s
        if link.payload_s:
            takes_s += self._random.random() * link.payload_s
        at_s = max(self.now_s, self._cut_until_s(ticket.sender, receiver)) + takes_s
        self._at(at_s, lambda: self._arrive(receiver, ticket, frame))

    # -- inside --------------------------------------------------------------------------------

    def _offer(self, peer: int, ticket: _Ticket) -> None:
        header = Header.unpack(ticket.header)
        offered = Offered(
            *(self._id(ticket.sender), header.kind, header.chunk, ticket.num_bytes, ticket),
            set_index=header.set_index,
            clock=header.clock,
            pull_number=header.pull_number,
        )
        self._give(peer, offered)

    def _arrive(self, receiver: int, ticket: _Ticket, frame: Frame) -> None:
        if ticket.sender in self.dead or receiver in self.dead:
            return
        is_first, ticket.has_arrived = not ticket.has_arrived, True
        if is_first:
            del self._open[receiver][ticket]
        if not is_first:
            if frame.payload is not None and ticket.frame.payload is not None:
                frame.payload[: ticket.num_bytes] = ticket.copy
        elif frame.payload is not None and ticket.frame.payload is not None:
            data = ticket.frame.payload[: ticket.num_bytes]
            if self._verify and zlib.crc32(data) != ticket.crc:
                raise InvariantError(
                    f"{describe_peer(ticket.sender)} changed the bytes of an open send to "
                    f"{describe_peer(receiver)}"
                )
            frame.payload[: ticket.num_bytes] = data
        frame.num_received = ticket.num_bytes
        sender = self._id(ticket.sender)
        self._give(receiver, Arrived(sender, Header.unpack(ticket.header), frame))
        if not is_first:
            return
        if late_s := self._late_s(self._link(ticket.sender, receiver)):
            self._at(self.now_s + late_s, lambda: self._give_back(ticket))
        else:
            self._give_back(ticket)

    def _give_back(self, ticket: _Ticket) -> None:
        self._give(ticket.sender, Sent(ticket.frame))

    def _how_often(self, link: LinkModel, what: type[Control] | Kind) -> int:
        """Return the number of deliveries of a message without payload."""
        if not link.repeat_rate or what not in self._repeatable:
            return 1
        return 1 + (self._random.random() < link.repeat_rate)

    def _late_s(self, link: LinkModel) -> float:
        return self._random.random() * link.sent_s if link.sent_s else 0.0

    def _deliver(self, sender: int, peer: int, happen: Callable[[], None]) -> None:
        if sender in self.dead:
            return
        delay_s = self._delay(self._link(sender, peer))
        earliest_s = self._last_delivery.get((sender, peer), 0.0)
        at_s = max(self.now_s + delay_s, earliest_s, self._cut_until_s(sender, peer))
        self._last_delivery[sender, peer] = at_s
        self._at(at_s, happen)

    def _give(self, peer: int, event: Event) -> None:
        if peer in self.dead:
            return
        self.endpoint(peer).inbox.append(event)
        self._turn(peer)

    def _lose(self, peer: int, dead: int) -> None:
        if peer in self.dead or dead in self.endpoint(peer).known_dead:
            return
        self.endpoint(peer).known_dead.add(dead)
        other = self._other_of.get(dead)
        for each in (dead,) if other is None else (dead, other):
            who, endpoint = describe_peer(each), self.endpoint(peer)
            if each not in endpoint.moved:
                endpoint.lost[each] = who
            self._give(peer, PeerLost(each, who))
        for address, host in self._host_of.items():  # hosted after the failure
            if host == peer and address in self._endpoints:
                at_s = self._last_delivery.get((dead, address), 0.0)
                self._at(max(self.now_s, at_s), partial(self._lose, address, dead))

    def _turn(self, peer: int) -> None:
        super()._turn(self._host_of.get(peer, peer))


class VirtualTransport(PlainTransport):
    """One endpoint, which may be in another one's process."""

    _network: VirtualNetwork

    def __init__(self, network: VirtualNetwork, me: int, *, address: int | None = None) -> None:
        """``address``: its address in the network; None for ``me``."""
        super().__init__(network, me)
        self._address = me if address is None else address
        self._moved: dict[int, int] = {}
        """Failed peer that continues elsewhere -> its address."""
        self.known_dead: set[int] = set()
        """Failed peers that this endpoint, or that of its process, has a PeerLost of."""

    def send(self, peer: int, frame: Frame) -> None:
        self._network.transmit(self._address, self._address_of(peer), frame)
        self._network.process_of(self._address).bytes_sent += (
            HEADER_BYTES + frame.num_payload_bytes()
        )

    def send_control(self, peer: int, message: Control, set_index: int = 0) -> None:
        address = self._address_of(peer)
        num_bytes = self._network.transmit_control(self._address, address, message, set_index)
        process = self._network.process_of(self._address)
        if process is not self._network.process_of(address):
            process.bytes_sent += num_bytes

    def _address_of(self, peer: int) -> int:
        return self._moved.get(peer, self._network.found_at(peer))

    def accept(self, ticket: Any, frame: Frame) -> None:
        self._network.transfer(self._address, ticket, frame)

    def host(self, peer: int) -> VirtualTransport:
        return self._network.hosted_endpoint(self._address, peer)

    def move(self, peer: int, host: int) -> None:
        self._moved[peer] = self._network.address(host, peer)
        self.moved[peer] = self.lost.pop(peer, describe_peer(peer))

    def become(self, peer: int) -> None:
        self._me = peer
        self._network.become(self._address, peer)
