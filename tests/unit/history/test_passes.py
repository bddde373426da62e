"""Passes with which rounds of local steps end, as they are recorded: read, refused where damaged,
and judged by the check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psdist.errors import HistoryError
from psdist.history.lines import (
    LengthLine,
    LineRecords,
    PassLine,
    WorkerLines,
    read_worker_lines,
)
from psdist.history.rules.choices.lengths import check_passes
from psdist.history.rules.findings import Findings
from psdist.history.run_record import RunRecord
from psdist.history.summary import Summary

RUN = RunRecord(
    psdist="1",
    mode="sync",
    has_rounds_by_pass=True,
    groups=((0,),),
    slices=((),),
    num_servers=1,
    num_chunks=0,
    owners=(),
)
PASSES = [(10, 0, True), (20, -1, True), (24, 3, False)]
"""A collective has ended the second after its last step, and the script has left the third."""
ROUNDS = [(0, 10), (1, 7), (2, 3), (3, 4)]


def found(
    passes: Any = PASSES, rounds: Any = ROUNDS, *, cut: int = 3, is_complete: bool = True
) -> str:
    lengths = tuple(LengthLine(round=clock, steps=steps) for clock, steps in rounds)
    told = tuple(PassLine(steps=n, round=clock, is_whole=whole) for n, clock, whole in passes)
    findings = Findings(max_listed_per_rule=20)
    check_passes(
        RUN,
        [WorkerLines(lines=lengths, is_complete=is_complete)],
        [WorkerLines(lines=told, is_complete=True)],
        Summary.model_construct(rounds_cut=cut, local_steps=24),
        findings,
    )
    return "\n".join(findings.lines())


def test_rounds_that_end_with_the_passes_are_right() -> None:
    assert found() == ""
    assert "rounds_cut 2; by what workers recorded it is 3" in found(cut=2)
    assert found(cut=2, is_complete=False) == "", "of records that end early nothing is counted"


@pytest.mark.parametrize(
    ("passes", "rounds", "words"),
    [
        (PASSES, [(0, 10), (1, 7), (2, 7)], "over after 20 steps, and no round ended there"),
        (PASSES, [(0, 10), (1, 7), (3, 3), (4, 4)], "round 3 is recorded where round 2 belongs"),
        ([(10, 0, True), (10, 0, True), *PASSES[1:]], ROUNDS, "10 steps, the one before it after"),
        ([(10, 7, True), *PASSES[1:]], ROUNDS, "over after 10 steps, round 7 after none"),
    ],
)
def test_other_rounds_are_told(passes: Any, rounds: Any, words: str) -> None:
    assert words in found(passes, rounds)


def test_records_are_read_as_they_were_made(tmp_path: Path) -> None:
    records = LineRecords(tmp_path, 0, PassLine)
    records.add(steps=10, round=0, is_whole=True)
    records.close()
    (told,) = read_worker_lines(tmp_path, PassLine, num_workers=1)
    line = PassLine(steps=10, round=0, is_whole=True)
    assert told == WorkerLines(lines=(line,), is_complete=True)
    assert not read_worker_lines(tmp_path, PassLine, num_workers=2, may_be_missing=True)[
        1
    ].is_complete
    with pytest.raises(HistoryError, match=r"cannot read .*worker-1.passes"):
        read_worker_lines(tmp_path, PassLine, num_workers=2)


@pytest.mark.parametrize("damaged", ["{}", '{"steps": 0, "round": 0, "is_whole": true}'])
def test_damage_names_the_file(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "worker-0.passes").write_text(f"{damaged}\nclosed\n")
    with pytest.raises(HistoryError, match=r"worker-0.passes is damaged"):
        read_worker_lines(tmp_path, PassLine, num_workers=1)
