"""Old names of settings: merged ones are translated, removed ones name a remedy.

    MERGED["bind"].updates("off", {"hosts_affinity": "auto"})    # {"hosts_affinity": "cards"}
    why_removed("watch")                 # "is no setting any more: call job.report(loss) ..."

Scripts rely on the old names, so every source still takes the merged ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

from psdist.config.codec_rounds import AUTO
from psdist.config.codec_specs import parse_both

SHORT: Final = "codec"
"""The short form of codec.push and codec.pull, which stays."""
STRICT: Final = "strict:"
"""Prefix of a placement that must be followed exactly."""
SCRIPT: Final = "script"
"""The schedule of a run whose script changes the mode."""
BOOLEANS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""Words of command lines and environments."""
_AFFINITIES: Final = {
    (True, True): "auto",
    (True, False): "cores",
    (False, True): "cards",
    (False, False): "off",
}
"""(ranks bind themselves, ranks use near cards) -> hosts.affinity."""
_STALE: Final = re.compile(r"off|(inverse)|(inverse\+)?compensate:([-+.0-9eE]+)")
_MOST_LAMBDA: Final = 1e6
STALE_ALLOWED: Final = (
    "off, inverse, compensate:LAMBDA or inverse+compensate:LAMBDA, with LAMBDA > 0 and <= 1000000"
)


def parse_stale(text: str) -> tuple[Literal["off", "inverse"], float]:
    """Return how ``consistency.stale_updates`` changes the lr, and lambda of the compensation.

    Raises ValueError for another text.
    """
    match = _STALE.fullmatch(text)
    strength = float(match[3]) if match and match[3] else 0.0
    if match is None or (match[3] and not 0 < strength <= _MOST_LAMBDA):
        raise ValueError("not a way to treat stale updates")
    return "inverse" if match[1] or match[2] else "off", strength


class Merged(NamedTuple):
    """A setting that is now a part of another one."""

    instead: str
    """Name of the other setting."""
    allowed: str
    """In words; "" if it takes the values of the other one."""
    updates: Callable[[object, Mapping[str, object]], dict[str, object]]
    """(value, settings so far) -> settings to change. Raises ValueError for a wrong value."""


def _codec(value: object, _now: Mapping[str, object]) -> dict[str, object]:
    text = _text(value)
    if text == AUTO:
        return {"codec_push": AUTO, "codec_pull": AUTO}
    parse_both(text)
    push, slash, pull = text.partition("/")
    return {"codec_push": push, "codec_pull": pull if slash else push}


def _renamed(key: str) -> Callable[[object, Mapping[str, object]], dict[str, object]]:
    return lambda value, _now: {key: value}


def _bind(value: object, now: Mapping[str, object]) -> dict[str, object]:
    has_cards = now["hosts_affinity"] in ("auto", "cards")
    return {"hosts_affinity": _AFFINITIES[_one_of(value, "off", "auto") == "auto", has_cards]}


def _nics(value: object, now: Mapping[str, object]) -> dict[str, object]:
    has_cores = now["hosts_affinity"] in ("auto", "cores")
    return {"hosts_affinity": _AFFINITIES[has_cores, _one_of(value, "off", "auto") == "auto"]}


def _set_mode(value: object, now: Mapping[str, object]) -> dict[str, object]:
    schedule = now["consistency_schedule"]
    if _one_of(value, "refused", "allowed") == "refused":
        return {"consistency_schedule": None if schedule == SCRIPT else schedule}
    if schedule not in (None, SCRIPT):
        raise ValueError("a schedule changes the mode already")
    return {"consistency_schedule": SCRIPT}


def _stale(of_lr: str, strength: float) -> dict[str, object]:
    parts = [] if of_lr == "off" else [of_lr]
    if strength:
        parts.append(f"compensate:{strength!r}")
    return {"stale_updates": "+".join(parts) or "off"}


def _stale_lr(value: object, now: Mapping[str, object]) -> dict[str, object]:
    return _stale(_one_of(value, "off", "inverse"), parse_stale(str(now["stale_updates"]))[1])


def _delay_compensation(value: object, now: Mapping[str, object]) -> dict[str, object]:
    is_number = isinstance(value, str | int | float) and not isinstance(value, bool)
    strength = float(str(value)) if is_number else -1.0  # by str: a huge int is inf, not an error
    if not 0 <= strength <= _MOST_LAMBDA:
        raise ValueError("not a strength")
    return _stale(parse_stale(str(now["stale_updates"]))[0], strength)


def _placement(value: object, now: Mapping[str, object]) -> dict[str, object]:
    text = _text(value)
    is_strict = str(now["hosts_placement"]).startswith(STRICT)
    return {"hosts_placement": f"{STRICT}{text}" if is_strict and text else text}


def _strict_placement(value: object, now: Mapping[str, object]) -> dict[str, object]:
    is_strict = BOOLEANS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(is_strict, bool):
        raise ValueError("not true or false")
    text = str(now["hosts_placement"]).removeprefix(STRICT)
    return {"hosts_placement": f"{STRICT}{text}" if is_strict else text}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _one_of(value: object, *allowed: str) -> str:
    if value not in allowed:
        raise ValueError(f"not one of {allowed}")
    return str(value)


MERGED: Final = {
    "codec": Merged(
        "codec.push and codec.pull", "auto, a codec for both directions, or PUSH/PULL", _codec
    ),
    "push_codec": Merged("codec.push", "", _renamed("codec_push")),
    "pull_codec": Merged("codec.pull", "", _renamed("codec_pull")),
    "schedule": Merged("consistency.schedule", "", _renamed("consistency_schedule")),
    "set_mode": Merged("consistency.schedule", "refused, or allowed without a schedule", _set_mode),
    "stale_lr": Merged("consistency.stale_updates", "off or inverse", _stale_lr),
    "delay_compensation": Merged(
        "consistency.stale_updates", "a number >= 0 and <= 1000000", _delay_compensation
    ),
    "placement": Merged(
        "hosts.placement", "auto, block, cyclic, or the path of a plan.json", _placement
    ),
    "strict_placement": Merged("hosts.placement", "true or false", _strict_placement),
    "bind": Merged("hosts.affinity", "auto or off", _bind),
    "nics": Merged("hosts.affinity", "auto or off", _nics),
}
"""Old name -> its translation, in the order in which they are applied."""

REMOVED: Final = {
    "watch": "call job.report(loss) in the script",
    "round_weights": "leave it out; groups weigh alike, however many local steps they make",
    "inner_state": "leave it out; the optimizer's state is kept from round to round",
    "on_server_death": "set failures.replication = buddy, or make checkpoints (checkpoint.every, "
    "resume)",
    "min_groups": "set failures.max_deaths; the job continues while one group is left",
    "spares_for": "set failures.max_deaths = 0, with which spares take the places of servers alone",
    "samples_of_dead": "leave it out; the samples of a failed worker are dropped, and counted in "
    "dropped_samples of summary.json",
    "checkpoint_memory": "leave it out; servers keep the memory for the next checkpoint",
}
"""Setting -> the remedy."""


def why_removed(key: str) -> str:
    """Return what is wrong with giving ``key``; "" unless it was a setting once."""
    remedy = REMOVED.get(key)
    return f"is no setting any more: {remedy}" if remedy is not None else ""
