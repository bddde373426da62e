"""Codecs with feedback in both directions, in sync: over the virtual network, with real codecs.

Servers hold x, and the workers' x^; a reply is the change of x^. Both are
computed again in a loop of a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from psdist.codecs import ANY_SERVER, RAW, seed_of
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import RandK, TopK
from psdist.codecs.wire import Wire
from psdist.protocol.memory import as_tensor
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.proof import prove
from tests.support.virtual.virtual_worker import VirtualWorker

INT4_SIGN: Final = Wire(
    push=Quantized("int4"), reply=Sign(), seed=5, is_relative=True, compare_every=3
)
WIRES: Final = {
    "int4/sign": INT4_SIGN,
    "topk/int8": replace(INT4_SIGN, push=TopK(0.1), reply=Quantized("int8")),
    "stochastic": replace(
        INT4_SIGN,
        push=Quantized("int2", is_stochastic=True),
        reply=RandK(0.5, is_scaled=False),
    ),
    "exact": replace(INT4_SIGN, exact_in_pushes=("*0",), exact_in_replies=("*1",)),
}
SCHEDULE: Final = Schedule(
    seed=3, num_chunks=5, servers=2, group_sizes=(1, 2, 1), iterations=(8,) * 3,
    collectives=((),) * 3, compute_s=(1e-3,) * 3, lr=0.1, momentum=0.9,
)  # fmt: skip


def in_workers(job: VirtualJob) -> list[torch.Tensor]:
    return [
        torch.cat([as_tensor(memory, "float32", 64) for memory in worker.parameters])
        for worker in job.workers
    ]


def held_by_servers(job: VirtualJob) -> torch.Tensor:
    """x^, chunk by chunk."""
    return job.parameters()


def parameters(job: VirtualJob) -> torch.Tensor:
    """x, chunk by chunk."""
    shards: list[Any] = [server.sets[0].executor for server in job.servers]
    found = {chunk: each.values for shard in shards for chunk, each in shard.memory.items()}
    return torch.cat([found[chunk] for chunk in sorted(found)])


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_all_workers_hold_what_their_servers_know_that_they_hold(wire: Wire) -> None:
    job = play(SCHEDULE, wire=wire)
    prove(job)
    held = held_by_servers(job)
    for each in in_workers(job):
        assert torch.equal(each, held)
    assert not torch.equal(held, parameters(job)), "nothing was left out: nothing is tested"
    assert all(worker.loop.replies.num_differing == 0 for worker in job.workers)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_results_are_the_same_bit_by_bit_in_a_repeated_run_and_with_another_number_of_servers(
    wire: Wire,
) -> None:
    first = play(SCHEDULE, wire=wire)
    for other in (
        replace(SCHEDULE, jitter_s=1e-3, seed=11),
        replace(SCHEDULE, servers=1, jitter_s=1e-3),
        replace(SCHEDULE, servers=3),
    ):
        again = play(other, wire=wire)
        assert torch.equal(parameters(again), parameters(first))
        for one, two in zip(in_workers(first), in_workers(again), strict=True):
            assert torch.equal(one, two)
    seeded = play(SCHEDULE, wire=replace(wire, seed=6))
    is_random = wire is WIRES["stochastic"]
    assert torch.equal(parameters(seeded), parameters(first)) != is_random


def test_what_is_left_out_of_replies_comes_later_and_what_is_held_follows_the_parameters() -> None:
    """Without a gradient that moves anything x stays, and x^ comes to it."""

    class Stops(VirtualWorker):
        def gradient(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
            gradient = super().gradient(index, parameter)
            return gradient if self.clock < 2 else torch.zeros_like(gradient)

    schedule = replace(SCHEDULE, momentum=0.0, iterations=(40,) * 3)
    job = play(schedule, wire=replace(INT4_SIGN, push=RAW), make_worker=Stops)
    far = play(
        replace(schedule, iterations=(3,) * 3), wire=replace(INT4_SIGN, push=RAW), make_worker=Stops
    )
    assert torch.equal(parameters(far), parameters(job))
    distances = [float((held_by_servers(each) - parameters(each)).norm()) for each in (far, job)]
    assert distances[1] < 0.1 * distances[0]


def test_relative_replies_are_computed_again() -> None:
    job = play(replace(SCHEDULE, servers=1), wire=replace(INT4_SIGN, push=RAW))
    raw = play(replace(SCHEDULE, servers=1))
    # With raw pushes x is the same as without codecs, because gradients do not depend on x^ here.
    assert torch.equal(parameters(job), parameters(raw))
    codings = INT4_SIGN.replies(job.partition)
    assert codings is not None
    steps: list[torch.Tensor] = []
    for num in range(SCHEDULE.iterations[0] + 1):
        steps.append(play(replace(SCHEDULE, servers=1, iterations=(num,) * 3)).parameters())
    held = steps[0].clone()
    for clock, values in enumerate(steps[1:]):
        for chunk in job.partition.chunks:
            place, into = slice(64 * chunk.index, 64 * chunk.index + 64), bytearray(1000)
            coding, of_chunk = codings[chunk.index], held[place].clone()
            seed = seed_of(5, ANY_SERVER, chunk.index, clock)
            length = coding.encode(
                values[place] - of_chunk, memoryview(into), whole=values[place], seed=seed
            )
            content = coding.read(memoryview(into)[:length])
            held[place] = of_chunk + content.values()
    assert torch.equal(held, held_by_servers(job))


@pytest.mark.parametrize("first", [0, pytest.param(40, marks=pytest.mark.slow)])
def test_every_schedule_in_sync_ends_and_keeps_the_rules(first: int) -> None:
    """Collectives, pulls, values that are set, skipped iterations, absent pieces, deaths."""
    num_played = 0
    for seed in range(first, first + 40):
        schedule = Schedule.from_seed(seed)
        if schedule.mode != "sync":
            continue
        num_played += 1
        try:
            job = play(schedule, wire=INT4_SIGN)
            prove(job)
        except Exception as error:  # say which schedule, whatever went wrong
            raise AssertionError(f"seed {seed}: {schedule}") from error
        assert all(each.loop.replies.num_differing == 0 for each in job.workers)
    assert num_played > 5


def test_what_a_worker_holds_wrongly_is_found_by_its_checksum_and_healed() -> None:
    class Corrupted(VirtualWorker):
        def iterate(self) -> Iterator[float | None]:
            yield from super().iterate()
            if self.worker == 1 and self.clock == 3:
                held = self.loop.replies.held(self.mine[0])
                assert held is not None
                held[7] += 1.0

    job = play(SCHEDULE, wire=INT4_SIGN, make_worker=Corrupted)
    held = held_by_servers(job)
    for each in in_workers(job):
        assert torch.equal(each, held)
    assert [worker.loop.replies.num_differing for worker in job.workers] == [0, 1, 0, 0]
    never = play(SCHEDULE, wire=replace(INT4_SIGN, compare_every=1000), make_worker=Corrupted)
    assert not torch.equal(in_workers(never)[1], held_by_servers(never))


def test_what_a_script_writes_is_replaced_and_replies_stay_relative() -> None:
    """x^ lies apart from the parameters: nothing has to come in full."""

    class Writes(VirtualWorker):
        def iterate(self) -> Iterator[float | None]:
            yield from super().iterate()
            with torch.no_grad():
                for parameter in self.model:
                    parameter += 1.0

    schedule = replace(SCHEDULE, collectives=((),) * 3)
    job, plain = (
        play(schedule, wire=INT4_SIGN, make_worker=each) for each in (Writes, VirtualWorker)
    )
    assert torch.equal(held_by_servers(job), held_by_servers(plain))
    for one, other in zip(job.workers, plain.workers, strict=True):
        assert one.core.counts().bytes_pulled == other.core.counts().bytes_pulled
        held = torch.cat([one.loop.replies.held(chunk) for chunk in one.mine])
        assert torch.equal(held, held_by_servers(job).view(-1, 64)[list(one.mine)].view(-1))
