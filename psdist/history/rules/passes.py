"""Whether rounds of local steps ended with the passes over the loader.

Owns the part of rule 11 of docs/history.md that is of rounds of an epoch: where passes ended is
counted by the loaders, where rounds did by the trainer. Pure.

    check_passes(run, read_lengths(folder, ...), read_passes(folder, ...), summary, findings)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from psdist.history.lengths import LengthLines, PassLine, PassLines
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary


def check_passes(
    run: RunRecord,
    rounds: Sequence[LengthLines],
    passes: Sequence[PassLines],
    summary: Summary | None,
    findings: Findings,
) -> None:
    """``rounds`` and ``passes``: by worker."""
    num_cut = num_steps = 0
    for worker, (lengths, told) in enumerate(zip(rounds, passes, strict=True)):
        ends = _ends(run, worker, lengths, findings)
        _check_worker(worker, ends, told.lines, findings)
        whole = {line.round for line in told.lines if line.is_whole}
        num_cut += sum(each not in whole for each in ends)
        num_steps += max(ends.values(), default=0)
    is_complete = all(each.is_complete for each in rounds) and all(
        each.is_complete for each in passes
    )
    if summary is None or not is_complete:
        return
    for name, says, is_so in (
        ("rounds_cut", summary.rounds_cut, num_cut),
        ("local_steps", summary.local_steps, num_steps),
    ):
        if says != is_so:
            findings.add(
                Rule.HANDS,
                f"summary.json says {name} {says}; by what workers recorded it is {is_so}",
            )


def _ends(
    run: RunRecord, worker: int, lengths: LengthLines, findings: Findings
) -> Mapping[int, int]:
    """By round, the steps that this worker had made when it ended."""
    first = int(run.first[int(run.group_of_worker()[worker])])
    for coming, line in enumerate(lengths.lines, start=first):
        if line.round != coming:
            findings.add(
                Rule.HANDS,
                f"worker {worker}: round {line.round} is recorded where round {coming} belongs",
            )
    made = accumulate(line.steps for line in lengths.lines)
    return dict(zip((line.round for line in lengths.lines), made, strict=True))


def _check_worker(
    worker: int, ends: Mapping[int, int], lines: Sequence[PassLine], findings: Findings
) -> None:
    """With each pass a round had ended, and no round was of two passes."""
    before, at_ends = 0, frozenset(ends.values())
    for number, line in enumerate(lines):
        where = f"worker {worker}: pass {number} was over after {line.steps} steps"
        if line.steps <= before and line.round >= 0:
            findings.add(Rule.HANDS, f"{where}, the one before it after {before}")
        before = line.steps
        if line.round >= 0 and ends.get(line.round) != line.steps:
            findings.add(
                Rule.HANDS, f"{where}, round {line.round} after {ends.get(line.round, 'none')}"
            )
        elif line.steps not in at_ends:
            findings.add(Rule.HANDS, f"{where}, and no round ended there")
