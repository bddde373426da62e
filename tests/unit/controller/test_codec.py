"""Which codecs psdist chooses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import pytest

from psdist.controller import WINDOW, Decision, Observation
from psdist.controller.codec import FIRST, LASTS, SETTLES, CodecControl
from psdist.controller.kept import at_place
from psdist.controller.level_times import LevelTimes, Seen

MS = 1000
NAMES = ("none", "fp16", "int8", "int4", "int4/sign")
SIZES = (1200, 600, 300, 150, 100)
Link = Callable[[int], tuple[int, int]]
"""By level: own and exposed microseconds of a round."""


def link(us_per_byte: float, *, own_us: int = 20 * MS, hidden_us: int = 0) -> Link:
    """A network on which an exchange takes so long, ``hidden_us`` of it while others compute."""
    return lambda level: (own_us, max(0, round(us_per_byte * SIZES[level]) - hidden_us))


class Run:
    """Groups that train on a link, and do what is decided."""

    def __init__(
        self, *, groups: int = 2, budget: float | None = None, patience: int | None = None
    ) -> None:
        self.control = CodecControl(
            num_groups=groups, names=NAMES, error_budget=budget, loss_patience=patience
        )
        self.control.know_sizes(SIZES)
        self.groups, self.round = groups, 1
        self.errors = (0, 500, 7_000, 120_000, 120_000)
        """Of pushes, by level, in millionths."""
        self.said: list[Decision] = []

    def train(self, link: Link, windows: int = 1, skew_us: int = 0) -> list[int]:
        """The level after each window; groups take turns being ``skew_us`` slower."""
        levels = []
        for _ in range(windows):
            stop = self.control.window.first + WINDOW
            while self.round < stop:
                self._tell(link, skew_us)
            if (decision := self.control.judge()) is not None:
                self.said.append(decision)
                self.control.committed(decision, self.round + 3)
            levels.append(self.control.level)
        return levels

    def _tell(self, link: Link, skew_us: int) -> None:
        own_us, exposed_us = link(self.control.level)
        for group in range(self.groups):
            late_us = skew_us if self.round % self.groups == group else 0
            waits_us = exposed_us + skew_us - late_us
            error = self.errors[self.control.level]
            seen = Observation(group, self.round, [own_us + late_us], [waits_us], [error])
            self.control.observe(seen)
        self.round += 1


def test_where_waiting_is_little_nothing_is_coded() -> None:
    assert Run().train(link(1.5), 5) == [0] * 5  # 1.8 ms of 21.8, 0.15 with the coarsest


def test_where_waiting_is_nearly_all_the_coarsest_comes_at_once() -> None:
    run = Run()
    assert run.train(link(1000.0), 4) == [4] * 4
    assert run.said[0] == Decision(
        "sync",
        0,
        f"iterations {FIRST} to {FIRST + WINDOW - 1}: 1220.00 ms each with none, 1200.00 ms of "
        "them waiting; 120.00 ms expected with int4/sign",
        4,
    )


@pytest.mark.parametrize(
    ("us_per_byte", "level"), [(1.8, 0), (2.2, 1), (3.0, 1), (10.0, 2), (30.0, 3), (70.0, 4)]
)
def test_the_least_lossy_level_comes_of_which_the_round_is_a_tenth_longer_at_most(
    us_per_byte: float, level: int
) -> None:
    assert Run().train(link(us_per_byte), 6) == [level] * 6
    rounds = [20 * MS + us_per_byte * size for size in SIZES]
    within = [each <= 1.1 * min(rounds) for each in rounds]
    assert within.index(True) == level


def test_what_hides_behind_computation_is_sent_as_it_is() -> None:
    """Of 12 ms 6 hide at level 0, and all at 1: that is enough, though what is seen at level 0
    calls for 2."""
    run = Run()
    levels = run.train(link(10.0, own_us=12 * MS, hidden_us=6 * MS), 40)
    assert levels[:2] == [2, 2]
    assert max(levels) == 2
    assert levels[-20:].count(1) >= 18


def test_groups_that_are_slow_in_turn_do_not_count_as_waiting() -> None:
    assert Run(groups=4).train(link(1.5), 3, skew_us=30 * MS) == [0] * 3


def test_a_link_that_is_fast_again_brings_what_is_less_lossy_back() -> None:
    run = Run()
    assert run.train(link(1000.0), 3) == [4] * 3
    assert run.train(link(0.5), 5) == [3, 2, 1, 0, 0]
    assert run.train(link(1000.0), 2)[-1] == 4
    assert "seen with" not in run.said[-1].why, "what was seen is of another network"


def test_a_codec_that_costs_more_time_than_its_bytes_is_left_again() -> None:
    def slow_codecs(level: int) -> tuple[int, int]:
        return 20 * MS + (15 * MS if level else 0), round(10 * SIZES[level])

    run = Run()
    levels = run.train(slow_codecs, 40)
    assert levels[0] > 0
    tried = pairwise(levels)
    gone = [number for number, (before, after) in enumerate(tried) if before == 0 != after]
    assert levels.count(0) > 28, levels
    waits = [later - earlier for earlier, later in pairwise(gone)]
    assert waits == sorted(waits)
    assert waits[-1] >= 2 * LASTS - 2, "it is tried ever less often"


def test_what_was_seen_of_a_level_is_forgotten_after_a_while() -> None:
    """21, 9, 3, 0, 0 ms are exposed: at level 3 all hides, and nobody knows by how much."""
    run = Run()
    levels = run.train(link(20.0, own_us=20 * MS, hidden_us=3 * MS), 80)
    assert levels[:LASTS] == [3] * LASTS
    tried = [number for number, level in enumerate(levels) if level == 2]
    assert tried[0] == LASTS + 1
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert waits == [2 * LASTS + 2, 4 * LASTS + 2]
    assert levels.count(3) + len(tried) == len(levels)


def test_nothing_is_decided_before_all_have_told_of_every_round_and_bytes_are_known() -> None:
    control = CodecControl(num_groups=2, names=NAMES)
    rounds = [20 * MS] * WINDOW, [900 * MS] * WINDOW
    control.observe(Observation(0, FIRST, *rounds))
    assert control.judge() is None
    control.observe(Observation(1, FIRST, *rounds))
    assert control.judge() is None
    control.know_sizes(SIZES)
    decision = control.judge()
    assert decision is not None
    control.committed(decision, FIRST + WINDOW + 5)
    first = FIRST + WINDOW + 5 + SETTLES
    for group in range(2):
        control.observe(Observation(group, first - SETTLES, *rounds))
    assert control.judge() is None, "the rounds just behind a change say nothing"
    for group in range(2):
        control.observe(Observation(group, first - SETTLES + WINDOW, *rounds))
    decision = control.judge()
    assert decision is not None
    assert decision.level == 0, "no bytes make it shorter"
    assert decision.why.endswith("900.00 ms of them waiting; 920.00 ms seen with none")


@pytest.mark.parametrize(
    ("budget", "level"), [(0.0004, 0), (0.001, 1), (0.01, 2), (0.1, 2), (0.13, 4)]
)
def test_a_budget_is_kept_one_level_at_a_time(budget: float, level: int) -> None:
    run = Run(budget=budget)
    levels = run.train(link(1000.0), 16)
    assert max(set(levels[-8:]), key=levels[-8:].count) == level
    steps = [after - before for before, after in zip([0, *levels], levels, strict=False)]
    assert max(steps) <= 1
    for tried, after in pairwise(levels):
        assert run.errors[after] <= budget * 1e6 or tried < after, "left as soon as it is seen"


def test_an_error_above_the_budget_is_the_reason_that_is_told() -> None:
    run = Run(budget=0.01)
    run.train(link(1000.0), 4)
    assert run.said[3].level == 2
    assert "with int4, 150.00 ms of them waiting, 0.1200 left out of a push where 0.01 is" in (
        run.said[3].why
    )


def tell(control: CodecControl, *groups: tuple[int, int, int]) -> Decision | None:
    """A window of rounds in which each group has these times and this error."""
    first = control.window.first
    for group, times in enumerate(groups):
        control.observe(Observation(group, first, *([each] * WINDOW for each in times)))
    decision = control.judge()
    if decision is not None:
        control.committed(decision, first + WINDOW)
    return decision


def control_of(budget: float | None = None) -> CodecControl:
    control = CodecControl(num_groups=2, names=NAMES, error_budget=budget)
    control.know_sizes(SIZES)
    return control


def test_a_round_takes_as_long_as_the_group_that_takes_longest() -> None:
    decision = tell(control_of(), (4 * MS, 5 * MS, 0), (7 * MS, 3 * MS, 0))
    assert decision is not None
    assert ": 10.00 ms each with none, 3.00 ms of them waiting;" in decision.why


def test_the_largest_error_of_all_groups_is_held_against_the_budget() -> None:
    control = control_of(0.001)
    slow = (MS, 500 * MS)
    assert tell(control, (*slow, 0), (*slow, 0)) is not None
    assert control.level == 1
    decision = tell(control, (*slow, 900), (*slow, 1100))
    assert decision is not None
    assert "0.0011 left out of a push where 0.001 is allowed" in decision.why
    assert control.level == 0


def test_time_that_no_bytes_make_shorter_is_not_expected_to_grow_with_them() -> None:
    """5 ms of an exchange are latency: on the fast link all others would take as long."""
    run = Run()

    def with_latency(us_per_byte: float) -> Link:
        return lambda level: (20 * MS, 5 * MS + round(us_per_byte * SIZES[level]))

    assert run.train(with_latency(1000.0), 2) == [4, 4]
    assert run.train(with_latency(0.1), 5) == [3, 2, 1, 0, 0]


def test_where_fewer_bytes_took_longer_the_nearer_level_says_what_to_expect() -> None:
    control = control_of()
    tell(control, *[(20 * MS, 10 * MS, 0)] * 2)
    assert control.level == 2
    tell(control, *[(20 * MS, 12 * MS, 0)] * 2)
    (times,) = control.times.values()
    sizes = [*SIZES, SIZES[0] - 1]
    expected = {1: 12 * MS, 4: 12 * MS, 5: 10 * MS}
    assert {level: times.exposed_us(level, sizes) for level in expected} == expected


@pytest.mark.parametrize(
    ("came_from", "windows", "to", "times"),
    [(4, 1, 4, 1), (4, 2, 4, 0), (2, 1, 4, 0), (2, 1, 1, 1)],
)
def test_a_level_was_gone_to_in_vain_if_it_is_left_at_once_to_where_it_came_from(
    came_from: int, windows: int, to: int, times: int
) -> None:
    control = control_of()
    control.committed(Decision("sync", 0, "", came_from), 30)
    control.committed(Decision("sync", 0, "", 3), 60)
    control._here = windows
    control.committed(Decision("sync", 0, "", to), 120)
    assert control.vain[3] == times


def test_another_network_may_take_what_was_in_vain_on_the_one_before() -> None:
    control = control_of()
    tell(control, *[(20 * MS, 90 * MS, 0)] * 2)
    assert control.level == 4
    tell(control, *[(20 * MS, 90 * MS, 0)] * 2)
    assert control.level == 0
    assert control.vain[4] == 1
    tell(control, *[(20 * MS, 900 * MS, 0)] * 2)
    assert control.vain.get(4, 0) == 0


# -- guided by the loss -----------------------------------------------------------------------


def guarded(run: Run, link: Link, losses: list[float]) -> list[int]:
    """The level after each window, in which one loss was reported."""
    levels = []
    for loss in losses:
        run.control.report(1, loss)
        levels += run.train(link)
    return levels


def test_where_the_loss_stands_still_less_lossy_levels_come_for_good() -> None:
    run = Run(patience=2)
    assert run.control.reads_losses
    slow = link(1000)
    falling = [5.0, 4.0, 3.0]
    assert guarded(run, slow, falling) == [4, 4, 4]
    assert guarded(run, slow, [3.0, 3.0]) == [4, 3]
    assert "the loss not below 3 for 2 windows; " in run.said[-1].why
    assert guarded(run, slow, [3.0, 3.0, 2.0, 2.0]) == [3, 2, 2, 2]
    assert guarded(run, slow, [2.0, 2.0, 2.0, 2.0]) == [1, 1, 0, 0], "down to none"
    assert guarded(run, slow, [1.0, 2.0, 2.0, 2.0]) == [0] * 4, "where it stays"
    assert len(run.said) == 5


def test_where_the_loss_falls_or_is_not_reported_the_link_decides() -> None:
    run = Run(patience=1)
    assert guarded(run, link(1000), [1 / n for n in range(1, 9)]) == [4] * 8
    assert run.train(link(1000), 8) == [4] * 8
    assert guarded(run, link(0.1), [0.1, 0.05, 0.02, 0.01])[-1] < 4, "a fast link still decides"


def test_a_change_for_the_link_s_sake_says_nothing_of_the_loss() -> None:
    run = Run(patience=1)
    assert guarded(run, link(1000), [5.0, 4.0, 4.0, 3.0])[-1] == 3, "as lossy as may be"
    assert guarded(run, link(0.1), [2.0])[-1] < 3
    assert "the loss not below 4 for 1 windows" in run.said[1].why
    assert "the loss" not in run.said[2].why


def test_the_loss_and_the_budget_both_hold() -> None:
    run = Run(patience=1, budget=0.01)
    levels = guarded(run, link(1000), [5.0, 4.0, 3.0, 2.0, 1.0, 0.9])
    assert levels[-1] == 2, "int4 leaves out too much"
    assert guarded(run, link(1000), [1.0, 1.0]) == [1, 0]


def test_without_a_patience_no_loss_is_read() -> None:
    assert not Run().control.reads_losses


# -- where groups are in different rounds ---------------------------------------------------------


class Apart:
    """Groups that continue by themselves over links of their own; in ssp who is further ahead than
    the bound waits until the others have come."""

    def __init__(self, mode: str, links: list[Link], *, bound: int = 2, **given: Any) -> None:
        self.control = CodecControl(
            num_groups=len(links), names=NAMES, mode=mode, staleness=bound, **given
        )
        self.control.know_sizes(SIZES)
        self.mode, self.links, self.bound = mode, links, bound
        self.ends: list[list[int]] = [[0] for _ in links]
        """By group: when each round had ended."""
        self.said: list[Decision] = []
        self.errors = (0, 500, 7_000, 120_000, 120_000)

    @property
    def clocks(self) -> list[int]:
        return [len(each) - 1 for each in self.ends]

    def train(self, until_us: int) -> list[int]:
        """For so long; the levels that were changed to."""
        since = len(self.said)
        while min(each[-1] for each in self.ends) < until_us:
            self._go_on(min(range(len(self.ends)), key=lambda group: self._may_begin(group)))
        return [each.level for each in self.said[since:]]

    def _may_begin(self, group: int) -> int:
        """When its next round may begin; never while the others are too far behind."""
        clock = self.clocks[group]
        if self.mode == "ssp" and min(self.clocks) < clock - self.bound:
            return 1 << 60
        return self.ends[group][-1]

    def _go_on(self, group: int) -> None:
        clock = self.clocks[group]
        own_us, exposed_us = self.links[group](at_place(tuple(self.control.starts), clock))
        end = self.ends[group][-1] + own_us + exposed_us
        if self.mode == "ssp" and clock + 1 > self.bound:
            # The reply waits until all have made the rounds that the next one needs.
            needed = clock + 1 - self.bound
            others = [each[needed] for each in self.ends if len(each) > needed]
            end = max([end, *others])
        began = self.ends[group][-1]
        self.ends[group].append(end)
        error = self.errors[at_place(tuple(self.control.starts), clock)]
        waits = [end - began - own_us]
        self.control.observe(Observation(group, clock, [own_us], waits, [error]))
        if (decision := self.control.judge()) is not None:
            self.said.append(decision)
            self.control.committed(decision, max(self.clocks) + 2)


SECOND: Final = 1_000_000


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize(
    ("us_per_byte", "level"), [(1.8, 0), (2.2, 1), (3.0, 1), (10.0, 2), (30.0, 3), (70.0, 4)]
)
def test_groups_that_are_alike_come_to_the_level_of_sync(
    mode: str, us_per_byte: float, level: int
) -> None:
    run = Apart(mode, [link(us_per_byte)] * 3)
    assert set(run.train(8 * SECOND)) <= {level}
    assert run.control.level == level
    assert all(each.mode == mode for each in run.said)


def test_in_ssp_waiting_for_a_slower_group_brings_no_codec() -> None:
    """The first one waits 41 of 61 ms; on the link 1.2 are lost."""
    run = Apart("ssp", [link(1.0), link(1.0, own_us=60 * MS)])
    assert run.train(8 * SECOND) == []
    assert run.control._num_windows > 4


def test_in_ssp_the_slow_link_of_one_group_brings_one() -> None:
    run = Apart("ssp", [link(1.0), link(100.0)])
    levels = run.train(20 * SECOND)
    assert levels
    assert run.control.level == 4


def test_in_ssp_a_slow_link_of_who_is_ahead_anyway_brings_none() -> None:
    """Its 20 and 30 ms are less than the 60 that the other one computes."""
    run = Apart("ssp", [link(25.0), link(0.1, own_us=60 * MS)])
    run.train(20 * SECOND)
    assert run.control.level == 0


def test_in_async_who_is_faster_counts_for_more() -> None:
    """The slow group's link is good: of 200 ms it waits 1. The others make nearly all rounds, half
    of whose time is their link's."""
    run = Apart("async", [link(10.0, own_us=10 * MS)] * 2 + [link(1.0, own_us=200 * MS)])
    run.train(20 * SECOND)
    # 12, 6, 3, 1.5, 1 ms of 22, 16, 13, 11.5, 11.
    assert run.control.level == 3
    slow_links = [link(0.1, own_us=2 * MS), link(20.0, own_us=200 * MS)]
    run = Apart("async", slow_links)
    assert run.train(20 * SECOND) == [], "here it is the slow one's, which makes few anyway"


def test_in_async_who_is_behind_holds_nobody_up() -> None:
    """It is 20 times as slow, and comes to no change for a long time: what rules is decided by then
    all the same, and what is known of it is of the level of its rounds."""
    run = Apart("async", [link(300.0, own_us=5 * MS)] * 2 + [link(1.0, own_us=900 * MS)])
    assert run.train(40 * SECOND) == [4]
    (start, _), *_ = run.control.starts[1:]
    assert run.clocks[2] < start, "it is before the change"
    assert {*run.control.times[2].seen} == {0}
    assert 4 in run.control.times[0].seen


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_a_link_that_is_fast_again_brings_what_is_less_lossy_back_group_by_group(mode: str) -> None:
    run = Apart(mode, [link(1000.0), link(1000.0, own_us=40 * MS)])
    assert run.train(60 * SECOND) == [4]
    run.links = [link(0.5), link(0.5, own_us=40 * MS)]
    assert run.train(80 * SECOND) == [3, 2, 1, 0]


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_budget_and_patience_hold_where_groups_are_apart(mode: str) -> None:
    run = Apart(mode, [link(1000.0)] * 2, error_budget=0.01)
    levels = run.train(60 * SECOND)
    assert levels[:4] == [1, 2, 3, 2]
    run = Apart(mode, [link(1000.0)] * 2, loss_patience=1)
    levels = []
    for number in range(1, 41):
        run.control.report(1, 5.0)
        levels += run.train(number * 2 * SECOND)
    assert levels == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("errors", [(1100, 900), (900, 1100)])
def test_where_groups_are_apart_the_largest_error_counts_too(
    mode: str, errors: tuple[int, int]
) -> None:
    control = CodecControl(num_groups=2, names=NAMES, mode=mode, error_budget=0.001)
    control.know_sizes(SIZES)

    def tell(first: int, *errors_ppm: int) -> Decision | None:
        for group, error in enumerate(errors_ppm):
            told = [MS] * WINDOW, [500 * MS] * WINDOW, [error] * WINDOW
            control.observe(Observation(group, first, *told))
        return control.judge()

    decision = tell(FIRST, 0, 0)
    assert decision is not None
    assert decision.level == 1
    control.committed(decision, 50)
    decision = tell(50 + SETTLES, *errors)
    assert decision is not None
    assert decision.level == 0
    assert "0.0011 left out of a push where 0.001 is allowed" in decision.why


def test_a_level_was_seen_when_all_that_are_at_this_one_have_seen_it() -> None:
    control = CodecControl(num_groups=3, names=NAMES, mode="async")
    control.know_sizes(SIZES)
    control.level = 3
    control.times = {group: LevelTimes() for group in range(3)}
    here, there = Seen(MS, 10, 1), Seen(MS, 10, 1)
    control.times[0].seen = {0: there, 3: here}
    control.times[1].seen = {3: here}
    control.times[2].seen = {0: there}  # it is behind
    assert control._best() == 2
    control.times[1].seen = {0: there, 3: here}
    control.times[2].seen = {1: there}
    assert control._best() == 0


def test_who_dies_is_not_part_of_the_rate_any_more() -> None:
    run = Apart("async", [link(1.0)] * 2)
    run.train(2 * SECOND)
    assert {*run.control.times} == {0, 1}
    run.control.lose(1)
    assert {*run.control.times} == {0}
    run.links[1:] = []
    run.ends[1:] = []
    assert run.train(4 * SECOND) == []


def test_a_frozen_moment_comes_before_codecs() -> None:
    for mode in ("sync", "ssp"):
        run = Apart(mode, [link(1000.0)] * 2, bound=0, freeze_step=100)
        run.mode = "ssp"  # in sync all are in the same round, too
        assert run.train(300 * SECOND) == [4]
        assert run.said[0].why.startswith("iterations 100 to 119: ")
