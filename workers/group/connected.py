"""Nobody of a process group goes on before all have connected.

    all_connected(store, place, size)            # behind the call that makes the process group

For gloo a connection is made when the side that opens it has written who it is, be it that the
other side has not accepted it yet. Who then ends or leaves the process group closes connections
that others still wait for, and theirs fails: "connectFullMesh failed ... Connection closed by
peer". So all say in the store in which they met that they have connected, and wait for each other.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from psdist.errors import MemberLostError


def all_connected(store: Any, place: int, size: int) -> None:
    """Wait until each of the ``size`` members has come here, as long as the timeout of ``store``
    allows, in which this process group alone has met: :class:`MemberLostError` then, or where the
    store is gone. Place 0 goes on last, when nobody needs the store any more, which it may keep.
    """
    come = [f"connected {each}" for each in range(size)]
    heard = [f"all have connected, says {each}" for each in range(size)]
    try:
        store.set(come[place], b"")
        store.wait(come)
        store.set(heard[place], b"")
        if place == 0:
            store.wait(heard)
    except RuntimeError as error:
        missing = [f"{each}" for each, key in enumerate(come) if not _is_there(store, key)]
        who = f"nothing from place {', '.join(missing)}" if missing else "all had connected"
        raise MemberLostError(
            f"the {size} workers of this worker's group wait for each other to have connected, and "
            f"the one at place {place} waits in vain ({who}): {error}"
        ) from error


def _is_there(store: Any, key: str) -> bool:
    with suppress(RuntimeError):
        return bool(store.check([key]))
    return False
