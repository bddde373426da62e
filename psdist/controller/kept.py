"""What a checkpoint keeps of what psdist has chosen within the run, so that ``--resume`` goes on
with it.

    kept = Fidelity(codecs=control.kept(clock=120))
    control.go_on(kept.codecs, first_round=120)         # of another attempt; ValueError: of none

Plain values, for index.json and for what is recorded of decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

from psdist.controller.rollback import CLOSED, KeptRise, Rise


@dataclass(frozen=True, kw_only=True)
class KeptGuard:
    """Of :class:`psdist.controller.loss_guard.LossGuard`."""

    __pydantic_config__ = CLOSED
    count: int
    total: float
    least: float | None
    num_vain: int


@dataclass(frozen=True, kw_only=True)
class KeptCodecs:
    """Of :class:`psdist.controller.codec.CodecControl`."""

    __pydantic_config__ = CLOSED
    names: tuple[str, ...]
    """Of the levels."""
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
    """Of local steps by the loss (:class:`psdist.controller.loss_steps.LossStepControl`)."""

    __pydantic_config__ = CLOSED
    starts: tuple[tuple[int, int], ...]
    """(block, steps), ascending, the first from block 0 on: what was fixed, until block"""
    num_fixed: int
    """which was not fixed then."""
    first_loss: float | None
    totals: tuple[float, ...]
    """By worker: the sum of what it had reported since the last decision,"""
    count: int
    """and how many reports all together."""


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """All that was chosen."""

    __pydantic_config__ = CLOSED
    codecs: KeptCodecs | None = None
    steps: KeptSteps | None = None
    rise: KeptRise | None = None
    """Where a loss that blows up leads back to a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """The loss has blown up: what the run is to go on with, and from when."""

    __pydantic_config__ = CLOSED
    round: int
    loss: float
    best: float
    good: int
    """As of :class:`psdist.controller.rollback.Rise`."""
    names: tuple[str, ...]
    """Of the codecs among which psdist chooses; nothing where it chooses local steps."""
    lossiest: int
    """Level, or local steps, since the loss was good,"""
    allowed: int
    """and from now on, at most; -1: there is nothing less lossy."""


def rolled_back(
    round_number: int, rise: Rise, lossiest: int, *, names: tuple[str, ...] = ()
) -> Rollback:
    """What follows from a loss that has blown up in this round: one step less lossy than the
    ``lossiest`` level, or, without ``names``, half as many local steps."""
    return Rollback(
        round=round_number,
        loss=rise.loss,
        best=rise.best,
        good=rise.good,
        names=names,
        lossiest=lossiest,
        allowed=lossiest - 1 if names else lossiest // 2 or -1,
    )


def within(fidelity: Fidelity, rollback: Rollback) -> Fidelity:
    """What is left of it behind this rollback: all where nothing less lossy was left."""
    most, codecs, steps = rollback.allowed, fidelity.codecs, fidelity.steps
    if most < 0:
        return fidelity
    if codecs is not None and codecs.names == rollback.names:
        codecs = replace(
            codecs,
            starts=_limited(codecs.starts, most),
            lossiest=min(codecs.lossiest, most),
            came_from=min(codecs.came_from, most),
        )
    if steps is not None and not rollback.names:
        steps = replace(steps, starts=_limited(steps.starts, most))
    return replace(fidelity, codecs=codecs, steps=steps)


def within_all(fidelity: Fidelity, rollbacks: Iterable[Rollback]) -> Fidelity:
    """What is left of it behind all of them."""
    return reduce(within, rollbacks, fidelity)


def _limited(starts: tuple[tuple[int, int], ...], most: int) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for start, what in starts:
        if not found or found[-1][1] != min(what, most):
            found.append((start, min(what, most)))
    return tuple(found)


def at_place(starts: tuple[tuple[int, int], ...], place: int) -> int:
    """What rules in this round or block; ``starts``: as :attr:`KeptCodecs.starts`."""
    return [what for start, what in starts if start <= place][-1]


def from_place(
    starts: tuple[tuple[int, int], ...] | list[tuple[int, int]], place: int
) -> tuple[tuple[int, int], ...]:
    """What rules from this round or block on, as if it had done so from the beginning."""
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
