"""Replies that the next ``step()`` awaits, not the one that has pushed (``pipeline = 1``; ssp and
async): communication has a whole iteration of computation to hide behind.

Meanwhile the script computes on the parameters that it has. Replies land next to them, and are put
in place inside ``step()`` only: a reader sees one version from step to step, and no read has to be
detected. A server answers for the iteration that uses the reply, one later than without a pipeline.

    strategy = Pipelined(parts, driver=..., newest=flat.values)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch import Tensor

from psdist.workers.blocking import Blocking, Parts
from psdist.workers.early.progress import Driver
from psdist.workers.loop import Wait
from psdist.workers.model.flat import Shadow
from psdist.workers.reduction import CALL, Reduced, in_group


class Pipelined(Blocking):
    lands_aside = True

    def __init__(
        self,
        parts: Parts,
        *,
        driver: Driver,
        newest: Sequence[Tensor],
    ) -> None:
        """``driver``: of the loop while the script computes; ``newest``: where the servers' newest
        values lie until the first push, flat by buffer; the rest as in :class:`Blocking`."""
        super().__init__(parts)
        self._driver = driver
        self._newest = newest
        self._shadow: Shadow | None = None
        if self.flat.transfers.has_mirrors:
            self.values.uses.check_as_values_land()

    def take_over(self) -> None:
        self._driver.take_over()

    def resume(self) -> None:
        if self.is_pending:
            self._driver.wake()

    def before_step(self) -> Generator[Wait, None, None]:
        self.take_over()
        yield from self.land()

    def exchange(self, reduced: Reduced) -> Generator[Wait, None, None]:
        yield from self._before_push()
        self._push(reduced)
        self._end_iteration(self.iteration.clock + 1)
        self.is_pending = True

    def _before_push(self) -> Generator[Wait, None, None]:
        """Put in place what has landed; later replies land next to the parameters."""
        if self.is_pending:
            yield from self._gather()
        else:  # a group lends the memory of a reduction until its next operation
            yield from in_group(self.group.channel.agree(CALL), CALL)
        if self._shadow is None and not self.flat.transfers.has_mirrors:
            self._shadow = Shadow(
                self.group.partition, self.flat, chunks=self.group.mine, newest=self._newest
            )
            self.loop.receive_into(self._shadow.parameter_frame)

    def land(self) -> Generator[Wait, None, None]:
        if self.is_pending:
            self.loop.begin_waiting(self.iteration.clock - 1)
            began_s = self.loop.now_s()
            yield self.loop.wait_for_replies()
            self._waited_s += self.loop.now_s() - began_s

    def _gather(self) -> Generator[Wait, None, None]:
        """Put in place what has landed; together in the group."""
        self.is_pending = False
        yield from self.values.take_new(CALL, self.place)

    def finish(self) -> Generator[Wait, None, None]:
        yield from self.land()
        if self.is_pending:
            yield from self._gather()

    def place(self, chunks: Sequence[int]) -> None:
        """Put the replies in place, whatever the script has written."""
        if self._shadow is None:
            super().place(chunks)
        else:
            self._shadow.move(chunks)
