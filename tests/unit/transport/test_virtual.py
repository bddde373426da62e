"""The virtual network keeps Transport's contract."""

from __future__ import annotations

import random

import pytest

from psdist.errors import InvariantError
from psdist.protocol.control import Progress, encode_control
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, PeerLost, Sent
from psdist.protocol.header import HEADER_BYTES, Header, Kind
from psdist.protocol.ids import server_id, worker_id
from psdist.transport import Transport
from psdist.transport.virtual import Actor
from tests.support.numbered import OrderWatch, send_numbered
from tests.support.virtual.network import LinkModel, VirtualNetwork

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
    with pytest.raises(InvariantError, match="a frame of 8 bytes after a header for 9"):
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


def test_every_byte_for_another_process_is_counted_by_the_one_that_sends_it() -> None:
    network, progress = VirtualNetwork(), Progress(worker=0, clock=1, samples=2)
    worker, server = network.endpoint(worker_id(0)), network.endpoint(server_id(0))
    frame = Frame(memoryview(bytearray(8)))
    Header(kind=Kind.PUSH, sender=worker_id(0), length=5).pack_into(frame.header)
    worker.send(server_id(0), frame)
    assert worker.bytes_sent == HEADER_BYTES + 5
    worker.send_control(server_id(0), progress)
    one = HEADER_BYTES + len(encode_control(progress))
    assert worker.bytes_sent == HEADER_BYTES + 5 + one
    server.send_control(server_id(0), progress)
    hosted = server.host(server_id(1))
    hosted.send_control(server_id(0), progress)
    assert server.bytes_sent == 0
    hosted.send_control(worker_id(0), progress)
    assert (server.bytes_sent, hosted.bytes_sent) == (one, 0)


# -- death -------------------------------------------------------------------------------------


def poll_all(transport: Transport) -> list[Event]:
    return list(iter(transport.poll, None))


@pytest.mark.parametrize("seed", range(10))
def test_what_had_left_the_dead_comes_first_and_then_its_loss_to_everybody(seed: int) -> None:
    network, pick = VirtualNetwork(seed=seed, link=SLOW), random.Random(seed)
    dead, others = PEERS[0], PEERS[1:]
    seen: dict[int, list[Event]] = {peer: [] for peer in others}

    def sends_until_it_dies() -> Actor:
        for number in range(20):
            for peer in others:
                send_numbered(network.endpoint(dead), peer, number)
            yield 1e-4
        network.crash(dead, notice_s=pick.choice([0.0, 0.1]))
        send_numbered(network.endpoint(dead), others[0], 20)

    def receives(me: int) -> Actor:
        while True:
            for event in poll_all(network.endpoint(me)):
                seen[me].append(event)
                if isinstance(event, Offered):
                    frame = Frame(memoryview(bytearray(event.num_bytes)))
                    network.endpoint(me).accept(event.ticket, frame)
            yield None

    network.spawn(dead, sends_until_it_dies())
    for peer in others:
        network.spawn(peer, receives(peer))
    network.run()
    for peer in others:
        watch = OrderWatch()
        for event in seen[peer]:
            watch.see(event)
        assert watch.announced == {dead: 20}
        assert seen[peer][-1] == PeerLost(dead, "server 0")
        assert seen[peer].count(seen[peer][-1]) == 1
        assert network.endpoint(peer).lost == {dead: "server 0"}
    assert not network.endpoint(dead).lost


def test_a_payload_stays_with_the_dead_and_the_frame_for_it_is_not_written() -> None:
    network = VirtualNetwork(link=LinkModel(latency_s=1.0, jitter_s=0.0))
    worker, server = network.endpoint(worker_id(0)), network.endpoint(server_id(0))
    for value in (b"\1", b"\2"):
        frame = Frame(memoryview(bytearray(value)))
        Header(kind=Kind.PUSH, sender=worker_id(0), length=1).pack_into(frame.header)
        worker.send(server_id(0), frame)
    network.run()
    first, second = poll_all(server)
    assert isinstance(first, Offered)
    assert isinstance(second, Offered)
    received = Frame(memoryview(bytearray(1)))
    server.accept(first.ticket, received)
    network.crash(worker_id(0))
    server.accept(second.ticket, received)
    network.run()
    assert poll_all(server) == [PeerLost(worker_id(0), "worker 0")]
    assert received.payload == b"\0"


def test_frames_that_the_dead_has_not_received_come_back() -> None:
    network = VirtualNetwork(link=LinkModel(latency_s=1.0, jitter_s=0.0))
    worker, server = network.endpoint(worker_id(0)), network.endpoint(server_id(0))
    frames = [Frame(memoryview(bytearray(1))) for _ in range(4)]
    for frame in frames:
        Header(kind=Kind.PUSH, sender=worker_id(0), length=1).pack_into(frame.header)
    worker.send(server_id(0), frames[0])
    worker.send(server_id(0), frames[1])
    network.run()
    offers = poll_all(server)
    assert isinstance(offers[0], Offered)
    server.accept(offers[0].ticket, Frame(memoryview(bytearray(1))))  # under way when it fails
    worker.send(server_id(0), frames[2])
    network.crash(server_id(0))
    worker.send(server_id(0), frames[3])
    network.run()
    events = poll_all(worker)
    sent = [event.frame for event in events if isinstance(event, Sent)]
    assert sorted(map(id, sent)) == sorted(map(id, frames))
    assert PeerLost(server_id(0), "server 0") in events
    assert not poll_all(server), "nothing reaches the dead"


def test_nothing_passes_a_cut_before_that_is_over() -> None:
    """Messages and words of deaths, also of who continues elsewhere; what stays on one side comes
    at once."""
    network = VirtualNetwork(link=LinkModel(latency_s=1e-5, jitter_s=0.0))
    one, other, third, dead = map(network.endpoint, PEERS)
    network.cut([one.me, third.me], 1.0)
    network.crash(dead.me)
    for each in (one, other):
        each.move(dead.me, third.me)
    hosted = network.hosted_endpoint(third.me, dead.me)
    said = Progress(worker=0, clock=0, samples=0)
    for sender, peer in ((one, third), (one, other), (other, one), (one, dead), (other, dead)):
        sender.send_control(peer.me, said)
    told, told_across = ControlArrived(one.me, said), ControlArrived(other.me, said)
    lost = PeerLost(dead.me, "worker 1")
    network.run(until=lambda: network.now_s > 2e-5)
    assert network.now_s == 1.0, "what is behind the cut comes then"
    assert [third.poll(), third.poll()] == [told, None]
    assert [hosted.poll(), hosted.poll()] == [told, None], "its process is on that side"
    assert other.poll() == lost
    network.run()
    assert other.poll() == told
    assert hosted.poll() == told_across
    assert third.poll() == lost
    assert [one.poll(), one.poll()] == [lost, told_across]


def test_a_payload_that_is_accepted_during_a_cut_comes_behind_it() -> None:
    network = VirtualNetwork(link=LinkModel(latency_s=1e-5, jitter_s=0.0))
    sender, receiver = network.endpoint(server_id(0)), network.endpoint(worker_id(0))
    send_numbered(sender, worker_id(0), 0)
    network.run()
    offer = receiver.poll()
    assert isinstance(offer, Offered)
    network.cut([server_id(0)], 1.0)
    frame = Frame(memoryview(bytearray(offer.num_bytes)))
    receiver.accept(offer.ticket, frame)
    network.run(until=lambda: network.now_s > 0.5)
    assert network.now_s >= 1.0
    assert isinstance(receiver.poll(), Arrived)
    network.cut([server_id(0)], -1.0)
    send_numbered(sender, worker_id(0), 1)
    network.run()
    assert network.now_s < 1.1
