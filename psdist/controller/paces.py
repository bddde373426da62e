"""Split a window of rounds: an exchange that every group waits for, and the rest; pure.

in_sync(rounds)          # rounds: [groups][rounds] of the same rounds
in_ssp(rounds)           # of each group's own
alone(rounds)            # of one group that waits for no other: async

All return a :class:`Pace`, in microseconds. ``exposed`` is what fewer bytes can make shorter; what
a group waits for slower groups is not part of it.

In sync a round takes the time of its slowest group; time in which no group computes is exposed:

    round = max over groups (own + wait),    exposed = round - max over groups own

each the median of the window. With bounded staleness every group proceeds at the pace of the
slowest in the mean, so that

    round = max over groups (mean of own + wait),    exposed = min over the slowest (median of wait)

where the slowest are those whose mean is at most :data:`NEAR` below the largest, and exposed is at
most what the largest mean of own times leaves of the round. A group that is held back by the bound
waits for others in most rounds; one for which others wait does not, and of groups that are slow by
turns none does in most. Means leave out the :data:`LONGEST` longest rounds: a group evaluates or
saves in one round of many. Where no group waits for another one,
a group's wait is its exchange, and its pace its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Final, NamedTuple

from psdist.controller import Times

LONGEST: Final = 2
"""Rounds of a group that its mean leaves out."""
NEAR: Final = 0.10
"""Part of the slowest group's round: a group within it of the slowest counts as slow."""


class Pace(NamedTuple):
    own_us: int
    """With what is waited for others in it."""
    exposed_us: int


def in_sync(rounds: Sequence[Sequence[Times]]) -> Pace:
    by_round = list(zip(*rounds, strict=True))
    own_us = median_low(max(each.own_us for each in groups) for groups in by_round)
    round_us = median_low(max(each.own_us + each.wait_us for each in groups) for groups in by_round)
    return Pace(own_us, max(0, round_us - own_us))


def in_ssp(rounds: Sequence[Sequence[Times]]) -> Pace:
    each_alone = [alone(group) for group in rounds]
    means = [own_us + wait_us for own_us, wait_us in each_alone]
    round_us = max(means)
    exposed_us = min(
        median_low(each.wait_us for each in group)
        for group, mean_us in zip(rounds, means, strict=True)
        if mean_us >= (1 - NEAR) * round_us
    )
    exposed_us = min(exposed_us, round_us - max(own_us for own_us, _ in each_alone))
    return Pace(round_us - exposed_us, exposed_us)


def alone(rounds: Sequence[Times]) -> Pace:
    kept = sorted(rounds, key=lambda each: each.own_us + each.wait_us)[:-LONGEST]
    own_us, wait_us = sum(each.own_us for each in kept), sum(each.wait_us for each in kept)
    return Pace(own_us // len(kept), wait_us // len(kept))
