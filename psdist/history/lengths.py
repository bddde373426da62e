"""What workers record of rounds whose length the loss decides: how many local steps each was of.

Owns the lines of ``history/worker-N.lengths``, one for each round. Never judges
(:mod:`psdist.history.rules.lengths`).

    records = LengthRecords(folder, worker=1)
    records.add(7, num_steps=11)
    records.close()
    read_lengths(folder, num_workers=4)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from psdist.history.line_records import Line, LineRecords, parsed, read_closed_lines


class LengthLine(Line):
    round: Annotated[int, Field(ge=0, lt=2**63)]
    steps: Annotated[int, Field(ge=1, lt=2**31)]


class LengthLines(Line):
    lines: tuple[LengthLine, ...]
    is_complete: bool
    """Whether the worker has closed its file."""


class LengthRecords(LineRecords):
    """One worker's."""

    def __init__(self, folder: Path, worker: int) -> None:
        super().__init__(folder / f"worker-{worker}.lengths")

    def add(self, round_number: int, num_steps: int) -> None:
        self.add_line({"round": round_number, "steps": num_steps})


def read_lengths(
    folder: Path, *, num_workers: int, may_be_missing: bool = False
) -> list[LengthLines]:
    """By worker. Raises :class:`HistoryError` where a file is damaged, or missing but in a run that
    ended early (``may_be_missing``); a last line that a crash has cut is left out."""
    found = []
    for worker in range(num_workers):
        path = folder / f"worker-{worker}.lengths"
        lines, is_complete = read_closed_lines(path, may_be_missing=may_be_missing)
        rounds = tuple(parsed(LengthLine, each, path) for each in lines)
        found.append(LengthLines(lines=rounds, is_complete=is_complete))
    return found
