"""Reports a worker's progress to the registrar, for the display and for detecting missed
collective calls.

    standing = Standing(worker, transport)
    standing.on_batch(position)                # of a loader that is so far in its pass
    standing.end_iteration(trainer)            # sends a few times a second
    standing.send(trainer)                     # sends now: before every collective, and at the end

The registrar judges a missed call by the last that came before it, so that must never be skipped.
"""

from __future__ import annotations

import time

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

    def on_batch(self, position: Position) -> None:
        """A batch for training was used, of a loader that is at ``position``."""
        self._position = position
        self._passes.on_batch(position.batches)

    def end_iteration(self, trainer: Trainer | None) -> None:
        """An iteration is finished."""
        self._passes.end_iteration()
        if time.monotonic() - self._sent_s >= _EVERY_S:
            self.send(trainer)

    def send(self, trainer: Trainer | None) -> None:
        """``trainer``: None before ``job.prepare``."""
        self._sent_s = time.monotonic()
        position = self._position
        progress = Progress(
            worker=self._worker,
            clock=trainer.clock if trainer is not None else 0,
            samples=trainer.num_samples if trainer is not None else 0,
            loader_batches=self._passes.num_batches,
            loader_until=self._passes.until,
            epoch=position.epoch,
            epochs=position.epochs,
            batch=position.batch,
            batches=position.batches,
            staleness=trainer.staleness if trainer is not None else 0,
            waited_s=trainer.waited_s if trainer is not None else 0.0,
        )
        self._transport.send_control(REGISTRAR, progress)
