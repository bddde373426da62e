"""Replays that several rules on psdist's own choices share: fixed local steps, and rollbacks; pure.

Owns the parts of rules 8 and 11 of docs/reference/history.md on a run that ends with a rollback:
reported losses go through :mod:`psdist.controller.rollback` again.

    check_fixed(lines, take, control.choose, findings)      # {term: steps}
    Risen(run.rollback).judge(line.rolled_back)             # "" if it is right
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from psdist.controller.kept import Rollback, rolled_back
from psdist.controller.observed import LossHeard
from psdist.controller.rollback import KeptRise, RiseGuard
from psdist.controller.steps import Choice, Term
from psdist.history.lines import STEP_LINES, StepLine
from psdist.history.rules.findings import Findings, Rule
from psdist.history.summary import Summary


class Risen:
    def __init__(self, factor: float | None) -> None:
        """``factor``: None if no loss ends the run."""
        self._guard = RiseGuard(factor) if factor is not None else None
        self._wanted: Rollback | None = None
        self._has_ended = False
        """True after a rollback."""

    @property
    def is_asked(self) -> bool:
        return self._guard is not None

    def go_on(self, kept: KeptRise | None, first_round: int) -> None:
        """Resume the state of a checkpoint. Raises ValueError if it is none."""
        if self._guard is not None:
            self._guard.go_on(kept, first_round)

    def kept(self) -> KeptRise | None:
        return self._guard.kept() if self._guard is not None else None

    def report(
        self,
        told: LossHeard,
        *,
        lossiest_since: Callable[[int], int],
        names: tuple[str, ...] = (),
    ) -> None:
        if self._guard is None:
            return
        rise = self._guard.report(told.round, told.count, told.total)
        if rise is not None:
            self._wanted = rolled_back(told.round, rise, lossiest_since(rise.good), names=names)

    def judge(self, said: Rollback | None) -> str:
        """Return the fault of a line with this rollback, or without one; "" if it is right."""
        if self._has_ended:
            return "follows a rollback, which ended the run"
        self._has_ended = said is not None
        wanted, self._wanted = self._wanted, None
        if said == wanted:
            return ""
        if wanted is None:
            return "the run has ended with a rollback, which what was reported does not call for"
        return (
            f"the loss had blown up in round {wanted.round} ({wanted.loss:.4g}, its least "
            f"{wanted.best:.4g}, good up to {wanted.good}), with which the run was to end"
        )

    def judge_end(self) -> str:
        """Return the fault at the end of a whole run; "" if there is none."""
        return "" if self._has_ended else self.judge(None)


def judge_summary(said: Iterable[Rollback | None], summary: Summary | None) -> str:
    """Return the fault of summary.json on the end of the run; ``said``: rollbacks by line."""
    if summary is None or not any(said) or summary.exit != "completed":
        return ""
    return "the run has ended with a rollback; summary.json says that it was completed"


def check_fixed(
    lines: Sequence[StepLine],
    take: Callable[[StepLine], str],
    choose: Callable[[], Choice],
    findings: Findings,
    fixed: dict[Term, list[int]] | None = None,
    judge: Callable[[StepLine], str] = lambda _line: "",
) -> dict[Term, list[int]]:
    """Return the fixed steps by term, after those in ``fixed``. ``take``: passes an observation to
    the controller and returns its fault, "" if it has none; ``judge``: the same for every line,
    before."""
    broken = findings[Rule.HANDS]
    fixed = {} if fixed is None else fixed
    for number, line in enumerate(lines, start=1):
        told = line.fixed
        if wrong := judge(line):
            broken.add(f"{STEP_LINES}, line {number}: {wrong}")
        if told is None:
            if wrong := take(line):
                broken.add(f"{STEP_LINES}, line {number}: {wrong}")
            continue
        term = Term(told.loader, told.number, told.block)
        choice = choose()
        if (tuple(told.steps), told.why) != (choice.steps, choice.why):
            broken.add(
                f"{STEP_LINES}, line {number}: fixed {told.steps} ({told.why or 'as before'}); "
                f"what was observed calls for {list(choice.steps)} "
                f"({choice.why or 'as before'})"
            )
        if term in fixed:
            broken.add(f"{STEP_LINES}, line {number}: {term} is fixed twice")
        fixed[term] = told.steps
    return fixed
