"""One configuration from all sources: command line, environment, TOML file, script, profile.

Owns the precedence of the sources (command line > environment ``PSDIST_<TABLE>_<KEY>`` > TOML file
> script > profile > default) and the report of mistakes: those of every source together, in one
ConfigError. psdist.config.settings says which values a setting takes. This module never touches
torch, MPI or the environment of the process: callers pass the mapping in.

    resolved = resolve(
        command_line={"codec.push": "int8"}, environment=os.environ, file=Path("run.toml")
    )
    resolved.config.codec_push, resolved.sources["codec_push"]      # "int8", "command line"
    passed = script_settings({"staleness": 5})                      # of psdist.init(staleness=5)
    with_script(resolved, passed).config.staleness                  # 5

Longer than other modules: each source has its own form of names, values and mistakes.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, get_args

from pydantic import ValidationError

from psdist.config.old_names import BOOLEANS, MERGED, SHORT, why_removed
from psdist.config.settings import (
    FIELDS,
    KEYS,
    NAMES,
    TABLES,
    RunConfig,
    allowed_values,
    contradiction,
)
from psdist.errors import ConfigError, UsageError


class Profile(NamedTuple):
    purpose: str
    settings: Mapping[str, object]
    """Name of a setting -> its value."""


PROFILES: Final = {
    "slow-network": Profile(
        "the network decides how long a step takes",
        {"codec.push": "int8", "codec.pull": "fp16"},
    ),
    "unreliable": Profile(
        "processes fail during the run",
        {
            "servers": 2,
            "checkpoint.every": "10m",
            "failures.replication": "buddy",
            "failures.max_deaths": 1,
        },
    ),
    "uneven": Profile(
        "now one group is slow, now another one",
        {"mode": "auto", "staleness": 4},
    ),
    "study": Profile(
        "the run is examined afterwards",
        {
            "transfer.checksum": "sampled",
            "report.record": True,
            "report.trace": True,
            "report.progress": "lines",
        },
    ),
}


CommandLineValue: TypeAlias = "str | int | float | bool | tuple[str, ...] | None"

MAX_FILE_BYTES: Final = 1 << 20

ENVIRONMENT_PREFIX: Final = "PSDIST_"
CONFIG_VARIABLE: Final = "PSDIST_CONFIG"
PROFILE_VARIABLE: Final = "PSDIST_PROFILE"
# PSDIST_* variables that are not settings. Every other one must be a setting: with a misspelt
# PSDIST_STALENES a run would train with the default and give no warning.
NOT_SETTINGS: Final = (
    CONFIG_VARIABLE,  # the TOML file, unless --config names one
    PROFILE_VARIABLE,  # the profile, unless --profile names one
    *("PSDIST_ROOT", "PSDIST_HOME", "PSDIST_DIR"),  # a module file's: where psdist is installed
    "PSDIST_CLUSTER_DIR",  # tests: where the Slurm cluster keeps its state
    "PSDIST_MPICH_ENV",  # tests: a virtual environment with MPICH's wheel
)
NOT_SETTINGS_PREFIXES: Final = (
    "PSDIST_INTERNAL_",  # from one psdist process to the next
    "PSDIST_REQUIRE_",  # tests: a missing prerequisite is a failure, not a skip
    "PSDIST_TEST_",  # tests: marks of a run's processes
)

SCRIPT_KEYS: Final = (*("mode", "staleness", "pipeline", "on_nonfinite", "seed", "checksum_every"),)
"""Settings that psdist.init takes: no rank needs them before scripts call it. All others decide the
roles and places of ranks, or the classes that servers may construct, before a script runs."""
SCRIPT: Final = "psdist.init"
"""Their source."""
PROFILE: Final = "profile "
"""The source of a profile's settings begins with this."""

_LISTS: Final = ("optimizers", "codec_exact")
"""Settings of several texts, separated by commas; the empty text is the empty list."""
_CLOSE: Final = 0.6
_ABOUT_AS_CLOSE: Final = 0.1

# A number with more digits is out of every range; int() refuses more than 4300 digits.
_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A configuration, and the source of each of its fields."""

    config: RunConfig
    sources: Mapping[str, str]
    flat: Mapping[str, str] = field(default_factory=dict)
    """Flat name that a source used -> the name to use instead."""


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A setting as a source gives it."""

    name: str
    """``codec.push``, a flat name such as ``push_codec``, or an option such as ``--push-codec``."""
    value: object
    source: str
    is_text: bool = False
    """True if the value is text to be parsed."""

    def __str__(self) -> str:
        """Name, value and source, for an error."""
        return f"{_short(_plain(self.name))} = {_short(self.value)} ({self.source})"

    @property
    def key(self) -> str | None:
        """The field, or the old name of a merged setting; None for an unknown setting."""
        name = _plain(self.name)
        if name in FIELDS:
            return FIELDS[name]
        table, _, last = name.rpartition(".")
        if table and last in MERGED and MERGED[last].instead.startswith(f"{table}."):
            return last  # it had its table before it was merged
        return name if name in KEYS or name in MERGED else None

    @property
    def is_flat(self) -> bool:
        """True for a flat name that is neither an option nor a parameter of psdist.init."""
        is_word = self.name.startswith("-") or self.source == SCRIPT
        return not is_word and self.key != SHORT and _plain(self.name) not in FIELDS


@dataclass(frozen=True, kw_only=True)
class _Given:
    value: object
    written: _Written


def _plain(name: str) -> str:
    """Return the name of an option without dashes."""
    return name.lstrip("-").replace("-", "_")


def environment_variable(name: str) -> str:
    """Return the environment variable of a setting: ``PSDIST_CODEC_PUSH`` for ``codec.push``."""
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


def resolve(
    *,
    command_line: Mapping[str, CommandLineValue],
    environment: Mapping[str, str],
    file: Path | None = None,
    profile: str | None = None,
) -> Resolved:
    """Make one configuration out of all sources, or report everything that is wrong with them.

    `command_line` maps names (``codec.push``, flat names) and options (``--push-codec``) to text or
    values; None is an option that was not given. PSDIST_CONFIG names the TOML file unless `file`
    does, PSDIST_PROFILE the profile unless `profile` does. An empty environment variable is unset.

    Raises ConfigError, which names for every mistake the setting, its source, the value and the
    allowed values.
    """
    mistakes: list[str] = []
    given: dict[str, _Given] = {}  # the weakest source first, overwritten by the stronger ones
    flat: dict[str, str] = {}
    name = profile or environment.get(PROFILE_VARIABLE, "")
    # A stronger source does not hide a wrong value: it would fail on the day when the option is
    # left out.
    for layer in (
        _from_profile(name, mistakes),
        _from_file(file or _file_of_environment(environment), mistakes),
        _from_environment(environment, mistakes),
        [
            _Written(name=key, value=value, source="command line", is_text=isinstance(value, str))
            for key, value in command_line.items()
            if value is not None
        ],
    ):
        _add(layer, given, flat, mistakes)
    if mistakes:
        raise ConfigError(_as_one_text(mistakes))
    config = RunConfig.model_validate({key: item.value for key, item in given.items()})
    if config.schedule is not None:  # it replaces the mode of a profile
        profiled = [key for key in ("mode", "staleness") if _is_profiled(key, given)]
        config = config.model_copy(update={key: _value_of(key) for key in profiled})
        for key in profiled:
            del given[key]
    sources = {key: given[key].written.source if key in given else "default" for key in KEYS}
    if config.resume and config.run_dir is None:
        raise ConfigError(
            f"resume = true ({sources['resume']}) without run_dir: name the run to resume "
            "(--run-dir RUN_DIR)"
        )
    both = [key for key in ("mode", "staleness") if key in given]
    if config.schedule is not None and both:
        raise ConfigError(
            f"consistency.schedule ({sources['consistency_schedule']}) and {both[0]} "
            f"({sources[both[0]]}): a schedule says the mode of every round; leave out "
            f"{' and '.join(both)}"
        )
    is_decided = "mode" in given or config.schedule is not None
    if is_decided and (wrong := contradiction(config)):  # else the script may choose another
        raise ConfigError(wrong + (f" (--profile {name} is in use)" if name else ""))
    return Resolved(config=config, sources=MappingProxyType(sources), flat=flat)


def script_settings(passed: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields that a script passes to psdist.init, from settings or tables of them. A
    value of None leaves a setting out.

    Raises UsageError for a setting that must be known before scripts run, ConfigError for a wrong
    value and for an unknown setting.
    """
    written = [
        each
        for each in _of_tables({key: value for key, value in passed.items() if value is not None})
        if each.value is not None
    ]
    for each in written:
        if each.key is not None and each.key not in SCRIPT_KEYS:
            name = MERGED[each.key].instead if each.key in MERGED else NAMES[each.key]
            is_set = f"{each.name}={_short(each.value)}"
            raise UsageError(
                f"psdist.init({each.name}={_short_repr.repr(each.value)}): {name} is decided "
                f"before scripts run, so it is set on the command line (--set {is_set}), by "
                f"{environment_variable(each.name)}={_short(each.value)} or in the TOML file; "
                f"psdist.init takes {', '.join(NAMES[key] for key in SCRIPT_KEYS)}"
            )
    mistakes: list[str] = []
    given: dict[str, _Given] = {}
    _add(written, given, {}, mistakes)
    if mistakes:
        raise ConfigError(_as_one_text(mistakes))
    return {key: item.value for key, item in given.items()}


def with_script(resolved: Resolved, passed: Mapping[str, Any]) -> Resolved:
    """Return ``resolved`` with the settings of a script (:func:`script_settings`), except those
    that a stronger source gives."""
    chosen = {
        key: value
        for key, value in passed.items()
        if resolved.sources[key] == "default" or resolved.sources[key].startswith(PROFILE)
    }
    if resolved.config.schedule is not None:
        for key in ("mode", "staleness"):  # the schedule is a stronger source's
            chosen.pop(key, None)
    config = RunConfig.model_validate({**resolved.config.model_dump(), **chosen})
    sources = {**resolved.sources, **dict.fromkeys(chosen, SCRIPT)}
    return replace(resolved, config=config, sources=MappingProxyType(sources))


def deprecation(resolved: Resolved) -> list[str]:
    """Return one line that names the flat names in use and their successors; none without any."""
    told = ", ".join(f"{new} for {old}" for old, new in resolved.flat.items())
    return [f"warning: flat names of settings are deprecated; write {told}"] if told else []


def describe_script(resolved: Resolved) -> list[str]:
    """Return a line for each setting that the script gives: ``mode = ssp  (psdist.init)``."""
    return [
        f"{name} = {value}  ({SCRIPT})"
        for name, value, source in _rows(resolved)
        if source == SCRIPT
    ]


def describe(resolved: Resolved, names: Collection[str] = ()) -> list[str]:
    """Return a line for each of ``names``, or without them for each setting that a source gives:
    ``mode = ssp  (command line)``."""
    rows = [row for row in _rows(resolved) if (row[0] in names if names else row[2] != "default")]
    name_width = max((len(name) for name, _, _ in rows), default=0)
    value_width = min(max((len(value) for _, value, _ in rows), default=0), 40)
    return [
        f"{name:<{name_width}} = {value:<{value_width}}  ({source})" for name, value, source in rows
    ]


def describe_defaults(resolved: Resolved) -> str:
    """Return all other settings in one line: ``mode = sync, staleness = 3, ...``."""
    rows = _rows(resolved)
    return ", ".join(f"{name} = {value}" for name, value, source in rows if source == "default")


def _rows(resolved: Resolved) -> list[tuple[str, str, str]]:
    """Return name, value and source of each setting."""
    return [
        (NAMES[key], _shown(getattr(resolved.config, key)), resolved.sources[key]) for key in KEYS
    ]


def _file_of_environment(environment: Mapping[str, str]) -> Path | None:
    name = environment.get(CONFIG_VARIABLE, "")
    return Path(name) if name else None


def _from_profile(name: str, mistakes: list[str]) -> list[_Written]:
    if name and name not in PROFILES:
        mistakes.append(f"profile = {_short(name)}: must be {', '.join(PROFILES)}")
        return []
    settings = PROFILES[name].settings if name else {}
    source = f"{PROFILE}{name}"
    return [_Written(name=key, value=value, source=source) for key, value in settings.items()]


def _from_file(file: Path | None, mistakes: list[str]) -> list[_Written]:
    if file is None:
        return []
    try:
        return list(_of_tables(_read_toml(file), str(file)))
    except ConfigError as error:
        mistakes.append(str(error))
        return []


def _of_tables(settings: Mapping[str, object], source: str = SCRIPT) -> Iterator[_Written]:
    """Yield the settings of a mapping in which a table is a mapping, too."""
    for key, value in settings.items():
        if isinstance(value, dict):
            for name, each in value.items():
                yield _Written(name=f"{key}.{name}", value=each, source=source)
        else:
            yield _Written(name=key, value=value, source=source)


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


def _from_environment(environment: Mapping[str, str], mistakes: list[str]) -> Iterator[_Written]:
    # The new names last: a table and its key may read as the flat name of the same setting.
    tabled = [f"{each.instead.partition('.')[0]}.{old}" for old, each in MERGED.items()]
    names = {environment_variable(name): name for name in (*KEYS, *MERGED, *tabled, *FIELDS)}
    for variable in sorted(environment):
        text = environment[variable]
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in NOT_SETTINGS:
            continue
        if variable.startswith(NOT_SETTINGS_PREFIXES) or not text.strip():
            continue
        if variable in names:
            source = f"environment {variable}"
            yield _Written(name=names[variable], value=text, source=source, is_text=True)
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        wrong = why_removed(key) or (
            f"is no setting of psdist{did_you_mean(key, environment_variable)}"
        )
        mistakes.append(f"{_short(variable)} = {_short(text)} (environment) {wrong}")


def _add(
    layer: Iterable[_Written],
    given: dict[str, _Given],
    flat: dict[str, str],
    mistakes: list[str],
) -> None:
    """Add the settings of one source to the settings of weaker sources."""
    new: dict[str, _Given] = {}
    order = {key: number for number, key in enumerate(MERGED)}
    for each in sorted(layer, key=lambda each: order.get(each.key or "", len(order))):
        key = each.key
        if key is None:
            mistakes.append(_unknown(each))
            continue
        value = _from_text(key, str(each.value)) if each.is_text else each.value
        updates = {key: value}
        if key in MERGED:
            now = {name: _value_of(name, new, given) for name in KEYS}
            try:
                updates = MERGED[key].updates(value, now)
            except ValueError:
                mistakes.append(f"{each}: must be {allowed_values(key)}")
                continue
        for changed, value in updates.items():
            other = new.get(changed)
            if other is not None and other.value != value and _excludes(each, other.written):
                mistakes.append(
                    f"{each} and {other.written}: two values of one setting; leave out one"
                )
            new[changed] = _Given(value=value, written=each)
        if each.is_flat:
            form = environment_variable if each.source.startswith("environment") else str
            changed, value = next(iter(updates.items()))
            is_renamed = key not in MERGED or value == each.value
            new_value, old_value = ("", "") if is_renamed else (f"={value}", f"={each.value}")
            flat[form(each.name) + old_value] = form(NAMES[changed]) + new_value
    mistakes.extend(_validate(new))
    given.update(new)


def _is_profiled(key: str, given: Mapping[str, _Given]) -> bool:
    return key in given and given[key].written.source.startswith(PROFILE)


def _value_of(key: str, *layers: Mapping[str, _Given]) -> object:
    """Return the value in the first of ``layers`` that has one, or the default."""
    found = next((layer[key].value for layer in layers if key in layer), None)
    return RunConfig.model_fields[key].default if found is None else found


def _excludes(one: _Written, other: _Written) -> bool:
    """Return True if two different values contradict each other. ``codec`` is the value of a
    direction that is not given; old names may each be a part of one setting."""
    is_part = one.key in MERGED and other.key in MERGED and one.key != other.key
    return other.key != SHORT and not is_part


def _from_text(key: str, text: str) -> object:
    """Text as a value of the key's type; text that does not fit is left for the type check."""
    if key in MERGED:
        return text.strip()
    annotation = RunConfig.model_fields[key].annotation
    members = get_args(annotation) or (annotation,)
    kinds = {get_args(member)[0] if get_args(member) else member for member in members}
    text = text.strip()
    if bool in kinds:
        return BOOLEANS.get(text.lower(), text)
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
        written = [given[key].written for key in wrong]
        return [f"{each}: must be {allowed_values(each.key or '')}" for each in written]
    return []


def _unknown(written: _Written) -> str:
    key = written.name.lstrip("-")
    wrong = why_removed(key) or f"is no setting{did_you_mean(key)}"
    return f"{written} {wrong}"


def did_you_mean(name: str, form: Callable[[str], str] = str) -> str:
    """Return the nearest settings, as ``form`` writes them, or where to find their list."""
    known = {SHORT: SHORT} | {old: merged.instead for old, merged in MERGED.items() if old != SHORT}
    for key, full in reversed(NAMES.items()):  # of equal last words the first setting's counts
        known |= {full.rpartition(".")[2]: full, key: full, full: full}
    close = {
        each: difflib.SequenceMatcher(None, name[:200], each).ratio()
        for each in difflib.get_close_matches(name[:200], known, n=5, cutoff=_CLOSE)
    }
    nearest = [each for each in close if close[each] > max(close.values()) - _ABOUT_AS_CLOSE]
    if nearest and name not in TABLES:
        names = dict.fromkeys(form(known[each]) for each in nearest)
        return f"; did you mean {' or '.join(names)}?"
    table = name.partition(".")[0]
    if table in TABLES:
        keys = [full.removeprefix(f"{table}.") for full in FIELDS if full.startswith(f"{table}.")]
        return f"; [{table}] has {', '.join(keys)}"
    return "; psdist settings lists them"


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
