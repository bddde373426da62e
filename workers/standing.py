"""Reports a worker's progress to the registrar, for the display and for detecting missed
collective calls.

    standing = Standing(worker, transport)
    standing.on_batch(position)                # of a loader that is so far in its pass
    standing.end_iteration(trainers, 0)        # sends a few times a second
    standing.send(trainers)                    # sends now: before every collective, and at the end

The registrar judges a missed call by the last that came before it, so that must never be skipped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from psdist.protocol.control import Progress
from psdist.protocol.ids import REGISTRAR
from psdist.transport.base import Transport
from psdist.workers.data.passes import EqualPasses
from psdist.workers.data.position import Position
from psdist.workers.trainer import Trainer

_EVERY_S = 0.25


class Standing:
    def __init__(self, worker: int, transport: Transport) -> None:
        self._worker = worker
        self._transport = transport
        self._passes = EqualPasses()
        self._position = Position()
        self._sent_s = 0.0

    def begin_at(self, clock: int) -> None:
        """The job goes on from a checkpoint, after ``clock`` iterations."""
        self._passes = EqualPasses(clock)

    def on_batch(self, position: Position) -> None:
        """A batch for training was used, of a loader that is at ``position``."""
        self._position = position
        self._passes.on_batch(position.batches)

    def end_iteration(self, trainers: Sequence[Trainer], set_index: int) -> None:
        """An iteration of this set is finished; the first one's clock is the job's."""
        if not set_index:
            self._passes.end_iteration()
        if time.monotonic() - self._sent_s >= _EVERY_S:
            self.send(trainers)

    def send(self, trainers: Sequence[Trainer]) -> None:
        """``trainers``: of every set, none before ``job.prepare``."""
        self._sent_s = time.monotonic()
        position = self._position
        progress = Progress(
            worker=self._worker,
            clock=trainers[0].clock if trainers else 0,
            samples=max((each.num_samples for each in trainers), default=0),
            loader_batches=self._passes.num_batches,
            loader_until=self._passes.until,
            epoch=position.epoch,
            epochs=position.epochs,
            batch=position.batch,
            batches=position.batches,
            staleness=max((each.staleness for each in trainers), default=0),
            waited_s=sum(each.waited_s for each in trainers),
        )
        self._transport.send_control(REGISTRAR, progress)
