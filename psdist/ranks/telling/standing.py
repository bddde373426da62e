"""How the job stands, out of what its workers report: what the coordinator tells a display. Pure.

    standing = Standing(mode="ssp (staleness 3)", group_of_worker=(0, 0, 1, 1))
    training = standing.at(12.5, progress={0: Progress(...), ...}, last={"loss": 0.3})

Owns the choice of the group that is called the slowest. It never speaks to anybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psdist.protocol.control import Progress
from psdist.report.facts import MAX_VALUES, Training

_VALUE_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class _Seen:
    at_s: float
    clocks: tuple[int, ...]
    waited_s: tuple[float, ...]
    """Both by group."""


class Standing:
    WINDOW_S = 10.0
    """How far back waiting is compared."""
    LEAST_WAITING = 0.1
    """Groups that wait less than this part of their time more than another wait for nobody."""
    LEAST_BEHIND = 3

    def __init__(self, *, mode: str, group_of_worker: Sequence[int]) -> None:
        self.mode = mode
        """In words; it may change."""
        self._group_of_worker = tuple(group_of_worker)
        self._num_groups = max(self._group_of_worker, default=-1) + 1
        self._seen: deque[_Seen] = deque()

    def behind(self, progress: Mapping[int, Progress], out: Collection[int]) -> int:
        """The clock of the slowest group; ``out`` as of :meth:`at`."""
        clocks = [0] * self._num_groups
        gone = self._gone(out)
        for worker, each in progress.items():
            group = self._group_of_worker[worker]
            clocks[group] = max(clocks[group], each.clock)
        return min(
            (clocks[group] for group in range(self._num_groups) if group not in gone), default=0
        )

    def _gone(self, out: Collection[int]) -> set[int]:
        """Groups of which nobody is left."""
        groups = self._group_of_worker
        return set(groups) - {group for worker, group in enumerate(groups) if worker not in out}

    def at(
        self,
        at_s: float,
        *,
        progress: Mapping[int, Progress],
        last: Mapping[str, Any],
        out: Collection[int] = (),
    ) -> Training:
        """``progress``: each worker's latest; ``last``: the chief's logged values; ``out``: workers
        that are not in the job any more."""
        progress = {worker: each for worker, each in progress.items() if worker not in out}
        gone = self._gone(out)
        living = [group for group in range(self._num_groups) if group not in gone]
        groups: list[list[Progress]] = [[] for _ in range(self._num_groups)]
        for worker, each in progress.items():
            groups[self._group_of_worker[worker]].append(each)
        clocks = tuple(max((each.clock for each in group), default=0) for group in groups)
        waited_s = tuple(
            sum(each.waited_s for each in group) / len(group) if group else 0.0 for group in groups
        )
        seen = self._seen
        seen.append(_Seen(at_s, clocks, waited_s))
        while len(seen) > 2 and seen[1].at_s <= at_s - self.WINDOW_S:
            seen.popleft()
        slowest, others_wait = self._slowest(living)
        behind = min((clocks[group] for group in living), default=0)
        in_data = [each for each in progress.values() if each.epoch]
        where = min(in_data, key=_position, default=None)
        return Training(
            at_s=at_s,
            mode=self.mode,
            behind=behind,
            ahead=max(clocks, default=0),
            samples=sum(each.samples for each in progress.values()),
            epoch=where.epoch if where else 0,
            epochs=where.epochs if where else 0,
            batch=where.batch if where else 0,
            batches=where.batches if where else 0,
            staleness=max((each.staleness for each in progress.values()), default=0),
            slowest=slowest,
            others_wait=others_wait,
            last={short(name): short(value) for name, value in list(last.items())[:MAX_VALUES]},
        )

    def _slowest(self, living: Sequence[int]) -> tuple[int | None, float]:
        """The group that others wait for, and how much of their time; or the one far behind."""
        first, now = self._seen[0], self._seen[-1]
        elapsed_s = now.at_s - first.at_s
        if len(living) < 2 or elapsed_s <= 0.0:
            return None, 0.0
        waiting = [
            (after - before) / elapsed_s
            for before, after in zip(first.waited_s, now.waited_s, strict=True)
        ]
        slowest = min(living, key=waiting.__getitem__)
        others = sum(waiting[group] for group in living if group != slowest) / (len(living) - 1)
        gap = min(1.0, others - waiting[slowest])
        if gap >= self.LEAST_WAITING:
            return slowest, gap
        # Workers report a few times a second, not at the same time: what a group does within a
        # second is no distance.
        ahead = max(now.clocks)
        last = min(living, key=now.clocks.__getitem__)
        in_a_second = (ahead - max(first.clocks)) / elapsed_s
        if ahead - now.clocks[last] > max(self.LEAST_BEHIND, in_a_second):
            return last, 0.0
        return None, 0.0


def short(value: Any) -> str:
    """A logged value as a display shows it."""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    # Neither control characters nor lone surrogates, which could not travel.
    return "".join(each if each.isprintable() else "?" for each in text[:_VALUE_CHARACTERS])


def _position(progress: Progress) -> tuple[int, int]:
    return progress.epoch, progress.batch
