"""Whether rounds were as long as the reported losses call for.

Owns the part of rule 11 of docs/history.md that is of steps by the loss: recomputes what
:mod:`psdist.controller.loss_steps` decides of what was reported, and holds the rounds that workers
have made against it. Pure.

    check_lengths(run, read_lengths(folder, ...), read_step_lines(run_dir), summary, findings)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psdist.controller.loss_steps import LossStepControl
from psdist.controller.steps import Term, block_of, first_of
from psdist.history.hands import StepLine
from psdist.history.lengths import LengthLine, LengthLines
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.fixed_steps import check_fixed
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary


def check_lengths(
    run: RunRecord,
    workers: Sequence[LengthLines],
    lines: Sequence[StepLine],
    summary: Summary | None,
    findings: Findings,
) -> None:
    """``workers``: by worker; ``lines``: the registrar's, in order."""
    fixed = _check_by_loss(run, lines, findings)
    if list(fixed) != (in_turn := [Term(0, 0, block) for block in range(len(fixed))]):
        at = next(n for n, pair in enumerate(zip(fixed, in_turn, strict=True)) if len({*pair}) > 1)
        findings.add(Rule.HANDS, f"{[*fixed][at]} was fixed where {in_turn[at]} was to be")
    num_short = sum(
        _check_worker(run, worker, told.lines, fixed, findings)
        for worker, told in enumerate(workers)
    )
    if summary is None or not all(told.is_complete for told in workers):
        return
    claimed = [(each.round, each.steps) for each in summary.steps_by_loss]
    if claimed != (shown := _changes(run, fixed)):
        findings.add(
            Rule.HANDS,
            f"summary.json says steps_by_loss {claimed}, by round; what was fixed is {shown}",
        )
    num_steps = sum(line.steps for told in workers for line in told.lines)
    for name, says, is_so in (
        ("rounds_cut", summary.rounds_cut, num_short),
        ("local_steps", summary.local_steps, num_steps),
    ):
        if says != is_so:
            findings.add(
                Rule.HANDS,
                f"summary.json says {name} {says}; by what workers recorded it is {is_so}",
            )


def _changes(run: RunRecord, fixed: Mapping[Term, Sequence[int]]) -> list[tuple[int, int]]:
    """From which rounds on all groups made how many steps."""
    changes = [(0, run.local_steps_by_loss)]
    for term, (steps, *_) in sorted(fixed.items()):
        if steps != changes[-1][1]:
            changes.append((first_of(term.block), steps))
    return changes


def _check_by_loss(
    run: RunRecord, lines: Sequence[StepLine], findings: Findings
) -> dict[Term, list[int]]:
    control = LossStepControl(
        num_workers=run.num_workers,
        num_groups=len(run.groups),
        local_steps=run.local_steps_by_loss,
    )

    def take(line: StepLine) -> str:
        told = line.reported
        if told is None:
            return "is no report"
        if not told.is_of(run.num_workers, least=0.0):
            return "of no worker of this run, or of losses that there are not"
        control.report(told.worker, told.count, told.total)
        return ""

    return check_fixed(lines, take, control.choose, findings)


def _check_worker(
    run: RunRecord,
    worker: int,
    lines: Sequence[LengthLine],
    fixed: Mapping[Term, Sequence[int]],
    findings: Findings,
) -> int:
    """One round after the other, each of as many steps as were fixed, or fewer where it was cut;
    the number of those."""
    num_short, group = 0, int(run.group_of_worker()[worker])
    for coming, line in enumerate(lines):
        where = f"worker {worker}: round {line.round}"
        if line.round != coming:
            findings.add(Rule.HANDS, f"{where} is recorded where round {coming} belongs")
        steps = fixed.get(Term(0, 0, block_of(line.round)))
        if steps is None or len(steps) <= group:
            findings.add(Rule.HANDS, f"{where}: its steps were never fixed")
            continue
        if line.steps > steps[group]:
            findings.add(Rule.HANDS, f"{where} is of {line.steps} steps, {steps[group]} were fixed")
        num_short += line.steps < steps[group]
    return num_short
