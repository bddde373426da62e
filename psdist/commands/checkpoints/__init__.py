"""``psdist checkpoint list``, ``verify``, ``diff`` and ``psdist export``, without MPI.

Here checkpoints are found, listed and proved (without torch); ``comparing`` compares two,
``exporting`` writes a model's file or torch's distributed format.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from psdist.checkpoint import index as indexes
from psdist.checkpoint.folder import FOLDER, Folder
from psdist.checkpoint.index import Index
from psdist.checkpoint.reading import Checkpoint
from psdist.checkpoint.strict import quoted
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
    """It is whole. Raises :class:`CheckpointError`; what is not used of a run is told."""
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


def list_all(path: Path) -> int:
    """One line for each checkpoint; only the indexes are read."""
    folder = find_folder(path)
    latest = folder.latest() if folder is not None else ""
    for checkpoint in [path] if folder is None else [folder.path / name for name in folder.names()]:
        try:
            words = _describe(Checkpoint.open(checkpoint).index)
        except CheckpointError as error:
            words = f"damaged: {error}"
        print(f"{checkpoint.name}  {words}{'  latest' if checkpoint.name == latest else ''}")
    return 0


def _describe(index: Index) -> str:
    clocks = " | ".join(_clocks(each.clocks) for each in index.sets)
    who = (
        f"{_count(index.num_workers, 'worker')} in {_count(len(index.groups), 'group')}, "
        f"{_count(index.servers, 'server')}"
    )
    return (
        f"{index.time}  attempt {index.attempt}  {index.mode}, {who}  clock {clocks}  "
        f"{size(index.num_bytes)}"
    )


def _clocks(clocks: Iterable[int]) -> str:
    """``"100"`` where all groups have it, else ``"100, 98"``."""
    every = tuple(clocks)
    return str(every[0]) if len(set(every)) == 1 else ", ".join(map(str, every))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def verify(path: Path) -> int:
    """Reads every byte of one checkpoint or of all of a run; the exit status."""
    folder = find_folder(path)
    if folder is None:
        return WHOLE if _is_whole(path) else DAMAGED
    verdicts = {name: _is_whole(folder.path / name) for name in folder.names()}
    latest = _problem_of_latest(folder)
    if latest:
        print(latest)
    return WHOLE if all(verdicts.values()) and not latest else DAMAGED


def _is_whole(path: Path) -> bool:
    try:
        checkpoint = Checkpoint.open(path)
        checkpoint.verify()
    except CheckpointError as error:
        print(f"{path.name}: {error}")
        return False
    index = checkpoint.index
    print(f"{path.name}: whole: {_count(len(index.files), 'file')}, {size(index.num_bytes)}")
    return True


def _problem_of_latest(folder: Folder) -> str:
    latest = folder.latest()
    if latest in folder.names():
        return ""
    return f"{folder.path / 'latest'}: it names no checkpoint that is here"
