"""The virtual network keeps Transport's contract."""

from __future__ import annotations

import random

import pytest

from psdist.errors import InvariantError
from psdist.protocol.events import Frame, Offered, Sent
from psdist.protocol.header import Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.transport.virtual import Actor, LinkModel, VirtualNetwork
from tests.support.numbered import OrderWatch, send_numbered

PEERS = [server_id(0), server_id(1), worker_id(0), worker_id(1)]
SLOW = LinkModel(latency_s=1e-4, jitter_s=1e-2, bytes_per_s=1e7, sent_s=1e-2)


@pytest.mark.parametrize("seed", range(5))
def test_headers_and_control_messages_of_a_pair_keep_their_order(seed: int) -> None:
    network, watches = VirtualNetwork(seed=seed, link=SLOW), {peer: OrderWatch() for peer in PEERS}
    count = 60

    def sends_and_receives(me: int) -> Actor:
        transport, pick = network.endpoint(me), random.Random(f"{seed} {me}")
        others = [peer for peer in PEERS if peer != me]
        offers: list[Offered] = []
        for number in range(count):
            for peer in others:
                send_numbered(transport, peer, number)
            yield pick.random() * 1e-3
        while any(watches[me].complete[peer] < count for peer in others):
            while (event := transport.poll()) is not None:
                watches[me].see(event)
                if isinstance(event, Offered):
                    offers.append(event)
            if offers:
                offer = offers.pop(pick.randrange(len(offers)))
                frame = Frame(memoryview(bytearray(offer.num_bytes)))
                transport.accept(offer.ticket, frame)
            yield 1e-4

    for peer in PEERS:
        network.spawn(peer, sends_and_receives(peer))
    network.run(until=lambda: not network.unfinished)
    for peer, watch in watches.items():
        assert watch.announced == {other: count for other in PEERS if other != peer}


def test_a_frame_smaller_than_its_header_says_is_not_sent() -> None:
    transport = VirtualNetwork().endpoint(worker_id(0))
    frame = Frame(memoryview(bytearray(8)))
    Header(kind=Kind.PUSH, sender=worker_id(0), length=9).pack_into(frame.header)
    with pytest.raises(InvariantError, match="a frame of 8 bytes behind a header that says 9"):
        transport.send(server_id(0), frame)


def test_who_drives_the_network_leaves_nothing_under_way() -> None:
    network = VirtualNetwork(link=LinkModel(latency_s=1.0, sent_s=3.0))
    driver, server = network.endpoint(worker_id(0)), network.endpoint(server_id(0))
    driver.drives = True
    frame = Frame()
    Header(kind=Kind.PULL, sender=worker_id(0)).pack_into(frame.header)
    driver.send(server_id(0), frame)
    driver.drain(0.0)
    assert not server.inbox, "there was no time"
    driver.drain(10.0)
    assert len(server.inbox) == 1
    assert driver.poll() == Sent(frame)
