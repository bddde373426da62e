"""Whether a worker's iterations say where in its data it is: then a clock says how far any worker
had come, also one that has died; pure.

    regular = RegularRounds()
    regular.hand_out(a_pass)                      # a batch to train with
    regular.end_iteration(1)                      # which took so many
    regular.standing(a_pass, clock=12, counts=[3])
"""

from __future__ import annotations

from collections.abc import Sequence

from psdist.protocol.returns import DataStanding
from psdist.workers.data.seen import Pass


class RegularRounds:
    def __init__(self) -> None:
        self._why_not = ""
        """Why that is not known for the rest of the job."""
        self._pass: Pass | None = None
        """With which it trains, or has trained last."""
        self._per_round = 0
        """Batches of each iteration in that pass, 0 before the first,"""
        self._is_first = True
        self._is_uneven = False
        """and whether they differ."""

    def hand_out(self, a_pass: Pass) -> None:
        """The script gets a batch of this pass to train with."""
        if a_pass is self._pass:
            return
        before, self._pass = self._pass, a_pass
        self._is_first, self._is_uneven = True, False
        if not a_pass.can_be_cut:
            self._why_not = (
                "the script trains with batches that are not dealt by psdist (a sampler of its "
                "own, a dataset without indices, shard=False)"
            )
        elif before is not None and before.number != a_pass.number:
            self._why_not = "the script trains with several datasets"
        elif before is not None and not before.is_over and a_pass.seen:  # it had begun before
            self._why_not = "the script trains with several loaders at once"

    def end_iteration(self, num_batches: int) -> None:
        """One that took so many."""
        if not num_batches:
            self._why_not = "the script trains with batches of its own"
        self._is_uneven |= num_batches != self._per_round and not self._is_first
        self._per_round, self._is_first = num_batches, False

    def standing(
        self, a_pass: Pass | None, *, clock: int, counts: Sequence[int]
    ) -> DataStanding | str:
        """After so many iterations, between batches of this pass or (None) between two; ``counts``:
        passes that were begun over each dataset. Or why that is not known."""
        if self._why_not:
            return self._why_not
        if self._is_uneven:
            return "iterations take different numbers of batches"
        last = self._pass if a_pass is None else a_pass
        if a_pass is not None and not a_pass.can_be_cut:
            return "the script is in a pass that is not dealt by psdist"
        if a_pass is not None and self._pass is not None and a_pass.number != self._pass.number:
            return "the script trains with several datasets"
        return DataStanding(
            clock=clock,
            per_round=self._per_round,
            dataset=None if last is None else last.number,
            is_open=a_pass is not None,
            seen=0 if a_pass is None else a_pass.seen,
            num_batches=0 if last is None else last.num_batches or 0,
            counts=tuple(counts),
        )
