"""Schedules of modes, who may change the mode, and what does not go with that."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.config.modes import (
    ModeFrom,
    describe_modes,
    first_mode,
    is_mixed,
    judging_mode,
    least_bound,
    mode_by,
    modes_that_may_come,
    parse_schedule,
)
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve, script_settings, with_script
from psdist.errors import ConfigError


def test_a_schedule_says_the_mode_of_every_round() -> None:
    parts = parse_schedule("0: ssp:8; 2000:ssp:2 ;5000:  sync; 6000: async")
    assert all(part.codecs is None for part in parts)
    assert tuple(part.mode for part in parts) == (
        ModeFrom(0, "ssp", 8),
        ModeFrom(2000, "ssp", 2),
        ModeFrom(5000, "sync"),
        ModeFrom(6000, "async"),
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", ";", "sync", "0", "0:", "0: turbo", "0: ssp", "0: ssp:-1", "0: ssp:x", "0: sync:3"),
        *("1: sync", "0: sync;", "0: sync; 0: ssp:1", "0: sync; 5: ssp:1; 4: async"),
        *("0: ssp:8 sync", "-1: sync", "0: ssp:99999999999", "99999999999: sync"),
        "0: ssp:4000000000",
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line_that_says_what_is(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(command_line={"schedule": text or " "}, environment={})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("schedule = ")
    assert "must be script, or ROUND: MODE; ROUND: MODE ..., the first from round 0" in line


def test_either_a_schedule_or_the_script_changes_the_mode() -> None:
    by_script = resolve(command_line={"consistency.schedule": "script"}, environment={}).config
    assert by_script == RunConfig(set_mode="allowed")
    assert (by_script.schedule, by_script.set_mode) == (None, "allowed")
    with pytest.raises(ConfigError, match=r"set_mode = allowed .* must be refused, or allowed"):
        resolve(command_line={"schedule": "0: sync", "set_mode": "allowed"}, environment={})


def test_a_schedule_and_a_mode_are_not_both_given() -> None:
    with pytest.raises(ConfigError, match="a schedule says the mode of every round"):
        resolve(command_line={"schedule": "0: sync"}, environment={"PSDIST_MODE": "ssp"})
    resolved = resolve(command_line={"schedule": "0: ssp:4"}, environment={})
    mine = with_script(resolved, script_settings({"mode": "async", "staleness": 9, "seed": 4}))
    assert (mine.config.mode, mine.config.staleness, mine.config.seed) == ("sync", 3, 4)
    assert first_mode(mine.config) == ModeFrom(0, "ssp", 4)


@pytest.mark.parametrize(
    ("settings", "coming", "judged", "bound", "mixed", "by", "words"),
    [
        ({}, ("sync",), "sync", 0, False, "run", "sync"),
        ({"mode": "ssp"}, ("ssp",), "ssp", 3, False, "run", "ssp (staleness 3)"),
        ({"mode": "async"}, ("async",), "async", 0, False, "run", "async"),
        ({"set_mode": "allowed"}, ("sync", "ssp", "async"), "ssp", 0, True, "script", "sync"),
        ({"mode": "auto"}, ("sync", "ssp"), "ssp", 0, True, "auto", "auto (sync, ssp:3)"),
        (
            {"mode": "ssp", "staleness": 2, "staleness_to": 8},
            *(("ssp",), "ssp", 2, False, "auto", "ssp (staleness 2 to 8)"),
        ),
        *(
            ({"schedule": text}, coming, judged, bound, mixed, "schedule", text)
            for text, coming, judged, bound, mixed in (
                ("0: ssp:8; 5: ssp:2", ("ssp",), "ssp", 2, False),
                ("0: ssp:8; 5: async", ("ssp", "async"), "ssp", 8, False),
                ("0: async; 5: sync", ("sync", "async"), "ssp", 0, True),
                ("0: sync", ("sync",), "sync", 0, False),
            )
        ),
    ],
)
def test_a_run_is_judged_by_all_modes_that_may_come(
    settings: dict[str, Any],
    coming: tuple[str, ...],
    judged: str,
    bound: int,
    mixed: bool,
    by: str,
    words: str,
) -> None:
    config = RunConfig(**settings)
    assert modes_that_may_come(config) == coming
    assert judging_mode(config) == judged
    assert least_bound(config) == bound
    assert is_mixed(config) == mixed
    assert mode_by(config) == by
    assert describe_modes(config) == words
    assert contradiction(config) == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"schedule": "0: ssp:4; 5: sync", "pipeline": 1},
            "5: sync: in sync every step",
        ),
        (
            {"set_mode": "allowed", "mode": "ssp", "pipeline": 1},
            "consistency.pipeline = 1 with consistency.schedule = script",
        ),
        (
            {"schedule": "0: ssp:4; 5: ssp:0", "pipeline": 1},
            "5: ssp:0: each group would",
        ),
        (
            {"schedule": "0: sync", "pipeline": 1},
            "consistency.pipeline = 1 with consistency.schedule = 0: sync: in sync",
        ),
        (
            {"schedule": "0: sync; 5: async", "pull_codec": "sign"},
            "codec.pull = sign with consistency.schedule",
        ),
        (
            {"set_mode": "allowed", "mode": "auto"},
            "consistency.schedule = script with mode = auto: only one",
        ),
        (
            {"mode": "auto", "pipeline": 1},
            "consistency.pipeline = 1 with mode = auto: in sync every step",
        ),
        ({"mode": "auto", "codec": "sign"}, "codec.pull = sign with mode = auto: a relative reply"),
        (
            {"schedule": "0: sync; 9: async", "pull_copies": "on"},
            "codec.pull_copies = on with consistency.schedule",
        ),
    ],
)
def test_what_a_mode_that_may_come_does_not_go_with_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    assert words in contradiction(RunConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "0: ssp:4; 5: async", "pipeline": 1},
        {"schedule": "0: sync; 5: async", "codec": "bf16"},
        {"schedule": "0: ssp:2; 5: async", "codec": "int8", "pull_copies": "on"},
        {"schedule": "0: sync", "max_deaths": 1, "local_steps": 4},
        {"schedule": "0: ssp:4; 5: sync", "max_deaths": 1},
        {"set_mode": "allowed", "max_deaths": 1},
        {"mode": "auto", "max_deaths": 1},
        {"schedule": "0: ssp:4; 5: sync", "resume": True},
        {"set_mode": "allowed", "resume": True, "on_usr1": "requeue"},
        {"mode": "auto", "resume": True},
        {"mode": "auto", "local_steps": 2},
        {"set_mode": "allowed", "local_steps": 4},
        {"mode": "ssp", "staleness": 2, "staleness_to": 8, "pipeline": 1},
        {"mode": "ssp", "staleness_to": 8, "max_deaths": 1},
        {"schedule": "0: ssp:4 int8; 5: sync int4/bf16", "replication": "buddy", "servers": 2},
        {"set_mode": "allowed", "replication": "buddy", "servers": 2},
        {"mode": "auto", "codec": "bf16", "replication": "buddy", "servers": 2},
        {"mode": "ssp", "staleness_to": 8, "replication": "buddy", "servers": 2},
    ],
)
def test_what_all_of_them_go_with_is_not(settings: dict[str, Any]) -> None:
    assert contradiction(RunConfig(**settings)) == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"schedule": "0: ssp:1"},
            "consistency.staleness_to = 8 with consistency.schedule = 0: ssp:1: only one of them",
        ),
        (
            {"set_mode": "allowed"},
            "consistency.schedule = script with consistency.staleness_to = 8: only one of them",
        ),
        ({"mode": "async"}, "consistency.staleness_to = 8 with mode = async: only ssp has a bound"),
        ({"mode": "auto"}, "consistency.staleness_to = 8 with mode = auto: only ssp has a bound"),
        (
            {"staleness": 8},
            "consistency.staleness_to = 8: expected more than staleness, which is 8",
        ),
    ],
)
def test_what_a_bound_that_moves_does_not_go_with_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    given = {"mode": "ssp", "staleness": 2, "staleness_to": 8}
    assert not contradiction(RunConfig(**given))
    assert contradiction(RunConfig(**{**given, **settings})).startswith(words)


def test_the_end_of_a_range_is_what_a_window_can_tell() -> None:
    with pytest.raises(ConfigError, match=r"staleness_to = 21 .*a whole number from 1 to 20"):
        resolve(command_line={"staleness_to": "21"}, environment={})
