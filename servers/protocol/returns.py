"""What of the dead goes back to the epoch, decided from where the living are in their data and from
how far the dead have come: the registrar's; pure.

All workers are dealt passes of equally many batches, so a clock says where in its data a worker is:
one that was ``n`` iterations behind another had brought ``n`` times the batches of an iteration
fewer. One pass is cut for all: that in which the farthest of the living is. What anybody has
brought of it stays; the living go on to where the farthest is, and what is left then, with what the
dead had not brought, is dealt to them. So all make equally many iterations, and a clock goes on
saying where in its data a worker is. Of a pass that one of the living has ended nothing is dealt:
some would make iterations that others do not.

    returns = Returns()
    returns.on_buried({1: (12,)})                   # worker 1 had brought 12 updates, of one set
    returns.decide({0: payload, 2: payload})        # what all who came are answered
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Final

from psdist.protocol.returns import (
    DataStanding,
    Return,
    pack_refusal,
    pack_return,
    unpack_standing,
)

NO_ITERATION: Final = "no worker has made an iteration to know one's batches by"


class Returns:
    def __init__(self) -> None:
        self.reached: dict[int, tuple[int, ...]] = {}
        """Of each of the dead, by parameter set: the most updates of its group that a chunk
        contains, or will contain."""
        self._decided: set[int] = set()
        """Those of them of whom was decided before."""

    def on_buried(self, reached: Mapping[int, tuple[int, ...]]) -> None:
        """A server has told how far each of the dead has come."""
        for worker, clocks in reached.items():
            pairs = zip_longest(self.reached.get(worker, ()), clocks, fillvalue=0)
            self.reached[worker] = tuple(max(pair) for pair in pairs)

    def decide(self, brought: Mapping[int, bytes]) -> bytes:
        """The answer to all, of what each of the living has brought."""
        living = sorted(brought)
        dead = [each for each in sorted(self.reached) if each not in {*self._decided, *living}]
        self._decided.update(dead)
        standings: list[DataStanding] = []
        for payload in (brought[worker] for worker in living):
            found = unpack_standing(payload)
            if isinstance(found, str):
                return pack_refusal(found)
            assert found is not None  # they were looked at when they came
            standings.append(found)
        trained_with = {each.dataset for each in standings if each.dataset is not None}
        if len(trained_with) > 1:
            return pack_refusal("workers are at different datasets")
        dataset = max(trained_with, default=None)
        cut = _cut(standings, dataset)
        if isinstance(cut, str):
            return pack_refusal(cut)
        farthest, (ordinal, at), per_round = cut
        parts, lost = [], 0
        for worker in dead:
            ahead = max(self.reached[worker], default=0) - farthest.clock
            if ahead and not per_round:
                return pack_refusal(NO_ITERATION)
            brought_of = at + ahead * per_round
            parts.append((worker, max(0, brought_of)))
            lost += max(0, -brought_of)
        counts = zip_longest(*(each.counts for each in standings), fillvalue=0)
        return pack_return(
            Return(
                dataset=dataset,
                ordinal=ordinal,
                at=at,
                num_batches=farthest.num_batches,
                living=tuple(living),
                brought=tuple(parts),
                lost=lost,
                counts=tuple(map(max, counts)),
            )
        )


def _cut(
    standings: list[DataStanding], dataset: int | None
) -> tuple[DataStanding, tuple[int, int], int] | str:
    """The farthest, where it is, and how many batches an iteration takes; or why nobody knows."""
    rounds = {each.per_round for each in standings if each.per_round}
    if len(rounds) > 1:
        return "iterations take different numbers of batches"
    per_round = max(rounds, default=0)
    farthest = max(standings, key=lambda each: _place(each, dataset))
    place = _place(farthest, dataset)
    open_there = [e for e in standings if e.is_open and _place(e, dataset)[0] == place[0]]
    if open_there:  # who has not begun that pass knows the length of the one before
        farthest = farthest._replace(num_batches=open_there[0].num_batches)
    for each in standings:
        ordinal, seen = _place(each, dataset)
        is_beside = ordinal == place[0]
        behind = (farthest.clock - each.clock) * per_round
        if each.clock > farthest.clock or (is_beside and place[1] - seen != behind):
            return "workers' iterations do not say where in their data they are"
        if is_beside and each.is_open and each.num_batches != farthest.num_batches:
            return "workers' passes are not of one length"
    return farthest, place, per_round


def _place(standing: DataStanding, dataset: int | None) -> tuple[int, int]:
    """The pass, and how many of its batches were handed out; where none is open the next one."""
    is_known = dataset is not None and dataset < len(standing.counts)
    begun = standing.counts[dataset] if dataset is not None and is_known else 0
    return (begun - 1, standing.seen) if standing.is_open else (begun, 0)
