"""``psdist checkpoint list``, ``verify``, ``diff`` and ``psdist export``, without MPI.

Here checkpoints are found, listed and proved (without torch); ``comparing`` compares two,
``exporting`` writes a model's file or torch's distributed format.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from psdist.checkpoint import index as indexes
from psdist.checkpoint.folder import FOLDER, Folder
from psdist.checkpoint.index import Index
from psdist.checkpoint.reading import Checkpoint
from psdist.checkpoint.strict import quoted
from psdist.commands import print_json
from psdist.errors import CheckpointError
from psdist.topology.draw import size


def find_folder(path: Path) -> Folder | None:
    """The run's, where ``path`` is a run's directory or its folder of checkpoints; None where it
    is a checkpoint. Raises :class:`CheckpointError` where it is neither."""
    if (path / indexes.NAME).exists():
        return None
    for run_dir in (path, path.parent) if path.name == FOLDER else (path,):
        folder = Folder(run_dir)
        if folder.names():
            return folder
    raise CheckpointError(
        f"{quoted(path)} holds no checkpoint: give the directory of a run that has written one, or "
        "a checkpoint's own, RUN_DIR/checkpoints/step-N"
    )


def find(path: Path) -> Checkpoint:
    """Return the newest whole checkpoint, and print why newer ones are not used. Raises
    :class:`CheckpointError`."""
    folder = find_folder(path)
    if folder is None:
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
        return checkpoint
    newest = folder.newest_good(lambda line: print(f"psdist: {line}", file=sys.stderr))
    if newest is None:
        raise CheckpointError(f"{quoted(folder.path)}: none of its checkpoints is whole")
    return newest


WHOLE, DAMAGED = 0, 1
"""Exit status of a proof."""


def list_all(path: Path, *, as_json: bool = False) -> int:
    """Print a line for each checkpoint. Only the indexes are read."""
    folder = find_folder(path)
    latest = folder.latest() if folder is not None else ""
    facts: list[dict[str, Any]] = []
    for checkpoint in _checkpoints(path, folder):
        is_latest = checkpoint.name == latest
        try:
            index = Checkpoint.open(checkpoint).index
            words, more, problem = _describe(index), _facts(index), ""
        except CheckpointError as error:
            words, more, problem = f"damaged: {error}", {}, str(error)
        facts.append({"name": checkpoint.name, "is_latest": is_latest, "problem": problem} | more)
        if not as_json:
            print(f"{checkpoint.name}  {words}{'  latest' * is_latest}")
    if as_json:
        print_json("checkpoint list", {"checkpoints": facts})
    return 0


def _checkpoints(path: Path, folder: Folder | None) -> list[Path]:
    return [path] if folder is None else [folder.path / name for name in folder.names()]


def _facts(index: Index) -> dict[str, Any]:
    """Return what ``list --json`` shows of a checkpoint that can be read."""
    return {
        "time": index.time,
        "attempt": index.attempt,
        "mode": index.mode,
        "num_workers": index.num_workers,
        "num_groups": len(index.groups),
        "num_servers": index.servers,
        "clocks": [list(each.clocks) for each in index.sets],
        "num_bytes": index.num_bytes,
    }


def _describe(index: Index) -> str:
    clocks = " | ".join(_clocks(each.clocks) for each in index.sets)
    who = (
        f"{_count(index.num_workers, 'worker')} in {_count(len(index.groups), 'group')}, "
        f"{_count(index.servers, 'server')}"
    )
    num_tables = sum(len(each.tables) for each in index.sets)
    return (
        f"{index.time}  attempt {index.attempt}  {index.mode}, {who}  clock {clocks}  "
        f"{size(index.num_bytes)}"
    ) + f"  {_count(num_tables, 'table')}" * bool(num_tables)


def _clocks(clocks: Iterable[int]) -> str:
    """``"100"`` where all groups have it, else ``"100, 98"``."""
    every = tuple(clocks)
    return str(every[0]) if len(set(every)) == 1 else ", ".join(map(str, every))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def verify(path: Path, *, as_json: bool = False) -> int:
    """Read every byte of one checkpoint or of all of a run, and return the exit status."""
    folder = find_folder(path)
    facts: list[dict[str, Any]] = []
    for each in _checkpoints(path, folder):
        facts.append(_proof(each))
        if not as_json:
            print(f"{each.name}: {facts[-1]['problem'] or _whole(facts[-1])}")
    problem = "" if folder is None else _problem_of_latest(folder)
    is_whole = not problem and all(each["is_whole"] for each in facts)
    if as_json:
        content = {"is_whole": is_whole, "problem": problem, "checkpoints": facts}
        print_json("checkpoint verify", content)
    elif problem:
        print(problem)
    return WHOLE if is_whole else DAMAGED


def _proof(path: Path) -> dict[str, Any]:
    """Return what ``verify --json`` shows of a checkpoint."""
    facts: dict[str, Any] = {"name": path.name, "is_whole": False, "problem": ""}
    try:
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
    except CheckpointError as error:
        return facts | {"problem": str(error)}
    index = checkpoint.index
    return facts | {
        "is_whole": True,
        "num_files": len(index.files),
        "num_bytes": index.num_bytes,
    }


def _whole(facts: dict[str, Any]) -> str:
    return f"whole: {_count(facts['num_files'], 'file')}, {size(facts['num_bytes'])}"


def _problem_of_latest(folder: Folder) -> str:
    latest = folder.latest()
    if latest in folder.names():
        return ""
    return f"{folder.path / 'latest'}: it names no checkpoint that is here"
