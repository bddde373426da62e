"""Which settings exclude or need each other, in the refusals and in docs/reference/conflicts.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from psdist.config.compatibility import (
    has,
    reads_losses,
    reforms_groups,
    refusal,
    refusals,
    take_servers_places,
    take_workers_places,
)
from psdist.config.conflicts import as_markdown, conflicts_table
from psdist.config.outer import has_rounds, steps_on_workers
from psdist.config.settings import FIELDS, TABLES, RunConfig, contradiction
from psdist.config.sources import resolve
from psdist.errors import ConfigError
from psdist.features import FEATURES, Conflict, Feature, Need
from tests import house
from tests.support.feature_pairs import both

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "conflicts.md"
NAMED = {each.name: each for each in FEATURES}
CONFLICTS = [(feature, each) for feature in FEATURES for each in feature.conflicts]
NEEDS = [(feature, each) for feature in FEATURES for each in feature.needs]
OFF: dict[str, Mapping[str, Any]] = {
    "ssp": {"mode": "async"},
    "local steps": {"local_steps": 1},
    "chosen codecs": {"codec": "int8"},
    "codec for devices": {"push_codec": "randk:0.1"},
    "failed workers": {"max_deaths": 0},
    "several servers": {"servers": 1},
    "steps by loss": {"steps_by": "count"},
    "stale tables": {"tables_mode": "same"},
    "checkpoints": {"checkpoint_every": None},
    "skipped steps": {"on_nonfinite": "error"},
    "replicas": {"replication": "none"},
}
"""Feature that another one needs -> settings without it."""


def examples_of(feature: Feature) -> Iterator[tuple[Mapping[str, Any], dict[str, str]]]:
    """Yield settings that turn the feature on, or what the script has for it."""
    yield from ((settings, {}) for settings in feature.settings)
    if not feature.settings:
        yield {}, {feature.name: "this script"}


@pytest.mark.parametrize("pair", CONFLICTS, ids=lambda pair: f"{pair[0].name}, {pair[1].feature}")
def test_features_that_exclude_each_other_are_refused_in_one_line(
    pair: tuple[Feature, Conflict],
) -> None:
    feature, conflict = pair
    other, num_tried = NAMED[conflict.feature], 0
    for (mine, script), (its, its_script) in product(examples_of(feature), examples_of(other)):
        given = both(mine, its)
        if given is None:
            continue
        num_tried += 1
        wrong = list(refusals(RunConfig(**given), script=script | its_script))
        (line,) = (each for each in wrong if conflict.reason in each and says(each, mine, its))
        assert "\n" not in line
        assert feature.off in line
        assert other.off in line
        for alone in (mine, its):
            if alone:
                said = list(refusals(RunConfig(**alone)))
                assert line not in said, "each of them alone is right"
    assert num_tried


def says(line: str, *settings: Mapping[str, Any]) -> bool:
    """True if the line names a setting of each."""
    return all(
        not given or any(f"{name} = " in line for name in names(given)) for given in settings
    )


def names(given: Mapping[str, Any]) -> list[str]:
    """Return the settings' names, with their tables."""
    texts = [RunConfig(**given).setting_text(key).partition(" = ")[0] for key in given]
    return [name for text in texts for name in text.split(" and ")]


@pytest.mark.parametrize("pair", NEEDS, ids=lambda pair: f"{pair[0].name}, {pair[1].features[0]}")
def test_what_a_feature_needs_is_asked_for_in_one_line(pair: tuple[Feature, Need]) -> None:
    feature, need = pair
    for settings in feature.settings:
        assert need.reason not in " ".join(refusals(RunConfig(**settings)))
        lacking: dict[str, Any] = {**settings}
        for name in need.features:
            lacking |= OFF[name]
        (line,) = (each for each in refusals(RunConfig(**lacking)) if need.reason in each)
        assert line.startswith(f"{names(settings)[0]} = ")
        assert "\n" not in line
        assert all(NAMED[name].on in line for name in need.features)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_its_examples_turn_a_feature_on_and_nothing_does_by_default(feature: Feature) -> None:
    for settings in feature.settings:
        assert has(RunConfig(**settings), feature.name)
        assert contradiction(RunConfig(**settings)) == "" or feature.name == "bound of 0"
    is_default = feature.name in ("sync rounds", "several servers")
    assert has(RunConfig(), feature.name) == is_default


def test_the_table_names_features_that_exist_and_each_pair_once() -> None:
    assert len(NAMED) == len(FEATURES)
    pairs = [frozenset((feature.name, each.feature)) for feature, each in CONFLICTS]
    assert len(set(pairs)) == len(pairs)
    assert all(len(pair) == 2 for pair in pairs)
    for row in conflicts_table():
        assert row.reason
        assert "tried" not in row.reason
        assert row.remedy.count(", or ") >= 1


def test_texts_of_the_table_name_settings_that_exist_with_their_tables() -> None:
    tables = "|".join(table for table in TABLES if table)
    name = re.compile(
        rf"(?:\w+\.)?\w+(?= = )|(?<=leave )[\w.]+(?= out)|\b(?:{tables})\.\w+|\b\w+_\w+\b"
    )
    texts = [(each.reason, each.remedy, *each.settings) for each in conflicts_table()]
    found = set(name.findall("; ".join(text for row in texts for text in row)))
    assert found <= FIELDS.keys()
    assert found > {"mode", "run_dir", "codec.pull", "checkpoint.every", "training.freeze_step"}


def test_the_measured_number_of_rows_is_that_of_the_table() -> None:
    rows = house.rows_of_tables(house.parse(house.read_sources()))
    assert len(rows) == len(conflicts_table()) <= 66


def test_the_document_has_the_table_that_the_code_makes() -> None:
    assert as_markdown() in DOCUMENT.read_text(encoding="utf-8")


def test_a_table_names_settings_and_remedies() -> None:
    (row,) = (each for each in conflicts_table() if each.pair == ("backup groups", "coded pushes"))
    assert row.settings == ("consistency.backup = 1", "codec.push = int8")
    assert row.remedy == "set codec.push = none, or set consistency.backup = 0"
    assert not row.is_need


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"backup": "1", "mode": "ssp"},
            "consistency.backup = 1 with mode = ssp: there each update is applied when it "
            "arrives; set mode = "
            "sync, or set consistency.backup = 0",
        ),
        (
            {"local_steps": "epoch", "outer": "accumulate"},
            "local.steps = epoch with local.outer = accumulate: a round's weight needs its number "
            "of "
            "steps beforehand; set local.outer = average, or set local.steps = a number",
        ),
        (
            {"rollback": "2", "codec": "int8"},
            "training.rollback = 2 with codec.push and codec.pull = int8 and with local.steps_by "
            "= count: else psdist cannot become "
            "less lossy; set codec.push = auto, or set local.steps_by = loss, or leave "
            "training.rollback out",
        ),
        (
            {"rollback": "2", "codec": "int4/sign"},
            "training.rollback = 2 with codec.push = int4 and with local.steps_by = count: else ",
        ),
        (
            {"rollback": "2", "codec": "auto", "checkpoint_every": "100"},
            "training.rollback = 2 without run_dir: the restarted job must find one to go back "
            "to; set "
            "checkpoint.every and run_dir, and start it with --resume, or leave training.rollback "
            "out",
        ),
        (
            {"steps_by": "loss", "local_steps": "1"},
            "local.steps_by = loss with local.steps = 1: no round is shorter than one step; set "
            "local.steps = 2, or set local.steps_by = count",
        ),
        (
            {"loss_patience": "3", "codec": "int8"},
            "training.loss_patience = 3 with codec.push and codec.pull = int8: it limits which "
            "codecs psdist chooses; set codec.push "
            "= auto, or leave training.loss_patience out",
        ),
        (
            {"loss_patience": "3"},
            "training.loss_patience = 3 without codec.push: it limits which codecs psdist "
            "chooses; set codec.push = "
            "auto, or leave training.loss_patience out",
        ),
        (
            {"on_group_death": "reform"},
            "failures.on_group_death = reform with failures.max_deaths = 0: without it the "
            "failure of a worker ends "
            "the job; set failures.max_deaths = 1, or set failures.on_group_death = leave",
        ),
        (
            {"spares": "2"},
            "failures.spares = 2 with failures.max_deaths = 0 and with failures.replication = "
            "none: no place would ever "
            "become free; set failures.max_deaths = 1, or set failures.replication = buddy, or "
            "set failures.spares = 0",
        ),
        (
            {"replication": "buddy", "servers": "1"},
            "failures.replication = buddy with servers = 1: another server stores the replica of "
            "a shard; "
            "set servers = 2 or more, or set failures.replication = none",
        ),
        (
            {"replication": "buddy", "servers": "2", "server_device": "cuda:1"},
            "failures.replication = buddy with hosts.server_device = cuda:1: replicas are kept in "
            "the memory of "
            "the host; set hosts.server_device = cpu, or set failures.replication = none",
        ),
        (
            {"mode": "ssp", "staleness": "8", "staleness_to": "8"},
            "consistency.staleness_to = 8: expected more than staleness, which is 8; set a higher "
            "one, or "
            "leave it out",
        ),
    ],
)
def test_a_run_that_is_impossible_is_refused_at_the_start(given: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(command_line={"mode": "sync", **given}, environment={})
    assert line in str(raised.value)


# What decides a feature


def test_a_codec_is_named_by_the_setting_that_gives_it() -> None:
    for given in ({"codec": "int8"}, {"codec": "int8", "schedule": "0: ssp:2; 9: async"}):
        wrong = contradiction(RunConfig(**{"mode": "ssp", "stale_lr": "inverse", **given}))
        assert wrong.startswith("consistency.stale_updates = inverse with codec.push = int8: ")
        assert "set codec.push = none, or leave consistency.stale_updates out" in wrong
    assert "codec.push" in contradiction(RunConfig(backup=1, codec="int8"))
    assert not contradiction(RunConfig(backup=1, codec="none/sign"))
    shrinking = {"on_group_death": "reform", "max_deaths": 1}
    assert "with codec.pull = fp16" in contradiction(RunConfig(**shrinking, codec="fp16"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "sync"}, "with mode = sync: in sync no update is stale"),
        ({"mode": "auto"}, "with mode = auto: "),
        ({"schedule": "0: ssp:2; 9: sync"}, "with consistency.schedule = 0: ssp:2; 9: sync: "),
        ({"set_mode": "allowed", "mode": "ssp"}, "with consistency.schedule = script: "),
    ],
)
def test_a_mode_is_named_by_the_setting_that_decides_it(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(command_line={**given, "stale_lr": "inverse"}, environment={})
    assert f"consistency.stale_updates = inverse {said}" in str(raised.value)


def test_a_schedule_without_sync_takes_what_sync_excludes() -> None:
    given = {"schedule": "0: ssp:2; 9: async", "stale_lr": "inverse"}
    assert resolve(command_line=given, environment={}).config.stale_lr == "inverse"


def test_codecs_of_a_schedule_are_refused_as_others_are() -> None:
    schedule = "0: ssp:2 none; 9: async int8"
    said = (
        r"consistency.stale_updates = inverse with consistency.schedule = 0: .*; set codec.push = "
        r"none, or leave consistency.stale_updates out"
    )
    with pytest.raises(ConfigError, match=said):
        resolve(command_line={"schedule": schedule, "stale_lr": "inverse"}, environment={})


def test_any_number_turns_on_what_a_number_turns_on() -> None:
    buddy: dict[str, Any] = {"replication": "buddy", "servers": 2, "mode": "async"}
    assert ("consistency.stale_updates = compensate:0.04") in contradiction(
        RunConfig(**buddy, delay_compensation=0.04)
    )
    assert "training.global_batch = 8" in contradiction(
        RunConfig(steps_by="speed", local_steps=2, global_batch=8)
    )
    assert not contradiction(RunConfig(steps_by="speed", local_steps=2, global_batch=None))


@pytest.mark.parametrize(
    ("given", "of_servers", "of_workers"),
    [
        ({"max_deaths": 1}, False, True),
        ({"replication": "buddy"}, True, False),
        ({"replication": "buddy", "max_deaths": 1}, True, True),
    ],
)
def test_whose_places_spares_take(
    given: dict[str, Any], of_servers: bool, of_workers: bool
) -> None:
    config = RunConfig(spares=1, **given)
    assert contradiction(config) == ""
    assert take_servers_places(config) == of_servers
    assert take_workers_places(config) == of_workers
    assert has(config, "spares for workers") == of_workers
    rounds = contradiction(config.model_copy(update={"local_steps": 2}))
    assert bool(rounds) == of_workers


def test_what_follows_from_several_settings() -> None:
    assert not reforms_groups(RunConfig(max_deaths=1))
    assert reforms_groups(RunConfig(max_deaths=1, on_group_death="reform"))
    assert not reads_losses(RunConfig(codec="int8"))
    assert reads_losses(RunConfig(steps_by="loss", local_steps=2))
    assert reads_losses(RunConfig(codec="auto", loss_patience=1))
    assert reads_losses(RunConfig(codec="auto", rollback=2.0))
    epoch = RunConfig(local_steps="epoch")
    assert has_rounds(epoch)
    assert steps_on_workers(epoch)


# Properties of the script


@pytest.mark.parametrize(
    ("given", "script", "line"),
    [
        (
            {"codec": "auto"},
            {"several optimizers": "2 prepared optimizers"},
            "2 prepared optimizers with codec.push and codec.pull = auto: it looks at the rounds "
            "of one optimizer; "
            "leave codec.push and codec.pull out, or prepare one optimizer",
        ),
        (
            {"push_codec": "skip:0.1"},
            {"optimizer other than SGD": "torch.optim.Adam on servers"},
            "codec.push = skip:0.1 with torch.optim.Adam on servers: skip compares lr x gradient "
            "with the parameters, which moves them in SGD alone; train with torch.optim.SGD, or "
            "leave skip:THETA out",
        ),
        (
            {"freeze_step": 5},
            {"optimizer without a second moment": "torch.optim.SGD on servers"},
            "torch.optim.SGD on servers with training.freeze_step = 5: training.freeze_step keeps "
            "the second moment; "
            "set training.freeze_step = 0, or train with Adam or AdamW and amsgrad=False",
        ),
        (
            {"on_group_death": "reform", "max_deaths": 1},
            {"call of a whole group": "job.pull"},
            "failures.on_group_death = reform with job.pull: a group can shrink only inside "
            "step(); leave "
            "the call out, or set failures.on_group_death = leave",
        ),
    ],
)
def test_what_a_script_does_is_named_as_it_calls_it(
    given: dict[str, Any], script: dict[str, str], line: str
) -> None:
    config = RunConfig(**given)
    assert refusal(config) == ""
    assert refusal(config, script=script) == line
    assert refusal(RunConfig(), script=script) == ""


@pytest.mark.parametrize(
    "given",
    [
        {"mode": "sync", "steps_by": "speed", "local_steps": "luck"},
        {"mode": "ssp", "stale_lr": "half"},
        {"mode": "sync", "steps_by": "luck"},
        {"backup": "-1"},
        {"backup_every": "1"},
        {"on_group_death": "hope"},
        {"mode": "sync", "local_steps": "1.5"},
        {"staleness_to": "21"},
        {"codec": "auto", "error_budget": "1"},
        {"codec": "auto", "error_budget": "0"},
        {"codec": "auto/int8"},
    ],
)
def test_a_value_that_a_setting_cannot_have_is_named(given: dict[str, str]) -> None:
    key = list(given)[-1]
    with pytest.raises(ConfigError, match=rf"{key} = {given[key]} \(command line\): must be "):
        resolve(command_line=given, environment={})
