"""Parts of messages about checkpoints: names, and the clocks of a cut; pure.

checkpoint_name(17)                   # "step-00000017"
unpack_clocks(pack_clocks([17, 4]))   # (17, 4): one clock for each parameter set
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psdist.protocol.header import MOST_SETS, NEVER

CHECKPOINT: Final = "checkpoint"
"""The collective in which one is made."""
WRITTEN: Final = "written"
"""The collective that ends when its files are there, or cannot be."""
MOST_PROBLEM_CHARACTERS: Final = 2000
"""Maximum length of a rank's report on a file that it could not write."""
_NAME: Final = re.compile(r"step-([0-9]{8,18})")
_CLOCKS: Final = re.compile(rb"[0-9]{1,18}( [0-9]{1,18})*")


@dataclass(frozen=True, kw_only=True)
class Misses:
    """Rounds that each group had missed when a checkpoint was made (backup groups)."""

    running: tuple[int, ...]
    """Missed since its last contribution."""
    in_all: tuple[int, ...]
    """Missed since the run began."""


@dataclass(frozen=True, kw_only=True)
class FirstClocks:
    """First clocks of the groups of a parameter set that is restored from a checkpoint."""

    checkpoint: str
    clocks: tuple[int, ...]
    """By group."""
    misses: Misses | None = None
    """None: no group has missed a round that counts."""


def checkpoint_name(clock: int) -> str:
    """Return the name of the cut whose lowest clock in the first set is ``clock``."""
    return f"step-{clock:08d}"


def number_of(name: str) -> int | None:
    """The clock that a checkpoint is named after; None for what is no name of one."""
    match = _NAME.fullmatch(name)
    if match is None or checkpoint_name(int(match[1])) != name:
        return None
    return int(match[1])


def pack_clocks(clocks: Sequence[int]) -> bytes:
    """A worker's, of each parameter set: what it brings to the collective."""
    return b" ".join(b"%d" % clock for clock in clocks)


def unpack_clocks(data: bytes) -> tuple[int, ...] | None:
    """None for anything else."""
    if len(data) > 20 * MOST_SETS or not _CLOCKS.fullmatch(data):
        return None
    clocks = tuple(map(int, data.split()))
    return clocks if len(clocks) <= MOST_SETS and max(clocks) < NEVER else None
