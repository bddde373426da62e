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


class Applying(Enum):
    """How the updates of a round become optimizer steps."""

    GATHERED = "gathered"
    """One step, on all groups' weighted mean, summed in group order."""
    ON_ARRIVAL = "on arrival"
    """A step for every push, its lr scaled by the group's weight."""


class Policy(Protocol):
    """What a mode demands before parameters may be used, and how pushes are applied."""

    @property
    def applying(self) -> Applying:
        """The same for every round of a run.

        A change needs to know that every server has the last round of the old kind behind it, which
        takes an event in two phases (proposed to all servers, committed at a round that none has
        answered yet); bounds need no such thing."""
        ...

    def required_min_done(self, round_number: int) -> int:
        """The least ``min_done`` of parameters that are used in this round."""
        ...


@dataclass(frozen=True)
class Sync:
    @property
    def applying(self) -> Applying:
        return Applying.GATHERED

    def required_min_done(self, round_number: int) -> int:
        return round_number


@dataclass(frozen=True)
class Ssp:
    staleness: int

    @property
    def applying(self) -> Applying:
        return Applying.ON_ARRIVAL

    def required_min_done(self, round_number: int) -> int:
        return round_number - self.staleness


@dataclass(frozen=True)
class Async:
    @property
    def applying(self) -> Applying:
        return Applying.ON_ARRIVAL

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
        for start, policy in self.parts:
            if policy.applying is not self.applying:
                raise ConfigError(
                    f"from round {start} on updates would be applied {policy.applying.value} "
                    f"instead of {self.applying.value}: within a run only the bound can change "
                    "(between ssp and async), not to or from sync"
                )

    @property
    def applying(self) -> Applying:
        return self.parts[0][1].applying

    def required_min_done(self, round_number: int) -> int:
        return self._policy(round_number).required_min_done(round_number)

    def _policy(self, round_number: int) -> Policy:
        return self.parts[bisect_right(self.parts, round_number, key=lambda part: part[0]) - 1][1]


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
