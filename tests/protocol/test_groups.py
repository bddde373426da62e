"""Groups of one to four workers under seeded schedules, with the Trainer that jobs use.

Random schedules have such groups, too (test_schedules). Here: sync in groups equals one process bit
for bit, and a group that is broken on purpose is caught.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from psdist.commands.check import check
from psdist.errors import CollectiveError, HyperparameterError, InvariantError
from psdist.workers.group.channel import Done, GroupChannel, Pending, Slices
from tests.support.virtual.group import VirtualChannel
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.numbers import gradient_of, initial_values
from tests.support.virtual.proof import prove
from tests.support.virtual.virtual_worker import VirtualWorker

ITERATIONS = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def schedule_of(sizes: Sequence[int], **changes: Any) -> Schedule:
    schedule = Schedule(
        seed=sum(sizes),
        group_sizes=tuple(sizes),
        iterations=(ITERATIONS,) * len(sizes),
        collectives=((2,),) * len(sizes),
        compute_s=tuple(1e-4 * (1 + group) for group in range(len(sizes))),
        num_chunks=6,
        servers=2,
    )
    return replace(schedule, **changes)


# -- as one process ------------------------------------------------------------------------------


def random_gradient(worker: int, clock: int, index: int, parameter: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(worker + 100 * clock + 10_000 * index)
    return torch.randn(parameter.shape, generator=generator)


class HasRandomGradients(VirtualWorker):
    def gradient(self, index: int, parameter: Tensor) -> Tensor:
        return random_gradient(self.worker, self.clock, index, parameter)


def flat_of(job: VirtualJob, pieces: Sequence[Tensor]) -> Tensor:
    """The pieces where they lie in the job's only buffer."""
    (buffer,) = job.partition.buffers
    flat = torch.zeros(buffer.num_elements)
    for piece, start in buffer.piece_starts:
        flat[start : start + len(pieces[piece])] = pieces[piece]
    return flat


def initial_pieces(job: VirtualJob) -> list[Tensor]:
    return [initial_values(i, torch.empty(p.shape)) for i, p in enumerate(job.partition.pieces)]


@pytest.mark.parametrize("sizes", [(1, 1), (2,), (4,), (2, 2), (2, 1, 1), (4, 4)], ids=str)
def test_sync_in_groups_equals_one_process_with_the_mean_of_all_workers(
    sizes: tuple[int, ...],
) -> None:
    job = play(schedule_of(sizes))
    prove(job)

    # These gradients are exact in any order of adding.
    pieces = initial_pieces(job)
    plain = torch.optim.SGD(pieces, lr=job.schedule.lr)
    workers = range(sum(sizes))
    for clock in range(ITERATIONS):
        for index, piece in enumerate(pieces):
            gradients = [gradient_of(worker, clock, index, piece) for worker in workers]
            piece.grad = torch.stack(gradients).mean(dim=0)
        plain.step()
    assert torch.equal(job.parameters(), flat_of(job, pieces))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3,), (2, 3), (4, 1), (3, 4, 2)], ids=str)
@pytest.mark.parametrize("servers", [1, 3])
def test_sync_in_groups_adds_in_worker_order_and_then_in_group_order(
    sizes: tuple[int, ...], servers: int
) -> None:
    job = play(schedule_of(sizes, servers=servers), make_worker=HasRandomGradients)
    prove(job)

    pieces = initial_pieces(job)
    plain = torch.optim.SGD(pieces, lr=job.schedule.lr)
    for clock in range(ITERATIONS):
        for index, piece in enumerate(pieces):
            total = torch.zeros_like(piece)
            for members in job.groups:
                mean = torch.zeros_like(piece)
                for worker in members:
                    mean += random_gradient(worker, clock, index, piece).mul_(1 / len(members))
                total.add_(mean, alpha=len(members))
            piece.grad = total.mul_(1 / sum(sizes))
        plain.step()
    assert torch.equal(job.parameters(), flat_of(job, pieces))


@pytest.mark.parametrize("sizes", [(3,), (2, 3)], ids=str)
def test_delays_in_a_group_change_no_bit(sizes: tuple[int, ...]) -> None:
    results = [
        play(
            schedule_of(sizes, seed=seed, jitter_s=10.0**-seed), make_worker=HasRandomGradients
        ).parameters()
        for seed in (2, 3, 4)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_all_workers_of_a_group_hold_the_same_bytes_and_a_group_waits_for_its_slowest() -> None:
    schedule = schedule_of((3, 4), mode="async", compute_s=(1e-4, 1.0), collectives=((), ()))
    job = play(schedule)
    prove(job)
    for members in job.groups:
        held = [b"".join(job.workers[worker].parameters) for worker in members]
        assert held == [held[0]] * len(members)
    assert check(job.history()).max_staleness == ITERATIONS - 1


# -- broken on purpose ---------------------------------------------------------------------------


class BrokenChannel:
    """A worker's end of its group; a test overrides the method with the mistake."""

    def __init__(self, channel: GroupChannel) -> None:
        self.place, self.size = channel.place, channel.size
        self.channel = channel
        self.num_gathers = 0

    def allocate(self, num_bytes: int) -> memoryview:
        return self.channel.allocate(num_bytes)

    def agree(self, call: str, values: Sequence[float] = ()) -> Pending[list[list[float]]]:
        return self.channel.agree(call, values)

    def reduce_scatter(self, flats: Sequence[Tensor], slices: Slices) -> Pending[None]:
        return self.channel.reduce_scatter(flats, slices)

    def all_gather(self, flats: Sequence[Tensor], slices: Slices) -> Pending[None]:
        """The first follows the pull, number 2 + n is that of iteration n."""
        self.num_gathers += 1
        return self.gather(flats, slices)

    def gather(self, flats: Sequence[Tensor], slices: Slices) -> Pending[None]:
        return self.channel.all_gather(flats, slices)

    def broadcast(self, tensor: Tensor, place: int) -> Pending[None]:
        return self.channel.broadcast(tensor, place)


def play_broken(
    broken: type[BrokenChannel], *, worker: int = 2, schedule: Schedule | None = None
) -> VirtualJob:
    """One worker of a group of three has this channel; there is a group of two as well."""
    job = VirtualJob(schedule or schedule_of((3, 2)), make_worker=HasRandomGradients)
    group = job.workers[worker].trainer.strategy.group
    group.channel = broken(group.channel)
    job.run()
    return job


def test_the_channel_that_tests_break_is_whole_before() -> None:
    prove(play_broken(BrokenChannel))


def test_a_step_is_one_agreement_one_reduce_scatter_and_one_all_gather(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    for name in ("agree", "reduce_scatter", "all_gather"):
        real = getattr(VirtualChannel, name)

        def counting(self: VirtualChannel, first: Any, *rest: Any, real: Any = real) -> Any:
            made.append(first if isinstance(first, str) else real.__name__)
            return real(self, first, *rest)

        monkeypatch.setattr(VirtualChannel, name, counting)
    prove(play(schedule_of((2,), collectives=((),))))
    steps = 2 * ITERATIONS
    assert Counter(made)["optimizer.step"] == steps
    assert Counter(made)["reduce_scatter"] == steps
    assert Counter(made)["all_gather"] == steps + Counter(made)["pull"]


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3), (4,)])
def test_a_group_pushes_one_gradient_and_pulls_one_set_of_parameters_in_an_iteration(
    sizes: tuple[int, ...], is_shuffled: bool
) -> None:
    job = play(
        schedule_of(sizes, num_chunks=7, is_shuffled=is_shuffled, collectives=((),) * len(sizes))
    )
    whole = job.partition.num_bytes
    for members in job.groups:
        counts = [job.workers[worker].core.counts() for worker in members]
        assert sum(each.bytes_pushed for each in counts) == ITERATIONS * whole
        assert sum(each.bytes_pulled for each in counts) == (1 + ITERATIONS) * whole
        if is_shuffled:
            most = ITERATIONS * job.partition.max_chunk_bytes
            pushed = [each.bytes_pushed for each in counts]
            assert max(pushed) - min(pushed) <= most


class SkipsAGather(BrokenChannel):
    skipped = 4

    def gather(self, flats: Sequence[Tensor], slices: Slices) -> Pending[None]:
        if self.num_gathers == self.skipped:
            return Done(None)
        return super().gather(flats, slices)


class SkipsTheLastGather(SkipsAGather):
    skipped = 1 + ITERATIONS


def test_a_worker_that_skips_an_all_gather_is_caught() -> None:
    with pytest.raises(InvariantError, match=r"different operations: .*'all_gather'.*'agree'"):
        play_broken(SkipsAGather)


def test_a_worker_that_skips_the_last_all_gather_leaves_its_group_waiting() -> None:
    schedule = schedule_of((3, 2), collectives=((), ()))
    with pytest.raises(AssertionError, match="still waiting"):
        play_broken(SkipsTheLastGather, schedule=schedule)


class GathersBeforeItReduces(BrokenChannel):
    def reduce_scatter(self, flats: Sequence[Tensor], slices: Slices) -> Pending[None]:
        self.channel.all_gather(flats, slices)
        return super().reduce_scatter(flats, slices)


def test_a_worker_that_calls_them_in_another_order_is_caught() -> None:
    with pytest.raises(InvariantError, match=r"different operations: .*'reduce_scatter'"):
        play_broken(GathersBeforeItReduces)


class GivesAnotherVersion(BrokenChannel):
    """In iteration 2 the bytes that it gives are those of iteration 1."""

    kept: list[Tensor]

    def gather(self, flats: Sequence[Tensor], slices: Slices) -> Pending[None]:
        mine = [
            flats[span.buffer][span.start : span.stop]
            for span in slices[self.place]
            if flats[span.buffer].is_floating_point()
        ]
        if self.num_gathers == 4:
            for part, old in zip(mine, self.kept, strict=True):
                part.copy_(old)
        self.kept = [part.clone() for part in mine]
        return super().gather(flats, slices)


class GivesAnOldVersion(GivesAnotherVersion):
    """With the position in the log that these bytes had."""

    def gather(self, flats: Sequence[Tensor], slices: Slices) -> Pending[None]:
        positions = flats[-1]
        assert not positions.is_floating_point()
        (span,) = (span for span in slices[self.place] if span.buffer == len(flats) - 1)
        if self.num_gathers == 4:
            positions[span.start : span.stop] = self.positions
        self.positions = positions[span.start : span.stop].clone()
        return super().gather(flats, slices)


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_slice_that_is_given_from_another_version_is_caught(worker: int) -> None:
    report = check(play_broken(GivesAnotherVersion, worker=worker).history())
    assert not report.proved
    assert "bytes" in report.violations[0]


def test_a_slice_that_is_given_from_an_old_version_is_caught() -> None:
    report = check(play_broken(GivesAnOldVersion).history())
    assert not report.proved
    assert "contain" in " ".join(report.violations)


class TakesNoSlices(BrokenChannel):
    """Begins to gather, and continues with what is in memory."""

    def gather(self, flats: Sequence[Tensor], slices: Slices) -> Pending[None]:
        super().gather(flats, slices)
        return Done(None)


def test_a_worker_that_does_not_wait_for_the_slices_of_the_others_is_caught() -> None:
    report = check(play_broken(TakesNoSlices).history())
    assert not report.proved
    assert all("worker 2" in violation for violation in report.violations)


def test_a_worker_that_pulls_while_its_group_steps_is_an_error_for_all_of_the_group() -> None:
    told: list[str] = []

    class Pulls(VirtualWorker):
        def iterate(self) -> Iterator[float | None]:
            try:
                if self.worker == 1 and self.clock == 2:
                    yield from self.bring()
                else:
                    yield from super().iterate()
            except CollectiveError as error:
                told.append(str(error))
                raise

    with pytest.raises(CollectiveError):
        play(schedule_of((3,)), make_worker=Pulls)
    assert "the worker at place 1 of the group called pull" in told[0]


def test_a_worker_with_hyperparameters_of_its_own_is_an_error() -> None:
    class IsStubborn(VirtualWorker):
        def draw_lr(self) -> float:
            return 0.25 if self.worker == 1 and self.clock == 2 else super().draw_lr()

    with pytest.raises(HyperparameterError, match=r"workers 0 and 1 .*0\.5 against 0\.25"):
        play(schedule_of((3,)), make_worker=IsStubborn)
