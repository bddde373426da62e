"""Backup groups (sync): which groups contribute to a round, decided once for all chunks; pure.

A round closes without the ``backup`` slowest groups of those that are waited for. A group that has
not come by then *misses* the round: its update is dropped, and it continues in a later round. One
server decides, the owner of the chunk that all groups send first; a group has come when its push
of that chunk is offered. The other servers receive the decision, and every chunk is stepped with
exactly these groups. A group that has missed ``wait_every`` - 1 rounds in a row is waited for.

    rounds = Rounds(first=(0, 0, 0), wait_every=10)
    closing = Closing(rounds, backup=1)
    closing.come(0, 0)
    closing.come(2, 0)
    rounds.add(closing.close([0, 1, 2]))     # Closed(number=0, round=0, groups=(0, 2), missed=(1,))
    closing.sits_out(1, 0, [0, 1, 2])        # False: it is in round 1 about when the others are

A group that missed several rounds by one update must first get parameters, while other groups
compute already. It would be late in the open round, and so in every later one. So it *sits out*
that round too: it receives the round in which it continues when the open round closes, and begins
together with all others. It does not sit out if it is waited for, or if no other group will be in
that round. A group that missed only one round continues at once, and contributes where another
group is slow. At most ``backup`` groups miss a round, including groups that sit it out.

Backup workers: Chen et al., "Revisiting Distributed Synchronous SGD", arXiv 1604.00981: the mean of
the first arrivals, late gradients dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from psdist.protocol.checkpoints import Misses


@dataclass(frozen=True, slots=True)
class Closed:
    """The decision about a round; groups ascending."""

    number: int
    """Number of the decision: 0, 1, 2 ..."""
    round: int
    groups: tuple[int, ...]
    """Contributors, at least one."""
    missed: tuple[int, ...]
    """Groups that were waited for and had not come."""


class Rounds:
    """The rounds that are closed, on one server."""

    def __init__(
        self, *, first: Sequence[int], wait_every: int, misses: Misses | None = None
    ) -> None:
        """``first``: by group, where its clock begins; ``misses``: what had been missed before."""
        self.num_closed = 0
        self.decided = list(first)
        """By group: its rounds are decided up to here."""
        self._wait_every = wait_every
        self._running = [0] * len(first) if misses is None else list(misses.running)
        """By group: rounds that it has missed since it contributed last."""
        self._in_all = [0] * len(first) if misses is None else list(misses.in_all)
        self._missed: list[set[int]] = [set() for _ in first]
        """By group: rounds that it has missed, whose update may still come."""

    def add(self, closed: Closed) -> int:
        """A round is closed; the group whose hyperparameters it is stepped with: that which has
        missed the fewest rounds, whose schedulers are the least behind."""
        self.num_closed += 1
        for group in closed.groups:
            self.decided[group] = closed.round + 1
            self._running[group] = 0
        leading = min(closed.groups, key=lambda group: (self._in_all[group], group))
        for group in closed.missed:
            self.decided[group] = closed.round + 1
            self._running[group] += 1
            self._in_all[group] += 1
            self._missed[group].add(closed.round)
        return leading

    @property
    def misses(self) -> Misses:
        """Up to now."""
        return Misses(running=tuple(self._running), in_all=tuple(self._in_all))

    def has_missed(self, group: int, round_number: int) -> bool:
        """Whether the group's update of this round is dropped."""
        return round_number in self._missed[group]

    def has_pushed(self, group: int, round_number: int) -> None:
        """The group is in this round: of earlier ones nothing comes any more."""
        missed = self._missed[group]
        if missed and min(missed) < round_number:
            self._missed[group] = {each for each in missed if each >= round_number}

    def is_awaited(self, group: int) -> bool:
        """Whether its next round does not close without it."""
        return self._running[group] >= self._wait_every - 1


class Closing:
    """On the server that decides."""

    def __init__(self, rounds: Rounds, *, backup: int) -> None:
        """``backup``: maximum groups that miss a round."""
        self._rounds = rounds
        self._backup = backup
        self._newest: dict[int, int] = {}
        """By group: the last round that it has come to."""
        self._sitting: set[int] = set()
        """Groups that sit out the round that is open."""

    def come(self, group: int, round_number: int) -> None:
        """The group pushes its update of this round."""
        self._newest[group] = max(round_number, self._newest.get(group, round_number))

    def sits_out(self, group: int, round_number: int, counting: Iterable[int]) -> bool:
        """Return True if a group whose update of this round came late sits out the open round;
        called again when other groups have stopped."""
        decided = self._rounds.decided
        same_round = {
            each for each in counting if each != group and decided[each] == decided[group]
        }
        is_behind = decided[group] > round_number + 1
        may_sit = len(same_round & self._sitting) < min(self._backup, len(same_round))
        if is_behind and may_sit and not self._rounds.is_awaited(group):
            self._sitting.add(group)
        else:
            self._sitting.discard(group)
        return group in self._sitting

    def comes_back(self, group: int) -> None:
        """The group continues with the open round."""
        self._sitting.discard(group)

    def close(self, counting: Iterable[int]) -> Closed | None:
        """The next round that is decided, if it can be; ``counting``: the groups that are waited
        for at all, ascending."""
        rounds, there = self._rounds, list(counting)
        now = min((rounds.decided[group] for group in there), default=0)
        taking_part = [group for group in there if rounds.decided[group] == now]
        here = tuple(group for group in taking_part if self._newest.get(group, -1) >= now)
        missing = tuple(group for group in taking_part if group not in here)
        may_come = [group for group in missing if group not in self._sitting]
        is_late = len(missing) > self._backup or any(map(rounds.is_awaited, may_come))
        if not here or (may_come and is_late):
            return None
        return Closed(rounds.num_closed, now, here, missing)
