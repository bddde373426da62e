"""What codec = auto goes with, as the settings judge it and the document says."""

from __future__ import annotations

import pytest

from psdist.config.codec_rounds import (
    codecs_that_may_come,
    coded,
    coded_by_round,
    has_codecs,
    is_auto,
    is_controlled,
    ladder_of,
)
from psdist.config.codec_specs import text_of_both
from psdist.config.compatibility import refusal
from psdist.config.settings import RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError


def names(config: RunConfig) -> list[str]:
    return [text_of_both(each) for each in ladder_of(config)]


def test_what_is_given_stays() -> None:
    assert names(RunConfig(codec="auto")) == [
        *("none", "fp16/fp16", "int8/int8", "int4/int4", "int4/sign"),
    ]
    pull = RunConfig(codec="auto", pull_codec="int8")
    assert names(pull) == ["none/int8", "fp16/int8", "int8/int8", "int4/int8"]
    push = RunConfig(codec="auto", push_codec="none")
    assert names(push) == ["none", "none/fp16", "none/int8", "none/int4", "none/sign"]
    both = RunConfig(codec="auto", push_codec="int8", pull_codec="sign")
    assert not is_auto(both)
    assert (both.push_codec, both.pull_codec) == ("int8", "sign")


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_where_groups_hold_different_versions_pulls_are_casts_or_have_copies(mode: str) -> None:
    casts = ["none", "fp16/fp16", "int8/fp16", "int4/fp16"]
    assert names(RunConfig(codec="auto", mode=mode)) == casts
    copies = RunConfig(codec="auto", mode=mode, pull_copies="on")
    assert names(copies) == names(RunConfig(codec="auto"))
    assert not contradiction(copies)
    push = RunConfig(codec="auto", mode=mode, push_codec="int8")
    assert names(push) == ["int8", "int8/fp16"]
    pull = RunConfig(codec="auto", mode=mode, pull_codec="bf16")
    assert names(pull) == ["none/bf16", "fp16/bf16", "int8/bf16", "int4/bf16"]


def test_a_run_begins_with_the_first_and_may_have_them_all() -> None:
    config = RunConfig(codec="auto")
    assert text_of_both(coded(config)) == "none"
    assert [each.round for each in coded_by_round(config)] == [0]
    assert codecs_that_may_come(config) == ladder_of(config)
    assert has_codecs(config)
    assert is_controlled(config)
    assert is_controlled(RunConfig(mode="auto"))
    assert not is_controlled(RunConfig(codec="int8"))
    assert refusal(config, script={"float64 parameters": "parameters of float64"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"error_budget": "0.1"},
            "codec.error_budget = 0.1 without codec.push: .* set codec.push = auto",
        ),
        (
            {"error_budget": "0.1", "codec": "int8"},
            "codec.error_budget = 0.1 with codec.push and codec.pull = int8",
        ),
        (
            {"error_budget": "0.1", "codec": "auto", "push_codec": "int8"},
            "0.1 with codec.push = int8",
        ),
        ({"error_budget": "1", "codec": "auto"}, "a number > 0 and < 1"),
        ({"error_budget": "0", "codec": "auto"}, "a number > 0 and < 1"),
        (
            {"codec": "auto", "push_codec": "sign+burst:9"},
            "codec.pull = auto with codec.push = sign.burst:9: .* leave .burst out",
        ),
        (
            {"codec": "auto", "mode": "auto"},
            "codec.push and codec.pull = auto with mode = auto: .* one thing at a time; keep one "
            "mode",
        ),
        (
            {"codec": "auto", "mode": "ssp", "staleness": "1", "staleness_to": "4"},
            "codec.push and codec.pull = auto with consistency.staleness_to = 4: .* one thing at "
            "a time",
        ),
        ({"codec": "auto", "mode": "ssp", "pull_codec": "int8"}, "or codec.pull_copies = on"),
        (
            {"codec": "auto", "mode": "async", "pull_copies": "on", "pipeline": "1"},
            "consistency.pipeline = 1 with codec.pull_copies = on",
        ),
        (
            {"codec": "auto", "local_steps": "4", "steps_by": "loss"},
            "codec.push and codec.pull = auto with local.steps_by = loss: .* one thing at a time",
        ),
        (
            {"codec": "auto", "backup": "1", "push_codec": "none"},
            "codec.pull = auto with consistency.backup = 1: a group does not report the time",
        ),
        ({"codec": "auto/int8"}, "must be auto, a codec for both directions, or PUSH/PULL"),
    ],
)
def test_a_run_that_cannot_be_is_refused_at_the_start(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(command_line={"mode": "sync", **given}, environment={})


def test_a_budget_of_auto_is_right() -> None:
    config = resolve(command_line={"codec": "auto", "error_budget": "0.01"}, environment={})
    assert config.config.error_budget == 0.01
