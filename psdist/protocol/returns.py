"""What is known everywhere of samples that go back to the epoch when workers have died; pure.

Those who live meet in the collective ``RETURN``. Each brings where it stands in its data, or why
nothing can go back; the registrar answers what is dealt anew, or why nothing is.

    payload = pack_standing(DataStanding(clock=12, per_round=1, dataset=0, is_open=True, ...))
    unpack_standing(payload)               # the same; a text where that says why not
    unpack_return(pack_return(Return(dataset=0, ordinal=3, at=12, ...)))

The registrar's part is psdist.servers.protocol.returns, a worker's psdist.workers.data.returned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from psdist.protocol.header import NEVER

RETURN: Final = "return"
"""The collective, and what a meeting for it is for."""
_MOST_DATASETS: Final = 1000
_MOST_CHARACTERS: Final = 200
_NUMBERS: Final = re.compile(rb"[0-9]{1,18}( [0-9]{1,18})*")
_WHY: Final = re.compile(rb"no ([ -~]{1,%d})" % _MOST_CHARACTERS)


class DataStanding(NamedTuple):
    """Where a worker is in its data, between two iterations."""

    clock: int
    """Iterations its group has finished."""
    per_round: int
    """Batches that an iteration takes; 0 where this worker has made none to know it by."""
    dataset: int | None
    """Which of the script's datasets it trains with; None before the first batch."""
    is_open: bool
    """Whether it is in a pass over that, or held at its end."""
    seen: int
    """Batches that it was handed out in this pass."""
    num_batches: int
    """Of this pass, or where none is open of the last one."""
    counts: tuple[int, ...]
    """By dataset, passes that were begun."""


class Return(NamedTuple):
    """What is dealt anew."""

    dataset: int | None
    ordinal: int
    """The pass over that dataset (0: the first of the job) that is cut: what is left of it is
    dealt to those who live, and so are all later passes."""
    at: int
    """Behind so many of its batches."""
    num_batches: int
    """Of such a pass as it was; 0 where nobody knows."""
    living: tuple[int, ...]
    """Those who are dealt to, ascending."""
    brought: tuple[tuple[int, int], ...]
    """Of each of the dead: how many batches it has brought since that pass began for it."""
    lost: int
    """Batches of earlier passes that the dead had not brought."""
    counts: tuple[int, ...]
    """By dataset, how many passes somebody has begun: later ones are dealt to the living."""


def pack_refusal(why: str) -> bytes:
    """``why`` nothing can go back, in printable characters of ASCII."""
    return b"no " + why.encode("ascii", "replace")[:_MOST_CHARACTERS]


def pack_standing(standing: DataStanding) -> bytes:
    numbers = (
        *(standing.clock, standing.per_round, _packed(standing.dataset), int(standing.is_open)),
        *(standing.seen, standing.num_batches, *standing.counts),
    )
    return _pack(numbers)


def unpack_standing(data: bytes) -> DataStanding | str | None:
    """A text where the worker says why nothing can go back; None for anything else."""
    if (why := _refusal(data)) is not None:
        return why
    numbers = _unpack(data)
    if numbers is None or not 6 <= len(numbers) <= 6 + _MOST_DATASETS:
        return None
    clock, per_round, dataset, is_open, seen, num_batches, *counts = numbers
    if is_open > 1 or clock >= NEVER or dataset > len(counts) or (is_open and not dataset):
        return None
    if dataset and not counts[dataset - 1]:
        return None
    of = dataset - 1 if dataset else None
    return DataStanding(clock, per_round, of, bool(is_open), seen, num_batches, tuple(counts))


def pack_return(found: Return) -> bytes:
    pairs = [number for pair in found.brought for number in pair]
    numbers = (
        *(_packed(found.dataset), found.ordinal, found.at, found.num_batches, found.lost),
        *(len(found.living), *found.living, len(found.brought), *pairs, *found.counts),
    )
    return _pack(numbers)


def unpack_return(data: bytes) -> Return | str | None:
    """A text where nothing goes back; None for anything else."""
    if (why := _refusal(data)) is not None:
        return why
    numbers = _unpack(data)
    if numbers is None or len(numbers) < 7:
        return None
    dataset, ordinal, at, num_batches, lost, num_living, *rest = numbers
    if len(rest) <= num_living:
        return None
    living, (num_dead, *rest) = rest[:num_living], rest[num_living:]
    if len(rest) < 2 * num_dead or not living:
        return None
    brought = tuple(zip(rest[: 2 * num_dead : 2], rest[1 : 2 * num_dead : 2], strict=True))
    counts = tuple(rest[2 * num_dead :])
    of = dataset - 1 if dataset else None
    return Return(of, ordinal, at, num_batches, tuple(living), brought, lost, counts)


def _packed(dataset: int | None) -> int:
    return 0 if dataset is None else dataset + 1


def _pack(numbers: Sequence[int]) -> bytes:
    return b" ".join(b"%d" % number for number in numbers)


def _unpack(data: bytes) -> list[int] | None:
    return [*map(int, data.split())] if _NUMBERS.fullmatch(data) else None


def _refusal(data: bytes) -> str | None:
    match = _WHY.fullmatch(data)
    return None if match is None else match[1].decode("ascii")
