"""The rounds that are looked at where groups are in different ones (ssp, async): of each group the
latest of its own; pure.

    window = OwnWindow(num_groups=4, first=5, waits_for_all=True)
    window.add(Observation(group, first_round, own_us, waits_us))
    window.take()                     # {group: Latest(...)}, or None
    window.change(140, first=142)     # from round 140 on something else rules

A round's number decides which choice it was made under, so a slow group comes to a change later.
Each group's last reports count: they are of one time then, whatever the rounds' numbers are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from psdist.controller import WINDOW, Observation, Times
from psdist.controller.snapshots import Fields, HasSnapshot


class Latest(NamedTuple):
    """WINDOW rounds of a group, from ``first`` on."""

    since: int
    """The first round of the current choice."""
    first: int
    rounds: list[Times]


def _latest(rounds: Iterable[Times] = ()) -> deque[Times]:
    return deque(rounds, maxlen=WINDOW)


@dataclass(slots=True)
class _Told:
    first: int = 0
    """Rounds before this one do not count."""
    next: int = 0
    """Number of the next round that it reports."""
    since: int = 0
    """First round of the choice under which its last reported rounds were made."""
    rounds: Annotated[deque[Times], AfterValidator(_latest)] = field(default_factory=_latest)


class OwnWindow(HasSnapshot):
    STATE = Fields(
        {
            list[tuple[int, int]]: "_starts",
            dict[int, _Told]: "_told",
        }
    )

    def __init__(self, *, num_groups: int, first: int, waits_for_all: bool) -> None:
        """``waits_for_all``: wait until all groups have come to the current choice; else until one
        has: where no group waits for slow ones, that may take very long, and their current rounds
        are made under the choice before."""
        self._waits_for_all = waits_for_all
        self._starts = [(0, first)]
        """(round, the first one to be looked at), ascending: what rules from when on."""
        self._told = {group: _Told() for group in range(num_groups)}

    @property
    def groups(self) -> frozenset[int]:
        """Groups whose rounds are awaited."""
        return frozenset(self._told)

    @property
    def first(self) -> int:
        """The first round to be looked at of those under the current choice."""
        return self._starts[-1][1]

    def lose(self, group: int) -> None:
        """The group has failed: drop its reports, and wait for no more of them."""
        del self._told[group]

    def admit(self, group: int, first_round: int) -> None:
        """The group has joined: it makes its first round there, which it does not report."""
        self._told[group] = _Told(first=first_round + 1, next=first_round)

    def change(self, round_number: int, first: int) -> None:
        """From this round on something else rules; of its rounds those from ``first`` on count."""
        earlier = [each for each in self._starts if each[0] < round_number]
        self._starts = [*earlier, (round_number, first)]

    def add(self, seen: Observation) -> None:
        told = self._told[seen.group]
        for round_number, each in enumerate(seen.times(), start=seen.first_round):
            told.next = round_number + 1
            place = bisect_right(self._starts, round_number, key=itemgetter(0)) - 1
            since, first = self._starts[place]
            if round_number < max(first, told.first):
                continue
            if told.since != since:
                told.rounds.clear()
                told.since = since
            told.rounds.append(each)

    def take(self) -> dict[int, Latest] | None:
        """Return the rounds by group, once each has reported WINDOW rounds; the next window
        follows."""
        now = self._starts[-1][0]
        here = [told.since == now for told in self._told.values()]
        is_enough = all(here) if self._waits_for_all else any(here)
        if not is_enough or any(len(told.rounds) < WINDOW for told in self._told.values()):
            return None
        found = {}
        for group, told in sorted(self._told.items()):
            found[group] = Latest(told.since, told.next - WINDOW, list(told.rounds))
            told.rounds.clear()
        return found
