"""Whether psdist's own changes of the mode are those that what was observed calls for.

Owns the last part of rule 8 of docs/history.md: what a registrar has recorded of its observations
goes through :mod:`psdist.mode_control` again. Pure but for reading the file.

    check_decisions(run, read_mode_lines(run_dir), changes, findings, is_complete=True)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from psdist.errors import HistoryError
from psdist.history.records import code_of
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord, cannot
from psdist.mode_control import Decision, ModeControl

MODE_LINES = "modes.jsonl"
"""In the run directory: a line for each report of a group, and for each change."""
_LIMIT_BYTES = 1 << 30

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Microseconds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 20)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Observed(_Line):
    """What rounds of a group have taken; ``is_judged``: whether the mode could change then."""

    group: _Count
    first_round: _Count
    own_us: _Microseconds
    waits_us: _Microseconds
    is_judged: bool


class Changed(_Line):
    """The mode has changed, for each set from this round on."""

    rounds: Annotated[list[_Count], Field(min_length=1)]
    mode: Literal["sync", "ssp"]
    staleness: _Count
    why: str


class ModeLine(_Line):
    observed: Observed | None = None
    changed: Changed | None = None


def read_mode_lines(run_dir: Path) -> list[ModeLine]:
    """In order; none where there is no such file, because nothing was observed. Raises
    :class:`HistoryError` for a damaged one; a last line that a crash has cut is left out."""
    path = run_dir / MODE_LINES
    try:
        if not path.exists():
            return []
        if path.stat().st_size > _LIMIT_BYTES:
            raise HistoryError(f"{path} is damaged: {path.stat().st_size} bytes")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        return [ModeLine.model_validate_json(line) for line in lines[:-1]]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise HistoryError(f"{path} is damaged: {first['msg']}") from error


def check_decisions(
    run: RunRecord,
    lines: list[ModeLine],
    changes: tuple[tuple[int, int], ...],
    findings: Findings,
    *,
    is_complete: bool,
) -> None:
    """``changes``: those of the first set's log, which are those that were decided, each for what
    was observed before it; nothing was decided that did not follow."""
    control = ModeControl(num_groups=len(run.groups), staleness=run.auto_staleness or 0)
    decided: Decision | None = None
    made: list[tuple[int, int]] = []
    for number, line in enumerate(lines, start=1):
        if (seen := line.observed) is not None:
            if seen.group >= len(run.groups) or len(seen.own_us) != len(seen.waits_us):
                findings.add(Rule.MODES, f"{MODE_LINES}, line {number}: of no group of this run")
                continue
            control.observe(seen.group, seen.first_round, seen.own_us, seen.waits_us)
            decided = (control.judge() if seen.is_judged else None) or decided
        elif (change := line.changed) is not None:
            said = Decision(change.mode, change.staleness, change.why)
            if decided != said:
                findings.add(
                    Rule.MODES,
                    f"{MODE_LINES}, line {number}: changed to {said.mode} ({said.why}); what was "
                    f"observed calls for {decided.mode if decided else 'no change'}"
                    + (f" ({decided.why})" if decided else ""),
                )
            control.committed(said, change.rounds[0])
            decided = None
            made.append((change.rounds[0], code_of(change.mode, change.staleness)))
    if decided is not None and is_complete:
        findings.add(
            Rule.MODES, f"{MODE_LINES}: {decided.mode} was never set, although: {decided.why}"
        )
    if tuple(made) != changes and is_complete:
        findings.add(
            Rule.MODES,
            f"{MODE_LINES} tells of {len(made)} changes, the log of server 0 of {len(changes)}, or "
            "of others",
        )
