"""Effects of signals on a worker: when SIGTERM waits for a checkpoint, and whose handlers stay."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from psdist.ranks.checkpointing.script_signals import (
    ScriptSignals,
    end_behind,
    keep_until_asked,
)
from psdist.ranks.failure import (
    Interrupted,
    Requeued,
    format_error,
    is_interruption,
    is_requeue,
)


class Parent:
    """A line to psdist run; only this part is used."""

    def __init__(self) -> None:
        self.postpone: Any = None
        self.delivered: list[int] = []

    def deliver(self, number: int) -> None:
        self.delivered.append(number)


@pytest.fixture(autouse=True)
def _usr1_as_it_was() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


def make(asked: list[str], parent: Any = None, *, grace_s: float = 1000.0) -> ScriptSignals:
    found = ScriptSignals(asked.append, on_usr1="requeue", grace_s=grace_s, parent=parent)
    found.begin()
    return found


def test_usr1_asks_for_what_the_setting_says_until_the_job_is_over() -> None:
    asked: list[str] = []
    signals = make(asked)
    signal.raise_signal(signal.SIGUSR1)
    signals.end()
    assert asked == ["requeue"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_usr1_that_comes_while_a_rank_starts_is_asked_for_once_when_the_script_begins() -> None:
    keep_until_asked()
    signal.raise_signal(signal.SIGUSR1)
    asked: list[str] = []
    make(asked).end()
    make(asked).end()
    assert asked == ["requeue"]
    keep_until_asked()
    make(asked).end()  # without a signal nothing is asked
    assert asked == ["requeue"]


def test_who_starts_a_rank_may_have_decided_about_usr1() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    keep_until_asked()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_handler_of_the_scripts_own_stays() -> None:
    came: list[int] = []

    def own(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGUSR1, own)
    asked: list[str] = []
    signals = make(asked)
    signal.raise_signal(signal.SIGUSR1)
    signals.end()
    assert (asked, came) == ([], [signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is own


def test_the_first_sigterm_waits_for_a_boundary_and_the_second_does_not() -> None:
    asked: list[str] = []
    parent = Parent()
    signals = make(asked, parent)
    signals.has_boundary()
    assert parent.postpone(signal.SIGTERM)
    assert not parent.postpone(signal.SIGTERM)
    assert asked == ["end"]
    signals.end()
    assert parent.postpone is None


def test_where_no_boundary_comes_in_time_the_script_is_interrupted() -> None:
    parent = Parent()
    signals = make([], parent, grace_s=1e-6)
    signals.has_boundary()
    assert parent.postpone(signal.SIGTERM)
    assert signals.timer is not None
    signals.timer.join()
    assert parent.delivered == [signal.SIGTERM]
    signals.end()


@pytest.mark.parametrize(
    ("number", "has_boundary", "grace_s"),
    [
        (signal.SIGHUP, True, 9.0),
        (signal.SIGINT, True, 9.0),
        (signal.SIGTERM, False, 9.0),
        (signal.SIGTERM, True, 0.0),
    ],
)
def test_what_ends_a_script_at_once(number: int, has_boundary: bool, grace_s: float) -> None:
    asked: list[str] = []
    parent = Parent()
    signals = make(asked, parent, grace_s=grace_s)
    if has_boundary:
        signals.has_boundary()
    assert not parent.postpone(number)
    assert asked == []
    signals.end()


def test_each_reason_ends_the_job_with_its_status() -> None:
    end_behind("checkpoint", "step-00000007")
    with pytest.raises(Requeued) as requeued:
        end_behind("requeue", "step-00000007")
    text, status = format_error(requeued.value)
    assert (text, status) == (
        "requeue: ended by SIGUSR1; --resume continues from step-00000007",
        75,
    )
    assert is_requeue(text, status)
    assert not is_interruption(text, status)
    with pytest.raises(Interrupted) as interrupted:
        end_behind("end", None)
    text, status = format_error(interrupted.value)
    assert (text, status) == ("interrupted by SIGTERM", 143)
    assert not is_requeue(text, status)
    assert not is_requeue("exited with status 75", 75)
