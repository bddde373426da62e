"""Which checkpoint a path on the command line means.

checkpoint = find(Path("runs/a"))       # the newest good one; or the path of one
folder = find_folder(Path("runs/a"))    # None where the path is a checkpoint's own
"""

from __future__ import annotations

import sys
from pathlib import Path

from psdist.checkpoint import index as indexes
from psdist.checkpoint.folder import FOLDER, Folder
from psdist.checkpoint.reading import Checkpoint
from psdist.checkpoint.strict import quoted
from psdist.errors import CheckpointError


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
