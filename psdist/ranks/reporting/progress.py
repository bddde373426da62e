"""The progress of the job, as displays show it: made from the reports of its workers; pure.

    paces = GroupPaces(group_of_worker=(0, 0, 1, 1))
    training = paces.training(12.5, mode="sync", progress=coordinator.progress, last={"loss": 0.3})

Owns the choice of the slowest group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psdist.protocol.control import Progress
from psdist.report import MAX_VALUES, Training

_VALUE_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class _Seen:
    at_s: float
    clocks: tuple[int, ...]
    waited_s: tuple[float, ...]
    """Both by group."""


class GroupPaces:
    WINDOW_S = 10.0
    """Time over which the waits of groups are compared."""
    LEAST_WAITING = 0.1
    """Least part of its time that a group waits for another, more than the other waits."""
    LEAST_BEHIND = 3

    def __init__(self, group_of_worker: Sequence[int]) -> None:
        self._group_of_worker = tuple(group_of_worker)
        self._num_groups = max(self._group_of_worker, default=-1) + 1
        self._seen: deque[_Seen] = deque()

    def behind(self, progress: Mapping[int, Progress], out: Collection[int]) -> int:
        """Return the clock of the slowest group; see :meth:`training`."""
        clocks = self._clocks(progress)
        return min((clocks[group] for group in self._living(out)), default=0)

    def _clocks(self, progress: Mapping[int, Progress]) -> list[int]:
        clocks = [0] * self._num_groups
        for worker, each in progress.items():
            group = self._group_of_worker[worker]
            clocks[group] = max(clocks[group], each.clock)
        return clocks

    def _living(self, out: Collection[int]) -> list[int]:
        """Return the groups that have a worker in the job."""
        groups = enumerate(self._group_of_worker)
        return sorted({group for worker, group in groups if worker not in out})

    def training(
        self,
        at_s: float,
        *,
        mode: str,
        progress: Mapping[int, Progress],
        last: Mapping[str, Any],
        out: Collection[int] = (),
    ) -> Training:
        """Return the report for displays. ``progress``: each worker's latest; ``last``: the chief's
        logged values; ``out``: workers that are not in the job any more."""
        progress = {worker: each for worker, each in progress.items() if worker not in out}
        living = self._living(out)
        waits: list[list[float]] = [[] for _ in range(self._num_groups)]
        for worker, each in progress.items():
            waits[self._group_of_worker[worker]].append(each.waited_s)
        clocks = tuple(self._clocks(progress))
        waited_s = tuple(sum(group) / max(1, len(group)) for group in waits)
        seen = self._seen
        seen.append(_Seen(at_s, clocks, waited_s))
        while len(seen) > 2 and seen[1].at_s <= at_s - self.WINDOW_S:
            seen.popleft()
        slowest, others_wait = self._slowest(living)
        in_data = [each for each in progress.values() if each.epoch]
        none_yet = Progress(worker=0, clock=0, samples=0)
        where = min(in_data, key=lambda each: (each.epoch, each.batch), default=none_yet)
        return Training(
            at_s=at_s,
            mode=mode,
            behind=min((clocks[group] for group in living), default=0),
            ahead=max(clocks, default=0),
            samples=sum(each.samples for each in progress.values()),
            epoch=where.epoch,
            epochs=where.epochs,
            batch=where.batch,
            batches=where.batches,
            staleness=max((each.staleness for each in progress.values()), default=0),
            slowest=slowest,
            others_wait=others_wait,
            last={short(name): short(value) for name, value in list(last.items())[:MAX_VALUES]},
        )

    def _slowest(self, living: Sequence[int]) -> tuple[int | None, float]:
        """Return the group that others wait for, and the part of their time that they wait; or the
        group that lags far."""
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
        # Workers report a few times a second, not at the same time: iterations of one second do not
        # count as a distance.
        ahead = max(now.clocks)
        last = min(living, key=now.clocks.__getitem__)
        in_a_second = (ahead - max(first.clocks)) / elapsed_s
        if ahead - now.clocks[last] > max(self.LEAST_BEHIND, in_a_second):
            return last, 0.0
        return None, 0.0


def short(value: Any) -> str:
    """Return a logged value as a display shows it."""
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    # Neither control characters nor lone surrogates, which could not travel.
    return "".join(each if each.isprintable() else "?" for each in text[:_VALUE_CHARACTERS])
