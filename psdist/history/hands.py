"""What workers record of the hands that they were dealt, and the registrar of local steps by speed.

Owns both files' lines: ``history/worker-N.hands``, a line for each hand of which this worker was
given the last batch, and ``RUN_DIR/steps.jsonl``, a line for each observation and for each term
that was fixed. Never judges (:mod:`psdist.history.rules.hands`).

    records = HandRecords(folder, worker=1)
    records.add(dealt, round_number=7)
    records.close()
    read_hands(folder, num_workers=4), read_step_lines(run_dir)
"""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from psdist.errors import HistoryError
from psdist.history.run_record import cannot

STEP_LINES = "steps.jsonl"
"""In the run directory."""
_LIMIT_BYTES = 1 << 30
_FLUSH_EVERY_S = 0.25

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_OrNone = Annotated[int, Field(ge=-1, lt=2**63)]
_Place = Annotated[int, Field(ge=0, lt=2**63)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class HandLine(_Line):
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


class HandLines(_Line):
    lines: tuple[HandLine, ...]
    is_complete: bool
    """Whether the worker has closed its file."""


class Observed(_Line):
    group: _Count
    round: _Count
    step_us: _Place


class Fixed(_Line):
    loader: _Count
    number: _Count
    block: _Count
    steps: Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(min_length=1)]
    why: str


class StepLine(_Line):
    observed: Observed | None = None
    fixed: Fixed | None = None


class Dealt(Protocol):
    """What a loader says of a hand (psdist.workers.data.hands)."""

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
_CLOSED = b"closed"


class HandRecords:
    """One worker's, appended; closed with a line that says so."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._path = folder / f"worker-{worker}.hands"
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

    def add(self, dealt: Dealt, *, round_number: int) -> None:
        line = {name: getattr(dealt, name) for name in _FIELDS}
        self._lines.append(json.dumps({**line, "round": round_number}) + "\n")
        if monotonic() >= self._flush_at_s:
            self.flush()

    def flush(self) -> None:
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


def read_hands(folder: Path, *, num_workers: int) -> list[HandLines]:
    """By worker. Raises :class:`HistoryError` where a file is missing or damaged; a last line that
    a crash has cut is left out."""
    found = []
    for worker in range(num_workers):
        path = folder / f"worker-{worker}.hands"
        lines = _read_lines(path)
        is_complete = bool(lines) and lines[-1] == _CLOSED
        parsed = tuple(_parsed(HandLine, each, path) for each in lines[: len(lines) - is_complete])
        found.append(HandLines(lines=parsed, is_complete=is_complete))
    return found


def read_step_lines(run_dir: Path) -> list[StepLine]:
    """In order; as :func:`read_hands`."""
    path = run_dir / STEP_LINES
    return [_parsed(StepLine, each, path) for each in _read_lines(path)]


def _read_lines(path: Path) -> list[bytes]:
    """Whole ones."""
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise HistoryError(f"{path} is damaged: {path.stat().st_size} bytes")
        return path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise cannot("read", path, error) from error


_L = TypeVar("_L", bound=_Line)


def _parsed(kind: type[_L], line: bytes, path: Path) -> _L:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_context=False)[0]
        raise HistoryError(f"{path} is damaged: {first['msg']}") from error
