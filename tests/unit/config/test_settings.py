"""Settings: sources and their order, every mistake in one report, what is saved reads back.

Longer than other modules: every source, type and mistake of one table of settings.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from psdist.config.settings import (
    KEYS,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    NAMES,
    RunConfig,
    allowed_values,
    decode,
    encode,
    parse_size,
    to_toml,
)
from psdist.config.sources import (
    MAX_FILE_BYTES,
    describe,
    describe_defaults,
    environment_variable,
    resolve,
)
from psdist.errors import ConfigError, ProtocolError
from psdist.protocol.optimizers import traits

counts = st.integers(1, 2**31 - 1)
seconds = st.floats(0, 1e9, exclude_min=True)
identifiers = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,8}", fullmatch=True)
optimizer_names = st.builds(
    "{}.{}:{}{}{}".format,
    identifiers,
    identifiers,
    identifiers,
    st.just("") | identifiers.map(".{}".format),
    st.sampled_from(["", "=elementwise", "=whole", "=elementwise+lr_scales", "=whole+lr_scales"]),
)
paths = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=50
)
configs = st.builds(
    RunConfig,
    mode=st.sampled_from(["sync", "ssp", "async"]),
    staleness=st.integers(0, 2**31 - 1),
    pipeline=st.sampled_from([0, 1]),
    servers=counts | st.just("auto"),
    group=st.sampled_from(["node", "socket", "numa", "rank"]),
    placement=paths,
    strict_placement=st.booleans(),
    racks=st.none() | paths,
    network=st.none() | paths,
    bind=st.sampled_from(["auto", "off"]),
    run_dir=st.none() | paths,
    seed=st.integers(0, 2**63 - 1),
    record=st.booleans(),
    trace=st.booleans(),
    checksum_every=counts,
    chunk_bytes=st.integers(MIN_CHUNK_BYTES, MAX_CHUNK_BYTES) | st.just("auto"),
    credits=st.integers(1, 4096) | st.just("auto"),
    receive_buffers=st.integers(3, 2**31 - 1) | st.just("auto"),
    warn_s=seconds,
    wait_timeout_s=seconds,
    on_nonfinite=st.sampled_from(["error", "skip"]),
    threads=counts | st.just("auto"),
    spin=st.sampled_from(["auto", "on", "off"]),
    progress=st.sampled_from(["auto", "live", "lines", "off"]),
    optimizers=st.lists(optimizer_names, max_size=4).map(tuple),
)


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "run.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def mistakes(
    command_line: dict[str, object] | None = None,
    environment: dict[str, str] | None = None,
    file: Path | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(command_line=command_line or {}, environment=environment or {}, file=file)
    return str(caught.value)


def test_without_any_source_every_value_is_the_default() -> None:
    resolved = resolve(command_line={}, environment={})
    assert resolved.config == RunConfig()
    assert set(resolved.sources.values()) == {"default"}
    assert set(resolved.sources) == set(KEYS)


def test_the_command_line_wins_over_the_environment_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'mode = "ssp"\nstaleness = 1\nseed = 1\n')
    resolved = resolve(
        command_line={"staleness": "3", "mode": None},
        environment={"PSDIST_STALENESS": "2", "PSDIST_SEED": "2"},
        file=file,
    )
    config, sources = resolved.config, resolved.sources
    assert (config.staleness, sources["staleness"]) == (3, "command line")
    assert (config.seed, sources["seed"]) == (2, "environment PSDIST_SEED")
    assert (config.mode, sources["mode"]) == ("ssp", str(file))
    assert (config.group, sources["group"]) == ("node", "default")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("mode", "async", "async"),
        ("staleness", " 7 ", 7),
        ("servers", "2", 2),
        ("servers", "auto", "auto"),
        ("record", "Yes", True),
        ("record", "0", False),
        ("chunk_bytes", "4MiB", 4 << 20),
        ("chunk_bytes", "64 KiB", 64 << 10),
        ("chunk_bytes", "8192", 8192),
        ("warn_s", "2", 2.0),
        ("warn_s", "0.5", 0.5),
        ("threads", "auto", "auto"),
        ("run_dir", "runs/first", "runs/first"),
        ("placement", "cyclic", "cyclic"),
        ("placement", "plan/plan.json", "plan/plan.json"),
        ("strict_placement", "true", True),
        ("racks", "/etc/slurm/topology.conf", "/etc/slurm/topology.conf"),
        ("optimizers", "mine.opt:Lion, other:Muon", ("mine.opt:Lion", "other:Muon")),
    ],
)
def test_text_becomes_a_value_of_the_type_of_its_setting(
    key: str, text: str, value: object
) -> None:
    by_environment = resolve(command_line={}, environment={environment_variable(key): text})
    by_command_line = resolve(command_line={key: text}, environment={})
    assert getattr(by_environment.config, key) == value
    assert by_environment.config == by_command_line.config


@given(optimizer_names)
def test_every_optimizer_that_the_setting_takes_is_understood_where_it_is_used(entry: str) -> None:
    config = resolve(command_line={"optimizers": entry}, environment={}).config
    known = traits(entry.partition("=")[0], extra=config.optimizers)
    assert known.kind == ("elementwise" if "=elementwise" in entry else "whole")
    assert known.lr_scales == entry.endswith("+lr_scales")


def test_values_that_are_typed_already_are_taken_from_the_command_line() -> None:
    config = resolve(command_line={"record": True, "seed": 9}, environment={}).config
    assert config.record is True
    assert config.seed == 9


def test_the_file_takes_typed_values_and_sizes_as_text(tmp_path: Path) -> None:
    file = write(
        tmp_path, 'chunk_bytes = "1MiB"\noptimizers = ["a.b:C"]\nwarn_s = 5\nrecord = true\n'
    )
    config = resolve(command_line={}, environment={}, file=file).config
    assert config.chunk_bytes == 1 << 20
    assert config.optimizers == ("a.b:C",)
    assert config.warn_s == 5.0
    assert config.record is True


def test_a_mistake_names_key_value_source_and_what_is_allowed() -> None:
    assert mistakes({"staleness": "-1"}) == (
        "staleness = -1 (command line): must be a whole number from 0 to 2147483647"
    )
    assert mistakes(environment={"PSDIST_MODE": "sspp"}) == (
        "mode = sspp (environment PSDIST_MODE): must be sync, ssp, async or auto"
    )


def test_all_mistakes_of_all_sources_are_reported_together(tmp_path: Path) -> None:
    file = write(tmp_path, 'stalenes = 3\nrecord = 1\nmode = "ssp"\n')
    text = mistakes({"credits": "0", "group": "racks"}, {"PSDIST_MOD": "ssp"}, file)
    lines = text.splitlines()
    assert lines[0] == "5 mistakes in the configuration:"
    assert lines[1:] == [
        f"  stalenes = 3 ({file}) is no setting; did you mean staleness?",
        f"  record = 1 ({file}): must be true or false",
        "  PSDIST_MOD = ssp (environment) is no setting of psdist; did you mean PSDIST_MODE?",
        "  group = racks (command line): must be node, socket, numa, rank, rack, a number of "
        "hosts, or auto",
        "  credits = 0 (command line): must be a whole number from 1 to 4096, or auto",
    ]


def test_a_wrong_value_that_a_stronger_source_overrides_is_still_a_mistake() -> None:
    text = mistakes({"mode": "sync"}, {"PSDIST_MODE": "x"})
    assert text.startswith("mode = x (environment PSDIST_MODE)")


def test_a_key_like_no_other_gets_the_list_of_settings() -> None:
    text = mistakes({"qqqq": "1"})
    assert text.startswith("qqqq = 1 (command line) is no setting; psdist settings lists them")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("mode", ""),
        ("mode", "SSP"),
        ("staleness", "3.0"),
        ("staleness", "three"),
        ("staleness", "9" * 5000),
        ("staleness", "\u0663"),  # a digit, but not of ours
        ("servers", "0"),
        ("servers", "many"),
        ("run_dir", ""),
        ("run_dir", "a\0b"),
        ("placement", ""),
        ("strict_placement", "perhaps"),
        ("racks", "a\0b"),
        ("bind", "on"),
        ("run_dir", "not-utf-8-\udc80"),
        ("seed", "-1"),
        ("seed", str(2**63)),
        ("record", "maybe"),
        ("checksum_every", "0"),
        ("chunk_bytes", "4Mbit"),
        ("chunk_bytes", "4096.5"),
        ("chunk_bytes", "4095"),
        ("chunk_bytes", "257MiB"),
        ("receive_buffers", "2"),
        ("warn_s", "0"),
        ("warn_s", "nan"),
        ("warn_s", "inf"),
        ("wait_timeout_s", "soon"),
        ("optimizers", "torch.optim.SGD"),
        ("optimizers", "a:b:c"),
        ("optimizers", "a:b."),
        ("optimizers", "a:b=flat"),
        ("optimizers", "a:b=whole+"),
        ("optimizers", "a:b+lr_scales"),
        ("optimizers", "os;system:x"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_that_says_what_is_allowed(
    key: str, text: str
) -> None:
    report = mistakes({key: text})
    assert report.startswith(f"{key} = ")
    assert report.endswith(f"must be {allowed_values(key)}")
    assert "\n" not in report
    assert len(report) < 300


@pytest.mark.parametrize(
    "line",
    [
        'staleness = "3"',
        "staleness = 3.0",
        "staleness = true",
        'record = "true"',
        "warn_s = true",
        'warn_s = "30"',
        "optimizers = 'a:B'",
        "optimizers = [1]",
        "run_dir = 3",
        "mode = 1979-05-27",
    ],
)
def test_a_value_of_the_wrong_type_in_the_file_is_refused(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, line + "\n")
    key = line.split(" ")[0]
    report = mistakes(file=file)
    assert report.startswith(f"{key} = ")
    assert f"({file})" in report
    assert report.endswith(f"must be {allowed_values(key)}")


def test_an_unknown_table_or_key_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    file = write(tmp_path, "[ssp]\nstaleness = 3\n[codec]\npsh = 'int8'\nqqqqqq = 1\n")
    assert mistakes(file=file).splitlines()[1:] == [
        f"  ssp.staleness = 3 ({file}) is no setting; did you mean staleness or "
        "consistency.staleness_to?",
        f"  codec.psh = int8 ({file}) is no setting; did you mean codec.push?",
        f"  codec.qqqqqq = 1 ({file}) is no setting; [codec] has push, pull, exact, feedback, "
        "encode_on, pull_copies, error_budget",
    ]


def test_invalid_toml_names_file_and_line(tmp_path: Path) -> None:
    file = write(tmp_path, 'mode = "ssp"\nstaleness 3\n')
    report = mistakes(file=file)
    assert report.startswith(f"{file} is not valid TOML: ")
    assert "line 2" in report


def test_a_file_that_is_not_text_names_the_line(tmp_path: Path) -> None:
    file = write(tmp_path, b'mode = "ssp"\n# \xff\n')
    assert mistakes(file=file) == f"{file}, line 2: this is not UTF-8 text"


def test_a_file_that_is_missing_or_a_directory_or_too_large_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert mistakes(file=missing) == (
        f"cannot read the configuration file {missing}: No such file or directory"
    )
    assert "Is a directory" in mistakes(file=tmp_path)
    assert "null byte" in mistakes(file=Path("a\0b"))
    large = write(tmp_path, b"#" * (MAX_FILE_BYTES + 1))
    assert "is larger than 1048576 bytes" in mistakes(file=large)


def test_hostile_nesting_in_the_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "optimizers = " + "[" * 100_000)
    assert "nested too deep" in mistakes(file=file)


def test_a_number_too_long_for_python_in_the_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "staleness = " + "9" * 5000)
    assert mistakes(file=file).startswith(f"{file} is not valid TOML: ")


def test_the_environment_names_the_file_where_the_command_line_does_not(tmp_path: Path) -> None:
    file = write(tmp_path, "seed = 5\n")
    other = tmp_path / "other.toml"
    other.write_text("seed = 6\n")
    environment = {"PSDIST_CONFIG": str(file)}
    assert resolve(command_line={}, environment=environment).config.seed == 5
    assert resolve(command_line={}, environment=environment, file=other).config.seed == 6


def test_internal_variables_and_variables_set_to_nothing_are_no_settings() -> None:
    environment = {
        "PSDIST_INTERNAL_LAUNCHED": "1",
        "PSDIST_REQUIRE_SLURM": "1",
        "PSDIST_TEST_RUN": "1f",
        "PSDIST_CLUSTER_DIR": "/var/tmp/cluster",
        "PSDIST_MODE": "",
        "PSDIST_WHATEVER": " ",
        "psdist_mode": "x",
        "PATH": "/bin",
    }
    assert resolve(command_line={}, environment=environment).config == RunConfig()


def test_the_process_environment_is_neither_read_nor_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PSDIST_MODE", "async")
    before = dict(os.environ)
    assert resolve(command_line={}, environment={}).config.mode == "sync"
    assert dict(os.environ) == before


def test_an_empty_list_on_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'optimizers = ["a:B"]\n')
    resolved = resolve(command_line={"optimizers": ""}, environment={}, file=file)
    assert resolved.config.optimizers == ()


def test_a_configuration_is_frozen_strict_and_closed() -> None:
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.mode = "ssp"
    with pytest.raises(ValidationError):
        RunConfig(staleness="3")
    with pytest.raises(ValidationError):
        RunConfig(unknown=1)


def test_every_setting_has_a_description_and_says_what_is_allowed() -> None:
    for key, field in RunConfig.model_fields.items():
        assert field.description
        assert allowed_values(key)


def test_what_was_chosen_is_described_with_its_source_and_defaults_apart() -> None:
    resolved = resolve(
        command_line={"seed": "4", "record": True}, environment={"PSDIST_MODE": "ssp"}
    )
    lines = describe(resolved)
    words = [line.split() for line in lines]
    assert words[0] == ["mode", "=", "ssp", "(environment", "PSDIST_MODE)"]
    assert words[1] == ["seed", "=", "4", "(command", "line)"]
    assert words[2] == ["report.record", "=", "true", "(command", "line)"]
    assert len(lines) == 3
    defaults = describe_defaults(resolved)
    assert defaults.startswith("staleness = 3, servers = auto, group = node, ")
    told = re.findall(r"(?:^|, )([\w.]+) = ", defaults)
    assert sorted([*told, *(each[0] for each in words)]) == sorted(NAMES.values())


def test_the_description_stays_one_line_per_setting_for_odd_paths() -> None:
    lines = describe(resolve(command_line={"run_dir": "a\nb"}, environment={}))
    assert all("\n" not in line for line in lines)


UNSET = {
    *("run_dir", "racks", "network", "checkpoint_every", "global_batch"),
    *("codec_push", "codec_pull", "error_budget", "consistency_schedule", "staleness_to"),
    *("loss_patience", "rollback"),
}
"""What TOML has no value for."""


@given(configs)
def test_the_saved_file_resolves_to_the_same_configuration(config: RunConfig) -> None:
    tables = tomllib.loads(to_toml(config))
    for key, name in NAMES.items():
        table, _, last = name.rpartition(".")
        within = tables[table] if table else tables
        expected = getattr(config, key)
        if last in within:
            assert within[last] == (list(expected) if isinstance(expected, tuple) else expected)
        else:
            assert key in UNSET


def test_the_saved_file_is_read_back_by_resolve(tmp_path: Path) -> None:
    config = RunConfig(mode="ssp", run_dir='a "b"\n\x7f\\c', optimizers=("a.b:C",), warn_s=1e-7)
    file = write(tmp_path, to_toml(config))
    assert resolve(command_line={}, environment={}, file=file).config == config


@given(configs)
def test_a_configuration_travels_as_bytes(config: RunConfig) -> None:
    assert decode(encode(config)) == config


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"mode": "x"}', b'{"new_key": 1}', b"[]", b" " * (2 << 20), b"\xff"]
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def report_of(command_line: dict[str, object], file: Path | None = None) -> str | None:
    try:
        resolve(command_line=command_line, environment={}, file=file)
    except ConfigError as error:
        return str(error)
    return None


@given(st.text(max_size=60))
def test_no_text_for_any_setting_raises_anything_but_a_configuration_error(text: str) -> None:
    for key in KEYS:
        report = report_of({key: text})
        if report is not None:
            assert report.startswith(f"{key} = ")
            assert "\n" not in report


@given(st.binary(max_size=200))
def test_no_file_raises_anything_but_a_configuration_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = write(tmp_path_factory.getbasetemp(), data)
    report = report_of({}, file)
    if report is not None:
        assert str(file) in report


def test_sizes_are_whole_bytes_and_what_is_none_comes_back_as_it_is() -> None:
    assert parse_size("1GiB") == 1 << 30
    assert parse_size("12b") == 12
    assert parse_size("1GB") == 10**9
    assert parse_size("0.5") == "0.5"
    assert parse_size("1Gb/s") == "1Gb/s"
    assert parse_size(5) == 5


def test_a_pipeline_goes_with_ssp_and_async_alone() -> None:
    def of(**given: str) -> RunConfig:
        return resolve(command_line={"pipeline": "1", **given}, environment={}).config

    assert of(mode="async").pipeline == of(mode="ssp", staleness="1").pipeline == 1
    assert of().pipeline == 1  # the script may choose the mode
    with pytest.raises(ConfigError, match="mode = sync"):
        of(mode="sync")
    with pytest.raises(ConfigError, match="staleness = 0"):
        of(mode="ssp", staleness="0")
    with pytest.raises(ConfigError, match=r"pipeline = 2 .*0 or 1"):
        of(pipeline="2")


@pytest.mark.parametrize("variable", ["PSDIST_ROOT", "PSDIST_HOME", "PSDIST_DIR"])
def test_a_module_file_may_say_where_psdist_is_installed(variable: str) -> None:
    resolved = resolve(command_line={}, environment={variable: "/apps/psdist/0.1.0"})
    assert set(resolved.sources.values()) == {"default"}
