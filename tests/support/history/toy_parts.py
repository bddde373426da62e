"""The parts of a toy run: its servers, groups and replies, and the faults it can make."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tests.support.history.memory import ServerHistory, WorkerHistory

NOBODY = 10**9


class Fault(Enum):
    BOUND_OFF_BY_ONE = "the servers enforce one more than the bound that the run promises"
    REPLY_BEFORE_STEP = "replies of sync go out one step too early"
    OWN_UPDATES_NOT_AWAITED = "replies do not wait for the reader's own update"
    UPDATE_LOST = "one update is counted but never applied"
    LAST_UPDATE_LOST = "the last update of a group is counted but never applied"
    UPDATE_TWICE = "one update is applied twice"
    HALF_STEP_SEEN = "a reply goes out between two contributions of a step"
    ARRIVAL_ORDER = "contributions are summed as they arrive"
    GROUP_LEFT_OUT = "a step is made without one of its groups"
    SUSPENDED_TOO_EARLY = "a suspension is stamped with clock 0"
    RESUME_FORGOTTEN = "a group never counts again after its first collective"


@dataclass(eq=False)
class Server:
    history: ServerHistory
    chunks: list[int]
    inbox: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(kind, group, clock, chunk), to be handled in any order but per (group, chunk)."""


class Reply(NamedTuple):
    position: int
    version: int
    """Checksum of the chunk's bytes."""
    clock: int
    slowest: int
    """The fewest updates that it contains of a group that is waited for."""


@dataclass(eq=False)
class Group:
    index: int
    writers: list[WorkerHistory]
    iterations: int
    clock: int = 0
    replies: dict[int, Reply] = field(default_factory=dict)
    """By chunk."""
    answered: dict[int, int] = field(default_factory=dict)
    """Pushes of a chunk that have been answered."""
    brought: list[tuple[float, frozenset[int]]] = field(default_factory=list)
    """By iteration: weight, chunks without a gradient."""
    collectives: list[int] = field(default_factory=list)
    is_waiting: bool = False
    has_left: bool = False


def even_slices(num_chunks: int, num_workers: int) -> list[range]:
    """The chunks of each worker of a group; the later ones have more."""
    bounds = [place * num_chunks // num_workers for place in range(num_workers + 1)]
    return [range(bounds[place], bounds[place + 1]) for place in range(num_workers)]


def crc_of(chunk: int, version: int) -> int:
    """Stands for the checksum of the chunk's bytes after that many steps."""
    return zlib.crc32(f"{chunk} {version}".encode())
