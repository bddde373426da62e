"""Replies that the next ``step()`` awaits, not the one that has pushed (``pipeline = 1``; ssp and
async): communication has a whole iteration of computation to hide behind.

Meanwhile the script computes on the parameters that it has; replies land beside them, and move into
place inside ``step()`` only. So who reads a parameter sees one version from step to step, and no
read has to be told. A server answers for the iteration that uses the reply, one later than else.

    pipelined = Pipelined(partition, chunks, flat, loop, values, group, driver=..., ...)
    yield from pipelined.land()                # before gradients are collected, or a collective
    yield from pipelined.before_push()         # all workers of the group together
    pipelined.begin()                          # everything of the iteration was handed over
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Final

from torch import Tensor

from psdist.protocol.partition import Partition
from psdist.workers.early.progress import Driver
from psdist.workers.group.channel import GroupChannel
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.model.shadow import Shadow
from psdist.workers.step_table import in_group
from psdist.workers.values import Values

_CALL: Final = "optimizer.step"


class Pipelined:
    def __init__(
        self,
        partition: Partition,
        chunks: Sequence[int],
        flat: FlatModel,
        loop: WorkerLoop,
        values: Values,
        group: GroupChannel,
        *,
        driver: Driver,
        to_device: Callable[[Sequence[int]], None],
    ) -> None:
        """``chunks``: those that this worker pushes; ``driver``: of the loop while the script
        computes; ``to_device(chunks)``: from the mirrors of a model on a GPU, where replies land
        beside the parameters anyway."""
        self.is_pending = False
        """Whether the last step has left replies to be brought, in the whole group."""
        self.newest: Sequence[Tensor] = flat.values
        """Where the servers' newest values lie, flat, until the first push."""
        self.waited_s = 0.0
        """Seconds of waits for replies."""
        self._partition = partition
        self._chunks = chunks
        self._flat = flat
        self._loop = loop
        self._values = values
        self._group = group
        self._driver = driver
        self._to_device = to_device
        self._shadow: Shadow | None = None

    def before_push(self) -> Generator[Wait, None, None]:
        """Gradients were reduced: what has landed becomes the parameters, and what comes from here
        on lands beside them. Collective over the group."""
        if self.is_pending:
            yield from self.gather()
        else:  # a group lends the memory of a reduction until its next operation
            yield from in_group(self._group.agree(_CALL), _CALL)
        if self._shadow is None and not self._flat.transfers.has_mirrors:
            self._shadow = Shadow(
                self._partition, self._flat, chunks=self._chunks, newest=self.newest
            )
            self._loop.receive_into(self._shadow.parameter_frame)

    def begin(self) -> None:
        """The script computes while replies come."""
        self.is_pending = True
        self._driver.wake()

    def resume(self) -> None:
        """The script has used the loop, and computes again."""
        if self.is_pending:
            self._driver.wake()

    def land(self) -> Generator[Wait, None, None]:
        """Until this worker's replies are there. The loop is the script's."""
        if self.is_pending:
            began_s = self._loop.now_s()
            yield self._loop.wait_for_replies()
            self.waited_s += self._loop.now_s() - began_s

    def gather(self) -> Generator[Wait, None, None]:
        """What has landed becomes the parameters. Collective over the group."""
        if self.is_pending:
            self.is_pending = False
            yield from self._values.take_new(_CALL, self.move)

    def move(self, chunks: Sequence[int]) -> None:
        """What has landed of ``chunks`` becomes the parameters, whatever the script has written."""
        if self._shadow is None:
            self._to_device(chunks)
        else:
            self._shadow.move(chunks)
