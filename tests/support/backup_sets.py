"""Groups that contributed to each round of a run with backup groups, by its history; and the same
sets once more in another run, whatever its network and its groups' speed are.

    sets = sets_of(first.history)
    replay(sets, monkeypatch)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from psdist.history import EventKind, History
from psdist.servers.protocol.rules import backup
from psdist.servers.protocol.rules.closing import Closed, Closing, Rounds


def sets_of(history: History) -> list[Closed]:
    """Return the groups that contributed to each round, in the order of those decisions."""
    events, found = history.servers[history.run.owners[0]].events, []
    of_chunk = events[events["chunk"] == 0]
    contributors: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for each in of_chunk:
        kind = {EventKind.APPLY: contributors, EventKind.MISSED: left}.get(EventKind(each["kind"]))
        if kind is not None:
            kind.setdefault(int(each["clock"]), []).append(int(each["group"]))
    for number, round_number in enumerate(sorted(contributors)):
        groups, away = contributors[round_number], left.get(round_number, [])
        found.append(Closed(number, round_number, tuple(groups), tuple(away)))
    return found


def replaying(sets: Sequence[Closed]) -> type[Closing]:
    """Closes each round with the groups that these say, when all of them have come."""

    class Replayed(Closing):
        def __init__(self, rounds: Rounds, *, backup: int) -> None:
            super().__init__(rounds, backup=backup)

        def close(self, counting: Iterable[int]) -> Closed | None:
            number = self._rounds.num_closed
            if number == len(sets) or not set(sets[number].groups) <= set(counting):
                return None
            closed = sets[number]
            here = all(self._newest.get(group, -1) >= closed.round for group in closed.groups)
            return closed if here else None

        def sits_out(self, group: int, _round: int, counting: Iterable[int]) -> bool:
            coming = sets[self._rounds.num_closed :]
            is_open = bool(coming) and set(coming[0].groups) <= set(counting)
            is_out = is_open and group not in coming[0].groups
            (self._sitting.add if is_out else self._sitting.discard)(group)
            return is_out

    return Replayed


class LateIsLate(backup.Backup):
    """A group that sits out may sit out several rounds."""

    def _tell_late(self, group: int) -> list[Any]:
        assert self._closing is not None
        if group in self._late and self._closing.sits_out(group, 0, self._counting):
            return []
        return super()._tell_late(group)


def replay(sets: Sequence[Closed], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of runs from now on close with these."""
    monkeypatch.setattr(backup, "Closing", replaying(sets))
    for module in ("psdist.servers.protocol.rules.backup", "tests.support.virtual.schedule"):
        monkeypatch.setattr(f"{module}.Backup", LateIsLate)
