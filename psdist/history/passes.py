"""What workers record of passes with which rounds of local steps end.

Owns the lines of ``history/worker-N.passes``, one for each pass that has trained. Never judges
(:mod:`psdist.history.rules.passes`).

    records = PassRecords(folder, worker=1)
    records.add(250, round_number=0, is_whole=True)
    records.close()
    read_passes(folder, num_workers=4)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from psdist.history.line_records import Line, LineRecords, parsed, read_closed_lines


class PassLine(Line):
    steps: Annotated[int, Field(ge=1, lt=2**63)]
    """That this worker had made when it was over, in this and all passes before it."""
    round: Annotated[int, Field(ge=-1, lt=2**63)]
    """That has ended with it; -1 where a collective behind its last step had ended it."""
    is_whole: bool
    """Whether the script has had all of its batches."""


class PassLines(Line):
    lines: tuple[PassLine, ...]
    is_complete: bool
    """Whether the worker has closed its file."""


class PassRecords(LineRecords):
    """One worker's."""

    def __init__(self, folder: Path, worker: int) -> None:
        super().__init__(folder / f"worker-{worker}.passes")

    def add(self, num_steps: int, *, round_number: int, is_whole: bool) -> None:
        self.add_line({"steps": num_steps, "round": round_number, "is_whole": is_whole})


def read_passes(folder: Path, *, num_workers: int, may_be_missing: bool = False) -> list[PassLines]:
    """By worker. Raises :class:`HistoryError` where a file is damaged, or missing but in a run that
    ended early (``may_be_missing``); a last line that a crash has cut is left out."""
    found = []
    for worker in range(num_workers):
        path = folder / f"worker-{worker}.passes"
        lines, is_complete = read_closed_lines(path, may_be_missing=may_be_missing)
        passes = tuple(parsed(PassLine, each, path) for each in lines)
        found.append(PassLines(lines=passes, is_complete=is_complete))
    return found
