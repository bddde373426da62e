"""Which codecs to send with: the least lossy ones with which a round is about as short as can be.

Pure: numbers in, decisions out. The registrar runs it (``codec = auto``), and ``psdist check``
feeds it what was recorded and must get the same decisions.

    control = CodecControl(num_groups=4, names=["none", "fp16", "int8"])
    control.know_sizes([1000, 500, 260])                      # bytes of an exchange, by level
    control.observe(Observation(group, first_round, own_us, waits_us, errors_ppm))
    decision = control.judge()                                # None, or the level to change to
    control.committed(decision, 140)                          # it rules from round 140 on

Codecs are *levels*, the least lossy first. In sync a round takes as long as its slowest group, own
time and wait together; what no group computes meanwhile is *exposed*:

    round = max over groups (own + wait),    exposed = round - max over groups own

each the median over a window of rounds. What is sent while others compute is not exposed: where it
all hides, fewer bytes make no round shorter. Of levels that were tried both are known. Of others
own time is as of the nearest level that was, and exposed time follows the bytes: on the line
through the two levels whose bytes are nearest; where one is known, on that through it and the
exposed time that an earlier line has shown to be there without bytes, 0 at first. The level to be
at is the least lossy one whose round is at most :data:`SLACK` longer than the shortest; to what was
not seen it goes back one level at a time, for what hides now may not hide there.

What was seen counts for :data:`LASTS` windows, twice as long for each time that a level was gone to
in vain, and no longer than until the level of now takes half or twice as much waiting as before,
because then the network is another one. So a level that was too slow is tried again, ever less
often. With an error budget only levels count whose ||p - C(p)|| / ||p|| is not above it; what has
not been seen of a level is found out one level at a time.

With a patience only levels count that are less lossy than those under which the reported loss has
stood still for so many windows (:mod:`psdist.controller.loss_guard`). That is for good: the
lossiest level that may come becomes less lossy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from statistics import median_low
from typing import Final, NamedTuple

from psdist.controller.decisions import WINDOW, Controller, Decision, Times, Window
from psdist.controller.kept import KeptCodecs, are_starts, from_place
from psdist.controller.loss_guard import LossGuard

SLACK: Final = 0.10
"""Of the shortest round: so much longer one may be with a less lossy level,"""
SLACK_BACK: Final = 0.05
"""and so much where that level is to be gone back to: less, so that in between nothing changes."""
FIRST: Final = 5
"""Where the first window begins: memory is made and connections are opened before."""
SETTLES: Final = 2
"""Rounds behind a change that say nothing: parameters come in full once."""
LASTS: Final = 8
"""Windows for which it counts what was seen of a level that is not the one of now."""
_MOST_VAIN: Final = 6
"""After so many vain trials of a level running it is not tried less often."""
_MILLION: Final = 1e6


class _Seen(NamedTuple):
    own_us: int
    exposed_us: int
    window: int
    """The how-manieth it was."""

    @property
    def round_us(self) -> int:
        return self.own_us + self.exposed_us


class CodecControl(Controller):
    def __init__(
        self,
        *,
        num_groups: int,
        names: Sequence[str],
        error_budget: float | None = None,
        loss_patience: int | None = None,
    ) -> None:
        """``names``: of the levels, the first of which the run begins with; ``error_budget``: the
        most that pushes may leave out, relative to what they were to bring; ``loss_patience``: for
        how many windows the loss may stand still under a level, where losses are reported."""
        super().__init__(Window(num_groups=num_groups, first=FIRST))
        self._names = names
        self._budget = error_budget
        self._guard = LossGuard(loss_patience) if loss_patience is not None else None
        self._lossiest = len(names) - 1
        """Of the levels that the loss allows."""
        self.level = 0
        self._starts = [(0, 0)]
        """(round, level): which rules from when on."""
        self._num_windows = 0
        self._here = 0
        """Windows since the level of now rules."""
        self._came_from = 0
        self._seen: dict[int, _Seen] = {}
        self._errors: dict[int, tuple[int, int]] = {}
        """By level: millionths that pushes have left out, and in which window."""
        self._fixed_us = 0.0
        """Exposed time that no bytes make shorter, as the line through two levels has said last."""
        self._vain: dict[int, int] = {}
        """By level: how often running it was left after a single window, to where it came from."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the levels."""
        return tuple(self._names)

    @property
    def reads_losses(self) -> bool:
        return self._guard is not None

    def report(self, count: int, total: float) -> None:
        """Scripts have reported so many losses, with this sum."""
        assert self._guard is not None
        self._guard.report(count, total)

    def judge(self) -> Decision | None:
        first = self._window.first
        if not self._sizes or (rounds := self._window.take()) is None:
            return None
        self._num_windows += 1
        self._here += 1
        self._take_in(rounds)
        if self._guard is not None and self._guard.stands_still() and self.level:
            self._lossiest = self.level - 1
        level = self._best()
        if level == self.level:
            return None
        return Decision("sync", 0, self._reason(level, first), level)

    def committed(self, decision: Decision, round_number: int) -> None:
        left, to = self.level, decision.level
        goes_back = self._here == 1 and (self._came_from > left) == (to > left)
        self._vain[left] = min(self._vain.get(left, 0) + 1, _MOST_VAIN) if goes_back else 0
        self._came_from, self.level, self._here = left, to, 0
        earlier = [each for each in self._starts if each[0] < round_number]
        self._starts = [*earlier, (round_number, to)]
        if self._guard is not None:
            self._guard.begin()
        self._window.begin(max(round_number + SETTLES, self._window.first))

    # -- from attempt to attempt ----------------------------------------------------------------

    def kept(self, clock: int) -> KeptCodecs:
        """For a checkpoint of ``clock`` rounds. Of rounds that no window has looked at yet nothing
        is kept."""
        return KeptCodecs(
            names=tuple(self._names),
            starts=from_place(self._starts, clock),
            lossiest=self._lossiest,
            num_windows=self._num_windows,
            here=self._here,
            came_from=self._came_from,
            seen=tuple((level, *self._seen[level]) for level in sorted(self._seen)),
            errors=tuple((level, *self._errors[level]) for level in sorted(self._errors)),
            fixed_us=self._fixed_us,
            vain=tuple(sorted(self._vain.items())),
            guard=self._guard.kept() if self._guard is not None else None,
        )

    def lossiest_since(self, round_number: int) -> int:
        """The lossiest level that has ruled in this round or later."""
        return max(level for _, level in from_place(self._starts, round_number))

    def go_on(self, kept: KeptCodecs, first_round: int) -> None:
        """Before anything is observed: a run that begins with ``first_round``, from a checkpoint.
        Raises ValueError for what is not of such a run."""
        most = len(self._names) - 1
        levels = [kept.came_from, *(each[0] for each in (*kept.seen, *kept.errors, *kept.vain))]
        counts = [kept.num_windows, kept.here, *chain(*kept.seen, *kept.errors, *kept.vain)]
        if (
            kept.names != tuple(self._names)
            or not are_starts(kept.starts, least=0, most=most)
            or not 0 <= kept.lossiest <= most
            or not all(0 <= each <= most for each in levels)
            or min(counts) < 0
            or max((times for _, times in kept.vain), default=0) > _MOST_VAIN
            or not 0 <= kept.fixed_us < math.inf
        ):
            raise ValueError(f"of the codecs {', '.join(kept.names)}, or not whole")
        self._starts = [*kept.starts]
        self.level, self._lossiest = kept.starts[-1][1], kept.lossiest
        self._num_windows, self._here = kept.num_windows, kept.here
        self._came_from, self._fixed_us = kept.came_from, kept.fixed_us
        self._seen = {level: _Seen(*each) for level, *each in kept.seen}
        self._errors = {level: (error, window) for level, error, window in kept.errors}
        self._vain = dict(kept.vain)
        if self._guard is not None and kept.guard is not None:
            self._guard.go_on(kept.guard)
        # As at the beginning of a run: memory is made, and connections are opened.
        self._window.begin(max(first_round, kept.starts[-1][0]) + FIRST)

    # -- what was seen --------------------------------------------------------------------------

    def _take_in(self, rounds: Sequence[Sequence[Times]]) -> None:
        by_round = list(zip(*rounds, strict=True))
        own_us = median_low(max(each.own_us for each in groups) for groups in by_round)
        round_us = median_low(
            max(each.own_us + each.wait_us for each in groups) for groups in by_round
        )
        error = max(median_low(each.error_ppm for each in group) for group in rounds)
        now = _Seen(own_us, max(0, round_us - own_us), self._num_windows)
        before = self._seen.get(self.level)
        if before is not None and _is_another_network(before, now):
            self._seen.clear()
            self._vain.clear()
        self._seen[self.level] = now
        self._errors[self.level] = error, self._num_windows
        self._seen = {
            level: seen for level, seen in self._seen.items() if self._counts(level, seen.window)
        }
        self._errors = {
            level: each for level, each in self._errors.items() if self._counts(level, each[1])
        }

        known = self._known()
        if len(known) > 1:
            small, large = min(known), max(known)
            slope = max(0.0, (known[large] - known[small]) / (large - small))
            self._fixed_us = max(0.0, known[small] - slope * small)

    def _counts(self, level: int, window: int) -> bool:
        return self._num_windows - window <= LASTS << self._vain.get(level, 0)

    # -- what is expected -----------------------------------------------------------------------

    def _round_us(self, level: int) -> float:
        """With this level; as it was seen, or is expected."""
        if (seen := self._seen.get(level)) is not None:
            return seen.round_us
        nearest = min(self._seen, key=lambda each: (abs(each - level), each))
        return self._seen[nearest].own_us + self._exposed_us(self._sizes[level])

    def _known(self) -> dict[int, int]:
        """Bytes -> exposed time, of what was seen."""
        return {self._sizes[level]: seen.exposed_us for level, seen in sorted(self._seen.items())}

    def _exposed_us(self, size: int) -> float:
        known = self._known()
        sizes = sorted(known)
        if len(sizes) == 1:
            fixed_us = min(self._fixed_us, known[sizes[0]])
            return fixed_us + (known[sizes[0]] - fixed_us) * size / sizes[0]
        place = sum(each < size for each in sizes)  # so many are smaller
        small, large = sizes[max(0, min(place - 1, len(sizes) - 2)) :][:2]
        slope = max(0.0, (known[large] - known[small]) / (large - small))
        nearer = large if 2 * size > small + large else small
        return max(0.0, known[nearer] + slope * (size - nearer))

    def _best(self) -> int:
        """The level to be at."""
        allowed = [level for level in range(len(self._names)) if self._is_allowed(level)]
        rounds = {level: self._round_us(level) for level in {*allowed, self.level}}
        shortest = min(rounds[level] for level in allowed)
        best = next(each for each in allowed if rounds[each] <= (1 + SLACK) * shortest)
        if best >= self.level or self.level not in allowed:
            return best
        back = next(
            each
            for each in allowed
            if each == self.level or rounds[each] <= (1 + SLACK_BACK) * shortest
        )
        return back if back in self._seen else max(back, self.level - 1)

    def _is_allowed(self, level: int) -> bool:
        """By the loss, and within the budget; of a level that was not seen only where the one
        before it is."""
        if level > self._lossiest:
            return False
        if self._budget is None or not level:
            return True
        if level in self._errors:
            return self._errors[level][0] <= self._budget * _MILLION
        return (level == 1 or level - 1 in self._errors) and self._is_allowed(level - 1)

    # -- in words -------------------------------------------------------------------------------

    def _reason(self, level: int, first: int) -> str:
        now = self._seen[self.level]
        told = (
            f"iterations {first} to {first + WINDOW - 1}: {now.round_us / 1e3:.2f} ms each with "
            f"{self._names[self.level]}, {now.exposed_us / 1e3:.2f} ms of them waiting"
        )
        if self._guard is not None and self.level > self._lossiest:
            told += f", {self._guard.words}"
        elif not self._is_allowed(self.level):
            error = self._errors[self.level][0] / _MILLION
            told += f", {error:.4f} left out of a push where {self._budget} is allowed"
        is_seen = "seen" if level in self._seen else "expected"
        return f"{told}; {self._round_us(level) / 1e3:.2f} ms {is_seen} with {self._names[level]}"


def _is_another_network(before: _Seen, now: _Seen) -> bool:
    """Whether waiting takes half as much or twice as much as before, and is a part of the round
    that counts."""
    least, most = sorted((before.exposed_us, now.exposed_us))
    return most >= 2 * least and most - least > SLACK * max(before.round_us, now.round_us)
