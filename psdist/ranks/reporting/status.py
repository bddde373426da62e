"""The coordinator's ``status.json``: written about once a second, and when the job ends.

    file = StatusFile(run_directory)
    file.write_start(roles, mode="sync", called=[0, 2], job=1)          # before the job has begun
    file.write(status, reports, training=training)

A failed write is ignored: a full disk is reported by the rank that needs the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from psdist.protocol.roles import Roles
from psdist.ranks.reporting.rank_reports import OpenCall, RankReports
from psdist.report import Training
from psdist.report.run_directory import RunDirectory
from psdist.report.status import (
    MOST_CHARACTERS,
    Phase,
    Status,
    WaitStatus,
    WorkerStatus,
    write_status,
)

if TYPE_CHECKING:  # it loads torch, which a rank in the lobby does not need
    from psdist.ranks.reporting.run_status import RunStatus

EVERY_S = 1.0


class StatusFile:
    def __init__(
        self, run_directory: RunDirectory, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock()``: seconds."""
        self._run_directory = run_directory
        self._clock = clock
        self._written_s = -EVERY_S
        self._since: dict[tuple[str, int], tuple[int, float]] = {}
        """By open call or worker: its clock, and since when it has this clock."""

    @property
    def is_due(self) -> bool:
        return self._clock() - self._written_s >= EVERY_S

    def write_start(self, roles: Roles, *, mode: str, called: Collection[int], job: int) -> None:
        """Servers wait for psdist.init on all workers; ``called``: workers that have called it."""
        absent = set(range(roles.num_beginning)) - set(called)
        self._write(
            Status(
                at=time.time(),
                phase="starting",
                mode=mode,
                num_workers=roles.num_beginning,
                waits=self._waits([OpenCall(-job, "psdist.init", called, absent)]),
                workers=(),
                done=(),
                dead=(),
                spares=len(roles.waiting_ranks),
                slowest=None,
                others_wait=0.0,
            )
        )

    def write(
        self,
        status: RunStatus,
        reports: RankReports,
        *,
        training: Training | None = None,
        outcome: str = "",
    ) -> None:
        """``training``: the report for displays; ``outcome``: how the job has ended, "" before."""
        roles, out, done = reports.roles, reports.out, reports.workers
        is_ending = set(range(roles.num_workers)) - out <= set(done)
        phase: Phase = "ended" if outcome else "ending" if is_ending else "training"
        progress = reports.last_progress if outcome else reports.progress
        workers = tuple(
            WorkerStatus(
                worker=worker,
                group=roles.group_of_worker[worker],
                clock=each.clock,
                epoch=each.epoch,
                batch=each.batch,
                waited_s=round(each.waited_s, 3),
                same_s=self._seconds_since("worker", worker, each.clock),
            )
            for worker, each in sorted(progress.items())
            if worker not in out
        )
        self._write(
            Status(
                at=time.time(),
                phase=phase,
                mode=status.mode,
                num_workers=roles.num_beginning,
                waits=self._waits(reports.calls),
                workers=workers,
                done=tuple(sorted(done)),
                dead=tuple(each["who"] for each in status.deaths),
                joined=tuple(status.joined_lines),
                alone=tuple(status.alone_now),
                registrar=reports.coordinator_line,
                spares=reports.num_idle_spares,
                slowest=training.slowest if training else None,
                others_wait=training.others_wait if training else 0.0,
                outcome=outcome[:MOST_CHARACTERS],
            )
        )

    def _waits(self, calls: Sequence[OpenCall]) -> tuple[WaitStatus, ...]:
        kept = {("call", each.key) for each in calls}
        since = self._since.items()
        self._since = {key: each for key, each in since if key[0] != "call" or key in kept}
        return tuple(
            WaitStatus(
                what=each.what,
                since_s=self._seconds_since("call", each.key),
                present=tuple(sorted(each.present)),
                absent=tuple(sorted(each.absent)),
            )
            for each in calls
        )

    def _seconds_since(self, kind: str, number: int, clock: int = 0) -> float:
        """Return for how long it has had this clock, as far as this has been written."""
        now_s = self._clock()
        before, since_s = self._since.get((kind, number), (-1, now_s))
        if before != clock:
            since_s = now_s
            self._since[kind, number] = clock, now_s
        return round(now_s - since_s, 3)

    def _write(self, status: Status) -> None:
        self._written_s = self._clock()
        with suppress(OSError):
            write_status(self._run_directory, status)
