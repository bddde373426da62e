"""Checks of rounds of local steps: lengths that follow the loss, and ends that follow passes.

Owns two parts of rule 11 of docs/reference/history.md. Steps by the loss: recomputes what
:mod:`psdist.controller.loss_steps` decides from the reported losses, and compares the rounds that
workers have made. Rounds of an epoch: loaders count where passes ended, the trainer where rounds
did. Pure.

    check_lengths(run, lengths, read_choices(run_dir, StepLine), summary, findings)
    check_passes(run, lengths, passes, summary, findings)       # lines by worker
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from psdist.controller.kept import KeptSteps, TuningState, at_place, from_place
from psdist.controller.loss_steps import LossStepControl, counts_nonfinite
from psdist.controller.steps import Term, first_of, window_of
from psdist.history.lines import STEP_LINES, LengthLine, PassLine, StepLine, WorkerLines
from psdist.history.rules.choices.replayed import Risen, check_fixed, judge_summary
from psdist.history.rules.choices.resumed import goes_on
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary


def check_lengths(
    run: RunRecord,
    workers: Sequence[WorkerLines[LengthLine]],
    lines: Sequence[StepLine],
    summary: Summary | None,
    findings: Findings,
) -> None:
    """``workers``: by worker; ``lines``: the coordinator's, in order."""
    broken = findings[Rule.HANDS]
    is_complete = summary is not None and all(told.is_complete for told in workers)
    fixed = _check_by_loss(run, lines, findings, is_complete=is_complete)
    if wrong := judge_summary((line.rolled_back for line in lines), summary):
        broken.add(f"{STEP_LINES}: {wrong}")
    first = window_of(_first_round(run))
    if list(fixed) != (in_turn := [Term(0, 0, first + block) for block in range(len(fixed))]):
        at = next(n for n, pair in enumerate(zip(fixed, in_turn, strict=True)) if len({*pair}) > 1)
        broken.add(f"{[*fixed][at]} was fixed where {in_turn[at]} was to be")
    num_short = sum(
        _check_worker(run, worker, told.lines, fixed, findings)
        for worker, told in enumerate(workers)
    )
    if summary is None or not all(told.is_complete for told in workers):
        return
    claimed = [(each.round, each.steps) for each in summary.steps_by_loss]
    begins = _begins(run, lines)
    at_first = run.local_steps_by_loss if begins is None else begins.starts[0][1]
    shown = [(first_of(block), steps) for block, steps in _changes(at_first, fixed)]
    if claimed != shown:
        broken.add(
            f"summary.json says steps_by_loss {claimed}, by round; what was fixed is {shown}"
        )
    num_steps = sum(line.steps for told in workers for line in told.lines)
    _check_counts(summary, num_short, num_steps, findings)


def _first_round(run: RunRecord) -> int:
    """Return the first round of the slowest group."""
    return int(run.first[: run.first_substitute].min())


def _begins(run: RunRecord, lines: Sequence[StepLine]) -> KeptSteps | None:
    """Return the steps of a checkpoint; None if the run begins as every run does."""
    resumed = lines[0].resumed if lines else None
    return resumed.fidelity.steps if resumed is not None and goes_on(run, resumed) else None


def _changes(at_first: int, fixed: Mapping[Term, Sequence[int]]) -> list[tuple[int, int]]:
    """Return (first block, steps) of each change."""
    changes = [(0, at_first)]
    for term, (steps, *_) in fixed.items():
        if steps != changes[-1][1]:
            changes.append((term.block, steps))
    return changes


def _check_by_loss(
    run: RunRecord, lines: Sequence[StepLine], findings: Findings, *, is_complete: bool
) -> dict[Term, list[int]]:
    broken = findings[Rule.HANDS]
    control = LossStepControl(
        num_workers=run.num_workers,
        num_groups=len(run.groups),
        local_steps=run.local_steps_by_loss,
    )

    fixed: dict[Term, list[int]] = {}
    risen = Risen(run.rollback)
    begins = _begins(run, lines)
    starts = ((0, run.local_steps_by_loss),) if begins is None else begins.starts
    num_before = 0 if begins is None else begins.num_fixed
    if begins is None:
        risen.go_on(None, _first_round(run))
    else:
        try:
            control.go_on(begins)
            resumed = lines[0].resumed
            assert resumed is not None
            risen.go_on(resumed.fidelity.rise, _first_round(run))
        except ValueError as error:
            broken.add(f"{STEP_LINES}, line 1: the run continued with steps {error}")
            return fixed
        for block in range(window_of(_first_round(run)), num_before):
            fixed[Term(0, 0, block)] = [*control.of_all(at_place(starts, block))]

    unsaid = [] if begins is None else [begins]

    def most_since(clock: int) -> int:
        changes = _changes(starts[0][1], fixed)
        return max(steps for _, steps in from_place(changes, window_of(clock)))

    def kept_now(step: int) -> KeptSteps:
        changes = _changes(starts[0][1], fixed)
        num_fixed = max((term.block + 1 for term in fixed), default=num_before)
        return control.kept(from_place(changes, window_of(step)), num_fixed)

    def take(line: StepLine) -> str:
        if line.rolled_back is not None:
            return ""
        if line.resumed is not None:
            is_first = bool(unsaid)
            unsaid.clear()
            return (
                ""
                if is_first
                else "names steps that the run continued with, but it did not continue"
            )
        if line.kept is not None:
            step = int(line.kept.checkpoint.removeprefix("step-") or 0)
            now = TuningState(steps=kept_now(step), rise=risen.kept())
            is_so = bool(line.kept.checkpoint) and line.kept.fidelity == now
            return "" if is_so else "other choices than follow from what was reported"
        told = line.reported
        if told is None:
            return "is no report"
        if not told.is_of(run.num_workers, least=0.0):
            return "of no worker of this run, or of losses that there are not"
        if not (risen.is_asked and counts_nonfinite(told.total)):
            control.report(told.worker, told.count, told.total)
        risen.report(told, lossiest_since=most_since)
        return ""

    def judge(line: StepLine) -> str:
        return risen.judge(line.rolled_back)

    check_fixed(lines, take, control.choose, findings, fixed, judge)
    if wrong := risen.judge_end() if is_complete else "":
        broken.add(f"{STEP_LINES}: {wrong}")
    return fixed


def _check_worker(
    run: RunRecord,
    worker: int,
    lines: Sequence[LengthLine],
    fixed: Mapping[Term, Sequence[int]],
    findings: Findings,
) -> int:
    """Require consecutive rounds of the fixed steps, or fewer where a round was cut. Return the
    number of cut rounds."""
    broken = findings[Rule.HANDS]
    num_short, group = 0, int(run.group_of_worker()[worker])
    for coming, line in enumerate(lines, start=int(run.first[group])):
        where = f"worker {worker}: round {line.round}"
        if line.round != coming:
            broken.add(f"{where} is recorded where round {coming} belongs")
        steps = fixed.get(Term(0, 0, window_of(line.round)))
        if steps is None or len(steps) <= group:
            broken.add(f"{where}: its steps were never fixed")
            continue
        if line.steps > steps[group]:
            broken.add(f"{where} is of {line.steps} steps, {steps[group]} were fixed")
        num_short += line.steps < steps[group]
    return num_short


def check_passes(
    run: RunRecord,
    rounds: Sequence[WorkerLines[LengthLine]],
    passes: Sequence[WorkerLines[PassLine]],
    summary: Summary | None,
    findings: Findings,
) -> None:
    """``rounds`` and ``passes``: by worker."""
    num_cut = num_steps = 0
    for worker, (lengths, told) in enumerate(zip(rounds, passes, strict=True)):
        ends = _ends(run, worker, lengths, findings)
        _check_passes_of(worker, ends, told.lines, findings)
        whole = {line.round for line in told.lines if line.is_whole}
        num_cut += sum(each not in whole for each in ends)
        num_steps += max(ends.values(), default=0)
    is_complete = all(each.is_complete for each in rounds) and all(
        each.is_complete for each in passes
    )
    if summary is not None and is_complete:
        _check_counts(summary, num_cut, num_steps, findings)


def _check_counts(summary: Summary, num_cut: int, num_steps: int, findings: Findings) -> None:
    for name, says, is_so in (
        ("rounds_cut", summary.rounds_cut, num_cut),
        ("local_steps", summary.local_steps, num_steps),
    ):
        if says != is_so:
            findings[Rule.HANDS].add(
                f"summary.json says {name} {says}; by what workers recorded it is {is_so}"
            )


def _ends(
    run: RunRecord, worker: int, lengths: WorkerLines[LengthLine], findings: Findings
) -> Mapping[int, int]:
    """Return the steps that this worker had made at the end of each round."""
    first = int(run.first[int(run.group_of_worker()[worker])])
    for coming, line in enumerate(lengths.lines, start=first):
        if line.round != coming:
            findings[Rule.HANDS].add(
                f"worker {worker}: round {line.round} is recorded where round {coming} belongs"
            )
    made = accumulate(line.steps for line in lengths.lines)
    return dict(zip((line.round for line in lengths.lines), made, strict=True))


def _check_passes_of(
    worker: int, ends: Mapping[int, int], lines: Sequence[PassLine], findings: Findings
) -> None:
    """Require that a round ended with each pass, and no round was of two passes."""
    broken = findings[Rule.HANDS]
    before, at_ends = 0, frozenset(ends.values())
    for number, line in enumerate(lines):
        where = f"worker {worker}: pass {number} was over after {line.steps} steps"
        if line.steps <= before and line.round >= 0:
            broken.add(f"{where}, the one before it after {before}")
        before = line.steps
        if line.round >= 0 and ends.get(line.round) != line.steps:
            broken.add(f"{where}, round {line.round} after {ends.get(line.round, 'none')}")
        elif line.steps not in at_ends:
            broken.add(f"{where}, and no round ended there")
