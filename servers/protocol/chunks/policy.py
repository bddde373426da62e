"""The consistency modes, as what they demand of a chunk in a round; pure.

A *round* is what the clock counts: usually one iteration. A policy is a function of the round, so
that a mode may change within a run: rounds below the change keep the old rule, rounds from there on
have the new one. ``min_done`` is the number of rounds whose updates of *every* active group a chunk
contains (psdist.servers.protocol.chunk_clock).

    policy_for("ssp", staleness=3).required_min_done(10)                # 7
    Scheduled(((0, Ssp(3)), (5, Ssp(0)))).required_min_done(10)         # 10

Bounded staleness: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013: a read at clock c sees all updates stamped <= c - s - 1, that is the
first c - s of every group.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from psdist.errors import ConfigError
from psdist.protocol.header import NEVER


class Applying(Enum):
    """How the updates of a round become optimizer steps."""

    GATHERED = "gathered"
    """One step, on all groups' weighted mean, summed in group order."""
    ON_ARRIVAL = "on arrival"
    """A step for every push, its lr scaled by the group's weight."""
    BY_ROUND = "by round"
    """The one in some rounds, the other in others (:meth:`Policy.is_gathered`)."""


class Policy(Protocol):
    """What a mode demands before parameters may be used, and how pushes are applied."""

    @property
    def applying(self) -> Applying:
        """What rounds of the run may be."""
        ...

    def is_gathered(self, round_number: int) -> bool:
        """Whether the updates of this round become one step."""
        ...

    def required_min_done(self, round_number: int) -> int:
        """The least ``min_done`` of parameters that are used in this round."""
        ...


@dataclass(frozen=True)
class Sync:
    @property
    def applying(self) -> Applying:
        return Applying.GATHERED

    def is_gathered(self, round_number: int) -> bool:  # noqa: ARG002 - the same in all rounds
        return True

    def required_min_done(self, round_number: int) -> int:
        return round_number


@dataclass(frozen=True)
class Ssp:
    staleness: int

    @property
    def applying(self) -> Applying:
        return Applying.ON_ARRIVAL

    def is_gathered(self, round_number: int) -> bool:  # noqa: ARG002 - the same in all rounds
        return False

    def required_min_done(self, round_number: int) -> int:
        return round_number - self.staleness


@dataclass(frozen=True)
class Async:
    @property
    def applying(self) -> Applying:
        return Applying.ON_ARRIVAL

    def is_gathered(self, round_number: int) -> bool:  # noqa: ARG002 - the same in all rounds
        return False

    def required_min_done(self, round_number: int) -> int:  # noqa: ARG002 - the same in all rounds
        return 0


@dataclass(frozen=True)
class Scheduled:
    """Policies one after another, each from its round on."""

    parts: tuple[tuple[int, Policy], ...]
    """(first round, policy), in order, the first from round 0."""

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.parts]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise ConfigError(
                f"a schedule of policies that begin at the rounds {starts}: the first must begin "
                "at round 0, each other one after the one before"
            )

    @property
    def applying(self) -> Applying:
        kinds = {policy.applying for _, policy in self.parts}
        return kinds.pop() if len(kinds) == 1 else Applying.BY_ROUND

    def is_gathered(self, round_number: int) -> bool:
        return self._policy(round_number).is_gathered(round_number)

    def required_min_done(self, round_number: int) -> int:
        return self._policy(round_number).required_min_done(round_number)

    def _policy(self, round_number: int) -> Policy:
        return self.parts[bisect_right(self.parts, round_number, key=lambda part: part[0]) - 1][1]


BARRED = NEVER + 1
"""No chunk's ``min_done`` ever gets there."""


class Changing:
    """A policy that the coordinator changes while the run goes on, from a round on of which no
    server has sent parameters (docs/modes.md).

        policy = Changing(Sync())
        policy.propose(highest_sent=7)     # from here nothing is sent for rounds above 7
        policy.commit(10, Ssp(3))          # rounds below 10 keep the old rule
        policy.release()                   # or: all rounds do
    """

    def __init__(self, first: Policy, *, keeps_mode: bool = False) -> None:
        """``keeps_mode``: what is proposed is never another mode."""
        self._applying = first.applying if keeps_mode else Applying.BY_ROUND
        self._rule = Scheduled(((0, first),))
        self._highest: int | None = None
        """While a change is proposed: the highest round for which parameters were sent."""

    @property
    def applying(self) -> Applying:
        return self._applying

    def propose(self, *, highest_sent: int) -> None:
        self._highest = highest_sent

    def commit(self, round_number: int, policy: Policy) -> None:
        """``policy`` rules from ``round_number`` on, which no change before it reaches."""
        before = [part for part in self._rule.parts if part[0] < round_number]
        self._rule = Scheduled((*before, (round_number, policy)))
        self._highest = None

    def release(self) -> None:
        """The rule stays, for all rounds."""
        self._highest = None

    @property
    def held_above(self) -> int | None:
        """The highest round for which parameters may be sent; None while no change is proposed."""
        return self._highest

    def is_gathered(self, round_number: int) -> bool:
        return self._rule.is_gathered(round_number)

    def required_min_done(self, round_number: int) -> int:
        if self._highest is not None and round_number > self._highest:
            return BARRED
        return self._rule.required_min_done(round_number)


def policy_for(mode: str, *, staleness: int) -> Policy:
    """The policy of a mode's name in the configuration."""
    if mode == "sync":
        return Sync()
    if mode == "ssp":
        if staleness < 0:
            raise ConfigError(f"staleness = {staleness}: the bound must be 0 or more")
        return Ssp(staleness)
    if mode == "async":
        return Async()
    raise ConfigError(f"mode = {mode!r}: allowed are sync, ssp and async")
