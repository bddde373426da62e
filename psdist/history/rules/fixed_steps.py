"""Whether the local steps that were fixed are what the observations before them call for; pure.

check_fixed(read_choices(run_dir, StepLine), take, control.choose, findings)      # {term: steps}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psdist.controller.steps import Choice, Term
from psdist.history.lines import STEP_LINES, StepLine
from psdist.history.rules.findings import Findings, Rule


def check_fixed(
    lines: Sequence[StepLine],
    take: Callable[[StepLine], str],
    choose: Callable[[], Choice],
    findings: Findings,
    fixed: dict[Term, list[int]] | None = None,
    judge: Callable[[StepLine], str] = lambda _line: "",
) -> dict[Term, list[int]]:
    """What was fixed, by term, behind what is in ``fixed`` already. ``take``: gives the controller
    what a line has observed, and says what is wrong with it, "" for nothing;
    ``judge``: likewise, of every line, before."""
    fixed = {} if fixed is None else fixed
    for number, line in enumerate(lines, start=1):
        told = line.fixed
        if wrong := judge(line):
            findings.add(Rule.HANDS, f"{STEP_LINES}, line {number}: {wrong}")
        if told is None:
            if wrong := take(line):
                findings.add(Rule.HANDS, f"{STEP_LINES}, line {number}: {wrong}")
            continue
        term = Term(told.loader, told.number, told.block)
        choice = choose()
        if (tuple(told.steps), told.why) != (choice.steps, choice.why):
            findings.add(
                Rule.HANDS,
                f"{STEP_LINES}, line {number}: fixed {told.steps} ({told.why or 'as before'}); "
                f"what was observed calls for {list(choice.steps)} "
                f"({choice.why or 'as before'})",
            )
        if term in fixed:
            findings.add(Rule.HANDS, f"{STEP_LINES}, line {number}: {term} is fixed twice")
        fixed[term] = told.steps
    return fixed
