"""Codecs that a schedule changes: what each round has, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.config.codec_rounds import coded_by_round, has_codecs
from psdist.config.compatibility import refusal
from psdist.config.modes import (
    ModeFrom,
    describe_modes,
    describe_now,
    is_changing,
    schedule_of,
)
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError

STORY = "0: ssp:8 topk:0.01/int8; 2000: ssp:2 int8; 5000: sync none"


def words(config: RunConfig) -> list[tuple[int, str]]:
    return [(part.round, str(part)) for part in coded_by_round(config)]


def test_a_schedule_says_the_mode_and_the_codecs_of_every_round() -> None:
    config = RunConfig(schedule=STORY, pull_copies="on")
    assert words(config) == [(0, "topk:0.01/int8"), (2000, "int8"), (5000, "none")]
    assert schedule_of(config) == (
        *(ModeFrom(0, "ssp", 8), ModeFrom(2000, "ssp", 2), ModeFrom(5000, "sync")),
    )
    assert describe_modes(config) == STORY
    assert contradiction(config) == ""
    assert has_codecs(config)


def test_displays_have_room_for_the_part_of_now() -> None:
    config = RunConfig(schedule=STORY, pull_copies="on")
    assert [describe_now(config, at) for at in (0, 1999, 2000, 5000, 10**6)] == [
        *("ssp:8 topk:0.01/int8", "ssp:8 topk:0.01/int8", "ssp:2 int8", "sync none", "sync none"),
    ]
    long = RunConfig(schedule=f"0: sync {'a' * 40}:{'b' * 40}; 1: sync none")
    assert describe_now(long, 0) == f"sync {'a' * 40}:{'b' * 15}..."
    assert len(describe_now(long, 0)) == 64
    assert describe_now(RunConfig(mode="ssp"), 7) == describe_modes(RunConfig(mode="ssp"))


def test_codecs_may_change_while_the_mode_stays_and_the_other_way_round() -> None:
    warm = RunConfig(schedule="0: sync none; 500: sync topk:0.01; 600: sync topk:0.01")
    assert words(warm) == [(0, "none"), (500, "topk:0.01")]
    assert schedule_of(warm) == (ModeFrom(0, "sync"),)
    assert not is_changing(warm)
    other = RunConfig(schedule="0: ssp:4 int8; 500: ssp:1 int8")
    assert words(other) == [(0, "int8")]
    assert len(schedule_of(other)) == 2
    assert not has_codecs(RunConfig(schedule="0: ssp:4 none; 500: ssp:1 none/none"))


def test_without_codecs_in_the_schedule_those_of_the_settings_are_of_every_round() -> None:
    config = RunConfig(schedule="0: ssp:4; 500: ssp:1", push_codec="sign")
    assert words(config) == [(0, "sign")]
    assert words(RunConfig(codec="int8")) == [(0, "int8/int8")]
    assert words(RunConfig()) == [(0, "none")]


@pytest.mark.parametrize(
    "text",
    [
        *("0: sync int9", "0: sync int8/", "0: sync /int8", "0: sync int8 int8", "0: int8"),
        *("0: sync; 5: sync int8", "0: sync int8; 5: sync", "0: sync int8/int8/int8"),
        *("0: sync int8; 5: sync int8/lowrank:4", "0: sync skip:0.1/skip:0.1"),
    ],
)
def test_what_names_no_codec_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(command_line={"schedule": text}, environment={})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("schedule = ")
    assert "after each mode, or after none, the codecs from there on" in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"codec": "int8"},
            "with codec.push and codec.pull = int8: the schedule decides the codecs of every round",
        ),
        ({"push_codec": "none"}, "with codec.push = none: the schedule decides"),
        ({"schedule": STORY}, "a relative reply needs the version its reader holds"),
        (
            {"schedule": "0: ssp:1 int8/int8; 5: sync int8/int8", "pull_copies": "on"},
            "codec.pull_copies = on with consistency.schedule = 0: ssp:1 int8/int8; 5: sync "
            "int8/int8: in sync one",
        ),
        (
            {"schedule": "0: ssp:1 int8; 5: sync int8/bf16", "pull_copies": "on"},
            "name the codecs in a schedule, with pulls of none in sync",
        ),
        ({"schedule": "0: ssp:1 int8; 5: sync int8/sign"}, "set codec.pull = none, fp16 or bf16"),
        ({"schedule": "0: sync int8; 5: sync skip:0.01", "feedback": "off"}, "would be lost"),
        (
            {"schedule": "0: ssp:1 int8; 5: ssp:1 int8/int8", "pull_copies": "on", "pipeline": 1},
            "consistency.pipeline = 1 with codec.pull_copies = on",
        ),
    ],
)
def test_what_codecs_in_a_schedule_do_not_go_with_is_refused(
    settings: dict[str, Any], said: str
) -> None:
    given = {"schedule": "0: sync none; 500: sync topk:0.01"} | settings
    assert said in contradiction(RunConfig(**given))


def test_casts_of_pulls_go_with_modes_that_change_without_copies() -> None:
    config = RunConfig(schedule="0: ssp:1 int8/fp16; 5: sync int8/bf16; 9: async none")
    assert contradiction(config) == ""
    assert refusal(config, script={"float64 parameters": "parameters of float64"})


def test_a_change_of_codecs_alone_goes_with_resume_and_local_steps() -> None:
    warm = "0: sync none; 500: sync topk:0.01"
    config = RunConfig(schedule=warm, resume=True, run_dir="run", local_steps=4)
    assert contradiction(config) == ""
