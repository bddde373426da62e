"""RUN_DIR/checkpoints: written under another name, renamed when complete, ``latest`` last.

    folder = Folder(run_dir)
    partial = folder.begin("step-00000100")       # where every rank writes its file
    folder.commit("step-00000100", index, keep=3)
    checkpoint = folder.newest_good(print)        # None: there is none

One process calls begin, commit and abandon. A failure at any moment leaves the last good checkpoint
where :meth:`Folder.newest_good` finds it: a folder step-N has all its files and an index, and any
other folder has another name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from psdist.checkpoint import index as indexes
from psdist.checkpoint.disk import DISK, Disk
from psdist.checkpoint.index import Index, encode
from psdist.checkpoint.reading import Checkpoint, Elements
from psdist.checkpoint.strict import quoted, read_text
from psdist.errors import CheckpointError

FOLDER: Final = "checkpoints"
LATEST: Final = "latest"
_NAME: Final = re.compile(r"step-([0-9]{8,15})")
_PARTIAL: Final = ".partial"
_OLD: Final = ".old"
_REMOVED: Final = ".removed"
_LEFT: Final = re.compile(r"(step-[0-9]{8,15}|latest)\.(partial|old|removed)")


def name_of(step: int) -> str:
    """Return the name of a checkpoint whose first set's slowest group has made ``step``
    iterations."""
    return f"step-{step:08d}"


class Folder:
    def __init__(self, run_dir: Path, *, disk: Disk = DISK) -> None:
        self.path = run_dir / FOLDER
        self._disk = disk

    # -- writing -------------------------------------------------------------------------------

    def partial(self, name: str) -> Path:
        """Where the files of ``name`` are written."""
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{name!r:.80} is no name of a checkpoint")
        return self.path / (name + _PARTIAL)

    def begin(self, name: str) -> Path:
        """Makes that folder, empty, and removes what an attempt before has left. Raises OSError."""
        path = self.partial(name)
        self._disk.make_folder(self.path)
        self._remove_left()
        self._disk.make_folder(path)
        return path

    def commit(self, name: str, index: Index, keep: int, *, good: int | None = None) -> None:
        """The files of ``index`` are all written: makes them a checkpoint and ``latest``, then
        removes all but the newest ``keep``, and (``good``) the newest one of so many iterations or
        fewer. Raises OSError, and :class:`CheckpointError` where a
        file is not there as written: the last checkpoint then still is the newest."""
        partial, path = self.partial(name), self.path / name
        try:
            Checkpoint(partial, index).check_sizes()
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; run_dir must lie on a file system that all hosts of the job share"
            ) from None
        self._write(partial / indexes.NAME, encode(index))
        self._disk.sync_folder(partial)
        if path.exists():
            self._disk.rename(path, path.with_name(name + _OLD))
        self._disk.rename(partial, path)
        self._write(self.path / (LATEST + _PARTIAL), name + "\n")
        self._disk.rename(self.path / (LATEST + _PARTIAL), self.path / LATEST)
        self._disk.sync_folder(self.path)  # before what was there is removed
        with contextlib.suppress(OSError):  # the next one tries again
            self._remove_left()
            self._remove_beyond(keep, good)

    def abandon(self, name: str) -> None:
        """Remove the files of an incomplete checkpoint."""
        with contextlib.suppress(OSError):
            self._disk.remove_folder(self.partial(name))

    def _write(self, path: Path, text: str) -> None:
        with self._disk.create(path) as file:
            self._disk.write(file, text.encode())
            self._disk.sync(file)

    def _remove_left(self) -> None:
        for path in sorted(self.path.iterdir()):
            if not _LEFT.fullmatch(path.name) or not path.is_dir():
                continue
            if path.suffix == _OLD and not path.with_suffix("").exists():
                self._disk.rename(path, path.with_suffix(""))
            else:
                self._disk.remove_folder(path)

    def set_aside(self, names: Collection[str], *, suffix: str) -> None:
        """Rename checkpoints that no run may resume from: their names get the suffix, and
        ``latest`` names the newest one that is left, or none. Raises OSError."""
        for name in names:
            self._disk.rename(self.path / name, self.path / f"{name}.{suffix}")
        if self.latest() in names:
            left = self._newest_first()
            self._write(self.path / (LATEST + _PARTIAL), "".join(left[:1]) + "\n")
            self._disk.rename(self.path / (LATEST + _PARTIAL), self.path / LATEST)
        self._disk.sync_folder(self.path)

    def _remove_beyond(self, keep: int, good: int | None) -> None:
        num_kept, awaits_good = 0, good is not None
        for name in self._newest_first():
            is_good = awaits_good and good is not None and _step_of(name) <= good
            if num_kept >= keep and not is_good:
                removed = self.path / (name + _REMOVED)
                self._disk.rename(self.path / name, removed)
                self._disk.remove_folder(removed)
                continue
            try:
                Checkpoint.open(self.path / name).check_sizes()
                num_kept += 1
                awaits_good = awaits_good and not is_good
            except CheckpointError:
                pass  # kept, and not counted

    # -- reading -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of folders that look complete, ascending."""
        try:
            found = [path.name for path in self.path.iterdir() if path.is_dir()]
        except OSError:
            return []
        names = [name for name in found if _NAME.fullmatch(name.removesuffix(_OLD))]
        return sorted(names, key=lambda name: (_step_of(name), name))

    def open(self, name: str) -> Checkpoint:
        """One of :meth:`names`. Raises :class:`CheckpointError`, also for any other name."""
        if not _NAME.fullmatch(name.removesuffix(_OLD)):
            raise CheckpointError(f"{name!r:.80} is no name of a checkpoint")
        return Checkpoint.open(self.path / name)

    def latest(self) -> str:
        """Return the name in ``latest``; "" if it cannot be read."""
        try:
            name = read_text(self.path / LATEST, max_bytes=100).strip()
        except CheckpointError:
            return ""
        return name if _NAME.fullmatch(name) else ""

    def newest_good(
        self, tell: Callable[[str], None], *, wanted: Sequence[Elements] | None = None
    ) -> Checkpoint | None:
        """Return the checkpoint in ``latest`` if it is whole, else the newest other whole one. All
        files are read, or those with parts of ``wanted`` (:meth:`Checkpoint.verify`). ``tell`` gets
        a line for each damaged checkpoint: which file, and why."""
        names = self._newest_first()
        latest = self.latest()
        if names and not latest:
            tell(f"{quoted(self.path / LATEST)} names no checkpoint: looking for the newest")
        elif latest and latest not in names:
            tell(f"{quoted(self.path / latest)}, the latest checkpoint, is gone")
        for name in names:
            try:
                checkpoint = Checkpoint.open(self.path / name)
                checkpoint.verify(wanted)
            except CheckpointError as error:
                tell(f"checkpoint {name} is not used: {error}")
                continue
            return checkpoint
        return None

    def _newest_first(self) -> list[str]:
        latest = self.latest()

        def age(name: str) -> tuple[bool, int, int, bool]:
            try:
                attempt = Checkpoint.open(self.path / name).index.attempt
            except CheckpointError:
                attempt = -1
            return name == latest, attempt, _step_of(name), not name.endswith(_OLD)

        return sorted(self.names(), key=age, reverse=True)


def _step_of(name: str) -> int:
    found = _NAME.match(name)
    return int(found[1]) if found else -1
