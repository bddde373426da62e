"""The protocol under seeded schedules: the code that runs on MPI, over the virtual network.

After every event the machine that has handled it is checked, and what passed is counted at the
network and at the memory (``watch`` of tests/support/virtual); after every run its end, its history
and its values (``proof``). The last part breaks servers and workers on purpose: each break
must be caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from psdist.commands.check import check
from psdist.errors import HyperparameterError, InvariantError
from psdist.protocol.collected import PREPARED
from psdist.protocol.control import Setup
from psdist.protocol.events import Arrived, Frame, Offered
from psdist.protocol.ids import server_id, worker_id
from psdist.servers.protocol.actions import Step
from psdist.servers.protocol.assembly import rule_for
from psdist.servers.set_loop import SetLoop
from psdist.transport.virtual import Actor
from psdist.transport.waiting import Waiting
from psdist.workers.assembly import make_loop
from psdist.workers.model.saving import PlainMemory
from psdist.workers.protocol import Seat
from tests.protocol.regressions import REGRESSIONS
from tests.support.virtual.job import Schedule, VirtualJob, play, small_partition
from tests.support.virtual.network import LinkModel, VirtualNetwork
from tests.support.virtual.proof import prove
from tests.support.virtual.schedule import Size
from tests.support.virtual.virtual_worker import VirtualWorker

BLOCK = 100


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, option, block in (
        ("first_small", "--schedules", BLOCK),
        ("large_seed", "--large-schedules", 1),
    ):
        if name in metafunc.fixturenames:
            num_schedules: int = metafunc.config.getoption(option)
            metafunc.parametrize(name, range(0, num_schedules, block))


def prove_seed(seed: int, size: Size) -> None:
    schedule = Schedule.from_seed(seed, size=size)
    try:
        prove(play(schedule))
    except Exception as error:  # say which schedule, whatever went wrong
        raise AssertionError(f"{size} seed {seed}: {schedule}") from error


def test_every_small_schedule_ends_and_keeps_its_modes_rules(first_small: int) -> None:
    for seed in range(first_small, first_small + BLOCK):
        prove_seed(seed, "small")


def test_a_large_schedule_ends_and_keeps_its_modes_rules(large_seed: int) -> None:
    prove_seed(large_seed, "large")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 30_000, 10 * BLOCK))
def test_many_more_small_schedules_end_and_keep_their_modes_rules(first: int) -> None:
    for seed in range(first, first + 10 * BLOCK):
        prove_seed(seed, "small")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1_000, 1_500, BLOCK))
def test_many_more_large_schedules_end_and_keep_their_modes_rules(first: int) -> None:
    for seed in range(first, first + BLOCK):
        prove_seed(seed, "large")


@pytest.mark.parametrize("what", REGRESSIONS)
def test_a_schedule_that_once_failed_stays_mended(what: str) -> None:
    prove(play(REGRESSIONS[what]))


PLAIN = Schedule(
    seed=1,
    group_sizes=(1, 1, 1),
    iterations=(6, 6, 6),
    collectives=((), (), ()),
    compute_s=(1e-3, 2e-4, 2e-4),
    num_chunks=4,
    servers=2,
)


@pytest.mark.parametrize("receive_buffers", [2, 3, 8])
def test_sync_gives_the_same_bits_whatever_the_delays_and_buffers(receive_buffers: int) -> None:
    results = [
        play(
            replace(
                PLAIN, seed=seed, jitter_s=10.0**-seed, receive_buffers=receive_buffers, servers=3
            )
        ).parameters()
        for seed in (2, 3, 4, 5)
    ]
    one_server = play(replace(PLAIN, servers=1)).parameters()
    assert all(torch.equal(result, one_server) for result in results)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_ssp_lets_fast_groups_ahead_by_the_bound_and_no_further(bound: int) -> None:
    schedule = replace(PLAIN, mode="ssp", staleness=bound, iterations=(10, 10, 10))
    job = play(schedule)
    prove(job)
    report = check(job.history())
    assert report.max_staleness == bound


def test_async_lets_fast_groups_finish_without_waiting() -> None:
    job = play(replace(PLAIN, mode="async", compute_s=(1.0, 1e-4, 1e-4)))
    prove(job)
    assert check(job.history()).max_staleness == 5


def test_a_pull_waits_for_the_slowest_group_and_a_fresh_one_does_not() -> None:
    waited: dict[bool, float] = {}
    for is_fresh in (False, True):
        job = VirtualJob(replace(PLAIN, mode="ssp", staleness=0, group_sizes=(1, 1),
                                 iterations=(1, 0), collectives=((), ()),
                                 compute_s=(1.0, 1.0)))  # fmt: skip
        puller = job.workers[1]

        def pull(worker: VirtualWorker = puller, is_fresh: bool = is_fresh) -> Iterator[Any]:
            worker.loop.begin_register()
            yield from worker._until(lambda: not worker.core.membership.is_joining)
            yield from worker._collective("prepare", PREPARED)
            worker.loop.begin_pull(clock=1, chunks=worker.mine, is_fresh=is_fresh)
            yield from worker._until(lambda: worker.core.is_idle)
            waited[is_fresh] = worker.job.network.now_s
            worker.history.close()
            worker.loop.finish({})
            yield from worker._until(lambda: worker.core.membership.is_stopped)

        job.network._actors[puller.loop.transport.me] = pull()
        job.network.run(until=lambda is_fresh=is_fresh: is_fresh in waited)
    # The slow group computes at least 0.5 virtual seconds. The puller's own group has made no
    # iteration, so nothing but the fresh pull can be answered before it has left.
    assert waited.get(True, 9.0) < 0.1
    assert False not in waited


# -- one job after another over one transport, as bench pushpull measures its sizes -------------

MANY_CHUNKS = replace(PLAIN, mode="async", num_chunks=8, jitter_s=1e-5, sent_s=0.1)
ONE_CHUNK = replace(MANY_CHUNKS, num_chunks=1)


def play_in_turn(*schedules: Schedule, **broken: Any) -> list[VirtualJob]:
    """Each job begins as soon as every rank of the one before is finished, whatever the network
    still has to tell."""
    jobs: list[VirtualJob] = []
    for schedule in schedules:
        network = jobs[-1].network if jobs else None
        jobs.append(VirtualJob(schedule, network=network, **broken))
        jobs[-1].network.run(until=lambda job=jobs[-1]: not job.network.unfinished)
        assert not jobs[-1].network.unfinished
    return jobs


@pytest.mark.parametrize("seed", range(8))
def test_a_server_after_another_gets_none_of_the_replies_of_the_one_before(seed: int) -> None:
    for job in play_in_turn(replace(MANY_CHUNKS, seed=seed), ONE_CHUNK, MANY_CHUNKS):
        prove(job)


class FinishesWithRepliesUnderWay(SetLoop):
    """Answers Finish although the network still has frames of this loop."""

    has_open_replies = False  # type: ignore[assignment]


def test_a_server_that_finishes_with_replies_under_way_is_caught() -> None:
    with pytest.raises(InvariantError, match="of a server before this one"):
        play_in_turn(MANY_CHUNKS, ONE_CHUNK, make_set=FinishesWithRepliesUnderWay)


def test_a_worker_after_another_is_not_told_that_its_setup_is_sent() -> None:
    network = VirtualNetwork(link=LinkModel(sent_s=1.0))
    server = network.endpoint(server_id(0))

    def receive() -> Actor:
        while True:
            event = server.poll()
            if isinstance(event, Offered):
                server.accept(event.ticket, Frame(memoryview(bytearray(event.num_bytes))))
            elif isinstance(event, Arrived):
                return
            else:
                yield None

    network.spawn(server_id(0), receive())
    partition = small_partition(1)
    seat = Seat(worker=0, group=0, members=(0,), num_servers=1)
    transport, waiting = network.endpoint(worker_id(0)), Waiting(is_spinning=False)
    first, second = (make_loop(transport, seat, waiting=waiting) for _ in range(2))
    for loop in (first, second):
        loop.take_slice(partition, owners=[0], credits=1, frames=PlainMemory(partition))
    first.begin_setup(Setup(partition=b"", optimizer="", hyper=b""))
    network.run(until=lambda: not network.unfinished)
    assert not first.turn()
    network.run()
    assert second.turn()
    assert not second.core.membership.is_joining
    assert first.core.membership.is_joining


# -- broken on purpose -------------------------------------------------------------------------


def test_check_catches_a_server_that_allows_one_iteration_too_many() -> None:
    schedule = replace(PLAIN, mode="ssp", staleness=1, iterations=(10, 10, 10))
    job = play(schedule, rule=lambda _server: rule_for("ssp", staleness=2))
    report = check(job.history())
    assert not report.proved
    assert "contain" in " ".join(report.violations)


def test_check_catches_one_server_of_two_that_does_not_wait_in_sync() -> None:
    modes = ["sync", "ssp"]
    job = play(PLAIN, rule=lambda server: rule_for(modes[min(server, 1)], staleness=1))
    assert not check(job.history()).proved


class OverwritesRepliesInFlight(SetLoop):
    """Steps in place although a reply from that buffer is open."""

    def _step(self, action: Step) -> None:
        action.target = action.source
        super()._step(action)

    def _reply(self, action: Any) -> None:
        honest, action.token.buffer = action.token.buffer, 0
        super()._reply(action)
        action.token.buffer = honest  # the state machine counts its open replies right


OVERWRITING = replace(
    PLAIN, mode="async", compute_s=(1e-5, 1e-5, 1e-5), jitter_s=1e-3, iterations=(10, 10, 10)
)


def test_check_catches_replies_overwritten_in_flight() -> None:
    job = VirtualJob(
        OVERWRITING,
        make_set=OverwritesRepliesInFlight,
        verify_open_sends=False,
        is_watched=False,
    )
    job.network.run()
    report = check(job.history())
    assert not report.proved
    assert "bytes" in " ".join(report.violations) or "crc" in " ".join(report.violations)


def test_the_virtual_network_catches_replies_overwritten_in_flight() -> None:
    job = VirtualJob(OVERWRITING, make_set=OverwritesRepliesInFlight, is_watched=False)
    with pytest.raises(InvariantError, match="changed the bytes of an open send"):
        job.network.run()


def test_honest_servers_copy_instead_of_overwriting() -> None:
    job = play(OVERWRITING)
    prove(job)
    copies = sum(server.sets[0].core.statistics().copies_on_write for server in job.servers)
    assert copies > 0, "this schedule was meant to overlap replies and steps"


def test_check_catches_a_worker_that_uses_an_old_buffer() -> None:
    class KeepsOldBytes(VirtualWorker):
        def iterate(self) -> Iterator[float | None]:
            kept = bytes(self.parameters[0])
            yield from super().iterate()
            if self.worker == 2 and self.clock == 3:
                self.parameters[0][:] = kept

    job = play(replace(PLAIN, iterations=(6, 6, 6)), make_worker=KeepsOldBytes)
    report = check(job.history())
    assert not report.proved
    assert "worker 2" in report.violations[0]


def test_groups_that_disagree_on_hyperparameters_in_sync_are_named() -> None:
    job = VirtualJob(PLAIN)
    stubborn = job.workers[1]
    stubborn.hyper = lambda lr: VirtualWorker.hyper(stubborn, lr / 2)  # type: ignore[method-assign]
    with pytest.raises(HyperparameterError, match=r"groups 0 and 1 disagree.*0\.5 .*0\.25"):
        job.network.run()


# -- memory and cost ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [4, 16])
def test_receive_buffers_do_not_grow_with_the_groups(num_groups: int) -> None:
    job = play(
        replace(
            PLAIN,
            group_sizes=(1,) * num_groups,
            iterations=(3,) * num_groups,
            collectives=((),) * num_groups,
            compute_s=(1e-6,) * num_groups,
            receive_buffers=3,
            credits=4,
            servers=1,
        )
    )
    prove(job)
    assert job.servers[0].sets[0].core.statistics().most_slots_used <= 3
