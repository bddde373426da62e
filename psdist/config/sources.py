"""From all sources to one configuration: command line, environment, TOML file, script, defaults.

Owns the order in which sources win (command line > environment ``PSDIST_<KEY>`` > TOML file >
script > default) and the report of mistakes: those of every source, together, in one ConfigError.
What a setting may be is psdist.config.settings's. It never touches torch, MPI or the process's own
environment: the mapping is passed in, and nothing is written.

    resolved = resolve(
        command_line={"mode": "ssp"}, environment=os.environ, file=Path("run.toml")
    )
    resolved.config.staleness, resolved.sources["mode"]      # 3, "command line"
    passed = script_settings({"staleness": 5})               # of psdist.init(staleness=5)
    with_script(resolved, passed).config.staleness           # 5
"""

from __future__ import annotations

import difflib
import re
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, get_args

from pydantic import ValidationError

from psdist.config.removed import why_removed
from psdist.config.settings import KEYS, RunConfig, allowed_values, contradiction
from psdist.errors import ConfigError, UsageError

CommandLineValue: TypeAlias = "str | int | float | bool | tuple[str, ...] | None"

MAX_FILE_BYTES: Final = 1 << 20

ENVIRONMENT_PREFIX: Final = "PSDIST_"
CONFIG_VARIABLE: Final = "PSDIST_CONFIG"
# PSDIST_* variables that are not settings. All others are, and an unknown one is a mistake: a
# misspelt PSDIST_STALENES would otherwise train with the default and say nothing.
NOT_SETTINGS: Final = (
    CONFIG_VARIABLE,  # the TOML file, where --config does not name one
    "PSDIST_CLUSTER_DIR",  # tests: where the Slurm cluster keeps its state
    "PSDIST_MPICH_ENV",  # tests: a virtual environment with MPICH's wheel
)
NOT_SETTINGS_PREFIXES: Final = (
    "PSDIST_INTERNAL_",  # from one psdist process to the next
    "PSDIST_REQUIRE_",  # tests: a missing prerequisite is a failure, not a skip
    "PSDIST_TEST_",  # tests: marks of a run's processes
)

SCRIPT_KEYS: Final = (*("mode", "staleness", "pipeline", "on_nonfinite", "seed", "checksum_every"),)
"""What psdist.init takes: no rank needs these before scripts call it. All others decide what ranks
are and where, or what servers may construct, and are known before a script runs."""
SCRIPT: Final = "psdist.init"
"""Their source."""

_LISTS: Final = ("optimizers", "codec_exact")
"""Settings of several texts, with commas between; nothing is none of them."""

# More digits than these are out of every range; int() would also refuse more than 4300 of them.
_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}")
_BOOLEANS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration, and for every key where its value came from."""

    config: RunConfig
    sources: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Given:
    value: object
    seen: object  # as the user wrote it
    source: str


def environment_variable(key: str) -> str:
    """The environment variable that sets `key`: ``PSDIST_MODE``."""
    return ENVIRONMENT_PREFIX + key.upper()


def resolve(
    *,
    command_line: Mapping[str, CommandLineValue],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> Resolved:
    """Make one configuration out of all sources, or say everything that is wrong with them.

    `command_line` maps keys to text or values; None is an option that was not given. Without
    `file`, PSDIST_CONFIG names the TOML file. An environment variable set to nothing is unset.

    Raises ConfigError naming for every mistake its key, its source, the value and what is allowed.
    """
    mistakes: list[str] = []
    given: dict[str, _Given] = {}  # the weakest source first, overwritten by the stronger ones
    # Also a value that a stronger source overrides must be right: otherwise it waits, wrong,
    # for the day the option is left out.
    layers = [
        _from_file(file or _file_of_environment(environment), mistakes),
        _from_environment(environment, mistakes),
        _from_command_line(command_line, mistakes),
    ]
    for layer in layers:
        mistakes.extend(_validate(layer))
        given.update(layer)
    if mistakes:
        raise ConfigError(_as_one_text(mistakes))
    config = RunConfig.model_validate({key: item.value for key, item in given.items()})
    if config.resume and config.run_dir is None:
        raise ConfigError(
            f"resume = true ({given['resume'].source}) without run_dir: say which run goes on "
            "(--run-dir RUN_DIR)"
        )
    if "schedule" in given and (both := [key for key in ("mode", "staleness") if key in given]):
        raise ConfigError(
            f"schedule ({given['schedule'].source}) and {both[0]} ({given[both[0]].source}): a "
            f"schedule says the mode of every round; leave out {' and '.join(both)}"
        )
    sources = {key: given[key].source if key in given else "default" for key in KEYS}
    is_decided = "mode" in given or "schedule" in given
    if is_decided and (wrong := contradiction(config)):  # else the script may choose another
        raise ConfigError(wrong)
    return Resolved(config=config, sources=MappingProxyType(sources))


def script_settings(passed: Mapping[str, object]) -> dict[str, Any]:
    """What a script passes to psdist.init; None stands for a setting that it leaves out.

    Raises UsageError for a setting that must be known before scripts run, ConfigError for a value
    that is not allowed and for what is no setting.
    """
    given = {
        key: _Given(value=value, seen=value, source=SCRIPT)
        for key, value in passed.items()
        if value is not None
    }
    for key, item in given.items():
        if key in KEYS and key not in SCRIPT_KEYS:
            value = _short(item.seen)
            raise UsageError(
                f"psdist.init({key}={_short_repr.repr(item.seen)}): {key} is decided before "
                f"scripts run, so it is set on the command line (--set {key}={value}), by "
                f"{environment_variable(key)}={value} or in the TOML file; psdist.init takes "
                f"{', '.join(SCRIPT_KEYS)}"
            )
    mistakes = [_unknown(key, given[key].seen, SCRIPT) for key in given if key not in KEYS]
    mistakes += _validate({key: item for key, item in given.items() if key in KEYS})
    if mistakes:
        raise ConfigError(_as_one_text(mistakes))
    return {key: item.value for key, item in given.items()}


def with_script(resolved: Resolved, passed: Mapping[str, Any]) -> Resolved:
    """``resolved`` with what a script has passed (:func:`script_settings`), where no stronger
    source has decided."""
    chosen = {key: value for key, value in passed.items() if resolved.sources[key] == "default"}
    if resolved.config.schedule is not None:
        for key in ("mode", "staleness"):  # the schedule is a stronger source's
            chosen.pop(key, None)
    config = RunConfig.model_validate({**resolved.config.model_dump(), **chosen})
    sources = {**resolved.sources, **dict.fromkeys(chosen, SCRIPT)}
    return Resolved(config=config, sources=MappingProxyType(sources))


def describe_script(resolved: Resolved) -> list[str]:
    """A line for each setting that the script has decided: ``mode = ssp  (psdist.init)``."""
    values = resolved.config.model_dump()
    return [
        f"{key} = {_shown(values[key])}  ({SCRIPT})"
        for key in KEYS
        if resolved.sources[key] == SCRIPT
    ]


def describe(resolved: Resolved) -> list[str]:
    """A line for each setting that was chosen: ``mode = ssp  (command line)``."""
    values = resolved.config.model_dump()
    chosen = [key for key in KEYS if resolved.sources[key] != "default"]
    key_width = max((len(key) for key in chosen), default=0)
    value_width = min(max((len(_shown(values[key])) for key in chosen), default=0), 40)
    return [
        f"{key:<{key_width}} = {_shown(values[key]):<{value_width}}  ({resolved.sources[key]})"
        for key in chosen
    ]


def describe_defaults(resolved: Resolved) -> str:
    """All other settings, in one line: ``mode = sync, staleness = 3, ...``."""
    values = resolved.config.model_dump()
    return ", ".join(
        f"{key} = {_shown(values[key])}" for key in KEYS if resolved.sources[key] == "default"
    )


def _file_of_environment(environment: Mapping[str, str]) -> Path | None:
    name = environment.get(CONFIG_VARIABLE, "")
    return Path(name) if name else None


def _from_file(file: Path | None, mistakes: list[str]) -> dict[str, _Given]:
    if file is None:
        return {}
    source = str(file)
    try:
        table = _read_toml(file)
    except ConfigError as error:
        mistakes.append(str(error))
        return {}
    given: dict[str, _Given] = {}
    for key, value in table.items():
        if key in KEYS:
            given[key] = _Given(value=value, seen=value, source=source)
        elif isinstance(value, dict):
            mistakes.append(
                f"[{_short(key)}] ({source}) is a table; settings stand at the top of the file, "
                "without tables"
            )
        else:
            mistakes.append(_unknown(key, value, source))
    return given


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error.strerror}") from error
    except ValueError as error:  # a null byte in the name
        raise ConfigError(f"cannot read the configuration file {str(file)!r}: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"the configuration file {file} is larger than {MAX_FILE_BYTES} bytes: is it TOML?"
        )
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}, line {line}: this is not UTF-8 text") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: tables or arrays are nested too deep") from error
    except ValueError as error:  # TOMLDecodeError, whose text ends "(at line 3, column 7)"
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _from_environment(environment: Mapping[str, str], mistakes: list[str]) -> dict[str, _Given]:
    keys = {environment_variable(key): key for key in KEYS}
    given: dict[str, _Given] = {}
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in NOT_SETTINGS:
            continue
        if name.startswith(NOT_SETTINGS_PREFIXES) or not environment[name].strip():
            continue
        text = environment[name]
        if name in keys:
            key = keys[name]
            given[key] = _Given(
                value=_from_text(key, text), seen=text, source=f"environment {name}"
            )
        else:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
            wrong = why_removed(key) or (
                f"is no setting of psdist{_did_you_mean(name, tuple(keys))}"
            )
            mistakes.append(f"{_short(name)} = {_short(text)} (environment) {wrong}")
    return given


def _from_command_line(
    command_line: Mapping[str, CommandLineValue], mistakes: list[str]
) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for key, value in command_line.items():
        if value is None:
            continue
        if key not in KEYS:
            mistakes.append(_unknown(key, value, "command line"))
            continue
        parsed = _from_text(key, value) if isinstance(value, str) else value
        given[key] = _Given(value=parsed, seen=value, source="command line")
    return given


def _from_text(key: str, text: str) -> object:
    """Text as a value of the key's type; text that does not fit is left for the type check."""
    annotation = RunConfig.model_fields[key].annotation
    members = get_args(annotation) or (annotation,)
    kinds = {get_args(member)[0] if get_args(member) else member for member in members}
    text = text.strip()
    if bool in kinds:
        return _BOOLEANS.get(text.lower(), text)
    if key in _LISTS:
        return tuple(part.strip() for part in text.split(",")) if text else ()
    if int in kinds and _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if float in kinds:
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _validate(given: Mapping[str, _Given]) -> list[str]:
    try:
        RunConfig.model_validate({key: item.value for key, item in given.items()})
    except ValidationError as error:
        # A union reports one error per member: one line per key is enough.
        wrong = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
        return [
            f"{key} = {_short(given[key].seen)} ({given[key].source}): "
            f"must be {allowed_values(key)}"
            for key in wrong
        ]
    return []


def _unknown(key: str, value: object, source: str) -> str:
    wrong = why_removed(key) or f"is no setting{_did_you_mean(key, KEYS)}"
    return f"{_short(key)} = {_short(value)} ({source}) {wrong}"


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name[:200], known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; the settings are {', '.join(known)}"


def _as_one_text(mistakes: list[str]) -> str:
    if len(mistakes) == 1:
        return mistakes[0]
    return "\n  ".join([f"{len(mistakes)} mistakes in the configuration:", *mistakes])


_short_repr: Final = reprlib.Repr()
_short_repr.maxstring = _short_repr.maxother = _short_repr.maxlong = 80


def _short(value: object) -> str:
    """A value as it was written, on one line and never long."""
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 80:
        return value
    return _short_repr.repr(value)


def _shown(value: object) -> str:
    if value is None:
        return "(unset)"
    if isinstance(value, bool):
        return str(value).lower()
    text = ", ".join(value) or "(none)" if isinstance(value, tuple) else str(value)
    return text if text.isprintable() else repr(text)
