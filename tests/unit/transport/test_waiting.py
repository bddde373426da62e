"""A wait spins or backs off, warns ever more rarely, and gives up with who it waited for."""

from __future__ import annotations

import pytest

from psdist.errors import WaitTimeoutError
from psdist.transport.waiting import Waiting


class Clock:
    """A clock that only sleeping moves, and that remembers the sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds


def back_off(clock: Clock, *, warn_s: float = 1e9, timeout_s: float = 1e9) -> Waiting:
    return Waiting(
        is_spinning=False, warn_s=warn_s, timeout_s=timeout_s, clock=clock, sleep=clock.sleep
    )


def idle(waiting: Waiting, times: int) -> int:
    """So many empty polls; how often it was time to warn."""
    return sum(waiting.idle("the moon") for _ in range(times))


def test_the_first_empty_polls_do_not_sleep() -> None:
    clock = Clock()
    idle(back_off(clock), Waiting.SPINS)
    assert clock.sleeps == []


def test_sleeps_double_up_to_the_longest() -> None:
    clock = Clock()
    idle(back_off(clock), Waiting.SPINS + 10)
    first, last = Waiting.FIRST_SLEEP_S, Waiting.LAST_SLEEP_S
    assert clock.sleeps[:4] == [first, 2 * first, 4 * first, 8 * first]
    assert clock.sleeps[-2:] == [last, last]
    assert max(clock.sleeps) == last


@pytest.mark.parametrize("is_relaxed", [False, True])
def test_in_a_long_wait_sleeps_are_a_share_of_it_up_to_the_longest(is_relaxed: bool) -> None:
    clock = Clock()
    waiting = back_off(clock)
    if is_relaxed:
        waiting.relax()
    share = Waiting.RELAXED_SHARE if is_relaxed else Waiting.LONG_SHARE
    while clock.now_s < 10.0:
        before_s, num_sleeps = clock.now_s, len(clock.sleeps)
        waiting.idle("the moon")
        for sleep_s in clock.sleeps[num_sleeps:]:
            assert sleep_s <= max(Waiting.LAST_SLEEP_S, share * before_s)
            assert sleep_s <= Waiting.LONGEST_SLEEP_S
    assert clock.sleeps[-1] == Waiting.LONGEST_SLEEP_S
    waiting.reset()
    idle(waiting, Waiting.SPINS + 1)
    assert clock.sleeps[-1] == Waiting.FIRST_SLEEP_S


def test_a_relaxed_wait_never_spins_and_polls_rarely() -> None:
    # A poll and a sleep cost some 20 us: below 1 % of a core even if something came every second.
    clock = Clock()
    waiting = Waiting(is_spinning=True, clock=clock, sleep=clock.sleep)
    waiting.relax()
    num_polls = 0
    while clock.now_s < 1.0:
        waiting.idle("the moon")
        num_polls += 1
    assert num_polls < 450
    clock.now_s += 10.0
    num_sleeps = len(clock.sleeps)
    idle(waiting, 100)
    # They double, so that the longest is reached one sleep after the next.
    assert min(clock.sleeps[num_sleeps + 2 :]) == Waiting.LONGEST_SLEEP_S


def test_after_something_happened_a_wait_starts_over() -> None:
    clock = Clock()
    waiting = back_off(clock, timeout_s=0.5)
    for _ in range(10):  # 3 s altogether
        idle(waiting, Waiting.SPINS + 300)
        waiting.reset()
    clock.sleeps.clear()
    idle(waiting, Waiting.SPINS)
    assert clock.sleeps == []
    idle(waiting, 1)
    assert clock.sleeps == [Waiting.FIRST_SLEEP_S]


def test_a_spinning_wait_never_sleeps_and_still_gives_up() -> None:
    clock = Clock()
    waiting = Waiting(is_spinning=True, timeout_s=5.0, clock=clock, sleep=clock.sleep)
    idle(waiting, 1000)
    clock.now_s += 6.0
    with pytest.raises(WaitTimeoutError):
        idle(waiting, 1000)
    assert clock.sleeps == []


def test_warnings_come_ever_more_rarely() -> None:
    clock = Clock()
    waiting = back_off(clock, warn_s=1.0)
    told = []
    while clock.now_s < 10.0:
        if waiting.idle("the moon"):
            told.append(clock.now_s)
    assert [round(at_s) for at_s in told] == [1, 2, 4, 8]


def test_a_wait_that_is_too_long_says_for_whom_and_which_setting_to_raise() -> None:
    clock = Clock()
    waiting = back_off(clock, timeout_s=2.0)
    with pytest.raises(WaitTimeoutError) as caught:
        idle(waiting, 10_000)
    assert str(caught.value) == (
        "waited 2 s for the moon, longer than failures.wait_timeout_s = 2; look in logs/ for a "
        "rank that is stuck, or raise failures.wait_timeout_s if such waits are normal here"
    )


def test_a_wait_without_a_deadline_neither_warns_nor_gives_up() -> None:
    clock = Clock()
    endless = float("inf")
    waiting = back_off(clock, warn_s=endless, timeout_s=endless)
    idle(waiting, Waiting.SPINS + 1)
    clock.now_s += 1e9
    assert idle(waiting, 10) == 0


def test_the_time_in_which_a_job_was_stopped_is_no_waiting() -> None:
    clock = Clock()
    waiting = back_off(clock, warn_s=100.0, timeout_s=200.0)
    idle(waiting, Waiting.SPINS + 1)
    clock.now_s += 86_400.0
    assert idle(waiting, 1000) == 0
    clock.now_s += 59.0  # a long poll is waiting
    assert idle(waiting, 1000) == 1
