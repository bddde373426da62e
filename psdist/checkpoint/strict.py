"""Read files and JSON that may have been changed: opened, limited and quoted in one line.

    with open_regular(path) as file: ...
    content = parse_json(text, where="index.json", limits=INDEX_LIMITS)

Raises CheckpointError and nothing else.
"""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path
from typing import Final

from psdist.errors import CheckpointError, PlacementError
from psdist.topology.text import decoded, strict_json
from psdist.topology.text.strict_json import Limits

LIMITS: Final = Limits(depth=200, brackets=1 << 24, commas=1 << 26)


def open_regular(path: Path) -> FileIO:
    """For reading. A folder, a pipe or a device is refused, and none is waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else "no path"
        raise CheckpointError(f"{quoted(path)} cannot be read: {reason}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{quoted(path)} is no file")
    return FileIO(descriptor, "rb")


def quoted(path: Path) -> str:
    """A path as messages name it: in one line."""
    return str(path) if str(path).isprintable() else repr(str(path))


def read_text(path: Path, *, max_bytes: int) -> str:
    with open_regular(path) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise CheckpointError(f"{quoted(path)} cannot be read: {error.strerror}") from None
    return decode(data, where=quoted(path), max_bytes=max_bytes)


def decode(data: bytes, *, where: str, max_bytes: int) -> str:
    try:
        return decoded(data, where=where, max_bytes=max_bytes)
    except PlacementError as error:
        raise CheckpointError(str(error)) from None


def parse_json(text: str, *, where: str) -> object:
    try:
        return strict_json.parse(text, where=where, made_by="psdist run", limits=LIMITS)
    except PlacementError as error:
        raise CheckpointError(str(error)) from None
