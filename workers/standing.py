"""Where a worker stands: it tells the registrar, for the display and for calls that are missed.

    standing = Standing(worker, transport)
    standing.on_batch(12)                      # of a loader with 12 batches in a pass
    standing.end_iteration(clock, samples)     # told a few times a second
    standing.tell(clock, samples)              # told now: before every collective, and at the end

The registrar judges a missed call by the last that came before it, so that must never be skipped.
"""

from __future__ import annotations

import time

from psdist.protocol.control import Progress
from psdist.protocol.ids import REGISTRAR
from psdist.transport.base import Transport
from psdist.workers.data.passes import EqualPasses

_EVERY_S = 0.25


class Standing:
    def __init__(self, worker: int, transport: Transport) -> None:
        self._worker = worker
        self._transport = transport
        self._passes = EqualPasses()
        self._told_s = 0.0

    def on_batch(self, num_batches: int) -> None:
        """A batch for training, of a loader with ``num_batches`` in a pass."""
        self._passes.on_batch(num_batches)

    def end_iteration(self, clock: int, samples: int) -> None:
        """``clock`` iterations are finished, with so many samples in all."""
        self._passes.end_iteration()
        if time.monotonic() - self._told_s >= _EVERY_S:
            self.tell(clock, samples)

    def tell(self, clock: int, samples: int) -> None:
        self._told_s = time.monotonic()
        progress = Progress(
            worker=self._worker,
            clock=clock,
            samples=samples,
            loader_batches=self._passes.num_batches,
            loader_until=self._passes.until,
        )
        self._transport.send_control(REGISTRAR, progress)
