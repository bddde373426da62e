"""RUN_DIR and its files, written by one rank each; every file is complete or absent.

    run = RunDirectory.create(Path("runs/a"))
    run.write_json("ranks.json", [...])
    run.append_metrics({"epoch": 1, "loss": 0.5})
    run.num_lost, run.why_lost                # lines for which there was no space

The contract of names is in docs/reference/run-directory.md; other modules decide the contents.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from psdist.errors import ConfigError, HistoryError
from psdist.protocol.coordinator_line import num_done
from psdist.whole_writes import append_whole

logger = logging.getLogger("psdist")


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        """Lines of metrics.jsonl that could not be written."""
        self.why_lost = ""
        """Why the first of them could not."""
        self._open: dict[str, FileIO] = {}
        """Files that lines are appended to, by name."""

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make the directory; :class:`ConfigError` if it holds a run already or cannot be made."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / "ranks.json").exists():
                raise ConfigError(
                    f"run_dir = {path}: it holds a run already; choose another directory, remove "
                    "this one, or continue it (--resume)"
                )
        except OSError as error:
            raise ConfigError(f"run_dir = {path}: cannot be made: {error.strerror}") from error
        return cls(path)

    def write_text(self, name: str, text: str) -> None:
        partial = self.path / f"{name}.partial"
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self.path / name)
        except OSError:
            with suppress(OSError):
                partial.unlink()  # a full disk needs its room
            raise

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Write one line of metrics.jsonl. If that fails, count the line and log the first failure;
        training continues."""
        try:
            self._append("metrics.jsonl", line)
        except OSError as error:
            if not self.num_lost:
                self.why_lost = error.strerror or str(error)
                logger.warning(
                    "a line of %s was not written: %s; training continues, and lines are lost "
                    "until there is space",
                    self.path / "metrics.jsonl",
                    self.why_lost,
                )
            self.num_lost += 1

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Write one line to a file of the history. Raises HistoryError if that fails, because
        psdist check needs every line."""
        try:
            self._append(name, line)
        except OSError as error:
            raise HistoryError(
                f"cannot write {self.path / name}: {error.strerror or error}; free some space, or "
                "leave report.record out"
            ) from error

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if name not in self._open:
            self._open[name] = open(self.path / name, "ab", buffering=0)  # noqa: SIM115 - by close()
        append_whole(self._open[name], f"{json.dumps(line)}\n".encode())

    def missing(self, name: str, lines: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the ``lines``, in order, that are not at the end of the file. Another rank was
        to append them, and may not have done so."""
        if not lines or not (self.path / name).exists():
            return lines
        with (self.path / name).open(encoding="utf-8") as file:
            there = [line.rstrip("\n") for line in deque(file, len(lines))]
        return lines[num_done(there, [json.dumps(each) for each in lines]) :]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
