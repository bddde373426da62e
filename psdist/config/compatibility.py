"""Compare the settings of a run with the table of features: which need and exclude each other.

    refusal(config)                                       # "" if all of them work together
    refusal(config, script={"float64 parameters": "parameters of float64"})
    has(config, "local steps")

The table is psdist.features. psdist.config.settings checks the value of each setting alone. This
module never touches torch, MPI or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from psdist.config.codec_rounds import codecs_that_may_come, has_codecs, is_auto, why_on_host
from psdist.config.codec_specs import CodecSpec
from psdist.config.modes import (
    has_range,
    is_changing,
    is_mixed,
    mode_by,
    modes_that_may_come,
    parts_of,
    row_staleness,
    schedule_of,
)
from psdist.config.outer import has_rounds
from psdist.features import FEATURES, Feature

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_NAMED: Final = MappingProxyType({each.name: each for each in FEATURES})
_MODE_KEYS: Final = MappingProxyType({"schedule": "schedule", "script": "set_mode"})


def _may_push(config: RunConfig, is_so: Callable[[CodecSpec], object]) -> bool:
    return any(is_so(each.push) for each in codecs_that_may_come(config))


def _may_pull(config: RunConfig, is_so: Callable[[CodecSpec], object]) -> bool:
    return any(is_so(each.pull) for each in codecs_that_may_come(config))


def _has_other_modes(config: RunConfig) -> bool:
    return modes_that_may_come(config) != ("sync",)


def _mixes_modes(config: RunConfig) -> bool:
    """True if sync is one of several modes, except if the schedule leaves its pulls uncoded."""
    parts = parts_of(config)
    is_plain = all(
        part.codecs is not None and (part.codecs.pull.is_none or part.mode.mode != "sync")
        for part in parts
    )
    return is_mixed(config) and not is_plain


_SPECIAL: Final[Mapping[str, Callable[[RunConfig], bool]]] = MappingProxyType(
    {
        "sync rounds": lambda config: "sync" in modes_that_may_come(config),
        "ssp or async": _has_other_modes,
        "bound of 0": lambda config: any(
            each.mode == "ssp" and not each.staleness for each in schedule_of(config)
        ),
        "changing mode": is_changing,
        "different versions": lambda config: (
            _has_other_modes(config) and config.pull_copies == "off"
        ),
        "local steps": has_rounds,
        "outer optimizer": lambda config: config.outer != "average",
        "codecs": has_codecs,
        "coded pushes": lambda config: _may_push(config, lambda codec: not codec.is_none),
        "coded pulls": lambda config: _may_pull(config, lambda codec: not codec.is_none),
        "relative pulls": lambda config: _may_pull(
            config, lambda codec: not (codec.is_none or codec.is_cast)
        ),
        "mixed modes": _mixes_modes,
        "checkpoints": lambda config: None not in (config.checkpoint_every, config.run_dir),
        "chosen codecs": is_auto,
        "codecs of a schedule": lambda config: any(part.codecs for part in parts_of(config)),
        "bursts": lambda config: _may_push(config, lambda codec: codec.burst),
        "skipped pushes": lambda config: _may_push(config, lambda codec: codec.skip),
        "codec for devices": lambda config: not why_on_host(config),
        "several servers": lambda config: config.servers != 1,
        "servers on a GPU": lambda config: config.server_device != "cpu",
        "mode of tables": lambda config: config.tables_mode != "same",
        "kept rows": lambda config: row_staleness(config) > 0,
        "stale tables": lambda config: (
            config.tables_mode != "same" or "sync" not in modes_that_may_come(config)
        ),
        "spares for workers": lambda config: config.spares > 0 and take_workers_places(config),
    }
)
"""Features that several settings decide together, or that also other values turn on."""


def off_of(feature: Feature, setting: str) -> str:
    """Return how to do without the feature, which ``setting`` turns on (``"seed = 1"``)."""
    return feature.off or f"leave {setting.partition(' = ')[0]} out"


def has(config: RunConfig, name: str) -> bool:
    """Return True if the settings turn on the feature ``name``."""
    return bool(_setting_of(config, _NAMED[name]))


def recorded_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the run's features that run.json has, by name."""
    mine = [each for each in FEATURES if each.recorded and has(config, each.name)]
    return {key: getattr(config, key) for each in mine for key in each.recorded}


def uncounted(config: RunConfig) -> frozenset[str]:
    """Return the counts of summary.json that are null, because their feature is off."""
    absent = [each for each in FEATURES if each.counted and not has(config, each.name)]
    return frozenset(key for each in absent for key in each.counted)


def refusal(config: RunConfig, *, script: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return why the run is impossible, with the remedy, in one line; "" if it is possible.

    ``script``: properties of the script that the table names -> how to call them in the text.
    """
    return next(refusals(config, script=script), "")


def refusals(
    config: RunConfig, *, script: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Yield a line for each need that is not met, and for each conflict; see :func:`refusal`."""
    named = {each.name: script.get(each.name) or _setting_of(config, each) for each in FEATURES}
    for feature in FEATURES:
        if not (mine := named[feature.name]):
            continue
        for need in feature.needs:
            wanted = [_NAMED[name] for name in need.features]
            if not any(named[each.name] for each in wanted):
                found = " and ".join(_absent(config, each) for each in wanted)
                remedy = ", or ".join([*(each.on for each in wanted), off_of(feature, mine)])
                yield f"{mine} {found}: {need.reason}; {remedy}"
        for conflict in feature.conflicts:
            if found := named[conflict.feature]:
                other = off_of(_NAMED[conflict.feature], found)
                remedy = f"{other}, or {off_of(feature, mine)}"
                yield f"{mine} with {found}: {conflict.reason}; {remedy}"


def _setting_of(config: RunConfig, feature: Feature) -> str:
    """Return the setting that turns on the feature, with its value; "" if the feature is off."""
    special = _SPECIAL.get(feature.name)
    if special is not None:
        if not special(config):
            return ""
        keys = [_deciding_key(config, next(iter(each))) for each in feature.settings]
        return next(text for text in map(config.setting_text, keys) if " = " in text)
    for example in feature.settings:
        key, value = next(iter(example.items()))
        if _is_on(config, key, value):
            return config.setting_text(key)
    return ""


def _is_on(config: RunConfig, key: str, example: object) -> bool:
    """True if ``key`` has the example's value. Any number turns on what a number does, except 0;
    and any value turns on what is unset by default."""
    found = getattr(config, key)
    if getattr(_defaults(type(config)), key) is None:
        return found is not None
    is_number = isinstance(example, int | float) and not isinstance(example, bool)
    return bool(found) if is_number else bool(found == example)


@cache
def _defaults(cls: type[RunConfig]) -> RunConfig:
    return cls()


def _deciding_key(config: RunConfig, key: str) -> str:
    """Return the setting that decides the mode, or the codec of ``key``."""
    if key == "mode":
        by_itself = "staleness_to" if has_range(config) else "mode"
        return _MODE_KEYS.get(mode_by(config), by_itself)
    if key == "staleness" and config.schedule is not None:
        return "schedule"
    if key in ("push_codec", "pull_codec"):
        field = f"codec_{key.partition('_')[0]}"
        given = (each for each in (field, "codec", "schedule") if getattr(config, each) is not None)
        return next(given, field)
    return key


def _absent(config: RunConfig, feature: Feature) -> str:
    """Return which setting is not as the feature needs it."""
    keys = [*feature.settings[0]]
    if feature.name in _SPECIAL:
        keys = [_deciding_key(config, key) for key in keys]
    texts = [config.setting_text(key) for key in keys]
    unset = [text for text in texts if " = " not in text]
    return f"without {unset[0]}" if unset else f"with {texts[0]}"


def take_workers_places(config: RunConfig) -> bool:
    """True if spares, where the run has some, take the places of workers, perhaps among others."""
    return config.replication == "none" or config.max_deaths > 0


def take_servers_places(config: RunConfig) -> bool:
    """True if spares, where the run has some, take the places of servers, perhaps among others."""
    return config.replication == "buddy"


def without_substitutes(config: RunConfig) -> str:
    """Return what to set where a script does not work with spares for workers' places."""
    return (
        "set failures.max_deaths = 0"
        if take_servers_places(config)
        else "leave failures.spares out"
    )


def reforms_groups(config: RunConfig) -> bool:
    """True if a group continues without its failed workers."""
    return config.on_group_death == "reform"


def misses_rounds(config: RunConfig) -> bool:
    """True if rounds close without the slowest groups, which miss them."""
    return config.backup > 0


def reads_losses(config: RunConfig) -> bool:
    """True if anything is decided by the losses that scripts report."""
    is_guarded = config.loss_patience is not None or config.rollback is not None
    return config.steps_by == "loss" or is_guarded
