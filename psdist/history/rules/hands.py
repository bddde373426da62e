"""Whether every sample was dealt once, and each group made the local steps that were fixed for it.

Owns rule 11 of docs/history.md: recomputes what :mod:`psdist.controller.steps` decides of what was
observed, and holds what workers were dealt against it. Pure.

    check_hands(run, read_hands(folder, ...), read_step_lines(run_dir), findings)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from psdist.controller.steps import StepControl, Term, block_of
from psdist.history.hands import HandLine, HandLines, StepLine
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.fixed_steps import check_fixed
from psdist.history.run_record import RunRecord

_Pass = tuple[int, int]
"""Loader, and number of the pass over it."""


def check_hands(
    run: RunRecord,
    workers: Sequence[HandLines],
    lines: Sequence[StepLine],
    findings: Findings,
) -> None:
    """``workers``: by worker; ``lines``: the registrar's, in order."""
    fixed = _check_by_speed(run, lines, findings)
    for worker, told in enumerate(workers):
        _check_worker(run, worker, told.lines, fixed, findings)
    by_hand: defaultdict[_Pass, defaultdict[int, dict[int, HandLine]]]
    by_hand = defaultdict(lambda: defaultdict(dict))
    for worker, told in enumerate(workers):
        for line in told.lines:
            by_hand[line.loader, line.number][line.hand][worker] = line
    for key, hands in sorted(by_hand.items()):
        _check_pass(run, key, hands, findings)


def _check_by_speed(
    run: RunRecord, lines: Sequence[StepLine], findings: Findings
) -> dict[Term, list[int]]:
    control = StepControl(
        sizes=[len(workers) for workers in run.groups], local_steps=run.local_steps_by_speed
    )

    def take(line: StepLine) -> str:
        seen = line.observed
        if seen is None:
            return "is no observation"
        if seen.group >= len(run.groups):
            return "of no group of this run"
        control.observe(seen.group, seen.step_us)
        return ""

    return check_fixed(lines, take, control.choose, findings)


def _check_worker(
    run: RunRecord,
    worker: int,
    lines: Sequence[HandLine],
    fixed: Mapping[Term, Sequence[int]],
    findings: Findings,
) -> None:
    """As many batches as were fixed for its group, but in the last hand of a pass; a round for each
    hand."""
    group = int(run.group_of_worker()[worker])
    last_round = -1
    coming: defaultdict[_Pass, int] = defaultdict(int)
    for line in lines:
        where = f"worker {worker}: hand {line.hand} of pass {line.number} over loader {line.loader}"
        steps = fixed.get(Term(line.loader, line.number, block_of(line.hand)))
        if steps is None or len(steps) <= group:
            findings.add(Rule.HANDS, f"{where} was never fixed")
        elif line.batches != steps[group] and not (line.end >= 0 and line.batches < steps[group]):
            findings.add(
                Rule.HANDS, f"{where} is of {line.batches} batches, {steps[group]} were fixed"
            )
        if 0 <= line.round <= last_round:
            findings.add(Rule.HANDS, f"{where} ended in round {line.round}, as the hand before it")
        last_round = max(last_round, line.round)
        if line.hand != coming[line.loader, line.number]:
            findings.add(Rule.HANDS, f"{where} follows {coming[line.loader, line.number] - 1}")
        coming[line.loader, line.number] = line.hand + 1
        if line.left > line.may_leave:
            findings.add(Rule.HANDS, f"{where} leaves out {line.left} samples")


def _check_pass(
    run: RunRecord,
    key: _Pass,
    hands: Mapping[int, Mapping[int, HandLine]],
    findings: Findings,
) -> None:
    """What all workers were dealt in a hand lies side by side, and hands one behind the other. Of a
    hand that some workers have not come to nothing is dealt twice."""
    place, which = 0, f"pass {key[1]} over loader {key[0]}"
    for hand, lines in sorted(hands.items()):
        is_whole = len(lines) == run.num_workers
        for line in sorted(lines.values(), key=lambda each: each.start):
            if line.start < place or (is_whole and line.start != place) or line.stop < line.start:
                findings.add(
                    Rule.HANDS,
                    f"{which}: in hand {hand} the samples {line.start} to {line.stop} were dealt, "
                    f"those before end at {place}",
                )
            place = max(place, line.stop)
        ends = {line.end for line in lines.values()}
        end = min(ends)
        if len(ends) > 1 or (end >= 0 and is_whole and end != place):
            findings.add(
                Rule.HANDS, f"{which}: hand {hand} ends at {place}, workers say {sorted(ends)}"
            )
        if end >= 0 and hand != max(hands):
            findings.add(Rule.HANDS, f"{which}: hand {hand} is the last one, and others follow")
