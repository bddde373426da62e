"""Who drives the loop during backward: one at a time; the next call tells what went wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from psdist.workers.early.progress import BackgroundProgress, Driver, PollingProgress

LONG_S = 30.0
"""Far more than any wait here takes."""


class Work:
    """What a thread does, told step by step."""

    def __init__(self) -> None:
        self.is_here = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.is_inside = False
        self.awaits = False
        self.error: Exception | None = None

    def __call__(self) -> bool:
        self.threads.add(threading.current_thread().name)
        self.is_inside = True
        self.is_here.release()
        assert self.may_go.acquire(timeout=LONG_S)
        self.is_inside = False
        if self.error is not None:
            raise self.error
        return False


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def background(work: Work) -> Iterator[BackgroundProgress]:
    progress = BackgroundProgress(work, is_awaiting=lambda: work.awaits)
    yield progress
    for _ in range(1000):
        work.may_go.release()
    progress.stop()


def test_a_thread_works_in_the_window_that_a_hook_opens(
    work: Work, background: BackgroundProgress
) -> None:
    assert "psdist-loop" not in {each.name for each in threading.enumerate()}
    background.wake()
    assert work.is_here.acquire(timeout=LONG_S)
    work.may_go.release()
    background.take_over()
    assert work.threads == {"psdist-loop"}


def test_who_takes_over_waits_until_the_thread_lets_go(
    work: Work, background: BackgroundProgress
) -> None:
    background.wake()
    assert work.is_here.acquire(timeout=LONG_S)
    has_taken_over = threading.Event()
    was_inside: list[bool] = []

    def take_over() -> None:
        background.take_over()
        was_inside.append(work.is_inside)
        has_taken_over.set()

    taking = threading.Thread(target=take_over)
    taking.start()
    assert not has_taken_over.is_set()
    work.may_go.release()
    assert has_taken_over.wait(LONG_S)
    taking.join()
    assert was_inside == [False]


def test_the_thread_asks_again_while_the_network_owes_something(
    work: Work, background: BackgroundProgress
) -> None:
    work.awaits = True
    background.wake()
    for _ in range(3):
        assert work.is_here.acquire(timeout=LONG_S)
        work.may_go.release()
    work.awaits = False


def test_a_closed_window_stays_closed_whatever_another_thread_says(
    work: Work, background: BackgroundProgress
) -> None:
    background.wake()
    assert work.is_here.acquire(timeout=LONG_S)
    work.may_go.release()
    background.take_over()
    other = threading.Thread(target=background.wake)
    other.start()
    other.join()
    background.take_over()
    assert not work.is_here.acquire(blocking=False)


def of_both_kinds(work: Work) -> list[Driver]:
    return [PollingProgress(work), BackgroundProgress(work, is_awaiting=lambda: False)]


@pytest.mark.parametrize("kind", [0, 1])
def test_what_goes_wrong_is_told_once_and_nothing_more_is_done(kind: int, work: Work) -> None:
    progress = of_both_kinds(work)[kind]
    work.error = ValueError("lost")
    work.may_go.release()
    progress.wake()
    assert work.is_here.acquire(timeout=LONG_S)
    with pytest.raises(ValueError, match="lost"):
        progress.take_over()
    progress.take_over()
    progress.stop()


def test_without_a_thread_hooks_work_themselves(work: Work) -> None:
    progress = PollingProgress(work)
    work.may_go.release()
    progress.wake()
    assert work.threads == {threading.current_thread().name}
    other = threading.Thread(target=progress.wake)
    other.start()
    other.join()
    assert work.threads == {threading.current_thread().name}
    progress.take_over()
    progress.stop()


def test_the_scripts_thread_opens_the_window_for_hooks_in_another(
    work: Work, background: BackgroundProgress
) -> None:
    background.open()
    other = threading.Thread(target=background.wake)
    other.start()
    assert work.is_here.acquire(timeout=LONG_S)
    work.may_go.release()
    other.join()
    background.take_over()
    assert work.threads == {"psdist-loop"}


def test_no_other_thread_opens_the_window(work: Work, background: BackgroundProgress) -> None:
    other = threading.Thread(target=background.open)
    other.start()
    other.join()
    background.wake()
    assert work.is_here.acquire(timeout=LONG_S)
    work.may_go.release()
    background.take_over()
    for act in (background.open, background.wake):
        other = threading.Thread(target=act)
        other.start()
        other.join()
    background.take_over()
    assert not work.is_here.acquire(blocking=False)


def test_an_error_closes_the_window_and_no_hook_opens_it_before_it_is_told(work: Work) -> None:
    progress = BackgroundProgress(work, is_awaiting=lambda: True)
    work.error = ValueError("lost")
    for _ in range(2):
        work.may_go.release()
    progress.open()
    assert progress._one_turn() == (False, False)
    assert work.is_here.acquire(blocking=False)
    assert progress._one_turn() == (False, False)
    progress.open()
    assert progress._one_turn() == (False, False)
    assert not work.is_here.acquire(blocking=False)
    with pytest.raises(ValueError, match="lost"):
        progress.take_over()
    progress.stop()
