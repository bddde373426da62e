"""Faults that only values show: the history of each such run is proved, its numbers are wrong.

Every fault is made once, in one step of one chunk or one iteration of one worker, as a machine or a
loop might make it. The oracle (tests/support/virtual/reference.py) must see each, and far off: a
mistake must not be within a few times of what rounding may do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from psdist.commands.check import check
from psdist.protocol.ids import server_id
from psdist.servers.protocol.actions import Fold, Hold, Load, SlotContent, StartSum, Step
from psdist.servers.set_loop import SetLoop
from psdist.servers.shard.tensors import TensorShard
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.proof import prove, prove_values
from tests.support.virtual.reference import WrongValueError
from tests.support.virtual.virtual_worker import VirtualWorker

FAR = 100.0
"""In parts of what is tolerated."""

SYNC = Schedule(
    seed=11,
    group_sizes=(2, 1, 3),
    num_chunks=4,
    chunk_elements=128,
    iterations=(7, 7, 7),
    collectives=((3,), (3,), (3,)),
    compute_s=(1e-4, 2e-4, 3e-4),
    optimizer_groups=2,
    servers=2,
    short_rate=0.5,
    absent_rate=0.6,
    settings_rate=0.5,
    momentum=0.5,
    weight_decay=0.125,
)
SSP = replace(SYNC, mode="ssp", staleness=1)
CLIPPED = replace(SYNC, clipping=0.1)
"""In every step."""
PUSHED = replace(SYNC, push_rate=1.0, collectives=((2, 4),) * 3)
MANY = replace(
    SSP,
    group_sizes=(4,) * 16,
    iterations=(3,) * 16,
    collectives=((),) * 16,
    compute_s=(1e-4,) * 16,
    short_rate=0.0,
    absent_rate=0.0,
    weight_decay=0.0,
)
"""A mistake of a single worker or group weighs least here."""

ONCE = 3
"""Number of the action that is done wrongly, where it can be."""


class OnceWrong(SetLoop):
    """Server 0 executes one action otherwise than its machine decided; the history has the
    decision."""

    num_possible = 0
    was_wrong = False

    def _is_now(self, *, if_possible: bool = True) -> bool:
        if not if_possible or self._transport.me != server_id(0):
            return False
        self.num_possible += 1
        self.was_wrong |= self.num_possible == ONCE
        return self.num_possible == ONCE

    def _step(self, action: Step) -> None:
        self._built.step(self.wrong_step(action))
        self._log.step(action.chunk, action.contributions, action.lr_scale)

    def wrong_step(self, action: Step) -> Step:
        return action


class TakesTheWeightOfTheGroupBefore(OnceWrong):
    weight = 0.0

    def _start_sum(self, action: StartSum) -> None:
        self.weight = action.weight
        super()._start_sum(action)

    def _fold(self, action: Fold) -> None:
        is_now = self._is_now(if_possible=action.weight != self.weight)
        super()._fold(replace(action, weight=self.weight) if is_now else action)


class LeavesOneOut(OnceWrong):
    def _fold(self, action: Fold) -> None:
        if not self._is_now():
            super()._fold(action)


class FoldsOneTwice(OnceWrong):
    def _fold(self, action: Fold) -> None:
        super()._fold(action)
        if self._is_now():
            super()._fold(action)


class TakesTheHyperparametersOfTheStepBefore(OnceWrong):
    hyper = b""

    def wrong_step(self, action: Step) -> Step:
        before, self.hyper = self.hyper, action.hyper
        is_now = self._is_now(if_possible=before not in (b"", action.hyper))
        return replace(action, hyper=before) if is_now else action


class IgnoresWhatIsAbsent(OnceWrong):
    def wrong_step(self, action: Step) -> Step:
        assert isinstance(self.executor, TensorShard)
        chunk = self.executor.memory[action.chunk].chunk
        matters = any(segment.piece in action.absent for segment in chunk.segments)
        return replace(action, absent=frozenset()) if self._is_now(if_possible=matters) else action


class TakesForAbsentWhatIsThere(OnceWrong):
    def wrong_step(self, action: Step) -> Step:
        assert isinstance(self.executor, TensorShard)
        (piece, *_) = (s.piece for s in self.executor.memory[action.chunk].chunk.segments)
        is_now = self._is_now(if_possible=piece not in action.absent)
        return replace(action, absent=action.absent | {piece}) if is_now else action


class DropsTheScaleOfLr(OnceWrong):
    def wrong_step(self, action: Step) -> Step:
        return replace(action, lr_scale=1.0) if self._is_now() else action


class CountsOneWorkerLess(OnceWrong):
    """There are 64 in the largest of these runs."""

    def wrong_step(self, action: Step) -> Step:
        num_workers = sum(MANY.group_sizes)
        scale = action.lr_scale * num_workers / (num_workers - 1)
        return replace(action, lr_scale=scale) if self._is_now() else action


class DividesByOneGroupLess(OnceWrong):
    def wrong_step(self, action: Step) -> Step:
        is_now = self._is_now(if_possible=len(action.contributions) > 1)
        left = sum(each.weight for each in action.contributions[:-1])
        return replace(action, gradient_scale=1 / left) if is_now and left else action


class AddsInsteadOfTheMean(OnceWrong):
    def wrong_step(self, action: Step) -> Step:
        is_now = self._is_now(if_possible=action.gradient_scale != 1.0)
        return replace(action, gradient_scale=1.0) if is_now else action


class StepsTwice(OnceWrong):
    def wrong_step(self, action: Step) -> Step:
        if self._is_now(if_possible=action.source == action.target):
            self._built.step(action)
            return replace(action, gradient_scale=1.0, content=SlotContent.GRADIENT)
        return action


class LeavesAChunkOutOfTheNorm(OnceWrong):
    def _hold(self, action: Hold) -> None:
        super()._hold(action)
        held = self._happened[-1]
        if self._is_now(if_possible=any(held.squares)):
            self._happened[-1] = replace(held, squares=(0.0,) * len(held.squares))


class HoldsTheSum(OnceWrong):
    def _hold(self, action: Hold) -> None:
        is_now = self._is_now(if_possible=action.scale != 1.0)
        super()._hold(replace(action, scale=1.0) if is_now else action)


class ForgetsToClip(OnceWrong):
    def wrong_step(self, action: Step) -> Step:
        is_now = self._is_now(if_possible=action.gradient_scale < 0.9)
        return replace(action, gradient_scale=1.0) if is_now else action


class CopiesNothingToTheSecondBuffer(OnceWrong):
    """The optimizer steps what lay there."""

    def wrong_step(self, action: Step) -> Step:
        if self._is_now(if_possible=action.target != action.source):
            assert isinstance(self.executor, TensorShard)
            memory = self.executor.memory[action.chunk]
            memory.values = memory.buffer(action.target)
        return action


class SetsTheValuesOfBefore(OnceWrong):
    def _load(self, action: Load) -> None:
        if self._is_now(if_possible=action.clock >= 0):
            assert isinstance(self.executor, TensorShard)
            values = self.executor.memory[action.chunk].values
            self.executor._slots.host(action.slot, "float32", len(values)).copy_(values)
        super()._load(action)


class ForgetsTheMomentum(OnceWrong):
    def _load(self, action: Load) -> None:
        super()._load(action)
        if self._is_now(if_possible=action.clock >= 0):
            assert isinstance(self.executor, TensorShard)
            optimizer = self.executor.memory[action.chunk].optimizer
            assert optimizer is not None
            for state in optimizer._optimizer.state.values():
                state["momentum_buffer"].zero_()


BY_SERVERS = [
    (TakesTheWeightOfTheGroupBefore, SYNC),
    (LeavesOneOut, SYNC),
    (FoldsOneTwice, SYNC),
    (TakesTheHyperparametersOfTheStepBefore, SYNC),
    (TakesTheHyperparametersOfTheStepBefore, SSP),
    (IgnoresWhatIsAbsent, replace(SYNC, seed=3, group_sizes=(1, 1, 1), absent_rate=0.9)),
    (IgnoresWhatIsAbsent, SSP),
    (TakesForAbsentWhatIsThere, SYNC),
    (TakesForAbsentWhatIsThere, SSP),
    (DropsTheScaleOfLr, SSP),
    (CountsOneWorkerLess, MANY),
    (DividesByOneGroupLess, SYNC),
    (AddsInsteadOfTheMean, SYNC),
    (StepsTwice, SYNC),
    (StepsTwice, SSP),
    (LeavesAChunkOutOfTheNorm, CLIPPED),
    (HoldsTheSum, CLIPPED),
    (ForgetsToClip, CLIPPED),
    (LeavesOneOut, CLIPPED),
    (TakesForAbsentWhatIsThere, CLIPPED),
    (SetsTheValuesOfBefore, PUSHED),
    (ForgetsTheMomentum, PUSHED),
    (CopiesNothingToTheSecondBuffer, replace(SSP, jitter_s=1e-3)),
]


def judge(job: VirtualJob) -> None:
    assert check(job.history()).proved, "the history shows it, too"
    with pytest.raises(WrongValueError) as caught:
        prove_values(job, job.history())
    assert caught.value.error > FAR, f"{caught.value.error} times what rounding may do"


@pytest.mark.parametrize(
    "schedule",
    [SYNC, SSP, MANY, CLIPPED, PUSHED],
    ids=["sync", "ssp", "many", "clipped", "pushed"],
)
def test_the_runs_that_are_broken_below_are_right_before(schedule: Schedule) -> None:
    prove(play(schedule))


@pytest.mark.parametrize(
    ("loop", "schedule"), BY_SERVERS, ids=lambda each: getattr(each, "__name__", "")
)
def test_one_wrong_action_of_a_server_is_seen_in_the_values(
    loop: type[OnceWrong], schedule: Schedule
) -> None:
    job = play(schedule, make_set=loop, is_watched=False)
    server = job.servers[0].sets[0]
    assert isinstance(server, OnceWrong)
    assert server.was_wrong
    judge(job)


# -- workers ---------------------------------------------------------------------------------------


class OnceWrongWorker(VirtualWorker):
    """Worker 2 brings something else to iteration 2 than it has drawn."""

    @property
    def is_now(self) -> bool:
        return (self.worker, self.clock) == (2, 2)

    def iterate(self) -> Iterator[float | None]:
        steps = super().iterate()
        if self.is_now:
            iterate = self.trainer.iterate

            def wrong(**arguments: Any) -> Iterator[Any]:
                self.trainer.iterate = iterate  # type: ignore[method-assign]
                self.bring_wrongly()
                yield from iterate(**arguments)

            self.trainer.iterate = wrong  # type: ignore[method-assign]
        yield from steps

    def bring_wrongly(self) -> None:
        raise NotImplementedError


class BringsTheGradientOfTheIterationBefore(OnceWrongWorker):
    def bring_wrongly(self) -> None:
        for parameter, before in zip(self.model, self.draws[-2].gradients, strict=True):
            if parameter.grad is not None and before is not None:
                parameter.grad.copy_(torch.from_numpy(before))


class BringsOneElementThatIsNotItsOwn(OnceWrongWorker):
    def bring_wrongly(self) -> None:
        gradient = next(each.grad for each in self.model if each.grad is not None)
        gradient[7] = gradient[8]


class BringsTheGradientOfItsNeighbour(OnceWrongWorker):
    def bring_wrongly(self) -> None:
        for index, parameter in enumerate(self.model):
            if parameter.grad is not None:
                self.worker -= 1
                parameter.grad.copy_(self.gradient(index, parameter))
                self.worker += 1


class WeighsLikeItsNeighbours(OnceWrongWorker):
    """In its group; the group's weight is right."""

    def bring_wrongly(self) -> None:
        size = len(self.job.groups[self.group])
        strategy = self.trainer.strategy
        average = strategy.average

        def wrong(share: float) -> Iterator[Any]:  # noqa: ARG001 - the right one
            strategy.average = average  # type: ignore[method-assign]
            return average(1 / size)

        strategy.average = wrong  # type: ignore[assignment]


class ComputesOnOldParameters(OnceWrongWorker):
    """Between the bytes that its checksum is taken of and those that it uses."""

    def record_use(self) -> None:
        super().record_use()
        if self.is_now:
            self.used[-1][3] = self.used[-2][3]

    def bring_wrongly(self) -> None:
        pass


BY_WORKERS = [
    BringsTheGradientOfTheIterationBefore,
    BringsOneElementThatIsNotItsOwn,
    BringsTheGradientOfItsNeighbour,
    WeighsLikeItsNeighbours,
    ComputesOnOldParameters,
]
UNEVEN = {"group_sizes": (1, 3, 2), "short_rate": 1.0, "absent_rate": 0.3, "seed": 3}


@pytest.mark.parametrize("schedule", [SYNC, SSP, MANY], ids=["sync", "ssp", "many"])
@pytest.mark.parametrize("worker", BY_WORKERS)
def test_one_wrong_iteration_of_a_worker_is_seen_in_the_values(
    worker: type[OnceWrongWorker], schedule: Schedule
) -> None:
    if worker is WeighsLikeItsNeighbours:
        schedule = replace(schedule, short_rate=0.5)
    if schedule is not MANY:
        schedule = replace(schedule, **UNEVEN)  # type: ignore[arg-type]
    judge(play(schedule, make_worker=worker))
