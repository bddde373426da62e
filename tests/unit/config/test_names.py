"""Names of settings: tables, flat names, merged settings, profiles; one deprecation line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.config.old_names import MERGED, parse_stale
from psdist.config.settings import FIELDS, KEYS, NAMES, TABLES, RunConfig
from psdist.config.sources import (
    PROFILES,
    deprecation,
    describe,
    environment_variable,
    resolve,
    script_settings,
    with_script,
)
from psdist.errors import ConfigError


def of(**command_line: object) -> RunConfig:
    return resolve(command_line=command_line, environment={}).config


def test_a_table_is_named_once_and_its_settings_stand_together() -> None:
    seen = [name.rpartition(".")[0] for name in NAMES.values()]
    assert seen == [table for table in TABLES for _ in range(seen.count(table))]
    assert not set(TABLES) & set(FIELDS)
    variables = [environment_variable(name) for name in FIELDS]
    assert len(set(variables)) == len(FIELDS)
    flat = {environment_variable(key): NAMES[key] for key in KEYS}
    assert all(environment_variable(name) == each or each not in variables
               for each, name in flat.items())  # fmt: skip


def test_every_source_takes_the_name_with_its_table(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('mode = "async"\n[codec]\npush = "int8"\n[local]\nsteps = 4\n')
    resolved = resolve(
        command_line={"failures.warn_s": "3"},
        environment={"PSDIST_CODEC_PULL": "fp16", "PSDIST_LOCAL_STEPS": "8"},
        file=file,
    )
    config = resolved.config
    assert (config.codec_push, config.codec_pull, config.local_steps) == ("int8", "fp16", 8)
    assert (config.mode, config.warn_s) == ("async", 3.0)
    assert resolved.sources["codec_pull"] == "environment PSDIST_CODEC_PULL"
    assert deprecation(resolved) == []


def test_flat_names_of_all_sources_are_deprecated_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('chunk_bytes = "8KiB"\ncodec = "int8"\n')
    resolved = resolve(
        command_line={"bind": "off", "--backup": "1", "mode": "sync", "--codec": "none"},
        environment={"PSDIST_PUSH_CODEC": "int4"},
        file=file,
    )
    assert deprecation(resolved) == [
        "warning: flat names of settings are deprecated; write transfer.chunk_bytes for "
        "chunk_bytes, PSDIST_CODEC_PUSH for PSDIST_PUSH_CODEC, hosts.affinity=cards for bind=off"
    ]
    assert (resolved.config.chunk_bytes, resolved.config.backup) == (8192, 1)


@pytest.mark.parametrize("key", KEYS)
def test_the_flat_name_of_each_setting_is_an_alias(key: str) -> None:
    default = RunConfig.model_fields[key].default
    value = {"codec_push": "int8", "codec_pull": "int8", "consistency_schedule": "script"}.get(key)
    value = default if value is None else value
    if value is None or key in ("resume", "run_dir"):
        return
    by_flat = resolve(command_line={key: value}, environment={})
    by_name = resolve(command_line={NAMES[key]: value}, environment={})
    assert by_flat.config == by_name.config
    assert by_flat.sources[key] == by_name.sources[key] == "command line"
    assert bool(by_flat.flat) == (key != NAMES[key])
    assert not by_name.flat


def test_two_names_of_one_setting_with_different_values_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        of(**{"push_codec": "int4", "codec.push": "int8"})
    assert str(caught.value) == (
        "codec.push = int8 (command line) and push_codec = int4 (command line): two values of one "
        "setting; leave out one"
    )
    assert of(**{"push_codec": "int8", "codec.push": "int8"}).codec_push == "int8"
    with pytest.raises(ConfigError, match="two values of one setting"):
        of(**{"bind": "off", "hosts.affinity": "auto"})
    # The command line wins over the environment, under either name.
    environment = {"PSDIST_PUSH_CODEC": "int4"}
    config = resolve(command_line={"codec.push": "int8"}, environment=environment).config
    assert config.codec_push == "int8"


def test_the_short_form_gives_both_directions() -> None:
    assert (of(codec="int8").codec_push, of(codec="int8").codec_pull) == ("int8", "int8")
    assert (of(codec="int4/sign").codec_push, of(codec="int4/sign").codec_pull) == ("int4", "sign")
    one = of(codec="int8", push_codec="topk:0.01")
    assert (one.codec_push, one.codec_pull) == ("topk:0.01", "int8")
    assert of(**{"codec.push": "auto"}) == of(**{"codec.push": "auto", "codec.pull": None})
    assert of(**{"codec.push": "auto"}).pull_codec == "none"
    with pytest.raises(ConfigError, match=r"codec = int9 \(command line\): must be auto, a codec"):
        of(codec="int9")


def test_old_names_of_several_sources_are_parts_of_one_setting(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("bind = 'off'\nstrict_placement = true\n")
    resolved = resolve(
        command_line={"nics": "off", "--placement": "plan.json"}, environment={}, file=file
    )
    config = resolved.config
    assert (config.hosts_affinity, config.bind, config.nics) == ("off", "off", "off")
    assert (config.placement, config.strict_placement) == ("plan.json", True)
    assert "hosts.placement = strict:plan.json  (command line)" in describe(resolved)
    assert of(bind="off").hosts_affinity == "cards"
    assert of(nics="off").hosts_affinity == "cores"


@pytest.mark.parametrize(
    ("given", "stale_updates"),
    [
        ({"stale_lr": "inverse"}, "inverse"),
        ({"delay_compensation": "0.04"}, "compensate:0.04"),
        ({"stale_lr": "inverse", "delay_compensation": 2}, "inverse+compensate:2.0"),
        ({"stale_lr": "off", "delay_compensation": 0}, "off"),
        ({"consistency.stale_lr": "inverse"}, "inverse"),
        ({"consistency.stale_updates": "inverse+compensate:1e-3"}, "inverse+compensate:1e-3"),
    ],
)
def test_stale_updates_has_two_old_names(given: dict[str, Any], stale_updates: str) -> None:
    config = of(mode="async", **given)
    assert config.stale_updates == stale_updates
    assert (config.stale_lr == "inverse") == ("inverse" in stale_updates)
    assert bool(config.delay_compensation) == ("compensate" in stale_updates)
    variables = {
        f"PSDIST_{name.replace('.', '_').upper()}": str(value) for name, value in given.items()
    }
    assert resolve(command_line={"mode": "async"}, environment=variables).config == config


@pytest.mark.parametrize(
    "text",
    ["", "on", "inverse+", "compensate", "compensate:0", "compensate:x", "compensate:1e7",
     "compensate:1_0", "compensate: 1", "compensate:\u0661", "compensate:1e", "compensate:-1",
     "compensate:nan", "compensate:1+inverse", "inverse+inverse", "inversecompensate:1"],
)  # fmt: skip
def test_a_wrong_way_to_treat_stale_updates_is_refused(text: str) -> None:
    if text:
        with pytest.raises(ConfigError, match=r"consistency.stale_updates = .* must be off, inver"):
            of(**{"consistency.stale_updates": text})
    with pytest.raises(ValueError):
        parse_stale(text)


@pytest.mark.parametrize("key", MERGED)
@pytest.mark.parametrize("value", ["\0", 10**400, True, [], 1.5])
def test_a_wrong_value_of_an_old_name_is_one_line(key: str, value: object) -> None:
    if (key, value) in (("strict_placement", True), ("delay_compensation", 1.5)):
        return
    with pytest.raises(ConfigError) as caught:
        of(**{key: value})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{key} = ")
    assert " (command line): must be " in line


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_the_weakest_source(name: str) -> None:
    resolved = resolve(command_line={}, environment={"PSDIST_PROFILE": name})
    settings = PROFILES[name].settings
    assert {NAMES[key] for key in KEYS if resolved.sources[key] == f"profile {name}"} == {*settings}
    first = next(iter(settings))
    default = RunConfig.model_fields[FIELDS[first]].default
    given = {first: "none" if first == "codec.push" else default}
    after = resolve(command_line=given, environment={}, profile=name)
    assert after.sources[FIELDS[first]] == "command line"
    assert getattr(after.config, FIELDS[first]) == given[first]


def test_a_script_and_a_schedule_win_over_a_profile() -> None:
    resolved = resolve(command_line={}, environment={}, profile="uneven")
    after = with_script(resolved, script_settings({"mode": "sync"}))
    assert (after.config.mode, after.config.staleness) == ("sync", 4)
    given = {"consistency.schedule": "0: ssp:2"}
    scheduled = resolve(command_line=given, environment={}, profile="uneven")
    assert (scheduled.config.mode, scheduled.sources["mode"]) == ("sync", "default")


def test_a_table_is_no_setting() -> None:
    with pytest.raises(ConfigError) as caught:
        of(failures="3")
    assert str(caught.value).startswith(
        "failures = 3 (command line) is no setting; [failures] has replication, max_deaths, "
    )


def test_an_unknown_profile_is_refused_and_a_refusal_names_the_profile() -> None:
    with pytest.raises(ConfigError, match=r"profile = fast: must be slow-network, unreliable"):
        resolve(command_line={}, environment={}, profile="fast")
    with pytest.raises(ConfigError, match=r"\(--profile uneven is in use\)"):
        resolve(command_line={"consistency.backup": "1"}, environment={}, profile="uneven")


def test_a_copy_takes_no_name_that_would_have_no_effect() -> None:
    config = RunConfig()
    assert config.model_copy(update={"codec_push": "int8"}).push_codec == "int8"
    with pytest.raises(ValueError, match=r"'push_codec': ...}\): write codec.push$"):
        config.model_copy(update={"push_codec": "int8"})
    with pytest.raises(ValueError, match=r"'watch': ...}\): it is no setting$"):
        config.model_copy(update={"watch": True})
