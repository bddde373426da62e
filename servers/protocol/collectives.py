"""The coordinator's record of a collective, and of the workers that missed its call; pure.

A worker that misses the call continues alone. The coordinator detects this by finished iterations:
worker B has *passed* worker A if B has finished more iterations than A had when A entered. Only
the iterations of the two workers decide whether this is an error. The order of messages decides
only how early the error is reported.

    calls = MissedCalls(mode="sync")
    calls.on_entered(collective, mine, others)      # errors and warnings
    calls.judge(collective, progress)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.protocol.collected import MOST_TOLD
from psdist.protocol.control import Enter, Progress, Resume
from psdist.protocol.ids import describe_workers
from psdist.servers.protocol.snapshots import OnWire


@dataclass(slots=True)
class Warn:
    """Warn the user; the job continues."""

    text: str


@dataclass(slots=True)
class Collective:
    name: str
    """Name that its first worker called."""
    entered: dict[int, Annotated[Enter, OnWire]] = field(default_factory=dict)
    earliest: dict[int | None, Annotated[Progress, OnWire]] = field(default_factory=dict)
    """Length of a worker's loaders (None: not all of one length) -> of the workers that have
    entered, the progress with the fewest iterations."""
    is_complete: bool = False
    """True when all workers have entered and the collective will not be retried."""
    told: Annotated[Resume, OnWire] | None = None
    """Message that servers have been sent; None before."""
    answered: set[int] = field(default_factory=set)
    """Servers that have answered it."""
    is_of_meeting: bool = False
    """True if psdist called it, on workers whose iterations differ."""
    error: str = ""
    """Reason of its failure, also for workers that enter later."""

    def fault_of_sets(self, clocks: Sequence[tuple[int, ...]]) -> str:
        """Return the error if workers have brought clocks of different numbers of sets, else ""."""
        if len(set(map(len, clocks))) < 2:
            return ""
        numbers = ", ".join(str(len(each)) for each in clocks[:MOST_TOLD])
        return (
            f"workers called {self.name} with different numbers of prepared optimizers: {numbers}"
        )

    def answer_all(self, payload: bytes) -> None:
        """Answer every worker with ``payload``, whatever workers have brought."""
        for worker, enter in self.entered.items():
            self.entered[worker] = replace(enter, payload=payload, values=b"")

    def who_called(self) -> str:
        """Return the different calls, by worker."""
        by_name: dict[str, set[int]] = {}
        for worker, enter in sorted(self.entered.items()):
            by_name.setdefault(enter.name, set()).add(worker)
        return "; ".join(
            f"{describe_workers(workers)} called {name}" for name, workers in by_name.items()
        )


class MissedCalls(HasSnapshot):
    STATE = Fields(
        {
            set[str]: "_warned_of",
        }
    )

    def __init__(self, *, mode: str, apart: Collection[str] = ()) -> None:
        """``mode``: "sync" only if the job cannot change its mode; ``apart``: names of collectives
        that workers may enter after different iterations."""
        self._mode = mode
        self._apart = apart
        self._warned_of: set[str] = set()
        """Names of collectives."""

    def on_entered(
        self, collective: Collective, mine: Progress, others: Iterable[Progress]
    ) -> Iterator[str | Warn]:
        """Judge a worker that has entered, with progress ``mine``. It may have passed an earlier
        one, or one of ``others`` may have passed it. An error ends the collective."""
        yield from self.judge(collective, mine)
        length = mine.loader_batches if mine.loader_until >= mine.clock else None
        earliest = collective.earliest.get(length, mine)
        if min(earliest, mine, key=_order) is not mine:
            return
        collective.earliest[length] = mine
        for other in sorted(others, key=_order):
            yield from self.judge(collective, other)

    def judge(self, collective: Collective, other: Progress) -> Iterator[str | Warn]:
        """Yield the error, or a warning, if ``other`` has finished an iteration past another
        worker's entry."""
        if collective.error:
            return
        name = collective.name
        if collective.is_of_meeting or name in self._apart:
            return
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
