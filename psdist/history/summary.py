"""``summary.json`` as the check reads it, to compare it with the history.

Fields that no history shows are ignored. :mod:`psdist.history.rules.summaries` judges.

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
    """The counts of a server."""

    num_chunks: _Count
    updates: _Count
    """Iterations of groups that all of its chunks contain, summed over groups."""
    pushes: _Count
    """Pushes without duplicates."""
    steps: _Count
    """Optimizer steps with at least one gradient."""
    replies: _Count
    copies_on_write: _Count
    position: _Count
    """Number of events in its log."""
    checksums: _Count
    """Number of replies with a checksum."""


class Recorded(_Told):
    pipeline: _Count
    checksum_every: _Count


class ModeTold(_Told):
    """A mode, and its first round."""

    round: _Count
    mode: str
    staleness: _Count | None


class CodecsTold(_Told):
    """Codecs of pushes and replies, and their first round."""

    round: _Count
    push: str
    pull: str


class StepsTold(_Told):
    """Local steps of all groups, and their first round."""

    round: _Count
    steps: _Count


class SetSummary(_Told):
    """The counts of one parameter set."""

    empty_servers: tuple[_Count, ...] | None
    chunks: _Count | None
    clocks: tuple[_Count, ...]
    updates_applied: _Count | None
    max_staleness_seen: _Count | None
    staleness_seen: dict[str, _Count]
    recorded: Recorded | None
    per_server: tuple[ServerSummary, ...]
    rounds_missed: tuple[_Count, ...] | None = None
    """By group; null if no group may miss a round."""
    modes: tuple[ModeTold, ...] = ()
    """The mode of every round; empty in older summaries."""


class Summary(SetSummary):
    """The counts of all parameter sets; clocks, modes and missed rounds are those of the first."""

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
