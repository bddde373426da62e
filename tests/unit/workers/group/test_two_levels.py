"""A group of several hosts: the same sums from whatever it is made, one crossing for each host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from psdist.errors import CollectiveError, InvariantError, MemberLostError, TransportError
from psdist.protocol.ids import worker_id
from psdist.protocol.partition import Span
from psdist.transport.virtual import Actor
from psdist.workers.group import two_levels
from psdist.workers.group.channel import GroupChannel, Pending
from psdist.workers.group.tier import Tier
from tests.support.group_operations import Operations, expected, finish, operations
from tests.support.process_groups import run_in_group
from tests.support.virtual.group import VirtualChannel
from tests.support.virtual.host_groups import over_hosts
from tests.support.virtual.network import LinkModel, VirtualNetwork

LAYOUTS = [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [2, 0, 0, 1, 1, 0], [0, 1, 2, 2]]


class Counted(VirtualChannel):
    """The end of the whole group; what it gives to each place."""

    given: list[int]

    def exchange(
        self,
        given: torch.Tensor,
        to: Sequence[int],
        taken: torch.Tensor,
        of: Sequence[int],
        *,
        in_turns: int = 1,
    ) -> Pending[None]:
        self.given = list(to)
        return super().exchange(given, to, taken, of, in_turns=in_turns)


class OverHosts:
    """Virtual groups of the hosts' workers, and of all."""

    def __init__(self, hosts: Sequence[int], seed: int) -> None:
        self.network = VirtualNetwork(seed=seed)
        self.channels = over_hosts(
            self.network,
            [worker_id(place) for place in range(len(hosts))],
            hosts,
            seed=seed,
            link=LinkModel(latency_s=1e-5, jitter_s=1e-3),
            over=Counted,
        )

    def given(self, place: int) -> list[int]:
        """Bytes that it gave to each place in the last exchange."""
        over = self.channels[place].over
        assert isinstance(over, Counted)
        return over.given

    def run(self, scripts: Sequence[Operations]) -> list[Any]:
        results: list[list[Any]] = [[] for _ in scripts]
        for place, script in enumerate(scripts):
            self.network.spawn(worker_id(place), act(script, results[place]))
        self.network.run()
        assert not self.network.unfinished
        return [result for (result,) in results]


def act(script: Operations, results: list[Any]) -> Actor:
    while True:
        try:
            pending = next(script)
        except StopIteration as stop:
            results.append(stop.value)
            return
        while not pending.is_done():
            yield None


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_sums_are_per_host_in_worker_order_and_then_in_the_order_of_hosts(
    hosts: list[int], seed: int
) -> None:
    group = OverHosts(hosts, seed)
    scripts = [operations(channel, channel.duplicate()) for channel in group.channels]
    for place, result in enumerate(group.run(scripts)):
        assert result == expected(place, len(hosts), hosts), f"place {place}"


def test_the_order_of_hosts_can_be_seen_in_the_sums() -> None:
    """Else the tests here would show nothing."""
    assert expected(0, 4, [0, 0, 1, 1]) != expected(0, 4)


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_a_slice_crosses_once_for_each_other_host_however_many_workers_that_has(
    hosts: list[int],
) -> None:
    group, size = OverHosts(hosts, 0), len(hosts)
    each = 64
    slices = [[Span(0, each * place, each * (place + 1))] for place in range(size)]

    def script(channel: GroupChannel) -> Operations:
        flats = [torch.ones(each * size)]
        pending = channel.reduce_scatter(flats, slices)
        yield pending
        pending.result()
        given = group.given(channel.place)
        pending = channel.all_gather(flats, slices)
        yield pending
        pending.result()
        assert flats[0].tolist() == [size] * len(flats[0])
        return {"reduced": given, "gathered": group.given(channel.place)}

    results = group.run([script(channel) for channel in group.channels])
    for mine, other in itertools.permutations(set(hosts), 2):
        here = [place for place, host in enumerate(hosts) if host == mine]
        there = [place for place, host in enumerate(hosts) if host == other]
        reduced = sum(results[place]["reduced"][to] for place in here for to in there)
        gathered = sum(results[place]["gathered"][to] for place in here for to in there)
        assert reduced == 4 * each * len(there)
        assert gathered == 4 * each * len(here)


def test_operations_that_were_begun_together_are_carried_out_one_after_the_other() -> None:
    group = OverHosts([0, 0, 1, 1], 3)
    slices = [[Span(0, 4 * place, 4 * place + 4)] for place in range(4)]

    def script(channel: GroupChannel) -> Operations:
        flats = [torch.full((16,), float(1 + channel.place))]
        begun: list[Pending[Any]] = [
            channel.reduce_scatter(flats, slices),
            channel.all_gather(flats, slices),
            channel.agree("any", [channel.place]),
        ]
        with pytest.raises(InvariantError, match="before it was done"):
            begun[2].result()
        yield begun[2]
        assert all(each.is_done() for each in begun)
        return {"rows": begun[2].result(), "flat": flats[0].tolist()}

    for result in group.run([script(channel) for channel in group.channels]):
        assert result == {"rows": [[0], [1], [2], [3]], "flat": [10.0] * 16}


def test_workers_on_several_hosts_that_call_different_things_are_all_told_so() -> None:
    group = OverHosts([0, 0, 1], 0)

    def script(channel: GroupChannel) -> Operations:
        pending = channel.agree("save" if channel.place == 2 else "pull")
        yield pending
        with pytest.raises(CollectiveError, match="place 2 of the group called save") as told:
            pending.result()
        again = channel.agree("finish")
        yield again
        again.result()
        return {"told": str(told.value)}

    first, *others = group.run([script(channel) for channel in group.channels])
    assert others == [first, first]


def test_slices_that_overlap_are_refused_before_anything_is_sent() -> None:
    channel = OverHosts([0, 1], 0).channels[0]
    with pytest.raises(InvariantError, match="from 11 on of flat 0 twice"):
        channel.reduce_scatter([torch.ones(24)], [[Span(0, 0, 12)], [Span(0, 11, 24)]])


# -- between processes ---------------------------------------------------------------------------


def all_operations(channel: GroupChannel) -> Any:
    assert type(channel).__name__ == "TwoLevelChannel"
    two_levels._TURN_BYTES = 48  # type: ignore[misc] # so that exchanges take several turns
    return finish(operations(channel, channel.duplicate()))


@pytest.mark.parametrize(
    ("hosts", "tier"),
    [
        ([0, 0, 1, 1], "auto"),
        ([0, 0, 1], "torch"),
        pytest.param([0, 1, 0, 0], "shared_memory", marks=pytest.mark.slow),
        pytest.param([0, 1], "auto", marks=pytest.mark.slow),
    ],
)
def test_processes_on_several_hosts_do_the_same_whichever_tier(
    hosts: list[int], tier: Tier
) -> None:
    results = run_in_group(len(hosts), all_operations, tier=tier, hosts=hosts)
    for place, result in enumerate(results):
        assert result == expected(place, len(hosts), hosts), f"place {place}"


@pytest.mark.parametrize("kind", [MemberLostError, TransportError])
def test_an_error_among_a_hosts_workers_is_of_its_kind_and_says_where(
    kind: type[TransportError],
) -> None:
    def fail() -> Any:
        raise kind("the worker at place 1 of it has ended")
        yield

    with pytest.raises(TransportError, match="among the workers of this host: ") as raised:
        next(two_levels._of_host(fail()))
    assert type(raised.value) is kind
