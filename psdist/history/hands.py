"""What workers record of the hands that they were dealt, and the coordinator of local steps that it
fixes, by speed or by the loss.

Owns both files' lines: ``history/worker-N.hands``, a line for each hand of which this worker was
given the last batch, and ``RUN_DIR/steps.jsonl``, a line for each observation or report and for
each term that was fixed. Never judges (:mod:`psdist.history.rules.hands`).

    records = HandRecords(folder, worker=1)
    records.add(dealt, round_number=7)
    records.close()
    read_hands(folder, num_workers=4), read_step_lines(run_dir)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field, model_validator

from psdist.controller.kept import Fidelity, Rollback
from psdist.controller.loss_steps import MOST_LOSS
from psdist.history.line_records import (
    Line,
    LineRecords,
    parsed,
    read_closed_lines,
    read_lines,
    require_one,
)

STEP_LINES = "steps.jsonl"
"""In the run directory."""

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_OrNone = Annotated[int, Field(ge=-1, lt=2**63)]
_Place = Annotated[int, Field(ge=0, lt=2**63)]


class HandLine(Line):
    """A worker's part of a hand: ``batches`` of the positions ``start`` to ``stop`` of the pass's
    order. ``end``: where the pass ends, -1 but in its last hand; ``left``: samples that it leaves
    out then, and ``may_leave``: as many at most. ``round``: that the worker was in, -1 outside of
    training."""

    loader: _Count
    number: _Count
    hand: _Count
    start: _Place
    stop: _Place
    batches: _Count
    end: _OrNone
    left: _Place
    may_leave: _Place
    round: _OrNone


class HandLines(Line):
    lines: tuple[HandLine, ...]
    is_complete: bool
    """Whether the worker has closed its file."""


class Observed(Line):
    group: _Count
    round: _Count
    step_us: _Place


class Reported(Line):
    """Of a worker's script, since the line before of the same worker: ``count`` losses, with the
    sum ``total``, until it came to ``round``."""

    worker: _Count
    round: _Count
    count: Annotated[int, Field(ge=1, lt=2**63)]
    total: Annotated[float, Field(allow_inf_nan=False)]

    def is_of(self, num_workers: int, *, least: float = -MOST_LOSS) -> bool:
        """Whether one of so many workers can have reported such losses."""
        is_possible = least * self.count <= self.total <= MOST_LOSS * self.count
        return self.worker < num_workers and is_possible


class Fixed(Line):
    loader: _Count
    number: _Count
    block: _Count
    steps: Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=1)]
    why: str


class KeptLine(Line):
    """What psdist had chosen by itself, as the checkpoint has it."""

    checkpoint: Annotated[str, Field(pattern=r"^(step-[0-9]{8,15})?$")]
    """"" where a run goes on with it behind a rollback, and from none."""
    fidelity: Fidelity


class StepLine(Line):
    observed: Observed | None = None
    reported: Reported | None = None
    fixed: Fixed | None = None
    kept: KeptLine | None = None
    resumed: KeptLine | None = None
    rolled_back: Rollback | None = None

    _is_one = model_validator(mode="after")(require_one)


class Dealt(Protocol):
    """What a loader says of a hand (psdist.workers.data.assignments)."""

    @property
    def loader(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def hand(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def batches(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def may_leave(self) -> int: ...


_FIELDS = ("loader", "number", "hand", "start", "stop", "batches", "end", "left", "may_leave")


class HandRecords(LineRecords):
    """One worker's."""

    def __init__(self, folder: Path, worker: int) -> None:
        super().__init__(folder / f"worker-{worker}.hands")

    def add(self, dealt: Dealt, *, round_number: int) -> None:
        line = {name: getattr(dealt, name) for name in _FIELDS}
        self.add_line({**line, "round": round_number})


def read_hands(folder: Path, *, num_workers: int, may_be_missing: bool = False) -> list[HandLines]:
    """By worker. Raises :class:`HistoryError` where a file is damaged, or missing but in a run that
    ended early (``may_be_missing``); a last line that a crash has cut is left out."""
    found = []
    for worker in range(num_workers):
        path = folder / f"worker-{worker}.hands"
        lines, is_complete = read_closed_lines(path, may_be_missing=may_be_missing)
        hands = tuple(parsed(HandLine, each, path) for each in lines)
        found.append(HandLines(lines=hands, is_complete=is_complete))
    return found


def read_step_lines(run_dir: Path) -> list[StepLine]:
    """In order; as :func:`read_hands`. None where there is no such file, because nothing was told
    or fixed."""
    path = run_dir / STEP_LINES
    if not path.exists():
        return []
    return [parsed(StepLine, each, path) for each in read_lines(path)]
