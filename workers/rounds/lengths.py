"""When a round of local steps is over: after as many steps as all groups make, always or while the
loss is what it is, with the pass over the loader, or, with groups of different speed, with the hand
that this worker's loader has dealt (psdist.workers.data.assignments).

    length = EqualSteps(16)                     # or StepsByLoss, PassSteps, StepsBySpeed(...)
    for wait in length.begin(clock): ...                     # before a round's first step
    length.use_batch()                                       # of job.loader
    length.end_step(in_round=1)                              # whether the round ends with it
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from psdist.controller.steps import Term, block_of
from psdist.errors import UsageError
from psdist.workers.loop import Wait


class RoundLength(Protocol):
    def begin(self, clock: int) -> Iterator[Wait]:
        """Before the first step of round ``clock``."""
        ...

    def use_batch(self) -> None:
        """A batch of one of psdist's loaders was handed out to train with."""
        ...

    def require_batches(self) -> None:
        """Raises UsageError before a step that is made of batches of which rounds cannot be."""
        ...

    def end_step(self, in_round: int) -> bool:
        """Whether the round ends with this step, its ``in_round``-th."""
        ...

    def end_round(self, clock: int) -> None:
        """Round ``clock`` has made its steps; the exchange follows,"""
        ...

    def exchanged(self) -> None:
        """and is over."""
        ...


class EqualSteps:
    def __init__(self, local_steps: int) -> None:
        self._local_steps = local_steps

    def begin(self, clock: int) -> Iterator[Wait]:  # noqa: ARG002 - all rounds are alike
        return iter(())

    def use_batch(self) -> None: ...

    def require_batches(self) -> None: ...

    def end_step(self, in_round: int) -> bool:
        return in_round == self._local_steps

    def end_round(self, clock: int) -> None: ...

    def exchanged(self) -> None: ...


class StepsByLoss:
    """As many steps as the coordinator has fixed for the term, by what scripts have reported."""

    def __init__(
        self,
        *,
        group: int,
        steps_of: Callable[[Term], Generator[Wait, None, tuple[int, ...]]],
        tell: Callable[[int], None],
        on_round: Callable[[int, int], None],
    ) -> None:
        """``tell(round)``: to the coordinator, what was reported until then; ``on_round(round,
        steps)``: it has ended, after so many."""
        self._group = group
        self._steps_of = steps_of
        self._tell = tell
        self._on_round = on_round
        self._fixed: tuple[int, int] = -1, 0
        """The block of rounds, and the steps in each of them."""
        self._in_round = 0

    def begin(self, clock: int) -> Iterator[Wait]:
        block = block_of(clock)
        if self._fixed[0] != block:
            self._tell(clock)  # before it asks: whoever hears of the one has heard the other
            steps = yield from self._steps_of(Term(0, 0, block))
            self._fixed = block, steps[self._group]

    def use_batch(self) -> None: ...

    def require_batches(self) -> None: ...

    def end_step(self, in_round: int) -> bool:
        self._in_round = in_round
        return in_round == self._fixed[1]

    def end_round(self, clock: int) -> None:
        self._on_round(clock, self._in_round)

    def exchanged(self) -> None: ...


class PassSteps:
    """A round is what a pass over one of psdist's loaders brings, and ends when that is over
    (:meth:`RoundTrainer.end_pass`), which no step knows before."""

    def __init__(
        self, *, is_in_pass: Callable[[], bool], on_round: Callable[[int, int], None]
    ) -> None:
        """``is_in_pass()``: whether a pass is under way in which steps were made; ``on_round(round,
        steps)``: it has ended, after so many."""
        self._is_in_pass = is_in_pass
        self._on_round = on_round
        self._has_batch = False
        """Whether one was handed out since the last step."""
        self._in_round = 0

    def begin(self, clock: int) -> Iterator[Wait]:  # noqa: ARG002 - all rounds are alike
        return iter(())

    def use_batch(self) -> None:
        self._has_batch = True

    def require_batches(self) -> None:
        if not self._has_batch and not self._is_in_pass():
            raise UsageError(
                "local.steps = epoch: a step behind a pass over psdist's loaders, or without one, "
                "and a round ends with such a pass: take the batches from job.loader, or from a "
                "DataLoader that job.prepare has returned, or set local.steps to a number"
            )

    def end_step(self, in_round: int) -> bool:
        self._in_round = in_round
        self._has_batch = False
        return False

    def end_round(self, clock: int) -> None:
        self._on_round(clock, self._in_round)

    def exchanged(self) -> None: ...


class StepsBySpeed:
    """With a loader of psdist's a round is a hand: one step for each of its batches. A script that
    has batches of its own makes as many steps as the coordinator has fixed for its group."""

    def __init__(
        self,
        *,
        group: int,
        steps_of: Callable[[Term], Generator[Wait, None, tuple[int, ...]]],
        tell: Callable[[int, int], None],
        now_s: Callable[[], float],
    ) -> None:
        """``tell(round, step_us)``: what each step of a round has taken."""
        self._group = group
        self._steps_of = steps_of
        self._tell = tell
        self._now_s = now_s
        self._ends_hand = False
        """Whether the batch that is handed out next, or was last, is the last one of its hand."""
        self._num_batches = 0
        """For training, since the last step."""
        self._has_loader = False
        self._own: tuple[int, int] = -1, 0
        """Of a script with batches of its own: the block, and this group's steps in its rounds."""
        self._round_began_s = self._first_step_s = self._last_step_s = now_s()
        self._in_round = 0

    def deal(self, *, ends_hand: bool) -> None:
        """A batch is about to be handed out."""
        self._ends_hand = ends_hand

    def use_batch(self) -> None:
        self._num_batches += 1
        self._has_loader = True

    def require_batches(self) -> None:
        if self._num_batches != self._has_loader:
            raise UsageError(
                f"local.steps_by = speed: a step of {self._num_batches} batches of psdist's "
                "loaders; it must be one, since a round is as many batches as its group makes "
                "steps: take one batch for each optimizer.step(), or set local.steps_by = count"
            )

    def begin(self, clock: int) -> Iterator[Wait]:
        if not self._has_loader and self._own[0] != block_of(clock):
            steps = yield from self._steps_of(Term(0, 0, block_of(clock)))
            self._own = block_of(clock), steps[self._group]

    def end_step(self, in_round: int) -> bool:
        self._last_step_s = self._now_s()
        if in_round == 1:
            self._first_step_s = self._last_step_s
        self._in_round = in_round
        self._num_batches = 0
        return self._ends_hand if self._has_loader else in_round == self._own[1]

    def end_round(self, clock: int) -> None:
        """Before its first step there may have been anything, a collective or an evaluation, so
        that one counts only where there is no other."""
        took_s, num_steps = self._last_step_s - self._first_step_s, self._in_round - 1
        if not num_steps:
            took_s, num_steps = self._last_step_s - self._round_began_s, 1
        self._tell(clock, round(1e6 * took_s / num_steps))

    def exchanged(self) -> None:
        self._round_began_s = self._now_s()
