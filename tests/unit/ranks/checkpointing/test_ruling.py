"""With which modes a job continues, and what is said of those that it drops."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.config.modes import ModeFrom
from psdist.config.settings import RunConfig
from psdist.controller.kept import KeptMode, KeptModes, TuningState
from psdist.mode_names import Mode
from psdist.ranks.checkpointing.ruling import (
    are_apart_in_sync,
    begins_with,
    fitting,
    line_of_modes,
    modes_of,
)
from tests.unit.ranks.checkpointing.test_tuning_state import CODECS

SYNC: tuple[Mode, int] = ("sync", 0)
SSP: tuple[Mode, int] = ("ssp", 3)


def kept(by: Any, *starts: tuple[int, Mode, int]) -> KeptModes:
    return KeptModes(
        by=by,
        starts=tuple(
            KeptMode(rounds=(start,), mode=mode, staleness=staleness)
            for start, mode, staleness in starts
        ),
    )


BY_SCRIPT = kept("script", (0, *SYNC), (66, *SSP))
BY_AUTO = kept("auto", (0, *SYNC), (66, *SSP))
BY_RANGE = kept("auto", (0, "ssp", 2), (66, *SSP))


@pytest.mark.parametrize(
    ("modes", "settings"),
    [
        (BY_SCRIPT, {"set_mode": "allowed"}),
        (BY_AUTO, {"mode": "auto", "staleness": 3}),
        (BY_RANGE, {"mode": "ssp", "staleness": 2, "staleness_to": 3}),
    ],
)
def test_the_same_settings_go_on_with_them(modes: KeptModes, settings: dict[str, Any]) -> None:
    config, tuning_state = RunConfig(**settings), TuningState(modes=modes)
    assert fitting(config, tuning_state) == tuning_state
    assert line_of_modes(config, modes) == "resume: continues with mode ssp:3 from iteration 66 on"
    first = modes.starts[0]
    expected = (ModeFrom(0, first.mode, first.staleness), ModeFrom(66, "ssp", 3))
    assert modes_of(config, tuning_state, set_index=0) == expected
    later = modes_of(config, tuning_state, set_index=1)
    assert [each.round for each in later] == [0, 0], "a set that came later began with all of them"
    begins = begins_with(config)
    assert begins is not None
    assert begins.starts == (first,)


@pytest.mark.parametrize(
    ("modes", "settings", "why"),
    [
        (BY_SCRIPT, {"mode": "sync"}, "consistency.schedule = script is not set now"),
        (
            BY_SCRIPT,
            {"mode": "auto", "staleness": 3},
            "consistency.schedule = script is not set now",
        ),
        (BY_SCRIPT, {"set_mode": "allowed", "mode": "async"}, "now it is async"),
        (BY_AUTO, {"mode": "sync"}, "mode = auto or consistency.staleness_to is not set now"),
        (BY_AUTO, {"mode": "auto", "staleness": 4}, "they were sync, ssp:3, and now it is auto"),
        (BY_AUTO, {"mode": "ssp", "staleness": 3, "staleness_to": 9}, "and now it is ssp"),
        (BY_RANGE, {"mode": "ssp", "staleness": 3, "staleness_to": 9}, "they were ssp:2, ssp:3"),
        (
            kept("auto", (0, "ssp", 2), (9, "ssp", 6)),
            {"mode": "ssp", "staleness": 2, "staleness_to": 5},
            "they were ssp:2, ssp:6, and now it is ssp (staleness 2 to 5)",
        ),
    ],
)
def test_with_others_they_are_dropped_and_a_line_says_why(
    modes: KeptModes, settings: dict[str, Any], why: str
) -> None:
    config = RunConfig(**settings)
    assert fitting(config, TuningState(modes=modes)) is None
    both = TuningState(modes=modes, codecs=CODECS.codecs)
    assert fitting(config, both) == CODECS
    line = line_of_modes(config, modes)
    assert line.startswith("resume: the modes that ruled until then are dropped: ")
    assert why in line


def test_a_bound_that_ruled_between_the_two_may_be_another_one_s() -> None:
    modes = kept("auto", (0, "ssp", 2), (9, "ssp", 6))
    config = RunConfig(mode="ssp", staleness=2, staleness_to=8)
    assert fitting(config, TuningState(modes=modes)) is not None


@pytest.mark.parametrize(
    "starts",
    [[], [(1, *SYNC)], [(0, *SYNC), (-1, *SSP)], [(0, "sync", 3)], [(0, "ssp", -1)]],
)
def test_modes_that_are_none_are_refused(starts: list[Any]) -> None:
    with pytest.raises(ValueError, match="modes that do not begin with round 0, or not whole"):
        kept("script", *starts)


@pytest.mark.parametrize(
    ("clocks", "are_apart"),
    [((60, 65), False), ((65, 67), False), ((65, 68), True), ((68, 68), False), ((69, 71), True)],
)
def test_groups_are_apart_where_some_have_made_a_round_of_all(
    clocks: tuple[int, int], *, are_apart: bool
) -> None:
    """Sync is from round 67 on: a start that another one has taken the place of does not count."""
    modes = [
        ModeFrom(0, "ssp", 3),
        ModeFrom(70, "sync"),
        ModeFrom(67, "async"),
        ModeFrom(67, "sync"),
    ]
    assert are_apart_in_sync(clocks, modes) == are_apart
    assert not are_apart_in_sync(clocks, modes[:1])
