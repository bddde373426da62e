"""Which calls of set_mode count in a script that resumes from a checkpoint."""

from __future__ import annotations

from psdist.workers.script.set_modes import SetModes

SSP, SYNC, ASYNC = ("ssp", 2), ("sync", 0), ("async", 0)


def gone_on(modes: SetModes, *, has_place: bool = False) -> SetModes:
    found = SetModes()
    found.restore(modes.collect(), has_place=has_place)
    return found


def trained() -> SetModes:
    """A script that sets ssp before its first iteration and later sync, and makes a checkpoint."""
    modes = SetModes()
    assert modes.counts(*SSP, is_resuming=False)
    modes.end_iteration()
    assert modes.counts(*SYNC, is_resuming=False)
    modes.end_iteration()
    return modes


def test_on_the_way_to_a_known_place_nothing_counts_and_behind_it_everything() -> None:
    modes = gone_on(trained(), has_place=True)
    assert not modes.counts(*SSP, is_resuming=True)
    assert not modes.counts(*ASYNC, is_resuming=True)
    assert modes.counts(*SSP, is_resuming=False)


def test_without_one_what_was_called_before_the_first_iteration_is_called_again() -> None:
    modes = gone_on(gone_on(trained()))
    assert not modes.counts(*SSP, is_resuming=True)
    assert modes.counts(*SYNC, is_resuming=True), "it was called in the middle, and is new here"
    assert modes.counts(*SSP, is_resuming=True), "a second time it is new"


def test_so_is_what_was_called_since_the_last_iteration() -> None:
    modes = trained()
    assert modes.counts(*ASYNC, is_resuming=False)
    again = gone_on(modes)
    assert not again.counts(*ASYNC, is_resuming=True)
    assert again.counts(*SSP, is_resuming=True), "that comes before it, and was left out"
    later = gone_on(gone_on(modes))
    assert not later.counts(*SSP, is_resuming=True)
    assert not later.counts(*ASYNC, is_resuming=True)


def test_before_the_first_iteration_each_call_is_called_again_once() -> None:
    modes = SetModes()
    assert modes.counts(*SSP, is_resuming=False)
    assert modes.counts(*SYNC, is_resuming=False)
    again = gone_on(modes)
    assert not again.counts(*SSP, is_resuming=True)
    assert not again.counts(*SYNC, is_resuming=True)
    assert again.counts(*SYNC, is_resuming=True)
