"""Text from outside, taken in with limits, and what it becomes: the lowest room of the mapper.

    text = decoded(data, where="topology.conf", max_bytes=1 << 20)
    raise PlacementError(f"{where}:3: {shown(word)} is not a host name: correct it")

Here it is decoded, and quoted in messages so that they stay one line. ``strict_json`` and
``strict_yaml`` parse without the liberties of those languages, ``models`` has the types that
pydantic reads, ``hostlist`` and ``bitmap`` are the notations of host lists and of sets of PUs.
Raises PlacementError and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from psdist.errors import PlacementError

HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
"""A valid host name, whole: files for launchers contain it, so it has no character special to a
shell, and no leading "-" that a launcher would take for an option."""

MAX_SHOWN = 48
MAX_LINES = 500_000


def shown(value: object) -> str:
    """``value`` as a message quotes it: its repr, short, on one line."""
    if isinstance(value, str | bytes):
        short = value[:MAX_SHOWN]
        return repr(short) + ("..." if len(value) > MAX_SHOWN else "")
    if isinstance(value, int) and value.bit_length() > 256:  # repr of a huge int raises
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, bool | int | float | None):
        return repr(value)
    return f"a {type(value).__name__}"


def file_bytes(path: Path, *, max_bytes: int) -> tuple[bytes, str]:
    """(content, the path as messages name it), one byte over the limit at most.

    Reads any file, a pipe too (``--racks <(scontrol show topology)``). Raises
    PlacementError where that fails.
    """
    where = str(path) if str(path).isprintable() else shown(str(path))
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1), where
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else "no path"
        raise PlacementError(f"{where}: cannot be read ({reason}): give a file") from None


def decoded(data: bytes, *, where: str, max_bytes: int) -> str:
    """UTF-8 text, with or without a byte-order mark. Raises PlacementError for anything else."""
    if len(data) > max_bytes:
        raise PlacementError(
            f"{where}: more than {max_bytes:,} bytes; that is not a file of this kind, "
            "give the right one"
        )
    if (position := data.find(b"\0")) >= 0:
        raise PlacementError(
            f"{where}: a NUL byte at offset {position}: this is no UTF-8 text, convert it or give "
            "the right file"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlacementError(
            f"{where}: byte {data[error.start]:#04x} at offset {error.start} is no UTF-8: convert "
            "the file to UTF-8 or give the right one"
        ) from None
    if text.count("\n") > MAX_LINES:
        raise PlacementError(f"{where}: more than {MAX_LINES:,} lines: give the right file")
    return text


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end); a copy of one line at a time, unlike splitlines."""
    start, number = 0, 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        number += 1
        yield number, text[start:end].removesuffix("\r")
        start = end + 1
