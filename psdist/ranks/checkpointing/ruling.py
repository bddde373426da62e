"""Which mode rules which rounds of a job that begins, also where it goes on from a checkpoint.

begins_with(config)                         # KeptModes, where the mode changes by no schedule
fitting(config, fidelity)                   # what of a checkpoint's this job goes on with
modes_of(config, fidelity, set_index=0)     # [ModeFrom(0, "sync"), ModeFrom(66, "ssp", 3)]
are_apart_in_sync([60, 65], modes)          # groups cannot go on at these clocks
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
from psdist.controller.kept import Fidelity, KeptMode, KeptModes

_ENDLESS: Final = 2**62
_SHOWN: Final = 8


def begins_with(config: RunConfig) -> KeptModes | None:
    """As every run begins; None where the settings say which mode rules when."""
    by, (_, mode, staleness) = mode_by(config), first_mode(config)
    if by not in ("script", "auto"):
        return None
    start = KeptMode(rounds=(0,), mode=mode, staleness=staleness)
    return KeptModes(by=by, starts=(start,))


def highest_bound(config: RunConfig) -> int | None:
    """Of ssp, where psdist chooses the mode or moves the bound."""
    return (config.staleness_to or config.staleness) if mode_by(config) == "auto" else None


def fitting(config: RunConfig, fidelity: Fidelity | None) -> Fidelity | None:
    """Without modes of other settings; ``config`` has what the script passes."""
    if fidelity is None or fidelity.modes is None or not _unfit(config, fidelity.modes):
        return fidelity
    left = replace(fidelity, modes=None)
    return left if left != Fidelity() else None


def line_of_modes(config: RunConfig, kept: KeptModes) -> str:
    """With which of these the job goes on, or why with none, for people."""
    if wrong := _unfit(config, kept):
        return f"resume: the modes that ruled until then are dropped: {wrong}"
    last = kept.last
    from_when = f" from iteration {last.rounds[0]} on" if len(kept.starts) > 1 else ""
    return f"resume: goes on with mode {describe_mode(last.mode, last.staleness)}{from_when}"


def _unfit(config: RunConfig, kept: KeptModes) -> str:
    """Why this run cannot go on with them; "" where it can."""
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
    config: RunConfig, fidelity: Fidelity | None, *, set_index: int
) -> tuple[ModeFrom, ...]:
    """In the order in which they were set: one that begins where another does, or before, takes its
    place. The first is from round 0 on."""
    if fidelity is None or fidelity.modes is None:
        return schedule_of(config)
    starts = fidelity.modes.starts
    return tuple(ModeFrom(each.start(set_index), each.mode, each.staleness) for each in starts)


def are_apart_in_sync(clocks: Sequence[int], modes: Sequence[ModeFrom]) -> bool:
    """Whether a round that some of these groups have made and others have not would be one of all
    together."""
    parts: list[ModeFrom] = []
    for each in modes:
        parts = [*(part for part in parts if part.round < each.round), each]
    ends = [after.round for _, after in pairwise(parts)] + [_ENDLESS]
    least, most = min(clocks), max(clocks)
    return any(
        part.mode == "sync" and max(least, part.round) < min(most, end)
        for part, end in zip(parts, ends, strict=True)
    )
