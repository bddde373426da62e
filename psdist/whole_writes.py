"""Files that are written as they are, without a buffer of Python's: a write may take a part only.

write_whole(file, data)
"""

from __future__ import annotations

from typing import Protocol


class _Raw(Protocol):
    def write(self, data: memoryview, /) -> int | None: ...


def write_whole(file: _Raw, data: bytes | memoryview) -> None:
    """All of ``data``. Raises :class:`OSError`; the file may end within it then."""
    rest = memoryview(data)
    while len(rest):
        rest = rest[file.write(rest) :]
