"""When to change between sync and bounded staleness: decided from what groups' rounds have taken.

Pure: numbers in, decisions out. The coordinator runs it (``mode = auto``), and ``psdist check``
feeds it what was recorded and must get the same decisions.

    control = ModeControl(num_groups=4, staleness=3)
    control.observe(Observation(group, first_round, own_us, waits_us))    # as groups report
    decision = control.judge()                                # None, or the mode to change to
    control.committed(decision, 140)                          # it rules from round 140 on

For each round every group reports its *own* time (computing, and whatever else is not waiting for
servers) and its *wait*. In sync a round takes the slowest group's own time and the exchange. The
last group waits for the exchange, too, so the exchange is the least wait of that round. With
bounded staleness groups proceed at their mean pace, so that in the long run the group with the
slowest mean decides:

    sync = mean over rounds (max over groups own + min over groups wait)
    ssp  = max over groups (mean over rounds own) + mean over rounds (min over groups wait)

The *gain* is 1 - ssp / sync. It is 0 where one group is always the slowest, whom staleness does not
help, and where all are alike. Own times are the same in either mode, so it is computed alike.

Each window of rounds is judged once. One in sync is judged with every round that all groups have
told of, too, from :data:`EARLY` on, for sync costs most while now this group is slow and now that
one: of few rounds the slowest in the mean has more than its share, so that their gain is less than
that of many. A gain from one or two bad rounds (a checkpoint here, an evaluation there) is
left out: the :data:`LEFT_OUT` that are longest in sync. Back to sync takes a whole window: in few
rounds there may be none that is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psdist.controller import WINDOW, Controller, Decision, Times, Window
from psdist.controller.kept import KeptModes
from psdist.controller.snapshots import Fields, Nested
from psdist.mode_names import Mode

TO_SSP: Final = 0.15
"""Minimum gain for a change from sync to ssp."""
TO_SYNC: Final = 0.05
"""Maximum gain for a change back: smaller, so that a gain in between changes nothing."""
EARLY: Final = 6
"""Minimum number of rounds for a change to ssp."""
LEFT_OUT: Final = 2
"""Rounds of these that do not count."""


class ModeControl(Controller):
    STATE = Fields(
        {
            tuple[int, ...]: "_sizes",
            Nested: "window",
            Mode: "mode",
        }
    )

    def __init__(self, *, num_groups: int, staleness: int) -> None:
        """``staleness``: the bound of ssp; the run begins in sync."""
        # The duration of round 0 is unknown: it begins before there is an iteration.
        self.window = Window(num_groups=num_groups, first=1)
        super().__init__(self.window)
        self._staleness = staleness
        self.mode: Mode = "sync"

    def judge(self) -> Decision | None:
        first = self.window.first
        if (rounds := self.window.take()) is not None:
            gain, told = _gain(first, _by_round(rounds))
            if self.mode == "ssp":
                return Decision("sync", 0, told) if gain <= TO_SYNC else None
        elif self.mode == "sync" and self.window.num_told >= EARLY:
            told_of = _by_round(self.window.so_far())
            shortest = sorted(told_of, key=_in_sync_us)[:-LEFT_OUT]
            gain, told = _gain(first, shortest, len(told_of))
        else:
            return None
        return Decision("ssp", self._staleness, told) if gain >= TO_SSP else None

    def committed(self, decision: Decision, round_number: int) -> None:
        self.mode = decision.mode
        self.window.begin(max(round_number, self.window.first))

    def go_on(self, kept: KeptModes | None, first_round: int) -> None:
        """Restore before anything is observed: all groups have made at most ``first_round`` rounds,
        and the run continues with these modes, or (None) as every run begins."""
        self.window.begin(first_round + 1)
        if kept is not None:
            self.mode = kept.last.mode
            self.window.begin(max(kept.last.rounds[0], first_round + 1))


_Round = Sequence[Times]
"""By group."""


def _by_round(rounds: Sequence[Sequence[Times]]) -> list[_Round]:
    return list(zip(*rounds, strict=True))


def _exchange_us(each: _Round) -> int:
    return min(group.wait_us for group in each)


def _in_sync_us(each: _Round) -> int:
    return max(group.own_us for group in each) + _exchange_us(each)


def _gain(first: int, rounds: Sequence[_Round], num_seen: int = WINDOW) -> tuple[float, str]:
    """Return the gain from these among the ``num_seen`` rounds from ``first`` on, and its words."""
    sync_us = sum(map(_in_sync_us, rounds))
    own_us = [[group.own_us for group in each] for each in rounds]
    ssp_us = max(map(sum, zip(*own_us, strict=True))) + sum(map(_exchange_us, rounds))
    gain = 1 - ssp_us / sync_us if sync_us else 0.0
    but = f" but the {num_seen - len(rounds)} longest" if len(rounds) < num_seen else ""
    sync_ms, ssp_ms = (us / len(rounds) / 1e3 for us in (sync_us, ssp_us))
    return gain, (
        f"iterations {first} to {first + num_seen - 1}{but}: {sync_ms:.2f} ms each in sync, "
        f"{ssp_ms:.2f} ms with bounded staleness, {100 * gain:.0f} % less"
    )
