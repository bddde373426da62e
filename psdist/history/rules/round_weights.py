"""Whether rounds of local steps weigh what their steps call for.

Owns the part of rule 5 of docs/history.md that is of ``round_weights``: what workers say that their
pushes weigh is held against the steps that they have recorded. Pure.

    check_round_weights(history, read_lengths(folder, ...), findings)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from psdist.history.lengths import LengthLines
from psdist.history.records import History
from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.pushes import Claims
from psdist.history.run_record import RunRecord

_ROUNDING = 1e-9
"""Relative."""


def check_round_weights(
    history: History, rounds: Sequence[LengthLines], findings: Findings
) -> None:
    """``rounds``: by worker, of the same parameter set."""
    run = history.run
    claims = Claims.of(history, Findings(max_listed_per_rule=0))  # judged by its own rule
    group_of = run.group_of_worker()
    for worker, told in enumerate(rounds):
        group = int(group_of[worker])
        share = run.num_workers / len(run.groups) / len(run.groups[group])
        first, begin = int(claims.first[worker]), int(claims.begin[worker])
        num = claims.num_iterations(worker)
        steps = {line.round: line.steps for line in told.lines}
        for clock in range(begin, begin + num):
            weight = float(claims.own[first + clock - begin])
            if clock not in steps:
                if told.is_complete:
                    findings.add(
                        Rule.WEIGHTS,
                        f"worker {worker}: the steps of round {clock} are not recorded",
                    )
                continue
            wanted = share * _weight(run, steps[clock])
            if not isclose(weight, wanted, rel_tol=_ROUNDING):
                findings.add(
                    Rule.WEIGHTS,
                    f"worker {worker}, round {clock}: brought weight {weight:g}; of {steps[clock]} "
                    f"steps it weighs {wanted:g} (round_weights = {run.round_weights})",
                )


def _weight(run: RunRecord, steps: int) -> float:
    if run.round_weights == "steps":
        return steps / run.usual_steps
    return run.usual_steps / steps
