"""What the coordinator knows of how the job stands, put into ``status.json``: about once a second,
and when the job ends.

    writer = StatusWriter(run_directory, roles=roles, mode="sync")
    writer.at_start(called=[0, 2], job=1)                       # before the job has begun
    writer.training(progress=..., calls=..., training=...)
    writer.training(progress=..., calls=..., outcome="completed")

It decides nothing; a file that cannot be written is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from psdist.protocol.control import Progress
from psdist.protocol.roles import Roles
from psdist.report.facts import Training
from psdist.report.run_directory import RunDirectory
from psdist.report.status import (
    MOST_CHARACTERS,
    Phase,
    Status,
    WaitStatus,
    WorkerStatus,
    write_status,
)

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that all workers make, and to which some have come."""

    key: int
    """Another one for every such call."""
    what: str
    present: Collection[int]
    absent: Collection[int]


class StatusWriter:
    def __init__(
        self,
        run_directory: RunDirectory,
        *,
        roles: Roles,
        mode: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock()``: seconds."""
        self._run_directory = run_directory
        self._roles = roles
        self.mode = mode
        """In words; it may change."""
        self._clock = clock
        self._written_s = -EVERY_S
        self._since_s: dict[int, float] = {}
        """By key of an open call: when it was first seen."""
        self._clock_of: dict[int, tuple[int, float]] = {}
        """By worker: its clock, and since when it is that."""

    @property
    def is_due(self) -> bool:
        return self._clock() - self._written_s >= EVERY_S

    def at_start(self, *, called: Collection[int], job: int) -> None:
        """Servers wait for psdist.init on all workers; ``called``: those that have called it."""
        everybody = range(self._roles.num_beginning)
        call = OpenCall(-job, "psdist.init", called, set(everybody) - set(called))
        self._write(phase="starting", calls=[call], spares=len(self._roles.waiting_ranks))

    def training(
        self,
        *,
        progress: Mapping[int, Progress],
        calls: Sequence[OpenCall],
        done: Collection[int] = (),
        out: Collection[int] = (),
        dead: Sequence[str] = (),
        alone: Sequence[int] = (),
        registrar: str = "",
        num_idle_spares: int = 0,
        joined: Sequence[str] = (),
        training: Training | None = None,
        outcome: str = "",
    ) -> None:
        """``progress``: what each worker has told last; ``out``: those that are not in the job any
        more; ``dead``: who has died, in words; ``alone``: servers of whose shards there is one
        copy; ``coordinator``: where it is, and its standby, if they have changed;
        ``num_idle_spares``: spares that wait; ``joined``: spares that have taken workers' places,
        in words; ``training``: what a display is told; ``outcome``: how the job has ended."""
        now_s = self._clock()
        workers = []
        for worker, each in sorted(progress.items()):
            if worker in out:
                continue
            clock, since_s = self._clock_of.get(worker, (-1, now_s))
            if clock != each.clock:
                since_s = now_s
                self._clock_of[worker] = each.clock, now_s
            workers.append(
                WorkerStatus(
                    worker=worker,
                    group=self._roles.group_of_worker[worker],
                    clock=each.clock,
                    epoch=each.epoch,
                    batch=each.batch,
                    waited_s=round(each.waited_s, 3),
                    same_s=round(now_s - since_s, 3),
                )
            )
        living = set(range(self._roles.num_workers)) - set(out)
        phase: Phase = "ending" if living <= set(done) else "training"
        self._write(
            phase="ended" if outcome else phase,
            calls=calls,
            workers=workers,
            done=done,
            dead=dead,
            alone=alone,
            registrar=registrar,
            spares=num_idle_spares,
            joined=joined,
            training=training,
            outcome=outcome,
        )

    def _write(
        self,
        *,
        phase: Phase,
        calls: Sequence[OpenCall],
        workers: Sequence[WorkerStatus] = (),
        done: Collection[int] = (),
        dead: Sequence[str] = (),
        alone: Sequence[int] = (),
        registrar: str = "",
        spares: int = 0,
        joined: Sequence[str] = (),
        training: Training | None = None,
        outcome: str = "",
    ) -> None:
        now_s = self._written_s = self._clock()
        self._since_s = {each.key: self._since_s.get(each.key, now_s) for each in calls}
        waits = [
            WaitStatus(
                what=each.what,
                since_s=round(now_s - self._since_s[each.key], 3),
                present=tuple(sorted(each.present)),
                absent=tuple(sorted(each.absent)),
            )
            for each in calls
        ]
        status = Status(
            at=time.time(),
            phase=phase,
            mode=self.mode,
            num_workers=self._roles.num_beginning,
            waits=tuple(waits),
            workers=tuple(workers),
            done=tuple(sorted(done)),
            dead=tuple(dead),
            joined=tuple(joined),
            alone=tuple(alone),
            registrar=registrar,
            spares=spares,
            slowest=training.slowest if training else None,
            others_wait=training.others_wait if training else 0.0,
            outcome=outcome[:MOST_CHARACTERS],
        )
        with suppress(OSError):  # a full disk is told by whoever needs the file
            write_status(self._run_directory, status)
