"""Which scripts a spare could follow."""

from __future__ import annotations

import pytest

from psdist.errors import UsageError
from psdist.workers.script.followed import FollowedScript

FIRST, SECOND = object(), object()


def test_a_loop_over_epochs_with_collectives_behind_passes_can_be_followed() -> None:
    script = FollowedScript()
    for _ in range(2):
        script.begin_epoch(num_loops=1)
        for _ in range(3):
            script.ask_for_batch(FIRST)
            script.end_iteration()
            script.call("mean")  # in the loop's body: the others have been there
        script.call("any")
    script.call("save")


@pytest.mark.parametrize(
    ("collective", "words"),
    [("barrier", r"job\.barrier was called"), ("loader", "a DataLoader with a sampler of its own")],
)
def test_what_all_call_before_the_epochs_would_be_called_alone(collective: str, words: str) -> None:
    script = FollowedScript()
    script.call(collective)
    script.call("mean")
    with pytest.raises(UsageError, match=f"{words}.* before the loop over job.epochs.*alone"):
        script.begin_epoch(num_loops=1)


def test_what_all_call_in_an_epoch_in_front_of_a_pass_would_be_called_alone() -> None:
    script = FollowedScript()
    script.begin_epoch(num_loops=1)
    script.ask_for_batch(FIRST)
    script.end_iteration()
    script.call("mean")
    script.ask_for_batch(FIRST)
    with pytest.raises(UsageError, match=r"job\.mean was called in an epoch in front of a"):
        script.ask_for_batch(SECOND)


def test_what_all_call_behind_an_epochs_last_pass_is_forgotten_in_the_next() -> None:
    script = FollowedScript()
    script.begin_epoch(num_loops=1)
    script.ask_for_batch(FIRST)
    script.call("mean")
    script.begin_epoch(num_loops=1)
    script.ask_for_batch(SECOND)


def test_a_second_loop_over_epochs_is_refused() -> None:
    script = FollowedScript()
    script.begin_epoch(num_loops=1)
    with pytest.raises(UsageError, match=r"looped over a second time"):
        script.begin_epoch(num_loops=2)


def test_a_step_outside_of_epochs_is_refused() -> None:
    script = FollowedScript()
    script.ask_for_batch(FIRST)
    with pytest.raises(UsageError, match=r"outside of a loop over job\.epochs\(n\)"):
        script.end_iteration()
