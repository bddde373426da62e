"""Pulls relative to what each group holds, in ssp and async: over the virtual network, with real
codecs. Servers keep x^_g for every reader; who differs from it is found, and gets all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from psdist.codecs import RAW
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.wire import Wire
from psdist.protocol.ids import worker_id
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.virtual_worker import VirtualWorker

COPIES: Final = Wire(
    push=RAW, reply=Sign(), seed=5, is_relative=True, has_copies=True, compare_every=1
)
SCHEDULE: Final = Schedule(
    seed=3, mode="ssp", staleness=2, num_chunks=4, servers=2, group_sizes=(1, 2, 1),
    iterations=(12,) * 3, collectives=((),) * 3, compute_s=(1e-3, 2e-3, 5e-3), lr=0.1,
)  # fmt: skip


def copies_of(job: VirtualJob, worker: VirtualWorker) -> dict[int, torch.Tensor]:
    """Return the servers' copies of this worker's parameters, by chunk of its slice."""
    found = {}
    for chunk in worker.mine:
        executor: Any = job.executor(job.owners[chunk])
        held = executor.replies.held_by(worker_id(worker.worker), chunk)
        assert held is not None
        found[chunk] = held
    return found


def held(worker: VirtualWorker) -> dict[int, torch.Tensor]:
    return {chunk: worker.loop.replies.held(chunk) for chunk in worker.mine}  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("push", [RAW, Quantized("int4")], ids=["raw", "int4"])
def test_every_reader_holds_what_its_servers_know_that_it_holds(mode: str, push: Any) -> None:
    job = play(replace(SCHEDULE, mode=mode), wire=replace(COPIES, push=push))
    prove(job)
    versions = []
    for worker in job.workers:
        assert worker.loop.replies.num_differing == 0
        mine, theirs = held(worker), copies_of(job, worker)
        assert mine.keys() == theirs.keys() == set(worker.mine)
        assert all(torch.equal(mine[chunk], theirs[chunk]) for chunk in mine)
        versions.append(mine)
    x = {chunk: job.parameters_of(chunk) for chunk in range(4)}
    assert any(not torch.equal(each[chunk], x[chunk]) for each in versions for chunk in each), (
        "nothing was left out: nothing is tested"
    )


def test_replies_are_relative_but_for_the_first() -> None:
    job = play(SCHEDULE, wire=COPIES)
    raw = play(SCHEDULE)
    for worker, other in zip(job.workers, raw.workers, strict=True):
        pulled = worker.core.counts().bytes_pulled
        assert pulled < 0.5 * other.core.counts().bytes_pulled
    # A codec that leaves nothing out gives what raw replies give, in any order of arrival.
    exact = play(SCHEDULE, wire=replace(COPIES, exact_in_replies=("*",)))
    assert torch.equal(exact.parameters(), raw.parameters())


def test_what_is_left_out_comes_later_and_each_copy_follows_the_parameters() -> None:
    class Stops(VirtualWorker):
        def gradient(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
            gradient = super().gradient(index, parameter)
            return gradient if self.clock < 2 else torch.zeros_like(gradient)

    def distance(iterations: int) -> float:
        schedule = replace(SCHEDULE, iterations=(iterations,) * 3)
        job = play(schedule, wire=COPIES, make_worker=Stops)
        return max(
            float((values - job.parameters_of(chunk)).norm())
            for worker in job.workers
            for chunk, values in held(worker).items()
        )

    assert distance(40) < 0.1 * distance(4)


def test_every_schedule_ends_and_keeps_the_rules() -> None:
    """Pulls, values that are set, skipped iterations, absent pieces, deaths, pipelines."""
    num_played = 0
    for seed in range(40):
        schedule = Schedule.from_seed(seed)
        if schedule.mode == "sync" or schedule.has_buddies:
            continue
        num_played += 1
        try:
            job = play(schedule, wire=COPIES)
            prove(job)
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {schedule}") from error
        assert all(each.loop.replies.num_differing == 0 for each in job.workers), f"seed {seed}"
    assert num_played > 20


def test_what_a_worker_holds_wrongly_is_found_by_its_checksum_and_healed() -> None:
    class Corrupted(VirtualWorker):
        def iterate(self) -> Iterator[float | None]:
            yield from super().iterate()
            if self.worker == 1 and self.clock == 3:
                values = self.loop.replies.held(self.mine[0])
                assert values is not None
                values[7] += 1.0

    job = play(SCHEDULE, wire=COPIES, make_worker=Corrupted)
    assert [worker.loop.replies.num_differing for worker in job.workers] == [0, 1, 0, 0]
    for worker in job.workers:
        mine, theirs = held(worker), copies_of(job, worker)
        assert all(torch.equal(mine[chunk], theirs[chunk]) for chunk in mine)
    never = play(SCHEDULE, wire=replace(COPIES, compare_every=1000), make_worker=Corrupted)
    mine, theirs = held(never.workers[1]), copies_of(never, never.workers[1])
    assert not all(torch.equal(mine[chunk], theirs[chunk]) for chunk in mine)
