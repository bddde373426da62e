"""What a checkpoint keeps of what psdist has chosen within the run, so that ``--resume`` goes on
with it.

    kept = Fidelity(codecs=control.kept(clock=120))
    control.go_on(kept.codecs, first_round=120)         # of another attempt; ValueError: of none

Plain values, for index.json and for what is recorded of decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_CLOSED: Final = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class KeptGuard:
    """Of :class:`psdist.controller.loss_guard.LossGuard`."""

    __pydantic_config__ = _CLOSED
    count: int
    total: float
    least: float | None
    num_vain: int


@dataclass(frozen=True, kw_only=True)
class KeptCodecs:
    """Of :class:`psdist.controller.codec.CodecControl`."""

    __pydantic_config__ = _CLOSED
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

    __pydantic_config__ = _CLOSED
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

    __pydantic_config__ = _CLOSED
    codecs: KeptCodecs | None = None
    steps: KeptSteps | None = None


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
