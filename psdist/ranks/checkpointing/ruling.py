"""The modes by round of a job that begins, new or from a checkpoint.

begins_with(config)                         # KeptModes, if the mode may change without a schedule
fitting(config, tuning_state)                   # the part of a checkpoint's tuning state that fits
modes_of(config, tuning_state, set_index=0)     # [ModeFrom(0, "sync"), ModeFrom(66, "ssp", 3)]
are_apart_in_sync([60, 65], modes)          # True: groups cannot continue at these clocks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from psdist.config.modes import (
    ModeFrom,
    describe_mode,
    describe_modes,
    first_mode,
    mode_by,
    schedule_of,
)
from psdist.config.settings import RunConfig
from psdist.controller.kept import KeptMode, KeptModes, TuningState

_ENDLESS: Final = 2**62
_SHOWN: Final = 8


def begins_with(config: RunConfig) -> KeptModes | None:
    """Return the modes of a new run; None if the settings determine the mode of every round."""
    by, (_, mode, staleness) = mode_by(config), first_mode(config)
    if by not in ("script", "auto"):
        return None
    start = KeptMode(rounds=(0,), mode=mode, staleness=staleness)
    return KeptModes(by=by, starts=(start,))


def highest_bound(config: RunConfig) -> int | None:
    """Return the highest bound of ssp; None unless psdist chooses the mode or moves the bound."""
    return (config.staleness_to or config.staleness) if mode_by(config) == "auto" else None


def fitting(config: RunConfig, tuning_state: TuningState | None) -> TuningState | None:
    """Return ``tuning_state`` without modes that do not fit ``config``, which has the script's
    settings."""
    if tuning_state is None or tuning_state.modes is None or not _unfit(config, tuning_state.modes):
        return tuning_state
    left = replace(tuning_state, modes=None)
    return left if left != TuningState() else None


def line_of_modes(config: RunConfig, kept: KeptModes) -> str:
    """Return a line on the mode with which the job continues, or why it drops the kept modes."""
    if wrong := _unfit(config, kept):
        return f"resume: the modes that ruled until then are dropped: {wrong}"
    last = kept.last
    from_when = f" from iteration {last.rounds[0]} on" if len(kept.starts) > 1 else ""
    return f"resume: continues with mode {describe_mode(last.mode, last.staleness)}{from_when}"


def _unfit(config: RunConfig, kept: KeptModes) -> str:
    """Return why this run cannot continue with the kept modes; "" if it can."""
    if kept.by != mode_by(config):
        setting = (
            "consistency.schedule = script"
            if kept.by == "script"
            else "mode = auto or consistency.staleness_to"
        )
        return f"{setting} is not set now"
    first = first_mode(config)
    if kept.are_of(
        by=kept.by, mode=first.mode, staleness=first.staleness, highest=highest_bound(config)
    ):
        return ""
    was = ", ".join(describe_mode(each.mode, each.staleness) for each in kept.starts[:_SHOWN])
    return f"they were {was}, and now it is {describe_modes(config)}"


def modes_of(
    config: RunConfig, tuning_state: TuningState | None, *, set_index: int
) -> tuple[ModeFrom, ...]:
    """Return the modes in the order in which they were set, the first from round 0 on. A mode
    replaces earlier ones that begin at the same round or later."""
    if tuning_state is None or tuning_state.modes is None:
        return schedule_of(config)
    starts = tuning_state.modes.starts
    return tuple(ModeFrom(each.start(set_index), each.mode, each.staleness) for each in starts)


def are_apart_in_sync(clocks: Sequence[int], modes: Sequence[ModeFrom]) -> bool:
    """True if some groups, but not all, have made a round that is a joint round of all groups."""
    parts: list[ModeFrom] = []
    for each in modes:
        parts = [*(part for part in parts if part.round < each.round), each]
    ends = [after.round for _, after in pairwise(parts)] + [_ENDLESS]
    least, most = min(clocks), max(clocks)
    return any(
        part.mode == "sync" and max(least, part.round) < min(most, end)
        for part, end in zip(parts, ends, strict=True)
    )
