"""Whether psdist's own changes, of mode or codecs, are those that what was observed calls for.

Owns the last part of rule 8 of docs/history.md: what a registrar has recorded of its observations
goes through :mod:`psdist.controller` again. Pure but for reading the file.

    lines = read_decision_lines(run_dir)
    check_decisions(run, lines, changes, findings, is_complete=True)
    run = with_decided_codecs(run, lines)        # what other rules hold messages against
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from psdist.controller.bound import BoundControl
from psdist.controller.codec import CodecControl
from psdist.controller.decisions import Controller, Decision, Observation
from psdist.controller.mode import ModeControl
from psdist.errors import HistoryError
from psdist.history.hands import Reported
from psdist.history.line_records import require_one
from psdist.history.records import code_of
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import CodecsSince, RunRecord, cannot

DECISION_LINES = "decisions.jsonl"
"""In the run directory: a line for each report of a group, and for each change."""
_LIMIT_BYTES = 1 << 30

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Microseconds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 20)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Observed(_Line):
    """What rounds of a group have taken, and what its codecs have left out in each; ``is_judged``:
    whether anything could change then."""

    group: _Count
    first_round: _Count
    own_us: _Microseconds
    waits_us: _Microseconds
    is_judged: bool
    errors_ppm: _Microseconds = []


class Changed(_Line):
    """The mode has changed, for each set from this round on, or (``level``) the codecs have."""

    rounds: Annotated[list[_Count], Field(min_length=1)]
    mode: Literal["sync", "ssp"]
    staleness: _Count
    why: str
    level: Annotated[int, Field(ge=-1, lt=2**31)] = -1


class Sized(_Line):
    """Bytes of one group's exchange, by level of the codecs among which psdist chooses."""

    sizes: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1, max_length=1000)]


class DecisionLine(_Line):
    observed: Observed | None = None
    reported: Reported | None = None
    changed: Changed | None = None
    sized: Sized | None = None

    _is_one = model_validator(mode="after")(require_one)


def read_decision_lines(run_dir: Path) -> list[DecisionLine]:
    """In order; none where there is no such file, because nothing was observed. Raises
    :class:`HistoryError` for a damaged one; a last line that a crash has cut is left out."""
    path = run_dir / DECISION_LINES
    try:
        if not path.exists():
            return []
        if path.stat().st_size > _LIMIT_BYTES:
            raise HistoryError(f"{path} is damaged: {path.stat().st_size} bytes")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        return [DecisionLine.model_validate_json(line) for line in lines[:-1]]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise HistoryError(f"{path} is damaged: {first['msg']}") from error


def check_decisions(
    run: RunRecord,
    lines: list[DecisionLine],
    changes: tuple[tuple[int, int], ...],
    findings: Findings,
    *,
    is_complete: bool,
) -> None:
    """``changes``: those of the first set's log, which are those of the mode that were decided,
    each for what was observed before it; nothing was decided that did not follow."""
    control = _controller(run)
    decided: Decision | None = None
    made: list[tuple[int, int]] = []
    for number, line in enumerate(lines, start=1):
        where = f"{DECISION_LINES}, line {number}"
        if (sized := line.sized) is not None:
            if len(sized.sizes) != len(run.ladder):
                findings.add(Rule.MODES, f"{where}: not of the codecs of this run")
                return
            control.know_sizes(sized.sizes)
        elif (loss := line.reported) is not None:
            may_be = loss.is_of(run.num_workers)
            if not isinstance(control, CodecControl) or not control.reads_losses or not may_be:
                findings.add(Rule.MODES, f"{where}: of no worker of this run, or not asked for")
                continue
            control.report(loss.count, loss.total)
        elif (seen := line.observed) is not None:
            is_whole = len(seen.own_us) == len(seen.waits_us)
            if not is_whole or len(seen.errors_ppm) not in (0, len(seen.own_us)):
                findings.add(Rule.MODES, f"{where}: not as much of each round")
                continue
            if seen.group >= len(run.groups):
                findings.add(Rule.MODES, f"{where}: of no group of this run")
                continue
            told = (seen.first_round, seen.own_us, seen.waits_us, seen.errors_ppm)
            control.observe(Observation(seen.group, *told))
            decided = (control.judge() if seen.is_judged else None) or decided
        elif (change := line.changed) is not None:
            if not -1 <= change.level < len(run.ladder) or (change.level >= 0) != bool(run.ladder):
                findings.add(Rule.MODES, f"{where}: to codecs that are none of this run")
                return
            said = Decision(change.mode, change.staleness, change.why, change.level)
            if decided != said:
                findings.add(
                    Rule.MODES,
                    f"{where}: changed to {_words(run, said)} ({said.why}); what was observed "
                    f"calls for {_words(run, decided) if decided else 'no change'}"
                    + (f" ({decided.why})" if decided else ""),
                )
            control.committed(said, change.rounds[0])
            decided = None
            if change.level < 0:
                made.append((change.rounds[0], code_of(change.mode, change.staleness)))
    if decided is not None and is_complete:
        findings.add(
            Rule.MODES,
            f"{DECISION_LINES}: {_words(run, decided)} was never set, although: {decided.why}",
        )
    if tuple(made) != changes and is_complete:
        findings.add(
            Rule.MODES,
            f"{DECISION_LINES} tells of {len(made)} changes, the log of server 0 of "
            f"{len(changes)}, or of others",
        )


def with_decided_codecs(run: RunRecord, lines: list[DecisionLine]) -> RunRecord:
    """With the codecs of every round, where psdist has chosen them; those of a line that names no
    level of the run, or no later round, are left out: :func:`check_decisions` names it."""
    codecs = [*run.codecs]
    for change in (line.changed for line in lines if line.changed is not None):
        is_later = bool(codecs) and change.rounds[0] > codecs[-1].round
        if is_later and 0 <= change.level < len(run.ladder):
            level = run.ladder[change.level].model_dump()
            codecs.append(CodecsSince(round=change.rounds[0], **level))
    return run.model_copy(update={"codecs": tuple(codecs)})


def _controller(run: RunRecord) -> Controller:
    if run.mode == "ssp" and run.auto_staleness is not None:
        lowest, highest = run.staleness or 0, run.auto_staleness
        return BoundControl(num_groups=len(run.groups), lowest=lowest, highest=highest)
    if not run.ladder:
        return ModeControl(num_groups=len(run.groups), staleness=run.auto_staleness or 0)
    return CodecControl(
        num_groups=len(run.groups),
        names=[each.name for each in run.ladder],
        error_budget=run.error_budget,
        loss_patience=run.loss_patience,
    )


def _words(run: RunRecord, decision: Decision) -> str:
    return run.ladder[decision.level].name if decision.level >= 0 else decision.mode
