"""The history's files of lines: each class declares one kind of line, for writing and reading.

A worker writes ``history/worker-N.SUFFIX`` (:class:`WorkerLine`); a last line ``closed`` ends a
complete file. The coordinator appends to a file of the run directory (:class:`ChoiceLine`). Each
line is one JSON object.

    records = LineRecords(folder, 1, LengthLine)
    records.add(round=7, steps=11)
    records.close()
    read_worker_lines(folder, LengthLine, num_workers=4)       # [WorkerLines(...), ...]
    read_choices(run_dir, StepLine)                            # [StepLine(...), ...]
"""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from psdist.controller.kept import Rollback, TuningState
from psdist.controller.observed import (
    GroupCame,
    GroupGone,
    LevelsSized,
    LossHeard,
    ModeObserved,
    StepsObserved,
)
from psdist.errors import HistoryError
from psdist.history.run_record import cannot, read_limited
from psdist.mode_names import Mode

STEP_LINES: Final = "steps.jsonl"
DECISION_LINES: Final = "decisions.jsonl"
_LIMIT_BYTES: Final = 1 << 30
_FLUSH_EVERY_S: Final = 0.25
_CLOSED: Final = b"closed"

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_OrNone = Annotated[int, Field(ge=-1, lt=2**63)]
_Place = Annotated[int, Field(ge=0, lt=2**63)]
_Steps = Annotated[int, Field(ge=1, lt=2**31)]


class Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# -- lines of a worker -----------------------------------------------------------------------------


class WorkerLine(Line):
    SUFFIX: ClassVar[str]


class HandLine(WorkerLine):
    """A worker's part of a hand: ``batches`` batches at the positions ``start`` to ``stop`` of the
    pass's order, written when the worker gets the last batch."""

    SUFFIX = "hands"

    loader: _Count
    number: _Count
    hand: _Count
    start: _Place
    stop: _Place
    batches: _Count
    end: _OrNone
    """Position at which the pass ends; -1 except in its last hand."""
    left: _Place
    """Samples that the pass leaves out."""
    may_leave: _Place
    """Most samples that the pass may leave out."""
    round: _OrNone
    """The worker's round; -1 outside of training."""


class LengthLine(WorkerLine):
    """A round whose length the loss decides."""

    SUFFIX = "lengths"

    round: _Place
    steps: _Steps


class PassLine(WorkerLine):
    """A pass that has trained."""

    SUFFIX = "passes"

    steps: Annotated[int, Field(ge=1, lt=2**63)]
    """Steps of this worker until the end of the pass, in this pass and all before it."""
    round: _OrNone
    """The round that ended with the pass; -1 if a collective after its last step had ended it."""
    is_whole: bool
    """True if the script has had all batches of the pass."""


_W = TypeVar("_W", bound=WorkerLine)


class WorkerLines(NamedTuple, Generic[_W]):
    """The lines of one worker."""

    lines: tuple[_W, ...]
    is_complete: bool
    """True if the worker has closed its file."""


class LineRecords(Generic[_W]):
    """A worker's file of one kind of line. Nothing is overwritten."""

    def __init__(self, folder: Path, worker: int, kind: type[_W]) -> None:
        """Raises :class:`HistoryError` if the file exists or cannot be made."""
        self._kind = kind
        self._path = folder / f"worker-{worker}.{kind.SUFFIX}"
        self._lines: list[str] = []
        self._flush_at_s = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise HistoryError(
                f"{self._path} is there already, from another run; choose another run directory"
            ) from error
        except OSError as error:
            raise cannot("write", self._path, error) from error

    def add(self, **fields: int) -> None:
        """Write a line with these fields of its kind."""
        self._lines.append(json.dumps(self._kind(**fields).model_dump()) + "\n")
        if monotonic() >= self._flush_at_s:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the operating system. Raises :class:`HistoryError`."""
        if self._file.closed:
            return
        lines, self._lines = self._lines, []
        self._flush_at_s = monotonic() + _FLUSH_EVERY_S
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:
            raise cannot("write", self._path, error) from error

    def close(self) -> None:
        self._lines.append(f"{_CLOSED.decode()}\n")
        self.flush()
        self._file.close()


def read_worker_lines(
    folder: Path, kind: type[_W], *, num_workers: int, may_be_missing: bool = False
) -> list[WorkerLines[_W]]:
    """Return the lines of each worker. Raises :class:`HistoryError` if a file is damaged, or
    missing (unless ``may_be_missing``: the run ended early). A truncated last line is left out."""
    found = []
    for worker in range(num_workers):
        path = folder / f"worker-{worker}.{kind.SUFFIX}"
        lines = [] if may_be_missing and not path.exists() else _read(path)
        is_complete = bool(lines) and lines[-1] == _CLOSED
        del lines[len(lines) - is_complete :]
        parsed = tuple(_parsed(kind, each, path) for each in lines)
        found.append(WorkerLines(parsed, is_complete))
    return found


# -- lines of the coordinator ----------------------------------------------------------------------


class KeptLine(Line):
    """Psdist's own choices, as the checkpoint has them."""

    checkpoint: Annotated[str, Field(pattern=r"^(step-[0-9]{8,15})?$")]
    """"" if a run begins with them after a rollback, without a checkpoint."""
    fidelity: TuningState
    """The tuning state, under its older name in files."""


class ChoiceLine(Line):
    """A line with exactly one member: what psdist has observed, or has chosen."""

    NAME: ClassVar[str]
    """Name of the file in the run directory."""

    kept: KeptLine | None = None
    resumed: KeptLine | None = None
    rolled_back: Rollback | None = None
    reported: LossHeard | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"a line of {len(self.model_fields_set)} members, where one belongs")
        return self


class Fixed(Line):
    """Local steps of each group in a term."""

    loader: _Count
    number: _Count
    block: _Count
    steps: Annotated[list[_Steps], Field(min_length=1)]
    why: str


class StepLine(ChoiceLine):
    """A line on local steps by speed or by the loss."""

    NAME = STEP_LINES

    observed: StepsObserved | None = None
    fixed: Fixed | None = None


class Changed(Line):
    """The mode from these rounds on, by parameter set; or the codecs (``level``)."""

    rounds: Annotated[list[_Count], Field(min_length=1)]
    mode: Mode
    staleness: _Count
    why: str
    level: Annotated[int, Field(ge=-1, lt=2**31)] = -1


class DecisionLine(ChoiceLine):
    """A line on the mode or the codecs, where psdist changes them."""

    NAME = DECISION_LINES

    observed: ModeObserved | None = None
    changed: Changed | None = None
    sized: LevelsSized | None = None
    gone: GroupGone | None = None
    came: GroupCame | None = None


_C = TypeVar("_C", bound=ChoiceLine)


def read_choices(run_dir: Path, kind: type[_C]) -> list[_C]:
    """Return the lines in order; none if there is no such file, because nothing was observed.
    Raises :class:`HistoryError` if it is damaged. A truncated last line is left out."""
    path = run_dir / kind.NAME
    return [_parsed(kind, each, path) for each in (_read(path) if path.exists() else ())]


# -- files -----------------------------------------------------------------------------------------

_L = TypeVar("_L", bound=Line)


def _read(path: Path) -> list[bytes]:
    """Return the whole lines. Raises :class:`HistoryError`."""
    return read_limited(path, _LIMIT_BYTES).split(b"\n")[:-1]


def _parsed(kind: type[_L], line: bytes, path: Path) -> _L:
    """Return the line. Raises :class:`HistoryError` with the name of the file."""
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_context=False)[0]
        raise HistoryError(f"{path} is damaged: {first['msg']}") from error
