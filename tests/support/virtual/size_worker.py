"""A virtual worker of sizes alone: no tensor, no model; for runs with a cost model.

It is alone in its group: what a group adds and gathers are tensors.

    job = VirtualJob(schedule, make_executor=..., make_worker=SizeWorker)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from psdist.protocol.events import Frame
from psdist.protocol.partition import Chunk
from tests.support.virtual.virtual_worker import VirtualWorker


class SizeFrames:
    def parameter_frame(self, chunk: Chunk) -> Frame:
        return Frame(capacity=chunk.num_bytes)

    gradient_frame = parameter_frame


class SizeWorker(VirtualWorker):
    def take_slice(self) -> None:
        assert len(self.seat.members) == 1, "see the module's docstring"
        self._staleness_seen: set[int] = set()
        job = self.job
        self.loop.take_slice(
            job.partition,
            owners=job.owners,
            credits=job.schedule.credits,
            frames=SizeFrames(),
            wire=job.wire,
            order=job.order,
        )

    def fill_parameters(self) -> None:
        """There is nothing to fill."""

    @property
    def staleness_seen(self) -> Collection[int]:
        return self._staleness_seen

    def bring(self) -> Iterator[float | None]:
        self.loop.begin_pull(clock=0, chunks=self.mine, is_fresh=False)
        yield from self._until(lambda: self.core.is_idle)

    def next_clock(self) -> int:
        return self.clock + 1

    def record_use(self) -> None:
        versions = [self.core.versions[chunk] for chunk in self.mine]
        self._staleness_seen |= {max(0, self.clock - version.min_done) for version in versions}
        positions = np.array([version.position for version in versions])
        replies = np.array([version.clock for version in versions])
        chunks = np.array(self.mine)
        self.history.uses(self.clock, chunks, self.job.owners, positions, replies)

    def iterate(self) -> Iterator[float | None]:
        hyper = self.hyper(self.draw_lr())
        self.history.push(self.clock, 1.0, 1.0, (), len(self.mine))
        self.loop.begin_push(clock=self.clock, hyper=hyper, absent=(), weight=1.0, empty=())
        yield from self._until(lambda: self.core.is_idle)
