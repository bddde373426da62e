"""Whether attempts of a run have gone on with what psdist had chosen before.

Owns the part of rule 7 of docs/history.md that is of psdist's own choices. What a checkpoint keeps
of them follows from what was observed (:mod:`psdist.history.rules.decisions`,
:mod:`psdist.history.rules.lengths`); here what the next attempt says of it is held against that.
Pure.

    check_resumed({1: (run, kept_lines), 2: (run, kept_lines)}, findings)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from psdist.controller.kept import Fidelity, Rollback, within
from psdist.history.hands import KeptLine
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord


class SaysKept(Protocol):
    """A line of decisions.jsonl or steps.jsonl."""

    @property
    def kept(self) -> KeptLine | None: ...
    @property
    def resumed(self) -> KeptLine | None: ...
    @property
    def rolled_back(self) -> Rollback | None: ...


class Attempt(NamedTuple):
    run: RunRecord
    """Of the first parameter set."""
    lines: Sequence[SaysKept]


def check_resumed(attempts: Mapping[int, Attempt], findings: Findings) -> None:
    """Each attempt that was recorded goes on with what the attempt that has made its checkpoint has
    kept in it, or, with settings that choose among other things, with nothing."""
    for number, (run, lines) in sorted(attempts.items()):
        before = [
            (other, line.rolled_back)
            for other, attempt in sorted(attempts.items())
            for line in attempt.lines
            if other < number and line.rolled_back is not None
        ]
        _check_rollbacks(number, run, lines, before, findings)
        maker = attempts.get(run.restored_attempt)
        if not run.restored or maker is None:
            continue
        kept = [line.kept for line in maker.lines if line.kept is not None]
        of_name = [each.fidelity for each in kept if each.checkpoint == run.restored]
        resumed = [line.resumed.fidelity for line in lines if line.resumed is not None]
        was = of_name[-1] if of_name else None
        for _, each in before:
            was = within(was, each) if was is not None else None
        now = resumed[0] if resumed else None
        if now != was and (now is not None or _may_go_on(run, was)):
            findings.add(
                Rule.KEPT,
                f"attempt {number} has gone on with other choices of psdist's own than attempt "
                f"{run.restored_attempt} has kept in {run.restored}",
            )


def _check_rollbacks(
    number: int,
    run: RunRecord,
    lines: Sequence[SaysKept],
    before: Sequence[tuple[int, Rollback]],
    findings: Findings,
) -> None:
    """Behind each (attempt, rollback) no attempt goes on from a checkpoint of when the loss rose,
    or with what was too lossy."""
    resumed = next((line.resumed.fidelity for line in lines if line.resumed is not None), None)
    for ended, each in before:
        step = int(run.restored.removeprefix("step-") or 0)
        if run.restored_attempt <= ended and step > each.good:
            findings.add(
                Rule.KEPT,
                f"attempt {number} goes on from {run.restored}; attempt {ended} has said that the "
                f"loss was good up to iteration {each.good}",
            )
        ladder = tuple(level.name for level in run.ladder)
        is_same = each.names == ladder if each.names else run.local_steps_by_loss > each.allowed
        is_limited = is_same and each.allowed >= 0
        if is_limited and (resumed is None or within(resumed, each) != resumed):
            findings.add(
                Rule.KEPT,
                f"attempt {number} is as lossy as what attempt {ended} has ended with: "
                f"{each.allowed} is allowed",
            )


def _may_go_on(run: RunRecord, fidelity: Fidelity | None) -> bool:
    """Whether this attempt chooses among the same things, so that it has to go on with them."""
    if fidelity is None:
        return False
    if fidelity.codecs is not None:
        return fidelity.codecs.names == tuple(each.name for each in run.ladder)
    steps = fidelity.steps
    return steps is not None and 0 < steps.starts[-1][1] <= run.local_steps_by_loss
