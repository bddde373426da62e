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

Every window of rounds is judged once. In sync the rounds that all groups have reported are judged
before the window is full, too, since random skew costs most in sync. Two tests allow the change:

- The rounds so far save :data:`TO_SSP` of the whole window, even if its other rounds take the usual
  time and save nothing. If no later round is longer than usual, the full window would lead to the
  same decision. This test needs no minimum of rounds.
- From :data:`EARLY` rounds on, the gain is high enough without the :data:`LEFT_OUT` longest rounds,
  which may be a checkpoint and an evaluation. This test finds groups whose rounds all vary.

A change back to sync takes a full window: few rounds may contain no slow one.
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
"""Minimum number of rounds for the second test of a change to ssp."""
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
        first, rounds = self.window.first, _by_round(self.window.so_far())
        is_whole = self.window.take() is not None
        if self.mode == "ssp":
            is_back = is_whole and _gain(rounds) <= TO_SYNC
            return Decision("sync", 0, _words(first, rounds)) if is_back else None
        if rounds and _gain(rounds, (WINDOW - len(rounds)) * _usual_us(rounds)) >= TO_SSP:
            return Decision("ssp", self._staleness, _words(first, rounds))
        shortest = sorted(rounds, key=_in_sync_us)[:-LEFT_OUT]
        if not is_whole and len(rounds) >= EARLY and _gain(shortest) >= TO_SSP:
            return Decision("ssp", self._staleness, _words(first, shortest, LEFT_OUT))
        return None

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


def _in_ssp_us(rounds: Sequence[_Round]) -> int:
    """Return the time of all these rounds."""
    own_us = [[group.own_us for group in each] for each in rounds]
    return max(map(sum, zip(*own_us, strict=True))) + sum(map(_exchange_us, rounds))


def _gain(rounds: Sequence[_Round], rest_us: int = 0) -> float:
    """Return the gain of these rounds. ``rest_us``: time of further rounds that save nothing."""
    sync_us = sum(map(_in_sync_us, rounds))
    saved_us, whole_us = sync_us - _in_ssp_us(rounds), sync_us + rest_us
    return saved_us / whole_us if whole_us else 0.0


def _usual_us(rounds: Sequence[_Round]) -> int:
    """Return the time of a round in which no group is slower than in its quickest quarter."""
    quarter = (len(rounds) - 1) // 4
    by_group: list[Sequence[Times]] = list(zip(*rounds, strict=True))
    own_us = (sorted(each.own_us for each in group)[quarter] for group in by_group)
    return max(own_us) + sorted(map(_exchange_us, rounds))[quarter]


def _words(first: int, rounds: Sequence[_Round], left_out: int = 0) -> str:
    """Return the times and the gain of the rounds from ``first`` on without the ``left_out``
    longest."""
    but = f" but the {left_out} longest" if left_out else ""
    sync_us, ssp_us = sum(map(_in_sync_us, rounds)), _in_ssp_us(rounds)
    sync_ms, ssp_ms = (us / len(rounds) / 1e3 for us in (sync_us, ssp_us))
    return (
        f"iterations {first} to {first + len(rounds) + left_out - 1}{but}: {sync_ms:.2f} ms each "
        f"in sync, {ssp_ms:.2f} ms with bounded staleness, {100 * _gain(rounds):.0f} % less"
    )
