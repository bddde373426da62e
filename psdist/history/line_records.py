"""A worker's file of lines in the history: written as it comes, closed with a line that says so.

Owns how such files are written and read; what a line says is its owner's
(:mod:`psdist.history.hands`, :mod:`psdist.history.lengths`).

    records = LineRecords(folder / "worker-1.hands")
    records.add_line({"round": 3})
    records.close()
    lines, is_complete = read_closed_lines(path)
"""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from psdist.errors import HistoryError
from psdist.history.run_record import cannot

_LIMIT_BYTES = 1 << 30
_FLUSH_EVERY_S = 0.25
_CLOSED = b"closed"


_B = TypeVar("_B", bound=BaseModel)


class Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def require_one(line: _B) -> _B:
    """Of a line that says one of several things: it says exactly one."""
    if len(line.model_fields_set) != 1:
        raise ValueError(f"a line of {len(line.model_fields_set)} members, where one belongs")
    return line


class LineRecords:
    """Appended to; nothing is written over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._flush_at_s = 0.0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise HistoryError(
                f"{path} is there already, from another run; choose another run directory"
            ) from error
        except OSError as error:
            raise cannot("write", path, error) from error

    def add_line(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps(line) + "\n")
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


def read_lines(path: Path) -> list[bytes]:
    """Whole ones: a last line that a crash has cut is left out. Raises :class:`HistoryError`."""
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise HistoryError(f"{path} is damaged: {path.stat().st_size} bytes")
        return path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise cannot("read", path, error) from error


def read_closed_lines(path: Path, *, may_be_missing: bool = False) -> tuple[list[bytes], bool]:
    """As :func:`read_lines`, without the one that closes the file; whether there is that one.
    ``may_be_missing``: the run may have ended before the file was begun, which has no lines then
    and is not closed."""
    if may_be_missing and not path.exists():
        return [], False
    lines = read_lines(path)
    is_complete = bool(lines) and lines[-1] == _CLOSED
    return lines[: len(lines) - is_complete], is_complete


_L = TypeVar("_L", bound=Line)


def parsed(kind: type[_L], line: bytes, path: Path) -> _L:
    """Raises :class:`HistoryError` that names ``path``."""
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_context=False)[0]
        raise HistoryError(f"{path} is damaged: {first['msg']}") from error
