"""A collective on its way, and who has missed its call: the registrar's; pure.

A worker that misses the call goes on alone. It is noticed by what it has finished: a worker that
has made more iterations than another had when that one entered has *passed* it. Whether that is an
error follows from the two workers' iterations alone; when their messages come decides only how
early it is told.

    calls = MissedCalls(mode="sync")
    calls.on_entered(collective, mine, others)      # what is wrong, or to be warned of
    calls.judge(collective, progress)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from psdist.protocol.control import Enter, Progress
from psdist.protocol.ids import describe_workers


@dataclass(slots=True)
class Warn:
    """Tell the user; the job goes on."""

    text: str


@dataclass(slots=True)
class Collective:
    name: str
    """What its first worker called."""
    entered: dict[int, Enter] = field(default_factory=dict)
    earliest: dict[int | None, Progress] = field(default_factory=dict)
    """Of those that have entered, the one with the fewest iterations, by the length of the loaders
    that these were made of (None: not all of one length)."""
    is_complete: bool = False
    """Whether all have come, and servers were told."""
    resumed: set[int] = field(default_factory=set)
    checkpoint: str = ""
    """Its name, where it makes one that has begun."""
    is_of_meeting: bool = False
    """psdist has called it, on workers whose iterations differ."""
    error: str = ""
    """Why it has failed: whoever comes later is told the same."""

    def who_called(self) -> str:
        """What, where not all have called the same."""
        by_name: dict[str, set[int]] = {}
        for worker, enter in sorted(self.entered.items()):
            by_name.setdefault(enter.name, set()).add(worker)
        return "; ".join(
            f"{describe_workers(workers)} called {name}" for name, workers in by_name.items()
        )


class MissedCalls:
    def __init__(self, *, mode: str, may_miss: bool = False) -> None:
        """``mode``: sync only where no other one may come; ``may_miss``: whether rounds may close
        without some groups."""
        self._mode = mode
        self._may_miss = may_miss
        self._warned_of: set[str] = set()
        """Names of collectives."""

    def on_entered(
        self, collective: Collective, mine: Progress, others: Iterable[Progress]
    ) -> Iterator[str | Warn]:
        """``mine``, of one that has entered: it may have passed one who had, or have been passed
        before, by one of ``others``. An error ends the collective."""
        yield from self.judge(collective, mine)
        length = mine.loader_batches if mine.loader_until >= mine.clock else None
        earliest = collective.earliest.get(length, mine)
        if min(earliest, mine, key=_order) is not mine:
            return
        collective.earliest[length] = mine
        for other in sorted(others, key=_order):
            yield from self.judge(collective, other)

    def judge(self, collective: Collective, other: Progress) -> Iterator[str | Warn]:
        """What is wrong if ``other`` has finished an iteration past somebody's entry, where that is
        an error, or what to warn of."""
        if collective.error:
            return
        name = collective.name
        is_apart = self._mode != "sync" or self._may_miss
        if is_apart and (collective.is_of_meeting or name == "prepare"):
            return  # those who go on from a checkpoint prepare at different clocks, too
        alike = collective.earliest.get(other.loader_batches)
        if self._mode == "sync" and alike is not None and other.loader_until > alike.clock:
            yield (
                f"{_describe_passing(name, alike, other)}, although both iterate over a job.loader "
                f"of {other.loader_batches} batches; {name} must be called by every worker, after "
                "the same iteration"
            )
            return
        first = min(collective.earliest.values(), key=_order, default=other)
        if first.clock >= other.clock or name in self._warned_of:
            return
        self._warned_of.add(name)
        yield Warn(
            f"{_describe_passing(name, first, other)}; {name} must be called "
            f"by every worker: if worker {other.worker} never calls it, that will be an error "
            "at the end of its script"
        )


def _order(progress: Progress) -> tuple[int, int]:
    return progress.clock, progress.worker


def _describe_passing(name: str, first: Progress, other: Progress) -> str:
    return (
        f"worker {first.worker} called {name} after {first.clock} iterations, but worker "
        f"{other.worker} continued past iteration {first.clock} without calling {name}"
    )
