"""Records of local steps by worker: the steps of each round, and the passes that ended rounds.

Owns the lines of ``history/worker-N.lengths``, one for each round whose length the loss decides,
and of ``history/worker-N.passes``, one for each pass that has trained. Never judges
(:mod:`psdist.history.rules.lengths`).

    records = LengthRecords(folder, worker=1)
    records.add(7, num_steps=11)
    records.close()
    read_lengths(folder, num_workers=4)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from psdist.history.line_records import Line, LineRecords, parsed, read_closed_lines

_L = TypeVar("_L", bound=Line)


class LengthLine(Line):
    round: Annotated[int, Field(ge=0, lt=2**63)]
    steps: Annotated[int, Field(ge=1, lt=2**31)]


class LengthLines(Line):
    lines: tuple[LengthLine, ...]
    is_complete: bool
    """True if the worker has closed its file."""


class LengthRecords(LineRecords):
    def __init__(self, folder: Path, worker: int) -> None:
        super().__init__(folder / f"worker-{worker}.lengths")

    def add(self, round_number: int, num_steps: int) -> None:
        self.add_line({"round": round_number, "steps": num_steps})


def read_lengths(
    folder: Path, *, num_workers: int, may_be_missing: bool = False
) -> list[LengthLines]:
    """Return the lines of each worker. Raises :class:`HistoryError` if a file is damaged, or
    missing (unless ``may_be_missing``: the run ended early). A truncated last line is left out."""
    paths = [folder / f"worker-{worker}.lengths" for worker in range(num_workers)]
    found = [_read(path, LengthLine, may_be_missing=may_be_missing) for path in paths]
    return [LengthLines(lines=lines, is_complete=is_complete) for lines, is_complete in found]


class PassLine(Line):
    steps: Annotated[int, Field(ge=1, lt=2**63)]
    """Steps of this worker until the end of the pass, in this pass and all before it."""
    round: Annotated[int, Field(ge=-1, lt=2**63)]
    """The round that ended with the pass; -1 if a collective after its last step had ended it."""
    is_whole: bool
    """True if the script has had all batches of the pass."""


class PassLines(Line):
    lines: tuple[PassLine, ...]
    is_complete: bool
    """True if the worker has closed its file."""


class PassRecords(LineRecords):
    def __init__(self, folder: Path, worker: int) -> None:
        super().__init__(folder / f"worker-{worker}.passes")

    def add(self, num_steps: int, *, round_number: int, is_whole: bool) -> None:
        self.add_line({"steps": num_steps, "round": round_number, "is_whole": is_whole})


def read_passes(folder: Path, *, num_workers: int, may_be_missing: bool = False) -> list[PassLines]:
    """As :func:`read_lengths`."""
    paths = [folder / f"worker-{worker}.passes" for worker in range(num_workers)]
    found = [_read(path, PassLine, may_be_missing=may_be_missing) for path in paths]
    return [PassLines(lines=lines, is_complete=is_complete) for lines, is_complete in found]


def _read(path: Path, kind: type[_L], *, may_be_missing: bool) -> tuple[tuple[_L, ...], bool]:
    lines, is_complete = read_closed_lines(path, may_be_missing=may_be_missing)
    return tuple(parsed(kind, each, path) for each in lines), is_complete
