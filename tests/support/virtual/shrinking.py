"""Groups of a virtual job that continue without their dead: how their channels are made again.

form_anew(worker)                  # from now on its group does
note_what_counts(worker)           # for the oracle of values
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from psdist.workers.group.channel import Done, GroupChannel, Pending
from psdist.workers.group.shrinking import ShrinkingChannel
from psdist.workers.loop import Wait
from psdist.workers.reduction import Row
from psdist.workers.shrinking import GroupShrinker, Outcome
from tests.support.virtual.group import VirtualChannel

if TYPE_CHECKING:
    from tests.support.virtual.job import VirtualJob
    from tests.support.virtual.virtual_worker import VirtualWorker


class VirtualFormer:
    def __init__(self, job: VirtualJob, channel: ShrinkingChannel) -> None:
        self._job, self._channel = job, channel

    def offer(self, place: int) -> list[float]:  # noqa: ARG002 - the seam's
        if isinstance(self._channel.inner, VirtualChannel):
            self._channel.inner.close()
        return []

    def form(
        self,
        members: Sequence[int],
        place: int,
        offers: list[list[float]],  # noqa: ARG002 - the seam's
    ) -> Pending[GroupChannel]:
        return Done(self._job.form(members, place))


class NotingShrinker(GroupShrinker):
    """Notes which iterations count only for what had been pushed of them."""

    worker: VirtualWorker

    def _go_on(self, inner: GroupChannel, outcome: Outcome) -> None:
        worker = self.worker
        for each in (worker, *worker.others):
            if outcome.is_given_up and each.trainer.is_open:
                worker.job.given_up.add((each.set_index, each.group, each.trainer.clock))
        super()._go_on(inner, outcome)


def form_anew(worker: VirtualWorker) -> None:
    """The worker's group continues without its dead."""
    channel = worker.job.channels[worker.group][worker.seat.place]
    assert isinstance(channel, ShrinkingChannel)
    reforming = NotingShrinker(
        worker.loop,
        channel,
        VirtualFormer(worker.job, channel),
        trainers=lambda: [each.trainer for each in (worker, *worker.others)],
    )
    reforming.worker = worker
    worker.loop.on_turn = reforming.advance


def note_what_counts(worker: VirtualWorker) -> None:
    """For the oracle of values: whose gradients an iteration is of."""
    group = worker.trainer.strategy.group
    gather = group.gather

    def noting(mine: Row) -> Generator[Wait, None, list[Row]]:
        table = yield from gather(mine)
        key = worker.set_index, worker.group, worker.trainer.clock
        workers, known = tuple(row.worker for row in table), worker.in_first.job.tables
        if workers not in known.setdefault(key, []):
            known[key].append(workers)
        return table

    group.gather = noting  # type: ignore[method-assign]
