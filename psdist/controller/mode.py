"""When to change between sync and bounded staleness: decided from what groups' rounds have taken.

Pure: numbers in, decisions out. The registrar runs it (``mode = auto``), and ``psdist check`` feeds
it what was recorded and must get the same decisions.

    control = ModeControl(num_groups=4, staleness=3)
    control.observe(Observation(group, first_round, own_us, waits_us))    # as groups report
    decision = control.judge()                                # None, or the mode to change to
    control.committed(decision, 140)                          # it rules from round 140 on

Of each round every group tells its *own* time (computing, and whatever else is not waiting for
servers) and its *wait*. In sync a round takes as long as the slowest group's own time and the
exchange, for which the last to come waits as well, so its wait is the least of that round. With
bounded staleness groups go on at their mean pace, so that in the long run the slowest in the mean
decides:

    sync = mean over rounds (max over groups own + min over groups wait)
    ssp  = max over groups (mean over rounds own) + mean over rounds (min over groups wait)

The *gain* is 1 - ssp / sync. It is 0 where one group is always the slowest, whom staleness does not
help, and where all are alike. Own times are the same in either mode, so it is computed alike.
"""

from __future__ import annotations

from typing import Final

from psdist.controller.decisions import WINDOW, Controller, Decision, Window
from psdist.controller.kept import KeptModes

TO_SSP: Final = 0.15
"""The gain from which on sync gives way,"""
TO_SYNC: Final = 0.05
"""and up to which it comes back: less, so that a gain in between changes nothing."""


class ModeControl(Controller):
    def __init__(self, *, num_groups: int, staleness: int) -> None:
        """``staleness``: the bound of ssp; the run begins in sync."""
        # What round 0 has taken nobody knows: it begins before there is an iteration.
        self._window = Window(num_groups=num_groups, first=1)
        super().__init__(self._window)
        self._staleness = staleness
        self.mode = "sync"

    def judge(self) -> Decision | None:
        first = self._window.first
        if (rounds := self._window.take()) is None:
            return None
        own = [[each.own_us for each in group] for group in rounds]
        waits = [[each.wait_us for each in group] for group in rounds]
        exchange_us = sum(map(min, zip(*waits, strict=True)))
        sync_us = sum(map(max, zip(*own, strict=True))) + exchange_us
        ssp_us = max(map(sum, own)) + exchange_us
        gain = 1 - ssp_us / sync_us if sync_us else 0.0
        told = (
            f"iterations {first} to {first + WINDOW - 1}: {sync_us / WINDOW / 1e3:.2f} ms each "
            f"in sync, {ssp_us / WINDOW / 1e3:.2f} ms with bounded staleness, {100 * gain:.0f} % "
            "less"
        )
        if self.mode == "sync" and gain >= TO_SSP:
            return Decision("ssp", self._staleness, told)
        if self.mode == "ssp" and gain <= TO_SYNC:
            return Decision("sync", 0, told)
        return None

    def committed(self, decision: Decision, round_number: int) -> None:
        self.mode = decision.mode
        self._window.begin(max(round_number, self._window.first))

    def go_on(self, kept: KeptModes | None, first_round: int) -> None:
        """Before anything is observed: a run whose groups have all made ``first_round`` rounds, or
        fewer, and that goes on with these modes, or (None) as every run begins."""
        self._window.begin(first_round + 1)
        if kept is not None:
            self.mode = kept.last.mode
            self._window.begin(max(kept.last.rounds[0], first_round + 1))
