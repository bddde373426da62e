"""The consistency modes, as what they demand of a chunk; pure.

``clock`` is the iteration for which parameters are wanted, ``min_done`` the number of iterations
whose updates of *every* active group a chunk contains (psdist.servers.protocol.chunk_clock).

    policy_for("ssp", staleness=3).required_min_done(10)    # 7

Bounded staleness: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013: a read at clock c sees all updates stamped <= c - s - 1, that is the
first c - s of every group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from psdist.errors import ConfigError


class Policy(Protocol):
    """What a mode demands before parameters may be used, and how pushes are applied."""

    @property
    def gathers(self) -> bool:
        """True: one optimizer step per iteration, on all groups' weighted mean, in group order.
        False: every push is one optimizer step on arrival, its lr scaled by the group's weight."""
        ...

    def required_min_done(self, clock: int) -> int:
        """The least ``min_done`` that parameters used for iteration ``clock`` may contain."""
        ...


@dataclass(frozen=True)
class Sync:
    gathers: bool = True

    def required_min_done(self, clock: int) -> int:
        return clock


@dataclass(frozen=True)
class Ssp:
    staleness: int
    gathers: bool = False

    def required_min_done(self, clock: int) -> int:
        return clock - self.staleness


@dataclass(frozen=True)
class Async:
    gathers: bool = False

    def required_min_done(self, clock: int) -> int:  # noqa: ARG002 - the protocol's signature
        return 0


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
