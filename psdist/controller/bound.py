"""The bound of ssp, moved in a range: decided from what groups' rounds have taken.

    control = BoundControl(num_groups=4, lowest=2, highest=8)         # as ModeControl

How long the rounds of a window would have taken under a bound follows from what each has taken of
its group without waiting for others (:func:`bounded_us`). The bound is the least one with which
that is hardly longer than with the highest. After DSSP (Zhao et al., "Dynamic Stale Synchronous
Parallel Distributed Training for Deep Learning", ICDCS 2019), which predicts waiting from push
intervals, too, there for one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psdist.controller import WINDOW, Controller, Decision, Window
from psdist.controller.kept import KeptModes
from psdist.controller.snapshots import Fields, Nested

NEAR: Final = 0.02
"""As much longer than with the highest bound is hardly longer;"""
TO_RAISE: Final = 0.05
"""as much longer raises the bound: more, so that what lowers it is not what raises it."""


class BoundControl(Controller):
    STATE = Fields(
        {
            tuple[int, ...]: "_sizes",
            Nested: "window",
            int: "bound",
        }
    )

    def __init__(self, *, num_groups: int, lowest: int, highest: int) -> None:
        """The run begins with the ``lowest``."""
        # The duration of round 0 is unknown: it begins before there is an iteration.
        self.window = Window(num_groups=num_groups, first=1)
        super().__init__(self.window)
        self._lowest, self._highest = lowest, highest
        self.bound = lowest

    def judge(self) -> Decision | None:
        first = self.window.first
        if (found := self.window.take()) is None:
            return None
        # A group's shortest wait in a round is the exchange.
        rounds_us = []
        for group in found:
            exchange_us = min(each.wait_us for each in group)
            rounds_us.append([each.own_us + exchange_us for each in group])
        took_us = [bounded_us(rounds_us, bound) for bound in range(self._highest + 1)]
        best_us, now_us = took_us[self._highest], took_us[self.bound]
        least = next(
            bound
            for bound in range(self._lowest, self._highest + 1)
            if took_us[bound] <= (1 + NEAR) * best_us
        )
        is_slow = now_us > (1 + TO_RAISE) * best_us
        if least == self.bound or (least > self.bound and not is_slow):
            return None
        now, then, best = (
            f"{us / WINDOW / 1e3:.2f} ms" for us in (now_us, took_us[least], best_us)
        )
        return Decision(
            "ssp",
            least,
            f"iterations {first} to {first + WINDOW - 1}: {now} each with staleness {self.bound}, "
            f"{then} with {least}, {best} with {self._highest}",
        )

    def committed(self, decision: Decision, round_number: int) -> None:
        self.bound = decision.staleness
        self.window.begin(max(round_number, self.window.first))

    def go_on(self, kept: KeptModes | None, first_round: int) -> None:
        """Restore before anything is observed: all groups have made at most ``first_round`` rounds,
        and the run continues with these modes, or (None) as every run begins."""
        self.window.begin(first_round + 1)
        if kept is not None:
            self.bound = kept.last.staleness
            self.window.begin(max(kept.last.rounds[0], first_round + 1))


def bounded_us(rounds_us: Sequence[Sequence[int]], bound: int) -> int:
    """Return the time at which the last group has made these rounds; all groups begin at 0.
    ``rounds_us``: [groups][rounds], time of each without waiting for others. A round c begins when
    every group has made its first c - ``bound``."""
    ends, opened = [0] * len(rounds_us), [0]
    for number, taken in enumerate(zip(*rounds_us, strict=True)):
        gate = opened[max(0, number - bound)]
        ends = [max(end, gate) + each for end, each in zip(ends, taken, strict=True)]
        opened.append(max(ends))
    return max(ends)
