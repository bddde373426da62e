"""Which codecs to send with: the least lossy ones with which a round is about as short as can be.

Pure: numbers in, decisions out. The coordinator runs it (``codec = auto``), and ``psdist check``
feeds it what was recorded and must get the same decisions.

    control = CodecControl(num_groups=4, names=["none", "fp16", "int8"])
    control.know_sizes([1000, 500, 260])                      # bytes of an exchange, by level
    control.observe(Observation(group, first_round, own_us, waits_us, errors_ppm))
    decision = control.judge()                                # None, or the level to change to
    control.committed(decision, 140)                          # it rules from round 140 on

Codecs are *levels*, the least lossy first. How long a round takes at each of them
:mod:`psdist.controller.paces` and :mod:`psdist.controller.level_times` say: in sync and ssp of all
groups together, in async, where none waits for another one, of each by itself, and all together
make rounds at the sum of their rates. The level to be at is the least lossy one whose round is at
most :data:`SLACK` longer than the shortest; to what was not seen it goes back one level at a time,
for what hides now may not hide there.

An observation counts for :data:`LASTS` windows, twice as long for each time that a level was tried
without success. It is dropped when waiting at the current level halves or doubles, because then the
network is another one. So a level that was too slow is tried again, ever less
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
from statistics import harmonic_mean, median_low
from typing import Final, NamedTuple

from psdist.controller import WINDOW, Controller, Decision, Times, Window, paces
from psdist.controller.kept import KeptCodecs, are_starts, at_place, from_place
from psdist.controller.level_times import LevelTimes, Seen
from psdist.controller.loss_guard import LossGuard
from psdist.controller.own_window import OwnWindow
from psdist.controller.paces import Pace
from psdist.controller.snapshots import Fields, Nested
from psdist.mode_names import Mode

SLACK: Final = 0.10
"""Part of the shortest round by which a round may be longer at a less lossy level."""
SLACK_BACK: Final = 0.05
"""The same for returning to a less lossy level: smaller, so that nothing changes in between."""
FIRST: Final = 5
"""Where the first window begins: memory is made and connections are opened before."""
SETTLES: Final = 2
"""Rounds after a change that do not count: parameters come in full once."""
LASTS: Final = 8
"""Windows for which an observation of another level than the current one counts."""
_MOST_VAIN: Final = 6
"""Failed trials of a level in a row after which it is not tried less often any more."""
_MILLION: Final = 1e6


_JOINT: Final = -1
"""Key for all groups together, instead of one of them."""


class _Look(NamedTuple):
    """Result of a window."""

    first: int
    last: int
    """Rounds."""
    paces: dict[int, tuple[int, Pace]]
    """By group, or of all of them: under which level, and how it was."""
    errors: dict[int, int]
    """By level, millionths that pushes have left out."""


class CodecControl(Controller):
    STATE = Fields(
        {
            tuple[int, ...]: "_sizes",
            Nested: "window _guard",
            int: "level _lossiest _num_windows _here _came_from",
            list[tuple[int, int]]: "starts",
            dict[int, LevelTimes]: "times",
            dict[int, tuple[int, int]]: "_errors",
            dict[int, int]: "vain",
        }
    )

    def __init__(
        self,
        *,
        num_groups: int,
        names: Sequence[str],
        mode: Mode = "sync",
        staleness: int = 0,
        error_budget: float | None = None,
        loss_patience: int | None = None,
        freeze_step: int = 0,
    ) -> None:
        """``names``: levels by name; the run begins with the first; ``mode``,
        ``staleness``: the run's, which stay; ``error_budget``: the most that pushes may leave out,
        relative to what they were to bring; ``loss_patience``: for how many windows the loss may
        stand still under a level, where losses are reported; ``freeze_step``: rounds before this
        one are not looked at, so that codecs come when Adam's second moment stays."""
        first = max(FIRST, freeze_step)
        self.window: Window | OwnWindow
        if mode == "sync":
            self.window = Window(num_groups=num_groups, first=first)
        else:
            waits = mode == "ssp"
            self.window = OwnWindow(num_groups=num_groups, first=first, waits_for_all=waits)
        super().__init__(self.window)
        self._mode, self._staleness = mode, staleness
        self._freeze_step = freeze_step
        self._names = names
        self._budget = error_budget
        self._guard = LossGuard(loss_patience) if loss_patience is not None else None
        self._lossiest = len(names) - 1
        """Lossiest level that the loss allows."""
        self.level = 0
        self.starts = [(0, 0)]
        """(round, level): which rules from when on."""
        self._num_windows = 0
        self._here = 0
        """Windows since the level of now rules."""
        self._came_from = 0
        self.times: dict[int, LevelTimes] = {}
        """By group, or of all of them."""
        self._errors: dict[int, tuple[int, int]] = {}
        """By level: millionths that pushes have left out, and in which window."""
        self.vain: dict[int, int] = {}
        """By level: how often running it was left after a single window, to where it came from."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the levels."""
        return tuple(self._names)

    @property
    def reads_losses(self) -> bool:
        return self._guard is not None

    def report(self, count: int, total: float) -> None:
        """Scripts have reported so many losses, with this sum."""
        assert self._guard is not None
        self._guard.report(count, total)

    def lose(self, group: int) -> None:
        super().lose(group)
        self.times.pop(group, None)

    def judge(self) -> Decision | None:
        if not self._sizes or (look := self._look()) is None:
            return None
        self._num_windows += 1
        self._here += 1
        self._take_in(look)
        if self._guard is not None and self._guard.stands_still() and self.level:
            self._lossiest = self.level - 1
        level = self._best()
        if level == self.level:
            return None
        return Decision(self._mode, self._staleness, self._reason(level, look), level)

    def committed(self, decision: Decision, round_number: int) -> None:
        left, to = self.level, decision.level
        goes_back = self._here == 1 and (self._came_from > left) == (to > left)
        self.vain[left] = min(self.vain.get(left, 0) + 1, _MOST_VAIN) if goes_back else 0
        self._came_from, self.level, self._here = left, to, 0
        earlier = [each for each in self.starts if each[0] < round_number]
        self.starts = [*earlier, (round_number, to)]
        if self._guard is not None:
            self._guard.begin()
        self._begin(round_number, round_number + SETTLES)

    def _begin(self, round_number: int, first: int) -> None:
        """Observe the choice of this round from round ``first`` on."""
        first = max(first, self._freeze_step)
        if isinstance(self.window, OwnWindow):
            self.window.change(round_number, first)
        else:
            self.window.begin(max(first, self.window.first))

    # -- from attempt to attempt ----------------------------------------------------------------

    def kept(self, clock: int) -> KeptCodecs:
        """Return the content of a checkpoint of ``clock`` rounds, without rounds that no window has
        taken yet, and without round times of single groups, which may be others after a restart."""
        times = self.times.get(_JOINT, LevelTimes())
        return KeptCodecs(
            names=tuple(self._names),
            starts=from_place(self.starts, clock),
            lossiest=self._lossiest,
            num_windows=self._num_windows,
            here=self._here,
            came_from=self._came_from,
            seen=tuple((level, *each) for level, each in sorted(times.seen.items())),
            errors=tuple((level, *self._errors[level]) for level in sorted(self._errors)),
            fixed_us=times.fixed_us,
            vain=tuple(sorted(self.vain.items())),
            guard=self._guard.kept() if self._guard is not None else None,
        )

    def lossiest_since(self, round_number: int) -> int:
        """The lossiest level that has ruled in this round or later."""
        return max(level for _, level in from_place(self.starts, round_number))

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
        self.starts = [*kept.starts]
        self.level, self._lossiest = kept.starts[-1][1], kept.lossiest
        self._num_windows, self._here = kept.num_windows, kept.here
        self._came_from = kept.came_from
        if kept.seen and self._mode != "async":
            times = self.times[_JOINT] = LevelTimes()
            times.seen = {level: Seen(*each) for level, *each in kept.seen}
            times.fixed_us = kept.fixed_us
        self._errors = {level: (error, window) for level, error, window in kept.errors}
        self.vain = dict(kept.vain)
        if self._guard is not None and kept.guard is not None:
            self._guard.go_on(kept.guard)
        # As at the beginning of a run: memory is made, and connections are opened.
        for start, _ in kept.starts:
            self._begin(start, max(first_round, start) + FIRST)

    # -- what was seen --------------------------------------------------------------------------

    def _look(self) -> _Look | None:
        """At the next window, once it is whole."""
        if isinstance(self.window, OwnWindow):
            return self._look_at_own(self.window)
        first = self.window.first
        if (rounds := self.window.take()) is None:
            return None
        error = max(map(_error, rounds))
        pace = self.level, paces.in_sync(rounds)
        return _Look(first, first + WINDOW - 1, {_JOINT: pace}, {self.level: error})

    def _look_at_own(self, window: OwnWindow) -> _Look | None:
        if (found := window.take()) is None:
            return None
        starts = tuple(self.starts)
        levels = {group: at_place(starts, each.since) for group, each in found.items()}
        if self._mode == "ssp":
            each_pace = {_JOINT: (self.level, paces.in_ssp([x.rounds for x in found.values()]))}
        else:
            each_pace = {
                group: (levels[group], paces.alone(each.rounds)) for group, each in found.items()
            }
        errors: dict[int, int] = {}
        for group, each in found.items():
            level = levels[group]
            errors[level] = max(errors.get(level, 0), _error(each.rounds))
        first = min(each.first for each in found.values())
        last = max(each.first for each in found.values()) + WINDOW - 1
        return _Look(first, last, each_pace, errors)

    def _take_in(self, look: _Look) -> None:
        num_changed = 0
        for group, (level, pace) in look.paces.items():
            times = self.times.setdefault(group, LevelTimes())
            num_changed += times.take_in(level, Seen(*pace, self._num_windows))
        if num_changed and 2 * num_changed >= len(look.paces):
            self.vain.clear()
        for level, error in look.errors.items():
            self._errors[level] = error, self._num_windows
        for times in self.times.values():
            times.keep(self._counts, self._sizes)
        self._errors = {
            level: each for level, each in self._errors.items() if self._counts(level, each[1])
        }

    def _counts(self, level: int, window: int) -> bool:
        return self._num_windows - window <= LASTS << self.vain.get(level, 0)

    # -- what is expected -----------------------------------------------------------------------

    def _round_us(self, level: int) -> float:
        """With this level; as it was seen, or is expected. Groups that wait for no other make
        rounds at the sum of their rates: one of all of them takes the harmonic mean."""
        return harmonic_mean([times.round_us(level, self._sizes) for times in self.times.values()])

    def _waiting_us(self) -> float:
        """Waiting per round at the current level: the exposed time of each group, weighted by how
        often it makes a round."""
        of_groups = self.times.values()
        rounds = [max(1.0, each.round_us(self.level, self._sizes)) for each in of_groups]
        exposed = [each.exposed_us(self.level, self._sizes) for each in of_groups]
        parts = sum(part / took / took for part, took in zip(exposed, rounds, strict=True))
        return harmonic_mean(rounds) * parts / sum(1 / took for took in rounds)

    def _is_seen(self, level: int) -> bool:
        """By all groups that have come to the level of now."""
        return all(level in each.seen for each in self.times.values() if self.level in each.seen)

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
        return back if self._is_seen(back) else max(back, self.level - 1)

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

    def _reason(self, level: int, look: _Look) -> str:
        told = (
            f"iterations {look.first} to {look.last}: {self._round_us(self.level) / 1e3:.2f} ms "
            f"each with {self._names[self.level]}, {self._waiting_us() / 1e3:.2f} ms of them "
            "waiting"
        )
        if self._guard is not None and self.level > self._lossiest:
            told += f", {self._guard.words}"
        elif not self._is_allowed(self.level):
            error = self._errors[self.level][0] / _MILLION
            told += f", {error:.4f} left out of a push where {self._budget} is allowed"
        is_seen = "seen" if self._is_seen(level) else "expected"
        return f"{told}; {self._round_us(level) / 1e3:.2f} ms {is_seen} with {self._names[level]}"


def _error(rounds: Sequence[Times]) -> int:
    """Return the part that a group's pushes have left out, in millionths."""
    return median_low(each.error_ppm for each in rounds)
