"""What of a window of rounds is an exchange that everybody waits for."""

from __future__ import annotations

import random

from psdist.controller import WINDOW, Times
from psdist.controller.paces import LONGEST, Pace, alone, in_ssp, in_sync

MS = 1000


def steady(own_ms: float, wait_ms: float) -> list[Times]:
    return [Times(round(own_ms * MS), round(wait_ms * MS))] * WINDOW


def test_in_sync_the_slowest_of_each_round_counts() -> None:
    turns = [[Times(9, 1), Times(1, 9)] * 10, [Times(1, 9), Times(9, 1)] * 10]
    assert in_sync(turns) == Pace(9, 1)
    assert in_sync([[Times(1, 1)] * 20, [Times(2, 3)] * 20]) == Pace(2, 3)


def test_who_is_held_back_by_the_bound_waits_for_no_bytes() -> None:
    assert in_ssp([steady(30, 1), steady(10, 21)]) == Pace(30 * MS, MS)
    assert in_ssp([steady(10, 21), steady(30, 1)]) == Pace(30 * MS, MS)


def test_who_has_the_slow_link_says_what_bytes_take() -> None:
    """The other one, which is ahead and not held back yet, waits for nothing."""
    assert in_ssp([steady(10, 10), steady(10, 1)]) == Pace(10 * MS, 10 * MS)
    assert in_ssp([steady(10, 10), steady(10, 10)]) == Pace(10 * MS, 10 * MS)


def test_no_more_is_exposed_than_the_slowest_to_compute_leaves() -> None:
    """A network that becomes slow in the middle of the window."""
    half = [*steady(5, 1)[:8], *steady(5, 20)[:12]]
    pace = in_ssp([half, half])
    assert sum(pace) == (18 * 5 + 8 + 10 * 20) * MS // 18
    assert pace.own_us == 5 * MS


def test_groups_that_are_slow_by_turns_wait_for_each_other_and_not_for_bytes() -> None:
    """As ssp with the bound 1 makes them wait: the exchange takes 0.5 ms. The first group is never
    slow, and waits for others in most rounds."""
    pick, groups, bound = random.Random(3), 4, 1
    ends = [[0.0] * groups]
    told: list[list[Times]] = [[] for _ in range(groups)]
    for number in range(60):
        slow = pick.randrange(1, groups)
        row = []
        for group in range(groups):
            own = 10.0 if group == slow else 1.0
            gate = max(ends[number - bound + 1]) if number >= bound else 0.0
            computed = ends[number][group] + own
            end = max(computed, gate) + 0.5
            told[group].append(Times(round(own * MS), round((end - computed) * MS)))
            row.append(end)
        ends.append(row)
    windows = [each[-WINDOW:] for each in told]
    waiting = max(sum(each.wait_us for each in group) / WINDOW for group in windows)
    pace = in_ssp(windows)
    assert waiting > 1.2 * MS, "much is waited for others: something is tested"
    assert sorted(each.wait_us for each in windows[0])[WINDOW // 2] > MS
    assert pace.exposed_us == 500


def test_the_longest_rounds_are_evaluations() -> None:
    rounds = steady(4, 6)
    rounds[3], rounds[7] = Times(900 * MS, 6 * MS), Times(4 * MS, 700 * MS)
    assert alone(rounds) == Pace(4 * MS, 6 * MS)
    rounds[9] = Times(22 * MS, 6 * MS)
    assert alone(rounds) == Pace(5 * MS, 6 * MS)
    assert LONGEST == 2
