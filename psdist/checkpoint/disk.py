"""The calls by which checkpoints reach the file system: one seam, so that tests fail any of them.

    disk = Disk()
    with disk.create(path) as file:
        disk.write(file, data)
        disk.sync(file)
    disk.rename(partial, path)
    disk.sync_folder(path.parent)

Each raises OSError as the system does, with the file's name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final

_WRITE_BYTES: Final = 16 << 20
"""A write of more would keep a thread in the kernel for long."""


@contextlib.contextmanager
def _named(file: FileIO) -> Iterator[None]:
    """An error says which file it is about, as the one of opening it does."""
    try:
        yield
    except OSError as error:
        error.filename = str(file.name)
        raise


class Disk:
    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> FileIO:
        """A file without content, open for writing."""
        return FileIO(path, "wb")

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        """All of ``data``."""
        rest = memoryview(data)
        with _named(file):
            while len(rest):
                rest = rest[file.write(rest[:_WRITE_BYTES]) :]

    def sync(self, file: FileIO) -> None:
        """Return when the written bytes are on the disk."""
        with _named(file):
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync_folder(self, path: Path) -> None:
        """The names in it are on the disk when this returns."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path)


DISK: Final = Disk()
