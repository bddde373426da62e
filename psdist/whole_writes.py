"""Files that are written as they are, without a buffer of Python's: a write may take a part only.

write_whole(file, data)
append_whole(file, data)             # all of it or nothing
"""

from __future__ import annotations

from contextlib import suppress
from io import FileIO
from typing import Protocol


class _Raw(Protocol):
    def write(self, data: memoryview, /) -> int | None: ...


def write_whole(file: _Raw, data: bytes | memoryview) -> None:
    """All of ``data``. Raises :class:`OSError`; the file may end within it then."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[file.write(rest) :]


def append_whole(file: FileIO, data: bytes) -> None:
    """Write ``data`` at the end of ``file``. Raises :class:`OSError`; then the file is as before,
    and later data may follow."""
    before = file.tell()
    try:
        write_whole(file, data)
    except OSError:
        with suppress(OSError):
            file.truncate(before)
            file.seek(before)
        raise
