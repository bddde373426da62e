"""State of psdist's choices within the run, in a checkpoint, so that ``--resume`` continues with
them.

    kept = TuningState(codecs=control.kept(clock=120))
    control.go_on(kept.codecs, first_round=120)         # of another attempt; ValueError: of none

Plain values, for index.json and for what is recorded of decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from psdist.controller.rollback import CLOSED, KeptRise, Rise
from psdist.mode_names import Mode


@dataclass(frozen=True, kw_only=True)
class KeptGuard:
    """State of :class:`psdist.controller.loss_guard.LossGuard`."""

    __pydantic_config__ = CLOSED
    count: int
    total: float
    least: float | None
    num_vain: int


@dataclass(frozen=True, kw_only=True)
class KeptCodecs:
    """State of :class:`psdist.controller.codec.CodecControl`."""

    __pydantic_config__ = CLOSED
    names: tuple[str, ...]
    """Names of the levels."""
    starts: tuple[tuple[int, int], ...]
    """(round, level), ascending: the one that ruled then, from round 0 on, and those that had been
    set for later rounds."""
    lossiest: int
    num_windows: int
    here: int
    came_from: int
    seen: tuple[tuple[int, int, int, int], ...]
    """(level, own time, exposed time, window), times in microseconds."""
    errors: tuple[tuple[int, int, int], ...]
    """(level, millionths left out, window)"""
    fixed_us: float
    vain: tuple[tuple[int, int], ...]
    """(level, times running that it was left at once)"""
    guard: KeptGuard | None


@dataclass(frozen=True, kw_only=True)
class KeptSteps:
    """State of local steps by the loss (:class:`psdist.controller.loss_steps.LossStepControl`)."""

    __pydantic_config__ = CLOSED
    starts: tuple[tuple[int, int], ...]
    """(first block, steps) of the fixed blocks, ascending; the first entry begins at block 0."""
    num_fixed: int
    """First block that was not fixed."""
    first_loss: float | None
    totals: tuple[float, ...]
    """By worker: the sum of its reports since the last decision."""
    count: int
    """Number of all these reports."""


@dataclass(frozen=True, kw_only=True)
class KeptPass:
    """State of a pass that some worker may be in: its steps by speed that are fixed so far."""

    __pydantic_config__ = CLOSED
    loader: int
    number: int
    starts: tuple[tuple[int, tuple[int, ...]], ...]
    """(first block, steps by group) of the fixed blocks, ascending."""
    num_fixed: int
    """First block that was not fixed."""

    def steps_of(self, block: int) -> tuple[int, ...] | None:
        """[groups]; None where they are not fixed."""
        if not self.starts[0][0] <= block < self.num_fixed:
            return None
        return [steps for start, steps in self.starts if start <= block][-1]

    def then(self, block: int, steps: tuple[int, ...]) -> KeptPass:
        """With this block, the next one."""
        more = ((block, steps),) * (steps != self.starts[-1][1])
        return replace(self, starts=(*self.starts, *more), num_fixed=block + 1)

    def is_of(self, num_groups: int) -> bool:
        """True if a job of ``num_groups`` groups can have such a pass."""
        blocks = [start for start, _ in self.starts]
        return (
            bool(blocks)
            and min(self.loader, self.number, *blocks) >= 0
            and [*blocks, self.num_fixed] == sorted({*blocks, self.num_fixed})
            and all(len(each) == num_groups and min(each) >= 1 for _, each in self.starts)
        )


@dataclass(frozen=True, kw_only=True)
class KeptPaces:
    """State of local steps by speed (:class:`psdist.controller.steps.StepControl`)."""

    __pydantic_config__ = CLOSED
    sizes: tuple[int, ...]
    """[groups]: workers."""
    total: int
    """Steps of all workers in a round, about."""
    steps: tuple[int, ...]
    """[groups]: as chosen last."""
    step_us: tuple[tuple[int, ...], ...]
    """[groups]: what a step had taken in a group's last rounds, the newest last."""
    passes: tuple[KeptPass, ...] = ()
    """Where groups may be in different hands: by loader and number."""

    @property
    def are_groups_apart(self) -> bool:
        """Whether groups may be in different hands of a loader's pass."""
        return any(each.loader for each in self.passes)


@dataclass(frozen=True, kw_only=True)
class KeptMode:
    """A mode that rules, in each parameter set from its round on."""

    __pydantic_config__ = CLOSED
    rounds: tuple[int, ...]
    """By set, of those that there were then; in sets that came later from round 0 on."""
    mode: Mode
    staleness: int
    """0 except for ssp."""

    def start(self, set_index: int) -> int:
        return self.rounds[set_index] if set_index < len(self.rounds) else 0


@dataclass(frozen=True, kw_only=True)
class KeptModes:
    """State of a run whose mode changes by no schedule (:mod:`psdist.controller.mode`,
    :mod:`psdist.controller.bound`, or the script's ``set_mode``)."""

    __pydantic_config__ = CLOSED
    by: Literal["script", "auto"]
    starts: tuple[KeptMode, ...]
    """In the order in which they were set, the first from round 0 on. One that begins where another
    does, or before, takes its place."""

    def __post_init__(self) -> None:
        counts = [count for each in self.starts for count in (*each.rounds, each.staleness)]
        bounds = [each.staleness for each in self.starts if each.mode != "ssp"]
        if (
            not all(each.rounds for each in self.starts)
            or not self.starts
            or any(self.starts[0].rounds)
            or min(counts) < 0
            or any(bounds)
        ):
            raise ValueError("modes that do not begin with round 0, or not whole")

    @property
    def last(self) -> KeptMode:
        """Which was set last."""
        return self.starts[-1]

    def are_of(self, *, by: str, mode: str, staleness: int, highest: int | None) -> bool:
        """True if a run that would begin with this mode may continue with this state. With ``by``
        auto, psdist may choose ssp up to the bound ``highest``, or moves the bound up to it."""
        first = self.starts[0]
        if (self.by, first.mode, first.staleness) != (by, mode, staleness):
            return False
        if by != "auto":
            return True
        assert highest is not None
        lowest = staleness if mode == "ssp" else highest
        return all(
            lowest <= each.staleness <= highest if each.mode == "ssp" else each.mode == mode
            for each in self.starts
        )

    def then(self, rounds: tuple[int, ...], mode: Mode, staleness: int) -> KeptModes:
        """With another one that was set behind these."""
        change = KeptMode(rounds=rounds, mode=mode, staleness=staleness)
        return replace(self, starts=(*self.starts, change))


@dataclass(frozen=True, kw_only=True)
class TuningState:
    """All that was chosen."""

    __pydantic_config__ = CLOSED
    codecs: KeptCodecs | None = None
    steps: KeptSteps | None = None
    paces: KeptPaces | None = None
    modes: KeptModes | None = None
    rise: KeptRise | None = None
    """Where a loss that blows up leads back to a checkpoint."""

    @property
    def is_of_steps(self) -> bool:
        """Whether local steps are what was chosen."""
        return self.steps is not None or self.paces is not None


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """The loss has blown up: the choices with which the run continues, and the last good round."""

    __pydantic_config__ = CLOSED
    round: int
    loss: float
    best: float
    good: int
    """As of :class:`psdist.controller.rollback.Rise`."""
    names: tuple[str, ...]
    """Names of the codecs among which psdist chooses; empty where it chooses local steps."""
    lossiest: int
    """Most lossy level, or most local steps, in force since the loss was good."""
    allowed: int
    """Maximum level, or local steps, from now on; -1: there is nothing less lossy."""


def rolled_back(
    round_number: int, rise: Rise, lossiest: int, *, names: tuple[str, ...] = ()
) -> Rollback:
    """Return the rollback after the loss has blown up in this round: one step less lossy than the
    ``lossiest`` level, or, without ``names``, half the local steps."""
    return Rollback(
        round=round_number,
        loss=rise.loss,
        best=rise.best,
        good=rise.good,
        names=names,
        lossiest=lossiest,
        allowed=lossiest - 1 if names else lossiest // 2 or -1,
    )


def within(tuning_state: TuningState, rollback: Rollback) -> TuningState:
    """Return the tuning state after this rollback, unchanged if nothing less lossy was left."""
    most, codecs, steps = rollback.allowed, tuning_state.codecs, tuning_state.steps
    if most < 0:
        return tuning_state
    if codecs is not None and codecs.names == rollback.names:
        codecs = replace(
            codecs,
            starts=_limited(codecs.starts, most),
            lossiest=min(codecs.lossiest, most),
            came_from=min(codecs.came_from, most),
        )
    if steps is not None and not rollback.names:
        steps = replace(steps, starts=_limited(steps.starts, most))
    return replace(tuning_state, codecs=codecs, steps=steps)


def within_all(tuning_state: TuningState, rollbacks: Iterable[Rollback]) -> TuningState:
    """Return the tuning state after all of these rollbacks."""
    return reduce(within, rollbacks, tuning_state)


def _limited(starts: tuple[tuple[int, int], ...], most: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for start, what in starts:
        if not found or found[-1][1] != min(what, most):
            found.append((start, min(what, most)))
    return tuple(found)


def at_place(starts: tuple[tuple[int, int], ...], place: int) -> int:
    """Return the choice in this round or block; ``starts``: as :attr:`KeptCodecs.starts`."""
    return [what for start, what in starts if start <= place][-1]


def from_place(
    starts: tuple[tuple[int, int], ...] | list[tuple[int, int]], place: int
) -> tuple[tuple[int, int], ...]:
    """Return the choices from this round or block on; the first one gets the start 0."""
    now = [what for start, what in starts if start <= place][-1]
    return ((0, now), *((start, what) for start, what in starts if start > place))


def are_starts(starts: tuple[tuple[int, int], ...], *, least: int, most: int) -> bool:
    """Whether there can be such, each naming something from ``least`` to ``most``."""
    rounds = [start for start, _ in starts]
    return (
        rounds[:1] == [0]
        and rounds == sorted(set(rounds))
        and all(least <= what <= most for _, what in starts)
    )
