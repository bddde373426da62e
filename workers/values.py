"""The parameters in this worker's memory: which versions they are, and how new ones come in.

values = Values(partition, owners, flat, loop, group, history, slices=slices)
values.record_use(clock)                   # a forward pass reads what is in memory
values.look_for_writes()                   # before a push or a pull
yield from values.take_new("pull", move)   # replies have landed: into place, in the group
values.place([3], {0, 1}, move)            # of some chunks, without a group
values.commit(clock)                       # the iteration counts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence

import torch
from torch import Tensor

from psdist.errors import GroupReformedError, UsageError
from psdist.history.writers import WorkerHistory
from psdist.protocol.header import NEVER, Flag
from psdist.protocol.partition import Partition, Span, runs_of
from psdist.workers.group.channel import GroupChannel, Pending
from psdist.workers.loop import Wait, WorkerLoop
from psdist.workers.model.flat import FlatModel
from psdist.workers.step_table import in_group
from psdist.workers.uses import Uses


class Values:
    def __init__(
        self,
        partition: Partition,
        owners: Sequence[int],
        flat: FlatModel,
        loop: WorkerLoop,
        group: GroupChannel,
        history: WorkerHistory | None,
        *,
        slices: Sequence[Sequence[int]],
    ) -> None:
        """``slices``: the chunks of each worker of the group, ascending."""
        self._partition = partition
        self._flat = flat
        self._loop = loop
        self._group = group
        self._mine: Sequence[int] = ()
        self._min_done: dict[int, int] = {}
        """By chunk of this worker's slice, of what lies in place."""
        self._is_shown = False
        """Whether something to look at lies in place, of which no gradient may be."""
        self._is_recorded = history is not None
        self._uses = Uses(partition, flat, owners, history)
        self.take_slices(slices)

    def take_slices(self, slices: Sequence[Sequence[int]]) -> None:
        """From now on these are the chunks of each worker. Of those that this one had not before,
        it does not know how stale they are until their next replies come."""
        self._mine = slices[self._group.place]
        self._min_done = {chunk: self._min_done.get(chunk, NEVER) for chunk in self._mine}
        self._spans = [self._partition.spans(chunks) for chunks in slices]
        """The slice of every worker of the group."""
        self._recorded_spans = self._with_versions(slices)

    def _with_versions(self, slices: Sequence[Sequence[int]]) -> list[tuple[Span, ...]]:
        """Of each slice the parameters, and the versions behind them."""
        num_flats = len(self._flat.values)
        return [
            (
                *self._partition.spans(chunks),
                *(Span(num_flats, 2 * run.start, 2 * run.stop) for run in runs_of(chunks)),
            )
            for chunks in slices
        ]

    def _flats(self) -> list[Tensor]:
        """The parameters, and when recording their versions behind them."""
        versions = [self._uses.versions.view(-1)] if self._is_recorded else []
        return [*self._flat.values, *versions]

    def give(self, channel: GroupChannel, giver: int) -> Pending[None]:
        """What lies in place at place ``giver`` of ``channel`` comes to all of it."""
        whole: list[list[int]] = [[] for _ in range(channel.size)]
        whole[giver] = list(range(len(self._partition.chunks)))
        spans = [self._partition.spans(chunks) for chunks in whole]
        if self._is_recorded:
            return channel.all_gather(self._flats(), self._with_versions(whole))
        return channel.all_gather(self._flats(), spans)

    def show(self, pieces: Sequence[Tensor]) -> None:
        """These lie in place, as if the script had written them, until :meth:`take_new`."""
        with torch.no_grad():
            for parameter, piece in zip(self._flat.parameters, pieces, strict=True):
                parameter.copy_(piece)
        self._is_shown = True

    def look_as_they_land(self) -> None:
        """See :meth:`Uses.look_as_values_land`."""
        self._uses.look_as_values_land()

    def record_use(self, clock: int) -> None:
        """Iteration ``clock`` reads them. Raises :class:`UsageError` where it must not."""
        if self._is_shown:
            raise UsageError(
                f"iteration {clock}: a gradient is made of the parameters that "
                "job.pull(exact=True) has brought, which are there to evaluate with, under "
                "torch.no_grad(); call job.pull() before training goes on"
            )
        self._uses.record(lambda: self._staleness_by_chunk(clock))

    def commit(self, clock: int) -> None:
        """Iteration ``clock`` has ended: what it has read counts."""
        self._uses.commit(clock)

    def _staleness_by_chunk(self, clock: int) -> Counter[int]:
        return Counter(max(0, clock - min_done) for min_done in self._min_done.values())

    def staleness(self, clock: int) -> int:
        """Of what is in memory, at its stalest."""
        return max((max(0, clock - min_done) for min_done in self._min_done.values()), default=0)

    @property
    def staleness_seen(self) -> Counter[int]:
        """Of all chunk uses of finished iterations."""
        return self._uses.staleness

    def look_for_writes(self) -> None:
        """What the script has written is no version of a server's: the next one replaces it. From
        here on replies may land."""
        self._flat.wait_until_landed()
        if written := set(self._flat.written_by_others()):
            chunks = self._partition.chunks
            self._loop.core.transfers.held.forget(
                chunk
                for chunk in self._mine
                if any(segment.piece in written for segment in chunks[chunk].segments)
            )

    def take_new(
        self, call: str, move: Callable[[Sequence[int]], None]
    ) -> Generator[Wait, None, None]:
        """Replies have landed: ``move(chunks)`` brings into place what has landed aside, or on the
        host of a device; gather the group's, tell autograd.

        All workers of a group use the same version of a chunk, that of its slice's owner.
        """
        while True:
            move(self._mine)
            self._note(self._mine)
            spans = self._recorded_spans if self._is_recorded else self._spans
            try:
                yield from in_group(self._group.all_gather(self._flats(), spans), call)
                break
            except GroupReformedError:  # this worker's slice has become larger
                yield self._loop.wait_for_replies()
        self._flat.samples.take()
        self._flat.values_changed()
        self._uses.values_changed()
        self._is_shown = False

    def place(
        self,
        chunks: Sequence[int],
        pieces: Collection[int],
        move: Callable[[Sequence[int]], None],
    ) -> None:
        """As :meth:`take_new`, of some of its chunks, on a worker that is alone in its group, after
        :meth:`commit`: no use is open that these could make another one. ``pieces``: those that
        have a part there."""
        if not chunks:
            return
        move(chunks)
        self._note(chunks)
        self._flat.samples.take(chunks)
        self._flat.values_changed(pieces)

    def _note(self, chunks: Sequence[int]) -> None:
        """The newest versions of ``chunks`` lie in place."""
        for chunk in chunks:
            version = self._loop.core.versions[chunk]
            self._min_done[chunk] = version.min_done
            if self._is_recorded:
                self._uses.versions[chunk, 0] = version.position
                self._uses.versions[chunk, 1] = 2 * version.clock + bool(
                    version.flags & Flag.RECORDED
                )
