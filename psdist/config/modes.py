"""Modes that change during a run: the words of a schedule, and which modes may come.

parse_schedule("0: ssp:8 int8; 5000: sync none")        # (Part(ModeFrom(0, "ssp", 8), Codecs(...)),
schedule_of(config)                                     # (ModeFrom(0, "ssp", 8), ...)
modes_that_may_come(config)                             # ("ssp", "sync")
first_mode(config)                                      # ModeFrom(0, "ssp", 8)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from psdist.config.codec_specs import Codecs, parse_codec, parse_codecs, parse_pull, text_of_both
from psdist.mode_names import MODES, Mode

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

ALLOWED: Final = (
    "ROUND: MODE; ROUND: MODE ..., the first from round 0, each later than the one before; a mode "
    "is sync, ssp:BOUND or async; after each mode, or after none, the codecs from there on: PUSH "
    "or PUSH/PULL"
)
_COUNT_MAX: Final = 2**31 - 1
_SHORT: Final = 64
"""Characters that displays have room for."""
_MOST_PARTS: Final = 1000
_PART: Final = re.compile(r"\s*([0-9]{1,10})\s*:\s*(\S+)(?:\s+(\S+))?\s*")
_MODE: Final = re.compile(r"(sync|async)|ssp:([0-9]{1,10})")


class ModeFrom(NamedTuple):
    """The mode from this round on; ``staleness`` is 0 except in ssp."""

    round: int
    mode: Mode
    staleness: int = 0

    def __str__(self) -> str:
        return describe_mode(self.mode, self.staleness)


class Part(NamedTuple):
    """A part of a schedule."""

    mode: ModeFrom
    codecs: Codecs | None = None
    """From the same round on; None if the settings give them."""


def describe_mode(mode: str, staleness: int) -> str:
    """Return the mode as a schedule writes it."""
    return f"ssp:{staleness}" if mode == "ssp" else mode


def parse_mode(text: str) -> ModeFrom:
    """Return the mode ``ssp:3`` from round 0 on. Raises ValueError for a text that is no mode."""
    found = _MODE.fullmatch(text)
    if found is None or int(found[2] or 0) > _COUNT_MAX:
        raise ValueError(f"{text[:80]!r} is no mode")
    if found[1] is not None:
        return ModeFrom(0, "sync" if found[1] == "sync" else "async")
    return ModeFrom(0, "ssp", int(found[2]))


def parse_schedule(text: str) -> tuple[Part, ...]:
    """Return the parts in their order. Raises ValueError for a text that is no schedule."""
    parts: list[Part] = []
    for part in text.split(";"):
        found = _PART.fullmatch(part)
        if found is None or int(found[1]) > _COUNT_MAX or len(parts) == _MOST_PARTS:
            raise ValueError(f"{part[:80]!r} is no part of a schedule")
        mode = parse_mode(found[2])._replace(round=int(found[1]))
        parts.append(Part(mode, _parse_codecs(found[3]) if found[3] is not None else None))
    starts = [part.mode.round for part in parts]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError(f"parts that begin at the rounds {starts}")
    if len({part.codecs is None for part in parts}) > 1:
        raise ValueError("some parts name codecs and others do not")
    return tuple(parts)


def _parse_codecs(text: str) -> Codecs:
    push, pull = parse_codecs(text)
    return Codecs(parse_codec(push), parse_pull(pull))


def parts_of(config: RunConfig) -> tuple[Part, ...]:
    """Return the parts of the schedule; of a run without one its mode, from round 0 on."""
    if config.schedule is not None:
        return parse_schedule(config.schedule)
    if config.mode == "auto":
        return (Part(ModeFrom(0, "sync")),)
    staleness = config.staleness if config.mode == "ssp" else 0
    return (Part(ModeFrom(0, config.mode, staleness)),)


def schedule_of(config: RunConfig) -> tuple[ModeFrom, ...]:
    """Return the modes alone: neighbours differ."""
    found: list[ModeFrom] = []
    for mode, _ in parts_of(config):
        if not found or mode[1:] != found[-1][1:]:
            found.append(mode)
    return tuple(found)


def first_mode(config: RunConfig) -> ModeFrom:
    """Return the mode of round 0."""
    return schedule_of(config)[0]


def is_changing(config: RunConfig) -> bool:
    """True if the mode may change during the run."""
    return mode_by(config) in ("script", "auto") or len(schedule_of(config)) > 1


def modes_that_may_come(config: RunConfig) -> tuple[Mode, ...]:
    """Return all modes of the run, in the order of :data:`psdist.mode_names.MODES`."""
    if config.set_mode == "allowed":
        return MODES
    if mode_by(config) == "auto":
        return ("ssp",) if has_range(config) else ("sync", "ssp")
    coming = {part.mode for part in schedule_of(config)}
    return tuple(mode for mode in MODES if mode in coming)


def judging_mode(config: RunConfig) -> Mode:
    """Return the most demanding mode: ``sync`` only if no other mode may come, ``async`` only if no
    group ever waits for another."""
    coming = modes_that_may_come(config)
    return coming[0] if len(coming) == 1 else "ssp"


def is_mixed(config: RunConfig) -> bool:
    """True if sync and another mode may come."""
    modes = modes_that_may_come(config)
    return "sync" in modes and len(modes) > 1


def least_bound(config: RunConfig) -> int:
    """Return the least staleness of the modes in which groups wait; 0 if no group waits."""
    if "sync" in modes_that_may_come(config):
        return 0
    return min((part.staleness for part in schedule_of(config) if part.mode == "ssp"), default=0)


def mode_of_tables(config: RunConfig) -> ModeFrom | None:
    """Return the mode of embedding tables; None if it is that of parameters."""
    return None if config.tables_mode == "same" else parse_mode(config.tables_mode)


def lag_of_tables(config: RunConfig) -> int:
    """Return the iterations from a push of rows to the use of its replies, beyond the next."""
    own = mode_of_tables(config)
    return config.pipeline if own is None else int(own.mode == "async")


def describe_tables(config: RunConfig) -> str:
    """Return how tables differ from parameters: ``tables async``; "" if they do not."""
    own, kept = mode_of_tables(config), row_staleness(config)
    mode = f"tables {own}" if own is not None else ""
    rows = f"{mode and ', '}rows of tables kept for {kept} iterations" if kept else ""
    return mode + rows


def row_staleness(config: RunConfig) -> int:
    """Return the iterations for which workers use a row after that which it was brought for."""
    return config.tables_cache_staleness if config.tables_cache else 0


def describe_modes(config: RunConfig) -> str:
    """Return the modes for people: ``ssp (staleness 3)``, ``sync``, ``0: ssp:8; 5000: sync``."""
    if config.schedule is not None:
        return "; ".join(
            f"{mode.round}: {mode}" + (f" {text_of_both(codecs)}" if codecs is not None else "")
            for mode, codecs in parts_of(config)
        )
    if config.mode == "auto":
        return f"auto (sync, ssp:{config.staleness})"
    first = first_mode(config)
    if has_range(config):
        return f"ssp (staleness {config.staleness} to {config.staleness_to})"
    return f"ssp (staleness {first.staleness})" if first.mode == "ssp" else first.mode


def describe_now(config: RunConfig, clock: int) -> str:
    """Return the mode of this round, as :func:`describe_modes`, short."""
    if config.schedule is None:
        return describe_modes(config)
    mode, codecs = [each for each in parts_of(config) if each.mode.round <= clock][-1]
    text = str(mode) if codecs is None else f"{mode} {text_of_both(codecs)}"
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


def mode_by(config: RunConfig) -> Literal["run", "schedule", "script", "auto"]:
    """Return which part may change the mode; run: none may."""
    if config.schedule is not None:
        return "schedule"
    if config.set_mode == "allowed":
        return "script"
    return "auto" if config.mode == "auto" or has_range(config) else "run"


def has_range(config: RunConfig) -> bool:
    """True if psdist moves the bound of ssp during the run."""
    return config.staleness_to is not None
