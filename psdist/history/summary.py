"""``summary.json`` as the check reads it: what the run says of itself, beside its history.

Owns the fields that a history can speak about; the others are ignored. Never judges: that is
:mod:`psdist.history.rules.summaries`.

    summary = read_summary(run_dir)          # None where there is none; HistoryError on damage
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from psdist.errors import HistoryError
from psdist.history.run_record import cannot

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
    overlap_corrections: _Count | None = 0
    """Iterations that a later push corrected; only psdist 0.1.0 made such corrections."""
    rounds_missed: tuple[_Count, ...] | None = None
    """By group; null where no group may miss any."""
    modes: tuple[ModeTold, ...] = ()
    """The mode of every round; nothing where a run does not say it."""


class Summary(_Told):
    mode: str
    staleness: _Count | None
    servers: _Count
    empty_servers: tuple[_Count, ...] | None
    workers: _Count
    groups: _Count
    chunks: _Count | None
    clocks: tuple[_Count, ...]
    updates_applied: _Count | None
    max_staleness_seen: _Count | None
    staleness_seen: dict[str, _Count]
    """Uses of the workers' own slices, by staleness."""
    exit: str
    recorded: Recorded | None
    per_server: tuple[ServerSummary, ...]
    overlap_corrections: _Count | None = 0
    """Iterations that a later push corrected; only psdist 0.1.0 made such corrections."""
    rounds_missed: tuple[_Count, ...] | None = None
    """By group; null where no group may miss any."""
    local_steps: _Count | None = None
    """Of all workers together,"""
    rounds_cut: _Count | None = None
    """and the rounds of theirs that were ended before they had made their steps."""
    steps_by_loss: tuple[StepsTold, ...] = ()
    """Of every round; nothing where the loss decides nothing."""
    modes: tuple[ModeTold, ...] = ()
    """The mode of every round; nothing where a run does not say it."""
    codecs: tuple[CodecsTold, ...] = ()
    """Of every round; nothing where nothing is coded in any."""
    sets: tuple[SetSummary, ...] = ()
    """Nothing where there is one: all that it would say stands above."""

    def of_set(self, index: int) -> Summary:
        """What the run says of one of its sets."""
        if not self.sets:
            return self
        return self.model_copy(update={**dict(self.sets[index]), "sets": ()})


def read_summary(run_dir: Path) -> Summary | None:
    path = run_dir / "summary.json"
    try:
        if not path.exists():
            return None
        if path.stat().st_size > _LIMIT_BYTES:
            raise HistoryError(f"{path} is damaged: {path.stat().st_size} bytes")
        text = path.read_bytes()
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        return Summary.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise HistoryError(
            f"{path} is damaged or of another version of psdist: "
            f"{where + ': ' if where else ''}{first['msg']}"
        ) from error
