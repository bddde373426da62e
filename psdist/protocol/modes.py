"""What workers bring to the collective in which they change the mode of the run.

unpack_mode(pack_mode("ssp", 3))     # ("ssp", 3)
"""

from __future__ import annotations

from typing import Final

from psdist.mode_names import Mode

SET_MODE: Final = "set_mode"
"""Name of the collective."""
_MOST: Final = 2**31 - 1


def pack_mode(mode: Mode, staleness: int) -> bytes:
    """``staleness``: 0 but for ssp."""
    return (f"ssp:{staleness}" if mode == "ssp" else mode).encode()


def unpack_mode(payload: bytes) -> tuple[Mode, int] | None:
    """The inverse; None for what is no mode."""
    if payload == b"sync":
        return "sync", 0
    if payload == b"async":
        return "async", 0
    digits = payload.removeprefix(b"ssp:")
    if digits == payload or not digits.isdigit() or len(digits) > 10 or int(digits) > _MOST:
        return None
    return "ssp", int(digits)
