"""The observations that psdist's own choices follow from; pure.

The coordinator reports them, a recorded history has them, and the check replays them. Times are in
microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import Field

from psdist.controller.loss_steps import MOST_LOSS

_STRICT: Final = {"extra": "forbid", "strict": True}
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Numbers = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 20)]


@dataclass(frozen=True, slots=True)
class ModeObserved:
    """The rounds of a group, from ``first_round`` on."""

    __pydantic_config__ = _STRICT
    group: _Count
    first_round: _Count
    own_us: _Numbers
    """Time of each round without waiting."""
    waits_us: _Numbers
    is_judged: bool
    """True if psdist could change the mode or the codecs then."""
    errors_ppm: _Numbers = field(default_factory=list)
    """The share that the codecs left out of each push, in millionths, if psdist chooses them."""


@dataclass(frozen=True, slots=True)
class GroupGone:
    """A group has failed: its later rounds are ignored."""

    __pydantic_config__ = _STRICT
    group: _Count


@dataclass(frozen=True, slots=True)
class GroupCame:
    """A substitute's group has joined with this round. Or another worker than before reports for a
    group, in the next observation. Later rounds are observed."""

    __pydantic_config__ = _STRICT
    group: _Count
    first_round: _Count


@dataclass(frozen=True, slots=True)
class LevelsSized:
    """Bytes of one group's exchange, by level of the codecs among which psdist chooses."""

    __pydantic_config__ = _STRICT
    sizes: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1, max_length=1000)]


@dataclass(frozen=True, slots=True)
class LossHeard:
    """Losses that a worker's script has reported before a round."""

    __pydantic_config__ = _STRICT
    worker: _Count
    round: _Count
    count: Annotated[int, Field(ge=1, lt=2**63)]
    total: Annotated[float, Field(allow_inf_nan=False)]
    """The sum of the losses."""

    def is_of(self, num_workers: int, *, least: float = -MOST_LOSS) -> bool:
        """Return True if one of ``num_workers`` workers can have reported such losses."""
        is_possible = least * self.count <= self.total <= MOST_LOSS * self.count
        return self.worker < num_workers and is_possible


@dataclass(frozen=True, slots=True)
class StepsObserved:
    """Time of each local step of a group in a round."""

    __pydantic_config__ = _STRICT
    group: _Count
    round: _Count
    step_us: Annotated[int, Field(ge=0, lt=2**63)]
