"""The rounds that are looked at where groups are in different ones (ssp, async): of each group the
latest of its own; pure.

    window = OwnWindow(num_groups=4, first=5, waits_for_all=True)
    window.add(Observation(group, first_round, own_us, waits_us))
    window.take()                     # {group: Latest(...)}, or None
    window.change(140, first=142)     # from round 140 on something else rules

What rules a round, its number says, so a group that is behind comes to a change later. Of each
group that was told last counts: all of it is of one time then, whatever the rounds' numbers are.
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
    """The round from which on there is what rules them."""
    first: int
    rounds: list[Times]


def _latest(rounds: Iterable[Times] = ()) -> deque[Times]:
    return deque(rounds, maxlen=WINDOW)


@dataclass(slots=True)
class _Told:
    first: int = 0
    """Rounds before this one do not count."""
    next: int = 0
    """The round that it tells of next."""
    since: int = 0
    """Of the rounds that it has told of, the change from which on they are ruled as they are."""
    rounds: Annotated[deque[Times], AfterValidator(_latest)] = field(default_factory=_latest)


class OwnWindow(HasSnapshot):
    STATE = Fields(
        {
            list[tuple[int, int]]: "_starts",
            dict[int, _Told]: "_told",
        }
    )

    def __init__(self, *, num_groups: int, first: int, waits_for_all: bool) -> None:
        """``waits_for_all``: for all groups to come to what rules now; else for one of them: where
        nobody waits for who is behind, that may take it very long, and its rounds of now are under
        what ruled before."""
        self._waits_for_all = waits_for_all
        self._starts = [(0, first)]
        """(round, the first one to be looked at), ascending: what rules from when on."""
        self._told = {group: _Told() for group in range(num_groups)}

    @property
    def groups(self) -> frozenset[int]:
        """Whose rounds are waited for."""
        return frozenset(self._told)

    @property
    def first(self) -> int:
        """Of the rounds under what rules now the first one to be looked at."""
        return self._starts[-1][1]

    def lose(self, group: int) -> None:
        """It has died: what it has told is dropped, and nothing more of it is waited for."""
        del self._told[group]

    def admit(self, group: int, first_round: int) -> None:
        """It has joined, and makes its first round there, of which it tells nothing."""
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
        """By group, once each has told of so many rounds; the next window begins behind them."""
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
