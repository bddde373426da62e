"""Which ranks of a running job serve, when each that serves is no worker any more.

    division = Division(parent=..., bytes_per_s=..., sizes=(0, 2, 2), ...)
    ways = all_ways(division, most=5_000)        # modulo vertices that are alike; None: too many
    fastest(division, ways).tied                 # the ways that no other one beats

A way is the number of servers at each vertex. The groups follow from it, so both ends of every
transfer are fixed. L_e = G_T M + (G - 2 G_T) M_T is linear in M_T, so "no edge is slower than t" is
an interval for the mass below each edge: a cap where fewer than half of the groups are below, a
floor where more are. The sums of the intervals, from the leaves up, tell whether a way is as fast
as t. All ways are tested at once, and t is halved between what none and what some of them reach.
Vertices are *alike* if their subtrees have the same shape, speeds, memory, ranks and groups; only
one order of them is tried.

Longer than other modules: trying all ways and climbing among them rest on the same times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Way: TypeAlias = tuple[int, ...]
"""Servers at each vertex."""
_Item = TypeVar("_Item")
_Matrix: TypeAlias = npt.NDArray[np.float64]

PRECISION = 1e-10
"""Relative: two times this close are the same."""
BATCH = 1 << 20
"""Numbers in one array: ways times vertices."""
EPSILON = 1e-12
"""Part of the model that rounding may leave over."""
PATIENCE = 8
"""Steps of a climb that gain nothing, one after the other; a step that looks at some of the moves
only counts for that part."""
MOST_AMOUNTS = 8
"""Moves between two kinds of places."""
WIDTH = 8
"""Number of equally good ways that a climb follows."""
CLIMB_NUMBERS = 8_000_000
"""Ways times vertices that a climb looks at, at most, so that large jobs try fewer: below 1 s."""
STEP_NUMBERS = 200_000
"""The same for one step, about."""
LIST_STEPS = 60
"""Parts of ways that are looked at to list all of them, for each way that there may be."""
MOST_DOUBLINGS = 40
"""Maximum doublings of the best time, to find the time of a step that gains nothing."""
GAIN = 1e-6
"""Relative: what a step of a climb gains at least."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Ranks on a rooted tree, as in :class:`psdist.topology.solver.Problem`."""

    parent: tuple[int, ...]
    bytes_per_s: tuple[float, ...]
    max_bytes: tuple[float, ...]
    sizes: tuple[int, ...]
    """Ranks at each vertex that may serve; 0 for a switch."""
    groups_with: Callable[[int, int], float]
    """``groups_with(v, k)``: groups at vertex v if k of its ranks serve; 0 for a switch."""
    model_bytes: float
    num_servers: int

    @cached_property
    def groups(self) -> _Matrix:
        """``groups[v, k]``: at v when k of its ranks serve; 0 beyond its size."""
        found = np.zeros((len(self.sizes), max(self.sizes) + 1))
        for v, size in enumerate(self.sizes):
            for k in range(size + 1):
                found[v, k] = self.groups_with(v, k)
        return found

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each vertex; those that are alike have the same one."""
        below: list[list[int]] = [[] for _ in self.parent]
        known: dict[tuple[object, ...], int] = {}
        kinds = [0] * len(self.parent)
        for v in reversed(range(len(self.parent))):
            groups = tuple(self.groups[v, : self.sizes[v] + 1].tolist())
            key = (self.bytes_per_s[v], self.max_bytes[v], self.sizes[v], groups)
            kinds[v] = known.setdefault((*key, tuple(sorted(below[v]))), len(known))
            if v:
                below[self.parent[v]].append(kinds[v])
        return tuple(kinds)

    @cached_property
    def levels(self) -> tuple[tuple[npt.NDArray[np.int64], ...], ...]:
        """From the lowest level up: (vertices, where those of one parent begin, the parents)."""
        depth = [0] * len(self.parent)
        for v in range(1, len(self.parent)):
            depth[v] = depth[self.parent[v]] + 1
        found = []
        for level in range(max(depth), 0, -1):
            here = sorted((self.parent[v], v) for v in range(len(depth)) if depth[v] == level)
            starts = [i for i, (up, _) in enumerate(here) if not i or here[i - 1][0] != up]
            columns = ([v for _, v in here], starts, [here[start][0] for start in starts])
            found.append(tuple(np.array(column) for column in columns))
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fastest:
    seconds: float
    """Time of one exchange, in the best of the ways."""
    tied: tuple[Way, ...]
    """All of them that are as fast, in the order in which they were given."""
    tried: int = 0
    """Ways that were compared."""


def all_ways(division: Division, *, most: int) -> list[Way] | None:
    """One of each kind of way to choose the servers; None where there are more than ``most``."""
    ranks = list(division.sizes)
    for v in range(len(ranks) - 1, 0, -1):
        ranks[division.parent[v]] += ranks[v]
    below: list[list[int]] = [[] for _ in ranks]
    for v in range(1, len(ranks)):
        below[division.parent[v]].append(v)
    # By kind and then by number, so that equal ones are neighbours.
    order: list[int] = []
    pending = [0]
    while pending:
        v = pending.pop()
        order.append(v)
        pending += sorted(below[v], key=lambda child: (division.kinds[child], child), reverse=True)
    return _ways_in_order(division, order, below, ranks, most)


def _ways_in_order(
    division: Division,
    order: Sequence[int],
    below: Sequence[Sequence[int]],
    ranks: Sequence[int],
    most: int,
) -> list[Way] | None:
    """Subtrees in ``order``; of twins, the earlier one never has the greater way."""
    wanted, total = division.num_servers, ranks[0]
    steps = LIST_STEPS * most
    # For each vertex its subtree's ways as (servers, servers of its nodes in order).
    made: dict[int, list[tuple[int, Way]]] = {}
    known: dict[int, list[tuple[int, Way]]] = {}
    for v in reversed(order):
        if division.kinds[v] in known:
            made[v] = known[division.kinds[v]]
            continue
        outside = total - ranks[v]
        found: list[tuple[int, Way]] = [(0, ())]
        if not below[v]:
            found = [(k, (k,)) for k in range(division.sizes[v] + 1)]
        children = sorted(below[v], key=lambda child: (division.kinds[child], child))
        runs: list[list[int]] = []
        for child in children:
            if runs and division.kinds[runs[-1][0]] == division.kinds[child]:
                runs[-1].append(child)
            else:
                runs.append([child])
        left = sum(ranks[child] for child in children)
        for run in runs:
            options = made[run[0]]
            left -= ranks[run[0]] * len(run)
            # (servers, parts, the last option): options in falling order are one order of each.
            partial = [(k, parts, len(options) - 1) for k, parts in found]
            for position in range(1, len(run) + 1):
                twins, rest = len(run) - position, left + outside
                longer: list[tuple[int, Way, int]] = []
                for k, parts, last in partial:
                    steps -= last + 1
                    if steps < 0:
                        return None
                    for i in range(last + 1):
                        more, added = options[i]
                        if k + more > wanted:
                            break
                        if k + more * (1 + twins) + rest >= wanted:
                            longer.append((k + more, parts + added, i))
                    if len(longer) > 4 * most:
                        return None
                partial = longer
            found = [(k, parts) for k, parts, _ in partial]
        made[v] = known[division.kinds[v]] = sorted(found)
    leaves = [v for v in order if not below[v]]
    ways = []
    for k, parts in made[0]:
        if k == wanted:
            way = [0] * len(order)
            for v, count in zip(leaves, parts, strict=True):
                way[v] = count
            ways.append(tuple(way))
    return ways if len(ways) <= most else None


def fastest(division: Division, ways: Sequence[Way]) -> Fastest | None:
    """The best time of ``ways`` and those that reach it; None where none has enough memory."""
    left = np.array(ways, dtype=np.int64).reshape(len(ways), len(division.parent))
    high = _some_time(division, left)
    if high is None:
        return None
    if _reached(division, left, 0.0).any():  # all on one vertex
        high = 0.0
    high, _ = _halved(division, left, high, PRECISION)
    # Once more among all: those that a last halving has put aside by a rounding.
    tied = np.flatnonzero(_reached(division, left, high * (1 + 10 * PRECISION)))
    return Fastest(seconds=high, tied=tuple(ways[i] for i in tied.tolist()), tried=len(ways))


def _halved(
    division: Division,
    ways: npt.NDArray[np.int64],
    high: float,
    precision: float,
    *,
    low: float = 0.0,
) -> tuple[float, npt.NDArray[np.int64]]:
    """The best time, where some way reaches ``high`` and none ``low``, and the positions of those
    that reach it."""
    chosen = np.flatnonzero(_reached(division, ways, high))
    while high - low > precision * high:
        middle = (low + high) / 2
        reached = _reached(division, ways[chosen], middle)
        if reached.any():
            high, chosen = middle, chosen[reached]
        else:
            low = middle
    return high, chosen


def climb(
    division: Division, starts: Iterable[Way], *, numbers: int = CLIMB_NUMBERS
) -> Fastest | None:
    """The best that steps from ``starts`` lead to: servers move between kinds of places.

    A step is the best of all moves from the ways that are best so far: of one server, of half or
    of all that equal places have, to equal places elsewhere; a way is never come to twice. Steps
    that gain nothing are taken too, up to PATIENCE of them, since many a link has equals that must
    be relieved one by one. Where it ends is not always the optimum; in large jobs it ends when
    ``numbers`` are used up, and each step looks at some of the moves only.
    """
    seen = set(starts)
    best = fastest(division, sorted(seen))
    if best is None:
        return None
    from_here, in_vain, turn = best.tied, 0.0, 0
    size = len(division.parent)
    most = max(MOST_AMOUNTS, STEP_NUMBERS // size // WIDTH)
    while in_vain < PATIENCE and numbers > 0:
        around: dict[Way, None] = {}
        part = 0.0
        for each in from_here[:WIDTH]:
            near, looked_at = _neighbours(division, each, most=most, turn=turn)
            around.update(dict.fromkeys(near))
            part = max(part, looked_at)
        turn += 1
        fresh = [way for way in around if way not in seen]
        seen.update(fresh)
        ways = np.array(fresh, dtype=np.int64).reshape(len(fresh), size)
        numbers -= max(1, 2 * len(around)) * size
        faster = best.seconds * (1 - GAIN)
        reached = np.flatnonzero(_reached(division, ways, faster))
        if reached.size:
            seconds, chosen = _halved(division, ways[reached], faster, GAIN)
            from_here = tuple(fresh[i] for i in reached[chosen].tolist())
            best, in_vain = Fastest(seconds=seconds, tied=from_here), 0.0
            numbers -= 8 * reached.size * size
            continue
        in_vain += part
        # The best of them, though slower: most often as slow as the best so far.
        low, high = faster, best.seconds * (1 + GAIN)
        for _ in range(MOST_DOUBLINGS):
            numbers -= ways.size
            reached = np.flatnonzero(_reached(division, ways, high))
            if reached.size:
                break
            low, high = high, 2 * high
        if reached.size:
            _, chosen = _halved(division, ways[reached], high, GAIN, low=low)
            numbers -= 8 * reached.size * size
            from_here = tuple(fresh[i] for i in reached[chosen].tolist())
        elif part == 1:
            break
    return Fastest(seconds=best.seconds, tied=best.tied, tried=len(seen))


def most_groups_first(division: Division, ways: Sequence[Way]) -> list[Way]:
    """Sort ``ways``: most groups first, then the most even one."""
    table = np.array(ways, dtype=np.int64).reshape(len(ways), len(division.parent))
    groups = division.groups[np.arange(table.shape[1]), table].sum(axis=1)
    order = np.lexsort(((table * table).sum(axis=1), -groups))
    return [ways[i] for i in order.tolist()]


def _neighbours(division: Division, way: Way, *, most: int, turn: int) -> tuple[list[Way], float]:
    """The ways that one move leads to, and which part of all they are; of equal places the first
    ones move. Where they are many more than ``most``, other ones in each ``turn``."""
    place: list[tuple[int, ...]] = [()] * len(way)
    same: dict[tuple[object, ...], list[int]] = {}
    # Equal: under one switch, of one kind, with the same number of servers; so too equal switches.
    content = _content_kinds(division, way)
    for v, size in enumerate(division.sizes):
        up = division.parent[v]
        place[v] = (content[up] if up >= 0 else -1, division.kinds[v], way[v])
        if size:
            same.setdefault((up, *place[v]), []).append(v)
    # Between equal switches: one to take from, another one to give to.
    by_place: dict[tuple[int, ...], list[list[int]]] = {}
    for vertices in same.values():
        by_place.setdefault(place[vertices[0]], []).append(vertices)
    found: dict[Way, None] = {}
    alike: dict[tuple[int, int], list[list[list[int]]]] = {}
    for each, places in by_place.items():
        if len(places) > 1:
            alike.setdefault((each[0], len(places)), []).append(places)
    stride = -(-len(alike) * MOST_AMOUNTS // most) or 1
    groups = list(alike.values())[turn % stride :: stride]
    for kinds in groups:
        share = most // MOST_AMOUNTS // len(groups)
        for first, second in _some_pairs(kinds, kinds, share, turn):
            found.update(dict.fromkeys(_everywhere(division, way, first, second)))
    few = [vertices for each in by_place.values() for vertices in each[:2]]
    sources = [vertices for vertices in few if way[vertices[0]]]
    targets = [vertices for vertices in few if division.sizes[vertices[0]] > way[vertices[0]]]
    pairs = max(1, most // MOST_AMOUNTS)
    for source, target in _some_pairs(sources, targets, pairs, turn):
        for move in _moves(way, division.sizes, source, target):
            found[_moved(way, move)] = None
    return list(found), min(1.0, pairs / max(1, len(sources) * len(targets)))


def _some_pairs(
    first: Sequence[_Item], second: Sequence[_Item], most: int, turn: int
) -> Iterator[tuple[_Item, _Item]]:
    """About ``most`` of the pairs, one at least, evenly; other ones in each ``turn``."""
    num = len(first) * len(second)
    if not num:
        return
    stride = -(-num // max(1, most))
    while math.gcd(stride, len(second)) > 1 and stride > 1:  # not the same few of ``second``
        stride += 1
    for position in range(turn % stride, num, stride):
        yield first[position // len(second)], second[position % len(second)]


def _everywhere(
    division: Division,
    way: Way,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> Iterable[Way]:
    """The same move below each of several switches that are alike."""
    of_parent = {division.parent[vertices[0]]: vertices for vertices in targets}
    below = []
    for source in sources:
        target = of_parent.get(division.parent[source[0]], ())
        if not target or not way[source[0]] or way[target[0]] == division.sizes[target[0]]:
            return
        below.append(list(_moves(way, division.sizes, source, target))[:MOST_AMOUNTS])
    for moves in zip(*below, strict=False):
        yield _moved(way, [change for move in moves for change in move])


_Move: TypeAlias = list[tuple[int, int]]
"""Vertices, and how many servers each gets more."""


def _moved(way: Way, move: _Move) -> Way:
    moved = list(way)
    for v, servers in move:
        moved[v] += servers
    return tuple(moved)


def _moves(
    way: Way, sizes: Sequence[int], source: Sequence[int], target: Sequence[int]
) -> Iterator[_Move]:
    """From places that are equal to others that are."""
    if source[0] == target[0]:
        # Two equal places: one becomes fuller for the other.
        source, target = source[-1:], source[:-1]
        if not target:
            return
    num = min(len(source), len(target))
    free = sizes[target[0]] - way[target[0]]
    for how_many in sorted({1, (num + 1) // 2, num}):
        for servers in sorted({1, min(way[source[0]], free)}):
            yield [(v, -servers) for v in source[:how_many]] + [
                (v, servers) for v in target[:how_many]
            ]
    # One place is emptied over several, or filled from several.
    if way[source[0]] > 1 and len(target) > 1:
        several = target[: way[source[0]]]
        yield [(source[0], -len(several)), *((v, 1) for v in several)]
    if free > 1 and len(source) > 1:
        several = source[:free]
        yield [*((v, -1) for v in several), (target[0], len(several))]


def _content_kinds(division: Division, way: Way) -> list[int]:
    """As ``kinds``, but with the servers: subtrees that are alike in these, too; and in all that
    is above them."""
    below: list[list[int]] = [[] for _ in way]
    known: dict[tuple[object, ...], int] = {}
    inside = [0] * len(way)
    for v in reversed(range(len(way))):
        key = (division.kinds[v], way[v], tuple(sorted(below[v])))
        inside[v] = known.setdefault(key, len(known))
        if v:
            below[division.parent[v]].append(inside[v])
    whole: dict[tuple[int, int], int] = {}
    found = [0] * len(way)
    for v in range(len(way)):
        up = found[division.parent[v]] if v else -1
        found[v] = whole.setdefault((up, inside[v]), len(whole))
    return found


def _reached(
    division: Division, ways: npt.NDArray[np.int64], seconds: float
) -> npt.NDArray[np.bool_]:
    """Which of ``ways`` have masses with which no edge takes longer than ``seconds``."""
    step = max(1, BATCH // len(division.parent))
    parts = [_fits(division, ways[i : i + step], seconds) for i in range(0, len(ways), step)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)


def _fits(division: Division, ways: npt.NDArray[np.int64], seconds: float) -> npt.NDArray[np.bool_]:
    """In units of the model: low and high are what the masses below each edge may be."""
    vertices = np.arange(len(division.parent))
    groups = division.groups[vertices, ways]
    room = np.minimum(np.array(division.max_bytes) / division.model_bytes, 1.0)
    high = np.where(ways > 0, room, 0.0)
    low = np.zeros_like(high)
    for here, starts, parents in division.levels:
        groups[:, parents] += np.add.reduceat(groups[:, here], starts, axis=1)
    total = groups[:, :1]
    is_possible = total[:, 0] > 0
    speed = np.array(division.bytes_per_s) / division.model_bytes
    for here, starts, parents in division.levels:
        load = seconds * speed[here] - groups[:, here]  # what is left for the masses' part
        slope = total - 2 * groups[:, here]
        with np.errstate(divide="ignore", invalid="ignore"):
            edge = load / slope
        allowed = np.where(slope > 0, edge, np.inf)
        needed = np.where(slope < 0, edge, -np.inf)
        top = np.minimum(high[:, here], allowed)
        bottom = np.maximum(low[:, here], needed)
        is_possible &= np.all((top >= bottom - EPSILON) & ((slope != 0) | (load >= 0)), axis=1)
        high[:, parents] += np.add.reduceat(top, starts, axis=1)
        low[:, parents] += np.add.reduceat(np.minimum(bottom, top), starts, axis=1)
    return is_possible & (high[:, 0] >= 1 - EPSILON) & (low[:, 0] <= 1 + EPSILON)


def _some_time(division: Division, ways: npt.NDArray[np.int64]) -> float | None:
    """A time that at least one way reaches, from above; None where memory suffices for none."""
    slowest = min((speed for speed in division.bytes_per_s[1:]), default=1.0)
    most = float(division.groups.max(axis=1).sum())
    seconds = 2 * max(most, 1.0) * division.model_bytes / slowest
    return seconds if _reached(division, ways, seconds).any() else None
