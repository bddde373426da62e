"""A rank fails at a random moment of a seeded schedule: the job ends for all, and for one reason.

Failures that a job survives will be tested here, too; in this version there are none.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from psdist.errors import PeerLostError, PsdistError
from psdist.protocol.control import Control
from psdist.protocol.events import Arrived, ControlArrived, Event, Frame, Offered, PeerLost
from psdist.protocol.ids import COORDINATOR, describe_peer, is_worker
from psdist.transport.virtual import Actor
from tests.support.virtual.job import Schedule, VirtualJob
from tests.support.virtual.network import LinkModel, VirtualNetwork

SEEDS = range(12)


class WatchedNetwork(VirtualNetwork):
    """Notes what every pair was sent and given, and which error each actor has ended with."""

    def __init__(self, schedule: Schedule) -> None:
        link = LinkModel(
            latency_s=schedule.latency_s,
            jitter_s=schedule.jitter_s,
            duplicate_rate=schedule.duplicate_rate,
            sent_s=schedule.sent_s,
        )
        super().__init__(seed=schedule.seed, link=link)
        self.errors: dict[int, PsdistError] = {}
        self.sent: dict[tuple[int, int], list[bytes | Control]] = {}
        self.given: dict[tuple[int, int], list[bytes | Control | None]] = {}
        """None for the sender's loss."""
        self._offers: set[object] = set()

    def spawn(self, peer: int, actor: Actor) -> None:
        super().spawn(peer, self._caught(peer, actor))

    def _caught(self, peer: int, actor: Actor) -> Actor:
        try:
            yield from actor
        except PsdistError as error:
            self.errors[peer] = error

    def transmit(self, sender: int, peer: int, frame: Frame) -> None:
        self.sent.setdefault((sender, peer), []).append(bytes(frame.header))
        super().transmit(sender, peer, frame)

    def transmit_control(self, sender: int, peer: int, message: Control, set_index: int) -> int:
        self.sent.setdefault((sender, peer), []).append(message)
        return super().transmit_control(sender, peer, message, set_index)

    def _give(self, peer: int, event: Event) -> None:
        what: bytes | Control | None = None
        if isinstance(event, Offered) and event.ticket not in self._offers:
            self._offers.add(event.ticket)  # not its duplicate
            what = event.ticket.header
        elif isinstance(event, Arrived) and event.frame is None:
            header = bytearray(128)
            event.header.pack_into(header)
            what = bytes(header)
        elif isinstance(event, ControlArrived):
            what = event.message
        if what is not None or isinstance(event, PeerLost):
            self.given.setdefault((event.peer, peer), []).append(what)
        super()._give(peer, event)


def play_until(schedule: Schedule, num_steps: float = float("inf")) -> tuple[VirtualJob, int]:
    """The job after so many events, or at its end; and how many there were."""
    network = WatchedNetwork(schedule)
    job = VirtualJob(schedule, network=network)
    steps = 0
    while steps < num_steps and network.unfinished and network.step():
        steps += 1
    return job, steps


@cache
def play_with_death(seed: int, victim: str) -> tuple[WatchedNetwork, int]:
    """A schedule in which one rank of this kind fails: the network at the end, and who it was."""
    pick = random.Random(f"{seed} {victim}")
    schedule = replace(Schedule.from_seed(seed), mistake="", death=None)
    if victim == "server":
        schedule = replace(schedule, servers=max(2, schedule.servers))
    _, num_steps = play_until(schedule)
    while True:
        job, _ = play_until(schedule, pick.randrange(num_steps))
        assert isinstance(job.network, WatchedNetwork)
        alive = {
            "worker": [peer for peer in job.network.unfinished if is_worker(peer)],
            "registrar": [COORDINATOR],
            "server": [peer for peer in job.network.unfinished if peer > 0 and not is_worker(peer)],
        }[victim]
        if alive:
            dead = pick.choice(alive)
            break
    job.network.crash(dead, notice_s=pick.choice([0.0, 1e-4, 1e-2]))
    job.network.run()
    return job.network, dead


@pytest.mark.parametrize("victim", ["worker", "server", "registrar"])
def test_everybody_ends_with_the_name_of_the_dead_and_nobody_waits(victim: str) -> None:
    num_errors = 0
    for seed in SEEDS:
        network, dead = play_with_death(seed, victim)
        assert not network.unfinished, f"seed {seed}: they wait for ever: {network.unfinished}"
        for peer, error in network.errors.items():
            assert isinstance(error, PeerLostError), f"seed {seed}: {describe_peer(peer)}"
            assert str(error).startswith(f"{describe_peer(dead)} has failed; ")
            assert str(error).endswith("restart the job")
        num_errors += len(network.errors)
    # A rank that had only the last message left to receive may have ended in time.
    assert num_errors > 2 * len(SEEDS)


@pytest.mark.parametrize("victim", ["worker", "server", "registrar"])
def test_everything_that_had_left_the_dead_is_delivered_before_its_loss(victim: str) -> None:
    num_messages = 0
    for seed in SEEDS:
        network, dead = play_with_death(seed, victim)
        for peer in network._endpoints:
            if peer == dead:
                continue
            sent = network.sent.get((dead, peer), [])
            given = network.given[dead, peer]
            assert given == [*sent, None], f"seed {seed}: from {dead} to {peer}"
            num_messages += len(sent)
    assert num_messages > 5 * len(SEEDS)
