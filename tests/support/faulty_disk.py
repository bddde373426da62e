"""Disks that fail: at one call of many, with or without a death, and with what a death takes along.

disk = FaultyDisk(fail_at=3)                    # OSError at the fourth call
disk = FaultyDisk(fail_at=3, is_death=True)     # Death, and then nothing works any more
disk.lose_what_was_not_synced()
"""

from __future__ import annotations

import errno
import shutil
from io import FileIO
from pathlib import Path

from psdist.checkpoint.disk import Disk


class Death(BaseException):
    """The process has been killed: no handler of psdist runs."""


class QuickDisk(Disk):
    """Without waiting for the disk: tests lose nothing by power."""

    def sync(self, file: FileIO) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class FaultyDisk(Disk):
    def __init__(self, *, fail_at: int | None = None, is_death: bool = False) -> None:
        self.num_calls = 0
        self._fail_at = fail_at
        self._is_death = is_death
        self._is_dead = False
        self._unsynced: dict[Path, int] = {}
        """Files, and how many bytes of them are on the disk."""
        self._unlisted: set[Path] = set()
        """Files whose names no sync of their folder has followed."""
        self._renames: list[tuple[Path, Path, bytes | None]] = []
        """Those that no sync of their folder has followed; what the target held, if a file."""

    def _call(self) -> None:
        if self._is_dead:
            raise Death
        self.num_calls += 1
        if self.num_calls - 1 == self._fail_at:
            self._is_dead = self._is_death
            if self._is_death:
                raise Death
            raise OSError(errno.ENOSPC, "No space left on device")

    def make_folder(self, path: Path) -> None:
        self._call()
        super().make_folder(path)

    def create(self, path: Path) -> FileIO:
        self._call()
        self._unsynced[path] = 0
        self._unlisted.add(path)
        return super().create(path)

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        try:
            self._call()
        except BaseException:
            super().write(file, data[: len(data) // 2])  # torn
            raise
        super().write(file, data)

    def sync(self, file: FileIO) -> None:
        self._call()
        self._unsynced.pop(Path(str(file.name)))

    def rename(self, source: Path, target: Path) -> None:
        self._call()
        self._renames.append((source, target, target.read_bytes() if target.is_file() else None))
        super().rename(source, target)
        self._move(source, target)

    def _move(self, source: Path, target: Path) -> None:
        """Files are known by where they lie now."""

        def now(path: Path) -> Path:
            return target / path.relative_to(source) if path.is_relative_to(source) else path

        self._unsynced = {now(path): num_bytes for path, num_bytes in self._unsynced.items()}
        self._unlisted = set(map(now, self._unlisted))

    def sync_folder(self, path: Path) -> None:
        self._call()
        self._renames = [each for each in self._renames if each[0].parent != path]
        self._unlisted = {each for each in self._unlisted if each.parent != path}

    def remove_folder(self, path: Path) -> None:
        try:
            self._call()
        except BaseException:
            for half in sorted(path.iterdir())[::2]:
                half.unlink()
            raise
        super().remove_folder(path)

    def lose_what_was_not_synced(self) -> None:
        """The machine has lost its power."""
        for source, target, before in reversed(self._renames):
            if target.is_dir():
                target.rename(source)
            elif target.exists():
                shutil.copy(target, source)
                target.unlink()
                if before is not None:
                    target.write_bytes(before)
            self._move(target, source)
        for path, num_bytes in self._unsynced.items():
            if path.exists():
                with path.open("r+b") as file:
                    file.truncate(num_bytes)
        for path in self._unlisted:
            path.unlink(missing_ok=True)
