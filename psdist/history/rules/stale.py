"""How stale each update was, and what its lr is multiplied with for that (docs/stale.md).

Owns what rule 5 of docs/history.md says of it: the factor is that of tau, the steps that others
have made of the chunk between the parameters that the gradient was computed on and the update, for
each of them. What it was computed on is what its worker says that it has used, not what the server
took it to be. Pure.

    factors = factors_of(replay, uses)         # [rows], NaN where nobody says what was used
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from psdist.history.records import Ints
from psdist.history.rules.replay import ServerReplay

if TYPE_CHECKING:
    from psdist.history.rules.uses import Uses


def factors_of(replay: ServerReplay, uses: Uses) -> npt.NDArray[np.float64]:
    """1 / max(1, tau) of each row. ``uses``: those that this server's log can speak about."""
    found, used = _used(replay, uses)
    factors = np.full(replay.num_rows, np.nan)
    rows = np.flatnonzero(found)
    chunk, at = replay.chunk[rows], replay.position[rows]
    behind = replay.version_of(chunk, at) - replay.version_of(chunk, used[rows])
    groups = replay.num_active_groups[replay.epoch_of(at)]
    factors[rows] = 1.0 / np.maximum(1.0, behind / np.maximum(1, groups - 1))
    return factors


def _used(replay: ServerReplay, uses: Uses) -> tuple[Ints, Ints]:
    """Of each row whether it is known, and which position it is, that the worker which pushed the
    chunk used last in that iteration."""
    num_groups = len(replay.run.groups)

    def keys(chunks: Ints, groups: Ints, clocks: Ints) -> Ints:
        made: Ints = ((chunks.astype(np.int64) * num_groups + groups) << 32) + clocks
        return made

    mine = np.flatnonzero(uses.worker == replay.run.slice_owner(uses.group, uses.chunk))
    key, position = (
        keys(uses.chunk[mine], uses.group[mine], uses.iteration[mine]),
        uses.position[mine],
    )
    order = np.lexsort((position, key))
    key, position = key[order], position[order]
    wanted = keys(replay.chunk, replay.group, replay.clock)
    at = np.searchsorted(key, wanted, side="right") - 1
    found = np.zeros(replay.num_rows, np.bool_)
    if len(key):
        found = (at >= 0) & (key[at] == wanted)
        return found, np.where(found, position[at], 0)
    return found, np.zeros(replay.num_rows, np.int64)
