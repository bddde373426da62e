"""When a round of local steps ends: after a number of steps that is fixed or follows the loss, with
a pass over the loader, or, for groups of different speed, with the assignment of samples that this
worker's loader has received (psdist.workers.data.assignments).

    length = EqualSteps(16)                     # or StepsByLoss, PassSteps, StepsBySpeed(...)
    for wait in length.begin(clock): ...                     # before a round's first step
    length.use_batch()                                       # of job.loader
    length.end_step(in_round=1)                              # True if the round ends with it
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from psdist.controller.steps import Term, window_of
from psdist.errors import UsageError
from psdist.workers.loop import Wait


class RoundLength:
    """A round that no call ends; derived classes replace what differs."""

    def begin(self, clock: int) -> Iterator[Wait]:  # noqa: ARG002 - for those who ask
        """Prepare round ``clock``, before its first step."""
        return iter(())

    def use_batch(self) -> None:
        """A batch of one of psdist's loaders was handed out to train with."""

    def require_batches(self) -> None:
        """Raises :class:`UsageError` before a step made of batches that cannot make rounds."""

    def end_step(self, in_round: int) -> bool:  # noqa: ARG002
        """Return True if the round ends with this step, its ``in_round``-th."""
        return False

    def end_round(self, clock: int) -> None:
        """Round ``clock`` has made its steps; the exchange follows."""

    def exchanged(self) -> None:
        """The exchange of the round has ended."""


class EqualSteps(RoundLength):
    def __init__(self, local_steps: int) -> None:
        self._local_steps = local_steps

    def end_step(self, in_round: int) -> bool:
        return in_round == self._local_steps


class StepsByLoss(RoundLength):
    """The number of steps that the coordinator has fixed for the term, by the losses that scripts
    have reported."""

    def __init__(
        self,
        *,
        group: int,
        steps_of: Callable[[Term], Generator[Wait, None, tuple[int, ...]]],
        tell: Callable[[int], None],
        on_round: Callable[[int, int], None],
    ) -> None:
        """``tell(round)`` sends the coordinator the losses reported until then; ``on_round(round,
        steps)``: the round has ended."""
        self._group = group
        self._steps_of = steps_of
        self._tell = tell
        self._on_round = on_round
        self._fixed: tuple[int, int] = -1, 0
        """The block of rounds, and the steps in each of them."""
        self._in_round = 0

    def begin(self, clock: int) -> Iterator[Wait]:
        block = window_of(clock)
        if self._fixed[0] != block:
            self._tell(clock)  # first: the coordinator reads the losses before the question
            steps = yield from self._steps_of(Term(0, 0, block))
            self._fixed = block, steps[self._group]

    def end_step(self, in_round: int) -> bool:
        self._in_round = in_round
        return in_round == self._fixed[1]

    def end_round(self, clock: int) -> None:
        self._on_round(clock, self._in_round)


class PassSteps(RoundLength):
    """A round is a pass over a loader of psdist, and ends after it (:meth:`Trainer.end_round`);
    no step can tell before."""

    def __init__(
        self, *, is_in_pass: Callable[[], bool], on_round: Callable[[int, int], None]
    ) -> None:
        """``is_in_pass()``: True if a pass is under way in which steps were made; ``on_round(round,
        steps)``: the round has ended."""
        self._is_in_pass = is_in_pass
        self._on_round = on_round
        self._has_batch = False
        """True if a batch was handed out since the last step."""
        self._in_round = 0

    def use_batch(self) -> None:
        self._has_batch = True

    def require_batches(self) -> None:
        if not self._has_batch and not self._is_in_pass():
            raise UsageError(
                "local.steps = epoch: a step after a pass over psdist's loaders, or without one, "
                "and a round ends with such a pass: take the batches from job.loader, or from a "
                "DataLoader that job.prepare has returned, or set local.steps to a number"
            )

    def end_step(self, in_round: int) -> bool:
        self._in_round = in_round
        self._has_batch = False
        return False

    def end_round(self, clock: int) -> None:
        self._on_round(clock, self._in_round)


class StepsBySpeed(RoundLength):
    """With a loader of psdist's a round is an assignment: one step for each of its batches. A
    script with batches of its own makes the steps that the coordinator has fixed for its group."""

    def __init__(
        self,
        *,
        group: int,
        steps_of: Callable[[Term], Generator[Wait, None, tuple[int, ...]]],
        tell: Callable[[int, int], None],
        now_s: Callable[[], float],
    ) -> None:
        """``tell(round, step_us)`` sends the time of each step of a round."""
        self._group = group
        self._steps_of = steps_of
        self._tell = tell
        self._now_s = now_s
        self._ends_assignment = False
        """True if the batch handed out next, or the newest one, is the last of its assignment."""
        self._num_batches = 0
        """Batches handed out for training since the last step."""
        self._has_loader = False
        self._own: tuple[int, int] = -1, 0
        """If the script has batches of its own: the block, and this group's steps in its rounds."""
        self._round_began_s = self._first_step_s = self._last_step_s = now_s()
        self._in_round = 0

    def begin_batch(self, *, ends_assignment: bool) -> None:
        """A batch is about to be handed out."""
        self._ends_assignment = ends_assignment

    def use_batch(self) -> None:
        self._num_batches += 1
        self._has_loader = True

    def require_batches(self) -> None:
        if self._num_batches != self._has_loader:
            raise UsageError(
                f"local.steps_by = speed: a step of {self._num_batches} batches of psdist's "
                "loaders; it must be one, since a round has one batch for each step of its group: "
                "take one batch for each optimizer.step(), or set local.steps_by = count"
            )

    def begin(self, clock: int) -> Iterator[Wait]:
        if not self._has_loader and self._own[0] != window_of(clock):
            steps = yield from self._steps_of(Term(0, 0, window_of(clock)))
            self._own = window_of(clock), steps[self._group]

    def end_step(self, in_round: int) -> bool:
        self._last_step_s = self._now_s()
        if in_round == 1:
            self._first_step_s = self._last_step_s
        self._in_round = in_round
        self._num_batches = 0
        return self._ends_assignment if self._has_loader else in_round == self._own[1]

    def end_round(self, clock: int) -> None:
        """The first step counts only if it is alone: before it there may have been a collective or
        an evaluation."""
        took_s, num_steps = self._last_step_s - self._first_step_s, self._in_round - 1
        if not num_steps:
            took_s, num_steps = self._last_step_s - self._round_began_s, 1
        self._tell(clock, round(1e6 * took_s / num_steps))

    def exchanged(self) -> None:
        self._round_began_s = self._now_s()
