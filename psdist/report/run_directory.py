"""RUN_DIR and its files, written by one rank each; every file is complete or absent.

    run = RunDirectory.create(Path("runs/a"))
    run.write_json("ranks.json", [...])
    run.append_metrics({"epoch": 1, "loss": 0.5})

The contract of names is in docs/design.md; what the files say is decided elsewhere.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from psdist.errors import ConfigError
from psdist.protocol.registrar_line import num_done


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, TextIO] = {}
        """Files that lines are appended to, by name."""

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make the directory; :class:`ConfigError` if it holds a run already or cannot be made."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / "ranks.json").exists():
                raise ConfigError(
                    f"run_dir = {path}: it holds a run already; choose another directory, remove "
                    "this one, or go on with it (--resume)"
                )
        except OSError as error:
            raise ConfigError(f"run_dir = {path}: cannot be made: {error.strerror}") from error
        return cls(path)

    def write_text(self, name: str, text: str) -> None:
        partial = self.path / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.path / name)

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=1) + "\n")

    def append_metrics(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl, in the file when this returns."""
        self.append("metrics.jsonl", line)

    def append(self, name: str, line: dict[str, Any]) -> None:
        """One line of a file of lines, in the file when this returns."""
        if name not in self._open:
            self._open[name] = (self.path / name).open("a", encoding="utf-8")
        self._open[name].write(json.dumps(line) + "\n")
        self._open[name].flush()

    def missing(self, name: str, lines: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Of ``lines``, which another rank was to append and may not have, in order, those that are
        not at the end of the file."""
        if not lines or not (self.path / name).exists():
            return lines
        with (self.path / name).open(encoding="utf-8") as file:
            there = [line.rstrip("\n") for line in deque(file, len(lines))]
        return lines[num_done(there, [json.dumps(each) for each in lines]) :]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
