"""Modes that change within a run: the words of a schedule, and which modes may come.

parse_schedule("0: ssp:8 int8; 5000: sync none")        # (Part(ModeFrom(0, "ssp", 8), Codecs(...)),
schedule_of(config)                                     # (ModeFrom(0, "ssp", 8), ...)
modes_that_may_come(config)                             # ("ssp", "sync")
first_mode(config)                                      # ModeFrom(0, "ssp", 8)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from psdist.config.codec_specs import parse_codec, parse_codecs
from psdist.config.combinations import Codecs, text_of_both
from psdist.config.outer import has_rounds
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
    """From this round on the mode is this one; ``staleness`` is 0 but for ssp."""

    round: int
    mode: Mode
    staleness: int = 0

    def __str__(self) -> str:
        return describe_mode(self.mode, self.staleness)


class Part(NamedTuple):
    """Of a schedule."""

    mode: ModeFrom
    codecs: Codecs | None = None
    """From the same round on; None where the settings say them."""


def describe_mode(mode: str, staleness: int) -> str:
    """As a schedule writes it."""
    return f"ssp:{staleness}" if mode == "ssp" else mode


def parse_mode(text: str) -> ModeFrom:
    """``ssp:3`` from round 0 on; ValueError for what is no mode."""
    found = _MODE.fullmatch(text)
    if found is None or int(found[2] or 0) > _COUNT_MAX:
        raise ValueError(f"{text[:80]!r} is no mode")
    if found[1] is not None:
        return ModeFrom(0, "sync" if found[1] == "sync" else "async")
    return ModeFrom(0, "ssp", int(found[2]))


def parse_schedule(text: str) -> tuple[Part, ...]:
    """The parts in their order; ValueError for what is no schedule."""
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
    return Codecs(*map(parse_codec, parse_codecs(text)))


def parts_of(config: RunConfig) -> tuple[Part, ...]:
    """Of a run without a schedule its mode, for the whole of it."""
    if config.schedule is not None:
        return parse_schedule(config.schedule)
    if config.mode == "auto":
        return (Part(ModeFrom(0, "sync")),)
    staleness = config.staleness if config.mode == "ssp" else 0
    return (Part(ModeFrom(0, config.mode, staleness)),)


def schedule_of(config: RunConfig) -> tuple[ModeFrom, ...]:
    """The modes alone: neighbours differ."""
    found: list[ModeFrom] = []
    for mode, _ in parts_of(config):
        if not found or mode[1:] != found[-1][1:]:
            found.append(mode)
    return tuple(found)


def first_mode(config: RunConfig) -> ModeFrom:
    """With which the run begins."""
    return schedule_of(config)[0]


def is_changing(config: RunConfig) -> bool:
    """Whether the mode may change within the run."""
    return mode_by(config) in ("script", "auto") or len(schedule_of(config)) > 1


def modes_that_may_come(config: RunConfig) -> tuple[Mode, ...]:
    """In the order of :data:`psdist.mode_names.MODES`."""
    if config.set_mode == "allowed":
        return MODES
    if mode_by(config) == "auto":
        return ("ssp",) if has_range(config) else ("sync", "ssp")
    coming = {part.mode for part in schedule_of(config)}
    return tuple(mode for mode in MODES if mode in coming)


def judging_mode(config: RunConfig) -> Mode:
    """The most demanding of them: ``sync`` only where no other mode may come, ``async`` only where
    no group ever waits for another."""
    coming = modes_that_may_come(config)
    return coming[0] if len(coming) == 1 else "ssp"


def is_mixed(config: RunConfig) -> bool:
    """Whether sync and others may come."""
    modes = modes_that_may_come(config)
    return "sync" in modes and len(modes) > 1


def least_bound(config: RunConfig) -> int:
    """The least staleness that may come, of modes in which groups wait; 0 where none does."""
    if "sync" in modes_that_may_come(config):
        return 0
    return min((part.staleness for part in schedule_of(config) if part.mode == "ssp"), default=0)


def describe_modes(config: RunConfig) -> str:
    """For people: ``ssp (staleness 3)``, ``sync``, ``0: ssp:8; 5000: sync``."""
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
    """As :func:`describe_modes`, short; of a schedule the part that rules this round."""
    if config.schedule is None:
        return describe_modes(config)
    mode, codecs = [each for each in parts_of(config) if each.mode.round <= clock][-1]
    text = str(mode) if codecs is None else f"{mode} {text_of_both(codecs)}"
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


def mode_by(config: RunConfig) -> Literal["run", "schedule", "script", "auto"]:
    """Who may change the mode; run: nobody."""
    if config.schedule is not None:
        return "schedule"
    if config.set_mode == "allowed":
        return "script"
    return "auto" if config.mode == "auto" or has_range(config) else "run"


def has_range(config: RunConfig) -> bool:
    """Whether psdist moves the bound of ssp within the run."""
    return config.staleness_to is not None


def contradiction_of_modes(config: RunConfig) -> str:
    """What does not go with a mode that changes, and what to do; "" where all does."""
    if wrong := _contradiction_of_range(config):
        return wrong
    if config.mode == "auto" and config.set_mode == "allowed":
        return (
            "mode = auto with set_mode = allowed: one of them may change the mode; set another "
            "mode, or set_mode = refused"
        )
    if not is_changing(config):
        return ""
    by_itself = "staleness_to" if has_range(config) else "mode = auto"
    why = {"schedule": "schedule", "auto": by_itself}.get(mode_by(config), "set_mode = allowed")
    if config.pipeline and "sync" in modes_that_may_come(config):
        return (
            f"pipeline = 1 with {why}: sync may come, in which every step awaits its own replies; "
            "set pipeline = 0, or a schedule without sync"
        )
    tried = {
        f"pipeline = {config.pipeline}": config.pipeline > 0 and has_range(config),
        f"local_steps = {config.local_steps}": has_rounds(config),
    }
    for setting, is_set in tried.items():
        if is_set:
            return (
                f"{setting} with {why}: a mode that changes within the run was not tried with it "
                "yet; leave out one of them"
            )
    return ""


def _contradiction_of_range(config: RunConfig) -> str:
    if config.staleness_to is None:
        return ""
    mine = f"staleness_to = {config.staleness_to}"
    if config.schedule is not None or config.set_mode == "allowed":
        other = "schedule" if config.schedule is not None else "set_mode = allowed"
        return f"{mine} with {other}: one of them may change the bound; leave out one of them"
    if config.mode != "ssp":
        return (
            f"{mine} with mode = {config.mode}: it is the bound of ssp that moves; set mode = ssp, "
            "or leave out staleness_to"
        )
    if config.staleness_to <= config.staleness:
        return (
            f"{mine} with staleness = {config.staleness}, from which on the bound moves: set a "
            "higher staleness_to, or leave it out"
        )
    return ""
