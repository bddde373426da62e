"""``summary.json`` as the check reads it: what the run says of itself, beside its history.

Owns the fields that a history can speak about; the others are ignored. Never judges: that is
:mod:`psdist.history.rules.summaries`.

    summary = read_summary(run_dir)          # None where there is none; HistoryError on damage
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from psdist.history.run_record import parsed, read_limited

_LIMIT_BYTES = 64 * 2**20

_Count = Annotated[int, Field(ge=0)]


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class ServerSummary(_Told):
    """What a server counted while it served."""

    num_chunks: _Count
    updates: _Count
    """Iterations of groups that all of its chunks contain, summed over the groups."""
    pushes: _Count
    """That it took; duplicates are not counted."""
    steps: _Count
    """To which somebody brought a gradient."""
    replies: _Count
    copies_on_write: _Count
    position: _Count
    """Events of its log."""
    checksums: _Count
    """Replies with a checksum."""


class Recorded(_Told):
    pipeline: _Count
    checksum_every: _Count


class ModeTold(_Told):
    """From this round on the mode is this one."""

    round: _Count
    mode: str
    staleness: _Count | None


class CodecsTold(_Told):
    """From this round on pushes and replies are coded by these."""

    round: _Count
    push: str
    pull: str


class StepsTold(_Told):
    """From this round on all groups have made so many local steps."""

    round: _Count
    steps: _Count


class SetSummary(_Told):
    """Of one parameter set; a run's own words are of all its sets together."""

    empty_servers: tuple[_Count, ...] | None
    chunks: _Count | None
    clocks: tuple[_Count, ...]
    updates_applied: _Count | None
    max_staleness_seen: _Count | None
    staleness_seen: dict[str, _Count]
    recorded: Recorded | None
    per_server: tuple[ServerSummary, ...]
    rounds_missed: tuple[_Count, ...] | None = None
    """By group; null where no group may miss any."""
    modes: tuple[ModeTold, ...] = ()
    """The mode of every round; nothing where a run does not say it."""


class Summary(SetSummary):
    """Of all parameter sets together; clocks, modes and missed rounds are those of the first."""

    mode: str
    staleness: _Count | None
    servers: _Count
    workers: _Count
    groups: _Count
    exit: str
    local_steps: _Count | None = None
    """Sum over all workers."""
    rounds_cut: _Count | None = None
    """Rounds, summed over all workers, that ended before their last step."""
    steps_by_loss: tuple[StepsTold, ...] = ()
    """The steps of every round; empty unless the loss decides them."""
    codecs: tuple[CodecsTold, ...] = ()
    """The codecs of every round; empty if nothing is coded in any round."""
    sets: tuple[SetSummary, ...] = ()
    """Each parameter set; empty if there is one, which the fields above describe."""

    def of_set(self, index: int) -> Summary:
        """Return the summary with the counts of one parameter set."""
        if not self.sets:
            return self
        return self.model_copy(update={**dict(self.sets[index]), "sets": ()})


def read_summary(run_dir: Path) -> Summary | None:
    """Return summary.json, None if there is none. Raises :class:`HistoryError`."""
    path = run_dir / "summary.json"
    return parsed(Summary, path, read_limited(path, _LIMIT_BYTES)) if path.exists() else None
